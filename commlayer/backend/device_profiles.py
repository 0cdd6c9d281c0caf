"""The profile by which a group plans for tensors on a device, where none was named: measured by its
ranks before the first call that could be planned, or kept by an earlier job.

Ranks measure together, and decide together whether they have: where one of them could not, whatever
it was, none plans. They meet for that in the job's store, in which the last one to come writes the
verdict, so that no two ranks can read different ones. A rank that is gone, or does not come, is
another matter: then the call fails, as it would have.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from commlayer.backend.create import Connector
from commlayer.backend.world import World
from commlayer.failures.board import FailureBoard, own_client, why_left
from commlayer.failures.endings import bury
from commlayer.failures.waits import Watched, keep
from commlayer.peer_words import read_text
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError
from commlayer.profiles.printable import say, shortened
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner

__all__ = ["DeviceSurvey", "settle", "veto"]

_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.1
_WELL = "well"


@dataclass(frozen=True)
class DeviceSurvey:
    """The measurement of one group's links on a device, by all of its ranks, which ``connector``
    connects."""

    connector: Connector
    job: World

    def planner(self, device: torch.device) -> Planner | None:
        """The planner by the links' profile, which is equal on all ranks; None on all where one of
        them could not measure.

        A Gloo group of the ranks is made for this alone. Collective. Raises PeerError and
        CollectiveTimeoutError where a rank is gone, or does not come.
        """
        request, group_board = self.connector.request, self.connector.board
        groups, ranks = [self.connector.gloo(f"links of {device.type}")], request.global_ranks
        rank, key = group_board.rank, f"{group_board.key}/links of {device.type}"
        own = PrefixStore(f"links/{device.type}/", own_client(self.connector.store))
        board = FailureBoard(group_board.detector, key, rank, ranks)
        profile = None
        try:
            profile = self._measured(device, Watched(groups[0], board), own)
        except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it, and none may plan alone
            is_woken, why = board.is_broken, why_left(error)
            veto(own, (board.judge.culprit() if is_woken else "") or f"rank {rank} {why}")
            if not is_woken:
                board.leave(why)
        who = f"rank {rank}, group {request.name}, to agree on the links of {device.type}"
        verdict = settle(own, len(ranks), group_board, request.timeout.total_seconds(), who)
        board.close()
        if board.has_abandoned:
            keep(groups.pop())
        else:
            bury(groups)
        if not verdict:
            return None if profile is None else Planner(profile)
        if request.rank == 0:
            say(
                f"{shortened(verdict, 600)}: the links of group {request.name} on {device.type} are not known, and its calls on "
                "that device are the inner backend's own, on all of its ranks"
            )
        return None

    def _measured(self, device: torch.device, gloo: Any, store: Store) -> Profile | None:
        request, timeout_s = self.connector.request, self.connector.request.timeout.total_seconds()
        members, places = request.global_ranks, self.job.nodes_of(request.global_ranks)
        node_of = {member: index for index, node in enumerate(places) for member in node}
        topology = Topology.from_identities([f"node {node_of[place]}" for place in range(len(members))])
        detector = self.connector.board.detector
        measuring = self.connector.measuring
        ranks = measuring.AllRanks(request.rank, len(members), store, gloo, "cpu", members, detector, timeout_s)
        return measuring.device_profile(
            self.job.settings,
            topology,
            ranks,
            device=device,
            job=self.job.topology.shape,
            timeout_s=timeout_s,
        )


def veto(store: Store, why: str) -> None:
    """Have :func:`settle` return ``why`` on all ranks, unless another rank has been quicker. Before
    this rank calls that."""
    store.compare_set("why", "", why)


def settle(store: Store, num_ranks: int, board: FailureBoard, timeout_s: float, who: str) -> str:
    """Return the first :func:`veto`, equal on all ranks; empty where there was none. Collective,
    once for a ``store``.

    Raises PeerError where a rank of ``board`` is gone, CollectiveTimeoutError where one does not
    come within ``timeout_s``.
    """
    if store.add("come", 1) == num_ranks:  # whoever has a veto has said it
        store.set("verdict", read_text(store.get("why")) if store.check(["why"]) else _WELL)
    until, look_s = time.monotonic() + timeout_s, _LOOK_S
    while not store.check(["verdict"]):
        if board.is_broken:
            raise PeerError(f"{who}: {board.judge.culprit()}")
        if time.monotonic() > until:
            raise CollectiveTimeoutError(
                f"{who}: a rank did not come within {timeout_s:g} s: look at the logs of the others"
            )
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)  # all ranks ask one store
    verdict = read_text(store.get("verdict"))
    return "" if verdict == _WELL else verdict

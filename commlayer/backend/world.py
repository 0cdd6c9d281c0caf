"""The knowledge that all groups of a job share: who sits on which node, the settings, the planner.
Agreed once.

The default group asks every rank, over its own inner Gloo; later groups look their members up.
Where the default group is another backend's, each group of ours asks its members: that some of them
know each other from another group decides nothing, or members would disagree on whether to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, get_debug_level

from commlayer.agree.discovery import Identity, declared_topology, node_identity, versions
from commlayer.agree.messages import ControlMessage, Peers, Reason, check_alike
from commlayer.agree.tree import gather_by_tree
from commlayer.backend.group_options import GroupOptions
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import CommlayerError, DisagreementError
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.link_rates import LinkTimes
from commlayer.scheduler.traffic import SlowPair
from commlayer.settings import Settings
from commlayer.transport.shared_memory.shared_messages import wants_shared_memory

__all__ = ["Measuring", "World", "agree", "current", "forget", "remember"]

_AGREED = (
    "topology",
    "debug",
    "plan",
    "reduction",
    "profile",
    "intra",
    "connections",
    "wire",
    "lanes",
    "lane_share",
    "trials",
    "replan",
    "shadow",
    "trace",
)
"""Settings of which ranks must not hold different ones: their calls would not meet."""


class Measuring(Protocol):
    """Finds out by which profile ranks plan, with all of them: :mod:`commlayer.measure.calibrate`
    is one."""

    AllRanks: Any
    """Makes the ranks that measure together, which the two below are given."""

    def planner_for(
        self,
        settings: Settings,
        topology: Topology,
        ranks: Any,
        *,
        is_whole_job: bool,
        timeout_s: float,
    ) -> Planner | None:
        """The planner of a job's groups; None where nothing is planned. Collective over
        ``ranks``."""

    def device_profile(
        self,
        settings: Settings,
        topology: Topology,
        ranks: Any,
        *,
        device: torch.device,
        job: str,
        timeout_s: float,
    ) -> Profile | None:
        """The profile of the links of a device between ``ranks``. ``job``: its shape.
        Collective."""

    def times_of_links(self, planned: Any, num_bytes: int) -> LinkTimes:
        """Time how long pairs of a group's nodes take to send each other ``num_bytes``, µs;
        ``planned``: who runs its plans. Collective, between calls."""


class _Card(ControlMessage, frozen=True):
    """The card that a rank shows when a group is made. ``must_agree``: names and values that all
    ranks must have alike."""

    must_agree: dict[str, str]
    failure: Reason | None = None


@dataclass(frozen=True)
class World:
    """Ranks that have agreed. ``ranks``: global, in order; ``topology``: of their positions in
    ``ranks``."""

    ranks: tuple[int, ...]
    topology: Topology
    settings: Settings
    planner: Planner | None

    @property
    def cpu_planner(self) -> Planner | None:
        """The planner for tensors on the CPU; None where the profile that was named is one of a
        device's links."""
        if self.planner is None or self.planner.profile.environment.get("backend", "gloo") != "gloo":
            return None
        return self.planner

    def device_planner(self, device_type: str) -> Planner | None:
        """The planner for tensors on a device: by the profile that was named, if it was measured
        there, or is a published one.

        None for one of the CPU's links, of which nothing follows for a device's; and where none was
        named: then each group measures (:mod:`commlayer.backend.device_profiles`).
        """
        if self.planner is None or self.settings.profile in (None, "auto"):
            return None
        profile = self.planner.profile
        backend = "nccl" if device_type == "cuda" else device_type
        is_of_device = profile.environment.get("backend") == backend or profile.kind in ("published", "paper")
        return self.planner if is_of_device else None

    def nodes_of(self, global_ranks: Sequence[int]) -> list[list[int]]:
        """The members of a group by node, as ranks of the group: ``[[0, 1], [2, 3]]``."""
        return list(self._nodes_of(global_ranks).values())

    def rates_of(self, global_ranks: Sequence[int]) -> tuple[float, ...]:
        """The rate of each of those nodes' cards, as a fraction of the usual one; empty where the
        profile knows none."""
        rates = () if self.planner is None else self.planner.profile.node_rates
        if len(rates) != self.topology.num_nodes:  # a part of the job does not know which of the profile's nodes it has
            return ()
        return tuple(rates[node] for node in self._nodes_of(global_ranks))

    def slow_pairs_of(self, global_ranks: Sequence[int]) -> tuple[SlowPair, ...]:
        """The slow ways between two of those nodes, by their places among them; empty where the
        profile knows none."""
        profile = None if self.planner is None else self.planner.profile
        if profile is None or Topology.parse(profile.topology).num_nodes != self.topology.num_nodes:
            return ()
        places = {node: index for index, node in enumerate(self._nodes_of(global_ranks))}
        pairs = [(places[a], places[b], rate) for a, b, rate in profile.slow_pairs if {a, b} <= places.keys()]
        return tuple(sorted((min(a, b), max(a, b), rate) for a, b, rate in pairs))

    def _nodes_of(self, global_ranks: Sequence[int]) -> dict[int, list[int]]:
        positions = {rank: index for index, rank in enumerate(self.ranks)}
        nodes: dict[int, list[int]] = {}
        for member, rank in enumerate(global_ranks):
            nodes.setdefault(self.topology.node_of(positions[rank]), []).append(member)
        return nodes


_current: tuple[World, object] | None = None


def current() -> World | None:
    """The agreement of the default group; None while there is none of ours."""
    return _current[0] if _current is not None else None


def remember(world: World, group: object) -> None:
    """``group`` is the default group, and ``world`` what it agreed on."""
    global _current
    _current = world, group


def forget(group: object) -> bool:
    """Forget what ``group`` agreed on, where it was the default group, and return whether it
    was."""
    global _current
    if _current is None or _current[1] is not group:
        return False
    _current = None
    return True


def read_settings() -> tuple[Settings, CommlayerError | None]:
    """This rank's settings; or the defaults, and why they could not be read: it must take part and
    say so."""
    try:
        return Settings.from_environment(), None
    except CommlayerError as error:
        return Settings(), error


def agree(
    gloo: Any,
    store: Store,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    detector: FailureDetector,
    *,
    measuring: Measuring,
    alone: GroupOptions | None = None,
) -> World:
    """Exchange what the ranks of ``gloo`` must agree on. Collective. ``detector`` watches them.
    ``measuring`` finds out by which profile to plan. ``alone``: of a group that is no part of
    torch's job, its options: what is declared of the job's topology says nothing of it.

    Raises, on every rank: DisagreementError for other versions or settings, or words that cannot be
    read, naming ranks; the rank whose own settings cannot be read raises SettingsError.
    TopologyError for a declared topology of another size.
    """
    settings, failure = read_settings()
    if alone is not None:
        # A profile and a topology that are named there are of the job's links and ranks, as its
        # trace is, and may differ from replica to replica; a plan for every call needs no profile.
        settings = alone.over(settings)
        profile = "auto" if settings.plan is None and settings.profile != "none" else "none"
        settings = replace(settings, profile=profile, topology=None, trace=None)
    # What decides beside the settings which groups are made: ranks that differ in it would wait for
    # each other.
    must_agree = {
        "TORCH_DISTRIBUTED_DEBUG": get_debug_level().name,
        "whether ranks of a node share memory (COMMLAYER_INTRA)": str(wants_shared_memory(settings)),
    }
    must_agree |= versions()
    must_agree |= {f"COMMLAYER_{name.upper()}": str(getattr(settings, name)) for name in _AGREED}
    card = _Card(must_agree, None if failure is None else Reason.of(failure))
    peers = Peers(gloo, tuple(global_ranks), rank, torch.device("cpu"))
    timeout_s, purpose = timeout.total_seconds(), "to make a group of the backend"
    # Two gathers: cards are all alike, and where a rank runs is alike on its node, so that neither
    # is told once for each rank.
    everyone = gather_by_tree(card, _Card, peers, timeout_s, purpose)
    if failure is not None:
        raise failure
    _check(everyone, global_ranks)
    identities = gather_by_tree(Identity(node_identity()), Identity, peers, timeout_s, purpose)
    texts = [each.text for each in identities]
    topology = Topology.from_identities(texts) if alone is not None else _topology(settings, texts, global_ranks)
    own = PrefixStore("calibrate/", store)
    ranks = measuring.AllRanks(rank, len(global_ranks), own, gloo, "cpu", tuple(global_ranks), detector, timeout_s)
    planner = measuring.planner_for(
        settings, topology, ranks, is_whole_job=alone is not None or not dist.is_initialized(), timeout_s=timeout_s
    )
    return World(tuple(global_ranks), topology, settings, planner)


def _check(everyone: Sequence[_Card], global_ranks: Sequence[int]) -> None:
    failed = [
        (rank, card.failure) for rank, card in zip(global_ranks, everyone, strict=True) if card.failure is not None
    ]
    if failed:
        raise DisagreementError(
            "; ".join(f"rank {rank} cannot take part: {why}" for rank, why in failed) + ": correct its environment"
        )
    check_alike([(rank, card.must_agree) for rank, card in zip(global_ranks, everyone, strict=True)])


def _topology(settings: Settings, identities: Sequence[str], global_ranks: Sequence[int]) -> Topology:
    declared = declared_topology(settings, dist.get_world_size() if dist.is_initialized() else len(global_ranks))
    if declared is not None:
        identities = [f"node {declared.node_of(rank)}" for rank in global_ranks]
    return Topology.from_identities(identities)

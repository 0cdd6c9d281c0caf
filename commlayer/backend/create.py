"""Making a group of ranks that have joined: its connections, what they agree on, its parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from commlayer.agree.messages import Peers
from commlayer.agree.tree import GatheredStore
from commlayer.backend import world
from commlayer.backend.called_lists import group_key
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.group_options import GroupOptions, options_of
from commlayer.backend.inner import ComparesCalls, InnerGroups
from commlayer.backend.joining import GroupRequest, Joined
from commlayer.calls.group_life import stage
from commlayer.calls.instruments import NewGroup, attach_own, attach_own_on_device, inquiries
from commlayer.engine.lane_holds import lanes
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import FailureBoard, why_left
from commlayer.failures.descriptors import require
from commlayer.failures.detector import host_lost, set_job_detector
from commlayer.failures.endings import end_with_program
from commlayer.failures.forks import disown_in_child, never_free_in_child
from commlayer.failures.store_answers import PolledStore
from commlayer.failures.waits import Watched, bounded
from commlayer.profiles.errors import BLAMING
from commlayer.scheduler.lanes import LanePolicy
from commlayer.transport.c10d import start_sequence
from commlayer.transport.gloo_groups import gloo_in_order, needed_descriptors

__all__ = ["Connector", "Extras", "create_group"]

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_FIRST = "gloo"
"""The inner group whose ranks find each other in the job's store; others find theirs over it."""


class Extras(Protocol):
    """Gives groups what calls of plain CPU tensors do without: calls on devices, sums in wire
    formats, the comparison of calls. :mod:`commlayer.backend.group_extras` is one."""

    def lacking(self, options: GroupOptions) -> dict[str, str]:
        """Name what this rank lacks of what ``options`` ask for, each with words; the ranks compare
        it."""

    def signatures(self, connector: Connector, planned: PlannedGroup, gloo: Any) -> ComparesCalls | None:
        """Make the comparison of calls where it is asked for; else None. Collective."""

    def give(self, group: CommlayerGroup, connector: Connector, options: GroupOptions, job: world.World) -> None:
        """Give them to a group that is being made with ``options``. Collective."""


def create_group(
    request: GroupRequest,
    joined: Joined,
    options: Any,
    *,
    measuring: world.Measuring,
    extras: Extras,
    make: Callable[..., CommlayerGroup],
) -> CommlayerGroup:
    """Make the group ``request``, whose ranks have ``joined``. Collective over the group's ranks.

    ``options``: torch's ``pg_options``, see :func:`commlayer.backend.group_options.options_of`;
    ``measuring`` finds out by which profile to plan; ``extras`` gives the group what only some
    have; ``make`` makes others of some of its members.

    Raises DisagreementError, SettingsError, TopologyError where the ranks cannot work together; UsageError for options that are
    none.
    """
    detector, me = joined.detector, request.global_rank
    board = FailureBoard(detector, group_key(request.name, joined.generation), me, request.global_ranks)
    inquiry = joined.inquiry or inquiries().inquiry_of(detector)
    if inquiry is not None:
        board.on_timeout, board.diagnosed = inquiry.timed_out, inquiry.diagnosed
    try:
        connect = Connector(request, joined.store, board, measuring)
        with joined.comparing_lists():
            group = _make(connect, options_of(options), extras, make)
    except BaseException as error:
        why = why_left(error)
        board.leave(
            why, is_consequence=isinstance(error, BLAMING)
        )  # of several words the first counts: one that was told why says nothing new
        if joined.is_own:
            detector.fail(why, is_consequence=isinstance(error, BLAMING))
        raise
    if joined.is_own:
        ending = group.parts.ending  # which ends with the group what the group was the first to have
        ending.detector, ending.inquiry = detector, joined.inquiry
    if request.is_default:
        set_job_detector(detector)
    end_with_program(group)
    disown_in_child(group)
    return group


def _make(
    connect: Connector, options: GroupOptions, extras: Extras, make: Callable[..., CommlayerGroup]
) -> CommlayerGroup:
    request, store = connect.request, connect.store
    is_default, global_ranks = request.is_default, request.global_ranks
    notes = options.words() | extras.lacking(options)
    with connect.board.detector.expecting_all(connect.has_come):
        gloo = connect.gloo(_FIRST)
    jobs = connect.agreed(gloo, options)
    job = replace(jobs, settings=options.over(jobs.settings))
    lanes().policy = LanePolicy(share=job.settings.lane_share)
    planned = connect.planned(gloo, job)
    signatures = extras.signatures(connect, planned, gloo)
    # What C++ calls without asking Python goes to the inner backend of the device: one of its own, because a Gloo group whose
    # collectives come from two threads (theirs, and the progress thread) mixes them up.
    direct = connect.gloo("direct", beside=gloo, note=notes) if len(global_ranks) > 1 else gloo
    inner = InnerGroups(gloo, direct, planned, store, signatures)
    group = CommlayerGroup(
        name=request.name,
        rank=request.rank,
        global_ranks=global_ranks,
        inner=inner,
        is_planning=job.cpu_planner is not None or job.settings.plan is not None or job.settings.reduction == "ordered",
        make=partial(make, stands_alone=request.stands_alone),
        options=options,
    )
    group._register_backend(torch.device("cpu"), _CUSTOM, direct)
    group._set_default_backend(_CUSTOM)
    extras.give(group, connect, options, job)
    if request.stands_alone:
        group.counters.rank = _rank_in_job()  # statistics are a rank's of its job, not of this group
    if options.lane is not None:
        group.use_lane(options.lane)
    is_of_job = is_default or (not request.stands_alone and world.current() is None)  # else the default group has told
    _attach(group, connect, job, is_of_job=is_of_job and jobs.planner is not None)
    if is_default:
        world.remember(jobs, group)
    return group


def _attach(group: CommlayerGroup, connect: Connector, job: world.World, *, is_of_job: bool) -> None:
    """Give a group its instruments."""
    request, parts = connect.request, group.parts
    calls, inner = parts.calls, parts.inner
    if request.stands_alone:
        me, world_size = _rank_in_job(), len(request.global_ranks)
    else:
        me = request.global_rank
        world_size = len(request.global_ranks) if request.is_default else dist.get_world_size()
    made = NewGroup(
        instruments=group.instruments,
        counters=group.counters,
        order=parts.order,
        calls=calls,
        planned=inner.planned,
        gloo=inner.gloo,
        store=inner.store,
        settings=job.settings,
        options=group.options,
        rank=me,
        ranks=request.global_ranks,
        world_size=world_size,
        is_planning=calls.is_planning,
        is_default=request.is_default,
        is_of_job=is_of_job,
        stands_alone=request.stands_alone,
        connecting=connect.connecting,
        time_links=partial(connect.measuring.times_of_links, inner.planned),
    )
    attach_own(made)
    for kind, on_device in inner.on_devices.items():
        own = replace(
            made,
            instruments=on_device.instruments,
            calls=on_device,
            planned=on_device.plans,
            is_planning=True,
            device=kind,
            time_links=partial(connect.measuring.times_of_links, on_device.plans),
        )
        on_device.when_known(partial(attach_own_on_device, own))


def _rank_in_job() -> int:
    """This rank's number in its job, for a group that is no part of it: torch's, or the one that a launcher gave."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _address_key(rank: int) -> str:
    """Return the name that Gloo gives the address of ``rank`` of a group."""
    return f"0/{rank}"


@dataclass(frozen=True)
class Connector:
    """Makes the inner groups of one group, with all its ranks: within the timeout, and not longer than they live."""

    request: GroupRequest
    store: Store
    """The group's own, of the generation that the ranks have joined."""
    board: FailureBoard
    measuring: world.Measuring

    def gloo(self, tag: str, *, beside: Any = None, note: Mapping[str, str] | None = None) -> Any:
        """An inner Gloo group. Its ranks find each other in the job's store, or, where they have one already, over that
        (``beside``), and there compare what they ``note``. Raises PeerError, CollectiveTimeoutError where a rank does not come,
        DisagreementError for notes that differ."""
        request, timeout_s = self.request, self.request.timeout.total_seconds()
        size, me = len(request.global_ranks), request.global_ranks[request.rank]
        require(needed_descriptors(size), f"rank {me}, the group {request.name} of {size} ranks")

        gathered = None if beside is None else self._over(beside, f"to connect for {tag}", note)
        polled = PolledStore(self.store, timeout_s, lambda: self.board.is_broken)

        def make() -> Any:
            store = PrefixStore(f"{tag}/", gathered or polled)
            gloo: Any = gloo_in_order(store, request.rank, size, request.timeout)
            never_free_in_child(gloo)
            start_sequence(gloo)
            if gathered is not None:
                gathered.check_notes()
                self._take_back_address()
            return gloo

        with self.connecting(f"for {tag}"):
            try:
                return bounded(make, self.board, timeout_s, f"connecting for {tag}")
            except RuntimeError:  # of a wait that was ended: what another rank found is a consequence for this one
                if gathered is not None:
                    gathered.check_notes()  # a rank that was quicker to see that they differ has left: say why here too
                if polled.is_lost:  # with a rank that need not be in this group
                    self.board.leave(
                        f"lost the job's store: {host_lost(self.board.detector.knowledge)}", is_consequence=True
                    )
                raise

    def _take_back_address(self) -> None:
        """Delete this rank's address of the first inner group from the job's store, which would keep it as long as the job lasts.

        Whoever has heard from all ranks over that group knows that all have connected, and that nobody looks for it any more.
        """
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a store of the program's own may not delete
            self._addresses().delete_key(_address_key(self.request.rank))

    def _addresses(self) -> Store:
        """Where Gloo keeps the addresses of the first inner group's ranks."""
        return PrefixStore(f"{_FIRST}/", self.store)

    def has_come(self, rank: int) -> bool:
        """Whether ``rank``, global, has left its address for the first inner group. Raises
        RuntimeError where the store is gone."""
        return self._addresses().check([_address_key(self.request.global_ranks.index(rank))])

    def _over(self, gloo: Any, purpose: str, note: Mapping[str, str] | None) -> GatheredStore:
        request = self.request
        watched, cpu = Watched(gloo, self.board), torch.device("cpu")
        peers = Peers(watched, request.global_ranks, request.rank, cpu)
        where = f"pg_options of the group {request.name}"
        notes = {f"{where} ({name})": value for name, value in (note or {}).items()}
        return GatheredStore(peers, request.timeout.total_seconds(), purpose, notes)

    @contextmanager
    def connecting(self, purpose: str, at: str = "") -> Iterator[None]:
        """Guard a block in which the group is made: a failure is told to the other ranks, and raised with the name of
        the rank that failed first. ``at``: what this rank says of the stage, "connecting …" unless it is given."""
        request, timeout_s = self.request, self.request.timeout.total_seconds()
        with (
            stage(at or f"connecting {purpose}"),
            self.board.connecting(request.global_ranks, request.name, purpose, timeout_s),
        ):
            yield

    def agreed(self, gloo: Any, options: GroupOptions) -> world.World:
        """Return the agreement of all ranks of the job; where there is none yet, or this group is no part of one, its ranks agree
        now."""
        request = self.request
        job = None if request.is_default or request.stands_alone else world.current()
        if job is None:
            with self.connecting("what all ranks must agree on", "agreeing on settings and links"):
                watched, detector = Watched(gloo, self.board), self.board.detector
                job = world.agree(
                    watched,
                    self.store,
                    request.rank,
                    request.global_ranks,
                    request.timeout,
                    detector,
                    measuring=self.measuring,
                    alone=options if request.stands_alone else None,
                )
        return job

    def planned(self, gloo: Any, job: world.World) -> PlannedGroup:
        """The engine's group, which runs plans, and wakes whoever waits in ``gloo``."""
        request = self.request
        planned = PlannedGroup(
            name=request.name,
            rank=request.rank,
            nodes=job.nodes_of(request.global_ranks),
            global_ranks=request.global_ranks,
            store=PrefixStore("planned/", self.store),
            planner=job.cpu_planner if len(request.global_ranks) > 1 else None,
            settings=job.settings,
            timeout_s=request.timeout.total_seconds(),
            board=self.board,
            rates=job.rates_of(request.global_ranks),
            slow_pairs=job.slow_pairs_of(request.global_ranks),
        )
        planned.connections.own_calls = gloo
        return planned

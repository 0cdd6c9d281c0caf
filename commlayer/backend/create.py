"""Making a group: the creator that torch calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, Store, get_debug_level

from commlayer.agree.gathered_store import GatheredStore
from commlayer.agree.messages import Peers
from commlayer.agree.signature_check import SignatureCheck
from commlayer.backend import world
from commlayer.backend.called_lists import group_key
from commlayer.backend.device_profiles import DeviceSurvey
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.group_options import GroupOptions, options_of
from commlayer.backend.inner import InnerGroups
from commlayer.backend.joining import GroupRequest, Joined, joining_group
from commlayer.backend.patches import (
    correct_devices,
    skip_methods,
    teach_barrier,
    teach_batches,
    teach_lists,
    teach_monitored_barrier,
    teach_timeouts,
)
from commlayer.calls.group_life import stage
from commlayer.calls.instruments import NewGroup, attach_own, attach_own_on_device, inquiries
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.lane_holds import lanes
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import FailureBoard, why_left
from commlayer.failures.descriptors import require
from commlayer.failures.detector import set_job_detector
from commlayer.failures.endings import end_with_program
from commlayer.failures.forks import disown_in_child, never_free_in_child
from commlayer.failures.polled_store import PolledStore
from commlayer.failures.waits import Watched, bounded
from commlayer.profiles.errors import BLAMING, UsageError
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience.link_rates import LinkTimes
from commlayer.scheduler.lanes import LanePolicy
from commlayer.transport.accelerators import MakeInner, registered_accelerators
from commlayer.transport.c10d import start_sequence
from commlayer.transport.gloo_groups import gloo_in_order, needed_descriptors
from commlayer.transport.nccl import InnerMessenger, Nccl, connect_now, is_usable, like_options, make_nccl
from commlayer.wire.kernels import row_kernels

__all__ = ["create_group", "make_group"]

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_FIRST = "gloo"
"""The inner group whose ranks find each other in the job's store; others find theirs over it."""


def make_group(
    *,
    name: str,
    rank: int,
    global_ranks: Sequence[int],
    store: Store,
    timeout: timedelta,
    measuring: world.Measuring,
    options: Any = None,
    stands_alone: bool = False,
) -> CommlayerGroup:
    """A group of ``global_ranks``, of which this is the one at ``rank``. ``store`` is the group's
    alone; ``measuring``, ``options``: as of :func:`create_group`; ``stands_alone``: as of
    :class:`commlayer.backend.joining.GroupRequest`."""
    request = GroupRequest(name, rank, tuple(global_ranks), store, timeout, stands_alone=stands_alone)
    with joining_group(request) as joined:
        return create_group(request, joined, options, measuring=measuring)


def create_group(request: GroupRequest, joined: Joined, options: Any, *, measuring: world.Measuring) -> CommlayerGroup:
    """Make the group ``request``, whose ranks have ``joined``. Collective over the group's ranks.

    ``options``: torch's ``pg_options``, see :func:`commlayer.backend.group_options.options_of`;
    ``measuring`` finds out by which profile to plan.

    Raises DisagreementError, SettingsError, TopologyError where the ranks cannot work together; UsageError for options that are
    none.
    """
    skip_methods()
    correct_devices()
    teach_monitored_barrier()
    teach_timeouts()
    teach_batches()
    teach_lists()
    teach_barrier()
    detector, me = joined.detector, request.global_rank
    board = FailureBoard(detector, group_key(request.name, joined.generation), me, request.global_ranks)
    inquiry = joined.inquiry or inquiries().inquiry_of(detector)
    if inquiry is not None:
        board.on_timeout, board.diagnosed = inquiry.timed_out, inquiry.diagnosed
    try:
        connect = _Connector(
            request.name, request.rank, request.global_ranks, joined.store, request.timeout, board, measuring
        )
        with joined.comparing_lists():
            group = _make(connect, request, options_of(options))
    except BaseException as error:
        why = why_left(error)
        board.leave(
            why, is_consequence=isinstance(error, BLAMING)
        )  # of several words the first counts: one that was told why says nothing new
        if joined.is_own:
            detector.fail(why, is_consequence=isinstance(error, BLAMING))
        raise
    if joined.is_own:
        group.own_detector(detector)
        if joined.inquiry is not None:
            group.own_inquiry(joined.inquiry)
    if request.is_default:
        set_job_detector(detector)
    end_with_program(group)
    disown_in_child(group)
    return group


def _make(connect: _Connector, request: GroupRequest, options: GroupOptions) -> CommlayerGroup:
    is_default = request.is_default
    name, rank, global_ranks, store = connect.name, connect.rank, connect.global_ranks, connect.store
    with connect.board.detector.expecting_all():
        gloo = connect.gloo(_FIRST)
    jobs = connect.agreed(gloo, request, options)
    job = replace(jobs, settings=options.over(jobs.settings))
    lanes().policy = LanePolicy(share=job.settings.lane_share)
    planned = connect.planned(gloo, job)
    signatures = connect.signatures(planned, gloo)
    # What C++ calls without asking Python goes to the inner backend of the device: one of its own, because a Gloo group whose
    # collectives come from two threads (theirs, and the progress thread) mixes them up.
    direct = connect.gloo("direct", beside=gloo, note=_notes(options)) if len(global_ranks) > 1 else gloo
    inner = InnerGroups(gloo, direct, planned, store, signatures)
    group = CommlayerGroup(
        name=name,
        rank=rank,
        global_ranks=global_ranks,
        inner=inner,
        is_planning=job.cpu_planner is not None or job.settings.plan is not None or job.settings.reduction == "ordered",
        make=partial(make_group, measuring=connect.measuring, stands_alone=request.stands_alone),
        options=options,
    )
    group._register_backend(torch.device("cpu"), _CUSTOM, direct)
    group._set_default_backend(_CUSTOM)
    if is_usable():
        is_split = not request.stands_alone  # its ranks have other numbers in the job, or are not in it
        nccl = make_nccl(
            store, rank, global_ranks, connect.timeout, name, options.nccl, is_default=is_default, is_split=is_split
        )
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl.backend)
        survey = connect.survey(job, "cuda")
        group.put_on_device("cuda", nccl, connect.choices(job, "cuda"), partial(connect.own_nccl, options.nccl), survey)
    for device_type, make in registered_accelerators().items():
        with connect.connecting(f"for tensors on {device_type}"):
            own = PrefixStore(f"{device_type}/", store)
            on_device = make(own, rank, global_ranks, connect.timeout, name)
        choices, survey = connect.choices(job, device_type), connect.survey(job, device_type)
        group.put_on_device(device_type, on_device, choices, partial(connect.own_of, make), survey)
    if request.stands_alone:
        group.counters.rank = _rank_in_job()  # statistics are a rank's of its job, not of this group
    if options.lane is not None:
        group.use_lane(options.lane)
    is_of_job = is_default or (not request.stands_alone and world.current() is None)  # else the default group has told
    _attach(group, connect, request, job, is_of_job=is_of_job and jobs.planner is not None)
    if is_default:
        world.remember(jobs, group)
    return group


def _attach(
    group: CommlayerGroup, connect: _Connector, request: GroupRequest, job: world.World, *, is_of_job: bool
) -> None:
    """Give a group its instruments."""
    order, calls, inner = group.parts
    if request.stands_alone:
        me, world_size = _rank_in_job(), len(request.global_ranks)
    else:
        me = request.global_rank
        world_size = len(request.global_ranks) if request.is_default else dist.get_world_size()
    made = NewGroup(
        instruments=group.instruments,
        counters=group.counters,
        order=order,
        calls=calls,
        planned=inner.planned,
        gloo=inner.gloo,
        store=inner.store,
        settings=job.settings,
        options=group.options,
        places=job.places_of(request.global_ranks),
        rank=me,
        ranks=request.global_ranks,
        world_size=world_size,
        is_planning=calls.is_planning,
        is_default=request.is_default,
        is_of_job=is_of_job,
        stands_alone=request.stands_alone,
        connecting=connect.connecting,
        time_links=partial(_time_links, inner.planned),
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
            time_links=partial(_time_links, on_device.plans),
        )
        on_device.when_known(partial(attach_own_on_device, own))


def _time_links(planned: PlannedGroup | DevicePlans, num_bytes: int) -> LinkTimes:
    from commlayer.measure import link_times  # a room above this one: who makes groups loads no measuring by itself

    return link_times.time_links(planned, num_bytes)


def _notes(options: GroupOptions) -> dict[str, str]:
    """Return what the ranks of a group compare when it is made: what they were given, and what one of them lacks for it.

    A rank that could not encode would refuse its first sum on CUDA alone, and the others would wait for it.
    """
    words = options.words()
    if options.sum_formats and is_usable():
        try:
            row_kernels()
        except UsageError as error:
            words["wire on CUDA"] = f"impossible here: {error}"
    return words


def _rank_in_job() -> int:
    """This rank's number in its job, for a group that is no part of it: torch's, or the one that a launcher gave."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


@dataclass(frozen=True)
class _Connector:
    """Makes the inner groups of one group, with all its ranks: within the timeout, and not longer than they live."""

    name: str
    rank: int
    global_ranks: Sequence[int]
    store: Store
    timeout: timedelta
    board: FailureBoard
    measuring: world.Measuring

    def gloo(self, tag: str, *, beside: Any = None, note: Mapping[str, str] | None = None) -> Any:
        """An inner Gloo group. Its ranks find each other in the job's store, or, where they have one already, over that
        (``beside``), and there compare what they ``note``. Raises PeerError, CollectiveTimeoutError where a rank does not come,
        DisagreementError for notes that differ."""
        size = len(self.global_ranks)
        require(needed_descriptors(size), f"rank {self.global_ranks[self.rank]}, the group {self.name} of {size} ranks")

        told = None if beside is None else self._over(beside, f"to connect for {tag}", note)
        polled = PolledStore(self.store, self.timeout.total_seconds(), lambda: self.board.is_broken)

        def make() -> Any:
            store = PrefixStore(f"{tag}/", told or polled)
            gloo: Any = gloo_in_order(store, self.rank, size, self.timeout)
            never_free_in_child(gloo)
            start_sequence(gloo)
            if told is not None:
                told.check_notes()
                self._take_back_address()
            return gloo

        with self.connecting(f"for {tag}"):
            try:
                return bounded(make, self.board, self.timeout.total_seconds(), f"connecting for {tag}")
            except RuntimeError:  # of a wait that was ended: what another rank found is a consequence for this one
                if told is not None:
                    told.check_notes()  # a rank that was quicker to see that they differ has left: say why here too
                if polled.is_lost:  # with a rank that need not be in this group
                    self.board.leave(f"lost the job's store: {self.board.detector.host_lost()}", is_consequence=True)
                raise

    def _take_back_address(self) -> None:
        """Delete this rank's address of the first inner group from the job's store, which would keep it as long as the job lasts.

        Whoever has heard from all ranks over that group knows that all have connected, and that nobody looks for it any more.
        """
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a store of the program's own may not delete
            PrefixStore(f"{_FIRST}/", self.store).delete_key(f"0/{self.rank}")  # as Gloo calls it

    def _over(self, gloo: Any, purpose: str, note: Mapping[str, str] | None) -> GatheredStore:
        peers = Peers(Watched(gloo, self.board), tuple(self.global_ranks), self.rank, torch.device("cpu"))
        told = {f"pg_options of the group {self.name} ({name})": value for name, value in (note or {}).items()}
        return GatheredStore(peers, self.timeout.total_seconds(), purpose, told)

    @contextmanager
    def connecting(self, purpose: str, at: str = "") -> Iterator[None]:
        """Guard a block in which the group is made: a failure is told to the other ranks, and raised with the name of
        the rank that failed first. ``at``: what this rank says of the stage, "connecting …" unless it is given."""
        with (
            stage(at or f"connecting {purpose}"),
            self.board.connecting(self.global_ranks, self.name, purpose, self.timeout.total_seconds()),
        ):
            yield

    def agreed(self, gloo: Any, request: GroupRequest, options: GroupOptions) -> world.World:
        """Return the agreement of all ranks of the job; where there is none yet, or this group is no part of one, its ranks agree
        now."""
        job = None if request.is_default or request.stands_alone else world.current()
        if job is None:
            with self.connecting("what all ranks must agree on", "agreeing on settings and links"):
                watched, detector = Watched(gloo, self.board), self.board.detector
                job = world.agree(
                    watched,
                    self.store,
                    self.rank,
                    self.global_ranks,
                    self.timeout,
                    detector,
                    measuring=self.measuring,
                    alone=options if request.stands_alone else None,
                )
        return job

    def planned(self, gloo: Any, job: world.World) -> PlannedGroup:
        """The engine's group, which runs plans, and wakes whoever waits in ``gloo``."""
        planned = PlannedGroup(
            name=self.name,
            rank=self.rank,
            nodes=job.nodes_of(self.global_ranks),
            global_ranks=self.global_ranks,
            store=PrefixStore("planned/", self.store),
            planner=job.cpu_planner if len(self.global_ranks) > 1 else None,
            settings=job.settings,
            timeout_s=self.timeout.total_seconds(),
            board=self.board,
            rates=job.rates_of(self.global_ranks),
            slow_pairs=job.slow_pairs_of(self.global_ranks),
        )
        planned.own_calls = gloo
        return planned

    def choices(self, job: world.World, device_type: str) -> Choices:
        """The choices of plans for tensors on a device."""
        shape = tuple(map(len, job.nodes_of(self.global_ranks)))
        planner = job.device_planner(device_type) if len(self.global_ranks) > 1 else None
        # Trials are run by the host, which does not see a device's steps; connections are the host's.
        settings = replace(job.settings, trials="off", connections=None)
        return Choices(shape, planner, settings)

    def survey(self, job: world.World, device_type: str) -> Callable[[torch.device], Planner | None] | None:
        """Return what finds out, with all ranks, by which profile to plan for a device; None where that is said, or nothing is to
        be planned there."""
        if len(self.global_ranks) == 1 or job.settings.profile not in (None, "auto") or job.settings.plan is not None:
            return None
        survey = DeviceSurvey(
            self.name,
            self.rank,
            self.global_ranks,
            self.store,
            self.timeout.total_seconds(),
            self.board,
            job,
            self.measuring,
        )
        return lambda device: survey.planner(device, partial(self.gloo, f"links of {device_type}"))

    def own_nccl(self, options: Any, purpose: str, lane: str, timeout: timedelta, device: torch.device) -> Messenger:
        """A communicator of NCCL's for the messages of plans, connected. ``options``: the user's of the group. Collective."""
        own, name = PrefixStore(f"{purpose}/", self.store), f"{self.name}: {purpose}"

        def make() -> Nccl:
            given, members = like_options(options), self.global_ranks
            made = make_nccl(own, self.rank, members, timeout, name, given, is_default=False, is_split=False, lane=lane)
            connect_now(made, device)
            return made

        with self.connecting(purpose):
            return InnerMessenger(bounded(make, self.board, timeout.total_seconds(), purpose))

    def own_of(self, maker: MakeInner, purpose: str, lane: str, timeout: timedelta, device: torch.device) -> Messenger:
        """The same of a registered device, which knows no lanes, and connects when it is made. Collective."""
        del lane, device
        own, name = PrefixStore(f"{purpose}/", self.store), f"{self.name}: {purpose}"

        def make() -> Nccl:
            return maker(own, self.rank, self.global_ranks, timeout, name)

        with self.connecting(purpose):
            return InnerMessenger(bounded(make, self.board, timeout.total_seconds(), purpose))

    def signatures(self, planned: PlannedGroup, gloo: Any) -> SignatureCheck | None:
        """Make the comparison of calls where COMMLAYER_DEBUG asks for one; else None."""
        if planned.settings.debug != "detail" and get_debug_level() != DebugLevel.DETAIL:
            return None
        control = self.gloo("control", beside=gloo)
        return SignatureCheck(control, self.store, self.rank, self.global_ranks, self.name, self.board, planned.explain)

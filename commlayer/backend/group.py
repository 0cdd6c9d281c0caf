"""The process group of the backend ``commlayer``: every verb of c10d, a life cycle, and what torch
asks of a group beside.

All verbs are overridden under their old and their new names. Those that C++ calls without going
through Python (gather, scatter, reduce, the ``_single`` forms from some functional operators) reach
an inner Gloo of their own, which is registered as this group's backend: right, but neither planned
nor counted nor in this group's order.

The group itself does nothing: a verb is a row of a table (verbs.py), and state is in the parts that
the group is made of.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions, GatherOptions, PrefixStore, Store, Work

from commlayer.backend import world
from commlayer.backend.batches import Batches
from commlayer.backend.ending import Ending
from commlayer.backend.group_options import GroupOptions
from commlayer.backend.inner import InnerGroups
from commlayer.backend.known_plans import KnownPlans
from commlayer.backend.members import Members
from commlayer.backend.options import make
from commlayer.backend.order import Order
from commlayer.backend.point_to_point import Messages
from commlayer.backend.running import Calls, barrier, monitored_barrier
from commlayer.backend.verb_methods import add_methods
from commlayer.backend.verbs import VERBS
from commlayer.backend.works import Together
from commlayer.calls.counters import GroupCounters
from commlayer.calls.group_life import INNER_NAME
from commlayer.calls.instruments import Instruments
from commlayer.calls.ring import Call, Track, open_track
from commlayer.engine.executor import Executor
from commlayer.engine.lane_holds import predicted_timeline
from commlayer.engine.planned import PlannedGroup
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.profiles.profile import Profile

__all__ = ["CommlayerGroup", "GroupParts"]

_ProcessGroup: Any = dist.ProcessGroup  # its annotations lack the forms in which torch itself calls it


def promised(engine: Executor, call: Call) -> tuple[tuple[tuple[float, float], ...], float] | None:
    """Return what is promised for a call that has run: the times of its plan's steps and the whole,
    µs; None: nothing is."""
    prices = engine.choices.prices
    plan = call.plan or prices.flat_plan(call.collective, call.run_bytes)
    timeline = None if plan is None else predicted_timeline(plan, prices.planner)
    if timeline is None:
        return None
    return () if call.plan is None else timeline.spans, timeline.total_us


class GroupParts(NamedTuple):
    """The parts of a group: the order of its calls, what runs them, its inner groups, its calls of
    known plans, and its end."""

    order: Order
    calls: Calls
    inner: InnerGroups
    known: KnownPlans
    ending: Ending


class CommlayerGroup(_ProcessGroup):  # type: ignore[misc]  # hence Any
    """A process group whose CPU collectives are planned. Made by
    ``init_process_group("commlayer")`` and ``new_group``.

    Its collectives are the rows of :data:`commlayer.backend.verbs.VERBS`.

    CUDA tensors are moved by plans on streams, or go to an inner NCCL group, made when CUDA is
    there.
    ``make``: makes another group, of some members of this one. ``options``: what the program gave
    for this group.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        inner: InnerGroups,
        is_planning: bool,
        make: Callable[..., CommlayerGroup],
        options: GroupOptions,
    ) -> None:
        super().__init__(rank, len(global_ranks))
        me = weakref.ref(self)  # what outlives a group, or is shared with threads, must not keep it alive
        planned: PlannedGroup = inner.planned
        is_planning = is_planning and len(global_ranks) > 1
        encodes_sums = bool(options.sum_formats) and len(global_ranks) > 1
        needs_look = is_planning or encodes_sums or inner.signatures is not None
        self._members = Members(
            name, rank, global_ranks, planned.nodes, lambda: group.group_desc if (group := me()) is not None else ""
        )
        self._inner, self._make, self.options = inner, make, options
        track = self.open_track(planned)
        self._order = Order(self._members, inner, track, needs_look=needs_look)
        track.ended = lambda: group._order.ended if (group := me()) is not None else 0
        self.counters = counters = GroupCounters(name, global_ranks[rank], list(global_ranks))
        counters.reasons, counters.describe = (lambda: planned.choices.reasons), self._members.describe
        size, num_far = len(global_ranks), len(self._members.far)
        counters.shares = num_far / size, (size - num_far - 1) / size
        track.shares, track.rank = counters.shares, counters.rank
        self._calls = Calls(self._order, self.counters, is_planning=is_planning)
        self._messages = Messages(self._order, self.counters)
        batches, known = Batches(self._order, self._messages, self.counters), KnownPlans(self._calls)
        self._known = known
        self._ending = Ending(self._order, batches, self.counters)
        # Verbs that c10d has not, for GroupCommunicator.
        self.start_batch = batches.start
        self.encoded_plan, self.start_planned = known.plan, known.start
        self.start_known_exchange, self.plans_on_device = known.start_known_exchange, known.plans_on_device

    @property
    def instruments(self) -> Instruments:
        """The instruments that listen to the group's calls."""
        return self._order.instruments

    @property
    def parts(self) -> GroupParts:
        """Its parts, for whoever makes it."""
        return GroupParts(self._order, self._calls, self._inner, self._known, self._ending)

    def open_track(self, engine: Executor, device_type: str = "") -> Track:
        """The group's calls in the ring, those of CPU tensors or those on a device, whose plans
        ``engine`` runs."""
        members, planned = self._members, self._inner.planned
        where = f" on {device_type}" if device_type else ""

        def describe() -> str:
            described = members.describe()
            return f"{described}{where}" if described and described != "undefined" else described

        me, running, board_ref = weakref.ref(self), weakref.ref(engine), weakref.ref(planned.board)
        track = open_track(
            int(planned.settings.ring),
            planned.board.key + where,
            members.name + where,
            members.global_ranks,
            describe,
            lambda: group.lane if (group := me()) is not None else "",
            planned.board.detector.numbering,
        )
        track.predict = lambda call: promised(executor, call) if (executor := running()) is not None else None
        track.is_broken = lambda: (board := board_ref()) is None or board.is_broken
        return track

    # Synchronisation

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Return when all ranks have come, and all that was queued before has ended."""
        opts = make(BarrierOptions, opts, timeout, {})
        on_device = None if opts.device is None else self._inner.on_devices.get(opts.device.type)
        if on_device is not None:
            return on_device.inner.own("barrier", opts)
        return self._order.issue(opts, "barrier", (None, 0, 0, None), [], barrier, self._calls, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that do not come within ``timeout`` (on rank 0; the others
        learn that it failed)."""
        is_given = timeout is not None and timeout.total_seconds() >= 0  # 0 is one: torch's tests give it
        limit = timeout if is_given else self._inner.timeout
        track = self._order.track
        call = track.note("monitored_barrier", None, 0, 0, None, False)
        try:
            self._order.progress.run("monitored_barrier", monitored_barrier, (self._calls, limit, wait_all_ranks))
        finally:
            track.done = call.number  # where it fails all ranks are told, and none is in it any more

    def _start_coalescing(self, device: torch.device) -> None:
        """Until :meth:`_end_coalescing`, asynchronous calls are waited for as one."""
        on_device = self._inner.on_devices.get(device.type)
        if on_device is not None:
            on_device.start_coalescing()
        else:
            self._order.coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        on_device = self._inner.on_devices.get(device.type)
        if on_device is not None:
            return on_device.end_coalescing()
        works, self._order.coalescing = self._order.coalescing or [], None
        return Together(works)

    # Messages

    def send(self, tensors: Sequence[torch.Tensor], dstRank: int, tag: int = 0) -> Work | None:  # noqa: N803  torch's name
        """Send ``tensors[0]`` (any dtype, strided) to rank ``dstRank`` of the group, which may be
        this one.

        Raises UsageError for a rank that is not in the group.
        """
        return self._messages.send(tensors, dstRank, tag)

    def recv(self, tensors: Sequence[torch.Tensor], srcRank: int, tag: int = 0) -> Work | None:  # noqa: N803
        """Receive into ``tensors[0]`` from rank ``srcRank`` of the group. Raises as
        :meth:`send`."""
        return self._messages.recv(tensors, srcRank, tag)

    def require_message(self, verb: str, tensor: torch.Tensor, member: int) -> None:
        """Raises what a ``send`` to, or a ``recv`` from, ``member`` would be refused with; sends
        nothing."""
        self._messages.require(verb, [tensor], member)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work | None:
        """Receive into ``tensors[0]`` from whichever other rank sends first; ``source_rank()`` of
        the Work says which."""
        return self._messages.recv_anysource(tensors, tag)

    # Lanes

    def use_lane(self, lane: str, *, fine: bool = True) -> None:
        """Put this group's traffic, from the next call on, on ``lane``, one of ep, pp, cp, dp, tp,
        or none (""). The same on all ranks, between the same calls. ``fine``: calls that others go
        before are cut more finely than their own speed asks for; False: they are held at the edges
        that they have, unless ``COMMLAYER_LANES=on`` cuts all.

        Where nobody says a lane the group's description does, if it is one that is known, and calls
        are not cut. Raises UsageError for a lane that does not exist.
        """
        self._order.use_lane(lane, is_told=fine)

    @property
    def lane(self) -> str:
        """The class of traffic; "" for none."""
        return self._order.lane_name

    @property
    def lane_is_told(self) -> bool:
        """Whether :meth:`use_lane` has said it."""
        return self._order.lane.is_told

    # Neighbours

    def use_siblings(self, siblings: int) -> None:
        """Plan this group's calls, from the next one on, for so many groups like it that use a
        node's links at the same time, this one among them. Collective: all ranks of the group call
        it with the same number, between the same calls.

        0, as it is where nobody says it: as many as the ranks of a node make up, which is what
        tensor parallelism's gradient groups are; 1: this group alone.
        :func:`commlayer.integrations.use_neighbours` finds the number from a list of groups. Raises
        UsageError for a negative number; on all ranks DisagreementError, which names who said what,
        for different ones (then nothing changes); CollectiveTimeoutError where a rank does not come
        within the group's timeout.
        """
        self._order.use_siblings(siblings)
        self._calls.never_plans_exchanges = False

    @property
    def siblings(self) -> int:
        """The number that :meth:`use_siblings` was told last; 0 where nobody has."""
        siblings: int = self._inner.planned.choices.prices.siblings
        return siblings

    # What torch, and who reads, ask of a group

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "commlayer"

    def name(self) -> str:
        return "commlayer"

    def _get_backend_name(self) -> str:
        """``gloo`` in a group without CUDA, else ``commlayer``: torch's ShardedTensor and
        SyncBatchNorm ask by this name whether tensors are on the CPU, and take a CUDA device where
        it is another. ``get_backend()`` does not ask here."""
        return "commlayer" if "cuda" in self._inner.on_devices else "gloo"

    @property
    def who(self) -> str:
        """This rank and group, for messages."""
        return self._members.who

    @property
    def _planned(self) -> Any:
        """The engine's group, or Destroyed: for tests and benchmarks."""
        return self._inner.planned

    @property
    def shape(self) -> tuple[int, ...]:
        """How many of the group's ranks each node holds."""
        shape: tuple[int, ...] = self._inner.planned.choices.prices.shape
        return shape

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The members on each node, as ranks of the group."""
        return self._inner.planned.nodes  # type: ignore[no-any-return]

    @property
    def profile(self) -> Profile | None:
        """The profile by which calls of this group are planned, as the job's ranks agreed on it: of
        the group's nodes and ranks. None: there is none."""
        planner = self._inner.planned.choices.agreed.prices.planner
        return None if planner is None else planner.profile

    def predicted_us(
        self, collective: str, num_bytes: int, shape: tuple[int, ...] | None = None, **how: Any
    ) -> float | None:
        """Predict by the profile that the job's ranks agreed on what a call takes, µs, also in wire
        formats or over rails: see :meth:`commlayer.engine.group_plans.CallPrices.predicted_us`. Talks
        to nobody. Not by what re-planning has found in this
        group: who asks may be deciding with ranks of other groups."""
        predicted: float | None = self._inner.planned.choices.agreed.prices.predicted_us(
            collective, num_bytes, shape, **how
        )
        return predicted

    def get_group_store(self) -> Store:
        """The store that the members of this group share."""
        store: Store = self._inner.store
        return store

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of calls that bring none of their own."""
        self._inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # What torch 2.15 asks of a group

    def supports_reconfigure(self) -> bool:
        """Whether its ranks can change while it lives: no, whatever the Gloo inside could."""
        return False

    def get_reconfigure_handle(self) -> str:
        """Raises UsageError: a group keeps its ranks."""
        raise UsageError(
            f"{self.who}: a group of commlayer keeps its ranks: make a new one, as "
            "commlayer.integrations.planned_process_group does for torchft"
        )

    def reconfigure(self, opts: Any) -> Work:
        """Raises as :meth:`get_reconfigure_handle`."""
        raise UsageError(f"{self.who}: a group of commlayer keeps its ranks: make a new one")

    def gather_single(self, output: torch.Tensor | None, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather every rank's ``input`` into ``output`` on ``opts.rootRank``, one behind the other.
        Others' ``output`` is unused.

        Raises TensorError, on the root, for an output of another dtype, of another size than all
        inputs, or not contiguous.
        """
        opts = make(GatherOptions, opts, None, {})
        members = self._members
        if opts.rootRank != members.rank:
            return self.gather([], [input], opts)  # type: ignore[no-any-return]
        if output is None or output.dtype is not input.dtype or output.numel() != members.size * input.numel():
            got = "None" if output is None else f"{output.numel()} of {output.dtype}"
            raise TensorError(
                f"{members.who}: gather_single expected an output of {members.size} times {input.numel()} elements of "
                f"{input.dtype}, got {got}"
            )
        if not output.is_contiguous():
            raise TensorError(
                f"{members.who}: gather_single expected a contiguous output, got strides {output.stride()}"
            )
        parts = [part.view(input.shape) for part in output.view(-1).split(input.numel())] if input.numel() else []
        parts = parts or [output.new_empty(input.shape) for _ in range(members.size)]
        return self.gather([parts], [input], opts)  # type: ignore[no-any-return]

    gather_into_tensor = gather_single
    """Torch's other name of it."""

    def _set_group_desc(self, description: str) -> None:
        """Take torch's description. torch gives it to the inner backends too: they keep one by which a dump of
        torch's recorder shows that it lacks the calls of plans. Their name has to be the group's, which C++ looks up by it."""
        super()._set_group_desc(description)
        for device in self._device_types:
            around = _ProcessGroup(self.rank(), self.size())
            around.bound_device_id = self.bound_device_id  # registering a backend binds it to that device
            around._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, self._get_backend(device))
            around._set_group_desc(INNER_NAME)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the numbers start at 0 on every rank, because a group is made by all of them
        together."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has run in this group."""
        return self._order.sequence

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> CommlayerGroup | None:
        """A group of the members ``new_ranks`` (ranks of this group, in the new order), or None on
        ranks outside it.

        Collective over ``new_ranks``. torch's own ``split_group`` refuses groups without a CUDA
        device before it asks here; ``new_group`` has no such condition.
        """
        del device_types  # one group serves all devices
        members = self._members
        if members.rank not in new_ranks:
            return None
        # No counter of calls: a rank that is in several splits has made more of them than its
        # peers.
        name = group_name or f"{members.name}/split:{'_'.join(map(str, new_ranks))}"
        group = self._make(
            name=name,
            rank=new_ranks.index(members.rank),
            global_ranks=[members.global_ranks[member] for member in new_ranks],
            store=PrefixStore(f"{name}/", self._inner.store),
            timeout=timeout or self._inner.timeout,
            options=opts if isinstance(opts, GroupOptions) else None,  # others are NCCL's, whose split is not used
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    # End

    def shutdown(self) -> None:
        """End what is queued and let go of threads and connections. What is called afterwards
        raises GroupError."""
        self._stop(drain=True)

    def abort(self) -> None:
        """Break what is under way, here and on the ranks that wait for this one."""
        self._stop(drain=False)

    def leave(self, patience_s: float) -> None:
        """Let go of the group: in good order where all that was called ends within ``patience_s``,
        else by :meth:`abort`."""
        self._stop(drain=self._ending.is_over_within(patience_s))

    def end(self, patience_s: float) -> None:
        """At the program's end, of a group that nobody destroyed: see
        :class:`commlayer.failures.endings.Ends`."""
        if not self._ending.is_over_within(patience_s):
            with contextlib.suppress(Exception):  # the program is over: nobody is left to be told
                self.abort()

    def _stop(self, *, drain: bool) -> None:
        self._ending.stop(drain=drain)
        world.forget(self)

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`."""
        self._ending.disown()
        world.forget(self)


add_methods(CommlayerGroup, VERBS)

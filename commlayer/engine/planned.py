"""Planned collectives of one group of CPU ranks: which plan a call gets, and running it.

The plans are those of :mod:`commlayer.scheduler`; they run by messages, on the connections that the backend's own calls use,
under tags of their own. What they need beside that, the memory that a node's ranks share, is made at the first planned call,
which all members make together: most groups of a trainer never need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.maximum import AgreedMaximum
from commlayer.calls.ring import Call
from commlayer.engine.group_plans import Choices
from commlayer.engine.lane_edges import HELD_OF_TIMEOUT, exchange_times_us, predicted_timeline
from commlayer.engine.lane_holds import Gate, lanes
from commlayer.engine.plain import as_bytes
from commlayer.engine.reducers import reducer
from commlayer.engine.runner import Prepared, Runner, Sent, drive
from commlayer.engine.split_exchange import SplitExchange, Splits
from commlayer.engine.tracing import record_steps, recorded
from commlayer.failures.board import FailedStep, Failure, FailureBoard, own_client, why_left
from commlayer.failures.descriptors import CLIENT, require, shortfall
from commlayer.failures.endings import bury
from commlayer.failures.forks import never_free_in_child
from commlayer.failures.waits import bounded, end_wait, keep
from commlayer.profiles.errors import ClusterError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.group_moves import moves_of_call
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Buffer, Op, Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.rails import SplitRows
from commlayer.scheduler.traffic import SlowPair
from commlayer.scheduler.two_level import TwoLevel
from commlayer.settings import MOST_CONNECTIONS, Settings
from commlayer.transport.connect import sharing_memory
from commlayer.transport.contract import CallMemory, Channel, StartedPlan, break_connections
from commlayer.transport.gloo import GlooTransport
from commlayer.transport.gloo_groups import gloo_in_order, needed_descriptors
from commlayer.transport.marks import mark_of
from commlayer.transport.shared_memory.shared_messages import SharedMemoryGroup

__all__ = ["PlannedGroup"]

_Made = TypeVar("_Made")
_MAX_KEPT = 1024
_MAX_EXCHANGES = 64
"""All_to_alls whose moves are kept: some kilobytes each, and a dropless layer never has the same splits again."""


class PlannedGroup:
    """Plans and runs the collectives of one group.

    ``nodes``: for each node that the group touches, its members as ranks *of the group*. ``global_ranks[i]`` is member i's
    rank in the job (for error messages). ``store`` is the group's own. ``planner`` None: nothing is planned, unless
    ``settings.plan`` names one plan for all calls to which it applies. Not thread-safe: one call at a time, in the same order
    on all ranks. ``rates``: of each of ``nodes``' cards, as a fraction of the usual one; empty: all alike. ``slow_pairs``:
    two of ``nodes`` each, and the rate of the way between them. ``board`` is where failures of the group are known.

    ``choices`` decides. ``own_calls`` is the inner group of the backend's own calls,
    once there is one: a failure breaks its connections too, so that nobody waits for the rest of a timeout.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        nodes: Sequence[Sequence[int]],
        global_ranks: Sequence[int],
        store: Store,
        planner: Planner | None,
        settings: Settings,
        timeout_s: float,
        board: FailureBoard,
        rates: tuple[float, ...] = (),
        slow_pairs: tuple[SlowPair, ...] = (),
    ) -> None:
        self.name, self.rank, self.global_ranks = name, rank, tuple(global_ranks)
        self.nodes = tuple(tuple(node) for node in nodes)
        shape = tuple(len(node) for node in self.nodes)
        self.choices = Choices(shape, planner, settings, rates=rates, slow_pairs=slow_pairs)
        self.settings, self.timeout_s = settings, timeout_s
        self.own_calls: dist.ProcessGroup | None = None
        self._store = store
        self.most_connections = MOST_CONNECTIONS
        """Over how many connections plans may contend: less once so many could not be made."""
        self.board = board
        self.waited_for: set[dist.Work] = set()
        """Messages of ``own_calls`` that are waited for: see GlooTransport."""
        self.board.on_break(self._wake)
        self._runner: Runner | None = None  # once there are connections
        self._agreed: AgreedMaximum | None = None
        self._measured: dist.ProcessGroup | None = None
        self.level = 0
        self.held_s = 0.0
        """For how long chunks of its planned calls were held at their edges, on a lane that yields to others."""
        self._exchanges = Kept[tuple[int, Splits], SplitExchange](_MAX_EXCHANGES)
        self._edges = Kept[int, tuple[Plan, tuple[tuple[float, bool], ...]]](_MAX_KEPT)

    def use_lane(self, lane: str, is_cut: bool) -> None:
        """Hold what is called from now on as ``lane`` says, and cut it finely. The same on all ranks, between the same calls."""
        self.level = level_of(lane)
        self.choices.use_lane(lane if self.level and is_cut else "")

    def gate(self, plan: Plan, timeout_s: float) -> Gate | None:
        """Where the exchanges of a call ask whether they may go; None where nobody goes before them."""
        if not self.level:
            return None
        kept = self._edges.get(id(plan))
        if kept is None:
            crossing = [step.resource is Resource.INTER for step in plan.steps]
            kept = plan, tuple(zip(exchange_times_us(plan, self.predicted(plan)), crossing, strict=True))
            self._edges.add(id(plan), kept)
        return Gate(lanes(), self.level, kept[1], timeout_s * HELD_OF_TIMEOUT)

    @property
    def never_plans_exchanges(self) -> bool:
        """Whether :meth:`plan_all_to_all` is None for every size. The same on all ranks."""
        if len(self.nodes) == 1 or len(self.global_ranks) == 1:
            return True
        return not self.choices.is_forced and not self.choices.two_level_may_pay

    def plan_all_to_all(self, num_bytes: int, *, timeout_s: float | None = None) -> Plan | None:
        """Plan, as ``choices`` does other calls, an all_to_all with any splits; ``num_bytes`` is the larger of what this rank
        sends and receives.

        Ranks see different numbers, and must decide alike: they decide by the largest of the *previous* call, on which they
        agree in the background (the first call is flat). Where no size could make a two-level plan pay nobody talks.
        Collective. Raises as :meth:`run`.
        """
        if self.never_plans_exchanges:
            return None
        if self.choices.is_forced:
            return self.choices.plan("all_to_all_v", 1)  # the size decides nothing, and may be 0 on some ranks only
        patience_s = timeout_s or self.timeout_s
        if self._agreed is None:
            self._agreed = AgreedMaximum(self.connect("agreement", self.timeout_s), self.board)
        began = time.monotonic()
        try:
            largest = self._agreed.exchange(num_bytes, patience_s)
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise self.explain(error, "all_to_all_v", self._agreed.calls, waited_s, patience_s) from error
        return None if not largest else self.choices.plan("all_to_all_v", 1 << (largest - 1).bit_length())

    def run(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        op: str = "sum",
        root: int = 0,
        timeout_s: float | None = None,
        issued: Call | None = None,
    ) -> Sent:
        """Run ``plan``; returns what this rank has sent, when the output may be used. ``issued`` gets its steps' times,
        where somebody has asked for them.

        Contiguous tensors of one dtype. all_gather: source [s], target [n·s]; reduce_scatter: source [n·s], target [s];
        all_reduce and broadcast: source is target, in place. ``op``: sum, product, min, max, band, bor, bxor.
        Raises PeerError, CollectiveTimeoutError (naming rank, group, collective, plan, step, chunk, peers).
        """
        limit_s = timeout_s or self.timeout_s
        # An asynchronous call runs on another thread than the mode that its tensors were made in. Torch's own context
        # manager around this one is ten calls of Python, which show in a small message's time.
        with torch._C._InferenceMode(True):
            try:
                runner = self._runner or self.connect_messages()
                prepared = runner.kept.get((id(plan), root)) or self._prepared(runner, plan, root)
                output = CallMemory(as_bytes(target))
                data = output if source is target else CallMemory(as_bytes(source))
                mark = mark_of(plan.traffic.collective, source.dtype, op, root)
                call = runner.start(prepared, data, output, limit_s, reducer(source.dtype, op), mark=mark)
                self.drive(plan, call, limit_s, issued)
            except BaseException as error:
                self.tell(error)
                raise
        return prepared.sent

    def prepare(self, plan: Plan, root: int = 0) -> None:
        """Have ready what a call of ``plan`` needs beside its data, so that the first one takes no longer than others.
        The group's first is collective."""
        self._prepared(self._runner or self.connect_messages(), plan, root)

    def drive(self, plan: Plan, call: StartedPlan, timeout_s: float, issued: Call | None = None) -> None:
        """Run a plan that has been started to its end, held where others go first.

        ``issued``, the call that it is run for, gets the times of its steps where somebody has asked for them.
        """
        gate = self.gate(plan, timeout_s) if self.level else None
        if issued is None or issued.steps is None:
            drive(plan, call, gate)
            call.finish()
        else:
            record_steps(issued, plan, call, recorded(plan, call, gate))
        if gate is not None:
            self.held_s += gate.held_s

    def predicted(self, plan: Plan) -> Timeline | None:
        """The plan's timeline by the profile; None without one, or where it does not know its operations."""
        return predicted_timeline(plan, self.choices.planner)

    def run_all_to_all(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        source_bytes: Sequence[int],
        target_bytes: Sequence[int],
        *,
        timeout_s: float | None = None,
        issued: Call | None = None,
    ) -> Sent:
        """Run an all_to_all plan: ``source_bytes[k]`` of source go to member k, ``target_bytes[k]`` come from it.

        Contiguous tensors. ``issued``, what is returned and raised: as :meth:`run`.
        """
        splits, limit_s = (tuple(source_bytes), tuple(target_bytes)), timeout_s or self.timeout_s
        with torch._C._InferenceMode(True):
            try:
                runner = self._runner or self.connect_messages()
                exchange = self._exchanges.get((id(plan), splits)) or self._exchange(runner, plan, splits)
                data = CallMemory(as_bytes(source)), CallMemory(as_bytes(target))
                call = exchange.start(runner, *data, limit_s)
                self.drive(plan, call, limit_s, issued)
            except BaseException as error:
                self.tell(error)
                raise
        return call.sent

    def run_over(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        *,
        issued: Call | None = None,
    ) -> Sent:
        """Run a plan of :func:`~commlayer.scheduler.rails.exchange_over`; ``splits``: bytes of ``source`` for each member, of
        ``target`` from each, none for members that are not of the plan's span.

        Contiguous tensors. ``issued``, what is returned and raised: as :meth:`run`.
        """
        with torch._C._InferenceMode(True):
            try:
                runner = self._runner or self.connect_messages()
                prepared = runner.prepare(plan, plan.moves(SplitRows(self.rank, *splits)), {})
                call = runner.start(
                    prepared, CallMemory(as_bytes(source)), CallMemory(as_bytes(target)), self.timeout_s
                )
                self.drive(plan, call, self.timeout_s, issued)
            except BaseException as error:
                self.tell(error)
                raise
        return prepared.sent

    def _exchange(self, runner: Runner, plan: Plan, splits: Splits) -> SplitExchange:
        """The moves of an all_to_all with these splits, which many programs have again and again."""
        if plan.connections > 1:
            self.connect_messages(plan.connections)
        two_level, transport = TwoLevel(self.nodes, self.rank, *splits), cast("GlooTransport", runner.transport)
        return self._exchanges.add((id(plan), splits), SplitExchange(plan, two_level, transport, self.near))

    def tell(self, error: BaseException) -> None:
        """Whatever breaks a call here is told to the others, who would wait for this rank in this group's other calls too."""
        if isinstance(error, UsageError):
            return  # found before a byte moved, and on all ranks alike
        self.abort(None if isinstance(error, ClusterError) else why_left(error))

    def explain(
        self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float
    ) -> ClusterError:
        """The error to raise where the backend's own (flat) call failed: names this rank, group, collective and sequence,
        and the rank that failed first where it can be found. Tells the other ranks, and wakes them."""
        board = self.board
        others = board.others(self.global_ranks)
        wait = FailedStep(board.rank, others, self.name, collective, "flat", collective, 0, sequence)
        return board.blame(wait, Failure(error, waited_s, timeout_s), self.abort)

    def abort(self, why: str | None = None) -> None:
        """After a failure: wake up the ranks that wait for this one, and tell them ``why`` where the failure is ours."""
        if why is not None:
            self.board.leave(why)
        if self._runner is not None:
            self._runner.transport.abort()
        self._break_own_calls()

    def wait_for_message(self, work: dist.Work, timeout: timedelta) -> None:
        """Return when a message of ``own_calls`` has gone or come. Raises RuntimeError: Gloo's, or that the group has been
        broken meanwhile."""
        self.waited_for.add(work)  # before the look at the board: whoever breaks it looks here afterwards
        try:
            if self.board.is_broken or not work.wait(timeout):
                raise self.board.woken()
        finally:
            self.waited_for.discard(work)

    def _wake(self) -> None:
        """The board is broken: end the waits for messages of ``own_calls``, and break its connections."""
        for work in list(self.waited_for):
            end_wait(work)
        self._break_own_calls()

    def _break_own_calls(self) -> None:
        group = self.own_calls  # another thread may be closing it
        if group is not None:
            break_connections(group, [member for member in range(len(self.global_ranks)) if member != self.rank])

    def close(self) -> None:
        """Let go of connections. Not collective: whoever closes has seen its last call end."""
        self.board.close()
        groups = self._let_go()  # only this list refers to them now
        if self.board.has_abandoned:
            for group in groups:
                keep(group)
        else:
            bury(groups)

    def _let_go(self) -> list[object]:
        groups: list[object] = [] if self._measured is None else [self._measured]
        if self._runner is not None:
            groups += cast("GlooTransport", self._runner.transport).release()
        for group in groups:
            if isinstance(group, SharedMemoryGroup):
                group.close()
        if self._agreed is not None:
            self._agreed.finish()
            groups.append(self._agreed.group)
        self._runner, self._agreed, self.own_calls, self._measured = None, None, None, None
        self._exchanges.clear()
        return groups

    def _prepared(self, runner: Runner, plan: Plan, root: int) -> Prepared:
        if plan.connections > 1:
            self.connect_messages(plan.connections)
        return runner.prepared(plan, root, lambda: self.moves(plan, root))

    def moves(self, plan: Plan, root: int = 0) -> tuple[Sequence[Moves], Mapping[Buffer, int]]:
        """The moves of this rank in each step of ``plan``, and the bytes of the buffers that it needs for them; not of an
        all_to_all_v, of which the splits say it."""
        return moves_of_call(plan, self.nodes, self.rank, root)

    @property
    def near(self) -> tuple[int, ...]:
        """The members on this rank's node."""
        return next(members for members in self.nodes if self.rank in members)

    def connect_messages(self, connections: int = 1) -> Runner:
        """The runner of the plans, whose messages inside nodes go through shared memory, and others over the connections of the
        backend's own calls, under tags of their own; where ``connections`` asks for several, over new ones too. Made at the first
        call that asks for them, which is collective."""
        if self._runner is None:
            group = self._sharing_memory(self.connect_own_calls())
            peers = tuple((rank, place) for place, rank in enumerate(self.global_ranks))
            channel = Channel(self.name, group, peers)
            self._runner = Runner(GlooTransport(dict.fromkeys(Op, channel), self.board), self.near)
        if connections > 1:
            transport = cast("GlooTransport", self._runner.transport)
            if connections > 1 + len(transport.others):
                self._widen(transport, connections)
        return self._runner

    def _widen(self, transport: GlooTransport, connections: int) -> None:
        transport.widen(self._more(connections, lambda purpose: self.connect(purpose, self.timeout_s)))

    @property
    def num_connections(self) -> int:
        """Over how many connections messages may go to a member on another node by now."""
        return 1 if self._runner is None else 1 + len(cast("GlooTransport", self._runner.transport).others)

    def shortage(self, connections: int) -> str:
        """Say why this process cannot have so many connections with every member; "" where it may."""
        more = connections - self.num_connections
        needed = more * (needed_descriptors(len(self.global_ranks)) + CLIENT)
        return shortfall(needed, f"{self._where(f'{connections} connections')}, {more} groups more")

    def try_connections(self, connections: int, patience_s: float) -> tuple[list[dist.ProcessGroup], str]:
        """Make what lacks for so many connections with every member, for :meth:`take_connections`; and say why it cannot be made
        here, if it cannot: then nothing breaks, and others may have made theirs. Collective."""
        errors: list[Exception] = []

        def made(purpose: str) -> dist.ProcessGroup | None:
            try:
                return self._made(purpose, self.timeout_s, patience_s)
            except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
                errors.append(error)
                return None

        groups = [group for group in self._more(connections, made) if group is not None]
        return groups, str(errors[0]) if errors else ""

    def take_connections(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Send parts of large messages over ``groups`` too. On all ranks, before the same call."""
        cast("GlooTransport", self.connect_messages().transport).widen(groups)

    def _more(self, connections: int, connect: Callable[[str], _Made]) -> list[_Made]:
        """``connect`` for each connection that lacks, on threads: each waits for the link some times."""
        numbers = range(self.num_connections + 1, connections + 1)
        with ThreadPoolExecutor(len(numbers)) as threads:
            return list(threads.map(connect, [f"messages, connection {number}" for number in numbers]))

    def connect_own_calls(self) -> dist.ProcessGroup:
        """Gloo's own calls: the backend's group where this object serves one, else one on connections of its own, made at the
        first call of this, which is collective then."""
        if self.own_calls is None:
            self.own_calls = self._measured = self.connect("own calls", self.timeout_s)
        return self.own_calls

    def _sharing_memory(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """``group``, of the members, with messages inside nodes through shared memory, where the ranks share any. Collective.
        Raises as :meth:`connect`."""

        def share() -> dist.ProcessGroup:
            return sharing_memory(group, self.rank, self.nodes, self.timeout_s, self.settings, self.board)

        with self.board.connecting(self.global_ranks, self.name, "messages", self.timeout_s, self.abort):
            return bounded(share, self.board, self.timeout_s, "messages")

    def connect(self, purpose: str, timeout_s: float) -> dist.ProcessGroup:
        """A Gloo group of the members for one purpose.

        Collective. Raises PeerError, CollectiveTimeoutError where a member does not come.
        """
        with self.board.connecting(self.global_ranks, self.name, purpose, timeout_s, self.abort):
            return self._made(purpose, timeout_s, timeout_s)

    def _made(self, purpose: str, timeout_s: float, patience_s: float) -> dist.ProcessGroup:
        """:meth:`connect`, given up after ``patience_s``, which breaks nothing where it fails."""

        # A client of its own: the groups of a process share one, whose waits hold its lock. Two groups that connect on two
        # threads, in another order on another rank, would wait for each other for ever.
        size = len(self.global_ranks)

        def make() -> dist.ProcessGroup:
            require(needed_descriptors(size) + CLIENT, f"{self._where(purpose)}: a group of {size} ranks")
            store = PrefixStore(f"commlayer/{purpose}", own_client(self._store))
            gloo = gloo_in_order(store, self.rank, size, timedelta(seconds=timeout_s))
            never_free_in_child(gloo)
            return cast("dist.ProcessGroup", gloo)  # a backend has those of a group's verbs that are called

        return bounded(make, self.board, patience_s, purpose)

    def _where(self, purpose: str) -> str:
        return f"rank {self.global_ranks[self.rank]}, group {self.name}, {purpose}"

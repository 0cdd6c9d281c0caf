"""Planned collectives of one group of CPU ranks: which plan a call gets, and running it.

The plans are those of :mod:`commlayer.scheduler`; they run by messages (connections.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store  # torch.distributed has them too, but not for type checkers

from commlayer.agree.maximum import AgreedMaximum
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.engine.connections import Connections
from commlayer.engine.encoded import explain_non_finite, reduce_scatter_in_place
from commlayer.engine.executor import Executor, Ran
from commlayer.engine.group_plans import Choices
from commlayer.engine.lane_holds import HELD_OF_TIMEOUT, Gate, exchange_times_us, lanes, predicted_timeline
from commlayer.engine.runner import Prepared, Runner, Sent, drive
from commlayer.engine.split_exchange import SplitCall, SplitExchange
from commlayer.engine.tracing import record_steps, recorded
from commlayer.failures.board import FailedStep, Failure, FailureBoard, why_left
from commlayer.profiles.errors import ClusterError, InternalError, NonFiniteError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import SlowPair
from commlayer.scheduler.two_level import TwoLevel
from commlayer.settings import Settings
from commlayer.transport.call_memory import Buffers, CallMemory, as_bytes, reducer
from commlayer.transport.contract import Script, StartedPlan
from commlayer.transport.marks import mark_of

__all__ = ["PlannedGroup"]

_MAX_KEPT = 1024
_MAX_SPLITS = 64
"""All_to_alls in two levels that are kept: see ``_MAX_EXCHANGES`` of the executor."""


class PlannedGroup(Executor):
    """Plans and runs the collectives of one group.

    ``nodes``: for each node that the group touches, its members as ranks *of the group*.
    ``global_ranks[i]`` is member i's rank in the job (for error messages). ``store`` is the group's
    own. ``planner`` None: nothing is planned, unless ``settings.plan`` names one plan for all calls
    to which it applies. Not thread-safe: one call at a time, in the same order on all ranks.
    ``rates``: of each of ``nodes``' cards, as a fraction of the usual one; empty: all alike.
    ``slow_pairs``: two of ``nodes`` each, and the rate of the way between them. ``board`` is where
    failures of the group are known.

    ``choices`` decides; ``connections`` has what calls go over.
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
        shape = tuple(map(len, nodes))
        super().__init__(nodes, rank, Choices(shape, planner, settings, rates=rates, slow_pairs=slow_pairs))
        self.name, self.global_ranks = name, tuple(global_ranks)
        self.settings, self.timeout_s, self.board = settings, timeout_s, board
        self.connections = Connections(name, rank, self.nodes, global_ranks, store, settings, timeout_s, board)
        self._runner: Runner | None = None  # once there are connections
        self._agreed: AgreedMaximum | None = None
        self.level = 0
        self.held_s = 0.0
        """For how long chunks of its planned calls were held at their edges, on a lane that yields
        to others."""
        self._splits = Kept[tuple[object, ...], SplitExchange](_MAX_SPLITS)
        self._edges = Kept[int, tuple[Plan, tuple[tuple[float, bool], ...]]](_MAX_KEPT)

    def use_lane(self, lane: str, is_cut: bool) -> None:
        """Hold what is called from now on as ``lane`` says, and cut it finely. The same on all
        ranks, between the same calls."""
        self.level = level_of(lane)
        self.choices.use_lane(lane if self.level and is_cut else "")

    def gate(self, plan: Plan, timeout_s: float) -> Gate | None:
        """Where the exchanges of a call ask whether they may go; None where nobody goes before
        them."""
        if not self.level:
            return None
        edges = self._edges.get(id(plan))
        if edges is None:
            crossing = [step.resource is Resource.INTER for step in plan.steps]
            edges = plan, tuple(zip(exchange_times_us(plan, self.predicted(plan)), crossing, strict=True))
            self._edges.add(id(plan), edges)
        return Gate(lanes(), self.level, edges[1], timeout_s * HELD_OF_TIMEOUT)

    def plan_all_to_all(self, num_bytes: int, *, timeout_s: float | None = None) -> Plan | None:
        """Plan, as ``choices`` does other calls, an all_to_all with any splits; ``num_bytes`` is
        the larger of what this rank sends and receives.

        Ranks see different numbers, and must decide alike: they decide by the largest of the
        *previous* call, on which they agree in the background (the first call is flat). Not asked
        where no size could make a two-level plan pay (:attr:`never_plans_exchanges`): nobody talks
        then. Collective. Raises as :meth:`run`.
        """
        if self.choices.is_forced:
            return self.plan_exchange(1)  # the size decides nothing, and may be 0 on some ranks only
        patience_s = timeout_s or self.timeout_s
        if self._agreed is None:
            self._agreed = AgreedMaximum(self.connections.connect("agreement", self.timeout_s), self.board)
        began = time.monotonic()
        try:
            largest = self._agreed.exchange(num_bytes, patience_s)
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise self.explain(error, "all_to_all_v", self._agreed.calls, waited_s, patience_s) from error
        return None if not largest else self.plan_exchange(largest)

    def run(self, movement: Movement, *, timeout_s: float | None = None, issued: Call | None = None) -> Ran:
        """See :meth:`Executor.run`. Returns when the output may be used; whatever breaks the call
        is told to the others."""
        limit_s = timeout_s or self.timeout_s
        # An asynchronous call runs on another thread than the mode that its tensors were made in.
        # Torch's own context manager around this one is ten calls of Python, which show in a small
        # message's time.
        with torch._C._InferenceMode(True):
            try:
                plan, source, target = movement.plan, movement.source, movement.target
                runner = self._runner or self.connected()
                if movement.kind == "in place":
                    return Ran(self._run_in_place(runner, movement, limit_s))
                output = CallMemory(as_bytes(target))
                data = output if source is target else CallMemory(as_bytes(source))
                if movement.kind == "whole":
                    op, root = movement.op, movement.root
                    prepared = runner.kept.get((id(plan), root)) or self.prepared(runner, movement)
                    mark, reduce = mark_of(plan.traffic.collective, source.dtype, op, root), reducer(source.dtype, op)
                    buffers = {Buffer.INPUT: data, Buffer.OUTPUT: output}  # runner.start, without its calls
                    for buffer, size in prepared.sizes.items():
                        memory = runner.memory.get(buffer)
                        if memory is None or memory.tensor.numel() < size:
                            memory = runner.stage(size, buffer, target.device)
                        buffers[buffer] = memory
                    call = runner.transport.start(prepared.script, buffers, limit_s, reduce, None, mark)
                    self.drive(plan, call, limit_s, issued)
                    return Ran(prepared.sent)
                sending, call = self._started(runner, movement, data, output, limit_s)
                self.drive(plan, call, limit_s, issued)
                return Ran(sending.sent)
            except BaseException as error:
                explained = self._explained(movement, error)
                self.tell(explained)
                if explained is error:
                    raise
                raise explained from error

    def _started(
        self, runner: Runner, movement: Movement, source: CallMemory, target: CallMemory, limit_s: float
    ) -> tuple[Prepared | SplitCall, StartedPlan]:
        """Begin a call of any other kind. Returns what knows, at its end, what this rank has sent,
        and the call."""
        if movement.kind == "split":
            exchange = self._exchange(movement).start(runner, source, target, limit_s)
            return exchange, exchange
        prepared = self.prepared(runner, movement)
        reduce = reducer(movement.source.dtype, "sum") if movement.kind == "encoded" else None
        coder = None if movement.codec is None else movement.codec.on_bytes()
        return prepared, runner.start(prepared, source, target, limit_s, reduce, coder)

    def _run_in_place(self, runner: Runner, movement: Movement, limit_s: float) -> Sent:
        def drive(script: Script, buffers: Buffers) -> None:
            self.drive(movement.plan, runner.transport.start(script, buffers, limit_s), limit_s)

        self.connections.messages(movement.plan.connections)
        return reduce_scatter_in_place(runner, self.rank, len(self.global_ranks), movement, drive)

    def _explained(self, movement: Movement, error: BaseException) -> BaseException:
        """Return the error that a broken call raises, and tells the other ranks.

        A codec refuses in the middle of a call, when it has seen a piece.
        """
        if movement.kind in ("whole", "split", "over"):
            return error
        if isinstance(error, NonFiniteError):
            where = f"rank {self.global_ranks[self.rank]}, group {self.name}"
            width = 1 if movement.codec is None else movement.codec.wire.row_elements
            return explain_non_finite(movement.source, width, where, error)
        if isinstance(error, UsageError):
            return InternalError(f"{type(error).__name__} in the middle of a call: {error}")
        return error

    def prepared(self, runner: Runner, movement: Movement) -> Prepared:
        """See :meth:`Executor.prepared`; over as many connections as the plan takes."""
        if movement.plan.connections > 1:
            self.connections.messages(movement.plan.connections)
        return super().prepared(runner, movement)

    def prepare(self, plan: Plan, root: int = 0) -> None:
        """Have ready what a call of ``plan`` needs beside its data, so that the first one takes no
        longer than others. The group's first is collective."""
        self.prepared(self._runner or self.connected(), Movement(plan, None, None, root=root))

    def drive(self, plan: Plan, call: StartedPlan, timeout_s: float, issued: Call | None = None) -> None:
        """Run a plan that has been started to its end, held where others go first.

        ``issued``, the call that it is run for, gets the times of its steps where somebody has
        asked for them.
        """
        gate = self.gate(plan, timeout_s) if self.level else None
        if issued is not None and issued.steps is not None:
            record_steps(issued, plan, call, recorded(plan, call, gate))
        elif gate is not None:
            drive(plan, call, gate)
            call.finish()
        else:  # the same, without a call and a look at the gate for every step
            for index, step in enumerate(plan.steps):
                for earlier in step.after:
                    call.require(earlier, index)
                call.post(index)
            call.finish()
        if gate is not None:
            self.held_s += gate.held_s

    def predicted(self, plan: Plan) -> Timeline | None:
        """The plan's timeline by the profile; None without one, or where it does not know its
        operations."""
        return predicted_timeline(plan, self.choices.prices.planner)

    def _exchange(self, movement: Movement) -> SplitExchange:
        """The moves of an all_to_all with these splits, which many programs have again and
        again."""
        plan, splits = movement.plan, (tuple(movement.splits[0]), tuple(movement.splits[1]))
        exchange = self._splits.get((id(plan), splits))
        if exchange is None:
            transport = self.connections.messages(plan.connections)
            two_level = TwoLevel(self.nodes, self.rank, *splits)
            exchange = self._splits.add((id(plan), splits), SplitExchange(plan, two_level, transport, self.near))
        return exchange

    def tell(self, error: BaseException) -> None:
        """Whatever breaks a call here is told to the others, who would wait for this rank in this
        group's other calls too."""
        if isinstance(error, UsageError):
            return  # found before a byte moved, and on all ranks alike
        self.connections.abort(None if isinstance(error, ClusterError) else why_left(error))

    def explain(
        self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float
    ) -> ClusterError:
        """The error to raise where the backend's own (flat) call failed: names this rank, group,
        collective and sequence, and the rank that failed first where it can be found. Tells the
        other ranks, and wakes them."""
        board = self.board
        others = tuple(rank for rank in self.global_ranks if rank != board.rank)
        wait = FailedStep(board.rank, others, self.name, collective, "flat", collective, 0, sequence)
        return board.blame(wait, Failure(error, waited_s, timeout_s), self.connections.abort)

    def connected(self) -> Runner:
        """Return the runner of the plans. Connects at the first call, which is collective."""
        if self._runner is None:
            self._runner = Runner(self.connections.messages(), self.near)
        return self._runner

    def close(self) -> None:
        """Let go of connections. Not collective: whoever closes has seen its last call end."""
        if self._agreed is not None:
            self._agreed.finish()
        self._runner, self._agreed = None, None
        self._exchanges.clear()
        self._splits.clear()
        self.connections.close()

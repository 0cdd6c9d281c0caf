"""Running a call of a group: compare its signature, find its plan, move its bytes, wait, count.

The bodies of the verbs (gathers.py, reductions.py, exchanges.py) say what a call is; they are given
a :class:`Calls` to run it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import perf_counter_ns as now
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import ReduceOp, Work

from commlayer.backend.inner import InnerGroups
from commlayer.backend.members import Members
from commlayer.backend.options import timeout_of
from commlayer.backend.order import Order
from commlayer.backend.works import IssuedWork
from commlayer.calls.counters import GroupCounters, Row
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.engine.group_plans import Choices
from commlayer.engine.progress import DONE
from commlayer.failures.waits import SLICE, bounded, wait
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError
from commlayer.scheduler.plan import Plan

__all__ = ["Calls", "EncodedSums", "Refused", "barrier", "monitored_barrier"]

_profiling = torch._C._autograd._profiler_enabled
_record = torch._C._profiler._RecordFunctionFast
_EVEN, _UNKNOWN = Row.EVEN, (Row.UNKNOWN, 0)
_REFUSAL = "Cannot use ReduceOp"
"""How Gloo, when it is waited for, begins to say that it has not an operation for a dtype. It has
sent nothing then."""
_HINTS: dict[type[ClusterError], str] = {
    CollectiveTimeoutError: "Ranks may have made different calls: COMMLAYER_DEBUG=detail compares them and says which. ",
    PeerError: "Gloo ends a rank that is sent more than its call expects: COMMLAYER_DEBUG=detail compares calls before. ",
}
"""Where else to look: a flat call knows nothing of the others'."""


EncodedSums = Callable[[str, torch.Tensor, torch.Tensor, ReduceOp.RedOpType, Any], bool]
"""Runs an all_reduce or a reduce_scatter in a wire format where the group's options allow one, and
says whether it has."""


class Refused(Exception):
    """The inner backend has not this operation. The verb then goes the long way, which has, or says
    why not."""


class Calls:
    """Runs the calls of one group, in its :class:`Order`. ``is_planning``: some may have a plan.

    ``instead``: runs a call flat whose plan was chosen before plans were stopped; None: they were
    not.
    """

    __slots__ = (
        "connected",
        "counters",
        "encoded_sums",
        "inner",
        "instead",
        "instruments",
        "is_planning",
        "judge",
        "members",
        "needs_look",
        "never_plans_exchanges",
        "order",
        "run_pending",
    )

    def __init__(self, order: Order, counters: GroupCounters, *, is_planning: bool) -> None:
        self.order, self.counters, self.is_planning = order, counters, is_planning
        self.members: Members = order.members
        self.inner: InnerGroups = order.inner
        self.needs_look = order.needs_look
        self.instruments = order.instruments
        self.instead: Callable[[Movement], None] | None = None
        self.encoded_sums: EncodedSums | None = None
        self.never_plans_exchanges = False  # found out at the first all_to_all
        self.connected: Callable[..., Plan | None]  # these three are given before the first call
        self.run_pending: Callable[..., None]
        self.judge: Callable[..., None]

    def use_trials(
        self,
        *,
        connected: Callable[..., Plan | None],
        run_pending: Callable[..., None],
        judge: Callable[..., None],
    ) -> None:
        """Run the group's trials by these functions: see :mod:`commlayer.measure.trials`."""
        self.connected, self.run_pending, self.judge = connected, run_pending, judge

    def stop_planning(self, instead: Callable[[Movement], None]) -> None:
        """Use no plans any more. ``instead`` runs calls whose plans were chosen before."""
        self.is_planning, self.instead = False, instead

    # Deciding

    def plan_anew(self, choices: Choices) -> None:
        """Plan by ``choices`` from the next call on. In the group's order."""
        self.inner.planned.choices = choices
        self.never_plans_exchanges = False
        self.order.lane.follow_links()

    def look(
        self,
        tensor: torch.Tensor | None,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        sizes: tuple[int, ...] | None = None,
        timeout: timedelta | None = None,
        plannable: bool = True,
    ) -> Plan | None:
        """The plan for a call, or None: flat. Compares signatures first, where that is asked for.

        Only for calls of which ``num_bytes`` and the dtype are equal on all ranks. Runs the plans
        that contend first, where that is pending.
        """
        assert self.order.call is not None
        collective, plan = self.order.call.collective, None
        choices, is_float = None, tensor is not None and tensor.dtype.is_floating_point
        if plannable and self.is_planning and tensor is not None:
            choices = self.inner.planned.choices
            plan = choices.plan(collective, num_bytes, is_float=is_float, is_in_turn=True)
            if plan is not None and plan.connections > 1 and choices.experience.is_contested:
                again = partial(choices.plan, collective, num_bytes, is_float=is_float, is_in_turn=True)
                plan = self.connected(self.inner.planned, choices, plan, again)
        if self.inner.signatures is not None:
            if timeout is None or timeout.total_seconds() < 0:
                timeout = self.inner.timeout
            limit_s = timeout.total_seconds()
            self.order.compare(collective, tensor, num_bytes, limit_s=limit_s, op=op, root=root, sizes=sizes, plan=plan)
        if choices is not None and choices.experience.pending is not None:
            limit_s = 0.0 if timeout is None else timeout.total_seconds()
            self.run_pending(self.inner.planned, limit_s if limit_s > 0 else None)
            plan = choices.plan(collective, num_bytes, is_float=is_float)
        return plan

    # Calls of the inner backend

    def flat(self, num_bytes: int, own: Callable[..., Work], *args: Any, sent: tuple[int, int] = _UNKNOWN) -> None:
        """Run the inner backend's ``own(*args)`` for the call that runs now.

        ``args[-1]`` are its options; ``sent``: the bytes it sends (inter and intra of Row).
        """
        call = self.order.call
        assert call is not None
        call.held_ns += self.order.lane.hold(num_bytes)
        call.plan = None  # another collective of the same call may have had one
        call.run_bytes = num_bytes
        call.logical_bytes += num_bytes
        call.inter_bytes, call.intra_bytes = sent
        if _profiling():
            with _record(f"commlayer:{call.collective} flat"):
                self.wait(call, num_bytes, now(), own(*args), args[-1], sent)
        else:
            self.wait(call, num_bytes, now(), own(*args), args[-1], sent)

    def wait(
        self, call: Call, num_bytes: int, started: int, work: Work, opts: Any, sent: tuple[int, int] = _UNKNOWN
    ) -> Work:
        """Wait for the inner backend's ``work``, and count it. Where issuing it raised, it was
        refused: nothing was sent."""
        collective = call.collective
        self.order.sequence = call.sequence = self.order.sequence + 1
        try:
            work.wait(SLICE)
        except RuntimeError:
            try:
                wait(work, self.inner.planned.board)
            except RuntimeError as error:
                self._fail(error, collective, call.sequence, started, opts)
        row = self.counters.flat[collective]  # row.add, without the call
        spent_ns = now() - started
        row.calls += 1
        row.logical_bytes += num_bytes
        row.time_ns += spent_ns
        inter, intra = sent
        if inter >= 0:
            row.inter += inter
            row.intra += intra
        elif inter == _EVEN:
            row.even += num_bytes
        else:
            row.is_known = False
        if self.instruments.moved:
            call.run_bytes, call.moved_ns = num_bytes, spent_ns
            call.inter_bytes, call.intra_bytes = sent
            for hear in self.instruments.moved:
                hear(call)
        return DONE

    def _fail(self, error: RuntimeError, collective: str, sequence: int, started: int, opts: Any) -> NoReturn:
        """A wait for a collective broke: tell the other ranks, and raise what it means.

        Raises Refused, PeerError, CollectiveTimeoutError, ClusterError.
        """
        if _REFUSAL in str(error):
            raise Refused(str(error)) from error
        waited_s, timeout_s = (now() - started) / 1e9, timeout_of(opts)
        limit_s = self.inner.timeout.total_seconds() if timeout_s is None else timeout_s
        explained = self.inner.planned.explain(error, collective, sequence, waited_s, limit_s)
        # What the inner backend said stays in the text: programs look for "Timed out" or
        # "Connection closed".
        kind = type(explained) if isinstance(explained, ClusterError) else ClusterError
        hint = _HINTS.get(kind, "") if self.inner.signatures is None else ""
        # On one line; what has been found out about all ranks follows it.
        first, sign, diagnosed = str(explained).partition("\n")
        raise kind(
            f"{self.members.who}, {collective} #{sequence}: {first}. {hint}Gloo's own message: {error}{sign}{diagnosed}"
        ) from error

    def under_way(
        self, call: Call, num_bytes: int, work: Work, opts: Any, outputs: Any, sent: tuple[int, int] = _UNKNOWN
    ) -> Work:
        """An asynchronous call that has just been issued."""
        order = self.order
        order.sequence = call.sequence = order.sequence + 1
        call.started_ns = now()
        self.counters.flat[call.collective].add(num_bytes, 0, *sent)
        issued = IssuedWork(order.progress, call, outputs, work, self.inner.planned.board, opts, self._end)
        if order.under_way.is_watched:
            of = weakref.ref(issued)  # what is under way must not hold the call's tensors
            order.under_way.begin(call, order.key, lambda: (call_work := of()) is None or call_work.has_come)
        order.latest = issued
        if order.coalescing is not None:
            order.coalescing.append(issued)
        return issued

    def _end(self, issued: IssuedWork, error: RuntimeError | None) -> None:
        """Count an asynchronous call that has ended, or raise what its ``error`` means."""
        order, call = self.order, issued.call
        call.ended_ns = now()
        if order.under_way.is_watched:
            order.under_way.end(call, call.ended_ns)
        if error is not None:
            call.error = type(error).__name__
            self._fail(error, call.collective, call.sequence, call.started_ns, issued.opts)
        call.track.done = call.number
        self.counters.flat[call.collective].time_ns += call.ended_ns - call.started_ns
        if order.latest is issued:  # it holds the call's tensors
            order.latest = None

    # Plans

    def run(self, movement: Movement, num_bytes: int, timeout: timedelta | None = None) -> None:
        """Run a plan for the call that runs now, on contiguous tensors; count ``num_bytes``.

        ``timeout``: of the call; None, or below zero: the group's.
        """
        order, call, plan, planned = self.order, self.order.call, movement.plan, self.inner.planned
        assert call is not None
        order.sequence = call.sequence = order.sequence + 1
        call.plan = plan
        for hear_moving in self.instruments.moving:
            hear_moving(call, movement)
        limit_s = 0.0 if timeout is None else max(timeout.total_seconds(), 0.0)
        started = now()
        if _profiling():
            with _record(f"commlayer:{call.collective} {plan.name}"):
                ran = planned.run(movement, timeout_s=limit_s, issued=call)
        else:
            ran = planned.run(movement, timeout_s=limit_s, issued=call)
        spent_ns = now() - started
        call.run_bytes, call.moved_ns = num_bytes, spent_ns
        call.logical_bytes += num_bytes
        call.inter_bytes, call.intra_bytes = inter, intra = ran.sent
        row = self.counters.planned[call.collective, plan.name]  # row.add, without the call
        row.calls += 1
        row.logical_bytes += num_bytes
        row.time_ns += spent_ns
        row.inter += inter
        row.intra += intra
        if planned.choices.is_tried and planned.choices.experience.is_contested:
            self.judge(planned, plan, spent_ns / 1e3)
        for hear in self.instruments.moved:
            hear(call)


def barrier(calls: Calls, opts: Any) -> None:
    """Return when all ranks have come."""
    if calls.needs_look:
        calls.look(None, 0, timeout=opts.timeout, plannable=False)
    calls.flat(0, calls.inner.gloo.barrier, opts)


def monitored_barrier(calls: Calls, limit: timedelta, wait_all_ranks: bool) -> None:
    """A barrier that names the ranks that do not come within ``limit``."""
    # Gloo's own text names ranks of the group; it is what programs look for, so it is left as
    # it is.
    task = partial(calls.inner.gloo.monitored_barrier, limit, wait_all_ranks)
    if calls.members.size == 1:
        task()
        return
    began, limit_s, planned = time.monotonic(), limit.total_seconds(), calls.inner.planned
    try:
        bounded(task, planned.board, 2 * limit_s + 5.0, "monitored_barrier")  # it names ranks itself at its limit
    except RuntimeError as error:
        if not planned.board.is_broken:
            raise
        waited_s = time.monotonic() - began
        raise planned.explain(error, "monitored_barrier", calls.order.sequence, waited_s, limit_s) from error

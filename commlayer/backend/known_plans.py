"""Calls of a plan that is known when they are made: in a wire format, or among the ranks of each
rail or node.

They run in a group's order, counted and compared like its others. c10d has no words for them;
:mod:`commlayer.wire_decider` and :mod:`commlayer.collectives` make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, Work

from commlayer.backend.arithmetic import AVG
from commlayer.backend.running import Calls
from commlayer.calls.movement import Movement
from commlayer.engine.group_plans import Choices
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.wire import Wire

__all__ = ["AskPlan", "EncodedSum", "KnownPlans"]

AskPlan = Callable[[str, int, tuple[Wire, ...], int], Plan | None]
"""Returns the plan of a collective of so many bytes, whose elements of so many bytes may go in
these formats; None: the backend's own call. The same on all ranks."""
EncodedSum = Callable[[AskPlan, str, torch.Tensor, torch.Tensor, ReduceOp.RedOpType, int], Movement | None]
""":func:`commlayer.backend.encoded_sums.encoded_sum`, for the formats that a group's options
allow."""


class KnownPlans:
    """Makes them, of contiguous tensors; each returns a Work of an asynchronous call."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._order, self._inner = calls, calls.order, calls.inner

    def plan(
        self,
        collective: str,
        num_bytes: int,
        wires: tuple[Wire, ...],
        element_bytes: int,
        x: torch.Tensor,
        *,
        is_in_turn: bool = False,
    ) -> Plan | None:
        """The plan for a call whose elements may go in ``wires``; None: the backend's own call. The
        same on all ranks. ``x``: a tensor of the call, for its device; ``is_in_turn``: as of
        :meth:`commlayer.engine.group_plans.Choices.plan`."""
        if not x.is_cpu:
            choices = self._order.on_device(x).known_choices(x.device)
            return choices.plan(collective, num_bytes, is_float=True, wires=wires, element_bytes=element_bytes)
        if self._order.lane.name is None:
            self._order.use_lane_of_group()
        agreed: Choices = self._inner.planned.choices.agreed
        ask = partial(
            agreed.plan,
            collective,
            num_bytes,
            is_float=True,
            wires=wires,
            element_bytes=element_bytes,
            lane=self._order.lane.cut_for,
            is_in_turn=is_in_turn,
        )
        plan = ask()
        if is_in_turn and plan is not None and plan.connections > 1 and agreed.experience.is_contested:
            plan = self._calls.connected(self._inner.planned, agreed, plan, ask)
        return plan

    def start(self, movement: Movement) -> Work:
        """Start a call of a plan that :meth:`plan` has found, or that the caller has made: the same
        on all ranks."""
        if not movement.source.is_cpu:
            return self._order.on_device(movement.source).start(movement)
        options: Any = AllreduceOptions()
        options.asyncOp = True
        collective = movement.plan.traffic.collective
        noted = movement.source.dtype, -1, -1, None  # ranks may have sizes of their own
        return self._order.issue(options, collective, noted, [movement.target], self._run_known, movement)

    def start_known_exchange(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        rows: tuple[Sequence[int], Sequence[int]],
        counts: tuple[tuple[int, ...], ...],
    ) -> Work:
        """An all_to_all on a device of which all ranks know ``counts``, the bytes that each sends
        to each other: nobody tells them. ``rows``: of ``source`` for each member, of ``target``
        from each."""
        return self._order.on_device(source).start_exchange(source, target, rows, counts)

    def plans_on_device(self, x: torch.Tensor) -> bool:
        """Whether calls of tensors such as ``x``, on a device, may have plans."""
        return self._order.on_device(x).known_choices(x.device).is_planning

    def sum_now(
        self,
        encoded: EncodedSum,
        collective: str,
        source: torch.Tensor,
        target: torch.Tensor,
        op: ReduceOp.RedOpType,
        opts: Any,
    ) -> bool:
        """Run one of the group's own sums in a wire format, where ``encoded`` chooses one; returns
        whether it has. In the group's order."""
        ask, size = partial(self.plan, x=source, is_in_turn=True), self._calls.members.size
        movement = encoded(ask, collective, source, target, op, size)
        if movement is None:
            return False
        self._run_known(movement, opts.timeout)
        if op == AVG:
            with torch._C._InferenceMode(True):
                target.data.div_(size)
        return True

    def _run_known(self, movement: Movement, timeout: timedelta | None = None) -> None:
        calls, plan, source = self._calls, movement.plan, movement.source
        collective, size = plan.traffic.collective, source.nbytes
        order = self._order
        # Of an all_to_all ranks have different sizes; of an all_gather each has its own part.
        is_even = collective in ("all_reduce", "reduce_scatter")
        order.compare(collective, source if is_even else None, size if is_even else 0, plan=plan)
        if calls.instead is not None:  # the plan was looked up when the call was made
            assert order.call is not None
            order.sequence = order.call.sequence = order.sequence + 1
            calls.instead(movement)
            return
        calls.run(movement, plan.traffic.logical_bytes if collective != "all_to_all_v" else size, timeout)

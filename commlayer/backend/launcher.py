"""One call on a device while it is launched: which plan it has, its comparison with other ranks', and
what runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp, Work

from commlayer.backend.arithmetic import AVG, is_summed_by_plans
from commlayer.backend.known_plans import EncodedSum
from commlayer.backend.launched_calls import LaunchedCalls, LaunchedWork
from commlayer.backend.order import Order
from commlayer.backend.tensors import is_dense
from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import Instruments
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call, Track
from commlayer.engine.device_plans import DevicePlans
from commlayer.profiles.errors import TensorError
from commlayer.scheduler.call_moves import Counts
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.wire import Wire
from commlayer.transport.nccl import Nccl
from commlayer.transport.streams import StreamCall

__all__ = ["Launcher", "TellCounts"]

TellCounts = Callable[[Sequence[int]], list[list[int]]]
"""Tells all ranks of a group this one's numbers, over the host, and returns everybody's.
Collective."""


class Launcher:
    """Launches a group's calls on a device, each by its plan, or gives it to the inner backend.

    ``order``: of the group's CPU calls, in whose turn ranks compare what they are about to call;
    ``track``: the calls on this device in the ring, to which ``instruments`` listen.
    ``tell`` exchanges counts. ``encoded``: chooses the format of the group's own FP32 sums; None:
    they go as they are. ``is_planning``: whether calls may have plans; ``instead``: runs a call flat
    whose plan was chosen before that was stopped. ``is_coalescing``: a coalesced block is open.
    """

    def __init__(
        self,
        inner: Nccl,
        plans: DevicePlans,
        order: Order,
        track: Track,
        counters: GroupCounters,
        tell: TellCounts,
        encoded: EncodedSum | None = None,
    ) -> None:
        self.inner, self.plans, self.order, self.members, self.tell = inner, plans, order, order.members, tell
        self.track, self._counters, self._encoded = track, counters, encoded
        self.instruments = Instruments()
        self.launched = LaunchedCalls(plans, track, counters, self.instruments)
        self.is_planning, self.is_coalescing = True, False
        self.instead: Callable[[Movement], None] | None = None

    def look(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        fits: bool = True,
    ) -> Plan | None:
        """The plan for the call that is launched now; None: the inner backend's own. Compares
        signatures, where that is asked for. ``fits``: whether the sizes are those of a plan."""
        assert self.launched.launching is not None
        collective, plan = self.launched.launching.collective, None
        is_compared = self.order.inner.signatures is not None
        may_plan = fits and self.is_planning and not self.is_coalescing and is_dense(output)
        if may_plan and (input is output or is_dense(input)) and (op is None or is_summed_by_plans(op, input.dtype)):
            # The ranks find out together by what to plan: not where they make different calls.
            if is_compared and self.plans.is_unknown:
                self.compare(collective, input, num_bytes, op=op, root=root)
            plan = self.plans.plan(collective, input, num_bytes)
        if is_compared:
            self.compare(collective, input, num_bytes, op=op, root=root, plan=plan)
        return plan

    def compare(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        num_bytes: int,
        *,
        op: ReduceOp.RedOpType | None = None,
        root: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Compare a call with the other ranks', where that is asked for, before anything of it is
        launched."""
        if self.order.inner.signatures is not None:
            words: dict[str, Any] = {"op": op, "root": root, "plan": plan, "where": " on a device"}
            self.meet(collective, partial(self.order.compare, collective, tensor, num_bytes, **words))

    def meet(self, collective: str, compare: Callable[[], None]) -> None:
        """``compare()`` a call with the other ranks', in the turn of the group's CPU calls, as one
        of them."""
        order = self.order

        def task() -> None:
            compare()
            order.sequence += 1

        order.in_turn(collective, task)

    def sum_encoded(
        self, source: torch.Tensor, target: torch.Tensor, op: ReduceOp.RedOpType, outputs: Any
    ) -> Work | None:
        """Launch one of the group's own sums in a format, where that is chosen; None where it is
        not. NaN and infinity pass."""
        if self._encoded is None or not self.is_planning or self.is_coalescing:
            return None
        if not is_dense(source) or not is_dense(target):
            return None
        assert self.launched.launching is not None
        collective = self.launched.launching.collective

        def ask(collective: str, num_bytes: int, wires: tuple[Wire, ...], element_bytes: int) -> Plan | None:
            if self.plans.is_unknown:
                self.compare(collective, source, num_bytes, op=op)
            self.plans.find_out(source.device)
            return self.plans.choices.plan(
                collective, num_bytes, is_float=True, wires=wires, element_bytes=element_bytes
            )

        movement = self._encoded(ask, collective, source, target, op, self.members.size)
        if movement is None:
            return None
        self.compare(collective, source, source.nbytes, op=op, plan=movement.plan)
        return self.launch(movement, movement.plan.traffic.logical_bytes, outputs, is_mean=op == AVG)

    def launch(self, movement: Movement, num_bytes: int, outputs: Any, *, is_mean: bool = False) -> Work:
        """Launch a plan for the call that is made now; count ``num_bytes``. ``is_mean``: a sum
        becomes a mean."""
        call, plans, plan = self.launched.launching, self.plans, movement.plan
        assert call is not None
        call.plan, call.run_bytes = plan, num_bytes
        if self.instruments.moving and not plans.connections.is_capturing:
            for hear in self.instruments.moving:
                hear(call, movement)
        ran = plans.run(movement, issued=call)
        started: StreamCall = ran.under_way
        call.logical_bytes += num_bytes
        call.inter_bytes, call.intra_bytes = ran.sent
        self._counters.planned[call.collective, plan.name].add(num_bytes, 0, *ran.sent)
        times = started.times
        if times is not None:
            self.launched.add(call, times)
            if call.is_awaited:
                self._await(call)
        if is_mean:
            # A tensor that was made in inference mode is written in it only.
            target = movement.target
            with torch._C._InferenceMode(True) if target.is_inference() else contextlib.nullcontext():
                started.then(partial(target.data.div_, self.members.size))
        return LaunchedWork(plans.connections, started, outputs)

    def _await(self, call: Call) -> None:
        """Have the host wait for the end of the latest call. Raises CollectiveTimeoutError,
        PeerError as calls do."""
        limit_s = self.plans.timeout_s
        self.launched.finish(limit_s)
        if not call.ended_ns:
            error = RuntimeError("Timed out waiting for the device")
            raise self.plans.explain(error, call.collective, call.sequence, limit_s, limit_s)

    def by_counts(self, output: torch.Tensor, input: torch.Tensor, counts: Counts) -> Work | None:
        """An all_to_all by its plan; None: the inner backend's own. The same on all ranks, for they
        know the same counts."""
        largest = max(*map(sum, counts), *map(sum, zip(*counts, strict=True)))
        plan = self.plans.plan_exchange(largest) if largest else None
        if plan is None:
            return None
        for name, x in (("input", input), ("output", output)):
            if not x.is_contiguous():
                raise TensorError(
                    f"{self.members.who}: all_to_all on {x.device} needs contiguous tensors, got strides {list(x.stride())} for "
                    f"the {name}: call contiguous() before"
                )
        me = self.members.rank
        splits = counts[me], [row[me] for row in counts]
        movement = Movement(plan, input.detach(), output.detach(), "split", splits=splits, counts=counts)
        return self.launch(movement, input.nbytes, [output])

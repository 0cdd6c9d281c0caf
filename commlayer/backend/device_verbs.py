"""The verbs of a group on a device's tensors: by plan where the group has one for the call, else the inner backend's own.

The host waits for nothing here. What a plan cannot do as it is (an operation that it does not know, a tensor that is not in one
piece, a coalesced block) goes to the inner backend, which on CUDA is NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.arithmetic import AVG, FLOATS, PLAN_NAMES
from commlayer.calls.counters import GroupCounters
from commlayer.engine.device_plans import DevicePlans
from commlayer.failures.waits import NO_TIMEOUT
from commlayer.profiles.errors import TensorError
from commlayer.scheduler.plan import Plan
from commlayer.transport.c10d import verb_of
from commlayer.transport.nccl import Nccl
from commlayer.transport.streams import StreamCall

__all__ = ["DeviceVerbs", "LaunchedWork", "is_dense"]

_STRIDED = torch.strided
_SUMMED = FLOATS | {torch.int8, torch.uint8, torch.int32, torch.int64}


class LaunchedWork(Work):
    """A planned call that has been launched. Waiting makes the current stream wait for it, not the host."""

    def __init__(self, plans: DevicePlans, call: StreamCall, outputs: Any) -> None:
        super().__init__()
        self._plans, self._call, self._outputs = plans, call, outputs
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once: what the current stream does from now on comes after the call."""
        del timeout
        self._call.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._call.is_done

    def is_success(self) -> bool:
        return self._call.is_done

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        """The outputs; their values are there for streams that have waited."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs. On CUDA it is set at once, and who waits for it makes a stream wait, as with NCCL's futures;
        on another device, of whose streams futures know nothing, who waits for it waits on the host."""
        if self._future is None:
            self._future = self._plans.future(self._call, self._outputs)
        return self._future


class DeviceVerbs:
    """The verbs by their first names; those that have no plan are ``inner``'s: its backend's, or where that has not the name,
    those of the process group around it."""

    def __init__(self, inner: Nccl, plans: DevicePlans, counters: GroupCounters) -> None:
        self._backend: Any = inner.backend
        self._inner: Any = inner.verbs or inner.backend
        self._plans, self._counters = plans, counters
        self._size = sum(map(len, plans.nodes))
        self._is_coalescing = False

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._backend, verb, None)
        return verb_of(self._inner, verb) if found is None else found

    def _start_coalescing(self) -> None:
        self._is_coalescing = True
        self._backend._start_coalescing()

    def _end_coalescing(self) -> Work:
        self._is_coalescing = False
        work: Work = self._backend._end_coalescing()
        return work

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        """Reduce a tensor over all ranks, in place."""
        x, op = tensors[0], opts.reduceOp.op
        if x.layout is not _STRIDED:
            sparse: Work = self._inner.allreduce(tensors, opts)  # by the verb that knows of them
            return sparse
        plan = self._plan("all_reduce", x, x, x.nbytes, op) if len(tensors) == 1 else None
        if plan is None:
            work: Work = self._backend.allreduce(tensors, opts)
            return work
        return self._launched(plan, x, x, tensors, op=op)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
        """Send rank ``opts.rootRank``'s tensor to all."""
        x = tensors[0]
        plan = self._plan("broadcast", x, x, x.nbytes) if len(tensors) == 1 else None
        if plan is None:
            work: Work = self._backend.broadcast(tensors, opts)
            return work
        return self._launched(plan, x, x, tensors, root=opts.rootRank)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Gather all ranks' inputs, one behind the other."""
        self._require_alike("all_gather", output, input)
        fits = output.nbytes == self._size * input.nbytes
        plan = self._plan("all_gather", output, input, output.nbytes) if fits else None
        if plan is None:
            work: Work = verb_of(self._inner, "all_gather_single")(output, input, opts)
            return work
        return self._launched(plan, input, output, [output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        """Reduce all ranks' inputs, and keep block k on rank k."""
        self._require_alike("reduce_scatter", output, input)
        fits, op = input.nbytes == self._size * output.nbytes, opts.reduceOp.op
        plan = self._plan("reduce_scatter", output, input, input.nbytes, op) if fits else None
        if plan is None:
            work: Work = verb_of(self._inner, "reduce_scatter_single")(output, input, opts)
            return work
        return self._launched(plan, input, output, [output], op=op)

    def _require_alike(self, collective: str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Raises TensorError, before anything is launched, for tensors of two devices or of two dtypes."""
        if output.device != input.device or output.dtype is not input.dtype:
            raise TensorError(
                f"{collective} expected an output of {input.dtype} on {input.device}, as the input is, got one of {output.dtype} "
                f"on {output.device}"
            )

    def _plan(
        self, collective: str, output: torch.Tensor, input: torch.Tensor, num_bytes: int, op: Any = None
    ) -> Plan | None:
        if self._is_coalescing or not is_dense(output) or not is_dense(input):
            return None
        if op is not None and not _is_summed(op, input.dtype):
            return None
        return self._plans.plan(collective, input, num_bytes)

    def _launched(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        outputs: Any,
        *,
        op: Any = None,
        root: int = 0,
    ) -> Work:
        name = "sum" if op is None else PLAN_NAMES[op]
        call, sent = self._plans.launch(plan, source, target, op=name, root=root)
        if op == AVG:
            self._divide(call, target)
        self._counters.planned[plan.traffic.collective, plan.name].add(plan.traffic.logical_bytes, 0, *sent)
        return LaunchedWork(self._plans, call, outputs)

    def _divide(self, call: StreamCall, target: torch.Tensor) -> None:
        """Make a sum a mean, behind the call."""
        # A tensor that was made in inference mode is written in it only.
        with torch._C._InferenceMode(True) if target.is_inference() else nullcontext():
            call.then(partial(target.data.div_, self._size))


def is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of ``x`` fill one piece of memory, in whatever order.

    NCCL takes such tensors in place, and so do plans: no rank goes flat alone because its tensor has another memory format.
    """
    if x.layout is not _STRIDED or x.is_neg() or x.is_conj():
        return False
    if x.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def _is_summed(op: Any, dtype: torch.dtype) -> bool:
    """Whether a plan reduces so: an average of floats only, and bitwise operations of integers only."""
    if op not in PLAN_NAMES or dtype not in _SUMMED:
        return False
    if op == AVG:  # of a sum that half precision may not hold; NCCL divides before it adds
        return dtype in FLOATS and dtype is not torch.float16
    return PLAN_NAMES[op] not in ("band", "bor", "bxor") or dtype not in FLOATS

"""The collectives that plans run on a device, as a table: the body of a row of verbs.py there.

A body is given an :class:`OnDevice` to launch the call with. It asks for a plan, and where there is
none calls the inner backend's own verb. What each collective does say the bodies for CPU tensors
(gathers.py, reductions.py, exchanges.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.exchanges import compare_exchange, in_bytes
from commlayer.backend.members import Tensors
from commlayer.backend.on_device import OnDevice
from commlayer.calls.movement import Movement

__all__ = ["LAUNCHES"]


def _all_gather(calls: OnDevice, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    calls.require_alike("all_gather", output, input)
    plan = calls.look(output, input, output.nbytes, fits=output.nbytes == calls.size * input.nbytes)
    if plan is None:
        return calls.own("all_gather_single", output, input, opts)
    return calls.launch(Movement(plan, input, output), plan.traffic.logical_bytes, [output])


def _broadcast(calls: OnDevice, tensors: Tensors, opts: Any) -> Work:
    x = tensors[0]
    plan = calls.look(x, x, x.nbytes, root=opts.rootRank, fits=len(tensors) == 1)
    if plan is None:
        return calls.own("broadcast", tensors, opts)
    return calls.launch(Movement(plan, x, x, root=opts.rootRank), plan.traffic.logical_bytes, tensors)


def _all_reduce(calls: OnDevice, tensors: Tensors, opts: Any) -> Work:
    x, op = tensors[0], opts.reduceOp.op
    if x.layout is not torch.strided:
        # The number of non-zero elements differs between ranks.
        calls.compare("all_reduce", None, 0, op=op)
        return calls.own_sparse(tensors, opts)
    is_one = len(tensors) == 1
    work = calls.sum_encoded(x, x, op, tensors) if is_one else None
    if work is not None:
        return work
    plan = calls.look(x, x, x.nbytes, op=op, fits=is_one)
    if plan is None:
        return calls.own("allreduce", tensors, opts)
    return calls.launch_sum(plan, x, x, op, tensors)


def _reduce_scatter(calls: OnDevice, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    calls.require_alike("reduce_scatter", output, input)
    fits, op = input.nbytes == calls.size * output.nbytes, opts.reduceOp.op
    work = calls.sum_encoded(input, output, op, [output]) if fits else None
    if work is not None:
        return work
    plan = calls.look(output, input, input.nbytes, op=op, fits=fits)
    if plan is None:
        return calls.own("reduce_scatter_single", output, input, opts)
    return calls.launch_sum(plan, input, output, op, [output])


def _all_to_all(
    calls: OnDevice,
    output: torch.Tensor,
    input: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    opts: Any,
) -> Work:
    """Whether a call has splits, like its dtype, is the same on all ranks.

    In two levels it needs the counts of all ranks, on the host, before it is launched: with splits
    ranks tell them once for each call, and the host waits for that, not for the device. Where all
    splits are even nothing is told.
    """
    if not calls.is_coalescing:  # communicators are not made inside a block
        calls.require_alike("all_to_all", output, input)
        if calls.order.inner.signatures is not None:
            compare = partial(compare_exchange, calls.order, output, input, received, sent, None)
            calls.meet("all_to_all", compare)
        calls.plans.find_out(input.device)
        if calls.is_planning and not calls.plans.never_plans_exchanges:
            if received or sent:
                going = in_bytes(input, sent) or _even(input, calls.size)
                counts = calls.told(going, in_bytes(output, received) or _even(output, calls.size))
            else:
                counts = (_even(input, calls.size),) * calls.size
            work = calls.by_counts(output, input, counts)
            if work is not None:
                return work
    return calls.own("all_to_all_single", output, input, received, sent, opts)


def _even(x: torch.Tensor, size: int) -> tuple[int, ...]:
    """The bytes of ``x`` for each of ``size`` ranks."""
    return (x.nbytes // size,) * size


LAUNCHES: Mapping[str, Callable[..., Work]] = MappingProxyType(
    {
        "all_gather_single": _all_gather,
        "broadcast": _broadcast,
        "allreduce": _all_reduce,
        "reduce_scatter_single": _reduce_scatter,
        "all_to_all_single": _all_to_all,
    }
)
"""The bodies, by the first name of the verb's row: ``launch(calls, *tensors, opts)``. A verb that is
not here goes to the inner backend's own on a device."""

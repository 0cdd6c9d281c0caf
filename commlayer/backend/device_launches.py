"""The collectives that plans run on a device, as a table: the body of a row of verbs.py there.

A body is given a :class:`Launcher` to launch the call with. It asks for a plan, and where there is
none calls the inner backend's own verb. What each collective does say the bodies for CPU tensors
(gathers.py, reductions.py, exchanges.py). Beside them: the bodies of other verbs, and of calls whose
plan is known already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch._C._distributed_c10d import AllToAllOptions, Work

from commlayer.backend.arithmetic import AVG, PLAN_NAMES
from commlayer.backend.exchanges import compare_exchange, in_bytes
from commlayer.backend.launcher import Launcher
from commlayer.backend.members import Tensors
from commlayer.calls.movement import Movement
from commlayer.engine.progress import HostWork
from commlayer.profiles.errors import DisagreementError, TensorError
from commlayer.scheduler.call_moves import Counts
from commlayer.scheduler.plan import Plan

__all__ = ["LAUNCHES", "launch_exchange", "launch_known", "launch_own"]


def _all_gather(calls: Launcher, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    _require_alike("all_gather", output, input)
    plan = calls.look(output, input, output.nbytes, fits=output.nbytes == calls.members.size * input.nbytes)
    if plan is None:
        return calls.inner.own("all_gather_single", output, input, opts)
    return calls.launch(Movement(plan, input, output), plan.traffic.logical_bytes, [output])


def _broadcast(calls: Launcher, tensors: Tensors, opts: Any) -> Work:
    x = tensors[0]
    plan = calls.look(x, x, x.nbytes, root=opts.rootRank, fits=len(tensors) == 1)
    if plan is None:
        return calls.inner.own("broadcast", tensors, opts)
    return calls.launch(Movement(plan, x, x, root=opts.rootRank), plan.traffic.logical_bytes, tensors)


def _all_reduce(calls: Launcher, tensors: Tensors, opts: Any) -> Work:
    x, op = tensors[0], opts.reduceOp.op
    if x.layout is not torch.strided:
        # The number of non-zero elements differs between ranks.
        calls.compare("all_reduce", None, 0, op=op)
        summed: Work = (calls.inner.verbs or calls.inner.backend).allreduce(tensors, opts)  # that knows of them
        return summed
    is_one = len(tensors) == 1
    work = calls.sum_encoded(x, x, op, tensors) if is_one else None
    if work is not None:
        return work
    plan = calls.look(x, x, x.nbytes, op=op, fits=is_one)
    if plan is None:
        return calls.inner.own("allreduce", tensors, opts)
    return _launch_sum(calls, plan, x, x, op, tensors)


def _reduce_scatter(calls: Launcher, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
    _require_alike("reduce_scatter", output, input)
    fits, op = input.nbytes == calls.members.size * output.nbytes, opts.reduceOp.op
    work = calls.sum_encoded(input, output, op, [output]) if fits else None
    if work is not None:
        return work
    plan = calls.look(output, input, input.nbytes, op=op, fits=fits)
    if plan is None:
        return calls.inner.own("reduce_scatter_single", output, input, opts)
    return _launch_sum(calls, plan, input, output, op, [output])


def _all_to_all(
    calls: Launcher,
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
        _require_alike("all_to_all", output, input)
        if calls.order.inner.signatures is not None:
            compare = partial(compare_exchange, calls.order, output, input, received, sent, None)
            calls.meet("all_to_all", compare)
        calls.plans.find_out(input.device)
        if calls.is_planning and not calls.plans.never_plans_exchanges:
            if received or sent:
                going = in_bytes(input, sent) or _even(input, calls.members.size)
                counts = _told(calls, going, in_bytes(output, received) or _even(output, calls.members.size))
            else:
                counts = (_even(input, calls.members.size),) * calls.members.size
            work = calls.by_counts(output, input, counts)
            if work is not None:
                return work
    return calls.inner.own("all_to_all_single", output, input, received, sent, opts)


def _even(x: torch.Tensor, size: int) -> tuple[int, ...]:
    """The bytes of ``x`` for each of ``size`` ranks."""
    return (x.nbytes // size,) * size


def _require_alike(collective: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Raises TensorError, before anything is launched, for tensors of two devices or of two
    dtypes."""
    if output.device != input.device or output.dtype is not input.dtype:
        raise TensorError(
            f"{collective} expected an output of {input.dtype} on {input.device}, as the input is, got one of {output.dtype} "
            f"on {output.device}"
        )


def _launch_sum(calls: Launcher, plan: Plan, source: torch.Tensor, target: torch.Tensor, op: Any, outputs: Any) -> Work:
    movement = Movement(plan, source, target, op=PLAN_NAMES[op])
    return calls.launch(movement, plan.traffic.logical_bytes, outputs, is_mean=op == AVG)


def _told(calls: Launcher, sent: Sequence[int], received: Sequence[int]) -> Counts:
    """Everybody's counts, in bytes. Raises DisagreementError, on all ranks, where two of them
    do not fit together."""
    size = calls.members.size
    everyones = calls.tell([*sent, *received])
    counts = tuple(tuple(each[:size]) for each in everyones)
    for sender, row in enumerate(counts):
        for receiver, count in enumerate(row):
            expected = everyones[receiver][size + sender]
            if count != expected:
                ranks = calls.members.global_ranks
                raise DisagreementError(
                    f"{calls.members.who}: all_to_all: rank {ranks[sender]} sends {count} bytes to rank {ranks[receiver]}, "
                    f"which expects {expected}; nothing was sent: make the splits of both fit"
                )
    return counts


def launch_own(calls: Launcher, name: str, collective: str, *args: Any) -> Work:
    """Compare a call of the verb ``name``, and give it to the inner backend."""
    opts = args[-1]
    op = opts.reduceOp.op if hasattr(opts, "reduceOp") else None
    root = opts.rootRank if hasattr(opts, "rootRank") else None
    calls.compare(collective, None, 0, op=op, root=root)
    return calls.inner.own(name, *args)


def launch_known(calls: Launcher, movement: Movement) -> Work:
    """Launch a call of a plan that is known already: see :meth:`OnDevice.start`."""
    plan, source, outputs = movement.plan, movement.source, [movement.target]
    collective = plan.traffic.collective
    is_even = collective in ("all_reduce", "reduce_scatter")
    calls.compare(collective, source if is_even else None, source.nbytes if is_even else 0, plan=plan)
    if calls.instead is not None:  # the plan was looked up when the call was made
        calls.instead(movement)
        return HostWork(outputs)
    return calls.launch(
        movement, plan.traffic.logical_bytes if collective != "all_to_all_v" else source.nbytes, outputs
    )


def launch_exchange(
    calls: Launcher,
    source: torch.Tensor,
    target: torch.Tensor,
    rows: tuple[Sequence[int], Sequence[int]],
    counts: Counts,
) -> Work:
    """Launch an all_to_all whose counts are known: see :meth:`OnDevice.start_exchange`."""
    calls.compare("all_to_all", None, 0)
    calls.plans.find_out(source.device)
    may_plan = calls.is_planning and not calls.plans.never_plans_exchanges
    work = calls.by_counts(target, source, counts) if may_plan else None
    if work is not None:
        return work
    return calls.inner.own("all_to_all_single", target, source, list(rows[1]), list(rows[0]), AllToAllOptions())


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

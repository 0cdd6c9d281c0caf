"""Collectives that reduce: all_reduce, reduce, reduce_scatter, in all of c10d's forms.

What is beyond Gloo: the dtypes and operations of :mod:`commlayer.backend.arithmetic`, outputs
checked by their number of elements, lists of unequal tensors in reduce_scatter, tensors that are
not contiguous.

These are bodies of rows of the table (verbs.py): they run in the group's order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from commlayer.backend.arithmetic import AVG, GLOO_REDUCES, PLAN_NAMES, carrier, reduce_rows
from commlayer.backend.members import Tensors
from commlayer.backend.options import like, with_op
from commlayer.backend.running import Calls
from commlayer.backend.tensors import join, land, plain_row, require_room, spread
from commlayer.calls.movement import Movement
from commlayer.failures.waits import bounded_reduce_scatter
from commlayer.profiles.errors import TensorError

__all__ = [
    "all_reduce",
    "all_reduce_joined",
    "is_native",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_each",
    "reduce_scatter_list",
]

_STRIDED = torch.strided


def is_native(tensor: torch.Tensor, opts: Any) -> bool:
    """Whether Gloo reduces ``tensor``, of floats, by itself. Asking for a sum first, which it does,
    takes a third of the time."""
    op = opts.reduceOp
    return op == ReduceOp.SUM or tensor.dtype in GLOO_REDUCES[op.op]


def all_reduce(calls: Calls, tensors: Tensors, opts: Any) -> None:
    """Every element becomes its reduction over all ranks, the same bits on every rank. In place."""
    tensor, op = tensors[0], opts.reduceOp.op
    if len(tensors) > 1 or tensor.layout is not _STRIDED:
        # Sparse, or a tensor for each of a rank's devices: Gloo's own.
        num_bytes = sum(x._nnz() * x.element_size() if x.is_sparse else x.nbytes for x in tensors)
        if calls.needs_look:  # the number of non-zero elements differs between ranks
            calls.look(None, 0, op=op, timeout=opts.timeout, plannable=False)
        calls.flat(num_bytes, calls.inner.gloo.allreduce, tensors, opts)
        return
    if tensor.dtype not in GLOO_REDUCES[op] or not tensor.is_contiguous() or tensor.is_neg():
        with torch.inference_mode():
            how = carrier(opts.reduceOp, tensor.dtype, calls.members.size)
            require_room(tensor)
            moved = how.load(plain_row(tensor))
            all_reduce(calls, [moved.view(-1)], with_op(AllreduceOptions, opts, how.op))
            land(tensor, how.store(moved).view(-1))
        return
    if calls.encoded_sums is not None and calls.encoded_sums("all_reduce", tensor, tensor, op, opts):
        return
    num_bytes = tensor.nbytes
    plan = calls.look(tensor, num_bytes, op=op, timeout=opts.timeout) if calls.needs_look else None
    if plan is None:
        calls.flat(num_bytes, calls.inner.gloo.allreduce, tensors, opts)
    else:
        calls.run(Movement(plan, tensor, tensor, op=PLAN_NAMES[op]), num_bytes, opts.timeout)
        if op == AVG:
            _divide(tensor, calls.members.size)


def _is_reduced_as_it_is(x: torch.Tensor, op: ReduceOp.RedOpType) -> bool:
    return x.dtype in GLOO_REDUCES[op] and x.is_contiguous() and not x.is_neg()


def all_reduce_joined(calls: Calls, tensors: Tensors, opts: Any) -> None:
    """:meth:`allreduce` of all ``tensors`` (one dtype), as one call."""
    if any(x.dtype != tensors[0].dtype for x in tensors):
        raise TensorError(
            f"{calls.members.who}: all_reduce_coalesced needs one dtype, got {sorted({str(x.dtype) for x in tensors})}"
        )
    if any(x.layout is not _STRIDED for x in tensors):
        options = with_op(AllreduceCoalescedOptions, opts, opts.reduceOp)
        calls.flat(0, calls.inner.gloo.allreduce_coalesced, tensors, options)
        return
    with torch.inference_mode():
        if len(tensors) == 1:
            all_reduce(calls, tensors, _plain(opts))
            return
        joined = join(tensors)
        all_reduce(calls, [joined], _plain(opts))
        spread(joined, tensors)


def reduce(calls: Calls, tensors: Tensors, opts: Any) -> None:
    """Reduce as :meth:`allreduce`, but only rank ``opts.rootRank`` gets the result; the others'
    tensors are undefined after it."""
    tensor, op = tensors[0], opts.reduceOp.op
    if len(tensors) != 1:
        raise TensorError(f"{calls.members.who}: reduce takes one tensor, got {len(tensors)}")
    calls.members.require_root("reduce to", opts.rootRank)
    if not _is_reduced_as_it_is(tensor, op):
        with torch.inference_mode():
            how = carrier(opts.reduceOp, tensor.dtype, calls.members.size)
            moved = how.load(plain_row(tensor))
            reduce(calls, [moved.view(-1)], with_op(ReduceOptions, opts, how.op))
            if opts.rootRank == calls.members.rank:
                land(tensor, how.store(moved).view(-1))
        return
    if calls.needs_look:
        calls.look(tensor, tensor.nbytes, op=op, root=opts.rootRank, timeout=opts.timeout, plannable=False)
    calls.flat(tensor.nbytes, calls.inner.gloo.reduce, tensors, opts)


def reduce_scatter(calls: Calls, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
    """``input`` holds n times the elements of ``output``, in any shape; rank k gets the reduction
    of block k."""
    size = calls.members.size
    if input.numel() != size * output.numel() or output.dtype != input.dtype:
        raise TensorError(
            f"{calls.members.who}: reduce_scatter of {input.numel()} elements of {input.dtype} over {size} ranks needs "
            f"{size} times the elements of the output, which has {output.numel()} of {output.dtype}"
        )
    op = opts.reduceOp.op
    if not (_is_reduced_as_it_is(input, op) and output.is_contiguous() and not output.is_neg()):
        with torch.inference_mode():
            how = carrier(opts.reduceOp, input.dtype, calls.members.size)
            moved = how.load(plain_row(input))
            part = torch.empty_like(moved.view(calls.members.size, -1)[0]) if moved.numel() else moved
            reduce_scatter(calls, part.view(-1), moved.view(-1), with_op(ReduceScatterOptions, opts, how.op))
            shape = (-1, *moved.shape[1:])  # complex numbers are pairs
            land(output, how.store(part.view(shape) if part.numel() else moved).view(-1))
        return
    num_bytes, original = input.nbytes, input
    output, input = output.data.view(-1), input.detach().view(-1)  # the verb tells autograd, not Gloo
    if calls.encoded_sums is not None and calls.encoded_sums("reduce_scatter", input, output, op, opts):
        return
    plan = calls.look(original, num_bytes, op=op, timeout=opts.timeout) if calls.needs_look else None
    if plan is None:
        calls.flat(num_bytes, bounded_reduce_scatter, calls.inner.gloo, output, input, opts)
    else:
        calls.run(Movement(plan, input, output, op=PLAN_NAMES[op]), num_bytes, opts.timeout)
        if op == AVG:
            _divide(output, size)


def reduce_scatter_each(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
    """:meth:`reduce_scatter_single` of each pair, as one call."""
    calls.members.require_as_many("reduce_scatter", outputs, inputs)
    for output, part in zip(outputs, inputs, strict=True):
        reduce_scatter(calls, output, part, opts)


def reduce_scatter_list(calls: Calls, output: torch.Tensor, inputs: Tensors, opts: Any) -> None:
    """``inputs[0]`` is a list of n tensors; rank k gets the reduction of the k-th. They may differ
    in size."""
    sizes = [x.numel() for x in inputs]
    if sizes[calls.members.rank] != output.numel() or any(x.dtype != output.dtype for x in inputs):
        raise TensorError(
            f"{calls.members.who}: reduce_scatter into {output.numel()} elements of {output.dtype} needs as many in input "
            f"{calls.members.rank}, and the same dtype in all; got inputs of {sizes} elements, "
            f"{sorted({str(x.dtype) for x in inputs})}"
        )
    with torch.inference_mode():
        if len(set(sizes)) == 1:
            reduce_scatter(calls, output, join(inputs), opts)
        else:
            _reduce_scatter_uneven(calls, output, inputs, sizes, opts)


def _reduce_scatter_uneven(calls: Calls, output: torch.Tensor, inputs: Tensors, sizes: list[int], opts: Any) -> None:
    """Every block straight to the rank that wants it, which reduces them in rank order."""
    op = opts.reduceOp.op
    num_bytes = sum(sizes) * output.element_size()
    if calls.needs_look:
        calls.look(output, num_bytes, op=op, sizes=tuple(sizes), timeout=opts.timeout, plannable=False)
    how = carrier(opts.reduceOp, output.dtype, calls.members.size)
    moved = how.load(join(inputs))
    width = moved[:1].nbytes  # of one element as it travels
    arrived = torch.empty((calls.members.size, output.numel(), *moved.shape[1:]), dtype=moved.dtype)
    source, target = moved.view(-1).view(torch.uint8), arrived.view(-1).view(torch.uint8)
    sent, received = [size * width for size in sizes], [output.numel() * width] * calls.members.size
    options = like(AllToAllOptions, opts)
    calls.flat(num_bytes, calls.inner.gloo.alltoall_base, target, source, received, sent, options)
    land(output, how.store(reduce_rows(arrived, how.op)).view(-1))


def _divide(total: torch.Tensor, size: int) -> None:
    """Make a mean of a sum over ``size`` ranks, in place. Autograd is not told: see
    :attr:`Verb.changes`."""
    with torch._C._InferenceMode(True):
        total.data.div_(size)


def _plain(opts: Any) -> AllreduceOptions:
    """AllreduceOptions of the same content: Gloo's two calls take different ones."""
    return opts if type(opts) is AllreduceOptions else with_op(AllreduceOptions, opts, opts.reduceOp)

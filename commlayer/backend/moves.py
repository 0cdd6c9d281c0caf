"""Collectives that move the same bytes to or from all: all_gather, broadcast, gather, scatter, in all of c10d's forms.

What is beyond Gloo: outputs are checked by their number of elements, as NCCL does, not by shape; all_gather takes lists of
unequal tensors; all dtypes travel; nothing has to be contiguous.

Which inner call is made depends only on what all ranks know alike (numbers of elements, dtype). Layout is a rank's own
affair, so it is put right by local copies.

These are bodies of rows of the table (verbs.py): they run in the group's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.backend.calls import Calls
from commlayer.backend.members import Members, Tensors
from commlayer.backend.tensors import MOVABLE, flat, is_plain, land, landing, require_room, spread
from commlayer.engine.plain import as_bytes
from commlayer.profiles.errors import TensorError

__all__ = [
    "all_gather",
    "all_gather_each",
    "all_gather_list",
    "all_gather_rows",
    "broadcast",
    "check_lists_of_rows",
    "gather",
    "scatter",
]


def all_gather(calls: Calls, output: torch.Tensor, input: torch.Tensor, opts: Any) -> None:
    """``output`` holds n times the elements of ``input``, in any shape; block k comes from rank k."""
    size = calls.members.size
    if output.numel() != size * input.numel() or output.dtype != input.dtype:
        raise TensorError(
            f"{calls.members.who}: all_gather of {input.numel()} elements of {input.dtype} over {size} ranks needs an output of "
            f"{size * input.numel()}, got {output.numel()} of {output.dtype}"
        )
    num_bytes = output.nbytes
    plan = calls.look("all_gather", input, num_bytes, timeout=opts.timeout) if calls.needs_look else None
    if plan is None and is_plain(output) and is_plain(input):
        if output.dim() != 1 or input.dim() != 1:
            output, input = output.detach().view(-1), input.detach().view(-1)
        calls.flat("all_gather", num_bytes, calls.inner.gloo._allgather_base, output, input, opts)
        return
    with torch.inference_mode():
        source, target = flat(input), landing(output)
        if plan is not None:
            calls.run_plan(plan, "all_gather", num_bytes, source, target, opts)
        else:
            into, part = _carried(target), _carried(source)
            calls.flat("all_gather", num_bytes, calls.inner.gloo._allgather_base, into, part, opts)
        land(output, target)


def all_gather_each(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
    """:meth:`all_gather_single` of each pair, as one call."""
    if len(outputs) != len(inputs):
        raise TensorError(
            f"{calls.members.who}: all_gather of {len(inputs)} tensors into {len(outputs)}: expected as many"
        )
    for output, part in zip(outputs, inputs, strict=True):
        all_gather(calls, output, part, opts)


def all_gather_list(calls: Calls, outputs: Tensors, input: torch.Tensor, opts: Any) -> None:
    """``outputs[0]`` is a list of n tensors, whose k-th has as many elements as the input of rank k."""
    sizes, mine = [output.numel() for output in outputs], calls.members.rank
    if sizes[mine] != input.numel() or any(output.dtype != input.dtype for output in outputs):
        raise TensorError(
            f"{calls.members.who}: all_gather of {input.numel()} elements of {input.dtype} needs as many in output {mine}, "
            f"and the same dtype in all; got outputs of {sizes} elements, {sorted({str(o.dtype) for o in outputs})}"
        )
    num_bytes = sum(sizes) * input.element_size()
    if len(set(sizes)) > 1:
        all_gather_uneven(calls, outputs, input, sizes, num_bytes, opts)
        return
    plan = calls.look("all_gather", input, num_bytes, timeout=opts.timeout) if calls.needs_look else None
    is_fitting = plan is None and is_plain(input) and all(o.shape == input.shape and is_plain(o) for o in outputs)
    if is_fitting:
        calls.flat("all_gather", num_bytes, calls.inner.gloo.allgather, [outputs], [input], opts)
        return
    with torch.inference_mode():
        source = flat(input)
        gathered = torch.empty(sum(sizes), dtype=input.dtype)
        if plan is not None:
            calls.run_plan(plan, "all_gather", num_bytes, source, gathered, opts)
        else:
            into, part = _carried(gathered), _carried(source)
            calls.flat("all_gather", num_bytes, calls.inner.gloo._allgather_base, into, part, opts)
        spread(gathered, outputs)


def all_gather_uneven(
    calls: Calls, outputs: Tensors, input: torch.Tensor, sizes: list[int], num_bytes: int, opts: Any
) -> None:
    """Padded to the largest: one call. All ranks know all sizes, from their outputs."""
    if calls.needs_look:
        calls.look("all_gather", input, num_bytes, sizes=tuple(sizes), timeout=opts.timeout, plannable=False)
    with torch.inference_mode():
        widest = max(sizes) * input.element_size()
        padded = torch.empty(widest, dtype=torch.uint8)
        source = as_bytes(input)
        padded[: source.numel()] = source
        gathered = torch.empty(calls.members.size * widest, dtype=torch.uint8)
        calls.flat("all_gather", num_bytes, calls.inner.gloo._allgather_base, gathered, padded, opts)
        for row, output in zip(gathered.view(calls.members.size, widest), outputs, strict=True):
            spread(row[: output.nbytes].view(output.dtype), [output])


def all_gather_rows(calls: Calls, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
    """``outputs[k][i]`` becomes input i of rank k."""
    for i, part in enumerate(inputs):
        all_gather_list(calls, [row[i] for row in outputs], part, opts)


def broadcast(calls: Calls, tensors: Tensors, opts: Any) -> None:
    """The tensors of rank ``opts.rootRank`` become those of all."""
    for tensor in tensors:
        broadcast_one(calls, tensor, opts)


def broadcast_one(calls: Calls, tensor: torch.Tensor, opts: Any) -> None:
    plan, num_bytes = None, tensor.nbytes
    calls.members.require_root("broadcast from", opts.rootRank)
    if calls.needs_look:
        plan = calls.look("broadcast", tensor, num_bytes, root=opts.rootRank, timeout=opts.timeout)
    if plan is None and is_plain(tensor):
        calls.flat("broadcast", num_bytes, calls.inner.gloo.broadcast, [tensor], opts)
        return
    require_room(tensor)
    with torch.inference_mode():
        moved = flat(tensor)
        if plan is not None:
            calls.run_plan(plan, "broadcast", num_bytes, moved, moved, opts, root=opts.rootRank)
        else:
            calls.flat("broadcast", num_bytes, calls.inner.gloo.broadcast, [_carried(moved)], opts)
        land(tensor, moved)


def gather(calls: Calls, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
    """The inputs of all ranks, on rank ``opts.rootRank``; elsewhere ``outputs`` is empty."""
    if len(inputs) != 1:
        raise TensorError(f"{calls.members.who}: gather takes one input, got {len(inputs)}")
    calls.members.require_root("gather to", opts.rootRank)
    source, is_root = inputs[0], opts.rootRank == calls.members.rank
    if is_root:
        calls.members.require_one_list("gather", outputs, inputs)
        calls.members.require_same_size("gather", source, outputs[0])
    if calls.needs_look:
        calls.look("gather", source, source.nbytes, root=opts.rootRank, timeout=opts.timeout, plannable=False)
    num_bytes = source.nbytes * calls.members.size
    with torch.inference_mode():
        sink = [landing(x) for x in outputs[0]] if is_root else []
        into = [[_carried(x) for x in sink]] if is_root else []
        calls.flat("gather", num_bytes, calls.inner.gloo.gather, into, [_carried(flat(source))], opts)
        for output, arrived in zip(outputs[0] if is_root else (), sink, strict=True):
            land(output, arrived)


def scatter(calls: Calls, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> None:
    """Input k of rank ``opts.rootRank`` goes to rank k; elsewhere ``inputs`` is empty."""
    if len(outputs) != 1:
        raise TensorError(f"{calls.members.who}: scatter takes one output, got {len(outputs)}")
    calls.members.require_root("scatter from", opts.rootRank)
    output, is_root = outputs[0], opts.rootRank == calls.members.rank
    if is_root:
        calls.members.require_one_list("scatter", inputs, outputs)
        calls.members.require_same_size("scatter", output, inputs[0])
    if calls.needs_look:
        calls.look("scatter", output, output.nbytes, root=opts.rootRank, timeout=opts.timeout, plannable=False)
    with torch.inference_mode():
        sink = landing(output)
        parts = [[_carried(flat(x)) for x in inputs[0]]] if is_root else []
        calls.flat(
            "scatter", output.nbytes * calls.members.size, calls.inner.gloo.scatter, [_carried(sink)], parts, opts
        )
        land(output, sink)


def check_lists_of_rows(members: Members, outputs: Sequence[Tensors], inputs: Tensors) -> None:
    """Raises TensorError unless there are as many outputs for each rank as inputs."""
    if len(outputs) != members.size or any(len(row) != len(inputs) for row in outputs):
        raise TensorError(
            f"{members.who}: all_gather_coalesced of {len(inputs)} tensors needs {members.size} output lists of as many, got "
            f"lists of {[len(row) for row in outputs]}"
        )


def _carried(x: torch.Tensor) -> torch.Tensor:
    """A flat tensor in a dtype that Gloo moves."""
    return x if x.dtype in MOVABLE else x.view(torch.uint8)

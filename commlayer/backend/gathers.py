"""Collectives that move the same bytes to or from all: all_gather, broadcast, gather, scatter, in
all of c10d's forms.

What is beyond Gloo: outputs are checked by their number of elements, as NCCL does, not by shape;
all_gather takes lists of unequal tensors; all dtypes travel; nothing has to be contiguous.

Which inner call is made depends only on what all ranks know alike (numbers of elements, dtype).
Layout is a rank's own affair, so it is put right by local copies.

These are bodies of rows of the table (verbs.py): they run in the group's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.backend.members import Members, Tensors
from commlayer.backend.running import Calls
from commlayer.backend.tensors import MOVABLE, is_plain, land, landing, plain_row, require_room, spread
from commlayer.calls.movement import Movement
from commlayer.profiles.errors import TensorError
from commlayer.scheduler.plan import Plan
from commlayer.transport.call_memory import as_bytes

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
    """``output`` holds n times the elements of ``input``, in any shape; block k comes from rank
    k."""
    size = calls.members.size
    if output.numel() != size * input.numel() or output.dtype != input.dtype:
        raise TensorError(
            f"{calls.members.who}: all_gather of {input.numel()} elements of {input.dtype} over {size} ranks needs an output of "
            f"{size * input.numel()}, got {output.numel()} of {output.dtype}"
        )
    num_bytes = output.nbytes
    plan = calls.look(input, num_bytes, timeout=opts.timeout) if calls.needs_look else None
    if plan is not None and is_plain(output):
        calls.run(Movement(plan, input, output), num_bytes, opts.timeout)
        return
    if plan is None and is_plain(output) and is_plain(input):
        # The verb tells autograd of the change, not Gloo.
        output, input = output.data.view(-1), input.detach().view(-1)
        calls.flat(num_bytes, calls.inner.gloo._allgather_base, output, input, opts)
        return
    with torch.inference_mode():
        target = landing(output)
        _gather_row(calls, plan, num_bytes, plain_row(input), target, opts)
        land(output, target)


def _gather_row(
    calls: Calls, plan: Plan | None, num_bytes: int, source: torch.Tensor, target: torch.Tensor, opts: Any
) -> None:
    """All_gather of flat tensors of any dtype, by ``plan`` where there is one."""
    if plan is not None:
        calls.run(Movement(plan, source, target), num_bytes, opts.timeout)
    else:
        call = calls.inner.gloo._allgather_base
        calls.flat(num_bytes, call, _carried(target), _carried(source), opts)


def all_gather_each(calls: Calls, outputs: Tensors, inputs: Tensors, opts: Any) -> None:
    """:meth:`all_gather_single` of each pair, as one call."""
    calls.members.require_as_many("all_gather", outputs, inputs)
    for output, part in zip(outputs, inputs, strict=True):
        all_gather(calls, output, part, opts)


def all_gather_list(calls: Calls, outputs: Tensors, input: torch.Tensor, opts: Any) -> None:
    """``outputs[0]`` is a list of n tensors, whose k-th has as many elements as the input of rank
    k."""
    sizes, own = [output.numel() for output in outputs], calls.members.rank
    if sizes[own] != input.numel() or any(output.dtype != input.dtype for output in outputs):
        raise TensorError(
            f"{calls.members.who}: all_gather of {input.numel()} elements of {input.dtype} needs as many in output {own}, "
            f"and the same dtype in all; got outputs of {sizes} elements, {sorted({str(o.dtype) for o in outputs})}"
        )
    num_bytes = sum(sizes) * input.element_size()
    if len(set(sizes)) > 1:
        _all_gather_uneven(calls, outputs, input, sizes, num_bytes, opts)
        return
    plan = calls.look(input, num_bytes, timeout=opts.timeout) if calls.needs_look else None
    if plan is None and is_plain(input) and all(o.shape == input.shape and is_plain(o) for o in outputs):
        gloo = calls.inner.gloo
        calls.flat(num_bytes, gloo.allgather, [[each.data for each in outputs]], [input], opts)
        return
    with torch.inference_mode():
        gathered = torch.empty(sum(sizes), dtype=input.dtype)
        _gather_row(calls, plan, num_bytes, plain_row(input), gathered, opts)
        spread(gathered, outputs)


def _all_gather_uneven(
    calls: Calls, outputs: Tensors, input: torch.Tensor, sizes: list[int], num_bytes: int, opts: Any
) -> None:
    """Padded to the largest: one call. All ranks know all sizes, from their outputs."""
    if calls.needs_look:
        calls.look(input, num_bytes, sizes=tuple(sizes), timeout=opts.timeout, plannable=False)
    with torch.inference_mode():
        widest = max(sizes) * input.element_size()
        padded = torch.empty(widest, dtype=torch.uint8)
        source = as_bytes(input)
        padded[: source.numel()] = source
        gathered = torch.empty(calls.members.size * widest, dtype=torch.uint8)
        calls.flat(num_bytes, calls.inner.gloo._allgather_base, gathered, padded, opts)
        for row, output in zip(gathered.view(calls.members.size, widest), outputs, strict=True):
            spread(row[: output.nbytes].view(output.dtype), [output])


def all_gather_rows(calls: Calls, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
    """``outputs[k][i]`` becomes input i of rank k."""
    for i, part in enumerate(inputs):
        all_gather_list(calls, [row[i] for row in outputs], part, opts)


def broadcast(calls: Calls, tensors: Tensors, opts: Any) -> None:
    """The tensors of rank ``opts.rootRank`` become those of all."""
    for tensor in tensors:
        plan, num_bytes = None, tensor.nbytes
        calls.members.require_root("broadcast from", opts.rootRank)
        if calls.needs_look:
            plan = calls.look(tensor, num_bytes, root=opts.rootRank, timeout=opts.timeout)
        if plan is None and is_plain(tensor):
            calls.flat(num_bytes, calls.inner.gloo.broadcast, [tensor], opts)
            continue
        require_room(tensor)
        with torch.inference_mode():
            moved = plain_row(tensor)
            if plan is not None:
                calls.run(Movement(plan, moved, moved, root=opts.rootRank), num_bytes, opts.timeout)
            else:
                calls.flat(num_bytes, calls.inner.gloo.broadcast, [_carried(moved)], opts)
            land(tensor, moved)


def gather(calls: Calls, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> None:
    """The inputs of all ranks, on rank ``opts.rootRank``; elsewhere ``outputs`` is empty."""
    source, wanted = _rooted(calls, "gather", "input", "to", inputs, outputs, opts)
    with torch.inference_mode():
        sink = [landing(x) for x in wanted]
        into = [[_carried(x) for x in sink]] if sink else []
        num_bytes = source.nbytes * calls.members.size
        calls.flat(num_bytes, calls.inner.gloo.gather, into, [_carried(plain_row(source))], opts)
        for output, arrived in zip(wanted, sink, strict=True):
            land(output, arrived)


def scatter(calls: Calls, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> None:
    """Input k of rank ``opts.rootRank`` goes to rank k; elsewhere ``inputs`` is empty."""
    output, blocks = _rooted(calls, "scatter", "output", "from", outputs, inputs, opts)
    with torch.inference_mode():
        sink = landing(output)
        parts = [[_carried(plain_row(x)) for x in blocks]] if blocks else []
        num_bytes = output.nbytes * calls.members.size
        calls.flat(num_bytes, calls.inner.gloo.scatter, [_carried(sink)], parts, opts)
        land(output, sink)


def _rooted(
    calls: Calls, verb: str, side: str, way: str, singles: Tensors, lists: Sequence[Tensors], opts: Any
) -> tuple[torch.Tensor, Tensors]:
    """Check and compare a call with a root: this rank's own tensor, and those of all ranks, which
    the root alone has."""
    members, root = calls.members, opts.rootRank
    if len(singles) != 1:
        raise TensorError(f"{members.who}: {verb} takes one {side}, got {len(singles)}")
    members.require_root(f"{verb} {way}", root)
    own, is_root = singles[0], root == members.rank
    if is_root:
        members.require_one_list(verb, lists, singles)
        members.require_same_size(verb, own, lists[0])
    if calls.needs_look:
        calls.look(own, own.nbytes, root=root, timeout=opts.timeout, plannable=False)
    return own, lists[0] if is_root else []


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

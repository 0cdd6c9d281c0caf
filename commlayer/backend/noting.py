"""Arguments of a verb as the ring of calls keeps them: dtype, bytes each way, torch's options, splits; no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.calls.movement import Movement

__all__ = ["Noted", "noted"]

Noted = tuple[Any, int, int, Any, bool, Any]
"""The arguments of :meth:`commlayer.calls.ring.Track.note` after the kind."""

_STRIDED = torch.strided


def noted(args: Sequence[Any], opts: Any) -> Noted:
    """Describe a queued call: ``args`` are those of a verb's body (verb_methods.py), of a barrier, or of a plan that is known.

    Arguments are not checked yet: of what makes no sense nothing is noted.
    """
    try:
        return _noted(args, opts)
    except Exception:  # noqa: BLE001  the verb says what is wrong with them
        return None, -1, -1, opts, opts.asyncOp, None


def _noted(args: Sequence[Any], opts: Any) -> Noted:
    if len(args) == 1:
        if isinstance(args[0], Movement):  # in a wire format, or over rails: ranks may have sizes of their own
            return args[0].source.dtype, -1, -1, opts, opts.asyncOp, None
        return None, 0, 0, opts, opts.asyncOp, None
    moved = args[1:-1]
    if len(moved) == 1:
        tensors = moved[0]
        if len(tensors) == 1 and tensors[0].layout is _STRIDED:  # nearly always
            num_bytes = tensors[0].nbytes
            return tensors[0].dtype, num_bytes, num_bytes, opts, opts.asyncOp, None
        num_bytes = -1 if any(x.layout is not _STRIDED for x in tensors) else _num_bytes(tensors)
        return tensors[0].dtype, num_bytes, num_bytes, opts, opts.asyncOp, None
    output, input = moved[0], moved[1]
    if isinstance(output, torch.Tensor) and isinstance(input, torch.Tensor):
        return input.dtype, _num_bytes(input), _num_bytes(output), opts, opts.asyncOp, moved[2:4] or None
    return _noted_lists(output, input, opts)


def _noted_lists(output: Any, input: Any, opts: Any) -> Noted:
    """One list and one tensor, or as many tensors each way."""
    dtype = _first(input).dtype if _has_any(input) else _first(output).dtype
    if hasattr(opts, "rootRank"):  # only the root has the list
        return dtype, -1, -1, opts, opts.asyncOp, None
    sent, received = _num_bytes(input), _num_bytes(output)
    if isinstance(input, torch.Tensor):  # all_gather: a tensor comes from each rank
        return dtype, sent, received, opts, opts.asyncOp, ([_num_bytes(x) for x in output], None)
    if isinstance(output, torch.Tensor) or not _is_row(output) or not _is_row(input):
        return dtype, sent, received, opts, opts.asyncOp, None
    return dtype, sent, received, opts, opts.asyncOp, ([_num_bytes(x) for x in output], [_num_bytes(x) for x in input])


def _num_bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()  # nbytes is not defined for sparse ones
    return sum(map(_num_bytes, tensors))


def _is_row(tensors: Any) -> bool:
    return all(isinstance(x, torch.Tensor) for x in tensors)


def _has_any(tensors: Any) -> bool:
    return isinstance(tensors, torch.Tensor) or any(map(_has_any, tensors))


def _first(tensors: Any) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    return next(_first(each) for each in tensors if _has_any(each))

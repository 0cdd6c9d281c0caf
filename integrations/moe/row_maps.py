"""Row maps: which row of a buffer each choice of a token is, worked out once and used by every gather, forward and backward.

Shapes: T tokens, K choices of each, E experts, H hidden, N rows (one for each kept choice, or, padded, E·capacity).
Both directions are gathers: each row of the result is written once (zeros first where choices are dropped, on a CPU). Rejected:
index_add into zeros, which reads and writes the result twice more, and on a GPU adds in an order that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from commlayer.transfers import differentiable_once

__all__ = [
    "Permutation",
    "RowMap",
    "combine_rows",
    "gather_rows",
    "make_row_map",
    "permute_rows",
    "regroup",
    "spread_rows",
    "weights_of_rows",
]

_BLOCK_BYTES = 1 << 20
"""The bytes that combine_rows and spread_rows take at a time: they stay in a core's cache until they are summed."""


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """The row map of T tokens: where their choices lie in N rows, which are sorted by expert, then by token.

    ``token_of_row`` [N] and ``choice_of_row`` [N] (flat: t·K + k); ``row_of_choice`` [T, K]. Where a choice has no row
    (dropped) ``is_kept`` [T, K] is False and its row any; where a row has no choice (padding) ``is_filled`` [N] is False and
    its token any. Both are None where all are True.
    """

    token_of_row: torch.Tensor
    choice_of_row: torch.Tensor
    row_of_choice: torch.Tensor
    is_kept: torch.Tensor | None
    is_filled: torch.Tensor | None


def make_row_map(
    indices: torch.Tensor, num_experts: int, capacity: int | None = None, num_dropped: int | None = None
) -> RowMap:
    """The map of ``indices`` [T, K]: the expert of each choice, −1 for none.

    ``capacity``: each expert gets exactly so many rows; no expert may have more choices (the router has dropped them).
    ``num_dropped``: how many choices are −1, where that is known: on a device the host else waits for their number.
    """
    num_tokens, top_k = indices.shape
    flat = indices.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    if num_dropped is None and (capacity is None or flat.is_cpu):
        num_dropped = int((flat < 0).sum())
    is_kept = None if num_dropped == 0 else indices >= 0
    if capacity is not None:
        order, rows, is_filled = _padded(experts, order, num_experts, capacity)
    else:
        order, is_filled = order[num_dropped:], None
        rows = torch.zeros_like(flat) if num_dropped else torch.empty_like(flat)
        rows[order] = torch.arange(order.numel(), device=flat.device)
    tokens = order if top_k == 1 else order // max(top_k, 1)
    return RowMap(tokens, order, rows.view(num_tokens, top_k), is_kept, is_filled)


def _padded(
    experts: torch.Tensor, order: torch.Tensor, num_experts: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choice of each row, the row of each choice, and which rows are filled: ``experts`` sorted, dropped choices first, and
    the choices in that ``order``. How many are dropped is not asked: they go to a row behind the last."""
    total, is_dropped = num_experts * capacity, experts < 0
    starts = torch.searchsorted(experts, torch.arange(num_experts, device=experts.device))
    places = torch.arange(experts.numel(), device=experts.device) + experts * capacity
    places = torch.where(is_dropped, total, places - starts[experts.clamp_min(0)])
    is_filled = torch.zeros(total + 1, dtype=torch.bool, device=experts.device)
    is_filled[places] = True
    choices = torch.zeros(total + 1, dtype=order.dtype, device=experts.device)
    choices[places] = order
    rows = torch.empty_like(order)
    rows[order] = places.masked_fill(is_dropped, 0)
    return choices[:-1], rows, is_filled[:-1]


@dataclass(frozen=True, slots=True, eq=False)
class Permutation:
    """A rearrangement of rows: row i of the result is row ``order[i]``; ``inverse`` undoes it."""

    order: torch.Tensor
    inverse: torch.Tensor

    def reversed(self) -> Permutation:
        return Permutation(self.inverse, self.order)

    def on(self, device: torch.device) -> Permutation:
        """The same on a device, for which the host does not wait."""
        return Permutation(*(each.to(device, non_blocking=True) for each in (self.order, self.inverse)))


def regroup(lengths: torch.Tensor, order: Sequence[int]) -> Permutation | None:
    """Return the permutation that brings segments of rows into another order; None where they are in it already.

    ``lengths`` int64, on the host: rows of each segment, in the order in which they lie (the last dimension fastest).
    ``order``: the dimensions in the order in which they are to lie.
    """
    flat = lengths.reshape(-1)
    starts = (flat.cumsum(0) - flat).view(lengths.shape).permute(*order).reshape(-1)
    flat = lengths.permute(*order).reshape(-1)
    shifts = starts - (flat.cumsum(0) - flat)
    if not shifts[flat > 0].any():
        return None
    forward = torch.repeat_interleave(shifts, flat) + torch.arange(int(flat.sum()))
    inverse = torch.empty_like(forward)
    inverse[forward] = torch.arange(forward.numel())
    return Permutation(forward, inverse)


def permute_rows(x: torch.Tensor, permutation: Permutation | None) -> torch.Tensor:
    """Rearrange the rows of ``x`` [R, H]; None: leave them as they are."""
    return x if permutation is None else _permute(x, permutation)


def gather_rows(x: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """Give each row its token: [T, H] → [N, H]; padding is zero. The gradient of a token is the sum of its rows', in pairs."""
    return _gather(x, rows)


def combine_rows(y: torch.Tensor, weights: torch.Tensor | None, rows: RowMap) -> torch.Tensor:
    """Sum over choices, ``out[t] = Σ_k weights[t, k] · y[row_of_choice[t, k]]``, in pairs: [N, H] → [T, H].

    The sum of the first half of the choices plus that of the second, and so on within: so k equal choices with weights 1/k,
    k a power of two, give their value bit for bit, which one after the other they do not. Products and sums in the wider
    dtype of ``y`` and ``weights`` [T, K] (None: plain sum, in FP32 at least), the result in that of ``y``.
    """
    return _combine(y, weights, rows)


def weights_of_rows(weights: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """Give each row the weight of its choice: [T, K] → [N, 1]; padding gets any."""
    if weights.numel() == 0:
        return weights.new_zeros(rows.choice_of_row.shape[0], 1) + weights.sum()  # still part of the graph
    return weights.reshape(-1, 1).index_select(0, rows.choice_of_row)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: RowMap) -> torch.Tensor:
        ctx.rows = rows
        return _take(x, rows)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_choices(gradient, None, ctx.rows), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permutation: Permutation) -> torch.Tensor:
        ctx.inverse = permutation.inverse
        return x.index_select(0, permutation.order)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(0, ctx.inverse), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor | None, rows: RowMap) -> torch.Tensor:
        ctx.rows = rows
        ctx.save_for_backward(y if weights is not None and weights.requires_grad else None, weights)
        return _sum_choices(y, weights, rows)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        y, weights = ctx.saved_tensors
        return *spread_rows(gradient, y, weights, ctx.rows, of_rows=ctx.needs_input_grad[0]), None


_permute: Callable[[torch.Tensor, Permutation], torch.Tensor] = cast("Any", _Permute.apply)
_gather: Callable[[torch.Tensor, RowMap], torch.Tensor] = cast("Any", _Gather.apply)
_combine: Callable[[torch.Tensor, torch.Tensor | None, RowMap], torch.Tensor] = cast("Any", _Combine.apply)


def _take(x: torch.Tensor, rows: RowMap) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(rows.token_of_row.shape[0], x.shape[1])
    gathered = x.index_select(0, rows.token_of_row)
    return gathered if rows.is_filled is None else gathered.masked_fill_(~rows.is_filled.unsqueeze(1), 0)


def _sum_choices(y: torch.Tensor, weights: torch.Tensor | None, rows: RowMap) -> torch.Tensor:
    """``Σ_k w[t, k] · y[row[t, k]]``, a block of tokens at a time where there is something to add or to convert."""
    num_tokens, top_k = rows.row_of_choice.shape
    if y.shape[0] == 0 or top_k == 0:
        return y.new_zeros(num_tokens, y.shape[1])
    dtype = y.dtype if weights is None else torch.promote_types(y.dtype, weights.dtype)
    if weights is None and y.dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    if top_k == 1 and y.dtype == dtype:
        return _part(y, weights, rows, slice(None), 0, dtype)
    out = y.new_empty(num_tokens, y.shape[1])
    for tokens in _blocks(num_tokens, y, dtype):
        out[tokens] = _sum_pairs(range(top_k), lambda k: _part(y, weights, rows, tokens, k, dtype))  # noqa: B023  called here
    return out


def _is_on_host(x: torch.Tensor) -> bool:
    return x.is_cpu


def _blocks(count: int, like: torch.Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of ``count`` rows such as ``like``'s, each as many as stay in a cache; on a GPU all, whose kernels are one loop."""
    size = max(1, _BLOCK_BYTES // max(1, like.shape[1] * dtype.itemsize) if _is_on_host(like) else count)
    return (slice(start, start + size) for start in range(0, count, size))


def _part(
    y: torch.Tensor, weights: torch.Tensor | None, rows: RowMap, tokens: slice, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """A block's choice k times its weight, zero where dropped: a fresh tensor."""
    places, of_choice = rows.row_of_choice[tokens, k], None if weights is None else weights[tokens, k].unsqueeze(1)
    is_kept = None if rows.is_kept is None else rows.is_kept[tokens, k]
    if is_kept is None or not _is_on_host(
        y
    ):  # the rows of dropped choices are not looked for: the host would wait for their number
        part = y.index_select(0, places).to(dtype)
        if of_choice is not None:
            part *= of_choice
        return (
            part if is_kept is None else part.masked_fill_(~is_kept.unsqueeze(1), 0)
        )  # not times zero: it may be infinite
    chosen = is_kept.nonzero().squeeze(1)
    values = y.index_select(0, places[chosen]).to(dtype)
    if of_choice is not None:
        values *= of_choice[chosen]
    return values.new_zeros(places.shape[0], y.shape[1]).index_copy_(0, chosen, values)


def _sum_pairs(choices: range, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
    if len(choices) == 1:
        return part(choices[0])
    half = len(choices) // 2
    return _sum_pairs(choices[:half], part).add_(_sum_pairs(choices[half:], part))


def spread_rows(
    gradient: torch.Tensor, y: torch.Tensor | None, weights: torch.Tensor | None, rows: RowMap, *, of_rows: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of the weighted sum: each row's, ``w[t, k] · gradient[t]`` [N, H], and each weight's,
    ``gradient[t] · y[row]`` [T, K], for which ``y`` is there; None where not asked for. A block of rows at a time.
    """
    num_rows = rows.token_of_row.shape[0]
    if weights is None or gradient.shape[0] == 0:
        gathered = _take(gradient, rows) if of_rows else None
        return gathered, None if y is None else torch.zeros_like(cast("torch.Tensor", weights))
    dtype = torch.promote_types(gradient.dtype, weights.dtype)
    spread = gradient.new_empty(num_rows, gradient.shape[1]) if of_rows else None
    dots = None if y is None else gradient.new_empty(num_rows, dtype=dtype)
    of_row = weights_of_rows(weights, rows).to(dtype)
    for part in _blocks(num_rows, gradient, dtype):
        gathered = gradient.index_select(0, rows.token_of_row[part]).to(dtype)
        if rows.is_filled is not None:  # not times zero: what lies there by chance may be infinite
            gathered.masked_fill_(~rows.is_filled[part].unsqueeze(1), 0)
        if dots is not None and y is not None:
            torch.linalg.vecdot(gathered, y[part].to(dtype), out=dots[part])
        if spread is not None:
            spread[part] = gathered.mul_(of_row[part])
    if dots is None:
        return spread, None
    of_weights = dots[rows.row_of_choice] if num_rows else dots.new_zeros(weights.shape)
    if rows.is_kept is not None:
        of_weights.masked_fill_(~rows.is_kept, 0)
    return spread, of_weights.to(weights.dtype)

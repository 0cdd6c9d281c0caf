"""What the work on one rank takes, measured at the first call: the experts, and rows that are moved in memory.

All ranks measure at the same time, as they will work, so that what they share (cores, memory) is shared here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from commlayer.integrations.moe.rows import RowMap, combine_rows, gather_rows, make_row_map, spread_rows

__all__ = ["Experts", "MoveShape", "MoveTimes", "measure_experts", "measure_moves"]

Experts = Callable[[torch.Tensor, Sequence[int], torch.Tensor | None], torch.Tensor]
"""Rows [R, H], sorted by expert; how many each local expert has; their gating weights [R, 1], or None → [R, H]."""
_MOST_BYTES = 64 << 20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MoveShape:
    """``tokens`` of all ``ranks`` together, ``top_k`` choices each of ``num_experts``, as many of which are here as on any rank:
    ``num_local``. ``is_sorted``: what arrives has to be sorted by expert. ``needs_gradient``: it goes back through all."""

    tokens: int
    ranks: int
    top_k: int
    num_experts: int
    num_local: int
    is_sorted: bool
    needs_gradient: bool


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """µs that each kind takes in memory: all_to_all for a row that a rank sends, all_gather for a token of any rank."""

    row_us: float
    token_us: float


def measure_moves(like: torch.Tensor, shape: MoveShape) -> MoveTimes:
    """What a call of ``shape`` does beside the exchanges, done with tokens such as ``like`` [T, H] whose choices are spread
    evenly; medians. Buffers are made as the call makes them: pages of new memory may cost more than what is written there.

    As many tokens as 64 MiB hold stand for more.
    """
    most = _MOST_BYTES // max(1, like.shape[1] * like.element_size())
    own = max(1, min(shape.tokens, most) // shape.ranks)
    tokens = own * shape.ranks
    choices = torch.arange(tokens * shape.top_k, device=like.device).view(tokens, shape.top_k) % shape.num_experts
    mine = make_row_map(choices[:own], shape.num_experts)
    local = torch.where(choices < shape.num_local, choices, -1).sort(1, descending=True).values
    here = make_row_map(local[:, : max(1, int((local >= 0).sum(1).max()))], shape.num_local)
    with torch.no_grad():
        exchanged_us = median(time_us(lambda: _exchange(like, mine, shape), like) for _ in range(_REPEATS))
        gathered_us = median(time_us(lambda: _gather(like, here, own, shape), like) for _ in range(_REPEATS))
    return MoveTimes(exchanged_us / max(1, mine.token_of_row.shape[0]), gathered_us / tokens)


def _exchange(like: torch.Tensor, rows: RowMap, shape: MoveShape) -> torch.Tensor:
    """As all_to_all; what would arrive is copied."""
    tokens, top_k = rows.row_of_choice.shape
    weights, x = like.new_ones(tokens, top_k), like.new_ones(tokens, like.shape[1])
    back = _there_and_back(gather_rows(x, rows), shape)
    out = combine_rows(back, weights, rows)
    if not shape.needs_gradient:
        return out
    of_rows, _ = spread_rows(out, back, weights, rows, of_rows=True)
    assert of_rows is not None  # asked for
    return combine_rows(_there_and_back(of_rows, shape), None, rows)


def _there_and_back(rows: torch.Tensor, shape: MoveShape) -> torch.Tensor:
    arrived = rows.clone()
    if shape.is_sorted:
        order = torch.arange(arrived.shape[0] - 1, -1, -1, device=rows.device)
        arrived = arrived.index_select(0, order).index_select(0, order)
    return arrived.clone()


def _gather(like: torch.Tensor, rows: RowMap, own: int, shape: MoveShape) -> torch.Tensor:
    """As all_gather; what would arrive is written."""
    tokens, top_k = rows.row_of_choice.shape
    weights, x = like.new_ones(tokens, top_k), like.new_ones(tokens, like.shape[1])
    taken = gather_rows(x, rows)
    summed = combine_rows(taken, weights, rows)
    if not shape.needs_gradient:
        return summed[:own].clone()
    of_rows, _ = spread_rows(torch.ones_like(summed), taken, weights, rows, of_rows=True)
    assert of_rows is not None  # asked for
    return combine_rows(of_rows, None, rows)[:own].clone()


def measure_experts(experts: Experts, num_experts: int, like: torch.Tensor, sizes: Sequence[int]) -> list[float]:
    """µs of a forward pass of ``experts`` on each number of rows, spread evenly over them; the median of five."""
    times = []
    # Dropout in the experts must draw, in a recomputation of the forward pass, what it drew there.
    with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        for size in sizes:
            rows = like.new_zeros(size, like.shape[1])
            counts = [size // num_experts + (expert < size % num_experts) for expert in range(num_experts)]
            times.append(median(time_us(lambda: experts(rows, counts, None), rows) for _ in range(_REPEATS)))  # noqa: B023
    return times


def time_us(call: Callable[[], torch.Tensor], like: torch.Tensor) -> float:
    """What ``call`` takes on the device of ``like``."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    started = time.perf_counter()
    call()
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return (time.perf_counter() - started) * 1e6

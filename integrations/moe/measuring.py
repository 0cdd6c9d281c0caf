"""What the work on one rank takes, measured at the first call: the experts, and rows that are moved in memory.

All ranks measure at the same time, as they will work, so that what they share (cores, memory) is shared here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from commlayer.integrations.moe.rows import combine_rows, gather_rows, make_row_map

__all__ = ["Experts", "MoveTimes", "measure_experts", "measure_moves"]

Experts = Callable[[torch.Tensor, Sequence[int], torch.Tensor | None], torch.Tensor]
"""Rows [R, H], sorted by expert; how many each local expert has; their gating weights [R, 1], or None → [R, H]."""
_FEWEST_TOKENS, _MOST_BYTES = 64, 16 << 20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """µs for a row: gathered from its token into a buffer; summed, weighted, into a token; written to memory that is new, which
    every result is: where its pages are made at the first write (not on a GPU) that costs more than the write."""

    gather_us: float
    sum_us: float
    new_us: float


def measure_moves(like: torch.Tensor, num_tokens: int) -> MoveTimes:
    """Of ``num_tokens`` tokens such as ``like`` [T, H] with two choices each, as far as 16 MiB hold them: rows out of a cache
    would look too cheap. The median of five."""
    most = _MOST_BYTES // max(1, like.shape[1] * like.element_size())
    num_tokens = max(_FEWEST_TOKENS, min(num_tokens, most))
    tokens = like.new_ones(num_tokens, like.shape[1])
    rows = make_row_map(torch.arange(2 * num_tokens, device=like.device).view(num_tokens, 2) % 4, 4)
    weights = like.new_ones(num_tokens, 2)
    with torch.no_grad():
        gathered = gather_rows(tokens, rows)
        gather_us = median(time_us(lambda: gather_rows(tokens, rows), like) for _ in range(_REPEATS))
        sum_us = median(time_us(lambda: combine_rows(gathered, weights, rows), like) for _ in range(_REPEATS))
        held: list[torch.Tensor] = []  # as a layer holds results: what is given back may come again with its pages
        new_us = median(time_us(lambda: _keep(held, torch.zeros_like(tokens)), like) for _ in range(_REPEATS))
        again_us = median(time_us(tokens.zero_, like) for _ in range(_REPEATS))
    return MoveTimes(gather_us / (2 * num_tokens), sum_us / (2 * num_tokens), max(0.0, new_us - again_us) / num_tokens)


def _keep(held: list[torch.Tensor], made: torch.Tensor) -> torch.Tensor:
    held.append(made)
    return made


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

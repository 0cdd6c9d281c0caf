"""The balanced layout of a pipeline: the one whose slowest rank has the least to do, within what the ranks' memory has room for.

Equal layers are given one after the other to the rank that has the least work with one more, which is best for equal work
(list scheduling); as layers with dense FFNs take another time, single layers are then moved from the slowest rank as long as
that helps. Within a rank they go to its chunks in the same way. It depends on nothing but its arguments, ties go to the earlier
rank, so that every process finds the same one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.pipeline_layout import PipelineChunk, ended
from commlayer.scheduler.mapping.pipeline_schedule import PipelineSchedule, chunks_of, num_chunks

__all__ = ["LaidOut", "LayerTimes", "balanced", "least_slowest_us", "move_layers", "owners"]

_MOST_MOVES = 64
_MOST_TAKERS = 4
"""The number of ranks, those with the least work, that are tried for a layer of the slowest."""


class LayerTimes(NamedTuple):
    """The times of a model's parts on a rank, µs: a layer with experts, a dense one, the head with its losses, the modules of
    multi-token prediction with their layers."""

    sparse_us: float
    dense_us: float
    head_us: float
    modules_us: float = 0.0


class LaidOut(NamedTuple):
    """A setup with its pipeline layout, and whether no other layout is faster that does not fit."""

    setup: Setup
    is_fastest: bool


def owners(schedule: PipelineSchedule, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each rank; of two ranks with the same ones (DualPipe) those of the first."""
    ranks = pp // 2 if schedule == "dualpipe" else pp
    return tuple(chunks_of(schedule, pp, rank, vpp) for rank in range(ranks))


@lru_cache(maxsize=1 << 14)
def balanced(
    kinds: tuple[bool, ...],
    modules: int,
    schedule: PipelineSchedule,
    pp: int,
    vpp: int,
    times: LayerTimes,
    room: tuple[int, ...] | None = None,
) -> tuple[PipelineChunk, ...] | None:
    """The chunks of a balanced layout; None where the layers do not fill them, or have no room.

    Args:
        kinds: for each layer of the model whether it has experts. modules: of multi-token prediction, which go with the head.
        room: for each rank of :func:`owners` the most layers, modules not counted; None: any number.
    """
    own, num = owners(schedule, pp, vpp), num_chunks(schedule, pp, vpp)
    least = [1] * (num - 1) + [int(num == 1)]  # the head fills its chunk by itself
    if sum(least) > len(kinds):
        return None
    found = _Layout(kinds, own, times, least, room)
    if any(found.room_of(rank) < 0 for rank in range(len(own))):
        return None
    if not found.give(len(kinds) - sum(least)):
        return None
    found.settle()
    return ended(found.counts, modules)


def least_slowest_us(layers: int, ranks: int, layer_us: float, head_us: float) -> float:
    """A time that the slowest of ``ranks`` is never below, where ``layers`` equal layers are laid on them, whole, and one has the
    head besides: the least t for which ``(ranks - 1) · ⌊t / layer_us⌋ + ⌊(t - head_us) / layer_us⌋`` layers are enough."""
    if layer_us <= 0:
        return head_us
    beside = head_us / layer_us
    whole, more = int(beside), int(beside) + (beside > int(beside))
    full = max(-(-(layers + more) // ranks), more)  # ranks with so many layers are the slowest
    with_head = max(0, -(-(layers - (ranks - 1) * whole) // ranks))  # or that of the head is, with so many
    return min(full * layer_us, head_us + with_head * layer_us)


def move_layers(
    counts: list[int], chunks: Sequence[int], under_way: Sequence[float], lacking: float, kept: float
) -> float:
    """Move layers between the two chunks of a rank, from the one that more micro-batches are under way in, until ``lacking``
    bytes are saved or it has one; return the bytes that are. ``under_way``: micro-batches of each chunk. ``kept``: bytes of a
    layer and a micro-batch."""
    (fewer, few), (more, many) = sorted(zip(under_way, chunks, strict=True))
    each = kept * (more - fewer)
    number = 0 if lacking <= 0 or each <= 0 else min(math.ceil(lacking / each), counts[many] - 1)
    counts[many] -= number
    counts[few] += number
    return number * each


class _Layout:
    def __init__(
        self,
        kinds: Sequence[bool],
        own: tuple[tuple[int, ...], ...],
        times: LayerTimes,
        counts: list[int],
        room: Sequence[int] | None,
    ) -> None:
        self.own, self.times, self.counts, self.room = own, times, counts, room
        self.dense = list(accumulate((not is_moe for is_moe in kinds), initial=0))
        """Dense layers before each layer."""
        self.is_plain = not 0 < self.dense[-1] < len(kinds)
        """Whether all layers are of one kind."""
        self.layer_us = times.sparse_us if self.dense[-1] < len(kinds) else times.dense_us

    def room_of(self, rank: int) -> int:
        """How many layers more it may have."""
        return 1 << 30 if self.room is None else self.room[rank] - sum(self.counts[chunk] for chunk in self.own[rank])

    def end_us(self, chunk: int) -> float:
        return self.times.head_us + self.times.modules_us if chunk == len(self.counts) - 1 else 0.0

    def give(self, number: int) -> bool:
        """Give so many layers, one after the other, to the rank that has the least work with it; False where none has room."""
        free = [(sum(map(self.equal_us, chunks)), rank, self.room_of(rank)) for rank, chunks in enumerate(self.own)]
        heap = [each for each in free if each[2] > 0]
        heapq.heapify(heap)
        for _ in range(number):
            if not heap:
                return False
            us, rank, room = heap[0]
            self.counts[self.place(rank)] += 1
            if room > 1:
                heapq.heapreplace(heap, (us + self.layer_us, rank, room - 1))
            else:
                heapq.heappop(heap)
        return True

    def equal_us(self, chunk: int) -> float:
        """The work of a chunk, as if all layers took the same time."""
        return self.counts[chunk] * self.layer_us + self.end_us(chunk)

    def place(self, rank: int) -> int:
        """The chunk of a rank that takes one layer more: the one with the least work."""
        return min(self.own[rank], key=lambda chunk: (self.equal_us(chunk), chunk))

    def works(self) -> list[float]:
        """The work of each rank."""
        firsts = list(accumulate(self.counts, initial=0))
        dense = [self.dense[after] - self.dense[first] for first, after in pairwise(firsts)]
        each = [
            (count - few) * self.times.sparse_us + few * self.times.dense_us + self.end_us(chunk)
            for chunk, (count, few) in enumerate(zip(self.counts, dense, strict=True))
        ]
        return [sum(each[chunk] for chunk in chunks) for chunks in self.own]

    def settle(self) -> None:
        """Move single layers from the slowest rank while that makes it, or one of several that are as slow, faster."""
        for _ in range(0 if self.is_plain else _MOST_MOVES):
            works = self.works()
            slowest = max(range(len(works)), key=works.__getitem__)
            if not self.moved(slowest, works):
                return

    def moved(self, slowest: int, works: Sequence[float]) -> bool:
        """Whether one layer of a rank is better with another, which then has it."""
        best = sorted(works, reverse=True)
        least = {chunk: int(chunk < len(self.counts) - 1) for chunk in self.own[slowest]}
        takers = sorted((rank for rank in range(len(works)) if rank != slowest), key=lambda rank: (works[rank], rank))
        for rank in takers[:_MOST_TAKERS]:
            if works[rank] >= works[slowest] or self.room_of(rank) < 1:
                continue
            to = self.place(rank)
            for chunk in self.own[slowest]:
                if self.counts[chunk] > least[chunk]:
                    self.counts[chunk] -= 1
                    self.counts[to] += 1
                    pairs = zip(sorted(self.works(), reverse=True), best, strict=True)
                    now, before = next((pair for pair in pairs if not math.isclose(*pair, rel_tol=1e-9)), (0.0, 0.0))
                    if now < before:  # the first number that differs
                        return True
                    self.counts[chunk] += 1
                    self.counts[to] -= 1
        return False

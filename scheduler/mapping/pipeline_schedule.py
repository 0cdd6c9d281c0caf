"""Pipeline schedules: what order micro-batches take through the stages, and how long that lasts.

1F1B (PipeDream-Flush) and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): each of p ranks has v
chunks of layers, and chunk c of rank r is virtual stage c·p + r. With equal stages the bubble is (p−1)/v of a rank's time per
micro-batch.

:func:`makespan_us` is that closed form, for stages that need not be equal; :func:`timetable` lays every task out, which tests
hold the closed form against and pictures show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.profiles.errors import InternalError, UsageError

__all__ = ["Task", "bubble_us", "hops", "makespan_us", "order", "timetable"]


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch through one chunk of layers, in one direction. ``start``, ``end``: µs."""

    rank: int
    chunk: int
    micro_batch: int
    is_forward: bool
    start: float = 0.0
    end: float = 0.0


def bubble_us(stages_us: Sequence[float], chunks: int) -> float:
    """For how long the slowest rank is idle, µs. ``stages_us``: of each rank, forward and backward of one micro-batch."""
    return (sum(stages_us) - max(stages_us)) / chunks


def makespan_us(stages_us: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Compute the time of all micro-batches, µs: the slowest rank works without a pause but for the bubble.

    Exact for equal stages, and where the slowest is the last, as it is by the head; where it is another, and forward and backward
    have one ratio in all stages, never too short: a part of the bubble behind it is then hidden.
    """
    return micro_batches * max(stages_us) + bubble_us(stages_us, chunks)


def hops(ranks: int, micro_batches: int, chunks: int = 1) -> int:
    """Sends between stages that lengthen a step, where each is posted as soon as there is something to send and takes no longer
    than a forward task: those on the longest chain of tasks that wait for each other.

    1F1B: 2(p−1) to fill and drain, and each further micro-batch 2 but for one in p; interleaved: 2(p·v−1), however many
    micro-batches there are. Found from :func:`timetable`, and held against it by tests.
    """
    if ranks == 1:
        return 0
    if chunks > 1:
        return 2 * (ranks * chunks - 1)
    return 2 * (ranks - 1) + 2 * (micro_batches - 1 - -(-(micro_batches - 1) // ranks))


def order(ranks: int, rank: int, micro_batches: int, chunks: int = 1) -> list[tuple[int, int, bool]]:
    """(chunk, micro-batch, is forward) in the order in which ``rank`` runs them, as Megatron-Core does.

    Raises UsageError where chunks are interleaved and the ranks do not divide the micro-batches.
    """
    if chunks > 1 and micro_batches % ranks:
        raise UsageError(
            f"interleaved chunks need a multiple of pp={ranks} micro-batches, got {micro_batches}: change the batch, "
            "micro-batch or pp, or set vpp to 1"
        )
    total = micro_batches * chunks
    if chunks == 1:
        warm = min(ranks - rank - 1, total)
    elif micro_batches == ranks:
        warm = total
    else:
        warm = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    forward = [(*_place(k, ranks, chunks), True) for k in range(total)]
    backward = []
    for k in range(total):
        chunk, micro_batch = _place(k, ranks, chunks)
        backward.append((chunks - 1 - chunk, micro_batch, False))
    found = forward[:warm]
    for k in range(total - warm):
        found += [forward[warm + k], backward[k]]
    return found + backward[total - warm :]


def _place(index: int, ranks: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of the index-th forward task: groups of as many micro-batches as ranks go through all chunks."""
    if chunks == 1:
        return 0, index
    group, within = divmod(index, ranks * chunks)
    return within // ranks, group * ranks + within % ranks


def timetable(
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    *,
    send_us: float = 0.0,
) -> list[Task]:
    """Every task of every rank, with its times. ``forward_us[r]``: of one micro-batch through all chunks of rank r.

    ``send_us``: between ranks, beside what they compute. Raises UsageError as :func:`order`.
    """
    ranks = len(forward_us)
    queues = [order(ranks, rank, micro_batches, chunks) for rank in range(ranks)]
    places, free = [0] * ranks, [0.0] * ranks
    ended: dict[tuple[int, int, bool], float] = {}
    tasks: list[Task] = []
    remaining = sum(map(len, queues))
    while remaining:
        moved = False
        for rank in range(ranks):
            while places[rank] < len(queues[rank]):
                chunk, micro_batch, is_forward = queues[rank][places[rank]]
                virtual = chunk * ranks + rank
                ready = _ready(ended, virtual, ranks * chunks, micro_batch, is_forward, send_us)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = start + (forward_us if is_forward else backward_us)[rank] / chunks
                ended[virtual, micro_batch, is_forward] = free[rank]
                tasks.append(Task(rank, chunk, micro_batch, is_forward, start, free[rank]))
                places[rank] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise InternalError(f"a pipeline of {ranks} ranks and {chunks} chunks waits in a circle")
    return tasks


def _ready(
    ended: dict[tuple[int, int, bool], float],
    stage: int,
    stages: int,
    micro_batch: int,
    is_forward: bool,
    send_us: float,
) -> float | None:
    """When the input of a task is there; None while the task that makes it has not been laid out."""
    if is_forward:
        return 0.0 if stage == 0 else _after(ended.get((stage - 1, micro_batch, True)), send_us)
    if stage == stages - 1:
        return ended.get((stage, micro_batch, True))
    return _after(ended.get((stage + 1, micro_batch, False)), send_us)


def _after(end: float | None, send_us: float) -> float | None:
    return None if end is None else end + send_us

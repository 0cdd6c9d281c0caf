"""Pipeline schedules: which chunks of a model's layers a rank has, and how long all micro-batches take.

- ``1f1b``: PipeDream-Flush and, with v > 1 chunks, its interleaved form (Narayanan et al. 2021, arXiv:2104.04473, section 2.2):
  each of p ranks has v chunks of layers, and chunk c of rank r is virtual stage c·p + r. With equal stages the bubble is
  (p−1)/v of a rank's time per micro-batch.
- ``1f1b-overlap``: the same with one forward task more before the first backward one, and then one task of each merged layer by
  layer, so that the exchange of tokens of one is under way while the other computes (Megatron-Core,
  ``--overlap-moe-expert-parallel-comm``: core/pipeline_parallel/combined_1f1b.py, and schedules.py for the order). The first
  forward tasks and the last backward ones have no partner. Megatron-Core wants chunks there, or no pipeline.
- ``dualpipe``: micro-batches enter at both ends, and each rank has the stages of both directions (DeepSeek-V3, arXiv:2412.19437,
  section 3.2.1); forward and backward of opposite directions are merged, and products for weights fill gaps.
- ``dualpipev``: half of it: a V of two chunks on each rank, 2·p stages in all (deepseek-ai/DualPipe).

:func:`course` says how long that is; mapping/pipeline_orders.py lays every task out, which tests hold closed forms against and
pictures show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

__all__ = [
    "SCHEDULES",
    "Course",
    "Hops",
    "PipelineSchedule",
    "StageTimes",
    "bubble_us",
    "chunks_of",
    "count_merged",
    "course",
    "hops",
    "in_flight_by_chunk",
    "in_flight_chunks",
    "is_dual",
    "merged_shares",
    "merges",
    "num_chunks",
    "passes",
    "unfit",
]

PipelineSchedule = Literal["1f1b", "1f1b-overlap", "dualpipe", "dualpipev"]
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


def is_dual(schedule: PipelineSchedule) -> bool:
    """Whether it is DualPipe or DualPipeV, whose ranks have two chunks each."""
    return schedule in ("dualpipe", "dualpipev")


def merges(schedule: PipelineSchedule) -> bool:
    """Whether forward and backward of two micro-batches are merged layer by layer."""
    return schedule != "1f1b"


def num_chunks(schedule: PipelineSchedule, ranks: int, chunks: int) -> int:
    """Count the chunks into which the layers are cut. ``chunks``: of each rank, where ranks' chunks are interleaved."""
    return 2 * ranks if schedule == "dualpipev" else ranks * chunks


def chunks_of(schedule: PipelineSchedule, ranks: int, rank: int, chunks: int) -> tuple[int, ...]:
    """List the chunks of the model that ``rank`` has: two ranks have the same ones with DualPipe."""
    if schedule == "dualpipe":
        return rank, ranks - 1 - rank
    if schedule == "dualpipev":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * chunks, ranks))


def passes(schedule: PipelineSchedule, micro_batches: int) -> int:
    """Count the micro-batches that go through a layer of a rank: half of all with DualPipe, whose two directions share them."""
    return micro_batches // 2 if schedule == "dualpipe" else micro_batches


def unfit(schedule: PipelineSchedule, ranks: int, chunks: int, micro_batches: int | None = None) -> str:
    """Say why a schedule does not go with a pipeline, and what would; empty where it does.

    ``micro_batches`` None: whatever their number.
    """
    if schedule == "1f1b-overlap" and ranks > 1 and chunks == 1:
        return f"expected vpp of at least 2 with pp={ranks} (Megatron-Core merges interleaved chunks), got 1: set vpp, or pp=1"
    if is_dual(schedule) and chunks > 1:
        return f"expected vpp=1, as each rank has two chunks already, got {chunks}"
    if is_dual(schedule) and ranks == 1:
        return "expected a pipeline, got pp=1: take 1f1b-overlap"
    if schedule == "dualpipe" and ranks % 2:
        return (
            f"expected an even number of stages, as two directions meet, got pp={ranks}: change pp, or take dualpipev"
        )
    if micro_batches is None:
        return ""
    if is_dual(schedule) and micro_batches < 2 * ranks:
        return f"expected at least 2 · pp = {2 * ranks} micro-batches, got {micro_batches}: lower pp or the micro-batch"
    if schedule == "dualpipe" and micro_batches % 2:
        return f"expected an even number of micro-batches, half for each direction, got {micro_batches}: change the micro-batch"
    return ""


def in_flight_chunks(schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int, chunks: int) -> float:
    """Chunks whose activations ``rank`` holds at once, at most, as they are when a task ends.

    1F1B: p − rank. Interleaved: (p − rank − 1) · 2 + (v − 1) · p + 1. Merged, as many: one forward task more is done before,
    and what a merged task adds it frees. DualPipe and its V: one more than the stages of a direction (deepseek-ai/DualPipe's
    README).
    """
    total = float(passes(schedule, micro_batches) * (2 if is_dual(schedule) else chunks))
    if is_dual(schedule):
        return min(num_chunks(schedule, ranks, chunks) + 1.0, total)
    if chunks == 1:
        return min(float(ranks - rank), total)
    return min((ranks - rank - 1) * 2.0 + (chunks - 1) * ranks + 1, total)


def in_flight_by_chunk(
    schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int, chunks: int
) -> tuple[float, ...]:
    """For each chunk of ``rank`` (:func:`chunks_of`) the micro-batches whose activations it has, when
    :func:`in_flight_chunks` are there.

    With DualPipe and its V as many as there are chunks from it to the end of its direction. Interleaved: what the first forward
    tasks are of, which go through all chunks by groups of p micro-batches.
    """
    total = in_flight_chunks(schedule, ranks, rank, micro_batches, chunks)
    if is_dual(schedule):
        num = num_chunks(schedule, ranks, chunks)
        first = min(float(num - rank), total)
        return first, min(float(rank + 1), total - first)
    if chunks == 1:
        return (total,)
    rounds, left = divmod(int(total), ranks * chunks)
    return tuple(float(rounds * ranks + min(max(left - chunk * ranks, 0), ranks)) for chunk in range(chunks))


class StageTimes(NamedTuple):
    """µs of one micro-batch through all chunks of a rank: forward; backward, of which ``weights_us`` are products for weights'
    gradients; and both of two micro-batches merged (``merged_us``)."""

    forward_us: float
    backward_us: float
    weights_us: float = 0.0
    merged_us: float = 0.0

    @property
    def alone_us(self) -> float:
        """Forward and backward, one after the other."""
        return self.forward_us + self.backward_us


class Course(NamedTuple):
    """The time of all micro-batches: rank ``slowest`` takes ``alone`` of them by themselves and ``merged`` in pairs (both counted
    through all of its chunks), and is idle for ``bubble_us``."""

    slowest: int
    alone: float
    merged: float
    bubble_us: float

    def total_us(self, stages: Sequence[StageTimes]) -> float:
        """The time from the first task to the last, µs."""
        stage = stages[self.slowest]
        return self.alone * stage.alone_us + self.merged * stage.merged_us + self.bubble_us


Makespan = Callable[[PipelineSchedule, Sequence[StageTimes], int], float]


def course(
    schedule: PipelineSchedule,
    stages: Sequence[StageTimes],
    micro_batches: int,
    chunks: int = 1,
    *,
    makespan: Makespan | None = None,
) -> Course:
    """How all micro-batches go through ``stages``, one of each rank.

    1F1B with merged tasks, equal stages, f and b of a chunk by itself and x of two merged: p·v·(f + b) + (m·v − (v−1)·p − 1)·x.
    Where stages differ, the slowest rank works without a pause but for the bubble: exact where it is the last, and else never too
    short, as a part of the bubble behind it is then hidden. DualPipe has no closed form but for special cases; ``makespan`` lays
    its tasks out (:func:`commlayer.scheduler.mapping.pipeline_orders.laid_out_us`), and without it the bubble is left out: a
    bound.
    """
    ranks = len(stages)
    if is_dual(schedule):
        counts = [count_merged(schedule, ranks, rank, micro_batches) for rank in range(ranks)]
        whole = passes(schedule, micro_batches)
        busy = [
            (whole - x / 2) * each.alone_us + x / 2 * each.merged_us for each, x in zip(stages, counts, strict=True)
        ]
        slowest = max(range(ranks), key=busy.__getitem__)
        bubble = max(0.0, makespan(schedule, stages, micro_batches) - busy[slowest]) if makespan else 0.0
        return Course(slowest, whole - counts[slowest] / 2, counts[slowest] / 2, bubble)
    alone = float(micro_batches)
    if schedule == "1f1b-overlap":
        alone = min(alone, ((chunks - 1) * ranks + 1) / chunks)
    merged = micro_batches - alone
    busy = [alone * each.alone_us + merged * each.merged_us for each in stages]
    slowest = max(range(ranks), key=busy.__getitem__)
    whole_us = sum(each.alone_us for each in stages)
    return Course(slowest, alone, merged, (whole_us - stages[slowest].alone_us) / chunks)


def count_merged(schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int) -> int:
    """Merged tasks of ``rank`` with DualPipe or its V (the order is that of deepseek-ai/DualPipe)."""
    half = ranks // 2 if schedule == "dualpipe" else ranks
    place = min(rank, ranks - 1 - rank) if schedule == "dualpipe" else rank
    each_way = passes(schedule, micro_batches)
    is_middle = place == half - 1
    return 2 * (each_way - 2 * half + place + 1) - is_middle + half - place - 1


@lru_cache(maxsize=4096)
def merged_shares(schedule: PipelineSchedule, ranks: int, micro_batches: int, chunks: int) -> tuple[float, float]:
    """The least and the largest part of a rank's micro-batches that go through it in merged pairs."""
    whole = passes(schedule, micro_batches)
    if is_dual(schedule):
        counts = [count_merged(schedule, ranks, rank, micro_batches) / 2 / whole for rank in range(ranks)]
        return min(counts), max(counts)
    if schedule == "1f1b-overlap":
        share = 1 - min(1.0, ((chunks - 1) * ranks + 1) / chunks / whole)
        return share, share
    return 0.0, 0.0


def bubble_us(stages_us: Sequence[float], chunks: int) -> float:
    """For how long the slowest rank is idle, µs. ``stages_us``: of each rank, forward and backward of one micro-batch."""
    return (sum(stages_us) - max(stages_us)) / chunks


class Hops(NamedTuple):
    """Sends between stages that lengthen a step: with tasks that are ``alone``, and with ``merged`` ones, whose last products for
    weights run beside them."""

    alone: int
    merged: int = 0


def hops(ranks: int, micro_batches: int, chunks: int = 1, schedule: PipelineSchedule = "1f1b") -> Hops:
    """Count the sends that lengthen a step, where each is posted as soon as there is something to send and takes no longer than
    a forward task: those on the longest chain of tasks that wait for each other.

    1F1B: 2(p−1) to fill and drain, and each further micro-batch 2 but for one in p; interleaved: 2(p·v−1), however many
    micro-batches there are. Merged tasks of neighbours wait for each other, so that each of the slowest rank adds one; with
    DualPipe p−1 in p do, and it fills and drains from both ends. Found from
    :func:`~commlayer.scheduler.mapping.pipeline_orders.timetable`, and held against it by tests.
    """
    if ranks == 1:
        return Hops(0)
    if schedule == "dualpipe":
        return Hops(2 * (ranks - 1), max(0, micro_batches * (ranks - 1) // ranks - ranks // 2 - 1))
    if schedule == "dualpipev":
        return Hops(4 * (ranks - 1), max(0, 2 * micro_batches * (ranks - 1) // ranks - 2 * ranks))
    if schedule == "1f1b-overlap":
        return Hops(2 * (ranks * chunks - 1), max(0, micro_batches * chunks - (chunks - 1) * ranks - 2))
    if chunks > 1:
        return Hops(2 * (ranks * chunks - 1))
    return Hops(2 * (ranks - 1) + 2 * (micro_batches - 1 - -(-(micro_batches - 1) // ranks)))

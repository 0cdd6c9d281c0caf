"""Every task of every pipeline rank, in the order of a schedule and with its times (mapping/pipeline_schedule.py).

Orders are those of Megatron-Core (core/pipeline_parallel/schedules.py, combined_1f1b.py) and of deepseek-ai/DualPipe. A task of a
rank begins when the one before it has ended and its input is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from commlayer.profiles.errors import InternalError, UsageError
from commlayer.scheduler.mapping.pipeline_schedule import (
    PipelineSchedule,
    StageTimes,
    is_dual,
    num_chunks,
    passes,
    unfit,
)

__all__ = ["Slot", "Task", "TaskKind", "laid_out_us", "order", "timetable"]

TaskKind = Literal["forward", "backward", "inputs", "weights", "merged"]
"""``backward``: with the gradients of weights; ``inputs``: without these, which ``weights`` makes later; ``merged``: the forward
task of one micro-batch and the backward task of another, layer by layer."""


class Slot(NamedTuple):
    """One task of a rank, of one of its chunks. ``partner``: chunk and micro-batch of a merged task's backward part."""

    kind: TaskKind
    chunk: int
    micro_batch: int
    partner: tuple[int, int] | None = None

    @property
    def is_forward(self) -> bool:
        """Whether it has a forward part."""
        return self.kind in ("forward", "merged")

    @property
    def backward(self) -> tuple[int, int] | None:
        """Chunk and micro-batch whose gradients it hands on; None for a forward task, or one for weights alone."""
        return self.partner or ((self.chunk, self.micro_batch) if self.kind in ("backward", "inputs") else None)


@dataclass(frozen=True, slots=True)
class Task:
    """A slot with its rank and its times, µs."""

    rank: int
    slot: Slot
    start: float = 0.0
    end: float = 0.0

    @property
    def chunk(self) -> int:
        return self.slot.chunk

    @property
    def micro_batch(self) -> int:
        return self.slot.micro_batch

    @property
    def is_forward(self) -> bool:
        return self.slot.is_forward


@lru_cache(maxsize=4096)
def order(
    ranks: int, rank: int, micro_batches: int, chunks: int = 1, schedule: PipelineSchedule = "1f1b"
) -> tuple[Slot, ...]:
    """The tasks of ``rank``, as Megatron-Core or deepseek-ai/DualPipe orders them.

    Chunks count within the rank; those of DualPipe are its two directions, and the second one's micro-batches count on behind the
    first one's.

    Raises UsageError where a schedule does not go with the pipeline, or where chunks are interleaved and the ranks do not divide
    the micro-batches.
    """
    if why := unfit(schedule, ranks, chunks, micro_batches):
        raise UsageError(f"schedule {schedule}: {why}")
    if is_dual(schedule):
        return _Dual(schedule, ranks, rank, micro_batches).slots()
    if chunks > 1 and micro_batches % ranks:
        raise UsageError(
            f"interleaved chunks need a multiple of pp={ranks} micro-batches, got {micro_batches}: change the batch, "
            "micro-batch or pp, or set vpp to 1"
        )
    total = micro_batches * chunks
    warm = ranks - rank - 1 if chunks == 1 else (ranks - rank - 1) * 2 + (chunks - 1) * ranks
    is_merged = schedule == "1f1b-overlap"
    warm = min(warm + is_merged, total)
    forward = [_place(k, ranks, chunks) for k in range(total)]
    backward = [(chunks - 1 - chunk, micro_batch) for chunk, micro_batch in forward]
    found = [Slot("forward", *place) for place in forward[:warm]]
    for there, back in zip(forward[warm:], backward, strict=False):
        found += [Slot("merged", *there, back)] if is_merged else [Slot("forward", *there), Slot("backward", *back)]
    return (*found, *(Slot("backward", *place) for place in backward[total - warm :]))


def _place(index: int, ranks: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of the index-th forward task: groups of as many micro-batches as ranks go through all chunks."""
    if chunks == 1:
        return 0, index
    group, within = divmod(index, ranks * chunks)
    return within // ranks, group * ranks + within % ranks


class _Dual:
    """The order of one rank of DualPipe or its V: eight phases, of which the fourth is the steady state.

    ``first``: the direction (or arm of the V) whose micro-batches come to this rank first.
    """

    def __init__(self, schedule: PipelineSchedule, ranks: int, rank: int, micro_batches: int) -> None:
        is_v = schedule == "dualpipev"
        self.half = ranks if is_v else ranks // 2
        self.place = rank if is_v else min(rank, ranks - 1 - rank)
        self.each_way = passes(schedule, micro_batches)
        self.offset = 0 if is_v else self.each_way
        self.first = int(not is_v and rank >= self.half)
        self.made: list[Slot] = []
        self.begun, self.ended = [0, 0], [0, 0]
        self.put_off: deque[tuple[int, int]] = deque()

    def slots(self) -> tuple[Slot, ...]:
        place, behind = self.place, self.half - self.place - 1
        for _ in range(2 * behind):
            self.forward(0)
        for _ in range(place + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(behind):
            self.backward(1, puts_off=True)
            self.weights()
            self.forward(1)
        for index in range(self.each_way - 2 * self.half + place + 1):
            if index == 0 and not behind:  # the middle rank's first two are not merged, which shortens the bubble
                self.forward(0)
                self.backward(1)
            else:
                self.merged(0, 1)
            self.merged(1, 0)
        for _ in range(behind):
            self.backward(1)
            self.merged(1, 0)
        for index in range(2 * (place + 1)):
            # The second half of these puts products for weights off, from the same direction on at every rank.
            self.backward(1 - index % 2, puts_off=index >= 2 * ((place + 1) // 2) + 1 - place % 2)
        for _ in range(behind):
            self.weights()
            self.backward(0, puts_off=True)
        while self.put_off:
            self.weights()
        return tuple(self.made)

    def forward(self, which: int) -> None:
        self.made.append(Slot("forward", *self.next(self.begun, which)))

    def backward(self, which: int, *, puts_off: bool = False) -> None:
        there = self.next(self.ended, which)
        self.made.append(Slot("inputs" if puts_off else "backward", *there))
        if puts_off:
            self.put_off.append(there)

    def weights(self) -> None:
        self.made.append(Slot("weights", *self.put_off.popleft()))

    def merged(self, which: int, other: int) -> None:
        self.made.append(Slot("merged", *self.next(self.begun, which), self.next(self.ended, other)))

    def next(self, counts: list[int], which: int) -> tuple[int, int]:
        """Direction and micro-batch of the next one that comes ``which``: 0 of the first direction, 1 of the other."""
        chunk = which ^ self.first
        counts[chunk] += 1
        return chunk, counts[chunk] - 1 + chunk * self.offset


def laid_out_us(schedule: PipelineSchedule, stages: Sequence[StageTimes], micro_batches: int, chunks: int = 1) -> float:
    """The time of all micro-batches, µs, by laying every task out. Raises UsageError as :func:`order`."""
    return max(task.end for task in timetable(schedule, stages, micro_batches, chunks))


def timetable(
    schedule: PipelineSchedule,
    stages: Sequence[StageTimes],
    micro_batches: int,
    chunks: int = 1,
    *,
    send_us: float = 0.0,
) -> list[Task]:
    """Every task of every rank, with its times. ``send_us``: between ranks, beside what they
    compute. Raises UsageError as :func:`order`."""
    ranks = len(stages)
    queues = [order(ranks, rank, micro_batches, chunks, schedule) for rank in range(ranks)]
    parts = 2 if is_dual(schedule) else chunks
    places = _Places(schedule, ranks, chunks)
    times = [
        {
            "forward": each.forward_us / parts,
            "backward": each.backward_us / parts,
            "inputs": (each.backward_us - each.weights_us) / parts,
            "weights": each.weights_us / parts,
            "merged": each.merged_us / parts,
        }
        for each in stages
    ]
    next_up, free = [0] * ranks, [0.0] * ranks
    ended: dict[tuple[int, int, bool], tuple[float, int]] = {}
    tasks: list[Task] = []
    remaining = sum(map(len, queues))
    while remaining:
        moved = False
        for rank in range(ranks):
            while next_up[rank] < len(queues[rank]):
                slot = queues[rank][next_up[rank]]
                start = free[rank]
                for needed in places.inputs(rank, slot):
                    if needed not in ended:
                        break
                    end, sender = ended[needed]
                    start = max(start, end + (send_us if sender != rank else 0.0))
                else:
                    free[rank] = start + times[rank][slot.kind]
                    for made in places.outputs(rank, slot):
                        ended[made] = free[rank], rank
                    tasks.append(Task(rank, slot, start, free[rank]))
                    next_up[rank] += 1
                    remaining -= 1
                    moved = True
                    continue
                break
        if not moved:
            raise InternalError(f"{schedule}: a pipeline of {ranks} ranks and {chunks} chunks waits in a circle")
    return tasks


class _Places:
    """The virtual stages of tasks: (stage, micro-batch, is forward) of what each needs and makes.

    Micro-batches tell DualPipe's directions apart.
    """

    def __init__(self, schedule: PipelineSchedule, ranks: int, chunks: int) -> None:
        self.schedule, self.ranks = schedule, ranks
        self.last = (ranks if schedule == "dualpipe" else num_chunks(schedule, ranks, chunks)) - 1

    def stage(self, rank: int, chunk: int) -> int:
        if is_dual(self.schedule):
            return self.last - rank if chunk else rank
        return chunk * self.ranks + rank

    def inputs(self, rank: int, slot: Slot) -> list[tuple[int, int, bool]]:
        found = []
        if slot.is_forward and (stage := self.stage(rank, slot.chunk)) > 0:
            found.append((stage - 1, slot.micro_batch, True))
        if (back := slot.backward) is not None:
            stage = self.stage(rank, back[0])
            found.append((stage, back[1], True) if stage == self.last else (stage + 1, back[1], False))
        return found

    def outputs(self, rank: int, slot: Slot) -> list[tuple[int, int, bool]]:
        found = [(self.stage(rank, slot.chunk), slot.micro_batch, True)] if slot.is_forward else []
        if (back := slot.backward) is not None:
            found.append((self.stage(rank, back[0]), back[1], False))
        return found

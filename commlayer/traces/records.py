"""The records of a rank: its calls, spans of its program; and the name of the file where they go."""

from __future__ import annotations

from dataclasses import dataclass, field

from commlayer.calls.ring import StepRecord

__all__ = ["CallRecord", "Mark", "rank_name"]


@dataclass(slots=True)
class CallRecord:
    """One collective call on this rank.

    ``lane``: "" for none. ``group``: its description or name. ``ranks``: of the group, global. ``rank``: this one, global.
    ``sequence``: number of the call in the group, the same on all ranks, by which their records are matched. ``plan``: its name,
    such as ``pipelined×4``. ``logical_bytes``: what the caller moved. ``inter_bytes``, ``intra_bytes``: what this rank sent over
    each link class; −1: only the inner backend knows. ``enqueue_ns``: issued by the program; ``start_ns``: its queue came to it;
    ``end_ns``; the last two 0 as long as that has not happened. ``held_ns``: held at chunk edges for higher lanes, in all.
    ``waited``: (start_ns, end_ns) for which a thread of the program was blocked by it; of a synchronous call all of it.
    ``steps``: none for a call of the inner backend's own. ``predicted``: (start_us, end_us) of each step from the call's start;
    empty: no prediction. ``predicted_us``: of the whole; −1: none. ``wire``: the format, ``native`` for the tensor's own.
    """

    lane: str
    group: str
    ranks: tuple[int, ...]
    rank: int
    sequence: int
    collective: str
    plan: str
    logical_bytes: int
    enqueue_ns: int
    start_ns: int = 0
    end_ns: int = 0
    inter_bytes: int = -1
    intra_bytes: int = -1
    held_ns: int = 0
    waited: list[tuple[int, int]] = field(default_factory=list)
    steps: tuple[StepRecord, ...] = ()
    predicted: tuple[tuple[float, float], ...] = ()
    predicted_us: float = -1.0
    wire: str = "native"


@dataclass(frozen=True, slots=True)
class Mark:
    """A span of the program itself, such as a training step."""

    name: str
    start_ns: int
    end_ns: int


def rank_name(rank: int, number: int = 1) -> str:
    """The name of a rank's file: rank-00003.json, and rank-00003-2.json of the second job that its process is part of."""
    return f"rank-{rank:05d}.json" if number == 1 else f"rank-{rank:05d}-{number}.json"

"""The records of a rank, for ``COMMLAYER_TRACE``: its calls, by the instrument that makes a record
of each, and spans of its program."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from time import perf_counter_ns as now
from typing import Protocol

from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call, StepRecord

__all__ = ["CallRecord", "CallRecords", "KeepsRecords", "Mark", "rank_name"]

_BY_SHARES = -2
"""In place of bytes between nodes: an even all_to_all, of which each rank has its share."""


@dataclass(slots=True)
class CallRecord:
    """One collective call on this rank.

    ``lane``: "" for none. ``group``: its description or name. ``ranks``: of the group, global.
    ``rank``: this one, global. ``sequence``: number of the call in the group, the same on all
    ranks, by which their records are matched. ``plan``: its name, such as ``pipelined×4``.
    ``logical_bytes``: what the caller moved. ``inter_bytes``, ``intra_bytes``: what this rank sent
    over each link class; −1: only the inner backend knows. ``enqueue_ns``: issued by the program;
    ``start_ns``: its queue came to it; ``end_ns``; the last two 0 as long as that has not happened;
    ``end_ns`` −1: it ended, and nobody recorded when.
    ``held_ns``: held at chunk edges for higher lanes, in all. ``waited``: (start_ns, end_ns) for
    which a thread of the program was blocked by it; of a synchronous call all of it. ``steps``:
    none for a call of the inner backend's own. ``predicted``: (start_us, end_us) of each step from
    the call's start; empty: no prediction. ``predicted_us``: of the whole; −1: none. ``wire``: the
    format, ``native`` for the tensor's own.
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
    """The name of a rank's file: rank-00003.json, and rank-00003-2.json of the second job that its
    process is part of."""
    return f"rank-{rank:05d}.json" if number == 1 else f"rank-{rank:05d}-{number}.json"


class KeepsRecords(Protocol):
    """A recorder. ``rank``: this rank in the job."""

    rank: int

    def add(self, record: CallRecord) -> None:
        """Keep a call."""

    def wait(self, record: CallRecord, start_ns: int, end_ns: int) -> None:
        """Note that a thread of the program was blocked so long by it."""


class CallRecords(Instrument):
    """Makes a record of every call of this process's groups for an open recorder."""

    def __init__(self, recorder: KeepsRecords) -> None:
        self._recorder = recorder
        self._records: weakref.WeakKeyDictionary[Call, CallRecord] = weakref.WeakKeyDictionary()

    def issued(self, call: Call) -> None:
        track = call.track
        described = track.describe()
        group = described if described and described != "undefined" else track.name
        ranks = track.ranks if call.number or call.collective != "messages" else (track.rank,)
        me = track.rank if track.rank >= 0 else self._recorder.rank
        record = CallRecord(track.lane(), group, ranks, me, 0, call.collective, "flat", 0, now())
        if call.collective == "messages":  # like no other rank's
            record.plan, record.start_ns = "messages", record.enqueue_ns
            _fill(record, call)
        call.steps = ()
        self._records[call] = record
        self._recorder.add(record)

    def began(self, call: Call) -> None:
        record = self._records.get(call)
        if record is not None:
            record.start_ns = call.started_ns

    def ended(self, call: Call) -> None:
        record = self._records.get(call)
        if record is not None:
            record.start_ns = call.started_ns or record.start_ns  # a device says when it began once it has ended
            record.end_ns = call.ended_ns or now()
            _fill(record, call)

    def fill_open(self) -> None:
        """Write into the records of calls that have not ended how far they have come."""
        for call, record in list(self._records.items()):
            if not record.end_ns:
                _fill(record, call)

    def waited(self, call: Call, start_ns: int, end_ns: int) -> None:
        record = self._records.get(call)
        if record is not None:
            self._recorder.wait(record, start_ns, end_ns)


def _fill(record: CallRecord, call: Call) -> None:
    """Write into ``record`` how ``call`` has run by now."""
    record.sequence, record.logical_bytes, record.held_ns = call.sequence, call.logical_bytes, call.held_ns
    inter, intra = call.inter_bytes, call.intra_bytes
    if inter == _BY_SHARES:
        far, near = call.track.shares
        inter, intra = int(call.run_bytes * far), int(call.run_bytes * near)
    if inter >= 0:
        record.inter_bytes, record.intra_bytes = inter, intra
    if call.plan is not None:
        record.plan, record.wire = call.plan.name, str(call.plan.wire)
    record.steps = call.steps or ()
    promised = call.track.predict(call) if call.run_bytes or call.plan is not None else None
    if promised is not None:
        record.predicted, record.predicted_us = promised

"""The instrument that makes a record of every call, for ``COMMLAYER_TRACE``."""

from __future__ import annotations

import weakref
from time import perf_counter_ns as now
from typing import Protocol

from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call
from commlayer.traces.records import CallRecord

__all__ = ["CallRecords", "KeepsRecords"]

_BY_SHARES = -2
"""In place of bytes between nodes: an even all_to_all, of which each rank has its share."""


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

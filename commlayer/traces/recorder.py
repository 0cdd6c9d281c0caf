"""The recorder of one rank: what it did and when, kept in memory for ``COMMLAYER_TRACE=folder`` and
written when the job ends.

A recorder costs a call a few allocations; everything else happens when it is closed. All times are
of ``time.perf_counter_ns``, the rank's own clock; the file says how it relates to that of rank 0:
:mod:`commlayer.traces.clock`. This module loads no torch, and what writes the file only at the
close.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from commlayer.calls.instruments import listen_to_all, stop_listening_to_all
from commlayer.calls.under_way import settle_calls
from commlayer.forked_child import in_forked_child
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import warn
from commlayer.traces.call_records import CallRecord, CallRecords, Mark, rank_name
from commlayer.traces.clock import ClockReading, exchange_clocks

__all__ = ["Recorder", "close_recorder", "open_recorder", "recorder"]

_MAX_ENTRIES = 100_000
"""Calls, steps and marks of one rank: some 40 MB of memory, 100 while the file is written, and 70
MB in the file."""


class Recorder:
    """The records of one rank. Thread-safe.

    ``job``: the same on all ranks of a job, and of no other. ``readings``: this rank's clock against rank 0's. ``number``: as for
    :func:`rank_name`, which names the file that is written in ``folder`` at the close. After ``max_entries`` calls, steps and
    marks the rest is counted, but not kept. ``pid``: of the process that opened it; a child that it forks writes nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        world_size: int,
        *,
        job: str = "",
        readings: tuple[ClockReading, ...] = (),
        number: int = 1,
        max_entries: int = _MAX_ENTRIES,
    ) -> None:
        self.path = Path(folder) / rank_name(rank, number)
        self.rank, self.world_size, self.job = rank, world_size, job
        self.readings = list(readings)
        self.opened_ns = time.perf_counter_ns()
        self.calls: list[CallRecord] = []
        self.marks: list[Mark] = []
        self.num_dropped = 0
        self.is_closed = False
        self._left = max_entries
        self._unpaid: deque[CallRecord] = deque()
        self._lock = threading.Lock()
        self.pid = os.getpid()
        self.instrument = CallRecords(self)
        """Makes the records of calls, while this recorder is the open one."""

    def add(self, record: CallRecord) -> None:
        """Keep a call. What is set in it later, such as its end, is in the file too, as is a call
        that never ends."""
        if self._has_room():
            self.calls.append(record)
            self._unpaid.append(record)

    def wait(self, record: CallRecord, start_ns: int, end_ns: int) -> None:
        """Note that a thread of the program was blocked so long by this call."""
        with self._lock:
            record.waited.append((start_ns, end_ns))

    def mark(self, name: str, start_ns: int, end_ns: int) -> None:
        """Note that the program did ``name`` in this time; ``commlayer trace --step 3`` looks for
        "step 3"."""
        if self._has_room():
            self.marks.append(Mark(name, start_ns, end_ns))

    def _has_room(self) -> bool:
        with self._lock:
            while self._unpaid and self._unpaid[0].end_ns:  # its steps are known only now
                self._left -= len(self._unpaid.popleft().steps)
            if self._left > 0:
                self._left -= 1
                return True
            self.num_dropped += 1
            is_first = self.num_dropped == 1
        if is_first:
            warn(
                f"rank {self.rank}: the trace in {self.path.parent} is full, {len(self.calls)} calls: later ones are counted but "
                "not recorded. Trace fewer steps of the program",
                stacklevel=3,
            )
        return False

    def close(self) -> None:
        """Write the file, whole or not at all. Again: nothing. Raises OSError where it cannot be
        written."""
        if os.getpid() != self.pid:  # a forked child has copies of our records, and perhaps of a lock that is held
            return
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self.instrument.fill_open()
        from commlayer.traces.chrome_of_job import rank_events
        from commlayer.traces.rank_files import RankTrace, installed_versions, write_trace

        trace = RankTrace(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            pid=self.pid,
            versions=installed_versions(),
            readings=tuple(self.readings),
            opened_ns=self.opened_ns,
            closed_ns=time.perf_counter_ns(),
            num_dropped=self.num_dropped,
            calls=tuple(self.calls),
            marks=tuple(self.marks),
        )
        write_trace(self.path, rank_events(trace), commlayer=trace)


_recorder: Recorder | None = None
_opened: dict[str, int] = {}
"""How many jobs of each folder this process knows of: none may overwrite the file of another."""


def recorder() -> Recorder | None:
    """The open recorder of this process, or None."""
    return _recorder


def open_recorder(
    folder: str | Path,
    rank: int,
    world_size: int,
    gather: Callable[[int], list[int]] | None = None,
    *,
    max_entries: int = _MAX_ENTRIES,
) -> Recorder:
    """Begin to record; at exit of the process at the latest, also by an exception, the file is
    written.

    Args:
        folder: made if it is not there.
        gather: all-gathers an integer below 2^63 over the job, in rank order. Then opening is
            collective: ranks agree on the job's name and its number, and compare clocks. Only a job
            of one rank can do without.

    Raises OSError where the folder cannot be made, UsageError without ``gather``, and what
    ``gather`` raises. A recorder that is open already is closed first, without the other ranks:
    they need not have one.
    """
    global _recorder
    if gather is None and world_size > 1:
        raise UsageError(
            f"expected a gather over the {world_size} ranks of the job, got none: their files could not be merged"
        )
    close_recorder()
    gather = gather or (lambda value: [value])
    # Before a rank may fail at its folder: the others would wait for it.
    job = gather(secrets.randbits(63))[0]
    path = os.path.abspath(folder)
    number = 1 + max(gather(_opened.get(path, 0)))  # a rank that was replaced has counted fewer
    _opened[path] = number
    readings = (exchange_clocks(gather, rank),)
    Path(folder).mkdir(parents=True, exist_ok=True)
    _recorder = Recorder(
        folder, rank, world_size, job=f"{job:016x}", readings=readings, number=number, max_entries=max_entries
    )
    listen_to_all(_recorder.instrument)
    atexit.register(close_recorder)
    return _recorder


@in_forked_child
def _in_child() -> None:
    """Forget the parent's recorder in a forked child: nothing is recorded until it opens a
    recorder."""
    global _recorder
    if _recorder is not None:
        stop_listening_to_all(_recorder.instrument)
    _recorder = None
    atexit.unregister(close_recorder)


def close_recorder(gather: Callable[[int], list[int]] | None = None) -> None:
    """Stop recording and write the file; nothing where no recorder is open.

    ``gather``: as for :func:`open_recorder`; then closing is collective, and clocks are compared
    again, for their drift. Where that fails, as with a rank that has died, the first comparison
    counts. A file that cannot be written is a warning: the job's results are worth more than its
    trace.
    """
    global _recorder
    closing, _recorder = _recorder, None
    if closing is None:
        return
    atexit.unregister(close_recorder)
    settle_calls()
    stop_listening_to_all(closing.instrument)
    if gather is not None:
        try:
            closing.readings.append(exchange_clocks(gather, closing.rank))
        except Exception as error:  # noqa: BLE001  whatever broke the job must not be hidden by its trace
            warn(f"rank {closing.rank}: clocks could not be compared again: {error}", stacklevel=2)
    try:
        closing.close()
    except OSError as error:
        warn(f"rank {closing.rank}: {closing.path}: the trace could not be written: {error}", stacklevel=2)

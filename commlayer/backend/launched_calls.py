"""Calls by plan that have been launched on a device: what a program holds of one, and what is noted
of it once the device has run it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from datetime import timedelta
from time import monotonic, sleep
from time import perf_counter_ns as now
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import Instruments
from commlayer.calls.ring import Call, StepRecord, Track
from commlayer.calls.under_way import settle_when_asked
from commlayer.devices.event_clock import EventClock
from commlayer.engine.device_connections import DeviceConnections
from commlayer.engine.device_plans import DevicePlans
from commlayer.failures.waits import NO_TIMEOUT
from commlayer.transport.streams import StreamCall, StreamTimes

__all__ = ["LOOK_S", "LaunchedCalls", "LaunchedWork"]

LOOK_S = 0.002
"""The pause between two looks at a device for which the host waits, seconds."""


class LaunchedWork(Work):
    """A planned call that has been launched. Waiting makes the current stream wait for it, not the
    host."""

    def __init__(self, connections: DeviceConnections, call: StreamCall, outputs: Any) -> None:
        super().__init__()
        self._connections, self._call, self._outputs = connections, call, outputs
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once: what the current stream does from now on comes after the call."""
        del timeout
        self._call.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._call.is_done

    def is_success(self) -> bool:
        return self._call.is_done

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        """The outputs; their values are there for streams that have waited."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs. On CUDA it is set at once, and who waits for it makes a stream
        wait, as with NCCL's futures; on another device, of whose streams futures know nothing, who
        waits for it waits on the host."""
        if self._future is None:
            self._future = self._connections.future(self._call, self._outputs)
        return self._future


class _Pending(NamedTuple):
    """A planned call that has perhaps not run yet."""

    call: Call
    times: StreamTimes


class LaunchedCalls:
    """The calls of a group on a device that are under way, in the order of their launch.

    ``launching``: the one that is being launched; ``pending``: those by plan that have perhaps not
    run yet, of which events say when they ran. Calls are timed where an instrument wants to know.
    """

    def __init__(self, plans: DevicePlans, track: Track, counters: GroupCounters, instruments: Instruments) -> None:
        self._plans, self._track, self._counters, self._instruments = plans, track, counters, instruments
        self.launching: Call | None = None
        self.pending: deque[_Pending] = deque()
        self._clock: EventClock | None = None
        self._settling = threading.Lock()
        me = weakref.ref(self)
        instruments.changed = lambda: calls._decide_timing() if (calls := me()) is not None else None
        self._decide_timing()
        settle_when_asked(self)

    def _decide_timing(self) -> None:
        self._plans.is_timing = bool(self._instruments.moved or self._instruments.ended)

    def add(self, call: Call, times: StreamTimes) -> None:
        """Take note of a planned call that has just been launched."""
        self.pending.append(_Pending(call, times))

    def settle(self) -> None:
        """Take note of planned calls that have run by now. Does not wait. What an instrument raises
        is raised here."""
        # An event that is asked while a graph is captured spoils that.
        if not self.pending or self._plans.connections.is_capturing or not self._settling.acquire(blocking=False):
            return
        try:
            while self.pending and self.pending[0].times.is_done:
                self._settle_one(self.pending.popleft())
            call = self.pending[0].call if self.pending else self.launching
            self._track.done = self._track.issued if call is None else call.number - 1
        finally:
            self._settling.release()

    def _settle_one(self, pending: _Pending) -> None:
        call, times, launched_ns = pending.call, pending.times, pending.call.started_ns
        if times.began and times.ended:
            if self._clock is None:
                self._clock = EventClock(self._plans.connections.device.stream(is_high=False))  # on which nothing waits
            clock = self._clock
            clock.follow(times.began[0], launched_ns)
            call.started_ns = min(map(clock.ns, times.began))
            call.moved_ns = clock.longest_ns(times.began, times.ended)
            call.ended_ns = call.started_ns + call.moved_ns
            if times.has_steps:
                call.steps = _step_records(call, times, clock)
        else:  # nothing of it is this rank's
            call.ended_ns = now()
        self._counters.planned[call.collective, call.plan.name].time_ns += call.moved_ns
        try:
            for hear in self._instruments.moved:
                hear(call)
        finally:
            for hear in self._instruments.ended:
                hear(call)

    def finish(self, patience_s: float) -> None:
        """Wait so long for planned calls that are noted to be under way, and take note of them."""
        until, board = monotonic() + patience_s, self._plans.board
        self.settle()
        while self.pending and not self._plans.connections.is_capturing and not board.is_broken and monotonic() < until:
            sleep(LOOK_S)
            self.settle()


def _step_records(call: Call, times: StreamTimes, clock: EventClock) -> tuple[StepRecord, ...]:
    """The steps of a call; one in which this rank had nothing to do took no time."""
    records: list[StepRecord] = []
    for index, step in enumerate(call.plan.steps):
        events = times.steps.get(index)
        earlier_ns = max((records[each].end_ns for each in step.after), default=call.started_ns)
        begin_ns, end_ns = (earlier_ns, earlier_ns) if events is None else (clock.ns(events[0]), clock.ns(events[1]))
        begin_ns, end_ns = (min(max(each, call.started_ns), call.ended_ns) for each in (begin_ns, end_ns))
        records.append(
            StepRecord(
                step.op.value,
                step.resource.value,
                step.chunk,
                step.bytes,
                times.sent_bytes[index],
                min(earlier_ns, begin_ns),
                begin_ns,
                end_ns,
            )
        )
    return tuple(records)

"""The clock of a device on the host's, with devices whose clocks are too fast or too slow."""

from __future__ import annotations

import pytest

from commlayer.devices import event_clock
from commlayer.devices.device_contract import Stream, StreamEvent, TimedEvent
from commlayer.devices.event_clock import EventClock


class Machine:
    """A host and a device, whose clock is ``pace`` times as fast as the host's."""

    def __init__(self, pace: float) -> None:
        self.pace, self.host_ns = pace, 5_000_000_000

    def now(self) -> int:
        return self.host_ns


class Point:
    """An event that is reached when it is recorded."""

    def __init__(self, machine: Machine) -> None:
        self.reached_us = machine.host_ns * machine.pace / 1e3

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_us(self, since: TimedEvent) -> float:
        assert isinstance(since, Point)
        return self.reached_us - since.reached_us


class Queue:
    """A stream that has nothing to do."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record_time(self) -> Point:
        return Point(self.machine)

    def record(self) -> StreamEvent:
        return Point(self.machine)

    def launch(self, work: object) -> None: ...
    def wait(self, event: object) -> None: ...
    def keep(self, tensor: object) -> None: ...
    def hold(self, busy: object, least: int, most_us: float) -> None: ...


@pytest.mark.parametrize("pace", [1.0, 1 + 5e-6, 1 - 5e-6, 1.001, 0.999])
def test_told_times_stay_where_the_host_has_seen_them(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(pace)
    monkeypatch.setattr(event_clock, "now", machine.now)
    stream: Stream = Queue(machine)
    clock = EventClock(stream)
    for turn in range(2000):
        machine.host_ns += (20_000_000, 3_000_000_000)[turn % 7 == 0]
        launched_ns = machine.host_ns
        machine.host_ns += 40_000
        began = stream.record_time()
        machine.host_ns += 300_000
        ended = stream.record_time()
        machine.host_ns += 25_000  # until the host looks
        clock.follow(began, launched_ns)
        assert launched_ns <= clock.ns(began) <= machine.host_ns
        assert clock.longest_ns([began], [ended]) == pytest.approx(300_000, rel=0.002)
        assert clock.longest_ns([ended], [began]) == 0

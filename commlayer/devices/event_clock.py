"""The clock of a device, on the host's: when its events were reached, in ns of ``time.perf_counter_ns``."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns as now

from commlayer.devices.device_contract import Stream, TimedEvent

__all__ = ["EventClock"]

_LONGEST_NS = 1_000_000_000
"""Times are told from an event that is hardly older than this: a device gives them as FP32, in ms."""


class EventClock:
    """Tells when events were reached. Making one has the host wait for ``stream``, which ties both clocks together.

    The two drift apart by some millionths. What is certain is that the device reaches what a call waits for after the host
    has launched the call, and before the host sees it: so a clock that is ahead or behind is set right.
    """

    def __init__(self, stream: Stream) -> None:
        self._event = stream.record_time()
        self._event.synchronize()
        self._ns = now()

    def ns(self, event: TimedEvent) -> int:
        """When ``event``, which has been reached, was."""
        return self._ns + round(event.elapsed_us(self._event) * 1e3)

    def follow(self, event: TimedEvent, launched_ns: int) -> None:
        """Tell times from ``event`` on where the last such event is old. It has been reached, and was launched then."""
        ns = self.ns(event)
        bounded = max(min(ns, now()), launched_ns)
        if bounded != ns or ns - self._ns > _LONGEST_NS:
            self._event, self._ns = event, bounded

    @staticmethod
    def longest_ns(began: Sequence[TimedEvent], ended: Sequence[TimedEvent]) -> int:
        """The time from the first of some events to the last of others."""
        return max(0, round(max(last.elapsed_us(first) for first in began for last in ended) * 1e3))

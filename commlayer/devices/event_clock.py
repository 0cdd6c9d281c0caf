"""The clock of a device, on the host's: when its events were reached, in ns of ``time.perf_counter_ns``."""

from __future__ import annotations

from time import perf_counter_ns as now

from commlayer.devices.device_contract import Stream, TimedEvent

__all__ = ["EventClock"]

_LONGEST_NS = 1_000_000_000
"""Times are told from an event that is no older than this: a device gives them as FP32, in ms."""


class EventClock:
    """Tells when events were reached. Making one has the host wait for ``stream``, which ties both clocks together.

    The two drift apart by some millionths. What is certain is that an event was reached before the host saw that: a
    clock that is ahead of this is set back.
    """

    def __init__(self, stream: Stream) -> None:
        self._event = stream.record_time()
        self._event.synchronize()
        self._ns = now()

    def ns(self, event: TimedEvent) -> int:
        """When ``event``, which has been reached, was."""
        return self._ns + round(event.elapsed_us(self._event) * 1e3)

    def follow(self, event: TimedEvent) -> None:
        """Tell times from ``event`` on, which has just been seen to be reached, where the last such event is old."""
        ns = min(self.ns(event), now())
        if ns - self._ns > _LONGEST_NS:
            self._event, self._ns = event, ns

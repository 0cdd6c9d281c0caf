"""When a call ran on the streams of a device: events that know when they were reached."""

from __future__ import annotations

from commlayer.devices.device_contract import TimedEvent

__all__ = ["StreamTimes"]


class StreamTimes:
    """The times of one call. It holds none of the program's memory, so it may be kept until the call has run.

    ``began``: the first points of its streams, at which all that it waits for has run; ``ended``: the last ones.
    Where ``has_steps``: ``steps`` has the beginning and the end of each step in which this rank had something to do,
    by its number, and ``sent_bytes`` what it sends in each step.
    """

    __slots__ = ("began", "ended", "has_steps", "sent_bytes", "steps")

    def __init__(self, *, has_steps: bool) -> None:
        self.began: list[TimedEvent] = []
        self.ended: list[TimedEvent] = []
        self.steps: dict[int, tuple[TimedEvent, TimedEvent]] = {}
        self.sent_bytes: tuple[int, ...] = ()
        self.has_steps = has_steps

    @property
    def is_done(self) -> bool:
        """Whether the call has run. Does not wait."""
        return all(each.is_done() for each in self.ended)

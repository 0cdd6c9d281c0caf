"""Who is held at a chunk's edge: the lanes of this process.

Every call of a group on a lane is *issued* from the moment the program makes it to its end, also while it is queued. A call of a
lower lane asks before each of its exchanges (:class:`Gate`) and is held while a higher lane has issued work, for a bounded time:
:mod:`commlayer.scheduler.lanes` has the rules, and why they cannot deadlock.

What this rank knows decides. Ranks of one node share its network card, but in training they issue the same things at the same
time, and a rank that is ahead must not stop those that are not. Rejected: counters in memory that a node's ranks share, which
make all of them wait for what one has issued early.

A higher call may wait for a rank that is late, with nothing on the link. So it holds others for a few times as long as its bytes
take, and no longer: the link is not to be idle for the sake of one that is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlayer.scheduler.lanes import LANES, LanePolicy, longest_hold_us

__all__ = ["Gate", "Lanes", "lanes"]

_PATIENCE = 3.0
_LEAST_PATIENCE_S = 0.02
"""A call holds lower lanes for this many times what its bytes take, and at least so long."""
_NUM_LEVELS = max(LANES.values()) + 1


@dataclass
class Held:
    """How often a lane was held, and for how long, seconds."""

    times: int = 0
    seconds: float = 0.0


class Lanes:
    """What is issued on which level. ``is_on`` False: nobody is held, which may be changed while nothing runs.

    Thread-safe: each group's calls run on a thread of their own.
    """

    def __init__(
        self,
        policy: LanePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        self.policy = policy or LanePolicy()
        self.is_on = True
        self.held = [Held() for _ in range(_NUM_LEVELS)]
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition(threading.Lock())
        self._issued = [0] * _NUM_LEVELS
        self._until = [0.0] * _NUM_LEVELS  # when the calls of a level stop holding others
        self._due = [0.0] * _NUM_LEVELS  # when the next chunk of a level goes whoever is issued
        self._num_waiting = 0

    def enter(self, level: int, expected_s: float = 0.0) -> None:
        """A call has been issued that takes ``expected_s`` by itself; 0: not known, it holds others for as long as it lasts."""
        patience_s = max(expected_s * _PATIENCE, _LEAST_PATIENCE_S) if expected_s else float("inf")
        with self._changed:
            until = max(self._until[level], self._clock()) if self._issued[level] else self._clock()
            self._until[level] = until + patience_s
            self._issued[level] += 1

    def leave(self, level: int) -> None:
        """That call has ended, well or not."""
        with self._changed:
            self._issued[level] -= 1
            if self._num_waiting and not self._issued[level]:
                self._changed.notify_all()

    def is_free(self, level: int) -> bool:
        """Whether nothing that goes before ``level`` is issued."""
        return not any(self._issued[:level])

    def hold(self, level: int, most_us: float) -> float:
        """Return when a chunk of ``level`` may go, after ``most_us`` at most for each call that asks at once. Seconds held."""
        if not self.is_on or not any(self._issued[:level]):
            return 0.0
        with self._changed:
            began = now = self._clock()
            # Chunks of several groups of one lane share what the lane keeps: each gets a place of its own in time.
            due = self._due[level] = max(now, self._due[level]) + most_us / 1e6
            self._num_waiting += 1
            try:
                while True:
                    ends = [self._until[k] for k in range(level) if self._issued[k]]
                    left = min(max(ends, default=now), due) - now
                    if left <= 0:
                        break
                    self._wait(self._changed, left)
                    now = self._clock()
            finally:
                self._num_waiting -= 1
            if now < due:
                self._due[level] = min(self._due[level], now)
            seconds = now - began
            self.held[level].times += 1
            self.held[level].seconds += seconds
        return seconds


class Gate:
    """The edges of one plan's chunks on a lane: called with a step's index before it is posted, returns ns that it was held.

    ``steps_us[i]``: what step i takes by itself; 0 for one that passes without being asked, as sums and copies do.
    """

    __slots__ = ("_lanes", "_level", "_longest")

    def __init__(self, lanes: Lanes, level: int, steps_us: Sequence[float]) -> None:
        self._lanes, self._level = lanes, level
        self._longest = [longest_hold_us(step_us, lanes.policy) for step_us in steps_us]

    def __call__(self, index: int) -> int:
        longest = self._longest[index]
        return int(self._lanes.hold(self._level, longest) * 1e9) if longest else 0


_LANES = Lanes()


def lanes() -> Lanes:
    """The lanes of this process, which is one rank."""
    return _LANES

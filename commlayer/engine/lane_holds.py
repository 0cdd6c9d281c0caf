"""Who is held at a chunk's edge, and for how long: the lanes of this process.

Every call of a group on a lane is *issued* from the moment the program makes it to its end, also
while it is queued. A call of a lower lane asks before each of its exchanges (:class:`Gate`) and is
held while a higher lane has issued work, for a bounded time: :mod:`commlayer.scheduler.lanes` has
the rules, and why they cannot deadlock.

What this rank knows decides. Ranks of one node share its network card, but in training they issue
the same things at the same time, and a rank that is ahead must not stop those that are not.
Rejected: counters in memory that a node's ranks share, which make all of them wait for what one has
issued early.

A higher call may wait for a rank that is late, with nothing on the link. So it holds others for a
few times as long as its bytes take, and no longer: the link is not to be idle for the sake of one
that is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlayer.forked_child import in_forked_child
from commlayer.profiles.errors import PlanError
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.lanes import LANES, LanePolicy, longest_hold_us
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline, price

__all__ = ["HELD_OF_TIMEOUT", "Gate", "Lanes", "exchange_times_us", "lanes", "longest_holds_us", "predicted_timeline"]

_PATIENCE = 3.0
_LEAST_PATIENCE_S = 0.02
"""A call holds lower lanes for this many times what its bytes take, and at least so long."""
_UNKNOWN_S = 1.0
_NUM_LEVELS = max(LANES.values()) + 1


@dataclass
class Held:
    """How often a lane was held, and for how long, seconds."""

    times: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Issued:
    """A call that has been issued and has not ended. ``crosses``: bytes of it go between nodes.
    ``until``: it holds others until then at most, seconds of the lanes' clock."""

    level: int
    crosses: bool
    until: float


class Lanes:
    """The calls that are issued, by level. ``is_on`` False: nobody is held, which may be changed
    while nothing runs.

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
        self._issued: list[set[Issued]] = [set() for _ in range(_NUM_LEVELS)]
        self._due = [0.0] * _NUM_LEVELS  # when the next chunk of a level goes whoever is issued
        self._num_waiting = 0

    def enter(self, level: int, expected_s: float | None = None, *, crosses: bool = True) -> Issued:
        """A call has been issued that takes ``expected_s`` by itself; None: not known, it holds
        others for a second at most.

        ``crosses``: it goes between nodes. Give what is returned to :meth:`leave`.
        """
        patience_s = _UNKNOWN_S if expected_s is None else max(expected_s * _PATIENCE, _LEAST_PATIENCE_S)
        call = Issued(level, crosses, self._clock() + patience_s)
        with self._changed:
            self._issued[level].add(call)
        return call

    def leave(self, call: Issued) -> None:
        """Note that ``call`` has ended, well or not. Harmless when repeated."""
        with self._changed:
            self._issued[call.level].discard(call)
            if self._num_waiting:
                self._changed.notify_all()

    def is_free(self, level: int) -> bool:
        """Whether nothing that goes before ``level`` is issued."""
        return not any(self._issued[:level])

    def hold(self, level: int, most_us: float, *, crosses: bool = True) -> float:
        """Return when a chunk of ``level`` may go, after ``most_us`` at most for each call that
        asks at once. Seconds held.

        ``crosses``: it goes between nodes, and so waits only for calls that do.
        """
        if not self.is_on or not any(self._issued[:level]):
            return 0.0
        with self._changed:
            began = now = self._clock()
            # Chunks of several groups of one lane share what the lane keeps: each gets a place of
            # its own in time.
            due = max(now, self._due[level]) + most_us / 1e6
            if self._until(level, crosses) <= now:
                return 0.0
            self._due[level] = due
            self._num_waiting += 1
            try:
                while (left_s := min(self._until(level, crosses), due) - now) > 0:
                    self._wait(self._changed, left_s)
                    now = self._clock()
            finally:
                self._num_waiting -= 1
            if now < due:
                self._due[level] = min(self._due[level], now)
            self.held[level].times += 1
            self.held[level].seconds += now - began
        return now - began

    def hold_whole(self, level: int, num_bytes: int, bytes_per_s: float, *, crosses: bool) -> int:
        """Hold a call of ``level`` that is not cut: its beginning is the only edge that it has.
        ``bytes_per_s``: of the link that it takes; 0: not known. Returns ns held."""
        if not level:
            return 0
        alone_us = num_bytes / bytes_per_s * 1e6 if bytes_per_s else num_bytes / _BYTES_PER_US
        longest_us = longest_hold_us(max(alone_us, _LATENCY_US), self.policy)
        return int(self.hold(level, longest_us, crosses=crosses) * 1e9)

    def _until(self, level: int, crosses: bool) -> float:
        """When the last of the calls that go before ``level`` there stops holding others; 0.0
        without any."""
        return max(
            (call.until for calls in self._issued[:level] for call in calls if call.crosses or not crosses), default=0.0
        )


class Gate:
    """The edges of one call's chunks on a lane: called with a step's index before it is posted,
    returns ns that it was held.

    ``steps``: of each step what it takes by itself, µs, and whether it goes between nodes; 0 µs for
    one that passes without being asked, as sums and copies do. ``budget_s``: for which the whole
    call is held at most: timeouts count holds too.
    """

    __slots__ = ("_budget_s", "_lanes", "_level", "_steps", "held_s")

    def __init__(self, lanes: Lanes, level: int, steps: Sequence[tuple[float, bool]], budget_s: float) -> None:
        self._lanes, self._level, self._steps, self._budget_s = lanes, level, steps, budget_s
        self.held_s = 0.0

    def __call__(self, index: int) -> int:
        step_us, crosses = self._steps[index]
        if not step_us or self._budget_s <= 0:
            return 0
        held_s = self._lanes.hold(self._level, longest_hold_us(step_us, self._lanes.policy), crosses=crosses)
        self._budget_s -= held_s
        self.held_s += held_s
        return int(held_s * 1e9)


_LANES = Lanes()


@in_forked_child
def _in_child() -> None:
    """Begin anew in a forked child, where what the parent has issued never ends, and must hold
    nothing."""
    global _LANES
    _LANES = Lanes()


def lanes() -> Lanes:
    """The lanes of this process, which is one rank."""
    return _LANES


HELD_OF_TIMEOUT = 0.25
"""How much of its timeout a call may be held: the rest is for what it waits for."""
_LATENCY_US = 100.0
_BYTES_PER_US = 100.0
"""Without a profile an exchange is taken for so long, and as long as its bytes take at so slow a
link: what is held for too long goes on all the same when the higher lane has ended."""


def predicted_timeline(plan: Plan, planner: Planner | None) -> Timeline | None:
    """The plan's timeline by the profile; None without one, or where it does not know its
    operations."""
    try:
        return None if planner is None else price(plan, planner.profile)
    except PlanError:
        return None


def exchange_times_us(plan: Plan, timeline: Timeline | None) -> list[float]:
    """Predict what each exchange of the plan takes by itself, µs; 0 for what is no exchange."""
    is_exchange = [step.leg.is_exchange for step in plan.steps]
    if timeline is not None:
        spans = zip(is_exchange, timeline.spans, strict=True)
        return [end - start if exchanges else 0.0 for exchanges, (start, end) in spans]
    return [
        _LATENCY_US + step.bytes / _BYTES_PER_US if exchanges else 0.0
        for exchanges, step in zip(is_exchange, plan.steps, strict=True)
    ]


def longest_holds_us(plan: Plan, planner: Planner | None, policy: LanePolicy, timeout_s: float) -> Sequence[float]:
    """For how long each step of a plan is held at most where the device does it, µs; 0 for one that
    passes without being asked.

    Nobody sees there how long the earlier ones were, so each has its part of what all may take
    together.
    """
    times_us = exchange_times_us(plan, predicted_timeline(plan, planner))
    part_us = timeout_s * HELD_OF_TIMEOUT * 1e6 / max(1, sum(time_us > 0 for time_us in times_us))
    return tuple(min(longest_hold_us(time_us, policy), part_us) if time_us else 0.0 for time_us in times_us)

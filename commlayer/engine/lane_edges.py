"""The edges of a call's chunks: which of a plan's steps are held, and for how long at most."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.lanes import LanePolicy, longest_hold_us
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.price import Timeline, price

__all__ = ["HELD_OF_TIMEOUT", "exchange_times_us", "longest_holds_us", "predicted_timeline"]

HELD_OF_TIMEOUT = 0.25
"""How much of its timeout a call may be held: the rest is for what it waits for."""
_LATENCY_US = 100.0
_BYTES_PER_US = 100.0
"""Without a profile an exchange is taken for so long, and as long as its bytes take at so slow a link: what is held for too long
goes on all the same when the higher lane has ended."""


def predicted_timeline(plan: Plan, planner: Planner | None) -> Timeline | None:
    """The plan's timeline by the profile; None without one, or where it does not know its operations."""
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
    """For how long each step of a plan is held at most where the device does it, µs; 0 for one that passes without being asked.

    Nobody sees there how long the earlier ones were, so each has its part of what all may take together.
    """
    times_us = exchange_times_us(plan, predicted_timeline(plan, planner))
    part_us = timeout_s * HELD_OF_TIMEOUT * 1e6 / max(1, sum(time_us > 0 for time_us in times_us))
    return tuple(min(longest_hold_us(time_us, policy), part_us) if time_us else 0.0 for time_us in times_us)

"""Trials: the plans that contend for a group's call, run by all of its ranks, and settled by what they took."""

from __future__ import annotations

import time

import torch

from commlayer.engine.planned import PlannedGroup
from commlayer.measure.calls import OwnCall, StepCall, TimedCall
from commlayer.measure.group_calls import largest
from commlayer.scheduler.plan import Plan, Strategy

__all__ = ["judge", "run_pending"]

_WHAT = "the trial of its plans"


def run_pending(planned: PlannedGroup, timeout_s: float | None = None) -> None:
    """Run the plans that are pending in the choices of ``planned``, and settle them. Collective over the group, between calls.

    They run in turn, on tensors of their own; what counts is the fastest time of each, the largest over ranks. ``timeout_s``
    bounds each wait, None: the group's. Raises PeerError and CollectiveTimeoutError as a call does.
    """
    trial, limit_s = planned.choices.pending, timeout_s or planned.timeout_s
    if trial is None:
        return
    rounds: list[list[float]] = []
    with torch._C._InferenceMode(True):
        planned.connect_messages()  # now, not within the first time
        calls = [_call(planned, plan, limit_s) for plan in trial.plans]
        while len(rounds) < trial.runs and sum(map(sum, rounds)) <= trial.longest_us:
            rounds.append(largest(planned, [_timed_us(planned, call, limit_s) for call in calls], limit_s, _WHAT))
        planned.choices.settle(trial, rounds)


def judge(planned: PlannedGroup, plan: Plan, time_us: float) -> None:
    """Tell the choices of ``planned`` what the call of ``plan`` took that just ran in its turn. Collective over the group. Raises
    PeerError and CollectiveTimeoutError as a call does."""
    planned.choices.ran(plan, time_us, lambda times: largest(planned, times, planned.timeout_s, _WHAT))


def _call(planned: PlannedGroup, plan: Plan, timeout_s: float) -> TimedCall:
    return (OwnCall if plan.strategy is Strategy.FLAT else StepCall)(planned, plan, timeout_s)


def _timed_us(planned: PlannedGroup, call: TimedCall, timeout_s: float) -> float:
    largest(planned, [0.0], timeout_s, _WHAT)  # all start together
    begin = time.perf_counter()
    call.run()
    return (time.perf_counter() - begin) * 1e6

"""Trials: the plans that contend for a group's call, run by all of its ranks, and settled by what they took."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import wait
from commlayer.measure.calls import OwnCall, StepCall, TimedCall
from commlayer.scheduler.plan import Plan, Strategy

__all__ = ["run_pending"]

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
            rounds.append(_largest(planned, [_timed_us(planned, call, limit_s) for call in calls], limit_s))
        planned.choices.settle(trial, rounds)


def _call(planned: PlannedGroup, plan: Plan, timeout_s: float) -> TimedCall:
    return (OwnCall if plan.strategy is Strategy.FLAT else StepCall)(planned, plan, timeout_s)


def _timed_us(planned: PlannedGroup, call: TimedCall, timeout_s: float) -> float:
    _largest(planned, [0.0], timeout_s)  # all start together
    begin = time.perf_counter()
    call.run()
    return (time.perf_counter() - begin) * 1e6


def _largest(planned: PlannedGroup, values: list[float], timeout_s: float) -> list[float]:
    """Each value's largest over ranks, so that all of them settle alike."""
    largest, options = torch.tensor(values, dtype=torch.float64), dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MAX), timedelta(seconds=timeout_s)
    began = time.monotonic()
    try:
        wait(planned.connect_own_calls().allreduce([largest], options), planned.board)
    except RuntimeError as error:
        raise planned.explain(error, _WHAT, 0, time.monotonic() - began, timeout_s) from error
    return [float(value) for value in largest]

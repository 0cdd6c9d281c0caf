"""Trials: the plans that contend for a group's call, run once each by all of its ranks, and settled by what they took."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import wait
from commlayer.measure.calls import OwnCall, StepCall, TimedCall
from commlayer.scheduler.corrections import RUNS
from commlayer.scheduler.plan import Plan, Strategy

__all__ = ["run_pending"]

_WHAT = "the trial of its plans"


def run_pending(planned: PlannedGroup) -> None:
    """Run the plans that are pending in the choices of ``planned``, and settle them. Collective over the group, between calls.

    They run in turn, on tensors of their own; what counts is the fastest time of each, the largest over ranks. Raises
    PeerError and CollectiveTimeoutError as a call does.
    """
    trial = planned.choices.pending
    if trial is None:
        return
    with torch._C._InferenceMode(True):
        planned.connect_messages()  # now, not within the first time
        rounds = [[_timed_us(planned, plan) for plan in trial.plans] for _ in range(RUNS)]
        least_us = [min(times) for times in zip(*rounds, strict=True)]
        planned.choices.settle(trial, _largest(planned, least_us))


def _timed_us(planned: PlannedGroup, plan: Plan) -> float:
    call: TimedCall = OwnCall(planned, plan) if plan.strategy is Strategy.FLAT else StepCall(planned, plan)
    _largest(planned, [0.0])  # all start together
    begin = time.perf_counter()
    call.run()
    return (time.perf_counter() - begin) * 1e6


def _largest(planned: PlannedGroup, values: list[float]) -> list[float]:
    """Each value's largest over ranks, so that all of them settle alike."""
    largest, options = torch.tensor(values, dtype=torch.float64), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    began = time.monotonic()
    try:
        wait(planned.connect_own_calls().allreduce([largest], options), planned.board)
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        raise planned.explain(error, _WHAT, 0, waited_s, planned.timeout_s) from error
    return [float(value) for value in largest]

"""What COMMLAYER_TRACE keeps of a group's calls: who fills a record in, and when."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from commlayer.planned import PlannedGroup
from commlayer.recorder import CallRecord, Recorder, StepRecord, close_recorder, open_recorder, recorder
from commlayer.scheduler.plan import Plan
from commlayer.settings import Settings
from commlayer.tracing import Recorded

__all__ = ["begin", "end", "fill_flat", "fill_plan", "new_record", "run_recorded", "waiting"]

_END_S = 10.0
"""For how long a rank waits at the end for the others, to compare clocks once more."""

_OF_PLANS = {"all_to_all": "all_to_all_v"}
"""What the planner calls a collective of the backend, where it is something else."""


def new_record(planned: PlannedGroup, lane: str, description: str, collective: str) -> CallRecord:
    """Of a call that the program issues now."""
    group = description if description and description != "undefined" else planned.name
    me = planned.global_ranks[planned.rank]
    return CallRecord(lane, group, planned.global_ranks, me, 0, collective, "flat", 0, now())


def run_recorded(planned: PlannedGroup, record: CallRecord, task: Callable[..., object], *args: Any) -> None:
    """``task(*args)``, one call of the group, which fills in what the group has as ``planned.record`` meanwhile."""
    planned.record = record
    record.start_ns = now()
    try:
        task(*args)
    finally:
        record.end_ns = now()
        planned.record = None


def waiting(recorder: Recorder, record: CallRecord, wait: Callable[[], object]) -> None:
    """``wait()`` on the program's thread, which is blocked meanwhile."""
    begin = now()
    try:
        wait()
    finally:
        recorder.wait(record, begin, now())


def fill_flat(planned: PlannedGroup, record: CallRecord, sequence: int, num_bytes: int, sent: tuple[int, int]) -> None:
    """A call of the inner backend's own. ``sent``: bytes between nodes and inside this one; below 0: not known."""
    record.sequence, record.logical_bytes = sequence, record.logical_bytes + num_bytes
    if sent[0] >= 0:
        record.inter_bytes, record.intra_bytes = sent
    predicted = planned.choices.flat_us(_OF_PLANS.get(record.collective, record.collective), num_bytes)
    record.predicted_us = -1.0 if predicted is None else predicted


def fill_plan(
    planned: PlannedGroup, record: CallRecord, sequence: int, plan: Plan, num_bytes: int, sent: tuple[int, int]
) -> None:
    """A planned call that has ended; its steps are those that ``planned`` has seen."""
    record.sequence, record.logical_bytes = sequence, num_bytes
    record.plan, record.wire = plan.name, str(plan.wire)
    record.inter_bytes, record.intra_bytes = sent
    seen, planned.seen = planned.seen, None
    if seen is not None:
        found, step_bytes = seen
        record.held_ns = found.held_ns
        record.steps = _steps(plan, found, step_bytes)
    timeline = planned.predicted(plan)
    if timeline is not None:
        record.predicted, record.predicted_us = timeline.spans, timeline.total_us


def _steps(plan: Plan, found: Recorded, step_bytes: list[int]) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(step.op.value, step.resource.value, step.chunk, step.bytes, sent, *times)
        for step, sent, times in zip(plan.steps, step_bytes, found.steps, strict=True)
    )


def begin(settings: Settings, gloo: Any, global_ranks: Sequence[int], rank: int, world_size: int) -> None:
    """Open the recorder that ``COMMLAYER_TRACE`` asks for, at the job's first group of all ranks. Collective over it."""
    if settings.trace is None or recorder() is not None:
        return
    if len(global_ranks) == world_size:
        open_recorder(settings.trace, global_ranks[rank], world_size, partial(_gather, gloo, world_size, None))
    else:
        warnings.warn(
            "COMMLAYER_TRACE: nothing is recorded before there is a group of all ranks, whose clocks can be compared: make the "
            "default group with backend commlayer, or one with planned_group()",
            stacklevel=2,
        )


def end(gloo: Any, world_size: int, *, with_others: bool) -> None:
    """Write the file, at the end of the group that opened it. ``with_others``: all ranks come here."""
    if recorder() is not None:
        close_recorder(partial(_gather, gloo, world_size, _END_S) if with_others else None)


def _gather(gloo: Any, world_size: int, timeout_s: float | None, value: int) -> list[int]:
    options = AllgatherOptions()
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    found = torch.empty(world_size, dtype=torch.int64)
    gloo._allgather_base(found, torch.tensor([value], dtype=torch.int64), options).wait()
    values: list[int] = found.tolist()
    return values

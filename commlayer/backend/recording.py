"""Records of a group's calls for COMMLAYER_TRACE: who fills a record in, and when."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import perf_counter_ns as now
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from commlayer.engine.planned import PlannedGroup
from commlayer.failures.waits import Board, Watched
from commlayer.profiles.printable import warn
from commlayer.scheduler.plan import Plan
from commlayer.settings import Settings
from commlayer.traces.recorder import Recorder, close_recorder, open_recorder, recorder
from commlayer.traces.records import CallRecord

__all__ = ["begin", "end", "fill_flat", "fill_plan", "new_record", "waiting"]

_END_S = 10.0
"""For how long a rank waits at the end for the others, to compare clocks once more."""

_OF_PLANS = {"all_to_all": "all_to_all_v"}
"""The planner's name of a collective of the backend, where it is something else."""


def new_record(planned: PlannedGroup, lane: str, description: str, collective: str) -> CallRecord:
    """Make the record of a call that the program issues now."""
    group = description if description and description != "undefined" else planned.name
    me = planned.global_ranks[planned.rank]
    return CallRecord(lane, group, planned.global_ranks, me, 0, collective, "flat", 0, now())


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
    """A planned call that has ended; its steps are in ``record`` already."""
    record.sequence, record.logical_bytes = sequence, num_bytes
    record.plan, record.wire = plan.name, str(plan.wire)
    record.inter_bytes, record.intra_bytes = sent
    timeline = planned.predicted(plan)
    if timeline is not None:
        record.predicted, record.predicted_us = timeline.spans, timeline.total_us


class _Opener(NamedTuple):
    """The group that opened the recorder of ``job``. ``gloo``: its own; a group's threads must not live on for its trace.
    ``places``: where in a gather over it each global rank is."""

    gloo: weakref.ref[Any]
    places: list[int]
    job: str


_opener: _Opener | None = None


def _in_child() -> None:
    """See :mod:`commlayer.traces.recorder`."""
    global _opener
    _opener = None


os.register_at_fork(after_in_child=_in_child)


def begin(
    settings: Settings,
    gloo: Any,
    global_ranks: Sequence[int],
    rank: int,
    world_size: int,
    board: Board | None = None,
) -> bool:
    """Open the recorder that ``COMMLAYER_TRACE`` asks for, at a group of all ranks. Collective over it, whether or not this rank
    records already: the others may have been replaced since. It goes on where all record one job, and otherwise all begin anew.

    ``board``: where failures of the ranks are known; then nobody waits for a dead one. Raises RuntimeError where a rank is gone.
    Returns whether this group has opened it: then its :func:`end` writes the file.
    """
    global _opener
    if not settings.trace:
        return False
    if len(global_ranks) != world_size:
        if recorder() is None:
            warn(
                "COMMLAYER_TRACE: nothing is recorded before there is a group of all ranks, whose clocks can be compared: make "
                "the default group with backend commlayer, or one with planned_group()",
                stacklevel=2,
            )
        return False
    places = sorted(range(world_size), key=global_ranks.__getitem__)
    gather = partial(_gather, gloo if board is None else Watched(gloo, board), places, None)
    jobs = gather(_open_job(world_size))
    if jobs[0] and len(set(jobs)) == 1:
        return False
    folder = str(settings.in_replica(settings.trace))
    try:
        opened = open_recorder(folder, global_ranks[rank], world_size, gather)
    except OSError as error:  # the job's results are worth more than its trace
        warn(
            f"COMMLAYER_TRACE: rank {global_ranks[rank]} records nothing, because it cannot make the folder "
            f"{folder}: {error}",
            stacklevel=2,
        )
        return False
    _opener = _Opener(weakref.ref(gloo), places, opened.job)
    return True


def _open_job(world_size: int) -> int:
    """The job that this rank records and can go on with; 0: none."""
    found = recorder()
    if found is None or found.pid != os.getpid() or found.world_size != world_size:
        return 0
    if _opener is not None and _opener.job == found.job:
        is_over = (
            _opener.gloo() is None or not dist.is_initialized()
        )  # a default group is being made: there was another
        if is_over:
            return 0
    return int(found.job, 16)


def end(gloo: Any, world_size: int, *, with_others: bool) -> None:
    """Write the file, at the end of the group that opened it; of any other group: nothing.

    ``with_others``: all ranks come here, and compare their clocks again. Without, as where the group is aborted, nobody is
    asked.
    """
    global _opener
    if _opener is None or _opener.gloo() is not gloo:
        return
    opener, _opener = _opener, None
    found = recorder()
    if found is None or found.job != opener.job:  # the program has closed it, or opened one of its own
        return
    close_recorder(partial(_gather, gloo, opener.places, _END_S) if with_others else None)


def _gather(gloo: Any, places: Sequence[int], timeout_s: float | None, value: int) -> list[int]:
    """``value`` of every rank, by global rank."""
    options = AllgatherOptions()
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    found = torch.empty(len(places), dtype=torch.int64)
    gloo._allgather_base(found, torch.tensor([value], dtype=torch.int64), options).wait()
    values: list[int] = found.tolist()
    return [values[place] for place in places]

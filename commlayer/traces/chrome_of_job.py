"""A rank's records as events of a Chrome trace: what ui.perfetto.dev and chrome://tracing show.

A process is a rank. Its tracks, from the top: the program (marks, and where it was blocked by a
call), for each lane the calls from the moment their queue came to them, for each resource the steps
of all lanes, and above those the steps as they were predicted. What overlaps on a track goes into a
second one of the same name: those programs draw no overlapping slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from commlayer.calls.ring import StepRecord
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import LANES
from commlayer.traces.call_records import CallRecord
from commlayer.traces.chrome_of_plan import metadata_event, slice_times
from commlayer.traces.intervals import Interval, rows_without_overlap
from commlayer.traces.rank_files import RankTrace

__all__ = ["call_label", "lane_place", "rank_events", "running"]

Event = dict[str, Any]
_Slices = list[tuple[Interval, Callable[[], Event]]]
_LANES = sorted(LANES, key=LANES.__getitem__)
_TRACKS_PER_RANK = 10_000
"""Numbers of threads are of one process only, as on Linux: Perfetto takes them for one where they
are equal."""
_RESOURCES = [resource.value for resource in Resource]


def call_label(call: CallRecord) -> str:
    """Return the name of a call in pictures and tables."""
    return f"{call.collective} #{call.sequence} {call.plan}"


def running(call: CallRecord) -> list[Interval]:
    """Return when each step of ``call`` was under way, ns: from its post, or the end of the step
    before it on its resource."""
    free: dict[str, int] = {}
    spans = []
    for step in call.steps:
        start = min(max(step.start_ns, free.get(step.resource, 0)), step.end_ns)
        free[step.resource] = step.end_ns
        spans.append((start, step.end_ns))
    return spans


def rank_events(trace: RankTrace, calls: Sequence[CallRecord] | None = None) -> Iterator[Event]:
    """The events of one rank, made one after the other: they need ten times the memory of the
    records.

    Args:
        calls: only these of the trace's calls.

    Yields:
        Metadata ("M"), a complete event ("X") for each mark, wait, call, step and predicted step,
        and a counter ("C") of calls that are queued in each lane. ``ts`` and ``dur`` are µs since
        the job's origin, on rank 0's clock.
    """
    shown = trace.calls if calls is None else calls
    clock = trace.job_clock()
    tid = (trace.rank + 1) * _TRACKS_PER_RANK
    yield metadata_event("process_name", trace.rank, tid, name=f"rank {trace.rank} ({trace.host})")
    yield metadata_event("process_sort_index", trace.rank, tid, sort_index=trace.rank)
    for name, slices in _tracks(trace, shown):
        for row in rows_without_overlap(slices):
            tid += 1
            yield metadata_event("thread_name", trace.rank, tid, name=name)
            yield metadata_event("thread_sort_index", trace.rank, tid, sort_index=tid)
            for (start, end), event in row:
                where = {"ph": "X", "pid": trace.rank, "tid": tid, **slice_times((clock(start), clock(end)))}
                yield event() | where
    yield from _queued(trace.rank, shown, clock)


def _tracks(trace: RankTrace, calls: Sequence[CallRecord]) -> Iterator[tuple[str, _Slices]]:
    marks: _Slices = [
        ((mark.start_ns, mark.end_ns), partial(dict, name=mark.name, cat="program")) for mark in trace.marks
    ]
    waits = [(span, partial(_wait, call)) for call in calls for span in call.waited]
    yield "program", [*marks, *waits]
    for lane in sorted({call.lane for call in calls}, key=lane_place):
        started = [call for call in calls if call.lane == lane and call.start_ns]
        name = f"lane {lane}" if lane else "no lane"
        # A call that has not ended reaches to the end of the trace, and one whose end nobody
        # recorded is a moment.
        ends = [call.start_ns if call.end_ns < 0 else call.end_ns or trace.closed_ns for call in started]
        yield name, [((call.start_ns, end), partial(_call, call)) for call, end in zip(started, ends, strict=True)]
    used = {step.resource for call in calls for step in call.steps}
    for resource in (*filter(used.__contains__, _RESOURCES), *sorted(used.difference(_RESOURCES))):
        # The predicted steps from the start of each call, as if nothing else ran; of a call without
        # a prediction none.
        yield (
            f"{resource.upper()} predicted",
            [
                (
                    (call.start_ns + round(start * 1e3), call.start_ns + round(end * 1e3)),
                    partial(_step, call, step, is_predicted=True),
                )
                for call in calls
                if call.start_ns
                for step, (start, end) in zip(call.steps, call.predicted, strict=False)
                if step.resource == resource
            ],
        )
        yield (
            resource.upper(),
            [
                (span, partial(_step, call, step))
                for call in calls
                for step, span in zip(call.steps, running(call), strict=True)
                if step.resource == resource
            ],
        )


def _wait(call: CallRecord) -> Event:
    return {"name": f"wait: {call_label(call)}", "cat": "wait", "args": {"lane": call.lane}}


def _call(call: CallRecord) -> Event:
    args = {
        "group": call.group,
        "ranks": list(call.ranks),
        "wire": call.wire,
        "logical_bytes": call.logical_bytes,
        "inter_bytes": call.inter_bytes if call.inter_bytes >= 0 else "unknown",
        "intra_bytes": call.intra_bytes if call.intra_bytes >= 0 else "unknown",
        "queued_us": (call.start_ns - call.enqueue_ns) / 1e3,
        "held_us": call.held_ns / 1e3,
        "blocked_us": sum(end - start for start, end in call.waited) / 1e3,
        "predicted_us": call.predicted_us if call.predicted_us >= 0 else "none",
    }
    return {"name": call_label(call) + ("" if call.end_ns else " (never ended)"), "cat": "call", "args": args}


def _step(call: CallRecord, step: StepRecord, *, is_predicted: bool = False) -> Event:
    name = f"{call.lane} {step.op} {step.chunk}".lstrip()
    if is_predicted:
        return {"name": name, "cat": "predicted", "args": {"call": call_label(call)}}
    args = {
        "call": call_label(call),
        "lane": call.lane,
        "chunk": step.chunk,
        "bytes": step.bytes,
        "sent_bytes": step.sent_bytes,
        "before_post_us": (step.start_ns - step.enqueue_ns) / 1e3,
    }
    return {"name": name, "cat": step.op, "args": args}


def _queued(rank: int, calls: Sequence[CallRecord], clock: Callable[[int], int]) -> Iterator[Event]:
    """A counter of each lane's calls that the program has issued and whose queue has not come to
    them."""
    changes: list[tuple[int, int, str]] = []
    for call in calls:
        if call.start_ns > call.enqueue_ns:
            changes += [(call.enqueue_ns, 1, call.lane or "none"), (call.start_ns, -1, call.lane or "none")]
    waiting = dict.fromkeys((lane for _, _, lane in changes), 0)
    for ns, change, lane in sorted(changes):
        waiting[lane] += change
        yield {"ph": "C", "name": "queued", "pid": rank, "ts": clock(ns) / 1e3, "args": dict(waiting)}


def lane_place(lane: str) -> tuple[int, str]:
    """Return a key that sorts lanes: those that go first, those nobody knows, none at all."""
    return _LANES.index(lane) if lane in LANES else len(_LANES) + (not lane), lane

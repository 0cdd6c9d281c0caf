"""Timelines as a Chrome trace: open the file at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Step
from commlayer.scheduler.price import Timeline

__all__ = ["chrome_trace", "complete_event", "metadata_event", "slice_times"]

_ROWS = {resource: row for row, resource in enumerate(Resource)}


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as the JSON object that Chrome and Perfetto read.

    Args:
        timelines: by the name under which each is shown ("predicted", "measured", or the plan's
            own).

    Returns:
        One process for each timeline, in it one thread for each resource, in it one complete event
        ("X") for each step: ``ts`` and ``dur`` in µs, ``args`` with the step's number, chunk,
        bytes, buffers and what it waited for.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append(metadata_event("process_name", pid, 0, name=f"{name} ({timeline.plan.name})"))
        events.append(metadata_event("process_sort_index", pid, 0, sort_index=pid))
        for resource in sorted({step.resource for step in timeline.plan.steps}, key=_ROWS.__getitem__):
            row = _ROWS[resource]
            events.append(metadata_event("thread_name", pid, row, name=resource.value.upper()))
            events.append(metadata_event("thread_sort_index", pid, row, sort_index=row))
        steps = timeline.plan.steps
        for index, (step, (start, end)) in enumerate(zip(steps, timeline.spans, strict=True)):
            about = {
                "step": index,
                "chunk": step.chunk,
                "bytes": step.bytes,
                "from": step.source.value,
                "to": step.target.value,
                "after": [f"{earlier}: {_label(steps[earlier])}" for earlier in step.after],
            }
            span_ns = (round(1e3 * start), round(1e3 * end))
            events.append(complete_event(_label(step), step.op.value, pid, _ROWS[step.resource], span_ns, about))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def metadata_event(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    """The event that names or places a process or thread; ``kind`` such as ``thread_name``."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def complete_event(
    name: str, category: str, pid: int, tid: int, span_ns: tuple[int, int], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the event ("X") of one slice."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        **slice_times(span_ns),
        "args": dict(args),
    }


def slice_times(span_ns: tuple[int, int]) -> dict[str, float]:
    """Return ``ts`` and ``dur`` of a slice, µs, which are whole nanoseconds when they are read,
    too: Perfetto drops a slice that overlaps the next one on its thread by a single one."""
    start, end = span_ns
    return {"ts": _us(start), "dur": _us(end - start)}


def _us(ns: int) -> float:
    """µs that are as many ns where they are multiplied by 1,000 and cut off, as Perfetto does."""
    us = ns / 1e3
    return us if int(us * 1e3) == ns else math.nextafter(us, math.inf)


def _label(step: Step) -> str:
    return f"{step.op.value} {step.chunk}"

"""Timelines as a Chrome trace: open the file at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Step
from commlayer.scheduler.price import Timeline

__all__ = ["chrome_trace", "metadata_event"]

_ROWS = {resource: row for row, resource in enumerate(Resource)}


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as the JSON object that Chrome and Perfetto read.

    Args:
        timelines: by the name under which each is shown ("predicted", "measured", or the plan's own).

    Returns:
        One process for each timeline, in it one thread for each resource, in it one complete event ("X") for each step:
        ``ts`` and ``dur`` in µs, ``args`` with the step's number, chunk, bytes, buffers and what it waited for.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append(metadata_event("process_name", pid, 0, name=f"{name} ({timeline.plan.name})"))
        events.append(metadata_event("process_sort_index", pid, 0, sort_index=pid))
        for resource in sorted({step.resource for step in timeline.plan.steps}, key=_ROWS.__getitem__):
            row = _ROWS[resource]
            events.append(metadata_event("thread_name", pid, row, name=resource.value.upper()))
            events.append(metadata_event("thread_sort_index", pid, row, sort_index=row))
        events += _steps(pid, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def metadata_event(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    """The event that names or places a process or thread; ``kind`` such as ``thread_name``."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _steps(pid: int, timeline: Timeline) -> list[dict[str, Any]]:
    steps = timeline.plan.steps
    return [
        {
            "ph": "X",
            "name": _label(step),
            "cat": step.op.value,
            "pid": pid,
            "tid": _ROWS[step.resource],
            "ts": round(start, 3),
            "dur": round(end - start, 3),
            "args": {
                "step": index,
                "chunk": step.chunk,
                "bytes": step.bytes,
                "from": step.source.value,
                "to": step.target.value,
                "after": [f"{earlier}: {_label(steps[earlier])}" for earlier in step.after],
            },
        }
        for index, (step, (start, end)) in enumerate(zip(steps, timeline.spans, strict=True))
    ]


def _label(step: Step) -> str:
    return f"{step.op.value} {step.chunk}"

"""The simulated course of a mapping's step: a Chrome/Perfetto trace, and a figure.

Three views: the pipeline's micro-batches through all stages; the forward and the backward pass of one stage with every call. The
pipeline is drawn as if all stages were as slow as the slowest one, and forward took a third of what a micro-batch takes (without
what is recomputed): an estimate knows the whole, not its split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.drawing.style import FAINT, INK, PAPER, name_rows, new_figure, styled
from commlayer.drawing.trace_figure import LANE_COLOURS
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.conflicts import CallTimes, Forecast
from commlayer.scheduler.mapping.pipeline_orders import Task, timetable
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.traces.chrome_of_job import lane_place
from commlayer.traces.chrome_of_plan import metadata_event
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["course_figure", "courses", "pipeline_tasks", "step_trace"]

_WIDTH = 11.0
_ROW = 0.34
"""Inches."""
_BAR = 0.78
_PALE = 0.35
_COMPUTE, _WAIT = "#7db8d8", "#4f5963"
_FORWARD, _BACKWARD = "#7db8d8", "#009e73"
_WORDS = {"": "compute", "filler": "other micro-batches"}
_OUTSIDE = ("bubble", "pp", "gradients", "parameters", "optimizer")
"""Parts of a step that no micro-batch on its stage is made of."""
_MOST_STAGES = 16
_MOST_TASKS = 60_000
_MANY = 100
"""Bars in a row that edges would hide."""


_Event = tuple[str, float, float, dict[str, Any]]
"""Name, start and end in µs, what else is known."""


class _Row(NamedTuple):
    """A thread of the trace."""

    name: str
    events: list[_Event]


def courses(estimate: StepEstimate) -> dict[str, Forecast]:
    """Return the simulated courses of an estimate, by name. Raises UsageError where the estimate has no course to show."""
    found = {"forward": estimate.forward, "backward": estimate.backward}
    kept = {name: forecast for name, forecast in found.items() if forecast is not None}
    if not kept:
        raise UsageError("the estimate has no course of its step to show: ask Estimator.estimate for it")
    return kept


def pipeline_tasks(estimate: StepEstimate) -> list[Task]:
    """Every micro-batch on every stage; none where there is no pipeline, or one too long to be looked at (_MOST_TASKS)."""
    setup = estimate.setup
    count = setup.micro_batches(estimate.job)
    uneven = setup.vpp > 1 and count % setup.pp
    if setup.pp == 1 or uneven or 2 * setup.pp * setup.vpp * count > _MOST_TASKS:
        return []
    whole = sum(us for part, us in estimate.parts.items() if part not in _OUTSIDE) / count
    forward = (whole - estimate.parts.get("recompute", 0.0) / count) / 3
    return timetable([forward] * setup.pp, [whole - forward] * setup.pp, count, setup.vpp)


def step_trace(estimate: StepEstimate) -> dict[str, Any]:
    """The trace as the JSON object that Chrome and Perfetto read.

    A process for the pipeline (a thread for each stage), and one for each direction: a thread for the program (what it computes
    and waits for), one for each lane (calls, from issue to end) and one for each resource (the steps of calls that occupy it).
    ``ts`` and ``dur`` in µs.

    Raises UsageError as :func:`courses`.
    """
    passes = courses(estimate).items()
    views = {f"{_scope(name, each)}: {format_us(each.total_us)}": _rows(each) for name, each in passes}
    tasks = pipeline_tasks(estimate)
    if tasks:
        views = {f"pipeline: {format_us(estimate.step_us)} a step": _stage_rows(estimate, tasks), **views}
    events: list[dict[str, Any]] = []
    for pid, (name, rows) in enumerate(views.items()):
        events.append(metadata_event("process_name", pid, 0, name=name))
        events.append(metadata_event("process_sort_index", pid, 0, sort_index=pid))
        for tid, row in enumerate(rows):
            events.append(metadata_event("thread_name", pid, tid, name=row.name))
            events.append(metadata_event("thread_sort_index", pid, tid, sort_index=tid))
            events += [
                {
                    "ph": "X",
                    "name": what,
                    "cat": row.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": round(start, 3),
                    "dur": round(end - start, 3),
                    "args": known,
                }
                for what, start, end, known in row.events
            ]
    about = {
        "setup": str(estimate.setup),
        "cluster": estimate.cluster,
        "software": estimate.software,
        "step_us": round(estimate.step_us, 3),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@styled
def course_figure(estimate: StepEstimate, title: str = "") -> Figure:
    """Draw the pipeline, forward and backward, one above the other, each over its own time.

    Of a pass: what the program computes (and waits for, dark), then a row for each lane. Full colour: a step of one of its calls
    occupies a link; pale: a call is under way, but held, or between its steps.

    Raises UsageError as :func:`courses`.
    """
    shown = courses(estimate)
    tasks = pipeline_tasks(estimate)
    lanes = {name: _lanes(forecast) for name, forecast in shown.items()}
    rows = [min(estimate.setup.pp, _MOST_STAGES)] * bool(tasks) + [1 + len(each) for each in lanes.values()]
    figure = new_figure(_WIDTH, 1.1 + sum(0.75 + _ROW * count for count in rows))
    panels = list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0])
    if tasks:
        _draw_pipeline(panels.pop(0), estimate, tasks)
    for axes, (name, forecast) in zip(panels, shown.items(), strict=True):
        unit_us = _time_axis(axes, forecast.total_us)
        _draw(axes, forecast, lanes[name], unit_us)
        exposed = f", of which {format_us(forecast.exposed_us)} waiting" if forecast.exposed_us else ""
        axes.set_title(f"{_scope(name, forecast)}   {format_us(forecast.total_us)}{exposed}", fontsize=9.5, pad=3)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    _legend(
        figure, sorted({lane for each in lanes.values() for lane in each}, key=lane_place), with_pipeline=bool(tasks)
    )
    return figure


def _time_axis(axes: Axes, end_us: float) -> float:
    """Its unit in µs."""
    unit_us, unit = (1e3, "ms") if end_us >= 2e3 else (1.0, "µs")
    axes.set_xlim(0, 1.01 * end_us / unit_us)
    axes.set_xlabel(f"predicted time ({unit})", fontsize=8.5, labelpad=1)
    return unit_us


def _draw_pipeline(axes: Axes, estimate: StepEstimate, tasks: list[Task]) -> None:
    shown = min(estimate.setup.pp, _MOST_STAGES)
    unit_us = _time_axis(axes, max(task.end for task in tasks))
    for stage in range(shown):
        for is_forward, colour in ((True, _FORWARD), (False, _BACKWARD)):
            own = [(task.start, task.end) for task in tasks if task.rank == stage and task.is_forward is is_forward]
            _bars(axes, stage, own, unit_us, colour, 1.0)
    name_rows(axes, [f"stage {stage}" for stage in range(shown)])
    left_out = f" (the first {shown} of {estimate.setup.pp} stages)" if shown < estimate.setup.pp else ""
    axes.set_title(
        f"micro-batches through the pipeline{left_out}   bubble {estimate.bubble:.1%} of a step", fontsize=9.5, pad=3
    )


def _stage_rows(estimate: StepEstimate, tasks: list[Task]) -> Iterator[_Row]:
    """A thread for each stage, and after the last micro-batch what a step ends with."""
    for stage in range(estimate.setup.pp):
        own = [
            (
                f"{'forward' if task.is_forward else 'backward'} {task.micro_batch}",
                task.start,
                task.end,
                {"micro_batch": task.micro_batch, "chunk": task.chunk},
            )
            for task in tasks
            if task.rank == stage
        ]
        yield _Row(f"stage {stage}", own)
    now = max(task.end for task in tasks)
    ends: list[_Event] = []
    for part in _OUTSIDE:
        us = estimate.parts.get(part, 0.0)
        if us and part != "bubble":
            ends.append((f"{part}, exposed" if part != "optimizer" else part, now, now + us, {}))
            now += us
    yield _Row("the step's end", ends)


def _scope(name: str, forecast: Forecast) -> str:
    """The words on what was simulated: all layers of a stage where data parallelism's calls meet them, else one layer."""
    return f"{name} of a stage, at the step's edge" if "dp" in _lanes(forecast) else f"{name} of a layer"


def _lanes(forecast: Forecast) -> list[str]:
    return sorted({times.call.lane for times in forecast.calls.values()}, key=lane_place)


def _rows(forecast: Forecast) -> Iterator[_Row]:
    program: list[_Event] = [(_WORDS.get(name, name), start, end, {}) for name, start, end in forecast.computed]
    program += [(f"wait for {name}", start, end, {}) for name, start, end in forecast.waited if end > start]
    yield _Row("program", sorted(program, key=lambda event: event[1:3]))
    for lane in _lanes(forecast):
        times = [each for each in forecast.calls.values() if each.call.lane == lane]
        yield _Row(lane or "no lane", [_call(each) for each in sorted(times, key=lambda each: each.issued_us)])
    for resource in Resource:
        steps = [step for each in forecast.calls.values() for step in _steps(each, resource)]
        if steps:
            yield _Row(resource.value.upper(), sorted(steps, key=lambda event: event[1:3]))


def _call(times: CallTimes) -> _Event:
    plan = times.call.plan
    known = {
        "plan": plan.name,
        "group_size": plan.traffic.group_size,
        "bytes": plan.traffic.logical_bytes,
        "held_us": round(times.held_us, 3),
        "exposed_us": round(times.exposed_us, 3),
    }
    return times.call.name, times.issued_us, times.end_us, known


def _steps(times: CallTimes, resource: Resource) -> Iterator[_Event]:
    for step, (start, end) in zip(times.call.plan.steps, times.spans, strict=True):
        if step.resource is resource:
            yield f"{times.call.name}: {step.op.value} {step.chunk}", start, end, {"bytes": step.bytes}


def _draw(axes: Axes, forecast: Forecast, lanes: list[str], unit_us: float) -> None:
    spans: Mapping[str, list[tuple[float, float]]] = {
        _COMPUTE: [(start, end) for _, start, end in forecast.computed],
        _WAIT: [(start, end) for _, start, end in forecast.waited],
    }
    for colour, each in spans.items():
        _bars(axes, 0, each, unit_us, colour, 1.0)
    for row, lane in enumerate(lanes, start=1):
        times = [each for each in forecast.calls.values() if each.call.lane == lane]
        colour = LANE_COLOURS.get(lane, FAINT)
        _bars(axes, row, [(each.issued_us, each.end_us) for each in times], unit_us, colour, _PALE)
        _bars(axes, row, [span for each in times for span in each.spans], unit_us, colour, 1.0)
    name_rows(axes, ["program", *(lane or "no lane" for lane in lanes)])


def _bars(axes: Axes, row: int, spans: list[tuple[float, float]], unit_us: float, colour: str, opacity: float) -> None:
    kept = [(start / unit_us, (end - start) / unit_us) for start, end in spans if end > start]
    edge = PAPER if colour in (_COMPUTE, _WAIT, _BACKWARD) and len(kept) < _MANY else colour
    axes.broken_barh(kept, (row - _BAR / 2, _BAR), color=colour, alpha=opacity, linewidth=0.3, edgecolor=edge)


def _legend(figure: Figure, lanes: list[str], *, with_pipeline: bool) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COMPUTE, label="forward, or computes" if with_pipeline else "computes")]
    handles += [Patch(color=_BACKWARD, label="backward")] if with_pipeline else []
    handles.append(Patch(color=_WAIT, label="waits"))
    handles += [Patch(color=LANE_COLOURS.get(lane, FAINT), label=lane or "no lane") for lane in lanes]
    handles.append(Patch(color=INK, alpha=_PALE, label="pale: held, or between steps"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))

"""The simulated course of a mapping's step: a Chrome/Perfetto trace, and a figure.

The views: the step on every pipeline rank (:mod:`commlayer.drawing.pipeline_course`); the forward
and the backward pass of one stage with every call, and of a layer both merged where the schedule
does that. In a pass, what other micro-batches compute beside its calls is told apart from its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.drawing.pipeline_course import MOST_RANKS, SPAN_COLOURS, RankSpan, draw_ranks, rank_spans
from commlayer.drawing.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    VERMILLION,
    name_rows,
    new_figure,
    styled,
)
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.conflicts import CallTimes, Forecast
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.traces.chrome_of_job import lane_place
from commlayer.traces.chrome_of_plan import complete_event, metadata_event
from commlayer.traces.intervals import rows_without_overlap
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["course_figure", "courses", "step_trace"]

_WIDTH = 11.0
_ROW = 0.34
"""Inches."""
_BAR = 0.78
_PALE = 0.35
_LANE_COLOURS = {"ep": VERMILLION, "tp": ORANGE, "pp": PURPLE, "cp": GREEN, "dp": BLUE}
_OTHERS = "#d8cfa0"
"""The colour of what other micro-batches compute beside a pass whose calls are looked at."""
_FILLER = "filler"
_MERGED = "forward and another's backward"
_WORDS = {"": "compute", _FILLER: "other micro-batches"}
_MANY = 100
"""Bars in a row that edges would hide."""


_Event = tuple[str, float, float, dict[str, Any]]
"""Name, start and end in µs, what else is known."""


class _Row(NamedTuple):
    """A thread of the trace."""

    name: str
    events: list[_Event]


def courses(estimate: StepEstimate) -> dict[str, Forecast]:
    """Return the simulated courses of an estimate, by name. Raises UsageError where the estimate
    has no course to show."""
    passes = {"forward": estimate.forward, "backward": estimate.backward, _MERGED: estimate.merged}
    simulated = {name: forecast for name, forecast in passes.items() if forecast is not None}
    if not simulated:
        raise UsageError("the estimate has no course of its step to show: ask Estimator.estimate for it")
    return simulated


def step_trace(estimate: StepEstimate) -> dict[str, Any]:
    """The trace as the JSON object that Chrome and Perfetto read.

    A process for the pipeline (a thread for each rank), and one for each direction: a thread for
    the program (what it computes and waits for), one for each lane (calls, from issue to end) and
    one for each resource (the steps of calls that occupy it). What overlaps on a thread goes into a
    second one of the same name: those programs draw no overlapping slices. ``ts`` and ``dur`` in
    µs.

    Raises UsageError as :func:`courses`.
    """
    passes = courses(estimate).items()
    views: dict[str, Iterable[_Row]] = {
        f"{_scope(name, each)}: {format_us(each.total_us)}": _rows(each) for name, each in passes
    }
    if ranks := rank_spans(estimate):
        rows = [
            _Row(f"pipeline rank {rank}", [(span.words, span.start, span.end, {}) for span in spans])
            for rank, spans in enumerate(ranks)
        ]
        views = {f"pipeline: {format_us(estimate.step_us)} a step": rows, **views}
    events: list[dict[str, Any]] = []
    for pid, (name, threads) in enumerate(views.items()):
        events.append(metadata_event("process_name", pid, 0, name=name))
        events.append(metadata_event("process_sort_index", pid, 0, sort_index=pid))
        tid = 0
        for row in threads:
            slices = [((round(1e3 * start), round(1e3 * end)), (what, known)) for what, start, end, known in row.events]
            for track in rows_without_overlap(slices):
                events.append(metadata_event("thread_name", pid, tid, name=row.name))
                events.append(metadata_event("thread_sort_index", pid, tid, sort_index=tid))
                for span_ns, (what, known) in track:
                    events.append(complete_event(what, row.name, pid, tid, span_ns, known))
                tid += 1
    about = {
        "setup": str(estimate.setup),
        "cluster": estimate.cluster,
        "software": estimate.software,
        "step_us": round(estimate.step_us, 3),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@styled
def course_figure(estimate: StepEstimate, title: str = "") -> Figure:
    """Draw the pipeline's ranks, forward and backward, one above the other, each over its own time.

    Of a pass: what the program computes (and waits for, dark), then a row for each lane. Full
    colour: a step of one of its calls occupies a link; pale: a call is under way, but held, or
    between its steps.

    Raises UsageError as :func:`courses`.
    """
    shown = courses(estimate)
    ranks = rank_spans(estimate)
    lanes = {name: _lanes(forecast) for name, forecast in shown.items()}
    rows = [min(len(ranks), MOST_RANKS)] * bool(ranks) + [1 + len(each) for each in lanes.values()]
    figure = new_figure(_WIDTH, 1.3 + sum(0.75 + _ROW * count for count in rows))
    panels = list(figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0])
    if ranks:
        axes = panels.pop(0)
        draw_ranks(axes, estimate, ranks, _time_axis(axes, estimate.step_us))
        name_rows(axes, [f"rank {rank}" for rank in range(rows[0])])
    for axes, (name, forecast) in zip(panels, shown.items(), strict=True):
        unit_us = _time_axis(axes, forecast.total_us)
        spans = {
            SPAN_COLOURS["forward"]: [(start, end) for what, start, end in forecast.computed if what != _FILLER],
            _OTHERS: [(start, end) for what, start, end in forecast.computed if what == _FILLER],
            SPAN_COLOURS["wait"]: [(start, end) for _, start, end in forecast.waited],
        }
        for colour, each in spans.items():
            _bars(axes, 0, each, unit_us, colour, 1.0)
        for row, lane in enumerate(lanes[name], start=1):
            times = [call for call in forecast.calls.values() if call.call.row == lane]
            colour = _LANE_COLOURS.get(lane, FAINT)
            _bars(axes, row, [(call.issued_us, call.end_us) for call in times], unit_us, colour, _PALE)
            _bars(axes, row, [span for call in times for span in call.spans], unit_us, colour, 1.0)
        name_rows(axes, ["program", *(lane or "no lane" for lane in lanes[name])])
        exposed = f", of which {format_us(forecast.exposed_us)} waiting" if forecast.exposed_us else ""
        axes.set_title(f"{_scope(name, forecast)}   {format_us(forecast.total_us)}{exposed}", fontsize=9.5, pad=3)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    others = any(name == _FILLER for each in shown.values() for name, _, _ in each.computed)
    _legend(figure, sorted({lane for each in lanes.values() for lane in each}, key=lane_place), ranks, others=others)
    return figure


def _time_axis(axes: Axes, end_us: float) -> float:
    """Its unit in µs."""
    unit_us, unit = (1e3, "ms") if end_us >= 2e3 else (1.0, "µs")
    axes.set_xlim(0, 1.01 * end_us / unit_us)
    axes.set_xlabel(f"predicted time ({unit})", fontsize=8.5, labelpad=1)
    return unit_us


def _scope(name: str, forecast: Forecast) -> str:
    """The words on what was simulated: all layers of a stage where data parallelism's calls meet
    them, else one layer."""
    is_edge = name != _MERGED and "dp" in _lanes(forecast)
    return f"{name} of a stage, at the step's edge" if is_edge else f"{name} of a layer"


def _lanes(forecast: Forecast) -> list[str]:
    return sorted({times.call.row for times in forecast.calls.values()}, key=lane_place)


def _rows(forecast: Forecast) -> Iterator[_Row]:
    program: list[_Event] = [(_WORDS.get(name, name), start, end, {}) for name, start, end in forecast.computed]
    program += [(f"wait for {name}", start, end, {}) for name, start, end in forecast.waited if end > start]
    yield _Row("program", sorted(program, key=lambda event: event[1:3]))
    for lane in _lanes(forecast):
        times = [each for each in forecast.calls.values() if each.call.row == lane]
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


def _bars(axes: Axes, row: int, spans: list[tuple[float, float]], unit_us: float, colour: str, opacity: float) -> None:
    bars = [(start / unit_us, (end - start) / unit_us) for start, end in spans if end > start]
    edge = PAPER if colour in (SPAN_COLOURS["forward"], SPAN_COLOURS["wait"], _OTHERS) and len(bars) < _MANY else colour
    axes.broken_barh(bars, (row - _BAR / 2, _BAR), color=colour, alpha=opacity, linewidth=0.3, edgecolor=edge)


_NAMES = {
    "backward": "backward",
    "weights": "weight gradients",
    "wait": "waits",
    "parameters": "gathering of weights, exposed",
    "gradients": "sum of gradients, exposed",
    "optimizer": "optimizer",
}


def _legend(figure: Figure, lanes: Sequence[str], ranks: Sequence[Sequence[RankSpan]], *, others: bool) -> None:
    from matplotlib.patches import Patch

    kinds = {span.kind for spans in ranks for span in spans} | {"wait"}
    kinds |= {"backward"} if "merged" in kinds else set()
    handles = [Patch(color=SPAN_COLOURS["forward"], label="forward, or computes" if ranks else "computes")]
    handles += [Patch(color=SPAN_COLOURS[kind], label=label) for kind, label in _NAMES.items() if kind in kinds]
    handles += [Patch(color=_OTHERS, label="other micro-batches")] if others else []
    handles += [
        Patch(color=_LANE_COLOURS.get(lane, FAINT), label=f"{lane} calls" if lane else "no lane") for lane in lanes
    ]
    handles.append(Patch(color=INK, alpha=_PALE, label="pale: held, or between steps"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))

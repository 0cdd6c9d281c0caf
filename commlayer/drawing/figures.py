"""The figures: timelines of plans, times of a benchmark, loads of experts.

All return a matplotlib ``Figure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from commlayer.drawing.style import (
    BEYOND,
    BLUE,
    FAINT,
    FIGURE_WIDTH,
    GREEN,
    INK,
    OP_COLOURS,
    PAPER,
    VERMILLION,
    byte_axis,
    name_rows,
    new_figure,
    save_figure,
    styled,
)
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.plan import Op
from commlayer.scheduler.price import Timeline
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bench_figure", "loads_figure", "plans_figure", "save_figure", "timeline_figure"]

_BAR = 0.76
"""Height of a bar, where a row is 1 high."""
_BRIGHTEST = 4.0
"""The load, in times the mean, from which on all is of one colour."""
_PREDICTED, _MEASURED = 0.38, 1.0
"""Opacity of bars."""


@styled
def timeline_figure(predicted: Timeline, measured: Timeline | None = None, title: str = "") -> Figure:
    """Draw one plan as bars over time, a row for each resource; the prediction is pale and above
    what was measured."""
    shown = [predicted] + ([measured] if measured is not None else [])
    rows = _resources(shown)
    figure = new_figure(FIGURE_WIDTH, 1.35 + (0.62 if measured else 0.42) * len(rows))
    axes = figure.add_subplot()
    end_us = max(timeline.total_us for timeline in shown) or 1.0
    unit_us, unit = _unit(end_us)
    if measured is None:
        _bars(axes, predicted, rows, end_us, unit_us)
    else:
        _bars(axes, predicted, rows, end_us, unit_us, offset=-_BAR / 4, height=_BAR / 2, alpha=_PREDICTED)
        _bars(axes, measured, rows, end_us, unit_us, offset=_BAR / 4, height=_BAR / 2)
    _time_axes(axes, rows, end_us, unit_us)
    axes.set_xlabel(f"time ({unit})")
    axes.set_title(f"{title or predicted.plan.name}\n", pad=2)
    words = f"{predicted.plan.name}: predicted {format_us(predicted.total_us)}"
    if measured is None:
        words += f", bottleneck {predicted.bottleneck.value}"
    else:
        words += f", measured {format_us(measured.total_us)}"
    axes.text(0, 1.02, words, transform=axes.transAxes, color=FAINT, va="bottom")
    ops = {step.op for timeline in shown for step in timeline.plan.steps}
    figure.legend(handles=_legend(ops, with_kinds=measured is not None), loc="outside lower center", ncols=5)
    return figure


@styled
def plans_figure(timelines: Mapping[str, Timeline], title: str = "", *, chosen: str | None = None) -> Figure:
    """Draw several plans by their names, one above the other over one time axis."""
    rows = {name: _resources([timeline]) for name, timeline in timelines.items()}
    counts = [len(each) for each in rows.values()]
    figure = new_figure(FIGURE_WIDTH, 1.3 + sum(0.42 + 0.3 * count for count in counts))
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    end_us = max((timeline.total_us for timeline in timelines.values()), default=0.0) or 1.0
    unit_us, unit = _unit(end_us)
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _bars(axes, timeline, rows[name], end_us, unit_us)
        _time_axes(axes, rows[name], end_us, unit_us)
        mark = "   ◀ chosen" if name == chosen else ""
        weight = "bold" if name == chosen else "normal"
        axes.set_title(f"{name}   {format_us(timeline.total_us)}{mark}", fontsize=9.5, fontweight=weight, pad=3)
        axes.axvline(timeline.total_us / unit_us, color=INK, linewidth=1.0)
    panels[-1].set_xlabel(f"predicted time ({unit})")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    ops = {step.op for timeline in timelines.values() for step in timeline.plan.steps}
    figure.legend(handles=_legend(ops), loc="outside lower center", ncols=5)
    return figure


@styled
def bench_figure(result: BenchResult) -> Figure:
    """Draw time over size of torch's flat all_to_all, of the chosen plan, of the best one and of
    the wire; below, the ratios.

    Raises:
        UsageError: a result without points.
    """
    if not result.points:
        raise UsageError("expected a result with at least one size, got none: there is nothing to draw")
    figure = new_figure(FIGURE_WIDTH, 6.6)
    times, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    sizes = [point.logical_bytes for point in result.points]
    lines: list[tuple[str, str, str, Callable[[BenchPoint], BenchRow]]] = [
        ("torch flat", VERMILLION, "s", lambda point: point.torch),
        ("chosen", BLUE, "o", lambda point: point.chosen),
        ("best measured", GREEN, "^", lambda point: point.best),
    ]
    for name, colour, marker, pick in lines:
        rows = [pick(point) for point in result.points]
        look = {
            "color": colour,
            "marker": marker,
            "markersize": 5,
            "linewidth": 1.8 if name != "best measured" else 1.0,
        }
        if name == "best measured":
            look |= {"markerfacecolor": "none", "markersize": 8, "linestyle": ":"}
        times.plot(sizes, [row.p50_us / 1e3 for row in rows], label=name, **look)
        if name == "torch flat":
            continue
        spread = [[row.ratio - row.ratio_low for row in rows], [row.ratio_high - row.ratio for row in rows]]
        ratios.errorbar(sizes, [row.ratio for row in rows], yerr=spread, capsize=2, elinewidth=0.8, **look)
    limits = [(p.logical_bytes, p.wire_limit_us, p.torch.p50_us) for p in result.points if p.wire_limit_us is not None]
    if limits:
        dashed = {"color": INK, "linestyle": (0, BEYOND), "linewidth": 1.1}
        times.plot([size for size, *_ in limits], [us / 1e3 for _, us, _ in limits], label="wire limit", **dashed)
        ratios.plot([size for size, *_ in limits], [us / flat for _, us, flat in limits], **dashed)
    _all_rows(times, result.points)
    times.set_xscale("log", base=2)
    times.set_yscale("log")
    times.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    times.set_ylabel("time (ms)")
    emulated = "emulated" if result.is_emulated else "measured"
    links = f": inter {result.inter} a node, intra {result.intra or 'unshaped'}" if result.inter else ""
    times.set_title(f"all_to_all on {result.topology}, {emulated}{links}")
    ratios.axhline(1.0, color=VERMILLION, linewidth=1.2)
    ratios.set_ylim(0, max(1.15, 1.05 * max(point.chosen.ratio_high for point in result.points)))
    ratios.set_ylabel("time / torch flat")
    byte_axis(ratios, "send buffer of one rank")
    figure.legend(loc="outside lower center", ncols=6)
    return figure


@styled
def loads_figure(loads: ExpertLoads, layer: int, ranks: dict[str, Any]) -> Figure:
    """Draw one layer: its experts over time, and for each name of ``ranks`` an array [steps, ranks]
    of rows."""
    panels = {"experts": loads.counts[:, layer], **ranks}
    figure = new_figure(FIGURE_WIDTH, 1.4 + 1.7 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(grid, panels.items(), strict=True):
        image = axes.imshow(
            (rows / rows.mean(1, keepdims=True).clip(1e-9)).T,
            aspect="auto",
            interpolation="nearest",
            origin="lower",
            cmap="cividis",
            vmin=0,
            vmax=_BRIGHTEST,
        )
        axes.grid(visible=False)
        axes.set_title(name)
        axes.set_ylabel("expert" if name == "experts" else "rank")
    grid[-1].set_xlabel("step" if loads.stride == 1 else f"step of {loads.stride} calls")
    figure.colorbar(image, ax=list(grid), label="choices, times the mean", extend="max")
    figure.suptitle(f"{loads.layers[layer]}: {loads.source}")
    return figure


def _resources(timelines: Sequence[Timeline]) -> list[Resource]:
    used = {step.resource for timeline in timelines for step in timeline.plan.steps}
    return [resource for resource in Resource if resource in used]


def _unit(end_us: float) -> tuple[float, str]:
    return (1e3, "ms") if end_us >= 1e3 else (1.0, "µs")


def _bars(
    axes: Axes,
    timeline: Timeline,
    rows: Sequence[Resource],
    end_us: float,
    unit_us: float,
    *,
    offset: float = 0.0,
    height: float = _BAR,
    alpha: float = _MEASURED,
) -> None:
    for step, (start, end) in zip(timeline.plan.steps, timeline.spans, strict=True):
        y = rows.index(step.resource) + offset
        width = (end - start) / unit_us
        draw = partial(axes.barh, y, width, height, start / unit_us, edgecolor=PAPER, linewidth=0.7, zorder=2)
        draw(color=PAPER)  # else the grid shines through
        draw(color=OP_COLOURS[step.op], alpha=alpha)
        # The chunk's number, or the operation where there is one chunk; nothing where it does not
        # fit.
        label = str(step.chunk) if timeline.plan.chunks > 1 else step.op.value
        if (end - start) / end_us > 0.011 * len(label) + 0.004:
            colour = INK if alpha < _MEASURED else "white"
            middle = start / unit_us + width / 2
            axes.text(middle, y, label, ha="center", va="center_baseline", color=colour, fontsize=8, zorder=3)


def _time_axes(axes: Axes, rows: Sequence[Resource], end_us: float, unit_us: float) -> None:
    axes.set_xlim(0, 1.02 * end_us / unit_us)
    name_rows(axes, [resource.value.upper() for resource in rows])


def _legend(ops: set[Op], *, with_kinds: bool = False) -> list[Artist]:
    from matplotlib.patches import Patch

    handles: list[Artist] = [Patch(color=OP_COLOURS[op], label=op.value) for op in OP_COLOURS if op in ops]
    if with_kinds:
        handles.append(Patch(color=FAINT, alpha=_PREDICTED, label="predicted (pale, above)"))
        handles.append(Patch(color=FAINT, label="measured (below)"))
    return handles


def _all_rows(axes: Axes, points: Sequence[BenchPoint]) -> None:
    """Everything else that was run, small and grey: what the choice was made from."""
    for kind, marker, name in (("plan", ".", "other plans"), ("baseline", "x", "baselines")):
        others = [
            (point.logical_bytes, row.p50_us / 1e3)
            for point in points
            for row in point.rows
            if row.kind == kind and not row.is_chosen
        ]
        if others:
            sizes, times = zip(*others, strict=True)
            axes.plot(
                sizes, times, linestyle="", marker=marker, markersize=5, color=FAINT, alpha=0.6, label=name, zorder=1
            )

"""The figures of mappings: what a step is made of, what fills the memory, how it scales, what would
change it.

All return a matplotlib ``Figure``. Bars of steps are as in MoE Parallel Folding's figures 5 and 6:
one for each mapping, its parts end to end. Parts of a kind have like colours: computing blue and
green, communication red, yellow and purple, waiting grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.drawing.mapping_cells import other_bests
from commlayer.drawing.style import COLOURS, FIGURE_WIDTH, INK, MARKERS, PAPER, name_rows, new_figure, styled
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.search import SearchResult
from commlayer.units import format_us

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

__all__ = ["PARTS", "FigureLine", "breakdown_figure", "curves_figure", "labelled", "mapping_name", "memory_figure"]

_BAR = 0.66
"""Height of a bar, where a row is 1 high."""
_ROW = 0.52
"""Height of a row in inches."""
_LEAST = 0.004
"""The least share of the longest bar that is drawn: parts that are shorter at every mapping are put
together as ``other``."""
_END = 0.13
"""The room, as a part of the longest bar, for what is written behind a memory bar."""
_ROOM = 1.5
"""The least room on both sides of a name in its bar, in pixels."""
_OTHER = "other"
_REST = "#4f5963"
"""Colour of parts that have none of their own."""

PARTS = {
    "attention": "#0072b2",
    "experts": "#009e73",
    "dense": "#7db8d8",
    "head": "#a9d0e4",
    "memory": "#8fcbb6",
    "recompute": "#c3d9a5",
    "host": "#8a7a5c",
    "dispatch": "#d55e00",
    "combine": "#e98a4b",
    "tp": "#e69f00",
    "cp": "#f0c752",
    "pp": "#cc79a7",
    "gradients": "#a04a7b",
    "parameters": "#dba9c6",
    "offload": "#6f5b94",
    "bubble": "#c4cad1",
    "optimizer": "#8b949e",
}
"""Colours of the parts of a step, and their order in the legend."""
_MEMORY = {
    "weights": "#0072b2",
    "gradients": "#a04a7b",
    "optimizer": "#8b949e",
    "activations": "#009e73",
    "buffers": "#e69f00",
}
_GB = 1e9


class FigureLine(NamedTuple):
    """One curve: ``points`` are (value, result); a result that is None leaves a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


def mapping_name(setup: Setup) -> str:
    """Name ``setup`` in two short lines: the degrees that are not 1, then what else is not as
    usual."""
    degrees = {
        "TP": setup.tp,
        "CP": setup.cp,
        "EP": setup.ep,
        "ETP": setup.etp,
        "PP": setup.pp,
        "VPP": setup.vpp,
        "DP": setup.dp,
    }
    words = str(setup).split(", ")[1:]
    return " ".join(f"{name}{size}" for name, size in degrees.items() if size > 1) + "\n" + ", ".join(words)


def labelled(result: SearchResult) -> dict[str, StepEstimate]:
    """Name the mappings that a search found, by rank and mapping: the ranking, then the best folded
    or unfolded one if it is not among them.
    """
    ranked = {f"{rank}  {mapping_name(each.setup)}": each for rank, each in enumerate(result.shown, start=1)}
    others = {f"best {kind}  {mapping_name(best.setup)}": best for kind, best in other_bests(result).items()}
    return ranked | others


@styled
def breakdown_figure(estimates: Mapping[str, StepEstimate], title: str = "") -> Figure:
    """Draw a bar for each mapping by its name, of its step's parts; behind it the step's time and
    MFU.

    Raises:
        UsageError: no mapping to draw.
    """
    _check(estimates, "mapping")
    steps = {name: dict(estimate.parts) for name, estimate in estimates.items()}
    longest = max(estimate.step_us for estimate in estimates.values())
    unit_us, unit = (1e6, "s") if longest >= 2e6 else (1e3, "ms")
    ends = [f"{format_us(each.step_us)}, MFU {each.mfu:.1%}" for each in estimates.values()]
    scaled = {name: {part: us / unit_us for part, us in parts.items()} for name, parts in steps.items()}
    return _stacked(scaled, PARTS, ends, title or "Where a step's time goes", f"step time ({unit})")


@styled
def memory_figure(estimates: Mapping[str, StepEstimate], title: str = "") -> Figure:
    """Draw a bar for each mapping by its name, of what fills the fullest GPU, against what a GPU
    has for the job.

    Raises:
        UsageError: no mapping to draw.
    """
    _check(estimates, "mapping")
    bars = {name: {part: getattr(each.memory, part) / _GB for part in _MEMORY} for name, each in estimates.items()}
    ends = [
        f"{each.memory.total / _GB:.1f} GB" + ("" if each.fits else "   does not fit") for each in estimates.values()
    ]
    limits = sorted({round(each.memory_limit / _GB, 1) for each in estimates.values()})
    return _stacked(bars, _MEMORY, ends, title or "What fills the fullest GPU", "memory (GB)", limits)


@styled
def curves_figure(
    lines: Sequence[FigureLine],
    title: str,
    x_label: str,
    y_label: str,
    *,
    crossings: Sequence[tuple[float, str]] = (),
    percent: bool = False,
    words: Sequence[str] = (),
) -> Figure:
    """Draw one result over one value, a curve for each alternative.

    Args:
        crossings: values at which two curves meet, and what to write there.
        percent: results are fractions.
        words: the values are these words, in order, and not numbers: x counts from 0.

    Raises:
        UsageError: nothing to draw.
    """
    drawn = [line for line in lines if any(result is not None for _, result in line.points)]
    _check(drawn, "curve with a result")
    figure = new_figure(FIGURE_WIDTH, 4.4)
    axes = figure.add_subplot()
    for index, line in enumerate(drawn):
        values = [value for value, _ in line.points]
        results = [math.nan if result is None else result for _, result in line.points]
        width = 1.6 + 0.7 * (len(drawn) - 1 - index)  # curves that coincide stay visible
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(
            values, results, color=colour, marker=marker, linewidth=width, markersize=3.3 * width, label=line.name
        )
    axes.set_ylim(0, 1.12 * max(result for line in drawn for _, result in line.points if result is not None))
    ticks = sorted({value for line in drawn for value, _ in line.points})
    if words:
        axes.set_xticks(range(len(words)), words)
        axes.set_xlim(-0.3, len(words) - 0.7)
    else:
        if ticks[0] > 0 and ticks[-1] >= 8 * ticks[0]:  # they grow by factors
            axes.set_xscale("log", base=2)
            axes.set_xticks([], minor=True)
        binary = ticks[-1] >= 2**14 and all(value % 1024 == 0 for value in ticks)
        ticks = ticks[:: math.ceil(len(ticks) / 9)]
        axes.set_xticks(ticks, [_short(value, binary=binary) for value in ticks])
    _crossings(axes, crossings)
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    if len(drawn) > 1:
        figure.legend(loc="outside lower center", ncols=min(4, len(drawn)))
    return figure


def _check(given: object, what: str) -> None:
    if not given:
        raise UsageError(f"expected at least one {what}, got none: there is nothing to draw")


def _stacked(
    bars: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    ends: Sequence[str],
    title: str,
    label: str,
    limits: Sequence[float] = (),
) -> Figure:
    longest = max(sum(parts.values()) for parts in bars.values())
    # The parts worth a colour, in order, and all else as one part.
    names = dict.fromkeys([*colours, *(part for parts in bars.values() for part in parts)])
    shown = [name for name in names if any(parts.get(name, 0.0) > _LEAST * longest for parts in bars.values())]
    bars = {
        bar: {
            **{part: parts.get(part, 0.0) for part in shown},
            _OTHER: sum(size for part, size in parts.items() if part not in shown),
        }
        for bar, parts in bars.items()
    }
    shown += [_OTHER] * any(parts[_OTHER] > 0 for parts in bars.values())
    figure = new_figure(FIGURE_WIDTH, 1.35 + _ROW * len(bars) + 0.22 * math.ceil((len(shown) + bool(limits)) / 6))
    axes = figure.add_subplot()
    end = max(1.34 * longest, 1.04 * max(limits, default=0.0))
    named: list[tuple[Rectangle, str, str]] = []
    for row, parts in enumerate(bars.values()):
        edge = 0.0
        for part in shown:
            width = parts.get(part, 0.0)
            colour = colours.get(part, _REST)
            drawn = axes.barh(row, width, _BAR, left=edge, color=colour, edgecolor=PAPER, linewidth=0.6, zorder=2)
            named += [(bar, part, colour) for bar in drawn if width > _LEAST * end]
            edge += width
        # a line of a limit must not strike what is written there through
        edge = max([edge, *(limit for limit in limits if edge <= limit < edge + _END * longest)])
        axes.text(edge + 0.01 * longest, row, ends[row], va="center", color=INK, fontsize=8.5, zorder=4)
    for limit in limits:
        axes.axvline(limit, color=INK, linewidth=1.2, linestyle=(0, (4.0, 2.0)), zorder=3)
    name_rows(axes, list(bars))
    axes.set_xlim(0, end)
    axes.set_xlabel(label)
    axes.set_title(title)
    figure.legend(handles=_legend(shown, colours, limits), loc="outside lower center", ncols=6)
    _name_parts(figure, named)
    return figure


def _name_parts(figure: Figure, bars: Sequence[tuple[Rectangle, str, str]]) -> None:
    """Write each part's name in its bar where, as all is laid out, there is room; ``bars``: with
    name and colour."""
    written = []
    for bar, part, colour in bars:
        # White on dark bars, dark on pale ones; not INK, which follows the reader's theme as bars
        # do not.
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "#1f2428"
        start, width, row = bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2
        behind = {"facecolor": colour, "edgecolor": "none", "pad": 0.5}  # a line of a limit must not strike it through
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "zorder": 4, "bbox": behind}
        written.append((bar, bar.axes.text(start + width / 2, row, part, color=ink, **look)))  # type: ignore[union-attr]
    figure.draw_without_rendering()
    for bar, text in written:
        room, needed = bar.get_window_extent(), text.get_window_extent()
        if needed.x0 < room.x0 + _ROOM or needed.x1 > room.x1 - _ROOM:
            text.remove()


def _legend(shown: Sequence[str], colours: Mapping[str, str], limits: Sequence[float]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [Patch(color=colours.get(part, _REST), label=part) for part in shown]
    if limits:
        dashed = Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4.0, 2.0)), label="what a GPU has for it")
        handles.append(dashed)
    return handles


def _short(value: float, *, binary: bool) -> str:
    """65536 as 64K, where all are such; 0.5 as it is."""
    if binary:
        return f"{value / 1024:g}K" if value < 2**20 else f"{value / 2**20:g}M"
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _crossings(axes: Axes, crossings: Sequence[tuple[float, str]]) -> None:
    """A dashed line at each, its words beside it; every other one lower, lest neighbours
    overlap."""
    low, high = axes.get_xlim()
    middle = math.sqrt(low * high) if axes.get_xscale() == "log" else (low + high) / 2
    for index, (value, words) in enumerate(crossings):
        axes.axvline(value, color=INK, linewidth=1.1, linestyle=(0, (4.0, 2.0)), zorder=1)
        is_right = value > middle
        axes.annotate(
            words,
            (value, 0.04 + 0.09 * (index % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if is_right else 5, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            fontsize=8.5,
            color=INK,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.0},
        )

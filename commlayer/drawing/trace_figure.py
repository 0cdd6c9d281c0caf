"""The figure of a job's traces: what its ranks did, lane by lane over one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from commlayer.drawing.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    VERMILLION,
    name_rows,
    new_figure,
    styled,
)
from commlayer.profiles.errors import UsageError
from commlayer.traces.analyse import Selected
from commlayer.traces.chrome_of_job import lane_place, running
from commlayer.traces.intervals import Interval, union

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LANE_COLOURS", "lanes_figure"]

LANE_COLOURS = {"ep": VERMILLION, "tp": ORANGE, "pp": PURPLE, "cp": GREEN, "dp": BLUE}
_WIDTH = 11.0
_ROW, _GAP = 0.2, 0.6
"""Height of a row in inches; space between ranks in rows."""
_BAR = 0.84
"""Height of a bar in rows."""
_PALE = 0.3
_MAX_RANKS = 16
_PIXELS = 4000
"""Across the picture: bars that are nearer to each other than one of these become one, or files
would grow without end."""


class _Bars(NamedTuple):
    """``row``: from the top of the rank's band. ``spans``: ns since the job's origin, disjoint, in
    order."""

    row: int
    colour: str
    opacity: float
    spans: list[Interval]


@styled
def lanes_figure(ranks: Sequence[Selected], title: str = "") -> Figure:
    """Draw a band for each rank (of the first 16): where its program was blocked, and under it a
    row for each lane. Full colour: a step of the lane was under way; pale: a call was, but held, or
    between its steps. Times are of rank 0's clock.

    Raises:
        UsageError: no call to draw.
    """
    shown = list(ranks[:_MAX_RANKS])
    lanes = sorted({call.lane for rank in shown for call in rank.calls}, key=lane_place)
    bands = [_bars(rank, lanes) for rank in shown]
    spans = [span for bars in bands for bar in bars for span in bar.spans]
    if not spans:
        raise UsageError("expected traces with calls whose ends are known, got none: there is nothing to draw")
    begin_ns, end_ns = min(start for start, _ in spans), max(end for _, end in spans)
    unit_ns, unit = (1e6, "ms") if end_ns - begin_ns >= 1e6 else (1e3, "µs")
    height = len(lanes) + 1 + _GAP
    figure = new_figure(_WIDTH, 1.2 + _ROW * height * len(shown))
    axes = figure.add_subplot()
    for row, bars in enumerate(bands):
        for bar in bars:
            joined = _joined(bar.spans, (end_ns - begin_ns) // _PIXELS)
            axes.broken_barh(
                [((start - begin_ns) / unit_ns, (end - start) / unit_ns) for start, end in joined],
                (row * height + bar.row + (1 - _BAR) / 2, _BAR),
                color=bar.colour,
                alpha=bar.opacity,
                linewidth=0,
            )
    axes.set_xlim(0, (end_ns - begin_ns) / unit_ns)
    axes.set_xlabel(f"time ({unit})")
    name_rows(axes, [f"rank {rank.trace.rank}" for rank in shown], height, -_GAP / 2)
    left_out = f" (the first {_MAX_RANKS} of {len(ranks)} ranks)" if len(ranks) > _MAX_RANKS else ""
    axes.set_title(f"{title}{left_out}")
    _legend(figure, lanes)
    return figure


def _bars(rank: Selected, lanes: Sequence[str]) -> list[_Bars]:
    bars = [_Bars(0, INK, 1.0, _comparable(rank, (span for call in rank.calls for span in call.waited)))]
    for row, lane in enumerate(lanes, start=1):
        calls = [call for call in rank.calls if call.lane == lane and call.start_ns]
        under_way = [(call.start_ns, call.end_ns or rank.trace.closed_ns) for call in calls]
        busy = [span for call in calls for span in (running(call) if call.steps else [(call.start_ns, call.end_ns)])]
        bars.append(_Bars(row, _colour(lane), _PALE, _comparable(rank, under_way)))
        bars.append(_Bars(row, _colour(lane), 1.0, _comparable(rank, busy)))
    return bars


def _comparable(rank: Selected, spans: Iterable[Interval]) -> list[Interval]:
    return [(rank.to_job_ns(start), rank.to_job_ns(end)) for start, end in union(spans)]


def _joined(spans: Sequence[Interval], least_ns: int) -> list[Interval]:
    """``spans`` without gaps, and with nothing shorter, than can be seen."""
    return union((start, max(end, start + least_ns)) for start, end in spans)


def _legend(figure: Figure, lanes: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=INK, label="program blocked")]
    handles += [Patch(color=_colour(lane), label=lane or "no lane") for lane in lanes]
    handles.append(Patch(color=FAINT, alpha=_PALE, label="pale: held, or between steps"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _colour(lane: str) -> str:
    return LANE_COLOURS.get(lane, FAINT)

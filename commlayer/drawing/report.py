"""The report of one run: one HTML file without anything from outside, readable in light and in dark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from statistics import median
from typing import NamedTuple

from commlayer.drawing.efficiency import efficiency_figure
from commlayer.drawing.figures import bench_figure, timeline_figure
from commlayer.drawing.page import drawing, render
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles.counted import counted
from commlayer.profiles.files import write_file
from commlayer.profiles.profile import Profile
from commlayer.scheduler.price import Timeline
from commlayer.units import format_bytes, format_us

__all__ = ["write_report"]

_OPEN_POINTS = 3
"""So many sizes are shown open; of more, only the largest."""
Fact = tuple[str, str]
"""A value and what it is, or a name and its value."""


def write_report(
    path: str | os.PathLike[str],
    profile: Profile,
    result: BenchResult,
    timelines: Sequence[tuple[str, Timeline, Timeline]] = (),
) -> None:
    """Write the report of what a run found.

    Without matplotlib the report has no figures, and says how to get them.

    Args:
        path: the .html file; replaced if it exists.
        profile: what the decisions were made with.
        result: what was measured.
        timelines: title, predicted and measured timeline of each plan to draw.

    Raises:
        OSError: the file cannot be written.
    """
    is_drawn = bool(result.points) and result.is_comparable
    text = render(
        "bench.html",
        title=f"commlayer on {result.topology}",
        result=result,
        facts=_facts(result, profile),
        summary=_summary(result),
        bad_card=_bad_card(result),
        points=_points(result),
        size_figure=drawing("size", lambda: bench_figure(result)) if is_drawn else None,
        timelines=[
            drawing(f"timeline{index}", partial(timeline_figure, predicted, measured, name), name)
            for index, (name, predicted, measured) in enumerate(timelines)
        ],
        links=_links(profile),
        links_figure=drawing("links", lambda: efficiency_figure(profile)),
        environment=_environment(result, profile),
    )
    write_file(path, text)


def _facts(result: BenchResult, profile: Profile) -> list[str]:
    date = result.environment.get("date") or datetime.now(timezone.utc).strftime("%Y-%m-%d")
    host = result.environment.get("host")
    where = ["emulated cluster" if result.is_emulated else "real cluster"]
    where += [f"on {host}"] if host else []
    rates = [f"{name} {rate} a node" for name, rate in (("inter", result.inter), ("intra", result.intra)) if rate]
    return [" ".join(where), *rates, f"profile {profile.name} ({profile.kind})", date]


def _summary(result: BenchResult) -> list[Fact]:
    """The numbers at the top; where nothing can be compared only whether all bits were right."""
    if not result.points:
        return []
    bits = ("bit-equal", "every result, to torch's")
    if result.num_wrong:
        bits = (str(result.num_wrong), "bytes not equal to torch's, the most on any rank")
    if not result.is_comparable:
        return [bits]
    largest = max(result.points, key=lambda point: point.logical_bytes)
    fastest = min(result.points, key=lambda point: point.chosen.ratio)
    errors = [abs(error) for point in result.points if (error := point.chosen.error) is not None]
    to_best = [point.chosen.p50_us / point.best.p50_us for point in result.points if point.best.p50_us]
    return [
        (
            f"{1 / fastest.chosen.ratio:.1f}×",
            f"as fast as torch's all_to_all, at {format_bytes(fastest.logical_bytes)} a rank",
        ),
        (
            f"{largest.chosen.ratio:.3f}",
            f"of flat's time at {format_bytes(largest.logical_bytes)}{_limit_words(largest)}",
        ),
        (
            f"{median(errors):.0%}",
            f"error of the chosen plans' predicted times, median of {counted(len(errors), 'size')}",
        )
        if errors
        else ("–", "no predictions"),
        (
            f"{median(to_best):.2f}",
            f"chosen / best measured plan, median of {counted(len(to_best), 'size')}, at most {max(to_best):.2f}",
        )
        if to_best
        else ("–", "no plans were run"),
        bits,
    ]


def _bad_card(result: BenchResult) -> int:
    """The place of the number that is marked as bad, or −1."""
    return len(_summary(result)) - 1 if result.num_wrong else -1


def _limit_words(point: BenchPoint) -> str:
    if point.wire_limit_us is None:
        return ""
    return f"; the wire alone takes {point.wire_limit_us / point.torch.p50_us:.3f}"


class _Row(NamedTuple):
    """A row of a point's table. ``bar``: the length of its bar in percent, or None; ``num_wrong``: None where nothing ran."""

    css: str
    cells: list[str]
    bar: float | None
    num_wrong: int | None


class _Point(NamedTuple):
    """One size, what was chosen there and why, and all that was run."""

    is_open: bool
    size: str
    about: str
    reason: str
    rows: list[_Row]


def _points(result: BenchResult) -> list[_Point]:
    """The largest size first."""
    ordered = sorted(result.points, key=lambda point: -point.logical_bytes)
    points = []
    for index, point in enumerate(ordered):
        chosen = point.chosen
        ratio = f", {chosen.ratio:.3f} of flat" if result.is_comparable else ""
        points.append(
            _Point(
                is_open=index == 0 or len(ordered) <= _OPEN_POINTS,
                size=format_bytes(point.logical_bytes),
                about=f"{chosen.name}, {format_us(chosen.p50_us)}{ratio}",
                reason=point.reason,
                rows=_rows(point, result.is_comparable),
            )
        )
    return points


def _rows(point: BenchPoint, with_ratios: bool) -> list[_Row]:
    widest = max([row.ratio for row in point.rows] + [1.0])
    kinds = {"torch": 0, "baseline": 1, "plan": 2}
    ordered = sorted(point.rows, key=lambda row: kinds.get(row.kind, 3))
    rows = [_row(row, widest, with_ratios) for row in ordered]
    if point.wire_limit_us is not None and with_ratios:
        limit = point.wire_limit_us / point.torch.p50_us
        cells = ["wire limit", "", "", format_us(point.wire_limit_us), "", "", f"{limit:.3f}"]
        rows.append(_Row("limit", cells, _bar(limit, widest), None))
    return rows


def _row(row: BenchRow, widest: float, with_ratios: bool) -> _Row:
    cells = [
        f"{row.name} ◀ chosen" if row.is_chosen else row.name,
        "" if row.chunks is None else str(row.chunks),
        "" if row.predicted_us is None else format_us(row.predicted_us),
        format_us(row.p50_us),
        f"{format_us(row.min_us)} … {format_us(row.max_us)}",
        "" if row.error is None else f"{row.error:+.0%}",
        f"{row.ratio:.3f}" if with_ratios else "",
    ]
    return _Row(
        css="chosen" if row.is_chosen else row.kind if row.kind in ("torch", "baseline") else "",
        cells=cells,
        bar=_bar(row.ratio, widest) if with_ratios else None,
        num_wrong=row.num_wrong,
    )


def _bar(ratio: float, widest: float) -> float:
    """The length of a bar, in percent of the longest; never too short to be seen."""
    return max(0.5, 100 * ratio / widest)


def _links(profile: Profile) -> list[Fact]:
    peaks = ", ".join(
        f"{name} {value:g} GB/s"
        for name, value in (
            ("inter", profile.peaks.inter_gbps),
            ("intra", profile.peaks.intra_gbps),
            ("device", profile.peaks.device_gbps),
        )
    )
    beside = ", ".join(
        f"{entry.resource} beside {entry.other} takes {entry.slowdown:.2f} times as long"
        for entry in profile.interference
    )
    return [
        ("peaks, one rank and direction", peaks),
        ("interference", beside or "none stored"),
        ("error", f"{profile.error:.1%} (median of the curves' hold-out errors)"),
        ("source", profile.source),
        ("fingerprint", profile.fingerprint),
    ]


def _environment(result: BenchResult, profile: Profile) -> list[Fact]:
    facts = [*sorted(result.environment.items()), ("profile of the run", f"{result.profile}, {result.fingerprint}")]
    others = [(f"profile's {name}", value) for name, value in sorted(profile.environment.items())]
    return [*facts, *(fact for fact in others if fact[1] not in result.environment.values())]

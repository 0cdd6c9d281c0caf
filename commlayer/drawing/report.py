"""The report of one run: one HTML file without anything from outside, readable in light and in dark."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from html import escape
from statistics import median

from commlayer.drawing.efficiency import efficiency_figure
from commlayer.drawing.figures import bench_figure, timeline_figure
from commlayer.drawing.page import GUIDE, cards, definitions, figure, page, section, table
from commlayer.measure.results import BenchPoint, BenchResult, BenchRow
from commlayer.profiles.counted import counted
from commlayer.profiles.files import write_file
from commlayer.profiles.profile import Profile
from commlayer.scheduler.price import Timeline
from commlayer.units import format_bytes, format_us

__all__ = ["write_report"]

_OPEN_POINTS = 3
"""So many sizes are shown open; of more, only the largest."""


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
    title = f"commlayer on {result.topology}"
    is_drawn = bool(result.points) and result.is_comparable
    body = [
        _header(result, profile),
        _cards(result),
        section("Results", *_points(result)) if result.points else "",
        section("Time and ratio over size", figure("size", lambda: bench_figure(result))) if is_drawn else "",
        section("Predicted over measured", *_timelines(timelines)) if timelines else "",
        section("What the links can do", _profile(profile), figure("links", lambda: efficiency_figure(profile))),
        section("Environment", _environment(result, profile)),
        section("How to read this", GUIDE),
    ]
    write_file(path, page(title, body))


def _header(result: BenchResult, profile: Profile) -> str:
    date = result.environment.get("date") or datetime.now(timezone.utc).strftime("%Y-%m-%d")
    host = result.environment.get("host")
    where = ["emulated cluster" if result.is_emulated else "real cluster"]
    where += [f"on {host}"] if host else []
    rates = [f"{name} {rate} a node" for name, rate in (("inter", result.inter), ("intra", result.intra)) if rate]
    facts = [" ".join(where), *rates, f"profile {profile.name} ({profile.kind})", date]
    warning = ""
    if not result.is_comparable:
        warning = (
            '<p class="note">Loopback, or wires of unknown rates: nothing says that one link was slower than another. The '
            "bits were checked; the times say nothing about a cluster, and no ratios are shown.</p>"
        )
    elif result.is_emulated:
        warning = (
            '<p class="note">Emulated: real processes and real bytes over slowed virtual links on one machine. Read the '
            "ratios, which compare runs taken alternately; absolute times belong to this machine only.</p>"
        )
    badge = ' <span class="badge">emulated</span>' if result.is_emulated else ""
    return (
        f"<header>\n<h1>all_to_all on {escape(result.topology)}{badge}</h1>\n"
        f'<p class="facts">{" · ".join(map(escape, facts))}</p>\n{warning}</header>'
    )


def _cards(result: BenchResult) -> str:
    if not result.points:
        return ""
    largest = max(result.points, key=lambda point: point.logical_bytes)
    fastest = min(result.points, key=lambda point: point.chosen.ratio)
    errors = [abs(error) for point in result.points if (error := point.chosen.error) is not None]
    num_wrong = result.num_wrong
    to_best = [point.chosen.p50_us / point.best.p50_us for point in result.points if point.best.p50_us]
    shown = [
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
        ("bit-equal", "every result, to torch's")
        if num_wrong == 0
        else (str(num_wrong), "bytes not equal to torch's, the most on any rank"),
    ]
    if not result.is_comparable:
        shown = shown[-1:]
    return cards(shown, len(shown) - 1 if num_wrong else -1)


def _limit_words(point: BenchPoint) -> str:
    if point.wire_limit_us is None:
        return ""
    return f"; the wire alone takes {point.wire_limit_us / point.torch.p50_us:.3f}"


def _points(result: BenchResult) -> Iterable[str]:
    ordered = sorted(result.points, key=lambda point: -point.logical_bytes)
    for index, point in enumerate(ordered):
        opened = " open" if index == 0 or len(ordered) <= _OPEN_POINTS else ""
        chosen = point.chosen
        with_ratios = result.is_comparable
        ratio = f", {chosen.ratio:.3f} of flat" if with_ratios else ""
        about = f"{escape(chosen.name)}, {format_us(chosen.p50_us)}{ratio}"
        summary = f"<b>{format_bytes(point.logical_bytes)}</b> a rank: {about}"
        yield (
            f"<details{opened}><summary>{summary}</summary>\n"
            f'<p class="reason">{escape(point.reason)}</p>\n{_point_table(point, with_ratios)}\n</details>'
        )


_COLUMNS = ("plan", "chunks", "predicted", "measured", "min … max", "error", "ratio to flat", "", "wrong")


def _point_table(point: BenchPoint, with_ratios: bool) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    widest = max([row.ratio for row in point.rows] + [1.0])
    kinds = {"torch": 0, "baseline": 1, "plan": 2}
    ordered = sorted(point.rows, key=lambda row: kinds.get(row.kind, 3))
    body = [_row(row, widest, with_ratios) for row in ordered]
    if point.wire_limit_us is not None and with_ratios:
        limit = point.wire_limit_us / point.torch.p50_us
        cells = ["wire limit", "", "", format_us(point.wire_limit_us), "", "", f"{limit:.3f}"]
        body.append(f'<tr class="limit">{_cells(cells)}{_bar(limit, widest)}<td></td></tr>')
    return table(head, body)


def _row(row: BenchRow, widest: float, with_ratios: bool) -> str:
    css = "chosen" if row.is_chosen else row.kind if row.kind in ("torch", "baseline") else ""
    cells = [
        f"{row.name} ◀ chosen" if row.is_chosen else row.name,
        "" if row.chunks is None else str(row.chunks),
        "" if row.predicted_us is None else format_us(row.predicted_us),
        format_us(row.p50_us),
        f"{format_us(row.min_us)} … {format_us(row.max_us)}",
        "" if row.error is None else f"{row.error:+.0%}",
        f"{row.ratio:.3f}" if with_ratios else "",
    ]
    wrong = '<td class="ok">0</td>' if row.num_wrong == 0 else f'<td class="bad">{row.num_wrong} bytes not equal</td>'
    return f'<tr class="{css}">{_cells(cells)}{_bar(row.ratio, widest) if with_ratios else "<td></td>"}{wrong}</tr>'


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _bar(ratio: float, widest: float) -> str:
    return f'<td class="bar"><i style="width:{max(0.5, 100 * ratio / widest):.1f}%"></i></td>'


def _profile(profile: Profile) -> str:
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
    facts = [
        ("peaks, one rank and direction", peaks),
        ("interference", beside or "none stored"),
        ("error", f"{profile.error:.1%} (median of the curves' hold-out errors)"),
        ("source", profile.source),
        ("fingerprint", profile.fingerprint),
    ]
    return definitions(facts)


def _environment(result: BenchResult, profile: Profile) -> str:
    facts = [*sorted(result.environment.items()), ("profile of the run", f"{result.profile}, {result.fingerprint}")]
    others = [(f"profile's {name}", value) for name, value in sorted(profile.environment.items())]
    return definitions([*facts, *(fact for fact in others if fact[1] not in result.environment.values())])


def _timelines(timelines: Sequence[tuple[str, Timeline, Timeline]]) -> Iterable[str]:
    for index, (title, predicted, measured) in enumerate(timelines):
        yield figure(f"timeline{index}", partial(timeline_figure, predicted, measured, title), title)

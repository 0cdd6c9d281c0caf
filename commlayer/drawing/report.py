"""The report of one run: one HTML file without anything from outside, readable in light and in
dark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from statistics import median

from commlayer.drawing.efficiency import efficiency_figure
from commlayer.drawing.figures import bench_figure, timeline_figure
from commlayer.drawing.page import drawing, write_page
from commlayer.measure.results import BenchResult
from commlayer.profiles.counted import counted
from commlayer.profiles.files import StrPath
from commlayer.profiles.profile import Profile
from commlayer.scheduler.price import Timeline
from commlayer.units import format_bytes

__all__ = ["write_report"]

Fact = tuple[str, str]
"""A value and what it is, or a name and its value."""


def write_report(
    path: StrPath,
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
    summary = _summary(result)
    rates = [f"{name} {rate} a node" for name, rate in (("inter", result.inter), ("intra", result.intra)) if rate]
    facts = [*sorted(result.environment.items()), ("profile of the run", f"{result.profile}, {result.fingerprint}")]
    others = [(f"profile's {name}", value) for name, value in sorted(profile.environment.items())]
    write_page(
        path,
        "bench.html",
        title=f"commlayer on {result.topology}",
        result=result,
        profile=profile,
        rates=rates,
        date=result.environment.get("date") or datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        summary=summary,
        bad_card=len(summary) - 1 if result.num_wrong else -1,
        size_figure=drawing("size", lambda: bench_figure(result)) if is_drawn else None,
        timelines=[
            drawing(f"timeline{index}", partial(timeline_figure, predicted, measured, name), name)
            for index, (name, predicted, measured) in enumerate(timelines)
        ],
        links_figure=drawing("links", lambda: efficiency_figure(profile)),
        environment=[*facts, *(fact for fact in others if fact[1] not in result.environment.values())],
    )


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
    limit = ""
    if largest.wire_limit_us is not None:
        limit = f"; the wire alone takes {largest.wire_limit_us / largest.torch.p50_us:.3f}"
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
            f"of flat's time at {format_bytes(largest.logical_bytes)}{limit}",
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

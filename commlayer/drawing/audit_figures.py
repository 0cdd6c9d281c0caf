"""The figures of a job's audit: measured over promised times, and when plans changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commlayer.auditing.job_audit import CallTotals, GroupTotals, JobAudit
from commlayer.drawing.style import (
    BEYOND,
    BLUE,
    COLOURS,
    FAINT,
    FIGURE_WIDTH,
    INK,
    MARKERS,
    VERMILLION,
    byte_axis,
    name_rows,
    new_figure,
    styled,
)
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["audit_figure", "events_figure", "plain_name"]

_MOST_GROUPS = 16
_LONGEST_NAME = 40
_WIDE = 1000.0
"""The range, in times the shortest, from which on an axis of times has a number at powers of ten
only."""


@styled
def audit_figure(job: JobAudit) -> Figure:
    """Draw what a call took over what was promised for it, and the ratio of the two over its size;
    a colour for each group.

    Raises:
        UsageError: a job without audited calls.
    """
    groups = sorted((group for group in job.groups if group.calls), key=lambda group: -group.measured_us)
    if not groups:
        raise UsageError("expected an audit with calls, got none: there is nothing to draw")
    figure = new_figure(FIGURE_WIDTH, 4.6)
    times, ratios = figure.subplots(1, 2)
    shown, others = groups[: len(COLOURS)], groups[len(COLOURS) :]
    for index, group in enumerate(shown):
        _points(times, ratios, group.calls, COLOURS[index], MARKERS[index], plain_name(group))
    if others:
        rest = [calls for group in others for calls in group.calls]
        _points(times, ratios, rest, FAINT, ".", f"{len(others)} more groups")
    calls = [calls for group in groups for calls in group.calls]
    ends = [us / 1e3 for each in calls for us in (each.promised_each_us, each.measured_each_us) if us > 0]
    limits = min(ends) / 1.5, max(ends) * 1.5
    times.plot(limits, limits, color=INK, linestyle=(0, BEYOND), linewidth=1.1, label="as promised")
    times.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    times.set(xlabel="promised (ms)", ylabel="measured (ms)", title="Calls, by group, plan and size")
    from matplotlib.ticker import LogLocator, NullFormatter

    is_wide = limits[1] > _WIDE * limits[0]
    for axis in (times.xaxis, times.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    ratios.axhline(1.0, color=INK, linestyle=(0, BEYOND), linewidth=1.1)
    ratios.set_xscale("log", base=2)
    ratios.set_yscale("log", base=2)
    ratios.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = ratios.get_ylim()
    ratios.set_ylim(min(low, 0.45), max(high, 2.2))
    ratios.set_ylabel("measured / promised")
    ratios.set_title("By size")
    byte_axis(ratios, "size of a call, up to", most=6)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _points(times: Axes, ratios: Axes, rows: Sequence[CallTotals], colour: str, marker: str, label: str) -> None:
    look: Any = {"linestyle": "", "marker": marker, "color": colour, "markersize": 6, "alpha": 0.85}
    shown = [calls for calls in rows if calls.measured_us > 0]
    times.plot(
        [calls.promised_each_us / 1e3 for calls in shown],
        [calls.measured_each_us / 1e3 for calls in shown],
        label=label,
        **look,
    )
    ratios.plot([calls.up_to_bytes for calls in shown], [calls.ratio for calls in shown], **look)


@styled
def events_figure(job: JobAudit) -> Figure:
    """Draw when the plans of groups changed, and when a measurement left them as they were: a row
    for each group, numbered marks.

    Raises:
        UsageError: nothing happened.
    """
    groups = [group for group in job.groups if group.events][:_MOST_GROUPS]
    if not groups:
        raise UsageError("expected events, got none: plans have never changed")
    begin_s = min([group.began_s for group in groups] + [event.time_s for group in groups for event in group.events])
    end_s = max([group.ended_s for group in groups] + [event.time_s for group in groups for event in group.events])
    unit_s, unit = (60.0, "min") if end_s - begin_s > 600 else (1.0, "s")
    figure = new_figure(FIGURE_WIDTH, 1.3 + 0.42 * len(groups))
    axes = figure.add_subplot()
    for row, group in enumerate(groups):
        span = [(each - begin_s) / unit_s for each in (group.began_s, group.ended_s)]
        axes.plot(span, [row, row], color=BLUE, linewidth=2.2, alpha=0.5, solid_capstyle="butt", zorder=1)
        for number, event in enumerate(group.events, start=1):
            at = (event.time_s - begin_s) / unit_s
            axes.plot([at], [row], marker="D", markersize=7, color=VERMILLION, zorder=2)
            axes.annotate(
                str(number), (at, row), (0, 7), textcoords="offset points", ha="center", fontsize=8, color=INK
            )
    name_rows(axes, [plain_name(group) for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.7)
    margin = 0.02 * ((end_s - begin_s) / unit_s or 1.0)
    axes.set_xlim(-margin, (end_s - begin_s) / unit_s + margin)
    axes.set_xlabel(f"since the first of these groups was made ({unit})")
    return figure


def plain_name(group: GroupTotals) -> str:
    """The group's name as a figure shows it: short, on one line, and nothing in it is markup."""
    return shortened(printable(group.name, keep=""), _LONGEST_NAME)

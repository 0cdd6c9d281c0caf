"""The page of a job's audit: one HTML file without anything from outside, readable in light and in
dark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from commlayer.auditing.audit_words import (
    AUDIT_COLUMNS,
    PLACEMENT_COLUMNS,
    call_cells,
    clock_text,
    group_lines,
    placement_cells,
)
from commlayer.auditing.job_audit import CallTotals, GroupTotals, JobAudit
from commlayer.drawing.audit_figures import audit_figure, events_figure, late_figure
from commlayer.drawing.page import drawing, render
from commlayer.profiles.counted import counted
from commlayer.profiles.files import write_file
from commlayer.profiles.printable import printable
from commlayer.units import format_us

__all__ = ["write_audit_report"]

_OPEN_GROUPS, _MOST_GROUPS = 3, 200
_BAD_RATIO = 1.25


def write_audit_report(path: str | os.PathLike[str], job: JobAudit, notes: Sequence[str] = ()) -> None:
    """Write the page. Without matplotlib it has no figures, and says how to get them.

    Args:
        path: the .html file; replaced if it exists.
        notes: what a reader must know of the files before believing them.

    Raises:
        OSError: the file cannot be written.
    """
    has_late = any(late.waited_us for group in job.groups for late in group.late)
    has_events = any(group.events for group in job.groups)
    has_calls = any(calls.measured_us for group in job.groups for calls in group.calls)
    by_cost = sorted(job.groups, key=lambda group: -abs(group.lost_us))
    text = render(
        "audit.html",
        title=f"commlayer, audit of job {printable(job.job, keep='')}",
        job=job,
        notes=notes,
        facts=_facts(job),
        summary=_summary(job),
        bad_card=0 if _is_slow(job) else -1,
        calls_figure=drawing("calls", lambda: audit_figure(job), _label(job)) if has_calls else None,
        late_figure=drawing("late", lambda: late_figure(job), "Waited for each rank") if has_late else None,
        late=_late(job),
        events_figure=drawing("events", lambda: events_figure(job), "Events over time") if has_events else None,
        events=_events(job),
        placement_columns=[name.lstrip(">") for name in (*PLACEMENT_COLUMNS, "why")],
        placements=[[*placement_cells(rank, each), each.reason] for rank, each in job.placements],
        groups=[_group(group) for group in by_cost[:_MOST_GROUPS]],
        num_open=_OPEN_GROUPS,
        num_more=max(0, len(by_cost) - _MOST_GROUPS),
        call_columns=[*(name.lstrip(">") for name in AUDIT_COLUMNS[1:]), "", "worst rank"],
    )
    write_file(path, text)


def _label(job: JobAudit) -> str:
    return f"Measured over promised times of {counted(len(job.groups), 'group')}"


def _facts(job: JobAudit) -> list[str]:
    hosts = len(set(job.hosts.values()))
    return [
        f"{len(job.hosts)} of {counted(job.world_size, 'rank')} on {counted(hosts, 'host')}",
        counted(len(job.groups), "group"),
        f"written {clock_text(job.written_s)}",
    ]


def _summary(job: JobAudit) -> list[tuple[str, str]]:
    groups = [group for group in job.groups if group.calls]
    if not groups:
        return []
    promised_us, lost_us = _promised_and_lost(groups)
    known = [group for group in groups if group.late_us is not None]
    late_us = sum((group.late_us or 0.0) * len(group.told) for group in known)
    num_events = sum(len(group.events) for group in groups)
    return [
        (f"{1 + lost_us / promised_us:.2f}", "measured over promised time, all calls"),
        (f"{lost_us / promised_us:+.0%}", "measured minus promised, of what was promised"),
        (f"{late_us / promised_us:.0%}", "of what was promised: waiting for ranks that came late")
        if known
        else ("–", "late ranks: no calls were compared"),
        (str(num_events), "changes of plans, and measurements that left them"),
    ]


def _promised_and_lost(groups: Sequence[GroupTotals]) -> tuple[float, float]:
    """Sums over all ranks of all groups, µs: a group's own numbers are means of a rank."""
    promised_us = sum(group.promised_us * len(group.told) for group in groups)
    return promised_us, sum(group.lost_us * len(group.told) for group in groups)


def _is_slow(job: JobAudit) -> bool:
    """Whether all calls together took much longer than promised."""
    groups = [group for group in job.groups if group.calls]
    promised_us, lost_us = _promised_and_lost(groups)
    return bool(groups) and 1 + lost_us / promised_us > _BAD_RATIO


def _late(job: JobAudit) -> list[list[str]]:
    return [
        [
            group.name,
            str(late.rank),
            job.hosts.get(late.rank, "–"),
            str(late.calls),
            str(group.compared_calls),
            format_us(late.waited_us),
            format_us(late.waited_us / late.calls) if late.calls else "–",
        ]
        for group in job.groups[:_MOST_GROUPS]
        for late in group.late[:5]
        if late.waited_us
    ]


def _events(job: JobAudit) -> list[list[str]]:
    return [
        [group.name, str(number), clock_text(event.time_s), str(event.call), event.what]
        for group in job.groups[:_MOST_GROUPS]
        for number, event in enumerate(group.events, start=1)
    ]


class _Call(NamedTuple):
    """A row of a group's calls. ``bar``: the length of its bar in percent; ``is_bad``: whether its
    ratio is marked."""

    cells: Sequence[str]
    is_bad: bool
    bar: float
    worst: str


class _Group(NamedTuple):
    """A group: what it is, what is to be said of it, and its calls."""

    name: str
    about: str
    lines: Sequence[str]
    rows: list[_Call]


def _group(group: GroupTotals) -> _Group:
    ratio = group.measured_us / group.promised_us if group.promised_us else 0.0
    widest = max([calls.ratio for calls in group.calls] + [1.0])
    return _Group(
        name=group.name,
        about=f"{counted(len(group.ranks), 'rank')} on {counted(len(group.nodes), 'node')}, {ratio:.2f} of what was promised",
        lines=group_lines(group),
        rows=[_call(group, calls, widest) for calls in group.calls],
    )


def _call(group: GroupTotals, calls: CallTotals, widest: float) -> _Call:
    return _Call(
        cells=call_cells(group, calls)[1:],
        is_bad=calls.ratio > _BAD_RATIO,
        bar=max(0.5, 100 * calls.ratio / widest),
        worst=f"{calls.worst_rank} (×{calls.worst_ratio:.2f})" if calls.worst_rank >= 0 else "–",
    )

"""The page of a job's audit: one HTML file without anything from outside, readable in light and in
dark."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.auditing.audit_words import (
    AUDIT_COLUMNS,
    PLACEMENT_COLUMNS,
    call_cells,
    clock_text,
    group_lines,
    placement_cells,
)
from commlayer.auditing.job_audit import JobAudit
from commlayer.drawing.audit_figures import audit_figure, events_figure
from commlayer.drawing.page import drawing, write_page
from commlayer.profiles.counted import counted
from commlayer.profiles.files import StrPath
from commlayer.profiles.printable import printable

__all__ = ["write_audit_report"]

_MOST_GROUPS = 200
_BAD_RATIO = 1.25


def write_audit_report(path: StrPath, job: JobAudit, notes: Sequence[str] = ()) -> None:
    """Write the page. Without matplotlib it has no figures, and says how to get them.

    Args:
        path: the .html file; replaced if it exists.
        notes: what a reader must know of the files before believing them.

    Raises:
        OSError: the file cannot be written.
    """
    audited = [group for group in job.groups if group.calls]
    # Sums over all ranks of all groups: a group's own numbers are means of a rank.
    promised_us = sum(group.promised_us * len(group.told) for group in audited)
    lost_us = sum(group.lost_us * len(group.told) for group in audited)
    label = f"Measured over promised times of {counted(len(job.groups), 'group')}"
    has_events = any(group.events for group in job.groups)
    has_calls = any(calls.measured_us for group in audited for calls in group.calls)
    by_cost = sorted(job.groups, key=lambda group: -abs(group.lost_us))
    write_page(
        path,
        "audit.html",
        title=f"commlayer, audit of job {printable(job.job, keep='')}",
        job=job,
        notes=notes,
        summary=_summary(job, promised_us, lost_us) if audited else [],
        bad_card=0 if audited and 1 + lost_us / promised_us > _BAD_RATIO else -1,
        calls_figure=drawing("calls", lambda: audit_figure(job), label) if has_calls else None,
        has_late=any(late.waited_us for group in job.groups for late in group.late),
        events_figure=drawing("events", lambda: events_figure(job), "Events over time") if has_events else None,
        placement_columns=[*PLACEMENT_COLUMNS, "why"],
        placements=[[*placement_cells(rank, each), each.reason] for rank, each in job.placements],
        groups=job.groups[:_MOST_GROUPS],
        by_cost=by_cost[:_MOST_GROUPS],
        num_more=max(0, len(by_cost) - _MOST_GROUPS),
        bad_ratio=_BAD_RATIO,
        call_columns=[*AUDIT_COLUMNS[1:], "", "worst rank"],
        call_cells=call_cells,
        group_lines=group_lines,
        clock_text=clock_text,
    )


def _summary(job: JobAudit, promised_us: float, lost_us: float) -> list[tuple[str, str]]:
    """The numbers at the top; times are those of all ranks."""
    known = [group for group in job.groups if group.calls and group.late_us is not None]
    late_us = sum((group.late_us or 0.0) * len(group.told) for group in known)
    num_events = sum(len(group.events) for group in job.groups if group.calls)
    return [
        (f"{1 + lost_us / promised_us:.2f}", "measured over promised time, all calls"),
        (f"{lost_us / promised_us:+.0%}", "measured minus promised, of what was promised"),
        (f"{late_us / promised_us:.0%}", "of what was promised: waiting for ranks that came late")
        if known
        else ("–", "late ranks: no calls were compared"),
        (str(num_events), "changes of plans, and measurements that left them"),
    ]

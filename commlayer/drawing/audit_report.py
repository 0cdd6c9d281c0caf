"""The page of a job's audit: one HTML file without anything from outside, readable in light and in dark."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape

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
from commlayer.drawing.page import cards, figure, page, section, table
from commlayer.profiles.counted import counted
from commlayer.profiles.files import write_file
from commlayer.profiles.printable import printable
from commlayer.units import format_us

__all__ = ["write_audit_report"]

_OPEN_GROUPS, _MOST_GROUPS = 3, 200
_BAD_RATIO = 1.25

_GUIDE = """<dl>
<dt>promised</dt><dd>what calls were expected to take, by the profile and by trials, when they were made; the mean.</dd>
<dt>measured</dt><dd>what they took, from start to end, waiting for ranks that came later included; the mean over ranks.</dd>
<dt>ratio</dt><dd>measured over promised: above 1 slower than promised.</dd>
<dt>late</dt><dd>of a call that ends on no rank before all have come, the rank of the shortest time came last, and the others
waited for it: by how much longer the middle rank took is what that cost. The group's first rank compares what it comes to.</dd>
<dt>plans, links and what shares these</dt><dd>what is left of measured minus promised without that waiting.
A call that runs beside one of another group shares links and cores with it: where only such calls are slow, the plan is not to
blame.</dd>
<dt>events</dt><dd>plans changed on all ranks before the same call, or links were measured and were found to be as they were.</dd>
<dt>migrations of experts</dt><dd>the way of weights and optimizer state beside a step, on the slowest rank; for how long a step
stood still for it; and the median training step before and behind it, the latter promised to be shorter by what the decision
saves.</dd>
<dt>up to</dt><dd>a size class: calls of more than half of that, and no more than it.</dd>
</dl>"""


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
    body = [
        _header(job, notes),
        _cards(job),
        section("Promised and measured", figure("calls", lambda: audit_figure(job), _label(job))) if has_calls else "",
        section("Ranks that came late", figure("late", lambda: late_figure(job), "Waited for each rank"), _late(job))
        if has_late
        else "",
        section("Changes of plans", figure("events", lambda: events_figure(job), "Events over time"), _events(job))
        if has_events
        else "",
        section("Migrations of experts", _placements(job)) if job.placements else "",
        section("Groups", *_groups(by_cost)) if by_cost else "",
        section("How to read this", _GUIDE),
    ]
    write_file(path, page(f"commlayer, audit of job {_text(job.job)}", body))


def _text(text: str) -> str:
    return printable(text, keep="")


def _label(job: JobAudit) -> str:
    return f"Measured over promised times of {counted(len(job.groups), 'group')}"


def _header(job: JobAudit, notes: Sequence[str]) -> str:
    hosts = len(set(job.hosts.values()))
    facts = [
        f"{len(job.hosts)} of {counted(job.world_size, 'rank')} on {counted(hosts, 'host')}",
        counted(len(job.groups), "group"),
        f"written {clock_text(job.written_s)}",
    ]
    said = "".join(f'<p class="note">{escape(_text(note))}</p>\n' for note in notes)
    return (
        f"<header>\n<h1>Audit of job {escape(_text(job.job))}</h1>\n"
        f'<p class="facts">{" · ".join(map(escape, facts))}</p>\n{said}</header>'
    )


def _cards(job: JobAudit) -> str:
    groups = [group for group in job.groups if group.calls]
    if not groups:
        return ""
    # Sums over all ranks of all groups: a group's own numbers are means of a rank.
    promised_us = sum(group.promised_us * len(group.told) for group in groups)
    lost_us = sum(group.lost_us * len(group.told) for group in groups)
    known = [group for group in groups if group.late_us is not None]
    late_us = sum((group.late_us or 0.0) * len(group.told) for group in known)
    num_events = sum(len(group.events) for group in groups)
    ratio = 1 + lost_us / promised_us
    shown = [
        (f"{ratio:.2f}", "measured over promised time, all calls"),
        (f"{lost_us / promised_us:+.0%}", "measured minus promised, of what was promised"),
        (f"{late_us / promised_us:.0%}", "of what was promised: waiting for ranks that came late")
        if known
        else ("–", "late ranks: no calls were compared"),
        (str(num_events), "changes of plans, and measurements that left them"),
    ]
    return cards(shown, 0 if ratio > _BAD_RATIO else -1)


def _late(job: JobAudit) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("group", "rank", "host", "last in", "of", "the others waited", "a call")
    )
    rows = [
        _row(
            [
                group.name,
                str(late.rank),
                job.hosts.get(late.rank, "–"),
                str(late.calls),
                str(group.compared_calls),
                format_us(late.waited_us),
                format_us(late.waited_us / late.calls) if late.calls else "–",
            ]
        )
        for group in job.groups[:_MOST_GROUPS]
        for late in group.late[:5]
        if late.waited_us
    ]
    return table(head, rows)


def _events(job: JobAudit) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("group", "number", "time", "before call", "what"))
    rows = [
        _row([group.name, str(number), clock_text(event.time_s), str(event.call), event.what])
        for group in job.groups[:_MOST_GROUPS]
        for number, event in enumerate(group.events, start=1)
    ]
    return table(head, rows)


def _placements(job: JobAudit) -> str:
    head = "".join(f"<th>{escape(name.lstrip('>'))}</th>" for name in (*PLACEMENT_COLUMNS, "why"))
    return table(head, [_row([*placement_cells(rank, each), each.reason]) for rank, each in job.placements])


def _groups(groups: Sequence[GroupTotals]) -> Iterable[str]:
    for index, group in enumerate(groups[:_MOST_GROUPS]):
        opened = " open" if index < _OPEN_GROUPS else ""
        ratio = group.measured_us / group.promised_us if group.promised_us else 0.0
        about = f"{counted(len(group.ranks), 'rank')} on {counted(len(group.nodes), 'node')}, {ratio:.2f} of what was promised"
        lines = "".join(f'<p class="reason">{escape(_text(line))}</p>\n' for line in group_lines(group))
        yield (
            f"<details{opened}><summary><b>{escape(_text(group.name))}</b>: {escape(about)}</summary>\n{lines}"
            f"{_calls(group)}\n</details>"
        )
    if len(groups) > _MOST_GROUPS:
        yield f'<p class="note">{len(groups) - _MOST_GROUPS} more groups, with less difference, are not shown.</p>'


def _calls(group: GroupTotals) -> str:
    head = (
        "".join(f"<th>{escape(name.lstrip('>'))}</th>" for name in AUDIT_COLUMNS[1:]) + "<th></th><th>worst rank</th>"
    )
    widest = max([calls.ratio for calls in group.calls] + [1.0])
    return table(head, [_call_row(group, calls, widest) for calls in group.calls])


def _call_row(group: GroupTotals, calls: CallTotals, widest: float) -> str:
    cells = [escape(_text(cell)) for cell in call_cells(group, calls)[1:]]
    cells[-1] = f'<span class="bad">{cells[-1]}</span>' if calls.ratio > _BAD_RATIO else cells[-1]
    bar = f'<td class="bar"><i style="width:{max(0.5, 100 * calls.ratio / widest):.1f}%"></i></td>'
    worst = f"{calls.worst_rank} (×{calls.worst_ratio:.2f})" if calls.worst_rank >= 0 else "–"
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{bar}<td>{worst}</td></tr>"


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(_text(cell))}</td>' for cell in cells)}</tr>"

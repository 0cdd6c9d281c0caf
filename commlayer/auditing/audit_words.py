"""Rows and sentences that say what an audit holds: the same at exit, in ``commlayer audit`` and on
its page."""

from __future__ import annotations

from datetime import datetime, timezone

from commlayer.auditing.audit_files import AuditedPlacement
from commlayer.auditing.job_audit import CallTotals, GroupTotals
from commlayer.profiles.counted import counted
from commlayer.units import format_bytes, format_us

__all__ = [
    "AUDIT_COLUMNS",
    "MOST_EVENTS",
    "MOST_LATE",
    "PLACEMENT_COLUMNS",
    "call_cells",
    "clock_text",
    "event_lines",
    "group_lines",
    "placement_cells",
    "signed_us",
]

AUDIT_COLUMNS = ("group", "collective", "plan", ">up to", ">calls", ">promised", ">measured", ">ratio")
"""The columns of :func:`call_cells`; those with ">" are numbers, of one call."""
PLACEMENT_COLUMNS = (
    ">rank",
    ">step",
    ">copies",
    ">migration promised",
    ">took",
    ">ratio",
    ">stood still",
    ">steps before",
    ">promised",
    ">measured",
    ">ratio",
)
"""The columns of :func:`placement_cells`: of a migration of experts, and of the steps behind it."""
MOST_LATE, MOST_EVENTS = 3, 5
_OUTSTANDING, _OF_ALL = 2.0, 0.75
"""How many times as long as for a usual rank the others wait for one that is named; of two ranks,
this part of all waiting."""


def call_cells(group: GroupTotals, calls: CallTotals) -> list[str]:
    """The cells of one row of the table."""
    return [
        f"{group.description[:20]} ({group.group[:8]})" if group.has_description else group.group[:24],
        calls.collective,
        calls.plan,
        format_bytes(calls.up_to_bytes),
        str(calls.num_calls),
        format_us(calls.promised_each_us),
        format_us(calls.measured_each_us),
        f"{calls.ratio:.2f}",
    ]


def placement_cells(rank: int, placed: AuditedPlacement) -> list[str]:
    """The cells of one migration of experts; what is not known is a dash."""

    def time(us: float | None) -> str:
        return "–" if us is None else format_us(us)

    def ratio(promised_us: float | None, measured_us: float | None) -> str:
        return f"{measured_us / promised_us:.2f}" if promised_us and measured_us is not None else "–"

    return [
        str(rank),
        str(placed.step),
        str(placed.copies),
        time(placed.promised_migration_us),
        time(placed.migration_us),
        ratio(placed.promised_migration_us, placed.migration_us),
        time(placed.waited_us),
        time(placed.step_before_us),
        time(placed.promised_step_us),
        time(placed.step_us),
        ratio(placed.promised_step_us, placed.step_us),
    ]


def group_lines(group: GroupTotals) -> list[str]:
    """Sentences on one group: what was lost, to whom, and over which links. Events are
    :func:`event_lines`."""
    lines = []
    if group.calls:
        ratio = group.measured_us / group.promised_us if group.promised_us else 0.0
        lost = f"its calls took {ratio:.2f} times what was promised, {signed_us(group.lost_us)} a rank"
        if group.late_us is None or group.plan_us is None:
            why = "no calls were compared over ranks" if group.has_first else "the file of its first rank is missing"
            lines.append(f"{lost}; how much of it was waiting for late ranks is not known: {why}")
        else:
            part = ""
            if group.compared_calls < group.comparable_calls:
                part = f" (by {group.compared_calls} of {counted(group.comparable_calls, 'call')})"
            waiting = f"{format_us(group.late_us)} waiting for ranks that came late{part}"
            lines.append(f"{lost}: {waiting}, {signed_us(group.plan_us)} by plans, links and what shares these")
    beside = group.beside
    if beside.rank_calls and beside.promised_us:
        num_calls = sum(calls.rank_calls for calls in group.calls)
        ratio = beside.measured_us / beside.promised_us
        alone = f"; alone, they took {group.alone_ratio:.2f} times" if group.alone_ratio else ""
        lines.append(
            f"{beside.rank_calls} of {counted(num_calls, 'call')}, counted on every rank, ran beside calls of other groups "
            f"of their rank, which share its links and cores: they took {ratio:.2f} times what was promised{alone}"
        )
    if group.held_us:
        lines.append(
            f"its chunks were held for {format_us(group.held_us / max(1, len(group.told)))} a rank for lanes before"
        )
    lines += _late_lines(group)
    if abs(group.fabric_rate - 1.0) > 1e-6:
        lines.append(f"links between nodes: planned with at {group.fabric_rate:.0%} of their rate at the start")
    lines += [f"slow: {node}" for node in group.slow_nodes]
    return lines


def _late_lines(group: GroupTotals) -> list[str]:
    """The ranks for which the others waited much longer than for a usual one: some rank always
    comes last."""
    usual_us = sum(late.waited_us for late in group.late) / len(group.ranks)
    least_us = min(_OUTSTANDING, _OF_ALL * len(group.ranks)) * usual_us
    outstanding = [late for late in group.late[:MOST_LATE] if usual_us and late.waited_us >= least_us]
    if usual_us and not outstanding:
        return ["ranks took turns in coming last: none cost the others twice what a usual one did"]
    return [
        f"rank {late.rank} came last to {late.calls} of {counted(group.compared_calls, 'call')} that were compared; the others "
        f"waited {format_us(late.waited_us)} for it"
        for late in outstanding
    ]


def signed_us(time_us: float) -> str:
    """A difference of times, with its sign."""
    return f"{'+' if time_us >= 0 else '−'}{format_us(abs(time_us))}"


def event_lines(group: GroupTotals, most: int | None = None) -> list[str]:
    """One line for each of the group's latest events."""
    shown = group.events if most is None else group.events[-most:]
    return [f"{clock_text(event.time_s)}, before call {event.call}: {event.what}" for event in shown]


def clock_text(time_s: float) -> str:
    """A Unix time as the clock shows it in UTC."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%H:%M:%S UTC")

"""The audits of this process's groups: the sum of those that are gone, and migrations of
experts."""

from __future__ import annotations

from collections import deque
from typing import Any, TypedDict

import msgspec

from commlayer.auditing.audit_files import AuditedCalls, AuditedGroup, AuditedWire
from commlayer.auditing.job_audit import summed_lateness
from commlayer.calls.counters import ENDED_GROUPS
from commlayer.forked_child import in_forked_child
from commlayer.statistics import PlacementStats

__all__ = ["EVENTS_KEPT", "Audit", "audit_placement", "audited_placements", "ended_groups"]

EVENTS_KEPT = 256
"""The most events of a group that are kept: the latest."""


class Audit(TypedDict):
    """The audit of this rank's planned calls; ``rank`` is None before the first group. ``groups``:
    the fields of :class:`commlayer.auditing.audit_files.AuditedGroup`. ``placements``: the last 256
    migrations of experts, on the first rank of a pipeline stage."""

    rank: int | None
    groups: list[dict[str, Any]]
    placements: list[PlacementStats]


def ended_groups(before: AuditedGroup | None, group: AuditedGroup) -> AuditedGroup:
    """Add the audit of ``group``, which is gone, to the sum of those that were gone before it;
    None: there were none.

    Only what can be added up is kept: neither the profile nor rates, which each group had of its
    own.
    """
    replace = msgspec.structs.replace
    events = [replace(event, what=f"group {group.group}: {event.what}") for event in group.events]
    both = [group] if before is None else [before, group]
    return AuditedGroup(
        group=ENDED_GROUPS,
        description="",
        ranks=tuple(sorted({rank for each in both for rank in each.ranks})),
        nodes=_joined([node for each in both for node in each.nodes]),
        began_s=min(each.began_s for each in both),
        profile="",
        fabric_rate=1.0,
        node_rates=(),
        calls=_added_calls([calls for each in both for calls in each.calls]),
        beside_calls=sum(each.beside_calls for each in both),
        beside_promised_us=sum(each.beside_promised_us for each in both),
        beside_measured_us=sum(each.beside_measured_us for each in both),
        held_us=sum(each.held_us for each in both),
        comparable_calls=sum(each.comparable_calls for each in both),
        late=tuple(summed_lateness(late for each in both for late in each.late)),
        events=(*(() if before is None else before.events), *events)[-EVENTS_KEPT:],
    )


def _joined(nodes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Join the tuples that share a rank: each is some of the ranks of one node."""
    joined: list[set[int]] = []
    for node in nodes:
        alike = [each for each in joined if not each.isdisjoint(node)]
        joined = [each for each in joined if each.isdisjoint(node)] + [set(node).union(*alike)]
    return tuple(sorted(tuple(sorted(node)) for node in joined))


def _added_calls(rows: list[AuditedCalls]) -> tuple[AuditedCalls, ...]:
    """Add up the rows of one collective, plan and size class."""
    rows_by_key: dict[tuple[str, str, int], AuditedCalls] = {}
    for row in rows:
        key = row.collective, row.plan, row.up_to_bytes
        before = rows_by_key.get(key)
        if before is None:
            rows_by_key[key] = row
            continue
        sent, more = before.wire_bytes, row.wire_bytes
        wire_bytes = None
        if sent is not None and more is not None:
            wire_bytes = AuditedWire(inter=sent.inter + more.inter, intra=sent.intra + more.intra)
        rows_by_key[key] = msgspec.structs.replace(
            row,
            calls=before.calls + row.calls,
            promised_us=before.promised_us + row.promised_us,
            measured_us=before.measured_us + row.measured_us,
            logical_bytes=before.logical_bytes + row.logical_bytes,
            wire_bytes=wire_bytes,
        )
    return tuple(rows_by_key[key] for key in sorted(rows_by_key))


_migrations: deque[PlacementStats] = deque(maxlen=256)
"""Migrations of experts, on the first rank of each pipeline stage: those of :func:`commlayer.stats`
that moved something."""
in_forked_child(_migrations.clear)  # a child's migrations are its own


def audit_placement(noted: PlacementStats) -> None:
    """Keep a migration, of which more may become known as steps pass."""
    _migrations.append(noted)


def audited_placements() -> list[PlacementStats]:
    """Return the last migrations, at most 256, as they are known by now."""
    return [each.copy() for each in list(_migrations)]

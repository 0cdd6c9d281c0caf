"""The audit of groups as plain data, and the sum of the groups that are gone."""

from __future__ import annotations

from collections import deque
from typing import TypedDict

from commlayer.calls.counters import ENDED_GROUPS
from commlayer.forked_child import in_forked_child
from commlayer.statistics import PlacementStats

__all__ = [
    "EVENTS_KEPT",
    "Audit",
    "AuditRow",
    "Event",
    "GroupAudit",
    "LateRank",
    "audit_placement",
    "audited_placements",
    "ended_groups",
]

EVENTS_KEPT = 256
"""The most events of a group that are kept: the latest."""


class AuditRow(TypedDict):
    """The calls of one collective by one plan, of sizes up to ``up_to_bytes`` (a power of two, and
    more than half of that).

    ``promised_us``, ``measured_us``: sums over ``calls``, from a call's start to its end, without
    waiting in the queue. ``logical_bytes``, ``wire_bytes``: as in
    :class:`commlayer.calls.counters.CallStats`.
    """

    collective: str
    plan: str
    up_to_bytes: int
    calls: int
    promised_us: float
    measured_us: float
    logical_bytes: int
    wire_bytes: dict[str, int] | None


class LateRank(TypedDict):
    """A global rank that came last to calls of the group, how often, and for how long the others
    waited, in all, µs."""

    rank: int
    calls: int
    waited_us: float


class Event(TypedDict):
    """Something that happened to a group's plans: at which Unix time (s), before which of its
    calls, what."""

    time_s: float
    call: int
    what: str


class GroupAudit(TypedDict):
    """The audit of one group. ``late`` and ``events`` are known on its first rank.

    ``nodes``: its global ranks, by node. ``began_s``: when it was made, Unix time. ``profile``: by
    which it plans now; ``fabric_rate``: the rate of links between nodes by which it plans, of that
    at its start; ``node_rates``: that of the card of each of ``nodes`` beside the usual one, empty
    where all are alike. ``comparable_calls``: those that ranks compare, of which ``late`` counts as
    many as were compared. ``beside_calls``: calls that ran beside one of another group of this
    rank, with what they were promised to take and took; ``held_us``: for how long chunks were held
    for lanes that go before the group's.
    """

    group: str
    description: str
    ranks: list[int]
    nodes: list[list[int]]
    began_s: float
    profile: str
    fabric_rate: float
    node_rates: list[float]
    calls: list[AuditRow]
    beside_calls: int
    beside_promised_us: float
    beside_measured_us: float
    held_us: float
    comparable_calls: int
    late: list[LateRank]
    events: list[Event]


class Audit(TypedDict):
    """The audit of this rank's planned calls; ``rank`` is None before the first group.
    ``placements``: the last 256 migrations of experts, on the first rank of a pipeline stage."""

    rank: int | None
    groups: list[GroupAudit]
    placements: list[PlacementStats]


def ended_groups(before: GroupAudit | None, group: GroupAudit) -> GroupAudit:
    """Add the audit of ``group``, which is gone, to the sum of those that were gone before it;
    None: there were none.

    Only what can be added up is kept: neither the profile nor rates, which each group had of its
    own.
    """
    events = [{**event, "what": f"group {group['group']}: {event['what']}"} for event in group["events"]]
    both = [group] if before is None else [before, group]
    return {
        "group": ENDED_GROUPS,
        "description": "",
        "ranks": sorted({rank for each in both for rank in each["ranks"]}),
        "nodes": _joined([node for each in both for node in each["nodes"]]),
        "began_s": min(each["began_s"] for each in both),
        "profile": "",
        "fabric_rate": 1.0,
        "node_rates": [],
        "calls": _added_calls([row for each in both for row in each["calls"]]),
        "beside_calls": sum(each["beside_calls"] for each in both),
        "beside_promised_us": sum(each["beside_promised_us"] for each in both),
        "beside_measured_us": sum(each["beside_measured_us"] for each in both),
        "held_us": sum(each["held_us"] for each in both),
        "comparable_calls": sum(each["comparable_calls"] for each in both),
        "late": _added_lateness([late for each in both for late in each["late"]]),
        "events": [*([] if before is None else before["events"]), *events][-EVENTS_KEPT:],
    }


def _joined(nodes: list[list[int]]) -> list[list[int]]:
    """Join the lists that share a rank: each is some of the ranks of one node."""
    joined: list[set[int]] = []
    for node in nodes:
        alike = [each for each in joined if not each.isdisjoint(node)]
        joined = [each for each in joined if each.isdisjoint(node)] + [set(node).union(*alike)]
    return sorted(sorted(node) for node in joined)


def _added_calls(rows: list[AuditRow]) -> list[AuditRow]:
    rows_by_key: dict[tuple[str, str, int], AuditRow] = {}
    for row in rows:
        key = row["collective"], row["plan"], row["up_to_bytes"]
        before = rows_by_key.get(key)
        rows_by_key[key] = row if before is None else _added(before, row)
    return [rows_by_key[key] for key in sorted(rows_by_key)]


def _added(before: AuditRow, row: AuditRow) -> AuditRow:
    sent, more = before["wire_bytes"], row["wire_bytes"]
    return {
        **row,
        "calls": before["calls"] + row["calls"],
        "promised_us": before["promised_us"] + row["promised_us"],
        "measured_us": before["measured_us"] + row["measured_us"],
        "logical_bytes": before["logical_bytes"] + row["logical_bytes"],
        "wire_bytes": None if sent is None or more is None else {link: sent[link] + more[link] for link in sent},
    }


def _added_lateness(lateness: list[LateRank]) -> list[LateRank]:
    by_rank: dict[int, LateRank] = {}
    for late in lateness:
        before = by_rank.get(late["rank"], {"rank": late["rank"], "calls": 0, "waited_us": 0.0})
        calls, waited_us = before["calls"] + late["calls"], before["waited_us"] + late["waited_us"]
        by_rank[late["rank"]] = {"rank": late["rank"], "calls": calls, "waited_us": waited_us}
    return sorted(by_rank.values(), key=lambda late: -late["waited_us"])


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

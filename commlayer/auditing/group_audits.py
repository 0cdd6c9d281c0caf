"""The audit of groups as plain data, and the sum of the groups that are gone."""

from __future__ import annotations

from typing import TypedDict

from commlayer.calls.counters import ENDED_GROUPS
from commlayer.statistics import PlacementStats

__all__ = ["EVENTS_KEPT", "Audit", "AuditRow", "Event", "GroupAudit", "LateRank", "ended_groups"]

EVENTS_KEPT = 256
"""The most events of a group that are kept: the latest."""


class AuditRow(TypedDict):
    """The calls of one collective by one plan, of sizes up to ``up_to_bytes`` (a power of two, and more than half of that).

    ``promised_us``, ``measured_us``: sums over ``calls``, from a call's start to its end, without waiting in the queue.
    ``logical_bytes``, ``wire_bytes``: as in :class:`commlayer.calls.counters.CallStats`.
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
    """A global rank that came last to calls of the group, how often, and for how long the others waited, in all, µs."""

    rank: int
    calls: int
    waited_us: float


class Event(TypedDict):
    """Something that happened to a group's plans: at which Unix time (s), before which of its calls, what."""

    time_s: float
    call: int
    what: str


class GroupAudit(TypedDict):
    """The audit of one group. ``late`` and ``events`` are known on its first rank.

    ``nodes``: its global ranks, by node. ``began_s``: when it was made, Unix time. ``profile``: by which it plans now;
    ``fabric_rate``: the rate of links between nodes by which it plans, of that at its start; ``node_rates``: that of the card of
    each of ``nodes`` beside the usual one, empty where all are alike. ``comparable_calls``: those that ranks compare, of which
    ``late`` counts as many as were compared. ``beside_calls``: calls that ran beside one of another group of this rank, with what
    they were promised to take and took; ``held_us``: for how long chunks were held for lanes that go before the group's.
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
    """The audit of this rank's planned calls; ``rank`` is None before the first group. ``placements``: the last 256 migrations of
    experts, on the first rank of a pipeline stage."""

    rank: int | None
    groups: list[GroupAudit]
    placements: list[PlacementStats]


def ended_groups(before: GroupAudit | None, group: GroupAudit) -> GroupAudit:
    """Add the audit of ``group``, which is gone, to the sum of those that were gone before it; None: there were none.

    Only what can be added up is kept: neither the profile nor rates, which each group had of its own.
    """
    found: GroupAudit = {
        "group": ENDED_GROUPS,
        "description": "",
        "ranks": list(group["ranks"]),
        "nodes": group["nodes"],
        "began_s": group["began_s"],
        "profile": "",
        "fabric_rate": 1.0,
        "node_rates": [],
        "calls": group["calls"],
        "beside_calls": group["beside_calls"],
        "beside_promised_us": group["beside_promised_us"],
        "beside_measured_us": group["beside_measured_us"],
        "held_us": group["held_us"],
        "comparable_calls": group["comparable_calls"],
        "late": group["late"],
        "events": [{**event, "what": f"group {group['group']}: {event['what']}"} for event in group["events"]],
    }
    if before is None:
        return found
    found["ranks"] = sorted({*before["ranks"], *group["ranks"]})
    found["nodes"] = _joined([*before["nodes"], *group["nodes"]])
    found["began_s"] = min(before["began_s"], group["began_s"])
    found["calls"] = _added_calls([*before["calls"], *group["calls"]])
    found["beside_calls"] += before["beside_calls"]
    found["beside_promised_us"] += before["beside_promised_us"]
    found["beside_measured_us"] += before["beside_measured_us"]
    found["held_us"] += before["held_us"]
    found["comparable_calls"] += before["comparable_calls"]
    found["late"] = _added_lateness([*before["late"], *group["late"]])
    found["events"] = [*before["events"], *found["events"]][-EVENTS_KEPT:]
    return found


def _joined(nodes: list[list[int]]) -> list[list[int]]:
    """Join the lists that share a rank: each is some of the ranks of one node."""
    found: list[set[int]] = []
    for node in nodes:
        alike = [each for each in found if not each.isdisjoint(node)]
        found = [each for each in found if each.isdisjoint(node)] + [set(node).union(*alike)]
    return sorted(sorted(node) for node in found)


def _added_calls(rows: list[AuditRow]) -> list[AuditRow]:
    found: dict[tuple[str, str, int], AuditRow] = {}
    for row in rows:
        key = row["collective"], row["plan"], row["up_to_bytes"]
        before = found.get(key)
        found[key] = row if before is None else _added(before, row)
    return [found[key] for key in sorted(found)]


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
    found: dict[int, LateRank] = {}
    for late in lateness:
        before = found.get(late["rank"], {"rank": late["rank"], "calls": 0, "waited_us": 0.0})
        calls, waited_us = before["calls"] + late["calls"], before["waited_us"] + late["waited_us"]
        found[late["rank"]] = {"rank": late["rank"], "calls": calls, "waited_us": waited_us}
    return sorted(found.values(), key=lambda late: -late["waited_us"])

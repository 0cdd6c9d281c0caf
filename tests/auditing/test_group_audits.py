"""The audits of groups that are gone: the last ones each, all earlier ones as one sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from commlayer.auditing import ledger
from commlayer.auditing.audit_files import AuditedCalls, AuditedGroup, AuditedLateness, AuditedWire, PlanEvent
from commlayer.auditing.audited_plans import AuditedPlans
from commlayer.auditing.group_audits import EVENTS_KEPT, ended_groups
from commlayer.auditing.ledger import Ledger, audit
from commlayer.calls.counters import MOST_ENDED, GroupCounters
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.planned import PlannedGroup
from commlayer.scheduler.experience.experience import Experience


class Planned(SimpleNamespace):
    """Stands for a planned group, of which a ledger keeps a weak reference."""


def audited(on_cpu: PlannedGroup, on_device: DevicePlans) -> list[AuditedPlans]:
    """Nobody calls this: mypy says by it whether both are what an audit takes."""
    return [on_cpu, on_device]


def group(name: str, nodes: list[list[int]], calls: int = 1, wire: dict[str, int] | None = None) -> AuditedGroup:
    sent = None if wire is None else AuditedWire(**wire)
    return AuditedGroup(
        group=name,
        description="dp",
        ranks=tuple(sorted(rank for node in nodes for rank in node)),
        nodes=tuple(map(tuple, nodes)),
        began_s=100.0 - calls,
        profile="small",
        fabric_rate=0.5,
        node_rates=(),
        calls=(
            AuditedCalls(
                collective="all_reduce",
                plan="flat",
                up_to_bytes=1024,
                calls=calls,
                promised_us=10.0,
                measured_us=12.0,
                logical_bytes=1000,
                wire_bytes=sent,
            ),
        ),
        beside_calls=1,
        beside_promised_us=2.0,
        beside_measured_us=3.0,
        held_us=4.0,
        comparable_calls=calls,
        late=(AuditedLateness(rank=nodes[0][0], calls=1, waited_us=5.0),),
        events=(PlanEvent(time_s=1.0, call=3, what="plans anew"),),
    )


def test_groups_that_are_gone_are_added_up() -> None:
    ended = None
    for each in (
        group("a", [[0], [2]], 1, {"inter": 1, "intra": 2}),
        group("b", [[1], [3]], 2, {"inter": 10, "intra": 20}),
        group("c", [[0, 1]], 3, {"inter": 0, "intra": 7}),
    ):
        ended = ended_groups(ended, each)
    assert ended is not None
    assert (ended.group, ended.description, ended.profile) == ("ended groups", "", "")
    assert (ended.ranks, ended.nodes, ended.began_s) == ((0, 1, 2, 3), ((0, 1), (2,), (3,)), 97.0)
    (row,) = ended.calls
    assert (row.calls, row.promised_us, row.logical_bytes) == (6, 30.0, 3000)
    assert row.wire_bytes == AuditedWire(inter=11, intra=29)
    assert (ended.beside_calls, ended.held_us, ended.comparable_calls) == (3, 12.0, 6)
    assert [(late.rank, late.calls, late.waited_us) for late in ended.late] == [(0, 2, 10.0), (1, 1, 5.0)]
    assert [event.what for event in ended.events] == [f"group {name}: plans anew" for name in "abc"]
    assert msgspec.convert(msgspec.to_builtins(ended), AuditedGroup) == ended, "a file takes it"


def test_bytes_that_one_does_not_know_the_sum_does_not() -> None:
    first = ended_groups(None, group("a", [[0, 1]], wire={"inter": 1, "intra": 2}))
    (row,) = ended_groups(first, group("b", [[0, 1]])).calls
    assert row.wire_bytes is None


def test_of_events_the_latest_are_kept() -> None:
    ended = None
    for number in range(EVENTS_KEPT + 5):
        ended = ended_groups(ended, group(str(number), [[0, 1]]))
    assert ended is not None
    assert len(ended.events) == EVENTS_KEPT
    assert ended.events[-1].what == f"group {EVENTS_KEPT + 4}: plans anew"


def test_only_the_last_groups_that_are_gone_have_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_ledgers", [])
    monkeypatch.setattr(ledger, "_ended", None)
    prices = SimpleNamespace(planner=None, job_planner=None, rates=(), flat_plan=lambda *_: "a flat plan")
    choices = SimpleNamespace(promised_us=lambda _: 10.0, prices=prices, experience=Experience())
    planned: Any = Planned(choices=choices, global_ranks=(0, 1), nodes=((0,), (1,)), held_s=0.0)
    of_flat = {"plan": None, "collective": "all_to_all", "run_bytes": 1000}
    call: Any = SimpleNamespace(**of_flat, moved_ns=5000, inter_bytes=1000, intra_bytes=0)
    ledgers = []
    for number in range(MOST_ENDED + 10):
        made = Ledger(GroupCounters(f"group {number}", 0, [0, 1]), planned)
        made.moved(call)
        ledgers.append(made)
        made.closed()
    assert len(ledger.open_ledgers()) == MOST_ENDED
    found = audit()
    assert (found["rank"], len(found["groups"])) == (0, MOST_ENDED + 1)
    assert found["groups"][0]["group"] == "ended groups"
    assert sum(row["calls"] for each in found["groups"] for row in each["calls"]) == MOST_ENDED + 10

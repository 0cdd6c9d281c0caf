"""Reading the counters of calls while threads count further ones."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from commlayer import statistics
from commlayer.calls import counters as counters_module
from commlayer.calls.counters import GroupCounters, Row


def test_counters_are_read_while_calls_add_rows() -> None:
    """Another thread may come in between any two instructions of the reader: here a new row comes between all of them."""
    counters, reasons = GroupCounters("world", 0, [0, 1]), Counter(busy=1)
    counters.reasons = lambda: reasons
    counters.flat["barrier"].add(0, 1)
    counters.planned["all_reduce", "flat_direct"].add(8, 1)
    count = 0

    def come_in(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != counters_module.__file__ or frame.f_code.co_name == "__init__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            counters.flat[f"flat {count}"].calls = 1
            counters.planned["all_reduce", f"plan {count}"].calls = 1
            reasons[f"reason {count}"] += 1
        return come_in

    before = sys.gettrace()
    sys.settrace(come_in)
    try:
        found = counters.read()
    finally:
        sys.settrace(before)
        counters_module._groups.remove(counters)
    assert {"barrier", "all_reduce"} <= {call["collective"] for call in found["calls"]}
    assert found["unplanned"]["busy"] == 1
    assert count > 10


def test_groups_that_are_gone_for_long_are_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "_groups", [])
    monkeypatch.setattr(counters_module, "_ended", None)
    living = GroupCounters("living", 3, [3])
    for number in range(100):
        group = GroupCounters(f"quorum {number}", 0, [0, number % 3])
        group.shares = 0.5, 0.25
        group.reasons = lambda: {"too small": 2}
        group.flat["broadcast"].add(10, 1000)
        group.flat["all_to_all"].add(8, 1000, Row.EVEN)
        group.planned["all_reduce", "flat_direct"].add(100, 1000, 7, 1)
        group.close()
    living.flat["broadcast"].add(1, 1)
    found = statistics.stats()
    assert len(counters_module._groups) == 66, "the last 64, those before, and the one that lives"
    ended, last = found["groups"][0], found["groups"][-1]
    assert (found["rank"], ended["group"], ended["ranks"]) == (3, "ended groups", [0, 1, 2])
    assert last["group"] == "quorum 99"
    assert ended["unplanned"] == {"too small": 72}
    calls = {call["collective"]: call for call in ended["calls"]}
    assert {name: (call["calls"], call["wire_bytes"]) for name, call in calls.items()} == {
        "broadcast": (36, None),
        "all_to_all": (36, {"inter": 36 * 4, "intra": 36 * 2}),
        "all_reduce": (36, {"inter": 36 * 7, "intra": 36}),
    }
    total = sum(call["logical_bytes"] for group in found["groups"] for call in group["calls"])
    assert total == 100 * 118 + 1
    statistics.reset_stats()
    assert statistics.stats()["groups"] == []

"""Reading the counters of calls while threads count further ones."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from commlayer import statistics
from commlayer.statistics import GroupCounters


def test_counters_are_read_while_calls_add_rows() -> None:
    """Another thread may come in between any two instructions of the reader: here a new row comes between all of them."""
    counters, reasons = GroupCounters("world", 0, [0, 1]), Counter(busy=1)
    counters.reasons = lambda: reasons
    counters.flat["barrier"].add(0, 1)
    counters.planned["all_reduce", "flat_direct"].add(8, 1)
    count = 0

    def come_in(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != statistics.__file__ or frame.f_code.co_name == "__init__":
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
        statistics._groups.remove(counters)
    assert {"barrier", "all_reduce"} <= {call["collective"] for call in found["calls"]}
    assert found["unplanned"]["busy"] == 1
    assert count > 10

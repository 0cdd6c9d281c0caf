"""Four bytes that say what a call is, and in which words errors say it."""

from __future__ import annotations

import itertools

import torch

from commlayer.backend.arithmetic import PLAN_NAMES
from commlayer.scheduler.traffic import GROUP_COLLECTIVES
from commlayer.transport.call_memory import _OPERATIONS
from commlayer.transport.marks import NO_MARK, mark_of, mark_text

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def test_calls_that_differ_have_other_marks() -> None:
    found: dict[int, set[str]] = {}
    for collective, dtype, op, root in itertools.product(
        GROUP_COLLECTIVES, (torch.float32, torch.int32, torch.bfloat16), _OPERATIONS, (0, 5)
    ):
        mark = mark_of(collective, dtype, op, root)
        assert 0 < mark < 1 << 32
        found.setdefault(mark, set()).add(mark_text(mark))
    texts = [text for texts in found.values() for text in texts]
    assert len(texts) == len(set(texts)) == len(found)
    assert mark_text(mark_of("all_reduce", torch.float32, "max", 3)) == "all_reduce(float32, max)"
    assert mark_text(mark_of("broadcast", torch.int8, "sum", 3)) == "broadcast(int8, root 3 of the group)"
    assert mark_text(mark_of("all_gather", torch.bool, "sum", 0)) == "all_gather(bool)"


def test_what_does_not_count_makes_no_difference() -> None:
    assert mark_of("all_gather", torch.int8, "sum", 0) == mark_of("all_gather", torch.int8, "max", 3)
    assert mark_of("all_reduce", torch.int8, "max", 0) == mark_of("all_reduce", torch.int8, "max", 3)


def test_every_dtype_and_every_plans_operation_has_a_mark() -> None:
    for dtype in DTYPES:
        assert NO_MARK < mark_of("broadcast", dtype, "sum", 65535) < 1 << 32
    for name in PLAN_NAMES.values():
        assert name in mark_text(mark_of("all_reduce", torch.float32, name, 0))
    assert mark_text(mark_of("all_reduce", torch.quint8, "sum", 0)) == "all_reduce(of another kind, sum)"
    assert "without a mark" in mark_text(NO_MARK)

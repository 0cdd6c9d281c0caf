"""Programs that are checked before they run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commlayer.diagnosis.checked_programs import check_programs
from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.findings import Cycle, Mismatch, Missing
from commlayer.profiles.errors import UsageError
from commlayer.scheduler import Strategy, Traffic, build
from commlayer.scheduler.programs import Compute, Issue, Item, PlannedCall, Wait

GROUPS: dict[str, Sequence[int]] = {"dp": (0, 1), "ep": (0, 1)}


def call(lane: str, num_bytes: int = 2**20) -> PlannedCall:
    return PlannedCall(f"{lane} call", build(Traffic(num_bytes, 2), Strategy.FLAT), lane)


def blocking(*lanes: str) -> list[Item]:
    """Each call issued and waited for."""
    program: list[Item] = []
    for lane in lanes:
        each = call(lane)
        program += [Issue(each), Compute(5.0, "work"), Wait(each)]
    return program


def test_a_program_that_all_ranks_run_alike_is_right() -> None:
    found = check_programs({0: blocking("dp", "ep", "dp"), 1: blocking("dp", "ep", "dp")}, GROUPS)
    assert (found.findings, found.waits) == ((), ())


def test_one_that_waits_later_is_right_too() -> None:
    """This is the reason why holds have an end (commlayer/scheduler/lanes.py): one rank waits for both, the other in between."""
    gradients, exchange, own, its = call("dp"), call("ep"), call("dp"), call("ep")
    programs: dict[int, Sequence[Item]] = {
        0: [Issue(gradients), Issue(exchange), Wait(exchange), Wait(gradients)],
        1: [Issue(own), Wait(own), Issue(its), Wait(its)],
    }
    assert check_programs(programs, GROUPS).findings == ()


def test_another_order_on_one_rank_is_a_circle_with_its_places() -> None:
    found = check_programs({0: blocking("dp", "ep"), 1: blocking("ep", "dp")}, GROUPS)
    (cycle,) = found.findings
    assert isinstance(cycle, Cycle)
    assert "waited for at program of rank 0:3 in Wait(dp call)" in in_words(found)


def test_calls_of_other_sizes_and_calls_left_out_are_told() -> None:
    large = call("dp", 2**21)
    (mismatch,) = check_programs({0: blocking("dp"), 1: [Issue(large), Wait(large)]}, GROUPS).findings
    assert isinstance(mismatch, Mismatch)
    (missing,) = check_programs({0: blocking("dp", "ep"), 1: blocking("dp")}, GROUPS).findings
    assert isinstance(missing, Missing)
    assert (missing.call.rank, missing.how) == (1, "its program ends here")


def test_what_makes_no_sense_is_refused() -> None:
    stray = call("ep")
    with pytest.raises(UsageError, match="which it has not issued"):
        check_programs({0: [Wait(stray)], 1: []}, GROUPS)
    with pytest.raises(UsageError, match="of which it is no member"):
        check_programs({0: [], 1: [], 2: [Issue(stray)]}, GROUPS)
    with pytest.raises(UsageError, match=r"got \[1\]"):
        check_programs({0: []}, GROUPS)

"""Contests of plans: who runs when, who is kept, and that ranks decide alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.experience.contenders import LEAST_BYTES, Contender, Contest, contenders
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.traffic import Traffic, link_over
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat

INT8 = Wire(WireFormat.INT8, 128)
FOUR = [Contender(Strategy.DIRECT, connections=count) for count in (1, 2, 4, 8)]


def traffic(nodes: tuple[int, ...], num_bytes: int = 2 * LEAST_BYTES, collective: str = "all_reduce") -> Traffic:
    size = sum(nodes)
    return Traffic(num_bytes, size, 1, link_over(nodes), collective, nodes, wires=(NATIVE, INT8), element_bytes=4)


def held(times: dict[Contender, list[float]], *others: dict[Contender, list[float]]) -> tuple[Contender, int]:
    """The winner by such times of several ranks, and after how many calls."""
    ranks = [{way: iter(each) for way, each in rank.items()} for rank in (times, *others)]
    contests = [Contest(list(times)) for _ in ranks]
    calls = 0
    while not contests[0].is_over:
        ways = {contest.current for contest in contests}
        assert len(ways) == 1, "ranks run the same plan"
        (way,) = ways
        told = [contest.ran(next(rank[way])) for contest, rank in zip(contests, ranks, strict=True)]
        calls += 1
        if told[0]:
            agreed = [max(each) for each in zip(*told, strict=True)]
            for contest in contests:
                contest.settle(agreed)
    assert len({contest.current for contest in contests}) == 1
    return contests[0].current, calls


def test_the_fastest_is_kept_and_who_is_far_behind_runs_once() -> None:
    one, two, four, eight = FOUR
    times = {one: [9.0], two: [4.0, 3.5], four: [4.0, 3.0, 3.0], eight: [7.0, 3.1, 2.9]}  # eight connected in its first
    assert held(times) == (eight, 4 + 3 + 2)


def test_a_plan_is_as_slow_as_its_slowest_rank() -> None:
    one, two = FOUR[:2]
    here, there = {one: [3.0] * 3, two: [1.0] * 3}, {one: [3.0] * 3, two: [8.0] * 3}
    assert held(here)[0] == two
    assert held(here, there) == (one, 2), "and runs no more, where that is long"


def test_ways_that_cannot_be_connected_are_left_out_in_their_turn() -> None:
    one, two, four, eight = FOUR
    ring = Contender(Strategy.RING, 4)
    contest = Contest([*FOUR, ring])
    assert [contest.current, contest.ran(3.0), contest.current, contest.ran(2.0), contest.current] == [
        one,
        [],
        two,
        [],
        four,
    ]
    assert contest.leave_out(4)
    assert contest.current == ring, "eight are more than four"
    assert contest.ran(5.0) == [3.0, 2.0, 5.0]
    last = Contest([one, two])
    last.ran(3.0)
    assert last.leave_out(2)
    assert last.is_over
    assert last.current == one
    alone = Contest([four, eight])
    assert not alone.leave_out(4)
    assert alone.current == four


def test_equally_fast_plans_leave_the_simplest() -> None:
    assert held({way: [1.0] * 3 for way in FOUR})[0] == FOUR[0]


@pytest.mark.parametrize(
    ("nodes", "wire", "strategies"),
    [
        ((1, 1), NATIVE, set()),
        ((1, 1, 1), NATIVE, {Strategy.RING}),
        ((1, 1, 1), INT8, set()),  # a ring adds nothing in another format
        ((2, 2), NATIVE, {Strategy.HIERARCHICAL, Strategy.PIPELINED}),
        ((2, 2), INT8, {Strategy.HIERARCHICAL, Strategy.PIPELINED}),
    ],
)
def test_what_contends(nodes: tuple[int, ...], wire: Wire, strategies: set[Strategy]) -> None:
    ways = contenders(traffic(nodes), wire)
    direct = FOUR if wire.is_native else [FOUR[0], *(replace(way, chunks=4) for way in FOUR)]
    assert ways[: len(direct)] == direct
    assert {way.strategy for way in ways[len(direct) :]} == strategies
    names = [way.plan(traffic(nodes), wire).name for way in ways]
    expected = ["", "∥2", "∥4"] if wire.is_native else [f"/{wire}", f"×4/{wire}", f"×4∥2/{wire}"]
    assert names[:3] == [f"flat_direct{each}" for each in expected]


def test_a_small_call_and_one_inside_a_node_have_one_way() -> None:
    assert contenders(traffic((1, 1), LEAST_BYTES // 2), NATIVE) == FOUR[:1]
    inside = traffic((4,))
    assert inside.link is Resource.INTRA
    assert contenders(inside, NATIVE) == FOUR[:1]


def test_a_given_number_of_connections_is_everybodys() -> None:
    assert {way.connections for way in contenders(traffic((1, 1, 1)), NATIVE, (3,))} == {3}


def test_a_collective_without_a_direct_form_has_no_plan() -> None:
    with pytest.raises(PlanError, match="flat form"):
        Contender(Strategy.DIRECT).plan(traffic((1, 1), collective="broadcast"), NATIVE)

"""Plans on streams, on simulated devices: every strategy, collective and wire format, in many orders of the streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Gather, Plan, Span, Strategy
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat
from commlayer.testing.simulated.judge import RaceJudge
from commlayer.testing.simulated.machine import Deadlock
from commlayer.testing.simulated.mutants import OrderingSite, ordering_sites, without
from commlayer.testing.simulated.plan_calls import DeviceCall, run_calls
from commlayer.transport import streams

SHAPES = ((2,), (3,), (2, 2), (3, 1), (2, 1, 3), (4, 4))
JUDGED = ((3,), (2, 2), (2, 1))
TURNS = 4
SEEDS = 2
WIRES = (NATIVE, Wire(WireFormat.BF16, 16), Wire(WireFormat.FP8_E4M3, 16))
WAYS = (
    (Strategy.DIRECT, 1, 1),
    (Strategy.DIRECT, 3, 1),
    (Strategy.HIERARCHICAL, 1, 1),
    (Strategy.LEADERS, 1, 1),
    (Strategy.PIPELINED, 3, 1),
    (Strategy.PIPELINED, 2, 3),
    (Strategy.RING, 1, 1),
    (Strategy.RING, 2, 1),
)


def nodes_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    edges = [0, *accumulate(shape)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))


def traffic_of(collective: str, shape: tuple[int, ...], wire: Wire = NATIVE, lane: str = "") -> Traffic:
    size = sum(shape)
    return Traffic(
        size * 320,
        size,
        1,
        Resource.INTER if len(shape) > 1 else Resource.INTRA,
        collective,
        shape,
        wires=(wire,),
        element_bytes=4,
        lane=lane,
    )


def plans_of(collective: str, shape: tuple[int, ...]) -> Iterator[Plan]:
    """Those that apply, by messages: flat is one call of the communicator's own."""
    for wire in WIRES:
        for lane in ("", "dp"):
            for strategy, chunks, pieces in WAYS:
                traffic = traffic_of(collective, shape, wire, lane)
                if strategy is Strategy.RING and len(shape) > 2:
                    traffic = replace(traffic, slow_pairs=((0, 1, 0.25),))
                try:
                    yield build(traffic, strategy, chunks, wire=wire, pieces=pieces)
                except PlanError:
                    continue


def call_of(plan: Plan, seed: int) -> DeviceCall:
    is_native = plan.wire.is_native
    dtype = torch.int32 if is_native else torch.float32
    root = seed % plan.traffic.group_size if plan.traffic.collective == "broadcast" else 0
    return DeviceCall("whole" if is_native else "encoded", plan, nodes_of(plan.traffic.nodes), dtype, root, seed=seed)


def exchange(kind: str, plan: Plan, shape: tuple[int, ...], seed: int) -> DeviceCall:
    """Rows of 64 bytes from everybody to everybody, where the plan's span reaches, and none between some."""
    nodes, size = nodes_of(shape), sum(shape)
    node_of = {member: node for node, members in enumerate(nodes) for member in members}

    def rows(sender: int, receiver: int) -> int:
        return 64 * ((3 * sender + 5 * receiver + seed) % 4) if reaches(sender, receiver) else 0

    def reaches(sender: int, receiver: int) -> bool:
        if kind != "over" or sender == receiver:
            return True
        near = node_of[sender] == node_of[receiver]
        return near if plan.steps[0].leg.span is Span.NODE else not near and sender % 2 == receiver % 2

    splits = tuple(
        (tuple(rows(me, other) for other in range(size)), tuple(rows(other, me) for other in range(size)))
        for me in range(size)
    )
    dtype = torch.int32 if plan.wire.is_native else torch.float32
    return DeviceCall(kind, plan, nodes, dtype, splits=splits, seed=seed)


def replicated_plans() -> Iterator[Plan]:
    for e, t in ((2, 2), (2, 3), (3, 2)):
        traffic = Traffic(e * t * 192, e, t, Resource.INTER)
        for gather in Gather:
            yield build(traffic, Strategy.HIERARCHICAL, gather=gather)
            yield build(traffic, Strategy.PIPELINED, 3, gather)
            yield build(traffic, Strategy.PIPELINED_COPY, 3, gather)


def turns(call: DeviceCall) -> list[DeviceCall]:
    """The call again and again, each time with other data and another root."""
    n = call.size
    return [replace(call, seed=turn, root=(call.root + turn) % n if call.root else 0) for turn in range(TURNS)]


def expect_bits(calls: list[DeviceCall], seeds: range) -> None:
    for seed in seeds:
        outcome = run_calls(calls, seed)
        assert outcome.wrong == [], f"{calls[0].plan.name}, seed {seed}: wrong at (turn, rank) {outcome.wrong}"


def expect_no_race(calls: list[DeviceCall]) -> None:
    judge = RaceJudge()
    run_calls(calls[:3], 0, watcher=judge)
    assert judge.races == [], calls[0].plan.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_every_plan_gives_its_bits_in_any_order_of_streams(collective: str, shape: tuple[int, ...]) -> None:
    for number, plan in enumerate(plans_of(collective, shape)):
        expect_bits(turns(call_of(plan, number)), range(number, number + SEEDS))


@pytest.mark.parametrize("shape", JUDGED, ids=str)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_no_plan_has_a_race(collective: str, shape: tuple[int, ...]) -> None:
    for number, plan in enumerate(plans_of(collective, shape)):
        expect_no_race(turns(call_of(plan, number)))


def exchanges() -> Iterator[list[DeviceCall]]:
    """Of rows, in their own format between the ranks of a node and of a rail, in others between all."""
    for shape in ((2, 2), (3,), (3, 3)):
        for span in (Span.NODE, Span.RAIL) if len(shape) > 1 else ():
            plan = exchange_over(span, shape, 4096)
            yield [exchange("over", plan, shape, turn) for turn in range(TURNS)]
        for wire in WIRES[1:]:
            plan = build(traffic_of("all_to_all_v", shape, wire), Strategy.DIRECT, wire=wire)
            yield [exchange("encoded exchange", plan, shape, turn) for turn in range(TURNS)]


def test_exchanges_of_rows_give_their_bits_in_any_order_of_streams() -> None:
    for number, calls in enumerate(exchanges()):
        expect_bits(calls, range(number, number + 6 * SEEDS))
        expect_no_race(calls)


def test_replicated_tokens_give_their_bits_in_any_order_of_streams() -> None:
    for number, plan in enumerate(replicated_plans()):
        t = plan.traffic.replication
        calls = turns(DeviceCall("replicated", plan, nodes_of((t,) * plan.traffic.group_size)))
        expect_bits(calls, range(number, number + 6 * SEEDS))
        expect_no_race(calls)


def test_two_exchanges_at_a_time_are_room_enough_for_every_plan() -> None:
    """A plan has two communicators; all ranks launch in one order, so two kernels that wait for their peers suffice."""
    for number, plan in enumerate(plans_of("all_reduce", (2, 2))):
        for seed in range(SEEDS):
            assert not run_calls(turns(call_of(plan, number)), seed, slots=2).wrong


# Mutants


def telling_calls() -> list[list[DeviceCall]]:
    """Calls that have, together, all that orders streams: stages on several, staging, sums, callers on two streams."""
    shape = (2, 2)
    plans = [
        build(traffic_of("all_reduce", shape), Strategy.PIPELINED, 3),
        build(traffic_of("reduce_scatter", shape), Strategy.HIERARCHICAL),
        build(traffic_of("all_gather", shape), Strategy.PIPELINED, 3),
        build(traffic_of("all_gather", (3,)), Strategy.DIRECT),
    ]
    grid = build(Traffic(768, 2, 2, Resource.INTER), Strategy.PIPELINED_COPY, 3, Gather.WHOLE)
    found = [turns(call_of(plan, 0)) for plan in plans]
    return [*found, turns(DeviceCall("replicated", grid, nodes_of(shape)))]


def sites() -> set[OrderingSite]:
    return ordering_sites(streams.__name__, lambda: [run_calls(calls, 0) for calls in telling_calls()])


def is_noticed(calls: list[DeviceCall], seeds: int) -> bool:
    try:
        return any(run_calls(calls, seed).wrong for seed in range(seeds))
    except Deadlock:
        return True


def is_a_race(calls: list[DeviceCall]) -> bool:
    judge = RaceJudge()
    run_calls(calls, 0, watcher=judge)
    return bool(judge.races)


def test_whatever_orders_streams_is_missed_where_it_is_left_out() -> None:
    """Each wait, record and keep of the transport, one at a time: some order of the streams gives wrong bits, and the judge of
    races sees it in any."""
    found = sites()
    assert len(found) >= 7, found
    for site in sorted(found):
        with without(site):
            assert any(is_noticed(calls, 60) for calls in telling_calls()), f"nobody notices that {site} is left out"
            assert any(is_a_race(calls) for calls in telling_calls()), (
                f"the judge of races does not see {site} left out"
            )

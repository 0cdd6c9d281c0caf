"""A leg is the one description of its steps: what they cost, what they move, over how many connections."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import cast

import pytest
from synthetic_profiles import synthetic_profile

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import InternalError, PlanError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler import Gather, Plan, Strategy, Traffic, build, price
from commlayer.scheduler.broadcast import Scatter
from commlayer.scheduler.conflicts import Issue, PlannedCall, simulate
from commlayer.scheduler.group_legs import OVER_NODES, Share
from commlayer.scheduler.group_moves import Group, group_moves
from commlayer.scheduler.group_strategies import schedule_of
from commlayer.scheduler.lanes import LanePolicy
from commlayer.scheduler.legs import LegOrder
from commlayer.scheduler.moves import Buffer, Copy, Moves, Region
from commlayer.scheduler.plan import CurveKey, Cut, Leg, Op, Span
from commlayer.scheduler.price import curves_of
from commlayer.scheduler.probes import probes
from commlayer.scheduler.replicated import REPLICATED_LEGS, replicated_moves
from commlayer.scheduler.step_model import loads_of
from commlayer.scheduler.traffic import GROUP_COLLECTIVES
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat

ROOT = Path(__file__).resolve().parents[2]
BF16 = Wire(WireFormat.BF16, 8)
SIZE = 1 << 20


def plans() -> Iterator[tuple[Plan, LegOrder]]:
    """One or more of every strategy of every collective, with the schedule that it was made from."""
    for (strategy, gather), schedule in REPLICATED_LEGS.items():
        yield build(Traffic(SIZE, 2, 4), strategy, 5, gather), schedule
    for collective in GROUP_COLLECTIVES:
        for wire in (NATIVE, BF16):
            traffic = Traffic(SIZE, 8, 1, Resource.INTER, collective, (4, 4), wires=(NATIVE, BF16), element_bytes=4)
            for strategy, chunks, pieces in (
                (Strategy.FLAT, 1, 1),
                (Strategy.DIRECT, 1, 1),
                (Strategy.DIRECT, 5, 1),
                (Strategy.HIERARCHICAL, 1, 1),
                (Strategy.PIPELINED, 5, 1),
                (Strategy.PIPELINED, 5, 3),
            ):
                try:
                    plan = build(traffic, strategy, chunks, wire=wire, pieces=pieces)
                except PlanError:
                    continue
                yield plan, schedule_of(traffic, strategy, wire)


PLANS = list(plans())


def test_every_collective_and_strategy_is_among_the_plans() -> None:
    assert len({(plan.traffic.collective, plan.strategy, plan.wire) for plan, _ in PLANS}) == 4 + 17 + 10


@pytest.mark.parametrize(("plan", "schedule"), PLANS, ids=[f"{p.traffic.collective}-{p.name}" for p, _ in PLANS])
def test_a_plan_is_its_list_of_legs(plan: Plan, schedule: LegOrder) -> None:
    """A step of each leg for each chunk, in order, as the leg makes it; and it waits for what its leg waits for."""
    cut = Cut(plan.traffic, plan.chunks, plan.pieces, plan.wire, plan.gather)
    found: dict[str, list[int]] = {leg.name: [] for leg in schedule.legs}
    assert len(found) == len(schedule.legs), "two legs of one name"
    for step in plan.steps:
        assert step == step.leg.step(cut, step.chunk, step.after)
        found[step.leg.name].append(step.chunk)
        waited = {plan.steps[index].leg for index in step.after}
        expected = {leg for leg in step.leg.after if leg in schedule.legs}
        assert waited == expected | ({step.leg} if step.leg.is_in_turn and step.chunk else set())
    for leg in schedule.legs:
        count = 1 if leg.is_whole else plan.chunks * (plan.pieces if leg.is_in_pieces else 1)
        assert found[leg.name] == list(range(count)), leg.name
        assert not leg.after or any(earlier in schedule.legs for earlier in leg.after), (
            "it waits for no leg that is here"
        )


def test_sums_in_another_format_leave_while_other_blocks_come() -> None:
    """A link that is long, or connections that begin slowly, are never idle between the two exchanges."""
    int8 = Wire(WireFormat.INT8, 64)
    traffic = Traffic(1 << 20, 3, 1, Resource.INTER, "all_reduce", (1, 1, 1), wires=(NATIVE, int8), element_bytes=4)
    order = [(step.leg.name, step.chunk) for step in build(traffic, Strategy.DIRECT, 4, wire=int8).steps]
    assert order.index(("send blocks", 3)) < order.index(("decode and sum", 0)), "all blocks are on their way first"
    assert order.index(("send to all", 0)) < order.index(("decode and sum", 1))
    assert order.index(("send to all", 3)) < order.index(("decode all", 0)), (
        "in place: nothing is overwritten before it left"
    )


def test_a_plan_is_the_same_after_it_was_sent_to_another_process() -> None:
    for plan, _ in PLANS:
        assert pickle.loads(pickle.dumps(plan)) == plan


# What is measured of a cluster: the curves that legs are timed by


class Notes:
    """A profile that has every curve, each of one small size, and notes which it was asked for."""

    def __init__(self) -> None:
        self.keys: set[CurveKey] = set()

    def find(self, collective: str, link: Resource, group_size: int) -> Curve:
        self.keys.add((collective, link, group_size))
        return Curve(collective, link, group_size, (1,), (1.0,))

    curve = find


def asked(topology: Topology) -> set[CurveKey]:
    """The curves that any plan is priced by: of replicated tokens, of the world, of a node, of one rank of every node, and of two
    ranks of a node."""
    world = tuple(map(len, topology.nodes))
    m, width = len(world), max(world)
    link = Resource.INTER if m > 1 else Resource.INTRA
    grid = (m, width) if m > 1 else (width, 1)
    traffics = [Traffic(SIZE * grid[0], *grid, link)] if topology.is_uniform else []
    pair = {(2,)} if width > 2 else set()
    for nodes in {world, (width,), (1,) * m} | pair if m > 1 else {(width,)} | pair:
        on = Resource.INTER if len(nodes) > 1 else Resource.INTRA
        for collective, wire in product(GROUP_COLLECTIVES, WireFormat) if sum(nodes) > 1 else ():
            wires = (Wire(wire, 64),)
            traffics.append(
                Traffic(SIZE * sum(nodes), sum(nodes), 1, on, collective, nodes, wires=wires, element_bytes=4)
            )
    notes = Notes()
    for traffic, strategy, gather in product(traffics, Strategy, Gather):
        for chunks, pieces in ((1, 1), (2, 1), (2, 2)):
            with contextlib.suppress(PlanError):
                curves_of(build(traffic, strategy, chunks, gather, traffic.wires[0], pieces), cast("Profile", notes))
    return notes.keys


@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x2", "3x1", "1x4", "1x2", "3+1", "2+1+3"])
def test_just_the_curves_that_plans_are_priced_by_are_measured(shape: str) -> None:
    topology = Topology.parse(shape)
    measured = [probe.key for probe in probes(topology)]
    assert len(set(measured)) == len(measured)
    assert set(measured) == asked(topology)
    empty = synthetic_profile().replace(topology=shape, curves=[])
    for key in measured:
        with pytest.raises(PlanError, match="Measure it on that cluster with `commlayer measure`"):
            empty.curve(*key)


@pytest.mark.parametrize("shape", ["2x4", "3x1", "1x4", "3+1", "2+1+3"])
def test_a_probe_has_a_step_of_its_size_timed_by_its_curve(shape: str) -> None:
    for probe in probes(Topology.parse(shape)):
        for size in (1, 4096, 100_003):
            plan = probe.plan(size)
            (step,) = plan.steps
            assert size <= step.bytes < size + 4 * plan.traffic.group_size * max(1, probe.share)
            assert probe.key in step.leg.curve_keys(plan)
            assert (step.leg, plan.name) == (probe.leg, probe.unit.name)


def test_a_leg_with_a_curve_of_its_own_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology.parse("2x4")
    before = probes(topology)
    new = ("send", Resource.INTRA, 4)
    monkeypatch.setattr(Scatter, "curve_keys", lambda *_: (new,))
    (added,) = (probe for probe in probes(topology) if probe not in before)
    assert (added.key, added.where) == (new, "world")  # there is no scatter but in a broadcast over nodes
    assert asked(topology) == {probe.key for probe in probes(topology)}


def test_a_job_s_own_probe_leaves_out_what_few_plan_by() -> None:
    topology = Topology.parse("2x4")
    whole, brief = ({probe.key for probe in probes(topology, is_brief=is_brief)} for is_brief in (False, True))
    links = ((Resource.INTER, 2), (Resource.INTRA, 4), (Resource.INTRA, 2))
    assert whole - brief == {("broadcast", *link) for link in links}
    assert all(probe.is_on_grid for probe in probes(topology, with_groups=False))


class Odd(Share):
    """It has the operation, the span and the buffers of another leg, and nothing else of it."""

    is_exchange = False

    def size(self, cut: Cut) -> float:
        return 1234.0

    def resource(self, traffic: Traffic) -> Resource:
        return Resource.COMPUTE

    def curve(self, profile: Profile, plan: Plan, size: float) -> Curve | None:
        return ODD_CURVE

    def looked_up(self, size: float, plan: Plan) -> float:
        return 2 * size

    def connections(self, traffic: Traffic) -> int:
        return 17

    def share_of_link(self, traffic: Traffic, curve: Curve) -> float:
        return 0.25

    def moves(self, place: object, tag: int, chunk: int) -> Moves:
        return Moves(copies=(Copy(Region(Buffer.INPUT, tag, tag + 1), Region(Buffer.OUTPUT, chunk, chunk + 1)),))


ODD_CURVE = Curve("all_to_all", Resource.INTER, 3, (1024, 1 << 20), (7.0, 700.0))


@pytest.mark.parametrize(("plan", "schedule"), PLANS, ids=[f"{p.traffic.collective}-{p.name}" for p, _ in PLANS])
def test_whatever_is_asked_of_a_step_is_asked_of_its_leg(plan: Plan, schedule: LegOrder) -> None:
    """With another leg of the same fields everything is as that one says: nobody reads a meaning from the fields."""
    odd = {id(leg): Odd(**{each.name: getattr(leg, each.name) for each in fields(leg)}) for leg in schedule.legs}
    cut = Cut(plan.traffic, plan.chunks, plan.pieces, plan.wire, plan.gather)
    steps = tuple(odd[id(step.leg)].step(cut, step.chunk, step.after) for step in plan.steps)
    assert {(step.op, step.source, step.target) for step in steps} == {(s.op, s.source, s.target) for s in plan.steps}
    swapped, profile = replace(plan, steps=steps), synthetic_profile()
    assert curves_of(swapped, profile) == {ODD_CURVE}
    peak_us = 1234.0 * 0.25 / (profile.peaks.of(Resource.INTER) * 1e3)
    alone_us = max(ODD_CURVE.at(2468.0), peak_us if plan.is_chunked else 0.0)
    assert price(swapped, profile).total_us == pytest.approx(alone_us * len(steps))
    for load in loads_of(swapped, profile):
        assert (load.resource, load.weight) == (Resource.COMPUTE, 17.0)
    ahead = Issue(PlannedCall("ahead", swapped, "ep", "ahead", (1e3,) * len(steps)))
    course = simulate([ahead, Issue(PlannedCall("call", swapped, "dp"))], profile, LanePolicy())
    assert course.calls["call"].held_us == 0.0, "its bytes leave no rank, so there is nothing to hold"
    if plan.traffic.collective == "all_to_all":
        moves, tags = replicated_moves(swapped, 0, 0), 2
    else:
        nodes = ((0, 1, 2, 3), (4, 5, 6, 7))
        moves, _ = group_moves(swapped, Group(nodes, 0, (SIZE // 8,) * 8))
        tags = 1 if plan.traffic.collective == "broadcast" else plan.tags_per_step
    for index, (step, moved) in enumerate(zip(steps, moves, strict=True)):
        assert moved == step.leg.moves(None, index * tags, step.chunk)


def test_a_call_of_the_backends_own_has_no_moves() -> None:
    traffic = Traffic(SIZE, 8, 1, Resource.INTER, "all_reduce", (4, 4))
    with pytest.raises(InternalError, match="own all_reduce is a call of the backend's own"):
        group_moves(build(traffic, Strategy.FLAT), Group(((0, 1, 2, 3), (4, 5, 6, 7)), 0, (SIZE // 8,) * 8))


# The order of posting


def test_steps_are_posted_as_late_as_their_turn_says() -> None:
    first, second = (Share(name, Op.ALL_TO_ALL, Span.NODE, Buffer.INPUT, Buffer.STAGING) for name in "ab")
    third: Leg = replace(first, name="c", after=(second,))
    cut = Cut(Traffic(SIZE, 8, 1, Resource.INTER, "all_reduce", (4, 4)), 3)

    def posted(schedule: LegOrder) -> str:
        return " ".join(f"{step.leg.name}{step.chunk}" for step in schedule.steps(cut))

    assert posted(LegOrder(((first, 0), (second, 1)))) == "a0 a1 b0 a2 b1 b2"
    assert posted(LegOrder(((second, 1), (first, 0)))) == "a0 b0 a1 b1 a2 b2"
    assert posted(LegOrder(((first, 0),), ((second, 0), (third, 0)))) == "a0 a1 a2 b0 c0 b1 c1 b2 c2"
    steps = LegOrder(((first, 0),), ((second, 0), (third, 0))).steps(cut)
    assert [step.after for step in steps if step.leg is third] == [(3,), (5,), (7,)]


def test_between_the_pieces_of_a_chunk_goes_what_the_next_one_needs() -> None:
    traffic = Traffic(SIZE, 8, 1, Resource.INTER, "reduce_scatter", (4, 4))
    steps = OVER_NODES["reduce_scatter"].steps(Cut(traffic, 4, pieces=3))
    names = [step.leg.name for step in steps]
    at = next(index for index, step in enumerate(steps) if step.leg.name == "cross rails" and step.chunk == 6)
    assert names[at : at + 5] == ["cross rails", "cross rails", "sum nodes", "cross rails", "sum node"]
    assert Counter(names) == {"share in node": 4, "sum node": 4, "cross rails": 12, "sum nodes": 4}


# docs/plans.md


def test_the_docs_show_the_legs_of_every_strategy() -> None:
    text = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`([a-z ]+(?: → [a-z ]+)*)`", text))
    for plan, schedule in PLANS:
        legs = " → ".join(leg.name for leg in schedule.legs)
        assert plan.strategy is Strategy.FLAT or legs in shown, f"{plan.traffic.collective} {plan.name}: `{legs}`"

"""The model of several calls at once: closed forms, bounds, and ``price`` where a call is alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_profiles import synthetic_profile

from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference
from commlayer.scheduler import Gather, Op, Plan, Step, Strategy, Traffic, build, price
from commlayer.scheduler.conflicts import Compute, Forecast, Issue, Item, PlannedCall, Wait, simulate, slowdown
from commlayer.scheduler.lanes import CHUNKS_IN_FLIGHT, LANES, LanePolicy, longest_hold_us, paced
from commlayer.scheduler.overlap import pipeline
from commlayer.scheduler.replicated import EXCHANGE_SLICES, LOCAL_BLOCK
from commlayer.scheduler.step_model import Load, loads_of, speeds

PROFILE = synthetic_profile()
TRAFFIC = Traffic(2**20, 2, 4)
STRICT = LanePolicy(share=1e-9)
"""Holds last until the lane above is done (or 200 ms, which is more than any of these take)."""


def exchanges(count: int, link: Resource = Resource.INTER, *, is_paced: bool = False) -> Plan:
    """``count`` exchanges on one link that wait for nothing; paced: for the one two before."""
    steps = tuple(Step(EXCHANGE_SLICES, link, chunk, TRAFFIC.logical_bytes / count, ()) for chunk in range(count))
    return Plan(TRAFFIC, Strategy.PIPELINED, count, Gather.REMOTE, paced(steps, link) if is_paced else steps)


def call(name: str, lane: str, times_us: list[float], group: str = "", link: Resource = Resource.INTER) -> PlannedCall:
    return PlannedCall(name, exchanges(len(times_us), link), lane, group, tuple(times_us))


def issued(*calls: PlannedCall) -> list[Item]:
    return [Issue(each) for each in calls]


def test_two_equal_flows_share() -> None:
    course = simulate(issued(call("a", "ep", [100.0], "one"), call("b", "ep", [100.0], "two")), PROFILE)
    assert [times.end_us for times in course.calls.values()] == [200.0, 200.0]
    assert course.total_us == course.busy_us[Resource.INTER] == 200.0


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=6))
def test_unequal_flows_end_as_processor_sharing_says(times_us: list[float]) -> None:
    calls = [call(f"c{place}", "", [time_us], f"g{place}") for place, time_us in enumerate(times_us)]
    course = simulate(issued(*calls), PROFILE)
    for place, time_us in enumerate(times_us):
        assert course.calls[f"c{place}"].end_us == pytest.approx(sum(min(time_us, other) for other in times_us))


def test_what_is_latency_is_hardly_slowed() -> None:
    """100 µs of latency and 50 bytes a µs: a kilobyte needs a seventh of the link, sixteen megabytes all of it."""
    small = PlannedCall("small", build(Traffic(1024, 2), Strategy.FLAT), "ep", "one")
    large = PlannedCall("large", build(Traffic(2**24, 2), Strategy.FLAT), "dp", "two")
    assert loads_of(small.plan, PROFILE)[0].use == pytest.approx(0.17, abs=0.01)
    assert slowdown(small, PROFILE, [large]) == 1.0
    assert slowdown(small, PROFILE, [PlannedCall("other", small.plan, "ep", "other")]) == 1.0
    alone_us = price(large.plan, PROFILE).total_us
    beside = simulate(issued(large, small), PROFILE).calls["large"].total_us
    assert alone_us < beside < alone_us + price(small.plan, PROFILE).total_us
    assert slowdown(large, PROFILE, [PlannedCall("other", large.plan, "dp", "other")]) == pytest.approx(2.0, rel=1e-3)


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.sampled_from([1.0, 2.0, 7.0])), min_size=1, max_size=8))
def test_shares_are_max_min_fair(tasks: list[tuple[float, float]]) -> None:
    loads = [Load(Resource.INTER, 1.0, use, weight) for use, weight in tasks]
    found = speeds(loads)
    used = sum(load.use * speed for load, speed in zip(loads, found, strict=True))
    assert used == pytest.approx(min(1.0, sum(load.use for load in loads)))
    parts = [load.use * speed / load.weight for load, speed in zip(loads, found, strict=True)]
    for part, speed in zip(parts, found, strict=True):
        assert 0 < speed <= 1
        assert speed == 1.0 or part == pytest.approx(max(parts))  # who is slowed has as much as anybody


def test_a_link_is_fair_between_connections() -> None:
    def connections(plan: Plan, op: Op) -> set[int]:
        return {step.leg.connections(plan.traffic) for step in plan.steps if step.op is op}

    wide = build(Traffic(2**20, 8, collective="all_to_all_v", nodes=(4, 4)), Strategy.FLAT)
    assert connections(wide, Op.ALL_TO_ALL) == {4}
    assert connections(build(Traffic(2**20, 2), Strategy.FLAT), Op.ALL_TO_ALL) == {1}
    gather = build(Traffic(2**20, 2, 4), Strategy.HIERARCHICAL)
    assert connections(gather, Op.ALL_GATHER) == {3}
    assert speeds([Load(Resource.INTER, 1.0, weight=4.0), Load(Resource.INTER, 1.0)]) == pytest.approx([0.8, 0.2])
    ring = build(Traffic(2**20, 8, collective="all_reduce", nodes=(4, 4)), Strategy.FLAT)
    assert connections(ring, Op.ALL_REDUCE) == {1}
    weights = [load.weight for load in loads_of(gather, PROFILE) if load.resource is Resource.INTRA]
    assert weights == [3.0]


# With lanes


def test_a_higher_lane_waits_for_what_is_in_flight_and_no_more() -> None:
    low, high = call("low", "dp", [10.0] * 20), call("high", "ep", [100.0])
    course = simulate([*issued(low, high), Wait(high)], PROFILE, STRICT)
    assert course.calls["high"].total_us == pytest.approx(100.0 + CHUNKS_IN_FLIGHT * 10.0)
    assert course.total_us == pytest.approx(100.0 + 20 * 10.0), "nothing is lost: the link always works"
    assert course.calls["low"].held_us == pytest.approx(100.0)  # from the end of its first chunk: 20 µs, as it shared
    assert course.calls["high"].exposed_us == course.exposed_us == pytest.approx(120.0)
    without = simulate(issued(low, high), PROFILE)
    assert without.calls["high"].total_us == pytest.approx(200.0)
    assert without.calls["low"].held_us == 0.0
    assert slowdown(high, PROFILE, [low], STRICT) == pytest.approx(1.2)
    assert slowdown(high, PROFILE, [low]) == pytest.approx(2.0)


def test_no_chunk_of_a_lower_lane_begins_while_a_higher_one_is_issued() -> None:
    low, high = call("low", "dp", [10.0] * 20), call("high", "ep", [100.0])
    program: list[Item] = [Issue(low), Compute(55.0), Issue(high)]
    course = simulate(program, PROFILE, STRICT)
    issued_us, ended_us = course.calls["high"].issued_us, course.calls["high"].end_us
    begun = [start for start, _ in course.calls["low"].spans if issued_us < start < ended_us]
    assert len(begun) == 1, "one was on the link and one behind it, when the call came"
    assert course.calls["high"].total_us == pytest.approx(100.0 + 5.0 + 10.0)


def test_each_leg_has_credits_of_its_own() -> None:
    """Two legs with the same operation and buffers are two: what both have posted goes on, so nothing is left to hold."""
    legs = [replace(EXCHANGE_SLICES, name=name) for name in ("there", "back")]
    steps = tuple(Step(leg, Resource.INTER, chunk, 1024.0, ()) for leg in legs for chunk in range(CHUNKS_IN_FLIGHT))

    def held_us(steps: tuple[Step, ...]) -> float:
        low = PlannedCall(
            "low", Plan(TRAFFIC, Strategy.PIPELINED, 4, Gather.REMOTE, steps), "dp", "", (10.0,) * len(steps)
        )
        return simulate(issued(low, call("high", "ep", [100.0])), PROFILE, STRICT).calls["low"].held_us

    assert held_us(steps) == 0.0
    assert held_us(tuple(replace(step, leg=legs[0]) for step in steps)) == pytest.approx(100.0)


def test_the_order_of_monta() -> None:
    """EP ≪ PP ≪ CP ≪ DP: issued in the opposite order, four calls end in this one."""
    calls = [call(lane, lane, [10.0] * 50) for lane in ("dp", "cp", "pp", "ep")]
    ends = {lane: times.end_us for lane, times in simulate(issued(*calls), PROFILE, STRICT).calls.items()}
    assert sorted(ends, key=ends.__getitem__) == ["ep", "pp", "cp", "dp"]
    assert [LANES[lane] for lane in ("ep", "pp", "cp", "dp")] == [0, 1, 2, 3]
    assert ends["ep"] <= 500.0 + 3 * CHUNKS_IN_FLIGHT * 10.0 + 1e-9
    assert ends["dp"] == pytest.approx(2000.0)


def test_tp_and_calls_without_a_lane_wait_for_nobody() -> None:
    for lane in ("tp", "ep", ""):
        course = simulate(issued(call("a", lane, [10.0] * 9), call("b", "ep", [90.0], "own")), PROFILE, STRICT)
        assert course.calls["a"].held_us == 0.0


def test_bytes_that_take_no_time_hold_nobody() -> None:
    """On a link without end all lanes are done at once."""
    course = simulate(issued(call("low", "dp", [0.0] * 9), call("high", "ep", [0.0])), PROFILE, STRICT)
    assert course.total_us == 0.0
    high = simulate(issued(call("low", "dp", [0.0] * 9), call("high", "ep", [50.0])), PROFILE, STRICT).calls["high"]
    assert high.total_us == 50.0


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 1.0])
def test_a_lower_lane_keeps_its_share(share: float) -> None:
    """Under higher traffic without end a chunk is held (1/share − 1) times its own time, and then shares the link."""
    count, chunk_us = 12, 10.0
    low = call("low", "dp", [chunk_us] * count)
    endless = [call(f"high{place}", "ep", [1000.0]) for place in range(10)]
    course = simulate(issued(low, *endless), PROFILE, LanePolicy(share=share))
    end_us = course.calls["low"].end_us
    assert end_us < course.calls["high9"].end_us, "there was higher traffic all the time"
    assert end_us <= count * chunk_us * (1 / share - 1 + 2) + 1e-6
    assert end_us >= (count - CHUNKS_IN_FLIGHT) * chunk_us * (1 / share - 1) - 1e-6
    assert course.calls["low"].held_us <= count * longest_hold_us(chunk_us, LanePolicy(share=share)) + 1e-6


def test_groups_of_one_lane_share_what_it_keeps() -> None:
    lows = [call(f"low{place}", "dp", [10.0] * 6, f"group {place}") for place in range(3)]
    course = simulate(issued(*lows, call("high", "ep", [4000.0])), PROFILE, LanePolicy(share=0.25))
    one = simulate(issued(lows[0], call("high", "ep", [4000.0])), PROFILE, LanePolicy(share=0.25))
    assert course.calls["low0"].end_us > 2 * one.calls["low0"].end_us


def test_a_group_is_first_in_first_out() -> None:
    first, second = call("first", "ep", [100.0]), call("second", "ep", [10.0])
    course = simulate(issued(first, second), PROFILE)
    assert course.calls["second"].start_us == course.calls["first"].end_us == 100.0
    assert course.calls["second"].total_us == 110.0
    behind = simulate(issued(call("low", "dp", [10.0] * 9), first, second), PROFILE, STRICT)
    assert behind.calls["low"].held_us == pytest.approx(110.0), "what is queued holds lower lanes too"


def test_waits_against_the_priorities_end() -> None:
    """The program waits for the lowest lane first, while higher calls that it has not waited for are issued."""
    calls = [call(lane, lane, [10.0] * 5) for lane in ("dp", "cp", "pp", "ep")]
    program: list[Item] = [*issued(*calls), *(Wait(each) for each in calls)]
    assert simulate(program, PROFILE, STRICT).total_us == pytest.approx(200.0)
    dp, ep = call("dp2", "dp", [10.0] * 5), call("ep2", "ep", [10.0])
    assert simulate([Issue(dp), Wait(dp), Issue(ep), Wait(ep)], PROFILE, STRICT).total_us == pytest.approx(60.0)


def test_a_paced_plan_is_no_slower_and_its_credits_change_nothing() -> None:
    times_us = (10.0,) * 8
    plain, own = (PlannedCall("low", exchanges(8, is_paced=paced), "dp", "", times_us) for paced in (False, True))
    high = call("high", "ep", [50.0])
    assert simulate(issued(own), PROFILE).total_us == 80.0
    assert simulate(issued(plain, high), PROFILE, STRICT).calls["low"].spans == (
        simulate(issued(own, high), PROFILE, STRICT).calls["low"].spans
    )


def test_while_a_call_is_held_nothing_behind_that_step_is_posted() -> None:
    """One loop posts a call's steps, and stands at the edge."""
    steps = [Step(EXCHANGE_SLICES, Resource.INTER, chunk, 1.0, ()) for chunk in range(4)]
    steps.append(Step(LOCAL_BLOCK, Resource.DEVICE, 0, 1.0, (0,)))
    plan = Plan(TRAFFIC, Strategy.PIPELINED, 4, Gather.REMOTE, tuple(steps))
    low = PlannedCall("low", plan, "dp", "", (10.0, 10.0, 10.0, 10.0, 1.0))
    spans = simulate([Issue(low), Compute(5.0), Issue(call("high", "ep", [100.0]))], PROFILE, STRICT).calls["low"].spans
    assert spans[0] == (0.0, 15.0), "what was posted goes on"
    assert spans[2][0] == spans[4][0] == pytest.approx(120.0), "the copy, behind the third exchange, waits with it"
    alone = simulate([Issue(low)], PROFILE, STRICT).calls["low"].spans
    assert alone[4] == (10.0, 11.0)


# Against price


@settings(max_examples=60)
@given(
    block=st.integers(1, 2**22),
    strategy=st.sampled_from([Strategy.HIERARCHICAL, Strategy.PIPELINED, Strategy.PIPELINED_COPY]),
    chunks=st.integers(2, 12),
    slow=st.sampled_from([1.0, 1.3, 2.0]),
    lane=st.sampled_from(["", "ep", "dp"]),
    gather=st.sampled_from(list(Gather)),
)
def test_alone_a_call_takes_its_price(
    block: int, strategy: Strategy, chunks: int, slow: float, lane: str, gather: Gather
) -> None:
    links = (Resource.INTER, Resource.INTRA, Resource.DEVICE)
    pairs = [(a, b) for a in links for b in links if a is not b]
    profile = synthetic_profile(interference=[Interference(a, b, 1 + (slow - 1) * k) for k, (a, b) in enumerate(pairs)])
    plan = build(Traffic(2 * block, 2, 4), strategy, 1 if strategy is Strategy.HIERARCHICAL else chunks, gather)
    for policy in (None, LanePolicy()):
        course = simulate(issued(PlannedCall("only", plan, lane)), profile, policy).calls["only"]
        right = price(plan, profile)
        assert course.total_us == pytest.approx(right.total_us, rel=1e-9)
        for (start, end), (right_start, right_end) in zip(course.spans, right.spans, strict=True):
            assert start == pytest.approx(right_start, rel=1e-9, abs=1e-6)
            assert end == pytest.approx(right_end, rel=1e-9, abs=1e-6)
        assert course.held_us == 0.0
    independent = simulate(issued(PlannedCall("only", plan, lane)), profile, interference=False)
    assert independent.total_us == pytest.approx(price(plan, profile, interference=False).total_us, rel=1e-9)
    assert independent.busy_us == pytest.approx(price(plan, profile, interference=False).busy_us())


def test_a_timeline_ends_with_its_call_and_an_unpriced_plan_is_refused() -> None:
    plan = build(Traffic(2**24, 2), Strategy.FLAT)
    course = simulate([Issue(PlannedCall("only", plan, "ep")), Compute(10.0)], PROFILE)
    assert course.calls["only"].timeline.total_us == course.calls["only"].end_us
    ring = build(Traffic(2**20, 8, collective="all_reduce", nodes=(4, 4)), Strategy.FLAT)
    with pytest.raises(PlanError, match="all_reduce"):
        simulate([Issue(PlannedCall("only", ring, "dp"))], PROFILE)


# Programs


def test_what_computation_hides_is_not_exposed() -> None:
    a = call("a", "dp", [100.0])
    course = simulate([Issue(a), Compute(70.0, "backward"), Wait(a), Compute(5.0)], PROFILE)
    assert course.total_us == 105.0
    assert course.exposed_us == course.calls["a"].exposed_us == 30.0
    assert course.computed == (("backward", 0.0, 70.0), ("", 100.0, 105.0))
    assert course.waited == (("a", 70.0, 100.0),)
    assert course.busy_us == {Resource.INTER: 100.0, Resource.COMPUTE: 75.0}
    assert simulate([Issue(a), Compute(170.0), Wait(a)], PROFILE).exposed_us == 0.0
    assert simulate([Issue(a), Compute(50.0)], PROFILE).total_us == 100.0, "a step ends with its last call"


def test_a_busy_link_slows_computation_where_the_profile_says_so() -> None:
    slow = synthetic_profile(interference=[Interference(Resource.COMPUTE, Resource.INTER, 2.0)])
    program: list[Item] = [Issue(call("a", "dp", [50.0])), Compute(100.0)]
    assert simulate(program, slow).total_us == pytest.approx(125.0)
    assert simulate(program, slow, interference=False).total_us == 100.0


def test_steps_of_computation_share_the_processor_with_the_program() -> None:
    plan = pipeline(Traffic(2**20, 2), (1, 1))
    times_us = tuple(20.0 if step.op is Op.COMPUTE else 10.0 for step in plan.steps)
    alone = simulate(issued(PlannedCall("experts", plan, "ep", "", times_us)), PROFILE)
    assert alone.total_us == 60.0
    beside = simulate([Issue(PlannedCall("experts", plan, "ep", "", times_us)), Compute(40.0)], PROFILE)
    assert beside.busy_us[Resource.COMPUTE] == pytest.approx(80.0)


def test_misuse_is_told() -> None:
    a = call("a", "dp", [1.0])
    with pytest.raises(UsageError, match="not issued"):
        simulate([Wait(a), Issue(a)], PROFILE)
    with pytest.raises(UsageError, match="twice"):
        simulate([Issue(a), Issue(a)], PROFILE)
    with pytest.raises(UsageError, match="2 times"):
        simulate([Issue(PlannedCall("a", exchanges(2), "dp", "", (1.0,)))], PROFILE)
    with pytest.raises(UsageError, match="at least 0"):
        simulate([Issue(PlannedCall("a", exchanges(1), "dp", "", (math.nan,)))], PROFILE)
    with pytest.raises(UsageError, match="lane"):
        PlannedCall("a", exchanges(1), "gradients")
    with pytest.raises(UsageError, match="us"):
        Compute(-1.0)


# Random programs


def random_program(seed: int, links: list[Resource]) -> list[Item]:
    """Calls on all lanes, issued, waited for and computed beside in some order; those of the top lane are one group's."""
    chance = random.Random(seed)
    program: list[Item] = []
    open_calls: list[PlannedCall] = []
    for place in range(chance.randint(2, 9)):
        lane = chance.choice(["ep", "pp", "cp", "dp", "dp"])
        times_us = [chance.uniform(1.0, 50.0)] * chance.randint(1, 6)
        group = "top" if lane == "ep" else f"{lane} {chance.randint(0, 1)}"
        made = call(f"{lane}{place}", lane, times_us, group, chance.choice(links))
        program.append(Issue(made))
        open_calls.append(made)
        if chance.random() < 0.4:
            program.append(Compute(chance.uniform(0.0, 80.0)))
        if chance.random() < 0.4:
            program.append(Wait(open_calls.pop(chance.randrange(len(open_calls)))))
    return program


def check_bounds(course: Forecast, program: list[Item]) -> None:
    computing = sum(item.us for item in program if isinstance(item, Compute))
    assert course.total_us >= computing - 1e-6
    assert course.total_us == pytest.approx(max(course.total_us, *(times.end_us for times in course.calls.values())))
    work: dict[Resource, float] = {}
    for times in course.calls.values():
        own = sum(times.call.durations_us or ())
        link = times.call.plan.steps[0].resource
        work[link] = work.get(link, 0.0) + own
        assert times.total_us >= own - 1e-6
        assert times.issued_us <= times.start_us <= times.spans[0][0]
        assert all(
            end - start >= us - 1e-6
            for (start, end), us in zip(times.spans, times.call.durations_us or (), strict=True)
        )
    for link, work_us in work.items():
        assert course.busy_us[link] == pytest.approx(work_us), "while a link is busy it does all that it can"
        assert course.total_us >= work_us - 1e-6


@pytest.mark.parametrize("links", [[Resource.INTER], [Resource.INTER, Resource.INTRA]])
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_random_programs_keep_their_bounds(links: list[Resource], seed: int) -> None:
    program = random_program(seed, links)
    for policy in (None, LanePolicy(), STRICT):
        course = simulate(program, PROFILE, policy)
        check_bounds(course, program)
        assert simulate(program, PROFILE, policy) == course, "the same program has one course"


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_the_top_lane_is_delayed_by_no_more_than_what_is_in_flight(seed: int) -> None:
    """It waits from its start (calls of its own group go first) for the credits of groups below; and nothing is idle for it."""
    program = random_program(seed, [Resource.INTER])
    course = simulate(program, PROFILE, STRICT)
    chunks: dict[str, float] = {}
    for times in course.calls.values():
        made = times.call
        if made.lane != "ep" and made.durations_us:
            chunks[made.group] = max(chunks.get(made.group, 0.0), *made.durations_us)
    bound = CHUNKS_IN_FLIGHT * sum(chunks.values())
    without = simulate(program, PROFILE)
    for name, times in course.calls.items():
        if times.call.lane == "ep":
            own = sum(times.call.durations_us or ())
            assert times.end_us - times.start_us <= own + bound + 1e-6
            assert (
                times.end_us - times.start_us
                <= without.calls[name].end_us - without.calls[name].start_us + bound + 1e-6
            )


@given(st.floats(0.0, 0.45), st.floats(0.0, 0.45), st.floats(1.0, 500.0), st.floats(1.0, 500.0))
def test_what_is_computed_beside_calls_lacks_what_their_kernels_take(
    multiprocessors: float, memory: float, call_us: float, work_us: float
) -> None:
    """Products lack multiprocessors, what streams the memory's rate, as long as the calls last and not after."""
    calls = [
        replace(call(name, "ep", [call_us], name, link), multiprocessors=multiprocessors, memory=memory)
        for name, link in (("one", Resource.INTER), ("two", Resource.INTRA))
    ]
    for is_streaming, part in ((False, multiprocessors), (True, memory)):
        course = simulate([*issued(*calls), Compute(work_us, "work", is_streaming)], PROFILE, interference=False)
        rate = 1 - 2 * part
        done_us = rate * call_us
        expected = work_us / rate if work_us <= done_us else call_us + work_us - done_us
        assert course.computed[0][2] == pytest.approx(expected)
        assert all(times.end_us == pytest.approx(call_us) for times in course.calls.values())
    alone = simulate([Issue(calls[0]), Wait(calls[0]), Compute(work_us)], PROFILE, interference=False)
    assert alone.total_us == pytest.approx(call_us + work_us)


def test_however_many_calls_leave_something_to_compute() -> None:
    calls = [replace(call(f"c{i}", "", [100.0], f"g{i}"), multiprocessors=0.9) for i in range(3)]
    course = simulate([*issued(*calls), Compute(1.0)], PROFILE)
    assert course.computed[0][2] == pytest.approx(10.0)
    with pytest.raises(UsageError, match="from 0 up to 1"):
        replace(calls[0], memory=1.0)

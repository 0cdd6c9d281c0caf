"""Plans, price and choice against MoNTA's closed forms (with the errata) and against the rules of the design."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_profiles import synthetic_profile

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import InternalError, PlanError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference, Profile
from commlayer.scheduler import (
    Gather,
    Plan,
    Planner,
    Policy,
    Step,
    Strategy,
    Traffic,
    build,
    choose,
    moe_bytes,
    price,
)
from commlayer.scheduler.plan import Cut
from commlayer.scheduler.probes import probes_of_grid
from commlayer.scheduler.replicated import EXCHANGE_SLICES, GATHER, LOCAL_BLOCK, replicated_moves
from commlayer.scheduler.wire import Wire, WireFormat

positive = st.floats(0.1, 1e4)


@settings(max_examples=200, deadline=None)
@given(
    block=st.integers(1, 10**8),
    e=st.integers(2, 8),
    t=st.integers(2, 8),
    chunks=st.integers(1, 40),
    alphas=st.tuples(positive, positive, positive),
    betas=st.tuples(positive, positive, positive),
)
def test_price_agrees_with_the_closed_forms(
    block: int, e: int, t: int, chunks: int, alphas: tuple[float, ...], betas: tuple[float, ...]
) -> None:
    """MoNTA eq. 8 to 11 and the loops of algorithms 1 and 2, where the copy may be the slowest stage too (erratum 2)."""
    names = ("inter", "intra", "device")
    profile = synthetic_profile(
        dict(zip(names, alphas, strict=True)), dict(zip(names, betas, strict=True)), nodes=e, ranks_per_node=t
    )
    total = e * block
    exchange = profile.curve("all_to_all", Resource.INTER, e).at
    gather = profile.curve("all_gather", Resource.INTRA, t).at
    copy = profile.curve("copy", Resource.DEVICE, 1).at
    traffic = Traffic(total, e, t)

    def priced(strategy: Strategy) -> float:
        return price(build(traffic, strategy, chunks, Gather.WHOLE), profile, interference=False).total_us

    assert priced(Strategy.FLAT) == pytest.approx(exchange(total), rel=1e-9)
    assert priced(Strategy.HIERARCHICAL) == pytest.approx(exchange(total / t) + gather(total), rel=1e-9)
    aa, ag, d2d = exchange(total / (t * chunks)), gather(total / chunks), copy(total / chunks)
    o2 = aa + (ag + d2d) * chunks if aa < ag + d2d else aa * chunks + ag + d2d
    assert priced(Strategy.PIPELINED) == pytest.approx(o2, rel=1e-9)
    o3 = aa + ag + d2d + (chunks - 1) * max(aa, ag, d2d)
    assert priced(Strategy.PIPELINED_COPY) == pytest.approx(o3, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(block=st.integers(1, 10**8), e=st.integers(2, 8), t=st.integers(2, 8), chunks=st.integers(1, 40))
def test_remote_gather_prices_what_it_moves(block: int, e: int, t: int, chunks: int) -> None:
    profile = synthetic_profile(nodes=e, ranks_per_node=t)
    total = e * block
    aa = profile.curve("all_to_all", Resource.INTER, e).at(total / (t * chunks))
    ag = profile.curve("all_gather", Resource.INTRA, t).at(total * (e - 1) / e / chunks)
    local = profile.curve("copy", Resource.DEVICE, 1).at(block)
    plan = build(Traffic(total, e, t), Strategy.PIPELINED, chunks)
    pipeline = aa + ag + (chunks - 1) * max(aa, ag)
    assert price(plan, profile).total_us == pytest.approx(max(pipeline, local), rel=1e-9)


def test_interference_of_one_is_none_and_more_is_slower() -> None:
    traffic = Traffic(2**24, 2, 4)
    plan = build(traffic, Strategy.PIPELINED_COPY, 8, Gather.WHOLE)
    alone = price(plan, synthetic_profile()).total_us
    entries = [(a, b) for a in ("inter", "intra", "device") for b in ("inter", "intra", "device") if a != b]
    hardly = tuple(Interference(Resource(a), Resource(b), 1.0 + 1e-12) for a, b in entries)
    assert price(plan, synthetic_profile(interference=hardly)).total_us == pytest.approx(alone, rel=1e-9)
    badly = tuple(Interference(Resource(a), Resource(b), 1.5) for a, b in entries)
    profile = synthetic_profile(interference=badly)
    assert alone < price(plan, profile).total_us < 1.5**2 * alone
    assert price(plan, profile, interference=False).total_us == pytest.approx(alone, rel=1e-12)


def reference_fluid(
    plan: Plan, durations: list[float], slow: dict[tuple[Resource, Resource], float]
) -> list[tuple[float, float]]:
    """The work of ``price`` where resources interfere, in its plainest form: at every event look at everything anew."""
    waiting: dict[Resource, list[int]] = {}
    for index, step in enumerate(plan.steps):
        waiting.setdefault(step.resource, []).append(index)
    start, end = [0.0] * len(plan.steps), [-1.0] * len(plan.steps)
    running: dict[Resource, int] = {}
    left: dict[Resource, float] = {}  # µs of undisturbed work
    now = 0.0
    while True:
        for resource, queue in waiting.items():
            if resource not in running and queue and all(end[earlier] >= 0 for earlier in plan.steps[queue[0]].after):
                index = running[resource] = queue.pop(0)
                left[resource], start[index] = durations[index], now
        if not running:
            return list(zip(start, end, strict=True))
        stretch = {a: math.prod(slow.get((a, b), 1.0) for b in running if b is not a) for a in running}
        passed = min(left[resource] * stretch[resource] for resource in running)
        now += passed
        for resource, index in list(running.items()):
            left[resource] -= passed / stretch[resource]
            if left[resource] <= 1e-12 * durations[index]:
                end[index] = now
                del running[resource]


LINKS = (Resource.INTER, Resource.INTRA, Resource.DEVICE)
SLOWDOWNS = st.one_of(st.just(1.0), st.floats(1.0, 5.0))


@settings(max_examples=300, deadline=None)
@given(
    block=st.integers(1, 10**8),
    e=st.integers(2, 8),
    t=st.integers(2, 8),
    strategy=st.sampled_from([s for s in Strategy if s not in (Strategy.DIRECT, Strategy.LEADERS, Strategy.RING)]),
    chunks=st.integers(1, 40),
    gather=st.sampled_from(Gather),
    alphas=st.tuples(positive, positive, positive),
    betas=st.tuples(positive, positive, positive),
    factors=st.lists(SLOWDOWNS, min_size=6, max_size=6),
)
def test_price_with_interference_agrees_with_the_plain_loop(
    block: int,
    e: int,
    t: int,
    strategy: Strategy,
    chunks: int,
    gather: Gather,
    alphas: tuple[float, ...],
    betas: tuple[float, ...],
    factors: list[float],
) -> None:
    slow = dict(zip([(a, b) for a in LINKS for b in LINKS if a is not b], factors, strict=True))
    profile = synthetic_profile(
        dict(zip(LINKS, alphas, strict=True)),
        dict(zip(LINKS, betas, strict=True)),
        nodes=e,
        ranks_per_node=t,
        interference=[Interference(a, b, factor) for (a, b), factor in slow.items()],
    )
    plan = build(Traffic(e * block, e, t), strategy, chunks, gather)
    alone = price(plan, profile, interference=False).spans
    expected = reference_fluid(plan, [end - start for start, end in alone], slow)
    total = max(end for _, end in expected)
    for got, wanted in zip(price(plan, profile).spans, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9 * total)


def test_steps_that_end_together_and_steps_of_no_length_are_priced_as_by_the_plain_loop() -> None:
    legs = {Resource.INTER: EXCHANGE_SLICES, Resource.INTRA: GATHER, Resource.DEVICE: LOCAL_BLOCK}
    graph = [("inter", ()), ("intra", ()), ("device", (0, 1)), ("inter", (1,)), ("intra", (2,)), ("device", (3, 4))]
    slow = {(a, b): 1.5 for a in LINKS for b in LINKS if a is not b}
    profile = synthetic_profile(
        dict.fromkeys(LINKS, 1.0),
        dict.fromkeys(LINKS, 1.0),
        interference=[Interference(a, b, factor) for (a, b), factor in slow.items()],
    )
    for sizes in ([64] * 6, [64, 64, 0, 0, 64, 64], [0] * 6, [64, 256, 0, 1024, 64, 4096]):
        steps = tuple(
            Step(legs[Resource(link)], Resource(link), 0, float(size), after)
            for (link, after), size in zip(graph, sizes, strict=True)
        )
        plan = Plan(Traffic(8, 2, 4), Strategy.HIERARCHICAL, 1, Gather.REMOTE, steps)
        durations = [1.0 + size if size else 0.0 for size in sizes]
        for got, wanted in zip(price(plan, profile).spans, reference_fluid(plan, durations, slow), strict=True):
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def with_one_call(profile: Profile, *, bytes_: tuple[int, ...], time_us: tuple[float, ...]) -> Profile:
    return profile.replace(curves=(*profile.curves, Curve("all_to_all_single", Resource.INTER, 2, bytes_, time_us)))


def test_a_small_flat_plan_is_priced_as_the_one_call_that_it_is() -> None:
    messages = synthetic_profile()
    both = with_one_call(messages, bytes_=(1024, 4096), time_us=(20.0, 30.0))

    def us(plan: Plan, profile: Profile) -> float:
        return price(plan, profile).total_us

    for size, expected in ((1024, 20.0), (4096, 30.0)):
        flat = build(Traffic(size, 2, 4), Strategy.FLAT)
        assert us(flat, both) == expected
        assert us(flat, messages) == pytest.approx(100 + size / 50)
    assert not price(build(Traffic(4096, 2, 4), Strategy.FLAT), both).is_extrapolated
    for size in (4098, 2**20):  # above the largest that was measured, a flat plan runs as messages
        flat = build(Traffic(size, 2, 4), Strategy.FLAT)
        assert us(flat, both) == us(flat, messages) > 100
    for strategy in (Strategy.HIERARCHICAL, Strategy.PIPELINED, Strategy.PIPELINED_COPY):  # steps are messages
        plan = build(Traffic(4096, 2, 4), strategy, 2)
        assert us(plan, both) == us(plan, messages)
    wider = both.replace(topology="4x4", curves=synthetic_profile(nodes=4).curves + both.curves[3:])
    assert us(build(Traffic(4096, 4, 4), Strategy.FLAT), wider) > 100  # the curve of another group size does not count


def test_a_cheaper_one_call_can_turn_the_choice() -> None:
    traffic = Traffic(2**15, 2, 4)
    profile = synthetic_profile()
    assert choose(traffic, profile).plan.strategy is not Strategy.FLAT
    cheap = with_one_call(profile, bytes_=(2**10, 2**17), time_us=(20.0, 80.0))
    assert choose(traffic, cheap).plan.strategy is Strategy.FLAT


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_probes_of_an_exchange_move_the_same_bytes_in_two_ways(group_size: int) -> None:
    messages, single = (probe.plan(1000) for probe in probes_of_grid(group_size, 3, Resource.INTER)[:2])
    assert messages.traffic == single.traffic
    assert 1000 <= messages.traffic.logical_bytes < 1000 + group_size
    assert single.strategy is Strategy.FLAT
    assert messages.strategy is not Strategy.FLAT  # no transport runs it as one call
    for ep in range(group_size):
        for tp in range(3):  # whatever a rank's place on its node: with nothing replicated it moves all of its buffer
            assert replicated_moves(messages, ep, tp) == replicated_moves(single, ep, tp) != ()


def test_contention_of_gather_and_copy_turns_o3_into_o2() -> None:
    """The model says what the paper observes at middle sizes, and what no model without contention can say (design rule 5)."""
    traffic = Traffic(2**22, 2, 4)
    policy = Policy(strategies=(Strategy.PIPELINED, Strategy.PIPELINED_COPY), gather=Gather.WHOLE)
    beta = {"inter": 400.0, "intra": 200.0, "device": 400.0}
    free = choose(traffic, synthetic_profile(None, beta), policy)
    assert free.plan.strategy is Strategy.PIPELINED_COPY
    contended = (
        Interference(Resource.INTRA, Resource.DEVICE, 2.6),
        Interference(Resource.DEVICE, Resource.INTRA, 2.6),
    )
    assert (
        choose(traffic, synthetic_profile(None, beta, interference=contended), policy).plan.strategy
        is Strategy.PIPELINED
    )


def test_timeline_keeps_order_and_dependencies() -> None:
    plan = build(Traffic(2**22, 2, 4), Strategy.PIPELINED_COPY, 5, Gather.WHOLE)
    slow = (Interference(Resource.INTER, Resource.INTRA, 1.3), Interference(Resource.INTRA, Resource.INTER, 1.2))
    for profile in (synthetic_profile(), synthetic_profile(interference=slow)):
        timeline = price(plan, profile)
        last: dict[Resource, float] = {}
        for index, step in enumerate(plan.steps):
            start, end = timeline.spans[index]
            assert end > start >= last.get(step.resource, 0.0) - 1e-9
            assert all(timeline.spans[earlier][1] <= start + 1e-9 for earlier in step.after)
            last[step.resource] = end
        assert timeline.bottleneck in timeline.busy_us()


def test_small_messages_stay_flat_and_large_ones_do_not() -> None:
    profile = synthetic_profile()
    assert choose(Traffic(2048, 2, 4), profile).plan.strategy is Strategy.FLAT
    assert choose(Traffic(2**24, 2, 4), profile).plan.strategy is not Strategy.FLAT


def test_a_gain_below_the_profiles_error_keeps_the_simpler_plan() -> None:
    traffic = Traffic(2**18, 2, 4)
    exact = choose(traffic, synthetic_profile(error=0.0))
    assert exact.plan.strategy is not Strategy.HIERARCHICAL
    assert exact.margin >= 0
    vague = choose(traffic, synthetic_profile(error=0.9))
    assert vague.plan.strategy in (Strategy.FLAT, Strategy.HIERARCHICAL)
    assert vague.margin < 0
    assert "simpler" in vague.reason()
    assert vague.predicted_us <= exact.predicted_us * 1.9


def test_below_the_sizes_that_a_profile_knows_the_plan_is_flat() -> None:
    profile = synthetic_profile().replace(plan_from_bytes=1 << 24)
    small, large = Traffic(1 << 23, 2, 4), Traffic(1 << 24, 2, 4)
    assert choose(small, synthetic_profile()).plan.strategy is not Strategy.FLAT
    decision = choose(small, profile, Policy(strategies=(Strategy.PIPELINED,)))
    assert decision.reason() == "flat: the only plan below 16777216 bytes, says the profile"
    assert choose(small, profile, Policy(min_bytes=1 << 24)).reason().endswith("says the policy")
    assert choose(small, profile, Policy(min_bytes=0)).plan == choose(small, synthetic_profile()).plan
    assert choose(large, profile).plan == choose(large, synthetic_profile()).plan


def test_nothing_replicated_means_flat() -> None:
    profile = synthetic_profile()
    for traffic in (Traffic(2**20, 2, 1), Traffic(0, 2, 4)):
        decision = choose(traffic, profile)
        assert decision.plan.strategy is Strategy.FLAT
        assert "only plan" in decision.reason()
    with pytest.raises(PlanError, match="replicated"):
        build(Traffic(2**20, 2, 1), Strategy.HIERARCHICAL)


def test_a_reason_says_what_was_compared_and_by_which_limit() -> None:
    traffic = Traffic(2**24, 2, 4)
    profile = synthetic_profile(error=0.0)
    only = choose(traffic, profile, Policy(strategies=(Strategy.PIPELINED,)))
    assert len(only.candidates) == 9
    assert "the fastest of 9 plans that the policy allows; bottleneck inter" in only.reason()
    near = choose(traffic, profile, Policy(strategies=(Strategy.PIPELINED,), tolerance=0.5))
    assert near.plan.chunks < only.plan.chunks
    assert f"{only.plan.name} is predicted" in near.reason()
    assert "less than the policy's tolerance of 50.0%, so the plan of fewer chunks stays" in near.reason()
    assert "the only plan that the policy allows" in choose(traffic, profile, Policy((Strategy.FLAT,))).reason()
    assert "replication 1, group size 2 over inter" in choose(Traffic(2**20, 2, 1), profile).reason()
    assert "nothing to move" in choose(Traffic(0, 2, 4), profile).reason()
    free = choose(traffic, profile)
    assert f"is predicted {free.margin:.1%} slower" in free.reason()
    lenient = choose(traffic, profile, Policy(tolerance=5.0))
    assert "less than the policy's tolerance of 500.0%, so the simpler plan stays" in lenient.reason()
    own = choose(traffic, synthetic_profile(error=5.0))
    assert "less than the profile's own error of 250.0%" in own.reason()


@pytest.mark.parametrize(
    "fields",
    [
        {"strategies": ()},
        {"strategies": ("flat",)},
        {"max_chunks": 0},
        {"min_slice_bytes": -1},
        {"gather": "remote"},
        {"tolerance": -0.1},
        {"tolerance": math.nan},
        {"tolerance": math.inf},
    ],
)
def test_a_policy_out_of_range_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(UsageError, match=rf"Policy\.{name}: expected .*, got ") as caught:
        Policy(**fields)
    assert str(caught.value).endswith(repr(value))


def test_nothing_to_move_is_flat_whatever_the_policy_and_the_profile() -> None:
    nothing = synthetic_profile().replace(curves=())
    for policy in (Policy(), Policy(strategies=(Strategy.PIPELINED,), max_chunks=1)):
        for profile in (synthetic_profile(), nothing):
            decision = choose(Traffic(0, 2, 4), profile, policy)
            assert (decision.plan.strategy, decision.predicted_us) == (Strategy.FLAT, 0.0)


def test_a_rank_alone_copies_on_any_profile() -> None:
    profile = synthetic_profile()
    alone = choose(Traffic(2**20, 1, 4), profile)
    assert alone.plan.strategy is Strategy.FLAT
    assert alone.predicted_us == profile.curve("copy", Resource.DEVICE, 1).at(2**20) > 0
    assert choose(Traffic(2**20, 1, 1, Resource.INTRA), profile.replace(curves=())).predicted_us == 0.0
    measured = profile.replace(curves=(Curve("all_to_all", Resource.INTER, 1, (2**20,), (7.0,)),))
    assert choose(Traffic(2**20, 1, 4), measured).predicted_us == 7.0


def test_every_rank_decides_alike_and_once() -> None:
    planner = Planner(synthetic_profile())
    assert planner.decide(Traffic(2**20, 2, 4)) is planner.decide(Traffic(2**20, 2, 4))
    other = Planner(synthetic_profile()).decide(Traffic(2**20, 2, 4))
    assert other == planner.decide(Traffic(2**20, 2, 4))


def test_decisions_of_ever_new_sizes_do_not_pile_up() -> None:
    planner = Planner(synthetic_profile())
    for size in range(2, 4096, 2):
        planner.decide(Traffic(size, 2, 1))
    assert len(planner._decisions) == 256
    assert planner.decide(Traffic(4094, 2, 1)) is planner.decide(Traffic(4094, 2, 1))


def test_bad_traffic_and_plans_are_refused() -> None:
    with pytest.raises(PlanError, match="pad the tensor"):
        Traffic(7, 2, 4)
    with pytest.raises(PlanError, match="0 or more"):
        Traffic(-2, 2, 4)
    with pytest.raises(PlanError, match="1 or more chunks"):
        build(Traffic(8, 2, 4), Strategy.PIPELINED, 0)
    with pytest.raises(PlanError, match=r"all_gather.*8"):
        choose(Traffic(2**20, 2, 8), synthetic_profile())
    with pytest.raises(PlanError, match=r"policy allows only hierarchical.*: allow flat too"):
        choose(Traffic(8, 2, 1), synthetic_profile(), Policy(strategies=(Strategy.HIERARCHICAL,)))
    with pytest.raises(PlanError, match=r"does not apply to all_to_all of 8 bytes over 2 ranks \(inter links\): allow"):
        choose(Traffic(8, 2, 1), synthetic_profile(), Policy(strategies=(Strategy.HIERARCHICAL,)))
    step = LOCAL_BLOCK.step(Cut(Traffic(8, 2, 4)), after=(0,))
    with pytest.raises(InternalError, match="only earlier steps"):
        Plan(Traffic(8, 2, 4), Strategy.FLAT, 1, Gather.WHOLE, (step,))


@pytest.mark.parametrize(
    ("traffic", "words"),
    [
        (Traffic(64, 2, 4), "all_to_all of 64 bytes over 2 ranks (inter links), replicated on 4 ranks of each node"),
        (Traffic(64, 4, 1, Resource.INTRA, "broadcast", (4,)), "broadcast of 64 bytes over 4 ranks on one node"),
        (
            Traffic(64, 3, 1, Resource.INTER, "all_reduce", (2, 1), is_ordered=True),
            "all_reduce of 64 bytes over 3 ranks on nodes of 2+1, summed in rank order",
        ),
    ],
)
def test_traffic_in_words(traffic: Traffic, words: str) -> None:
    assert str(traffic) == words


def test_moe_bytes_is_equation_3() -> None:
    assert moe_bytes(batch=1, sequence=8192, hidden=8192, dtype="bf16", top_k=2) == 8192 * 8192 * 2 * 2
    assert moe_bytes(batch=2, sequence=3, hidden=5, dtype="float8_e4m3") == 30
    with pytest.raises(PlanError, match="unknown dtype"):
        moe_bytes(batch=1, sequence=1, hidden=1, dtype="bf17")
    with pytest.raises(PlanError, match="sequence must be"):
        moe_bytes(batch=1, sequence=0, hidden=1)


def test_what_fp8_costs_goes_by_elements() -> None:
    """Its curves are of BF16: FP32 of as many bytes has half the elements."""
    curves = [
        Curve(name, Resource.DEVICE, 1, (1 << 10, 1 << 24), (1.0, 1.0 * (1 << 14)))
        for name in ("encode_fp8_e4m3", "decode_fp8_e4m3")
    ]
    curves.append(Curve("all_to_all", Resource.INTER, 2, (1 << 10, 1 << 24), (10.0, 20.0)))
    profile = synthetic_profile(nodes=2, ranks_per_node=1).replace(curves=curves, interference=())
    wire = Wire(WireFormat.FP8_E4M3, 128)
    spent = []
    for element_bytes in (2, 4):
        traffic = Traffic(
            1 << 20, 2, 1, Resource.INTER, "reduce_scatter", (1, 1), wires=(wire,), element_bytes=element_bytes
        )
        timeline = price(build(traffic, Strategy.DIRECT, wire=wire), profile)
        spent.append(timeline.busy_us()[Resource.DEVICE])
    assert math.isclose(spent[0], 2 * spent[1])

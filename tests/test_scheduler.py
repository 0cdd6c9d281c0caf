"""Plans, price and choice against MoNTA's closed forms (with the errata) and against the rules of the design."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import InternalError, PlanError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference
from commlayer.scheduler import (
    Gather,
    Op,
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
from commlayer.scheduler.plan import Buffer
from commlayer.testing.synthetic import synthetic_profile

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


def test_contention_of_gather_and_copy_turns_o3_into_o2() -> None:
    """What the paper observes at middle sizes, and what no model without contention can say (design rule 5)."""
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


def test_nothing_replicated_means_flat() -> None:
    profile = synthetic_profile()
    for traffic in (Traffic(2**20, 2, 1), Traffic(0, 2, 4)):
        decision = choose(traffic, profile)
        assert decision.plan.strategy is Strategy.FLAT
        assert "only plan" in decision.reason()
    with pytest.raises(PlanError, match="replicated"):
        build(Traffic(2**20, 2, 1), Strategy.HIERARCHICAL)


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
    with pytest.raises(PlanError, match="policy allows only"):
        choose(Traffic(8, 2, 1), synthetic_profile(), Policy(strategies=(Strategy.HIERARCHICAL,)))
    step = Step(Op.COPY, Resource.DEVICE, 0, 8.0, (0,), Buffer.INPUT, Buffer.OUTPUT)
    with pytest.raises(InternalError, match="only earlier steps"):
        Plan(Traffic(8, 2, 4), Strategy.FLAT, 1, Gather.WHOLE, (step,))


def test_moe_bytes_is_equation_3() -> None:
    assert moe_bytes(batch=1, sequence=8192, hidden=8192, dtype="bf16", top_k=2) == 8192 * 8192 * 2 * 2
    assert moe_bytes(batch=2, sequence=3, hidden=5, dtype="float8_e4m3") == 30
    with pytest.raises(PlanError, match="unknown dtype"):
        moe_bytes(batch=1, sequence=1, hidden=1, dtype="bf17")
    with pytest.raises(PlanError, match="sequence must be"):
        moe_bytes(batch=1, sequence=0, hidden=1)

"""Slow pairs of nodes in prices and decisions: what they cost, which order of nodes goes round them, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linear_profiles import linear_profile

from commlayer.engine.group_plans import Choices
from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource, SlowLink
from commlayer.profiles.profile import Profile
from commlayer.scheduler import Policy, Strategy, Traffic, build, choose, price
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.group_profiles import group_profile, pairs_on
from commlayer.scheduler.plan import Plan, Span, owned_parts
from commlayer.scheduler.slow_pairs import direct_hindrance, ring_hindrance, ring_order
from commlayer.settings import Settings

PAIR = (0, 1, 0.25)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def traffic_of(collective: str, nodes: tuple[int, ...] = (2, 2, 2, 2), *pairs: tuple[int, int, float]) -> Traffic:
    return Traffic.on_nodes(collective, 16 << 20, nodes, slow_pairs=pairs)


def inter_us(plan: Plan, profile: Profile) -> float:
    return price(plan, profile).busy_us()[Resource.INTER]


def test_an_exchange_of_all_nodes_is_slowed_down_by_what_goes_the_slow_way() -> None:
    for nodes, expected in (((2,) * 4, 4 / 3), ((2,) * 3, 2.0), ((4,) * 8, 1.0), ((2, 2), 4.0)):
        traffic = traffic_of("all_gather", nodes, PAIR)
        owned = owned_parts(traffic, is_duplex=False)
        assert direct_hindrance(traffic, owned) == pytest.approx(expected)
        assert ring_hindrance(traffic, range(len(nodes))) == 4.0
        assert ring_hindrance(traffic, ring_order(traffic)) == (1.0 if len(nodes) > 3 else 4.0)
    slow_card = Traffic.on_nodes(
        "all_gather", 16 << 20, (2,) * 4, rates=(0.25, 1.0, 1.0, 1.0), slow_pairs=((0, 1, 0.2),)
    )
    assert (
        direct_hindrance(slow_card, (0.25,) * 4) == 1.0
    )  # the card alone takes longer than the way, of which it has three
    assert ring_hindrance(slow_card, (0, 1, 2, 3)) == pytest.approx(1.25)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_was_measured_with_a_slow_pair_prices_plans_with_it_and_round_it(collective: str) -> None:
    measured = linear_profile("4x2", direct=4 / 3, ring=4.0, slow=(SlowLink((0, 1), 0.25),))
    without, clean = linear_profile("4x2"), group_profile(measured, (2, 2, 2, 2))
    assert clean.peaks.inter_gbps == pytest.approx(without.peaks.inter_gbps)
    slow, plain = traffic_of(collective, (2, 2, 2, 2), PAIR), traffic_of(collective)
    for strategy in (Strategy.FLAT, Strategy.DIRECT, Strategy.HIERARCHICAL):
        now, before = build(slow, strategy), build(plain, strategy)
        assert inter_us(now, clean) == pytest.approx(inter_us(before, measured), rel=1e-3)  # as measured
        assert inter_us(before, clean) == pytest.approx(inter_us(before, without), rel=1e-3)
    ring, direct = build(slow, Strategy.RING), build(plain, Strategy.HIERARCHICAL)
    assert inter_us(ring, clean) == pytest.approx(inter_us(direct, without), rel=1e-3)  # as if there were no slow pair
    assert inter_us(build(plain, Strategy.RING), clean) == pytest.approx(inter_us(direct, without), rel=1e-3)


def test_a_part_of_the_cluster_without_the_pair_is_priced_without_it() -> None:
    measured = linear_profile("4x2", direct=4 / 3, ring=4.0, slow=(SlowLink((0, 1), 0.25),))
    for nodes in ((2, 2), (1, 1, 1), (1, 1, 1, 1)):
        found, expected = (group_profile(each, nodes) for each in (measured, linear_profile("4x2")))
        for strategy in (Strategy.FLAT, Strategy.DIRECT):
            plan = build(traffic_of("all_gather", nodes), strategy)
            assert inter_us(plan, found) == pytest.approx(inter_us(plan, expected), rel=1e-3)


def test_the_peak_of_an_uneven_cluster_is_that_of_its_rails() -> None:
    slow = (SlowLink((1, 2), 0.1),)
    measured = linear_profile("5+1+1+1", direct=10 / 3, ring=10.0, slow=slow)
    clean = group_profile(measured, (4, 1, 1, 1))
    assert clean.peaks.inter_gbps == pytest.approx(linear_profile("5+1+1+1").peaks.inter_gbps)


def test_a_shape_on_every_node_is_predicted_with_the_profiles_slow_pairs() -> None:
    slow = (SlowLink((0, 1), 0.1),)
    measured = linear_profile("4x2", direct=10 / 3, ring=10.0, slow=slow)
    with_pair = Choices((2,) * 4, Planner(measured), Settings(), slow_pairs=measured.slow_pairs)
    plain = Choices((2,) * 4, Planner(linear_profile("4x2")), Settings())
    own, by_shape = (with_pair.prices.predicted_us("all_to_all_v", 1 << 24, shape) for shape in (None, (2,) * 4))
    assert own is not None
    assert by_shape == pytest.approx(own)
    rails = [choices.prices.predicted_us("all_to_all_v", 1 << 24, over=Span.RAIL) for choices in (with_pair, plain)]
    assert rails[0] is not None
    assert rails[1] is not None
    assert rails[0] == pytest.approx(rails[1] * 10 / 3, rel=0.01)
    assert pairs_on(measured, (1, 1, 1)) == ()  # on which three nodes, nobody knows
    assert pairs_on(linear_profile("1+3+3", slow=slow), (3, 1, 1)) == ()  # not in the cluster's order


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nodes", [(2,) * 4, (1,) * 4, (3, 1, 2, 2)])
def test_the_ring_is_chosen_where_an_order_of_nodes_goes_round_the_slow_pair(
    collective: str, nodes: tuple[int, ...]
) -> None:
    profile = group_profile(linear_profile("3+3+3+3" if len(set(nodes)) > 1 else f"4x{nodes[0]}"), nodes)
    policy = Policy(tolerance=0.1)
    slow = choose(traffic_of(collective, nodes, (0, 1, 0.1)), profile, policy)
    assert slow.plan.strategy is Strategy.RING
    assert "; node order 0-2-1-3 avoids the slow pair 0-1 of the group (10% of the usual rate)" in slow.reason()
    plain = choose(traffic_of(collective, nodes), profile, policy)
    assert all(timeline.plan.strategy is not Strategy.RING for timeline in plain.candidates)
    assert "pair" not in plain.reason()
    best_us = min(timeline.total_us for timeline in plain.candidates)
    assert slow.predicted_us < 1.5 * best_us


def test_a_slow_pair_that_is_used_all_the_same_is_named_with_the_reason() -> None:
    three = choose(traffic_of("all_gather", (2, 2, 2), PAIR), linear_profile("3x2"))
    assert "; no order of its 3 nodes avoids the slow pair 0-1 of the group (25% of the usual rate)" in three.reason()
    wide = choose(
        Traffic.on_nodes("all_gather", 16 << 20, (2,) * 8, slow_pairs=(PAIR,)),
        linear_profile("8x2"),
        Policy(tolerance=0.1),
    )
    assert wide.plan.strategy is not Strategy.RING
    assert "is used, for going round it in the node order 0-2-1-3-4-5-6-7 is not predicted faster" in wide.reason()
    small = choose(traffic_of("all_gather", (2, 2, 2, 2), PAIR), linear_profile("4x2"), Policy(min_bytes=1 << 30))
    assert "pair" not in small.reason()
    exchange = choose(traffic_of("all_to_all_v", (2, 2, 2, 2), PAIR), linear_profile("4x2"))
    assert "is used, for no plan of this traffic goes round the nodes" in exchange.reason()


def test_a_ring_alone_is_refused_where_no_pair_is_slow() -> None:
    with pytest.raises(PlanError, match=r"allows only ring, .* and no pair is slow"):
        choose(traffic_of("all_reduce"), linear_profile("4x2"), Policy(strategies=(Strategy.RING,)))


def test_an_all_to_all_takes_as_long_as_the_slow_pair() -> None:
    profile = linear_profile("4x2")
    for strategy in (Strategy.FLAT, Strategy.HIERARCHICAL):
        plain, slow = (build(traffic_of("all_to_all_v", (2,) * 4, *pairs), strategy) for pairs in ((), (PAIR,)))
        assert inter_us(slow, profile) == pytest.approx(inter_us(plain, profile) * 4 / 3)


def test_a_ring_passes_a_slow_card_at_its_rate() -> None:
    profile = linear_profile("4x2")
    slow_card = replace(traffic_of("all_gather", (2,) * 4, (0, 1, 0.1)), rates=(1.0, 1.0, 1.0, 0.25))
    ring, direct = build(slow_card, Strategy.RING), build(replace(slow_card, slow_pairs=()), Strategy.HIERARCHICAL)
    assert inter_us(ring, profile) == pytest.approx(inter_us(direct, profile))


@pytest.mark.parametrize("pair", [(1, 0, 0.5), (0, 4, 0.5), (0, 1, 1.0), (0, 1, 0.0), (2, 2, 0.5)])
def test_slow_pairs_that_cannot_be_are_refused(pair: tuple[int, int, float]) -> None:
    with pytest.raises(PlanError, match="expected two of 4 nodes in their order, and a rate between 0 and 1"):
        traffic_of("all_reduce", (2, 2, 2, 2), pair)


def test_slow_pairs_of_a_profile_are_in_the_order_of_its_nodes() -> None:
    profile = linear_profile("4x2", slow=(SlowLink((3, 2), 0.5), SlowLink((1,), 0.25), SlowLink((0, 1), 0.25)))
    assert profile.slow_pairs == ((0, 1, 0.25), (2, 3, 0.5))

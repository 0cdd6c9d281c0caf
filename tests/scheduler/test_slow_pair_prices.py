"""Slow pairs of nodes in prices and decisions: what they cost, which order of nodes goes round them, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.engine.group_plans import Choices
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Peaks, Resource, SlowLink
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler import Policy, Strategy, Traffic, build, choose, price
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.group_profiles import group_profile, pairs_on
from commlayer.scheduler.legs import OwnCallLeg
from commlayer.scheduler.plan import Op, Plan, Span, owned_parts
from commlayer.scheduler.probes import probes
from commlayer.scheduler.slow_pairs import direct_hindrance, ring_hindrance, ring_order
from commlayer.settings import Settings

RATES = {Resource.INTER: 6.25, Resource.INTRA: 500.0, Resource.DEVICE: 2000.0}  # bytes a microsecond and rank
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
PAIR = (0, 1, 0.25)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def profile_of(shape: str, *, direct: float = 1.0, ring: float = 1.0, slow: tuple[SlowLink, ...] = ()) -> Profile:
    """Links without latency, as measured where slow pairs make exchanges and rings between nodes take so much longer."""
    curves = []
    for probe in probes(Topology.parse(shape)):
        is_ring = isinstance(probe.leg, OwnCallLeg) and probe.leg.op is not Op.ALL_TO_ALL
        slower = (ring if is_ring else direct) if probe.key[1] is Resource.INTER else 1.0
        unit = Curve(*probe.key, bytes=(1,), time_us=(1.0,))
        share = probe.leg.share_of_link(probe.unit.traffic, unit)
        times = tuple(size * share * slower / RATES[probe.key[1]] for size in SIZES)
        curves.append(Curve(*probe.key, bytes=SIZES, time_us=times))
    peaks = Peaks(RATES[Resource.INTER] / direct / 1e3, RATES[Resource.INTRA] / 1e3, RATES[Resource.DEVICE] / 1e3)
    return Profile.create(
        name="linear",
        kind="emulated",
        source="a test",
        topology=shape,
        peaks=peaks,
        gather="remote",
        curves=curves,
        slow_links=slow,
    )


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
    measured = profile_of("4x2", direct=4 / 3, ring=4.0, slow=(SlowLink((0, 1), 0.25),))
    without, clean = profile_of("4x2"), group_profile(measured, (2, 2, 2, 2))
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
    measured = profile_of("4x2", direct=4 / 3, ring=4.0, slow=(SlowLink((0, 1), 0.25),))
    for nodes in ((2, 2), (1, 1, 1), (1, 1, 1, 1)):
        found, expected = (group_profile(each, nodes) for each in (measured, profile_of("4x2")))
        for strategy in (Strategy.FLAT, Strategy.DIRECT):
            plan = build(traffic_of("all_gather", nodes), strategy)
            assert inter_us(plan, found) == pytest.approx(inter_us(plan, expected), rel=1e-3)


def test_the_peak_of_an_uneven_cluster_is_that_of_its_rails() -> None:
    slow = (SlowLink((1, 2), 0.1),)
    measured = profile_of("5+1+1+1", direct=10 / 3, ring=10.0, slow=slow)
    clean = group_profile(measured, (4, 1, 1, 1))
    assert clean.peaks.inter_gbps == pytest.approx(profile_of("5+1+1+1").peaks.inter_gbps)


def test_a_shape_on_every_node_is_predicted_with_the_profiles_slow_pairs() -> None:
    slow = (SlowLink((0, 1), 0.1),)
    measured = profile_of("4x2", direct=10 / 3, ring=10.0, slow=slow)
    with_pair = Choices((2,) * 4, Planner(measured), Settings(), slow_pairs=measured.slow_pairs)
    plain = Choices((2,) * 4, Planner(profile_of("4x2")), Settings())
    own, by_shape = (with_pair.predicted_us("all_to_all_v", 1 << 24, shape) for shape in (None, (2,) * 4))
    assert own is not None
    assert by_shape == pytest.approx(own)
    rails = [choices.predicted_us("all_to_all_v", 1 << 24, over=Span.RAIL) for choices in (with_pair, plain)]
    assert rails[0] is not None
    assert rails[1] is not None
    assert rails[0] == pytest.approx(rails[1] * 10 / 3, rel=0.01)
    assert pairs_on(measured, (1, 1, 1)) == ()  # on which three nodes, nobody knows
    assert pairs_on(profile_of("1+3+3", slow=slow), (3, 1, 1)) == ()  # not in the cluster's order


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nodes", [(2,) * 4, (1,) * 4, (3, 1, 2, 2)])
def test_the_ring_is_chosen_where_an_order_of_nodes_goes_round_the_slow_pair(
    collective: str, nodes: tuple[int, ...]
) -> None:
    profile = group_profile(profile_of("3+3+3+3" if len(set(nodes)) > 1 else f"4x{nodes[0]}"), nodes)
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
    three = choose(traffic_of("all_gather", (2, 2, 2), PAIR), profile_of("3x2"))
    assert "; no order of its 3 nodes avoids the slow pair 0-1 of the group (25% of the usual rate)" in three.reason()
    wide = choose(
        Traffic.on_nodes("all_gather", 16 << 20, (2,) * 8, slow_pairs=(PAIR,)), profile_of("8x2"), Policy(tolerance=0.1)
    )
    assert wide.plan.strategy is not Strategy.RING
    assert "is used, for going round it in the node order 0-2-1-3-4-5-6-7 is not predicted faster" in wide.reason()
    small = choose(traffic_of("all_gather", (2, 2, 2, 2), PAIR), profile_of("4x2"), Policy(min_bytes=1 << 30))
    assert "pair" not in small.reason()
    exchange = choose(traffic_of("all_to_all_v", (2, 2, 2, 2), PAIR), profile_of("4x2"))
    assert "is used, for no plan of this traffic goes round the nodes" in exchange.reason()


def test_a_ring_alone_is_refused_where_no_pair_is_slow() -> None:
    with pytest.raises(PlanError, match=r"allows only ring, .* and no pair is slow"):
        choose(traffic_of("all_reduce"), profile_of("4x2"), Policy(strategies=(Strategy.RING,)))


def test_an_all_to_all_takes_as_long_as_the_slow_pair() -> None:
    profile = profile_of("4x2")
    for strategy in (Strategy.FLAT, Strategy.HIERARCHICAL):
        plain, slow = (build(traffic_of("all_to_all_v", (2,) * 4, *pairs), strategy) for pairs in ((), (PAIR,)))
        assert inter_us(slow, profile) == pytest.approx(inter_us(plain, profile) * 4 / 3)


def test_a_ring_passes_a_slow_card_at_its_rate() -> None:
    profile = profile_of("4x2")
    slow_card = replace(traffic_of("all_gather", (2,) * 4, (0, 1, 0.1)), rates=(1.0, 1.0, 1.0, 0.25))
    ring, direct = build(slow_card, Strategy.RING), build(replace(slow_card, slow_pairs=()), Strategy.HIERARCHICAL)
    assert inter_us(ring, profile) == pytest.approx(inter_us(direct, profile))


@pytest.mark.parametrize("pair", [(1, 0, 0.5), (0, 4, 0.5), (0, 1, 1.0), (0, 1, 0.0), (2, 2, 0.5)])
def test_slow_pairs_that_cannot_be_are_refused(pair: tuple[int, int, float]) -> None:
    with pytest.raises(PlanError, match="expected two of 4 nodes in their order, and a rate between 0 and 1"):
        traffic_of("all_reduce", (2, 2, 2, 2), pair)


def test_slow_pairs_of_a_profile_are_in_the_order_of_its_nodes() -> None:
    profile = profile_of("4x2", slow=(SlowLink((3, 2), 0.5), SlowLink((1,), 0.25), SlowLink((0, 1), 0.25)))
    assert profile.slow_pairs == ((0, 1, 0.25), (2, 3, 0.5))

"""The price of a placement and the choice of one: by hand where that goes, and never worse than keeping."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.catalog import load_profile
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.placement_search import Placer, _Exchanges, relabelled
from commlayer.scheduler.placement.placing import PlacementRoom, place, place_layer
from commlayer.scheduler.placement.spilled_rows import rows_on_the_way
from commlayer.scheduler.placement.step_timeline import MicroBatch
from commlayer.scheduler.rails import distinct_nodes
from examples.synthetic_loads import synthetic_loads

WORK = ExpertWork.of_shape(2048, 1408, tflops=400)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return clusters.load("h100-eos").profile_of((4, 4))


@pytest.fixture(scope="module")
def prices(profile: Profile) -> PlacementPrices:
    return PlacementPrices(profile, WORK)


def zipf(experts: int = 32, exponent: float = 1.0, seed: int = 0, top_k: int = 4) -> LayerLoad:
    loads = synthetic_loads("zipf", experts=experts, tokens=32768, top_k=top_k, steps=1, exponent=exponent, seed=seed)
    return LayerLoad(loads.counts[0, 0], top_k)


def placed(load: LayerLoad, profile: Profile, prices: PlacementPrices, horizon: int = 200, **more: Any) -> Any:
    return place(load.counts[None], profile, horizon, work=WORK, top_k=load.top_k, prices=prices, **more)[0]


# The price


def test_one_node_is_priced_by_its_curve() -> None:
    profile = clusters.load("h100-eos").profile_of((4,))
    prices = PlacementPrices(profile, ExpertWork.of_shape(1024, 512, tflops=100, micro_batches=2))
    load = LayerLoad(np.array([4096, 2048, 1024, 1024, 0, 0, 0, 8192]), 2)
    found = prices.layer(load, ExpertPlacement.in_order(8, 4))
    curve = profile.curve("all_to_all_v", Resource.INTRA, 4)
    assert found.exchange_us == pytest.approx(8 * curve.at(8192 * 2048 / 2), rel=0.01)
    assert found.compute_us == pytest.approx(3 * 8192 * 6 * 1024 * 512 / 1e8)
    assert (found.busiest, found.gradient_us, found.spill_us, found.levels) == (2.0, 0.0, 0.0, False)


def test_rows_that_are_moved_in_memory_count_and_decide_between_one_and_two_levels(profile: Profile) -> None:
    load, placement = LayerLoad(np.full(64, 4096.0), 8), ExpertPlacement.in_order(64, 8)
    rows = 4096 * 8
    works = WORK, replace(WORK, level_move_us=1e3), replace(WORK, move_us=1.0, level_move_us=0.5)
    plain, flat, levels = (PlacementPrices(profile, work).layer(load, placement) for work in works)
    assert (plain.levels, flat.levels, levels.levels) == (True, False, True)
    tokens = 4096 * 64 / 8
    moved = tokens / 4 + tokens * _totals(profile, load, placement).reached(load).max()
    assert levels.exchange_us == pytest.approx(plain.exchange_us + (moved + rows) * 0.5, rel=1e-3)
    dear = PlacementPrices(profile, replace(WORK, move_us=1.0, level_move_us=1e3)).layer(load, placement)
    assert dear.exchange_us == pytest.approx(flat.exchange_us + rows * 1.0)


def _totals(profile: Profile, load: LayerLoad, placement: ExpertPlacement) -> Any:
    return PlacementPrices(profile, WORK).totals(load, placement)[0]


def test_tokens_that_reach_a_node_are_about_as_many_as_with_independent_choices(prices: PlacementPrices) -> None:
    for top_k in (1, 2, 8):
        load = LayerLoad(np.full(64, 1000.0), top_k)
        ranks, nodes = prices.totals(load, ExpertPlacement.in_order(64, 8))
        for totals, count in ((ranks, 8), (nodes, 2)):
            expected = distinct_nodes(64, count, top_k) / count
            assert totals.reached(load) == pytest.approx(expected, rel=0.05)


def test_an_expert_that_all_tokens_choose_brings_them_all_to_its_node(prices: PlacementPrices) -> None:
    load = LayerLoad(np.array([700.0] + [100.0] * 7), 2)
    _, nodes = prices.totals(load, ExpertPlacement.in_order(8, 8))
    assert nodes.reached(load)[0] == pytest.approx(1.0)


def test_replicas_halve_the_rows_and_cost_gradients(prices: PlacementPrices) -> None:
    load = LayerLoad(np.array([8000.0] + [1000.0] * 7), 1)
    alone = prices.layer(load, ExpertPlacement.in_order(8, 8, spare=1))
    slots = ExpertPlacement.in_order(8, 8, spare=1).slots.copy()
    slots[4, 1] = 0
    twice = prices.layer(load, ExpertPlacement(slots, 8))
    assert twice.compute_us == pytest.approx(alone.compute_us * 5 / 8)
    size = WORK.gradient_bytes * 8 / 7
    curve = prices.times.profile.curve("all_to_all_v", Resource.INTER, 8)
    assert twice.gradient_us == pytest.approx(curve.at(size), rel=0.02)
    spilled = prices.layer(load, ExpertPlacement.in_order(8, 8), ((0, 0, 4, 0.5),))
    assert spilled.compute_us == pytest.approx(alone.compute_us * 5 / 8)
    assert spilled.sent_us == pytest.approx(2 * curve.at(size), rel=0.02)
    assert 0 < spilled.spill_us < spilled.sent_us, "the helper computes with its own expert meanwhile"


@pytest.mark.parametrize("seed", range(4))
def test_gradients_go_from_every_copy_to_all_others(prices: PlacementPrices, seed: int) -> None:
    draw = np.random.default_rng(seed)
    slots = np.full((8, 7), -1)
    slots[:, :4] = np.arange(32).reshape(8, 4)
    for rank in range(8):
        slots[rank, 4:] = draw.choice(np.setdiff1d(np.arange(10), slots[rank]), 3, replace=False)
    placement = ExpertPlacement(slots, 32)
    pairs = [
        (source, target)
        for expert in range(32)
        for source, target in permutations(np.flatnonzero(placement.copies[expert]), 2)
    ]
    sources, targets = np.array(pairs).T
    messages_us = prices.times.messages_us(sources, targets, np.full(len(pairs), WORK.gradient_bytes))
    assert prices.gradients_us(placement) == messages_us > 0


def test_migration_sends_weights_and_state_of_every_new_copy(prices: PlacementPrices) -> None:
    before = ExpertPlacement.in_order(8, 8, spare=1)
    replica, home = before.slots.copy(), before.slots.copy()
    replica[5, 1] = 0
    home[0, 0], home[5, 1] = -1, 0
    replica_us, home_us = (
        prices.migration_us(before, ExpertPlacement(slots, 8, before.homes)) for slots in (replica, home)
    )
    curve = prices.times.profile.curve("all_to_all_v", Resource.INTER, 8)
    assert prices.migration_us(before, before) == 0.0
    assert replica_us == home_us == pytest.approx(curve.at((WORK.weight_bytes + WORK.state_bytes) * 8 / 7), rel=0.02)


def test_other_ranks_are_refused(prices: PlacementPrices) -> None:
    with pytest.raises(UsageError, match="profile's 8 ranks of 32 experts: got 32 experts on 4"):
        prices.layer(zipf(), ExpertPlacement.in_order(32, 4))


def batch(own: list[float], guests: list[float], *, puts_off: bool = False) -> MicroBatch:
    return MicroBatch(10.0, 2.0, np.array(own), np.array(guests), puts_off)


def test_weights_that_are_lent_hide_behind_own_experts() -> None:
    plain = batch([100, 40], [0, 60])
    assert plain.total_us(0, 0) == 4 * 10 + 3 * 100
    assert plain.total_us(40, 80) == plain.total_us(0, 0), "on time for the guests, and home with the gradients of rows"
    assert plain.total_us(50, 80) == plain.total_us(0, 0) + 10, "guests wait"
    assert plain.total_us(40, 95) == plain.total_us(0, 0) + 15, "gradients of rows share the links with what is late"


def test_products_that_are_put_off_hide_behind_gradients_of_rows() -> None:
    assert batch([100, 100], [0, 0], puts_off=True).total_us(0, 0) == 3 * 10 + 3 * 100 + 2
    assert batch([4, 4], [0, 0], puts_off=True).total_us(0, 0) == 4 * 10 + 2 * 4
    assert batch([100, 40], [0, 60], puts_off=True).total_us(0, 0) == 3 * 10 + 100 + (2 * 100 + 2)


def test_helpers_take_rows_of_their_own_rank_and_node_first() -> None:
    eight, counts = ExpertPlacement.in_order(8, 8), np.array([8000.0] + [0.0] * 7)
    node_of = np.arange(8) // 4

    def rows(*spilled: tuple[int, int, int, float], weight: float = 1.0) -> float:
        return rows_on_the_way(counts, eight, spilled, node_of, weight)

    assert rows() == pytest.approx(8000), "of an exchange in which an eighth stays"
    assert rows((0, 0, 4, 0.125)) == pytest.approx(6000 * 8 / 7), "what its own rank sends its helper never comes"
    assert rows((0, 0, 4, 0.5)) == pytest.approx(3000 * 8 / 7)
    assert rows((0, 0, 4, 0.5), weight=0.0) == 1.0, "each node keeps its own"
    assert rows((0, 0, 4, 0.5), (0, 0, 5, 0.5), weight=0.0) == pytest.approx(2000 * 8 / 4), (
        "half of it from the other node"
    )


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_what_spills_are_those_of_all_parts(prices: PlacementPrices, seed: int) -> None:
    draw = np.random.default_rng(seed)
    load, placement = zipf(seed=seed), ExpertPlacement.in_order(32, 8)
    shares = placement.even_shares()
    spilled: list[tuple[int, int, int, float]] = []
    for expert, target in zip(draw.choice(16, 6), (5, 6, 7, 4, 5, 6), strict=True):
        if (expert, target) not in [each[:3:2] for each in spilled]:
            spilled.append((int(expert), int(expert) // 4, target, 0.1))
            shares[expert, expert // 4] -= 0.1
            shares[expert, target] += 0.1
    ranks, nodes = prices.totals(load, placement, tuple(spilled))
    for totals, of in ((ranks, shares), (nodes, shares.reshape(32, 2, 4).sum(2))):
        assert totals.rows == pytest.approx(load.counts @ of)
        assert totals.none == pytest.approx(np.log1p(-load.chosen_by[:, None] * of).sum(0))


# The search


@pytest.mark.parametrize("spare", [0, 1])
def test_what_exchanges_change_is_the_price(prices: PlacementPrices, spare: int) -> None:
    load, before = zipf(exponent=0.6), ExpertPlacement.in_order(32, 8, spare)
    placer = Placer(prices, load, before, 100)
    slots = before.slots.copy()
    layer, done, last = _Exchanges(placer, before, slots), 0, np.inf
    while layer.exchange_best() and done < 8:
        done += 1
        step = prices.layer(load, ExpertPlacement(slots.copy(), 32, before.homes))
        assert layer._now_us() == pytest.approx(100 * step.total_us)
        assert step.total_us < last
        last = step.total_us
    assert done >= 2


def test_relabelling_keeps_who_is_together(prices: PlacementPrices) -> None:
    before = ExpertPlacement.in_order(32, 8)
    again = relabelled(ExpertPlacement(before.slots[[6, 7, 5, 4, 1, 0, 2, 3]], 32), before, prices.times.node_of)
    assert again.moves_from(before) == ()


def test_relabelling_begins_with_the_rank_that_has_most_already() -> None:
    """The result is that of a hand: time and again the pair of ranks with most experts in common, the first of equal ones."""
    before = ExpertPlacement.in_order(64, 8)
    for seed in range(5):
        placement = ExpertPlacement(np.random.default_rng(seed).permutation(64).reshape(8, 8), 64)
        found = relabelled(placement, before, np.zeros(8, dtype=int))
        common = placement.copies.T @ before.copies
        for _ in range(8):
            mine, there = np.unravel_index(common.argmax(), common.shape)
            assert found.slots[there].tolist() == placement.slots[mine].tolist()
            common[mine], common[:, there] = -1, -1


# The choice


def test_even_loads_are_left_alone(profile: Profile, prices: PlacementPrices) -> None:
    decision = placed(LayerLoad(np.full(32, 5000.0), 4), profile, prices)
    assert (decision.chosen.kind, decision.moves, decision.gain) == ("keep", (), 0.0)
    assert decision.reason().startswith("keep: the busiest rank has 1.00 times the mean")


def test_skew_is_evened_out_better_than_by_eplb(profile: Profile, prices: PlacementPrices) -> None:
    room = PlacementRoom(2 * WORK.copy_bytes)
    decision = placed(zipf(), profile, prices, room=room)
    eplb = next(each for each in decision.candidates if each.kind == "eplb")
    assert decision.gain > 0.3
    assert decision.chosen.total_us < eplb.total_us < decision.kept.total_us
    assert len(decision.moves) > 0
    assert all(decision.placement.copies[move.expert, move.target] for move in decision.moves)
    assert "copies move" in decision.reason()
    assert "paid back after" in decision.reason()


def test_a_short_horizon_pays_for_no_migration(profile: Profile, prices: PlacementPrices) -> None:
    decision = placed(zipf(exponent=0.4), profile, prices, horizon=1, room=PlacementRoom(may_spill=False))
    assert decision.chosen.kind == "keep"
    assert decision.moved_bytes == 0


def test_weights_go_along_where_no_memory_is_left(profile: Profile, prices: PlacementPrices) -> None:
    decision = placed(zipf(exponent=1.5), profile, prices, horizon=1)
    assert decision.chosen.kind == "spill"
    rows = decision.placement.even_shares()
    for expert, source, target, part in decision.spilled:
        rows[expert, source] -= part
        rows[expert, target] += part
    assert (rows > -1e-9).all()
    assert rows.sum(1) == pytest.approx(1.0)


def test_all_forms_are_compared_and_the_fastest_is_taken(profile: Profile, prices: PlacementPrices) -> None:
    decision = placed(zipf(exponent=1.2), profile, prices, room=PlacementRoom(WORK.copy_bytes))
    assert set(decision.best) == {"keep", "without copies", "with copies", "with spilling", "spilling alone"}
    totals = [each.total_us for each in decision.best.values()]
    assert totals == sorted(totals)
    assert decision.chosen is next(iter(decision.best.values()))
    assert all(form in decision.reason() for form in decision.best)
    dear = replace(WORK, gradient_bytes=1 << 32)
    copies = place_layer(
        zipf(exponent=1.2),
        PlacementPrices(profile, dear),
        ExpertPlacement.in_order(32, 8, 1),
        200,
        PlacementRoom(),
    )
    assert copies.chosen.form == "without copies", "gradients are dear, of copies and of guests"
    assert not copies.placement.has_replicas


def test_what_hides_decides_between_copies_and_spilling(profile: Profile) -> None:
    """Long computation hides weights, and never the gradients of copies."""
    work = replace(WORK, row_us=20 * WORK.row_us)
    load, before = zipf(exponent=1.2), ExpertPlacement.in_order(32, 8, 1)
    decision = place_layer(load, PlacementPrices(profile, work), before, 10_000, PlacementRoom())
    assert decision.spilled
    assert not decision.placement.has_replicas
    assert decision.chosen.step.spill_us < 0.01 * decision.chosen.step.sent_us
    assert "behind computation" in decision.reason()
    without = place_layer(load, PlacementPrices(profile, work), before, 10_000, PlacementRoom(may_spill=False))
    assert without.chosen.form == "with copies"
    dear = place_layer(load, PlacementPrices(profile, work), before, 10_000, PlacementRoom(decision_us=1e9))
    assert dear.chosen.form == "with copies", "deciding in every call takes longer than what it saves"


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 5000), min_size=16, max_size=16).filter(any),
    top_k=st.integers(1, 4),
    horizon=st.sampled_from([1, 10, 1000]),
    spare=st.integers(0, 2),
    turned=st.booleans(),
)
def test_no_decision_is_predicted_worse_than_keeping(
    profile: Profile,
    prices: PlacementPrices,
    counts: list[int],
    top_k: int,
    horizon: int,
    spare: int,
    turned: bool,
) -> None:
    load = LayerLoad(np.array(counts), top_k)
    before = ExpertPlacement.in_order(16, 8, spare)
    if turned:  # some placement, as an earlier decision left it
        before = placed(
            zipf(16, seed=1), profile, prices, before=(before,), room=PlacementRoom(may_spill=False)
        ).placement
    room = PlacementRoom(spare * WORK.copy_bytes)
    decision = placed(load, profile, prices, horizon, before=(before,), room=room)
    assert decision.chosen.total_us <= decision.kept.total_us
    assert decision.placement.slots.shape == before.slots.shape
    assert decision.moves == decision.placement.moves_from(before, prices.times.node_of)
    assert decision.reason().startswith(decision.chosen.kind)
    again = placed(load, profile, prices, horizon, before=(before,), room=room)
    assert (again.placement.slots == decision.placement.slots).all()


def test_recorded_loads_are_forecast(profile: Profile) -> None:
    loads = synthetic_loads("zipf", experts=32, layers=2, tokens=32768, top_k=4, steps=8)
    first, second = place(loads, profile, 100, work=WORK)
    assert first.gain > 0
    assert (first.placement.slots != second.placement.slots).any()


def test_what_does_not_fit_is_refused(profile: Profile) -> None:
    counts = np.ones((1, 32))
    with pytest.raises(UsageError, match="a horizon of 0"):
        place(counts, profile, 0, work=WORK, top_k=2)
    with pytest.raises(UsageError, match="and top_k"):
        place(counts, profile, 1, work=WORK)
    with pytest.raises(UsageError, match="each of 1 layers, got 2"):
        place(counts, profile, 1, work=WORK, top_k=2, before=(ExpertPlacement.in_order(32, 8),) * 2)
    with pytest.raises(PlanError, match="a group of 1x16 does not fit"):
        PlacementPrices(profile, WORK, (16,))


def test_a_part_of_the_cluster_is_priced_as_a_profile_of_that_part() -> None:
    whole = load_profile("emulated-2x4")
    load, placement = LayerLoad(np.arange(1.0, 9.0), 2), ExpertPlacement.in_order(8, 4)
    of_part = PlacementPrices(whole, WORK, (2, 2))
    assert of_part.layer(load, placement) == PlacementPrices(group_profile(whole, (2, 2)), WORK).layer(load, placement)
    of_node = PlacementPrices(whole, WORK, (4,))
    assert (of_node.times.num_nodes, of_node.times.num_ranks, of_node.times.has_levels) == (1, 4, False)
    assert of_node.layer(load, placement).exchange_us > 0


def test_on_nodes_of_different_sizes_every_rank_is_a_node_of_its_own() -> None:
    profile = clusters.load("h100-eos").profile_of((4, 2))
    prices = PlacementPrices(profile, replace(WORK, row_us=1e4))
    assert (prices.times.num_nodes, prices.times.per_node, prices.times.has_levels) == (6, 1, False)
    assert prices.times.node_of.tolist() == list(range(6))
    near, far = (prices.times.messages_us(np.array([0]), np.array([to]), np.array([1 << 20])) for to in (1, 5))
    assert near == far > 0
    decision = place_layer(
        LayerLoad(np.arange(1.0, 13.0), 2), prices, ExpertPlacement.in_order(12, 6, 1), 10_000, PlacementRoom()
    )
    assert decision.chosen.step.busiest < decision.kept.step.busiest


def test_where_experts_may_have_no_copies_none_is_placed() -> None:
    prices = PlacementPrices(clusters.load("h100-eos").profile_of((4, 4)), WORK)
    before = ExpertPlacement.in_order(16, 8, 1)
    load = LayerLoad(np.array([1e6] + [1.0] * 15), 2)
    free, without = (
        place_layer(load, prices, before, 10_000, PlacementRoom(may_copy=may_copy, may_spill=False))
        for may_copy in (True, False)
    )
    assert any(each.placement.has_replicas for each in free.candidates)
    assert not any(each.placement.has_replicas for each in without.candidates)

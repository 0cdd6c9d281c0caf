"""LLEP's rule: an example by hand, what it keeps to, and the same row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.llep import LlepRule, llep_spilled
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.spilled_rows import Spilled

FOUR = ExpertPlacement.in_order(8, 4)


def rank_rows(counts: Array, spilled: Spilled, placement: ExpertPlacement = FOUR) -> list[int]:
    """The rows of each rank, added up expert by expert; every row is somewhere."""
    rows = [0.0] * placement.num_ranks
    for expert, count in enumerate(counts):
        rows[placement.homes[expert]] += count
    for expert, source, target, part in spilled:
        assert source == placement.homes[expert] != target
        rows[source] -= part * counts[expert]
        rows[target] += part * counts[expert]
    assert sum(rows) == pytest.approx(sum(counts))
    assert min(rows) >= -1e-6
    return [round(each) for each in rows]


def row_by_row(counts: list[int], rule: LlepRule) -> list[int]:
    """The same rule for single rows, where a rank may take as few as it likes: the rows of each rank."""
    waiting = [sum(counts[rank * 2 : rank * 2 + 2]) for rank in range(4)]
    taken, limit = [0] * 4, int(rule.capacity * (sum(counts) // 4))
    for expert in sorted(range(8), key=lambda each: -counts[each]):
        home = helper = expert // 2
        waiting[home] -= counts[expert]
        for _ in range(counts[expert]):
            if taken[home] + waiting[home] < limit:
                helper = home
            elif helper == home or taken[helper] + waiting[helper] >= limit:
                helper = min((rank for rank in range(4) if rank != home), key=lambda each: taken[each] + waiting[each])
            taken[helper] += 1
    return taken


def test_an_example_by_hand() -> None:
    """16,000 rows, so 4,000 a rank on average, and 4,400 at most. Expert 0 comes first: its rank may still get 1,000 rows of
    expert 1, so 3,400 stay, and 5,600 are over. The least busy rank is 3, with 1,000: it takes 3,400. Then 2 has 2,000 and takes
    the other 2,200."""
    counts = [9000, 1000, 2000, 1000, 1000, 1000, 500, 500]
    spilled = llep_spilled(np.array(counts), FOUR)
    assert [each[:3] for each in spilled] == [(0, 0, 3), (0, 0, 2)]
    assert [each[3] * 9000 for each in spilled] == pytest.approx([3400, 2200])
    assert rank_rows(counts, spilled) == [4400, 3000, 4200, 4400]


def test_a_rank_that_takes_few_rows_is_passed_over_and_the_rest_goes_somewhere() -> None:
    """1,000 rows a rank on average, 1,100 at most. No rank has room for 1,024 rows, so the least busy one gets all 2,300 that are
    over; expert 2, which was at home there, has to go on."""
    counts = [3400, 0, 200, 0, 200, 0, 200, 0]
    spilled = llep_spilled(np.array(counts), FOUR)
    assert [each[:3] for each in spilled] == [(0, 0, 1), (2, 1, 2)]
    assert rank_rows(counts, spilled) == [1100, 2300, 400, 200]
    few = llep_spilled(np.array(counts), FOUR, LlepRule(least_rows=100))
    assert rank_rows(counts, few) == [1100, 1100, 1100, 700]
    counts = [1400, 0, 900, 0, 900, 0, 800, 0]  # fewer go where they are all that is left
    assert rank_rows(counts, llep_spilled(np.array(counts), FOUR)) == [1100, 900, 900, 1100]


def test_nothing_spills_below_the_imbalance_and_something_at_it() -> None:
    counts = np.array([1299, 0, 901, 0, 900, 0, 900, 0])
    assert llep_spilled(counts, FOUR) == ()
    counts[0], counts[2] = 1300, 900
    assert rank_rows(counts, llep_spilled(counts, FOUR)) == [1100, 1100, 900, 900]
    assert llep_spilled(counts, FOUR, LlepRule(imbalance=1.31)) == ()
    assert llep_spilled(np.zeros(8), FOUR) == ()
    assert llep_spilled(np.array([5.0]), ExpertPlacement.in_order(1, 1), LlepRule(imbalance=0, capacity=1)) == ()


def test_one_row_stays_at_home() -> None:
    assert llep_spilled(np.array([0, 0, 0, 1, 0, 0, 0, 0]), FOUR) == ()


rows = st.lists(st.integers(0, 40), min_size=8, max_size=8)


@given(rows, st.sampled_from([1.0, 1.1, 1.5, 2.0]))
def test_ranks_have_as_many_rows_as_row_by_row_and_none_above_its_capacity(counts: list[int], capacity: float) -> None:
    counts[0] += -sum(counts) % 4  # then all rows have room
    rule = LlepRule(imbalance=0, capacity=capacity, least_rows=1)
    found = rank_rows(counts, llep_spilled(np.array(counts), FOUR, rule))
    assert found == row_by_row(counts, rule)
    assert max(found) <= int(capacity * (sum(counts) // 4))


@given(rows, st.integers(0, 30))
def test_no_rank_takes_fewer_rows_than_it_shall_but_the_last_ones(counts: list[int], least: int) -> None:
    spilled = llep_spilled(np.array(counts), FOUR, LlepRule(imbalance=0, least_rows=least))
    rank_rows(counts, spilled)
    for at, (expert, _, _, part) in enumerate(spilled):
        is_last = all(each[0] != expert for each in spilled[at + 1 :])
        assert is_last or round(part * counts[expert]) >= least


def test_the_weights_of_a_decision_are_priced() -> None:
    prices = PlacementPrices(clusters.load("h100-eos").profile_of((2, 2)), ExpertWork.of_shape(2048, 1408, tflops=400))
    load = LayerLoad(np.array([9000, 1000, 2000, 1000, 1000, 1000, 500, 500]) * 16, 2)
    spilled = llep_spilled(load.counts, FOUR)
    before, after = prices.layer(load, FOUR), prices.layer(load, FOUR, spilled)
    assert before.busiest == 10 / 4
    assert after.busiest == pytest.approx(1.1)
    assert after.compute_us == pytest.approx(before.compute_us * 4.4 / 10)
    sources, targets = np.array([part[1] for part in spilled]), np.array([part[2] for part in spilled])
    there_us = prices.times.messages_us(sources, targets, np.full(len(spilled), prices.work.weight_bytes))
    assert after.sent_us == pytest.approx(2 * there_us)
    assert 0 < after.spill_us < after.sent_us


@pytest.mark.parametrize(
    ("counts", "placement", "match"),
    [
        ([1, 1], FOUR, "counts of 8 experts without copies, got 2 counts"),
        ([1, 1], ExpertPlacement(np.array([[0, 1], [1, 0]]), 2), "2 copies at most"),
    ],
)
def test_what_the_rule_does_not_know_is_refused(counts: list[int], placement: ExpertPlacement, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        llep_spilled(np.array(counts), placement)


@pytest.mark.parametrize("numbers", [(-1.0, 1.1, 0), (1.3, 0.9, 0), (1.3, float("nan"), 0), (1.3, 1.1, -1)])
def test_thresholds_that_cannot_be_are_refused(numbers: tuple[float, float, int]) -> None:
    with pytest.raises(UsageError, match="LLEP's rule"):
        LlepRule(*numbers)

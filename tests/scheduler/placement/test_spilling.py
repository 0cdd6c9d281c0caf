"""Decisions of what spills in a call: whole rows, on all ranks alike, and never where it is not predicted to pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.llep import LlepRule
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.spilling import Spilling, decide_spill, spilled_cells

EIGHT = ExpertPlacement.in_order(8, 8)
PRICED = Spilling("priced")


@pytest.fixture(scope="module")
def prices() -> PlacementPrices:
    """Price experts that compute long, and whose weights are small."""
    work = ExpertWork(row_bytes=4096, row_us=1.0, weight_bytes=1 << 16, gradient_bytes=1 << 16, state_bytes=0)
    return PlacementPrices(clusters.load("h100-eos").profile_of((4, 4)), work)


def in_order(counts: list[int]) -> np.ndarray:
    """Rows of each expert's copy on each rank, one expert on each."""
    return np.diag(counts)


def test_even_loads_are_told_by_whole_numbers() -> None:
    for spilling, least in (
        (PRICED, 105),
        (Spilling("llep"), 130),
        (Spilling("llep", thresholds=LlepRule(imbalance=2)), 200),
    ):
        assert not spilling.is_for([least - 1, 201 - least])
        assert spilling.is_for([least, 200 - least])
        assert not any(map(spilling.is_for, ([0, 0], [], [7])))


def test_a_hot_rank_spills_where_it_pays_and_within_its_node_first(prices: PlacementPrices) -> None:
    found = decide_spill(in_order([9000, 100, 1000, 1000, 1000, 1000, 1000, 1000]), EIGHT, 1, PRICED, prices)
    assert found.parts
    assert found.parts[0].expert == found.parts[0].source == 0
    assert found.parts[0].target == 1, "the lightest rank, which shares the node"
    assert found.busiest[1] < found.busiest[0]
    assert found.step_us is not None
    assert found.step_us[1] < found.step_us[0]
    assert "rows of 1 expert spill" in found.reason()


def test_nothing_spills_at_an_even_load_nor_where_weights_are_dear(prices: PlacementPrices) -> None:
    even = decide_spill(in_order([1000, 1010, 990, 1000, 1000, 1000, 1000, 1000]), EIGHT, 1, PRICED, prices)
    assert even.parts == ()
    assert "nothing spills" in even.reason()
    work = ExpertWork(row_bytes=4096, row_us=0.01, weight_bytes=1 << 30, gradient_bytes=1 << 30, state_bytes=0)
    dear = PlacementPrices(prices.times.profile, work)
    assert decide_spill(in_order([9000] + [1000] * 7), EIGHT, 1, PRICED, dear).parts == ()


@given(st.lists(st.integers(0, 5000), min_size=16, max_size=16), st.integers(0, 3))
def test_prices_never_choose_what_they_find_slower(prices: PlacementPrices, counts: list[int], seed: int) -> None:
    slots = np.full((8, 3), -1)
    slots.reshape(-1)[np.random.default_rng(seed).permutation(24)[:16]] = np.arange(16)
    placement = ExpertPlacement(slots, 16)
    rows = np.zeros((16, 8), dtype=np.int64)
    experts, ranks = placement.held
    rows[experts, ranks] = np.array(counts)[experts]
    found = decide_spill(rows, placement, 2, PRICED, prices)
    after = rows.copy()
    for part in found.parts:
        after[part.expert, part.source] -= part.rows
        after[part.expert, part.target] += part.rows
    assert (after >= 0).all()
    assert len({part[:3] for part in found.parts}) == len(found.parts)
    if found.parts:
        load = LayerLoad(rows.sum(1), 2)
        spilled = tuple((e, s, t, moved / rows[e].sum()) for e, s, t, moved in found.parts)
        assert prices.layer(load, placement, spilled).total_us < prices.layer(load, placement).total_us
        assert after.sum(0).max() <= rows.sum(0).max()


def test_copies_of_an_expert_spill_by_prices_and_not_by_llep(prices: PlacementPrices) -> None:
    slots = np.array([[0, 1], [0, -1], [2, -1], [3, -1], [4, -1], [5, -1], [6, -1], [7, -1]])
    placement = ExpertPlacement(slots, 8)
    rows = np.zeros((8, 8), dtype=np.int64)
    rows[0, 0], rows[0, 1], rows[1, 0], rows[2:, 2:] = 4001, 4000, 4000, np.diag([100] * 6)
    found = decide_spill(rows, placement, 1, PRICED, prices)
    assert found.parts
    assert all(part.target > 1 for part in found.parts)
    with pytest.raises(UsageError, match="without copies"):
        decide_spill(rows, placement, 1, Spilling("llep"))


def test_llep_spills_by_its_thresholds() -> None:
    rows = in_order([8000] + [0] * 7)
    found = decide_spill(rows, EIGHT, 1, Spilling("llep"))
    assert sum(part.rows for part in found.parts) == 8000 - 1100
    few = decide_spill(rows, EIGHT, 1, Spilling("llep", thresholds=LlepRule(imbalance=9.0)))
    assert few.parts == ()
    assert few.step_us is None


def test_what_does_not_go_together_is_refused() -> None:
    assert Spilling.of(None) is None
    assert Spilling.of("llep") == Spilling("llep")
    with pytest.raises(UsageError, match="priced or llep"):
        Spilling.of("often")
    with pytest.raises(UsageError, match="thresholds"):
        Spilling("priced", thresholds=LlepRule())
    with pytest.raises(UsageError, match="no prices"):
        Spilling("llep", work=ExpertWork.of_shape(8, 8, tflops=1))
    with pytest.raises(UsageError, match="a profile and an expert's work"):
        decide_spill(in_order([9] + [1] * 7), EIGHT, 1, PRICED)


def test_helpers_take_the_rows_of_their_own_rank_first_then_of_their_node() -> None:
    counts = np.full((4, 1, 2, 1), 10)  # 20 rows of each rank
    found = spilled_cells(counts, [(0, 2, 30)], node_of=[0, 0, 1, 1])
    assert found[0, :, 0].sum(1).tolist() == [0, 0, 20, 10]
    assert found[0, 3, 0].tolist() == [5, 5], "in proportion from both parts of the tokens"
    far = spilled_cells(counts, [(0, 2, 60), (0, 1, 20)], node_of=[0, 0, 1, 1])
    assert far.sum((2, 3)).tolist() == [[20, 0, 20, 20], [0, 20, 0, 0]], "each helper's own before another helper's"


@given(st.data())
def test_cells_add_up_and_no_source_gives_more_than_it_has(data: st.DataObject) -> None:
    shape = 3, 2, 4, 5
    numbers = data.draw(st.lists(st.integers(0, 9), min_size=120, max_size=120))
    counts = np.array(numbers).reshape(shape)
    parts: list[tuple[int, int, int]] = []
    left = counts.sum((0, 1, 2))
    for place in data.draw(st.lists(st.integers(0, 4), max_size=6)):
        rows = data.draw(st.integers(0, int(left[place])))
        left[place] -= rows
        parts.append((place, data.draw(st.integers(0, 2)), rows))
    found = spilled_cells(counts, parts, node_of=[0, 0, 1])
    assert found.sum((1, 2, 3)).tolist() == [rows for *_, rows in parts]
    assert (found >= 0).all()
    for place in range(5):
        taken = sum((found[at] for at, part in enumerate(parts) if part[0] == place), np.zeros(shape[:3], dtype=int))
        assert (taken <= counts[..., place]).all()

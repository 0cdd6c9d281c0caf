"""Placements, the moves between them, and EPLB's by its description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.eplb import balanced_packs, eplb_placement, replicated_copies
from commlayer.scheduler.placement.expert_placement import ExpertMove, ExpertPlacement


def test_the_three_arrays_say_the_same() -> None:
    placement = ExpertPlacement(np.array([[2, 0], [1, 2], [-1, 0]]), 3)
    assert placement.phy2log.tolist() == [2, 0, 1, 2, -1, 0]
    assert placement.logcnt.tolist() == [2, 1, 2]
    assert placement.log2phy.tolist() == [[1, 5], [2, -1], [0, 3]]
    assert placement.homes.tolist() == [0, 1, 0]
    assert placement.even_shares().tolist() == [[0.5, 0, 0.5], [0, 1, 0], [0.5, 0.5, 0]]
    assert placement.has_replicas
    later = ExpertPlacement(np.array([[-1, -1], [1, 2], [2, 0]]), 3)
    assert placement.owned_as(later).homes.tolist() == [2, 1, 1]


def test_experts_in_order() -> None:
    placement = ExpertPlacement.in_order(5, 2, spare=1)
    assert placement.slots.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1]]
    assert not placement.has_replicas


@pytest.mark.parametrize(
    ("slots", "match"),
    [
        ([[0, 1], [1, -1]], "none for \\[2\\]"),
        ([[0, 0], [1, 2]], "several times"),
        ([[0, 1], [2, 3]], "an expert, got"),
    ],
)
def test_unsound_placements_are_refused(slots: list[list[int]], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        ExpertPlacement(np.array(slots), 3)


def test_moves_are_what_is_missing_and_come_from_near() -> None:
    before = ExpertPlacement(np.array([[0, 3], [1, -1], [2, -1], [3, -1]]), 4)
    after = ExpertPlacement(np.array([[0, -1], [1, 0], [3, -1], [2, 3]]), 4)
    node_of = np.array([0, 0, 1, 1])
    assert after.moves_from(before, node_of) == (
        ExpertMove(0, 0, 1, is_replica=True),
        ExpertMove(2, 2, 3, is_replica=False),
        ExpertMove(3, 3, 2, is_replica=False),
    )
    assert before.moves_from(before) == ()
    with pytest.raises(UsageError, match="moves: expected"):
        after.moves_from(ExpertPlacement.in_order(4, 2))


def test_who_stays_on_a_rank_stays_in_its_slot() -> None:
    before = ExpertPlacement(np.array([[0, 1, 2], [3, 4, -1]]), 5, np.array([0, 0, 0, 1, 1]))
    after = ExpertPlacement(np.array([[4, 2, 0], [1, 3, 0]]), 5).settled_from(before)
    assert after.slots.tolist() == [[0, 4, 2], [3, 1, 0]]
    assert after.homes.tolist() == [0, 1, 0, 1, 0]
    assert before.settled_from(before).slots.tolist() == before.slots.tolist()
    with pytest.raises(UsageError, match="as before"):
        after.settled_from(ExpertPlacement.in_order(5, 2, spare=1))


# EPLB


def test_packs_have_equally_many_and_the_heaviest_apart() -> None:
    assert balanced_packs(np.array([1.0, 9.0, 8.0, 2.0]), 2).tolist() == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="2 packs"):
        balanced_packs(np.ones(3), 2)


def test_copies_go_to_who_has_most_to_do() -> None:
    assert replicated_copies(np.array([8.0, 4.0, 1.0]), 6, 4).tolist() == [3, 2, 1]
    assert replicated_copies(np.array([8.0, 4.0, 1.0]), 6, 2).tolist() == [2, 2, 2]
    with pytest.raises(UsageError, match="1 to 4 copies"):
        replicated_copies(np.ones(3), 2, 4)


def test_the_published_example_is_placed_in_its_hierarchy() -> None:
    """The loads of the README's example, first layer: 12 experts in 4 groups, 16 slots, 2 nodes of 4 GPUs."""
    loads = np.array([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], dtype=float)
    placement = eplb_placement(loads, 16, 8, num_nodes=2, num_groups=4)
    nodes = [set(part) for part in placement.phy2log.reshape(2, 8).tolist()]
    assert sorted(map(sorted, nodes)) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert np.flatnonzero(placement.logcnt == 2).tolist() == [1, 4, 5, 10]


loads_of_experts = st.lists(st.integers(0, 1000), min_size=8, max_size=8)


@given(loads_of_experts, st.sampled_from([8, 12, 16]), st.sampled_from([1, 2, 4]))
def test_every_placement_is_sound(loads: list[int], slots: int, groups: int) -> None:
    placement = eplb_placement(np.array(loads, float), slots, 4, num_nodes=2, num_groups=groups)
    assert placement.logcnt.sum() == slots
    assert placement.copies.max() == 1


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="ranks to divide 9 slots"):
        eplb_placement(np.ones(8), 9, 4)
    with pytest.raises(UsageError, match="1 to 2 copies"):
        eplb_placement(np.ones(2), 8, 2)

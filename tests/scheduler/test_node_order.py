"""The order of nodes in a ring, against all orders that there are."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.scheduler.node_order import MOST_EXACT, Rates, best_order, slowest_edge

LEVELS = (0.1, 0.25, 0.5, 1.0)


def rates_of(nodes: int, slow: dict[tuple[int, int], float], *, is_both_ways: bool = True) -> Rates:
    ways = {**slow, **({(b, a): rate for (a, b), rate in slow.items()} if is_both_ways else {})}
    return tuple(tuple(ways.get((a, b), 1.0) for b in range(nodes)) for a in range(nodes))


def worth(order: tuple[int, ...], rates: Rates) -> tuple[float, float]:
    edges = [rates[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return min(edges), round(sum(edges), 6)


@st.composite
def matrices(draw: st.DrawFn) -> Rates:
    nodes = draw(st.integers(3, 6))
    return tuple(tuple(draw(st.sampled_from(LEVELS)) for _ in range(nodes)) for _ in range(nodes))


@given(matrices())
def test_no_order_is_better(rates: Rates) -> None:
    orders = [(0, *rest) for rest in permutations(range(1, len(rates)))]
    best = max(worth(order, rates) for order in orders)
    assert best_order(rates) == next(order for order in orders if worth(order, rates) == best)


def test_a_slow_pair_is_gone_round_from_four_nodes_on() -> None:
    assert best_order(rates_of(4, {(0, 1): 0.25})) == (0, 2, 1, 3)
    for nodes in range(4, 24):
        rates = rates_of(nodes, {(2, 3): 0.25, (0, nodes - 1): 0.5} if nodes > 4 else {(2, 3): 0.25})
        order = best_order(rates)
        assert sorted(order) == list(range(nodes))
        assert order[0] == 0
        assert slowest_edge(order, rates) == 1.0
    three = rates_of(3, {(0, 1): 0.25})
    assert slowest_edge(best_order(three), three) == 0.25


def test_one_direction_of_a_pair_can_be_slow_alone() -> None:
    rates = rates_of(3, {(0, 1): 0.25}, is_both_ways=False)
    assert best_order(rates) == (0, 2, 1)  # the other way round
    assert slowest_edge((0, 1, 2), rates) == 0.25


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, MOST_EXACT, MOST_EXACT + 1, 64])
def test_nodes_that_are_alike_keep_their_order(nodes: int) -> None:
    assert best_order(rates_of(nodes, {})) == tuple(range(nodes))


@pytest.mark.parametrize("nodes", [MOST_EXACT + 1, 40])
def test_a_slow_node_is_passed_once_and_slow_pairs_are_gone_round_beside_it(nodes: int) -> None:
    slow = {(5, other): 0.25 for other in range(nodes) if other != 5} | {(0, 1): 0.1, (1, 2): 0.1}
    order = best_order(rates_of(nodes, slow))
    assert slowest_edge(order, rates_of(nodes, slow)) == 0.25
    assert sorted(order) == list(range(nodes))


def test_the_least_rate_counts_before_the_sum() -> None:
    rates = rates_of(4, {(0, 1): 0.1, (0, 2): 0.3, (1, 3): 0.3})
    assert worth((0, 1, 2, 3), rates)[1] > worth((0, 2, 1, 3), rates)[1]
    assert best_order(rates) == (0, 2, 1, 3)

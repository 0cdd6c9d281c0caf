"""Links between nodes, pair by pair: the rounds in which they are timed, and which are found slow."""

from __future__ import annotations

from itertools import combinations

import pytest
from synthetic_profiles import synthetic_profile

from commlayer.profiles.errors import ProfileError
from commlayer.profiles.links import SlowLink
from commlayer.profiles.pairs import Pair, pair_rounds, slow_links


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 8, 15, 16])
def test_every_pair_meets_once_and_no_node_twice_in_a_round(num_nodes: int) -> None:
    rounds = pair_rounds(num_nodes)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(num_nodes), 2))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("num_nodes", [17, 64, 1000])
def test_of_many_nodes_each_meets_fifteen_at_most(num_nodes: int) -> None:
    rounds = pair_rounds(num_nodes)
    assert len(rounds) == 15
    met = [pair for pairs in rounds for pair in pairs]
    assert len(set(met)) == len(met)
    assert {node for pair in met for node in pair} == set(range(num_nodes))


def times_of(rates: list[float], ways: dict[Pair, float] | None = None) -> dict[Pair, float]:
    return {
        (a, b): 1000.0 / min(rates[a], rates[b]) / (ways or {}).get((a, b), 1.0)
        for a, b in combinations(range(len(rates)), 2)
    }


def test_a_slow_card_is_named_and_not_those_that_talk_to_it() -> None:
    (found,) = slow_links(times_of([1.0, 1.0, 0.25, 1.0]))
    assert found.nodes == (2,)
    assert found.rate == pytest.approx(0.25)
    assert str(found) == "node 2's card has 25% of the usual rate"


def test_a_slow_way_between_two_fast_cards_is_named_as_a_pair() -> None:
    (found,) = slow_links(times_of([1.0] * 4, {(1, 3): 0.2}))
    assert found.nodes == (1, 3)
    assert found.rate == pytest.approx(0.2)
    assert str(found) == "nodes 1 and 3 have 20% of the usual rate"


def test_noise_and_two_nodes_name_nobody() -> None:
    assert slow_links(times_of([1.0, 0.9, 1.0, 0.85])) == ()
    assert slow_links(times_of([1.0, 0.25])) == ()
    assert slow_links({}) == ()


def test_a_profile_keeps_slow_links_and_one_without_is_as_before() -> None:
    plain = synthetic_profile(nodes=4)
    slow = plain.replace(slow_links=[SlowLink((3,), 0.25), SlowLink((0, 1), 0.5)])
    assert slow.node_rates == (1.0, 1.0, 1.0, 0.25)
    assert plain.node_rates == ()
    assert slow.fingerprint != plain.fingerprint
    assert "slow_links" not in plain.to_json()
    assert slow.replace(slow_links=[]).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("nodes", "rate", "words"),
    [
        ((4,), 0.5, "expected nodes below 4"),
        ((1, 1), 0.5, "two different ones"),
        ((0,), 1.5, "fraction of the usual rate"),
    ],
)
def test_slow_links_that_cannot_be_are_refused(nodes: tuple[int, ...], rate: float, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        synthetic_profile(nodes=4).replace(slow_links=[SlowLink(nodes, rate)])

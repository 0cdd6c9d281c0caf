"""Links between nodes, pair by pair: in which rounds all are timed, and which of them are slower
than the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from commlayer.profiles.links import SlowLink

__all__ = ["MOST_PAIR_ROUNDS", "Pair", "pair_rounds", "slow_links"]

Pair = tuple[int, int]
MOST_PAIR_ROUNDS = 15
"""Rounds of pairs that are measured at most: of more than 16 nodes each meets so many others, a
sample that names a slow card, which all of its pairs show, and perhaps not a slow pair."""
_SLOW_CARD = 0.8
"""A card of more than this part of the usual rate counts as one like the others: what is measured
once is not known better."""
_SLOW_PAIR = 0.6
"""The same of the way between two nodes, of what the slower one of their cards does with others."""


def pair_rounds(num_nodes: int, most: int = MOST_PAIR_ROUNDS) -> list[list[Pair]]:
    """Rounds in which every node exchanges with one other, or with none, until all pairs have; at
    most ``most`` of them.

    A round-robin tournament: one node stays, the others turn.
    """
    places: list[int | None] = list(range(num_nodes))
    if num_nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(min(most, len(places) - 1)):
        halves = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in halves if a is not None and b is not None])
        places.insert(1, places.pop())
    return rounds


def slow_links(times_us: Mapping[Pair, float]) -> tuple[SlowLink, ...]:
    """The cards and pairs that are slower than the others, by how long each pair took for the same
    bytes, µs.

    A card is as fast as its fastest pair; the usual rate is the median card's, of an even number
    the slower middle one's, so that a few pairs that are faster than all others make nobody slow.
    Two nodes have one pair, of which nobody can say which card it is, and nothing to compare it
    with: then none.
    """
    nodes = sorted({node for pair in times_us for node in pair})
    if len(nodes) < 3:
        return ()
    best_us = {node: min(time for pair, time in times_us.items() if node in pair) for node in nodes}
    usual_us = sorted(best_us.values())[len(nodes) // 2]
    cards = [SlowLink((node,), usual_us / best_us[node]) for node in nodes if usual_us < best_us[node] * _SLOW_CARD]
    expected_us = {pair: max(best_us[node] for node in pair) for pair in times_us}
    pairs = [
        SlowLink(pair, usual_us / time_us)
        for pair, time_us in sorted(times_us.items())
        if expected_us[pair] < time_us * _SLOW_PAIR and usual_us < time_us
    ]
    return (*cards, *pairs)

"""The cost of a slow way between two nodes: of exchanges in which every node meets every other one, and of a ring in some order.

Curves of a group are without slow pairs (:mod:`commlayer.scheduler.group_profiles`); what is told here is by how much a step's
bytes look larger to them where one is in its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from commlayer.scheduler.node_order import Rates, best_order, slowest_edge
from commlayer.scheduler.traffic import SlowPair, Traffic

__all__ = ["direct_hindrance", "is_avoided", "ring_hindrance", "ring_order"]


@lru_cache(maxsize=256)
def _edge_rates(cards: tuple[float, ...], slow_pairs: tuple[SlowPair, ...]) -> Rates:
    """The rate from every node to every other one: of the pair where it is slow, else of the slower card."""
    nodes = range(len(cards))
    slow = {frozenset((a, b)): rate for a, b, rate in slow_pairs}
    return tuple(tuple(slow.get(frozenset((a, b)), min(cards[a], cards[b])) for b in nodes) for a in nodes)


def ring_order(traffic: Traffic) -> tuple[int, ...]:
    """The order of the nodes in a ring."""
    if not traffic.slow_pairs:
        return tuple(range(len(traffic.nodes)))
    return best_order(_edge_rates(traffic.node_rates, traffic.slow_pairs))


def is_avoided(traffic: Traffic, pair: tuple[int, int]) -> bool:
    """Whether a ring in that order goes round a pair of nodes."""
    order = ring_order(traffic)
    places = sorted(map(order.index, pair))
    return places[1] - places[0] not in (1, len(order) - 1)


def ring_hindrance(traffic: Traffic, order: Sequence[int]) -> float:
    """The factor by which a ring in this order takes longer than without slow pairs, at least 1. Every edge carries as much."""
    if not traffic.slow_pairs:
        return 1.0
    return max(1.0, min(traffic.node_rates) / slowest_edge(order, _edge_rates(traffic.node_rates, traffic.slow_pairs)))


def direct_hindrance(traffic: Traffic, owned: Sequence[float], *, is_duplex: bool = False) -> float:
    """The factor by which an exchange in which every node sends each other one something takes longer than without slow pairs, at
    least 1: a pair carries a small part of what a card does, so one that is a little slow costs nothing.

    ``owned``: the part of the bytes that each node owns; a node sends that to every other one, or gets so much from each.
    ``is_duplex``: both at the same time.
    """
    if not traffic.slow_pairs:
        return 1.0
    others = len(traffic.nodes) - 1
    ways = [(1 - part, part * others) for part in owned]  # out and in, or in and out, of each card
    cards = [(sum(both) / 2 if is_duplex else max(both)) for both in ways]
    longest = max(load / rate for load, rate in zip(cards, traffic.node_rates, strict=True))
    pairs = ((owned[a], owned[b], rate) for a, b, rate in traffic.slow_pairs)
    return max(
        1.0, *((((one + other) / 2 if is_duplex else max(one, other)) / rate / longest) for one, other, rate in pairs)
    )

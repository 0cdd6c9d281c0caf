"""The order of nodes in a ring: round all of them, so that the slowest way that is used is as fast
as can be. Pure.

A ring is as fast as its slowest edge, so the least rate is made as large as possible, and only then
the sum of all; a shortest tour (the sum alone) takes one slow way where it saves a little on many.
Up to ten nodes that is exact: Held and Karp's tables over sets of nodes, once for the least rate,
and once for the sum over the edges that are fast enough. Above it edges at the least rate are
exchanged, in a fixed order, until nothing gets better: with few slow pairs that finds a way round
them, with many it may not.

Prior art: PCCL measures its peers and solves for the shortest tour, heuristically, on its master;
its issue 22 (2025) is that peers went on with the old ring, for the improved one was not handed to
them. Here every rank finds the order by itself.

Rates are from a node to another one, and may differ the other way. Every rank finds the same order:
they count in whole numbers, and where all are alike the order is 0, 1, 2 and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise

__all__ = ["MOST_EXACT", "Rates", "best_order", "slowest_edge"]

MOST_EXACT = 10
"""Up to this number of nodes the order is the best there is; the tables have 2^(n-1)·n entries."""
_UNIT = 1 << 20
"""Rates are counted in parts of one: sums of fractions would depend on their order."""

Rates = tuple[tuple[float, ...], ...]
_Counts = list[list[int]]


@lru_cache(maxsize=256)
def best_order(rates: Rates) -> tuple[int, ...]:
    """The nodes in their order, node 0 first; the last one goes on to the first. ``rates[a][b]`` is
    from node a to node b, and above 0; those of a node to itself are not looked at."""
    nodes = range(len(rates))
    counts = [[max(1, round(rate * _UNIT)) for rate in row] for row in rates]
    if len(nodes) < 3 or len({counts[a][b] for a in nodes for b in nodes if a != b}) == 1:
        return tuple(nodes)
    return _exact(counts) if len(nodes) <= MOST_EXACT else _improved(counts)


def slowest_edge(order: Sequence[int], rates: Rates) -> float:
    """The least rate on the way round; that of one node, which goes nowhere, is infinite."""
    return min((rates[a][b] for a, b in _edges(order)), default=math.inf)


def _edges(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise([*order, order[0]]) if len(order) > 1 else iter(())


def _exact(counts: _Counts) -> tuple[int, ...]:
    """The best order; of several the first by its nodes. By the node where one is and the nodes
    that are left."""

    @cache
    def least(here: int, left: frozenset[int]) -> int:
        """The slowest edge of the way home that has the fastest one."""
        edges = counts[here]
        return max((min(edges[node], least(node, left - {node})) for node in left), default=edges[0])

    @cache
    def way(here: int, left: frozenset[int]) -> tuple[int, tuple[int, ...]] | None:
        """The largest sum of a way home over edges of ``slowest`` and above, and its nodes; None:
        there is no such way."""
        edges = counts[here]
        if not left:
            return (edges[0], (here,)) if edges[0] >= slowest else None
        best = None
        for node in sorted(node for node in left if edges[node] >= slowest):
            rest = way(node, left - {node})
            if rest is not None and (best is None or edges[node] + rest[0] > best[0]):
                best = edges[node] + rest[0], (here, *rest[1])
        return best

    others = frozenset(range(1, len(counts)))
    slowest = least(0, others)
    best = way(0, others)
    assert best is not None  # the way whose slowest edge that is
    return best[1]


def _improved(counts: _Counts) -> tuple[int, ...]:
    """The order of the nodes as they come, with its slowest edges exchanged for better ones as long
    as there are any."""
    order = list(range(len(counts)))
    worth = _worth(order, counts)
    while True:
        found = next((other for other in _exchanged(order, counts, worth[0]) if _worth(other, counts) > worth), None)
        if found is None:
            start = order.index(0)
            return tuple(order[start:] + order[:start])
        order, worth = found, _worth(found, counts)


def _worth(order: Sequence[int], counts: _Counts) -> tuple[int, int]:
    edges = [counts[a][b] for a, b in _edges(order)]
    return min(edges), sum(edges)


def _exchanged(order: list[int], counts: _Counts, least: int) -> Iterator[list[int]]:
    """The orders without one of the edges at the least rate: a part of the way is turned round, or
    one of its two nodes moved."""
    for place, (a, b) in enumerate(_edges(order)):
        if counts[a][b] > least:
            continue
        turned = order[place + 1 :] + order[: place + 1]  # that edge is now from the last to the first
        for stop in range(2, len(turned)):
            yield turned[:stop][::-1] + turned[stop:]
        for stop in range(1, len(turned) - 1):
            yield [*turned[1 : stop + 1], turned[0], *turned[stop + 1 :]]
            yield [*turned[:stop], turned[-1], *turned[stop:-1]]

"""The legs of an all_to_all with any splits among some ranks of a group: those of each rail, or those of each node.

A dispatch in two levels is one of each, with work on the rows between them. Both ends know what they exchange, so nothing is
told first, and nobody else of the group is written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from commlayer.profiles.errors import PlanError, UsageError
from commlayer.scheduler.legs import ExchangeLeg
from commlayer.scheduler.moves import Buffer, Copy, Message, Moves, Region, filled
from commlayer.scheduler.plan import Cut, Gather, Op, Plan, Span, Strategy
from commlayer.scheduler.traffic import SlowPair, Traffic

__all__ = ["SplitRows", "distinct_nodes", "exchange_over", "is_one_of_two"]

_MOST_KEPT = 256


@lru_cache(maxsize=_MOST_KEPT)
def distinct_nodes(num_experts: int, num_nodes: int, top_k: int, groups: int = 1, limit: int = 1) -> float:
    """The expected number of nodes that hold any of a token's ``top_k`` different experts, all choices being as likely, where
    every node holds as many of ``num_experts``: ``n · (1 − C(E − E/n, k) / C(E, k))``. Of ranks in place of nodes as well.

    ``groups``, ``limit``: of a router that chooses among the experts of only so many groups (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2: 4 of 8), all choices of groups being as likely; a group's experts are consecutive, as a node's are.

    Raises UsageError for numbers that cannot be.
    """
    if num_nodes < 1 or num_experts % num_nodes or not 0 <= top_k <= num_experts:
        raise UsageError(
            f"expected experts that {num_nodes} nodes share evenly, and at most as many choices; got {num_experts} and {top_k}"
        )
    if groups < 1 or num_experts % groups or not 1 <= limit <= groups or top_k > limit * (num_experts // groups):
        raise UsageError(
            f"expected groups that share {num_experts} experts evenly, and as many experts in those that are chosen as choices; "
            f"got {limit} of {groups} groups, and {top_k} choices"
        )
    each, size = num_experts // num_nodes, num_experts // groups
    reachable = limit * size
    total = 0.0
    for node in range(num_nodes):  # one node's experts, by the group that they are in
        held = [max(0, min((node + 1) * each, (g + 1) * size) - max(node * each, g * size)) for g in range(groups)]
        ways = [
            {0: 1} if not count else {} for count in range(limit + 1)
        ]  # how many choices of groups hold so many of them
        for here in held:
            for count in range(limit, 0, -1):
                for known, number in ways[count - 1].items():
                    ways[count][known + here] = ways[count].get(known + here, 0) + number
        missed = sum(number * math.comb(reachable - known, top_k) for known, number in ways[limit].items())
        total += 1 - missed / (math.comb(groups, limit) * math.comb(reachable, top_k))
    return total


class SplitRows:
    """The place of ``rank`` in such a call: ``source_bytes[k]`` go to member k of the group, ``target_bytes[k]`` come from it."""

    def __init__(self, rank: int, source_bytes: Sequence[int], target_bytes: Sequence[int]) -> None:
        self.rank, self.size = rank, len(source_bytes)
        self._bases = {
            Buffer.INPUT: [0, *accumulate(source_bytes)],
            Buffer.OUTPUT: [0, *accumulate(target_bytes)],
        }

    def region(self, buffer: Buffer, member: int) -> Region:
        """The region that goes to a member, or comes from it."""
        bases = self._bases[buffer]
        return Region(buffer, bases[member], bases[member + 1])


class ExchangeRows(ExchangeLeg):
    """Messages to and from the members with which there is anything to exchange, and a copy of the rank's own rows."""

    def moves(self, place: SplitRows, tag: int, chunk: int) -> Moves:
        ring = [(place.rank + distance) % place.size for distance in range(1, place.size)]  # no hot receiver
        own = Copy(place.region(self.source, place.rank), place.region(self.target, place.rank))
        return filled(
            [Message(peer, tag, place.region(self.source, peer)) for peer in ring],
            [Message(peer, tag, place.region(self.target, peer)) for peer in ring],
            [own],
        )


_LEGS = {
    Span.RAIL: ExchangeRows("rows on rails", Op.ALL_TO_ALL, Span.RAIL, Buffer.INPUT, Buffer.OUTPUT),
    Span.NODE: ExchangeRows("rows in node", Op.ALL_TO_ALL, Span.NODE, Buffer.INPUT, Buffer.OUTPUT),
}


@lru_cache(maxsize=_MOST_KEPT)
def exchange_over(
    span: Span, nodes: tuple[int, ...], logical_bytes: int, slow_pairs: tuple[SlowPair, ...] = ()
) -> Plan:
    """The plan of an all_to_all over the rails, or the nodes, of a group with so many ranks on each of ``nodes``.

    ``logical_bytes``: the buffer of one rank, its own rows included, as of an even all_to_all among the ranks of the span.
    ``slow_pairs``: as of a :class:`~commlayer.scheduler.traffic.Traffic`; they change what it costs, not what it moves.
    The same object for the same numbers: who runs plans keeps what it finds out about one by its identity.
    Raises PlanError for another span, and for nodes of different sizes.
    """
    if span not in _LEGS:
        raise PlanError(f"an all_to_all over rails or nodes, got {span.value}")
    traffic = Traffic.on_nodes("all_to_all_v", logical_bytes, nodes, slow_pairs=slow_pairs)
    if not traffic.is_uniform:
        raise PlanError(f"{traffic}: rails need as many ranks of the group on every node")
    return Plan(traffic, Strategy.HIERARCHICAL, 1, Gather.WHOLE, (_LEGS[span].step(Cut(traffic)),))


def is_one_of_two(plan: Plan) -> bool:
    """Whether ``plan`` is one of the two exchanges of tokens that go in two levels (:func:`exchange_over`)."""
    return any(isinstance(step.leg, ExchangeRows) for step in plan.steps)

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

__all__ = ["LEAST_GAIN", "SplitRows", "distinct_nodes", "exchange_over"]

_MOST_KEPT = 256
LEAST_GAIN = 0.1
"""Another kind of dispatch than all_to_all is taken where it is predicted faster by more than this: it also computes maps of all
ranks' tokens."""


def distinct_nodes(num_experts: int, num_nodes: int, top_k: int) -> float:
    """The expected number of nodes that hold any of a token's ``top_k`` different experts, all choices being as likely, where
    every node holds as many of ``num_experts``: ``n · (1 − C(E − E/n, k) / C(E, k))``. Of ranks in place of nodes as well.

    Raises UsageError for numbers that cannot be.
    """
    if num_nodes < 1 or num_experts % num_nodes or not 0 <= top_k <= num_experts:
        raise UsageError(
            f"expected experts that {num_nodes} nodes share evenly, and at most as many choices; got {num_experts} and {top_k}"
        )
    elsewhere = num_experts - num_experts // num_nodes
    return num_nodes * (1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k))


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

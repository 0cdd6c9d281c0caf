"""The legs of all_gather, reduce_scatter and all_reduce round a ring of nodes, in an order that goes past slow pairs.

Every node sends to the next one only, and every byte passes all nodes: as many bytes through each card as where every node sends
to every other one, (m − 1)/m of the whole each way, but over m of the m·(m − 1)/2 ways between nodes. Inside the nodes it is as
in the other plans (:mod:`commlayer.scheduler.group_legs`).

A chunk takes m − 1 *hops* one after the other, each a leg of its own: of a sum, what has come is added to this node's part, and
both go on (the node before a block's own is where its sum ends last but one); of an all_gather, what has come goes on as it is.
Hops of different chunks are under way at once, each a chunk behind the one before, so that the wire does not wait for a message
to have come; a call of one chunk waits for each.

Where sums are rounded (half precision) they are once a hop, instead of once for all nodes: as in the rings of backends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from commlayer.scheduler.group_legs import OWN_BLOCK, SHARE, SPREAD, SUM_NODE
from commlayer.scheduler.group_moves import RingPlace
from commlayer.scheduler.legs import AHEAD, ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import Buffer, Message, Moves, Reduction
from commlayer.scheduler.plan import Cut, Leg, Op, Plan, Span
from commlayer.scheduler.slow_pairs import ring_hindrance, ring_order
from commlayer.scheduler.traffic import Traffic

__all__ = ["round_nodes"]


def _bytes_of_hop(cut: Cut) -> float:
    """Bytes that a rank of the emptiest node sends in a hop, of the node from which most goes out."""
    nodes = cut.traffic.nodes
    least = 1 / len(nodes) if cut.traffic.collective == "all_reduce" else min(nodes) / cut.traffic.group_size
    return cut.size * (1 - least) / (len(nodes) - 1) / min(nodes) / cut.chunks


@dataclass(frozen=True)
class RingHop(ExchangeLeg):
    """A message to the next node, and one from the node before; timed as an exchange of so many bytes among all of them."""

    hop: int = 0

    def size(self, cut: Cut) -> float:
        m = len(cut.traffic.nodes)
        return _bytes_of_hop(cut) * m / (m - 1)

    def connections(self, traffic: Traffic) -> int:
        return 1

    def hindrance(self, plan: Plan) -> float:
        return ring_hindrance(plan.traffic, ring_order(plan.traffic))


class SumHop(RingHop):
    """The node's sum of a block, with those of the nodes before."""

    def moves(self, place: RingPlace, tag: int, chunk: int) -> Moves:
        out, into = place.back(1 + self.hop), place.back(2 + self.hop)
        found = place.landing if self.hop else place.partial
        return Moves(
            tuple(
                Message(peer, tag + nth, found(out, piece)) for peer, nth, piece in place.common(out, place.next, chunk)
            ),
            tuple(
                Message(peer, tag + nth, place.landing(into, piece))
                for peer, nth, piece in place.common(into, place.before, chunk)
            ),
        )


@dataclass(frozen=True)
class AddHop(LocalLeg):
    """The sum of what has come and this node's own; for this rank's block that is the result."""

    hop: int = 0

    def size(self, cut: Cut) -> float:
        return _bytes_of_hop(cut)

    def moves(self, place: RingPlace, tag: int, chunk: int) -> Moves:
        b = place.back(2 + self.hop)
        return Moves(
            reductions=tuple(
                Reduction(
                    (place.landing(b, piece), place.partial(b, piece)),
                    place.output(piece) if b == place.a else place.landing(b, piece),
                )
                for piece in place.pieces(b, place.i, chunk)
            )
        )


class BlockHop(RingHop):
    """A node's block, as the node before has sent it; the first one is this node's own."""

    def moves(self, place: RingPlace, tag: int, chunk: int) -> Moves:
        out, into = place.back(self.hop), place.back(1 + self.hop)
        sent = place.common(out, place.next, chunk)
        received = place.common(into, place.before, chunk)
        whole = place.layout.region
        return Moves(
            tuple(
                Message(peer, tag + nth, whole(Buffer.OUTPUT, piece) if self.hop else place.output(piece, self.source))
                for peer, nth, piece in sent
            ),
            tuple(Message(peer, tag + nth, whole(Buffer.OUTPUT, piece)) for peer, nth, piece in received),
        )


@lru_cache(maxsize=64)
def round_nodes(collective: str, num_nodes: int, *, has_insides: bool) -> LegOrder:
    """The legs of a collective over so many nodes, three or more. ``has_insides``: some node holds several ranks."""
    phase: list[tuple[Leg, int]] = []
    lag, is_summed = 0, collective != "all_gather"
    after: tuple[Leg, ...] = (SUM_NODE,)
    if is_summed:
        lag = AHEAD if has_insides else 0
        for hop in range(num_nodes - 1):
            send = SumHop("pass sums on", Op.ALL_TO_ALL, Span.RAIL, Buffer.STAGING, Buffer.STAGING, after, hop)
            target = Buffer.OUTPUT if hop == num_nodes - 2 else Buffer.STAGING
            add = AddHop("add node", Op.REDUCE, Span.RAIL, Buffer.STAGING, target, (send,), hop)
            phase += [(send, lag), (add, lag + 1)]
            after, lag = (add,), lag + 1
        if has_insides:  # before those that wait for the wire
            phase[1:1] = [(SHARE, 0), (SUM_NODE, AHEAD - 1)]
    if collective == "reduce_scatter":
        return LegOrder(tuple(phase))
    blocks: list[Leg] = []
    for hop in range(num_nodes - 1):
        source = Buffer.OUTPUT if hop or is_summed else Buffer.INPUT
        before = (blocks[-1],) if blocks else after if is_summed else ()
        blocks.append(BlockHop("pass blocks on", Op.ALL_GATHER, Span.RAIL, source, Buffer.OUTPUT, before, hop))
    if not is_summed:
        phase.append((OWN_BLOCK, 0))
    phase += [(leg, lag + hop) for hop, leg in enumerate(blocks)]
    if has_insides:
        phase.append((replace(SPREAD, after=(OWN_BLOCK, *after, *blocks)), lag + num_nodes - 1))
    return LegOrder(tuple(phase))

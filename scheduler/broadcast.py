"""The legs of a broadcast over nodes: the root scatters inside its node, whose ranks send on side by side; nodes gather.

A chunk is cut into one slice for each rank of the root's node (what that rank sends on), and for each other node into one
slice for each of its ranks (what that rank receives). Where both hold equally many ranks these are the same.
"""

from __future__ import annotations

from commlayer.scheduler.legs import ExchangeLeg, LegOrder
from commlayer.scheduler.moves import Buffer, Message, Moves, Region, cut, filled
from commlayer.scheduler.plan import CurveKey, Cut, Op, Plan, Span

__all__ = ["BROADCAST", "BroadcastPlace"]


class BroadcastPlace:
    """Where ``rank`` stands: rank ``i`` of node ``a``, the root in node ``home``. ``nodes``: the members on each node."""

    def __init__(self, plan: Plan, nodes: tuple[tuple[int, ...], ...], rank: int, root: int) -> None:
        self.plan, self.nodes, self.rank, self.root = plan, nodes, rank, root
        self.home = next(a for a, members in enumerate(self.nodes) if root in members)
        self.a = next(a for a, members in enumerate(self.nodes) if rank in members)
        self.here = self.nodes[self.a]
        self.i = self.here.index(rank)

    def slice_of(self, a: int, i: int, chunk: int) -> Region:
        """The part of a chunk that rank i of node a handles."""
        size = self.plan.traffic.logical_bytes
        start, stop = (cut(size, self.plan.chunks, chunk + k) for k in (0, 1))
        low, high = (start + cut(stop - start, len(self.nodes[a]), i + k) for k in (0, 1))
        return Region(Buffer.OUTPUT, low, high)


class Scatter(ExchangeLeg):
    """The root gives each rank of its node a slice: an all_to_all, of which only one rank has anything to send."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return (("all_to_all", self.resource(plan.traffic), self.span.ranks(plan.traffic)),)

    def moves(self, place: BroadcastPlace, tag: int, chunk: int) -> Moves:
        if place.a != place.home:
            return Moves()
        if place.rank != place.root:
            return filled(receives=[Message(place.root, tag, place.slice_of(place.a, place.i, chunk))])
        peers = [(i, peer) for i, peer in enumerate(place.here) if peer != place.root]
        return filled([Message(peer, tag, place.slice_of(place.a, i, chunk)) for i, peer in peers])


class SendOn(ExchangeLeg):
    """The ranks of the root's node send their slices to the other nodes; those are fewest where that is the emptiest one."""

    def size(self, cut: Cut) -> float:
        return super().size(cut) * len(cut.traffic.nodes) / min(cut.traffic.nodes)

    def moves(self, place: BroadcastPlace, tag: int, chunk: int) -> Moves:
        mine = place.slice_of(place.a, place.i, chunk)
        if place.a != place.home:
            senders = enumerate(place.nodes[place.home])
            receives = [Message(p, tag, _common(mine, place.slice_of(place.home, i, chunk))) for i, p in senders]
            return filled(receives=receives)
        return filled(
            Message(peer, tag, _common(mine, place.slice_of(b, i, chunk)))
            for b, members in enumerate(place.nodes)
            if b != place.home
            for i, peer in enumerate(members)
        )


class GatherInNode(ExchangeLeg):
    """The ranks of every node give each other their slices; the root has them."""

    def moves(self, place: BroadcastPlace, tag: int, chunk: int) -> Moves:
        mine = place.slice_of(place.a, place.i, chunk)
        others = [(i, peer) for i, peer in enumerate(place.here) if peer != place.rank]
        sends = [Message(peer, tag, mine) for _, peer in others if peer != place.root]
        receives = [Message(peer, tag, place.slice_of(place.a, i, chunk)) for i, peer in others]
        return filled(sends, [] if place.rank == place.root else receives)


def _common(a: Region, b: Region) -> Region:
    start = max(a.start, b.start)
    return Region(a.buffer, start, max(start, min(a.stop, b.stop)))


_OUT = Buffer.OUTPUT

SCATTER = Scatter("scatter in node", Op.SCATTER, Span.NODE, _OUT, _OUT)
SEND_ON = SendOn("send on", Op.ALL_GATHER, Span.RAIL, _OUT, _OUT, (SCATTER,))
GATHER = GatherInNode("gather in node", Op.ALL_GATHER, Span.NODE, _OUT, _OUT, (SEND_ON,))

BROADCAST = LegOrder(((SCATTER, 0),), ((SEND_ON, 0),), ((GATHER, 0),))

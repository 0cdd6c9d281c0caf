"""Which bytes a rank of a group sends and receives in each step of a broadcast over nodes. Pure arithmetic.

A chunk is cut into one slice for each rank of the root's node (what that rank sends on), and for each other node into one
slice for each of its ranks (what that rank receives). Where both hold equally many ranks these are the same.
"""

from __future__ import annotations

from commlayer.profiles.links import Resource
from commlayer.scheduler.moves import Message, Moves, Region, cut
from commlayer.scheduler.plan import Buffer, Op, Plan, Step

__all__ = ["Broadcast"]


class Broadcast:
    """``nodes``: the members on each node; ``rank`` and ``root`` are members."""

    def __init__(self, plan: Plan, nodes: tuple[tuple[int, ...], ...], rank: int, root: int) -> None:
        self.plan, self.nodes, self.rank = plan, nodes, rank
        self.home = next(a for a, members in enumerate(self.nodes) if root in members)
        self.root = root
        self.a = next(a for a, members in enumerate(self.nodes) if rank in members)
        self.here = self.nodes[self.a]
        self.i = self.here.index(rank)

    def of_step(self, index: int, step: Step) -> Moves:
        tag = index
        if step.op is Op.SCATTER:
            return self._scatter(tag, step.chunk)
        return self._across(tag, step.chunk) if step.resource is Resource.INTER else self._inside(tag, step.chunk)

    def _slice(self, a: int, i: int, chunk: int) -> Region:
        size = self.plan.traffic.logical_bytes
        start, stop = (cut(size, self.plan.chunks, chunk + k) for k in (0, 1))
        low, high = (start + cut(stop - start, len(self.nodes[a]), i + k) for k in (0, 1))
        return Region(Buffer.OUTPUT, low, high)

    def _scatter(self, tag: int, chunk: int) -> Moves:
        if self.a != self.home:
            return Moves()
        if self.rank != self.root:
            return _without_empty([], [Message(self.root, tag, self._slice(self.a, self.i, chunk))])
        sends = [
            Message(peer, tag, self._slice(self.a, i, chunk)) for i, peer in enumerate(self.here) if peer != self.root
        ]
        return _without_empty(sends, [])

    def _across(self, tag: int, chunk: int) -> Moves:
        if self.a != self.home:
            mine = self._slice(self.a, self.i, chunk)
            senders = enumerate(self.nodes[self.home])
            receives = [Message(p, tag, _common(mine, self._slice(self.home, i, chunk))) for i, p in senders]
            return _without_empty([], receives)
        mine = self._slice(self.home, self.i, chunk)
        sends = [
            Message(peer, tag, _common(mine, self._slice(b, i, chunk)))
            for b, members in enumerate(self.nodes)
            if b != self.home
            for i, peer in enumerate(members)
        ]
        return _without_empty(sends, [])

    def _inside(self, tag: int, chunk: int) -> Moves:
        mine = self._slice(self.a, self.i, chunk)
        others = [(i, peer) for i, peer in enumerate(self.here) if peer != self.rank]
        sends = [Message(peer, tag, mine) for _, peer in others if peer != self.root]
        receives = [Message(peer, tag, self._slice(self.a, i, chunk)) for i, peer in others]
        return _without_empty(sends, [] if self.rank == self.root else receives)


def _common(a: Region, b: Region) -> Region:
    start = max(a.start, b.start)
    return Region(a.buffer, start, max(start, min(a.stop, b.stop)))


def _without_empty(sends: list[Message], receives: list[Message]) -> Moves:
    return Moves(tuple(m for m in sends if m.region.size), tuple(m for m in receives if m.region.size))

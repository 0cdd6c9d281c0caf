"""Which bytes a rank of a group sends, receives, sums and copies in each step of a plan over nodes. Pure arithmetic.

Geometry. Member k of the group owns *block* k. The blocks of node b's members, one behind the other, are cut into one
*slice* for each rank of node a: slice i is what rank i of node a handles of that node's data. Where both nodes hold equally
many ranks a slice is exactly one block, and i is the same place in both nodes (a rail). A slice is cut into chunks, the
chunks of a slice into the blocks that it touches: *pieces*. All stages of all_gather, reduce_scatter and all_reduce move
pieces, there and back, so nodes of different sizes and blocks of different lengths need no case of their own.

Cuts inside a block are at multiples of ``ALIGN`` bytes from its slice's beginning, so no element is cut; of rows, where those
are encoded (:mod:`commlayer.scheduler.encoded_moves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlayer.profiles.links import Resource
from commlayer.scheduler.broadcast_moves import Broadcast
from commlayer.scheduler.moves import ALIGN, Copy, Message, Moves, Reduction, Region, cut, tags_per_step
from commlayer.scheduler.plan import Buffer, Op, Plan, Step, Strategy

__all__ = ["Group", "Layout", "Piece", "Stages", "even_blocks", "group_moves"]

Nodes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A group as one of its members sees it. ``nodes``: the members on each node; ``blocks``: bytes that each owns."""

    nodes: Nodes
    rank: int
    blocks: tuple[int, ...]

    def of_plan(self, plan: Plan) -> Nodes:
        """The nodes that the plan sees: ``flat_direct`` takes the group for one."""
        return (tuple(range(len(self.blocks))),) if plan.strategy is Strategy.DIRECT else self.nodes


def even_blocks(num_bytes: int, group_size: int, align: int = ALIGN) -> tuple[int, ...]:
    """Who owns how much of a tensor that every rank holds: cut at multiples of ``align``, so the last may own less or more."""
    cuts = [cut(num_bytes, group_size, k, align) for k in range(group_size + 1)]
    return tuple(stop - start for start, stop in pairwise(cuts))


def group_moves(plan: Plan, group: Group, root: int = 0) -> tuple[tuple[Moves, ...], int]:
    """The moves of the group's rank, one entry for each step, and the staging bytes that they need.

    For all collectives but all_to_all_v (see two_level). ``root``: the sender of a broadcast, as a rank of the group.
    """
    if plan.traffic.collective == "broadcast":
        spread = Broadcast(plan, group.nodes, group.rank, root)
        return tuple(spread.of_step(i, step) for i, step in enumerate(plan.steps)), 0
    stages = Stages(plan, group)
    return tuple(stages.of_step(i, step) for i, step in enumerate(plan.steps)), stages.staging_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of member ``owner``'s block; ``offset`` is where the piece lies in its slice."""

    owner: int
    start: int
    stop: int
    offset: int


class Layout:
    """Slices and pieces of a group's blocks."""

    def __init__(self, nodes: Nodes, blocks: Sequence[int], align: int = ALIGN) -> None:
        self.nodes, self.blocks, self.align = nodes, blocks, align
        self.bases = [0, *accumulate(blocks)]

    def slice_of(self, b: int, a: int, i: int) -> tuple[int, int]:
        """Where slice i for node a begins and ends in node b's blocks."""
        owners, parts = self.nodes[b], len(self.nodes[a])
        edges = [0, *accumulate(self.blocks[k] for k in owners)]
        if len(owners) == parts:
            return edges[i], edges[i + 1]
        return cut(edges[-1], parts, i, self.align), cut(edges[-1], parts, i + 1, self.align)

    def pieces(self, b: int, a: int, i: int, chunk: int, chunks: int) -> list[Piece]:
        """The pieces of a chunk of slice i of node b for node a."""
        first, last = self.slice_of(b, a, i)
        start, stop = (first + cut(last - first, chunks, chunk + k, self.align) for k in (0, 1))
        found, base = [], 0
        for owner in self.nodes[b]:
            low, high = max(start, base), min(stop, base + self.blocks[owner])
            if low < high:
                found.append(Piece(owner, low - base, high - base, low - first))
            base += self.blocks[owner]
        return found

    def region(self, buffer: Buffer, piece: Piece) -> Region:
        """The piece in a buffer that holds all blocks."""
        base = self.bases[piece.owner]
        return Region(buffer, base + piece.start, base + piece.stop)


class Stages:
    """all_gather, reduce_scatter, all_reduce."""

    def __init__(self, plan: Plan, group: Group, align: int = ALIGN) -> None:
        self.plan, self.rank = plan, group.rank
        nodes = group.of_plan(plan)
        self.layout = Layout(nodes, group.blocks, align)
        self.a = next(a for a, members in enumerate(nodes) if group.rank in members)
        self.here = nodes[self.a]
        self.i = self.here.index(group.rank)
        self.nodes = nodes
        self.away = [(self.a + d) % len(nodes) for d in range(1, len(nodes))]  # near ones first: no hot receiver
        self.is_summed = plan.traffic.collective != "all_gather"
        # Staging: from each local peer its share of my slices (of all nodes), then from each other node my block.
        widths = [self._width(b) for b in range(len(nodes))]
        self.slices = [0, *accumulate(widths)]
        peers = len(self.here) - 1 if self.is_summed else 0
        self.arrivals = peers * self.slices[-1]
        mine = group.blocks[group.rank]
        self.staging_bytes = self.arrivals + (len(self.away) * mine if self.is_summed else 0)

    def _width(self, b: int) -> int:
        first, last = self.layout.slice_of(b, self.a, self.i)
        return last - first

    def of_step(self, index: int, step: Step) -> Moves:
        tag = index * tags_per_step(self.plan)
        if step.op is Op.COPY:
            return Moves(copies=self._own_block())
        crosses = step.resource is Resource.INTER and len(self.nodes) > 1
        if step.op is Op.ALL_GATHER:
            return self._to_rails(tag, step) if crosses else self._inside(tag, step)
        if step.op is Op.ALL_TO_ALL:
            return self._partials(tag, step) if crosses else self._share(tag, step)
        is_last = step.target is Buffer.OUTPUT and len(self.nodes) > 1
        return Moves(reductions=tuple(self._last_sum(step) if is_last else self._first_sum(step)))

    def _pieces(self, b: int, i: int, chunk: int, a: int | None = None, parts: int = 1) -> list[Piece]:
        """Of a chunk; of one that is cut into ``parts``, ``chunk`` counts those."""
        return self.layout.pieces(b, self.a if a is None else a, i, chunk, self.plan.chunks * parts)

    def _output(self, piece: Piece) -> Region:
        """A piece in the output, which for a reduce_scatter is this rank's block alone."""
        if self.plan.traffic.collective == "reduce_scatter":
            return Region(Buffer.OUTPUT, piece.start, piece.stop)
        return self.layout.region(Buffer.OUTPUT, piece)

    def _own_block(self) -> tuple[Copy, ...]:
        base, size = self.layout.bases[self.rank], self.layout.blocks[self.rank]
        if not size:
            return ()
        return (Copy(Region(Buffer.INPUT, 0, size), Region(Buffer.OUTPUT, base, base + size)),)

    def _ring(self) -> list[int]:
        """The places of the other ranks of this node, each rank beginning with another one."""
        return [(self.i + d) % len(self.here) for d in range(1, len(self.here))]

    def _numbered(self, tag: int, peer: int, regions: Sequence[Region]) -> list[Message]:
        return [Message(peer, tag + nth, region) for nth, region in enumerate(regions)]

    def _arrival(self, place: int, b: int, piece: Piece) -> Region:
        """Where the share of local rank ``place`` of my slice of node b lies in staging."""
        nth = (place - self.i) % len(self.here) - 1
        base = nth * self.slices[-1] + self.slices[b] + piece.offset
        return Region(Buffer.STAGING, base, base + piece.stop - piece.start)

    def _share(self, tag: int, step: Step) -> Moves:
        """Each local peer gets its slices of this rank's input."""
        sends: list[Message] = []
        receives: list[Message] = []
        for place in self._ring():
            peer = self.here[place]
            theirs = [(b, p) for b in range(len(self.nodes)) for p in self._pieces(b, place, step.chunk)]
            mine = [(b, p) for b in range(len(self.nodes)) for p in self._pieces(b, self.i, step.chunk)]
            sends += self._numbered(tag, peer, [self.layout.region(Buffer.INPUT, p) for _, p in theirs])
            receives += self._numbered(tag, peer, [self._arrival(place, b, p) for b, p in mine])
        return Moves(tuple(sends), tuple(receives))

    def _partial(self, b: int, piece: Piece) -> Region:
        """Where the node's sum of a piece lies: in place of one of the first two that are added.

        Never straight in the output: in an all_reduce that is also an input, and perhaps the third one.
        """
        if len(self.here) == 1:
            return self.layout.region(Buffer.INPUT, piece)
        return self._arrival(1 if self.i == 0 else 0, b, piece)

    def _first_sum(self, step: Step) -> list[Reduction]:
        """Over the ranks of this node, in their order."""
        if len(self.here) == 1:
            return []
        sums = []
        for b in range(len(self.nodes)):
            for piece in self._pieces(b, self.i, step.chunk):
                sources = tuple(
                    self.layout.region(Buffer.INPUT, piece) if place == self.i else self._arrival(place, b, piece)
                    for place in range(len(self.here))
                )
                partial = self._partial(b, piece)
                sums.append(Reduction(sources, partial))
                if len(self.nodes) == 1:
                    sums.append(Reduction((partial,), self._output(piece)))
        return sums

    def _mine(self, b: int, chunk: int, parts: int = 1) -> list[tuple[int, Piece]]:
        """The pieces of this rank's block that node b handles, with the rank (of the group) that does."""
        return [
            (peer, piece)
            for place, peer in enumerate(self.nodes[b])
            for piece in self._pieces(self.a, place, chunk, b, parts)
            if piece.owner == self.rank
        ]

    def _outgoing(self, b: int, piece: Piece) -> Region:
        """What is sent of a node's sum."""
        return self._partial(b, piece)

    def _crossed(self, b: int, piece: Piece) -> Region:
        """Where node b's sum of a piece of this rank's block lies in staging."""
        base = self.arrivals + self.away.index(b) * self.layout.blocks[self.rank]
        return Region(Buffer.STAGING, base + piece.start, base + piece.stop)

    def _partials(self, tag: int, step: Step) -> Moves:
        """The node's sums go to the owners of the blocks."""
        sends: list[Message] = []
        receives: list[Message] = []
        parts = self.plan.pieces
        for b in self.away:
            handled = self._pieces(b, self.i, step.chunk, parts=parts)
            sends += [Message(piece.owner, tag, self._outgoing(b, piece)) for piece in handled]
            mine = self._mine(b, step.chunk, parts)
            receives += [Message(peer, tag, self._crossed(b, piece)) for peer, piece in mine]
        return Moves(tuple(sends), tuple(receives))

    def _last_sum(self, step: Step) -> list[Reduction]:
        """Over the nodes, this one first. Nodes of different sizes cut this rank's block at different places: then one
        node after the other is added to what is there."""
        own = [piece for piece in self._pieces(self.a, self.i, step.chunk) if piece.owner == self.rank]
        others = [[piece for _, piece in self._mine(b, step.chunk)] for b in self.away]
        if all(len(pieces) == 1 and pieces == own for pieces in others):
            crossed = tuple(self._crossed(b, own[0]) for b in self.away)
            return [Reduction((self._partial(self.a, own[0]), *crossed), self._output(own[0]))]
        sums = [Reduction((self._partial(self.a, piece),), self._output(piece)) for piece in own]
        for b, pieces in zip(self.away, others, strict=True):
            for piece in pieces:
                target = self._output(piece)
                sums.append(Reduction((target, self._crossed(b, piece)), target))
        return sums

    def _to_rails(self, tag: int, step: Step) -> Moves:
        """Each owner's pieces to the ranks that handle them on the other nodes."""
        sends: list[Message] = []
        receives: list[Message] = []
        for b in self.away:
            for peer, piece in self._mine(b, step.chunk, self.plan.pieces):
                region = self._output(piece)
                if step.source is Buffer.INPUT:
                    region = Region(Buffer.INPUT, piece.start, piece.stop)
                sends.append(Message(peer, tag, region))
            handled = self._pieces(b, self.i, step.chunk, parts=self.plan.pieces)
            receives += [Message(p.owner, tag, self.layout.region(Buffer.OUTPUT, p)) for p in handled]
        return Moves(tuple(sends), tuple(receives))

    def _inside(self, tag: int, step: Step) -> Moves:
        """Every rank of the node gets what this one handles, of all nodes."""
        sends: list[Message] = []
        receives: list[Message] = []
        all_nodes = range(len(self.nodes))
        mine = [self._output(p) for b in all_nodes for p in self._pieces(b, self.i, step.chunk)]
        for place in self._ring():
            theirs = [self._output(p) for b in all_nodes for p in self._pieces(b, place, step.chunk)]
            sends += self._numbered(tag, self.here[place], mine)
            receives += self._numbered(tag, self.here[place], theirs)
        return Moves(tuple(sends), tuple(receives))

"""Where the bytes of a group's ranks lie in a plan over nodes: what its legs (:mod:`commlayer.scheduler.group_legs`) move.

Geometry. Member k of the group owns *block* k, and every block is cut into chunks: chunk c of a block is the same bytes of it for
all nodes, so what is summed or passed on in a chunk needs nothing of another one. What the blocks of node b's members have in
a chunk, one behind the other, is divided among the ranks of node a: *share* i is what rank i of node a handles of it, and the
shares of all chunks together are its *slice*. Where both nodes hold equally many ranks a slice is exactly one block, and i is
the same place in both nodes (a rail). Else shares are of equal length, and each touches one block or more: *pieces*. All
stages of all_gather, reduce_scatter and all_reduce move pieces, there and back, so nodes of different sizes and blocks of
different lengths need no case of their own.

Rejected: chunks of slices. Nodes of different sizes cut slices at different places, so a chunk of one node's would have met parts
of several chunks of another's.

Cuts are at multiples of ``ALIGN`` bytes from the beginning of a block, so no element is cut; of rows, and of those that share
scales, where they are encoded (:mod:`commlayer.scheduler.encoded_moves`): whoever encodes them, wherever it cuts, finds the same
scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from commlayer.scheduler.broadcast import BroadcastPlace
from commlayer.scheduler.leaders import LeaderPlace
from commlayer.scheduler.moves import ALIGN, Buffer, Message, Moves, Region, cut
from commlayer.scheduler.plan import Plan, Strategy, owned_by_node
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.scheduler.slow_pairs import ring_order

__all__ = [
    "Group",
    "GroupPlace",
    "Layout",
    "Piece",
    "RingPlace",
    "even_blocks",
    "exchanged",
    "group_moves",
    "moves_of_call",
    "owned_blocks",
]

Nodes = tuple[tuple[int, ...], ...]
_PARTS = 1 << 20
"""The finest part of a tensor that a rank may own, of the whole."""


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


def owned_blocks(plan: Plan, nodes: Nodes, align: int = ALIGN) -> tuple[int, ...]:
    """Who owns how much of a tensor that every rank holds, where ``plan`` sums it: every node as much as the others, or as
    its card allows (:func:`commlayer.scheduler.plan.owned_by_node`).

    Not every rank: a node that owned more than the others would get more through its card than they. On one level, where there
    are no nodes, each rank owns as much.
    """
    num_bytes, size = plan.traffic.logical_bytes, plan.traffic.group_size
    if plan.strategy is Strategy.DIRECT or (plan.traffic.is_uniform and not plan.is_duplex):
        return even_blocks(num_bytes, size, align)
    owned = owned_by_node(plan.traffic, is_duplex=plan.is_duplex)
    parts = {
        member: round(part / len(members) * _PARTS)
        for part, members in zip(owned, nodes, strict=True)
        for member in members
    }
    edges = list(accumulate(map(parts.__getitem__, range(size)), initial=0))
    cuts = [*(cut(num_bytes, edges[-1], edge, align) for edge in edges[:-1]), num_bytes]
    return tuple(stop - start for start, stop in pairwise(cuts))


def moves_of_call(plan: Plan, nodes: Nodes, rank: int, root: int = 0) -> tuple[tuple[Moves, ...], dict[Buffer, int]]:
    """The moves of ``rank`` in each step of a call, and the bytes of the buffers that it needs for them beside its tensors.

    For all collectives but all_to_all_v, of which the splits say it. Where ranks bring, or get, a block each, these are equal.
    Of an all_to_all of replicated tokens ``nodes`` are the rows of the grid (:mod:`commlayer.scheduler.replicated`).
    """
    size, n = plan.traffic.logical_bytes, sum(map(len, nodes))
    if plan.traffic.collective == "all_to_all":
        place, staged = divmod(rank, n // plan.traffic.group_size), staging_bytes(plan)
        return replicated_moves(plan, *place), {Buffer.STAGING: staged} if staged else {}
    is_callers = plan.traffic.collective in ("all_gather", "reduce_scatter")
    blocks = (size // n,) * n if is_callers else owned_blocks(plan, nodes)
    steps, staging = group_moves(plan, Group(nodes, rank, blocks), root)
    return steps, {Buffer.STAGING: staging} if staging else {}


def group_moves(plan: Plan, group: Group, root: int = 0) -> tuple[tuple[Moves, ...], int]:
    """The moves of the group's rank, one entry for each step, and the staging bytes that they need.

    For all collectives but all_to_all_v (see two_level). ``root``: the sender of a broadcast, as a rank of the group.
    """
    if plan.strategy is Strategy.LEADERS:
        by_leaders = LeaderPlace(plan, group.nodes, group.rank, group.blocks, root)
        return plan.moves(by_leaders), by_leaders.staging_bytes
    if plan.traffic.collective == "broadcast":
        return plan.moves(BroadcastPlace(plan, group.nodes, group.rank, root), tags=1), 0
    place = RingPlace(plan, group) if plan.strategy is Strategy.RING else GroupPlace(plan, group)
    return plan.moves(place), place.staging_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of member ``owner``'s block; ``offset`` is where the piece lies in its slice."""

    owner: int
    start: int
    stop: int
    offset: int


class Layout:
    """Slices and pieces of a group's blocks, each of which is cut into ``chunks``."""

    def __init__(self, nodes: Nodes, blocks: Sequence[int], chunks: int = 1, align: int = ALIGN) -> None:
        self.nodes, self.blocks, self.chunks, self.align = nodes, blocks, chunks, align
        self.bases = [0, *accumulate(blocks)]
        self._lengths: dict[int, list[list[int]]] = {}
        self._offsets: dict[tuple[int, int, int], list[int]] = {}

    def slice_bytes(self, b: int, a: int, i: int) -> int:
        """How much rank i of node a handles of node b's blocks."""
        if len(self.nodes[b]) == len(self.nodes[a]):
            return self.blocks[self.nodes[b][i]]
        return self._offsets_of(b, a, i)[-1]

    def pieces(self, b: int, a: int, i: int, chunk: int, parts: int = 1) -> list[Piece]:
        """The pieces of node b's blocks that rank i of node a handles in a chunk, or in one of its ``parts``: ``chunk`` counts
        those."""
        owners = self.nodes[b]
        if len(owners) == len(self.nodes[a]):
            start, stop = (cut(self.blocks[owners[i]], self.chunks * parts, chunk + k, self.align) for k in (0, 1))
            return [Piece(owners[i], start, stop, start)] if start < stop else []
        chunk, part = divmod(chunk, parts)
        first, last = self._share(b, a, i, chunk)
        start, stop = (first + cut(last - first, parts, part + k, self.align) for k in (0, 1))
        before = self._offsets_of(b, a, i)[chunk] - first
        found, base = [], 0
        for owner in owners:
            begin, end = self._edges(owner, chunk)
            low, high = max(start, base), min(stop, base + end - begin)
            if low < high:
                found.append(Piece(owner, begin + low - base, begin + high - base, before + low))
            base += end - begin
        return found

    def _edges(self, owner: int, chunk: int) -> tuple[int, int]:
        """Where a chunk of a block begins and ends in it."""
        size = self.blocks[owner]
        return cut(size, self.chunks, chunk, self.align), cut(size, self.chunks, chunk + 1, self.align)

    def _share(self, b: int, a: int, i: int, chunk: int) -> tuple[int, int]:
        """Where share i for node a begins and ends in what node b's blocks have in a chunk."""
        if b not in self._lengths:
            edges = [[self._edges(owner, each) for owner in self.nodes[b]] for each in range(self.chunks)]
            self._lengths[b] = [[end - begin for begin, end in row] for row in edges]
        lengths, parts = self._lengths[b][chunk], len(self.nodes[a])
        return self._cut(lengths, i, parts), self._cut(lengths, i + 1, parts)

    def _cut(self, lengths: Sequence[int], index: int, parts: int) -> int:
        """Where part ``index`` of blocks of these lengths begins, which lie one behind the other: in a block at a multiple of
        ``align``."""
        total = sum(lengths)
        position, base = total * index // parts, 0
        for length in lengths:
            if position < base + length:
                return base + (position - base) // self.align * self.align
            base += length
        return total

    def _offsets_of(self, b: int, a: int, i: int) -> list[int]:
        """Where the share of each chunk begins in slice i of node b for node a; and where the last one ends."""
        if (b, a, i) not in self._offsets:
            shares = (self._share(b, a, i, chunk) for chunk in range(self.chunks))
            self._offsets[b, a, i] = [0, *accumulate(last - first for first, last in shares)]
        return self._offsets[b, a, i]

    def region(self, buffer: Buffer, piece: Piece) -> Region:
        """The piece in a buffer that holds all blocks."""
        base = self.bases[piece.owner]
        return Region(buffer, base + piece.start, base + piece.stop)


def exchanged(tag: int, sent: Iterable[tuple[int, Region]], received: Iterable[tuple[int, Region]]) -> Moves:
    """Messages to, and from, other ranks of a group, by their rank; several between two ranks are numbered in their order."""
    sides: list[tuple[Message, ...]] = []
    for addressed in (sent, received):
        numbers, messages = Counter[int](), []
        for peer, region in addressed:
            messages.append(Message(peer, tag + numbers[peer], region))
            numbers[peer] += 1
        sides.append(tuple(messages))
    return Moves(sides[0], sides[1])


class GroupPlace:
    """Where a rank stands in an all_gather, reduce_scatter or all_reduce, and where what passes it lies in its buffers.

    ``here``: the ranks of its node, of which it is number ``i``; ``others``: number and rank of the others of these, each rank
    beginning with another one; ``a``: its node; ``away``: the other nodes.
    """

    def __init__(self, plan: Plan, group: Group, align: int = ALIGN) -> None:
        self.plan, self.rank = plan, group.rank
        self.nodes = nodes = group.of_plan(plan)
        self.layout = Layout(nodes, group.blocks, plan.chunks, align)
        self.a = next(a for a, members in enumerate(nodes) if group.rank in members)
        self.here = nodes[self.a]
        self.i = self.here.index(group.rank)
        width = len(self.here)
        self.others = [((self.i + d) % width, self.here[(self.i + d) % width]) for d in range(1, width)]
        self.away = [(self.a + d) % len(nodes) for d in range(1, len(nodes))]  # near ones first: no hot receiver
        is_summed = plan.traffic.collective != "all_gather"
        # Staging: from each local peer its share of my slices (of all nodes), then from each other node my block.
        self.slices = [0, *accumulate(self.layout.slice_bytes(b, self.a, self.i) for b in range(len(nodes)))]
        self.arrivals = (len(self.here) - 1) * self.slices[-1] if is_summed else 0
        self.staging_bytes = self.arrivals + (len(self.away) * group.blocks[group.rank] if is_summed else 0)

    def pieces(self, b: int, i: int, chunk: int, parts: int = 1) -> list[Piece]:
        """The pieces of node b's data that rank i of this node handles; of a chunk that is cut into ``parts``, ``chunk`` counts
        those."""
        return self.layout.pieces(b, self.a, i, chunk, parts)

    def handled(self, i: int, chunk: int) -> list[tuple[int, Piece]]:
        """The pieces of a chunk, of all nodes' data, that rank i of this node handles, with the node whose they are."""
        return [(b, piece) for b in range(len(self.nodes)) for piece in self.pieces(b, i, chunk)]

    def mine(self, b: int, chunk: int, parts: int = 1) -> list[tuple[int, Piece]]:
        """The pieces of this rank's block that node b handles, with the rank (of the group) that does."""
        return [
            (peer, piece)
            for place, peer in enumerate(self.nodes[b])
            for piece in self.layout.pieces(self.a, b, place, chunk, parts)
            if piece.owner == self.rank
        ]

    def own(self, chunk: int) -> list[Piece]:
        """The pieces of this rank's block in a chunk, as this node cuts it and this rank handles it."""
        return [piece for piece in self.pieces(self.a, self.i, chunk) if piece.owner == self.rank]

    def output(self, piece: Piece, buffer: Buffer = Buffer.OUTPUT) -> Region:
        """A piece in the output, which for a reduce_scatter is this rank's block alone; or in the input of an all_gather, which
        is that block too."""
        if buffer is Buffer.INPUT or self.plan.traffic.collective == "reduce_scatter":
            return Region(buffer, piece.start, piece.stop)
        return self.layout.region(buffer, piece)

    def arrival(self, place: int, b: int, piece: Piece) -> Region:
        """Where the share of local rank ``place`` of my slice of node b lies in staging."""
        nth = (place - self.i) % len(self.here) - 1
        base = nth * self.slices[-1] + self.slices[b] + piece.offset
        return Region(Buffer.STAGING, base, base + piece.stop - piece.start)

    def partial(self, b: int, piece: Piece) -> Region:
        """Where the node's sum of a piece lies: in place of one of the first two that are added.

        Never straight in the output: in an all_reduce that is also an input, and perhaps the third one.
        """
        if len(self.here) == 1:
            return self.layout.region(Buffer.INPUT, piece)
        return self.arrival(1 if self.i == 0 else 0, b, piece)

    def outgoing(self, b: int, piece: Piece) -> Region:
        """List what is sent to node b of this node's sum."""
        return self.partial(b, piece)

    def crossed(self, b: int, piece: Piece) -> Region:
        """Where node b's sum of a piece of this rank's block arrives."""
        base = self.arrivals + self.away.index(b) * self.layout.blocks[self.rank]
        return Region(Buffer.STAGING, base + piece.start, base + piece.stop)


class RingPlace(GroupPlace):
    """Where a rank stands in such a call that goes round the nodes: what comes from node ``before``, goes on to ``next``.

    Of each node's blocks a rank holds its slice, as in the other plans; between nodes of different sizes a message is what a rank
    here and one there both handle. Staging: the arrivals from local peers, then what has come of each node's sums.
    """

    def __init__(self, plan: Plan, group: Group) -> None:
        super().__init__(plan, group)
        self._order = ring_order(plan.traffic)
        self._position = self._order.index(self.a)
        self.before, self.next = self.back(1), self.back(-1)
        is_summed = plan.traffic.collective != "all_gather"
        self.staging_bytes = self.arrivals + (self.slices[-1] if is_summed else 0)

    def back(self, distance: int) -> int:
        """The node so many places before this one in the ring."""
        return self._order[(self._position - distance) % len(self._order)]

    def common(self, b: int, other: int, chunk: int) -> list[tuple[int, int, Piece]]:
        """The pieces of node b's data in a chunk that this rank and one of node ``other`` handle: that one's rank in the group,
        the number of the message between both, the piece."""
        found = []
        for place, peer in enumerate(self.nodes[other]):
            theirs = self.layout.pieces(b, other, place, chunk)
            pairs = ((mine, its) for mine in self.pieces(b, self.i, chunk) for its in theirs if mine.owner == its.owner)
            pieces = [
                Piece(mine.owner, start, stop, mine.offset + start - mine.start)
                for mine, its in pairs
                if (start := max(mine.start, its.start)) < (stop := min(mine.stop, its.stop))
            ]
            found += [(peer, nth, piece) for nth, piece in enumerate(pieces)]
        return found

    def landing(self, b: int, piece: Piece) -> Region:
        """Where the sum of the nodes before arrives, of a piece of node b's blocks."""
        base = self.arrivals + self.slices[b] + piece.offset
        return Region(Buffer.STAGING, base, base + piece.stop - piece.start)

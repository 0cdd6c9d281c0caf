"""Which bytes a rank encodes, sends, receives and decodes in each step of a plan with a wire format. Pure arithmetic.

The pieces are those of :mod:`commlayer.scheduler.group_moves`, cut between rows. What is encoded of a piece is one message in
the buffer ``encoded``, and at its receiver one in ``arrived``; both ends compute the same size from the piece's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from commlayer.scheduler.group_moves import Group, Piece, Stages
from commlayer.scheduler.moves import ALIGN, Copy, Decode, Encode, Message, Moves, Reduction, Region, tags_per_step
from commlayer.scheduler.plan import Buffer, Op, Plan, Step

__all__ = ["Encoded", "encoded_moves", "exchange_moves"]

Place = tuple[object, ...]


class Encoded:
    """Memory of encoded messages in one buffer: each piece of the tensor has its place, given at its first use."""

    def __init__(self, buffer: Buffer, plan: Plan) -> None:
        self.buffer, self.plan = buffer, plan
        self.num_bytes = 0
        self._regions: dict[Place, Region] = {}

    def at(self, place: Place, native_bytes: int) -> Region:
        """Where the encoded form of ``native_bytes`` lies, known by ``place``."""
        if place not in self._regions:
            plan = self.plan
            rows = native_bytes // (plan.traffic.element_bytes * plan.wire.row_elements)
            size = plan.wire.wire_bytes(rows)
            self._regions[place] = Region(self.buffer, self.num_bytes, self.num_bytes + size)
            self.num_bytes += -(-size // ALIGN) * ALIGN
        return self._regions[place]


def encoded_moves(plan: Plan, group: Group) -> tuple[tuple[Moves, ...], int, int, int]:
    """The moves of the group's rank, one entry for each step, and the bytes of staging, ``encoded`` and ``arrived`` they need.

    For all_gather, reduce_scatter and all_reduce (see :func:`exchange_moves`).
    """
    stages = _EncodedStages(plan, group)
    steps = tuple(stages.of_step(i, step) for i, step in enumerate(plan.steps))
    return steps, stages.staging_bytes, stages.encoded.num_bytes, stages.arrived.num_bytes


class _EncodedStages(Stages):
    def __init__(self, plan: Plan, group: Group) -> None:
        super().__init__(plan, group, plan.traffic.cut_bytes(plan.wire))
        self.encoded, self.arrived = Encoded(Buffer.ENCODED, plan), Encoded(Buffer.ARRIVED, plan)
        self.is_one_level = len(self.nodes) == 1
        self.staging_bytes = 0 if self.is_one_level else self.arrivals

    def of_step(self, index: int, step: Step) -> Moves:
        tag = index * tags_per_step(self.plan)
        if step.op is Op.ENCODE:
            return self._encode_sums(step) if self._is_sum(step) else self._encode_own(step)
        if step.op is Op.DECODE:
            if not self._is_gather(step):
                return Moves(reductions=tuple(self._last_sum(step)))
            return Moves(decodes=tuple(self._decoded(step.chunk)))
        if step.target is not Buffer.ARRIVED:
            return super().of_step(index, step)
        if step.op is Op.ALL_TO_ALL:
            return self._blocks(tag, step) if self.is_one_level else self._partials(tag, step)
        return self._own_to_all(tag, step) if self.is_one_level else self._to_rails(tag, step)

    def _is_sum(self, step: Step) -> bool:
        """Whether a step of encoding comes before sums; the others come before a gather."""
        return self.is_summed and step.source is not Buffer.OUTPUT

    def _is_gather(self, step: Step) -> bool:
        return self.plan.steps[step.after[0]].op is Op.ALL_GATHER

    def _key(self, piece: Piece) -> Place:
        return piece.owner, piece.start, piece.stop

    def _size(self, piece: Piece) -> int:
        return piece.stop - piece.start

    # Sums

    def _own_blocks(self, chunk: int) -> list[tuple[int, Piece]]:
        """On one level: (owner, piece) of every rank's block, in rank order."""
        return [(place, piece) for place in range(len(self.here)) for piece in self._pieces(0, place, chunk)]

    def _encode_sums(self, step: Step) -> Moves:
        if self.is_one_level:
            pieces = [(self.layout.region(Buffer.INPUT, p), p) for _, p in self._own_blocks(step.chunk)]
        else:
            pieces = [(self._partial(b, p), p) for b in self.away for p in self._pieces(b, self.i, step.chunk)]
        encodes = (Encode(region, self.encoded.at(self._key(p), self._size(p))) for region, p in pieces)
        return Moves(encodes=tuple(encodes))

    def _blocks(self, tag: int, step: Step) -> Moves:
        """On one level: everyone's block to its owner."""
        sends: list[Message] = []
        receives: list[Message] = []
        for place in self._ring():
            theirs = self._pieces(0, place, step.chunk)
            mine = self._pieces(0, self.i, step.chunk)
            peer = self.here[place]
            sends += self._numbered(tag, peer, [self.encoded.at(self._key(p), self._size(p)) for p in theirs])
            receives += self._numbered(tag, peer, [self._from(place, p) for p in mine])
        return Moves(tuple(sends), tuple(receives))

    def _from(self, source: int, piece: Piece) -> Region:
        """Where a piece that local rank (one level) or node (several) ``source`` has sent arrives."""
        return self.arrived.at(("sum", source, *self._key(piece)), self._size(piece))

    def _outgoing(self, b: int, piece: Piece) -> Region:
        return self.encoded.at(self._key(piece), self._size(piece))

    def _crossed(self, b: int, piece: Piece) -> Region:
        return self._from(b, piece)

    def _last_sum(self, step: Step) -> list[Reduction]:
        if not self.is_one_level:
            return super()._last_sum(step)
        sums = []
        for piece in self._pieces(0, self.i, step.chunk):
            own = self.encoded.at(self._key(piece), self._size(piece))
            sources = tuple(own if place == self.i else self._from(place, piece) for place in range(len(self.here)))
            sums.append(Reduction(sources, self._output(piece)))
        return sums

    # Gathers

    def _own(self, chunk: int) -> list[Piece]:
        """The pieces of this rank's block in a chunk, as this node cuts it."""
        return [piece for piece in self._pieces(self.a, self.i, chunk) if piece.owner == self.rank]

    def _gathered(self, piece: Piece) -> Region:
        return self.encoded.at(("gather", *self._key(piece)), self._size(piece))

    def _coming(self, piece: Piece) -> Region:
        return self.arrived.at(("gather", *self._key(piece)), self._size(piece))

    def _source(self, step: Step, piece: Piece) -> Region:
        return Region(Buffer.INPUT, piece.start, piece.stop) if step.source is Buffer.INPUT else self._output(piece)

    def _encode_own(self, step: Step) -> Moves:
        """This rank's block, for whoever gets it, and decoded again in its own output."""
        own = self._own(step.chunk)
        sent = [piece for b in self.away for _, piece in self._mine(b, step.chunk)]
        pieces = {(piece.start, piece.stop): piece for piece in (*own, *sent)}.values()
        encodes = tuple(Encode(self._source(step, piece), self._gathered(piece)) for piece in pieces)
        return Moves(encodes=encodes, decodes=tuple(Decode(self._gathered(p), self._output(p)) for p in own))

    def _to_rails(self, tag: int, step: Step) -> Moves:
        sends: list[Message] = []
        receives: list[Message] = []
        for b in self.away:
            sends += [Message(peer, tag, self._gathered(piece)) for peer, piece in self._mine(b, step.chunk)]
            receives += [Message(p.owner, tag, self._coming(p)) for p in self._pieces(b, self.i, step.chunk)]
        return Moves(tuple(sends), tuple(receives))

    def _own_to_all(self, tag: int, step: Step) -> Moves:
        sends: list[Message] = []
        receives: list[Message] = []
        mine = [self._gathered(piece) for piece in self._own(step.chunk)]
        for place in self._ring():
            theirs = [self._coming(piece) for piece in self._pieces(0, place, step.chunk)]
            sends += self._numbered(tag, self.here[place], mine)
            receives += self._numbered(tag, self.here[place], theirs)
        return Moves(tuple(sends), tuple(receives))

    def _decoded(self, chunk: int) -> Iterable[Decode]:
        if self.is_one_level:
            pieces = [piece for place in self._ring() for piece in self._pieces(0, place, chunk)]
        else:
            pieces = [piece for b in self.away for piece in self._pieces(b, self.i, chunk)]
        return (Decode(self._coming(piece), self._output(piece)) for piece in pieces)


def exchange_moves(
    plan: Plan, group: Group, source_bytes: Sequence[int], target_bytes: Sequence[int]
) -> tuple[tuple[Moves, ...], int, int]:
    """The moves of an all_to_all: ``source_bytes[k]`` go to member k, ``target_bytes[k]`` come from it; whole rows.

    Returns them with the bytes of ``encoded`` and ``arrived`` that they need. Members on this rank's node get theirs as they are,
    unless the group has no other node.
    """
    exchange = _Exchange(plan, group, source_bytes, target_bytes)
    steps = tuple(exchange.of_step(i, step) for i, step in enumerate(plan.steps))
    return steps, exchange.encoded.num_bytes, exchange.arrived.num_bytes


class _Exchange:
    def __init__(self, plan: Plan, group: Group, source_bytes: Sequence[int], target_bytes: Sequence[int]) -> None:
        self.plan, self.rank, size = plan, group.rank, len(source_bytes)
        here = next(members for members in group.nodes if group.rank in members)
        ring = [(group.rank + distance) % size for distance in range(1, size)]  # no hot receiver
        is_inside = len(group.nodes) == 1
        self.far = [k for k in ring if is_inside or k not in here]
        self.near = [k for k in ring if not is_inside and k in here]
        self.sizes = {Buffer.INPUT: source_bytes, Buffer.OUTPUT: target_bytes}
        self.bases = {buffer: [0, *accumulate(sizes)] for buffer, sizes in self.sizes.items()}
        self.encoded, self.arrived = Encoded(Buffer.ENCODED, plan), Encoded(Buffer.ARRIVED, plan)
        self.row = plan.traffic.row_bytes(plan.wire)

    def of_step(self, index: int, step: Step) -> Moves:
        tag = index * self.plan.traffic.group_size
        if step.op is Op.ENCODE:
            return Moves(encodes=tuple(Encode(n, e) for _, n, e in self._coded(Buffer.INPUT, step.chunk)))
        if step.op is Op.DECODE:
            return Moves(decodes=tuple(Decode(e, n) for _, n, e in self._coded(Buffer.OUTPUT, step.chunk)))
        if step.op is Op.COPY:
            return Moves(copies=tuple(Copy(*pair) for pair in [self._whole(self.rank)] if pair[0].size))
        if step.target is Buffer.OUTPUT:
            pairs = [(k, *self._whole(k)) for k in self.near]
            sends = tuple(Message(k, tag, source) for k, source, _ in pairs if source.size)
            return Moves(sends, tuple(Message(k, tag, target) for k, _, target in pairs if target.size))
        sends = tuple(Message(k, tag, e) for k, _, e in self._coded(Buffer.INPUT, step.chunk))
        return Moves(sends, tuple(Message(k, tag, e) for k, _, e in self._coded(Buffer.OUTPUT, step.chunk)))

    def _coded(self, buffer: Buffer, chunk: int) -> list[tuple[int, Region, Region]]:
        """(member, what goes to it or comes from it, its encoded form) of a chunk, without the empty ones."""
        found, memory = [], self.encoded if buffer is Buffer.INPUT else self.arrived
        for k in self.far:
            base, rows = self.bases[buffer][k], self.sizes[buffer][k] // self.row
            edges = [self._edge(self.sizes[buffer][k], rows, chunk + next_) for next_ in (0, 1)]
            if edges[0] < edges[1]:
                region = Region(buffer, base + edges[0], base + edges[1])
                found.append((k, region, memory.at((k, chunk), region.size)))
        return found

    def _edge(self, size: int, rows: int, chunk: int) -> int:
        return size if chunk == self.plan.chunks else rows * chunk // self.plan.chunks * self.row

    def _whole(self, k: int) -> tuple[Region, Region]:
        regions = (
            Region(buffer, self.bases[buffer][k], self.bases[buffer][k + 1]) for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        )
        source, target = regions
        return source, target

"""Where the bytes of a group's ranks lie, encoded and not, in a plan with a wire format. Pure arithmetic.

The pieces are those of :mod:`commlayer.scheduler.group_moves`, cut between rows. What is encoded of a piece is one message in
the buffer ``encoded``, and at its receiver one in ``arrived``; both ends compute the same size from the piece's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commlayer.scheduler.group_moves import Group, GroupPlace, Piece
from commlayer.scheduler.moves import ALIGN, Buffer, Moves, Region
from commlayer.scheduler.plan import Plan

__all__ = ["EncodedPlace", "ExchangePlace", "encoded_moves", "exchange_moves"]

Key = tuple[object, ...]


class _EncodedMemory:
    """Memory of encoded messages in one buffer: each piece of the tensor has its place, given at its first use."""

    def __init__(self, buffer: Buffer, plan: Plan) -> None:
        self.buffer, self.plan = buffer, plan
        self.num_bytes = 0
        self._regions: dict[Key, Region] = {}

    def at(self, key: Key, native_bytes: int) -> Region:
        """Where the encoded form of ``native_bytes`` lies, known by ``key``."""
        if key not in self._regions:
            plan = self.plan
            rows = native_bytes // (plan.traffic.element_bytes * plan.wire.row_elements)
            size = plan.wire.wire_bytes(rows)
            self._regions[key] = Region(self.buffer, self.num_bytes, self.num_bytes + size)
            self.num_bytes += -(-size // ALIGN) * ALIGN
        return self._regions[key]

    def of(self, piece: Piece, *key: object) -> Region:
        return self.at((*key, piece.owner, piece.start, piece.stop), piece.stop - piece.start)


def encoded_moves(plan: Plan, group: Group) -> tuple[tuple[Moves, ...], int, int, int]:
    """The moves of the group's rank, one entry for each step, and the bytes of staging, ``encoded`` and ``arrived`` they need.

    For all_gather, reduce_scatter and all_reduce (see :func:`exchange_moves`).
    """
    place = EncodedPlace(plan, group)
    return plan.moves(place), place.staging_bytes, place.encoded.num_bytes, place.arrived.num_bytes


class EncodedPlace(GroupPlace):
    """Where a rank stands in a plan with a wire format, and where encoded messages lie."""

    def __init__(self, plan: Plan, group: Group) -> None:
        super().__init__(plan, group, plan.traffic.cut_bytes(plan.wire))
        self.encoded, self.arrived = _EncodedMemory(Buffer.ENCODED, plan), _EncodedMemory(Buffer.ARRIVED, plan)
        self.staging_bytes = 0 if len(self.nodes) == 1 else self.arrivals

    def outgoing(self, b: int, piece: Piece) -> Region:
        return self.encoded.of(piece)

    def crossed(self, b: int, piece: Piece) -> Region:
        """Where what local rank (on one level) or node (on several) ``b`` has sent of a piece arrives."""
        return self.arrived.of(piece, "sum", b)

    def gathered(self, piece: Piece) -> Region:
        """Where a piece of this rank's block lies that others gather."""
        return self.encoded.of(piece, "gather")

    def coming(self, piece: Piece) -> Region:
        """Where a gathered piece arrives."""
        return self.arrived.of(piece, "gather")


def exchange_moves(
    plan: Plan, group: Group, source_bytes: Sequence[int], target_bytes: Sequence[int]
) -> tuple[tuple[Moves, ...], int, int]:
    """The moves of an all_to_all: ``source_bytes[k]`` go to member k, ``target_bytes[k]`` come from it; whole rows.

    Returns them with the bytes of ``encoded`` and ``arrived`` that they need. Members on this rank's node get theirs as they are,
    unless the group has no other node.
    """
    place = ExchangePlace(plan, group, source_bytes, target_bytes)
    return plan.moves(place), place.encoded.num_bytes, place.arrived.num_bytes


class ExchangePlace:
    """Where a rank stands in an all_to_all with any splits: who is ``near`` and who is ``far``, and what they send each other."""

    def __init__(self, plan: Plan, group: Group, source_bytes: Sequence[int], target_bytes: Sequence[int]) -> None:
        self.rank, self.chunks, size = group.rank, plan.chunks, len(source_bytes)
        here = next(members for members in group.nodes if group.rank in members)
        ring = [(group.rank + distance) % size for distance in range(1, size)]  # no hot receiver
        is_inside = len(group.nodes) == 1
        self.far = [k for k in ring if is_inside or k not in here]
        self.near = [k for k in ring if not is_inside and k in here]
        self.sizes = {Buffer.INPUT: source_bytes, Buffer.OUTPUT: target_bytes}
        self.bases = {buffer: [0, *accumulate(sizes)] for buffer, sizes in self.sizes.items()}
        self.encoded, self.arrived = _EncodedMemory(Buffer.ENCODED, plan), _EncodedMemory(Buffer.ARRIVED, plan)
        self.row = plan.traffic.row_bytes(plan.wire)

    def coded(self, buffer: Buffer, chunk: int) -> list[tuple[int, Region, Region]]:
        """(member, what goes to it or comes from it, its encoded form) of a chunk, without the empty ones."""
        found, memory = [], self.encoded if buffer is Buffer.INPUT else self.arrived
        for k in self.far:
            base, rows = self.bases[buffer][k], self.sizes[buffer][k] // self.row
            edges = [self._edge(self.sizes[buffer][k], rows, chunk + next_) for next_ in (0, 1)]
            if edges[0] < edges[1]:
                region = Region(buffer, base + edges[0], base + edges[1])
                found.append((k, region, memory.at((k, chunk), region.size)))
        return found

    def whole(self, buffer: Buffer, k: int) -> Region:
        """All that goes to member k, or comes from it."""
        return Region(buffer, self.bases[buffer][k], self.bases[buffer][k + 1])

    def _edge(self, size: int, rows: int, chunk: int) -> int:
        return size if chunk == self.chunks else rows * chunk // self.chunks * self.row

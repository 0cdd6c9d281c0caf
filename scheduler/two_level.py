"""The legs of a two-level all_to_all with any splits (plan ``hierarchical`` of all_to_all_v).

Rank i of node a sends what is for rank j of *any* node to rank j of its own node, which passes on to rank j of node b what
all ranks of node a have for it: one message between each two nodes a rank, instead of one for each rank there.

How much a local peer will bring is known to that peer only, so the ranks of a node tell each other first (``counts``). What
comes from other nodes is in the caller's own splits; those receives can be posted before anything is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commlayer.scheduler.legs import ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import Buffer, Copy, Message, Moves, Region, filled
from commlayer.scheduler.plan import Cut, Op, Span

__all__ = ["TWO_LEVEL", "TwoLevel"]

_COUNT_BYTES = 8


class TwoLevel:
    """One call on one rank. ``nodes``: the members on each node, equally many. ``source_bytes[k]`` go to member k,
    ``target_bytes[k]`` come from it.

    Steps are numbered as in the plan: 0 counts, 1 sorted (inside the node), 2 crossed (between nodes), 3 placed.
    """

    def __init__(
        self, nodes: Sequence[Sequence[int]], rank: int, source_bytes: Sequence[int], target_bytes: Sequence[int]
    ) -> None:
        self.nodes, self.rank = nodes, rank
        self.a = next(a for a, members in enumerate(nodes) if rank in members)
        self.here = nodes[self.a]
        self.i = self.here.index(rank)
        self.source_bytes, self.target_bytes = source_bytes, target_bytes
        self.sources, self.targets = [0, *accumulate(source_bytes)], [0, *accumulate(target_bytes)]
        self.away = [(self.a + d) % len(nodes) for d in range(1, len(nodes))]
        self._row = len(nodes) * _COUNT_BYTES
        counts = 2 * len(self.here) * self._row
        landing = [sum(target_bytes[k] for k in nodes[b]) for b in self.away]
        self._landings = [counts, *accumulate(landing, initial=counts)][1:]
        self.edges: list[int] = []
        """Between what the local ranks bring, node by node, in transit; empty until the counts are known."""

    @property
    def staging_bytes(self) -> int:
        """Counts out, counts in, and what comes from other nodes."""
        return self._landings[-1]

    def counts(self) -> list[list[int]]:
        """Counts for local rank j: how much it brings for rank j of each node. To be written, as int64, to the
        beginning of the staging buffer."""
        return [[self.source_bytes[members[j]] for members in self.nodes] for j in range(len(self.here))]

    @property
    def counts_region(self) -> Region:
        """Where the local ranks' counts for this rank arrive, in their order; its own row is not written."""
        width = len(self.here) * self._row
        return Region(Buffer.STAGING, width, 2 * width)

    def before(self) -> tuple[Moves, ...]:
        """The moves that are known at once. Step 1 and the sends of step 2 follow from the counts."""
        return tuple(leg.moves(self, step * self._tags, 0) for step, leg in enumerate(TWO_LEVEL.legs))

    def after(self, counts: Sequence[Sequence[int]]) -> tuple[Moves, Moves, int]:
        """Steps 1 and 2, and the transit bytes, once ``counts[j][b]`` is known: what local rank j brings for rank i of b."""
        self.edges = [0, *accumulate(counts[j][b] for b in self.away for j in range(len(self.here)))]
        passed = PASS_ON.moves(self, 2 * self._tags, 0)
        return SORT.moves(self, self._tags, 0), Moves(sends=passed.sends), self.edges[-1]

    @property
    def _tags(self) -> int:
        """How far apart the tags of the steps are."""
        return len(self.nodes) * len(self.here)

    def source(self, member: int) -> Region:
        """The region that goes to a member."""
        return Region(Buffer.INPUT, self.sources[member], self.sources[member + 1])

    def target(self, member: int) -> Region:
        """Where what comes from a member belongs."""
        return Region(Buffer.OUTPUT, self.targets[member], self.targets[member + 1])

    def landing(self, nth: int) -> Region:
        """Where what the ``nth`` other node has for this rank arrives."""
        return Region(Buffer.STAGING, self._landings[nth], self._landings[nth + 1])

    def held(self, nth: int, first: int, stop: int) -> Region:
        """The region that the local ranks ``first`` to ``stop`` bring for the rank of this place on the ``nth`` other node."""
        edges = self.edges[nth * len(self.here) :]
        return Region(Buffer.TRANSIT, edges[first], edges[stop])

    def row(self, j: int) -> Region:
        """A local rank's row of counts, which begin the staging buffer."""
        return Region(Buffer.STAGING, j * self._row, (j + 1) * self._row)


class Count(ExchangeLeg):
    """The ranks of a node tell each other how much is coming."""

    def size(self, cut: Cut) -> float:
        return float(cut.traffic.group_size * _COUNT_BYTES)

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        peers = [(j, peer) for j, peer in enumerate(place.here) if j != place.i]
        return Moves(
            tuple(Message(peer, tag, place.row(j)) for j, peer in peers),
            tuple(Message(peer, tag, place.row(len(place.here) + j)) for j, peer in peers),
        )


class Sort(ExchangeLeg):
    """Inside the node by the destination's place in its node; for this node's own ranks that is all. Needs the counts."""

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        if not place.edges:
            return Moves()
        sends, receives, copies = [], [], []
        for j, peer in enumerate(place.here):
            for nth, b in enumerate([*place.away, place.a]):
                source = place.source(place.nodes[b][j])
                kept = place.target(peer) if b == place.a else place.held(nth, j, j + 1)
                if j == place.i:
                    copies.append(Copy(source, kept))
                else:  # numbered by the node that it is for: both ends see nodes in their own order
                    sends.append(Message(peer, tag + b, source))
                    receives.append(Message(peer, tag + b, kept))
        return filled(sends, receives, copies)


class PassOn(ExchangeLeg):
    """One message to the rank of this place on each other node. What is sent needs the counts."""

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        peers = [(nth, place.nodes[b][place.i]) for nth, b in enumerate(place.away)]
        sends = [Message(peer, tag, place.held(nth, 0, len(place.here))) for nth, peer in peers if place.edges]
        return filled(sends, [Message(peer, tag, place.landing(nth)) for nth, peer in peers])


class PlaceBlocks(LocalLeg):
    """A node's message holds what its ranks sent here, in their order."""

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        copies = []
        for nth, b in enumerate(place.away):
            start = place.landing(nth).start
            for member in place.nodes[b]:
                size = place.target_bytes[member]
                copies.append(Copy(Region(Buffer.STAGING, start, start + size), place.target(member)))
                start += size
        return filled(copies=copies)


_STAGED, _TRANSIT = Buffer.STAGING, Buffer.TRANSIT

COUNT = Count("count in node", Op.ALL_TO_ALL, Span.NODE, _STAGED, _STAGED)
SORT = Sort("sort in node", Op.ALL_TO_ALL, Span.NODE, Buffer.INPUT, _TRANSIT, (COUNT,))
PASS_ON = PassOn("pass on", Op.ALL_TO_ALL, Span.RAIL, _TRANSIT, _STAGED, (SORT,))
PLACE = PlaceBlocks("place", Op.COPY, Span.SELF, _STAGED, Buffer.OUTPUT, (PASS_ON,))

TWO_LEVEL = LegOrder(((COUNT, 0), (SORT, 0), (PASS_ON, 0), (PLACE, 0)))

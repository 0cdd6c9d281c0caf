"""Which bytes a rank moves in a two-level all_to_all with any splits (plan ``hierarchical`` of all_to_all_v).

Rank i of node a sends what is for rank j of *any* node to rank j of its own node, which passes on to rank j of node b what
all ranks of node a have for it: one message between each two nodes a rank, instead of one for each rank there.

How much a local peer will bring is known to that peer only, so the ranks of a node tell each other first (``counts``). What
comes from other nodes is in the caller's own splits; those receives can be posted before anything is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commlayer.scheduler.moves import Copy, Message, Moves, Region
from commlayer.scheduler.plan import Buffer

__all__ = ["TwoLevel"]

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

    @property
    def staging_bytes(self) -> int:
        """Counts out, counts in, and what comes from other nodes."""
        return self._landings[-1]

    def counts(self) -> list[list[int]]:
        """What this rank tells local rank j: how much it brings for rank j of each node. To be written, as int64, to the
        beginning of the staging buffer."""
        return [[self.source_bytes[members[j]] for members in self.nodes] for j in range(len(self.here))]

    @property
    def counts_region(self) -> Region:
        """Where the local ranks' counts for this rank arrive, in their order; its own row is not written."""
        width = len(self.here) * self._row
        return Region(Buffer.STAGING, width, 2 * width)

    def before(self) -> tuple[Moves, Moves, Moves, Moves]:
        """What is known at once. Step 1 and the sends of step 2 follow from the counts."""
        sends, receives = [], []
        for j, peer in enumerate(self.here):
            if j != self.i:
                there, here = j * self._row, (len(self.here) + j) * self._row
                sends.append(Message(peer, 0, Region(Buffer.STAGING, there, there + self._row)))
                receives.append(Message(peer, 0, Region(Buffer.STAGING, here, here + self._row)))
        landings = tuple(
            Message(self.nodes[b][self.i], 2 * self._tags, self._landing(nth)) for nth, b in enumerate(self.away)
        )
        return (
            Moves(tuple(sends), tuple(receives)),
            Moves(),
            Moves(receives=_filled(landings)),
            Moves(copies=tuple(self._placed())),
        )

    def after(self, counts: Sequence[Sequence[int]]) -> tuple[Moves, Moves, int]:
        """Steps 1 and 2, and the transit bytes, once ``counts[j][b]`` is known: what local rank j brings for rank i of b."""
        edges = [0, *accumulate(counts[j][b] for b in self.away for j in range(len(self.here)))]
        width = len(self.here)

        def held(nth: int, j: int) -> Region:
            return Region(Buffer.TRANSIT, edges[nth * width + j], edges[nth * width + j + 1])

        sends, receives, copies = [], [], []
        for j, peer in enumerate(self.here):
            for nth, b in enumerate([*self.away, self.a]):
                source = self._source(self.nodes[b][j])
                kept = self._target(peer) if b == self.a else held(nth, j)
                if j == self.i:
                    copies.append(Copy(source, kept))
                else:  # numbered by the node that it is for: both ends see nodes in their own order
                    sends.append(Message(peer, self._tags + b, source))
                    receives.append(Message(peer, self._tags + b, kept))
        passed = tuple(
            Message(
                self.nodes[b][self.i],
                2 * self._tags,
                Region(Buffer.TRANSIT, edges[nth * width], edges[(nth + 1) * width]),
            )
            for nth, b in enumerate(self.away)
        )
        sorted_ = Moves(_filled(sends), _filled(receives), tuple(copy for copy in copies if copy.source.size))
        return sorted_, Moves(sends=_filled(passed)), edges[-1]

    @property
    def _tags(self) -> int:
        """Tags of one step."""
        return len(self.nodes) * len(self.here)

    def _source(self, member: int) -> Region:
        return Region(Buffer.INPUT, self.sources[member], self.sources[member + 1])

    def _target(self, member: int) -> Region:
        return Region(Buffer.OUTPUT, self.targets[member], self.targets[member + 1])

    def _landing(self, nth: int) -> Region:
        return Region(Buffer.STAGING, self._landings[nth], self._landings[nth + 1])

    def _placed(self) -> list[Copy]:
        """A node's message holds what its ranks sent here, in their order."""
        copies = []
        for nth, b in enumerate(self.away):
            start = self._landings[nth]
            for member in self.nodes[b]:
                size = self.target_bytes[member]
                if size:
                    copies.append(Copy(Region(Buffer.STAGING, start, start + size), self._target(member)))
                start += size
        return copies


def _filled(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.region.size)

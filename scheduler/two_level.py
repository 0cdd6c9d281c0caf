"""The legs of a two-level all_to_all with any splits (plan ``hierarchical`` of all_to_all_v).

What the ranks of node a have for a rank of another node goes to one rank of node a, the *relay* of that rank, which passes it
on: one message between a node and a rank of another, instead of one for each rank there. Where nodes hold equally many
ranks the relay is the one at the same place; else the ranks of all nodes, one behind the other, are dealt out to those of
the node in turn, so that none relays for many more than the others.

How much a local peer will bring is known to that peer only, so the ranks of a node tell each other first (``counts``). What
comes from other nodes is in the caller's own splits; those receives can be posted before anything is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from commlayer.scheduler.legs import ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import ALIGN, Buffer, Copy, Message, Moves, Region, filled
from commlayer.scheduler.plan import Cut, Op, Span

__all__ = ["TWO_LEVEL", "TwoLevel"]

_COUNT_BYTES = 8


def _relay(sizes: Sequence[int], a: int, b: int, place: int) -> int:
    """The place in node a of who relays what it has for the rank at ``place`` of node b; ``sizes``: the ranks of each node."""
    return (sum(sizes[:b]) + place) % sizes[a]


def _others(sizes: Sequence[int], a: int) -> list[tuple[int, int]]:
    """Node and place of every rank of the other nodes, near ones first: no hot receiver."""
    away = [(a + d) % len(sizes) for d in range(1, len(sizes))]
    return [(b, place) for b in away for place in range(sizes[b])]


class TwoLevel:
    """One call on one rank. ``nodes``: the members on each node. ``source_bytes[k]`` go to member k, ``target_bytes[k]`` come
    from it.

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
        self._tags = len(source_bytes)  # how far apart those of the steps are
        self.sources, self.targets = [0, *accumulate(source_bytes)], [0, *accumulate(target_bytes)]
        self.away = [(self.a + d) % len(nodes) for d in range(1, len(nodes))]
        sizes = [len(members) for members in nodes]
        self.relayed: list[list[int]] = [[] for _ in self.here]
        """For each local rank the members of other nodes whose relay it is."""
        for b, place in _others(sizes, self.a):
            self.relayed[_relay(sizes, self.a, b, place)].append(nodes[b][place])
        self.relays = [nodes[b][_relay(sizes, b, self.a, self.i)] for b in self.away]
        """Who relays for this rank on each other node."""
        self._rows = [0, *accumulate(len(members) * _COUNT_BYTES for members in self.relayed)]
        self._width = len(self.relayed[self.i]) * _COUNT_BYTES
        self.counts_region = Region(Buffer.STAGING, self._rows[-1], self._rows[-1] + len(self.here) * self._width)
        """Where the local ranks' counts for this rank arrive, in their order; its own row is not written."""
        counts_end = -(-self.counts_region.stop // ALIGN) * ALIGN  # devices copy from there in whole words
        landing = [sum(target_bytes[k] for k in nodes[b]) for b in self.away]
        self._landings = [*accumulate(landing, initial=counts_end)]
        self.staging_bytes = self._landings[-1]
        """Counts out, counts in, and what comes from other nodes."""
        self.edges: list[int] = []
        """Between what the local ranks bring, member by member, in transit; empty until the counts are known."""

    def counts(self) -> list[list[int]]:
        """Counts for local rank j: how much it brings for each member whose relay that is. To be written, as int64, one row
        behind the other, to the beginning of the staging buffer."""
        return [[self.source_bytes[member] for member in members] for members in self.relayed]

    def before(self) -> tuple[Moves, ...]:
        """The moves that are known at once. Step 1 and the sends of step 2 follow from the counts."""
        return tuple(leg.moves(self, step * self._tags, 0) for step, leg in enumerate(TWO_LEVEL.legs))

    def after(self, counts: Sequence[Sequence[int]]) -> tuple[Moves, Moves, int]:
        """Steps 1 and 2, and the transit bytes, once ``counts[j][nth]`` is known: what local rank j brings for the nth of the
        members that this rank relays for."""
        mine = range(len(self.relayed[self.i]))
        self.edges = [0, *accumulate(counts[j][nth] for nth in mine for j in range(len(self.here)))]
        passed = PASS_ON.moves(self, 2 * self._tags, 0)
        return SORT.moves(self, self._tags, 0), Moves(sends=passed.sends), self.edges[-1]

    def known(self, counts: Sequence[Sequence[int]]) -> tuple[tuple[Moves, ...], int]:
        """All moves of a call, and the transit bytes, where this rank knows beforehand ``counts[k][member]``: the bytes that
        member k sends to another one, for the members k of its node at least. Nobody tells counts: that step is empty."""
        relayed = self.relayed[self.i]
        *_, transit = self.after([[counts[peer][member] for member in relayed] for peer in self.here])
        later = enumerate(TWO_LEVEL.legs[1:], start=1)
        return (Moves(), *(leg.moves(self, step * self._tags, 0) for step, leg in later)), transit

    def target(self, member: int) -> Region:
        """Where what comes from a member belongs."""
        return Region(Buffer.OUTPUT, self.targets[member], self.targets[member + 1])

    def landing(self, nth: int) -> Region:
        """Where what the ``nth`` other node has for this rank arrives."""
        return Region(Buffer.STAGING, self._landings[nth], self._landings[nth + 1])

    def held(self, nth: int, first: int, stop: int) -> Region:
        """The region that the local ranks ``first`` to ``stop`` bring for the ``nth`` member that this rank relays for."""
        edges = self.edges[nth * len(self.here) :]
        return Region(Buffer.TRANSIT, edges[first], edges[stop])

    def row(self, j: int) -> Region:
        """The row of counts for a local rank; these begin the staging buffer."""
        return Region(Buffer.STAGING, self._rows[j], self._rows[j + 1])

    def told(self, j: int) -> Region:
        """Where the counts of a local rank for this one arrive."""
        start = self.counts_region.start + j * self._width
        return Region(Buffer.STAGING, start, start + self._width)


class Count(ExchangeLeg):
    """The ranks of a node tell each other how much is coming."""

    tells_counts = True

    def size(self, cut: Cut) -> float:
        return float(cut.traffic.group_size * _COUNT_BYTES)

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        peers = [(j, peer) for j, peer in enumerate(place.here) if j != place.i]
        return filled(
            [Message(peer, tag, place.row(j)) for j, peer in peers],
            [Message(peer, tag, place.told(j)) for j, peer in peers],
        )


class Sort(ExchangeLeg):
    """Inside the node to the relays; for this node's own ranks that is all. Needs the counts."""

    def size(self, cut: Cut) -> float:
        """The size of an even exchange in the fullest node that brings a rank as much as the busiest relay of any node gets.

        That one gets what its peers have for so many ranks, itself among them: all ranks are dealt out in turn (:func:`_relay`),
        those of a node, which follow each other, one to each of it.
        """
        nodes, width = cut.traffic.nodes, max(cut.traffic.nodes)
        most = max(-(-sum(nodes) // ranks) * (ranks - 1) for ranks in nodes)
        return cut.size / cut.traffic.group_size * most * width / (width - 1)

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        if not place.edges:
            return Moves()
        sends, receives, copies = [], [], []
        for j, peer in enumerate(place.here):
            members = (peer, *place.relayed[j])
            sources = [Region(Buffer.INPUT, place.sources[k], place.sources[k + 1]) for k in members]
            targets = [place.target(peer), *(place.held(nth, j, j + 1) for nth in range(len(place.relayed[place.i])))]
            if j == place.i:
                copies += [Copy(*pair) for pair in zip(sources, targets, strict=True)]
            else:  # numbered by the relay's own list, which both ends know
                sends += [Message(peer, tag + nth, region) for nth, region in enumerate(sources)]
                receives += [Message(peer, tag + nth, region) for nth, region in enumerate(targets)]
        return filled(sends, receives, copies)


class PassOn(ExchangeLeg):
    """One message to each rank of another node for which this one is the relay. What is sent needs the counts."""

    def size(self, cut: Cut) -> float:
        """The size that brings as much through a card as goes through the busiest one: each byte for another node leaves once."""
        traffic = cut.traffic
        nodes, n, m, rates = traffic.nodes, traffic.group_size, len(traffic.nodes), traffic.node_rates
        if traffic.is_uniform:
            return cut.size
        busiest = max(ranks * (n - ranks) / n / rate for ranks, rate in zip(nodes, rates, strict=True)) * min(rates)
        return cut.size * busiest * m / (m - 1) / min(nodes)

    def moves(self, place: TwoLevel, tag: int, chunk: int) -> Moves:
        members = place.relayed[place.i] if place.edges else []
        sends = [Message(peer, tag, place.held(nth, 0, len(place.here))) for nth, peer in enumerate(members)]
        return filled(sends, [Message(relay, tag, place.landing(nth)) for nth, relay in enumerate(place.relays)])


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

"""The legs of plans by leaders: one rank of each node does all of the traffic between nodes (strategy ``leaders``).

A leader gets what its node has, exchanges with the other leaders, and hands out what came of it. Where the other plans over nodes
let every rank send its share, this takes few messages, and so the least time where latency rules: of small calls, and
all the more where nodes hold different numbers of ranks. The leader's memory and its card's one connection carry all bytes,
so shares win where those count; which it is, prices say.

An all_reduce's leaders send each other the sums of their nodes whole, and each adds up all of them in the order of nodes: so all
ranks hold the same bits. Rejected: parts of them, as shares go. That is a round more, for fewer bytes where there are few.

Fewest are the messages where the ranks of a node follow each other in the group's order, so that a node's blocks are one run of
bytes; else an all_gather and a reduce_scatter send one message for each run. A leader that sums has its peers' inputs beside
its own, and the other nodes' sums: of l ranks on each of m nodes, (l + m - 2) times the tensor in an all_reduce. Where that is
much (:data:`MOST_STAGED`), there is no such plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import bus_factor
from commlayer.profiles.profile import Profile
from commlayer.scheduler.legs import ExchangeLeg, LegOrder, LocalLeg
from commlayer.scheduler.moves import Buffer, Copy, Message, Moves, Reduction, Region, filled
from commlayer.scheduler.plan import CurveKey, Cut, Op, Plan, Span
from commlayer.scheduler.traffic import Traffic

__all__ = ["BY_LEADERS", "MOST_STAGED", "LeaderPlace", "staging_of_leaders"]

MOST_STAGED = 64 << 20
"""Bytes that a leader may have beside the tensor. Leaders win where latency rules, of calls far smaller than those that need so
much; and a rank whose memory is all planned for can spare this, but not some times a gradient bucket."""


def staging_of_leaders(traffic: Traffic) -> int:
    """The bytes that the busiest leader has beside the tensor, for what arrives to be summed."""
    if traffic.collective not in ("all_reduce", "reduce_scatter"):
        return 0
    is_whole, most = traffic.collective == "all_reduce", max(traffic.nodes)
    sums = traffic.logical_bytes if is_whole else traffic.logical_bytes * most // traffic.group_size
    return traffic.logical_bytes * max(most - 1, int(is_whole)) + (len(traffic.nodes) - 1) * sums


class LeaderPlace:
    """Where ``rank`` stands in a plan by leaders, and where what passes it lies in its buffers.

    ``nodes``: the members on each node; ``blocks``: bytes that each owns of an all_gather or a reduce_scatter. The leader of a
    node is its first member; of the ``root``'s node, in a broadcast, the root.
    """

    def __init__(
        self, plan: Plan, nodes: tuple[tuple[int, ...], ...], rank: int, blocks: Sequence[int], root: int
    ) -> None:
        collective, self.rank, self.nodes, self.blocks = plan.traffic.collective, rank, nodes, blocks
        self.bases = [0, *accumulate(blocks)]
        is_rooted = collective == "broadcast"
        self.leaders = [root if is_rooted and root in members else members[0] for members in nodes]
        self.root = root
        self.size = plan.traffic.logical_bytes if is_rooted or collective == "all_reduce" else self.bases[-1]
        self.a = next(a for a, members in enumerate(nodes) if rank in members)
        self.away = [(self.a + d) % len(nodes) for d in range(1, len(nodes))]
        self.leader = self.leaders[self.a]
        self.here = nodes[self.a]
        self.peers = [member for member in self.here if member != self.leader]
        # Staging of a leader: its peers' inputs, of which the first becomes the node's sum; then the other nodes' sums.
        self._is_kept = collective == "all_reduce" or bool(self.peers)
        """Whether the node's sum lies in staging: not in the input where that is also the output."""
        self._mine = self.size if collective == "all_reduce" else sum(blocks[member] for member in self.here)
        self._inputs = self.size * max(len(self.peers), int(self._is_kept))
        is_staged = self.is_leader and collective in ("all_reduce", "reduce_scatter")
        self.staging_bytes = self._inputs + len(self.away) * self._mine if is_staged else 0

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader

    def whole(self, buffer: Buffer) -> Region:
        """All of a buffer that holds the whole tensor."""
        return Region(buffer, 0, self.size)

    def block(self, buffer: Buffer, member: int) -> Region:
        """A member's block in a buffer that holds all of them."""
        return Region(buffer, self.bases[member], self.bases[member + 1])

    def runs(self, members: Sequence[int]) -> list[Region]:
        """The blocks of members in such a buffer, those that lie behind each other as one: for messages."""
        found: list[Region] = []
        for member in members:
            block = self.block(Buffer.OUTPUT, member)
            if found and found[-1].stop == block.start:
                block = Region(Buffer.OUTPUT, found.pop().start, block.stop)
            found.append(block)
        return found

    def arrival(self, peer: int) -> Region:
        """Where a peer's input arrives."""
        base = self.peers.index(peer) * self.size
        return Region(Buffer.STAGING, base, base + self.size)

    def total(self, part: Region | None = None) -> Region:
        """The sum of this node's inputs, or the part of it that lies there in a buffer of the whole tensor."""
        start, stop = (0, self.size) if part is None else (part.start, part.stop)
        return Region(Buffer.STAGING if self._is_kept else Buffer.INPUT, start, stop)

    def crossed(self, b: int, part: Region | None = None) -> Region:
        """Where node b's sum arrives of what is summed here, or of a part of that."""
        base = self._inputs + self.away.index(b) * self._mine
        start, stop = (0, self._mine) if part is None else (part.start, part.stop)
        return Region(Buffer.STAGING, base + start, base + stop)

    def packed(self, regions: Sequence[Region]) -> list[Region]:
        """The same lengths, behind each other."""
        edges = [0, *accumulate(region.size for region in regions)]
        return [Region(Buffer.STAGING, *pair) for pair in pairwise(edges)]


class _InNode(ExchangeLeg):
    """Messages between a leader and its peers, each of them of one rank of the node at one end."""

    def curve(self, profile: Profile, plan: Plan, size: float) -> Curve | None:
        """A profile that is older than these plans has curves of an all_to_all, in which every rank moves as much: no less."""
        (_, link, ranks) = key = self.curve_keys(plan)[0]
        return profile.find(*key) or profile.curve("all_to_all", link, ranks)

    def share_of_link(self, traffic: Traffic, curve: Curve) -> float:
        """The share of a link that all ranks of the node share, one rank's bytes."""
        return bus_factor(curve.collective, curve.group_size) / (
            min(traffic.nodes) if self.span is Span.LEADERS else max(traffic.nodes)
        )


class _Between(_InNode):
    """Messages between the leaders."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return (("leaders", self.resource(plan.traffic), self.span.ranks(plan.traffic)),)


# An all_gather


class KeepOwn(LocalLeg):
    """A leader's own block, copied to its place."""

    def size(self, cut: Cut) -> float:
        return cut.block

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        own = place.block(Buffer.OUTPUT, place.rank)
        return filled(copies=[Copy(Region(Buffer.INPUT, 0, own.size), own)] if place.is_leader else [])


class CollectBlocks(_InNode):
    """Every rank's block goes to its leader."""

    def size(self, cut: Cut) -> float:
        return cut.block * max(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return filled([Message(place.leader, tag, Region(Buffer.INPUT, 0, place.blocks[place.rank]))])
        return filled(receives=[Message(peer, tag, place.block(Buffer.OUTPUT, peer)) for peer in place.peers])


class ExchangeBlocks(_Between):
    """Each leader's blocks, all of its node, go to all other leaders."""

    def size(self, cut: Cut) -> float:
        return cut.over_rails(cut.size) * min(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return Moves()
        sends = [
            Message(place.leaders[b], tag + nth, region)
            for b in place.away
            for nth, region in enumerate(place.runs(place.here))
        ]
        receives = [
            Message(place.leaders[b], tag + nth, region)
            for b in place.away
            for nth, region in enumerate(place.runs(place.nodes[b]))
        ]
        return filled(sends, receives)


class HandOut(_InNode):
    """A leader's peers get all of the tensor."""

    def size(self, cut: Cut) -> float:
        return cut.size * max(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        whole = place.whole(Buffer.OUTPUT)
        if place.is_leader:
            return filled([Message(peer, tag, whole) for peer in place.peers])
        return filled(receives=[Message(place.leader, tag, whole)])


# Sums


class CollectInputs(_InNode):
    """Every rank's input goes to its leader."""

    def size(self, cut: Cut) -> float:
        return cut.size * max(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return filled([Message(place.leader, tag, place.whole(Buffer.INPUT))])
        return filled(receives=[Message(peer, tag, place.arrival(peer)) for peer in place.peers])


class SumInputs(LocalLeg):
    """The leader's sum over the ranks of its node, in their order."""

    def size(self, cut: Cut) -> float:
        return cut.size * (max(cut.traffic.nodes) - 1)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        own, total = place.whole(Buffer.INPUT), place.total()
        if not place.is_leader or total == own:
            return Moves()
        if not place.peers:
            return filled(copies=[Copy(own, total)])
        return Moves(reductions=(Reduction((own, *map(place.arrival, place.peers)), total),))


class ExchangeSums(_Between):
    """Each node's whole sum goes to all other leaders."""

    def size(self, cut: Cut) -> float:
        return cut.size * len(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return Moves()
        return filled(
            [Message(place.leaders[b], tag, place.total()) for b in place.away],
            [Message(place.leaders[b], tag, place.crossed(b)) for b in place.away],
        )


class SumAll(LocalLeg):
    """Each leader's sum over all nodes, in their order, so that all leaders find the same bits."""

    def size(self, cut: Cut) -> float:
        return cut.size * (len(cut.traffic.nodes) - 1)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return Moves()
        sources = (place.total() if b == place.a else place.crossed(b) for b in range(len(place.nodes)))
        return Moves(reductions=(Reduction(tuple(sources), place.whole(Buffer.OUTPUT)),))


class CrossSums(_Between):
    """Each node's sum of another's blocks goes to the leader there."""

    def size(self, cut: Cut) -> float:
        return cut.over_rails(cut.size) * min(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return Moves()
        mine = place.packed(place.runs(place.here))
        sends = [
            Message(place.leaders[b], tag + nth, place.total(region))
            for b in place.away
            for nth, region in enumerate(place.runs(place.nodes[b]))
        ]
        receives = [
            Message(place.leaders[b], tag + nth, place.crossed(b, region))
            for b in place.away
            for nth, region in enumerate(mine)
        ]
        return filled(sends, receives)


class SumBlocks(LocalLeg):
    """The leader's sum over the nodes of each block of its own, this node first."""

    def size(self, cut: Cut) -> float:
        return cut.block * max(cut.traffic.nodes) * (len(cut.traffic.nodes) - 1)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if not place.is_leader:
            return Moves()
        blocks = [place.block(Buffer.OUTPUT, member) for member in place.here]
        sums = []
        for member, block, part in zip(place.here, blocks, place.packed(blocks), strict=True):
            if block.size:
                total = place.total(block)
                target = Region(Buffer.OUTPUT, 0, block.size) if member == place.rank else total
                sums.append(Reduction((total, *(place.crossed(b, part) for b in place.away)), target))
        return Moves(reductions=tuple(sums))


class HandOutBlocks(_InNode):
    """A leader's peers get their blocks."""

    def size(self, cut: Cut) -> float:
        return cut.block * max(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        if place.is_leader:
            return filled(Message(peer, tag, place.total(place.block(Buffer.OUTPUT, peer))) for peer in place.peers)
        return filled(receives=[Message(place.leader, tag, Region(Buffer.OUTPUT, 0, place.blocks[place.rank]))])


# A broadcast


class SendToLeaders(_Between):
    """The root sends to the leaders of the other nodes."""

    def size(self, cut: Cut) -> float:
        return cut.size * len(cut.traffic.nodes)

    def moves(self, place: LeaderPlace, tag: int, chunk: int) -> Moves:
        whole = place.whole(Buffer.OUTPUT)
        if place.rank == place.root:
            return filled([Message(place.leaders[b], tag, whole) for b in place.away])
        return filled(receives=[Message(place.root, tag, whole)] if place.is_leader else [])


_IN, _OUT, _STAGED = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING

KEEP_OWN = KeepOwn("keep own block", Op.COPY, Span.SELF, _IN, _OUT)
COLLECT_BLOCKS = CollectBlocks("collect blocks", Op.GATHER, Span.NODE, _IN, _OUT)
EXCHANGE_BLOCKS = ExchangeBlocks("exchange blocks", Op.ALL_GATHER, Span.LEADERS, _OUT, _OUT, (KEEP_OWN, COLLECT_BLOCKS))
COLLECT_INPUTS = CollectInputs("collect inputs", Op.GATHER, Span.NODE, _IN, _STAGED)
SUM_INPUTS = SumInputs("sum inputs", Op.REDUCE, Span.NODE, _STAGED, _STAGED, (COLLECT_INPUTS,))
EXCHANGE_SUMS = ExchangeSums("exchange sums", Op.ALL_GATHER, Span.LEADERS, _STAGED, _STAGED, (SUM_INPUTS,))
SUM_ALL = SumAll("sum all nodes", Op.REDUCE, Span.LEADERS, _STAGED, _OUT, (EXCHANGE_SUMS,))
CROSS_SUMS = CrossSums("cross sums", Op.ALL_TO_ALL, Span.LEADERS, _STAGED, _STAGED, (SUM_INPUTS,))
SUM_BLOCKS = SumBlocks("sum blocks", Op.REDUCE, Span.LEADERS, _STAGED, _OUT, (CROSS_SUMS,))
HAND_OUT_BLOCKS = HandOutBlocks("hand out blocks", Op.SCATTER, Span.NODE, _STAGED, _OUT, (SUM_BLOCKS,))
SEND_TO_LEADERS = SendToLeaders("send to leaders", Op.BROADCAST, Span.LEADERS, _OUT, _OUT)
HAND_OUT = HandOut("hand out", Op.SCATTER, Span.NODE, _OUT, _OUT, (EXCHANGE_BLOCKS, SUM_ALL, SEND_TO_LEADERS))

_COLLECTED = LegOrder(((COLLECT_INPUTS, 0), (SUM_INPUTS, 0)))
BY_LEADERS = {
    "all_gather": LegOrder(((KEEP_OWN, 0), (COLLECT_BLOCKS, 0), (EXCHANGE_BLOCKS, 0), (HAND_OUT, 0))),
    "reduce_scatter": _COLLECTED + LegOrder(((CROSS_SUMS, 0), (SUM_BLOCKS, 0), (HAND_OUT_BLOCKS, 0))),
    "all_reduce": _COLLECTED + LegOrder(((EXCHANGE_SUMS, 0), (SUM_ALL, 0), (HAND_OUT, 0))),
    "broadcast": LegOrder(((SEND_TO_LEADERS, 0), (HAND_OUT, 0))),
}

"""The legs of an all_to_all of replicated tokens, and how MoNTA's strategies (table 6) are put together from them.

What differs from the paper is ``Gather.REMOTE``, the default of this runtime:

- the local block is copied from the input instead of being gathered from its own copies, so that the all_gather moves
  (e−1)/e of the tensor (half of it with two nodes);
- ``pipelined`` receives every piece where it finally belongs, so that MoNTA's interleaving copy is not needed; it costs
  e−1 messages a peer instead of one. ``pipelined_copy`` keeps one message a peer and pays with a copy.

``Gather.WHOLE`` is the paper to the letter, for its profile, for comparison, and for the ablation in the benchmark.

Geometry. The input of a rank is e blocks of B bytes; block k goes to rank k of the group. Every block is cut into
chunks, every chunk into one slice for each of the t ranks that hold the same tokens:

    block k  =  [ chunk 0: slice 0 … slice t−1 ][ chunk 1: slice 0 … slice t−1 ] …

The staging buffer of a chunk holds slice after slice, and in each slice the gathered blocks one behind the other: what a peer
needs is one contiguous message.
"""

from __future__ import annotations

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.legs import ExchangeLeg, LegOrder, LocalLeg, Phase
from commlayer.scheduler.moves import ALIGN, Buffer, Copy, Message, Moves, Region, filled
from commlayer.scheduler.plan import CurveKey, Cut, Gather, Op, Plan, Span, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import Wire

__all__ = [
    "EXCHANGE_SLICES",
    "GATHER",
    "LOCAL_BLOCK",
    "REPLICATED_LEGS",
    "ReplicatedPlace",
    "can_drop",
    "objection",
    "replicated_moves",
    "staging_bytes",
]

_STRATEGIES = (Strategy.FLAT, Strategy.HIERARCHICAL, Strategy.PIPELINED, Strategy.PIPELINED_COPY)


def can_drop(traffic: Traffic) -> bool:
    """Whether dropping to slices can pay at all: several holders of the same tokens, and a wire between the nodes."""
    return traffic.replication > 1 and traffic.group_size > 1 and traffic.link is Resource.INTER


def objection(traffic: Traffic, strategy: Strategy, chunks: int, wire: Wire, pieces: int) -> str:
    """Say why the strategy does not apply to an all_to_all of replicated tokens; empty where it does."""
    if pieces > 1 or not wire.is_native:
        return "tokens that are replicated inside nodes go in chunks, and in their own format"
    if strategy not in _STRATEGIES:
        return "it is for groups whose ranks hold tokens of their own: use hierarchical"
    if strategy is not Strategy.FLAT and not can_drop(traffic):
        return "it needs tokens that are replicated inside nodes, and a group that crosses nodes: use flat"
    return "" if chunks >= 1 else f"a pipelined plan needs 1 or more chunks, got {chunks}"


def replicated_moves(plan: Plan, ep_index: int, tp_index: int) -> tuple[Moves, ...]:
    """The moves of rank (``ep_index``, ``tp_index``) of the grid, one entry for each step of the plan.

    ``ep_index`` is the rank's place in the group of the all_to_all, ``tp_index`` among the holders of the same tokens.
    """
    return plan.moves(ReplicatedPlace(plan, ep_index, tp_index))


def staging_bytes(plan: Plan) -> int:
    """Size of the staging buffer that the plan needs on each rank (0 when it receives in place)."""
    return len(_gathered(plan, 0)) * plan.traffic.block_bytes if plan.is_staged else 0


def _gathered(plan: Plan, ep_index: int) -> list[int]:
    """The blocks that pass through the all_gather, in ring order from this rank: near peers first, no hot receiver."""
    group_size = plan.traffic.group_size
    first = 0 if plan.gather is Gather.WHOLE else 1
    return [(ep_index - distance) % group_size for distance in range(first, group_size)]


class ReplicatedPlace:
    """Where rank (``ep``, ``tp``) of the grid stands, and where slices lie in its buffers.

    ``e``: ranks of the group; ``t``: slices of a chunk; ``gathered``: the blocks that pass through the all_gather.
    """

    def __init__(self, plan: Plan, ep_index: int, tp_index: int) -> None:
        self.ep, self.tp = ep_index, tp_index
        self.e, self.t, self.block = plan.traffic.group_size, plan.slices, plan.traffic.block_bytes
        self.gathered = _gathered(plan, ep_index)
        pieces = plan.chunks * self.t
        self.cuts = [self.block * i // pieces // ALIGN * ALIGN for i in range(pieces)] + [self.block]

    def slice_of(self, buffer: Buffer, block: int, chunk: int, nth: int) -> Region:
        """Slice ``nth`` of a chunk of a block, in a buffer that holds all blocks."""
        base, cut = block * self.block, chunk * self.t + nth
        return Region(buffer, base + self.cuts[cut], base + self.cuts[cut + 1])

    def staged(self, chunk: int, nth: int) -> Region:
        """Slice ``nth`` of a chunk in staging, of all gathered blocks."""
        cut, width = chunk * self.t + nth, len(self.gathered)
        return Region(Buffer.STAGING, self.cuts[cut] * width, self.cuts[cut + 1] * width)

    def staged_of(self, place: int, chunk: int, nth: int) -> Region:
        """The same of the gathered block that has that place."""
        start, size = self.staged(chunk, nth).start, self.slice_of(Buffer.STAGING, 0, chunk, nth).size
        return Region(Buffer.STAGING, start + place * size, start + (place + 1) * size)


class Slices(ExchangeLeg):
    """Each rank sends its 1/t slice of every block to that block's rank, and waits for nothing: all chunks may go at once."""

    def size(self, cut: Cut) -> float:
        return cut.traffic.logical_bytes / (cut.chunks * cut.traffic.replication)

    def curve(self, profile: Profile, plan: Plan, size: float) -> Curve | None:
        if plan.traffic.group_size == 1:  # a rank alone copies its input, on whatever profile
            return profile.find("all_to_all", plan.traffic.link, 1) or profile.find("copy", Resource.DEVICE, 1)
        return super().curve(profile, plan, size)

    def landing(self, place: ReplicatedPlace, nth: int, block: int, chunk: int, slice_: int) -> Region:
        """Where a slice of the ``nth`` gathered block arrives."""
        return place.slice_of(self.target, block, chunk, slice_)

    def moves(self, place: ReplicatedPlace, tag: int, chunk: int) -> Moves:
        mine = place.tp if place.t > 1 else 0  # with one slice nothing is dropped: every holder exchanges all of it
        landing = {block: self.landing(place, nth, block, chunk, mine) for nth, block in enumerate(place.gathered)}
        sends, receives, copies = [], [], []
        for distance in range(1, place.e):
            source, target = (place.ep - distance) % place.e, (place.ep + distance) % place.e
            receives.append(Message(source, tag, landing[source]))
            sends.append(Message(target, tag, place.slice_of(self.source, target, chunk, mine)))
        if place.ep in landing:
            copies.append(Copy(place.slice_of(self.source, place.ep, chunk, mine), landing[place.ep]))
        return filled(sends, receives, copies)


class SlicesToStaging(Slices):
    """The same, received in staging."""

    def landing(self, place: ReplicatedPlace, nth: int, block: int, chunk: int, slice_: int) -> Region:
        return place.staged_of(nth, chunk, slice_)


class WholeBlocks(Slices):
    """The whole buffer, as torch.distributed sends it; where the profile knows such calls, a small one is a call of the
    backend's own."""

    def curve_keys(self, plan: Plan) -> tuple[CurveKey, ...]:
        return ("all_to_all_single", plan.traffic.link, plan.traffic.group_size), *super().curve_keys(plan)

    def curve(self, profile: Profile, plan: Plan, size: float) -> Curve | None:
        single = profile.find(*self.curve_keys(plan)[0]) if plan.traffic.group_size > 1 else None
        if single is not None and size <= single.bytes[-1]:  # above, the transport sends messages too
            return single
        return super().curve(profile, plan, size)

    def size(self, cut: Cut) -> float:
        return cut.size


class GatherSlices(ExchangeLeg):
    """The holders of the same tokens give each other their slices, block by block, where they belong."""

    def size(self, cut: Cut) -> float:
        return _gathered_bytes(cut)

    def regions(self, place: ReplicatedPlace, chunk: int, nth: int) -> list[tuple[int, Region]]:
        """The regions that holder ``nth`` gives the others, with the numbers of the messages."""
        return [(block, place.slice_of(Buffer.OUTPUT, block, chunk, nth)) for block in place.gathered]

    def moves(self, place: ReplicatedPlace, tag: int, chunk: int) -> Moves:
        sends: list[Message] = []
        receives: list[Message] = []
        mine = self.regions(place, chunk, place.tp)
        for distance in range(1, place.t):
            source, target = (place.tp - distance) % place.t, (place.tp + distance) % place.t
            receives += (Message(source, tag + n, region) for n, region in self.regions(place, chunk, source))
            sends += (Message(target, tag + n, region) for n, region in mine)
        return filled(sends, receives)


class GatherStaged(GatherSlices):
    """The same in staging, where all blocks are one message."""

    def regions(self, place: ReplicatedPlace, chunk: int, nth: int) -> list[tuple[int, Region]]:
        return [(0, place.staged(chunk, nth))]


class PlaceChunk(LocalLeg):
    """Copy what lies in staging to its place; over HOLDERS, in turn with the all_gather, and else beside it."""

    def size(self, cut: Cut) -> float:
        return _gathered_bytes(cut)

    def resource(self, traffic: Traffic) -> Resource:
        return self.span.link(traffic)

    def moves(self, place: ReplicatedPlace, tag: int, chunk: int) -> Moves:
        return filled(
            copies=(
                Copy(place.staged_of(nth, chunk, slice_), place.slice_of(self.target, block, chunk, slice_))
                for slice_ in range(place.t)
                for nth, block in enumerate(place.gathered)
            )
        )


class LocalBlock(LocalLeg):
    """The block that stays on this rank: copied while the wire is busy, instead of gathered."""

    is_whole = True

    def size(self, cut: Cut) -> float:
        return cut.block

    def moves(self, place: ReplicatedPlace, tag: int, chunk: int) -> Moves:
        start, stop = place.ep * place.block, (place.ep + 1) * place.block
        return filled(copies=(Copy(Region(self.source, start, stop), Region(self.target, start, stop)),))


def _gathered_bytes(cut: Cut) -> float:
    """Bytes of a chunk that pass through the all_gather."""
    blocks = cut.traffic.group_size if cut.gather is Gather.WHOLE else cut.traffic.group_size - 1
    return float(cut.traffic.block_bytes * blocks) / cut.chunks


_IN, _OUT, _STAGED = Buffer.INPUT, Buffer.OUTPUT, Buffer.STAGING

WHOLE_BLOCKS = WholeBlocks("all blocks", Op.ALL_TO_ALL, Span.GROUP, _IN, _OUT)
EXCHANGE_SLICES = Slices("slices", Op.ALL_TO_ALL, Span.GROUP, _IN, _OUT)
LOCAL_BLOCK = LocalBlock("local block", Op.COPY, Span.SELF, _IN, _OUT)
GATHER = GatherSlices("gather in node", Op.ALL_GATHER, Span.HOLDERS, _OUT, _OUT, (EXCHANGE_SLICES,))
STAGED_SLICES = SlicesToStaging("slices to staging", Op.ALL_TO_ALL, Span.GROUP, _IN, _STAGED)
GATHER_STAGED = GatherStaged("gather in staging", Op.ALL_GATHER, Span.HOLDERS, _STAGED, _STAGED, (STAGED_SLICES,))
PLACE_IN_TURN = PlaceChunk("place in turn", Op.COPY, Span.HOLDERS, _STAGED, _OUT, (GATHER_STAGED,))
PLACE_BESIDE = PlaceChunk("place beside", Op.COPY, Span.SELF, _STAGED, _OUT, (GATHER_STAGED,))

_EXCHANGE: Phase = ((EXCHANGE_SLICES, 0),)
_EXCHANGE_STAGED: Phase = ((STAGED_SLICES, 0),)
_LOCAL: Phase = ((LOCAL_BLOCK, 0),)
# The copy of a chunk is posted behind the all_gather of the next one where it has a resource of its own, so that an executor that
# copies on its own thread has already posted what the copy should overlap.
_BESIDE: Phase = ((GATHER_STAGED, 0), (PLACE_BESIDE, 1))

_FLAT = LegOrder(((WHOLE_BLOCKS, 0),))
_IN_PLACE = LegOrder(_EXCHANGE, _LOCAL, ((GATHER, 0),))
REPLICATED_LEGS = {
    (Strategy.FLAT, Gather.WHOLE): _FLAT,
    (Strategy.HIERARCHICAL, Gather.WHOLE): LegOrder(_EXCHANGE, ((GATHER, 0),)),
    (Strategy.HIERARCHICAL, Gather.REMOTE): _IN_PLACE,
    (Strategy.PIPELINED, Gather.WHOLE): LegOrder(_EXCHANGE_STAGED, ((GATHER_STAGED, 0), (PLACE_IN_TURN, 0))),
    (Strategy.PIPELINED, Gather.REMOTE): _IN_PLACE,
    (Strategy.PIPELINED_COPY, Gather.WHOLE): LegOrder(_EXCHANGE_STAGED, _BESIDE),
    (Strategy.PIPELINED_COPY, Gather.REMOTE): LegOrder(_EXCHANGE_STAGED, _LOCAL, _BESIDE),
}
"""The legs of each strategy: what torch does; MoNTA's O1 (equation 11): each rank sends its 1/t slice between nodes, then the
node gathers; its O2 (algorithm 1): all_to_all of chunk j+1 ∥ all_gather of chunk j, WHOLE also copies, on the same resource; its
O3 (algorithm 2): all_to_all ∥ all_gather ∥ copy, three chunks in flight."""

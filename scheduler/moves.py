"""Which bytes a rank sends, receives and copies in each step of a plan. Pure arithmetic, no torch: tested without processes.

Geometry. The input of a rank is e blocks of B bytes; block k goes to rank k of the group. Every block is cut into
chunks, every chunk into one slice for each of the t ranks that hold the same tokens:

    block k  =  [ chunk 0: slice 0 … slice t−1 ][ chunk 1: slice 0 … slice t−1 ] …

Cuts are at multiples of ``ALIGN`` bytes, so sizes that do not divide just give slices that differ a little (some may be
empty); a byte is a byte, so every dtype passes. The staging buffer of a chunk holds slice after slice, and in each slice
the gathered blocks one behind the other: what a peer needs is one contiguous message.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Step

__all__ = [
    "ALIGN",
    "MAX_TAGS",
    "Copy",
    "Decode",
    "Encode",
    "Message",
    "Moves",
    "Reduction",
    "Region",
    "cut",
    "moves",
    "staging_bytes",
    "tags_per_step",
]

ALIGN = 64
MAX_TAGS = 1 << 14
"""Message tags of one call. A transport keeps the calls in flight apart above them."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes ``start`` to ``stop`` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """A region that goes to, or comes from, rank ``peer`` of the step's group. ``tag`` is equal at both ends."""

    peer: int
    tag: int
    region: Region


@dataclass(frozen=True, slots=True)
class Copy:
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Encode:
    """``source``, bytes of the tensor, becomes one encoded message in ``target``."""

    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Decode:
    """One encoded message in ``source`` becomes ``target``, bytes of the tensor."""

    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Reduction:
    """``target`` becomes the sum (or what the call's operation is) of ``sources``, in this order, all of one size.

    The target may be the same region as the first or the second source, and overlaps no other. Sources in the buffers
    ``encoded`` and ``arrived`` are encoded messages of so much of the tensor as the target has.
    """

    sources: tuple[Region, ...]
    target: Region


@dataclass(frozen=True, slots=True)
class Moves:
    """What one rank does in one step: copies, then reductions, then encoding, then decoding.

    For replicated tokens an all_to_all goes over the ep group and an all_gather over the tp group; else peers are those of
    the group.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    copies: tuple[Copy, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    encodes: tuple[Encode, ...] = ()
    decodes: tuple[Decode, ...] = ()


def cut(total: int, parts: int, index: int, align: int = ALIGN) -> int:
    """Where part ``index`` of ``parts`` begins, in bytes: at a multiple of ``align``; part ``parts`` at the end."""
    return total if index == parts else total * index // parts // align * align


def tags_per_step(plan: Plan) -> int:
    """How many messages one rank may send another in one step, and so how far apart the steps' tags are."""
    traffic = plan.traffic
    if traffic.collective == "all_to_all" or traffic.collective == "all_to_all_v" or not traffic.is_uniform:
        return traffic.group_size
    return len(traffic.nodes)


def staging_bytes(plan: Plan) -> int:
    """Size of the staging buffer that the plan needs on each rank (0 when it receives in place)."""
    return len(_gathered(plan, 0)) * plan.traffic.block_bytes if plan.is_staged else 0


def moves(plan: Plan, ep_index: int, tp_index: int) -> tuple[Moves, ...]:
    """The moves of rank (``ep_index``, ``tp_index``) of the grid, one entry for each step of the plan.

    ``ep_index`` is the rank's place in the group of the all_to_all, ``tp_index`` among the holders of the same tokens.
    """
    geometry = _Geometry(plan, ep_index, tp_index)
    return tuple(geometry.of_step(index, step) for index, step in enumerate(plan.steps))


def _gathered(plan: Plan, ep_index: int) -> list[int]:
    """The blocks that pass through the all_gather, in ring order from this rank: near peers first, no hot receiver."""
    group_size = plan.traffic.group_size
    first = 0 if plan.gather is Gather.WHOLE else 1
    return [(ep_index - distance) % group_size for distance in range(first, group_size)]


class _Geometry:
    def __init__(self, plan: Plan, ep_index: int, tp_index: int) -> None:
        self.plan, self.ep, self.tp = plan, ep_index, tp_index
        self.e, self.t, self.block = plan.traffic.group_size, plan.slices, plan.traffic.block_bytes
        self.gathered = _gathered(plan, ep_index)
        pieces = plan.chunks * self.t
        cuts = [self.block * i // pieces // ALIGN * ALIGN for i in range(pieces)] + [self.block]
        self.cuts = cuts

    def of_step(self, index: int, step: Step) -> Moves:
        tag = index * self.e
        if step.op is Op.ALL_TO_ALL:
            return self._exchange(tag, step)
        if step.op is Op.ALL_GATHER:
            return self._gather_staged(tag, step) if step.target is Buffer.STAGING else self._gather(tag, step)
        return Moves(copies=self._local() if step.source is Buffer.INPUT else self._place(step.chunk))

    def _piece(self, buffer: Buffer, block: int, chunk: int, slice_: int) -> Region:
        base, cut = block * self.block, chunk * self.t + slice_
        return Region(buffer, base + self.cuts[cut], base + self.cuts[cut + 1])

    def _size(self, chunk: int, slice_: int) -> int:
        return self.cuts[chunk * self.t + slice_ + 1] - self.cuts[chunk * self.t + slice_]

    def _staged(self, chunk: int, slice_: int, nth: int | None = None) -> Region:
        """Slice ``slice_`` of a chunk in staging: all gathered blocks, or only the ``nth`` of them."""
        width = len(self.gathered)
        start = self.cuts[chunk * self.t + slice_] * width
        size = self._size(chunk, slice_)
        if nth is None:
            return Region(Buffer.STAGING, start, start + size * width)
        return Region(Buffer.STAGING, start + nth * size, start + (nth + 1) * size)

    def _exchange(self, tag: int, step: Step) -> Moves:
        mine = self.tp if self.t > 1 else 0  # with one slice nothing is dropped: every holder exchanges all of it
        landing: dict[int, Region] = {}
        for nth, block in enumerate(self.gathered):
            if step.target is Buffer.STAGING:
                landing[block] = self._staged(step.chunk, mine, nth)
            else:
                landing[block] = self._piece(Buffer.OUTPUT, block, step.chunk, mine)
        sends, receives, copies = [], [], []
        for distance in range(1, self.e):
            source, target = (self.ep - distance) % self.e, (self.ep + distance) % self.e
            receives.append(Message(source, tag, landing[source]))
            sends.append(Message(target, tag, self._piece(Buffer.INPUT, target, step.chunk, mine)))
        if self.ep in landing:
            copies.append(Copy(self._piece(Buffer.INPUT, self.ep, step.chunk, mine), landing[self.ep]))
        return _without_empty(sends, receives, copies)

    def _gather(self, tag: int, step: Step) -> Moves:
        sends, receives = [], []
        for distance in range(1, self.t):
            source, target = (self.tp - distance) % self.t, (self.tp + distance) % self.t
            for block in self.gathered:
                receives.append(Message(source, tag + block, self._piece(Buffer.OUTPUT, block, step.chunk, source)))
                sends.append(Message(target, tag + block, self._piece(Buffer.OUTPUT, block, step.chunk, self.tp)))
        return _without_empty(sends, receives, [])

    def _gather_staged(self, tag: int, step: Step) -> Moves:
        sends, receives = [], []
        for distance in range(1, self.t):
            source, target = (self.tp - distance) % self.t, (self.tp + distance) % self.t
            receives.append(Message(source, tag, self._staged(step.chunk, source)))
            sends.append(Message(target, tag, self._staged(step.chunk, self.tp)))
        return _without_empty(sends, receives, [])

    def _place(self, chunk: int) -> tuple[Copy, ...]:
        copies = [
            Copy(self._staged(chunk, slice_, nth), self._piece(Buffer.OUTPUT, block, chunk, slice_))
            for slice_ in range(self.t)
            for nth, block in enumerate(self.gathered)
        ]
        return _without_empty([], [], copies).copies

    def _local(self) -> tuple[Copy, ...]:
        start, stop = self.ep * self.block, (self.ep + 1) * self.block
        copy = Copy(Region(Buffer.INPUT, start, stop), Region(Buffer.OUTPUT, start, stop))
        return _without_empty([], [], [copy]).copies


def _without_empty(sends: list[Message], receives: list[Message], copies: list[Copy]) -> Moves:
    """Both ends know that a region is empty, so neither posts it."""
    return Moves(
        tuple(message for message in sends if message.region.size),
        tuple(message for message in receives if message.region.size),
        tuple(copy for copy in copies if copy.source.size),
    )

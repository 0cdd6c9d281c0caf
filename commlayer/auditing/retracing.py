"""The moves of a plan that have brought a byte of its result: bytes are followed back, over all
ranks, to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from commlayer.scheduler.call_moves import RankMoves
from commlayer.scheduler.moves import Buffer, Region
from commlayer.scheduler.plan import Plan

__all__ = ["Hop", "suspects"]

_CODED = (Buffer.ENCODED, Buffer.ARRIVED)


class Hop(NamedTuple):
    """A move that has brought a byte on, from one member of the group to another or to itself."""

    step: int
    kind: str
    source: int
    target: int

    def describe(self, plan: Plan, ranks: Sequence[int]) -> str:
        """In words; ``ranks``: of the members, in the job."""
        step = plan.steps[self.step]
        chunk = f", chunk {step.chunk}" if plan.is_chunked else ""
        where = f"on rank {ranks[self.target]}"
        if self.kind == "message":
            where = f"from rank {ranks[self.source]} to rank {ranks[self.target]}"
        return f"step {self.step} ({step.leg.name}{chunk}), a {self.kind} {where}"


class _Place(NamedTuple):
    """Bytes of a buffer of a member, as they are before some step."""

    member: int
    region: Region


class _Write(NamedTuple):
    """``target`` becomes what ``sources`` are. ``is_whole``: each byte comes from all of them, as
    where it is decoded."""

    target: Region
    sources: tuple[_Place, ...]
    hop: Hop
    is_whole: bool
    is_sent: bool = False


class _Trail:
    """Follows bytes through the moves of all members. ``is_in_place``: input and output are one
    memory."""

    def __init__(self, ranks: Sequence[RankMoves], *, is_in_place: bool) -> None:
        self._ranks, self._is_in_place = ranks, is_in_place
        self._written: dict[tuple[int, int], list[_Write]] = {}

    def hops(self, member: int, start: int, stop: int) -> set[Hop]:
        """All that has brought these bytes of a member's output."""
        hops: set[Hop] = set()
        wanted = {_Place(member, Region(Buffer.OUTPUT, start, stop))}
        for step in reversed(range(len(self._ranks[member].steps))):
            earlier: set[_Place] = set()
            for target in wanted:
                self._back(target, step, self._writes(target.member, step), hops, earlier)
            wanted = earlier
        return hops

    def _back(self, place: _Place, step: int, writes: Sequence[_Write], hops: set[Hop], earlier: set[_Place]) -> None:
        """Add to ``earlier`` where bytes were before a step; ``writes``: of the step, the last one
        first."""
        for nth, write in enumerate(writes):
            region = self._known(place.region)
            target = write.target
            if not (region.buffer is target.buffer and region.start < target.stop and target.start < region.stop):
                continue
            hops.add(write.hop)
            start, stop = max(region.start, target.start), min(region.stop, target.stop)
            for source in write.sources:
                before = _Place(
                    source.member, source.region if write.is_whole else _part(source.region, write, start, stop)
                )
                if write.is_sent:
                    earlier.add(before)
                else:
                    self._back(before, step, writes[nth + 1 :], hops, earlier)
            for edge in ((region.start, start), (stop, region.stop)):
                if edge[0] < edge[1]:
                    rest = _Place(place.member, Region(region.buffer, *edge))
                    self._back(rest, step, writes[nth + 1 :], hops, earlier)
            return
        earlier.add(place)

    def _known(self, region: Region) -> Region:
        if self._is_in_place and region.buffer is Buffer.INPUT:
            return Region(Buffer.OUTPUT, region.start, region.stop)
        return region

    def _writes(self, member: int, step: int) -> list[_Write]:
        """The writes of a member in a step, the last one first."""
        known = self._written.get((member, step))
        if known is not None:
            return known
        moves = self._ranks[member].steps[step]
        writes = []

        def add(kind: str, target: Region, sources: Sequence[Region], is_whole: bool) -> None:
            places = tuple(_Place(member, source) for source in sources)
            writes.append(_Write(self._known(target), places, Hop(step, kind, member, member), is_whole))

        for copy in moves.copies:
            add("copy", copy.target, [copy.source], False)
        for total in moves.reductions:
            add("sum", total.target, total.sources, any(source.buffer in _CODED for source in total.sources))
        for encode in moves.encodes:
            add("encoding", encode.target, [encode.source], True)
        for decode in moves.decodes:
            add("decoding", decode.target, [decode.source], True)
        for message in moves.receives:
            sent = self._sent(message.peer, step, member, message.tag)
            source, hop = _Place(message.peer, sent), Hop(step, "message", message.peer, member)
            writes.append(_Write(self._known(message.region), (source,), hop, False, True))
        return self._written.setdefault((member, step), writes[::-1])

    def _sent(self, member: int, step: int, to: int, tag: int) -> Region:
        sends = self._ranks[member].steps[step].sends
        return next(message.region for message in sends if (message.peer, message.tag) == (to, tag))


def _part(source: Region, write: _Write, start: int, stop: int) -> Region:
    offset = source.start - write.target.start
    return Region(source.buffer, start + offset, stop + offset)


def suspects(
    ranks: Sequence[RankMoves], firsts: Sequence[int], width: int, *, is_in_place: bool, is_shared: bool
) -> list[Hop]:
    """The moves that alone can have brought the first wrong elements, of ``width`` bytes; in the
    order of steps, perhaps none.

    ``firsts``: the first wrong element of each rank, −1: none. ``is_shared``: all ranks get the
    same result, so a rank whose element is right clears what has brought it.
    """
    trail = _Trail(ranks, is_in_place=is_in_place)

    def hops(member: int, element: int) -> set[Hop]:
        return trail.hops(member, element * width, (element + 1) * width)

    wrong = [member for member, first in enumerate(firsts) if first >= 0]
    if not is_shared:
        return sorted(_common(lambda member: hops(member, firsts[member]), wrong))
    lead = min(firsts[member] for member in wrong)
    suspected = _common(lambda member: hops(member, lead), [member for member in wrong if firsts[member] == lead])
    for member, first in enumerate(firsts):
        if first != lead and suspected:
            suspected -= hops(member, lead)
    return sorted(suspected)


def _common(hops: Callable[[int], set[Hop]], members: Sequence[int]) -> set[Hop]:
    common = hops(members[0])
    for member in members[1:]:
        common &= hops(member)
    return common

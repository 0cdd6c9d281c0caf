"""A rank that lies: one byte that a step of a planned call has written is flipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["StepFlip", "flipped_in_step"]


class StepFlip:
    """A byte that is flipped in one step of a planned call; not done where the rank's steps write nothing."""

    def __init__(self, choice: int, mask: int) -> None:
        self.choice, self.mask = choice, mask
        self.is_done = False


@contextmanager
def flipped_in_step(planned: Any, choice: int, *, mask: int = 0x80, from_step: int = 0) -> Iterator[StepFlip]:
    """Flip bits of one byte of what a step of each call here has written: what has arrived, or was copied, summed or decoded.

    ``planned``: the group's (``group._planned``), on the rank that lies. ``choice``, any number from 0, says which byte, among
    all that the steps from ``from_step`` on write; ``mask``: the bits.
    """
    flip, drive = StepFlip(choice, mask), planned.drive

    def lying(plan: Any, call: Any, *args: Any) -> None:
        drive(plan, _FlippingCall(call, flip, from_step), *args)

    planned.drive = lying
    try:
        yield flip
    finally:
        del planned.drive


class _FlippingCall:
    """A call in steps (see transport.Call) that flips a byte when the step that writes it has ended."""

    def __init__(self, inner: Any, flip: StepFlip, from_step: int) -> None:
        self._inner, self._flip = inner, flip
        self._from_step = from_step

    @property
    def steps(self) -> Any:
        return self._inner.steps

    def require(self, earlier: int, index: int) -> None:
        self._inner.require(earlier, index)
        self._strike(earlier, is_arrived=True)

    def post(self, index: int) -> None:
        self._inner.post(index)
        self._strike(index, is_arrived=False)

    def finish(self) -> None:
        self._inner.finish()
        for index in range(len(self._inner.steps)):
            self._strike(index, is_arrived=True)

    def _strike(self, step: int, *, is_arrived: bool) -> None:
        """Flip the byte, if a step that has ended wrote it; what arrives is there when somebody has waited for it."""
        if self._flip.is_done:
            return
        written = [
            (index, is_message, region)
            for index, moves in enumerate(self._inner.steps)
            for is_message, region in _writes(moves)
            if index >= self._from_step and region.size
        ]
        if not written:
            return
        index, is_message, region, place = _place(written, self._flip.choice)
        if index == step and is_arrived == is_message:
            self._inner._buffers[region.buffer].bytes[region.start + place] ^= self._flip.mask
            self._flip.is_done = True


def _place(written: Sequence[tuple[int, bool, Any]], choice: int) -> tuple[int, bool, Any, int]:
    """The move that writes the byte of this number, and its place in the region."""
    place = choice % sum(region.size for *_, region in written)
    for each in written:
        if place < each[2].size:
            break
        place -= each[2].size
    return *each, place


def _writes(moves: Any) -> Iterator[tuple[bool, Any]]:
    """The regions that a step writes, each with whether a message brings it."""
    yield from ((True, message.region) for message in moves.receives)
    yield from ((False, copy.target) for copy in moves.copies)
    totals = moves.reductions
    for nth, total in enumerate(totals):
        if not any(
            total.target in later.sources for later in totals[nth + 1 :]
        ):  # else nobody reads it when the step has ended
            yield False, total.target
    yield from ((False, encode.target) for encode in moves.encodes)
    yield from ((False, decode.target) for decode in moves.decodes)

"""Moves of one rank in one step: messages, copies, sums, encoding and decoding of regions of its buffers. Pure, no torch.

Cuts are at multiples of ``ALIGN`` bytes, so sizes that do not divide just give parts that differ a little (some may be
empty); a byte is a byte, so every dtype passes. Which regions those are says the leg of the step, for a place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "ALIGN",
    "MAX_TAGS",
    "Buffer",
    "Copy",
    "Decode",
    "Encode",
    "Message",
    "Moves",
    "Reduction",
    "Region",
    "cut",
    "filled",
]

ALIGN = 64
MAX_TAGS = 1 << 14
"""Message tags of one call. A transport keeps the calls in flight apart above them."""


class Buffer(str, Enum):
    INPUT = "input"
    OUTPUT = "output"
    STAGING = "staging"
    TRANSIT = "transit"  # what is passed on, of a size that is known only during the call
    ENCODED = "encoded"  # in a wire format, to be sent
    ARRIVED = "arrived"  # in a wire format, received


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
    """The moves of one rank in one step: copies, then reductions, then encoding, then decoding.

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


def filled(sends: Iterable[Message] = (), receives: Iterable[Message] = (), copies: Iterable[Copy] = ()) -> Moves:
    """Moves without those of no bytes: both ends know that a region is empty, so neither posts it."""
    return Moves(
        tuple([each for each in sends if each.region.start < each.region.stop]),
        tuple([each for each in receives if each.region.start < each.region.stop]),
        tuple([each for each in copies if each.source.start < each.source.stop]),
    )

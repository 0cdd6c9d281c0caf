"""Frames: what the failure detectors of two ranks send each other over a connection, as bytes.

A frame is four bytes with its length, and then a greeting or a record
(:mod:`commlayer.failures.failure_records`) in msgpack.
"""

from __future__ import annotations

import struct

import msgspec

from commlayer.failures.failure_records import Absent, Asked, Gone, Left, Report
from commlayer.peer_words import read_words

__all__ = ["LENGTH", "MAX_FRAME_BYTES", "Card", "Frame", "Hello", "Welcome", "framed", "frames", "read_frame"]

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 << 10


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first frame of a rank that dials. ``proof``: the secret of the rank that it dials;
    ``secret``: its own."""

    rank: int
    proof: bytes
    secret: bytes
    port: int


class Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer. ``proof``: the secret of the rank that dialled."""

    proof: bytes


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank listens; it lies in the job's store, and is no frame. ``trouble``: why the rank
    cannot listen, and leaves."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    trouble: str = ""


Frame = Gone | Left | Report | Asked | Absent | Hello | Welcome


def framed(frame: Frame) -> bytes:
    """The bytes of ``frame``."""
    content = msgspec.msgpack.encode(frame)
    return LENGTH.pack(len(content)) + content


def read_frame(content: bytes) -> Frame:
    """The frame in ``content``, without its length. Raises DisagreementError for what is none."""
    frame: Frame = read_words(content, Frame, "a visitor", MAX_FRAME_BYTES)
    return frame


def frames(inbox: bytearray) -> list[Frame]:
    """The complete frames of ``inbox``, taken out of it. Raises ValueError, DisagreementError for
    what is none."""
    complete = []
    while len(inbox) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(inbox)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        end = LENGTH.size + length
        if len(inbox) < end:
            break
        complete.append(read_frame(bytes(inbox[LENGTH.size : end])))
        del inbox[:end]
    return complete

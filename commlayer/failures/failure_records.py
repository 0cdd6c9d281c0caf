"""The records that ranks pass on to each other, who is gone, who has left, who waits for whom, who
asks, and the frames in which they travel.

A frame is what the failure detectors of two ranks send each other over a connection: four bytes with
its length, and then a greeting or a record in msgpack.
"""

from __future__ import annotations

import struct

import msgspec

from commlayer.peer_words import read_words

__all__ = [
    "LENGTH",
    "MAX_FRAME_BYTES",
    "PROCESS_ENDED",
    "Absent",
    "Asked",
    "Card",
    "Ended",
    "Frame",
    "Gone",
    "Hello",
    "Left",
    "Record",
    "Report",
    "Welcome",
    "framed",
    "frames",
    "read_frame",
    "told",
]

PROCESS_ENDED = "its process has ended"
"""The words for a rank that ended without a word."""
_MAX_TEXT = 4000
LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 << 10


class Gone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank's process has ended without a word to ``seen_by``, the rank that noticed.
    ``is_unheard``: which never had a connection with it, so that others may know more."""

    rank: int
    seen_by: int
    is_unheard: bool = False

    @property
    def what(self) -> str:
        """The words for messages: what became of it."""
        return f"died: {PROCESS_ENDED}"


class Left(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank has left the job and said so. ``is_failure``: by an exception, so that nobody should
    wait for it; ``is_consequence``: of another rank's failure, so that it is not to blame."""

    rank: int
    why: str
    is_failure: bool
    is_consequence: bool = False

    @property
    def what(self) -> str:
        """The words for messages: what became of it."""
        return self.why if self.is_failure else f"has left the job ({self.why})"


class Report(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A wait of a rank broke, in the group ``key``: it waited for ``peers``, or for all others of
    the group (``is_all``).

    Neither: it left on its own account, or (``is_consequence``) because another rank of the job
    failed. All others are not listed: of a large group every rank would send every rank a list.
    """

    key: str
    rank: int
    peers: tuple[int, ...]
    what: str
    is_all: bool = False
    is_consequence: bool = False

    @property
    def is_leaving(self) -> bool:
        """Whether the rank left on its own account."""
        return not self.peers and not self.is_all


class Asked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A rank asks all others what they called and what they wait for
    (:mod:`commlayer.diagnosis.inquiry`). ``round``: a number of its own for each time that ranks
    ask. ``is_timeout``: because a call took too long."""

    round: int
    rank: int
    is_timeout: bool


class Absent(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ranks had not come to the job ``within_s`` seconds after ``seen_by`` came, which waits no
    longer."""

    ranks: tuple[int, ...]
    within_s: float
    seen_by: int

    @property
    def what(self) -> str:
        """The words for messages: what became of them."""
        return f"did not come within {self.within_s:g} s"


Ended = Gone | Left | Absent
"""Tells of ranks that take no further part in the job."""
Record = Ended | Report | Asked


def told(text: str) -> str:
    """``text`` as it can be told: not too long, and without halves of characters, as in names of
    files."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode()


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

"""The gate of all words of other ranks, from messages, sockets and the job's store: data of a bounded size, and never more.

Whatever cannot be read is a DisagreementError that names who has said it. What is read may be printed by the gate of text only
(:mod:`commlayer.profiles.printable`).
"""

from __future__ import annotations

import functools
import zlib
from array import array
from typing import Any

import msgspec

from commlayer.profiles.errors import DisagreementError
from commlayer.profiles.printable import printable, shortened
from commlayer.version import __version__

__all__ = ["LIMIT_BYTES", "inflated", "read_number", "read_text", "read_times", "read_words", "refusal"]

LIMIT_BYTES = 1 << 20
"""The longest message. What a peer announces beyond it is refused before memory is taken for it: all ranks' words arrive
padded to the longest, so one rank's claim costs every rank that many bytes times the number of ranks."""

_SHOWN = 40
"""Characters of a peer's words that an error message repeats."""
_MOST_TEXT = 2000
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors that msgspec raises: not the type's bytes; text that is not UTF-8; nested too deep."""


def read_words(
    data: bytes, type_: Any, who: str, most_bytes: int = LIMIT_BYTES, version: str | None = None, name: str = ""
) -> Any:
    """Read the ``type_`` in ``data``, msgpack that ``who`` ("rank 3") has sent; ``version``: of its commlayer, if it is known;
    ``name``: of the message, where that is not the type's.

    Raises DisagreementError for anything else: it names ``who`` and says why.
    """
    name = name or getattr(type_, "__name__", "message").lstrip("_")
    if len(data) > most_bytes:
        raise refusal(who, f"expected a {name} of at most {most_bytes} bytes, got {len(data)}", version)
    try:
        return _decoder(type_).decode(data)
    except _UNREADABLE as error:
        raise refusal(who, f"expected a {name} of commlayer, got {len(data)} bytes ({error})", version) from error


def inflated(data: bytes, who: str, most_bytes: int = LIMIT_BYTES) -> bytes:
    """Unpack what ``who`` has packed with zlib, ``most_bytes`` at most. Raises DisagreementError."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, most_bytes + 1)
    except zlib.error as error:
        raise refusal(who, f"expected packed words, got {len(data)} bytes ({error})") from error
    if len(text) > most_bytes or not unpacker.eof:
        got = f"more than {most_bytes}" if len(text) > most_bytes else "a part of them"
        raise refusal(who, f"expected packed words of at most {most_bytes} bytes, got {got}")
    return text


def read_text(data: bytes) -> str:
    """Read a text for people: UTF-8, whatever else is in it replaced, in one line, and of a very long one both ends."""
    return printable(shortened(data[:LIMIT_BYTES].decode(errors="replace"), _MOST_TEXT), keep="")


def read_number(data: bytes, who: str) -> int:
    """Read a whole number in decimal digits. Raises DisagreementError."""
    if len(data) > _SHOWN or not data.isdigit():
        raise refusal(who, f"expected a number, got {data[:_SHOWN]!r}")
    return int(data)


def read_times(data: bytes, who: str) -> array[float]:
    """Read numbers of 64 bits, as ``array("d").tobytes()`` writes them. Raises DisagreementError."""
    if len(data) > LIMIT_BYTES or len(data) % 8:
        raise refusal(who, f"expected times of 8 bytes each, {LIMIT_BYTES} at most, got {len(data)} bytes")
    return array("d", data)


def refusal(who: str, why: str, version: str | None = None) -> DisagreementError:
    """Make the error for words of ``who`` ("rank 3") that cannot be read, and ``why``."""
    if version is not None and version != __version__:
        versions = f"it runs commlayer {version[:_SHOWN]!r}, this rank {__version__!r}"
    else:
        versions = "versions may differ"
    return DisagreementError(
        f"what {who} says cannot be read: {why}; {versions}: start the same commlayer on all ranks. If they are the same, "
        f"look whether something else than a rank of this job has come in as {who}"
    )


@functools.cache
def _decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_, strict=True)

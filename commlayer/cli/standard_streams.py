"""Standard streams that every command can print on: of any encoding, and also where the shell has
closed one."""

from __future__ import annotations

import contextlib
import os
import sys
from _codecs import register_error  # of codecs; a program in benchmarks/ has that name too, for type checkers
from typing import TextIO

__all__ = ["give_up_stdout", "make_usable"]

_SPELLINGS = dict(
    zip("µ×−–·²≈─═█▓░▸►◀◄◆é", "ux--*2~-=##.>><<*e", strict=True),
    **{"≥": ">=", "≤": "<=", "→": "->", "±": "+-", "…": "...", "✓": "ok", "✗": "bad", "∞": "inf", "Σ": "sum"},
)
"""The characters that we print beyond ASCII, for streams that have none of them."""
_ERRORS = "commlayer-spelt"


def make_usable() -> None:
    """Give this process a stdin, a stdout and a stderr, of which the last two take any text.

    A descriptor that the shell has closed (``>&-``) is opened again in a way that writing to it
    fails, as it would have: else the next file that is opened would get its number, and what a
    program prints would land in there. Where stderr is closed, its text is lost.
    """
    for descriptor, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if not _is_open(descriptor):
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = _to(os.open(os.devnull, os.O_RDONLY))
    if sys.stderr is None:
        sys.stderr = _to(os.devnull)
    register_error(_ERRORS, _spelt)
    for stream in (sys.stdout, sys.stderr):
        # Somebody's own stream may have no encoding, or be closed.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors=_ERRORS)  # type: ignore[union-attr]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _to(file: str | int) -> TextIO:
    return open(file, "w", encoding="utf-8")


def give_up_stdout() -> None:
    """Print nowhere from now on: what stdout did not take would fail once more when the program
    ends, and change its status."""
    sys.stdout = _to(os.devnull)


def _spelt(error: UnicodeError) -> tuple[str, int]:
    """Our own characters in ASCII, and all others as Python spells them: ``\\xe4``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(
        _SPELLINGS.get(char) or char.encode("ascii", "backslashreplace").decode() for char in text
    ), error.end

"""The gate of all text that a job prints: text of others (files, the environment, peers) is shown, and never obeyed.

What a running job says goes through :func:`say`, :func:`say_table` and :func:`warn`; commands print through
:mod:`commlayer.cli.tables`, which stands on :func:`printable` too. ``tests/test_gate.py`` finds code that prints otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Sequence

__all__ = ["printable", "say", "say_table", "shortened", "warn"]

_MOST_SAID = 1 << 16
"""The most characters that are printed at once: a diagnosis of thousands of ranks has fewer."""
_LOG_WIDTH = 140
"""The width of a table in a log, where nobody can widen it."""


def printable(text: str, keep: str = "\n\t") -> str:
    """Return ``text`` with whatever a terminal would obey, or would not show, spelt out: an escape is printed as ``\\x1b``.

    That is control characters except those in ``keep``, marks that turn the direction of text, separators of lines, and halves
    of surrogate pairs, which no terminal can be sent.
    """
    if text.isprintable():
        return text
    import unicodedata  # lazy: nearly all text is printable, and offline commands start without it

    spelt = []
    for char in text:
        category, code = unicodedata.category(char), ord(char)
        if char in keep or not (category[0] == "C" or category in ("Zl", "Zp")):
            spelt.append(char)
        elif code < 0x100:
            spelt.append(f"\\x{code:02x}")
        else:
            spelt.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return "".join(spelt)


def shortened(text: str, most: int = 200) -> str:
    """Shorten ``text`` of more than ``most`` characters to its two ends, and say how long it is."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-most // 4 :]} ({len(text)} characters)"


def say(text: str, *, keep: str = "") -> None:
    """Print ``commlayer: text`` on stderr in one piece, as ranks share a terminal: a line, or several with ``keep="\\n"``.

    Raises nothing: a job goes on where its stderr is closed, full, or there is none.
    """
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        said = shortened(printable(f"commlayer: {text}", keep), _MOST_SAID)
        stream.write(said.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1, source: object = None) -> None:
    """Warn as ``warnings.warn`` does."""
    warnings.warn(shortened(printable(text), _MOST_SAID), category, stacklevel + 1, source)


def say_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], lines: Iterable[str] = ()) -> None:
    """Print a table on stderr, and ``lines`` below it. A column that begins with ">" is right-aligned.

    Raises nothing, as :func:`say`.
    """
    import os

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=printable(title, keep=""), title_justify="left")
    for column in columns:
        table.add_column(printable(column.lstrip(">"), keep=""), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(printable(cell, keep="") for cell in row))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        width = None if sys.stderr.isatty() or "COLUMNS" in os.environ else _LOG_WIDTH
        console = Console(stderr=True, width=width, highlight=False, emoji=False, markup=False)
        console.print(table)
        for line in lines:
            console.print(printable(line, keep=""))

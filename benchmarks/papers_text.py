"""Tables and prose of the page about the papers, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["percent", "prose", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def prose(text: str) -> str:
    """Paragraphs and items, laid out anew; items are paragraphs here, and follow each other without a blank line there."""
    found = []
    for block in map(str.strip, text.split("\n\n")):
        indent = "  " if block.startswith("- ") else ""
        whole = " ".join(block.split()) if not block.startswith("#") else block
        laid = textwrap.fill(whole, 128, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        found.append(laid)
    return "\n\n".join(found).replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1)


def percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{value:+.1%}" if signed else f"{value:.1%}"

"""Text of others (files, the environment, other hosts), made fit to be printed on a terminal."""

from __future__ import annotations

__all__ = ["printable", "shortened"]


def printable(text: str, keep: str = "\n\t") -> str:
    """Return ``text`` with whatever a terminal would obey, or would not show, spelt out: an escape is printed as ``\\x1b``.

    That is control characters except those in ``keep``, marks that turn the direction of text, separators of lines, and halves
    of surrogate pairs, which no terminal can be sent.
    """
    if text.isprintable():
        return text
    return "".join(char if char in keep or not _is_hidden(char) else _spelt(char) for char in text)


def _is_hidden(char: str) -> bool:
    import unicodedata  # lazy: nearly all text is printable, and offline commands start without it

    category = unicodedata.category(char)
    return category[0] == "C" or category in ("Zl", "Zp")


def _spelt(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, most: int = 200) -> str:
    """Shorten ``text`` of more than ``most`` characters to its two ends, and say how long it is."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-most // 4 :]} ({len(text)} characters)"

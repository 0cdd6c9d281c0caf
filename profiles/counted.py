"""Nouns with their numbers and names as people write them: "1 rank", "2 ranks", "rank 3", "ranks 3, 4 and 2 more"."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["counted", "listed"]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write ``number`` with ``noun``, or with its ``plural`` (an s behind it unless given) where it is not one."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def listed(noun: str, names: Iterable[object], most: int | None = None) -> str:
    """Write which of the things called ``noun`` are meant, and of more than ``most`` how many more there are."""
    words = [str(name) for name in names]
    shown = words[:most]
    more = f" and {len(words) - len(shown)} more" if len(words) > len(shown) else ""
    return f"{noun}{'s' * (len(words) != 1)} {', '.join(shown)}{more}"

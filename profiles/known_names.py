"""Names that are known, or else paths: which one a word is, and what may have been meant by an unknown name."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["closest", "closest_or_all", "is_path"]

_MOST = 3


def is_path(name_or_path: str) -> bool:
    """Tell whether a word that is no known name is a path: it has a "/", ends with ".json", or is one of something."""
    return "/" in name_or_path or name_or_path.endswith(".json") or os.path.exists(name_or_path)


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: what may have been meant; "" where nothing is close."""
    import difflib  # here: only errors need it

    names, name = list(known), name.lower()
    # What begins so comes first: h100 is h100-eos, though h800 looks more like it.
    begun = [each for each in names if name and each.startswith(name)]
    close = (begun or difflib.get_close_matches(name, names, n=_MOST, cutoff=0.5))[:_MOST]
    if not close:
        return ""
    *others, last = close
    return f". Did you mean {', '.join(others)}{' or ' * bool(others)}{last}?"


def closest_or_all(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: what may have been meant; all names where nothing is close."""
    names = list(known)
    return closest(name, names) or f". Known are {', '.join(names)}"

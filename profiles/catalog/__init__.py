"""The shipped profiles, one JSON file each. ``build.py`` beside them says where each number comes from."""

from __future__ import annotations

import difflib
import os
from functools import cache

from commlayer.profiles.errors import ProfileNotFoundError
from commlayer.profiles.printable import shortened
from commlayer.profiles.profile import Profile, parse_profile, read_profile

__all__ = ["load", "load_profile", "names"]


def names() -> list[str]:
    """The names of the shipped profiles, sorted."""
    from importlib.resources import files  # lazy: `commlayer --help` needs no profile

    return sorted(entry.name[: -len(".json")] for entry in files(__name__).iterdir() if entry.name.endswith(".json"))


@cache
def load(name: str) -> Profile:
    """The shipped profile ``name``.

    Raises:
        ProfileNotFoundError: no such name; the message has the closest ones.
        ProfileError: the shipped file is damaged.
    """
    from importlib.resources import files

    if name not in (known := names()):
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ProfileNotFoundError(
            f"expected the name of a shipped profile or the path of a profile file, got {shortened(name)!r}. "
            f"{hint}`commlayer profiles list` shows all"
        )
    return parse_profile((files(__name__) / f"{name}.json").read_bytes(), f"catalog/{name}.json")


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A shipped profile by its name, or any profile by its path.

    What is not a shipped name is a path when it contains "/", ends with ".json" or exists.

    Raises:
        ProfileNotFoundError: neither a shipped name nor a file.
        ProfileError: a file that is not a sound profile.
    """
    wanted = os.fspath(name_or_path)
    if wanted not in names() and ("/" in wanted or wanted.endswith(".json") or os.path.exists(wanted)):
        return read_profile(wanted)
    return load(wanted)

"""The shipped profiles, one JSON file each. ``build.py`` beside them says where each number comes from."""

from __future__ import annotations

import os
from functools import cache

from commlayer.profiles.errors import ProfileNotFoundError
from commlayer.profiles.known_names import closest, is_path
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
        raise ProfileNotFoundError(
            f"expected the name of a shipped profile or the path of a profile file, got {shortened(name)!r}"
            f"{closest(name, known) or '.'} `commlayer profiles list` shows all"
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
    if wanted not in names() and is_path(wanted):
        return read_profile(wanted)
    return load(wanted)

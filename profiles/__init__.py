"""Profiles of clusters: topology, curves, the file of what links can do, and the sweep that measures it.

The names below are loaded when first used: importing this package loads neither numpy nor scipy nor torch, and next to
nothing else. ``commlayer.profiles.catalog`` holds the shipped profiles, ``commlayer.profiles.measure`` the sweep.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.profiles.catalog import load_profile
    from commlayer.profiles.compare import Difference, diff
    from commlayer.profiles.curve import Curve
    from commlayer.profiles.links import COLLECTIVES, Peaks, Resource, bus_factor
    from commlayer.profiles.profile import Interference, Profile, check_shape, parse_profile, read_profile
    from commlayer.profiles.topology import Topology

__all__ = [
    "COLLECTIVES",
    "Curve",
    "Difference",
    "Interference",
    "Peaks",
    "Profile",
    "Resource",
    "Topology",
    "bus_factor",
    "check_shape",
    "diff",
    "load_profile",
    "parse_profile",
    "read_profile",
]

_HOMES = {
    "COLLECTIVES": "links",
    "Curve": "curve",
    "Difference": "compare",
    "Interference": "profile",
    "Peaks": "links",
    "Profile": "profile",
    "Resource": "links",
    "Topology": "topology",
    "bus_factor": "links",
    "check_shape": "profile",
    "diff": "compare",
    "load_profile": "catalog",
    "parse_profile": "profile",
    "read_profile": "profile",
}
_MODULES = ("catalog", "measure")


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value  # the next use finds it without coming here
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})

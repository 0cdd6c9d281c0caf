"""Profiles of clusters: topology, curves, the file of what links can do, and the sweep that measures it.

The names below are loaded when first used: importing this package loads neither numpy nor scipy nor torch, and next to
nothing else. ``commlayer.profiles.catalog`` holds the shipped profiles, ``commlayer.profiles.sweep`` the sweep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, modules=("catalog", "sweep"))

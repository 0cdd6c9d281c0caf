"""The mode of a cluster, namespaces or loopback, and the checks of its arguments."""

from __future__ import annotations

import math
from typing import Literal, get_args

from commlayer.emulation.protocol import LONGEST_DELAY_US, LinkSpec
from commlayer.emulation.rates import parse_rate
from commlayer.emulation.rights import rights
from commlayer.profiles.errors import RightsError, UsageError
from commlayer.profiles.printable import warn
from commlayer.settings import Settings

__all__ = ["EmulationWarning", "Mode", "checked_count", "decide_mode", "link_spec"]

Mode = Literal["auto", "netns", "loopback"]
ActualMode = Literal["netns", "loopback"]

_warned = False


class EmulationWarning(UserWarning):
    """The warning that ranks run without an emulated network."""


def checked_count(name: str, value: int) -> int:
    """Return `value` if it is a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return value


def link_spec(inter: str | None, intra: str | None, delay_us: float, scale: float = 1.0) -> LinkSpec:
    """Make the properties of the wires that were asked for."""
    if not isinstance(delay_us, int | float) or not math.isfinite(delay_us) or not 0 <= delay_us <= LONGEST_DELAY_US:
        raise UsageError(f"delay_us: expected 0 to {LONGEST_DELAY_US:.0f} microseconds one way, got {delay_us!r}")
    return LinkSpec(
        None if inter is None else parse_rate(inter, "inter", scale),
        None if intra is None else parse_rate(intra, "intra", scale),
        float(delay_us),
        "none",
        scale,
    )


def decide_mode(mode: str, spec: LinkSpec) -> ActualMode:
    """Decide between namespaces and loopback.

    Raises:
        UsageError: no such mode.
        SettingsError: COMMLAYER_EMULATION names none, or another variable of ours is wrong.
        RightsError: namespaces were demanded and cannot be had, or a delay was asked for that this
            machine cannot make (a delay is never dropped silently).
    """
    if mode not in get_args(Mode):
        raise UsageError(f"mode: expected one of {', '.join(get_args(Mode))}, got {mode!r}")
    wanted = Settings.from_environment().emulation if mode == "auto" else mode
    asked = spec.inter is not None or spec.intra is not None or spec.delay_us > 0
    if wanted == "loopback":
        if asked:
            _warn_once("loopback was asked for")
        return "loopback"
    granted = rights()
    is_shaped = spec.inter is not None or spec.intra is not None
    # Why such a cluster cannot be built here; empty if it can.
    missing = "" if granted.netns and (granted.shaping or not is_shaped) else granted.reason
    if missing and wanted == "netns":
        raise RightsError(f"mode='netns': {missing}; or mode='loopback' runs the same ranks without a network")
    if missing:
        _warn_once(missing)
        return "loopback"
    if spec.delay_us and granted.delay == "none":
        raise RightsError(f"delay_us={spec.delay_us:g}: {granted.reason}; delay_us=0 works here")
    return "netns"


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        consequence = "ranks run on loopback, unshaped; times are not comparable with a cluster's"
        warn(f"{reason}: {consequence}", EmulationWarning, stacklevel=4)

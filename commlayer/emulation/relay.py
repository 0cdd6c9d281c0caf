"""Delay of the emulated wire without the kernel's netem."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.profiles.errors import RightsError

__all__ = ["start_relay"]


def start_relay(ports: Sequence[str], delay_us: float) -> int:
    """Placeholder until the relay is written."""
    raise RightsError("delay needs the kernel's sch_netem")

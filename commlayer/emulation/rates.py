"""Rates of emulated links, written as tc writes them."""

from __future__ import annotations

import re

from commlayer.profiles.errors import UsageError

__all__ = ["MAX_BYTES_PER_S", "format_rate", "parse_rate"]

_UNITS_BITS = {
    "bit": 1,
    "kbit": 10**3,
    "mbit": 10**6,
    "gbit": 10**9,
    "kibit": 2**10,
    "mibit": 2**20,
    "gibit": 2**30,
    "byte": 8,
    "kbyte": 8 * 10**3,
    "mbyte": 8 * 10**6,
    "gbyte": 8 * 10**9,
}
_EXAMPLES = "for example '400mbit', '3.2gbit' or '50mbyte'; left out, the link is unshaped"
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", re.IGNORECASE)

MIN_BYTES_PER_S = 8_000
"""The least rate, 64 kbit/s: below it one packet of 64 KiB takes longer than the queue's patience."""

MAX_BYTES_PER_S = 4_000_000_000
"""The highest rate. The kernel's 32-bit rate field of the token bucket ends at 4.29 GB/s; a veth pair does not carry
more anyway.
"""


def parse_rate(rate: str, name: str = "rate", scale: float = 1.0) -> int:
    """Read a rate as bytes per second, such as ``400mbit``, ``3.2gbit`` or ``50mbyte`` (k, m, g are powers of 1000).

    ``scale``: how many times slower than that it will be run, for what the token bucket can hold.
    tc's ``mbps`` family is refused on purpose: tc reads it as mega*bytes*, most people as megabits.

    Raises:
        UsageError: not a rate, or one that the token bucket cannot hold; names ``name`` and gives examples.
    """
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None:
        raise UsageError(f"{name}: expected a rate with its unit, got {rate!r}: {_EXAMPLES}")
    number, unit = match[1], match[2].lower()
    if unit.endswith("bps"):
        prefix = unit[:-3]
        raise UsageError(
            f"{name}: {rate!r} is ambiguous, tc reads {unit!r} as bytes per second: "
            f"write '{number}{prefix}bit' or '{number}{prefix}byte'"
        )
    if unit not in _UNITS_BITS:
        raise UsageError(f"{name}: unknown unit {unit!r} in {rate!r}, expected one of {', '.join(_UNITS_BITS)}")
    bytes_per_s = round(float(number) * _UNITS_BITS[unit] / 8)
    if not MIN_BYTES_PER_S <= bytes_per_s / scale <= MAX_BYTES_PER_S:
        slower = "" if scale == 1 else f", {scale:g} times slower,"
        raise UsageError(
            f"{name}: {rate!r}{slower} is outside of what a shaped link can do, "
            f"{format_rate(MIN_BYTES_PER_S)} to {format_rate(MAX_BYTES_PER_S)}: {_EXAMPLES}"
        )
    return bytes_per_s


def format_rate(bytes_per_s: int | None) -> str:
    """Write a rate in tc's shortest spelling: ``50_000_000`` is ``400mbit``; None is ``unshaped``."""
    if bytes_per_s is None:
        return "unshaped"
    bits = bytes_per_s * 8
    for unit, size in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if bits >= size:
            return f"{bits / size:.6g}{unit}"
    return f"{bits}bit"

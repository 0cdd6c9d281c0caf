"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

from commlayer.profiles.errors import UsageError

__all__ = ["EXBIBYTE", "format_binary", "format_bytes", "format_us", "parse_bytes"]

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
# nccl-tests reads -b 64K as 65536: a bare letter is what its users type.
_LETTERS = {"k": 2**10, "m": 2**20, "g": 2**30}
_UNITS = {"": 1, **_DECIMAL, **_BINARY, **_LETTERS}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\+?\d+)?|\.\d+(?:e\+?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
EXBIBYTE = 2**60
"""1 EiB: no size is as large."""
_EXAMPLES = "for example 16MiB, 64KiB, 1.5GB, 256e6 or 16777216"


def parse_bytes(text: str) -> int:
    """Read a size: a number, plain or as 256e6, with an optional unit.

    KB, MB, GB are powers of 1000; KiB, MiB, GiB powers of 1024; so are K, M, G alone, as nccl-tests reads them.

    Raises:
        UsageError: no number, an unknown unit, part of a byte, or 1 EiB and more.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"expected a size in bytes, got {text!r}: {_EXAMPLES}")
    unit = match[2].lower()
    if unit not in _UNITS:
        raise UsageError(f"expected a size with the unit B, KB, MB, GB, KiB, MiB or GiB, got {text!r}: {_EXAMPLES}")
    size = float(match[1]) * _UNITS[unit]
    if not size < EXBIBYTE:
        raise UsageError(f"expected a size below 1 EiB, got {text!r}: {_EXAMPLES}")
    if size != int(size):
        raise UsageError(f"expected whole bytes, got {text!r}, which is {size:.6g} bytes")
    # Digits alone are read as an integer: a float would lose the last ones above 2**53.
    return int(match[1]) * _UNITS[unit] if match[1].isdecimal() else int(size)


def format_binary(nbytes: float) -> str:
    """Write ``nbytes`` in 4 digits with a unit that is a power of 1024, for sizes that are compared: "16 MiB", "1.144 MiB"."""
    name, size = next(((name, size) for name, size in reversed(_BINARY.items()) if nbytes >= size), ("b", 1))
    return f"{nbytes / size:.4g} {_spelling(name)}"


def format_bytes(nbytes: float) -> str:
    """Write ``nbytes`` shortly: "16 MiB" and "256 MB" where that is exact, else 4 digits with a decimal unit."""
    for units in (_BINARY, _DECIMAL):
        fitting = [(name, size) for name, size in units.items() if size <= nbytes and name != "b"]
        if fitting:
            name, size = fitting[-1]
            if (nbytes / size * 4).is_integer():
                return f"{nbytes / size:g} {_spelling(name)}"
    for name, size in reversed(_DECIMAL.items()):
        if nbytes >= size and name != "b":
            return f"{nbytes / size:.4g} {_spelling(name)}"
    return f"{nbytes:g} B"


def _spelling(unit: str) -> str:
    return f"{unit[0].upper()}iB" if unit.endswith("ib") else unit.upper()


def format_us(time_us: float) -> str:
    """Write a time in µs with 4 digits, in µs, ms or s, whichever reads best."""
    for limit, scale, unit in ((999.95, 1.0, "µs"), (999_950.0, 1e3, "ms")):
        if time_us < limit:
            return f"{time_us / scale:.4g} {unit}"
    return f"{time_us / 1e6:.4g} s"

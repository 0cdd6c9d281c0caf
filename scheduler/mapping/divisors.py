"""The divisors of a number, and the sizes nearest to one that is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["divisors", "nearest"]


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def nearest(value: int, valid: Sequence[int]) -> list[int]:
    """Return the sizes of ``valid``, which ascend, that are next to ``value``, on both sides; fewer where there are none."""
    below, above = [size for size in valid if size < value], [size for size in valid if size > value]
    return below[-1:] + above[:1]

"""Where two ways of doing something cross: by bisection, and never silent about finding nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from commlayer.profiles.errors import UsageError

__all__ = ["Crossover", "crossover", "crossover_of_values"]

_SAMPLES = 9


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Where two alternatives change places between ``low`` and ``high``. ``str`` says it in words.

    Attributes:
        first, second: what they are called.
        crossings: where the other becomes the faster one, ascending; empty where one is never the slower one.
        at_low, at_high: the faster one at either end; empty where both are equal there.
        is_exact: crossings are points; else they are the first values of a list at which the order has changed.
    """

    first: str
    second: str
    low: float
    high: float
    crossings: tuple[float, ...]
    at_low: str
    at_high: str
    is_exact: bool = True

    @property
    def at(self) -> float | None:
        """The first crossing."""
        return self.crossings[0] if self.crossings else None

    def __str__(self) -> str:
        between = f"between {self.low:g} and {self.high:g}"
        if not self.crossings:
            if not self.at_low and not self.at_high:
                return f"no crossing {between}: {self.first} and {self.second} are equally fast"
            if not self.at_low or not self.at_high:
                equal = self.high if self.at_low else self.low
                return f"no crossing {between}: {self.at_low or self.at_high} is never slower, and as fast at {equal:g}"
            return f"no crossing {between}: {self.at_low} is always faster"
        where = ", ".join(f"{place:.4g}" for place in self.crossings)
        other = self.second if self.at_low == self.first else self.first
        if len(self.crossings) == 1:
            return f"{self.at_low} is faster below {where}, {other} from there on ({between})"
        return f"{self.at_low} is faster at {self.low:g}; they change places at {where} ({between})"


def crossover(
    difference: Callable[[float], float],
    low: float,
    high: float,
    tolerance: float,
    *,
    first: str = "the first",
    second: str = "the second",
    samples: int = _SAMPLES,
) -> Crossover:
    """Every change of places that ``samples`` points, evenly spread over ``low`` … ``high``, show; each by bisection.

    Args:
        difference: time of the first less time of the second; negative: the first is faster. It may jump.
        tolerance: how wide, in units of ``low`` and ``high``, the interval of a crossing may remain; its middle is returned.
        samples: at least 2. A pair of crossings between two of them is not seen.

    Raises:
        UsageError: no interval, no tolerance, or a difference that is no number.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"expected low < high, got {low!r} and {high!r}")
    if not tolerance > 0:
        raise UsageError(f"tolerance: expected a positive number, got {tolerance!r}")
    if samples < 2:
        raise UsageError(f"samples: expected at least 2, got {samples!r}")
    places = [low + (high - low) * index / (samples - 1) for index in range(samples - 1)] + [high]
    signs = [_sign(difference, place) for place in places]
    found = []
    for (left, right), (before, _) in zip(_unlike(places, signs), _unlike(signs, signs), strict=True):
        found.append(_bisect(difference, left, right, int(before), tolerance))
    return _crossover(first, second, places, signs, tuple(found), is_exact=True)


def crossover_of_values(
    differences: Sequence[float], values: Sequence[float], *, first: str = "the first", second: str = "the second"
) -> Crossover:
    """Find crossovers where only ``values`` make sense (numbers of GPUs): the values from which the order has changed.

    Raises UsageError for fewer than two values, values that do not ascend, or a difference that is no number.
    """
    if len(values) < 2 or len(values) != len(differences) or any(b <= a for a, b in pairwise(values)):
        raise UsageError(
            f"expected at least two ascending values and a difference for each, got {values!r}, {differences!r}"
        )
    known = dict(zip(values, differences, strict=True))
    signs = [_sign(known.__getitem__, value) for value in values]
    found = tuple(right for _, right in _unlike(values, signs))
    return _crossover(first, second, values, signs, found, is_exact=False)


def _crossover(
    first: str, second: str, places: Sequence[float], signs: Sequence[int], found: tuple[float, ...], *, is_exact: bool
) -> Crossover:
    unequal = [sign for sign in signs if sign]
    names = {-1: first, 1: second, 0: ""}
    return Crossover(
        first=first,
        second=second,
        low=places[0],
        high=places[-1],
        crossings=found,
        at_low=names[unequal[0] if found else signs[0]],
        at_high=names[unequal[-1] if found else signs[-1]],
        is_exact=is_exact,
    )


def _unlike(what: Sequence[float], signs: Sequence[int]) -> list[tuple[float, float]]:
    """Neighbours of ``what`` with opposite signs; what is equal belongs to no side, and is passed over."""
    unequal = [(value, sign) for value, sign in zip(what, signs, strict=True) if sign]
    return [(left, right) for (left, before), (right, after) in pairwise(unequal) if before != after]


def _bisect(difference: Callable[[float], float], left: float, right: float, before: int, tolerance: float) -> float:
    """Between ``left``, with sign ``before``, and ``right``, with the other."""
    while right - left > tolerance:
        middle = (left + right) / 2
        if not left < middle < right:  # no number lies between them
            break
        sign = _sign(difference, middle)
        if sign == 0:
            return middle
        left, right = (middle, right) if sign == before else (left, middle)
    return (left + right) / 2


def _sign(difference: Callable[[float], float], place: float) -> int:
    value = difference(place)
    if math.isnan(value):
        raise UsageError(f"the difference at {place!r} is no number: neither alternative could be estimated there")
    return (value > 0) - (value < 0)

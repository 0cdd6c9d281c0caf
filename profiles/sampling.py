"""Whether a curve rests on enough times: for the error of its medians, and for an error of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from commlayer.profiles.counted import counted
from commlayer.profiles.curve import Curve

__all__ = ["doubts", "least_samples"]

_LEAST_SIZES = 3
"""With fewer no point of a curve can be predicted from the others."""


def least_samples(confidence: float) -> int:
    """How many times a median needs to have an interval of that confidence (from order statistics): 6 for 95 %.

    All n times lie on one side of the true median with probability 2 / 2^n.
    """
    return next(n for n in range(1, 1_000) if 2 / 2**n <= 1 - confidence)


def doubts(curves: Iterable[Curve], confidence: float = 0.95) -> list[str]:
    """Describe what is too little in measured curves, a line for each such curve; none where it is not known how often was
    measured."""
    return [text for curve in curves if curve.samples and (text := "; ".join(_doubts(curve, confidence)))]


def _doubts(curve: Curve, confidence: float) -> Iterator[str]:
    name = f"{curve.collective} on {curve.link}, group size {curve.group_size}: "
    least = least_samples(confidence)
    few = [(size, num) for size, num in zip(curve.bytes, curve.samples, strict=True) if num < least]
    if few:
        sizes = f"{few[0][0]} bytes" if len(few) == 1 else f"{few[0][0]} to {few[-1][0]} bytes"
        yield (
            f"{name}{len(few)} of {counted(len(curve.bytes), 'size')} ({sizes}) measured fewer than {least} times (down to "
            f"{min(num for _, num in few)}), so their medians have no {confidence:.0%} interval and their p99 is the slowest time"
        )
        name = ""
    if len(curve.bytes) < _LEAST_SIZES:
        yield f"{name}fewer than {_LEAST_SIZES} sizes, so it has no hold-out error"

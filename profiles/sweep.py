"""The sweep: how often to repeat a measurement, what to make of the times, and the curve that comes of it.

It takes callables to time and knows nothing of who runs them. Every rank runs this code, and a rank that stops one
repeat earlier than another leaves that one alone in a collective, for ever. Hence the one rule here: decisions rest
only on what ``run()`` returns, which all ranks have agreed on (the maximum over ranks); never on a local clock.

The width of the median's confidence interval decides when to stop. It comes from order statistics (the binomial
distribution): times of collectives are skewed, and a normal interval around the mean would follow the outliers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from commlayer.profiles.counted import counted
from commlayer.profiles.curve import Curve, median
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource

__all__ = [
    "MAX_SLOWDOWN",
    "Point",
    "Repeats",
    "Samples",
    "doubts",
    "interference",
    "least_samples",
    "measure",
    "sizes_between",
    "summarize",
    "sweep",
]

#: What ``interference`` reports for a step that stands still while the other runs: JSON has no infinity.
MAX_SLOWDOWN = 100.0

# Of a normal distribution the standard deviation is 1.4826 times the median absolute deviation.
_OUTLIER_DEVIATIONS = 5 * 1.4826
# When more than half of the times are equal (a coarse clock) that deviation is 0, and anything above would be an
# outlier. This fraction of the median stands in for it.
_LEAST_DEVIATION = 0.01

_MOST_SIZES = 1000
_LEAST_SIZES = 3
"""With fewer no point of a curve can be predicted from the others."""


@dataclass(frozen=True)
class Repeats:
    """The rule by which a measurement has been repeated often enough.

    Attributes:
        warmup: runs whose times are thrown away (fewer when one already takes half of the budget).
        min_repeats, max_repeats: bounds on the runs that count. A median has a 95 % interval from 6 runs on.
        confidence: of the interval around the median.
        half_width: stop when that interval is within this fraction of the median on both sides.
        budget_us: stop when the runs that count add up to more; from 2 runs on when each takes over half of it.

    Raises:
        UsageError: a value out of its range.
    """

    warmup: int = 2
    min_repeats: int = 5
    max_repeats: int = 40
    confidence: float = 0.95
    half_width: float = 0.05
    budget_us: float = 2e6

    def __post_init__(self) -> None:
        rules = {
            "warmup": (self.warmup >= 0, "at least 0"),
            "min_repeats": (self.min_repeats >= 1, "at least 1"),
            "max_repeats": (self.max_repeats >= self.min_repeats, f"at least min_repeats ({self.min_repeats})"),
            "confidence": (0 < self.confidence < 1, "between 0 and 1"),
            "half_width": (self.half_width > 0, "more than 0"),
            "budget_us": (self.budget_us > 0, "more than 0"),
        }
        for name, (sound, expected) in rules.items():
            if not sound:
                raise UsageError(f"Repeats.{name}: expected {expected}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Samples:
    """The times of one measurement, in µs.

    Attributes:
        mean_us, p50_us, p99_us: of the times without the outliers (p99 by nearest rank).
        cv: their standard deviation over their mean.
        num: how many times were taken, outliers included.
        num_outliers: how many lie above median + 5 · 1.4826 · MAD; they are in ``raw`` and in nothing else.
        half_width: half the median's confidence interval, over the median; infinite with too few times to have one.
        raw: all times in the order in which they were taken.
    """

    mean_us: float
    p50_us: float
    p99_us: float
    cv: float
    num: int
    num_outliers: int
    half_width: float
    raw: tuple[float, ...] = field(repr=False)


def measure(run: Callable[[], float], repeats: Repeats) -> Samples:
    """Repeat a measurement until its median is known well enough.

    Args:
        run: runs once and returns the time in µs that all ranks agreed on, more than 0.
        repeats: when to stop.

    Returns:
        The same on every rank.

    Raises:
        UsageError: ``run`` returned something that is not a positive, finite time.
    """
    spent_us = 0.0
    for _ in range(repeats.warmup):
        spent_us += _checked(run())
        if spent_us > repeats.budget_us / 2:
            break
    times: list[float] = []
    while len(times) < repeats.max_repeats:
        # The least time, not the last: one hiccup must not cut a measurement short.
        is_slow = bool(times) and min(times) > repeats.budget_us / 2
        if len(times) >= min(repeats.min_repeats, 2 if is_slow else repeats.min_repeats):
            if sum(times) > repeats.budget_us:
                break
            is_known = _half_width(sorted(times), repeats.confidence) <= repeats.half_width
            if len(times) >= repeats.min_repeats and is_known:
                break
        times.append(_checked(run()))
    return summarize(times, repeats.confidence)


def _checked(time_us: float) -> float:
    if not 0 < time_us < math.inf:
        raise UsageError(f"expected run() to return a positive, finite time in us, got {time_us}")
    return float(time_us)


def summarize(times_us: Sequence[float], confidence: float = 0.95) -> Samples:
    """Summarise agreed times in µs, at least one."""
    if not times_us:
        raise UsageError("expected at least one time, got none")
    ordered = sorted(times_us)
    middle = median(ordered)
    deviation = median([abs(t - middle) for t in ordered]) * _OUTLIER_DEVIATIONS
    usual = [t for t in ordered if t <= middle + (deviation or _LEAST_DEVIATION * middle)]
    mean = sum(usual) / len(usual)
    variance = sum((t - mean) ** 2 for t in usual) / (len(usual) - 1) if len(usual) > 1 else 0.0
    return Samples(
        mean_us=mean,
        p50_us=median(usual),
        p99_us=usual[math.ceil(0.99 * len(usual)) - 1],
        cv=math.sqrt(variance) / mean,
        num=len(ordered),
        num_outliers=len(ordered) - len(usual),
        half_width=_half_width(ordered, confidence),
        raw=tuple(times_us),
    )


def _half_width(ordered: Sequence[float], confidence: float) -> float:
    """Half the confidence interval of the median of sorted times, over the median; outliers included.

    The k-th smallest and k-th largest of n hold the median between them with probability 1 - 2 P(Bin(n, 1/2) < k).
    """
    n = len(ordered)
    outside, k = 0.0, 0
    while k < n // 2 and outside + 2 * math.comb(n, k) / 2**n <= 1 - confidence:
        outside += 2 * math.comb(n, k) / 2**n
        k += 1
    if k == 0:
        return math.inf
    middle = median(ordered)
    return max(ordered[n - k] - middle, middle - ordered[k - 1]) / middle


def least_samples(confidence: float) -> int:
    """How many times a median needs to have an interval of that confidence (from order statistics): 6 for 95 %.

    All n times lie on one side of the true median with probability 2 / 2^n.
    """
    return next(n for n in range(1, 1_000) if 2 / 2**n <= 1 - confidence)


def doubts(curves: Iterable[Curve]) -> list[str]:
    """Describe what is too little in measured curves, a line for each such curve; none where it is not known how often was
    measured."""
    confidence, lines = Repeats.confidence, []
    least = least_samples(confidence)
    for curve in curves:
        if not curve.samples:
            continue
        reasons = []
        few = [(size, num) for size, num in zip(curve.bytes, curve.samples, strict=True) if num < least]
        if few:
            sizes = f"{few[0][0]} bytes" if len(few) == 1 else f"{few[0][0]} to {few[-1][0]} bytes"
            reasons.append(
                f"{len(few)} of {counted(len(curve.bytes), 'size')} ({sizes}) measured fewer than {least} times (down to "
                f"{min(num for _, num in few)}), so their medians have no {confidence:.0%} interval and their p99 is the slowest "
                "time"
            )
        if len(curve.bytes) < _LEAST_SIZES:
            reasons.append(f"fewer than {_LEAST_SIZES} sizes, so it has no hold-out error")
        if reasons:
            name = f"{curve.collective} on {curve.link}, group size {curve.group_size}"
            lines.append(f"{name}: {'; '.join(reasons)}")
    return lines


@dataclass(frozen=True)
class Point:
    """One size of a sweep: what was measured (``nbytes`` is S as nccl-tests defines it) and its times."""

    collective: str
    link: Resource
    group_size: int
    nbytes: int
    samples: Samples


def sweep(
    collective: str,
    link: Resource,
    group_size: int,
    sizes: Sequence[int],
    prepare: Callable[[int], Callable[[], float]],
    repeats: Repeats,
    on_point: Callable[[Point], None] | None = None,
    source: str = "",
    longest_us: float = math.inf,
) -> Curve:
    """Measure one collective over sizes.

    Args:
        collective, link, group_size: what is measured.
        sizes: in bytes, strictly increasing.
        prepare: makes ready for one size (buffers, correctness check) and returns what ``measure`` runs.
        repeats: when a size has been measured often enough.
        on_point: called after each size, for a progress bar or a table.
        source: for ``Curve.source``.
        longest_us: no larger size is measured after one whose median takes longer. A curve has two sizes at least.

    Raises:
        UsageError: sizes that do not increase, or times that are none.
    """
    if not sizes or any(after <= before for before, after in pairwise(sizes)) or sizes[0] < 1:
        raise UsageError(f"expected sizes of at least 1 byte that increase, got {list(sizes)}")
    measured: list[Samples] = []
    for nbytes in sizes:
        samples = measure(prepare(nbytes), repeats)
        measured.append(samples)
        if on_point is not None:
            on_point(Point(collective, link, group_size, nbytes, samples))
        if samples.p50_us > longest_us and len(measured) > 1:
            break
    return Curve.from_samples(
        collective,
        link,
        group_size,
        sizes[: len(measured)],
        [samples.p50_us for samples in measured],
        p99_us=[samples.p99_us for samples in measured],
        samples=[samples.num for samples in measured],
        source=source,
    )


def sizes_between(min_bytes: int, max_bytes: int, factor: float = 2.0) -> tuple[int, ...]:
    """List the sizes of nccl-tests' -b, -e, -f: from ``min_bytes`` on, each size ``factor`` times the one before, up to
    ``max_bytes``.

    Raises:
        UsageError: a range or factor that gives no increasing sizes.
    """
    if not 1 <= min_bytes <= max_bytes or not 1 < factor < math.inf:
        raise UsageError(
            "expected a smallest size of 1 byte or more, a largest one that is no smaller, and a factor above 1, got "
            f"{min_bytes} bytes, {max_bytes} bytes and {factor:g}"
        )
    if (count := math.log(max_bytes / min_bytes) / math.log(factor)) > _MOST_SIZES:
        raise UsageError(
            f"expected a factor that makes at most {_MOST_SIZES} sizes of {min_bytes} to {max_bytes} bytes, got {factor!r}, "
            f"which makes {count:,.0f}"
        )
    sizes, exact = [min_bytes], float(min_bytes)
    while (exact := exact * factor) <= max_bytes:
        if round(exact) > sizes[-1]:
            sizes.append(round(exact))
    return tuple(sizes)


def interference(alone_a_us: float, alone_b_us: float, beside_a_us: float, beside_b_us: float) -> tuple[float, float]:
    """Compute how much two steps slow each other down, from their times alone and side by side.

    Fluid model: both start together; while both are active each runs at 1 / slowdown of its speed, and what is left of
    the longer one runs at full speed. So the first to end was slowed down all the time: s = beside / alone. The other
    did alone - (beside - first) of its work during the first's time: s = first / (alone - (beside - first)).

    Args:
        alone_a_us, alone_b_us: time of each step alone.
        beside_a_us, beside_b_us: from the common start until each step's own end.

    Returns:
        (slowdown of a, slowdown of b), each at least 1 and at most ``MAX_SLOWDOWN`` (a step that stood still).

    Raises:
        UsageError: a time that is not positive and finite.
    """
    for time_us in (alone_a_us, alone_b_us, beside_a_us, beside_b_us):
        if not 0 < time_us < math.inf:
            raise UsageError(f"expected four positive, finite times in us, got {time_us}")
    first_us = min(beside_a_us, beside_b_us)

    def slowdown(alone_us: float, beside_us: float) -> float:
        done_us = alone_us - (beside_us - first_us)  # work done while both were active, in time at full speed
        return MAX_SLOWDOWN if done_us * MAX_SLOWDOWN <= first_us else max(1.0, first_us / done_us)

    return slowdown(alone_a_us, beside_a_us), slowdown(alone_b_us, beside_b_us)

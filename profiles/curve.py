"""One measured curve: bytes → time, for one collective on one link class in a group of one size.

Between two measured sizes the logarithm of time is linear in the logarithm of bytes. That is monotone, passes through
every measured point, and is exact where time is proportional to bytes. Rejected:

- time over log bytes, drawn as straight chords: where time is proportional to bytes such a chord is up to 26 % high
  between sizes a factor 4 apart (6 % for a factor 2), and every chunk that falls between two sizes would be overpriced;
- efficiency over log bytes (what MoNTA plots): time = bytes / efficiency need not be monotone then;
- time over bytes: exact for latency + bandwidth, which log-log overestimates by at most 6 % (factor 4; 1.5 % for a
  factor 2), but as much too low where a library changes its protocol on the way and time grows slower than that line.

Outside the measured sizes there is only a model: latency + bytes / bandwidth, fitted to the nearest points.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import msgspec

from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.profiles.links import COLLECTIVES, Resource, bus_factor

__all__ = ["Curve", "median", "prediction_error"]

# How many points at each end of a curve tell latency and bandwidth. Two would take all noise of the neighbour; with
# many the fit would describe the middle of the curve.
_FIT_POINTS = 3


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """A measured curve: time in µs over bytes.

    Attributes:
        collective: one of ``links.COLLECTIVES``.
        link: the link class on which the group was measured.
        group_size: ranks in the group; 1 for a copy.
        bytes: strictly increasing. S as nccl-tests defines it for the collective: all_to_all the whole send buffer of
            one rank, all_gather the gathered total, copy the bytes copied.
        time_us: positive and non-decreasing; one per size.
        holdout_error: median relative error when each inner point is predicted from the others; None if not known.
        p50_us, p99_us: per size, as measured, where known (p50_us before it was made non-decreasing).
        samples: per size, how many measurements stand behind it, where known.
        source: where the numbers come from.
        basis: ``measured`` on such a group; ``interpolated`` between groups that were measured; ``derived`` from one of them, or
            from beyond them.

    Raises:
        ProfileError: arrays that break one of these rules; the message names the field and the index.
    """

    collective: str
    link: Resource
    group_size: int
    bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    holdout_error: float | None = None
    p50_us: tuple[float, ...] = ()
    p99_us: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    source: str = ""
    basis: Literal["measured", "interpolated", "derived"] = "measured"

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise ProfileError(f"collective: expected one of {', '.join(COLLECTIVES)}, got {self.collective!r}")
        if self.link not in ("inter", "intra", "device"):
            raise ProfileError(f"link: expected the link class inter, intra or device, got {self.link}")
        if self.group_size < 1 or (self.collective == "copy" and self.group_size != 1):
            raise ProfileError(f"group_size: expected at least 1, and 1 for a copy, got {self.group_size}")
        sizes = _checked_sizes(self.bytes)
        times = _checked_times("time_us", self.time_us, len(sizes))
        for i, (before, after) in enumerate(pairwise(times)):
            if after < before:
                raise ProfileError(f"time_us[{i + 1}]: expected times that do not fall, got {after} after {before}")
        _check_count("samples", self.samples, len(sizes))
        if self.holdout_error is not None and not 0 <= self.holdout_error < math.inf:
            raise ProfileError(f"holdout_error: expected a relative error of at least 0, got {self.holdout_error}")
        normal = {
            "link": Resource(self.link),
            "bytes": sizes,
            "time_us": times,
            "p50_us": _checked_times("p50_us", self.p50_us, len(sizes)) if self.p50_us else (),
            "p99_us": _checked_times("p99_us", self.p99_us, len(sizes)) if self.p99_us else (),
            "samples": tuple(int(num) for num in self.samples),
            "basis": sys.intern(
                self.basis
            ),  # msgspec leaves out what is the default itself, and not a copy from elsewhere
            "holdout_error": None if self.holdout_error is None else float(self.holdout_error),
        }
        for name, value in normal.items():  # one spelling (float, tuple, enum): equal curves have one fingerprint
            msgspec.structs.force_setattr(self, name, value)

    @classmethod
    def from_efficiency(
        cls,
        collective: str,
        link: Resource,
        group_size: int,
        points: Sequence[tuple[float, float]],
        peak_gbps: float,
        source: str = "",
    ) -> Curve:
        """Build from (bytes, efficiency) points: t = S · bus factor / (peak · efficiency), MoNTA eq. 8 to 10.

        Raises:
            ProfileError: a peak or an efficiency that is not positive.
        """
        if not peak_gbps > 0:
            raise ProfileError(f"peak_gbps: expected a positive number of GB/s, got {peak_gbps}")
        for i, (_, efficiency) in enumerate(points):
            if not efficiency > 0:
                raise ProfileError(f"points[{i}]: expected a positive efficiency, got {efficiency}")
        factor = bus_factor(collective, group_size)
        times = tuple(size * factor / (peak_gbps * 1e9 * efficiency) * 1e6 for size, efficiency in points)
        return cls(collective, link, group_size, tuple(int(size) for size, _ in points), times, source=source)

    @classmethod
    def from_samples(
        cls,
        collective: str,
        link: Resource,
        group_size: int,
        sizes: Sequence[int],
        p50_us: Sequence[float],
        *,
        p99_us: Sequence[float] = (),
        samples: Sequence[int] = (),
        source: str = "",
    ) -> Curve:
        """Build from measured medians (µs, one per size in bytes), which noise may have left non-monotone.

        ``time_us`` is the closest non-decreasing curve in relative error (isotonic regression of log time);
        ``holdout_error`` the median of |predicted - p50| / p50 over the inner points, each predicted from the others
        (None below 3 points).

        Raises:
            ProfileError: as the constructor.
        """
        raw = _checked_times("p50_us", p50_us, len(_checked_sizes(sizes)))
        errors = []
        for i in range(1, len(raw) - 1):
            others = _monotone(raw[:i] + raw[i + 1 :])
            rest = cls(collective, link, group_size, (*sizes[:i], *sizes[i + 1 :]), others)
            errors.append(abs(prediction_error(rest.at(sizes[i]), raw[i])))
        return cls(
            collective,
            link,
            group_size,
            tuple(sizes),
            _monotone(raw),
            holdout_error=median(errors) if errors else None,
            p50_us=raw,
            p99_us=tuple(p99_us),
            samples=tuple(samples),
            source=source,
        )

    @property
    def key(self) -> tuple[str, Resource, int]:
        """The curve's key, (collective, link, group_size), which makes a curve the only one of its kind in a profile."""
        return self.collective, self.link, self.group_size

    @cached_property
    def _segments(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Sizes, times, the exponent after each size, the time that the segment must not pass.

        The last size has a segment of no length, so that looking it up is no special case.
        """
        sizes, times = self.bytes, self.time_us
        steps = zip(pairwise(sizes), pairwise(times), strict=True)
        exponents = [math.log(t1 / t0) / math.log(b1 / b0) for (b0, b1), (t0, t1) in steps]
        return sizes, times, (*exponents, 0.0), (*times[1:], times[-1])

    @cached_property
    def _low_fit(self) -> tuple[float, float]:
        if len(self.bytes) > 1 and self.time_us[0] == self.time_us[1]:
            return self.time_us[0], 0.0  # a plateau at the small end is latency and nothing else
        return _fit(self.bytes[:_FIT_POINTS], self.time_us[:_FIT_POINTS])

    @cached_property
    def _high_fit(self) -> tuple[float, float]:
        return _fit(self.bytes[: -_FIT_POINTS - 1 : -1], self.time_us[: -_FIT_POINTS - 1 : -1])

    def at(self, nbytes: float) -> float:
        """Return the time in µs to move ``nbytes``; 0 bytes take 0.0. Continuous and non-decreasing above that.

        Raises:
            UsageError: a negative size, or NaN.
        """
        # Pricing one plan asks about a hundred times and has 200 µs: hence no numpy, one power, and no log.
        sizes, times, exponents, limits = self._segments
        if sizes[0] <= nbytes <= sizes[-1]:
            i = bisect_right(sizes, nbytes) - 1
            time_us = times[i] * (nbytes / sizes[i]) ** exponents[i]
            return time_us if time_us < limits[i] else limits[i]  # rounding must not pass the next point
        if nbytes > sizes[-1]:
            return times[-1] + self._high_fit[1] * (nbytes - sizes[-1])
        if nbytes > 0:
            latency_us, us_per_byte = self._low_fit
            return min(latency_us + us_per_byte * nbytes, times[0])
        if nbytes == 0:
            return 0.0
        raise UsageError(
            f"expected a size of at least 0 bytes, got {nbytes}, for {self.collective} on {self.link} with group size "
            f"{self.group_size}"
        )

    def is_extrapolated(self, nbytes: float) -> bool:
        """Whether ``at(nbytes)`` comes from the fit, not from between two measured sizes. 0 bytes need neither."""
        return nbytes != 0 and not self.bytes[0] <= nbytes <= self.bytes[-1]

    def algbw_gbps(self, nbytes: float) -> float:
        """Algorithm bandwidth at ``nbytes``: bytes over time (0.0 at 0 bytes)."""
        return nbytes / self.at(nbytes) / 1e3 if nbytes else 0.0

    def busbw_gbps(self, nbytes: float) -> float:
        """Bus bandwidth at ``nbytes``: algorithm bandwidth times nccl-tests' bus factor."""
        return self.algbw_gbps(nbytes) * bus_factor(self.collective, self.group_size)

    def efficiency(self, nbytes: float, peak_gbps: float) -> float:
        """Bus bandwidth at ``nbytes`` over the link's peak."""
        return self.busbw_gbps(nbytes) / peak_gbps

    @property
    def latency_us(self) -> float:
        """The fitted time of a message of no length (fit at the small end)."""
        return self._low_fit[0]

    @property
    def bandwidth_gbps(self) -> float:
        """The fitted algorithm bandwidth of a message of endless length (fit at the large end)."""
        return 1e-3 / self._high_fit[1]


def _fit(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Latency (µs) and slope (µs per byte) through the first point, least relative squares to the others.

    Through the first point, the curve's end, so that the curve is continuous there. Neither number may be negative. One
    point alone, or a stretch without any slope, counts as pure bandwidth: a flat line would promise endless bandwidth.
    """
    end_bytes, end_us = sizes[0], times[0]
    weighted = [((size - end_bytes) / t, (t - end_us) / t) for size, t in zip(sizes[1:], times[1:], strict=True)]
    slope = sum(x * y for x, y in weighted) / sum(x * x for x, _ in weighted) if weighted else 0.0
    proportional = end_us / end_bytes
    if not 0 < slope < proportional:
        return 0.0, proportional
    return end_us - slope * end_bytes, slope


def _monotone(times: Sequence[float]) -> tuple[float, ...]:
    # Pool adjacent violators: by hand, because scipy's takes a second to load, and every rank of a job would at its start.
    pools: list[tuple[float, int]] = []
    for time_us in times:
        mean, count = math.log(time_us), 1
        while pools and pools[-1][0] > mean:
            before, num = pools.pop()
            mean, count = (before * num + mean * count) / (num + count), num + count
        pools.append((mean, count))
    fitted = (math.exp(mean) for mean, count in pools for _ in range(count))
    # Times that differ by a rounding have one logarithm, so those that were not pooled may fall by that much too.
    return tuple(accumulate(times if len(pools) == len(times) else fitted, max))


def prediction_error(predicted: float, measured: float) -> float:
    """Return ``predicted`` over ``measured``, less 1, both in one unit; ``measured`` is above zero.

    Of times, an error below zero is a run that was slower than predicted; of speeds, one that was faster.
    """
    return (predicted - measured) / measured


def median(values: Sequence[float]) -> float:
    """The median of some values (``statistics`` would cost the offline commands its import)."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not sizes:
        raise ProfileError("bytes: expected at least one size, got none")
    for i, size in enumerate(sizes):
        if size < 1:
            raise ProfileError(f"bytes[{i}]: expected a size of at least 1 byte, got {size}")
        if i and size <= sizes[i - 1]:
            raise ProfileError(f"bytes[{i}]: expected sizes that increase, got {size} after {sizes[i - 1]}")
    return tuple(int(size) for size in sizes)


def _checked_times(name: str, times: Sequence[float], count: int) -> tuple[float, ...]:
    _check_count(name, times, count)
    for i, time_us in enumerate(times):
        if not 0 < time_us < math.inf:
            raise ProfileError(f"{name}[{i}]: expected a positive, finite time in µs, got {time_us}")
    return tuple(float(time_us) for time_us in times)


def _check_count(name: str, values: Sequence[float], count: int) -> None:
    if (values and len(values) != count) or (name == "time_us" and not values):
        raise ProfileError(f"{name}: expected {count} values, one per entry of bytes, got {len(values)}")

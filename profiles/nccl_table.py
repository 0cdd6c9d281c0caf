"""The profiler's table: nccl-tests' columns, so that its users can read ours, then percentiles and how well they are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from commlayer.profiles.links import bus_factor

if TYPE_CHECKING:
    from commlayer.profiles.sweep import Point

__all__ = ["COLUMNS", "NcclRow"]

#: The headers; what ``NcclRow.cells`` returns stands under them.
COLUMNS = (
    "size(B)",
    "count(elements)",
    "type",
    "time(us)",
    "algbw(GB/s)",
    "busbw(GB/s)",
    "#wrong",
    "p50(us)",
    "p99(us)",
    "±%",
    "out",
)


@dataclass(frozen=True)
class NcclRow:
    """One line. ``time_us`` is the mean, as in nccl-tests; ``num_wrong`` is None where nothing was checked.

    ``half_width_percent`` is half the confidence interval of the median, in % of it: infinite (null in JSON) where too few
    times were taken to have one. ``num_outliers`` times were left out of the mean and the percentiles.
    """

    size_bytes: int
    count: int
    dtype: str
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    num_wrong: int | None
    p50_us: float
    p99_us: float
    half_width_percent: float
    num_outliers: int

    @classmethod
    def of(cls, point: Point, *, dtype: str = "uint8", element_bytes: int = 1, num_wrong: int | None = None) -> NcclRow:
        """The line of one point, whose elements are ``dtype`` of ``element_bytes`` bytes each."""
        samples = point.samples
        algbw_gbps = point.nbytes / samples.mean_us / 1e3
        return cls(
            size_bytes=point.nbytes,
            count=point.nbytes // element_bytes,
            dtype=dtype,
            time_us=samples.mean_us,
            algbw_gbps=algbw_gbps,
            busbw_gbps=algbw_gbps * bus_factor(point.collective, point.group_size),
            num_wrong=num_wrong,
            p50_us=samples.p50_us,
            p99_us=samples.p99_us,
            half_width_percent=100 * samples.half_width,
            num_outliers=samples.num_outliers,
        )

    def cells(self) -> tuple[str, ...]:
        """The line as text, one cell for each of ``COLUMNS``; "N/A" (as in nccl-tests) where nothing was checked."""
        return (
            str(self.size_bytes),
            str(self.count),
            self.dtype,
            _digits(self.time_us),
            _digits(self.algbw_gbps),
            _digits(self.busbw_gbps),
            "N/A" if self.num_wrong is None else str(self.num_wrong),
            _digits(self.p50_us),
            _digits(self.p99_us),
            f"{self.half_width_percent:.1f}",
            str(self.num_outliers),
        )


def _digits(value: float) -> str:
    """Four significant digits, no exponent."""
    places = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{places}f}"

"""Rows of the MoE benchmarks, and how times become rows: pure, no cluster and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, quantiles

__all__ = [
    "PHASES",
    "Breakdown",
    "HostRow",
    "KindRow",
    "LayerRow",
    "Spread",
    "breakdown",
    "ratios",
    "spread",
    "table",
    "width_of_balance",
]

PHASES = ("router", "permute", "dispatch", "experts", "combine")
"""The phases as in MoE Parallel Folding's figure 5."""


@dataclass(frozen=True)
class Spread:
    """The median, and the quartiles."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class LayerRow:
    """One way to run one layer, forward and backward; times of the slowest rank, ms. ``ratio``: over the plain layer's time
    of the same round, at EP over all ranks and the same width. ``cores_ms``: what all ranks' processes computed, over the
    machine's cores: the least that it can take there. ``why_not``: why it was not run."""

    way: str
    mapping: str
    width: int
    chosen: str = ""
    predicted_ms: float | None = None
    time_ms: Spread | None = None
    forward_ms: float | None = None
    cores_ms: float | None = None
    ratio: Spread | None = None
    rounds: int = 0
    checked: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Breakdown:
    """Where a way's time goes, ms, forward and backward: the mean over ranks, the median over rounds."""

    way: str
    mapping: str
    phases_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.phases_ms.values())


@dataclass(frozen=True)
class KindRow:
    """Both kinds of one k; times of the slowest rank, ms: the forward pass, and both passes, for which they are predicted."""

    ranks: int
    top_k: int
    predicted_ms: Mapping[str, float]
    forward_ms: Mapping[str, Spread]
    both_ms: Mapping[str, Spread]
    chosen: str
    rounds: int
    checked: str

    @property
    def loss(self) -> float:
        """The time that the chosen one takes over the faster one, forward and backward."""
        return self.both_ms[self.chosen].middle / min(each.middle for each in self.both_ms.values())


@dataclass(frozen=True)
class HostRow:
    """Ours against bare index_select and index_add, on one rank, ms."""

    what: str
    bare_ms: Spread
    ours_ms: Spread
    ratio: Spread
    rounds: int
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Round by round: what slows a whole round down cancels."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def breakdown(way: str, mapping: str, rounds: Sequence[Sequence[Mapping[str, float]]]) -> Breakdown:
    """``rounds[i][rank]``: µs by phase."""
    phases = {name: median(mean(rank.get(name, 0.0) for rank in ranks) for ranks in rounds) / 1e3 for name in PHASES}
    return Breakdown(way, mapping, phases)


def width_of_balance(exchange_us: float, widths: Sequence[int], experts_us: Sequence[float], step: int = 32) -> int:
    """The expert width, a multiple of ``step``, at which the experts take ``exchange_us``: on the line through two widths."""
    (low, high), (fast, slow) = widths, experts_us
    slope = (slow - fast) / (high - low)
    if slope <= 0:  # noise
        slope, low, fast = slow / high, 0, 0.0
    width = low + (exchange_us - fast) / slope
    return max(step, round(width / step) * step)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]

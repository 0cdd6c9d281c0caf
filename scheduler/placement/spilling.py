"""Spilling, decided for every micro-batch: rows of busy ranks are computed on idle ones, to which
the experts' weights travel.

Every rank knows how many rows of each rank go to each expert, because ranks tell each other before
tokens travel. What is decided here follows from these counts, a rule and, for ours, measured
curves: so all ranks find the same. Two rules: LLEP's (:mod:`commlayer.scheduler.placement.llep`),
which knows no network; and ours, which spills only where weights, and gradients on their way back,
are predicted to take less than the queue that they spare, by more than the curves may err.

Which rows a helper takes is decided here too: those that its own rank sends, then those of its
node, then others', in each case from all sources, and all parts of their tokens, in proportion.

Shapes: S sources (EP × ETP ranks), F parts of the tokens of each, P places of experts, one after
another and rank after rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.profile import Profile
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.llep import LlepRule, llep_spilled
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from commlayer.scheduler.placement.placement_search import LEAST_GAIN, Placer
from commlayer.scheduler.placement.spilled_rows import Spilled

__all__ = ["SpillDecision", "SpillRule", "SpilledRows", "Spilling", "decide_spill", "spilled_cells"]

SpillRule = Literal["priced", "llep"]
_EVEN = 1.05
"""The busiest rank's rows over the mean, below which nothing is priced: less than that could be
gained, and to compare what ranks decided takes something too."""


@dataclass(frozen=True)
class Spilling:
    """The way in which a layer spills.

    Attributes:
        rule: ``priced``: where measured curves say that it pays; ``llep``: LLEP's rule.
        thresholds: of LLEP's rule; None: its authors'.
        profile: of the expert group, for prices; None: the one by which the group plans its calls.
        work: what an expert costs, for prices; None: measured in the first call that is uneven.

    Raises:
        UsageError: another rule, or something that the rule does not look at.
    """

    rule: SpillRule = "priced"
    thresholds: LlepRule | None = None
    profile: Profile | None = None
    work: ExpertWork | None = None

    def __post_init__(self) -> None:
        if self.rule not in ("priced", "llep"):
            raise UsageError(f"spilling: the rule must be priced or llep, got {self.rule!r}")
        if self.thresholds is not None and self.rule != "llep":
            raise UsageError("spilling: thresholds are of the rule llep; prices have none: leave them out")
        if (self.profile is not None or self.work is not None) and self.rule != "priced":
            raise UsageError("spilling: LLEP's rule knows no prices: leave profile and work out")

    def is_for(self, rows_of_ranks: Sequence[int]) -> bool:
        """Tell whether ranks with so many rows are uneven enough for a decision at all: by whole
        numbers and the rule alone, so that ranks on any machines find the same."""
        total, least = sum(rows_of_ranks), _EVEN
        if self.rule == "llep":
            least = (self.thresholds or LlepRule()).imbalance
        return total > 0 and len(rows_of_ranks) > 1 and max(rows_of_ranks) * len(rows_of_ranks) >= least * total

    @classmethod
    def of(cls, given: Spilling | str | None) -> Spilling | None:
        """Read what a user gives: a rule's name is enough. Raises UsageError."""
        if given is None or isinstance(given, Spilling):
            return given
        return cls(given)  # type: ignore[arg-type]  # which looks at it


class SpilledRows(NamedTuple):
    """The rows of one expert's copy on rank ``source`` that rank ``target`` computes."""

    expert: int
    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class SpillDecision:
    """The decision for one call.

    ``parts``: what spills, each expert once to a rank; empty: nothing. ``busiest``: the busiest
    rank's rows over the mean, before and after. ``step_us``: what the layer's step is predicted to
    take without, and with, the best that was found; None: nothing was priced.
    """

    rule: SpillRule
    parts: tuple[SpilledRows, ...]
    busiest: tuple[float, float]
    step_us: tuple[float, float] | None = None

    @property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks that lend, and those that are lent, one for each part."""
        return tuple(part.source for part in self.parts), tuple(part.target for part in self.parts)

    def reason(self) -> str:
        """Say what was decided, and why."""
        prices = ""
        if self.step_us is not None:
            without_ms, with_ms = (us / 1e3 for us in self.step_us)
            prices = f", a step is predicted to take {with_ms:.4g} ms with spilling, {without_ms:.4g} without"
        if not self.parts:
            why = "" if self.step_us is None else ": too little to spill for"
            return (
                f"{self.rule}: nothing spills, the busiest rank has {self.busiest[0]:.2f} times the mean{prices}{why}"
            )
        rows = sum(part.rows for part in self.parts)
        experts, targets = ({part[at] for part in self.parts} for at in (0, 2))
        return (
            f"{self.rule}: {counted(rows, 'row')} of {counted(len(experts), 'expert')} spill to "
            f"{counted(len(targets), 'rank')}: the busiest rank has "
            f"{self.busiest[1]:.2f} times the mean in place of {self.busiest[0]:.2f}{prices}"
        )


def decide_spill(
    rows: Array, placement: ExpertPlacement, top_k: int, spilling: Spilling, prices: PlacementPrices | None = None
) -> SpillDecision:
    """Decide what spills in one call.

    Args:
        rows: that each expert's copy on each rank has, whole numbers [experts, ranks].
        placement: where experts lie.
        top_k: choices of a token.
        prices: of the profile and an expert's work, with one micro-batch to a step; needed where
            the rule is ``priced``.

    Raises:
        UsageError: LLEP's rule for experts that have copies; prices that are missing, or of another
            number of ranks.
    """
    import numpy as np

    of_ranks = rows.sum(0)
    load, step_us = LayerLoad(rows.sum(1), top_k), None
    if spilling.rule == "llep":
        spilled = llep_spilled(rows.sum(1), placement, spilling.thresholds)
    elif prices is None:
        raise UsageError("spilling by prices: a profile and an expert's work are needed")
    else:
        spilled, step_us = _priced(load, placement, prices)
    parts, rest, after = [], rows.copy(), of_ranks.copy()
    for expert, source, target, part in spilled:  # in whole rows, no more than a copy has
        moved = min(round(part * int(rows[expert].sum())), int(rest[expert, source]))
        if moved > 0:
            rest[expert, source] -= moved
            after[source] -= moved
            after[target] += moved
            parts.append(SpilledRows(expert, source, target, moved))
    mean = max(float(of_ranks.mean()), 1e-300)
    busiest = float(np.max(of_ranks)) / mean, float(np.max(after)) / mean
    return SpillDecision(spilling.rule, tuple(parts), busiest, step_us)


def _priced(
    load: LayerLoad, placement: ExpertPlacement, prices: PlacementPrices
) -> tuple[Spilled, tuple[float, float]]:
    """Find what spills where that surely saves something, and the prices of a step without and with
    it."""
    placer = Placer(prices, load, placement, horizon=1)
    plain, best = placer.step(placement), placer.spilled(placement)
    step = placer.step(placement, best)
    doubt_us = max(step.doubt_us(plain, prices.times.profile.error), LEAST_GAIN * plain.total_us)
    is_sure = plain.total_us - step.total_us > doubt_us
    return best if is_sure else (), (plain.total_us, step.total_us)


def spilled_cells(counts: Array, parts: Sequence[tuple[int, int, int]], node_of: Sequence[int]) -> Array:
    """Find which rows of which source go to a helper.

    Args:
        counts: rows that each source sends to each place, [ranks, more of the same rank, F, P].
        parts: (place, target rank, rows): no place has more than it has rows.
        node_of: of each rank.

    Returns the rows of each part from each source and each part of its tokens, [parts, ranks, more,
    F].
    """
    import numpy as np

    nodes = np.asarray(node_of)
    ranks = np.arange(len(nodes))
    cells = np.zeros((len(parts), *counts.shape[:-1]), dtype=np.int64)
    rest = {place: counts[..., place].copy() for place, _, _ in parts}
    for nearness in range(3):
        for at, (place, target, rows) in enumerate(parts):
            is_source = (ranks == target, nodes == nodes[target], ranks >= 0)[nearness]
            there = rest[place] * is_source[:, None, None]
            total = int(there.sum())
            wanted = min(rows - int(cells[at].sum()), total)
            if wanted:
                ends = np.cumsum(there.reshape(-1)) * wanted // total
                moved = np.diff(ends, prepend=0).reshape(there.shape)
                cells[at] += moved
                rest[place] -= moved
    return cells

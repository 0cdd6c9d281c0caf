"""LLEP's rule for one micro-batch, after a reading of what its authors published (github.com/SalesforceAIResearch/LeastLoadedEP).

The second reference to beat, beside EPLB's placements. Experts stay in order, and nothing is forecast: once it is known how
many rows each expert has in a micro-batch, rows of ranks that have too many *spill* to those that have least, and the experts'
weights travel with them. All of it follows from three numbers that a user types (:class:`LlepRule`); it knows no network.

Two readings are ours. What is left when no rank has room goes to the rank that has least by then, where the published program
sometimes takes the one that had least before; and the weights of an expert travel to a rank once.
"""

from __future__ import annotations

from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.spilled_rows import Spilled

__all__ = ["LlepRule", "llep_spilled"]


@dataclass(frozen=True, slots=True)
class LlepRule:
    """The thresholds of the rule, as its authors set them.

    Attributes:
        imbalance: the busiest rank's rows over the mean, below which nothing spills.
        capacity: the rows that a rank shall have at most, over the mean.
        least_rows: that a rank takes of an expert, unless fewer are left.

    Raises:
        UsageError: a number below its least: 0, 1 and 0.
    """

    imbalance: float = 1.3
    capacity: float = 1.1
    least_rows: int = 1024

    def __post_init__(self) -> None:
        if not (self.imbalance >= 0 and 1 <= self.capacity < float("inf") and self.least_rows >= 0):
            raise UsageError(f"LLEP's rule: expected a capacity of at least 1 and nothing below 0, got {self}")


def llep_spilled(counts: Array, placement: ExpertPlacement, rule: LlepRule | None = None) -> Spilled:
    """Decide whose rows go elsewhere in a micro-batch, and with them the weights.

    Experts come in turn, the one with most rows first. Its rank takes as many rows as it has room for, counting all that its
    other experts may still bring; what is over goes to the rank that is least busy, counted alike, then to the next. A rank
    takes at least ``rule.least_rows`` of an expert, or all that is left of it; where no rank does, the least busy one takes
    the rest, whatever it has.

    Args:
        counts: the rows of each expert in the micro-batch, [experts]; rounded to whole ones.
        placement: where experts lie, each once.

    Raises:
        UsageError: counts of other experts, or experts that have copies.
    """
    import numpy as np

    if len(counts) != placement.num_experts or placement.has_replicas:
        raise UsageError(
            f"LLEP's rule: expected counts of {placement.num_experts} experts without copies, got {len(counts)} counts and "
            f"{int(placement.logcnt.max())} copies at most"
        )
    rule = rule or LlepRule()
    rows, homes = np.rint(counts).astype(np.int64), placement.homes
    busy = np.bincount(homes, rows, minlength=placement.num_ranks).astype(np.int64)
    total = int(rows.sum())
    if busy.max() * placement.num_ranks < rule.imbalance * total:
        return ()
    mean = total // placement.num_ranks
    limit = int(rule.capacity * mean) if mean else total
    by_target: dict[tuple[int, int], int] = {}
    for expert in np.argsort(-rows, kind="stable").tolist():
        home, rest = int(homes[expert]), int(rows[expert])
        others = int(busy[home]) - rest
        rest -= min(rest, max(limit - others, 0))
        busy[home] = others + int(rows[expert]) - rest
        while rest and placement.num_ranks > 1:
            order = [rank for rank in np.argsort(busy, kind="stable").tolist() if rank != home]
            target, moved = order[0], rest
            for rank in order:
                has_room = min(rest, limit - int(busy[rank]))
                if has_room > 0 and (has_room >= rule.least_rows or has_room == rest):
                    target, moved = rank, has_room
                    break
            busy[target] += moved
            rest -= moved
            by_target[expert, target] = by_target.get((expert, target), 0) + moved
    return tuple(
        (expert, int(homes[expert]), target, moved / int(rows[expert])) for (expert, target), moved in by_target.items()
    )

"""How unevenly experts are loaded: as a distribution of their popularity, and what the busiest rank of a group gets of it.

A step waits for its busiest rank, so what counts is the largest sum over a rank's experts, over the mean. It depends on ep: with
many experts on a rank popular ones and others add up to about the mean, with one expert on each the most popular one rules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from commlayer.profiles.errors import UsageError

__all__ = ["Loads"]

_SAMPLES = 400
_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Loads:
    """``shares[i]``: of all choices that expert i gets; they add up to 1.

    Raises UsageError for no experts, a share below 0, or shares that do not add up to 1.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) < 0 or not math.isclose(sum(self.shares), 1.0, rel_tol=1e-9):
            raise UsageError(f"experts' shares: expected one of at least 0 for each, 1 together, got {self.shares[:8]}")

    @classmethod
    def even(cls, experts: int) -> Loads:
        """Every expert is as popular as the others: what balancing losses aim at."""
        return cls.of_counts([1.0] * experts)

    @classmethod
    def zipf(cls, experts: int, exponent: float) -> Loads:
        """The i-th most popular expert gets a share proportional to 1/i^exponent. 0: even. Raises UsageError for an exponent
        below 0."""
        if not 0 <= exponent < math.inf:
            raise UsageError(f"the exponent of experts' popularity: expected at least 0, got {exponent!r}")
        return cls.of_counts([1.0 / (place + 1) ** exponent for place in range(experts)])

    @classmethod
    def of_counts(cls, counts: Sequence[float]) -> Loads:
        """Make loads from how often each expert was chosen, as a router counts it. Raises UsageError for no choices at all."""
        whole = float(sum(counts))
        if not whole > 0:
            raise UsageError("experts' counts: expected at least one choice")
        return cls(tuple(count / whole for count in counts))

    def busiest(self, ep: int, rows: int) -> float:
        """The rows of the busiest of ``ep`` ranks over the mean, the mean over many steps: ``rows``
        choices are drawn, and experts lie on ranks in random order.

        By 400 draws with a seed, so that the answer is always the same. Choices are drawn independently of each other: each
        expert's count is normal around its share, as large samples are. Raises UsageError where ep does not divide the experts.
        """
        if ep < 1 or len(self.shares) % ep or rows < 1:
            raise UsageError(
                f"expected ep to divide the {len(self.shares)} experts and at least one row, got ep={ep}, rows={rows}"
            )
        return _busiest(self.shares, ep, rows)

    def togetherness(self, parts: int, top_k: int) -> float:
        """Compute on how many of ``parts`` a token has an expert, expected, over what it were with even shares: popular experts
        lie together.

        Each part holds as many experts, in their order. A token's different experts are drawn one after the other by their
        shares, which is the order in which exponential clocks of these rates ring (Rosén 1972, successive sampling): with the
        time t by which ``top_k`` have rung, expected, a part of share s has none with probability exp(-t·s). 1.0 for even shares.

        Raises UsageError where ``parts`` does not divide the experts.
        """
        if parts < 1 or len(self.shares) % parts:
            raise UsageError(f"expected parts that divide the {len(self.shares)} experts, got {parts}")
        return _togetherness(self.shares, parts, top_k)


@lru_cache(maxsize=1024)
def _togetherness(shares: tuple[float, ...], parts: int, top_k: int) -> float:
    experts = len(shares)
    local = experts // parts
    blocks = [sum(shares[first : first + local]) for first in range(0, experts, local)]
    even = parts * (1 - (1 - top_k / experts) ** local)
    if top_k >= sum(share > 0 for share in shares):  # every expert that is ever chosen is
        return float(sum(block > 0 for block in blocks) / even)
    low, high = 0.0, 1.0
    while _rung(shares, high) < top_k:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _rung(shares, middle) < top_k else (low, middle)
    return float(_rung(blocks, low) / even)


def _rung(rates: Sequence[float], time: float) -> float:
    """How many clocks of these rates have rung by then, expected."""
    return sum(1 - math.exp(-time * rate) for rate in rates)


@lru_cache(maxsize=1024)
def _busiest(shares: tuple[float, ...], ep: int, rows: int) -> float:
    if ep == 1:
        return 1.0
    draw = random.Random(0)
    local = len(shares) // ep
    order = list(shares)
    total = 0.0
    for _ in range(_SAMPLES):
        draw.shuffle(order)
        counts = [max(0.0, draw.gauss(rows * share, math.sqrt(rows * share * (1 - share)))) for share in order]
        ranks = [sum(counts[first : first + local]) for first in range(0, len(counts), local)]
        mean = sum(ranks) / ep
        total += max(ranks) / mean if mean else 1.0
    return total / _SAMPLES

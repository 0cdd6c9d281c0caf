"""Estimates by a model that was fitted to runs that somebody measured, as far as a case is like them."""

from __future__ import annotations

import math
from dataclasses import replace

from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_work import LayerWork
from commlayer.scheduler.mapping.layout_balance import LaidOut
from commlayer.scheduler.mapping.result import Memory, StepEstimate
from commlayer.scheduler.mapping.run_fit import FADE, RunFit
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, Software
from commlayer.scheduler.mapping.validity import CaseKind, after_fit, kind_of, widened
from commlayer.scheduler.programs import Item

__all__ = ["FittedEstimator"]


class FittedEstimator(Estimator):
    """Estimates of one job on one cluster, for any setup, by a model that was fitted to ``fit``'s runs.

    A setup has the factors that are left for it (:meth:`RunFit.faded`), and is estimated by an
    estimator of a GPU and links that are so much slower: there are as many as weights.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        software: Software = COMMLAYER,
        *,
        fit: RunFit,
        efficiency: float | None = None,
    ) -> None:
        super().__init__(job, cluster, software, efficiency=efficiency)
        self.fit = fit
        self._by_factors: dict[tuple[float, ...], Estimator] = {}

    def memory(self, setup: Setup) -> Memory:
        return self._of(setup).memory(setup)

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        return self._of(setup).laid_out(setup, limit)

    def bound_us(self, setup: Setup, level: int = 0) -> float:
        bound_us = self._of(setup).bound_us(setup, level)
        if level < 3 and setup.zero == 3:  # also of setups that shard less, whose factors may be others
            bound_us = min(bound_us, self._of(replace(setup, zero=2)).bound_us(setup, level))
        return bound_us

    def work(self, setup: Setup, is_moe: bool) -> LayerWork:
        return self._of(setup).work(setup, is_moe)

    def programs(self, setup: Setup, is_moe: bool) -> tuple[list[Item], list[Item]]:
        return self._of(setup).programs(setup, is_moe)

    def ends_us(self, setup: Setup) -> tuple[float, float, float]:
        return self._of(setup).ends_us(setup)

    def estimate(self, setup: Setup, *, detail: bool = True) -> StepEstimate:
        found = self._of(setup).estimate(setup, detail=detail)
        notes, validity, fit = (*found.notes, self.fit.note(self._kind(setup))), found.validity, self.fit
        if validity is not None:
            differs = fit.differences(validity.kind)
            surprises = fit.faded(validity.kind).surprises
            if differs is not None and surprises:  # published runs say little of their kind
                validity = widened(validity, surprises)
            elif differs is not None and len(differs) < len(FADE):
                validity = after_fit(validity, len(differs))
            # runs of this very case are in its interval
            if own := [run.step_us / found.step_us - 1 for run in fit.runs if run.is_of(found)]:
                validity = replace(widened(validity, own), own=min(own))
        return replace(found, notes=notes, validity=validity)

    def _kind(self, setup: Setup) -> CaseKind:
        """The kind of a setup, but for how long its layers take, which no fit asks about."""
        return kind_of(self.job, setup, self.cluster, self.software, math.inf)

    def _of(self, setup: Setup) -> Estimator:
        """The estimator with the factors that a setup has."""
        fit = self.fit.faded(self._kind(setup))
        factors = tuple(fit.factors.values())
        if factors not in self._by_factors:
            slowed = fit.slowed(self.cluster)
            efficiency = self.efficiency * fit.efficiency
            made = Estimator(self.job, slowed, self.software, efficiency=efficiency)
            made.notes = self.notes
            self._by_factors[factors] = made
        return self._by_factors[factors]

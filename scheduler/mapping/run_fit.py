"""The model fitted to runs that somebody measured: a factor each on named parts of a step, what
such a fit is worth for other runs, and the measured speed of a run in words.

A step's parts belong to compute, to exchange or to the host, which launches kernels
(:data:`FITTED_PARTS`); a bubble grows with all of them. The fit has the factors that explain the
measured times, and are small: it minimizes, over runs and factors,

    sum (log measured - log fitted)² + NOISE · sum (log factor)²

(ridge regression in logarithms). One run says one number, so its deviation is split by how much of
the step each part is, and only a part of it is taken over: the rest is the run's own, as published
runs show, whose neighbours differ as well (docs/published.md).

The less a case is like the runs, the less their factors say of it: they fade with the number of
traits that differ (:data:`FADE`), and are not applied to other machines or software. Rejected: the
same factors for every case, by which published runs of 10 of 12 groups (source, cluster, software)
were predicted worse than without a fit.

The factors change what the model is made of, not its result: the GPU's rates and the links' peaks
(:meth:`RunFit.slowed`), so that a search, and overlap, follow from them. Times that depend on none
of these stay: the latencies of links, and what dispatch kernels take before rows go."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.scheduler.mapping import flops
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.validity import CaseKind, assess

__all__ = ["FADE", "FITTED_PARTS", "NOISE", "MeasuredRun", "RunFit", "fit_to", "measured_step_us"]

FITTED_PARTS = {
    "compute": ("attention", "experts", "dense", "memory", "head", "recompute", "optimizer"),
    "exchange": ("dispatch", "combine", "tp", "cp", "pp", "gradients", "parameters"),
    "host": ("host",),
}
"""The parts of a step (:class:`~commlayer.scheduler.mapping.result.StepEstimate`) that each factor
is on."""
NOISE = 1.0
"""The part of a run's deviation that is its own, over the part that it shares with others: one run
of compute alone passes 1 / (1 + NOISE) of it on. Of 0.1, 0.2, 0.4, 0.7, 1 and 2, the one with the
least mean error of published runs that were predicted from another of their source, cluster and
software which differs in at most one trait."""
FADE = (1.0, 0.75, 0.5)
"""The weights of the factors' logarithms in a case that differs in no trait from the most alike run,
in one, and so on; 0 beyond. Each is, of eighths from 0 to 1, the one with the least mean error (to 0.02 %)
of the pairs of published runs that differ in so many traits, their steps taken as parts times
factors (benchmarks/published_fits.py has the pairs)."""
_SWEEPS = 100
_INCOMPARABLE = {"generation", "fabric", "software"}
"""Traits of which a run says nothing that holds for another one."""
_FARTHEST = 10.0
_SPEED = re.compile(
    r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]+|(?<=[0-9])\.?)(?:e[+-]?[0-9]+)?)"
    r"\s*([a-z/]+)\s*",
    re.IGNORECASE,
)
_STEP_US = {"ms": 1e3, "s": 1e6, "min": 6e7}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run that somebody measured: its estimate without a fit, and its step, µs.

    Raises:
        UsageError: a step that is more than ten times as long or as short as estimated.
    """

    estimate: StepEstimate
    kind: CaseKind
    step_us: float

    def __post_init__(self) -> None:
        if not 1 / _FARTHEST <= self.step_us / self.estimate.step_us <= _FARTHEST:
            raise UsageError(
                f"measured: a step of {self.step_us / 1e3:,.4g} ms, where {self.estimate.step_us / 1e3:,.4g} ms are estimated: "
                f"expected at most {_FARTHEST:g} times as much or as little: check the unit, the batch and the mapping"
            )

    def is_of(self, estimate: StepEstimate) -> bool:
        """Whether it is a run of the very case of ``estimate``: job, mapping, cluster, software."""
        own = self.estimate
        return (own.job, own.setup, own.cluster, own.software) == (
            estimate.job,
            estimate.setup,
            estimate.cluster,
            estimate.software,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """Factors on the times of a step's parts, by the names of :data:`FITTED_PARTS`, and the runs
    that they come from."""

    factors: Mapping[str, float]
    runs: tuple[MeasuredRun, ...]

    def slowed(self, cluster: Cluster) -> Cluster:
        """The cluster on whose GPUs and links everything takes so much longer, but for matrix
        products and attention, which :attr:`efficiency` has. The links of a measured cluster stay:
        somebody measured them."""
        compute, exchange, host = (self.factors[name] for name in FITTED_PARTS)
        gpu, peaks = cluster.gpu, cluster.peaks
        launches = {
            field.name: getattr(gpu, field.name) * host for field in fields(gpu) if field.name.endswith("_launch_us")
        }  # of the host; a kernel's own launch_us is the GPU's
        gpu = replace(gpu, memory_gbps=gpu.memory_gbps / compute, launch_us=gpu.launch_us * compute, **launches)
        slower = msgspec.structs.replace(
            peaks, inter_gbps=peaks.inter_gbps / exchange, intra_gbps=peaks.intra_gbps / exchange
        )
        return cluster.replace(gpu=gpu) if cluster.measured else cluster.replace(gpu=gpu, peaks=slower)

    @property
    def efficiency(self) -> float:
        """The factor on the rates of matrix products and attention."""
        return 1 / self.factors["compute"]

    @property
    def surprises(self) -> tuple[float, ...]:
        """Each run that lies outside the interval that published runs give its kind: its step over
        the fitted one, less 1."""
        intervals = [(run, assess(run.kind)) for run in self.runs]
        return tuple(
            run.step_us / self._step_us(run) - 1
            for run, known in intervals
            if not known.low <= run.step_us / run.estimate.step_us - 1 <= known.high
        )

    def _step_us(self, run: MeasuredRun) -> float:
        """The step of a run with the factors on its parts, as if nothing were hidden anew."""
        return sum(us * self.factors[name] for name, us in _parts_us(run.estimate).items())

    def differences(self, kind: CaseKind) -> tuple[str, ...] | None:
        """The traits in which a case differs from the most alike of the runs; None where all were
        on other machines or with other software. ``short`` is left out: it follows from the
        estimate."""
        every = [tuple(name for name in kind.differs(run.kind) if name != "short") for run in self.runs]
        comparable = [differs for differs in every if not _INCOMPARABLE & set(differs)]
        return min(comparable, key=len, default=None)

    def faded(self, kind: CaseKind) -> RunFit:
        """The fit with its factors as a case of ``kind`` has them (:data:`FADE`)."""
        differs = self.differences(kind)
        weight = 0.0 if differs is None or len(differs) >= len(FADE) else FADE[len(differs)]
        return replace(self, factors={name: factor**weight for name, factor in self.factors.items()})

    def note(self, kind: CaseKind) -> str:
        """The note of an estimate of ``kind``: the factors it has, or why it has none."""
        differs = self.differences(kind)
        deviations = sorted(run.step_us / run.estimate.step_us - 1 for run in self.runs)
        ends = " to ".join(dict.fromkeys(f"{each:+.1%}" for each in (deviations[0], deviations[-1])))
        runs = f"{counted(len(self.runs), 'measured run')} ({ends} beside the estimate)"
        if differs is None:
            return f"not fitted to {runs}: no run was of such GPUs, network and software"
        if len(differs) >= len(FADE):
            return f"not fitted to {runs}: the most alike run differs in {', '.join(differs)}"
        factors = self.faded(kind).factors
        words = {name: f"{factor:.3g}" for name, factor in factors.items()}
        changed = (f"{name} takes {word} times" for name, word in words.items() if word != "1")
        times = ", ".join(changed) or "all takes"
        faded = f"; faded, as the most alike run differs in {', '.join(differs)}" if differs else ""
        return f"fitted to {runs}: {times} as long as declared{faded}"


def fit_to(runs: Sequence[MeasuredRun]) -> RunFit:
    """The factors that explain ``runs``, of which there is at least one."""
    parts = [_parts_us(run.estimate) for run in runs]
    logs = dict.fromkeys(FITTED_PARTS, 0.0)
    for _ in range(_SWEEPS):  # Gauss-Newton, a factor at a time
        for name in FITTED_PARTS:
            step, weight = -NOISE * logs[name], NOISE
            for run, part in zip(runs, parts, strict=True):
                fitted = {other: us * math.exp(logs[other]) for other, us in part.items()}
                total_us = sum(fitted.values())
                share = fitted[name] / total_us
                step += share * math.log(run.step_us / total_us)
                weight += share * share
            logs[name] += step / weight
    return RunFit(factors={name: math.exp(log) for name, log in logs.items()}, runs=tuple(runs))


def _parts_us(estimate: StepEstimate) -> dict[str, float]:
    """The step by the names of :data:`FITTED_PARTS`; what belongs to none is spread over them."""
    own = {name: sum(estimate.parts.get(part, 0.0) for part in parts) for name, parts in FITTED_PARTS.items()}
    return {name: us * estimate.step_us / sum(own.values()) for name, us in own.items()}


def measured_step_us(text: str, job: Job) -> float:
    """The step of ``job``, µs, that a measured speed means: a time (``19.7 s``), ``tokens/s``,
    ``tokens/s/GPU`` or ``TFLOP/s`` of a GPU (by our count of FLOPs: causal attention counted by
    half).

    Raises UsageError for any other text.
    """
    match = _SPEED.fullmatch(text)
    number, unit = (float(match.group(1).replace(",", "")), match.group(2).lower()) if match else (0.0, "")
    if not 0 < number < math.inf:
        unit = ""
    if unit in _STEP_US:
        return number * _STEP_US[unit]
    if unit in ("tokens/s", "tokens/s/gpu"):
        return job.tokens / number * 1e6 / (job.gpus if unit.endswith("gpu") else 1)
    if unit in ("tflop/s", "tflops", "tflop/s/gpu", "tflops/gpu"):
        return flops.of_step(job) / job.gpus / number * 1e-6
    raise UsageError(
        "measured: expected a number and s, ms, min, tokens/s, tokens/s/GPU or TFLOP/s, such as '19.7 s', or on the "
        f"command line a file of runs that exists, got {shortened(text)!r}"
    )

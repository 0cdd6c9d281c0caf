"""Variations: what would change if one thing were different, and where two ways of doing it change places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.crossing import Crossover, crossover, crossover_of_values
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.precisions import PRECISIONS
from commlayer.scheduler.mapping.result import StepEstimate, describe_memory
from commlayer.scheduler.mapping.search import Estimates, check_margin, search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software
from commlayer.scheduler.mapping.space import Space

__all__ = [
    "ALTERNATIVES",
    "KINDS",
    "Alternative",
    "Crossover",
    "MakeEstimates",
    "Value",
    "Variation",
    "VariationKind",
    "WhatIf",
    "WhatIfPoint",
    "compare",
    "crossover",
    "split_experts",
    "vary",
    "what_if",
]

VariationKind = Literal[
    "gpus",
    "inter_gbps",
    "inter_factor",
    "intra_gbps",
    "intra_factor",
    "domain",
    "gpu",
    "precision",
    "top_k",
    "split",
    "sequence",
    "global_batch",
    "skew",
]
KINDS: tuple[str, ...] = get_args(VariationKind)
Value = float | int | str
FindCluster = Callable[[str], Cluster]
MakeEstimates = Callable[[Job, Cluster, Software], Estimates]
Progress = Callable[[float, int], None]

_REAL = ("inter_gbps", "inter_factor", "intra_gbps", "intra_factor")
_WHOLE = ("gpus", "domain", "top_k", "split", "sequence", "global_batch")
_SMOOTH = (*_REAL, "skew")
_FINENESS = 0.002  # of the interval: to what a crossing of bandwidths is found


@dataclass(frozen=True, slots=True)
class Variation:
    """One thing that varies, and its values.

    Kinds:
        gpus: how many. domain: GPUs that NVLink joins (8 in a node, 72 in a rack).
        inter_gbps, intra_gbps: of each GPU, one direction, 1e9 B/s. inter_factor, intra_factor: times what the cluster has
            (0.5: half its rate). Efficiencies and latencies stay.
        gpu: the GPU of the cluster of that name, with the links of this one.
        precision: a recipe (:data:`~commlayer.scheduler.mapping.precisions.PRECISIONS`). sequence, global_batch: of the job.
        top_k: experts for each token. split: every expert into so many of which tokens take as many times more, with as many
            active parameters: fine-grained experts (DeepSeekMoE, arXiv:2401.06066).
        skew: the exponent of experts' popularity, which is then Zipf's, in place of the job's; 0: even, 1: as words are.

    Raises:
        UsageError: an unknown kind, no values, or one of the wrong sort.
    """

    kind: VariationKind
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"what varies: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.values:
            raise UsageError(f"{self.kind}: expected at least one value")
        for value in self.values:
            _check(self.kind, value)


@dataclass(frozen=True, kw_only=True)
class WhatIfPoint:
    """One value. ``estimate``: None where nothing is valid or fits, and then ``note`` says why. ``cluster``: its name."""

    value: Value
    job: Job
    cluster: str
    estimate: StepEstimate | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The result of a variation. ``setup``: what all points run (but for what varies); None: each runs its best."""

    variation: Variation
    job: Job
    cluster: str
    software: str
    setup: Setup | None
    points: tuple[WhatIfPoint, ...]

    @property
    def fastest(self) -> WhatIfPoint | None:
        """The point with the most tokens a second; None where there is none at all."""
        known = [(point.estimate.tokens_per_s, -index) for index, point in enumerate(self.points) if point.estimate]
        return self.points[-max(known)[1]] if known else None


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One of two ways: a setup, or (None) the best of a space; by what software, and with what part of each GPU's memory limit
    left free."""

    name: str
    setup: Setup | None = None
    space: Space = field(default_factory=Space)
    software: Software = COMMLAYER
    margin: float = 0.0


ALTERNATIVES: dict[str, tuple[Alternative, Alternative]] = {
    "folding": (
        Alternative(name="folded", space=Space(folded=(True,))),
        Alternative(name="unfolded", space=Space(folded=(False,))),
    ),
    "attention": (
        Alternative(name="tensor", space=Space(attention=("tensor",))),
        Alternative(name="ulysses", space=Space(attention=("ulysses",))),
    ),
    "dispatch": (
        Alternative(name="all_to_all", space=Space(dispatch=("all_to_all",))),
        Alternative(name="all_gather", space=Space(dispatch=("all_gather",))),
    ),
    "schedule": (
        Alternative(name="1f1b", space=Space(schedule=("1f1b",))),
        Alternative(name="1f1b-overlap", space=Space(schedule=("1f1b-overlap",))),
    ),
    "software": (Alternative(name="commlayer"), Alternative(name="megatron", software=MEGATRON)),
}
"""Pairs that people ask about, by name."""


def what_if(
    job: Job,
    cluster: Cluster,
    variation: Variation,
    *,
    setup: Setup | None = None,
    space: Space | None = None,
    software: Software = COMMLAYER,
    margin: float = 0.0,
    make: MakeEstimates | None = None,
    named: FindCluster = clusters.load,
    progress: Progress | None = None,
) -> WhatIf:
    """Estimate ``job`` at every value of ``variation``: by ``setup``, or by the best of ``space``.

    Args:
        margin: the part of each GPU's memory limit that stays free, from 0 to below 1.
        make: an estimator of a job; :class:`commlayer.scheduler.mapping.simulate.Estimator` unless given.
        named: the cluster of a name, where it is its GPU that varies; unless given, of the declared ones.
        progress: called with points done, the part that is searched of the one under way among them, and points in all.

    Raises:
        UsageError: a value that the cluster cannot have (links of a measured one), or no such margin. Where a point is not
            valid or does not fit, its note says so instead.
    """
    _check_links(cluster, variation.kind)
    check_margin(margin)
    way = Alternative(name="", setup=setup, space=space or Space(), software=software, margin=margin)
    points: list[WhatIfPoint] = []

    def tell(done: int, of: int) -> None:
        if progress:
            progress(len(points) + done / of, len(variation.values))

    for value in variation.values:
        tell(0, 1)
        points.append(_point(job, cluster, variation.kind, value, way, make, named, tell))
    tell(0, 1)
    return WhatIf(
        variation=variation,
        job=job,
        cluster=cluster.name,
        software=software.name,
        setup=setup,
        points=tuple(points),
    )


def compare(
    job: Job,
    cluster: Cluster,
    variation: Variation,
    first: Alternative,
    second: Alternative,
    *,
    make: MakeEstimates | None = None,
) -> Crossover:
    """Where two ways change places. Bandwidths: between the least and the greatest value, by bisection to 0.2 % of that
    interval; anything else: from which of the values on.

    Raises:
        UsageError: fewer than two values, values that are no numbers, or one at which one of the two cannot run, and why.
    """

    def difference(value: float) -> float:
        times = []
        for way in (first, second):
            point = _point(job, cluster, variation.kind, value, way, make)
            if point.estimate is None:
                raise UsageError(
                    f"{variation.kind}={value:g}: {way.name} cannot run there, so nothing crosses: {point.note}"
                )
            times.append(point.estimate.step_us)
        return times[0] - times[1]

    _check_links(cluster, variation.kind)
    if variation.kind not in (*_SMOOTH, *_WHOLE):
        raise UsageError(f"{variation.kind} has no order in which two ways could cross: use what_if for each")
    values = sorted({float(value) for value in variation.values})
    if len(values) < 2:
        raise UsageError(f"{variation.kind}: expected at least two values to look between, got {variation.values!r}")
    if variation.kind in _SMOOTH:
        low, high = values[0], values[-1]
        return crossover(difference, low, high, (high - low) * _FINENESS, first=first.name, second=second.name)
    return crossover_of_values(
        [difference(int(value)) for value in values], values, first=first.name, second=second.name
    )


def vary(
    job: Job, cluster: Cluster, kind: VariationKind, value: Value, named: FindCluster = clusters.load
) -> tuple[Job, Cluster]:
    """``job`` and ``cluster`` where one thing is different; ``precision`` changes neither. ``named``: the cluster of a
    name.

    Raises UsageError for a value that they cannot have.
    """
    _check(kind, value)
    if kind in ("gpus", "sequence", "global_batch"):
        changes: dict[str, Any] = {kind: value}
        return replace(job, **changes), cluster
    if kind == "skew":
        return replace(job, loads=Loads.zipf(job.model.experts, float(value)), imbalance=1.0), cluster
    if kind == "top_k":
        return replace(job, model=_renamed(job.model, f"top-{value}", top_k=value)), cluster
    if kind == "split":
        return replace(job, model=split_experts(job.model, int(value))), cluster
    if kind == "gpu":
        gpu = named(str(value)).gpu
        return job, cluster.replace(gpu=gpu, name=f"{cluster.name} with {gpu.name}")
    return job, cluster if kind == "precision" else _vary_links(cluster, kind, float(value))


def split_experts(model: ModelShape, parts: int) -> ModelShape:
    """``model`` with every expert in ``parts``, of which a token takes as many more: the same total and active parameters,
    but for the router's. Raises UsageError where ``parts`` does not divide the width."""
    if model.width % parts:
        raise UsageError(f"split={parts}: expected a divisor of an expert's width, {model.width}")
    if parts == 1:
        return model
    return _renamed(
        model,
        f"experts in {parts}",
        experts=model.experts * parts,
        top_k=model.top_k * parts,
        width=model.width // parts,
    )


def _vary_links(cluster: Cluster, kind: VariationKind, value: float) -> Cluster:
    _check_links(cluster, kind)
    if kind == "domain":
        return cluster.replace(domain=int(value), name=f"{cluster.name}, domain {value:g}")
    link, unit = kind.split("_")
    rate = value * cluster.peaks.of(link) if unit == "factor" else value  # type: ignore[arg-type]
    peaks = msgspec.structs.replace(cluster.peaks, **{f"{link}_gbps": rate})
    return cluster.replace(peaks=peaks, name=f"{cluster.name}, {link} {rate:g} GB/s")


def _check_links(cluster: Cluster, kind: VariationKind) -> None:
    if cluster.kind == "profile" and kind in (*_REAL, "domain"):
        raise UsageError(
            f"{kind}: the links of {cluster.name} were measured, and nobody measured others; declare a cluster (docs/clusters.md)"
        )


def _renamed(model: ModelShape, what: str, **changes: Any) -> ModelShape:
    """A model of the same family, for its efficiency is that of the same kernels; and of no published size."""
    return replace(model, name=f"{model.name}, {what}", family=model.family or model.name, published=0.0, **changes)


def _point(
    job: Job,
    cluster: Cluster,
    kind: VariationKind,
    value: Value,
    way: Alternative,
    make: MakeEstimates | None,
    named: FindCluster = clusters.load,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIfPoint:
    try:
        job, cluster = vary(job, cluster, kind, value, named)
        estimate, note = _estimate(job, cluster, kind, value, way, make or Estimator, progress)
    except UsageError as error:
        estimate, note = None, str(error)
    return WhatIfPoint(value=value, job=job, cluster=cluster.name, estimate=estimate, note=note)


def _estimate(
    job: Job,
    cluster: Cluster,
    kind: VariationKind,
    value: Value,
    way: Alternative,
    make: MakeEstimates,
    progress: Callable[[int, int], None] | None,
) -> tuple[StepEstimate | None, str]:
    estimator = make(job, cluster, way.software)
    if way.setup is None:
        changes: dict[str, Any] = {"precision": (value,)} if kind == "precision" else {}
        space = replace(way.space, **changes)
        return search(job, estimator, space, top=1, margin=way.margin, progress=progress).best, ""
    changes = {"precision": value} if kind == "precision" else {}
    setup = replace(way.setup, gpus=job.gpus, **changes)
    needed, limit = estimator.memory(setup), estimator.memory_limit * (1 - way.margin)
    if needed.total > limit:
        return None, (
            f"{setup} does not fit: {needed.total / 1e9:.1f} GB of {limit / 1e9:.1f} GB ({describe_memory(needed)})"
        )
    return estimator.estimate(setup), ""


def _check(kind: VariationKind, value: Value) -> None:
    if kind in _WHOLE:
        sound, expected = type(value) is int and value >= 1, "a whole number of at least 1"
    elif kind in _REAL:
        sound, expected = (
            isinstance(value, (int, float)) and type(value) is not bool and 0 < value < float("inf"),
            "a positive number",
        )
    elif kind == "skew":
        sound, expected = type(value) in (int, float) and 0 <= float(value) < float("inf"), "an exponent of at least 0"
    elif kind == "precision":
        sound, expected = value in PRECISIONS, f"one of {', '.join(PRECISIONS)}"
    else:
        sound, expected = isinstance(value, str), "the name of a cluster that has it"
    if not sound:
        raise UsageError(f"{kind}: expected {expected}, got {value!r}")

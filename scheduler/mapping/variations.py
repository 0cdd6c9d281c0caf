"""Variations: what would change if one thing were different, and where two ways of doing it change places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.mapping.cluster import Cluster
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
    "Progress",
    "Value",
    "Variation",
    "VariationKind",
    "Varied",
    "VariedPoint",
    "VariedWay",
    "at_value",
    "crossover",
    "split_experts",
    "vary",
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
PartDone = Callable[[int, int], None]

_REAL = ("inter_gbps", "inter_factor", "intra_gbps", "intra_factor")
_WHOLE = ("gpus", "domain", "top_k", "split", "sequence", "global_batch")
_SMOOTH = (*_REAL, "skew")
_FINENESS = 0.002
"""The part of the interval between the least and the greatest value to which a crossing of rates is found."""


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
class Alternative:
    """One way to do a job: a setup, or (None) the best of a space; by what software, and with what part of each GPU's memory
    limit left free."""

    name: str = ""
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
    "exchange": (
        Alternative(name="all_to_all", space=Space(exchange=("all_to_all",))),
        Alternative(name="all_gather", space=Space(exchange=("all_gather",))),
    ),
    "schedule": (
        Alternative(name="1f1b", space=Space(schedule=("1f1b",))),
        Alternative(name="1f1b-overlap", space=Space(schedule=("1f1b-overlap",))),
    ),
    "software": (Alternative(name="commlayer"), Alternative(name="megatron", software=MEGATRON)),
}
"""Pairs that people ask about, by name."""


@dataclass(frozen=True, kw_only=True)
class VariedPoint:
    """One value. ``estimate``: None where nothing is valid or fits, and then ``note`` says why. ``cluster``: its name."""

    value: Value
    job: Job
    cluster: str
    estimate: StepEstimate | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class VariedWay:
    """One way at every value: by its setup (but for what varies), or where it has none by the best of its space."""

    way: Alternative
    points: tuple[VariedPoint, ...]

    @property
    def fastest(self) -> VariedPoint | None:
        """The point with the most tokens a second; None where there is none at all."""
        known = [(point.estimate.tokens_per_s, -index) for index, point in enumerate(self.points) if point.estimate]
        return self.points[-max(known)[1]] if known else None


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Where two alternatives change places between ``low`` and ``high``. ``str`` says it in words.

    Attributes:
        first, second: what they are called.
        crossings: where the other becomes the faster one, ascending; empty where one is never the slower one.
        at_low, at_high: the faster one at either end; empty where both are equal there.
        is_exact: crossings are points; else they are the first values of a list at which the order has changed.
    """

    first: str
    second: str
    low: float
    high: float
    crossings: tuple[float, ...]
    at_low: str
    at_high: str
    is_exact: bool = True

    @property
    def at(self) -> float | None:
        """The first crossing."""
        return self.crossings[0] if self.crossings else None

    def __str__(self) -> str:
        between = f"between {self.low:g} and {self.high:g}"
        if not self.crossings:
            if not self.at_low and not self.at_high:
                return f"no crossing {between}: {self.first} and {self.second} are equally fast"
            if not self.at_low or not self.at_high:
                equal = self.high if self.at_low else self.low
                return f"no crossing {between}: {self.at_low or self.at_high} is never slower, and as fast at {equal:g}"
            return f"no crossing {between}: {self.at_low} is always faster"
        where = ", ".join(f"{place:.4g}" for place in self.crossings)
        other = self.second if self.at_low == self.first else self.first
        if len(self.crossings) == 1:
            return f"{self.at_low} is faster below {where}, {other} from there on ({between})"
        return f"{self.at_low} is faster at {self.low:g}; they change places at {where} ({between})"


@dataclass(frozen=True, kw_only=True)
class Varied:
    """A job with one thing varied. ``crossover``: where its two ways change places; None where there are not two of them, or
    not two values, in an order, at which both run."""

    variation: Variation
    job: Job
    cluster: str
    ways: tuple[VariedWay, ...]
    crossover: Crossover | None


def vary(
    job: Job,
    cluster: Cluster,
    variation: Variation,
    *ways: Alternative,
    make: MakeEstimates | None = None,
    named: FindCluster = clusters.load,
    progress: Progress | None = None,
) -> Varied:
    """Estimate ``job`` at every value of ``variation``, each of ``ways`` (unless given, the best of all setups).

    Of two ways it is found where they change places, too: of rates between two values by bisection, to 0.2 % of the interval
    of all; of anything else from which of the values on. Two crossings between neighbouring values are not seen.

    Args:
        make: an estimator of a job; :class:`commlayer.scheduler.mapping.simulate.Estimator` unless given.
        named: the cluster of a name, where it is its GPU that varies; unless given, of the declared ones.
        progress: called with points done, the part that is searched of the one under way among them, and points in all.

    Raises:
        UsageError: a value that the cluster cannot have (links of a measured one), or no such margin. Where a point is not
            valid or does not fit, its note says so instead.
    """
    _check_links(cluster, variation.kind)
    ways = ways or (Alternative(),)
    for way in ways:
        check_margin(way.margin)
    points: list[VariedPoint] = []

    def tell(done: int, of: int) -> None:
        if progress:
            progress(len(points) + done / of, len(ways) * len(variation.values))

    def point_at(value: Value, way: Alternative, part_done: PartDone | None) -> VariedPoint:
        asked, on = job, cluster
        try:
            asked, on = at_value(job, cluster, variation.kind, value, named)
            estimate, note = _estimate(asked, on, variation.kind, value, way, make or Estimator, part_done)
        except UsageError as error:
            estimate, note = None, str(error)
        return VariedPoint(value=value, job=asked, cluster=on.name, estimate=estimate, note=note)

    for way in ways:
        for value in variation.values:
            tell(0, 1)
            points.append(point_at(value, way, tell))
    tell(0, 1)
    number = len(variation.values)
    varied = [VariedWay(way=way, points=tuple(points[at * number :][:number])) for at, way in enumerate(ways)]
    return Varied(
        variation=variation,
        job=job,
        cluster=cluster.name,
        ways=tuple(varied),
        crossover=_crossover_of(variation.kind, varied, lambda value, way: point_at(value, way, None)),
    )


def _crossover_of(
    kind: VariationKind, ways: Sequence[VariedWay], point_at: Callable[[float, Alternative], VariedPoint]
) -> Crossover | None:
    """Where two ways change places, between the values at which both run."""
    if len(ways) != 2 or kind not in (*_SMOOTH, *_WHOLE):
        return None
    first, second = ways
    known = {
        float(one.value): one.estimate.step_us - other.estimate.step_us
        for one, other in zip(first.points, second.points, strict=True)
        if one.estimate and other.estimate
    }

    def difference(value: float) -> float:
        if value in known:
            return known[value]
        times = []
        for each in ways:
            point = point_at(value, each.way)
            if point.estimate is None:
                raise UsageError(
                    f"{kind}={value:g}: {each.way.name} cannot run there, so nothing crosses: {point.note}"
                )
            times.append(point.estimate.step_us)
        return times[0] - times[1]

    values = sorted(known)
    if len(values) < 2:
        return None
    tolerance = (values[-1] - values[0]) * _FINENESS * (kind in _SMOOTH)
    return crossover(difference, values, tolerance, first=first.way.name, second=second.way.name)


def crossover(
    difference: Callable[[float], float],
    values: Sequence[float],
    tolerance: float = 0.0,
    *,
    first: str = "the first",
    second: str = "the second",
) -> Crossover:
    """Every change of places that ``values`` show.

    Args:
        difference: time of the first less time of the second; negative: the first is faster. It may jump.
        values: at which it is asked, ascending. Two crossings between neighbours are not seen.
        tolerance: how wide the interval of a crossing may remain, which is bisected; its middle is returned. 0: only
            ``values`` make sense (numbers of GPUs), and a crossing is the first of them behind it.

    Raises:
        UsageError: fewer than two values, values that do not ascend, or a difference that is no number.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)) or any(b <= a for a, b in pairwise(values)):
        raise UsageError(f"expected at least two ascending values, got {values!r}")
    signs = [(value, _sign(difference, value)) for value in values]
    # what is equal belongs to no side, and is passed over
    unequal = [(value, sign) for value, sign in signs if sign]
    crossings = tuple(
        _bisect(difference, left, right, before, tolerance) if tolerance else right
        for (left, before), (right, after) in pairwise(unequal)
        if before != after
    )
    names, ends = {-1: first, 1: second, 0: ""}, unequal if crossings else signs
    return Crossover(
        first=first,
        second=second,
        low=values[0],
        high=values[-1],
        crossings=crossings,
        at_low=names[ends[0][1]],
        at_high=names[ends[-1][1]],
        is_exact=tolerance > 0,
    )


def _bisect(difference: Callable[[float], float], left: float, right: float, before: int, tolerance: float) -> float:
    """Between ``left``, with sign ``before``, and ``right``, with the other."""
    while right - left > tolerance:
        middle = (left + right) / 2
        if not left < middle < right:  # no number lies between them
            break
        sign = _sign(difference, middle)
        if sign == 0:
            return middle
        left, right = (middle, right) if sign == before else (left, middle)
    return (left + right) / 2


def _sign(difference: Callable[[float], float], place: float) -> int:
    value = difference(place)
    if math.isnan(value):
        raise UsageError(f"the difference at {place!r} is no number: neither alternative could be estimated there")
    return (value > 0) - (value < 0)


def at_value(
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
    if kind == "precision":
        return job, cluster
    _check_links(cluster, kind)
    if kind == "domain":
        return job, cluster.replace(domain=value, name=f"{cluster.name}, domain {value}")
    link, unit = kind.split("_")
    rate = float(value) * cluster.peaks.of(link) if unit == "factor" else float(value)  # type: ignore[arg-type]
    peaks = msgspec.structs.replace(cluster.peaks, **{f"{link}_gbps": rate})
    return job, cluster.replace(peaks=peaks, name=f"{cluster.name}, {link} {rate:g} GB/s")


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


def _check_links(cluster: Cluster, kind: VariationKind) -> None:
    is_declared = cluster.inter is not None and kind in ("inter_gbps", "inter_factor")
    if cluster.measured and kind in (*_REAL, "domain") and not is_declared:
        raise UsageError(
            f"{kind}: the links of {cluster.name} were measured, and nobody measured others; declare a cluster (docs/clusters.md)"
        )


def _renamed(model: ModelShape, what: str, **changes: Any) -> ModelShape:
    """A model of the same family, for its efficiency is that of the same kernels; and of no published size."""
    return replace(model, name=f"{model.name}, {what}", family=model.family or model.name, published=0.0, **changes)


def _estimate(
    job: Job,
    cluster: Cluster,
    kind: VariationKind,
    value: Value,
    way: Alternative,
    make: MakeEstimates,
    progress: PartDone | None,
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

"""How far to trust an estimate: published runs of its kind, how far off their predictions were, and the interval that follows.

A case is of a kind (:class:`CaseKind`): GPUs' generation, precision, where experts lie and what carries tokens to them, what
hides the exchange. Published runs were predicted once (docs/published.md), and their errors are shipped
(checked_rows.json, which `make published` writes). An estimate is

- ``checked`` where at least :data:`LEAST` published runs are of its kind, one of them of a like model: with the same kind of
  attention, and at most :data:`SIZES_ALIKE` times as large or as small,
- ``interpolated`` where that many differ from it in one thing only, but for the generation,
- ``unchecked`` else.

The interval is that of the errors of the :data:`NEAREST` runs, and of those that are as near as the last of them; of all runs
of its kind where none is of a like model; and of all there are where an estimate is unchecked. Runs of the same model come
first among those that differ as much. A tenth at each end lies outside, counted as in conformal prediction (Vovk, Gammerman,
Shafer: Algorithmic Learning in a Random World, 2005), so that the next run lies inside with a probability of :data:`COVERAGE`
if it comes from the same place. Rejected: a normal distribution, whose ends a few far misses decide; and all runs of a kind,
of whatever model, whose intervals were 1.8 times as wide (median of what is checked). How much each difference counts was
chosen on the runs themselves, so that leaving one out at a time holds what is promised (docs/published.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from commlayer.profiles.shipped import shipped_data
from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import Software

__all__ = [
    "COVERAGE",
    "LEAST",
    "NEAREST",
    "SHORT_LAYER_US",
    "SIZES_ALIKE",
    "UNEXPLAINED",
    "CaseKind",
    "CheckedRow",
    "CheckedRows",
    "Validity",
    "Word",
    "assess",
    "cautions",
    "checked_rows",
    "kind_of",
]

Word = Literal["checked", "interpolated", "unchecked"]

COVERAGE = 0.8
"""The share of runs of its kind that an interval is meant to hold."""
LEAST = 3
"""The number of runs that make a kind a checked one."""
SIZES_ALIKE = 3.0
"""The ratio of two models' parameters up to which they are alike, with attention of one kind."""
NEAREST = 9
"""The fewest errors that an interval is made of: of fewer, the lowest and the highest would hold less than COVERAGE."""
SHORT_LAYER_US = 12_000.0
"""Below this, by our estimate, a layer takes a micro-batch forward and backward so fast that its host may be late with launching
kernels, unless CUDA graphs hold them (NVIDIA's guide to DeepSeek-V3 on GB200 calls steps host-bound whose layers are as long).
Launches are modelled by their mean (mapping/host_launches.py)."""
_SHOWN = 3
_GENERATIONS = {"A": "ampere", "H": "hopper", "B": "blackwell", "GB": "blackwell"}
_WEIGHTS = {
    "generation": 4.0,
    "experts": 3.0,
    "dispatcher": 3.0,
    "precision": 1.0,
    "overlap": 1.0,
    "short": 1.0,
    "sharded": 1.0,
}
_FAMILY, _UNLIKE, _SCALE, _MOST_SCALE = 1.0, 1.0, 0.25, 4.0
"""Distances: of another model, of one that is not alike beside that, and of each doubling of the GPUs, up to so many."""


class CaseKind(NamedTuple):
    """The kind of a case.

    ``generation``: of the GPU (ampere, hopper, blackwell, other). ``precision``: bf16 or fp8, of whichever recipe.
    ``dispatcher``: nccl, chunks (ours) or kernels by name. ``experts``: where they lie: alone (no expert parallelism), inside (an
    NVLink domain) or between (them). ``overlap``: what hides the exchange: none, chunks, or merged (other micro-batches' passes).
    ``short``: whether a layer's passes are (:data:`SHORT_LAYER_US`). ``sharded``: whether data parallelism shards weights.
    ``family``: the model. ``attention``: its kind (gqa, mla, windows, linear; windows where any layer has one, linear where any
    layer is). ``billions``: its parameters, rounded, at least 1.
    """

    generation: str
    precision: str
    dispatcher: str
    experts: str
    overlap: str
    short: bool
    sharded: bool
    family: str
    attention: str
    billions: int
    gpus: int


class CheckedRow(NamedTuple):
    """A published run.

    ``key``: its name in docs/published.md or docs/papers.md. ``error``: predicted over published throughput, less 1.
    """

    key: str
    kind: CaseKind
    error: float


class CheckedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of the published runs whose errors are shipped. ``kind``: the fields of each row's kind, in order."""

    kind: tuple[str, ...]
    rows: tuple[CheckedRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The error that an estimate of some kind may have, and the published runs that say so.

    Attributes:
        low, high: the ends between which the ratio of predicted to real throughput lies, less 1, by the nearest runs.
        num_rows: that they come from. num_kind: how many of these are of the very kind.
        nearest: the nearest runs, the nearest first.
    """

    word: Word
    kind: CaseKind
    low: float
    high: float
    num_rows: int
    num_kind: int
    nearest: tuple[CheckedRow, ...]

    def interval(self, step_us: float) -> tuple[float, float]:
        """The interval of a step that was estimated at ``step_us``, µs."""
        return step_us * (1 + self.low), step_us * (1 + self.high)


def kind_of(job: Job, setup: Setup, cluster: Cluster, software: Software, busy_us: float) -> CaseKind:
    """The kind of a case. ``busy_us``: the estimated step without the pipeline's bubble."""
    layer_us = busy_us / setup.micro_batches(job) / (job.model.layers / setup.pp)
    if setup.ep * setup.etp == 1:
        experts = "alone"
    else:
        experts = "between" if len(cluster.nodes_of(setup.layout("etp_ep"), setup.gpus)) > 1 else "inside"
    kernels = software.kernels
    chunks = software.hides_dispatch or software.two_levels
    return CaseKind(
        generation=_generation(cluster.gpu.name),
        precision="bf16" if setup.precision == "bf16" else "fp8",
        dispatcher=kernels.name if kernels is not None else "chunks" if chunks else "nccl",
        experts=experts,
        overlap=_overlap(setup, software),
        short=layer_us < SHORT_LAYER_US,
        sharded=setup.zero == 3,
        family=job.model.family or job.model.name,
        attention=_attention(job.model),
        billions=max(1, round(parameters.count(job.model).total / 1e9)),
        gpus=setup.gpus,
    )


@cache
def checked_rows() -> tuple[CheckedRow, ...]:
    """The published runs whose errors are shipped: read once."""
    return shipped_data("commlayer.scheduler.mapping", "checked_rows.json", CheckedRows, "list of published runs").rows


def assess(kind: CaseKind, rows: Sequence[CheckedRow] | None = None) -> Validity:
    """Label an estimate of ``kind`` by ``rows``, or by the shipped ones. Without any row nothing is known: −100 % to ∞."""
    known = checked_rows() if rows is None else rows
    near = sorted(known, key=lambda row: (_distance(kind, row.kind), row.key))
    same = [row for row in near if not _differences(kind, row.kind)]
    is_known = any(_are_models_alike(kind, row.kind) for row in same)
    alike = sum(_is_alike(kind, row.kind) for row in near)
    word: Word = "checked" if is_known and len(same) >= LEAST else "interpolated" if alike >= LEAST else "unchecked"
    used = near if word == "unchecked" else _nearest(kind, near, NEAREST if is_known else max(NEAREST, len(same)))
    low, high = _interval([row.error for row in used])
    return Validity(
        word=word,
        kind=kind,
        low=low,
        high=high,
        num_rows=len(used),
        num_kind=len(same),
        nearest=tuple(near[:_SHOWN]),
    )


UNEXPLAINED: tuple[tuple[str, Callable[[CaseKind], bool]], ...] = (
    (
        "tokens by NCCL's all_to_all on Blackwell",
        lambda kind: kind.dispatcher == "nccl" and kind.generation == "blackwell",
    ),
    ("windows of attention, as gpt-oss has them", lambda kind: kind.attention == "windows"),
    (f"layers of less than {SHORT_LAYER_US / 1e3:.0f} ms a micro-batch", lambda kind: kind.short),
)
"""Traits that published runs which are far from their predictions have in common. Mechanisms with public numbers behind them were
added until these were left (docs/published.md)."""
_FAR = 0.15
"""The median error from which on such runs are worth a caution."""


def cautions(kind: CaseKind, rows: Sequence[CheckedRow] | None = None) -> tuple[str, ...]:
    """Say of what in a case of ``kind`` published runs are slower than predicted, without that any public number says why."""
    known, found = checked_rows() if rows is None else rows, []
    for words, has in UNEXPLAINED:
        errors = [row.error for row in known if has(row.kind)]
        if has(kind) and len(errors) >= LEAST and median(errors) > _FAR:
            found.append(
                f"{words}: the prediction is likely too fast: for {len(errors)} published runs with that it was off by "
                f"{min(errors):+.0%} to {max(errors):+.0%}, half of them by more than {median(errors):+.0%}, and no public "
                "number that we found explains it"
            )
    return tuple(found)


def _nearest(kind: CaseKind, near: Sequence[CheckedRow], wanted: int) -> Sequence[CheckedRow]:
    """The first that are ``wanted``, and those that are as near as the last of them: names decide nothing."""
    far = _distance(kind, near[:wanted][-1].kind)
    return [row for row in near if _distance(kind, row.kind) <= far]


def _interval(errors: Sequence[float]) -> tuple[float, float]:
    if not errors:
        return -1.0, math.inf
    ordered, count = sorted(errors), len(errors)
    outside = max(1, math.floor((1 - COVERAGE) / 2 * (count + 1)))
    return ordered[outside - 1], ordered[-outside]


def _is_alike(one: CaseKind, other: CaseKind) -> bool:
    return one.generation == other.generation and len(_differences(one, other)) <= 1


def _differences(one: CaseKind, other: CaseKind) -> set[str]:
    return {name for name in _WEIGHTS if getattr(one, name) != getattr(other, name)}


def _distance(one: CaseKind, other: CaseKind) -> float:
    apart = sum(_WEIGHTS[name] for name in _differences(one, other))
    scale = min(abs(math.log2(one.gpus / other.gpus)), _MOST_SCALE)
    model = _FAMILY * (one.family != other.family) + _UNLIKE * (not _are_models_alike(one, other))
    return apart + model + _SCALE * scale


def _are_models_alike(one: CaseKind, other: CaseKind) -> bool:
    sizes = sorted((one.billions, other.billions))
    return one.attention == other.attention and sizes[1] <= SIZES_ALIKE * sizes[0]


def _attention(model: ModelShape) -> str:
    if model.linear is not None:
        return "linear"
    if model.window is not None:
        return "windows"
    return "mla" if model.latent is not None else "gqa"


def _overlap(setup: Setup, software: Software) -> str:
    if setup.schedule != "1f1b":
        return "merged"
    return "chunks" if software.hides_dispatch else "none"


def _generation(gpu: str) -> str:
    found = re.match(r"(GB|[ABH])\d+", gpu)
    return _GENERATIONS[found.group(1)] if found else "other"

"""The trust that an estimate deserves: published runs of its kind, how far off their predictions
were, and the interval that follows.

Published runs were predicted (docs/published.md), and their errors are shipped (checked_rows.json,
which `make published` writes). Runs of one project share people, machines and software, and so
their errors: a project is one source, whatever it publishes in how many releases. A new case is a
draw from a source that may be none of them. So its error has the distribution of a mixture (pooling
of distributions over groups, each group with one vote: Dunn, Wasserman, Ramdas, Distribution-Free
Prediction Sets for Two-Layer Hierarchical Models, JASA 2022, arXiv:1809.07441):

- each source votes with the weight of its nearest run; among its runs the vote is split by
  nearness. The nearness of a run is exp(-n), where n of the case's traits differ
  (:class:`CaseKind`);
- the case's own source, which nobody has seen, votes with all runs, each source alike
  (:data:`UNSEEN`), and with both :data:`EXTREMES` (:data:`BEYOND` each).

The interval leaves a tenth of the votes outside at each end (:data:`COVERAGE`). It is as wide as
few or far sources leave it: where no run was on such a machine at all, nothing is near, and it
reaches to the extremes. An estimate always lies in its interval: where runs of its kind were all
slower than predicted, it is one end.

With one whole source left out at a time the intervals hold more than they promise
(docs/published.md has the shares). Rejected: leaving out a run at a time, for the others of its
source know its error; releases of a project as sources of their own, which promised 80 % and held
72 % of the runs of a project that was left out; a normal distribution, whose ends a few far misses
decide; traits of unequal weight, which gained nothing."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from commlayer.profiles.shipped import shipped_data
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.declared_links import FABRICS, Link
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.mapping.token_routes import TokenRoutes

__all__ = [
    "CLOSE",
    "COVERAGE",
    "EXTREMES",
    "LEAST",
    "LINEAR_RUN",
    "ROUGH",
    "SHORT_LAYER_US",
    "TRAITS",
    "UNEXPLAINED",
    "CaseKind",
    "CheckedRow",
    "CheckedRows",
    "FittedErrors",
    "Validity",
    "Word",
    "after_fit",
    "assess",
    "cautions",
    "checked_rows",
    "fitted_errors",
    "kind_of",
    "quantiles",
    "widened",
]

Word = Literal["close", "rough", "unknown"]
"""The width of an interval: its ends at most :data:`CLOSE` times apart, at most :data:`ROUGH`, or
farther."""

CLOSE, ROUGH = 1.5, 2.5
COVERAGE = 0.8
"""The share of runs that an interval is meant to hold."""
UNSEEN, BEYOND = 0.5, 0.07
"""Votes of the source that nobody has seen: with all runs, and with each of the :data:`EXTREMES`; a
near source has one vote."""
EXTREMES = (0.7, 6.0)
"""A step over its estimate, at the fastest and at the slowest: a little beyond what any published
run took at the fast end (0.78); 6 is a bound taken for what nobody measured, and has no source."""
LINEAR_RUN = 1.49
"""The only published step of a model with linear attention over its plan: Qwen3-Next's 2.2 s, where
1.48 s are planned (docs/published.md, rows without a prediction). Upper ends are so many times as
far where no run has the case's attention."""
LEAST = 3
"""The number of runs from which on what they have in common is worth a caution."""
SHORT_LAYER_US = 12_000.0
"""Below this, by our estimate, a layer takes a micro-batch forward and backward so fast that its
host may be late with launching kernels, unless CUDA graphs hold them (NVIDIA's guide to DeepSeek-V3
on GB200 calls steps host-bound whose layers are as long). Launches are modelled by their mean (mapping/host_launches.py)."""
_SHOWN = 3
_MEASURED = "measured"
_GENERATIONS = {"A": "ampere", "H": "hopper", "B": "blackwell", "GB": "blackwell"}


class CaseKind(NamedTuple):
    """The kind of a case: what decides how near a published run is to it (:data:`TRAITS`), and its
    size.

    ``generation``: of the GPU (ampere, hopper, blackwell, other). ``fabric``: the network between
    nodes, or ``measured``: links as a profile has them. ``software``: the trainer's, by name.
    ``precision``: bf16 or fp8, of whichever recipe. ``dispatcher``: nccl, chunks (ours) or kernels
    by name, where there is expert parallelism.
    ``experts``: where they lie: alone (no expert parallelism), inside (an NVLink domain)
    or between (them). ``overlap``: what hides the exchange: none, chunks, or merged (other
    micro-batches' passes). ``fused``: whether experts' activation functions are part of their
    products (this year's kernels, and their graphs). ``short``: whether a layer's passes are
    (:data:`SHORT_LAYER_US`). ``sharded``: whether data parallelism shards weights. ``attention``:
    its kind (gqa, mla, windows, linear, indexed, compressed; the last four where any layer has
    it, the last one first). ``family``: the model. ``gpus``: no trait: cluster sizes of one run have like errors.
    """

    generation: str
    fabric: str
    software: str
    precision: str
    dispatcher: str
    experts: str
    overlap: str
    fused: bool
    short: bool
    sharded: bool
    attention: str
    family: str
    gpus: int

    def differs(self, other: CaseKind) -> tuple[str, ...]:
        """The names of the traits in which two cases differ."""
        return tuple(name for name in TRAITS if getattr(self, name) != getattr(other, name))


TRAITS = CaseKind._fields[:-1]
"""The fields that a case has or has not in common with a published run; each counts alike."""


class CheckedRow(NamedTuple):
    """A published run.

    ``key``: its name in docs/published.md or docs/papers.md. ``source``: the project or paper that
    published it. ``error``: predicted over published throughput, less 1: so the published step over
    the predicted one, less 1.
    """

    key: str
    source: str
    kind: CaseKind
    error: float


class FittedErrors(NamedTuple):
    """The errors of published runs that were predicted by a model that was fitted to one other run
    of their source, cluster and software (mapping/run_fit.py).

    ``differences``: traits in which the two runs differ. ``num_pairs``: as many differences have.
    ``low``, ``middle``, ``high``: of the published step over the predicted one, less 1, as in
    :class:`Validity`; each source, cluster and software has one vote, split by nearness."""

    differences: int
    num_pairs: int
    low: float
    middle: float
    high: float


class CheckedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of the published runs whose errors are shipped. ``kind``: the fields of each row's
    kind, in order. ``fitted``: by increasing differences."""

    kind: tuple[str, ...]
    rows: tuple[CheckedRow, ...]
    fitted: tuple[FittedErrors, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The error that an estimate of some kind may have, and the published runs that say so.

    Attributes:
        low, middle, high: a real step over the estimated one, less 1: the ends of the interval,
            with 0 between them, and the median.
        num_rows, num_sources: runs of the very kind, whatever their size, and how many sources they
            come from.
        is_new: no run was on such a machine: with GPUs of this generation, or with this network
            or one of the same curves.
        is_new_attention: no run was of a model with this attention.
        nearest: the nearest runs, the nearest first.
        fitted: what a fit to measured runs is worth, from which the interval comes; None: there was
            no fit.
        own: the measured step of this very case over the estimated one, less 1, the fastest of
            several; 0: nobody measured it.
    """

    kind: CaseKind
    low: float
    middle: float
    high: float
    num_rows: int
    num_sources: int
    is_new: bool
    nearest: tuple[CheckedRow, ...]
    fitted: FittedErrors | None = None
    is_new_attention: bool = False
    own: float = 0.0

    @property
    def is_unseen(self) -> bool:
        """Whether no run was on such a machine or of such an attention: none says what is likely."""
        return self.is_new or self.is_new_attention

    @property
    def ratio(self) -> float:
        """The upper end of the interval over the lower one."""
        return (1 + self.high) / (1 + self.low)

    @property
    def word(self) -> Word:
        """The width of the interval in a word."""
        return "close" if self.ratio <= CLOSE else "rough" if self.ratio <= ROUGH else "unknown"

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
    kernels, nodes = software.kernels, cluster.nodes_of(setup.layout("ep"), setup.gpus)
    if kernels is not None and TokenRoutes.of(kernels, job, setup, nodes, software) is None:
        kernels = None  # they do not dispatch this mapping, which a note says
    chunks = software.hides_dispatch or software.two_levels
    return CaseKind(
        generation=_generation(cluster.gpu.name),
        # A declared cluster without a name has InfiniBand's curves.
        fabric=cluster.fabric or (_MEASURED if cluster.measured else "infiniband"),
        software=re.split("[,@]", software.name)[0],
        precision="bf16" if setup.precision == "bf16" else "fp8",
        dispatcher=kernels.name if kernels is not None else "chunks" if chunks else "nccl",
        experts=experts,
        overlap="merged" if setup.schedule != "1f1b" else "chunks" if software.hides_dispatch else "none",
        fused=software.fuses_experts,
        short=layer_us < SHORT_LAYER_US,
        sharded=setup.zero == 3,
        attention=_attention(job.model),
        family=job.model.family or job.model.name,
        gpus=setup.gpus,
    )


@cache
def _shipped() -> CheckedRows:
    """The file, read once."""
    return shipped_data("commlayer.scheduler.mapping", "checked_rows.json", CheckedRows, "list of published runs")


def checked_rows() -> tuple[CheckedRow, ...]:
    """The published runs whose errors are shipped."""
    return _shipped().rows


def fitted_errors() -> tuple[FittedErrors, ...]:
    """The errors that a fit to one run leaves for another one, by how much they differ."""
    return _shipped().fitted


def after_fit(validity: Validity, differences: int) -> Validity:
    """The validity of an estimate by a model that was fitted to a run which differs in so many
    traits: the interval of published runs that were predicted so, where that is narrower."""
    like = [each for each in fitted_errors() if each.differences <= differences]
    if not like:
        return validity
    low, middle, high = like[-1][-3:]
    after = replace(validity, low=min(low, 0.0), middle=middle, high=max(high, 0.0), fitted=like[-1])
    return after if after.ratio < validity.ratio else validity


def widened(validity: Validity, errors: Sequence[float]) -> Validity:
    """The validity with an interval that has ``errors`` inside as well."""
    return replace(validity, low=min(validity.low, *errors), high=max(validity.high, *errors))


def assess(kind: CaseKind, rows: Sequence[CheckedRow] | None = None) -> Validity:
    """The interval of an estimate of ``kind`` by ``rows``, or by the shipped ones; without any, all
    between the extremes."""
    known = checked_rows() if rows is None else rows
    is_new = kind.generation not in {row.kind.generation for row in known} or _curves(kind.fabric) not in {
        _MEASURED,
        *(_curves(row.kind.fabric) for row in known),
    }
    is_new_attention = kind.attention not in {row.kind.attention for row in known}
    sources: dict[str, list[CheckedRow]] = defaultdict(list)
    for row in known:
        sources[row.source].append(row)
    votes = [(extreme - 1, BEYOND) for extreme in EXTREMES]  # errors, and their votes
    for of_source in sources.values():
        near = [math.exp(-len(kind.differs(row.kind))) for row in of_source]
        vote = 0.0 if is_new else max(near) / sum(near)
        unseen = UNSEEN / len(sources) / len(of_source)
        votes += [(row.error, vote * each + unseen) for row, each in zip(of_source, near, strict=True)]
    low, middle, high = quantiles(sorted(votes))
    if is_new_attention and not is_new:
        high = (1 + max(high, 0.0)) * LINEAR_RUN - 1
    same = [row for row in known if not kind.differs(row.kind)]

    def farness(row: CheckedRow) -> tuple[float, float]:
        """The traits that differ, then the doublings between the sizes."""
        return len(kind.differs(row.kind)), abs(math.log2(kind.gpus / row.kind.gpus))

    return Validity(
        kind=kind,
        low=min(low, 0.0),
        middle=middle,
        high=max(high, 0.0),
        num_rows=len(same),
        num_sources=len({row.source for row in same}),
        is_new=is_new,
        is_new_attention=is_new_attention,
        nearest=tuple(sorted(known, key=farness))[:_SHOWN],
    )


def _curves(fabric: str) -> Link | str:
    """The curves of a network, which others may share; its name where nobody declared any."""
    return FABRICS[fabric].link if fabric in FABRICS else fabric


def quantiles(votes: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The errors below which a tenth, a half and nine tenths of the votes lie. ``votes``: errors,
    each with its votes, in order."""
    total = sum(vote for _, vote in votes)

    def below(share: float) -> float:
        counted = 0.0
        for error, vote in votes:
            counted += vote
            if counted >= share * total:
                return error
        return votes[-1][0]

    outside = (1 - COVERAGE) / 2
    return below(outside), below(0.5), below(1 - outside)


UNEXPLAINED: tuple[tuple[str, Callable[[CaseKind], bool]], ...] = (
    (
        "tokens by NCCL's all_to_all on Blackwell",
        lambda kind: kind.dispatcher == "nccl" and kind.generation == "blackwell",
    ),
    ("windows of attention, as gpt-oss has them", lambda kind: kind.attention == "windows"),
    (f"layers of less than {SHORT_LAYER_US / 1e3:.0f} ms a micro-batch", lambda kind: kind.short),
)
"""Traits that published runs which are far from their predictions have in common. Mechanisms with
public numbers behind them were added until these were left (docs/published.md)."""
_FAR = 0.15
"""The median error from which on such runs are worth a caution."""


def cautions(kind: CaseKind, rows: Sequence[CheckedRow] | None = None) -> tuple[str, ...]:
    """Say of what in a case of ``kind`` published runs are slower than predicted, without that any
    public number says why."""
    known, said = checked_rows() if rows is None else rows, []
    for words, has in UNEXPLAINED:
        errors = [row.error for row in known if has(row.kind)]
        if has(kind) and len(errors) >= LEAST and median(errors) > _FAR:
            said.append(
                f"{words}: the prediction is likely too fast: for {len(errors)} published runs with that it was off by "
                f"{min(errors):+.0%} to {max(errors):+.0%}, half of them by more than {median(errors):+.0%}, and no public "
                "number that we found explains it"
            )
    return tuple(said)


def _attention(model: ModelShape) -> str:
    if model.compressed is not None:
        return "compressed"
    if model.indexer is not None:
        return "indexed"
    if model.linear is not None:
        return "linear"
    if model.window is not None:
        return "windows"
    return "mla" if model.latent is not None else "gqa"


def _generation(gpu: str) -> str:
    name = re.match(r"(GB|[ABH])\d+", gpu)
    return _GENERATIONS[name.group(1)] if name else "other"

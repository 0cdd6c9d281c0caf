"""A published row as a job, a cluster, software and a mapping; and what the planner predicts for it.

What the planner has no word for is left out and named (:attr:`Outcome.left_out`); what it cannot express at all raises
nothing here but becomes the outcome's reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from published_data import Published

from commlayer.profiles.curve import prediction_error
from commlayer.profiles.errors import CommlayerError
from commlayer.scheduler.mapping import catalog, clusters, flops
from commlayer.scheduler.mapping.fitted_estimator import FittedEstimator
from commlayer.scheduler.mapping.job import Job, Recompute, Setup
from commlayer.scheduler.mapping.offloading import KEPT, canonical_offload
from commlayer.scheduler.mapping.pipeline_schedule import PipelineSchedule
from commlayer.scheduler.mapping.precisions import Precision
from commlayer.scheduler.mapping.recomputation import canonical
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.run_fit import RunFit
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import (
    COMMLAYER,
    MEGATRON,
    Software,
    with_dispatcher,
    with_fused_experts,
    with_graphs,
    with_optimizer,
)
from commlayer.scheduler.mapping.validity import CaseKind, CheckedRow, kind_of
from commlayer.scheduler.programs import run_alone

__all__ = ["CLUSTERS", "Outcome", "order_pairs", "predict", "predict_all"]

CLUSTERS = {
    "h100": "h100-eos",
    "h800": "h800",
    "b200": "b200-hgx",
    "b300": "b300-hgx",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
"""The declared cluster that stands for a source's system."""

_FSDP = replace(MEGATRON, name="fsdp2", host="unknown")
"""Its rows show nothing of a host: without they are predicted 12 % too slow in the mean already."""
_MEGASCALE = replace(COMMLAYER, name="megascale", overlaps_parameters=True, gradient_bytes=2, host="runs ahead")
"""Chunks beside computation, as this project's layers; gradients cross in BF16 (section 5)."""
_GRAPHS = {"attention and router": "attention+router", "full iteration": "full-iteration"}
"""Names of graphs; that of shared experts is a router's."""
_PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16",
    "fp8": "fp8-current",
    "blockwise": "fp8-blockwise",
    "mxfp8": "fp8-mxfp8",
}
_SOFTWARE = {"megatron": MEGATRON, "fsdp2": _FSDP, "megascale": _MEGASCALE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and what came of it. ``published``, ``predicted``: tokens/s of a GPU. ``reason``: why there is no prediction.
    ``passes_us``: of a layer with experts, forward and backward, nothing in each other's way."""

    row: Published
    published: float = 0.0
    estimate: StepEstimate | None = None
    kind: CaseKind | None = None
    reason: str = ""
    left_out: tuple[str, ...] = field(default=())
    passes_us: tuple[float, float] = (0.0, 0.0)

    @property
    def predicted(self) -> float:
        return 0.0 if self.estimate is None else self.estimate.tokens_per_s / self.row.gpus

    @property
    def step_us(self) -> float:
        """The published step, µs."""
        return 0.0 if self.estimate is None else self.estimate.step_us * self.predicted / self.published

    @property
    def error(self) -> float | None:
        """The error of the predicted throughput; None where there is none."""
        return None if self.estimate is None else prediction_error(self.predicted, self.published)

    @property
    def checked(self) -> CheckedRow | None:
        """Return what an estimate of its kind is told."""
        return (
            None
            if self.error is None or self.kind is None or self.row.fitted
            else CheckedRow(self.row.key, self.row.project, self.kind, round(self.error, 4))
        )


def predict_all(rows: Iterable[Published]) -> list[Outcome]:
    return [predict(row) for row in rows]


def predict(row: Published, fit: RunFit | None = None) -> Outcome:
    """Predict one row; ``fit``: by a model that was fitted to others."""
    if row.cannot:
        return Outcome(row, reason=row.cannot)
    try:
        job = _job(row)
        cluster = clusters.load(CLUSTERS.get(row.system, row.system))
        software, left_out = _software(row)
        estimator = FittedEstimator(job, cluster, software, fit=fit) if fit else Estimator(job, cluster, software)
        setup, more = _setup(row, estimator)
        estimate = estimator.estimate(setup, detail=False)
    except CommlayerError as error:
        return Outcome(row, reason=str(error))
    kind = kind_of(job, setup, estimator.cluster, software, estimate.step_us * (1 - estimate.bubble))
    forward, backward = (run_alone(program).total_us for program in estimator.programs(setup, job.model.moe_layers > 0))
    return Outcome(row, _tokens(row, job), estimate, kind, "", (*left_out, *more), (forward, backward))


def _job(row: Published) -> Job:
    model = catalog.load(row.model)
    return Job(
        model=replace(model, mtp_layers=row.mtp) if row.mtp else model,
        gpus=row.gpus,
        global_batch=row.global_batch,
        sequence=row.sequence,
        capacity_factor=row.capacity,
    )


def _tokens(row: Published, job: Job) -> float:
    """Return the published throughput in tokens/s of a GPU.

    TFLOP/s become tokens by our count of FLOPs, which agrees with Megatron's within a percent.
    """
    if row.unit == "tokens/s/GPU":
        return row.published
    if row.unit == "step s":
        return job.tokens / row.gpus / row.published
    return row.published * 1e12 / (flops.of_step(job) / job.tokens)


def _software(row: Published) -> tuple[Software, list[str]]:
    software = _SOFTWARE[row.software]
    if row.software != "megascale":
        software = with_optimizer(with_dispatcher(software, row.dispatcher), main_grads_dtype=row.gradients)
    if row.graph == "full iteration":  # Megatron-Bridge's recipes have both or none
        software = with_fused_experts(software)
    graph = row.graph.removesuffix(", router and shared experts")
    graph = "attention and router" if graph != row.graph else graph
    return with_graphs(software, _GRAPHS.get(graph, graph)), []


def _setup(row: Published, estimator: Estimator) -> tuple[Setup, list[str]]:
    """The row's mapping. Where a source says nothing of recomputation, the least that fits."""
    schedule, left_out = _schedule(row)
    setup = Setup(
        gpus=row.gpus,
        tp=row.tp,
        cp=row.cp,
        pp=row.pp,
        ep=row.ep,
        etp=row.etp,
        vpp=row.vpp,
        pipeline_layout=row.layout,
        micro_batch=row.micro_batch,
        recompute=_recompute(row),
        precision=_PRECISIONS[row.precision],
        schedule=schedule,
        attention="ulysses" if row.software == "megascale" else "tensor",
        zero=row.zero,
        offload=canonical_offload("+".join(row.offload) or KEPT),
    )
    if "recompute" in row.assumed and not row.recompute:
        for recompute in ("none", "megascale", "full"):
            setup = replace(setup, recompute=recompute)
            if estimator.memory(setup).total <= estimator.memory_limit:
                break
    return setup, left_out


def _schedule(row: Published) -> tuple[PipelineSchedule, list[str]]:
    """The pipeline's schedule; without chunks of layers Megatron-Core merges nothing in a pipeline."""
    if row.overlap == "dualpipe":
        return "dualpipe", []
    if row.overlap != "1f1b" or row.ep == 1:
        return "1f1b", []
    if row.pp > 1 and row.vpp == 1:
        return "1f1b", ["overlap of merged micro-batches without chunks"]
    return "1f1b-overlap", []


def _recompute(row: Published) -> Recompute:
    if not row.recompute or row.recompute == ("megascale",) or row.recompute == ("full",):
        return row.recompute[0] if row.recompute else "none"
    return canonical("+".join(row.recompute))


def order_pairs(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome, bool]]:
    """Pairs of two mappings of one model, system, number of GPUs and batch from one source, more than 5 % apart as published: the
    faster, the slower, and whether they are predicted in this order."""
    found = [each for each in outcomes if each.estimate is not None]
    pairs = []
    for one, other in combinations(found, 2):
        if _case(one.row) != _case(other.row) or _mapping(one.row) == _mapping(other.row):
            continue
        if abs(one.published / other.published - 1) > 0.05:
            fast, slow = (one, other) if one.published > other.published else (other, one)
            pairs.append((fast, slow, fast.predicted > slow.predicted))
    return pairs


def _case(row: Published) -> tuple[object, ...]:
    return row.source, row.model, row.system, row.gpus, row.precision, row.global_batch, row.sequence


def _mapping(row: Published) -> tuple[object, ...]:
    degrees = row.tp, row.cp, row.pp, row.vpp, row.ep, row.etp, row.micro_batch, row.zero
    return *degrees, row.dispatcher, row.overlap, row.software

"""A training step that nobody has run: how long it takes on a cluster, what of it is communication,
what it needs in memory.

Layers are programs of what is computed and what is sent
(:mod:`commlayer.scheduler.mapping.layers`). Every collective in them is planned and priced as the
run time would (``choose``, ``price``), and where calls meet on a link the conflict model says what
that costs (:mod:`commlayer.scheduler.conflicts`), lanes included: there is no other cost model. A
step is made of parts (mapping/step_parts.py), through a pipeline (mapping/step_pipeline.py), in
memory (mapping/step_memory.py); a search asks for bounds of its time first
(mapping/step_bounds.py). On top of the layers:

- the pipeline: micro-batches through the slowest stage, by themselves or merged with others, and
  the bubble of the schedule (mapping/pipeline_schedule.py);
- activations between stages: those on the longest chain of tasks, of which interleaving leaves few
  (``hops``);
- gradients and sharded weights at the edges of a step, as far as the backward and the forward pass
  do not hide them (mapping/pipeline_stage.py);
- the optimizer: Adam reads and writes the sharded state once, bound by memory.

Of the host only the launches of layers are modelled (mapping/host_launches.py). Not modelled: data
loading, checkpoints, stragglers, and collectives that mapping/step_collectives.py lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters, flops, memory, parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.compute import DEFAULT_FACTOR, GpuCompute, efficiency_for
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_work import AnyCompute, LayerWork, head_work
from commlayer.scheduler.mapping.layers import LayerBuilder, dispatch_note
from commlayer.scheduler.mapping.layout_balance import LaidOut
from commlayer.scheduler.mapping.model import ModelShape, mechanisms
from commlayer.scheduler.mapping.offloading import KEPT, canonical_offload, offloaded_modules, unfit_offload
from commlayer.scheduler.mapping.parameters import Stage
from commlayer.scheduler.mapping.pipeline_stage import Exposed, exposed_gradients, exposed_parameters
from commlayer.scheduler.mapping.recomputation import unfit_recomputation
from commlayer.scheduler.mapping.result import Memory, StepEstimate, Traffics
from commlayer.scheduler.mapping.software import COMMLAYER, Software
from commlayer.scheduler.mapping.step_bounds import StepBounds
from commlayer.scheduler.mapping.step_collectives import StepCollective, whole_step
from commlayer.scheduler.mapping.step_memory import StepMemory
from commlayer.scheduler.mapping.step_parts import StepParts
from commlayer.scheduler.mapping.step_pipeline import StepPipeline
from commlayer.scheduler.mapping.validity import LINEAR_RUN, assess, cautions, checked_rows, kind_of
from commlayer.scheduler.programs import Compute, Item

__all__ = ["Estimator"]

_ORDER = (
    *("attention", "experts", "dense", "memory", "head", "recompute", "host"),
    *("dispatch", "combine", "tp", "cp", "pp"),
    *("gradients", "parameters", "offload", "bubble", "optimizer"),
)
_WORK = ("attention", "experts", "dense", "memory", "head", "recompute", "optimizer")

_UNMEASURED = {
    "linear attention": "linear",
    "attention with an indexer": "indexed",
    "compressed attention": "compressed",
}
"""Mechanisms whose kernels nobody measured here, each with its word in the kind of a case."""


class Estimator:
    """Estimates of one job on one cluster, for any setup. Not for several threads.

    Args:
        software: what the trainer's software does (:mod:`commlayer.scheduler.mapping.software`).
        efficiency: factor on the GPU's declared rates of matrix products and attention; None: what
            was calibrated for the model's family, else the median of those that were; ``notes`` of
            every estimate say so then.
        compute: in place of the GPU's declared one, such as a measured one.
        loads: experts' popularity, in place of ``job.loads``; and both in place of
            ``job.imbalance``, which then follows from ep.

    Raises:
        UsageError: loads of another number of experts than the model's; a dispatcher's kernels on a
            measured cluster.
        DispatchError: a dispatcher's kernels that do not run on the GPU.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        software: Software = COMMLAYER,
        *,
        efficiency: float | None = None,
        compute: AnyCompute | None = None,
        loads: Loads | None = None,
    ) -> None:
        loads = job.loads if loads is None else loads
        if loads is not None and len(loads.shares) != job.model.experts:
            raise UsageError(
                f"loads: expected a share for each of {job.model.experts} experts, got {len(loads.shares)}"
            )
        if software.kernels is not None:
            software.kernels.check(cluster.gpu)
        if software.kernels is not None and software.kernels.measured is None and cluster.measured:
            raise UsageError(
                f"cluster {cluster.name!r} was measured, and nobody measured {software.kernels.name} on it: take a declared "
                "cluster, the dispatcher nccl or commlayer, or a table of its times"
            )
        self.notes: tuple[str, ...] = tuple(_model_notes(job.model))
        if efficiency is None and compute is None:
            efficiency, calibrated = efficiency_for(job.model)
            self.notes += calibrated
        cluster, used = clusters.fitted(cluster, job.gpus)
        self.notes += (used,) if used else ()
        if software.offloaded_optimizer:
            self.notes += (
                f"{software.offloaded_optimizer:.0%} of the optimizer's state is in the host's memory: gradients and weights "
                f"cross to it at {cluster.gpu.host_gbps:g} GB/s, but what its own Adam takes is not modelled",
            )
        self.job, self.cluster, self.software, self.loads = job, cluster, software, loads
        self.efficiency = efficiency or DEFAULT_FACTOR
        self.compute = compute or GpuCompute(cluster.gpu, self.efficiency)
        self._parts = StepParts(job, cluster, software, self.compute, loads)
        self._pipeline = StepPipeline(self._parts)
        self._bounds = StepBounds(self._pipeline)
        self._memory = StepMemory(self._bounds)
        self.pricer, self.memory_limit = self._parts.pricer, self._memory.limit

    def memory(self, setup: Setup) -> Memory:
        """Bytes of the fullest GPU. Raises as
        :func:`commlayer.scheduler.mapping.memory.estimate`."""
        return self._memory.of(setup)

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        """The setup with the pipeline layout that it gets: as :meth:`StepMemory.laid_out`."""
        return self._memory.laid_out(setup, limit)

    def bound_us(self, setup: Setup, level: int = 0) -> float:
        """A time that :meth:`estimate` is never below, µs: as :meth:`StepBounds.us`, from level 3
        on of the layout that is chosen where the setup's is ``auto``."""
        return self._bounds.us(self.laid_out(setup, self.memory_limit).setup if level > 2 else setup, level)

    def work(self, setup: Setup, is_moe: bool) -> LayerWork:
        """Find what one layer computes for a micro-batch."""
        return self._parts.builder(setup).work(setup, is_moe)

    def programs(self, setup: Setup, is_moe: bool) -> tuple[list[Item], list[Item]]:
        """Return the programs of a layer for one micro-batch, forward and backward; each ends with
        the time for which the host holds it up."""
        passes, builder = self._parts.programs(setup, is_moe), self._parts.builder(setup)
        forward, backward = (
            [*program, Compute(max(held.total_us - builder.timed(program).total_us, 0.0), "host")]
            for held, program in zip(self._parts.layer_times(setup, is_moe), passes, strict=True)
        )
        return forward, backward

    def ends_us(self, setup: Setup) -> tuple[float, float, float]:
        """Time the head of a micro-batch, forward and backward, and the optimizer of a step, µs."""
        head = head_work(self._parts.builder(setup).job, setup, self.compute)
        return head.forward, head.backward, self._parts.optimizer_us(setup)

    def estimate(self, setup: Setup, *, detail: bool = True) -> StepEstimate:
        """The step of ``setup``. ``detail``: with its traffic and its forecasts, which take longer
        than its time.

        Raises:
            UsageError, GroupError: degrees that do not go with the model or the batch; names what
                would.
            PlanError: the cluster's profile lacks a curve that a call needs.

        A pipeline layout ``auto`` becomes the one that is chosen (:meth:`laid_out`), which the
        estimate's ``setup`` has.
        """
        job = self._parts.builder(setup).job
        setup.check(job)
        setup = self.laid_out(setup, self.memory_limit).setup
        parameters.check(job.model, setup, self.software)
        why = unfit_recomputation(job.model, self.cluster.gpu, setup.recompute, setup.precision, setup.is_merged)
        if why:
            raise UsageError(f"recompute {setup.recompute}: {why}")
        stages = self._parts.stages(setup)
        times = self._pipeline.breakdown(setup, stages)
        gradients = self._parts.exposed(exposed_gradients, setup, stages[0])
        weights = self._parts.exposed(exposed_parameters, setup, stages[0])
        for part, each in (("gradients", gradients), ("parameters", weights)):
            times.expose(part, "dp", each.us, each.links)
        optimizer_us = self._parts.optimizer_us(setup)
        times.parts["optimizer"] = optimizer_us
        times.total_us += optimizer_us
        of_step = flops.of_step(job) / job.gpus / times.total_us * 1e-6
        worked = sum(times.parts.get(part, 0.0) for part in _WORK)
        busy = {"compute": worked, "host": times.parts.get("host", 0.0), **times.links}
        found = StepEstimate(
            job=job,
            setup=setup,
            cluster=self.cluster.name,
            software=self.software.name,
            step_us=times.total_us,
            mfu=of_step / self.cluster.gpu.bf16_tflops,
            tflops=of_step,
            memory=self.memory(setup),
            memory_limit=self.memory_limit,
            parts={part: times.parts[part] for part in _ORDER if times.parts.get(part)},
            exposed_us={lane: us for lane, us in times.exposed.items() if us},
            links_us={link: us for link, us in times.links.items() if us},
            traffics=(),
            bubble=times.parts.get("bubble", 0.0) / times.total_us,
            bottleneck=max(busy, key=lambda name: busy[name]),
            notes=(
                *self.notes,
                *self._notes(setup, stages, of_step / self.cluster.gpu.bf16_tflops),
            ),
        )
        return self._detailed(found, stages, gradients, weights) if detail else found

    def _notes(self, setup: Setup, stages: tuple[Stage, ...], mfu: float) -> Iterator[str]:
        """The notes on one setup: on its dispatch, on offloading, and a doubt where its MFU cannot be."""
        note = dispatch_note(self._parts.builder(setup), setup)
        if note and any(stage.sparse for stage in stages):
            yield note
        job, gpu = self._parts.builder(setup).job, self.cluster.gpu
        if setup.offload != KEPT:
            is_moe, needed = job.model.moe_layers > 0, self.memory(setup)
            size = memory.offloaded_layer_bytes(job, setup, gpu, software=self.software, is_moe=is_moe)
            yield (
                f"{size / 1e6:,.0f} MB of a layer and a micro-batch cross to the host and back, at {gpu.host_gbps:g} GB/s each "
                f"way, beside a neighbouring layer's work; the fullest GPU has {needed.offloaded / 1e9:.1f} GB in the host's "
                "memory"
            )
            modules = offloaded_modules(setup.offload)
            for module in sorted(modules):
                others = canonical_offload("+".join(modules - {module}) or KEPT)
                is_fit = not unfit_offload(others, setup.recompute)
                if is_fit and self.memory(replace(setup, offload=others)).total <= needed.total:
                    yield f"offloading {module} frees nothing here"
        if mfu > gpu.most_mfu(setup.precision):
            yield f"an MFU of {mfu:.0%} cannot be: look at efficiency, and at a capacity factor that drops what MFU counts"

    def _detailed(
        self, found: StepEstimate, stages: tuple[Stage, ...], gradients: Exposed, weights: Exposed
    ) -> StepEstimate:
        """With its traffic, and the forecasts of the first stage's first and last micro-batch (of
        one layer, where nothing is overlapped there)."""
        setup = found.setup
        builder = self._parts.builder(setup)
        forward, backward = self._parts.programs(setup, any(stage.sparse for stage in stages))
        counted: dict[StepCollective, int] = {}  # equal ones together, in order of first use
        exchanges = whole_step(builder.job, setup, builder.software, stage=stages[-1].number)
        for exchange in builder.sent(setup, exchanges, builder.levels(setup)[0]):
            one = replace(exchange, count=1)
            counted[one] = counted.get(one, 0) + exchange.count
        kind = kind_of(self.job, setup, self.cluster, self.software, found.step_us * (1 - found.bubble))
        return replace(
            found,
            notes=(*found.notes, *cautions(kind)),
            traffics=tuple(_traffic(builder, setup, exchange, count) for exchange, count in counted.items()),
            forward=weights.forecast or builder.simulated(forward)[1],
            backward=gradients.forecast or builder.simulated(backward)[1],
            merged=builder.simulated(self._parts.merged_program(setup, True))[1] if setup.is_merged else None,
            ranks=self._pipeline.rank_times(setup, stages),
            mean_parts=self._pipeline.over_ranks(setup, stages, found.parts),
            validity=assess(kind),
        )


def _traffic(builder: LayerBuilder, setup: Setup, exchange: StepCollective, count: int) -> Traffics:
    """``count`` calls of one kind, with the price of each, for people to read."""
    price, collective, size = builder.calls.price(setup, exchange), exchange.collective, exchange.logical_bytes
    names = exchange.name, exchange.axis, exchange.lane
    return Traffics(*names, collective, size, price.nodes, count, price.us, price.name, price.link)


def _model_notes(model: ModelShape) -> Iterator[str]:
    """Say what an estimate of ``model`` leaves out, and which of its kernels nobody measured."""
    if model.approximates:
        yield f"{model.name} is planned without {model.approximates}"
    for name in mechanisms(model):
        if (attention := _UNMEASURED.get(name)) is None:
            continue
        published = "no published run with it is known"
        if ratios := sorted(1 + row.error for row in checked_rows() if row.kind.attention == attention):
            runs = counted(len(ratios), "published run")
            published = f"{runs} with it took {ratios[0]:.2f} to {ratios[-1]:.2f} times as long as planned"
        elif attention == "linear":
            published = f"one published run with it took {LINEAR_RUN:g} times as long as planned"
        yield (
            f"the kernels of {name} are taken at the rate of flash attention, which nobody measured: {published} "
            "(docs/published.md)"
        )

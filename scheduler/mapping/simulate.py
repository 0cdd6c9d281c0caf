"""A training step that nobody has run: how long it takes on a cluster, what of it is communication, what it needs in memory.

Layers are programs of what is computed and what is sent (:mod:`commlayer.scheduler.mapping.layers`). Every collective in
them is planned and priced as the run time would (``choose``, ``price``), and where calls meet on a link the conflict model says
what that costs (:mod:`commlayer.scheduler.conflicts`), lanes included: there is no other cost model. On top of the layers:

- the pipeline: micro-batches through the slowest stage, by themselves or merged with others, and the bubble of the schedule
  (mapping/pipeline_schedule.py);
- activations between stages: those on the longest chain of tasks, of which interleaving leaves few (``hops``);
- gradients and sharded weights at the edges of a step, as far as the backward and the forward pass do not hide them
  (mapping/pipeline_stage.py);
- the optimizer: Adam reads and writes the sharded state once, bound by memory.

Not modelled: data loading, checkpoints, stragglers, host stalls, and collectives that mapping/step_collectives.py lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters, flops, memory, parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.compute import DEFAULT_FACTOR, GpuCompute, efficiency_for
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_work import AnyCompute, LayerWork, head_work, tokens_of
from commlayer.scheduler.mapping.layers import LayerBuilder, group_nodes
from commlayer.scheduler.mapping.layout_balance import (
    LaidOut,
    LayerTimes,
    balanced,
    least_slowest_us,
    move_layers,
    owners,
)
from commlayer.scheduler.mapping.model import layer_kinds
from commlayer.scheduler.mapping.offloading import KEPT, canonical_offload, offloaded_modules, unfit_offload
from commlayer.scheduler.mapping.parameters import Stage
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT, ended, parse_layout, written
from commlayer.scheduler.mapping.pipeline_orders import laid_out_us
from commlayer.scheduler.mapping.pipeline_schedule import (
    StageTimes,
    bubble_us,
    course,
    hops,
    in_flight_by_chunk,
    is_dual,
    merged_shares,
)
from commlayer.scheduler.mapping.pipeline_stage import (
    Exposed,
    boundary_us,
    ends,
    exposed_gradients,
    exposed_parameters,
    least_exposed,
    passing,
)
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.recomputation import unfit_recomputation
from commlayer.scheduler.mapping.result import Memory, StepEstimate, Traffics
from commlayer.scheduler.mapping.software import COMMLAYER, Software
from commlayer.scheduler.mapping.step_collectives import SEND_RECV, StepCollective, whole_step
from commlayer.scheduler.mapping.validity import assess, cautions, kind_of
from commlayer.scheduler.plan import Span
from commlayer.scheduler.programs import Breakdown, Item, run_alone
from commlayer.scheduler.traffic import link_over

__all__ = ["RESERVE", "Estimator"]

RESERVE = 0.06
"""The part of a GPU's memory that CUDA, NCCL and fragmentation take before a model does."""


class Estimator:
    """Estimates of one job on one cluster, for any setup. Not for several threads.

    Args:
        software: what the trainer's software does (:mod:`commlayer.scheduler.mapping.software`).
        efficiency: factor on the GPU's declared rates of matrix products and attention; None: what was calibrated for the model's
            family, else the median of those that were; ``notes`` of every estimate say so then.
        compute: in place of the GPU's declared one, such as a measured one.
        loads: experts' popularity, in place of ``job.loads``; and both in place of ``job.imbalance``, which then follows from ep.

    Raises:
        UsageError: loads of another number of experts than the model's; a dispatcher's kernels on a measured cluster.
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
        if software.kernels is not None and cluster.measured:
            raise UsageError(
                f"cluster {cluster.name!r} was measured, and nobody measured {software.kernels.name} on it: take a declared "
                "cluster, or the dispatcher nccl or commlayer"
            )
        self.notes: tuple[str, ...] = ()
        if efficiency is None and compute is None:
            efficiency, self.notes = efficiency_for(job.model)
        cluster, used = clusters.fitted(cluster, job.gpus)
        self.notes += (used,) if used else ()
        if software.offloaded_optimizer:
            self.notes += (
                f"{software.offloaded_optimizer:.0%} of the optimizer's state is in the host's memory: gradients and weights "
                f"cross to it at {cluster.gpu.host_gbps:g} GB/s, but what its own Adam takes is not modelled",
            )
        self.job, self.cluster, self.software, self.loads = job, cluster, software, loads
        self.compute = compute or GpuCompute(cluster.gpu, efficiency or DEFAULT_FACTOR)
        self.pricer = Pricer(cluster, software.strategies)
        self.memory_limit = cluster.gpu.memory_bytes * (1 - RESERVE)
        self._kinds = layer_kinds(job.model)
        every = (*self._kinds, *self._kinds[-1:] * job.model.mtp_layers)
        self._numbers = {is_moe: every.count(is_moe) for is_moe in sorted(set(every))}
        """How many layers there are with experts, and with a dense FFN, modules' among them."""
        self._builders: dict[float, LayerBuilder] = {}
        self._known: dict[tuple[object, ...], Any] = {}

    def memory(self, setup: Setup) -> Memory:
        """Bytes of the fullest GPU. Raises as :func:`commlayer.scheduler.mapping.memory.estimate`."""
        laid = self.laid_out(setup, self.memory_limit).setup

        def counted() -> Memory:
            job, gpu = self._job(laid), self.cluster.gpu
            return memory.estimate(job, laid, self.software.gradient_bytes, software=self.software, gpu=gpu)

        return _kept(self._known, ("memory", laid), counted)

    def bound_us(self, setup: Setup, level: int = 0) -> float:
        """A time that :meth:`estimate` is never below, µs.

        ``level``: 0 of computation and bubble; 1 of layers that take as long as tokens are on their way to experts, where
        computation takes less; 2 of all calls that layers and ends make, but for those of ZeRO 2 and 3; 3 of these too, and of
        what passes cannot hide of gradients and weights; 4 with gradients and weights sent when they are ready, nothing in each
        other's way. Each takes longer to find than the one before. For setups that :meth:`estimate` would take: nothing is
        checked. With the pipeline layout ``auto``, up to level 2, it is a bound of every layout.
        """
        if level > 2:
            setup = self.laid_out(setup, self.memory_limit).setup
        total = self._optimizer_us(setup)
        if level <= 2 and setup.zero > 1:
            setup = replace(setup, zero=1)
        total += self._least_pipeline_us(setup, level)
        if level >= 2:
            total += self._sending_us(setup)
        if level == 3:
            total += self._least_exposed_us(setup)
        elif level > 3:
            stage = self._stages(setup)[0]
            for ask in (exposed_gradients, exposed_parameters):
                total += self._exposed(ask, setup, stage, is_bound=True).us
        return total

    def programs(self, setup: Setup, is_moe: bool) -> tuple[list[Item], list[Item]]:
        """Return the programs of a layer for one micro-batch, forward and backward."""
        return self._programs(setup, is_moe)

    def ends_us(self, setup: Setup) -> tuple[float, float, float]:
        """Time the head of a micro-batch, forward and backward, and the optimizer of a step, µs."""
        head = head_work(self._job(setup), setup, self.compute)
        return head.forward, head.backward, self._optimizer_us(setup)

    def estimate(self, setup: Setup, *, detail: bool = True) -> StepEstimate:
        """The step of ``setup``. ``detail``: with its traffic and its forecasts, which take longer than its time.

        Raises:
            UsageError, GroupError: degrees that do not go with the model or the batch; names what would.
            PlanError: the cluster's profile lacks a curve that a call needs.

        A pipeline layout ``auto`` becomes the one that is chosen (:meth:`laid_out`), which the estimate's ``setup`` has.
        """
        job = self._job(setup)
        setup.check(job)
        setup = self.laid_out(setup, self.memory_limit).setup
        parameters.check(job.model, setup, self.software)
        why = unfit_recomputation(job.model, self.cluster.gpu, setup.recompute, setup.precision, setup.is_merged)
        if why:
            raise UsageError(f"recompute {setup.recompute}: {why}")
        stages = self._stages(setup)
        times = self._pipeline(setup, stages)
        gradients = self._exposed(exposed_gradients, setup, stages[0])
        weights = self._exposed(exposed_parameters, setup, stages[0])
        for part, each in (("gradients", gradients), ("parameters", weights)):
            times.expose(part, "dp", each.us, each.links)
        optimizer_us = self._optimizer_us(setup)
        times.parts["optimizer"] = optimizer_us
        times.total_us += optimizer_us
        of_step = flops.of_step(job) / job.gpus / times.total_us * 1e-6
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
            bottleneck=_bottleneck(times),
            notes=(
                *self.notes,
                *self._dispatch_notes(setup, stages),
                *self._offload_notes(setup),
                *self._doubts(of_step / self.cluster.gpu.bf16_tflops),
            ),
        )
        return self._detailed(found, stages, gradients, weights) if detail else found

    def _dispatch_notes(self, setup: Setup, stages: tuple[Stage, ...]) -> Iterator[str]:
        note = self._builder(setup).dispatch_note(setup)
        if note and any(stage.sparse for stage in stages):
            yield note

    def _offload_notes(self, setup: Setup) -> Iterator[str]:
        """The notes on offloading: what crosses to the host, and which of the modules that were named frees nothing."""
        if setup.offload == KEPT:
            return
        job, gpu = self._job(setup), self.cluster.gpu
        size = memory.offloaded_layer_bytes(job, setup, gpu, software=self.software, is_moe=job.model.moe_layers > 0)
        needed = self.memory(setup)
        yield (
            f"{size / 1e6:,.0f} MB of a layer and a micro-batch cross to the host and back, at {gpu.host_gbps:g} GB/s each way, "
            f"beside a neighbouring layer's work; the fullest GPU has {needed.offloaded / 1e9:.1f} GB in the host's memory"
        )
        modules = offloaded_modules(setup.offload)
        for module in sorted(modules):
            others = canonical_offload("+".join(modules - {module}) or KEPT)
            is_fit = not unfit_offload(others, setup.recompute)
            if is_fit and self.memory(replace(setup, offload=others)).total <= needed.total:
                yield f"offloading {module} frees nothing here"

    def _doubts(self, mfu: float) -> Iterator[str]:
        """The caution that a reader of an estimate should know about its inputs."""
        if mfu > 1:
            yield f"an MFU of {mfu:.0%} cannot be: look at efficiency, and at a capacity factor that drops what MFU counts"

    def _pipeline(self, setup: Setup, stages: tuple[Stage, ...]) -> Breakdown:
        """All micro-batches, with the bubble and what is exposed between stages."""
        alone = [self._stage_alone(setup, stage) for stage in stages]
        merged = (
            [self._stage_merged(setup, stage) for stage in stages] if setup.is_merged else [Breakdown()] * len(stages)
        )
        times = [
            self._stage_times(setup, stage, one.total_us, both.total_us)
            for stage, one, both in zip(stages, alone, merged, strict=True)
        ]
        places = self._places_of_ranks(setup, stages)
        way = course(
            setup.schedule,
            [times[place] for place in places],
            setup.micro_batches(self.job),
            setup.vpp,
            makespan=laid_out_us,
        )
        found, slowest = Breakdown(), places[way.slowest]
        found.add(alone[slowest], way.alone)
        found.add(merged[slowest], way.merged)
        found.parts["bubble"] = way.bubble_us
        found.total_us += way.bubble_us
        if exposed := self._sending_us(setup):
            found.expose("pp", "pp", exposed, {self._boundary(setup)[1]: exposed})
        return found

    def _stage_alone(self, setup: Setup, stage: Stage) -> Breakdown:
        """One micro-batch through all layers of a stage, forward and backward, and its ends."""
        found = Breakdown()
        for is_moe, number in stage.numbers:
            for times in self._layer_times(setup, is_moe):
                found.add(times, number)
        found.add(self._ends(setup, stage))
        return found

    def _stage_merged(self, setup: Setup, stage: Stage, *, is_bound: bool = False) -> Breakdown:
        """The same with forward and backward of two micro-batches merged, layers with experts among themselves. A layer that has
        no partner in the other task, as the chunks of a rank differ, is by itself: one with experts, where there are any."""
        found = Breakdown()
        alone = self._unpaired(setup, stage)
        for is_moe, number in stage.numbers:
            single = min(float(number), alone)
            alone -= single
            found.add(self._merged_times(setup, is_moe, is_bound=is_bound), number - single)
            if single:
                for times in self._layer_times(setup, is_moe, is_bound=is_bound):
                    found.add(times, single)
        found.add(self._ends(setup, stage))
        return found

    def _unpaired(self, setup: Setup, stage: Stage) -> float:
        """Layers of a rank, forward and backward, that are merged with no other: the forward task of a chunk goes with the
        backward task of the one that is as far from the rank's last as it is from the first."""
        kinds = parameters.kinds_of_chunks(self.job.model, setup.pp, setup.vpp, setup.schedule, setup.pipeline_layout)
        layers = [len(kinds[chunk]) for chunk in setup.chunks(stage.number)]
        return sum(abs(one - other) for one, other in zip(layers, reversed(layers), strict=True)) / 2

    def _stage_times(self, setup: Setup, stage: Stage, alone_us: float, merged_us: float) -> StageTimes:
        """A stage's times as the schedule asks for them: without a split, where none of it matters to how long all takes."""
        return self._split_times(setup, stage, alone_us, merged_us) if setup.is_merged else StageTimes(0.0, alone_us)

    def _split_times(self, setup: Setup, stage: Stage, alone_us: float, merged_us: float) -> StageTimes:
        """Part a stage's times into forward, backward, and products for weights. The ends are a third of each."""
        forward = weights = 0.0
        for is_moe, number in stage.numbers:
            forward += number * self._layer_times(setup, is_moe)[0].total_us
            weights += number * self.work(setup, is_moe).weights
        third = self._ends(setup, stage).total_us / 3
        return StageTimes(forward + third, alone_us - forward - third, weights + third, merged_us)

    def _rank_times(self, setup: Setup, stages: tuple[Stage, ...]) -> tuple[StageTimes, ...]:
        """The times of every pipeline rank's stage, for people to see."""
        found = []
        for stage in stages:
            merged_us = self._stage_merged(setup, stage).total_us if setup.is_merged else 0.0
            found.append(self._split_times(setup, stage, self._stage_alone(setup, stage).total_us, merged_us))
        return tuple(found[place] for place in self._places_of_ranks(setup, stages))

    def _places_of_ranks(self, setup: Setup, stages: tuple[Stage, ...]) -> Sequence[int]:
        """For each pipeline rank, where its stage is in ``stages``; only DualPipe and layouts
        that are spelt out ask in which order."""
        if is_dual(setup.schedule) or setup.pipeline_layout != EVEN_LAYOUT:
            model = self.job.model
            return parameters.stage_of_ranks(model, setup.pp, setup.vpp, setup.schedule, setup.pipeline_layout)
        return [place for place, stage in enumerate(stages) for _ in range(stage.alike)]

    def _sending_us(self, setup: Setup) -> float:
        """The time that sends between stages add to a step, µs. Beside those of merged tasks the last layer's products for
        weights are computed (Megatron-Core puts them off for that)."""
        us = self._boundary(setup)[0]
        if not us:
            return 0.0
        sends = hops(setup.pp, setup.micro_batches(self.job), setup.vpp, setup.schedule)
        hidden = self.work(setup, True).attention_weights if sends.merged else 0.0
        return sends.alone * us + sends.merged * max(0.0, us - hidden)

    def _merged_times(self, setup: Setup, is_moe: bool, *, is_bound: bool = False) -> Breakdown:
        """The time of one layer, forward of a micro-batch and backward of another."""

        def times() -> Breakdown:
            builder, program = self._builder(setup), self._merged_program(setup, is_moe)
            return run_alone(program) if is_bound else builder.timed(program)

        return _kept(self._known, ("merged times", is_bound, *self._layer_key(setup, is_moe)), times)

    def _merged_program(self, setup: Setup, is_moe: bool) -> list[Item]:
        key = ("merged", *self._layer_key(setup, is_moe))
        return _kept(self._known, key, lambda: self._builder(setup).merged(setup, is_moe))

    def work(self, setup: Setup, is_moe: bool) -> LayerWork:
        """Find what one layer computes for a micro-batch."""
        return self._builder(setup).work(setup, is_moe)

    def _layer_times(self, setup: Setup, is_moe: bool, *, is_bound: bool = False) -> tuple[Breakdown, Breakdown]:
        """The times of one layer, forward and backward."""

        def times() -> tuple[Breakdown, Breakdown]:
            time = run_alone if is_bound else self._builder(setup).timed
            forward, backward = self._programs(setup, is_moe)
            return time(forward), time(backward)

        return _kept(self._known, ("times", is_bound, *self._layer_key(setup, is_moe)), times)

    def _programs(self, setup: Setup, is_moe: bool) -> tuple[list[Item], list[Item]]:
        def programs() -> tuple[list[Item], list[Item]]:
            builder = self._builder(setup)
            return builder.forward(setup, is_moe), builder.backward(setup, is_moe)

        return _kept(self._known, ("programs", *self._layer_key(setup, is_moe)), programs)

    def _layer_key(self, setup: Setup, is_moe: bool) -> tuple[object, ...]:
        """The key on which a layer's program depends: not on the pipeline, unless it sends to the whole stage."""
        degrees: tuple[object, ...] = (setup.tp, setup.cp, setup.micro_batch)
        if is_moe:
            degrees += (setup.ep, setup.etp, setup.dispatch, setup.folded)
        ways = (setup.recompute, setup.precision, setup.attention, max(setup.zero, 1), setup.offload)
        # The ranks of a stage matter to what is sent to all of them, and to groups that lie in dp.
        size = setup.gpus // setup.pp if setup.zero > 1 or self.software.balances or not setup.folded else 0
        return (is_moe, *degrees, *ways, size)

    def _exposed(self, ask: Callable[..., Exposed], setup: Setup, stage: Stage, *, is_bound: bool = False) -> Exposed:
        side = 1 if ask is exposed_gradients else 0

        def template(is_moe: bool) -> tuple[list[Item], float]:
            return self._programs(setup, is_moe)[side], self._layer_times(setup, is_moe, is_bound=is_bound)[
                side
            ].total_us

        return ask(self._builder(setup), setup, stage, template, is_bound=is_bound)

    def _stages(self, setup: Setup) -> tuple[Stage, ...]:
        """The stages of a setup; of the even layout, where it is open."""
        layout = EVEN_LAYOUT if setup.pipeline_layout == AUTO_LAYOUT else setup.pipeline_layout
        return parameters.stages(self.job.model, setup.pp, setup.vpp, setup.schedule, layout)

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        """The setup with the pipeline layout that is fastest among those that fit into ``limit`` bytes, where it says ``auto``:
        the even one where that fits and no other is faster, else the balanced one (mapping/layout_balance.py), with fewer layers
        on ranks that lack memory. Where none fits it is the even one."""
        if setup.pipeline_layout != AUTO_LAYOUT:
            return LaidOut(setup, True)
        if setup.pp == 1:
            return LaidOut(replace(setup, pipeline_layout=EVEN_LAYOUT), True)
        return _kept(self._known, ("laid out", setup, limit), lambda: self._chosen_layout(setup, limit))

    def _chosen_layout(self, setup: Setup, limit: float) -> LaidOut:
        even = replace(setup, pipeline_layout=EVEN_LAYOUT)
        times: dict[Setup, float] = {}
        fitting: list[Setup] = []

        def look_at(way: Setup) -> None:
            times[way] = self._least_pipeline_us(way, 2)
            fitting.extend([way] * (self.memory(way).total <= limit))

        if setup.num_chunks <= self.job.model.layers:
            if self.memory(even).total > limit and not self._may_fit(even, limit):
                return LaidOut(even, False)  # before programs are made for its times
            look_at(even)
            if fitting and times[even] <= self._least_of_layouts_us(setup, 2) * (1 + _FASTER):
                return LaidOut(even, True)
        first = self._balanced(setup, None)
        if not first:
            parameters.stages(self.job.model, setup.pp, setup.vpp, setup.schedule)  # raises, and says why there is none
        for way in first:
            look_at(way)

        def cost(way: Setup) -> float:
            return times[way] * (1 + _FASTER * (way != even))

        best = min(times, key=cost)
        if best in fitting:
            return LaidOut(best, True)
        for way in self._squeezed(setup, first[0], limit):
            look_at(way)
        return LaidOut(min(fitting, key=cost) if fitting else even if even in times else best, False)

    def _may_fit(self, setup: Setup, limit: float) -> bool:
        """Whether all layers of a setup have room, however they are laid on the ranks."""
        return memory.have_room(
            self._job(setup), setup, limit, self.software.gradient_bytes, software=self.software, gpu=self.cluster.gpu
        )

    def _balanced(self, setup: Setup, room: Sequence[int] | None) -> list[Setup]:
        """The balanced layout, if there is one: as layers of ``setup`` take alone, or merged where most tasks are."""
        model = self.job.model
        weights = {is_moe: self._least_layer_us(setup, is_moe, 2) for is_moe in self._numbers}
        if setup.is_merged:
            weights = self._weights(setup, weights, 2)
        kinds = self._kinds
        unit = weights[kinds[-1]]
        modules_us = self._head_us(setup, False, True) + model.mtp_layers * unit
        layers = (weights.get(is_moe, 0.0) for is_moe in (True, False))
        each = (*layers, self._head_us(setup, True, False), modules_us)
        times = LayerTimes(*(round(us / unit, 2) for us in each))  # hundredths of a layer: few are ever balanced
        most = None if room is None else tuple(room)
        chunks = balanced(kinds, model.mtp_layers, setup.schedule, setup.pp, setup.vpp, times, most)
        return [] if chunks is None else [replace(setup, pipeline_layout=written(chunks))]

    def _weights(self, setup: Setup, single: dict[bool, float], level: int) -> dict[bool, float]:
        """The least that one layer of each kind takes of a rank, µs of a micro-batch, where passes are merged. ``single``: by
        itself."""
        shares = merged_shares(setup.schedule, setup.pp, setup.micro_batches(self.job), setup.vpp)
        found = {}
        for is_moe, alone in single.items():
            both = self._merged_times(setup, is_moe, is_bound=True).total_us if level >= 2 else alone
            found[is_moe] = min(alone, *(alone * (1 - share) + both * share for share in shares))
        return found

    def _squeezed(self, setup: Setup, start: Setup, limit: float) -> Iterator[Setup]:
        """Layouts that take less memory than ``start``, which is balanced, of the ranks that lack it: with layers in chunks whose
        activations fewer micro-batches keep (DualPipe and its V, of which a rank's chunks differ much in that), and with fewer
        layers."""
        model = self.job.model
        own = owners(setup.schedule, setup.pp, setup.vpp)
        for _ in range(_MOST_ROUNDS):
            job = self._job(start)
            rooms = memory.rooms(
                job, start, limit, self.software.gradient_bytes, software=self.software, gpu=self.cluster.gpu
            )
            counts = [chunk.layers for chunk in parse_layout(start.pipeline_layout)]
            most, fewer = [], []
            for rank, chunks in enumerate(own):
                left, layer, kept = rooms[rank]
                fewer.append(sum(counts[chunk] for chunk in chunks) + math.floor(left / layer))
                if is_dual(setup.schedule):
                    under_way = in_flight_by_chunk(setup.schedule, setup.pp, rank, setup.micro_batches(job), setup.vpp)
                    left += move_layers(counts, chunks, under_way, -left, kept)
                most.append(sum(counts[chunk] for chunk in chunks) + math.floor(left / layer))
            found = [replace(setup, pipeline_layout=written(ended(counts, model.mtp_layers)))]
            for room in (most, fewer):
                found += self._balanced(setup, room) if sum(room) >= model.layers else []
            others = [way for way in dict.fromkeys(found) if way != start]
            yield from others
            if not others:
                return
            start = others[0]

    def _ends(self, setup: Setup, stage: Stage) -> Breakdown:
        degrees = (setup.pp, setup.tp, setup.cp, setup.micro_batch)
        layers = (setup.vpp, setup.pipeline_layout) if setup.zero > 1 else ()
        key = (
            "ends",
            setup.ends_at(stage.number),
            *layers,
            *degrees,
            setup.schedule,
            setup.precision,
            setup.zero,
            setup.attention,
        )
        return _kept(self._known, key, lambda: ends(self._builder(setup), _with_a_layout(setup), stage))

    def _boundary(self, setup: Setup) -> tuple[float, str]:
        key = ("boundary", setup.pp, setup.tp, setup.cp, setup.micro_batch)
        return _kept(self._known, key, lambda: boundary_us(self._builder(setup), _with_a_layout(setup)))

    def _least_exposed_us(self, setup: Setup) -> float:
        """For how long a step waits for its gradients and weights at least: what these take, less the passes that may hide them
        but for one layer (the one before the first gradients, or behind the last weights)."""
        stage = self._stages(setup)[0]
        degrees = (
            setup.tp,
            setup.cp,
            setup.pp,
            setup.ep,
            setup.etp,
            setup.folded,
            setup.attention,
            setup.precision,
            setup.zero,
            setup.copies,
        )
        key = ("exposed", *degrees, stage.dense, stage.sparse, setup.ends_at(stage.number))
        least = _kept(self._known, key, lambda: least_exposed(self._builder(setup), setup, stage))
        total = 0.0
        for place, side in (("gradients", 1), ("parameters", 0)):
            us, hides = least[place]
            if us and hides:
                layers = {
                    is_moe: self._layer_times(setup, is_moe, is_bound=True)[side].total_us
                    for is_moe in set(stage.kinds)
                }
                plain = sum(layers[is_moe] for is_moe in stage.kinds) - max(layers.values())
                us = max(0.0, us - plain * (1 + passing(self._builder(setup), setup)))
            total += us
        return total

    def _exchanged_us(self, setup: Setup) -> float:
        """Bound for how long a layer's tokens are on their way. The key: few of all mappings differ in that."""
        if setup.ep * setup.etp == 1:
            return 0.0
        tokens = (setup.micro_batch * self.job.sequence / (setup.cp * setup.tp), setup.precision, setup.attention)
        key = (
            "exchanged",
            *tokens,
            setup.etp,
            setup.dispatch,
            *map(setup.layout, ("ep", "etp_ep")),
            self._job(setup).imbalance,
        )
        plain = setup if setup.recompute == "none" else replace(setup, recompute="none")
        return _kept(self._known, key, lambda: self._builder(setup).least_exchange_us(plain))

    def _waits_us(self, setup: Setup) -> float:
        """Bound for how long a layer waits for attention's calls, which few of all mappings differ in."""
        if setup.tp * setup.cp == 1:
            return 0.0
        key = ("waits", setup.tp, setup.cp, setup.micro_batch, setup.attention)
        plain = setup if setup.recompute == "none" else replace(setup, recompute="none")
        return _kept(self._known, key, lambda: self._builder(setup).least_waits_us(plain))

    def _computed_us(self, setup: Setup, is_moe: bool) -> float:
        """Time one layer without its calls, forward and backward."""
        degrees = (setup.tp, setup.cp, setup.micro_batch, *((setup.ep, setup.etp) if is_moe else ()))
        key = ("computed", is_moe, *degrees, setup.recompute, setup.precision, setup.attention)

        return _kept(self._known, key, lambda: self.work(setup, is_moe).step_us(setup.recompute))

    def _least_pipeline_us(self, setup: Setup, level: int) -> float:
        """Bound the time of all micro-batches, as :meth:`bound_us` says."""
        if setup.pipeline_layout == AUTO_LAYOUT:
            return self._least_of_layouts_us(setup, level)
        stages = self._stages(setup)
        count, calls = setup.micro_batches(self.job), level >= 2
        sparse = self._least_layer_us(setup, True, level) if any(stage.sparse for stage in stages) else 0.0
        dense = self._least_layer_us(setup, False, level) if any(stage.dense for stage in stages) else 0.0
        alone = [
            stage.sparse * sparse + stage.dense * dense + self._least_end_us(setup, stage, level) for stage in stages
        ]
        if not setup.is_merged:
            return count * max(alone) + _bubble_us(alone, stages, setup)
        merged = alone
        if calls:
            merged = [self._stage_merged(setup, stage, is_bound=True).total_us for stage in stages]
        times = [StageTimes(0.0, us, 0.0, both) for us, both in zip(alone, merged, strict=True)]
        ranks = [times[place] for place in self._places_of_ranks(setup, stages)]
        return course(setup.schedule, ranks, count, setup.vpp).total_us(ranks)

    def _least_of_layouts_us(self, setup: Setup, level: int) -> float:
        """Bound the time of all micro-batches, however the layers are laid on the ranks.

        The slowest rank has at least the mean of all work, and at least what the layers with experts and the head make it have
        where they are laid as evenly as whole layers go (:func:`~commlayer.scheduler.mapping.layout_balance.least_slowest_us`).
        """
        count, ranks = setup.passes(self.job), setup.pp // setup.copies
        single = {is_moe: self._least_layer_us(setup, is_moe, level) for is_moe in self._numbers}
        weights = self._weights(setup, single, level) if setup.is_merged else single
        head_us = self._head_us(setup, True, False)
        ends_us = head_us if level < 2 and not self.job.model.mtp_layers else self._all_ends_us(setup, level)
        work = ends_us + sum(number * single[is_moe] for is_moe, number in self._numbers.items())
        busy = ends_us + sum(number * weights[is_moe] for is_moe, number in self._numbers.items())
        slowest = busy / ranks
        if sparse := self._numbers.get(True):
            slowest = max(slowest, least_slowest_us(sparse, ranks, weights[True], head_us))
        if is_dual(setup.schedule):
            return count * slowest
        # the bubble is the other ranks' work: all but what the slowest takes by itself
        alone = max(1.0, *(single[is_moe] / weights[is_moe] for is_moe in weights)) if setup.is_merged else 1.0
        return slowest * (count - alone / setup.vpp) + work / setup.vpp

    def _all_ends_us(self, setup: Setup, level: int) -> float:
        """Bound the time of embedding, head and modules of a micro-batch, on whichever ranks they are."""
        if level < 2:
            return self._head_us(setup, True, True)
        return sum(self._ends(setup, stage).total_us * stage.alike for stage in self._stages(setup)) / setup.copies

    def _least_layer_us(self, setup: Setup, is_moe: bool, level: int) -> float:
        """Bound the time of one layer, forward and backward, as :meth:`bound_us` says."""
        if level >= 2:
            forward, backward = self._layer_times(setup, is_moe, is_bound=True)
            return forward.total_us + backward.total_us
        computed = self._computed_us(setup, is_moe)
        if level:
            computed += self._waits_us(setup)
        if not level or not is_moe:
            return computed
        exchanged = self._exchanged_us(setup)
        # A micro-batch's exchange has nothing beside it but experts; merged passes have the other micro-batch's.
        alone = 0.0 if setup.is_merged else computed - self.work(setup, True).beside_us
        return max(computed, alone + exchanged)

    def _least_end_us(self, setup: Setup, stage: Stage, level: int) -> float:
        """Bound the time of what a stage has beside its layers, in the same way."""
        if level >= 2:
            return self._ends(setup, stage).total_us
        has = setup.has_head(stage.number), setup.has_modules(stage.number)
        return self._head_us(setup, *has) if any(has) else 0.0

    def _head_us(self, setup: Setup, has_head: bool, has_modules: bool) -> float:
        key = ("head", setup.tp, setup.cp, setup.micro_batch, setup.precision, has_head, has_modules)

        def times() -> float:
            head = head_work(self.job, setup, self.compute, head=has_head, modules=has_modules)
            return head.forward + head.backward

        return _kept(self._known, key, times)

    def _optimizer_us(self, setup: Setup) -> float:
        """Adam on this rank's share, the gradients' buffers set to zero, and weights cast for products in FP8."""

        def time() -> float:
            cast = 0.0
            if setup.pipeline_layout == AUTO_LAYOUT:  # whatever the layout will be
                mean = parameters.mean_elements(self.job.model, setup, self.software)
                over = parameters.replicas(setup, self.software) if setup.zero else (1, 1, 1)
                share, whole = sum(a / b for a, b in zip(mean, over, strict=True)), float(sum(mean))
            else:
                share = parameters.shard_elements(self.job.model, setup, self.software)
                whole = parameters.held_elements(self.job.model, setup, self.software)
                held = parameters.held(self.job.model, setup, self.software)
                cast = self.compute.cast_bytes(setup.precision) * max(each.multiplied for each in held)
            kept = whole if setup.zero < 2 else share
            software, far = self.software, self.software.offloaded_optimizer * share
            moved = (share - far) * software.adam_moved_bytes + kept * software.gradient_bytes + cast
            # gradients to the host, and weights back; its own Adam is not in it (see the notes)
            sent = (
                far
                * (software.gradient_bytes + software.gathered_weight_bytes(setup.precision))
                / (self.cluster.gpu.host_gbps * 1e3)
            )
            return self.compute.memory_us(moved) + sent

        degrees = (setup.tp, setup.cp, setup.pp, setup.vpp, setup.ep, setup.etp, setup.schedule, setup.pipeline_layout)
        return _kept(self._known, ("optimizer", *degrees, setup.zero, setup.attention, setup.precision), time)

    def _job(self, setup: Setup) -> Job:
        return self._builder(setup).job

    def _builder(self, setup: Setup) -> LayerBuilder:
        """The builder for this setup's imbalance, which depends on ep where experts' popularity is given."""
        ratio = self.job.imbalance
        if self.loads is not None:
            rows = round(tokens_of(self.job, setup)[1] * setup.ep * self.job.model.top_k)
            ratio = self.loads.spread(setup.ep, max(rows, 1)).mean
        if ratio not in self._builders:
            job = replace(self.job, imbalance=ratio, loads=self.loads)
            self._builders[ratio] = LayerBuilder(job, self.cluster, self.software, self.pricer, self.compute)
        return self._builders[ratio]

    def _detailed(
        self, found: StepEstimate, stages: tuple[Stage, ...], gradients: Exposed, weights: Exposed
    ) -> StepEstimate:
        """With its traffic, and the forecasts of the first stage's first and last micro-batch (of one layer, where nothing is
        overlapped there)."""
        setup = found.setup
        builder = self._builder(setup)
        forward, backward = self._programs(setup, any(stage.sparse for stage in stages))
        counted: dict[StepCollective, int] = {}  # equal ones together, in order of first use
        for exchange in builder.sent(setup, whole_step(builder.job, setup, builder.software, stage=stages[-1].number)):
            one = replace(exchange, count=1)
            counted[one] = counted.get(one, 0) + exchange.count
        kind = kind_of(self.job, setup, self.cluster, self.software, found.step_us * (1 - found.bubble))
        return replace(
            found,
            notes=(*found.notes, *cautions(kind)),
            traffics=tuple(_traffic(builder, setup, exchange, count) for exchange, count in counted.items()),
            forward=weights.forecast or builder.simulated(forward)[1],
            backward=gradients.forecast or builder.simulated(backward)[1],
            merged=builder.simulated(self._merged_program(setup, True))[1] if setup.is_merged else None,
            ranks=self._rank_times(setup, stages),
            validity=assess(kind),
        )


_MOST_ROUNDS = 3
"""The most changes of a layout that lacks memory: what a rank takes of a layer depends on which one it is."""
_FASTER = 1e-3
"""The part by which another layout has to be faster than the even one."""
_Value = TypeVar("_Value")
_ORDER = (
    *("attention", "experts", "dense", "memory", "head", "recompute", "dispatch", "combine", "tp", "cp", "pp"),
    *("gradients", "parameters", "offload", "bubble", "optimizer"),
)
_WORK = ("attention", "experts", "dense", "memory", "head", "recompute", "optimizer")


def _with_a_layout(setup: Setup) -> Setup:
    """The even one, where any will do."""
    return replace(setup, pipeline_layout=EVEN_LAYOUT) if setup.pipeline_layout == AUTO_LAYOUT else setup


def _kept(kept: dict[tuple[object, ...], Any], key: tuple[object, ...], make: Callable[[], _Value]) -> _Value:
    """Return what was made for ``key``, or is made now: a search asks the same of thousands of setups."""
    if key not in kept:
        kept[key] = make()
    value: _Value = kept[key]
    return value


def _bubble_us(per_stage: Sequence[float], stages: Sequence[Stage], setup: Setup) -> float:
    every = [us for us, stage in zip(per_stage, stages, strict=True) for _ in range(stage.alike)]
    return bubble_us(every, setup.vpp)


def _bottleneck(times: Breakdown) -> str:
    busy = {"compute": sum(times.parts.get(part, 0.0) for part in _WORK), **times.links}
    return max(busy, key=lambda name: busy[name])


def _traffic(builder: LayerBuilder, setup: Setup, exchange: StepCollective, count: int) -> Traffics:
    """``count`` calls of one kind, with the price of each, for people to read."""
    nodes = group_nodes(builder.cluster, setup, exchange)
    collective, size = exchange.collective, exchange.logical_bytes
    if collective == SEND_RECV:
        us, plan, link = builder.pricer.us(SEND_RECV, size, nodes), SEND_RECV, link_over(nodes).value
    elif (kernels_us := builder.kernels_us(setup, exchange)) is not None and builder.software.kernels is not None:
        us, plan, link = kernels_us, builder.software.kernels.name, link_over(nodes).value
    elif exchange.over is not Span.GROUP:
        over, us = builder.pricer.over(exchange.over, size, nodes)
        plan, link = over.steps[0].leg.name, over.steps[0].resource.value
    else:
        decision = builder.pricer.decide(collective, size, nodes, exchange.lane if builder.software.lanes else "")
        us, plan, link = decision.predicted_us, decision.plan.name, decision.bottleneck.value
    return Traffics(exchange.name, exchange.axis, exchange.lane, collective, size, nodes, count, us, plan, link)

"""The parts of a step: layers, what the model's ends take, messages between stages, the optimizer;
each timed once for all setups that share it, for a search asks the same of thousands of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_work import AnyCompute, head_work, tokens_of
from commlayer.scheduler.mapping.layers import LayerBuilder
from commlayer.scheduler.mapping.parameters import Stage
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT
from commlayer.scheduler.mapping.pipeline_stage import Exposed, boundary_us, ends, exposed_gradients
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.programs import Breakdown, Item, run_alone

__all__ = ["StepParts"]

_Value = TypeVar("_Value")


class StepParts:
    """The parts of steps of one job on one cluster. Arguments as
    :class:`~commlayer.scheduler.mapping.simulate.Estimator`."""

    def __init__(
        self, job: Job, cluster: Cluster, software: Software, compute: AnyCompute, loads: Loads | None
    ) -> None:
        self.job, self.cluster, self.software, self.compute, self.loads = job, cluster, software, compute, loads
        self.pricer = Pricer(cluster, software.strategies)
        self._builders: dict[float, LayerBuilder] = {}
        self._known: dict[tuple[object, ...], Any] = {}

    def once(self, key: tuple[object, ...], make: Callable[[], _Value]) -> _Value:
        """Return what was made for ``key``, or is made now."""
        value: _Value | None = self._known.get(key)
        if value is None:
            value = self._known[key] = make()
        return value

    def merged_times(self, setup: Setup, is_moe: bool, *, is_bound: bool = False) -> Breakdown:
        """The time of one layer, forward of a micro-batch and backward of another."""

        def times() -> Breakdown:
            builder, program = self.builder(setup), self.merged_program(setup, is_moe)
            both = run_alone(program) if is_bound else builder.timed(program)
            return _held_up(both, sum(builder.host(setup, is_moe).busy_us))

        return self.once(("merged times", is_bound, *self.layer_key(setup, is_moe)), times)

    def merged_program(self, setup: Setup, is_moe: bool) -> list[Item]:
        key = ("merged", *self.layer_key(setup, is_moe))
        return self.once(key, lambda: self.builder(setup).merged(setup, is_moe))

    def layer_times(self, setup: Setup, is_moe: bool, *, is_bound: bool = False) -> tuple[Breakdown, Breakdown]:
        """The times of one layer, forward and backward."""

        def times() -> tuple[Breakdown, Breakdown]:
            builder = self.builder(setup)
            time = run_alone if is_bound else builder.timed
            passes = zip(self.programs(setup, is_moe), builder.host(setup, is_moe).busy_us, strict=True)
            forward, backward = (_held_up(time(program), least_us) for program, least_us in passes)
            return forward, backward

        return self.once(("times", is_bound, *self.layer_key(setup, is_moe)), times)

    def programs(self, setup: Setup, is_moe: bool) -> tuple[list[Item], list[Item]]:
        def programs() -> tuple[list[Item], list[Item]]:
            builder = self.builder(setup)
            return builder.forward(setup, is_moe), builder.backward(setup, is_moe)

        return self.once(("programs", *self.layer_key(setup, is_moe)), programs)

    def layer_key(self, setup: Setup, is_moe: bool) -> tuple[object, ...]:
        """The key on which a layer's program depends: not on the pipeline, unless it sends to the
        whole stage."""
        degrees: tuple[object, ...] = (setup.tp, setup.cp, setup.micro_batch)
        if is_moe:
            degrees += (setup.ep, setup.etp, setup.exchange, setup.folded)
        ways = (setup.recompute, setup.precision, setup.attention, max(setup.zero, 1), setup.offload)
        # The ranks of a stage matter to what is sent to all of them, and to groups that lie in dp.
        size = setup.gpus // setup.pp if setup.zero > 1 or self.software.balances or not setup.folded else 0
        return (is_moe, *degrees, *ways, size)

    def exposed(self, ask: Callable[..., Exposed], setup: Setup, stage: Stage, *, is_bound: bool = False) -> Exposed:
        side = 1 if ask is exposed_gradients else 0

        def template(is_moe: bool) -> tuple[list[Item], float]:
            return self.programs(setup, is_moe)[side], self.layer_times(setup, is_moe, is_bound=is_bound)[side].total_us

        return ask(self.builder(setup), setup, stage, template, is_bound=is_bound)

    def stages(self, setup: Setup) -> tuple[Stage, ...]:
        """The stages of a setup; of the even layout, where it is open."""
        return parameters.stages(self.job.model, _with_a_layout(setup).pipeline)

    def ends(self, setup: Setup, stage: Stage) -> Breakdown:
        degrees = (setup.pp, setup.tp, setup.cp, setup.micro_batch)
        layers = (setup.vpp, setup.pipeline_layout) if setup.zero > 1 else ()
        ways = (setup.schedule, setup.precision, setup.zero, setup.attention)
        key = ("ends", stage.ends, *layers, *degrees, *ways)
        return self.once(key, lambda: ends(self.builder(setup), _with_a_layout(setup), stage))

    def boundary(self, setup: Setup) -> tuple[float, str]:
        key = ("boundary", setup.pp, setup.tp, setup.cp, setup.micro_batch)
        return self.once(key, lambda: boundary_us(self.builder(setup), _with_a_layout(setup)))

    def head_us(self, setup: Setup, has_head: bool, has_modules: bool) -> float:
        key = ("head", setup.tp, setup.cp, setup.micro_batch, setup.precision, has_head, has_modules)

        def times() -> float:
            head = head_work(self.job, setup, self.compute, head=has_head, modules=has_modules)
            return head.forward + head.backward

        return self.once(key, times)

    def optimizer_us(self, setup: Setup) -> float:
        """Adam on this rank's share, the gradients' buffers set to zero, and weights cast for
        products in FP8."""

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

        is_open = setup.pipeline_layout == AUTO_LAYOUT
        degrees = (setup.tp, setup.pp, 0 if is_open else setup.vpp, setup.ep, setup.etp, setup.copies)
        layers = (setup.pipeline_layout, None if is_open else setup.schedule)
        return self.once(("optimizer", *degrees, *layers, setup.zero, setup.attention, setup.precision), time)

    def builder(self, setup: Setup) -> LayerBuilder:
        """The builder for this setup's imbalance, which depends on ep where experts' popularity is
        given."""
        ratio = self.job.imbalance
        if self.loads is not None:
            rows = round(tokens_of(self.job, setup)[1] * setup.ep * self.job.model.top_k)
            ratio = self.loads.busiest(setup.ep, max(rows, 1))
        if ratio not in self._builders:
            job = replace(self.job, imbalance=ratio, loads=self.loads)
            self._builders[ratio] = LayerBuilder(job, self.cluster, self.software, self.pricer, self.compute)
        return self._builders[ratio]


def _held_up(breakdown: Breakdown, least_us: float) -> Breakdown:
    """A pass that takes no less than its host is busy with it."""
    more_us = least_us - breakdown.total_us
    if more_us > 0:
        breakdown.add(Breakdown(more_us, {"host": more_us}))
    return breakdown


def _with_a_layout(setup: Setup) -> Setup:
    """The even one, where any will do."""
    return replace(setup, pipeline_layout=EVEN_LAYOUT) if setup.pipeline_layout == AUTO_LAYOUT else setup

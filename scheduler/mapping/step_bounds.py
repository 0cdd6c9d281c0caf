"""Bounds of a step's time, each closer and slower to find than the one before: a search leaves out
what none can make fast."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import get_args

from commlayer.scheduler.mapping.job import ExchangeKind, Setup
from commlayer.scheduler.mapping.layout_balance import least_slowest_us
from commlayer.scheduler.mapping.model import layer_kinds
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT
from commlayer.scheduler.mapping.pipeline_schedule import StageTimes, bubble_us, course, is_dual, merged_shares
from commlayer.scheduler.mapping.pipeline_stage import exposed_gradients, exposed_parameters, least_exposed, passing
from commlayer.scheduler.mapping.step_parts import StepParts
from commlayer.scheduler.mapping.step_pipeline import StepPipeline
from commlayer.scheduler.programs import run_alone

__all__ = ["LayerBounds", "StepBounds"]


class LayerBounds:
    """Bounds of what one layer takes of a rank for a micro-batch. ``kinds``: of the model's layers,
    with experts or with a dense FFN."""

    def __init__(self, parts: StepParts, kinds: Collection[bool]) -> None:
        self._parts, self._job, self._kinds = parts, parts.job, kinds

    def least_us(self, setup: Setup, level: int) -> dict[bool, float]:
        """Bound the time of one layer of each kind that the model has, forward and backward, as
        :meth:`StepBounds.us` says."""

        def layers() -> dict[bool, float]:
            if level < 2:
                return {is_moe: self._untimed_us(setup, is_moe, level) for is_moe in self._kinds}
            passes = {is_moe: self._parts.layer_times(setup, is_moe, is_bound=True) for is_moe in self._kinds}
            return {is_moe: forward.total_us + backward.total_us for is_moe, (forward, backward) in passes.items()}

        return self._parts.once(("layers", level, setup.is_merged, *self._parts.layer_key(setup, True)), layers)

    def _untimed_us(self, setup: Setup, is_moe: bool, level: int) -> float:
        """Bound the time of one layer, forward and backward, without timing its passes."""
        parts, builder = self._parts, self._parts.builder(setup)
        any_exchange = not level and not setup.is_merged  # another one has other calls
        exchanges = get_args(ExchangeKind) if any_exchange else (setup.exchange,)
        busy_us = min(sum(builder.host(replace(setup, exchange=each), is_moe).busy_us) for each in exchanges)
        degrees = (setup.tp, setup.cp, setup.micro_batch, *((setup.ep, setup.etp) if is_moe else ()))
        key = ("computed", is_moe, *degrees, setup.recompute, setup.precision, setup.attention)
        computed = parts.once(key, lambda: builder.work(setup, is_moe).step_us(setup.recompute))
        forward, backward = builder.host(setup, is_moe).launches
        computed = computed + forward.us + backward.us
        # with nothing computed, or sent, again
        plain = setup if setup.recompute == "none" else replace(setup, recompute="none")
        if level and setup.tp * setup.cp > 1:  # attention's calls, which few of all mappings differ in
            key = ("waits", setup.tp, setup.cp, setup.micro_batch, setup.attention)
            computed += parts.once(key, lambda: builder.calls.least_waits_us(plain))
        if not level or not is_moe:
            return max(busy_us, computed)
        exchanged = 0.0
        if setup.ep * setup.etp > 1:  # tokens on their way
            tokens = (setup.micro_batch * self._job.sequence / (setup.cp * setup.tp), setup.precision, setup.attention)
            groups = map(setup.layout, ("ep", "etp_ep"))
            key = ("exchanged", *tokens, setup.etp, setup.exchange, *groups, builder.job.imbalance)
            exchanged = parts.once(key, lambda: builder.calls.least_exchange_us(plain))
        # A micro-batch's exchange has nothing beside it but experts; merged passes have the other micro-batch's.
        alone = 0.0 if setup.is_merged else computed - builder.work(setup, True).beside_us
        return max(busy_us, computed, alone + exchanged)

    def weights(self, setup: Setup, single: dict[bool, float], level: int) -> dict[bool, float]:
        """The least that one layer of each kind takes of a rank, µs of a micro-batch, where passes
        are merged. ``single``: by itself."""
        shares = merged_shares(setup.schedule, setup.pp, setup.micro_batches(self._job), setup.vpp)
        weights = {}
        for is_moe, alone in single.items():
            both = self._parts.merged_times(setup, is_moe, is_bound=True).total_us if level >= 2 else alone
            weights[is_moe] = min(alone, *(alone * (1 - share) + both * share for share in shares))
        return weights


class StepBounds:
    """The bounds of steps that have these parts."""

    def __init__(self, pipeline: StepPipeline) -> None:
        self.parts, self.pipeline, self.job = pipeline.parts, pipeline, pipeline.job
        kinds = layer_kinds(self.job.model)
        every = (*kinds, *kinds[-1:] * self.job.model.mtp_layers)
        self.numbers = {is_moe: every.count(is_moe) for is_moe in sorted(set(every))}
        """How many layers there are with experts, and with a dense FFN, modules' among them."""
        self.layers = LayerBounds(self.parts, self.numbers)

    def us(self, setup: Setup, level: int = 0) -> float:
        """A time that a step is never below, µs.

        ``level``: 0 of computation and bubble; 1 of layers that take as long as tokens are on their
        way to experts, where computation takes less; 2 of all calls that layers and ends make, but
        for those of ZeRO 2 and 3; 3 of these too, and of what passes cannot hide of gradients and
        weights; 4 with gradients and weights sent when they are ready, nothing in each other's way.
        Each takes longer to find than the one before. For setups that an estimator would take:
        nothing is checked. With the pipeline layout ``auto``, which is for the levels up to 2, it
        is a bound of every layout.
        """
        total = self.parts.optimizer_us(setup)
        if level <= 2 and setup.zero > 1:
            setup = replace(setup, zero=1)
        total += self.least_pipeline_us(setup, level)
        if level >= 2:
            total += self.pipeline.sending_us(setup)
        if level == 3:
            total += self._least_exposed_us(setup)
        elif level > 3:
            stage = self.parts.stages(setup)[0]
            for ask in (exposed_gradients, exposed_parameters):
                total += self.parts.exposed(ask, setup, stage, is_bound=True).us
        return total

    def _least_exposed_us(self, setup: Setup) -> float:
        """For how long a step waits for its gradients and weights at least: what these take, less
        the passes that may hide them but for one layer (the one before the first gradients, or
        behind the last weights), which its host does not hold up."""
        stage = self.parts.stages(setup)[0]
        degrees = (setup.tp, setup.cp, setup.pp, setup.ep, setup.etp, setup.folded)
        ways = (setup.attention, setup.precision, setup.zero, setup.copies)
        key = ("exposed", *degrees, *ways, stage.dense, stage.sparse, stage.ends)
        least = self.parts.once(key, lambda: least_exposed(self.parts.builder(setup), setup, stage))
        total = 0.0
        for place, side in (("gradients", 1), ("parameters", 0)):
            us, hides = least[place]
            if us and hides:
                layers = {
                    is_moe: self.parts.layer_times(setup, is_moe, is_bound=True)[side].total_us
                    for is_moe in set(stage.kinds)
                }
                one = max(self._alone_us(setup, is_moe)[side] for is_moe in layers)
                plain = sum(layers[is_moe] for is_moe in stage.kinds) - one
                us = max(0.0, us - plain * (1 + passing(self.parts.builder(setup), setup)))
            total += us
        return total

    def _alone_us(self, setup: Setup, is_moe: bool) -> tuple[float, float]:
        """The times of one layer's passes on the GPU, forward and backward, µs, nothing in each
        other's way: no host holds them up."""

        def times() -> tuple[float, float]:
            forward, backward = self.parts.programs(setup, is_moe)
            return run_alone(forward).total_us, run_alone(backward).total_us

        return self.parts.once(("alone", *self.parts.layer_key(setup, is_moe)), times)

    def least_pipeline_us(self, setup: Setup, level: int) -> float:
        """Bound the time of all micro-batches, as :meth:`us` says."""
        if setup.pipeline_layout == AUTO_LAYOUT:
            return self.least_of_layouts_us(setup, level)
        stages = self.parts.stages(setup)
        count, calls = setup.micro_batches(self.job), level >= 2
        single = self.layers.least_us(setup, level)
        sparse, dense = (single.get(is_moe, 0.0) for is_moe in (True, False))
        alone = []
        for stage in stages:
            has_ends = stage.ends.head, stage.ends.modules
            end_us = self.parts.ends(setup, stage).total_us if calls else 0.0
            if not calls and any(has_ends):
                end_us = self.parts.head_us(setup, *has_ends)
            alone.append(stage.sparse * sparse + stage.dense * dense + end_us)
        if not setup.is_merged:
            every = [us for us, stage in zip(alone, stages, strict=True) for _ in range(stage.alike)]
            return count * max(alone) + bubble_us(every, setup.vpp)
        merged = alone
        if calls:
            merged = [self.pipeline.stage_merged(setup, stage, is_bound=True).total_us for stage in stages]
        times = [StageTimes(0.0, us, 0.0, both) for us, both in zip(alone, merged, strict=True)]
        ranks = [times[place] for place in self.pipeline.places_of_ranks(setup, stages)]
        return course(setup.schedule, ranks, count, setup.vpp).total_us(ranks)

    def least_of_layouts_us(self, setup: Setup, level: int) -> float:
        """Bound the time of all micro-batches, however the layers are laid on the ranks.

        The slowest rank has at least the mean of all work, and at least what the layers with
        experts and the head make it have where they are laid as evenly as whole layers go
        (:func:`~commlayer.scheduler.mapping.layout_balance.least_slowest_us`).
        """
        count, ranks = setup.micro_batches(self.job) // setup.copies, setup.pp // setup.copies
        single = self.layers.least_us(setup, level)
        weights = self.layers.weights(setup, single, level) if setup.is_merged else single
        head_us = ends_us = self.parts.head_us(setup, True, False)
        if level >= 2:
            degrees = (setup.tp, setup.cp, setup.micro_batch, setup.zero, setup.attention, setup.precision)

            def all_us() -> float:
                stages = self.parts.stages(setup)
                return sum(self.parts.ends(setup, stage).total_us * stage.alike for stage in stages) / setup.copies

            ends_us = self.parts.once(("all ends", setup.pipeline, *degrees), all_us)
        elif self.job.model.mtp_layers:
            ends_us = self.parts.head_us(setup, True, True)
        work = ends_us + sum(number * single[is_moe] for is_moe, number in self.numbers.items())
        busy = ends_us + sum(number * weights[is_moe] for is_moe, number in self.numbers.items())
        slowest = busy / ranks
        if sparse := self.numbers.get(True):
            slowest = max(slowest, least_slowest_us(sparse, ranks, weights[True], head_us))
        if is_dual(setup.schedule):
            return count * slowest
        # the bubble is the other ranks' work: all but what the slowest takes by itself
        alone = max(1.0, *(single[is_moe] / weights[is_moe] for is_moe in weights)) if setup.is_merged else 1.0
        return slowest * (count - alone / setup.vpp) + work / setup.vpp

"""Micro-batches through the pipeline: the slowest stage, by themselves or merged with others, and
the schedule's bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlayer.scheduler.mapping import parameters
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.parameters import Stage
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT
from commlayer.scheduler.mapping.pipeline_orders import laid_out_us
from commlayer.scheduler.mapping.pipeline_schedule import Course, StageTimes, course, hops, is_dual
from commlayer.scheduler.mapping.step_parts import StepParts
from commlayer.scheduler.programs import Breakdown

__all__ = ["StepPipeline"]


class StepPipeline:
    """The pipelines of steps that have these parts."""

    def __init__(self, parts: StepParts) -> None:
        self.parts, self.job = parts, parts.job

    def breakdown(self, setup: Setup, stages: tuple[Stage, ...]) -> Breakdown:
        """All micro-batches, with the bubble and what is exposed between stages."""
        passes, way = self._passes(setup, stages)
        found = Breakdown()
        found.add(passes[way.slowest])
        found.parts["bubble"] = way.bubble_us
        found.total_us += way.bubble_us
        if exposed := self.sending_us(setup):
            found.expose("pp", "pp", exposed, {self.parts.boundary(setup)[1]: exposed})
        return found

    def over_ranks(self, setup: Setup, stages: tuple[Stage, ...], parts: Mapping[str, float]) -> dict[str, float]:
        """The parts of a step as the mean of the pipeline's ranks has them, in place of those of the
        slowest: what the others wait for it counts as bubble."""
        passes, way = self._passes(setup, stages)
        found = Breakdown(parts=dict(parts))
        found.add(passes[way.slowest], -1.0)
        for each in passes:
            found.add(each, 1 / len(passes))
        found.parts["bubble"] = parts.get("bubble", 0.0) - found.total_us
        return found.parts

    def _passes(self, setup: Setup, stages: tuple[Stage, ...]) -> tuple[list[Breakdown], Course]:
        """All micro-batches through the layers of each pipeline rank, as often merged as the slowest
        rank's are, and the course of the pipeline."""
        alone = [self._stage_alone(setup, stage) for stage in stages]
        merged = (
            [self.stage_merged(setup, stage) for stage in stages] if setup.is_merged else [Breakdown()] * len(stages)
        )
        times = [
            self._split_times(setup, stage, one.total_us, both.total_us)
            if setup.is_merged
            else StageTimes(0.0, one.total_us)  # how it is split would not matter to how long all takes
            for stage, one, both in zip(stages, alone, merged, strict=True)
        ]
        places = self.places_of_ranks(setup, stages)
        way = course(
            setup.schedule,
            [times[place] for place in places],
            setup.micro_batches(self.job),
            setup.vpp,
            makespan=laid_out_us,
        )
        passes = [Breakdown() for _ in stages]
        for found, one, both in zip(passes, alone, merged, strict=True):
            found.add(one, way.alone)
            found.add(both, way.merged)
        return [passes[place] for place in places], way

    def _stage_alone(self, setup: Setup, stage: Stage) -> Breakdown:
        """One micro-batch through all layers of a stage, forward and backward, and its ends."""
        found = Breakdown()
        for is_moe, number in stage.numbers:
            for times in self.parts.layer_times(setup, is_moe):
                found.add(times, number)
        found.add(self.parts.ends(setup, stage))
        return found

    def stage_merged(self, setup: Setup, stage: Stage, *, is_bound: bool = False) -> Breakdown:
        """The same with forward and backward of two micro-batches merged, layers with experts among
        themselves. A layer that has no partner in the other task, as the chunks of a rank differ,
        is by itself: one with experts, where there are any."""
        found = Breakdown()
        # The forward task of a chunk goes with the backward task of the one that is as far from the rank's last as it is from
        # the first.
        kinds = parameters.kinds_of_chunks(self.job.model, setup.pipeline)
        layers = [len(kinds[chunk]) for chunk in setup.pipeline.chunks(stage.number)]
        alone = sum(abs(one - other) for one, other in zip(layers, reversed(layers), strict=True)) / 2
        for is_moe, number in stage.numbers:
            single = min(float(number), alone)
            alone -= single
            found.add(self.parts.merged_times(setup, is_moe, is_bound=is_bound), number - single)
            if single:
                for times in self.parts.layer_times(setup, is_moe, is_bound=is_bound):
                    found.add(times, single)
        found.add(self.parts.ends(setup, stage))
        return found

    def _split_times(self, setup: Setup, stage: Stage, alone_us: float, merged_us: float) -> StageTimes:
        """Part a stage's times into forward, backward, and products for weights. The ends are a
        third of each."""
        forward = weights = 0.0
        for is_moe, number in stage.numbers:
            forward += number * self.parts.layer_times(setup, is_moe)[0].total_us
            weights += number * self.parts.builder(setup).work(setup, is_moe).weights
        third = self.parts.ends(setup, stage).total_us / 3
        return StageTimes(forward + third, alone_us - forward - third, weights + third, merged_us)

    def rank_times(self, setup: Setup, stages: tuple[Stage, ...]) -> tuple[StageTimes, ...]:
        """The times of every pipeline rank's stage, for people to see."""
        found = []
        for stage in stages:
            merged_us = self.stage_merged(setup, stage).total_us if setup.is_merged else 0.0
            found.append(self._split_times(setup, stage, self._stage_alone(setup, stage).total_us, merged_us))
        return tuple(found[place] for place in self.places_of_ranks(setup, stages))

    def places_of_ranks(self, setup: Setup, stages: tuple[Stage, ...]) -> Sequence[int]:
        """For each pipeline rank, where its stage is in ``stages``; only DualPipe and layouts
        that are spelt out ask in which order."""
        if is_dual(setup.schedule) or setup.pipeline_layout != EVEN_LAYOUT:
            return parameters.stage_of_ranks(self.job.model, setup.pipeline)
        return [place for place, stage in enumerate(stages) for _ in range(stage.alike)]

    def sending_us(self, setup: Setup) -> float:
        """The time that sends between stages add to a step, µs. Beside those of merged tasks the
        last layer's products for weights are computed (Megatron-Core puts them off for that)."""
        us = self.parts.boundary(setup)[0]
        if not us:
            return 0.0
        sends = hops(setup.pp, setup.micro_batches(self.job), setup.vpp, setup.schedule)
        hidden = self.parts.builder(setup).work(setup, True).attention_weights if sends.merged else 0.0
        return sends.alone * us + sends.merged * max(0.0, us - hidden)

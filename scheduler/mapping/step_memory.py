"""The memory of a setup, and the pipeline layout that is fastest among those that fit into it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from commlayer.scheduler.mapping import memory, parameters
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layout_balance import LaidOut, LayerTimes, balanced, move_layers, owners
from commlayer.scheduler.mapping.model import layer_kinds
from commlayer.scheduler.mapping.pipeline_layout import AUTO_LAYOUT, EVEN_LAYOUT, ended, parse_layout, written
from commlayer.scheduler.mapping.pipeline_schedule import in_flight_by_chunk, is_dual
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.step_bounds import StepBounds

__all__ = ["StepMemory"]

_RESERVE = 0.06
"""The part of a GPU's memory that CUDA, NCCL and fragmentation take before a model does."""
_MOST_ROUNDS = 3
"""The most changes of a layout that lacks memory: what a rank takes of a layer depends on which one
it is."""
_FASTER = 1e-3
"""The part by which another layout has to be faster than the even one."""


class StepMemory:
    """The memory of steps, in ``limit`` bytes of each GPU, and their pipeline layouts."""

    def __init__(self, bounds: StepBounds) -> None:
        self.parts, self.bounds, self.job = bounds.parts, bounds, bounds.job
        self.cluster, self.software = self.parts.cluster, self.parts.software
        self.limit = self.cluster.gpu.memory_bytes * (1 - _RESERVE)

    def of(self, setup: Setup) -> Memory:
        """Bytes of the fullest GPU. Raises as
        :func:`commlayer.scheduler.mapping.memory.estimate`."""
        laid = self.laid_out(setup, self.limit).setup
        job, software, gpu = self.parts.builder(laid).job, self.software, self.cluster.gpu
        return self.parts.once(("memory", laid), lambda: memory.estimate(job, laid, software=software, gpu=gpu))

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        """The setup with the pipeline layout that is fastest among those that fit into ``limit``
        bytes, where it says ``auto``: the even one where that fits and no other is faster, else the
        balanced one (mapping/layout_balance.py), with fewer layers on ranks that lack memory. Where
        none fits it is the even one."""
        if setup.pipeline_layout != AUTO_LAYOUT:
            return LaidOut(setup, True)
        if setup.pp == 1:
            return LaidOut(replace(setup, pipeline_layout=EVEN_LAYOUT), True)
        return self.parts.once(("laid out", setup, limit), lambda: self._chosen_layout(setup, limit))

    def _chosen_layout(self, setup: Setup, limit: float) -> LaidOut:
        even = replace(setup, pipeline_layout=EVEN_LAYOUT)
        times: dict[Setup, float] = {}
        fitting: list[Setup] = []

        def look_at(way: Setup) -> None:
            times[way] = self.bounds.least_pipeline_us(way, 2)
            fitting.extend([way] * (self.of(way).total <= limit))

        if setup.pipeline.num_chunks <= self.job.model.layers:
            job, software, gpu = self.parts.builder(even).job, self.software, self.cluster.gpu
            if self.of(even).total > limit and not memory.have_room(job, even, limit, software=software, gpu=gpu):
                return LaidOut(even, False)  # before programs are made for its times
            look_at(even)
            if fitting and times[even] <= self.bounds.least_of_layouts_us(setup, 2) * (1 + _FASTER):
                return LaidOut(even, True)
        first = self._balanced(setup, None)
        if not first:
            parameters.stages(self.job.model, even.pipeline)  # raises, and says why there is none
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

    def _balanced(self, setup: Setup, room: Sequence[int] | None) -> list[Setup]:
        """The balanced layout, if there is one: as layers of ``setup`` take alone, or merged where
        most tasks are."""
        model = self.job.model
        weights = self.bounds.layers.least_us(setup, 2)
        if setup.is_merged:
            weights = self.bounds.layers.weights(setup, weights, 2)
        kinds = layer_kinds(self.job.model)
        unit = weights[kinds[-1]]
        modules_us = self.parts.head_us(setup, False, True) + model.mtp_layers * unit
        layers = (weights.get(is_moe, 0.0) for is_moe in (True, False))
        each = (*layers, self.parts.head_us(setup, True, False), modules_us)
        times = LayerTimes(*(round(us / unit, 2) for us in each))  # hundredths of a layer: few are ever balanced
        most = None if room is None else tuple(room)
        chunks = balanced(kinds, model.mtp_layers, setup.schedule, setup.pp, setup.vpp, times, most)
        return [] if chunks is None else [replace(setup, pipeline_layout=written(chunks))]

    def _squeezed(self, setup: Setup, start: Setup, limit: float) -> Iterator[Setup]:
        """Layouts that take less memory than ``start``, which is balanced, of the ranks that lack
        it: with layers in chunks whose activations fewer micro-batches keep (DualPipe and its V, of
        which a rank's chunks differ much in that), and with fewer layers."""
        model = self.job.model
        own = owners(setup.schedule, setup.pp, setup.vpp)
        for _ in range(_MOST_ROUNDS):
            job = self.parts.builder(start).job
            rooms = memory.rooms(job, start, limit, software=self.software, gpu=self.cluster.gpu)
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

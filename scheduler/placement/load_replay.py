"""Recorded loads, run again under a way of placing experts: what steps would have taken, migrations
included, as predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.eplb import eplb_placement
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.scheduler.placement.expert_placement import Array, ExpertPlacement
from commlayer.scheduler.placement.llep import llep_spilled
from commlayer.scheduler.placement.placement_price import LayerLoad, PlacementPrices
from commlayer.scheduler.placement.placing import PlacementRoom, place_layer
from commlayer.scheduler.placement.spilled_rows import Spilled

__all__ = ["REPLAY_WAYS", "LoadReplay", "ReplayWay", "replay_loads"]

ReplayWay = Literal["static", "eplb", "llep", "place", "oracle"]
REPLAY_WAYS: tuple[str, ...] = get_args(ReplayWay)
_IN_ORDER = ("static", "llep")


@dataclass(frozen=True)
class LoadReplay:
    """The course of a replay.

    ``step_us`` [steps]: all layers, one after the other. ``migration_us``: of all migrations,
    ``num_migrations`` of a layer each. ``rank_rows`` [steps, layers, ranks]: choices that each rank
    would have computed."""

    way: ReplayWay
    step_us: Array
    migration_us: float
    num_migrations: int
    rank_rows: Array

    @property
    def total_us(self) -> float:
        return float(self.step_us.sum()) + self.migration_us

    @property
    def busiest(self) -> float:
        """The busiest rank's rows over the mean: the mean over steps and layers."""
        rows = self.rank_rows
        return float((rows.max(-1) / rows.mean(-1).clip(1e-9)).mean())


def replay_loads(
    loads: ExpertLoads,
    prices: PlacementPrices,
    way: ReplayWay,
    *,
    every: int = 16,
    horizon: int | None = None,
    room: PlacementRoom | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadReplay:
    """Run ``loads`` again.

    Ways:
        static: experts stay in order.
        eplb: every so many steps EPLB's placement of the forecast, whatever it costs.
        llep: experts stay in order, and in every step rows spill by LLEP's rule and its authors'
            thresholds, which sees the step's own load (each of its micro-batches as an even part).
        place: every so many steps the decision of
            :func:`~commlayer.scheduler.placement.placing.place` on the forecast.
        oracle: the same decision on what will really be until the next one.

    Args:
        every: steps between decisions; the first is made after as many.
        horizon: over which a migration shall pay back; ``every`` unless given.
        progress: called with steps done and steps in all.

    Raises:
        UsageError: an unknown way, or a number below one.
    """
    import numpy as np

    if way not in REPLAY_WAYS or every < 1:
        raise UsageError(
            f"expected one of {', '.join(REPLAY_WAYS)} and at least one step between decisions, got {way}, {every}"
        )
    room, horizon = room or PlacementRoom(), horizon or every
    start = ExpertPlacement.in_order(loads.num_experts, prices.times.num_ranks, room.spare_slots(prices.work))
    placements = [start] * loads.num_layers
    spilled: list[Spilled] = [()] * loads.num_layers
    step_us = np.zeros(loads.num_steps)
    rows = np.zeros((loads.num_steps, loads.num_layers, prices.times.num_ranks))
    migration_us, migrations = 0.0, 0
    for step in range(loads.num_steps):
        if way not in _IN_ORDER and step and step % every == 0:
            expected = _expected(loads, way, step, every)
            for layer, counts in enumerate(expected):
                before = placements[layer]
                placements[layer], spilled[layer] = _decided(
                    way, LayerLoad(counts, loads.top_k), prices, before, horizon, room
                )
                took_us = prices.migration_us(before, placements[layer])
                migration_us, migrations = migration_us + took_us, migrations + (took_us > 0)
        for layer, placement in enumerate(placements):
            load = LayerLoad(loads.counts[step, layer], loads.top_k)
            if way == "llep":
                spilled[layer] = llep_spilled(load.counts / prices.work.micro_batches, placement)
            step_us[step] += prices.layer(load, placement, spilled[layer]).total_us
            rows[step, layer] = prices.totals(load, placement, spilled[layer])[0].rows
        if progress:
            progress(step + 1, loads.num_steps)
    return LoadReplay(way, step_us, migration_us, migrations, rows)


def _expected(loads: ExpertLoads, way: ReplayWay, step: int, every: int) -> Array:
    if way == "oracle":
        return loads.between(step, min(step + every, loads.num_steps)).counts.mean(0)
    return loads.between(0, step).forecast(every)


def _decided(
    way: ReplayWay,
    load: LayerLoad,
    prices: PlacementPrices,
    before: ExpertPlacement,
    horizon: int,
    room: PlacementRoom,
) -> tuple[ExpertPlacement, Spilled]:
    if way == "eplb":
        nodes, groups = prices.times.num_nodes, room.num_groups
        eplb = eplb_placement(load.counts, before.slots.size, before.num_ranks, num_nodes=nodes, num_groups=groups)
        return eplb.owned_as(before), ()
    decision = place_layer(load, prices, before, horizon, room)
    return decision.placement, decision.spilled

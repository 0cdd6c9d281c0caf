"""The work and the bytes of an expert that is here, as placements are priced by: its time is measured, its bytes are counted."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.integrations.moe.expert_migration import Optimizer, moved_bytes
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.measuring import Measurements
from commlayer.scheduler.placement.placement_price import ExpertWork

__all__ = ["measured_work"]

_ROWS = 1024
"""The most rows on which experts are measured: as many as their times grow in proportion from, on most devices."""


def measured_work(layer: MoELayer, optimizers: Sequence[Optimizer] = (), micro_batches: int = 1) -> ExpertWork:
    """Find what an expert of ``layer`` costs. Collective over EP and ETP: all ranks measure at once, and agree on the medians.

    ``optimizers``: whose state goes with an expert. Raises what measuring raises here; DisagreementError where it
    failed on another rank.
    """
    experts = layer.experts
    tokens = experts.w_gate.new_empty(0, experts.hidden)
    times = Measurements(layer.dispatcher.grid).experts(experts, _ROWS, tokens)
    row_us = max(0.0, (times.times_us[-1] - times.times_us[0]) / max(1, times.rows[-1] - times.rows[0]))
    weight_bytes = sum(parameter.nbytes for parameter in experts.parameters()) // experts.count
    return ExpertWork(
        row_bytes=experts.hidden * experts.w_gate.element_size(),
        row_us=row_us,
        expert_us=max(0.0, times.times_us[0] - row_us * times.rows[0]) / experts.count,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        state_bytes=max(0, moved_bytes(layer, optimizers) - weight_bytes),
        micro_batches=micro_batches,
    )

"""The work and the bytes of an expert that is here, as placements are priced by: its time is measured, its bytes are counted."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.integrations.moe.expert_migration import Optimizer, moved_bytes
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.measuring import Measurements, work_of_experts
from commlayer.scheduler.placement.placement_price import ExpertWork

__all__ = ["measured_work"]


def measured_work(
    layer: MoELayer, optimizers: Sequence[Optimizer] = (), micro_batches: int = 1, *, tokens: int = 0
) -> ExpertWork:
    """Find what an expert of ``layer`` costs. Collective over EP and ETP: all ranks measure at once, and agree on the medians.

    ``optimizers``: whose state goes with an expert. ``tokens``: of all ranks in a call; 0: as many as were measured before, by
    the layer's calls. Raises what measuring raises here; DisagreementError where it
    failed on another rank.
    """
    weight_bytes = sum(parameter.nbytes for parameter in layer.experts.parameters()) // layer.experts.count
    state_bytes = max(0, moved_bytes(layer, optimizers) - weight_bytes)
    measured, top_k = Measurements(layer.dispatcher.grid), layer.router.config.top_k
    return work_of_experts(layer.experts, measured, top_k, tokens, state_bytes=state_bytes, micro_batches=micro_batches)

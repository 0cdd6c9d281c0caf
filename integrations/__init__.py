"""Layers of MoE models, and hooks for trainers. Names are loaded on first use (PEP 562); they load
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.profiles.lazy_names import lazy_names

if TYPE_CHECKING:
    from commlayer.integrations.clipping import clip_gradients
    from commlayer.integrations.ddp import all_reduce_hook, plan_ddp
    from commlayer.integrations.deepspeed import plan_deepspeed_moe
    from commlayer.integrations.fsdp import PlannedAllGather, PlannedReduceScatter, plan_fsdp
    from commlayer.integrations.gradients import reduce_replicated_gradients, synchronise_gradients
    from commlayer.integrations.groups import planned_group
    from commlayer.integrations.megatron import tell_megatron_neighbours
    from commlayer.integrations.megatron_moe import plan_megatron_moe
    from commlayer.integrations.mesh import FoldedMesh
    from commlayer.integrations.moe.dispatcher import TokenDispatcher
    from commlayer.integrations.moe.expert_placer import ExpertPlacer
    from commlayer.integrations.moe.experts import GroupedExperts
    from commlayer.integrations.moe.layer import MoELayer
    from commlayer.integrations.moe.replica_gradients import sum_replica_gradients
    from commlayer.integrations.moe.router import Router, RouterConfig
    from commlayer.integrations.moe.routing import Routing
    from commlayer.integrations.neighbours import tell_neighbours, use_neighbours
    from commlayer.integrations.parameter_marks import mark_experts, mark_replicated, mark_split
    from commlayer.integrations.remat import Rematerialise, recomputable
    from commlayer.integrations.torchft import planned_process_group
    from commlayer.integrations.training_state import TrainingState
    from commlayer.integrations.wire_choice import DispatchWire
    from commlayer.scheduler.mapping.folded import FoldedMapping

__all__ = [
    "DispatchWire",
    "ExpertPlacer",
    "FoldedMapping",
    "FoldedMesh",
    "GroupedExperts",
    "MoELayer",
    "PlannedAllGather",
    "PlannedReduceScatter",
    "Rematerialise",
    "Router",
    "RouterConfig",
    "Routing",
    "TokenDispatcher",
    "TrainingState",
    "all_reduce_hook",
    "clip_gradients",
    "mark_experts",
    "mark_replicated",
    "mark_split",
    "plan_ddp",
    "plan_deepspeed_moe",
    "plan_fsdp",
    "plan_megatron_moe",
    "planned_group",
    "planned_process_group",
    "recomputable",
    "reduce_replicated_gradients",
    "sum_replica_gradients",
    "synchronise_gradients",
    "tell_megatron_neighbours",
    "tell_neighbours",
    "use_neighbours",
]

__getattr__, __dir__ = lazy_names(__name__)

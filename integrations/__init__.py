"""Layers of MoE models, and hooks for trainers. Names are loaded on first use (PEP 562); they load torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer.integrations.attention import ParallelAttention as ParallelAttention
    from commlayer.integrations.block import MoETransformerLayer as MoETransformerLayer
    from commlayer.integrations.buckets import GradientBuckets as GradientBuckets
    from commlayer.integrations.context_parallel import merge_sequence as merge_sequence
    from commlayer.integrations.context_parallel import split_sequence as split_sequence
    from commlayer.integrations.ddp import all_reduce_hook as all_reduce_hook
    from commlayer.integrations.ddp import plan_ddp as plan_ddp
    from commlayer.integrations.fsdp import PlannedAllGather as PlannedAllGather
    from commlayer.integrations.fsdp import PlannedReduceScatter as PlannedReduceScatter
    from commlayer.integrations.fsdp import plan_fsdp as plan_fsdp
    from commlayer.integrations.gradients import reduce_replicated_gradients as reduce_replicated_gradients
    from commlayer.integrations.gradients import synchronise_gradients as synchronise_gradients
    from commlayer.integrations.groups import planned_group as planned_group
    from commlayer.integrations.language_model import ModelConfig as ModelConfig
    from commlayer.integrations.language_model import MoELanguageModel as MoELanguageModel
    from commlayer.integrations.linear import ColumnParallelLinear as ColumnParallelLinear
    from commlayer.integrations.linear import ReplicatedLinear as ReplicatedLinear
    from commlayer.integrations.linear import RowParallelLinear as RowParallelLinear
    from commlayer.integrations.mesh import FoldedMesh as FoldedMesh
    from commlayer.integrations.moe.dispatcher import TokenDispatcher as TokenDispatcher
    from commlayer.integrations.moe.experts import GroupedExperts as GroupedExperts
    from commlayer.integrations.moe.layer import MoELayer as MoELayer
    from commlayer.integrations.moe.router import Router as Router
    from commlayer.integrations.moe.router import RouterConfig as RouterConfig
    from commlayer.integrations.moe.routing import Routing as Routing
    from commlayer.integrations.norm import RMSNorm as RMSNorm
    from commlayer.integrations.parameter_marks import mark_experts as mark_experts
    from commlayer.integrations.parameter_marks import mark_replicated as mark_replicated
    from commlayer.integrations.pipeline_schedules import run_pipeline as run_pipeline
    from commlayer.integrations.remat import Rematerialise as Rematerialise
    from commlayer.integrations.remat import recomputable as recomputable
    from commlayer.integrations.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from commlayer.integrations.wire_choice import DispatchWire as DispatchWire
    from commlayer.integrations.wire_choice import LaneWires as LaneWires
    from commlayer.integrations.wire_choice import tensor_parallel_wire as tensor_parallel_wire
    from commlayer.scheduler.mapping.folded import FoldedMapping as FoldedMapping

_HOME = {
    "ColumnParallelLinear": "linear",
    "DispatchWire": "wire_choice",
    "FoldedMapping": "mesh",
    "FoldedMesh": "mesh",
    "GradientBuckets": "buckets",
    "GroupedExperts": "moe.experts",
    "LaneWires": "wire_choice",
    "MoELanguageModel": "language_model",
    "MoELayer": "moe.layer",
    "MoETransformerLayer": "block",
    "ModelConfig": "language_model",
    "ParallelAttention": "attention",
    "PlannedAllGather": "fsdp",
    "PlannedReduceScatter": "fsdp",
    "RMSNorm": "norm",
    "Rematerialise": "remat",
    "ReplicatedLinear": "linear",
    "Router": "moe.router",
    "RouterConfig": "moe.router",
    "Routing": "moe.routing",
    "RowParallelLinear": "linear",
    "ShardedOptimizer": "sharded_optimizer",
    "TokenDispatcher": "moe.dispatcher",
    "all_reduce_hook": "ddp",
    "mark_experts": "parameter_marks",
    "mark_replicated": "parameter_marks",
    "merge_sequence": "context_parallel",
    "plan_ddp": "ddp",
    "plan_fsdp": "fsdp",
    "planned_group": "groups",
    "recomputable": "remat",
    "reduce_replicated_gradients": "gradients",
    "run_pipeline": "pipeline_schedules",
    "split_sequence": "context_parallel",
    "synchronise_gradients": "gradients",
    "tensor_parallel_wire": "wire_choice",
}

__all__ = [
    "ColumnParallelLinear",
    "DispatchWire",
    "FoldedMapping",
    "FoldedMesh",
    "GradientBuckets",
    "GroupedExperts",
    "LaneWires",
    "MoELanguageModel",
    "MoELayer",
    "MoETransformerLayer",
    "ModelConfig",
    "ParallelAttention",
    "PlannedAllGather",
    "PlannedReduceScatter",
    "RMSNorm",
    "Rematerialise",
    "ReplicatedLinear",
    "Router",
    "RouterConfig",
    "Routing",
    "RowParallelLinear",
    "ShardedOptimizer",
    "TokenDispatcher",
    "all_reduce_hook",
    "mark_experts",
    "mark_replicated",
    "merge_sequence",
    "plan_ddp",
    "plan_fsdp",
    "planned_group",
    "recomputable",
    "reduce_replicated_gradients",
    "run_pipeline",
    "split_sequence",
    "synchronise_gradients",
    "tensor_parallel_wire",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

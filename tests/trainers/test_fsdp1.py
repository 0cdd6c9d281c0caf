"""FSDP1 in each of its precisions, and DDP's hook that resizes a bucket, on backend commlayer and on Gloo: the same training.

Both free memory by ``resize_`` of a storage that was in a collective before: what a planned call leaves there decides whether the
next step can be made at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import commlayer
import commlayer.backend.create  # ranks are forked: what is imported here they need not import
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

WIDTH = 32
STEPS = 3
BF16 = torch.bfloat16
PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "FP32": dict,
    "parameters in BF16": lambda: {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)},
    "gradients in BF16": lambda: {"mixed_precision": MixedPrecision(reduce_dtype=BF16)},
    "both, and buffers": lambda: {
        "mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    },
    "offloaded": lambda: {"cpu_offload": CPUOffload(offload_params=True)},
    "offloaded, parameters in BF16": lambda: {
        "cpu_offload": CPUOffload(offload_params=True),
        "mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    },
    "gathered once, parameters in BF16": lambda: {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "mixed_precision": MixedPrecision(param_dtype=BF16),
    },
    "sharded inside nodes, parameters in BF16": lambda: {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "mixed_precision": MixedPrecision(param_dtype=BF16),
    },
}


def fresh() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(*layers)


def train(model: Any) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = (model(torch.randn(6, WIDTH, generator=draw)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def every_precision() -> dict[str, list[float]]:
    # Offloading takes two things that torch has for an accelerator only, which Gloo is no help with either.
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.cpu.Stream.synchronize = lambda _: None  # type: ignore[attr-defined]
    found = {}
    for name, options in PRECISIONS.items():
        model = FullyShardedDataParallel(
            fresh(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            **options(),
        )
        found[name] = train(model)
    return found


def batched_power_sgd() -> dict[str, list[float]]:
    orthogonalize: Any = powerSGD_hook._orthogonalize

    def of_one(matrices: torch.Tensor, epsilon: float = 0) -> None:
        """torch 2.13's takes a batch of matrices, and its own batched hook gives it one, which fails on every backend."""
        orthogonalize(matrices if matrices.dim() > 2 else matrices.unsqueeze(0), epsilon)

    powerSGD_hook._orthogonalize = of_one
    model = DistributedDataParallel(fresh())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    return {"batched PowerSGD": train(model)}


def losses_on(
    backend: str, plan: str | None, job: Callable[[], dict[str, list[float]]]
) -> tuple[dict[str, list[float]], set[str]]:
    """On a rank: the losses, and the collectives that had a plan."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    if plan is not None:
        os.environ["COMMLAYER_PLAN"] = plan
    dist.init_process_group(backend)
    losses = job()
    rows = [row for group in commlayer.stats()["groups"] for row in group["calls"]]
    dist.destroy_process_group()
    return losses, {row["collective"] for row in rows if row["plan"] != "flat"}


@pytest.mark.parametrize(
    ("job", "planned"),
    [(every_precision, {"all_gather", "reduce_scatter"}), (batched_power_sgd, {"all_reduce"})],
    ids=["FSDP1", "batched PowerSGD"],
)
def test_the_same_training_by_plans(
    emulated_cluster: ClusterFactory, job: Callable[[], dict[str, list[float]]], planned: set[str]
) -> None:
    cluster = emulated_cluster(nodes=2, ranks_per_node=2)
    on_gloo = cluster.run(partial(losses_on, "gloo", None, job))
    by_plans = cluster.run(partial(losses_on, "commlayer", "hierarchical", job))
    for (wanted, _), (got, collectives) in zip(on_gloo, by_plans, strict=True):
        assert planned <= collectives
        for name, losses in wanted.items():
            assert got[name] == pytest.approx(losses, rel=1e-2 if "BF16" in name or "both" in name else 1e-5), name

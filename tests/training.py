"""Small models that learn some steps on any device: by DDP, by FSDP2, and with a MoE layer over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig

__all__ = ["MODELS", "Breaks", "sharded", "train"]

HIDDEN, CLASSES, STEPS = 32, 8, 3


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    width = 64
    return nn.Sequential(
        nn.Linear(HIDDEN, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def _with_ddp(device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(_mlp().to(device), bucket_cap_mb=0.005)


def sharded(model: nn.Sequential, device: torch.device) -> nn.Module:
    """Spread ``model``, which lies on ``device``, over all ranks: each linear layer, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _with_fsdp(device: torch.device) -> nn.Module:
    return sharded(_mlp().to(device), device)


class _Routed(nn.Module):
    """A MoE layer over all ranks between two linear ones. The gradients of what all ranks hold are summed after the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        mesh = FoldedMesh({"ep": dist.get_world_size()})
        self.moe = MoELayer(HIDDEN, 24, RouterConfig(num_experts=8, top_k=2), mesh=mesh, shared_width=16, chunks=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        out: torch.Tensor = self.after(hidden + self.moe(hidden))
        return out

    def finish(self) -> None:
        whole = [p for name, p in self.named_parameters() if "experts" not in name or "shared" in name]
        works = [dist.all_reduce(p.grad, async_op=True) for p in whole if p.grad is not None]
        for work in works:
            assert work is not None
            work.wait()


def _with_moe(device: torch.device) -> nn.Module:
    return _Routed().to(device)


MODELS = {"ddp": _with_ddp, "fsdp": _with_fsdp, "moe": _with_moe}


Breaks = Callable[[pytest.MonkeyPatch], None]


def train(kind: str, device: torch.device, breaks: Breaks = lambda patch: None) -> list[float]:
    """The losses of some steps, read when all of them were launched. ``breaks`` leaves something out in the backward."""
    model = MODELS[kind](device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, HIDDEN, generator=draws).to(device)
        wanted = torch.randint(0, CLASSES, (16,), generator=draws).to(device)
        loss = functional.cross_entropy(model(x), wanted)
        optimizer.zero_grad()
        with pytest.MonkeyPatch.context() as patch:  # not forward, where DDP's ranks tell each other how to go on
            breaks(patch)
            loss.backward()
            if isinstance(model, _Routed):
                model.finish()
            optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]

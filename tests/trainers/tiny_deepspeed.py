"""A tiny model with DeepSpeed's MoE layers, trained by its engine, with tensor parallelism and without. Runs inside ranks."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_size import Size
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from wrong_rows import sorted_wrongly

import commlayer.backend.new_groups  # noqa: F401  # needs no import where commlayer is installed; here: once, before ranks are forked
from commlayer.integrations import plan_deepspeed_moe
from commlayer.statistics import Stats, stats

SIZE = Size(sequence=16)
AUTO_EP = "deepspeed.module_inject.auto_ep_layer"


def deepspeed(module: str = "deepspeed") -> Any:
    """DeepSpeed, or a module of its. Through importorskip because mypy would otherwise read all of it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = pytest.importorskip(module, reason="NOT TESTED: deepspeed is not installed (extra 'deepspeed')")
    # Its shared-memory all_reduce for inference would be compiled at the start of every job, where a compiler is found.
    vars(importlib.import_module("deepspeed.ops"))["__compatible_ops__"] = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return found


def load() -> None:
    """Import what ranks will need: before the fork, once, not in each of them."""
    for module in ("deepspeed", "deepspeed.moe.layer", "deepspeed.moe.sharded_moe", "deepspeed.utils.groups", AUTO_EP):
        deepspeed(module)


@dataclass(frozen=True)
class Run:
    """The program of a rank.

    ``tp``: tensor-parallel ranks. ``is_planned``: by plan_deepspeed_moe(), whose ``kind`` it is. ``wrong``: its exchange delivers
    two blocks swapped, or two rows. ``options``: of DeepSpeed's configuration, beside sizes.
    """

    backend: str = "gloo"
    tp: int = 1
    ep: int = 4
    steps: int = 20
    environment: tuple[tuple[str, str], ...] = ()
    is_planned: bool = True
    kind: str = "auto"
    wrong: bool = False
    size: Size = SIZE
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Trained:
    """The losses of a rank, what ran, and the lanes of the groups that its MoE layers' tokens travel in; None: of Gloo's."""

    losses: list[float]
    stats: Stats
    lanes: set[str | None]


class Ranks:
    """Tensor and data parallel groups, as DeepSpeed asks a model-parallel unit (mpu) for them."""

    def __init__(self, tp: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        groups = [[dist.new_group(range(start, start + tp)) for start in range(0, world, tp)]]
        groups.append([dist.new_group(range(place, world, tp)) for place in range(tp)])
        self.tp, self.dp = groups[0][rank // tp], groups[1][rank % tp]
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: self.tp
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = self.tp.rank
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = self.tp.size
        self.get_data_parallel_group = lambda: self.dp
        self.get_data_parallel_rank, self.get_data_parallel_world_size = self.dp.rank, self.dp.size


class Copy(torch.autograd.Function):
    """Megatron's f: forward nothing, backward the sum over ``group``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Megatron's g: forward the sum over ``group``, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Expert(nn.Module):
    """An MLP, sharded over the ranks of ``group`` where there are several."""

    def __init__(self, size: Size, group: dist.ProcessGroup | None, tp: int) -> None:
        super().__init__()
        self.size, self.tp, width = size, tp, size.width // tp
        self.up, self.down = nn.Linear(size.hidden, width, bias=False), nn.Linear(width, size.hidden, bias=False)
        self.group = [group] if tp > 1 else []  # in a list: a module is copied for each expert, a group cannot be

    def __deepcopy__(self, memo: object) -> Expert:
        made = Expert(self.size, self.group[0] if self.group else None, self.tp)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.group:
            return self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]
        copied: torch.Tensor = Copy.apply(x, self.group[0])  # type: ignore[no-untyped-call]
        summed: torch.Tensor = Sum.apply(self.down(F.silu(self.up(copied))), self.group[0])  # type: ignore[no-untyped-call]
        return summed


class Model(nn.Module):
    """A layer of DeepSpeed's experts between an embedding and a head."""

    def __init__(self, run: Run, mpu: Ranks | None) -> None:
        super().__init__()
        size = run.size
        self.embedding, self.head = (
            nn.Embedding(size.vocabulary, size.hidden),
            nn.Linear(size.hidden, size.vocabulary),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(size.hidden) for _ in range(size.layers)])
        expert = Expert(size, mpu.tp if mpu else None, run.tp)
        moe = deepspeed("deepspeed.moe.layer").MoE
        self.layers = nn.ModuleList(
            moe(
                size.hidden,
                expert,
                size.num_experts,
                ep_size=run.ep,
                k=size.top_k,
                min_capacity=0,
                use_rts=False,
                top2_2nd_expert_sampling=False,
                enable_expert_tensor_parallelism=run.tp > 1,
            )
            for _ in range(size.layers)
        )
        self._fill(run)

    def _fill(self, run: Run) -> None:
        """Make experts distinct, and the same under every mapping."""
        place, shard = dist.get_rank() // run.tp % run.ep, dist.get_rank() % run.tp
        for number, layer in enumerate(self.layers):
            experts = list(layer.deepspeed_moe.experts.deepspeed_experts)  # type: ignore[union-attr, arg-type]
            for index, expert in enumerate(experts):
                seed = 1000 * (number + 1) + place * len(experts) + index
                generator = torch.Generator().manual_seed(seed)
                up, down = torch.randn(2, run.size.width, run.size.hidden, generator=generator) * 0.3
                expert.up.weight.data.copy_(up.chunk(run.tp)[shard])
                expert.down.weight.data.copy_(down.chunk(run.tp)[shard].t())
            assert not any(torch.equal(a.up.weight, b.up.weight) for a, b in combinations(experts, 2)), "clones"

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        total = x.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, loss, _ = layer(norm(x))
            x, total = x + out, total + loss
        found: torch.Tensor = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * total
        return found


def train(run: Run) -> Trained:
    """The job of one rank."""
    lanes: set[str | None] = set()
    return Trained(list(losses_of(run, lanes)), stats(), lanes)


def losses_of(run: Run, lanes: set[str | None] | None = None) -> Iterator[float]:
    """DeepSpeed's engine around the model, and what its loop calls: the losses of one rank, step by step. ``lanes`` takes those
    of the groups that tokens travel in."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "none", **dict(run.environment)})
    library = deepspeed()
    library.init_distributed(dist_backend=run.backend, verbose=False)
    mpu = Ranks(run.tp) if run.tp > 1 else None
    torch.manual_seed(0)
    model = Model(run, mpu)
    replicas, size = dist.get_world_size() // run.tp, run.size
    config = {
        "train_micro_batch_size_per_gpu": size.batch,
        "train_batch_size": size.batch * replicas,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config | dict(run.options), mpu=mpu)
    if run.is_planned and run.backend == "commlayer":
        plan_deepspeed_moe(engine, kind=run.kind)
    if run.wrong:
        _swap_blocks(engine)
    generator = torch.Generator().manual_seed(1 + dist.get_rank() // run.tp)
    for _ in range(run.steps):
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
        with sorted_wrongly() if run.wrong else contextlib.nullcontext():
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
        engine.step()
        yield loss.item()
    if lanes is not None:
        sharded = deepspeed("deepspeed.moe.sharded_moe").MOELayer
        lanes |= {getattr(layer.ep_group, "lane", None) for layer in engine.modules() if isinstance(layer, sharded)}


def _swap_blocks(model: nn.Module) -> None:
    """Make the planned exchange of every layer deliver what the first two ranks sent each in the other's place."""
    for layer in model.modules():
        planned: Any = vars(layer).get("forward")
        if planned is not None and "_AllToAll" in getattr(planned, "__globals__", {}):
            exchange = planned.__globals__["_AllToAll"]
            right = exchange.apply

            def wrong(group: dist.ProcessGroup, rows: torch.Tensor, right: Any = right) -> torch.Tensor:
                moved: torch.Tensor = right(group, rows)
                return torch.cat([moved.chunk(2)[1], moved.chunk(2)[0]])

            exchange.apply = wrong


def exchange_as_auto_ep(run: Run) -> Stats:
    """The exchanges of AutoEP's layer, by its functions, over DeepSpeed's own group: counts, rows out and home, their gradients.

    Experts multiply by a number that only their rank has, so rows at the wrong rank are noticed.
    """
    os.environ.update({"COMMLAYER_PROFILE": "none", **dict(run.environment)})
    deepspeed().init_distributed(dist_backend=run.backend, verbose=False)
    groups, layer = deepspeed("deepspeed.utils.groups"), deepspeed(AUTO_EP)
    groups._create_expert_and_data_parallel(expert_parallel_size_=run.ep)
    group = groups._get_expert_parallel_group(f"ep_size_{run.ep}")
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    size, num_local = run.size, run.size.num_experts // run.ep
    experts = torch.randint(0, size.num_experts, (size.batch * size.sequence,), generator=generator).sort().values
    rows = torch.randn(len(experts), size.hidden, generator=generator, requires_grad=True)
    plan = layer.compute_split_plan_from_expert_indices(experts, size.num_experts, run.ep, num_local, group)
    assert len(set(plan.input_splits)) > 1, "all splits are alike"
    arrived = layer._AllToAllV.apply(group, rows, plan.input_splits, plan.output_splits)
    computed = arrived * (1 + group.rank())
    back = layer._AllToAllV.apply(group, computed, plan.output_splits, plan.input_splits)
    factor = (1 + experts // num_local).unsqueeze(1).float()
    torch.testing.assert_close(back, rows * factor, rtol=0, atol=0)
    back.backward(rows.detach())
    torch.testing.assert_close(rows.grad, rows.detach() * factor, rtol=0, atol=0)
    return stats()

"""Tiny random models of transformers, their experts spread over ranks, and a plain training loop. Runs inside ranks.

Legend of shapes: T tokens of this rank, K choices a token, H hidden, E experts, L experts of this rank, n ranks, R rows that
this rank's experts receive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlayer.backend.new_groups  # noqa: F401  # needs no import where commlayer is installed; here: once, before ranks are forked
from commlayer.statistics import Stats, stats

STEPS, BATCH, SEQUENCE, VOCABULARY = 4, 2, 12, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
    # The default 0.02 makes outputs of experts so small that a token at the wrong expert hardly changes the loss.
    "initializer_range": 0.2,
}
NUM_EXPERTS = 8


def transformers() -> Any:
    """The library. Through importorskip because mypy would otherwise read all of it."""
    return pytest.importorskip("transformers", reason="NOT TESTED: transformers is not installed (extra 'trainers')")


def mixtral_config() -> Any:
    return transformers().MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=NUM_EXPERTS)


def qwen3_moe_config() -> Any:
    return transformers().Qwen3MoeConfig(
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=24,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        norm_topk_prob=True,
    )


def build(config: Any) -> Any:
    """The same random model on every rank; no two of its experts are alike, or misrouted tokens would change nothing."""
    torch.manual_seed(0)
    model = transformers().AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            assert weight.shape[0] == NUM_EXPERTS
            assert not any(torch.equal(one, other) for one, other in combinations(weight, 2)), "experts are clones"
    return model


class AllToAll(torch.autograd.Function):
    """Rows to other ranks by uneven splits; their gradients the other way. As Megatron writes it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (received, sent), group
        target = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(target, rows.contiguous(), received, sent, group=group)
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received, sent = ctx.splits
        moved: torch.Tensor = AllToAll.apply(gradients[0], sent, received, ctx.group)  # type: ignore[no-untyped-call]
        return moved, None, None, None


class ParallelExperts(torch.nn.Module):
    """In the place of a model's experts: holds this rank's; rows travel to the owners of their experts, and back."""

    def __init__(self, experts: Any, group: dist.ProcessGroup, *, functional: bool) -> None:
        super().__init__()
        self.group, self.act_fn, self.functional = group, experts.act_fn, functional
        self.num_experts = experts.num_experts
        self.num_local = self.num_experts // group.size()
        mine = slice(group.rank() * self.num_local, (group.rank() + 1) * self.num_local)
        self.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.detach()[mine].clone())
        self.down_proj = torch.nn.Parameter(experts.down_proj.detach()[mine].clone())
        for (
            weight
        ) in self.parameters():  # their gradients are sums over all ranks' tokens; the loss is a mean over ranks
            weight.register_hook(lambda gradient: gradient / group.size())

    def forward(self, x_th: torch.Tensor, expert_tk: torch.Tensor, weight_tk: torch.Tensor) -> torch.Tensor:
        """``x_th`` [T, H] through the experts ``expert_tk`` [T, K], summed with ``weight_tk`` [T, K]: [T, H]."""
        num_choices = expert_tk.shape[1]
        order = expert_tk.flatten().argsort(stable=True)  # by expert, and so by owner
        counts_e = torch.bincount(expert_tk.flatten(), minlength=self.num_experts)
        counts_nl = torch.empty_like(counts_e).view(self.group.size(), self.num_local)
        dist.all_to_all_single(counts_nl, counts_e.view_as(counts_nl), group=self.group)
        sent, received = counts_e.view_as(counts_nl).sum(1).tolist(), counts_nl.sum(1).tolist()
        rows_rh = self.exchange(x_th[order // num_choices], received, sent)
        expert_r = torch.arange(self.num_local).repeat(self.group.size()).repeat_interleave(counts_nl.flatten())
        back = self.exchange(self.compute(rows_rh, expert_r), sent, received)
        y_tkh = back[order.argsort()].view(*expert_tk.shape, -1)
        return (y_tkh * weight_tk[..., None]).sum(1).to(x_th.dtype)

    def exchange(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        """Rows to their ranks, and in the backward pass their gradients the other way: uneven splits."""
        moved: torch.Tensor
        if self.functional:
            moved = all_to_all_single_autograd(rows, received, sent, self.group)
        else:
            moved = AllToAll.apply(rows, received, sent, self.group)  # type: ignore[no-untyped-call]
        return moved

    def compute(self, rows_rh: torch.Tensor, expert_r: torch.Tensor) -> torch.Tensor:
        y_rh = torch.zeros_like(rows_rh)
        for expert in range(self.num_local):
            index = (expert_r == expert).nonzero().flatten()
            gate, up = torch.nn.functional.linear(rows_rh[index], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y_rh = y_rh.index_add(0, index, torch.nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert]))
        return y_rh


def spread_experts(model: Any, group: dist.ProcessGroup, *, functional: bool) -> set[torch.nn.Parameter]:
    """Replace each layer's experts by this rank's share of them; returns these parameters, which have no replicas."""
    for layer in model.model.layers:
        layer.mlp.experts = ParallelExperts(layer.mlp.experts, group, functional=functional)
    return {parameter for layer in model.model.layers for parameter in layer.mlp.experts.parameters()}


def with_ddp(model: Any, experts: set[torch.nn.Parameter], group: dist.ProcessGroup | None) -> Any:
    names = [name for name, parameter in model.named_parameters() if parameter in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)


def with_fsdp(model: Any, experts: set[torch.nn.Parameter], group: dist.ProcessGroup | None) -> Any:
    assert group is None, "FSDP2 takes the default group's ranks here"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


@dataclass(frozen=True)
class Run:
    """The program of a rank.

    backend: of all groups. plan: COMMLAYER_PLAN. cache: COMMLAYER_CACHE, for plans from a measured profile. gradients: the
    backend of the gradients' group, where it is another one. functional: experts exchange by torch's functional all_to_all
    instead of c10d's. break_all_to_all: in which pass c10d's all_to_all delivers two peers' blocks swapped.
    """

    config: Callable[[], Any] = mixtral_config
    wrapper: Literal["ddp", "fsdp"] = "ddp"
    backend: str = "gloo"
    plan: str | None = None
    cache: str | None = None
    gradients: str | None = None
    expert_parallel: bool = True
    functional: bool = False
    break_all_to_all: Literal["forward", "backward"] | None = None


@dataclass(frozen=True)
class Trained:
    """The results of a rank: its own loss at each step; rows that a broken all_to_all misplaced; statistics of the backend."""

    losses: list[float]
    num_misplaced: int
    stats: Stats


def train(run: Run) -> Trained:
    """The job of one rank: set up, train, report."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none" if run.cache is None else "auto"
    os.environ.update({"COMMLAYER_PLAN": run.plan} if run.plan else {})
    os.environ.update({"COMMLAYER_CACHE": run.cache} if run.cache else {})
    dist.init_process_group(run.backend)
    model = build(run.config())
    world = dist.new_group()
    experts = spread_experts(model, world, functional=run.functional) if run.expert_parallel else set()
    gradients = dist.new_group(backend=run.gradients) if run.gradients else None
    misplaced = Misplaced(run.break_all_to_all)
    model = (with_ddp if run.wrapper == "ddp" else with_fsdp)(model, experts, gradients)
    losses = loop(model)
    # No destroy_process_group(): where DDP's reducer is then the last to hold a Gloo group, its destructor joins Gloo's
    # threads with the interpreter's lock held, and one of these may wait for that lock to free a finished operation (torch
    # 2.13; seen in one of ten runs). The process ends here anyway.
    return Trained(losses, misplaced.num_rows, stats())


def loop(model: Any) -> list[float]:
    """A plain loop over random tokens, others on every rank and at every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Misplaced:
    """Makes torch's all_to_all_single deliver wrongly in one pass: rows from rank 0 and from rank 1 change places."""

    def __init__(self, in_pass: Literal["forward", "backward"] | None) -> None:
        self.num_rows, self.in_pass, self.right = 0, in_pass, dist.all_to_all_single
        if in_pass is not None:
            setattr(dist, self.right.__name__, self.wrong)  # in a forked rank: nobody else sees it

    def wrong(
        self, output: torch.Tensor, source: torch.Tensor, received: Any = None, *rest: Any, **options: Any
    ) -> Any:
        received = options.pop("output_split_sizes", received)
        work = self.right(output, source, received, *rest, **options)
        backward = torch._C._current_graph_task_id() != -1
        if received is not None and backward == (self.in_pass == "backward"):
            count = min(received[:2])
            first, second = slice(0, count), slice(received[0], received[0] + count)
            output[first], output[second] = output[second].clone(), output[first].clone()
            self.num_rows += count
        return work

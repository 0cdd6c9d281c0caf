"""A tiny random MoE model of torchtitan's, by its own configuration, overrides and parallelisation, and a plain loop. Runs inside
ranks.

torchtitan's Trainer wants a GPU (it asks one for its name and memory); what it does between is called here in its order: the
configuration's override, the meshes, parallelize_qwen3 with expert parallelism and FSDP2, the weights, forward, backward, step.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from model_size import Size
from torch.distributed.fsdp import FSDPModule
from wrong_rows import sorted_wrongly

import commlayer.backend.new_groups  # once, before ranks are forked
from commlayer.statistics import Stats, stats

STEPS, SIZE = 20, Size(width=24, layers=2)


def load() -> None:
    """Import torchtitan, on the CPU; skip, and say so, where it is not installed."""
    if find_spec("torchtitan") is None:
        pytest.skip("NOT TESTED: torchtitan is not installed (extra 'torchtitan')")
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):  # of which it takes a copy
        import_module("torchtitan.tools.utils")
    for name in ("torchtitan.trainer", "torchtitan.models.qwen3", "commlayer.integrations.torchtitan"):
        import_module(name)
    for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
        if (
            getattr(module, "device_type", "cpu") != "cpu"
        ):  # somebody imported it before, and it took this machine for one with GPUs
            vars(module).update(device_type="cpu", device_module=torch.cpu)


@dataclass(frozen=True)
class Run:
    """The program of a rank. ``alias``: COMMLAYER_AS, where commlayer is used; ``override``: of the configuration, with its
    ``options``; ``plan``: COMMLAYER_PLAN; ``ep``: ranks with different experts; ``checkpointed``: activations are computed anew,
    as torchtitan does by default; ``wrong``: rows are sorted wrongly."""

    alias: str | None = None
    override: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    plan: str = "flat"
    ep: int = 4
    checkpointed: bool = False
    wrong: bool = False
    size: Size = SIZE
    steps: int = STEPS
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Trained:
    """The results of a rank: its loss at each step, and the backend's statistics."""

    losses: list[float]
    stats: Stats


def configuration(run: Run) -> Any:
    """torchtitan's configuration of the job."""
    qwen3, titan, size = import_module("torchtitan.models.qwen3"), import_module("torchtitan.trainer"), run.size
    configs = import_module("torchtitan.config.configs")
    attention, rope = (
        import_module("torchtitan.models.common.attention"),
        import_module("torchtitan.models.common.rope"),
    )
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=size.layers,
        dim=size.hidden,
        n_heads=4,
        n_kv_heads=2,
        head_dim=size.hidden // 4,
        moe_hidden_dim=size.width,
        num_experts=size.num_experts,
        top_k=size.top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=rope.CosSinRoPE.Config(dim=size.hidden // 4, max_seq_len=size.sequence, theta=10_000.0),
    )
    for layer in layers:  # FlexAttention would be compiled
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    model = qwen3.Qwen3Model.Config(
        vocab_size=size.vocabulary,
        dim=size.hidden,
        norm=qwen3._qwen3_norm(size.hidden),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=size.vocabulary, embedding_dim=size.hidden, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(
            in_features=size.hidden, out_features=size.vocabulary, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )
    spec = qwen3.ModelSpec("qwen3", "tiny", model, qwen3.parallelize_qwen3, None, None, None)
    override = import_module("torchtitan.config.override")
    imports = [] if run.override is None else [(run.override, dict(run.options))]
    return titan.Trainer.Config(
        model_spec=spec,
        training=configs.TrainingConfig(
            local_batch_size=size.batch,
            seq_len=size.sequence,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=configs.ParallelismConfig(expert_parallel_degree=run.ep, spmd_backend="partial_dtensor"),
        override=override.OverrideConfig(imports=imports),
    )


def build(run: Run) -> tuple[Any, Any]:
    """The model, parallelised and with its weights, as torchtitan's Trainer does it; and its context of a training step."""
    config = configuration(run)
    dims, utils = import_module("torchtitan.distributed.parallel_dims"), import_module("torchtitan.distributed.utils")
    parallel_dims = dims.ParallelDims.from_config(config.parallelism, dist.get_world_size())
    parallel_dims.build_mesh()
    utils.set_spmd_backend(config.parallelism.spmd_backend)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    if config.override.imports:
        import_module("torchtitan.config.override").apply_overrides(config.override, config)
    with torch.device("meta"):
        model = model_config.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint if run.checkpointed else None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):  # it asks for PREMUL_SUM, which Gloo has not
            module.set_force_sum_reduction_for_comms(True)
    return model, utils.get_spmd_context(parallel_dims=parallel_dims)


def strengthen(model: Any) -> None:
    """Make all experts matter. No two of a layer may be alike, on any rank, or tokens at the wrong one would change nothing."""
    for name, parameter in model.named_parameters():
        if ".inner_experts." in name:
            whole = getattr(parameter, "to_local", lambda parameter=parameter: parameter)().detach()
            whole.mul_(10)
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, whole.flatten(1).sum(1).tolist())
            assert len({each for sums in everyones for each in sums}) == sum(map(len, everyones)), "experts are clones"


def in_fp32() -> Any:
    """Let torchtitan's experts, which take BF16 of what they get, compute in its own format: they would magnify a last bit."""
    return mock.patch.object(torch.Tensor, "bfloat16", lambda x: x)


def train(run: Run) -> Trained:
    """The job of one rank."""
    return Trained(list(losses_of(run)), stats())  # no destroy_process_group(): see tiny_moe.py


def losses_of(run: Run) -> Iterator[float]:
    """The losses of one rank, step by step."""
    size = run.size
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does: its meshes are of a thread
    os.environ.update({"COMMLAYER_PROFILE": "none"} | ({"COMMLAYER_PLAN": run.plan} if run.plan else {}))
    os.environ.update(run.environment)
    if run.alias is not None:
        os.environ["COMMLAYER_AS"] = run.alias
        commlayer.backend.autoload()  # what `import torch` does in a fresh process; this one has the parent's
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank fills its own shards
    model, context = build(run)
    strengthen(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(run.steps):
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
        with context(), in_fp32(), sorted_wrongly() if run.wrong else contextlib.nullcontext():
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

"""Layers: the parameters, memory, work, exchanges and programs of layers of every kind of model, in random setups.

The estimates of the fence have whole steps; these cases reach ways of running a layer that those draw rarely, such as modules
that are computed again or offloaded beside FP8, Ulysses, and shared experts beside the exchange.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fence_cases import MODELS, Case, Facts
from layer_parts import layer_parts

from commlayer.profiles.errors import CommlayerError
from commlayer.scheduler import COMMLAYER, MEGATRON, PLANNED, Estimator, Job
from commlayer.scheduler.mapping import catalog, clusters, flops, memory, parameters
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.layers import LayerBuilder, dispatch_note
from commlayer.scheduler.mapping.model import LatentAttention, ModelShape
from commlayer.scheduler.mapping.offloading import OFFLOADABLE, canonical_offload
from commlayer.scheduler.mapping.precisions import recipe_of
from commlayer.scheduler.mapping.recomputation import MODULES, canonical
from commlayer.scheduler.mapping.software import (
    with_dispatcher,
    with_fp8_activations,
    with_fused_experts,
    with_overlap,
)
from commlayer.scheduler.mapping.step_collectives import StepCollective, layer_backward, layer_forward, step_exchanges
from commlayer.scheduler.programs import Compute, Issue, Item

__all__ = ["cases"]

_PER_MODEL = 14
_GPUS = 256
_TRIES = 400
_DENSE = ModelShape(
    name="dense",
    layers=12,
    hidden=2048,
    heads=16,
    kv_heads=4,
    head_dim=128,
    experts=1,
    top_k=1,
    width=1,
    dense_layers=12,
    dense_width=8192,
    vocabulary=32_000,
    gated=False,
    qkv_bias=True,
)
_LATENT = replace(
    _DENSE,
    name="latent",
    kv_heads=16,
    experts=32,
    top_k=4,
    width=1024,
    shared_width=2048,
    dense_layers=3,
    dense_at=(0, 4, 8),
    gated=True,
    qkv_bias=False,
    latent=LatentAttention(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    mtp_layers=1,
)
_SOFTWARE = {
    "commlayer": COMMLAYER,
    "commlayer, balanced": replace(COMMLAYER, balances=True),
    "megatron": MEGATRON,
    "megatron, all_to_all of ours": with_dispatcher(MEGATRON, "commlayer"),
    "megatron, fused": with_fused_experts(MEGATRON),
    "megatron, fp8 dispatch, shared beside": with_overlap(
        with_fp8_activations(MEGATRON), dispatch_precision="fp8", overlaps_shared=True
    ),
    "megatron, deepep": with_overlap(with_dispatcher(MEGATRON, "deepep"), overlaps_shared=True),
    "megatron, hybridep": with_dispatcher(MEGATRON, "hybridep"),
    "megatron, puts off weights": replace(MEGATRON, puts_off_weights=True, gathers_again=False),
    "planned": PLANNED,
}


def cases() -> list[Case]:
    """Every case, in a fixed order."""
    models = [*map(catalog.load, sorted(catalog.names()[:MODELS])), _DENSE, _LATENT]
    found = [Case(f"model {model.name}", partial(_of_model, model)) for model in models]
    for model in models:
        found += [Case(f"{model.name} {number}", partial(_of_layer, model, number)) for number in range(_PER_MODEL)]
    return found


def _of_model(model: ModelShape) -> Facts:
    """The numbers that follow from a model alone."""
    return {
        "parameters": asdict(parameters.count(model)),
        "a layer's": layer_parts(model),
        "flops": asdict(flops.forward(model, 4096)),
    }


def _of_layer(model: ModelShape, number: int) -> Facts:
    draw = random.Random(f"{model.name} {number}")
    software = draw.choice(sorted(_SOFTWARE))
    cluster = draw.choice(("h100-eos", "h100-eos", "b200-hgx", "gb200-nvl72"))
    capacity = draw.choice((None, None, None, 1.25))
    job = Job(
        model=model,
        gpus=_GPUS,
        global_batch=1024,
        sequence=draw.choice((4096, 8192)),
        capacity_factor=capacity,
        imbalance=1.0 if capacity else draw.choice((1.0, 1.3)),
    )
    words: Facts = {"software": software, "cluster": cluster, "job": f"{job.sequence} {capacity} {job.imbalance}"}
    estimator = Estimator(job, clusters.load(cluster), _SOFTWARE[software])
    setup = next(filter(None, (_drawn(draw, estimator) for _ in range(_TRIES))))
    return words | {"setup": str(setup)} | _facts(estimator, setup)


def _drawn(draw: random.Random, estimator: Estimator) -> Setup | None:
    """A random setup; None where it cannot run the estimator's job."""
    job = estimator.job
    try:
        setup = _setup(draw)
        setup.check(job)
        parameters.check(job.model, setup, estimator.software)
        recipe_of(setup.precision, estimator.cluster.gpu)
    except CommlayerError:
        return None
    return setup


def _setup(draw: random.Random) -> Setup:
    recompute = draw.choice(("none", "megascale", "full", "", ""))
    offload = draw.choice(("none", "none", ""))
    schedule = draw.choice(("1f1b", "1f1b", "1f1b-overlap", "dualpipev"))
    pp = draw.choice((1, 2, 4))
    return Setup(
        gpus=_GPUS,
        tp=draw.choice((1, 2, 4, 8)),
        cp=draw.choice((1, 1, 2)),
        pp=pp,
        vpp=2 if schedule == "1f1b-overlap" and pp > 1 else 1,
        ep=draw.choice((1, 4, 8, 16)),
        etp=draw.choice((1, 1, 1, 2)),
        micro_batch=draw.choice((1, 2)),
        recompute=recompute or canonical("+".join(draw.sample(MODULES, draw.choice((1, 2, 3))))),
        precision=draw.choice(("bf16", "bf16", "fp8", "fp8-deepgemm", "fp8-blockwise", "fp8-mxfp8")),
        exchange=draw.choice(("all_to_all", "all_to_all", "all_to_all", "all_gather")),
        attention=draw.choice(("tensor", "tensor", "ulysses")),
        zero=draw.choice((0, 1, 1, 2, 3)),
        schedule=schedule,  # type: ignore[arg-type]  # a word of PipelineSchedule
        offload=offload or canonical_offload("+".join(draw.sample(OFFLOADABLE, draw.choice((1, 2, 3))))),
    )


def _facts(estimator: Estimator, setup: Setup) -> Facts:
    job, software, model = estimator.job, estimator.software, estimator.job.model
    gpu = estimator.cluster.gpu
    builder = LayerBuilder(job, estimator.cluster, software, estimator.pricer, estimator.compute)
    found: Facts = {
        "memory": asdict(memory.estimate(job, setup, software=software, gpu=gpu)),
        "memory, bf16": asdict(memory.estimate(job, setup, software=software)),
        "room": memory.have_room(job, setup, estimator.memory_limit, software=software, gpu=gpu),
        "held": [[*map(list, each[1:3]), *each[3:5]] for each in parameters.held(model, setup, software)],
        "stage": parameters.stage_parameters(model, setup, software, setup.pp - 1),
        "replicated": parameters.replicated_elements(model, setup, software, 0),
        "mean": list(parameters.mean_elements(model, setup, software)),
        "of the step": _sent(step_exchanges(job, setup, software, stage=setup.pp - 1)),
        "waits, exchanges": [builder.calls.least_waits_us(setup), builder.calls.least_exchange_us(setup)],
        "note": dispatch_note(builder, setup),
    }
    for is_moe in (True, False):
        if model.moe_layers if is_moe else model.dense_layers:
            found["sparse" if is_moe else "dense"] = _of_kind(builder, setup, is_moe=is_moe)
    return found


def _of_kind(builder: LayerBuilder, setup: Setup, *, is_moe: bool) -> Facts:
    """A layer with experts, or with a dense FFN."""
    job, software = builder.job, builder.software
    work = builder.work(setup, is_moe)
    found: Facts = {
        "parameters": parameters.layer_parameters(job.model, setup, software, is_moe),
        "offloaded": memory.offloaded_layer_bytes(job, setup, builder.cluster.gpu, software=software, is_moe=is_moe),
        "work": [work.forward, work.backward, work.weights, work.attention_weights, work.beside_us],
        "step": work.step_us(setup.recompute),
        "sent": _sent(layer_forward(job, setup, software, moe=is_moe)),
        "sent back": _sent(layer_backward(job, setup, software, moe=is_moe)),
    }
    programs = {"forward": builder.forward(setup, is_moe), "backward": builder.backward(setup, is_moe)}
    if setup.is_merged:
        programs["merged"] = builder.merged(setup, is_moe)
    for name, program in programs.items():
        found[name] = [builder.timed(program).total_us, *map(_shown, program)]
    return found


def _sent(exchanges: Sequence[StepCollective]) -> list[Any]:
    return [[each.name, each.axis, each.collective, each.logical_bytes, each.count] for each in exchanges]


def _shown(item: Item) -> list[Any]:
    if isinstance(item, Compute):
        return [item.name, item.us]
    return ["issue" if isinstance(item, Issue) else "wait", item.call.name, item.call.us]

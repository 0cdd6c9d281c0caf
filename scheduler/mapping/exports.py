"""A mapping as the configuration of a trainer: Megatron-LM's flags, torchtitan's options, DeepSpeed's JSON.

A trainer that cannot run a mapping says so (UsageError) rather than run another one. What it does slightly differently, or wants
told in the program, is in the notes. Sources: Megatron-LM, see :mod:`commlayer.scheduler.mapping.exports_megatron`; torchtitan
0.3, torchtitan/config/configs.py, trainer.py and distributed/parallel_dims.py; DeepSpeed 0.19, docs/_pages/config-json.md,
module_inject/auto_ep_config.py, auto_ep_folding.py and tp_shard.py, runtime/sequence_parallel/ulysses_sp.py,
runtime/pipe/engine.py.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.exports_megatron import megatron, megatron_notes, refuse
from commlayer.scheduler.mapping.folded import offsets
from commlayer.scheduler.mapping.hardware import Gpu
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.offloading import KEPT
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT
from commlayer.scheduler.mapping.precisions import recipe_of
from commlayer.scheduler.mapping.recomputation import modules_of
from commlayer.scheduler.mapping.software import MEGATRON, Software

__all__ = ["TRAINERS", "Export", "deepspeed", "export", "megatron", "torchtitan"]

TRAINERS = ("megatron", "deepspeed", "torchtitan")

Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Export:
    """A mapping for somebody else's program.

    ``target``: a trainer or a simulator. ``values``: the arguments, or the configuration by section. ``text``: as the target
    reads it. ``notes``: what differs.
    """

    target: str
    values: list[str] | Section
    text: str
    notes: tuple[str, ...] = ()


def export(trainer: str, job: Job, setup: Setup, software: Software = MEGATRON, gpu: Gpu | None = None) -> Export:
    """``setup`` for ``trainer``. ``software``: what was planned with, of which dispatch, overlap and the optimizer's state count.
    ``gpu``: which says what recipe the word fp8 means; None: a Hopper's.

    Raises:
        UsageError: an unknown trainer, or a mapping that it cannot run: says what stands in the way and what to change.
        GroupError: a batch that the mapping does not divide.
    """
    if trainer not in TRAINERS:
        raise UsageError(f"export: expected {', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}, got {trainer!r}")
    recipe = None if gpu is None or setup.precision != "fp8" else recipe_of("fp8", gpu)
    if recipe is not None and recipe.remakes:
        setup = replace(setup, precision=recipe.name)  # type: ignore[arg-type]  # whose name is a precision
    if trainer == "megatron":
        flags = megatron(job, setup, software)
        return Export(trainer, flags, _lines(flags), megatron_notes(job, setup, software))
    make: Callable[[Job, Setup], Section] = deepspeed if trainer == "deepspeed" else torchtitan
    config = make(job, setup)
    notes = _deepspeed_notes(job, setup) if trainer == "deepspeed" else _torchtitan_notes(job, setup)
    if software.kernels is not None:
        notes += (
            f"tokens go by {trainer}'s own all_to_all in this configuration: {software.kernels.name} is to be added by hand",
        )
    if left := _left_out(setup, software):
        notes += (f"this configuration leaves out {', '.join(left)}, as planned with: add them, or plan without",)
    return Export(trainer, config, json.dumps(config, indent=2) if trainer == "deepspeed" else _options(config), notes)


def _left_out(setup: Setup, software: Software) -> list[str]:
    """List what was asked of the software and is no part of a mapping."""
    is_exchanged = setup.ep * setup.etp > 1
    options = {
        "gradients in BF16": software.gradient_bytes != MEGATRON.gradient_bytes,
        "an optimizer's state in less than FP32": software.adam_bytes != MEGATRON.adam_bytes,
        f"{software.offloaded_optimizer:.0%} of that state in the host's memory": software.offloaded_optimizer > 0,
        "weights in FP8 alone": software.keeps_fp8_weights and setup.precision != "bf16",
        "SwiGLU's input kept in FP8": software.keeps_fp8_activations,
        "rows sent to experts in FP8": software.dispatch_precision == "fp8" and is_exchanged,
        "shared experts beside the exchange": software.overlaps_shared and is_exchanged,
    }
    return [words for words, is_asked in options.items() if is_asked]


# torchtitan


def torchtitan(job: Job, setup: Setup) -> Section:
    """Sections training, parallelism and activation_checkpoint of its configuration; the model and the rest are yours.

    Raises as :func:`export`.
    """
    micro_batches = setup.micro_batches(job)
    refuse("torchtitan", f"{setup}", _torchtitan_limits(job, setup))
    shards = setup.zero >= 1
    config: Section = {
        "training": {
            # of a data-parallel rank: a pipeline splits it, otherwise a micro-batch is one forward
            "local_batch_size": setup.micro_batch * (micro_batches if setup.pp > 1 else 1),
            "global_batch_size": job.global_batch,
            "seq_len": job.sequence,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1 if shards else setup.dp,
            "data_parallel_shard_degree": setup.dp if shards else 1,
            "fsdp_reshard_after_forward": "always" if setup.zero == 3 else "never",
            "tensor_parallel_degree": setup.tp,
            "context_parallel_degree": setup.cp,
            "pipeline_parallel_degree": setup.pp,
            "expert_parallel_degree": setup.ep,
        },
        "activation_checkpoint": {"mode": _TORCHTITAN_MODES.get(setup.recompute, setup.recompute)},
    }
    if setup.pp > 1 or setup.ep > 1:
        config["training"]["disable_cuda_graphs"] = (
            True  # its graphs know no pipeline, and no exchange that asks the host
        )
    if setup.pp > 1:
        one_way = "Interleaved1F1B" if setup.vpp > 1 else "1F1B"
        config["parallelism"] |= {
            "pipeline_parallel_schedule": "DualPipeV" if setup.schedule == "dualpipev" else one_way,
            "pipeline_parallel_microbatch_size": setup.micro_batch,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
        if setup.vpp not in _DEFAULT_CHUNKS:
            config["parallelism"]["pipeline_parallel_layers_per_stage"] = _layers_per_stage(job, setup)
    return config


_TORCHTITAN_MODES = {"megascale": "selective"}
"""The nearest of its modes of recomputation, where it has another name there."""
_DEFAULT_CHUNKS = (1, 2)
"""The chunks of a pipeline rank, by torchtitan's two schedules, where no layers per stage are given."""


def _layers_per_stage(job: Job, setup: Setup) -> int:
    return math.ceil(job.model.layers / (setup.pp * setup.vpp))


def _torchtitan_limits(job: Job, setup: Setup) -> dict[str, bool]:
    model, divisor = job.model, setup.tp * setup.cp * 2
    stages = math.ceil(model.layers / _layers_per_stage(job, setup))
    kv_heads = model.expanded_kv_heads
    return {
        f"tensor parallelism needs heads={model.heads} and kv_heads={kv_heads} to be multiples of tp={setup.tp}": (
            model.heads % setup.tp > 0 or kv_heads % setup.tp > 0
        ),
        f"experts={model.experts} is no multiple of ep={setup.ep}": model.experts % setup.ep > 0,
        f"sequence={job.sequence} is no multiple of tp · 2 · cp = {divisor}": job.sequence % divisor > 0,
        "it has no Ulysses attention: choose attention tensor": setup.attention == "ulysses" and setup.tp > 1,
        "it exchanges tokens by all_to_all: choose that exchange": setup.exchange == "all_gather" and setup.ep > 1,
        f"it has no expert tensor parallelism beside ep={setup.ep}: set etp=1": setup.ep > 1 and setup.etp > 1,
        f"without ep the experts have tp={setup.tp} as all else": setup.ep == 1 and setup.etp != setup.tp,
        "its ep ranks are neighbours, an unfolded ep lies beyond cp: fold": (
            not setup.folded
            and setup.ep > 1
            and offsets(setup.layout("ep")) != offsets(replace(setup, folded=True).layout("ep"))
        ),
        "ep cannot go beyond cp · tp where data parallelism shards nothing: choose zero 1 or more": (
            setup.zero == 0 and setup.dp > 1 and setup.ep * setup.etp > setup.cp * setup.tp
        ),
        f"it recomputes no modules by name, got {setup.recompute}: choose none, full, or megascale, which is "
        "exported as its selective": bool(modules_of(setup.recompute)),
        f"it offloads no modules by name, got {setup.offload}: choose offload none": setup.offload != KEPT,
        f"it has no multi-token prediction, got mtp_layers={model.mtp_layers}": model.mtp_layers > 0,
        "chunks of layers need a pipeline": setup.vpp > 1 and setup.pp == 1,
        f"it splits layers evenly, got the layout {setup.pipeline_layout}: choose the pipeline layout even": (
            setup.pipeline_layout != EVEN_LAYOUT
        ),
        f"it has no {setup.schedule}: choose the schedule 1f1b or dualpipev": (
            setup.schedule in ("1f1b-overlap", "dualpipe")
        ),
        f"{model.layers} layers do not make pp · vpp = {setup.pp * setup.vpp} equal stages: choose vpp 1 or 2": (
            setup.pp > 1 and setup.vpp not in _DEFAULT_CHUNKS and stages != setup.pp * setup.vpp
        ),
    }


def _torchtitan_notes(job: Job, setup: Setup) -> tuple[str, ...]:
    notes = [
        "options of torchtitan 0.3, behind --module and --config; activation_checkpoint: is a choice, and stays the last one"
    ]
    if setup.zero == 1 and setup.dp > 1:
        notes.append(
            "ZeRO 1 has no counterpart: FSDP shards gradients too (ZeRO 2), which takes less memory and sums each micro-batch"
        )
    if setup.zero == 0 and setup.cp > 1:
        notes.append("weights are sharded over cp in any case")
    if job.capacity_factor is not None:
        notes.append("it never drops tokens: the capacity factor has no counterpart")
    if setup.recompute == "megascale":
        notes.append(
            "megascale recomputation (MegaScale-MoE, A.2) is none of its modes: the nearest is selective, which keeps matrix "
            "products and what was exchanged"
        )
    if setup.precision != "bf16":
        notes.append("FP8 is the program's: Float8LinearConverter, Float8GroupedExpertsConverter and torchao")
    return tuple(notes)


# DeepSpeed


def deepspeed(job: Job, setup: Setup) -> Section:
    """The JSON configuration. Raises as :func:`export`."""
    micro_batches = setup.micro_batches(job)
    refuse("DeepSpeed", f"{setup}", _deepspeed_limits(job, setup))
    config: Section = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": setup.zero, "overlap_comm": setup.zero >= 2},
    }
    if setup.attention == "ulysses" and setup.tp > 1:
        config["sequence_parallel_size"] = setup.tp
    elif setup.tp > 1:
        config["tensor_parallel"] = {"autotp_size": setup.tp}
    if setup.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": setup.ep, "expert_tensor_parallel_size": setup.etp}
    return config


def _deepspeed_limits(job: Job, setup: Setup) -> dict[str, bool]:
    model = job.model
    is_tensor = setup.tp > 1 and setup.attention == "tensor"
    ulysses = setup.tp if setup.attention == "ulysses" else 1
    kv_heads = model.expanded_kv_heads
    return {
        f"experts={model.experts} is no multiple of autoep_size={setup.ep}": model.experts % setup.ep > 0,
        f"AutoTP leaves ranks without keys: tp={setup.tp} is more than kv_heads={kv_heads}": (
            is_tensor and setup.tp > kv_heads
        ),
        f"Ulysses needs heads={model.heads} to be a multiple of its {ulysses} ranks, and kv_heads={kv_heads} or they one of the "
        "other": model.heads % ulysses > 0 or (kv_heads % ulysses > 0 and ulysses % kv_heads > 0),
        f"sequence={job.sequence} is no multiple of the {ulysses} ranks of Ulysses": job.sequence % ulysses > 0,
        "it has no context parallelism beside Ulysses: set cp=1, or attention ulysses with tp": setup.cp > 1,
        "its pipeline is 1F1B without chunks: set vpp=1": setup.vpp > 1,
        f"its configuration has no layout of layers, got {setup.pipeline_layout}: choose the pipeline layout even": (
            setup.pipeline_layout != EVEN_LAYOUT
        ),
        f"it has no {setup.schedule}: choose the schedule 1f1b": setup.schedule != "1f1b",
        "its pipeline engine takes ZeRO 0 or 1": setup.pp > 1 and setup.zero >= 2,
        "its expert parallelism (AutoEP) has no expert tensor parallelism: set etp=1": setup.etp > 1,
        "AutoEP with tensor parallelism takes pp=1": is_tensor and setup.ep > 1 and setup.pp > 1,
        "AutoEP with tensor parallelism takes ZeRO 0 to 2": is_tensor and setup.ep > 1 and setup.zero == 3,
        "tensor parallelism of a MoE model needs autoep_size > 1": is_tensor and setup.ep == 1,
        "it exchanges tokens by all_to_all: choose that exchange": setup.exchange == "all_gather" and setup.ep > 1,
        f"it offloads no modules by name, got {setup.offload}: choose offload none (activation_checkpointing.cpu_checkpointing "
        "keeps the inputs of layers that it computes again in the host's memory)": setup.offload != KEPT,
        f"it has no multi-token prediction, got mtp_layers={model.mtp_layers}": model.mtp_layers > 0,
        "its configuration has no FP8 training: choose bf16": setup.precision != "bf16",
        "AutoEP never drops tokens: leave the capacity factor out": job.capacity_factor is not None and setup.ep > 1,
    }


def _deepspeed_notes(job: Job, setup: Setup) -> tuple[str, ...]:
    notes = []
    if setup.pp > 1:
        notes.append(
            f"the pipeline is the program's: PipelineModule(..., num_stages={setup.pp}); AutoEP inside it is not proven"
        )
    if setup.recompute == "full":
        notes.append("recomputation is the program's: deepspeed.checkpointing.checkpoint around each layer")
    elif modules_of(setup.recompute):
        notes.append(f"recomputation is the program's: deepspeed.checkpointing.checkpoint around {setup.recompute}")
    elif setup.recompute == "megascale":
        notes.append(
            "megascale recomputation is the program's: checkpoint norms, SwiGLU and dispatch (MegaScale-MoE, A.2)"
        )
    if "sequence_parallel_size" in deepspeed(job, setup):
        notes.append(
            "Ulysses needs the attention wrapped in the program: DistributedAttention, or UlyssesSPAttentionHF"
        )
    if is_autotp := setup.attention == "tensor" and setup.tp > 1:
        notes.append("AutoTP keeps whole activations on each rank: no sequence parallelism, more activation memory")
    if setup.ep > 1 and is_autotp:
        notes.append(
            "AutoEP with AutoTP is new: the documents of 0.19 still say that they do not go together, its code takes them"
        )
    return tuple(notes)


# Shared


def _lines(flags: list[str]) -> str:
    """One flag with its values a line, quoted for a shell."""
    lines: list[str] = []
    for token in flags:
        if token.startswith("--"):
            lines.append(token)
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return "\n".join(lines)


def _options(config: Section) -> str:
    """Options of a command line, one a line, and torchtitan's choice of what is computed again, which comes behind them."""
    options = [
        f"--{name}.{key}" if value is True else f"--{name}.{key} {shlex.quote(str(value))}"
        for name, values in config.items()
        if name != "activation_checkpoint"
        for key, value in values.items()
    ]
    return "\n".join([*options, f"activation_checkpoint:{config['activation_checkpoint']['mode']}"])

"""A mapping as flags of Megatron-LM.

Flags: megatron/training/arguments.py of Megatron-LM, whose parser took these at core_v0.13.1, core_v0.16.1 and a later state of
its main branch (ZeRO 2 and 3 from core_v0.16, as ``--use-megatron-fsdp``). Groups: megatron/core/parallel_state.py, which lays
attention's ranks as tp-cp-dp-pp and the experts' as tp-ep-dp-pp, innermost first: our folded mapping. What does not divide is
refused as Megatron-LM does: ``validate_args`` there, megatron/core/transformer/transformer_config.py,
megatron/core/pipeline_parallel/schedules.py (interleaved 1F1B), and of Ulysses Transformer Engine's attention.
"""

from __future__ import annotations

from collections.abc import Mapping

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape, layer_kinds, mechanisms
from commlayer.scheduler.mapping.offloading import KEPT
from commlayer.scheduler.mapping.parameters import chunks_laid
from commlayer.scheduler.mapping.pipeline_layout import EVEN_LAYOUT, written
from commlayer.scheduler.mapping.pipeline_schedule import is_dual
from commlayer.scheduler.mapping.precisions import RECIPES
from commlayer.scheduler.mapping.recomputation import MODULES, modules_of
from commlayer.scheduler.mapping.software import MEGATRON, STATE_BYTES, Software

__all__ = ["megatron", "megatron_notes", "refuse"]

_Flags = dict[str, object]
"""Flags without their dashes and what they say: True is a flag alone, False and None none; a tuple has several words."""
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""The strategy of Megatron-FSDP, by ZeRO's stage."""


def megatron(job: Job, setup: Setup, software: Software = MEGATRON) -> list[str]:
    """The arguments of the job's model, batch and mapping, as pretrain_gpt.py takes them; data, optimizer and schedule are yours.
    ``software``: what was planned with, of which the dispatcher and what runs beside it count.

    Raises:
        UsageError: what Megatron-Core has no flags for (groups that are not of the folded kind, chunks without a pipeline), or
            refuses (heads, experts, widths, a sequence or micro-batches that the degrees do not divide): names every reason.
        GroupError: a batch that the mapping does not divide.
    """
    setup.micro_batches(job)
    if not setup.folded and setup.cp > 1 and setup.ep > 1:
        raise UsageError(
            f"Megatron-Core cannot lay {setup} out: its ep={setup.ep} ranks are neighbours (folded over cp={setup.cp}), those "
            "of an unfolded ep lie beyond cp: export the folded mapping, or one with cp=1"
        )
    if setup.vpp > 1 and setup.pp == 1:
        raise UsageError(
            f"Megatron-Core has no chunks of layers without a pipeline: got vpp={setup.vpp} with pp=1; set vpp=1"
        )
    refuse("Megatron-LM", f"{setup} of {job.model.name}", _limits(job, setup))
    flags = (
        _model(job.model) | _degrees(job, setup) | _moe(job, setup, software) | _memory(setup) | _state(setup, software)
    )
    words: list[str] = []
    for name, value in flags.items():
        if value is not False and value is not None:
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            words += [f"--{name}", *map(str, values)]
    return words


def megatron_notes(job: Job, setup: Setup, software: Software = MEGATRON) -> tuple[str, ...]:
    """Where the flags are the nearest thing and not the same."""
    model, kernels = job.model, software.kernels
    tp, kv_heads = _own_degrees(setup)[0], model.expanded_kv_heads
    unknown = {"--rotary-base (10000)": model.rotary_base, "--norm-epsilon (1e-05)": model.norm_epsilon}
    defaults = [flag for flag, value in unknown.items() if not value]
    notes = {
        "megascale recomputation drops also the gathered inputs and what dispatch brought (MegaScale-MoE, A.2); the "
        "nearest of Megatron recomputes norms and the experts' activation: its activations are larger": (
            setup.recompute == "megascale"
        ),
        "Ulysses is a kind of context parallelism there (--cp-comm-type a2a): --context-parallel-size is tp × cp, and the "
        "vocabulary is not split": setup.attention == "ulysses",
        f"needs core_v0.16 or later, which keeps copies of the {kv_heads} query groups on tp={tp} ranks; earlier ones refuse "
        "more tp than query groups": tp > kv_heads,
        f"Megatron-LM's defaults stand in for {' and '.join(defaults)}: add them as your model's config.json has them": (
            bool(defaults)
        ),
        "install UCCL-EP in place of DeepEP: it answers to the backend deepep": (
            kernels is not None and kernels.name == "uccl"
        ),
        "its all_to_all, DeepEP and Hybrid-EP send BF16 to the experts there: FP8 rows, as planned, are no option": (
            software.dispatch_precision == "fp8"
        ),
        "merged passes need Transformer Engine 2.8 or later, and more than 1 in CUDA_DEVICE_MAX_CONNECTIONS (32), although "
        "tp and cp ask for 1 on Hopper": setup.schedule == "1f1b-overlap",
        "offloading needs Transformer Engine's layers, and NVTE_CPU_OFFLOAD_V1=1 from its version 2.10 on; tensors of less "
        "than 1,048,576 elements stay; add --fine-grained-offloading-max-inflight-offloads 1 where your version has it "
        "(2026), without which copies that take longer than a layer hold more memory than planned": setup.offload
        != KEPT,
        f"ZeRO {setup.zero} is Megatron-FSDP there: unset CUDA_DEVICE_MAX_CONNECTIONS, or set more than 1": setup.zero
        >= 2,
        "DeepSeek's own kernels are no option there: the blockwise recipe has their format, and slower products (plan with "
        "fp8-blockwise to see by how much)": setup.precision == "fp8-deepgemm",
        "the recipe is blockwise there, and not fp8's usual one, delayed, which cannot cast again what is computed again: "
        "plan with fp8-blockwise or fp8-current to see what it takes": _stands_in_for_delayed(setup),
        "the router's scores and bias do not change the mapping: add their flags": (
            model.family.startswith("deepseek-v3") or model.name.startswith("deepseek-v3")
        ),
    }
    return tuple(note for note, holds in notes.items() if holds)


def refuse(trainer: str, what: str, limits: Mapping[str, bool]) -> None:
    """Raise UsageError with each reason of ``limits`` that stands, if one does. ``what``: the mapping that is refused."""
    if reasons := [reason for reason, stands in limits.items() if stands]:
        raise UsageError(f"{trainer} cannot run {what}: {'; '.join(reasons)}")


def _limits(job: Job, setup: Setup) -> Mapping[str, bool]:
    model, kv_heads = job.model, job.model.expanded_kv_heads
    tp, cp, sequence = _own_degrees(setup)
    micro_batches = setup.micro_batches(job)
    halves = 2 * cp if cp > 1 else 1  # of the causal mask: each rank has one from the front and one from the back
    widths = {"dense_width": (model.dense_width, tp), "shared_width": (model.shared_width, tp)}
    limits = {
        f"heads={model.heads} is no multiple of tp={tp}": model.heads % tp > 0,
        f"kv_heads={kv_heads} is neither a multiple nor a divisor of tp={tp}": kv_heads % tp > 0 and tp % kv_heads > 0,
        f"Ulysses needs heads={model.heads} and kv_heads={kv_heads} to be multiples of its {sequence} ranks": (
            model.heads % sequence > 0 or kv_heads % sequence > 0
        ),
        f"experts={model.experts} is no multiple of ep={setup.ep}": model.experts % setup.ep > 0,
        f"width={model.width} of an expert is no multiple of etp={setup.etp}": model.width % setup.etp > 0,
        f"sequence={job.sequence} is no multiple of 2 x cp={cp}": job.sequence % halves > 0,
        f"the {job.sequence // cp} tokens of a cp rank are no multiple of tp={tp}": job.sequence // cp % tp > 0,
        f"it has no {setup.schedule}: choose the schedule 1f1b or 1f1b-overlap": is_dual(setup.schedule),
        f"chunks need micro-batches in whole rounds: {micro_batches} is no multiple of pp={setup.pp}": (
            setup.vpp > 1 and micro_batches % setup.pp > 0
        ),
    }
    without_flag = {
        "a norm of queries and keys across all heads, or another vector of attention": (
            model.vectors > 0 and not _has_head_norms(model)
        ),
        "a vector of layers with experts": model.moe_vectors > 0 and not _gates_shared(model),
        "a bias of the last norm or of the head": model.end_vectors > 0,
    }
    unwritten = {
        "a model without experts": not model.moe_layers,
        "windows of attention": model.window is not None,
        "a gate of attention's output": model.gated_attention,
        **dict.fromkeys(mechanisms(model), True),
        "biases of experts": model.expert_vectors > 0,
    }
    limits |= {f"{what} of {model.name} has no flag there": has for what, has in without_flag.items()}
    limits |= {
        f"{what} of {model.name} has flags that this export does not write": has for what, has in unwritten.items()
    }
    return limits | {
        f"{name}={width} is no multiple of tp={by}": width % by > 0 for name, (width, by) in widths.items()
    }


def _has_head_norms(model: ModelShape) -> bool:
    """Whether queries and keys are normalized, each head by itself; or, with latent attention, what
    they are projected from."""
    return model.latent is not None or model.vectors == 2 * model.head_dim


def _gates_shared(model: ModelShape) -> bool:
    """Whether a gate weighs what the shared expert gives."""
    return model.shared_width > 0 and model.moe_vectors == model.hidden


def _own_degrees(setup: Setup) -> tuple[int, int, int]:
    """Megatron's tensor and context parallel sizes, and how many ranks of the latter are Ulysses'."""
    sequence = setup.tp if setup.attention == "ulysses" else 1
    return setup.tp // sequence, setup.cp * sequence, sequence


def _model(model: ModelShape) -> _Flags:
    latent, has_groups = model.latent, model.kv_heads != model.heads
    kinds = ",".join(str(int(is_moe)) for is_moe in layer_kinds(model))
    leading = f"([0]*{model.dense_layers}+[1]*{model.moe_layers})"
    attention: _Flags = {
        "kv-channels": model.head_dim,
        "group-query-attention": has_groups,
        "num-query-groups": has_groups and model.kv_heads,
    }
    if latent is not None:
        attention = {
            "multi-latent-attention": True,
            "q-lora-rank": latent.q_rank or None,
            "kv-lora-rank": latent.kv_rank,
            "qk-head-dim": latent.nope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
        }
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        **attention,
        "add-qkv-bias": model.qkv_bias,
        "qk-layernorm": _has_head_norms(model),
        "ffn-hidden-size": model.dense_width or model.width,
        "num-experts": model.experts,
        "moe-ffn-hidden-size": model.width,
        "moe-router-topk": model.top_k,
        "moe-router-pre-softmax": model.top_k == 1,  # without it Megatron-Core refuses one expert a token
        "moe-router-num-groups": model.router_groups > 1 and model.router_groups,
        "moe-router-group-topk": model.router_groups > 1 and model.router_group_limit,
        "moe-layer-freq": model.dense_layers > 0 and (f"([{kinds}])" if model.dense_at else leading),
        "moe-shared-expert-intermediate-size": model.shared_width or None,
        "moe-shared-expert-gate": _gates_shared(model),
        "swiglu": model.gated,
        "untie-embeddings-and-output-weights": not model.ties_embeddings,
        "rotary-base": round(model.rotary_base) or None,
        "norm-epsilon": model.norm_epsilon or None,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "vocab-size": model.vocabulary,
    }


def _degrees(job: Job, setup: Setup) -> _Flags:
    """The degrees, the pipeline and the batch."""
    model, (tp, cp, sequence) = job.model, _own_degrees(setup)
    stages = setup.pp * setup.vpp
    is_even = not model.layers % stages and setup.pipeline_layout == EVEN_LAYOUT
    has_both = sequence > 1 and setup.cp > 1
    return {
        "tensor-model-parallel-size": tp,
        "sequence-parallel": tp > 1,  # Megatron-Core demands it of MoE layers under tensor parallelism
        "context-parallel-size": cp,
        "cp-comm-type": sequence > 1 and ("a2a+p2p" if has_both else "a2a"),
        "hierarchical-context-parallel-sizes": has_both and (sequence, setup.cp),
        "expert-model-parallel-size": setup.ep,
        "expert-tensor-parallel-size": setup.etp,
        "pipeline-model-parallel-size": setup.pp,
        "mtp-num-layers": model.mtp_layers or None,
        "pipeline-model-parallel-layout": (
            None if setup.pp == 1 or is_even else written(chunks_laid(model, setup.pipeline))
        ),
        "num-layers-per-virtual-pipeline-stage": setup.vpp > 1 and is_even and model.layers // stages,
        "micro-batch-size": setup.micro_batch,
        "global-batch-size": job.global_batch,
        "seq-length": job.sequence,
        "max-position-embeddings": job.sequence,
    }


def _moe(job: Job, setup: Setup, software: Software) -> _Flags:
    kernels, is_by_calls = software.kernels, setup.exchange == "all_to_all"
    flex = None  # kernels, where they dispatch (mapping/token_routes.py)
    if kernels is not None and is_by_calls and setup.etp == 1 and job.capacity_factor is None:
        flex = kernels.megatron
    is_exchanged = is_by_calls and setup.ep * setup.etp > 1
    is_dropped, is_merged = job.capacity_factor is not None, setup.schedule == "1f1b-overlap"
    return {
        "moe-token-dispatcher-type": "alltoall" if is_by_calls and flex is None else "flex" if flex else "allgather",
        "moe-flex-dispatcher-backend": flex,
        "moe-shared-expert-overlap": (
            software.overlaps_shared and job.model.shared_width > 0 and is_exchanged and not setup.is_merged
        ),
        "moe-grouped-gemm": True,
        "moe-expert-capacity-factor": is_dropped and f"{job.capacity_factor:g}",
        "moe-pad-expert-input-to-capacity": is_dropped,
        # The exchange of one micro-batch's tokens beside another's computation, and products for weights when gradients are on
        # their way.
        "overlap-moe-expert-parallel-comm": is_merged,
        "delay-wgrad-compute": is_merged,
    }


def _memory(setup: Setup) -> _Flags:
    """The flags of what is kept: formats, activations, and the part of the state that each rank has."""
    recipe = RECIPES.get(setup.precision)
    name = recipe.megatron if recipe else ""
    if setup.precision == "fp8-deepgemm" or _stands_in_for_delayed(setup):
        name = "blockwise"  # the same format, or what can be cast again
    is_fp8, is_full = setup.precision != "bf16", setup.recompute == "full"
    modules: tuple[str, ...] = ("layernorm", "moe_act")
    if setup.recompute != "megascale":
        modules = tuple(module for module in MODULES if module in modules_of(setup.recompute))
    return {
        "bf16": True,
        "fp8-format": is_fp8 and ("e4m3" if name in ("blockwise", "mxfp8") else "hybrid"),
        "fp8-recipe": is_fp8 and (name or None),
        "recompute-granularity": "full" if is_full else "selective" if modules else None,
        "recompute-modules": modules or None,
        "recompute-method": is_full and "uniform",
        "recompute-num-layers": "1" if is_full else None,
        "fine-grained-activation-offloading": setup.offload != KEPT,
        "offload-modules": setup.offload != KEPT and tuple(setup.offload.split("+")),
        "use-distributed-optimizer": setup.zero >= 1,
        "overlap-param-gather": setup.zero >= 1,
        "overlap-grad-reduce": True,
        "use-megatron-fsdp": setup.zero >= 2,
        "data-parallel-sharding-strategy": _SHARDING.get(setup.zero),
        "ckpt-format": setup.zero >= 2 and "fsdp_dtensor",
    }


def _stands_in_for_delayed(setup: Setup) -> bool:
    """Whether another recipe is taken than delayed scaling, its default, which cannot recompute norms and activations."""
    if setup.precision not in ("fp8", "fp8-delayed"):
        return False
    return setup.recompute == "megascale" or bool(modules_of(setup.recompute) & {"moe_act", "layernorm"})


def _state(setup: Setup, software: Software) -> _Flags:
    """The formats of gradients, weights and optimizer state, what of it is in the host's memory, and what kernels and graphs
    there are (Megatron-Core's page on CUDA graphs, user-guide/features/cuda_graph)."""
    words = {size: word for word, size in STATE_BYTES.items() if word != "fp16"}  # of two bytes: bf16
    formats = {
        "main-grads-dtype": words[software.gradient_bytes],
        "main-params-dtype": "fp16" if software.main_weight_bytes == STATE_BYTES["fp16"] else "fp32",
        "exp-avg-dtype": words[software.moment_bytes[0]],
        "exp-avg-sq-dtype": words[software.moment_bytes[1]],
    }
    changed: _Flags = {name: word for name, word in formats.items() if word != "fp32"}
    modules = {"attention": ("attn",), "router": ("moe_router", "moe_preprocess")}
    held = tuple(word for part in sorted(software.graphs - {"step"}) for word in modules[part])
    return {
        "use-precision-aware-optimizer": bool(changed) or software.offloaded_optimizer > 0,  # offloading needs it too
        **changed,
        "grad-reduce-in-bf16": "main-grads-dtype" in changed,
        "fp8-param-gather": software.keeps_fp8_weights and setup.precision != "bf16",
        "activation-func-fp8-input-store": software.keeps_fp8_activations,
        "use-transformer-engine-op-fuser": software.fuses_experts,
        "cuda-graph-impl": "full_iteration" if "step" in software.graphs else "transformer_engine" if held else None,
        "cuda-graph-modules": held or None,
        "optimizer-cpu-offload": software.offloaded_optimizer > 0,
        "optimizer-offload-fraction": software.offloaded_optimizer > 0 and f"{software.offloaded_optimizer:g}",
    }

"""A mapping as flags of Megatron-LM.

Flags: megatron/training/arguments.py of Megatron-LM, whose parser took these at core_v0.13.1, core_v0.16.1 and a later state of
its main branch (ZeRO 2 and 3 from core_v0.16, as ``--use-megatron-fsdp``). Groups: megatron/core/parallel_state.py, which lays
attention's ranks as tp-cp-dp-pp and the experts' as tp-ep-dp-pp, innermost first: our folded mapping. What does not divide is
refused as Megatron-LM does: ``validate_args`` there, megatron/core/transformer/transformer_config.py,
megatron/core/pipeline_parallel/schedules.py (interleaved 1F1B), and of Ulysses Transformer Engine's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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

_MERGED = ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute")
"""The exchange of one micro-batch's tokens beside another's computation, and products for weights when gradients are on their
way."""
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
    _check(job, setup)
    return [
        *_model(job.model),
        *_degrees(setup),
        *_pipeline(job.model, setup),
        *_batch(job, setup),
        *_moe(job, setup, software),
        *(_MERGED if setup.schedule == "1f1b-overlap" else ()),
        *_memory(job, setup),
        *_state(setup, software),
    ]


def megatron_notes(job: Job, setup: Setup, software: Software = MEGATRON) -> tuple[str, ...]:
    """Where the flags are the nearest thing and not the same."""
    notes = []
    if setup.recompute == "megascale":
        notes.append(
            "megascale recomputation drops also the gathered inputs and what dispatch brought (MegaScale-MoE, A.2); the "
            "nearest of Megatron recomputes norms and the experts' activation: its activations are larger"
        )
    if setup.attention == "ulysses":
        notes.append(
            "Ulysses is a kind of context parallelism there (--cp-comm-type a2a): --context-parallel-size is tp × cp, and the "
            "vocabulary is not split"
        )
    tp, kv_heads = _own_degrees(setup)[0], job.model.expanded_kv_heads
    if tp > kv_heads:
        notes.append(
            f"needs core_v0.16 or later, which keeps copies of the {kv_heads} query groups on tp={tp} ranks; earlier ones refuse "
            "more tp than query groups"
        )
    unknown = {"--rotary-base (10000)": job.model.rotary_base, "--norm-epsilon (1e-05)": job.model.norm_epsilon}
    if flags := [flag for flag, value in unknown.items() if not value]:
        notes.append(
            f"Megatron-LM's defaults stand in for {' and '.join(flags)}: add them as your model's config.json has them"
        )
    kernels = software.kernels
    if kernels is not None and kernels.name == "uccl":
        notes.append("install UCCL-EP in place of DeepEP: it answers to the backend deepep")
    notes += _notes_on_ways(setup, software)
    if setup.precision == "fp8-deepgemm":
        notes.append(
            "DeepSeek's own kernels are no option there: the blockwise recipe has their format, and slower products (plan with "
            "fp8-blockwise to see by how much)"
        )
    elif _stands_in_for_delayed(setup):
        notes.append(
            "the recipe is blockwise there, and not fp8's usual one, delayed, which cannot cast again what is computed again: "
            "plan with fp8-blockwise or fp8-current to see what it takes"
        )
    if job.model.family.startswith("deepseek-v3") or job.model.name.startswith("deepseek-v3"):
        notes.append("the router's scores and bias do not change the mapping: add their flags")
    return tuple(notes)


def _notes_on_ways(setup: Setup, software: Software) -> Iterator[str]:
    """The notes on what goes beside computation, or into the host's memory."""
    if software.dispatch_precision == "fp8":
        yield "its all_to_all, DeepEP and Hybrid-EP send BF16 to the experts there: FP8 rows, as planned, are no option"
    if setup.schedule == "1f1b-overlap":
        yield (
            "merged passes need Transformer Engine 2.8 or later, and more than 1 in CUDA_DEVICE_MAX_CONNECTIONS (32), although "
            "tp and cp ask for 1 on Hopper"
        )
    if setup.offload != KEPT:
        yield (
            "offloading needs Transformer Engine's layers, and NVTE_CPU_OFFLOAD_V1=1 from its version 2.10 on; tensors of less "
            "than 1,048,576 elements stay; add --fine-grained-offloading-max-inflight-offloads 1 where your version has it "
            "(2026), without which copies that take longer than a layer hold more memory than planned"
        )
    if setup.zero >= 2:
        yield f"ZeRO {setup.zero} is Megatron-FSDP there: unset CUDA_DEVICE_MAX_CONNECTIONS, or set more than 1"


def _check(job: Job, setup: Setup) -> None:
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
    unknown = {
        "a model without experts": not model.moe_layers,
        "windows of attention": model.window is not None,
        "a gate of attention's output": model.gated_attention,
        **dict.fromkeys(mechanisms(model), True),
        "biases of experts": model.expert_vectors > 0,
    }
    limits |= {f"{what} of {model.name} has no flag there": has for what, has in _without_flag(model).items()}
    limits |= {
        f"{what} of {model.name} has flags that this export does not write": has for what, has in unknown.items()
    }
    return limits | {
        f"{name}={width} is no multiple of tp={by}": width % by > 0 for name, (width, by) in widths.items()
    }


def _without_flag(model: ModelShape) -> dict[str, bool]:
    """Name the parameters that no flag of Megatron-LM gives a model, and say of each whether this model has it."""
    return {
        "a norm of queries and keys across all heads, or another vector of attention": (
            model.vectors > 0 and not _has_head_norms(model)
        ),
        "a vector of layers with experts": model.moe_vectors > 0 and not _gates_shared(model),
        "a bias of the last norm or of the head": model.end_vectors > 0,
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


def _model(model: ModelShape) -> Iterator[str]:
    yield from _flag("num-layers", model.layers)
    yield from _flag("hidden-size", model.hidden)
    yield from _attention(model)
    yield from _experts(model)
    if model.gated:
        yield "--swiglu"
    if not model.ties_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if model.rotary_base:
        yield from _flag("rotary-base", round(model.rotary_base))
    if model.norm_epsilon:
        yield from _flag("norm-epsilon", model.norm_epsilon)
    yield "--disable-bias-linear"
    yield from _flag("normalization", "RMSNorm")
    yield from _flag("position-embedding-type", "rope")
    yield from _flag("vocab-size", model.vocabulary)


def _attention(model: ModelShape) -> Iterator[str]:
    yield from _flag("num-attention-heads", model.heads)
    if model.latent is not None:
        yield "--multi-latent-attention"
        if model.latent.q_rank:
            yield from _flag("q-lora-rank", model.latent.q_rank)
        yield from _flag("kv-lora-rank", model.latent.kv_rank)
        yield from _flag("qk-head-dim", model.latent.nope_dim)
        yield from _flag("qk-pos-emb-head-dim", model.latent.rope_dim)
        yield from _flag("v-head-dim", model.latent.value_dim)
    else:
        yield from _flag("kv-channels", model.head_dim)
        if model.kv_heads != model.heads:
            yield "--group-query-attention"
            yield from _flag("num-query-groups", model.kv_heads)
    if model.qkv_bias:
        yield "--add-qkv-bias"
    if _has_head_norms(model):
        yield "--qk-layernorm"


def _experts(model: ModelShape) -> Iterator[str]:
    """The FFNs of layers with experts, and of those without."""
    yield from _flag("ffn-hidden-size", model.dense_width or model.width)
    yield from _flag("num-experts", model.experts)
    yield from _flag("moe-ffn-hidden-size", model.width)
    yield from _flag("moe-router-topk", model.top_k)
    if model.top_k == 1:
        yield "--moe-router-pre-softmax"  # without it Megatron-Core refuses one expert a token
    if model.router_groups > 1:
        yield from _flag("moe-router-num-groups", model.router_groups)
        yield from _flag("moe-router-group-topk", model.router_group_limit)
    if model.dense_layers:
        leading = f"([0]*{model.dense_layers}+[1]*{model.moe_layers})"
        kinds = ",".join(str(int(is_moe)) for is_moe in layer_kinds(model))
        yield from _flag("moe-layer-freq", f"([{kinds}])" if model.dense_at else leading)
    if model.shared_width:
        yield from _flag("moe-shared-expert-intermediate-size", model.shared_width)
        if _gates_shared(model):
            yield "--moe-shared-expert-gate"


def _degrees(setup: Setup) -> Iterator[str]:
    tp, cp, sequence = _own_degrees(setup)
    yield from _flag("tensor-model-parallel-size", tp)
    if tp > 1:
        yield "--sequence-parallel"  # Megatron-Core demands it of MoE layers under tensor parallelism
    yield from _flag("context-parallel-size", cp)
    if sequence > 1:
        if setup.cp == 1:
            yield from _flag("cp-comm-type", "a2a")
        else:
            yield from (
                "--cp-comm-type",
                "a2a+p2p",
                "--hierarchical-context-parallel-sizes",
                str(sequence),
                str(setup.cp),
            )
    yield from _flag("expert-model-parallel-size", setup.ep)
    yield from _flag("expert-tensor-parallel-size", setup.etp)


def _pipeline(model: ModelShape, setup: Setup) -> Iterator[str]:
    yield from _flag("pipeline-model-parallel-size", setup.pp)
    if model.mtp_layers:
        yield from _flag("mtp-num-layers", model.mtp_layers)
    if setup.pp == 1:
        return
    stages = setup.pp * setup.vpp
    if model.layers % stages or setup.pipeline_layout != EVEN_LAYOUT:
        chunks = chunks_laid(model, setup.pipeline)
        yield from _flag("pipeline-model-parallel-layout", written(chunks))
    elif setup.vpp > 1:
        yield from _flag("num-layers-per-virtual-pipeline-stage", model.layers // stages)


def _batch(job: Job, setup: Setup) -> Iterator[str]:
    yield from _flag("micro-batch-size", setup.micro_batch)
    yield from _flag("global-batch-size", job.global_batch)
    yield from _flag("seq-length", job.sequence)
    yield from _flag("max-position-embeddings", job.sequence)


def _moe(job: Job, setup: Setup, software: Software) -> Iterator[str]:
    kernels = software.kernels
    takes_kernels = setup.exchange == "all_to_all" and setup.etp == 1 and job.capacity_factor is None  # as token_routes
    if kernels is None or not takes_kernels:
        yield from _flag("moe-token-dispatcher-type", "alltoall" if setup.exchange == "all_to_all" else "allgather")
    else:
        yield from _flag("moe-token-dispatcher-type", "flex")
        yield from _flag("moe-flex-dispatcher-backend", kernels.megatron)
    is_exchanged = setup.exchange == "all_to_all" and setup.ep * setup.etp > 1
    if software.overlaps_shared and job.model.shared_width and is_exchanged and not setup.is_merged:
        yield "--moe-shared-expert-overlap"
    yield "--moe-grouped-gemm"
    if job.capacity_factor is not None:
        yield from _flag("moe-expert-capacity-factor", f"{job.capacity_factor:g}")
        yield "--moe-pad-expert-input-to-capacity"


def _memory(job: Job, setup: Setup) -> Iterator[str]:
    yield "--bf16"
    yield from _precision(setup)
    if setup.recompute == "megascale":
        yield from ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "moe_act")
    elif modules := modules_of(setup.recompute):
        named = (module for module in MODULES if module in modules)
        yield from ("--recompute-granularity", "selective", "--recompute-modules", *named)
    elif setup.recompute == "full":
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    if setup.offload != KEPT:
        yield from ("--fine-grained-activation-offloading", "--offload-modules", *setup.offload.split("+"))
    if setup.zero >= 1:
        yield "--use-distributed-optimizer"
        yield "--overlap-param-gather"
    yield "--overlap-grad-reduce"
    if setup.zero >= 2:
        yield "--use-megatron-fsdp"
        yield from _flag("data-parallel-sharding-strategy", _SHARDING[setup.zero])
        yield from _flag("ckpt-format", "fsdp_dtensor")


def _precision(setup: Setup) -> Iterator[str]:
    """The recipe by its name there. DeepSeek's own kernels have none: Transformer Engine's for the same format stand in."""
    if setup.precision == "bf16":
        return
    recipe = RECIPES.get(setup.precision)
    name = "blockwise" if setup.precision == "fp8-deepgemm" else recipe.megatron if recipe else ""
    if _stands_in_for_delayed(setup):
        name = "blockwise"
    yield from _flag("fp8-format", "e4m3" if name in ("blockwise", "mxfp8") else "hybrid")
    if name:
        yield from _flag("fp8-recipe", name)


def _stands_in_for_delayed(setup: Setup) -> bool:
    """Whether another recipe is taken than delayed scaling, its default, which cannot recompute norms and activations."""
    if setup.precision not in ("fp8", "fp8-delayed"):
        return False
    return setup.recompute == "megascale" or bool(modules_of(setup.recompute) & {"moe_act", "layernorm"})


def _state(setup: Setup, software: Software) -> Iterator[str]:
    """The formats of gradients, weights and optimizer state, and what of it is in the host's memory."""
    words = {size: word for word, size in STATE_BYTES.items() if word != "fp16"}  # of two bytes: bf16
    formats = {
        "main-grads-dtype": words[software.gradient_bytes],
        "main-params-dtype": "fp16" if software.main_weight_bytes == STATE_BYTES["fp16"] else "fp32",
        "exp-avg-dtype": words[software.moment_bytes[0]],
        "exp-avg-sq-dtype": words[software.moment_bytes[1]],
    }
    changed = {name: word for name, word in formats.items() if word != "fp32"}
    if changed or software.offloaded_optimizer:  # offloading needs it too
        yield "--use-precision-aware-optimizer"
    for name, word in changed.items():
        yield from _flag(name, word)
    if "main-grads-dtype" in changed:
        yield "--grad-reduce-in-bf16"
    if software.keeps_fp8_weights and setup.precision != "bf16":
        yield "--fp8-param-gather"
    if software.keeps_fp8_activations:
        yield "--activation-func-fp8-input-store"
    if software.fuses_experts:
        yield "--use-transformer-engine-op-fuser"
    if software.graphs:
        yield from _graphs(software)
    if software.offloaded_optimizer:
        yield "--optimizer-cpu-offload"
        yield from _flag("optimizer-offload-fraction", f"{software.offloaded_optimizer:g}")


def _graphs(software: Software) -> Iterator[str]:
    """CUDA graphs, as Megatron-Core's page on them has their flags (user-guide/features/cuda_graph)."""
    if "step" in software.graphs:
        yield from _flag("cuda-graph-impl", "full_iteration")
        return
    modules = {"attention": ("attn",), "router": ("moe_router", "moe_preprocess")}
    yield from _flag("cuda-graph-impl", "transformer_engine")
    yield "--cuda-graph-modules"
    yield from (word for part in sorted(software.graphs) for word in modules[part])


def _flag(name: str, value: object) -> tuple[str, str]:
    return f"--{name}", str(value)

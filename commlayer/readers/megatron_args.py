"""Megatron-LM's flags as the options of ``commlayer estimate``.

Flags and their defaults: megatron/training/arguments.py of Megatron-LM at core_v0.16.1, and of CUDA graphs its page on them
(docs/user-guide/features/cuda_graph.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.profiles.errors import UsageError
from commlayer.readers.launch_flags import Flags, LaunchFormat
from commlayer.scheduler.mapping.offloading import OFFLOADABLE
from commlayer.scheduler.mapping.pipeline_layout import parse_layout
from commlayer.scheduler.mapping.precisions import RECIPES
from commlayer.scheduler.mapping.recomputation import MODULES
from commlayer.scheduler.mapping.software import STATE_BYTES

__all__ = ["MEGATRON_ARGS"]

_SAME: dict[str, tuple[str, int | tuple[str, ...] | type | None]] = {
    "tensor-model-parallel-size": ("tp", 1),
    "context-parallel-size": ("cp", 1),
    "expert-model-parallel-size": ("ep", 1),
    "pipeline-model-parallel-size": ("pp", 1),
    "num-virtual-stages-per-pipeline-rank": ("vpp", 1),
    "micro-batch-size": ("micro_batch", 1),
    "global-batch-size": ("global_batch", 1),
    "seq-length": ("sequence", 1),
    "mtp-num-layers": ("mtp", 0),
    "pipeline-model-parallel-layout": ("pipeline_layout", str),
    "moe-expert-capacity-factor": ("capacity_factor", float),
    "main-grads-dtype": ("main_grads_dtype", ("fp32", "bf16")),
    "main-params-dtype": ("main_params_dtype", ("fp32", "fp16")),
    "exp-avg-dtype": ("exp_avg_dtype", tuple(STATE_BYTES)),
    "exp-avg-sq-dtype": ("exp_avg_sq_dtype", tuple(STATE_BYTES)),
    "moe-shared-expert-overlap": ("shared_expert_overlap", None),
    "fp8-param-gather": ("fp8_param_gather", None),
    "activation-func-fp8-input-store": ("activation_func_fp8_input_store", None),
    "use-transformer-engine-op-fuser": ("use_transformer_engine_op_fuser", None),
}
"""Flags that are options under another name, or under their own, and their values: a whole number
of at least so much, one of several words, a text (str), a number (float); None: the flag has
none."""
_READ = {
    *_SAME,
    *("expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage", "nnodes", "nproc-per-node"),
    *("recompute-granularity", "recompute-modules", "offload-modules", "fine-grained-activation-offloading"),
    *("fp8-format", "fp8-recipe", "bf16", "moe-token-dispatcher-type", "moe-flex-dispatcher-backend"),
    *("moe-enable-deepep", "overlap-moe-expert-parallel-comm", "use-distributed-optimizer", "use-megatron-fsdp"),
    *("data-parallel-sharding-strategy", "recompute-method", "recompute-num-layers", "grad-reduce-in-bf16"),
    *("optimizer-cpu-offload", "optimizer-offload-fraction", "use-precision-aware-optimizer"),
    *("cp-comm-type", "hierarchical-context-parallel-sizes", "enable-cuda-graph", "external-cuda-graph"),
    *("cuda-graph-impl", "cuda-graph-modules", "cuda-graph-scope", "moe-pad-expert-input-to-capacity"),
    # what an estimate takes for given
    *("sequence-parallel", "overlap-grad-reduce", "overlap-param-gather", "delay-wgrad-compute", "moe-grouped-gemm"),
}
_CHANGES = {
    *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "attention-backend"),
    *("ddp-bucket-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    *("defer-embedding-wgrad-compute", "distribute-saved-activations", "first-last-layers-bf16", "fp4-format"),
    *("fp4-param-gather", "fp4-recipe", "no-overlap-grad-reduce", "tp-comm-overlap-ag", "tp-comm-overlap-rs"),
    *("microbatch-group-size-per-virtual-pipeline-stage", "moe-expert-rank-capacity-factor", "moe-layer-recompute"),
    *("moe-paged-stash", "moe-permute-fusion", "moe-router-fusion", "no-gradient-accumulation-fusion"),
    *("no-overlap-p2p-communication", "num-distributed-optimizer-instances", "overlap-cpu-optimizer-d2h-h2d"),
    *("overlap-p2p-communication-warmup-flush", "rampup-batch-size", "tp-comm-overlap", "transformer-impl"),
    *("use-flash-attn", "use-nccl-ub", "use-torch-fsdp2", "use-tp-pp-dp-mapping"),
}
"""Flags that change a step or its memory, and that no option has."""
_SHAPE = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-experts": "experts",
    "moe-router-topk": "top_k",
    "moe-ffn-hidden-size": "width",
}
"""Flags that say which model it is, and the field of its shape that they have to be."""
_GRAPHED = {"attn": "attention", "moe_router": "router", "moe_preprocess": "router"}
"""The parts of a layer that modules of --cuda-graph-modules lie in, by the names of --cuda-graphs."""
_STAGES = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}


def _options(flags: Flags) -> Iterator[tuple[str, object]]:
    yield "software_name", "megatron"
    yield from _same(flags)
    tp = flags.whole("tensor-model-parallel-size")
    own = "expert-tensor-parallel-size" in flags
    yield "etp", str(flags.whole("expert-tensor-parallel-size") if own else tp)  # its default there
    if "nproc-per-node" in flags:
        yield "gpus", flags.whole("nproc-per-node") * flags.whole("nnodes")
    yield from _chunks(flags)
    yield from _attention(flags)
    yield from _memory(flags)
    if graphs := _graphs(flags):
        yield "cuda_graphs", graphs
    kind = flags.one_of("moe-token-dispatcher-type", ("allgather", "alltoall", "flex"), "allgather")
    yield "exchange", "all_gather" if kind == "allgather" else "all_to_all"
    backend = flags.one_of("moe-flex-dispatcher-backend", ("deepep", "hybridep"), "deepep")
    yield "dispatcher", backend if kind == "flex" or "moe-enable-deepep" in flags else "nccl"
    if "overlap-moe-expert-parallel-comm" in flags:
        yield "schedule", "1f1b-overlap"
    stage = "1" if "use-distributed-optimizer" in flags else "0"
    if "use-megatron-fsdp" in flags:
        stage = _STAGES[flags.one_of("data-parallel-sharding-strategy", _STAGES, "no_shard")]
    yield "zero", stage


def _same(flags: Flags) -> Iterator[tuple[str, object]]:
    for name, (option, kind) in _SAME.items():
        if name not in flags:
            continue
        if isinstance(kind, int):
            yield option, str(flags.whole(name, least=kind))
        elif isinstance(kind, tuple):
            yield option, flags.one_of(name, kind, kind[0])
        elif kind is None:
            yield option, True
        else:
            yield option, flags.real(name) if kind is float else flags.value(name)


def _chunks(flags: Flags) -> Iterator[tuple[str, object]]:
    """vpp by the other two ways of saying it."""
    stages = flags.whole("pipeline-model-parallel-size")
    if "pipeline-model-parallel-layout" in flags:
        yield "vpp", len(parse_layout(flags.value("pipeline-model-parallel-layout"))) // stages
    elif "num-layers-per-virtual-pipeline-stage" in flags:
        each = flags.whole("num-layers-per-virtual-pipeline-stage")
        if "num-layers" not in flags:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each} of the launch line: expected --num-layers beside it, without "
                "which nobody knows how many chunks that makes: add the model's"
            )
        layers = flags.whole("num-layers")
        if layers % (stages * each):
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each} of the launch line: expected chunks that {stages} stages can "
                f"have of {layers} layers: Megatron-LM refuses others"
            )
        yield "vpp", layers // (stages * each)


def _attention(flags: Flags) -> Iterator[tuple[str, object]]:
    """Ulysses, which is a kind of context parallelism there, and of tensor parallelism here."""
    name = "hierarchical-context-parallel-sizes"
    sizes = flags.wholes(name)
    kind = flags.value("cp-comm-type", "p2p")
    if kind not in ("a2a", "a2a+p2p"):
        return
    if flags.whole("tensor-model-parallel-size") > 1:
        raise UsageError(
            f"--cp-comm-type {kind} of the launch line: Ulysses beside tensor parallelism is not modelled: leave one of "
            "them out"
        )
    degree = flags.whole("context-parallel-size")
    if kind == "a2a":
        sizes = (degree, 1)
    if len(sizes) != 2 or sizes[0] * sizes[1] != degree:
        raise UsageError(
            f"{flags.origin(name)}: expected two sizes whose product is "
            f"--context-parallel-size {degree}, got {' '.join(map(str, sizes[:3])) or 'none'}: Megatron-LM refuses others"
        )
    yield from (("attention", "ulysses"), ("tp", str(sizes[0])), ("cp", str(sizes[1])))


def _memory(flags: Flags) -> Iterator[tuple[str, object]]:
    granularity = flags.one_of("recompute-granularity", ("full", "selective"), "")
    modules = flags.some_of("recompute-modules", MODULES, ("core_attn",))
    if granularity:
        yield "recompute", "full" if granularity == "full" else "+".join(modules)
    if offloaded := flags.some_of("offload-modules", OFFLOADABLE, ()):
        yield "offload", "+".join(offloaded)
    if "fp8-format" in flags:
        recipes = {recipe.megatron: name for name, recipe in RECIPES.items() if recipe.megatron}
        yield "precision", recipes[flags.one_of("fp8-recipe", recipes, "delayed")]
    if "grad-reduce-in-bf16" in flags and "main-grads-dtype" not in flags:
        yield "main_grads_dtype", "bf16"
    is_part = "optimizer-offload-fraction" in flags
    fraction = flags.real("optimizer-offload-fraction", most=1) if is_part else "1.0"
    if "optimizer-cpu-offload" in flags:  # without it the fraction changes nothing
        yield "optimizer_offload_fraction", fraction


_GRAPH_FLAGS = ("cuda-graph-impl", "cuda-graph-modules", "cuda-graph-scope", "enable-cuda-graph", "external-cuda-graph")


def _graphs(flags: Flags) -> str:
    """The kind of --cuda-graphs that is captured; empty for what no kind has, such as whole layers."""
    is_older = "enable-cuda-graph" in flags or "external-cuda-graph" in flags
    words = ("none", "local", "transformer_engine", "full_iteration")
    impl = flags.one_of("cuda-graph-impl", words, "local" if is_older else "none")
    named = next((name for name in ("cuda-graph-modules", "cuda-graph-scope") if flags.get(name)), None)
    modules = flags.values_of(named) if named else ()
    if impl == "full_iteration" or "full_iteration" in modules:
        return "full-iteration"
    if impl == "none":
        return "none"
    if not set(modules) <= set(_GRAPHED):
        return ""
    return "+".join(sorted({_GRAPHED[module] for module in modules}))


def _unlike(flags: Flags) -> tuple[str, ...]:
    """Flags that are read, but say what no option has."""
    found = []
    is_full = flags.value("recompute-granularity", "") == "full"
    if is_full and flags.value("recompute-method", "uniform") != "uniform":
        found.append("recompute-method")
    if is_full and flags.value("recompute-num-layers", "1") != "1":
        found.append("recompute-num-layers")
    if not _graphs(flags):
        found += _GRAPH_FLAGS
    if flags.value("cp-comm-type", "p2p") not in ("p2p", "a2a", "a2a+p2p"):
        found.append("cp-comm-type")
    return tuple(found)


def _shape(flags: Flags) -> dict[str, str]:
    """The fields of the model's shape that the flags say."""
    return {field: str(flags.whole(name)) for name, field in _SHAPE.items() if name in flags}


MEGATRON_ARGS = LaunchFormat(frozenset({*_READ, *_SHAPE}), frozenset(_CHANGES), _options, _shape, _unlike)

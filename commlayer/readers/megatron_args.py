"""A launch line of Megatron-LM as the options of ``commlayer estimate``: the inverse of its export.

Flags and their defaults: megatron/training/arguments.py of Megatron-LM at core_v0.16.1, and of CUDA graphs its page on them
(docs/user-guide/features/cuda_graph.md). Only what a mapping, a batch or software depends on is read; the other flags are named,
so that nobody takes them for read.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.pipeline_layout import parse_layout
from commlayer.scheduler.mapping.precisions import RECIPES
from commlayer.scheduler.mapping.recomputation import MODULES
from commlayer.scheduler.mapping.software import STATE_BYTES

__all__ = ["Launch", "read_launch"]

Flags = Mapping[str, list[str]]

_NUMBERS = {
    "tensor-model-parallel-size": "tp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "seq-length": "sequence",
}
"""Flags with a whole number that are options under another name."""
_FORMATS = {
    "main-grads-dtype": ("fp32", "bf16"),
    "main-params-dtype": ("fp32", "fp16"),
    "exp-avg-dtype": tuple(STATE_BYTES),
    "exp-avg-sq-dtype": tuple(STATE_BYTES),
}
"""Flags with a format that are options of the same name, and the formats."""
_SWITCHES = {
    "moe-shared-expert-overlap": "shared_expert_overlap",
    "fp8-param-gather": "fp8_param_gather",
    "activation-func-fp8-input-store": "activation_func_fp8_input_store",
    "use-transformer-engine-op-fuser": "use_transformer_engine_op_fuser",
}
"""Flags without a value that are options under another name."""
_READ = {
    *_NUMBERS,
    *_FORMATS,
    *_SWITCHES,
    *("mtp-num-layers", "pipeline-model-parallel-layout", "moe-expert-capacity-factor"),
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


@dataclass(frozen=True)
class Launch:
    """A launch line that was read.

    Attributes:
        options: of the command, by the names of its parameters.
        shape: fields of the model's.
        changing: flags that change the step, and are not read.
        unread: flags that nothing here depends on, or that nobody knows.
        misspelt: those of them that are nearly the name of a flag that is known, in a question.
        unknown: variables of the shell in the place of flags, which the text does not assign.
    """

    options: Mapping[str, object]
    shape: Mapping[str, str]
    changing: tuple[str, ...]
    unread: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    misspelt: tuple[str, ...] = ()

    def check(self, model: ModelShape) -> None:
        """Raises UsageError where the line is of another model."""
        for name, value in self.shape.items():
            if value != str(getattr(model, name)):
                raise UsageError(
                    f"the launch line is of a model with {name}={shortened(value)}, but {model.name} has "
                    f"{getattr(model, name)}: name the model that it trains with --model"
                )

    def notes(self) -> Iterator[str]:
        """The flags that were not read, where there are any."""
        yield from self.misspelt
        if self.changing:
            yield f"not read of the launch line, although the step changes with them: {', '.join(self.changing)}"
        if self.unknown:
            yield f"not read, as the text does not say what they hold: {', '.join(self.unknown)}: write their flags out"
        if self.unread:
            yield f"not read of the launch line, as nothing here depends on them or knows them: {', '.join(self.unread)}"


def read_launch(text: str, environment: Mapping[str, str] | None = None) -> Launch:
    """Read a launch line, with its continuation lines, quotes and comments; what comes before its first flag is skipped.

    A variable of the shell stands for what ``text`` assigns to it, else for what ``environment`` has.

    Raises UsageError for quotes that do not end, a line without flags, a variable without a value, and for what this planner
    does not model.
    """
    flags, expanded = _flags(text, _variables(text, environment or {}))
    if "tensor-model-parallel-size" not in flags and "micro-batch-size" not in flags:
        raise UsageError(
            "expected a launch line of Megatron-LM, such as torchrun … pretrain_gpt.py --tensor-model-parallel-size 2 "
            f"--micro-batch-size 1, got {', '.join(f'--{shortened(name)}' for name in list(flags)[:5]) or 'no flag'}"
        )
    options = dict(_options(flags))
    shape = {field: flags[name][0] for name, field in _SHAPE.items() if flags.get(name)}
    changing, unread, beyond = [], [], {*_CHANGES, *_unlike(flags)}
    for name in flags:
        if name in beyond:
            changing.append(f"--{shortened(name)}")
        elif name not in _READ and name not in _SHAPE:
            unread.append(f"--{shortened(name)}")
    misspelt = (_question(name) for name in flags if f"--{name}" in unread)
    unknown = tuple(shortened(word) for word in dict.fromkeys(expanded) if not _is_assigned(word, text))
    return Launch(options, shape, tuple(changing), tuple(unread), unknown, tuple(filter(None, misspelt)))


def _question(name: str) -> str:
    """Which flag an unread one may have been meant to be; empty where it is like none."""
    import difflib

    close = difflib.get_close_matches(name, sorted({*_READ, *_SHAPE, *_CHANGES}), n=1, cutoff=_ALIKE)
    return f"--{shortened(name)} of the launch line is not read: did you mean --{close[0]}?" if close else ""


_ALIKE = 0.89
"""How alike two flags are of which one may be the other, misspelt: more than --ffn-hidden-size and --moe-ffn-hidden-size."""


def _variables(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the shell that hold one word: what ``text`` assigns, else what ``environment``
    has, else a default in ``${NAME:-word}``."""
    text = _COMMENT.sub("", text)
    found = {**dict(_DEFAULT.findall(text)), **environment}
    for name, quoted, plain in _ONE_WORD.findall(text):
        found[name] = _substituted(quoted or plain, found)
    return found


def _substituted(word: str, variables: Mapping[str, str]) -> str:
    """The word with the value of the variable that it is; as it is where nobody says what that holds."""
    variable = _EXPANSION.fullmatch(word)
    name = variable and (variable[1] or variable[2])
    return variables.get(name, word) if name else word


def _is_assigned(word: str, text: str) -> bool:
    """Whether ``text`` says what a variable of the shell holds; nobody can of what is given to a script itself."""
    variable = _EXPANSION.fullmatch(word)
    name = variable and (variable[1] or variable[2])
    return bool(name and re.search(rf"(?<!\w){re.escape(name)}\+?=", text))


def _flags(text: str, variables: Mapping[str, str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of each flag, the last time that it is given, with those of ``variables`` in their places; and variables of
    the shell in the place of flags."""
    found: dict[str, list[str]] = {}
    expanded: list[str] = []
    values: list[str] = []
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = found[name.replace("_", "-")] = [_substituted(value, variables)] if has_value else []
        elif word in _ENDS:
            values = []  # of no flag
        elif word.endswith(_ARRAY) or (values and _EXPANSION.fullmatch(word)):
            expanded.append(word)
        else:
            values.append(_substituted(word, variables))
    return found, expanded


# What an assignment, ``NAME=value`` or ``NAME+=value``, gives; and whether that holds flags.
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=(.*)", re.DOTALL)
_HOLDS_OPTIONS = re.compile(r"(^|\s)--[a-z][a-z0-9_-]*(\s|$)")
_EXPANSION = re.compile(r"\$(\w+|[@*])|\$\{(\w+).*\}")
"""A variable, or all that was given to a script: its name alone."""
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_ONE_WORD = re.compile(r"""(?<![\w-])([A-Za-z_]\w*)=(?:["']([^"'\s]*)["']|([^\s"'();]+))""")
"""An assignment of one word."""
_DEFAULT = re.compile(r"\$\{(\w+):[-=]([^}\s$]+)\}")
"""A variable with what it is where nobody has set it."""
_ARRAY = ("[@]}", "[*]}", "$@", "$*")
"""The ends of words that stand for several."""
_ENDS = ("(", ")", "|", ";", "&", "&&", "||", ">", ">>", "2>&1")
"""Words of a shell behind which nothing is a value of the flag before them."""


def _words(text: str, is_variable: bool = False) -> Iterator[str]:
    """The words of a shell's text, those inside arrays and inside variables that hold options among them. Raises UsageError
    for quotes that do not end."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"cannot read the launch line: {error}: quote it as a shell would") from error
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if assigned and not is_variable and _HOLDS_OPTIONS.search(assigned[1]):
            yield from (";", *_words(assigned[1], is_variable=True), ";")
            continue
        if assigned:
            word = assigned[1]
            yield ";"
        if word.startswith("(") and word.count("(") > word.count(")"):
            word = word[1:]
            yield "("
        is_last = word.count(")") > word.count("(")
        if word := word[: len(word) - is_last]:
            yield word
        yield from (")",) * is_last


def _options(flags: Flags) -> Iterator[tuple[str, object]]:
    yield "software_name", "megatron"
    yield from _same(flags)
    for name, option in _SWITCHES.items():
        if name in flags:
            yield option, True
    tp = _whole(flags, "tensor-model-parallel-size")
    own = "expert-tensor-parallel-size" in flags
    yield "etp", str(_whole(flags, "expert-tensor-parallel-size") if own else tp)  # its default there
    if "nproc-per-node" in flags:
        yield "gpus", _whole(flags, "nproc-per-node") * _whole(flags, "nnodes")
    yield from _chunks(flags)
    yield from _attention(flags)
    yield from _memory(flags)
    yield from _optimizer(flags)
    if graphs := _graphs(flags):
        yield "cuda_graphs", graphs
    yield from _dispatch(flags)
    if "overlap-moe-expert-parallel-comm" in flags:
        yield "schedule", "1f1b-overlap"
    stage = "1" if "use-distributed-optimizer" in flags else "0"
    if "use-megatron-fsdp" in flags:
        stage = _STAGES[_one_of(flags, "data-parallel-sharding-strategy", _STAGES, "no_shard")]
    yield "zero", stage


def _same(flags: Flags) -> Iterator[tuple[str, object]]:
    """Flags that are options under another name, or under their own."""
    for name, option in _NUMBERS.items():
        if name in flags:
            yield option, str(_whole(flags, name))
    if "mtp-num-layers" in flags:
        yield "mtp", str(_whole(flags, "mtp-num-layers", least=0))
    if "pipeline-model-parallel-layout" in flags:
        yield "pipeline_layout", _value(flags, "pipeline-model-parallel-layout")
    if "moe-expert-capacity-factor" in flags:
        yield "capacity_factor", _real(flags, "moe-expert-capacity-factor")
    for name, words in _FORMATS.items():
        if name in flags:
            yield name.replace("-", "_"), _one_of(flags, name, words, words[0])


def _chunks(flags: Flags) -> Iterator[tuple[str, object]]:
    """vpp by the other two ways of saying it."""
    stages = _whole(flags, "pipeline-model-parallel-size")
    if "pipeline-model-parallel-layout" in flags:
        yield "vpp", len(parse_layout(_value(flags, "pipeline-model-parallel-layout"))) // stages
    elif "num-layers-per-virtual-pipeline-stage" in flags:
        each = _whole(flags, "num-layers-per-virtual-pipeline-stage")
        if "num-layers" not in flags:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each} of the launch line: expected --num-layers beside it, without "
                "which nobody knows how many chunks that makes: add the model's"
            )
        layers = _whole(flags, "num-layers")
        if layers % (stages * each):
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each} of the launch line: expected chunks that {stages} stages can "
                f"have of {layers} layers: Megatron-LM refuses others"
            )
        yield "vpp", layers // (stages * each)


def _attention(flags: Flags) -> Iterator[tuple[str, object]]:
    """Ulysses, which is a kind of context parallelism there, and of tensor parallelism here."""
    kind = _value(flags, "cp-comm-type", "p2p")
    if kind not in ("a2a", "a2a+p2p"):
        return
    if _whole(flags, "tensor-model-parallel-size") > 1:
        raise UsageError(
            f"--cp-comm-type {kind} of the launch line: Ulysses beside tensor parallelism is not modelled: leave one of "
            "them out"
        )
    sizes = flags.get("hierarchical-context-parallel-sizes") or [_value(flags, "context-parallel-size", "1")]
    yield from (("attention", "ulysses"), ("tp", sizes[0]), ("cp", sizes[1] if len(sizes) > 1 else "1"))


def _memory(flags: Flags) -> Iterator[tuple[str, object]]:
    granularity = _one_of(flags, "recompute-granularity", ("full", "selective"), "")
    if granularity:
        modules = flags.get("recompute-modules") or ["core_attn"]
        if unknown := [word for word in modules if word not in MODULES]:
            raise UsageError(
                f"--recompute-modules of the launch line: expected some of {', '.join(MODULES)}, got {shortened(unknown[0])!r}"
            )
        yield "recompute", "full" if granularity == "full" else "+".join(modules)
    if flags.get("offload-modules"):
        yield "offload", "+".join(flags["offload-modules"])
    if "fp8-format" in flags:
        recipes = {recipe.megatron: name for name, recipe in RECIPES.items() if recipe.megatron}
        yield "precision", recipes[_one_of(flags, "fp8-recipe", recipes, "delayed")]


def _optimizer(flags: Flags) -> Iterator[tuple[str, object]]:
    if "grad-reduce-in-bf16" in flags and "main-grads-dtype" not in flags:
        yield "main_grads_dtype", "bf16"
    if "optimizer-cpu-offload" in flags:  # without it the fraction changes nothing
        is_part = "optimizer-offload-fraction" in flags
        yield "optimizer_offload_fraction", _real(flags, "optimizer-offload-fraction") if is_part else "1.0"


_GRAPH_FLAGS = ("cuda-graph-impl", "cuda-graph-modules", "cuda-graph-scope", "enable-cuda-graph", "external-cuda-graph")


def _graphs(flags: Flags) -> str:
    """The kind of --cuda-graphs that is captured; empty for what no kind has, such as whole layers."""
    is_older = "enable-cuda-graph" in flags or "external-cuda-graph" in flags
    words = ("none", "local", "transformer_engine", "full_iteration")
    impl = _one_of(flags, "cuda-graph-impl", words, "local" if is_older else "none")
    modules = flags.get("cuda-graph-modules") or flags.get("cuda-graph-scope") or []
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
    is_full = _value(flags, "recompute-granularity", "") == "full"
    if is_full and _value(flags, "recompute-method", "uniform") != "uniform":
        found.append("recompute-method")
    if is_full and _value(flags, "recompute-num-layers", "1") != "1":
        found.append("recompute-num-layers")
    if not _graphs(flags):
        found += _GRAPH_FLAGS
    if _value(flags, "cp-comm-type", "p2p") not in ("p2p", "a2a", "a2a+p2p"):
        found.append("cp-comm-type")
    return tuple(found)


def _dispatch(flags: Flags) -> Iterator[tuple[str, object]]:
    kind = _one_of(flags, "moe-token-dispatcher-type", ("allgather", "alltoall", "flex"), "allgather")
    yield "dispatch", "all_gather" if kind == "allgather" else "all_to_all"
    backend = _value(flags, "moe-flex-dispatcher-backend", "deepep")
    yield "dispatcher", backend if kind == "flex" or "moe-enable-deepep" in flags else "nccl"


def _value(flags: Flags, name: str, default: str | None = None) -> str:
    """The value of a flag, or ``default`` where it is not given. Raises UsageError for a flag without its value."""
    if name not in flags and default is not None:
        return default
    if not flags.get(name):
        raise UsageError(
            f"--{name} of the launch line: expected a value behind it, got none: write it as the shell gets it"
        )
    text = flags[name][0]
    if _EXPANSION.fullmatch(text):
        raise UsageError(
            f"--{name} of the launch line: neither the text nor the environment says what {shortened(text)} holds: export it, "
            "or write its value out"
        )
    return text


def _whole(flags: Flags, name: str, least: int = 1) -> int:
    text = _value(flags, name, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise UsageError(
            f"--{name} of the launch line: expected a whole number of at least {least}, got {shortened(text)!r}"
        )
    return int(text)


def _real(flags: Flags, name: str) -> str:
    text = _value(flags, name)
    try:
        is_number = 0 <= float(text) < math.inf
    except ValueError:
        is_number = False
    if not is_number:
        raise UsageError(f"--{name} of the launch line: expected a number of at least 0, got {shortened(text)!r}")
    return text


def _one_of(flags: Flags, name: str, words: Mapping[str, str] | tuple[str, ...], default: str) -> str:
    text = _value(flags, name, default)
    if text not in words and text != default:
        raise UsageError(f"--{name} of the launch line: expected one of {', '.join(words)}, got {shortened(text)!r}")
    return text

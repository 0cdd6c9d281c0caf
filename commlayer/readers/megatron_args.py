"""A launch line of Megatron-LM as the options of ``commlayer estimate``: the inverse of its export.

Flags and their defaults: megatron/training/arguments.py of Megatron-LM at core_v0.16.1. Only what a mapping, a batch or software
depends on is read; the other flags are named, so that nobody takes them for read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.pipeline_layout import parse_layout
from commlayer.scheduler.mapping.precisions import RECIPES

__all__ = ["Launch", "read_launch"]

Flags = Mapping[str, list[str]]

_SAME = {
    "tensor-model-parallel-size": "tp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vpp",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
    "seq-length": "sequence",
    "mtp-num-layers": "mtp",
    "pipeline-model-parallel-layout": "pipeline_layout",
    "moe-expert-capacity-factor": "capacity_factor",
    "main-grads-dtype": "main_grads_dtype",
    "main-params-dtype": "main_params_dtype",
    "exp-avg-dtype": "exp_avg_dtype",
    "exp-avg-sq-dtype": "exp_avg_sq_dtype",
    "optimizer-offload-fraction": "optimizer_offload_fraction",
    "moe-shared-expert-overlap": "shared_expert_overlap",
    "fp8-param-gather": "fp8_param_gather",
    "activation-func-fp8-input-store": "activation_func_fp8_input_store",
    "use-transformer-engine-op-fuser": "use_transformer_engine_op_fuser",
}
"""Flags that are options under another name, with their value; those without one are switches."""
_READ = {
    *_SAME,
    *("expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage", "nnodes", "nproc-per-node"),
    *("recompute-granularity", "recompute-modules", "offload-modules", "fine-grained-activation-offloading"),
    *("fp8-format", "fp8-recipe", "bf16", "moe-token-dispatcher-type", "moe-flex-dispatcher-backend"),
    *("moe-enable-deepep", "overlap-moe-expert-parallel-comm", "use-distributed-optimizer", "use-megatron-fsdp"),
    "data-parallel-sharding-strategy",
}
_SHAPE = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-experts": "experts",
    "moe-router-topk": "top_k",
    "moe-ffn-hidden-size": "width",
}
"""Flags that say which model it is, and the field of its shape that they have to be."""
_STAGES = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}


@dataclass(frozen=True)
class Launch:
    """A launch line that was read: ``options`` of the command by the names of its parameters; ``shape``, fields of the
    model's; ``unread``, flags that nothing here depends on, or that nobody knows."""

    options: Mapping[str, object]
    shape: Mapping[str, str]
    unread: tuple[str, ...]

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
        if self.unread:
            yield f"not read of the launch line, as nothing here depends on them or knows them: {', '.join(self.unread)}"


def read_launch(text: str) -> Launch:
    """Read a launch line, with its continuation lines, quotes and comments; what comes before its first flag is skipped.

    Raises UsageError for quotes that do not end, a line without flags, and for what this planner does not model.
    """
    flags = _flags(text)
    if "tensor-model-parallel-size" not in flags and "micro-batch-size" not in flags:
        raise UsageError(
            "expected a launch line of Megatron-LM, such as torchrun … pretrain_gpt.py --tensor-model-parallel-size 2 "
            f"--micro-batch-size 1, got {', '.join(f'--{shortened(name)}' for name in list(flags)[:5]) or 'no flag'}"
        )
    options = dict(_options(flags))
    shape = {field: flags[name][0] for name, field in _SHAPE.items() if flags.get(name)}
    unread = tuple(f"--{shortened(name)}" for name in flags if name not in _READ and name not in _SHAPE)
    return Launch(options, shape, unread)


def _flags(text: str) -> dict[str, list[str]]:
    """The values of each flag, the last time that it is given."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"cannot read the launch line: {error}: quote it as a shell would") from error
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = found[name.replace("_", "-")] = [value] if has_value else []
        else:
            values.append(word)
    return found


def _options(flags: Flags) -> Iterator[tuple[str, object]]:
    yield "software_name", "megatron"
    for name, option in _SAME.items():
        if name in flags:
            yield option, flags[name][0] if flags[name] else True
    tp = _value(flags, "tensor-model-parallel-size", "1")
    yield "etp", _value(flags, "expert-tensor-parallel-size", tp)  # its default there
    if "nproc-per-node" in flags:
        yield "gpus", _whole(flags, "nproc-per-node") * _whole(flags, "nnodes")
    yield from _chunks(flags)
    yield from _memory(flags)
    yield from _dispatch(flags)
    if "overlap-moe-expert-parallel-comm" in flags:
        yield "schedule", "1f1b-overlap"
    stage = "1" if "use-distributed-optimizer" in flags else "0"
    if "use-megatron-fsdp" in flags:
        stage = _STAGES[_one_of(flags, "data-parallel-sharding-strategy", _STAGES, "no_shard")]
    yield "zero", stage


def _chunks(flags: Flags) -> Iterator[tuple[str, object]]:
    """vpp by the other two ways of saying it."""
    stages = _whole(flags, "pipeline-model-parallel-size")
    if "pipeline-model-parallel-layout" in flags:
        yield "vpp", len(parse_layout(_value(flags, "pipeline-model-parallel-layout", ""))) // stages
    elif "num-layers-per-virtual-pipeline-stage" in flags:
        each = _whole(flags, "num-layers-per-virtual-pipeline-stage")
        yield "vpp", _whole(flags, "num-layers") // (stages * each)


def _memory(flags: Flags) -> Iterator[tuple[str, object]]:
    granularity = _one_of(flags, "recompute-granularity", ("full", "selective"), "")
    if granularity:
        modules = flags.get("recompute-modules") or ["core_attn"]
        yield "recompute", "full" if granularity == "full" else "+".join(modules)
    if flags.get("offload-modules"):
        yield "offload", "+".join(flags["offload-modules"])
    if "fp8-format" in flags:
        recipes = {recipe.megatron: name for name, recipe in RECIPES.items() if recipe.megatron}
        yield "precision", recipes[_one_of(flags, "fp8-recipe", recipes, "delayed")]


def _dispatch(flags: Flags) -> Iterator[tuple[str, object]]:
    kind = _one_of(flags, "moe-token-dispatcher-type", ("allgather", "alltoall", "flex"), "allgather")
    yield "dispatch", "all_gather" if kind == "allgather" else "all_to_all"
    backend = _value(flags, "moe-flex-dispatcher-backend", "deepep")
    yield "dispatcher", backend if kind == "flex" or "moe-enable-deepep" in flags else "nccl"


def _value(flags: Flags, name: str, default: str) -> str:
    values = flags.get(name)
    return values[0] if values else default


def _whole(flags: Flags, name: str) -> int:
    text = _value(flags, name, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise UsageError(
            f"--{name} of the launch line: expected a whole number of at least 1, got {shortened(text)!r}: write "
            "variables of the shell out, as `echo` prints them"
        )
    return int(text)


def _one_of(flags: Flags, name: str, words: Mapping[str, str] | tuple[str, ...], default: str) -> str:
    text = _value(flags, name, default)
    if text not in words and text != default:
        raise UsageError(f"--{name} of the launch line: expected one of {', '.join(words)}, got {shortened(text)!r}")
    return text

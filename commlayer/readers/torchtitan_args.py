"""torchtitan's options as those of ``commlayer estimate``, with the configuration that they override.

Until 0.2 that is a file, ``--job.config_file model.toml``; since 0.3 a function of Python, ``--module NAME --config NAME``,
which is called where torchtitan is installed, and only if it is one of torchtitan's own models. Options and their defaults:
torchtitan 0.3, config/configs.py, trainer.py, distributed/fsdp.py and distributed/pipeline_parallel.py; of before, the
train_configs of its models.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import shortened
from commlayer.readers.launch_flags import Flags, LaunchFormat
from commlayer.readers.launch_variables import variables_of
from commlayer.scheduler.mapping import catalog

__all__ = ["TORCHTITAN_ARGS", "is_torchtitan", "with_configuration"]

_MOST_BYTES = 1 << 20
_DEGREES = {
    "parallelism.tensor-parallel-degree": "tp",
    "parallelism.context-parallel-degree": "cp",
    "parallelism.pipeline-parallel-degree": "pp",
    "parallelism.expert-parallel-degree": "ep",
}
_EXPERT_TP = "parallelism.expert-tensor-parallel-degree"
_SHARD = "parallelism.data-parallel-shard-degree"
_REPLICATE = "parallelism.data-parallel-replicate-degree"
_RESHARD = "parallelism.fsdp-reshard-after-forward"
_SCHEDULE = "parallelism.pipeline-parallel-schedule"
_LAYERS = "parallelism.pipeline-parallel-layers-per-stage"
_LESS = tuple(f"parallelism.pipeline-parallel-{end}-stage-less-layers" for end in ("first", "last"))
_BACKEND = "parallelism.expert-parallel-comm-backend"
_LOCAL, _GLOBAL, _SEQUENCE = "training.local-batch-size", "training.global-batch-size", "training.seq-len"
_MICRO = "parallelism.pipeline-parallel-microbatch-size"
_MODE, _SELECTION = "activation-checkpoint.mode", "activation-checkpoint.selective-ac-option"
_READ = frozenset(
    {
        *(*_DEGREES, *_LESS, _EXPERT_TP, _SHARD, _REPLICATE, _RESHARD, _SCHEDULE, _LAYERS, _BACKEND),
        *(_LOCAL, _GLOBAL, _SEQUENCE, _MICRO, _MODE, _SELECTION),
        *("model.name", "model.flavor", "job.config-file", "module", "config", "nnodes", "nproc-per-node"),
        # what an estimate takes for given
        *("training.mixed-precision-param", "training.mixed-precision-reduce", "parallelism.enable-sequence-parallel"),
    }
)
_CHANGING = frozenset(
    {
        *("compile.enable", "compile.components", "compile.enable-async-tensor-parallel", "model.converters"),
        *("training.enable-cpu-offload", "training.disable-cuda-graphs", "training.dtype"),
        *("parallelism.enable-async-tensor-parallel", "parallelism.enable-fsdp-symm-mem", "override.imports"),
        *("parallelism.module-fqns-per-model-part", "parallelism.pipeline-parallel-schedule-csv"),
        *("parallelism.context-parallel-load-balancer", "parallelism.context-parallel-rotate-method"),
    }
)
_SCHEDULES = {"1f1b": ("1f1b", 1), "interleaved1f1b": ("1f1b", 2), "dualpipev": ("dualpipev", 1)}
"""Schedules that are modelled, in lower case, by which names do not differ; and the chunks where no layers per stage are said."""
_MODES = {"none": "none", "full": "full", "selective": "megascale", "memory_budget": "none", "memory-budget": "none"}
"""The nearest recomputation to each mode of activation checkpointing."""
_BACKENDS = {"standard": "nccl", "deepep": "deepep", "hybridep": "hybridep"}
_MODELS = {
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("qwen3_5", "35b-a3b"): "qwen3.5-35b-a3b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("llama4", "17bx16e"): "llama4-scout",
    ("llama4", "17bx128e"): "llama4-maverick",
}
"""Models of the catalog by torchtitan's name and flavor."""
_FIELDS = ("layers", "hidden", "heads", "experts", "top_k")
_SCRIPT = {"CONFIG_FILE": "job.config-file", "MODULE": "module", "CONFIG": "config", "NGPU": "nproc-per-node"}
"""Variables that torchtitan's run_train.sh hands on, and the options that it makes of them."""


def is_torchtitan(text: str, flags: Flags) -> bool:
    """Whether the launch line is one of torchtitan."""
    is_named = "torchtitan" in text or "run_train.sh" in text or "job.config-file" in flags
    return is_named or any(name.startswith("parallelism.") for name in flags)


def with_configuration(text: str, flags: Flags, variables: Mapping[str, str]) -> Flags:
    """The options of the configuration that the line names, and over them those of the line.

    Raises UsageError for a configuration that cannot be read.
    """
    handed_on = variables_of(text, variables, is_handed_on=True) if "run_train.sh" in text else {}
    for variable, name in _SCRIPT.items():
        if name not in flags and variable in handed_on:
            flags.add(name, [handed_on[variable]], f"{variable} of the launch line")
    found = Flags()
    if "job.config-file" in flags:
        path = flags.value("job.config-file")
        try:
            content = msgspec.toml.decode(read_file(path, _MOST_BYTES), type=dict[str, Any])
            for name, value in _leaves(content):
                found.add(name, _as_words(value), f"{shortened(name)} of {shortened(path)}")
        except (OSError, ImportError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{flags.origin('job.config-file')}: expected a file in TOML, got {shortened(path)}: "
                f"{shortened(str(error))}: write the path as seen from here"
            ) from error
    elif "module" in flags or "config" in flags:
        _add_registered(found, flags.value("module", ""), flags.value("config", ""))
    for name, values in flags.items():
        found.add(name, values, flags.origin(name))
        for value in values:  # a choice, which stands behind all options
            choice, _, mode = value.partition(":")
            if choice == "activation_checkpoint" and mode:
                found.add(_MODE, [mode], f"{choice}: of the launch line")
    return found


def _leaves(content: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a file in TOML, as sections and their keys, joined by dots."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{section}{key}.")
        else:
            yield section + key, value


def _as_words(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else [str(value)]


def _add_registered(found: Flags, module: str, config: str) -> None:
    """Enter what a configuration of torchtitan's own models sets otherwise than its defaults.

    Raises UsageError for another module, whose code is not run, and where torchtitan is not installed.
    """
    import importlib

    origin = f"--module {shortened(module)} --config {shortened(config)} of the launch line"
    names = f"torchtitan.models.{module}.config_registry"
    if not all(re.fullmatch(r"[a-z]\w*", name, re.ASCII) for name in (module, config)):
        raise UsageError(f"{origin}: expected a model of torchtitan and one of its configurations, by their names")
    try:
        registered = getattr(importlib.import_module(names), config)()
    except Exception as error:  # somebody else's code
        raise UsageError(
            f"{origin}: cannot ask torchtitan for this configuration: {shortened(str(error))}: install torchtitan 0.3, and take "
            "a configuration of torchtitan.models; or give the options themselves without --module and --config"
        ) from error
    for section in ("training", "parallelism", "compile"):
        values = getattr(registered, section)
        for field in dataclasses.fields(values):
            if (value := getattr(values, field.name)) not in (field.default, None, []):
                found.add(f"{section}.{field.name}", _as_words(value), f"{section}.{field.name} of {config}")
    kind = type(registered.activation_checkpoint).__qualname__.split(".")[0]
    mode = {"NoneType": "none", "FullAC": "full", "SelectiveAC": "selective"}.get(kind, "memory-budget")
    for name, text in {
        _MODE: mode,
        "model.name": registered.model_spec.name,
        "model.flavor": registered.model_spec.flavor,
        _BACKEND: next((each for each in _BACKENDS if config.endswith(f"_{each}")), "standard"),
    }.items():
        found.add(name, [text], f"{name} of {config}")


def _model(flags: Flags) -> str:
    """The catalog's name of the model; empty where it has none."""
    names = (flags.value("model.name", ""), flags.value("model.flavor", "").lower())
    return _MODELS.get(names, "")


def _shape(flags: Flags) -> dict[str, str]:
    if not (name := _model(flags)):
        return {}
    model = catalog.load(name)
    return {field: str(getattr(model, field)) for field in _FIELDS}


def _options(flags: Flags) -> Iterator[tuple[str, object]]:
    yield "software_name", "megatron"
    if name := _model(flags):
        yield "model_name", name
    degrees = {option: flags.whole(flag) for flag, option in _DEGREES.items()}
    yield from ((option, str(degree)) for option, degree in degrees.items())
    yield "etp", str(flags.whole(_EXPERT_TP) if degrees["ep"] > 1 else degrees["tp"])
    yield "exchange", "all_to_all"
    yield "dispatcher", _BACKENDS[flags.one_of(_BACKEND, _BACKENDS, "standard")]
    yield "recompute", _MODES[flags.one_of(_MODE, _MODES, "selective")]
    yield "sequence", str(flags.whole(_SEQUENCE, default="2048"))
    if degrees["pp"] > 1:
        yield from _pipeline(flags, degrees["pp"])
    replicas = flags.whole(_REPLICATE)
    shards = None if flags.value(_SHARD, "-1") == "-1" else flags.whole(_SHARD)
    yield from _batch(flags, math.prod(degrees[axis] for axis in ("tp", "cp", "pp")), replicas, shards)
    is_resharded = {"always": True, "never": False, "default": degrees["pp"] == 1}
    stage = "3" if is_resharded[flags.one_of(_RESHARD, is_resharded, "default")] else "2"
    yield "zero", "0" if shards == 1 else stage


def _pipeline(flags: Flags, stages: int) -> Iterator[tuple[str, object]]:
    lowered = flags.value(_SCHEDULE, "1F1B").lower()
    if lowered not in _SCHEDULES:
        flags.one_of(_SCHEDULE, ("1F1B", "Interleaved1F1B", "DualPipeV"), "1F1B")
    schedule, chunks = _SCHEDULES[lowered]
    yield "schedule", schedule
    if chunks > 1 and (name := _model(flags)) and _LAYERS in flags:
        layers = catalog.load(name).layers + sum(flags.whole(end, least=0) for end in _LESS)
        chunks = math.ceil(layers / flags.whole(_LAYERS)) // stages
    yield "vpp", str(chunks)


def _batch(flags: Flags, sharing: int, replicas: int, shards: int | None) -> Iterator[tuple[str, object]]:
    """GPUs and batches; ``sharing``: the GPUs that work on the same sequences."""
    local = flags.whole(_LOCAL, default="8")
    is_pipelined = flags.whole("parallelism.pipeline-parallel-degree") > 1
    yield "micro_batch", str(flags.whole(_MICRO) if is_pipelined else local)
    gpus = flags.whole("nproc-per-node") * flags.whole("nnodes") if "nproc-per-node" in flags else None
    if shards is not None:
        laid = sharing * replicas * shards
        if gpus not in (None, laid):
            raise UsageError(
                f"{flags.origin(_SHARD)}: expected degrees whose product is the {gpus} GPUs of the launch line, got {laid}: set "
                "it to -1 for what the others leave"
            )
        gpus = laid
    if gpus is not None:
        if gpus % (sharing * replicas):
            raise UsageError(
                f"{flags.origin('nproc-per-node')}: expected a multiple of the {sharing * replicas} GPUs that the degrees "
                f"have in common, got {gpus} GPUs in all"
            )
        yield "gpus", gpus
    if flags.value(_GLOBAL, "-1") != "-1":
        yield "global_batch", str(flags.whole(_GLOBAL))
    elif gpus is not None:
        yield "global_batch", str(local * (gpus // sharing))


def _unlike(flags: Flags) -> tuple[str, ...]:
    mode = flags.value(_MODE, "selective")
    is_interleaved = flags.value(_SCHEDULE, "1F1B").lower() == "interleaved1f1b"
    beyond = {
        _REPLICATE: flags.value(_REPLICATE, "1") != "1" and flags.value(_SHARD, "-1") != "1",
        _MODE: mode.startswith("memory"),
        _SELECTION: mode == "selective" and flags.value(_SELECTION, "op") != "op",
        _LAYERS: _LAYERS in flags and not (is_interleaved and _model(flags)),
    }
    quantized = (name for name in flags if name.startswith(("quantize.", "float8.", "mx.")))
    return (*(name for name, is_beyond in beyond.items() if is_beyond), *quantized)


def _remarks(flags: Flags) -> tuple[str, ...]:
    remarks = [
        "the launch line is of torchtitan, whose overlap is not modelled: it is estimated as Megatron-LM's software"
    ]
    if flags.value(_MODE, "selective") == "selective":
        remarks.append("selective activation checkpointing is estimated as megascale, the nearest that is modelled")
    if flags.whole("parallelism.pipeline-parallel-degree") > 1 and any(flags.value(end, "1") != "0" for end in _LESS):
        remarks.append(
            "torchtitan gives its first and last stage fewer layers (pipeline_parallel_first_stage_less_layers): estimated "
            "with even stages, unless --pipeline-layout says otherwise"
        )
    return tuple(remarks)


TORCHTITAN_ARGS = LaunchFormat(_READ, _CHANGING, _options, _shape, _unlike, _remarks)

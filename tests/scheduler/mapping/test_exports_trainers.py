"""A mapping for a trainer: the flags, what a trainer cannot run, and Megatron-LM's own parser on the flags where there is one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from commlayer.profiles.errors import GroupError, UsageError
from commlayer.scheduler.mapping import catalog, parameters
from commlayer.scheduler.mapping.exports import TRAINERS, deepspeed, export, megatron, torchtitan
from commlayer.scheduler.mapping.hardware import GPUS
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pipeline_layout import parse_layout, written
from commlayer.scheduler.mapping.precisions import Precision
from commlayer.scheduler.mapping.software import (
    MEGATRON,
    with_dispatcher,
    with_fp8_activations,
    with_fused_experts,
    with_graphs,
    with_optimizer,
    with_overlap,
)

JOB = Job(model=catalog.load("mixtral-8x22b"), gpus=128, global_batch=256, sequence=4096)
BEST = Setup(gpus=128, tp=2, ep=8, pp=8, vpp=7)


def flags(setup: Setup = BEST, **changes: Any) -> dict[str, list[str]]:
    """Megatron's arguments by flag."""
    found: dict[str, list[str]] = {}
    for token in megatron(replace(JOB, **changes), setup):
        if token.startswith("--"):
            assert token not in found
            found[token] = values = []
        else:
            values.append(token)
    return found


def test_megatron_takes_every_degree() -> None:
    found = flags(Setup(gpus=128, tp=2, cp=2, ep=4, etp=2, pp=4, vpp=7, micro_batch=2))
    expected = {
        "tensor-model-parallel-size": 2,
        "context-parallel-size": 2,
        "expert-model-parallel-size": 4,
        "expert-tensor-parallel-size": 2,
        "pipeline-model-parallel-size": 4,
        "num-layers-per-virtual-pipeline-stage": 2,
        "micro-batch-size": 2,
        "global-batch-size": 256,
        "seq-length": 4096,
        "num-layers": 56,
        "num-experts": 8,
        "moe-router-topk": 2,
        "num-query-groups": 8,
    }
    assert {name: found[f"--{name}"] for name in expected} == {name: [str(value)] for name, value in expected.items()}
    assert found["--moe-token-dispatcher-type"] == ["alltoall"]
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--swiglu", "--bf16"} <= set(found)
    assert "--recompute-granularity" not in found
    assert "--moe-expert-capacity-factor" not in found


def test_megatron_says_how_it_is_run() -> None:
    found = flags(
        replace(BEST, recompute="full", precision="fp8", exchange="all_gather", zero=0, tp=1), capacity_factor=1.25
    )
    assert found["--recompute-granularity"] == ["full"]
    assert found["--fp8-format"] == ["hybrid"]
    assert found["--moe-token-dispatcher-type"] == ["allgather"]
    assert found["--moe-expert-capacity-factor"] == ["1.25"]
    assert "--moe-pad-expert-input-to-capacity" in found
    assert not {"--use-distributed-optimizer", "--sequence-parallel"} & set(found)


def test_fp8_recomputes_selectively_with_another_recipe_than_the_default() -> None:
    found = flags(replace(BEST, recompute="megascale", precision="fp8"))
    assert found["--recompute-modules"] == ["layernorm", "moe_act"]
    assert found["--fp8-recipe"] == ["blockwise"]
    expected: dict[Precision, str] = {"fp8": "recipe is blockwise there", "fp8-deepgemm": "DeepSeek's own kernels"}
    for precision, words in expected.items():
        again = replace(BEST, recompute="megascale", precision=precision)
        assert any(words in note for note in export("megatron", JOB, again).notes)


def test_ulysses_is_context_parallelism_to_megatron() -> None:
    alone = flags(Setup(gpus=128, tp=8, ep=8, pp=8, attention="ulysses"))
    assert (alone["--tensor-model-parallel-size"], alone["--context-parallel-size"]) == (["1"], ["8"])
    assert alone["--cp-comm-type"] == ["a2a"]
    both = flags(Setup(gpus=128, tp=4, cp=2, ep=8, pp=8, attention="ulysses"))
    assert both["--context-parallel-size"] == ["8"]
    assert both["--hierarchical-context-parallel-sizes"] == ["4", "2"]


@pytest.mark.parametrize(("pp", "vpp"), [(16, 1), (8, 5), (16, 3)])
def test_uneven_layers_are_laid_out_as_they_are_counted(pp: int, vpp: int) -> None:
    job = Job(model=catalog.load("deepseek-v3"), gpus=256, global_batch=256, sequence=4096)
    tokens = megatron(job, Setup(gpus=256, ep=16, pp=pp, vpp=vpp))
    chunks = parse_layout(tokens[tokens.index("--pipeline-model-parallel-layout") + 1])
    assert len(chunks) == pp * vpp
    counts = [chunk.layers for chunk in chunks]
    assert sum(counts) == 61
    assert max(counts) - min(counts) == 1
    assert all(left >= right for left, right in pairwise(counts))


def test_latent_attention_dense_layers_and_shared_experts_have_their_flags() -> None:
    job = Job(model=catalog.load("deepseek-v3"), gpus=256, global_batch=256, sequence=4096)
    exported = export("megatron", job, Setup(gpus=256, ep=16, pp=16))
    assert "--multi-latent-attention" in exported.values
    assert "--moe-layer-freq '([0]*3+[1]*58)'" in exported.text
    assert "--group-query-attention" not in exported.values
    assert any("router" in note for note in exported.notes)
    assert "--moe-router-num-groups 8" in exported.text
    assert "--moe-router-group-topk 4" in exported.text


def test_kernels_of_a_dispatch_have_their_flags_or_a_note() -> None:
    setup = Setup(gpus=128, ep=16, pp=8)
    flags = export("megatron", QWEN, setup, HYBRIDEP).text
    assert "--moe-token-dispatcher-type flex" in flags
    assert "--moe-flex-dispatcher-backend hybridep" in flags
    uccl = export("megatron", QWEN, setup, with_dispatcher(MEGATRON, "uccl"))
    assert "--moe-flex-dispatcher-backend deepep" in uccl.text
    assert any("install UCCL-EP in place of DeepEP" in note for note in uccl.notes)
    for without in (export("megatron", QWEN, setup), export("megatron", QWEN, replace(setup, ep=8, etp=2), HYBRIDEP)):
        assert "--moe-token-dispatcher-type alltoall" in without.text
        assert "flex" not in without.text
    plain, noted = (export("deepspeed", JOB, Setup(gpus=128, ep=8), software) for software in (MEGATRON, DEEPEP))
    assert (noted.text, len(noted.notes)) == (plain.text, len(plain.notes) + 1)
    assert "deepep is to be added by hand" in noted.notes[-1]


def test_what_a_configuration_leaves_out_is_noted() -> None:
    planned = with_optimizer(MEGATRON, exp_avg_dtype="bf16", main_grads_dtype="bf16", optimizer_offload_fraction=0.5)
    for trainer in ("deepspeed", "torchtitan"):
        note = export(trainer, JOB, Setup(gpus=128, ep=8), planned).notes[-1]
        for words in ("gradients in BF16", "state in less than FP32", "50% of that state in the host's memory"):
            assert words in note
        assert not any("leaves out" in note for note in export(trainer, JOB, Setup(gpus=128, ep=8)).notes)


def test_fp8_is_the_recipe_that_it_means_on_the_gpu() -> None:
    setup = Setup(gpus=128, ep=8, pp=8, precision="fp8")
    assert "--fp8-format e4m3\n--fp8-recipe mxfp8" in export("megatron", JOB, setup, gpu=GPUS["b200"]).text
    assert "--fp8-recipe" not in export("megatron", JOB, setup, gpu=GPUS["h100"]).text


def test_merged_passes_and_shared_experts_have_their_flags() -> None:
    job = Job(model=catalog.load("deepseek-v3"), gpus=256, global_batch=512, sequence=4096)
    setup = Setup(gpus=256, ep=16, pp=4, vpp=4)
    beside = with_overlap(HYBRIDEP, overlaps_shared=True, dispatch_precision="fp8")
    plain = export("megatron", job, setup, beside)
    assert "--moe-shared-expert-overlap" in plain.values
    assert "--overlap-moe-expert-parallel-comm" not in plain.values
    assert any("send BF16 to the experts" in note for note in plain.notes)
    merged = export("megatron", job, replace(setup, schedule="1f1b-overlap"), beside)
    assert {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"} <= set(merged.values)
    assert "--moe-shared-expert-overlap" not in merged.values  # Megatron-Core refuses both
    with pytest.raises(UsageError, match="choose the schedule 1f1b or 1f1b-overlap"):
        megatron(job, replace(setup, vpp=1, schedule="dualpipe"))
    for schedule in ("1f1b-overlap", "dualpipev"):
        with pytest.raises(UsageError, match="choose the schedule 1f1b"):
            deepspeed(job, replace(setup, vpp=4 if schedule == "1f1b-overlap" else 1, schedule=schedule))
    with pytest.raises(UsageError, match="choose the schedule 1f1b or dualpipev"):
        torchtitan(job, replace(setup, schedule="1f1b-overlap"))
    found = torchtitan(job, replace(setup, vpp=1, schedule="dualpipev"))["parallelism"]
    assert found["pipeline_parallel_schedule"] == "DualPipeV"


def test_an_unfolded_mapping_beyond_cp_has_no_flags() -> None:
    with pytest.raises(UsageError, match="Megatron-Core cannot lay"):
        megatron(JOB, Setup(gpus=128, cp=2, ep=8, pp=8, folded=False))
    # without cp both kinds are the same groups
    assert megatron(JOB, Setup(gpus=128, tp=2, etp=2, ep=8, pp=8, folded=False))


QWEN = Job(model=catalog.load("qwen3-235b-a22b"), gpus=128, global_batch=256, sequence=4096)


def test_qwen3_is_trained_as_it_was() -> None:
    setup = Setup(gpus=128, tp=4, ep=8, pp=8)
    exported = export("megatron", QWEN, setup)
    for flag in ("--qk-layernorm\n", "--rotary-base 1000000\n", "--norm-epsilon 1e-06\n"):
        assert flag in exported.text
    assert not any("--rotary-base" in note for note in exported.notes)
    mixtral = export(
        "megatron", Job(model=catalog.load("mixtral-8x7b"), gpus=8, global_batch=8, sequence=4096), Setup(gpus=8)
    )
    assert "--norm-epsilon 1e-05\n" in mixtral.text
    larger = export("megatron", JOB, Setup(gpus=128, tp=2, ep=8, pp=8))
    assert "--rotary-base 1000000\n" in larger.text
    assert not any("--rotary-base" in note for note in larger.notes)
    unknown = Job(model=catalog.load("qwen2-57b-a14b"), gpus=8, global_batch=8, sequence=4096)
    other = export("megatron", unknown, Setup(gpus=8))
    assert "--rotary-base" not in other.text
    assert any("stand in for --rotary-base (10000) and --norm-epsilon (1e-05)" in note for note in other.notes)


def test_more_tensor_parallelism_than_query_groups_needs_a_later_megatron() -> None:
    wide, narrow = Setup(gpus=128, tp=8, ep=8, pp=8), Setup(gpus=128, tp=4, ep=8, pp=8)
    exported = export("megatron", QWEN, wide)
    assert "--num-query-groups 4\n" in exported.text
    assert any("needs core_v0.16 or later" in note and "tp=8" in note for note in exported.notes)
    assert not any("core_v0.16" in note for note in export("megatron", QWEN, narrow).notes)


@pytest.mark.parametrize(
    ("setup", "changes", "reason"),
    [
        (Setup(gpus=96, tp=3, ep=8), {}, "heads=64 is no multiple of tp=3; kv_heads=4 is neither"),
        (
            Setup(gpus=96, tp=6, ep=8),
            {"heads": 96, "head_dim": 64},
            "kv_heads=4 is neither a multiple nor a divisor of tp=6",
        ),
        (Setup(gpus=128, tp=8, ep=8, attention="ulysses"), {}, "Ulysses needs heads=64 and kv_heads=4"),
        (Setup(gpus=96, ep=12), {}, "experts=128 is no multiple of ep=12"),
        (Setup(gpus=128, tp=2, ep=8, etp=2), {"width": 1535}, "width=1535 of an expert is no multiple of etp=2"),
        (Setup(gpus=128, tp=2, ep=8), {"shared_width": 1535}, "shared_width=1535 is no multiple of tp=2"),
        (Setup(gpus=128, cp=4, ep=8), {"sequence": 4100}, "sequence=4100 is no multiple of 2 x cp=4"),
        (Setup(gpus=128, tp=4, ep=8), {"sequence": 4098}, "the 4098 tokens of a cp rank are no multiple of tp=4"),
        (Setup(gpus=128, tp=2, ep=8, pp=8, vpp=2), {"global_batch": 96}, "12 is no multiple of pp=8"),
    ],
)
def test_megatron_refuses_what_does_not_divide(setup: Setup, changes: dict[str, Any], reason: str) -> None:
    job = {name: value for name, value in changes.items() if name in ("sequence", "global_batch")}
    model = {name: value for name, value in changes.items() if name not in job}
    job = {"gpus": setup.gpus, "global_batch": 1920, **job}
    given = replace(QWEN, model=replace(QWEN.model, **model), **job)
    with pytest.raises(UsageError, match=f"Megatron-LM cannot run .*{reason}"):
        export("megatron", given, setup)


@pytest.mark.parametrize(
    ("trainer", "setup", "sequence", "reason"),
    [
        ("torchtitan", Setup(gpus=128, tp=8, ep=8, pp=2), 4096, "kv_heads=4 to be multiples of tp=8"),
        ("torchtitan", Setup(gpus=128, cp=2, ep=8), 4098, "no multiple of tp · 2 · cp = 4"),
        ("torchtitan", Setup(gpus=96, ep=12), 4096, "experts=128 is no multiple of ep=12"),
        ("deepspeed", Setup(gpus=96, ep=12), 4096, "experts=128 is no multiple of autoep_size=12"),
        ("deepspeed", Setup(gpus=128, tp=8, ep=8), 4096, "tp=8 is more than kv_heads=4"),
        (
            "deepspeed",
            Setup(gpus=96, tp=3, ep=8, attention="ulysses"),
            4096,
            "heads=64 to be a multiple of its 3 ranks",
        ),
        ("deepspeed", Setup(gpus=128, tp=8, ep=8, attention="ulysses"), 4100, "no multiple of the 8 ranks of Ulysses"),
    ],
)
def test_others_refuse_what_does_not_divide(trainer: str, setup: Setup, sequence: int, reason: str) -> None:
    with pytest.raises(UsageError, match=f"cannot run .*{reason}"):
        export(trainer, replace(QWEN, gpus=setup.gpus, sequence=sequence, global_batch=1920), setup)


def test_torchtitan_has_every_degree() -> None:
    found = torchtitan(JOB, BEST)
    degrees = found["parallelism"]
    assert degrees["tensor_parallel_degree"] == 2
    assert degrees["expert_parallel_degree"] == 8
    assert degrees["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert degrees["pipeline_parallel_layers_per_stage"] == 1
    product = degrees["data_parallel_shard_degree"] * degrees["data_parallel_replicate_degree"]
    assert product * degrees["tensor_parallel_degree"] * degrees["pipeline_parallel_degree"] == 128
    # of a data-parallel rank: all micro-batches of its pipeline
    assert found["training"]["local_batch_size"] == 256 // BEST.dp


_PARSE_TITAN = """
import json, sys
from torchtitan.config import ConfigManager
found = []
for arguments in json.load(sys.stdin):
    config = ConfigManager().parse_args(["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel", *arguments])
    policy = config.activation_checkpoint
    found.append({
        "training": {name: getattr(config.training, name) for name in config.training.__slots__},
        "parallelism": {name: getattr(config.parallelism, name) for name in config.parallelism.__slots__},
        "activation_checkpoint": "none" if policy is None else type(policy).__qualname__,
    })
    from torchtitan.distributed.parallel_dims import ParallelDims
    ParallelDims.from_config(config.parallelism, world_size=128)
print("PARSED " + json.dumps(found, default=str))
"""
_POLICIES = {"none": "none", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}


def test_torchtitan_parses_its_options() -> None:
    """The configuration manager of the installed torchtitan takes them, and its dimensions fill the GPUs."""
    pytest.importorskip("torchtitan")
    setups = [
        BEST,
        Setup(gpus=128, tp=2, cp=2, ep=8, pp=4, vpp=2, recompute="full"),
        Setup(gpus=128, ep=8, zero=3, recompute="megascale", precision="fp8"),
        Setup(gpus=128, tp=4, ep=4, pp=8, zero=0),
        Setup(gpus=128, tp=2, ep=8, pp=8, schedule="dualpipev"),
    ]
    exported = [export("torchtitan", JOB, setup) for setup in setups]
    given = [[word for line in each.text.splitlines() for word in shlex.split(line)] for each in exported]
    answered = _python({**os.environ}, _PARSE_TITAN, json.dumps(given))
    assert answered.returncode == 0, answered.stderr[-2000:]
    line = next(line for line in answered.stdout.splitlines() if line.startswith("PARSED "))
    for each, read in zip(exported, json.loads(line.removeprefix("PARSED ")), strict=True):
        assert isinstance(each.values, dict)
        for section in ("training", "parallelism"):
            assert read[section] | each.values[section] == read[section]
        assert read["activation_checkpoint"] == _POLICIES[each.values["activation_checkpoint"]["mode"]]
    assert any("ZeRO 1" in note for note in exported[0].notes)
    assert any("the nearest is selective" in note for note in exported[2].notes)
    assert any("Float8" in note for note in exported[2].notes)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (Setup(gpus=128, tp=4, etp=2, ep=4, pp=8), "no expert tensor parallelism beside ep=4"),
        (Setup(gpus=128, tp=4, ep=4, pp=8, attention="ulysses"), "no Ulysses"),
        (Setup(gpus=128, ep=8, pp=8, exchange="all_gather"), "all_to_all"),
        (Setup(gpus=128, cp=2, ep=8, pp=8, folded=False), "ep ranks are neighbours"),
        (Setup(gpus=128, ep=8, pp=8, zero=0), "zero 1 or more"),
        (Setup(gpus=128, ep=8, pp=8, recompute="core_attn"), "megascale, which is exported as its selective"),
    ],
)
def test_torchtitan_refuses_what_it_cannot_run(setup: Setup, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        torchtitan(JOB, setup)


def test_deepspeed_batch_adds_up() -> None:
    setup = Setup(gpus=128, tp=2, ep=8, micro_batch=2, zero=2)
    found = deepspeed(JOB, setup)
    product = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * setup.dp
    assert product == found["train_batch_size"] == 256
    assert found["zero_optimization"]["stage"] == 2
    assert found["expert_parallel"]["autoep_size"] == 8
    assert found["tensor_parallel"]["autotp_size"] == 2
    assert json.loads(export("deepspeed", JOB, setup).text) == found


_PARSE_DEEPSPEED = """
import json, sys
from deepspeed.runtime import config as runtime
runtime.dist.get_rank = lambda: 0  # no processes: it asks nothing else of them

class Mpu:
    def __init__(self, size): self.size = size
    def get_data_parallel_world_size(self): return self.size

found = []
for size, config in json.load(sys.stdin):
    read = runtime.DeepSpeedConfig(config, mpu=Mpu(size))
    found.append({
        "train_batch_size": read.train_batch_size,
        "train_micro_batch_size_per_gpu": read.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": read.gradient_accumulation_steps,
        "stage": read.zero_config.stage,
        "bf16": read.bfloat16_config.enabled,
    })
print("PARSED " + json.dumps(found))
"""


def test_deepspeed_reads_its_configuration() -> None:
    """The configuration class of the installed DeepSpeed takes it: it refuses batches that do not add up, and unknown values."""
    pytest.importorskip("deepspeed")
    setups = [
        Setup(gpus=128, tp=2, ep=8, micro_batch=2, zero=2),
        Setup(gpus=128, ep=8, pp=8),
        Setup(gpus=128, tp=4, ep=8, attention="ulysses", zero=3, recompute="full"),
    ]
    configs = [json.loads(export("deepspeed", JOB, setup).text) for setup in setups]
    sizes = [setup.dp for setup in setups]
    answered = _python({**os.environ}, _PARSE_DEEPSPEED, json.dumps(list(zip(sizes, configs, strict=True))))
    assert answered.returncode == 0, answered.stderr[-2000:]
    line = next(line for line in answered.stdout.splitlines() if line.startswith("PARSED "))
    for setup, config, read in zip(setups, configs, json.loads(line.removeprefix("PARSED ")), strict=True):
        batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert {name: read[name] for name in batch} == {name: config[name] for name in batch}
        assert (read["stage"], read["bf16"]) == (setup.zero, True)
    wrong = {**configs[0], "gradient_accumulation_steps": 7}
    assert _python({**os.environ}, _PARSE_DEEPSPEED, json.dumps([(sizes[0], wrong)])).returncode != 0


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (BEST, "without chunks: set vpp=1"),
        (Setup(gpus=128, cp=2, ep=8), "no context parallelism beside Ulysses"),
        (Setup(gpus=128, tp=2, etp=2, ep=8), "no expert tensor parallelism"),
        (Setup(gpus=128, ep=8, pp=8, zero=2), "takes ZeRO 0 or 1"),
        (Setup(gpus=128, ep=8, precision="fp8"), "no FP8"),
    ],
)
def test_deepspeed_refuses_what_it_cannot_run(setup: Setup, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        deepspeed(JOB, setup)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_batch_that_does_not_divide_is_refused(trainer: str) -> None:
    with pytest.raises(GroupError, match="no multiple of dp"):
        export(trainer, replace(JOB, global_batch=100), Setup(gpus=128, ep=8, pp=8))


def test_an_unknown_trainer_is_refused() -> None:
    with pytest.raises(UsageError, match="expected megatron, deepspeed or torchtitan, got 'nemo'"):
        export("nemo", JOB, BEST)


# Megatron-LM's own parser, where MEGATRON_LM_PATH is a checkout of it, or where it is installed

_PARSE = """
import json, sys
from megatron.training.arguments import parse_args
plain = (bool, int, float, str, type(None))
found = []
for arguments in json.load(sys.stdin):
    sys.argv = ["pretrain_gpt.py", *arguments]
    found.append({name: value for name, value in vars(parse_args()).items() if isinstance(value, plain)})
print("PARSED " + json.dumps(found))
"""

DEEPEP, HYBRIDEP = (with_dispatcher(MEGATRON, name) for name in ("deepep", "hybridep"))

_SETUPS = [
    BEST,
    Setup(gpus=128, tp=2, cp=2, ep=8, pp=4, vpp=7, recompute="full"),
    Setup(gpus=128, tp=4, ep=2, etp=4, pp=4, exchange="all_gather", zero=0),
    replace(BEST, precision="fp8", recompute="megascale"),
    Setup(gpus=128, tp=4, cp=2, ep=8, pp=8, attention="ulysses"),
    Setup(gpus=128, tp=2, ep=8, pp=16, vpp=3),
]


def test_megatron_parses_the_flags() -> None:
    """With Megatron-LM's core_v0.13.1, v0.16.1, v0.19.0 this passed."""
    cases = [
        (replace(JOB, model=catalog.load(model), capacity_factor=factor), setup)
        for model, factor in (("mixtral-8x22b", 1.0), ("deepseek-v3", None), ("qwen2-57b-a14b", None))
        for setup in _SETUPS
        if setup.pipeline.num_chunks <= catalog.load(model).layers
    ]
    laid = Setup(gpus=256, pp=8, vpp=4, ep=32, pipeline_layout="Et*3|(tt|)*29m|L")
    cases.append(
        (
            Job(model=replace(catalog.load("deepseek-v3"), mtp_layers=1), gpus=256, global_batch=1024, sequence=4096),
            laid,
        )
    )
    answered = _python(_megatron_environment(), _PARSE, json.dumps([megatron(job, setup) for job, setup in cases]))
    assert answered.returncode == 0, answered.stderr[-2000:]
    line = next(line for line in answered.stdout.splitlines() if line.startswith("PARSED "))
    parsed = json.loads(line.removeprefix("PARSED "))
    assert len(parsed) == len(cases)
    for (job, setup), args in zip(cases, parsed, strict=True):
        sequence = setup.tp if setup.attention == "ulysses" else 1
        expected: dict[str, object] = {
            "tensor_model_parallel_size": setup.tp // sequence,
            "context_parallel_size": setup.cp * sequence,
            "pipeline_model_parallel_size": setup.pp,
            "expert_model_parallel_size": setup.ep,
            "expert_tensor_parallel_size": setup.etp,
            "micro_batch_size": setup.micro_batch,
            "num_layers": job.model.layers,
            "hidden_size": job.model.hidden,
            "num_experts": job.model.experts,
            "moe_ffn_hidden_size": job.model.width,
            "moe_router_topk": job.model.top_k,
            "moe_expert_capacity_factor": job.capacity_factor,
        }
        if setup is laid:
            expected["pipeline_model_parallel_layout"] = setup.pipeline_layout
        assert {name: args[name] for name in expected} == expected, str(setup)


def _megatron_environment() -> dict[str, str]:
    path = os.environ.get("MEGATRON_LM_PATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    probe = _python(environment, "import megatron.training.arguments")
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        if path:
            pytest.fail(f"MEGATRON_LM_PATH={path} cannot be imported: {reason}")
        pytest.skip(f"no Megatron-LM here (set MEGATRON_LM_PATH to a checkout): {reason}")
    return environment


def _python(environment: dict[str, str], program: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        input=given,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=Path(__file__).parent,
    )


def test_megatron_has_the_flags_of_recipes_modules_and_state() -> None:
    job = Job(model=replace(catalog.load("deepseek-v3"), mtp_layers=1), gpus=256, global_batch=1024, sequence=4096)
    state = {"exp_avg_dtype": "bf16", "main_params_dtype": "fp16", "main_grads_dtype": "bf16"}
    planned = with_optimizer(
        with_fused_experts(with_fp8_activations(MEGATRON)),
        **state,
        fp8_param_gather=True,
        optimizer_offload_fraction=0.5,
    )
    setup = Setup(gpus=256, pp=4, ep=64, precision="fp8-blockwise", recompute="moe_act+mla_up_proj")
    flags = " ".join(megatron(job, setup, planned))
    for wanted in (
        "--mtp-num-layers 1",
        "--pipeline-model-parallel-layout Et*16|(t*16|)*2t*13mL",
        "--fp8-format e4m3 --fp8-recipe blockwise",
        "--recompute-granularity selective --recompute-modules moe_act mla_up_proj",
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype bf16",
        "--grad-reduce-in-bf16",
        "--fp8-param-gather",
        "--activation-func-fp8-input-store",
        "--use-transformer-engine-op-fuser",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ):
        assert wanted in flags
    plain = " ".join(megatron(job, replace(setup, precision="bf16", recompute="none")))
    assert not any(word in plain for word in ("fp8", "recompute", "dtype", "offload", "precision-aware"))


@pytest.mark.parametrize(
    ("graphs", "wanted"),
    [
        ("router", "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router moe_preprocess"),
        ("attention+router", "--cuda-graph-modules attn moe_router moe_preprocess"),
        ("full-iteration", "--cuda-graph-impl full_iteration"),
    ],
)
def test_megatron_has_the_flags_of_graphs(graphs: str, wanted: str) -> None:
    job = Job(model=catalog.load("mixtral-8x7b"), gpus=8, global_batch=64, sequence=4096)
    flags = " ".join(megatron(job, Setup(gpus=8, ep=8), with_graphs(MEGATRON, graphs)))
    assert wanted in flags
    assert "cuda-graph" not in " ".join(megatron(job, Setup(gpus=8, ep=8), MEGATRON))


def test_megatron_core_reads_a_layout_as_it_was_laid() -> None:
    """Its own parser reads it, that of the installed package."""
    own = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout").PipelineParallelLayerLayout
    for layout, pp, modules in (("Ettt|(tt|)*29m|L", 8, 1), ("Et*5|(t*4|)*14mL", 16, 1), ("E|(t|)*61L", 21, 0)):
        chunks = parse_layout(layout)
        read = own(written(chunks), pp)
        read.validate_layer_layout(61, modules)
        flat = [read.layout[chunk % pp][chunk // pp] for chunk in range(len(chunks))]
        named = [[kind.name for kind in kinds] for kinds in flat]
        assert [kinds.count("decoder") for kinds in named] == [chunk.layers for chunk in chunks]
        assert [kinds.count("mtp") for kinds in named] == [chunk.modules for chunk in chunks]
        assert named[0][0] == "embedding"
        assert named[-1][-1] == "loss"


# Megatron-Core's own configuration classes, which is what the installed package has of it

_CONFIGURE = """
import ast, dataclasses, json, sys
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

OTHER_NAMES = {
    "num_experts": "num_moe_experts", "swiglu": "gated_linear_unit", "norm_epsilon": "layernorm_epsilon",
}
OF_ARGUMENTS = {  # what pretrain_gpt.py takes for itself, and no configuration of Megatron-Core has
    "untie_embeddings_and_output_weights", "position_embedding_type", "vocab_size", "micro_batch_size", "global_batch_size",
    "seq_length", "max_position_embeddings", "group_query_attention", "num_layers_per_virtual_pipeline_stage",
    "use_megatron_fsdp", "ckpt_format", "rotary_base",
}

def value(words):
    if not words:
        return True
    found = []
    for word in words:
        try:
            found.append(ast.literal_eval(word))
        except (ValueError, SyntaxError):
            found.append(eval(word) if word.startswith("([") else word)
    return found if len(found) > 1 else found[0]

def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}

def configure(arguments):
    given, name = {}, ""
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = []
        else:
            given[name].append(word)
    values = {OTHER_NAMES.get(name, name): value(words) for name, words in given.items()}
    if values.pop("disable_bias_linear", False):
        values["add_bias_linear"] = False
    if "fp8_format" in values:
        values["fp8"] = values.pop("fp8_format")
    for modules in {"recompute_modules", "offload_modules"} & set(values):
        values[modules] = given[modules]
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    left = set(values)
    for each in (kind, DistributedDataParallelConfig, OptimizerConfig):
        own = {name: known for name, known in values.items() if name in fields(each)}
        if each is kind:
            own.setdefault("pipeline_dtype", __import__("torch").bfloat16)
            stages = values.get("num_layers_per_virtual_pipeline_stage")
            if stages:
                own["virtual_pipeline_model_parallel_size"] = own["num_layers"] // stages // own["pipeline_model_parallel_size"]
        each(**own)
        left -= set(own)
    unknown = left - OF_ARGUMENTS
    if unknown:
        raise ValueError(f"no configuration of Megatron-Core has {sorted(unknown)}")

found = []
for arguments in json.load(sys.stdin):
    try:
        configure(arguments)
        found.append("")
    except Exception as error:
        found.append(str(error) or type(error).__name__)
print("CONFIGURED " + json.dumps(found))
"""


def test_megatron_core_takes_the_flags_as_its_configuration() -> None:
    """The installed megatron-core's configurations of the model, of data parallelism and of the optimizer, with their checks."""
    pytest.importorskip("megatron.core")
    latent = Job(model=catalog.load("deepseek-v3"), gpus=256, global_batch=2048, sequence=4096)
    cases = [(JOB, setup) for setup in _SETUPS if setup.precision == "bf16"] + [  # FP8 asks Transformer Engine
        (latent, Setup(gpus=256, ep=16, pp=16, recompute="megascale")),
        (latent, Setup(gpus=256, ep=16, pp=8, vpp=2, recompute="full")),
        (
            latent,
            Setup(gpus=256, ep=16, pp=16, recompute="moe_act", offload="attn_norm+core_attn+attn_proj+expert_fc1"),
        ),
    ]
    flags = [megatron(job, setup) for job, setup in cases]
    broken = [[*flags[0], "--no-such-flag", "1"], [*flags[0], "--num-attention-heads", "47"]]
    broken.append([word for word in flags[-1] if word != "core_attn"])
    answered = _python({**os.environ}, _CONFIGURE, json.dumps([*flags, *broken]))
    assert answered.returncode == 0, answered.stderr[-2000:]
    line = next(line for line in answered.stdout.splitlines() if line.startswith("CONFIGURED "))
    *errors, unknown, uneven, without_core = json.loads(line.removeprefix("CONFIGURED "))
    assert errors == [""] * len(cases)
    assert "no_such_flag" in unknown
    assert "47" in uneven
    assert "attn_proj cannot be set" in without_core


_NO_FLAGS = {
    "phi-3.5-moe": "another vector of attention",  # biases of norms and of the output, beside none of experts
    "minimax-m2": "a norm of queries and keys across all heads",
}
"""Models that nothing but this keeps from Megatron-LM: by its flags it would train another number of parameters."""


def test_megatron_core_counts_the_parameters_of_the_flags_as_we_do() -> None:
    """Its GPTModel of the flags of every model that the export writes, on the meta device."""
    pytest.importorskip("megatron.core")
    exported, refused = {}, {}
    for name in catalog.names():
        model = catalog.load(name)
        try:
            exported[name] = megatron(Job(model=model, gpus=1, global_batch=8, sequence=4096), Setup(gpus=1))
        except UsageError as error:
            refused[name] = str(error)
    qwen3 = exported["qwen3-30b-a3b"]
    without_norms = [word for word in qwen3 if word != "--qk-layernorm"]
    program = (Path(__file__).parent / "megatron_core_count.py").read_text("utf-8")
    answered = _python({**os.environ}, program, json.dumps([*exported.values(), without_norms]))
    assert answered.returncode == 0, answered.stderr[-2000:]
    line = next(line for line in answered.stdout.splitlines() if line.startswith("PARAMETERS "))
    *counted, other = json.loads(line.removeprefix("PARAMETERS "))
    own = {name: parameters.count(catalog.load(name)).total for name in exported}
    assert dict(zip(exported, counted, strict=True)) == own
    assert other == own["qwen3-30b-a3b"] - 48 * 2 * 128
    assert len(exported) >= 17
    for name, why in _NO_FLAGS.items():
        assert why in refused[name]

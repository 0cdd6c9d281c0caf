"""A launch line of Megatron-LM becomes the options of an estimate: what the export writes comes back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import UsageError
from commlayer.readers.launch_lines import read_launch
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.exports import export
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import (
    MEGATRON,
    Software,
    with_dispatcher,
    with_fused_experts,
    with_graphs,
    with_optimizer,
)

JOB = Job(model=catalog.load("qwen3-235b-a22b"), gpus=128, global_batch=256, sequence=4096)
PLAIN = Setup(gpus=128, tp=4, ep=8, pp=8)
LAUNCH = "torchrun --nnodes=16 --nproc_per_node 8 pretrain_gpt.py \\\n --lr 3e-4 "


@pytest.mark.parametrize(
    ("setup", "dispatcher"),
    [
        (PLAIN, "nccl"),
        (replace(PLAIN, etp=2, cp=2, micro_batch=2, recompute="full", zero=0), "nccl"),
        (replace(PLAIN, recompute="moe_act+layernorm", precision="fp8-blockwise", exchange="all_gather"), "nccl"),
        (replace(PLAIN, pp=2, vpp=47, schedule="1f1b-overlap"), "deepep"),
        (replace(PLAIN, pp=4, vpp=1, pipeline_layout="Et*23|(t*24|)*2t*23L", zero=1), "hybridep"),
    ],
)
def test_what_is_exported_is_read_again(setup: Setup, dispatcher: str, tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    flags = export("megatron", JOB, setup, with_dispatcher(MEGATRON, dispatcher)).text
    path.write_text(LAUNCH + flags.replace("\n", " "), encoding="utf-8")
    asked = ["estimate", "-m", "qwen3-235b-a22b", "-c", "h100-eos", "--from-args", str(path), "--json"]
    result = CliRunner().invoke(main, asked, prog_name="commlayer")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    # layers that do not divide are written as a layout, which is the even one
    assert found["estimate"]["mapping"].split(", layout")[0] == str(setup).split(", layout")[0]
    assert setup.pipeline_layout in ("even", found["estimate"]["setup"]["pipeline_layout"])
    assert found["estimate"]["setup"]["zero"] == setup.zero
    assert found["job"]["gpus"] == 128
    assert found["job"]["global_batch"] == 256
    assert ("deepep" in found["software"]) == (dispatcher == "deepep")
    assert "not read of the launch line" in result.stderr
    assert "--lr" in result.stderr
    assert "--tensor-model-parallel-size" not in result.stderr


SOFTWARE = with_optimizer(
    with_graphs(with_dispatcher(with_fused_experts(MEGATRON), "hybridep"), "attention+router"),
    main_grads_dtype="bf16",
    exp_avg_dtype="bf16",
    optimizer_offload_fraction=0.5,
)


@pytest.mark.parametrize(
    ("software", "setup"),
    [
        (SOFTWARE, replace(PLAIN, recompute="full")),
        (with_graphs(MEGATRON, "attention"), replace(PLAIN, tp=4, etp=1, attention="ulysses")),
        (with_graphs(MEGATRON, "router"), replace(PLAIN, tp=2, etp=1, cp=2, attention="ulysses")),
        (with_graphs(with_dispatcher(MEGATRON, "hybridep"), "full-iteration"), PLAIN),
    ],
)
def test_graphs_optimizer_and_ulysses_are_read_again(software: Software, setup: Setup, tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(LAUNCH + export("megatron", JOB, setup, software).text.replace("\n", " "), encoding="utf-8")
    asked = ["estimate", "-m", "qwen3-235b-a22b", "-c", "h100-eos", "--from-args", str(path), "--json"]
    result = CliRunner().invoke(main, asked, prog_name="commlayer")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    estimate = Estimator(JOB, clusters.load("h100-eos"), software).estimate(setup)
    assert found["estimate"]["step_us"] == pytest.approx(estimate.step_us, rel=1e-5)
    assert found["estimate"]["memory_bytes"]["total"] == pytest.approx(estimate.memory.total, rel=1e-5)
    assert "although the step changes" not in result.stderr


SCRIPT = """#!/bin/bash
# --tensor-model-parallel-size 16
MODEL_ARGS=" \\
    --num-layers 94 \\
    --moe-router-dtype fp32 \\
"
PARALLEL=( --tensor-model-parallel-size 4
    --expert-tensor-parallel-size 1 --micro-batch-size 2
    --moe-shared-expert-overlap
)
EXTRA_ARGS=(--recompute-granularity selective
  --recompute-modules moe_act layernorm)
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS} --bf16 "${PARALLEL[@]}" \\
    ${EXTRA_ARGS[@]} --offload-modules moe_act ${MORE} "$@" 2>&1 | tee run.log
"""


def test_arrays_and_variables_of_a_script_are_read() -> None:
    launch = read_launch(SCRIPT)
    expected = {"tp": "4", "etp": "1", "micro_batch": "2", "recompute": "moe_act+layernorm", "offload": "moe_act"}
    assert {name: launch.options[name] for name in expected} == expected
    assert launch.options["shared_expert_overlap"] is True
    assert launch.shape == {"layers": "94"}
    assert launch.unread == ("--moe-router-dtype",)
    assert any("not say what they hold: ${MORE}, $@" in note for note in launch.notes())


def test_flags_that_change_the_step_are_named_apart() -> None:
    full = "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    launch = read_launch(f"x --micro-batch-size 1 {full} --cuda-graph-impl local --tp-comm-overlap --lr 1")
    assert set(launch.changing) == {
        *("--recompute-method", "--recompute-num-layers"),
        *("--cuda-graph-impl", "--tp-comm-overlap"),
    }
    assert launch.unread == ("--lr",)
    assert "cuda_graphs" not in launch.options


def test_variables_hold_what_the_text_or_the_environment_says() -> None:
    text = (
        "TP=4\n# TP=2\nEP='8'\nPP=$TP\ntorchrun x --tensor-model-parallel-size $TP --expert-model-parallel-size=${EP} "
    )
    text += "--pipeline-model-parallel-size ${PP} --micro-batch-size ${MBS:-2} --seq-length $SEQ --data-path $DATA"
    launch = read_launch(text, {"SEQ": "4096", "TP": "16"})
    expected = {"tp": "4", "ep": "8", "pp": "4", "micro_batch": "2", "sequence": "4096"}
    assert {name: launch.options[name] for name in expected} == expected
    assert read_launch(text, {"SEQ": "4096", "MBS": "3"}).options["micro_batch"] == "3"
    with pytest.raises(UsageError, match=r"--seq-length of the launch line: .* what \$SEQ holds"):
        read_launch(text)


LINE = "torchrun pretrain_gpt.py --micro-batch-size"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"A=1; B=6\n{LINE} ${{A}}${{B}}", "16"),
        (f"{LINE} ${{A-3}}", "3"),
        (f"A=\n{LINE} ${{A:-3}}", "3"),
        (f"export B=4 A=3\n{LINE} $A", "3"),
        (f"run() {{\n  local A=3  # it's one\n{LINE} $A\n}}", "3"),
        (f"A=3; A=3\n{LINE} $A\nA=4", "3"),
        (f"x --foo=A=4 -D A=5\nA=3\n{LINE} $A", "3"),
        (f"case x in a) B=1 ;; esac; if (( 1 )); then B=1; fi\nA=3\n{LINE} $A", "3"),
    ],
)
def test_a_variable_is_replaced_as_bash_does(script: str, expected: str) -> None:
    assert read_launch(script).options["micro_batch"] == expected


@pytest.mark.parametrize(
    ("script", "unread"),
    [
        *((f"A=16\n{LINE} {word}", word) for word in ("${A%6}", "${A/6/7}", "${A:0:1}", "${A:+4}", "${#A}", "${A#1}")),
        *((f"{LINE} {word}", word) for word in ("$((2*4))", "$(nproc)", "`nproc`")),
        (f"A=4\nif [ x = y ]; then A=8; fi\n{LINE} $A", "$A"),
        (f"if [ x = y ]; then\n  A=8\nfi\n{LINE} ${{A:-4}}", "$A"),
        (f"case x in a) A=4 ;; esac\n{LINE} $A", "$A"),
        (f'[ -z "$A" ] && A=4\n{LINE} $A', "$A"),
        (f"for A in 1 2; do\n{LINE} $A\ndone", "$A"),
        (f"for ((i=0; i<2; i++)); do A=8; done\n{LINE} $A", "$A"),
        (f"A=4\nA=8\n{LINE} $A", "$A"),
        (f"A=4\nA+=4\n{LINE} $A", "$A"),
        (f"A=4 {LINE} $A", "$A"),
        (f"A=$((2*4))\n{LINE} $A", "$A"),
        (f"A=$(nproc)\n{LINE} $A", "$A"),
        (f"A=$(nproc)0\n{LINE} $A", "$A"),
        (f"A=`nproc --all`\n{LINE} $A", "$A"),
        (f"A=(4 8)\n{LINE} $A", "$A"),
    ],
)
def test_what_only_bash_knows_is_refused(script: str, unread: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_launch(script, {"A": "99"} if "A=" in script else {})
    message = f"--micro-batch-size of the launch line: neither the text nor the environment says what {unread} holds"
    assert message in str(refused.value)
    assert "as echo prints it" in str(refused.value)


@pytest.mark.parametrize("script", [f"{LINE} $A\nA=4", f"x --foo=A=4\n{LINE} $A"])
def test_what_a_script_does_not_assign_is_of_the_environment(script: str) -> None:
    assert read_launch(script, {"A": "99"}).options["micro_batch"] == "99"


def test_a_list_in_a_variable_is_several_values() -> None:
    line = f"{LINE} 1 --recompute-granularity selective --recompute-modules"
    assert read_launch(f'M="moe_act layernorm"\n{line} $M').options["recompute"] == "moe_act+layernorm"
    assert read_launch(f'M="moe_act layernorm"\n{line} mlp $M').options["recompute"] == "mlp+moe_act+layernorm"


def test_a_misspelt_flag_is_asked_about() -> None:
    notes = list(read_launch("x --micro-batch-size 1 --seq-lenght 4096 --ffn-hidden-size 8 --lr 1").notes())
    assert notes[0] == "--seq-lenght of the launch line is not read: did you mean --seq-length?"
    assert not any("did you mean" in note for note in notes[1:])


@pytest.mark.parametrize(
    "flag", ["fp4-recipe", "fp4-param-gather", "no-overlap-grad-reduce", "tp-comm-overlap-ag", "tp-comm-overlap-rs"]
)
def test_a_flag_of_megatron_is_not_taken_for_another(flag: str) -> None:
    launch = read_launch(f"x --micro-batch-size 1 --{flag}")
    assert launch.changing == (f"--{flag}",)
    assert not launch.misspelt


@pytest.mark.parametrize("flag", ["fp16-recipe", "no-overlap-param-gather", "fp4-recipes"])
def test_no_other_number_or_negation_is_asked_about(flag: str) -> None:
    notes = "".join(read_launch(f"x --micro-batch-size 1 --{flag}").notes())
    assert "did you mean --fp8" not in notes
    assert "did you mean --overlap" not in notes


def test_an_optimizer_that_is_not_offloaded_has_no_fraction() -> None:
    fraction = "x --micro-batch-size 1 --optimizer-offload-fraction 0.5"
    assert "optimizer_offload_fraction" not in read_launch(fraction).options
    assert read_launch("x --micro-batch-size 1 --optimizer-cpu-offload").options["optimizer_offload_fraction"] == "1.0"


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("x --micro-batch-size 1 --sequence-parallel $MORE", ("$MORE",)),
        ("x --sequence-parallel $MORE --micro-batch-size 1", ("$MORE",)),
        ("MORE=$(cat flags)\nx --micro-batch-size 1 $MORE", ("$MORE",)),
        ("x --micro-batch-size 1 --save $FOLDER", ()),
        ("MORE='--sequence-parallel'\nx --micro-batch-size 1 --bf16 $MORE", ()),
    ],
)
def test_what_only_the_shell_knows_is_named_also_behind_a_switch(script: str, unknown: tuple[str, ...]) -> None:
    assert read_launch(script).unknown == unknown


def test_flags_of_a_launch_line_inside_a_substitution_are_read() -> None:
    launch = read_launch(
        "OUT=$(srun --nodes 2 torchrun pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 2)"
    )
    assert (launch.options["micro_batch"], launch.options["tp"]) == ("1", "2")


def test_an_option_wins_over_the_launch_line() -> None:
    text = LAUNCH + export("megatron", JOB, PLAIN).text
    asked = ["estimate", "-m", "qwen3-235b-a22b", "-c", "h100-eos", "--from-args", "-", "--micro-batch", "2", "--json"]
    found = json.loads(CliRunner().invoke(main, asked, input=text, prog_name="commlayer").stdout)
    assert found["estimate"]["setup"]["micro_batch"] == 2
    assert found["estimate"]["setup"]["tp"] == 4


def test_experts_are_split_as_attention_unless_the_line_says_otherwise() -> None:
    assert read_launch("x --tensor-model-parallel-size 2").options["etp"] == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python train.py --lr 1", "expected a launch line of Megatron-LM"),
        ("x --micro-batch-size 1 --fp8-format 'e4m3", "quote it as a shell would"),
        (
            "x --micro-batch-size 1 --nproc-per-node $GPUS",
            "--nproc-per-node of the launch line: neither the text nor the environment says what $GPUS holds",
        ),
        (
            "x --micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 2",
            "--num-layers-per-virtual-pipeline-stage 2 of the launch line: expected --num-layers beside it",
        ),
        (
            "x --micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 8 --num-layers 4",
            "expected chunks that 1 stages can have of 4 layers",
        ),
        (
            "x --tensor-model-parallel-size",
            "--tensor-model-parallel-size of the launch line: expected a value behind it",
        ),
        ("x --micro-batch-size two", "--micro-batch-size of the launch line: expected a whole number"),
        ("x --micro-batch-size 1 --moe-expert-capacity-factor nan", "--moe-expert-capacity-factor of the launch line"),
        ("x --micro-batch-size 1 --exp-avg-dtype bf17", "--exp-avg-dtype of the launch line: expected one of"),
        (
            "x --micro-batch-size 1 --recompute-granularity selective --recompute-modules mla",
            "--recompute-modules of the launch line: expected some of core_attn",
        ),
        *(
            (
                f"x --micro-batch-size 1 {flag} $L",
                f"{flag.split()[-1]} of the launch line: neither the text nor the environment says what $L holds",
            )
            for flag in (
                *("--num-layers", "--hidden-size", "--num-experts", "--moe-router-topk"),
                *("--recompute-granularity selective --recompute-modules", "--offload-modules"),
                *("--hierarchical-context-parallel-sizes", "--cuda-graph-impl local --cuda-graph-modules"),
            )
        ),
        (
            "x --micro-batch-size 1 --recompute-granularity selective --recompute-modules mlp a$L",
            "says what $L holds",
        ),
        (
            "x --micro-batch-size 1 --hierarchical-context-parallel-sizes x y",
            "--hierarchical-context-parallel-sizes of the launch line: expected a whole number of at least 1, got 'x'",
        ),
        (
            "x --micro-batch-size 1 --context-parallel-size 8 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2",
            "expected two sizes whose product is --context-parallel-size 8, got 2 2",
        ),
        (
            "x --micro-batch-size 1 --optimizer-offload-fraction 3",
            "--optimizer-offload-fraction of the launch line: expected a number from 0 to 1, got '3'",
        ),
        (
            "x --micro-batch-size 1 --offload-modules foo",
            "--offload-modules of the launch line: expected some of attn_norm",
        ),
        (
            "x --micro-batch-size 1 --moe-flex-dispatcher-backend foo",
            "--moe-flex-dispatcher-backend of the launch line: expected one of deepep, hybridep",
        ),
        ("x --micro-batch-size 1 --moe-token-dispatcher-type ring", "expected one of allgather, alltoall, flex"),
        (
            f"{LINE} 1 --tensor-model-parallel-size 2\n{LINE} 1 --tensor-model-parallel-size 4",
            "expected one launch line, got 2 that differ",
        ),
        (
            f"{LINE} 1 --bf16; echo --tensor-model-parallel-size 4",
            "--tensor-model-parallel-size: expected it in the launch line, got it behind echo",
        ),
        (f"python tools/prepare.py --seq-length=64 && {LINE} 1", "--seq-length: expected it in the launch line"),
    ],
)
def test_a_line_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_launch(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "script",
    [
        f"pip install torchrun\nif test $DEBUG; then {LINE} 1 --tp 1 2>&1 | tee log; else {LINE} 1 --tp 1; fi",
        f"ARGS=(--seq-length 64)\nexport MORE='--seq-length 64'\nsbatch --nodes 4 other.sh\n{LINE} 1 ${{ARGS[@]}};",
        f"{LINE} 1\n--seq-length 64",
    ],
)
def test_a_script_has_one_launch_line(script: str) -> None:
    launch = read_launch(script)
    assert launch.options["micro_batch"] == "1"
    assert not any(flag.endswith(";") for flag in launch.unread)


def test_a_line_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="layers=48, but qwen3-235b-a22b has 94"):
        read_launch("x --micro-batch-size 1 --num-layers 48").check(JOB.model)

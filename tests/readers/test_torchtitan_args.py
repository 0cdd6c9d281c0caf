"""A launch line of torchtitan, with the configuration that it overrides, becomes the options of an estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.errors import UsageError
from commlayer.readers.launch_lines import read_launch
from commlayer.scheduler.mapping import catalog
from commlayer.scheduler.mapping.exports import export
from commlayer.scheduler.mapping.job import Job, Setup

CONFIG = """
[metrics]
log_freq = 10
[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
LAUNCH = "torchrun --nnodes 16 --nproc_per_node=8 -m torchtitan.train "
JOB = Job(model=catalog.load("qwen3-235b-a22b"), gpus=128, global_batch=256, sequence=4096)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "model.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def test_options_of_the_line_win_over_the_file(config: Path) -> None:
    launch = read_launch(f"{LAUNCH} --job.config_file {config} --parallelism.expert-parallel-degree=16")
    expected = {
        "model_name": "deepseek-v3",
        "pp": "4",
        "vpp": "2",
        "ep": "16",
        "etp": "1",
        "tp": "1",
        "gpus": 128,
        "micro_batch": "1",
        "global_batch": "128",
        "sequence": "4096",
        "recompute": "full",
        "zero": "2",
    }
    assert {name: launch.options[name] for name in expected} == expected
    assert launch.changing == (f"compile.enable of {config}",)
    assert launch.unread == (f"metrics.log_freq of {config}",)
    with pytest.raises(UsageError, match="layers=61, but qwen3-235b-a22b has 94"):
        launch.check(JOB.model)


def test_the_script_of_torchtitan_hands_variables_on(config: Path) -> None:
    launch = read_launch(f"NGPU=8 CONFIG_FILE={config} ./run_train.sh --training.global_batch_size 64")
    assert launch.options["gpus"] == 8
    assert launch.options["global_batch"] == "64"


@pytest.mark.parametrize(
    "setup",
    [
        Setup(gpus=128, tp=4, ep=8, pp=8, zero=3, recompute="full"),
        Setup(gpus=128, tp=4, etp=4, cp=2, zero=3),
        Setup(gpus=128, ep=4, pp=4, vpp=6, zero=2, micro_batch=2),
        Setup(gpus=128, ep=1, tp=4, etp=4, pp=2, zero=0),
    ],
)
def test_what_is_exported_is_read_again(setup: Setup) -> None:
    options = "--model.name qwen3 --model.flavor 235B-A22B " + export("torchtitan", JOB, setup).text.replace("\n", " ")
    asked = ["estimate", "-c", "h100-eos", "--from-args", "-", "--json"]
    result = CliRunner().invoke(main, asked, input=f"{LAUNCH} {options}", prog_name="commlayer")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["estimate"]["mapping"].split(", layout")[0] == str(setup)
    assert (found["job"]["gpus"], found["job"]["global_batch"], found["job"]["sequence"]) == (128, 256, 4096)
    assert "is of torchtitan" in result.stderr


def test_shards_leave_what_the_other_degrees_do_not_take() -> None:
    line = f"{LAUNCH} --training.local_batch_size 2 --parallelism.data_parallel_shard_degree"
    assert read_launch(f"{line} -1 --parallelism.tensor_parallel_degree 4").options["global_batch"] == "64"
    assert read_launch("x --parallelism.data_parallel_shard_degree 4").options["gpus"] == 4
    both = read_launch(f"{line} 16 --parallelism.data_parallel_replicate_degree 8")
    assert both.changing == ("--parallelism.data_parallel_replicate_degree",)
    alone = read_launch(f"{line} 1 --parallelism.data_parallel_replicate_degree 128")
    assert alone.options["zero"] == "0"
    assert not alone.changing


def test_what_is_only_near_is_said() -> None:
    launch = read_launch(
        f"{LAUNCH} --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 2"
    )
    assert launch.options["recompute"] == "megascale"
    assert any("megascale, the nearest" in note for note in launch.notes())
    assert launch.changing == ("--activation_checkpoint.selective_ac_option",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--parallelism.tensor_parallel_degree two",
            "--parallelism.tensor_parallel_degree of the launch line: expected",
        ),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule GPipe", "one of 1F1B"),
        ("--parallelism.data_parallel_shard_degree 4", "product is the 128 GPUs of the launch line, got 4"),
        ("--parallelism.tensor_parallel_degree 3", "expected a multiple of the 3 GPUs"),
        ("--activation_checkpoint.mode some", "expected one of none, full, selective"),
        ("--job.config_file missing.toml", "--job.config_file of the launch line: expected a file in TOML"),
        ("--module os --config path.join", "expected a model of torchtitan and one of its configurations"),
        ("--module nowhere --config debug", "cannot ask torchtitan for this configuration"),
    ],
)
def test_a_bad_value_is_named_by_its_option(options: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_launch(LAUNCH + options)
    assert message in str(refused.value)


def test_a_bad_value_is_named_by_its_key(config: Path) -> None:
    config.write_text(CONFIG.replace("seq_len = 4096", 'seq_len = "4K"'), encoding="utf-8")
    with pytest.raises(UsageError, match=r"training.seq_len of .*model.toml: expected a whole number"):
        read_launch(f"{LAUNCH} --job.config_file {config}")
    config.write_text("[parallelism\n", encoding="utf-8")
    with pytest.raises(UsageError, match="expected a file in TOML"):
        read_launch(f"{LAUNCH} --job.config_file {config}")


def test_a_configuration_of_torchtitan_is_asked_for() -> None:
    pytest.importorskip("torchtitan.models.qwen3")
    launch = read_launch(f"{LAUNCH} --module qwen3 --config qwen3_30b_a3b activation_checkpoint:full")
    expected = {"model_name": "qwen3-30b-a3b", "recompute": "full", "gpus": 128, "zero": "3"}
    assert {name: launch.options[name] for name in expected} == expected


def test_a_setup_that_is_replicated_is_read_as_such() -> None:
    setup = Setup(gpus=128, tp=4, etp=4, zero=0)
    launch = read_launch(LAUNCH + export("torchtitan", JOB, setup).text.replace("\n", " "))
    assert launch.options["zero"] == "0"

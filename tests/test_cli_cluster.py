"""The commands that run on a cluster: profile, bench and demo, on emulated ones and as ranks of a torchrun-style start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles.nccl_table import COLUMNS
from commlayer.profiles.profile import load_profile, parse_profile
from commlayer.testing.synthetic import synthetic_profile

SMALL = ("-b", "16KiB", "-e", "64KiB", "-f", "4")
WAYS = {"torch.distributed", "flat", "hierarchical", "DeepSpeed drop/gather", "MoNTA released, 4 chunks"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMMLAYER_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def shell(*arguments: object, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: it forks ranks, and its stdout must hold nothing but its result."""
    command = [sys.executable, "-c", "from commlayer.cli.main import main; main(prog_name='commlayer')"]
    result = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few rounds as are asked for: ranks are forks of this process."""
    monkeypatch.setattr("commlayer.bench._SIZE_BUDGET_US", 0.0)
    monkeypatch.setattr("commlayer.bench._PAIR_BUDGET_US", 0.0)


def here(*arguments: object) -> str:
    """stdout of a command that succeeds in this process."""
    result = CliRunner().invoke(main, [*map(str, arguments)], prog_name="commlayer")
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, status: int = 2) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)], prog_name="commlayer")
    assert result.exit_code == status, result.output
    return " ".join(result.stderr.split())


def test_profile_measures_and_writes_what_it_measured(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("p.json", "t.json", "p.svg")}
    options = ("-n", "3", "-o", files["p.json"], "-J", files["t.json"], "--picture", files["p.svg"], "--json")
    result = shell("profile", "--emulate", "2x2", "--inter", "4gbit", "--name", "mine", *SMALL, *options)
    profile = parse_profile(result.stdout.encode(), "stdout")
    assert profile == load_profile(files["p.json"])
    assert (profile.name, profile.kind, profile.topology, profile.gather) == ("mine", "emulated", "2x2", "remote")
    assert profile.environment["inter"] == "4gbit"
    assert profile.peaks.inter_gbps == pytest.approx(0.25)  # 4 Gbit/s are 0.5 GB/s, shared by two ranks
    assert {(c.collective, c.link.value, c.group_size) for c in profile.curves} == {
        ("all_to_all", "inter", 2),
        ("all_gather", "intra", 2),
        ("copy", "device", 1),
    }
    table = json.loads(files["t.json"].read_text())
    assert [row["size_bytes"] for row in table if row["collective"] == "all_to_all"] == [16384, 65536]
    assert all(row["num_wrong"] == 0 for row in table)
    assert "<svg" in files["p.svg"].read_text()


def test_profile_prints_nccl_tests_columns() -> None:
    output = shell("profile", "--emulate", "2x1", "--inter", "4gbit", "-b", "4KiB", "-e", "4KiB", "-n", "2").stdout
    assert "all_to_all on inter, group size 2" in output
    assert "all_gather" not in output  # one rank a node has nobody to gather with
    for column in COLUMNS:
        assert column.split()[0] in output
    assert "fingerprint" in output


@pytest.mark.usefixtures("_quick")
def test_bench_compares_every_way_with_torch(tmp_path: Path) -> None:
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "p.json")
    outputs = ("-o", tmp_path / "r.json", "--report", tmp_path / "r.html")
    common = ("bench", "--emulate", "2x2", "--inter", "4gbit", "--profile", tmp_path / "p.json", "-n", "1")
    result = json.loads(here(*common, *SMALL, "--all-forms", *outputs, "--json"))
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert (result["topology"], result["is_emulated"], result["inter"]) == ("2x2", True, "4gbit")
    assert [point["logical_bytes"] for point in result["points"]] == [16384, 65536]
    for point in result["points"]:
        names = {row["name"] for row in point["rows"]}
        assert names >= WAYS | {"hierarchical whole"}
        assert sum(row["is_chosen"] for row in point["rows"]) == 1
        assert all(row["num_wrong"] == 0 and row["p50_us"] > 0 for row in point["rows"])
    assert "predicted" in (tmp_path / "r.html").read_text()


def test_bench_without_namespaces_claims_no_speed(tmp_path: Path) -> None:
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "p.json")
    common = ("bench", "--emulate", "2x2", "--profile", tmp_path / "p.json", "-n", "1", "-b", "4KiB", "-e", "4KiB")
    result = shell(*common, COMMLAYER_EMULATION="loopback")
    assert "no shaped links here" in result.stdout
    assert "warning" in result.stderr or "loopback" in result.stderr


def test_ranks_of_a_torchrun_style_start_print_once(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from commlayer.cli.main import main; main(prog_name='commlayer')"]
    profile = ("profile", "-b", "4KiB", "-e", "4KiB", "-n", "2", "-o", tmp_path / "p.json", "--json")
    cluster = ("emulate", "--nodes", "2", "--ranks-per-node", "2", "--inter", "4gbit", "--timeout", "60s", "--")
    measured = parse_profile(shell(*cluster, *program, *profile).stdout.encode(), "stdout")
    assert (measured.topology, measured.kind) == ("2x2", "measured")
    assert measured == load_profile(tmp_path / "p.json")


@pytest.mark.usefixtures("_quick")
def test_demo_measures_proves_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cli.demo._SIZES", (4 << 10, 16 << 10))
    monkeypatch.setattr("commlayer.cli.demo._MAX_CHUNKS", 2)
    output = here("demo", "--shape", "2x2", "--inter", "4gbit", "-o", tmp_path / "out")
    assert "4 KiB a rank: " in output
    assert "16 KiB a rank on 2x2, inter 4gbit" in output
    assert "bit-equal" in output
    written: dict[str, Any] = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"profile.json", "result.json", "report.html", "trace.json"}
    assert load_profile(tmp_path / "out" / "profile.json").topology == "2x2"
    assert json.loads(written["trace.json"])["traceEvents"]
    assert written["report.html"].count("<svg") >= 3


# What is refused, before anything runs


def test_a_cluster_command_without_a_cluster_says_how_to_get_one() -> None:
    for command in ("profile", "bench"):
        words = refused(command)
        assert "torchrun --nnodes 2 --nproc-per-node 8 --no-python commlayer" in words
        assert "--emulate 2x4" in words


def test_rates_without_an_emulated_cluster_are_refused() -> None:
    assert "add --emulate" in refused("bench", "--inter", "400mbit")


def test_a_rate_that_means_two_things_is_refused() -> None:
    assert "400mbps" in refused("bench", "--emulate", "2x2", "--inter", "400mbps")


def test_a_profile_of_another_shape_is_refused() -> None:
    words = refused("bench", "--emulate", "2x4", "--profile", "monta-a800-2x8")
    assert "--emulate 2x4: profile 'monta-a800-2x8' is of shape 2x8" in words


def test_an_unknown_profile_is_refused_with_the_closest_names() -> None:
    assert "monta-a800-2x8" in refused("bench", "--emulate", "2x8", "--profile", "monta-a80")


@pytest.mark.parametrize("option", ["-o", "--picture", "-J"])
def test_a_folder_that_does_not_exist_is_found_before_measuring(option: str, tmp_path: Path) -> None:
    assert "does not exist" in refused("profile", "--emulate", "2x4", option, tmp_path / "no" / "x.svg")


def test_a_picture_of_an_unknown_kind_is_found_before_measuring(tmp_path: Path) -> None:
    assert ".svg, .png, .pdf, got .bmp" in refused("profile", "--emulate", "2x4", "--picture", tmp_path / "x.bmp")


def test_without_matplotlib_a_report_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for arguments in (("bench", "--emulate", "2x4", "--report", tmp_path / "x.html"), ("demo", "-o", tmp_path)):
        assert "pip install 'commlayer[plots]'" in refused(*arguments)

"""The commands that run on a cluster: measure, bench and demo, on emulated ones and as ranks of a torchrun-style start."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner
from synthetic_profiles import synthetic_profile

from commlayer.cli.main import main
from commlayer.cli.measure import link_rates
from commlayer.cli.place import Place, emulation
from commlayer.measure.results import BenchResult
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.nccl_table import COLUMNS, NcclRow
from commlayer.profiles.profile import parse_profile, read_profile
from commlayer.profiles.sweep import Point, summarize

SMALL = ("-b", "16KiB", "-e", "64KiB", "-f", "4")
PROGRAM = (sys.executable, "-c", "from commlayer.cli.main import main; main(prog_name='commlayer')")
QUICK = (
    sys.executable,
    "-c",
    "from commlayer.measure import benchmark; benchmark._SIZE_BUDGET_US = benchmark._PAIR_BUDGET_US = 0.0; "
    + PROGRAM[2],
)
"""The same, where a benchmark runs as few rounds as are asked for: it would go on for seconds to know its medians better."""
WAYS = {"torch.distributed", "flat", "hierarchical"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMMLAYER_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


def shell(
    *arguments: object, program: tuple[str, ...] = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: it forks ranks, and its stdout must hold nothing but its result."""
    result = subprocess.run(
        [*program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds are as few as are asked for: ranks are forks of this process."""
    monkeypatch.setattr("commlayer.measure.benchmark._SIZE_BUDGET_US", 0.0)
    monkeypatch.setattr("commlayer.measure.benchmark._PAIR_BUDGET_US", 0.0)


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
    result = shell("measure", "--emulate", "2x2", "--inter", "4gbit", "--name", "mine", *SMALL, *options)
    profile = parse_profile(result.stdout.encode(), "stdout")
    assert profile == read_profile(files["p.json"])
    assert (profile.name, profile.kind, profile.topology, profile.gather) == ("mine", "emulated", "2x2", "remote")
    assert profile.environment["inter"] == "4gbit"
    assert profile.peaks.inter_gbps == pytest.approx(0.25)  # 4 Gbit/s are 0.5 GB/s, shared by two ranks
    assert {(c.collective, c.link.value, c.group_size) for c in profile.curves} >= {
        ("all_reduce", "inter", 4),  # the backend's own calls: all ranks, a node, one rank on each node
        ("all_reduce", "intra", 2),
        ("all_reduce", "inter", 2),
        ("all_to_all", "inter", 2),
        ("all_to_all_single", "inter", 2),
        ("all_gather", "intra", 2),
        ("copy", "device", 1),
    }
    assert profile.environment["emulated"] == "netns"
    assert "on an emulated cluster: 2x2, inter 4gbit a node, intra unshaped. " in profile.source
    table = json.loads(files["t.json"].read_text(encoding="utf-8"))
    assert all(row["half_width_percent"] is None for row in table)  # three times have no interval, JSON no infinity
    assert all(row["num_outliers"] in (0, 1) for row in table)
    steps = [(row["link"], row["group_size"]) for row in table if row["collective"] == "all_to_all"]
    assert steps.count(("inter", 2)) == 2  # of these two sizes
    assert {row["size_bytes"] for row in table if row["collective"] == "all_to_all_single"} == {16384, 65536}
    assert all(row["num_wrong"] == 0 for row in table)
    assert "<svg" in files["p.svg"].read_text(encoding="utf-8")


def test_profile_prints_nccl_tests_columns() -> None:
    output = here("measure", "--emulate", "2x1", "--inter", "4gbit", "-b", "4KiB", "-e", "4KiB", "-n", "2")
    assert "all_to_all on inter, group size 2" in output
    assert " on intra, " not in output  # one rank a node has nobody to talk to there
    for column in COLUMNS:
        assert column.split()[0] in output
    assert "fingerprint" in output


@pytest.mark.usefixtures("_quick")
def test_bench_compares_every_way_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "p.json")
    outputs = ("-o", tmp_path / "r.json", "--report", tmp_path / "r.html")
    common = ("bench", "--emulate", "2x2", "--inter", "4gbit", "--profile", tmp_path / "p.json", "-n", "1")
    monkeypatch.setattr("commlayer.measure.benchmark.run_environment", lambda: {"date": "the run's"})
    result = json.loads(here(*common, *SMALL, "--all-forms", *outputs, "--json"))
    assert result == json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (result["topology"], result["is_emulated"], result["inter"]) == ("2x2", True, "4gbit")
    assert [point["logical_bytes"] for point in result["points"]] == [16384, 65536]
    rates = {"emulated": "netns", "inter": "4gbit", "intra": "unshaped", "delay_us": "0"}
    assert result["environment"] == {"date": "the run's", **rates}
    for point in result["points"]:
        # half of the buffer over 0.5 GB/s, which is not the rate of the made-up profile
        assert point["wire_limit_us"] == pytest.approx(point["logical_bytes"] / 2 / 500)
        names = {row["name"] for row in point["rows"]}
        assert names >= WAYS | {"hierarchical whole"}
        assert sum(row["is_chosen"] for row in point["rows"]) == 1
        assert all(row["num_wrong"] == 0 and row["p50_us"] > 0 for row in point["rows"])
    assert "predicted" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_bench_without_namespaces_claims_no_speed(tmp_path: Path) -> None:
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "p.json")
    common = ("bench", "--emulate", "2x2", "--profile", tmp_path / "p.json", "-n", "1", "-b", "4KiB", "-e", "4KiB")
    result = shell(*common, program=QUICK, COMMLAYER_EMULATION="loopback")
    assert "no links known to be shaped here" in result.stdout
    assert "ratio" not in result.stdout
    assert "inter" not in result.stdout.split("4 KiB a rank on 2x2")[1].splitlines()[0]
    assert "warning" in result.stderr or "loopback" in result.stderr


@pytest.mark.usefixtures("_quick")
def test_bench_runs_sizes_that_are_no_power_of_two(tmp_path: Path) -> None:
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "p.json")
    common = ("bench", "--emulate", "2x2", "--inter", "4gbit", "--profile", tmp_path / "p.json", "-n", "1", "--json")
    result = json.loads(here(*common, "-b", "99999", "-e", "99999"))
    (point,) = result["points"]
    assert point["logical_bytes"] == 100_000  # the nearest that two nodes divide
    assert all(row["num_wrong"] == 0 for row in point["rows"])
    assert {row["kind"] for row in point["rows"]} == {"torch", "plan"}


def test_a_wire_of_unknown_rate_has_no_limit_and_no_ratios(tmp_path: Path) -> None:
    synthetic_profile(nodes=2, ranks_per_node=1).save(tmp_path / "p.json")
    cluster = (
        "emulate",
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--inter",
        "4gbit",
        "--timeout",
        "60s",
        "--no-prefix",
        "--",
    )
    bench = ("bench", "--profile", tmp_path / "p.json", "-n", "1", "-b", "4KiB", "-e", "4KiB")
    output = shell(*cluster, *QUICK, *bench, "-o", tmp_path / "r.json").stdout
    assert "ratio" not in output
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (result["is_emulated"], result["inter"]) == (True, None)
    assert result["environment"]["emulated"] == "netns"
    assert [point["wire_limit_us"] for point in result["points"]] == [None]


def test_ranks_of_a_torchrun_style_start_print_once(tmp_path: Path) -> None:
    profile = ("measure", "-b", "4KiB", "-e", "4KiB", "-n", "2", "-o", tmp_path / "p.json", "--json")
    cluster = (
        "emulate",
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--inter",
        "4gbit",
        "--timeout",
        "60s",
        "--no-prefix",
        "--",
    )
    measured = parse_profile(shell(*cluster, *PROGRAM, *profile).stdout.encode(), "stdout")
    assert (measured.name, measured.topology, measured.kind) == ("emulated-2x2", "2x2", "emulated")
    assert "at rates not known here" in measured.source
    assert measured == read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("by", ["--emulate", "emulate"])
def test_a_profile_of_loopback_says_that_its_times_mean_nothing(by: str) -> None:
    profile = ("-b", "4KiB", "-e", "4KiB", "-n", "2", "--json")
    cluster = (
        "emulate",
        "--mode",
        "loopback",
        "--nodes",
        "2",
        "--ranks-per-node",
        "1",
        "--no-prefix",
        "--",
        *PROGRAM,
        "measure",
    )
    command = ("measure", "--emulate", "2x1", "--inter", "4gbit") if by == "--emulate" else cluster
    measured = parse_profile(shell(*command, *profile, COMMLAYER_EMULATION="loopback").stdout.encode(), "stdout")
    assert measured.kind == "emulated"
    assert "on loopback, unshaped" in measured.source
    assert "its times mean nothing" in measured.source
    assert "None" not in measured.source
    rates = {"emulated": "loopback", "inter": "unshaped", "intra": "unshaped", "delay_us": "0"}
    assert rates.items() <= measured.environment.items()


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("netns", "netns"), ("loopback", "loopback")])
def test_the_ranks_say_what_is_emulated(
    value: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("COMMLAYER_EMULATED", value)
    assert emulation() == expected
    assert link_rates(Place(None)) == ({} if value is None else link_rates(Place(None)) | {"emulated": value})


@pytest.mark.usefixtures("_quick")
def test_demo_measures_proves_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cli.demo._SIZES", (4 << 10, 16 << 10))
    monkeypatch.setattr("commlayer.cli.demo._MAX_CHUNKS", 2)
    output = here("demo", "--shape", "2x2", "--inter", "4gbit", "-o", tmp_path / "out")
    assert "4 KiB a rank: " in output
    assert "16 KiB a rank on 2x2, inter 4gbit" in output
    assert "bit-equal" in output
    written: dict[str, Any] = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"profile.json", "result.json", "report.html", "trace.json"}
    assert read_profile(tmp_path / "out" / "profile.json").topology == "2x2"
    assert json.loads(written["trace.json"])["traceEvents"]
    assert written["report.html"].count("<svg") >= 3


@pytest.mark.usefixtures("_quick")
def test_demo_on_loopback_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cli.demo._SIZES", (4 << 10, 16 << 10))
    monkeypatch.setattr("commlayer.cli.demo._MAX_CHUNKS", 2)
    monkeypatch.setenv("COMMLAYER_EMULATION", "loopback")
    # three nodes: the sizes are rounded to what they divide
    result = CliRunner().invoke(main, ["demo", "--shape", "3x1", "-o", str(tmp_path)], prog_name="commlayer")
    assert result.exit_code == 0, result.output
    assert "3x1 on loopback" in result.stderr
    assert "inter 400mbit" not in result.output
    assert "ratio" not in result.stdout
    assert "of torch.distributed's time" not in " ".join(result.stdout.split())
    assert "quote no times, but every result is bit-equal" in result.stdout


# What the numbers rest on


class _Clock:
    """A prober whose calls take the times that they say."""

    def __init__(self) -> None:
        self.now_us, self.batches = 0.0, 0

    def timed(self, way: Any) -> float:
        before = self.now_us
        way()
        self.batches += 1
        return self.now_us - before

    def takes(self, time_us: float) -> Any:
        def way() -> None:
            self.now_us += time_us

        return way


def test_only_the_ratio_rests_on_the_rounds_of_the_pair_alone() -> None:
    from commlayer.measure import benchmark
    from commlayer.scheduler import Traffic, choose

    profile = synthetic_profile(nodes=2, ranks_per_node=4)
    decision = choose(Traffic(1 << 20, 2, 4), profile)
    name = decision.plan.name
    clock = _Clock()
    ways = {name: clock.takes(1e3), benchmark._TORCH: clock.takes(1e4)}
    more = benchmark._alternate_pair(name, ways, cast(Any, clock), rounds=3, about_us=1e4)
    assert more == pytest.approx([0.1] * len(more))
    in_a_row = min(benchmark._MAX_BATCH, int(benchmark._BATCH_US / 1e4))
    assert in_a_row > 1
    assert clock.batches == 2 * len(more)
    assert clock.now_us == pytest.approx(1.1e4 * in_a_row * len(more))
    assert len(more) == min(benchmark._MAX_PAIR_ROUNDS - 3, math.ceil(benchmark._PAIR_BUDGET_US / (1.1e4 * in_a_row)))
    common = {name: [4e3, 6e3, 5e3], benchmark._TORCH: [1e4, 1e4, 1e4]}
    row = benchmark._row(name, common, more, 0, decision.plan, decision, profile)
    assert (row.p50_us, row.min_us, row.max_us, row.rounds) == (5e3, 4e3, 6e3, 3)
    assert row.ratio == pytest.approx(0.1)
    assert row.ratio_rounds == 3 + len(more)
    torch_row = benchmark._row(benchmark._TORCH, common, [], 0, None, decision, profile)
    assert (torch_row.ratio, torch_row.rounds, torch_row.ratio_rounds) == (1.0, 3, 3)


def test_progress_compares_only_what_compares() -> None:
    from commlayer.cli.bench import _latest

    row = {"kind": "plan", "p50_us": 1.0, "min_us": 1.0, "max_us": 1.0, "ratio": 0.5, "ratio_low": 0.5}
    row |= {"name": "flat", "ratio_high": 0.5, "num_wrong": 0, "rounds": 1, "ratio_rounds": 1, "is_chosen": True}
    content = {
        "topology": "2x2",
        "profile": "p",
        "fingerprint": "f",
        "is_emulated": True,
        "inter": "1gbit",
        "intra": None,
    }
    points = [{"logical_bytes": 4096, "wire_limit_us": None, "reason": "", "rows": [row]}]
    result = msgspec.convert({**content, "environment": {}, "points": points}, BenchResult)
    assert _latest(result) == "4 KiB: flat takes 0.50 of torch's time"
    assert "torch" not in _latest(msgspec.structs.replace(result, inter=None))


def test_the_table_says_how_well_the_median_is_known() -> None:
    def cells(*times_us: float) -> dict[str, str]:
        point = Point("all_to_all", Resource.INTER, 2, 4096, summarize(times_us))
        return dict(zip(COLUMNS, NcclRow.of(point).cells(), strict=True))

    assert (cells(100, 101, 99)["±%"], cells(100, 101, 99)["out"]) == ("inf", "0")
    many = cells(*(100.0 + k / 2 for k in range(10)), 1000.0)
    assert (many["±%"], many["out"]) == ("2.0", "1")


# What is refused, before anything runs


def test_a_cluster_command_without_a_cluster_says_how_to_get_one() -> None:
    for command in ("measure", "bench"):
        words = refused(command)
        assert "torchrun --nnodes 2 --nproc-per-node 8 --no-python commlayer" in words
        assert "--emulate 2x4" in words


def test_the_library_refuses_sizes_that_do_not_divide() -> None:
    from commlayer.measure.benchmark import check_sizes

    check_sizes([4, 100_000], 2)
    with pytest.raises(UsageError, match="multiples of 4 bytes; the nearest is 100000"):
        check_sizes([4, 99_999], 2)


@pytest.mark.parametrize(("size", "near"), [(1, 4), (3, 4), (5, 4), (100_002, 100_004), (4, 4)])
def test_the_nearest_size_that_divides(size: int, near: int) -> None:
    from commlayer.measure.benchmark import nearest_size

    assert nearest_size(size, 2) == near


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
    assert "does not exist" in refused("measure", "--emulate", "2x4", option, tmp_path / "no" / "x.svg")


def test_a_picture_of_an_unknown_kind_is_found_before_measuring(tmp_path: Path) -> None:
    assert ".svg, .png, .pdf, got .bmp" in refused("measure", "--emulate", "2x4", "--picture", tmp_path / "x.bmp")


def test_without_matplotlib_a_report_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for arguments in (("bench", "--emulate", "2x4", "--report", tmp_path / "x.html"), ("demo", "-o", tmp_path)):
        assert "pip install 'matplotlib>=3.8'" in refused(*arguments)

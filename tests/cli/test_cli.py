"""The command line: what it prints, how it fails, and that offline commands stay light."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from commlayer import __version__
from commlayer.cli.main import main
from commlayer.profiles import catalog
from commlayer.profiles.errors import InternalError, UsageError
from commlayer.units import format_bytes, format_us, parse_bytes

MONTA = ["plan", "--profile", "monta-a800-2x8", "--bytes", "256e6", "--tp", "8", "--ep", "2"]
ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "scipy", "matplotlib")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COMMLAYER_"):
            monkeypatch.delenv(name)


def call(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


def call_json(*arguments: str, status: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", status=status).stdout)


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from commlayer.cli.main import main; main(prog_name='commlayer')", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


# The group


def test_help_names_every_command_without_importing_it() -> None:
    before = set(sys.modules)
    output = call("--help").output
    for name in ("demo", "measure", "bench", "emulate", "plan", "profiles", "trace", "audit", "doctor"):
        assert f"  {name} " in output
    assert call("-h").output == output
    assert "Shell completion" in output
    assert not {name for name in set(sys.modules) - before if name.startswith("commlayer.cli.")}


def test_another_package_adds_a_command_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "extra_command.py").write_text(
        "import click\n@click.command('extra')\ndef extra():\n    click.echo('more')\n", encoding="utf-8"
    )
    metadata = tmp_path / "extra-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n", encoding="utf-8")
    points = "[commlayer.commands]\nextra = extra_command:extra\nplan = extra_command:extra\n"
    (metadata / "entry_points.txt").write_text(points, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert shell("extra", PYTHONPATH=paths).stdout == "more\n"
    assert "extra  from extra_command" in shell("--help", PYTHONPATH=paths).stdout
    assert "Choose how to move" in shell("plan", "--help", PYTHONPATH=paths).stdout, "ours was replaced"


def test_version() -> None:
    assert call("--version").output == f"commlayer {__version__}\n"


def test_misspelt_command_gets_a_hint() -> None:
    assert "Did you mean 'plan'?" in call("plann", status=2).stderr
    assert "Expected one of demo" in call("xyz", status=2).stderr


def test_old_names_are_refused_with_the_new_ones() -> None:
    assert "profile is called measure now." in call("profile", "--emulate", "2x4", status=2).stderr
    for command in ("search", "estimate", "what-if"):
        assert "--dispatch is called --exchange now." in call(command, "--dispatch=all_gather", status=2).stderr
    assert "is called" not in call("plan", "--dispatch=all_gather", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("measure", "--emulate", "2x2", "-b", "1MiB", "-e", "1KiB"), "1048576 bytes, 1024 bytes"),
        (("measure", "--emulate", "2x2", "-f", "0.5"), "'--factor': 0.5 is not in the range x>1"),
        (("measure", "--emulate", "1x1"), "expected two ranks or more, got one"),
        (("bench", "--emulate", "1x1"), "expected two ranks or more, got one"),
        (("demo", "--shape", "1x1"), "say --shape 2x4, for example"),
    ],
)
def test_sizes_and_clusters_that_cannot_be_measured_are_refused_before_any_rank_starts(
    arguments: tuple[str, ...], said: str
) -> None:
    result = call(*arguments, status=2)
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_errors_are_one_line_and_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("plan", "--profile", "nosuch", "--bytes", "1MB", status=2)
    assert result.stderr.startswith("error: expected the name of a shipped profile")
    assert "Traceback" not in result.output

    def bug(name: str) -> None:
        raise InternalError("a bug")

    monkeypatch.setattr(catalog, "load_profile", bug)
    result = call("plan", "--profile", "x", "--bytes", "1MB", status=3)
    assert "please report it" in result.stderr
    traced = call("--traceback", "plan", "--profile", "x", "--bytes", "1MB", status=3)
    assert "Traceback" in traced.stderr
    assert "InternalError: a bug" in traced.stderr
    monkeypatch.setenv("COMMLAYER_DEBUG", "detail")
    assert "Traceback" in call("plan", "-p", "x", "-b", "1MB", status=3).stderr


def test_unwritable_file_is_no_traceback(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "trace.json")
    assert f"the folder '{tmp_path / 'missing'}' does not exist" in call(*MONTA, "--trace", path, status=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        MONTA,
        [*MONTA, "--json"],
        ["profiles", "list"],
        ["profiles", "show", "monta-a800-2x8"],
        ["profiles", "validate", "monta-a800-2x8"],
        ["profiles", "diff", "h800-2x8", "h800-2x8", "--json"],
    ],
)
def test_offline_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom commlayer.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='commlayer')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "if '--json' in sys.argv and 'rich' in sys.modules: heavy.append('rich')\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "index", "expected"),
    [
        ("commlayer pro", "1", "profiles"),
        ("commlayer plan --profile mon", "3", "monta-a800-2x8"),
        ("commlayer profiles show h8", "3", "h800-2x8"),
        ("commlayer plan --strategy hier", "3", "hierarchical"),
    ],
)
def test_completion(words: str, index: str, expected: str) -> None:
    done = shell(_COMMLAYER_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=index)
    assert f"plain,{expected}" in done.stdout.splitlines(), done.stderr


# The documentation


def unknown_word(line: str) -> str:
    """The first command or option of a documented line that there is not; empty where all are there."""
    group, context = main, click.Context(main)
    words = line.partition(" -- ")[0].split()
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        command = group.get_command(context, name)
        if command is None:
            return name
        group, context = command, click.Context(command, parent=context)  # type: ignore[assignment]
    known = {each for parameter in group.params for each in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return next((each for each in options if each not in known), "")


def test_commands_and_options_of_the_documentation_are_there() -> None:
    lines = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))
        code = "\n".join(re.findall(r"^    .+|(?<=```sh\n)[^`]+", text, re.M))
        lines += [
            (page.name, line)
            for line in re.findall(r"(?:^|\$|=\S+) +commlayer ([a-z-]+(?![\w:])[^#|>\n]*)", code, re.M)
        ]
    assert len(lines) > 80
    assert [(page, line) for page, line in lines if unknown_word(line)] == []
    assert unknown_word("profiles merge a b") == "merge"
    assert unknown_word("search -m x --dispatch all_gather -- --else") == "--dispatch"


def test_the_page_of_commands_names_those_of_each_group() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    groups = {name: main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main))}
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]*) \|", text, re.M))
    assert rows.keys() == groups.keys()
    for name, group in groups.items():
        if isinstance(group, click.Group):
            assert sorted(re.findall(r"`([\w-]+)`", rows[name])) == sorted(group.commands), name


def test_the_readmes_search_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((command, row),) = re.findall(r"\$ commlayer (search .*)\n.*\n +(1 +.*)\n", readme)
    lines = call(*command.split()).stdout.splitlines()
    (best,) = [line for line in lines if line.startswith(" 1 ")]
    shown, printed = (re.split(r" {2,}", each.strip()) for each in (row, best))
    assert [cell for cell in printed if cell in shown] == shown


# plan


def test_plan_gives_table_8_of_monta() -> None:
    content = call_json(*MONTA, "--no-interference")
    times = {(entry["strategy"], entry["chunks"]): entry["predicted_us"] for entry in content["candidates"]}
    expected = {
        ("flat", 1): 6909,
        ("hierarchical", 1): 2454,
        ("pipelined", 4): 2117,
        ("pipelined_copy", 4): 1967,
    }
    for key, time_us in expected.items():
        assert times[key] == pytest.approx(time_us, rel=0.005)
    assert content["decision"]["strategy"] == "pipelined_copy"
    assert content["decision"]["chunks"] == 4


def test_plan_json_shape() -> None:
    content = call_json(*MONTA)
    assert list(content) == ["profile", "traffic", "decision", "candidates"]
    assert content["profile"] == {
        "name": "monta-a800-2x8",
        "fingerprint": catalog.load("monta-a800-2x8").fingerprint,
        "kind": "paper",
        "topology": "2x8",
    }
    expected = {"collective": "all_to_all", "bytes": 256_000_000, "tp": 8, "ep": 2, "link": "inter", "nodes": []}
    assert content["traffic"] == expected
    wanted = {"strategy", "chunks", "wire", "gather", "predicted_us", "bottleneck"}
    assert wanted | {"margin", "tolerance", "reason"} <= set(content["decision"])
    for candidate in content["candidates"]:
        assert wanted | {"is_extrapolated", "stages"} <= set(candidate)
        for stage in candidate["stages"]:
            assert set(stage) == {"op", "resource", "count", "bytes", "each_us", "busy_us"}
            assert stage["busy_us"] == pytest.approx(stage["count"] * stage["each_us"], abs=0.05)
    stages = {stage["op"]: stage for stage in content["candidates"][-1]["stages"]}
    assert stages["copy"]["resource"] == "device"
    assert stages["all_to_all"]["bytes"] * stages["all_to_all"]["count"] == 256_000_000 / 8


def test_plan_defaults_follow_the_topology() -> None:
    short = call_json("plan", "-p", "monta-a800-2x8", "-b", "256MB")
    assert short == call_json(*MONTA)


def test_plan_size_from_the_model() -> None:
    model = ["--batch", "1", "--sequence", "8192", "--hidden", "8192", "--top-k", "2", "--dtype", "bf16"]
    content = call_json("plan", "-p", "h800-2x8", *model)
    assert content["traffic"]["bytes"] == 8192 * 8192 * 2 * 2


def test_plan_table() -> None:
    output = call(*MONTA).stdout
    assert "◀ chosen" in output
    assert "12 slower chunk counts not shown (--all)" in output
    assert "extrapolated: a step lies outside" in output
    assert "on a device, in a CUDA graph: yes" in output
    assert output.rstrip().endswith("is predicted 7.6% slower; bottleneck intra")
    flat = next(line for line in output.splitlines() if line.startswith("flat"))
    assert flat.split() == ["flat", "1", "native", "6.910", "1.000", "inter"]
    every = call(*MONTA, "--all").stdout
    assert len(every.splitlines()) > len(output.splitlines()) + 10


def test_plan_policy_options() -> None:
    content = call_json(*MONTA, "--strategy", "flat", "--strategy", "pipelined", "--max-chunks", "3")
    assert {(c["strategy"], c["chunks"]) for c in content["candidates"]} == {
        ("flat", 1),
        ("pipelined", 2),
        ("pipelined", 3),
    }
    remote = call_json(*MONTA, "--gather", "remote")["candidates"]
    assert {c["gather"] for c in remote if c["strategy"] != "flat"} == {"remote"}
    assert call_json(*MONTA, "--tolerance", "0.5")["decision"]["strategy"] == "hierarchical"
    only = call(*MONTA, "--strategy", "pipelined").stdout
    assert "–" in only  # no flat to compare with


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--group world", "--group is for collectives other than all_to_all"),
        ("--top-k 2", "--top-k is for a size from --batch, --sequence and --hidden, got it with --bytes"),
        ("--top-k 1", "--top-k is for"),  # the default too: whoever gives it expects it to count
        ("--dtype fp32", "--dtype is for a size from --batch, --sequence and --hidden, or for --wire"),
        ("--collective all_reduce --dtype fp32", "--dtype is for"),
        ("--collective all_reduce --gather whole", "--gather is for --collective all_to_all"),
        ("--strategy flat --gather whole", "--gather is for strategies that gather"),
        ("--strategy flat --strategy hierarchical --max-chunks 4", "--max-chunks is for strategies in chunks"),
        ("--all --json", "--all is for the table"),
        ("--strategy flat --strategy flat_direct", "--strategy flat_direct: expected a strategy with a plan"),
    ],
)
def test_plan_refuses_what_it_would_ignore(options: str, words: str) -> None:
    message = call("plan", "-p", "h800-2x8", "-b", "16MiB", *options.split(), status=2).stderr
    assert words in message
    assert "leave it out" in message or "use those" in message


@pytest.mark.parametrize(
    "options",
    [
        "--batch 1 --sequence 8192 --hidden 8192 --top-k 2 --dtype bf16",
        "-b 16MiB --strategy flat --strategy pipelined --max-chunks 3 --gather remote",
        "-b 16MiB --strategy hierarchical --gather whole --tolerance 0 --no-interference",
        "-b 16MiB --tp 4 --ep 2 --link inter",
    ],
)
def test_plan_takes_what_counts(options: str) -> None:
    call("plan", "-p", "h800-2x8", *options.split())


def test_plan_asked_for_a_strategy_where_there_is_nothing_to_move() -> None:
    words = call("plan", "-p", "monta-a800-2x8", "-b", "0", "--strategy", "pipelined", status=2).stderr
    assert "the only plan for this traffic (nothing to move)" in words


def test_plan_nothing_to_move() -> None:
    content = call_json("plan", "-p", "monta-a800-2x8", "-b", "0")
    assert content["decision"]["strategy"] == "flat"
    assert content["decision"]["predicted_us"] == 0
    call("plan", "-p", "monta-a800-2x8", "-b", "0")


def test_plan_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    catalog.load("monta-a800-2x8").save(path)
    assert call_json("plan", "-p", str(path), "-b", "256e6") == call_json(*MONTA)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "12x"], "expected a size with the unit"),
        (["--bytes", "many"], "expected a size in bytes, got 'many'"),
        (["--bytes", "-1"], "expected a size in bytes"),
        (["--bytes", "0.5"], "expected whole bytes"),
        ([], "expected --bytes, or all of --batch"),
        (["--batch", "2"], "add --sequence, --hidden"),
        (["--bytes", "1MB", "--batch", "2"], "drop one side"),
        (["--batch", "1", "--sequence", "1", "--hidden", "2", "--dtype", "fp3"], "unknown dtype 'fp3'"),
        (["--bytes", "1MB", "--tp", "16"], "--tp 16: expected at most 8"),
        (["--bytes", "1MB", "--ep", "4"], "--ep 4: expected at most 2"),
        (["--bytes", "1MB", "--link", "intra", "--ep", "9"], "inside a node"),
        (["--bytes", "1MB", "--link", "intra"], "expected a curve of all_to_all on intra"),
        (["--bytes", "1MB", "--tp", "4"], "for group size 4"),
        (["--bytes", "1000001"], "needs a multiple of 2 bytes"),
        (["--bytes", "1MB", "--strategy", "fast"], "'fast' is not one of"),
        (["--bytes", "1MB", "--picture", "x.jpeg"], ".svg, .png, .pdf"),
    ],
)
def test_plan_bad_input(arguments: list[str], words: str) -> None:
    assert words in call("plan", "-p", "monta-a800-2x8", *arguments, status=2).stderr


def test_plan_files(tmp_path: Path) -> None:
    trace, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = call(*MONTA, "--trace", str(trace), "--picture", str(picture), "--json")
    json.loads(result.stdout)  # what was written is told on stderr
    assert str(trace) in result.stderr
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "flat (flat)" in names
    assert any("pipelined_copy×4" in name for name in names)
    assert "◀ chosen" in picture.read_text(encoding="utf-8")


# profiles


def test_profiles_list() -> None:
    output = call("profiles", "list").stdout
    assert all(name in output for name in catalog.names())
    entries = call_json("profiles", "list")
    assert [entry["name"] for entry in entries] == catalog.names()
    assert {"kind", "topology", "peaks", "curves", "source", "fingerprint"} <= set(entries[0])


def test_profiles_show(tmp_path: Path) -> None:
    output = call("profiles", "show", "monta-a800-2x8").stdout
    for word in ("size(B)", "time(us)", "algbw(GB/s)", "busbw(GB/s)", "256000000", "74.1%", "A800", "interference"):
        assert word in output
    picture = tmp_path / "curves.png"
    content = json.loads(call("profiles", "show", "monta-a800-2x8", "--picture", str(picture), "--json").stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")
    row = content["curves"][0]["rows"][2]
    assert row["bytes"] == 256_000_000
    assert row["efficiency"] == pytest.approx(0.741)
    assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] / 2)


def test_profiles_validate(tmp_path: Path) -> None:
    good, edited, broken = tmp_path / "good.json", tmp_path / "edited.json", tmp_path / "broken.json"
    catalog.load("h800-2x8").save(good)
    edited.write_text(good.read_text(encoding="utf-8").replace('"h800-2x8"', '"mine"'), encoding="utf-8")
    broken.write_text("{", encoding="utf-8")
    assert call("profiles", "validate", str(good), "h800-2x8").stdout.count("ok ") == 2
    lines = call("profiles", "validate", str(good), str(edited), str(broken), "nosuch", status=2).stdout.splitlines()
    assert [line[:3] for line in lines] == ["ok ", "bad", "bad", "bad"]
    assert "fingerprint" in lines[1]
    assert str(edited) in lines[1]
    results = call_json("profiles", "validate", str(good), str(broken), status=2)
    assert [result["ok"] for result in results] == [True, False]


def test_profiles_diff(tmp_path: Path) -> None:
    assert "equal content" in call("profiles", "diff", "h800-2x8", "h800-2x8").stdout
    assert call_json("profiles", "diff", "h800-2x8", "h800-2x8")["same"] is True
    content = call_json("profiles", "diff", "h800-2x8", "h100-eos-2x8", status=1)
    assert content["same"] is False
    assert "peaks.intra_gbps" in {entry["field"] for entry in content["differences"]}
    ratio = next(r for r in content["ratios"] if r["curve"] == "all_gather intra 8" and r["bytes"] == 2**33)
    assert ratio["ratio"] == pytest.approx(200 / 450, rel=0.01)
    output = call("profiles", "diff", "h800-2x8", "h100-eos-2x8", status=1).stdout
    assert "+125.0%" in output
    assert "1 MiB" in output
    # no common sizes: compared where both ranges cover the other's sizes
    other = call_json("profiles", "diff", "h800-2x8", "monta-a800-2x8", status=1)
    assert {r["bytes"] for r in other["ratios"]} >= {64_000_000, 256_000_000}


# doctor


def findings(**environment: str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    result = CliRunner().invoke(main, ["doctor", "--json"], env=environment)
    content = json.loads(result.stdout)
    assert content["ok"] == (result.exit_code == 0)
    return result.exit_code, {(entry["section"], entry["name"]): entry for entry in content["findings"]}


def test_doctor_sound_machine() -> None:
    status, found = findings(COMMLAYER_PROFILE="monta-a800-2x8", GLOO_SOCKET_IFNAME="lo")
    assert status == 0
    assert found["Versions", "commlayer"]["value"] == __version__
    assert "gloo" in found["torch.distributed and GPUs", "backends"]["value"]
    assert found["Network", "interface lo"]["value"].startswith("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" in found["Network", "gloo would use"]["value"]
    assert found["Settings", "profile"]["advice"] == "from COMMLAYER_PROFILE"
    assert "is predicted" in found["What would be chosen", "16 MiB a rank"]["advice"]


def test_doctor_reports_instead_of_crashing() -> None:
    status, found = findings(COMMLAYER_PROFIL="x", GLOO_SOCKET_IFNAME="nosuch0")
    assert status == 1
    assert "did you mean COMMLAYER_PROFILE?" in found["Settings", "COMMLAYER_*"]["value"]
    assert found["Network", "gloo would use"]["mark"] == "bad"
    status, found = findings(COMMLAYER_PROFILE="nosuch")
    assert status == 1
    assert found["What would be chosen", "profile"]["mark"] == "bad"


def test_doctor_explains_variables() -> None:
    section = "Environment variables"
    _, found = findings(CUDA_DEVICE_MAX_CONNECTIONS="1", NCCL_PXN_DISABLE="0", TORCH_NCCL_MADE_UP="1", NCCL_ALGO="Ring")
    assert found[section, "CUDA_DEVICE_MAX_CONNECTIONS"]["mark"] == "warn"
    assert "undoes the overlap" in found[section, "CUDA_DEVICE_MAX_CONNECTIONS"]["advice"]
    assert found[section, "NCCL_PXN_DISABLE"]["mark"] == "ok"
    assert found[section, "TORCH_NCCL_MADE_UP"]["mark"] == "ok"
    assert found[section, "NCCL_ALGO"]["mark"] == "warn"
    _, found = findings(CUDA_DEVICE_MAX_CONNECTIONS="32", NCCL_LAUNCH_ORDER_IMPLICIT="1")
    assert found[section, "CUDA_DEVICE_MAX_CONNECTIONS"]["mark"] == "ok"
    assert "program's order" in found[section, "NCCL_LAUNCH_ORDER_IMPLICIT"]["advice"]


def test_doctor_without_a_profile_says_how_to_get_one() -> None:
    _, found = findings()
    assert "commlayer measure -o" in found["What would be chosen", "profile"]["advice"]
    output = call("doctor").output
    assert "✓" in output


@pytest.mark.parametrize(("name", "words"), [("auto", "has kept of this cluster"), ("none", "plans nothing")])
def test_doctor_knows_what_is_no_profile(name: str, words: str) -> None:
    _, found = findings(COMMLAYER_PROFILE=name)
    chosen = found["What would be chosen", "profile"]
    assert (chosen["mark"], chosen["value"]) == ("ok", name)
    assert words in chosen["advice"]


def test_doctor_asks_for_the_versions_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["click>=999.1", "msgspec>=0.1", 'numpy>=999; extra == "dev"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    status, found = findings()
    assert status == 1
    assert found["Versions", "click"]["advice"] == "too old: pip install 'click>=999.1'"
    assert found["Versions", "msgspec"]["mark"] == "ok"
    assert found["Versions", "numpy"]["mark"] == "ok"


def test_doctor_without_metadata_knows_no_minimums(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    status, found = findings()
    assert status == 0
    assert found["Versions", "click"]["mark"] == "ok"


# emulate


@pytest.mark.cluster
def test_emulate_runs_a_rank_for_each_place() -> None:
    done = shell("emulate", "--nodes", "2", "--ranks-per-node", "2", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"[rank {rank}] rank {rank} of 4" for rank in range(4))]
    assert "commlayer emulate: 2 x 2 ranks" in done.stderr


def emulate(*arguments: str, script: str) -> subprocess.CompletedProcess[str]:
    """Without namespaces: what is printed is the same."""
    return shell("emulate", "--mode", "loopback", *arguments, "--", "sh", "-c", script)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--nodes", "1", "--ranks-per-node", "2"), ["[rank 0] a", "[rank 0] b", "[rank 1] a", "[rank 1] b"]),
        (("--nodes", "2", "--per-node"), ["[node 0] a", "[node 0] b", "[node 1] a", "[node 1] b"]),
        (("--nodes", "1", "--ranks-per-node", "1"), ["a", "b"]),
        (("--nodes", "1", "--ranks-per-node", "1", "--prefix"), ["[rank 0] a", "[rank 0] b"]),
    ],
)
def test_emulate_begins_each_line_with_the_rank(options: tuple[str, ...], expected: list[str]) -> None:
    done = emulate(*options, script='echo a; printf b; [ -n "$RANK$PET_NODE_RANK" ] && echo')
    assert sorted(done.stdout.split("\n"))[1:] == expected
    assert done.returncode == 0


@pytest.mark.cluster
def test_emulate_hands_on_what_ranks_print_as_it_is() -> None:
    """Each rank writes its lines at once: two writes of two ranks may come in any order."""
    done = emulate("--nodes", "1", "--ranks-per-node", "2", "--no-prefix", script=r"printf 'a\nb\n'")
    assert done.stdout == "a\nb\n" * 2
    assert done.returncode == 0


@pytest.mark.cluster
def test_emulate_says_which_rank_failed_and_what_it_said() -> None:
    done = emulate(
        "--nodes=2",
        "--ranks-per-node=2",
        script='echo first >&2; echo "hello from $RANK" >&2; [ $RANK = 2 ] && exit 7; sleep 60',
    )
    assert done.returncode == 7
    said = done.stderr.partition("commlayer emulate: rank 2 (node 1) ")[2].splitlines()
    assert said[:2] == ["exited with code 7; it said:", "    hello from 2"]
    assert said[2] == "rank 0 (node 0), rank 1 (node 0), rank 3 (node 1): killed by the cluster after rank 2 failed"
    assert "[rank 2] first\n" in done.stderr  # all of it has been passed on: it is not said again
    assert "[rank 2] hello from 2" in done.stderr


@pytest.mark.cluster
def test_emulate_names_the_signal_and_the_node() -> None:
    done = emulate("--nodes=2", "--per-node", "--no-prefix", script="[ $GROUP_RANK = 1 ] && kill -SEGV $$; sleep 1")
    assert done.returncode == 128 + 11
    assert done.stderr.endswith("commlayer emulate: node 1 killed by signal 11 (SIGSEGV)\n")


@pytest.mark.cluster
def test_emulate_says_what_ranks_said_last_when_the_time_is_up() -> None:
    done = emulate("--nodes=1", "--ranks-per-node=2", "--timeout=2s", script="echo stuck in a lock >&2; sleep 60")
    assert done.returncode == 124
    assert "    stuck in a lock" in done.stderr


@pytest.mark.cluster
def test_emulate_exit_status_is_the_command_s() -> None:
    done = shell("emulate", "--mode", "loopback", "--nodes", "1", "--ranks-per-node", "2", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "loopback" in done.stderr


@pytest.mark.cluster
def test_emulate_timeout() -> None:
    done = shell("emulate", "--nodes", "1", "--ranks-per-node", "1", "--timeout", "300ms", "--", "sleep", "60")
    assert done.returncode == 124
    assert "were killed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inter", "400", "--", "true"], "expected a rate with its unit"),
        (["--delay", "400", "--", "true"], "expected a time with its unit"),
        (["--timeout", "0s", "--", "true"], "expected a time above zero"),
        (["--mode", "loopback", "--", "no-such-program"], "no program 'no-such-program'"),
        ([], "Missing argument"),
        (["--grace", "5s", "--", "true"], "No such option '--grace'"),
        (["--compute=4tflops", "-q", "true"], "No such option '-q'"),
    ],
)
def test_emulate_bad_input(arguments: list[str], words: str) -> None:
    done = shell("emulate", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


# Sizes and times


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16777216", 2**24),
        ("16MiB", 2**24),
        ("64 kib", 2**16),
        ("1.5GB", 1_500_000_000),
        ("256e6", 256_000_000),
        ("2.5e3", 2500),
        ("64K", 2**16),
        ("0", 0),
        ("9007199254740993", 9007199254740993),
        (".5KiB", 512),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "1XB", "-5", "1e40", "nan", "inf", "1.2.3", "0x10", "3.3B", "1 MiB 2"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (2**16, "64 KiB"),
        (1536, "1.5 KiB"),
        (256_000_000, "256 MB"),
        (16 * 2**20, "16 MiB"),
        (123_456_789, "123.5 MB"),
        (8_192_000_000, "8.192 GB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(0.0, "0 µs"), (12.345, "12.35 µs"), (1967.41, "1.967 ms"), (999.97, "1 ms"), (3_401_000.0, "3.401 s")],
)
def test_format_us(time_us: float, text: str) -> None:
    assert format_us(time_us) == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_behind_stdout_is_said_without_a_traceback(more: tuple[str, ...]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "commlayer", "profiles", "list", *more]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: output: No space left on device\n"


def test_sentences_of_a_plan_wrap_at_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("plan", "--profile", "h100-eos-2x8", "--bytes", "16MiB")
    monkeypatch.delenv("COLUMNS", raising=False)
    reason = call(*asked).stdout.splitlines()[-1]
    assert len(reason) > 60
    monkeypatch.setenv("COLUMNS", "60")
    lines = call(*asked).stdout.splitlines()[-2:]
    assert " ".join(lines) == reason
    assert all(len(line) <= 60 for line in lines)

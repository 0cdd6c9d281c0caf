"""Audits of jobs, on made-up files of several ranks: what is read, refused, merged, printed and drawn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from commlayer.auditing.audit_files import (
    AuditedCalls,
    AuditedGroup,
    AuditedLateness,
    AuditedPlacement,
    AuditedWire,
    PlanEvent,
    RankAudit,
    audit_name,
    read_audits,
    write_audit,
)
from commlayer.auditing.audit_words import group_lines
from commlayer.auditing.job_audit import merge_audits
from commlayer.auditing.prometheus import prometheus_text
from commlayer.cli.main import main
from commlayer.drawing.audit_figures import audit_figure, events_figure
from commlayer.drawing.audit_report import write_audit_report
from commlayer.profiles.errors import UsageError

START = 1_790_000_000.0
HOSTILE = 'dp <script>alert(1)</script>\x1b[2J "x"\\ $y$\n'


def calls_of(collective: str = "all_reduce", calls: int = 10, **other: Any) -> AuditedCalls:
    usual: dict[str, Any] = {
        "plan": "pipelined×4",
        "up_to_bytes": 1 << 22,
        "promised_us": 1000.0 * calls,
        "measured_us": 1500.0 * calls,
        "logical_bytes": calls << 22,
        "wire_bytes": AuditedWire(inter=100 * calls, intra=50 * calls),
    }
    return AuditedCalls(collective=collective, calls=calls, **(usual | other))


def group_of(rank: int, **other: Any) -> AuditedGroup:
    """All of four ranks on two nodes, as ``rank`` knows it: the first one, who came late and what happened."""
    is_first = rank == 0
    usual: dict[str, Any] = {
        "group": "0",
        "description": "default_pg",
        "ranks": (0, 1, 2, 3),
        "nodes": ((0, 1), (2, 3)),
        "began_s": START,
        "profile": "auto-2x2",
        "fabric_rate": 0.25 if is_first else 1.0,
        "node_rates": (1.0, 0.4) if is_first else (),
        "calls": (calls_of(), calls_of("all_gather", plan="flat", wire_bytes=None, measured_us=9000.0)),
        "comparable_calls": 20,
        "late": (
            (AuditedLateness(rank=3, calls=8, waited_us=1600.0), AuditedLateness(rank=1, calls=2, waited_us=0.0))
            if is_first
            else ()
        ),
        "events": (PlanEvent(time_s=START + 5, call=12, what="plans are made anew"),) if is_first else (),
    }
    return AuditedGroup(**(usual | other))


def audit_of(rank: int, *groups: AuditedGroup, **other: Any) -> RankAudit:
    usual: dict[str, Any] = {
        "job": "00ab",
        "world_size": 4,
        "host": f"node{rank // 2}",
        "pid": 100 + rank,
        "commlayer": "0.1.0",
        "written_s": START + 60 + rank,
        "is_final": True,
    }
    return RankAudit(rank=rank, groups=groups or (group_of(rank),), **(usual | other))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(4):
        write_audit(tmp_path, audit_of(rank))
    return tmp_path


def call(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments), prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


# Files


def test_what_is_written_is_read(folder: Path) -> None:
    assert read_audits(folder) == [audit_of(rank) for rank in range(4)]
    assert read_audits(folder / audit_name(2)) == [audit_of(2)]
    assert [path.name for path in sorted(folder.iterdir())] == [audit_name(rank) for rank in range(4)]


def test_a_file_of_the_job_that_is_asked_for_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def read(path: Path, most_bytes: int) -> bytes:
        names.append(path.name)
        return path.read_bytes()

    monkeypatch.setattr("commlayer.auditing.audit_files.read_file", read)
    assert len(read_audits(folder, "00ab")) == 4
    assert sorted(names) == [audit_name(rank) for rank in range(4)]


def changed(folder: Path, change: Callable[[Any], None]) -> str:
    """The error that reading gives of rank 1's file after ``change``."""
    path = folder / audit_name(1)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_audits(folder)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path}: ")


def put(*place: Any, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for step in place[:-1]:
            content = content[step]
        content[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("format", value="commlayer-profile"), "field format: expected 'commlayer-audit', got 'commlayer-profile'"),
        (put("version", value=2), "field version: expected 1, got 2: read it with the commlayer that wrote it"),
        (put("version", value=True), "field version: expected 1, got True"),
        (put("extra", value=1), "field extra: unknown field"),
        (put("rank", value=7), "field rank: expected one below 4"),
        (put("rank", value=-1), "field rank: expected int >= 0"),
        (put("world_size", value=1 << 30), "field world_size: expected int <= 1048576"),
        (put("groups", 0, "ranks", value=[1, 1, 2, 3]), "field groups[0].ranks: expected each rank once"),
        (put("groups", 0, "ranks", value=[0, 2, 3]), "field groups[0].nodes: expected each of the group's ranks"),
        (put("groups", 0, "node_rates", value=[0.5]), "field groups[0].node_rates: expected one for each of 2 nodes"),
        (put("groups", 0, "fabric_rate", value=0), "field groups[0].fabric_rate: expected float > 0.0"),
        (put("groups", 0, "calls", 0, "calls", value="ten"), "field groups[0].calls[0].calls: expected int, got str"),
        (put("groups", 0, "calls", 0, "promised_us", value=0), "field groups[0].calls[0].promised_us: expected float > 0.0"),
        (put("groups", 0, "calls", 0, "measured_us", value=float("nan")), "field groups[0].calls[0].measured_us: "),
        (put("groups", 0, "calls", 0, "measured_us", value=float("inf")), "field groups[0].calls[0].measured_us: "),
        (put("groups", 0, "calls", 0, "logical_bytes", value=1 << 70), "field groups[0].calls[0].logical_bytes: "),
        (put("groups", 0, "late", value=[{"rank": 9, "calls": 1, "waited_us": 1}]), "field groups[0].late: expected ranks"),
        (put("groups", 0, "events", value=[{"time_s": 1, "call": 1, "what": "x" * 5000}]), "field groups[0].events[0].what: "),
    ],
)  # fmt: skip
def test_a_file_that_is_not_sound_is_refused_by_field(folder: Path, change: Callable[[Any], None], said: str) -> None:
    assert changed(folder, change).startswith(said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "line 1, column 1: expected JSON"),
        (b"[" * 100_000, "expected a commlayer audit, got JSON that no audit needs"),
        (b"[1]", "expected a JSON object with a commlayer audit, got a JSON array"),
        (b'{"format": "x", "format": "y"}', "field format: expected it once"),
        (b"\xff", "expected UTF-8 text"),
        (b'{"a": "' + b"\x00" * 8 + b'"}', "line 1"),
        (b"{}", "field format: expected 'commlayer-audit', but it is missing"),
    ],
)
def test_damaged_bytes_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / audit_name(0)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=re.escape(f"{path}: {said}")):
        read_audits(path)


def test_a_large_file_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / audit_name(0)
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(UsageError, match="cannot read the audit: expected at most 16777216 bytes"):
        read_audits(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="cannot read the audit: expected a regular file, got a directory"):
        read_audits(tmp_path)


def test_a_folder_without_audits_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected files such as audit-rank-00000\.json.*COMMLAYER_AUDIT="):
        read_audits(tmp_path)


def test_a_file_under_another_ranks_name_is_refused(folder: Path) -> None:
    (folder / audit_name(1)).rename(folder / audit_name(5))
    with pytest.raises(
        UsageError, match=r"expected a name that fits its content, rank 1: rename it to audit-rank-00001"
    ):
        read_audits(folder)


def test_two_jobs_in_a_folder_are_told_apart(folder: Path) -> None:
    write_audit(folder, audit_of(3, job="cd00"))
    with pytest.raises(UsageError, match=r"job 00ab \(3 of 4 ranks.*and job cd00 \(1 of 4 ranks.*--job 00ab"):
        read_audits(folder)
    assert [audit.rank for audit in read_audits(folder, "cd")] == [3]
    with pytest.raises(UsageError, match=r"expected files of job ef, got job 00ab \(3 of 4 ranks"):
        read_audits(folder, "ef")


# Merging


def test_ranks_are_merged(folder: Path) -> None:
    write_audit(folder, audit_of(2, group_of(2, calls=(calls_of(measured_us=30_000.0),))))
    job = merge_audits(read_audits(folder))
    (group,) = job.groups
    gather, reduce = group.calls
    assert (gather.collective, gather.num_calls, gather.rank_calls, gather.inter_bytes) == ("all_gather", 10, 30, None)
    assert (reduce.num_calls, reduce.rank_calls, reduce.inter_bytes, reduce.intra_bytes) == (10, 40, 4000, 2000)
    assert (reduce.worst_rank, reduce.worst_ratio) == (2, 3.0)
    assert reduce.promised_each_us == 1000.0
    assert reduce.measured_each_us == (3 * 1500.0 + 3000.0) / 4
    assert (job.missing, job.unfinished, job.hosts[3]) == ([], [], "node1")
    assert [(node.node, node.host, node.ranks, node.rate) for node in group.slow_nodes] == [(1, "node1", (2, 3), 0.4)]


def test_waiting_for_late_ranks_is_told_from_what_plans_cost(folder: Path) -> None:
    (group,) = merge_audits(read_audits(folder)).groups
    assert group.lost_us == pytest.approx(10 * 500 - 1000)
    assert (group.compared_calls, group.comparable_calls) == (10, 20)
    assert group.late_us == pytest.approx(2 * 1600)  # half of the calls were compared
    assert group.plan_us == pytest.approx(4000 - 3200)
    lost, late, fabric, slow = group_lines(group)
    assert (
        "took 1.20 times what was promised, +4 ms a rank: 3.2 ms waiting for ranks that came late (by 10 of 20" in lost
    )
    assert late == "rank 3 came last to 8 of 10 calls that were compared; the others waited 1.6 ms for it"
    assert fabric == "links between nodes: planned with at 25% of their rate at the start"
    assert slow == "slow: node 1 of the group (node1), ranks 2, 3: 40% of the usual rate"


def test_calls_beside_other_groups_are_told_from_those_alone() -> None:
    shared = {"beside_calls": 4, "beside_promised_us": 4000.0, "beside_measured_us": 12_000.0, "held_us": 500.0}
    alike = {"calls": (calls_of(measured_us=18_000.0),), "late": (), "node_rates": (), "fabric_rate": 1.0}
    (group,) = merge_audits([audit_of(rank, group_of(rank, **alike, **shared)) for rank in range(4)]).groups
    assert group.alone_ratio == pytest.approx(1.0)
    _, beside, held = group_lines(group)
    assert beside == (
        "16 of 40 calls, counted on every rank, ran beside calls of other groups of their rank, which share its links and cores: "
        "they took 3.00 times what was promised; alone, they took 1.00 times"
    )
    assert held == "its chunks were held for 500 µs a rank for lanes before"
    (crowded,) = merge_audits([audit_of(0, group_of(0, **alike, **(shared | {"beside_calls": 10})))]).groups
    assert crowded.alone_ratio == 0.0
    assert "alone" not in group_lines(crowded)[1]


def test_where_ranks_take_turns_in_coming_last_none_is_named() -> None:
    late = tuple(AuditedLateness(rank=rank, calls=5, waited_us=900.0 + 100 * rank) for rank in range(4))
    (group,) = merge_audits([audit_of(0, group_of(0, late=late))]).groups
    assert [line for line in group_lines(group) if "rank " in line and "came last to" in line] == []
    assert any(line.startswith("ranks took turns in coming last") for line in group_lines(group))


def test_without_the_first_rank_nobody_knows_who_was_late(folder: Path) -> None:
    (folder / audit_name(0)).unlink()
    job = merge_audits(read_audits(folder))
    (group,) = job.groups
    assert (group.late_us, group.plan_us, job.missing) == (None, None, [0])
    assert "is not known: the file of its first rank is missing" in group_lines(group)[0]
    (alone,) = merge_audits([audit_of(0, group_of(0, late=()))]).groups
    assert "no calls were compared over ranks" in group_lines(alone)[0]


def test_a_group_that_was_made_twice_counts_once() -> None:
    (group,) = merge_audits([audit_of(0, group_of(0), group_of(0, began_s=START + 30))]).groups
    assert group.told == [0]
    assert group.began_s == START
    assert [(late.rank, late.calls) for late in group.late] == [(3, 16), (1, 4)]
    assert len(group.events) == 2
    assert {calls.rank_calls for calls in group.calls} == {20}


# The command


def test_the_command_prints_what_was_promised_and_measured(folder: Path) -> None:
    output = call("audit", str(folder)).stdout
    assert "job 00ab: 4 of 4 ranks on 2 hosts, 1 group" in output
    assert re.search(
        r"default_pg \(0\)\s+all_reduce\s+pipelined×4\s+4 MiB\s+10\s+1 ms\s+1.5 ms\s+1.50\s+\+5 ms", output
    )
    assert re.search(r"\d\d:\d\d:\d\d UTC, before call 12: plans are made anew", output)


def test_the_command_says_what_is_missing(folder: Path) -> None:
    (folder / audit_name(3)).unlink()
    write_audit(folder, audit_of(2, is_final=False))
    result = call("audit", str(folder))
    assert "note: no file of rank 3 of 4" in result.stderr
    assert "note: rank 2 did not write at the end" in result.stderr
    assert "no file" not in call("audit", str(folder / audit_name(0))).stderr  # one file was asked for


@pytest.mark.parametrize("way", ["--json", "--prometheus"])
def test_the_command_imports_nothing_heavy(folder: Path, way: str) -> None:
    code = (
        "import sys\nfrom commlayer.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='commlayer')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit(','.join({'torch', 'numpy', 'scipy', 'matplotlib', 'rich'}.intersection(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", code, "audit", str(folder), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_json_has_it_all(folder: Path) -> None:
    found = json.loads(call("audit", str(folder), "--json").stdout)
    (group,) = found["groups"]
    assert found["ranks"] == [0, 1, 2, 3]
    assert group["calls"][1]["ratio"] == 1.5
    assert group["calls"][0]["total_wire_bytes"] is None
    assert group["slow_nodes"] == [{"node": 1, "host": "node1", "ranks": [2, 3], "rate": 0.4}]
    assert group["late"][0] == {"rank": 3, "calls": 8, "waited_us": 1600.0}
    assert group["events"][0]["call"] == 12


def test_migrations_of_experts_are_promised_and_measured(tmp_path: Path) -> None:
    known = AuditedPlacement(
        step=40,
        layers=2,
        copies=6,
        copy_bytes=64,
        reason=HOSTILE,
        promised_migration_us=2000.0,
        migration_us=3000.0,
        waited_us=10.0,
        step_before_us=500.0,
        promised_step_us=400.0,
        step_us=420.0,
    )
    unknown = AuditedPlacement(
        **(msgspec.structs.asdict(known) | dict.fromkeys(("promised_migration_us", "promised_step_us", "step_us")))
    )
    write_audit(tmp_path, audit_of(0, placements=(known, unknown)))
    assert read_audits(tmp_path)[0].placements == (known, unknown)
    printed = call("audit", str(tmp_path)).stdout
    assert "Migrations of experts" in printed
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "0 40 6 2 ms 3 ms 1.50 10 µs 500 µs 400 µs 420 µs 1.05" in rows
    assert "0 40 6 – 3 ms – 10 µs 500 µs – – –" in rows
    found = json.loads(call("audit", str(tmp_path), "--json").stdout)["placements"]
    assert [(each["rank"], each["migration_us"], each["promised_step_us"]) for each in found] == [
        (0, 3000.0, 400.0),
        (0, 3000.0, None),
    ]
    write_audit_report(tmp_path / "page.html", merge_audits(read_audits(tmp_path)))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Migrations of experts" in page
    assert "<script" not in page


def test_wrong_usage_and_bad_files_are_status_2(folder: Path, tmp_path: Path) -> None:
    assert "choose one" in call("audit", str(folder), "--json", "--prometheus", status=2).stderr
    assert "does not exist" in call("audit", str(tmp_path / "nothing"), status=2).stderr
    (folder / audit_name(1)).write_text("{", encoding="utf-8")
    result = call("audit", str(folder), status=2)
    assert f"error: {folder / audit_name(1)}: line 1" in result.stderr
    assert "3 of 4 ranks" in result.stdout, "one damaged file hides no other"
    assert "Traceback" not in result.output


def test_what_files_say_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    write_audit(tmp_path, audit_of(0, group_of(0, description=HOSTILE, profile=HOSTILE), host=HOSTILE, job=HOSTILE))
    page = tmp_path / "page.html"
    result = call("audit", str(tmp_path), "-o", str(page))
    assert "\x1b" not in result.output
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x1b" not in text
    prometheus = call("audit", str(tmp_path), "--prometheus").stdout
    assert "\x1b" not in prometheus
    assert samples_of(prometheus)


# Prometheus

SAMPLE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (?P<value>[-+0-9.e]+)')


def samples_of(text: str) -> dict[str, dict[str, float]]:
    """Samples by metric and labels, as a strict reader of the text format takes them."""
    found: dict[str, dict[str, float]] = {}
    typed: dict[str, str] = {}
    last = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed, "a metric's lines must stand together"
            typed[name], last = kind, name
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match["name"] == last, line
            assert (typed[last] == "counter") == last.endswith("_total")
            rows = found.setdefault(last, {})
            assert match["labels"] not in rows, "the same sample twice"
            rows[match["labels"]] = float(match["value"])
    return found


def test_prometheus_text_has_the_names_of_nccl_inspector(folder: Path) -> None:
    text = call("audit", str(folder), "--prometheus").stdout
    assert text == prometheus_text(read_audits(folder))
    samples = samples_of(text)
    labels = (
        'version="commlayer 0.1.0",slurm_job_id="unknown",node="node1",gpu="unknown",comm_name="default_pg",n_nodes="2",'
        'nranks="4",rank="3",group="0",collective="AllReduce",message_size="2-4MB",algo_proto="pipelined×4"'
    )
    assert samples["nccl_collective_exec_time_microseconds"][labels] == 1500.0
    assert samples["nccl_bus_bandwidth_gbs"][labels] == pytest.approx((1 << 22) * 1.5 / 1500 / 1e3)
    assert samples["commlayer_promised_seconds_total"][labels] == pytest.approx(0.01)
    assert samples["commlayer_wire_bytes_total"][labels + ',link="inter"'] == 1000
    (late,) = (key for key in samples["commlayer_late_calls_total"] if 'late_rank="3"' in key)
    assert samples["commlayer_late_wait_seconds_total"][late] == pytest.approx(0.0016)
    assert sorted(samples["commlayer_node_rate_ratio"].values()) == [0.4, 1.0]
    assert list(samples["commlayer_fabric_rate_ratio"].values()) == [0.25]  # of the first rank alone
    assert len(samples["commlayer_audit_written_timestamp_seconds"]) == 4


@pytest.mark.parametrize(
    ("up_to_bytes", "said"), [(1, "0-1B"), (1024, "512-1024B"), (2048, "1-2KB"), (1 << 22, "2-4MB"), (1 << 31, "1-2GB")]
)
def test_size_classes_are_ranges(up_to_bytes: int, said: str) -> None:
    audit = audit_of(0, group_of(0, calls=(calls_of(up_to_bytes=up_to_bytes),)))
    assert f'message_size="{said}"' in prometheus_text([audit])


def test_the_same_samples_are_summed_and_unknown_collectives_have_no_bandwidth() -> None:
    groups = [group_of(1, calls=(calls_of("gossip"),))] * 2
    samples = samples_of(prometheus_text([audit_of(1, *groups)]))
    assert list(samples["commlayer_calls_total"].values()) == [20]
    assert list(samples["nccl_collective_exec_time_microseconds"].values()) == [1500.0]
    assert "nccl_bus_bandwidth_gbs" not in samples


# The page


def test_the_page_shows_calls_late_ranks_and_events(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert f"report: {page}" in call("audit", str(folder), "-o", str(page)).stderr
    text = page.read_text(encoding="utf-8")
    for title in ("Promised and measured", "Ranks that came late", "Changes of plans", "Groups", "How to read this"):
        assert f"<h2>{title}</h2>" in text
    assert text.count("<svg") == 2
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"(src|href)=\"(?!#)", text) is None, "a page must need nothing from outside"
    assert "plans are made anew" in text
    for name in ("calls", "events"):
        assert f'id="{name}-' in text


def test_a_quiet_job_has_a_quiet_page(tmp_path: Path) -> None:
    job = merge_audits([audit_of(1, group_of(1))])
    write_audit_report(tmp_path / "page.html", job)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "Changes of plans" not in text
    with pytest.raises(UsageError, match="got none"):
        events_figure(job)
    nothing = merge_audits([RankAudit(**(msgspec.structs.asdict(audit_of(0)) | {"groups": ()}))])
    write_audit_report(tmp_path / "page.html", nothing)
    with pytest.raises(UsageError, match="got none"):
        audit_figure(nothing)


def test_many_groups_are_drawn_and_the_rest_are_one() -> None:
    groups = [group_of(0, group=str(number)) for number in range(9)]
    figure = audit_figure(merge_audits([audit_of(0, *groups)]))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == 8
    assert "3 more groups" in labels

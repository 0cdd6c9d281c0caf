"""Times of NCCL from nccl-tests and from NCCL Inspector: what is read, what is refused, and the way there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.profiles import catalog
from commlayer.profiles.errors import PlanError, ProfileError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, read_profile
from commlayer.readers.nccl_files import nccl_profile, nccl_tests_json, read_nccl_runs
from commlayer.scheduler.decision import choose
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.mapping import catalog as models
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.hardware import GPUS
from commlayer.scheduler.mapping.job import Job
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.traffic import Traffic

TEXT = """# nccl-tests version 2.18.3 nccl-headers=23004 nccl-library=23004
# Collective test starting: {program}
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4194304 step: 64(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   4100 on     node-a device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   4101 on     node-a device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   9000 on     node-b device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   9001 on     node-b device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     0.21    0.00    0.00       0     0.21    0.00    0.00       0
        1024           256     float     sum      -1    22.50    0.05    0.07       0    21.00    0.05    0.07       0
       65536         16384     float     sum      -1    21.90    2.99    4.49       0    30.00    2.18    3.28     N/A
     4194304       1048576     float     sum      -1  1.2e+02   34.95   52.43       0   119.00   35.25   52.87       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 18.9
#
"""


def result(size: int, time_us: float, **changes: Any) -> dict[str, Any]:
    timed = {"time": time_us, "alg_bw": 0.0, "bus_bw": 0.0, "nwrong": 0.0}
    common = {
        "size": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": timed,
    }
    return {**common, "in_place": timed, "actual_iterations": 20, "experiment_name": "", **changes}


def document(program: str = "/opt/build/all_gather_perf", **changes: Any) -> dict[str, Any]:
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 1,
            "hostname": f"n{rank // 8}",
            "device": rank % 8,
            "device_hex": "",
            "device_info": "",
        }
        for rank in range(16)
    ]
    found = {
        "version": 3,
        "args": [program, "-J", "x"],
        "env": ["NCCL_ALGO=Ring", "NCCL_PROTO=LL128", "A=b=c"],
        "devices": devices,
    }
    return {**found, "nccl_version": 23004, "results": [result(1 << 20, 80.5), result(1 << 26, 900.25)], **changes}


def inspected(
    sequence: int, rank: int, time_us: int, coll: str = "AllGather", size: int = 1 << 20, **header: Any
) -> str:
    call = {"coll": coll, "coll_sn": sequence, "coll_msg_size_bytes": size, "coll_exec_time_us": time_us}
    return json.dumps(
        {"header": {"id": "0x7f", "rank": rank, "n_ranks": 8, "nnodes": 2} | header, "metadata": {}, "coll_perf": call}
    )


def test_text_of_nccl_tests(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text(TEXT.format(program="all_reduce_perf"), encoding="utf-8")
    (run,), left_out = read_nccl_runs(path)
    assert (run.collective, run.nodes, left_out) == ("all_reduce", (2, 2), [])
    assert run.times_us == {1024: 22.5, 65536: 21.9, 4194304: 120.0}
    profile = nccl_profile([run], name="x")
    assert (profile.topology, profile.kind) == ("2x2", "measured")
    assert "nccl-tests' text out.txt" in profile.source
    curve = profile.curve("all_reduce", Resource.INTER, 4)
    assert curve.p50_us == (22.5, 21.9, 120.0)
    assert list(curve.time_us) == sorted(curve.time_us)
    assert profile.peaks.inter_gbps == pytest.approx(4194304 * 1.5 / 120 / 1e3)


def test_a_text_that_does_not_say_of_what_takes_it_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text(
        "\n".join(line for line in TEXT.splitlines() if "starting" not in line and "Rank" not in line), encoding="utf-8"
    )
    with pytest.raises(ProfileError, match="name it with --collective"):
        read_nccl_runs(path)
    with pytest.raises(ProfileError, match="name them with --topology"):
        read_nccl_runs(path, "alltoall")
    (run,), _ = read_nccl_runs(path, "alltoall", (8,))
    keys = {curve.key for curve in nccl_profile([run], name="x").curves}
    assert keys == {(name, Resource.INTRA, 8) for name in ("all_to_all", "all_to_all_single", "all_to_all_v")}


def test_json_of_nccl_tests(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    in_place = result(1 << 28, 0.0, out_of_place=None, in_place={"time": 3500.0})
    path.write_text(json.dumps(document(results=[*document()["results"], result(0, 1.0), in_place])), encoding="utf-8")
    (run,), _ = read_nccl_runs(path)
    assert (run.collective, run.nodes) == ("all_gather", (8, 8))
    assert run.times_us == {1 << 20: 80.5, 1 << 26: 900.25, 1 << 28: 3500.0}
    assert {curve.key for curve in nccl_profile([run], name="x").curves} == {("all_gather_single", Resource.INTER, 16)}


def test_inspector_counts_ranks_and_takes_who_came_last(tmp_path: Path) -> None:
    path = tmp_path / "host-pid1.log"
    lines = [inspected(1, 0, 90), inspected(1, 1, 70), inspected(2, 0, 60), inspected(3, 0, 65)]
    lines += [inspected(4, 0, 40, "AllReduce"), inspected(5, 0, 1, "Reduce"), inspected(6, 0, 9, n_ranks=7)]
    lines += [json.dumps({"header": {}, "metadata": {}, "p2p_perf": {"p2p": "Send"}}), '{"header": {"id": "0x']
    path.write_text("\n".join(lines), encoding="utf-8")
    runs, left_out = read_nccl_runs(path)
    found = {run.collective: run for run in runs}
    assert found["all_gather"].times_us == {8 << 20: 65}  # of 70 (not 90), 60 and 65
    assert found["all_gather"].nodes == (4, 4)
    assert found["all_reduce"].times_us == {1 << 20: 40}
    assert len(left_out) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "got a file that does not say of what"),
        ("hello\n", "got a file that does not say of what"),
        ('{"results": 3}', "as nccl-tests' JSON: field results: expected array, got int"),
        (json.dumps(document(results=[])), "expected times of"),
        (json.dumps(document(devices=[])), "--topology"),
        (json.dumps(document("reduce_perf")), "got reduce"),
        ('{"a": 1}\n{"b": 2', "got none"),
        ('{"coll_perf": 1}\n{}', "as NCCL Inspector's entry 1: field coll_perf: expected object"),
        ('{"coll_perf"\n{}', "line 1: expected one JSON object"),
        ("[" * 10_000, "got a file that does not say"),
    ],
)
def test_what_is_none_of_them_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=reason):
        read_nccl_runs(path)


def test_the_fastest_of_several_runs_counts_and_larger_groups_than_the_base_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path, time_us in zip(paths, (50.0, 40.0), strict=True):
        path.write_text(
            json.dumps(document(results=[result(1 << 20, time_us), result(1 << int(time_us), 9e3)])), encoding="utf-8"
        )
    runs = [run for path in paths for run in read_nccl_runs(path)[0]]
    profile = nccl_profile(runs, name="x")
    assert dict(zip(profile.curves[0].bytes, profile.curves[0].time_us, strict=True))[1 << 20] == 40.0
    with pytest.raises(ProfileError, match="do not fit a cluster of 2x4"):
        nccl_profile(runs, name="x", base=catalog.load("emulated-2x4"))


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all_v")


def chosen(profile: Profile, nodes: tuple[int, ...], nbytes: int) -> dict[str, tuple[str, float]]:
    found = {}
    for collective in COLLECTIVES:
        traffic = Traffic.on_nodes(collective, nbytes, nodes)
        try:
            decision = choose(traffic, group_profile(profile, nodes))
        except PlanError:
            continue
        found[collective] = decision.plan.name, decision.predicted_us
    return found


@pytest.mark.parametrize("name", ["emulated-2x8", "emulated-2x4"])
def test_there_and_back_gives_the_same_decisions(tmp_path: Path, name: str) -> None:
    """A profile is written as nccl-tests' JSON and read on a base whose own times are all wrong."""
    profile = catalog.load(name)
    for file, text in nccl_tests_json(profile).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    wrong = [type(each)(each.collective, each.link, each.group_size, (1, 2), (1.0, 1.0)) for each in profile.curves]
    base = profile.replace(curves=wrong)
    runs = [run for path in sorted(tmp_path.iterdir()) for run in read_nccl_runs(path)[0]]
    again = nccl_profile(runs, name=name, base=base)
    assert {curve.key: curve.time_us for curve in again.curves} == {
        curve.key: curve.time_us for curve in profile.curves
    }
    world = tuple(map(int, (profile.topology.split("x")[1],) * 2))
    compared = 0
    for nodes in (world, (1, 1), world[:1], (2, 2)):
        for power in range(10, 29, 3):
            expected = chosen(profile, nodes, 1 << power)
            assert chosen(again, nodes, 1 << power) == expected
            compared += len(expected)
    assert compared > 50
    differ = [chosen(base, world, 1 << power) != chosen(profile, world, 1 << power) for power in (12, 20, 26)]
    assert any(differ)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "moonlight-16b-a3b"])
def test_there_and_back_gives_the_same_mappings(tmp_path: Path, model: str) -> None:
    profile = catalog.load("emulated-2x8")
    for file, text in nccl_tests_json(profile).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    runs = [run for path in sorted(tmp_path.iterdir()) for run in read_nccl_runs(path)[0]]
    again = nccl_profile(runs, name="again", base=profile)
    job = Job(model=models.load(model), gpus=16, global_batch=32, sequence=4096)
    space = Space(tp=(1, 2), cp=(1,), ep=(4, 8), pp=(1, 2), vpp=(1,), micro_batch=(1,), recompute=("megascale",))
    found = []
    for measured in (profile, again):
        estimator = Estimator(job, Cluster.from_profile(measured, GPUS["h200"]), MEGATRON)
        found.append([(each.setup, each.step_us) for each in search(job, estimator, space, top=3).ranked])
    assert len(found[0]) == 3
    assert found[0] == found[1]


def test_the_command_says_what_it_read(tmp_path: Path) -> None:
    text, output = tmp_path / "a.txt", tmp_path / "cluster.json"
    text.write_text(TEXT.format(program="all_reduce_perf"), encoding="utf-8")
    call = ["profiles", "import", str(text), "--output", str(output)]
    found = CliRunner().invoke(main, call)
    assert found.exit_code == 0, found.output
    assert "all_reduce of 4 ranks, 3 sizes" in found.output
    assert "how links slow each other down is not known" in found.output
    assert read_profile(output).name == "cluster"
    assert CliRunner().invoke(main, call).exit_code == 2
    assert CliRunner().invoke(main, [*call, "--force", "--base", "emulated-2x4"]).exit_code == 0
    assert read_profile(output).topology == "2x4"
    folder = tmp_path / "files"
    written = ["profiles", "export", "emulated-2x4", "--output", str(folder)]
    assert CliRunner().invoke(main, written).exit_code == 0
    files = [str(path) for path in sorted(folder.glob("all_*_2.json"))]
    back = CliRunner().invoke(main, ["profiles", "import", *files, "--output", str(tmp_path / "back.json")])
    assert {line.split(",")[0].split(" of ")[1] for line in back.output.splitlines() if " sizes" in line} == {"2 ranks"}
    again = read_profile(tmp_path / "back.json")
    assert again.kind == "emulated"
    assert "NOT measured" in again.source
    assert "--force" in CliRunner().invoke(main, written).output
    bad = tmp_path / "bad.json"
    bad.write_text("{}", encoding="utf-8")
    refused = CliRunner().invoke(main, ["profiles", "import", str(bad), "--output", str(output), "--force"])
    assert refused.exit_code == 2
    assert "Traceback" not in refused.output


@pytest.mark.parametrize(
    ("key", "groups"),
    [
        ("all_reduce_inter_8", [0, 0, 0, 0, 0, 0, 0, 0]),
        ("all_reduce_inter_2", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("all_reduce_intra_4", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("copy_device_1", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_is_written_says_which_ranks_formed_groups(key: str, groups: list[int]) -> None:
    """Groups are numbered as nccl-tests does it with NCCL_TESTS_SPLIT."""
    devices = json.loads(nccl_tests_json(catalog.load("emulated-2x4"))[f"{key}.json"])["devices"]
    assert [device["group"] for device in devices] == groups
    assert [device["rank"] for device in devices] == list(range(8))
    assert [device["hostname"] for device in devices] == ["node0"] * 4 + ["node1"] * 4
    assert [device["device"] for device in devices] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"devices": [{"hostname": {}}]}, r"field devices\[0\].hostname: expected str, got object"),
        ({"results": [{"size": None}]}, r"field results\[0\].size: expected int, got null"),
        (
            {"profile_kind": "guessed"},
            "field profile_kind: expected measured, emulated, published, paper, got 'guessed'",
        ),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, damage: dict[str, Any], says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document(**damage)), encoding="utf-8")
    with pytest.raises(ProfileError, match=says):
        read_nccl_runs(path)


@pytest.mark.parametrize(
    ("collective", "line", "time_us"),
    [
        # NVIDIA/nccl#527, nccl-tests of 2022: no root, and errors in place of counts of wrong elements
        ("all_reduce", "  1073741824  268435456  float  sum  35215  30.49  57.17  4e-07  35198  30.51  57.20  4e-07", 35215),
        # NVIDIA/nccl-tests of 2020: all_to_all without an operation
        ("alltoall", " 33554432  1048576  float  817.8  41.03  35.90  0e+00  785.1  42.74  37.40  0e+00", 817.8),
        # awsome-distributed-training: srun --label
        ("all_reduce", "0:  4194304  1048576  float  sum  -1  168.6  24.87  46.64  0  167.7  25.02  46.91  0", 168.6),
        # aws-k8s-tester#503 and its like: mpirun --tag-output
        ("alltoall", "[1,0]<stdout>: 524288 8192 float none -1 212.76 2.46 2.31 0 223.82 2.34 2.20 N/A", 212.76),
    ],
    ids=["old errors", "no operation", "srun", "mpirun"],
)  # fmt: skip
def test_lines_of_other_versions_and_launchers_are_read(
    tmp_path: Path, collective: str, line: str, time_us: float
) -> None:
    path = tmp_path / "log.txt"
    path.write_text(line + "\n", encoding="utf-8")
    runs, left_out = read_nccl_runs(path, collective, (8, 8))
    assert list(runs[0].times_us.values()) == [time_us]
    assert not left_out


def _table(path: Path, **columns: list[Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path)
    return path


def test_a_table_of_aiconfigurator_is_a_node_s_profile(tmp_path: Path) -> None:
    path = _table(
        tmp_path / "nccl_perf.parquet",
        nccl_dtype=["half", "half", "int8", "half", "fp4"],
        num_gpus=[8, 2, 8, 8, 8],
        message_size=[1 << 20, 1 << 20, 2 << 20, 4 << 20, 8],
        op_name=["alltoall", "alltoall", "alltoall", "alltoall", "alltoall"],
        latency=[0.0262, 0.0100, 0.0250, 0.0500, 1.0],
    )
    runs, left_out = read_nccl_runs(path)
    assert [(run.collective, run.nodes, dict(run.times_us)) for run in runs] == [
        ("alltoall", (8,), {2 << 20: 25.0, 8 << 20: 50.0}),  # the shortest of two formats of one size
        ("alltoall", (2,), {2 << 20: 10.0}),
    ]
    assert left_out == ["1 rows of another operation or format, or without a size or a time"]
    profile = nccl_profile(runs, name="node")
    assert profile.topology == "1x8"
    with pytest.raises(ProfileError, match="leave --collective and --topology out"):
        read_nccl_runs(path, "alltoall")


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    path = _table(tmp_path / "other.parquet", size=[1])
    with pytest.raises(ProfileError, match=r"as aiconfigurator's table: field \[0\].nccl_dtype: expected this field"):
        read_nccl_runs(path)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ProfileError, match="expected a parquet table: "):
        read_nccl_runs(path)


def test_a_table_of_a_dispatcher_is_sent_where_it_is_read(tmp_path: Path) -> None:
    path = _table(tmp_path / "wideep_deepep_normal_perf.parquet", dispatch_transmit_us=[1.0])
    with pytest.raises(ProfileError, match="give the table to --dispatcher"):
        read_nccl_runs(path)

"""Dumps of torch's Flight Recorder: read as data, and diagnosed as logs are; of NCCL's recorder in memory, of Gloo's for real."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dumps_in_memory import START_NS, device_dump, write_dumps
from jobs_in_memory import Groups, Job, Op, legal_program, run
from test_graph import FAULTS, blocking

from commlayer.calls.group_life import INNER_NAME
from commlayer.cli.main import main
from commlayer.diagnosis import recorder_dumps
from commlayer.diagnosis.diagnosis_words import in_words
from commlayer.diagnosis.dump_groups import DumpGroups
from commlayer.diagnosis.dump_readings import diagnose_dumps
from commlayer.diagnosis.evidence import gather_evidence
from commlayer.diagnosis.findings import Cycle, Diagnosis, Mismatch, Missing
from commlayer.diagnosis.recorder_dumps import rank_in_name, read_dumps
from commlayer.emulation import EmulatedCluster
from commlayer.profiles.errors import UsageError

A, B = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)
HANGS = {
    name: fault
    for name, fault in FAULTS.items()
    if name in ("two groups", "three groups", "missing", "dtype", "message")
}
"""The faults that NCCL's recorder shows: it notes no splits, roots and waits of the host."""


def diagnosed(paths: list[Path]) -> Diagnosis:
    return diagnose_dumps(read_dumps(paths))[1]


def circle(folder: Path, **options: Any) -> list[Path]:
    """The dumps of two ranks that wait for each other, and of a third."""
    groups = {"world": (0, 1, 2), "dp": (0, 1), "tp": (0, 1)}
    job = Job(groups, {0: [A, B], 1: [B, A], 2: [Op("barrier", "world", 3, 30, dtype="", op="")]})
    run(job, random.Random(1))
    return write_dumps(folder, job, random.Random(2), **options)


# What hangs


@pytest.mark.parametrize("has_timing", [True, False], ids=["timing", "no timing"])
@pytest.mark.parametrize("fault", HANGS)
@pytest.mark.parametrize("seed", range(10))
def test_seeded_faults_are_named(fault: str, seed: int, has_timing: bool, tmp_path: Path) -> None:
    """Behind a random program that is right; some ranks that have no part in it leave no dump, some rings lose calls."""
    random_ = random.Random(f"{fault}{seed}")
    groups, legal = legal_program(random_, random_.randint(4, 8), 20)
    program = blocking(legal)
    spoil, kind = HANGS[fault]
    culprits = spoil(random_, groups, program)
    job = Job(groups, program)
    run(job, random_)
    others = sorted(set(program) - culprits)
    most = 12 if seed % 3 == 0 and fault != "dtype" else 2000  # in memory, calls that differ end, and may be lost
    absent = (others[0],) if fault in ("two groups", "three groups") and seed % 2 else ()
    diagnosis = diagnosed(write_dumps(tmp_path, job, random_, has_timing=has_timing, absent=absent, most=most))
    text = in_words(diagnosis)
    assert diagnosis.has_found, text
    first = (*diagnosis.findings, *diagnosis.waits)[0]
    assert type(first) is kind, text
    if isinstance(first, Cycle):
        assert {step.call.rank for step in first.steps} >= culprits, text
        assert all(step.site.file == "train.py" for step in first.steps), "the innermost place that is not torch's"
    elif isinstance(first, Missing):
        assert {each.call.rank for each in diagnosis.waits} == culprits, text
    else:
        assert isinstance(first, Mismatch)
        assert culprits <= set(first.odd) or len(groups[first.group.removeprefix("the ")]) == 2, text
    assert "the world" in text or "group the r" in text or "group the g" in text, "groups go by their descriptions"
    assert diagnosis.without == absent
    assert "several threads" not in text, "calls on a device have no thread"


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_of_a_legal_program_gives_an_alarm(seed: int, tmp_path: Path) -> None:
    """Ten programs a seed, each rank seen at a moment of its own, a second after its first call."""
    for index in range(10):
        random_ = random.Random(seed * 1000 + index)
        groups, program = legal_program(random_, random_.randint(2, 8), random_.randint(1, 30))
        job = Job(groups, blocking(program))
        dumps = {}
        for rank in random_.sample(list(job.ranks), len(job.ranks)):
            run(job, random_, random_.randint(0, 12))
            dumps[rank] = device_dump(job, rank, ahead=random_.randint(0, 3), has_timing=bool(index % 2))
        paths = []
        for rank, dump in dumps.items():
            path = tmp_path / f"{index}_rank_{rank}"
            path.write_bytes(pickle.dumps(dump, protocol=2))
            os.utime(path, ns=(START_NS + 1_000_000_000,) * 2)
            paths.append(path)
        diagnosis = diagnosed(paths)
        assert not diagnosis.has_found, in_words(diagnosis)
        assert diagnosis.findings == ()


def test_what_the_dumps_do_not_say_is_told(tmp_path: Path) -> None:
    diagnosis = diagnosed(circle(tmp_path, has_timing=True))
    (cycle,) = diagnosis.findings
    assert isinstance(cycle, Cycle)
    assert cycle.behind == (2,)
    assert diagnosis.assumed == ("a host that has enqueued nothing more is taken to wait for its device",)
    groups: Groups = {"dp": (0, 1), "tp": (0, 1)}
    job = Job(groups, {0: [A, B], 1: [B, A]})
    run(job, random.Random(1))
    for rank in (0, 1):  # both hosts have enqueued both calls, and it is not known which has begun
        dump = device_dump(job, rank, ahead=1, has_timing=False)
        (tmp_path / f"all_{rank}").write_bytes(pickle.dumps(dump))
    diagnosis = diagnosed([tmp_path / "all_0", tmp_path / "all_1"])
    assert [type(each) for each in diagnosis.findings] == [Cycle]
    assert any("TORCH_NCCL_ENABLE_TIMING" in each for each in diagnosis.assumed)
    assert "assumed: the dumps do not say which calls have begun" in in_words(diagnosis)


def test_a_circle_of_calls_that_are_young_is_no_alarm(tmp_path: Path) -> None:
    """On a device two calls may run side by side, so that both orders are right."""
    assert not diagnosed(circle(tmp_path, has_timing=True, age_s=1.0)).has_found


def test_a_call_that_all_have_come_to_is_under_way(tmp_path: Path) -> None:
    job = Job({"world": (0, 1)}, {0: [A], 1: [A]})
    job.groups = {"dp": (0, 1)}
    for rank in (0, 1):
        job.step(rank)
    diagnosis = diagnosed(write_dumps(tmp_path, job, random.Random(1), has_timing=True))
    assert diagnosis.findings == ()
    assert "no call is missing" in in_words(diagnosis)


# Files


def test_the_command_says_the_circle_and_draws_it(tmp_path: Path) -> None:
    circle(tmp_path, has_timing=True)
    (tmp_path / "notes.txt").write_text("not a dump", encoding="utf-8")
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path), "-o", str(tmp_path / "hang.html")])
    assert result.exit_code == 1, result.output
    assert "ranks 0 and 1 wait for each other, in a circle of 2" in result.output
    assert "3 dumps of torch's Flight Recorder (nccl): ranks 0, 1 and 2; 1 file not understood: " in result.output
    assert "rank 2" in (tmp_path / "hang.html").read_text(encoding="utf-8")
    single = CliRunner().invoke(main, ["diagnose", *map(str, tmp_path.glob("*rank*")), "--json"])
    assert json.loads(single.stdout)["findings"][0]["type"] == "cycle"
    foreign = CliRunner().invoke(main, ["diagnose", str(tmp_path / "notes.txt")])
    assert foreign.exit_code == 2
    assert "got 1 file not understood" in foreign.output


class _Opens:
    """A pickle that would write a file where it is loaded as torch's reader loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_dump_is_data_and_nothing_in_it_is_executed(tmp_path: Path) -> None:
    paths = circle(tmp_path, has_timing=True)
    hostile = tmp_path / "nccl_trace_rank_7"
    hostile.write_bytes(pickle.dumps({"version": "2.10", "entries": [_Opens(tmp_path / "written")]}))
    damaged: list[str] = []
    assert [dump.rank for dump in read_dumps([*paths, hostile], damaged)] == [0, 1, 2]
    assert "nccl_trace_rank_7" in damaged[0]
    assert "a dump is plain data" in damaged[0]
    assert not (tmp_path / "written").exists()


def _entry(**fields: Any) -> dict[str, Any]:
    """An entry of a dump, with ``fields`` changed."""
    start = {
        "process_group": ("0", "dp"),
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": 1,
        "state": "started",
    }
    return {**start, **fields}


def test_odd_words_in_a_dump_do_no_harm(tmp_path: Path) -> None:
    odd = _entry(thread_id="²", profiling_name="nccl:send " + "9" * 5000 + "->1", is_p2p=True)
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"version": "2.10", "entries": [odd, _entry(thread_id="9" * 5000)]}))
    (tmp_path / "other").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    logs, _ = diagnose_dumps(read_dumps(gather_evidence([tmp_path], []).dump_paths))
    assert [len(log.calls) for log in logs] == [1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rank_1", b"\x80\x04nonsense", "got a damaged or foreign file"),
        ("rank_1", pickle.dumps({"entries": 3, "version": "2.10"}), "got a damaged or foreign file"),
        ("rank_1", pickle.dumps({"version": "1.4"}), "expected a dump of version 2.0 or later, got 1.4"),
        ("rank_1", b'{"version": "2.10", "entries": [{', "got a damaged or foreign file"),
        ("trace", pickle.dumps({"version": "2.10"}), "expected a name with the rank"),
        ("rank_1", pickle.dumps([[]] * 10), "got a damaged or foreign file"),
        ("rank_1", b"\x80\x02]r\xff\xff\xff\x7f.", "got a damaged or foreign file"),  # asks for 64 GiB of memory
        ("rank_1", b'{"version": "2.10", "entries": [], "pg_config": 3}', "got a damaged or foreign file"),
        ("rank_1", pickle.dumps({"version": "2.10", "entries": [_entry(timeout_ms=10**400)]}), "timeout_ms"),
        ("rank_1", pickle.dumps({"version": "2.10", "entries": [_entry(frames=[{"line": 1 << 70}])]}), "line"),
        (
            "rank_1",
            pickle.dumps({"version": "2.10", "entries": []}),
            "expected the calls of rank 1",
        ),  # none are recorded
        (
            "rank_1",
            pickle.dumps(
                {
                    "version": "2.10",
                    "pg_config": {"0": {"ranks": "[0, 1]"}},
                    "pg_status": {"0": {"last_enqueued_collective": 6}},
                }
            ),
            "expected the calls of rank 1",
        ),
    ],
)
def test_files_that_are_no_dumps_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as refused:
        read_dumps([path])
    assert str(path) in str(refused.value)


def _entry_of(name: str, pg_id: int) -> dict[str, Any]:
    return _entry(process_group=(name, ""), pg_id=pg_id)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([("", 0), ("", 2)], "calls of several without one"),
        ([(INNER_NAME, 1)], "those of commlayer's groups that run by no plan.*COMMLAYER_DIAGNOSE_DIR"),
    ],
)
def test_calls_whose_groups_cannot_be_told_apart_are_refused(
    tmp_path: Path, groups: list[tuple[str, int]], words: str
) -> None:
    """They would be taken for calls of one group that differ."""
    path = tmp_path / "rank_1"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": [_entry_of(*group) for group in groups]}))
    with pytest.raises(UsageError, match=words) as refused:
        read_dumps([path])
    assert str(path) in str(refused.value)
    assert "damaged" not in str(refused.value)  # another copy of it would be refused too
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": [_entry_of("", 3), _entry_of("", 3)]}))
    assert len(read_dumps([path])) == 1


def _records_what_is_inside(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    import commlayer.backend  # noqa: F401  registers the backend

    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    for group in (dist.group.WORLD, dist.new_group(range(dist.get_world_size()))):
        inside: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        inside.allreduce([torch.ones(2)]).wait()  # as C++ calls it, without asking Python
    content = c10d._dump_fr_trace()  # type: ignore[attr-defined]
    names = {entry["process_group"] for entry in pickle.loads(content)["entries"]}
    assert len(names) == 2, names
    assert dist.group.WORLD.group_desc == "default_pg"  # type: ignore[union-attr]
    assert all(INNER_NAME in each for each in names), names
    Path(folder, f"rank_{rank}").write_bytes(content)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.usefixtures("emulated_cluster")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_torch_records_what_is_inside_of_a_group_under_its_name(tmp_path: Path, num_ranks: int) -> None:
    """Its calls are those that run by no plan, so that a rank in another one would look as if it were in none."""
    c10d = pytest.importorskip("torch._C._distributed_c10d")
    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip("NOT TESTED: this torch has no _dump_fr_trace, so it records no calls of Gloo")
    with EmulatedCluster(1, num_ranks) as cluster:  # what this process records itself is in the dumps of its children
        cluster.run(_records_what_is_inside, str(tmp_path))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UsageError, match="those of commlayer's groups that run by no plan"):
            read_dumps([path])
    assert len(list(tmp_path.iterdir())) == num_ranks


def test_dumps_of_torchcomms_are_read_as_torchs(tmp_path: Path) -> None:
    """They number calls from 0, and of those that have ended only ``retired`` tells."""

    def entry(number: int, group: str = "world", **fields: Any) -> dict[str, Any]:
        ids = {
            "record_id": number,
            "collective_seq_id": number,
            "process_group": (group, "nccl"),
            "timeout_ms": 600_000,
        }
        return _entry(**ids, state="scheduled", time_created_ns=START_NS, **fields)

    def write(rank: int, *entries: dict[str, Any]) -> None:
        config = {
            name: {"name": name, "desc": "nccl", "ranks": "0,1"} for name, _ in {e["process_group"] for e in entries}
        }
        path = tmp_path / f"comm_lib_trace_rank_{rank}"
        path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "entries": list(entries)}))
        os.utime(path, ns=(START_NS + 700 * 10**9,) * 2)

    write(0, entry(0, retired=True), entry(1))
    write(1, entry(0, retired=True))
    (missing,) = diagnosed([*tmp_path.iterdir()]).waits
    assert (missing.call.rank, missing.call.number) == (1, 2)
    write(1, entry(0, retired=True), entry(1, group="tp"))
    with pytest.raises(UsageError, match="it numbers together: give each a FlightRecorderHook") as refused:
        read_dumps([*tmp_path.iterdir()])
    assert "damaged" not in str(refused.value)  # another copy of it would be refused too


def test_calls_of_commlayers_groups_are_left_out_and_the_others_used(tmp_path: Path) -> None:
    """Rank 1 is not blamed, as it may be in a call of a group of commlayer's."""
    config = {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}}
    for rank in (0, 1):
        fields = {"process_group": ("0", ""), "time_created_ns": START_NS, "timeout_ms": 600_000}
        own = [
            _entry(
                **fields, record_id=number, collective_seq_id=number, state="completed" if number == 1 else "started"
            )
            for number in range(1, 3 - rank)
        ]
        path = tmp_path / f"rank_{rank}"
        content = {"version": "2.10", "pg_config": config, "entries": [_entry_of(INNER_NAME, 1), *own]}
        path.write_bytes(pickle.dumps(content))
        os.utime(path, ns=(START_NS + 700 * 10**9,) * 2)
    dumps = read_dumps(sorted(tmp_path.iterdir()))
    assert [(dump.num_left_out, dump.lost, len(dump.entries)) for dump in dumps] == [(1, 0, 2), (1, 0, 1)]
    diagnosis = diagnosed(sorted(tmp_path.iterdir()))
    (missing,) = diagnosis.waits
    assert (missing.call.rank, missing.certainty) == (1, "unknown")
    assert "it may be in a call of commlayer's groups" in missing.doubt
    assert any("2 calls of commlayer's own groups are left out" in each for each in diagnosis.assumed)
    with pytest.raises(UsageError, match="those of commlayer's groups"):
        read_dumps(sorted(tmp_path.iterdir()), keeps_all=True)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("node7-trace_rank_12.json", 12),
        ("trace_rank_node7_5", 5),
        ("dump-0003.json", 3),
        ("rank_1_on_host2.pickle", 1),
        ("nccl_trace_rank_", None),
        ("rank_" + "9" * 5000, None),
    ],
)
def test_the_rank_is_in_the_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name, or_last_number=True) == rank


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}_rank_1" for name in "ab"]
    for path in paths:
        path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {"0": {"ranks": "[1]"}}}))
    with pytest.raises(UsageError, match="expected one dump of each rank"):
        read_dumps(paths)


class _EndedPool:
    """Processes of which one is ended after some dumps."""

    def __init__(self, num_processes: int) -> None:
        assert num_processes > 0

    def __enter__(self) -> _EndedPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, read: Callable[[Path], Any], paths: list[Path], chunksize: int) -> Iterator[Any]:
        yield from map(read, paths[: 2 * chunksize])
        raise BrokenProcessPool


def test_a_reading_process_that_is_ended_loses_only_what_was_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"trace_rank_{rank}" for rank in range(16)]
    for path in paths:
        path.write_bytes(pickle.dumps({"version": "2.10", "entries": [_entry()]}))
    monkeypatch.setattr(recorder_dumps, "ProcessPoolExecutor", _EndedPool)
    damaged: list[str] = []
    assert [dump.rank for dump in read_dumps(paths, damaged)] == list(range(8))
    assert [error.partition(": ")[0] for error in damaged] == list(map(str, paths[8:]))


def test_every_shortened_dump_is_read_or_refused(tmp_path: Path) -> None:
    (whole, *_) = circle(tmp_path, has_timing=True)
    data, path = whole.read_bytes(), tmp_path / "cut_rank_0"
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(UsageError, match="cut_rank_0"):
            read_dumps([path])


# Gloo, for real


def _hangs_on_gloo(folder: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    dp, tp = (dist.new_group([0, 1], group_desc=name, timeout=timeout) for name in ("dp", "tp"))
    tensor = torch.ones(4)
    dist.barrier()
    if rank < 2:
        dist.barrier(group=dp)
        dist.barrier(group=tp)

    def dump() -> None:
        time.sleep(3)  # by then all ranks are where they stay
        content = torch._C._distributed_c10d._dump_fr_trace(True)  # type: ignore[attr-defined]
        path = Path(folder, f"gloo_rank_{rank}")
        path.with_suffix(".part").write_bytes(content)
        path.with_suffix(".part").rename(path)
        while len(list(Path(folder).glob("gloo_rank_?"))) < 3:  # whoever ends has the calls of others fail
            time.sleep(0.05)
        os._exit(0)

    threading.Thread(target=dump).start()
    if rank == 2:
        dist.barrier()
    for group in (dp, tp) if rank == 0 else (tp, dp):
        dist.all_reduce(tensor, group=group)


@pytest.mark.usefixtures("emulated_cluster")
def test_dumps_of_torchs_own_recorder_on_gloo_name_the_circle(tmp_path: Path) -> None:
    with EmulatedCluster(1, 3) as cluster:
        cluster.run(_hangs_on_gloo, str(tmp_path), check=False)
    later_s = time.time() + 100
    for path in tmp_path.iterdir():
        os.utime(path, (later_s, later_s))
    diagnosis = diagnosed([*tmp_path.iterdir()])
    (cycle,) = (each for each in diagnosis.findings if isinstance(each, Cycle))
    assert {(step.call.rank, step.call.group, step.missing.rank) for step in cycle.steps} == {
        (0, "dp", 1),
        (1, "tp", 0),
    }
    assert cycle.behind == (2,)
    assert all(step.site.function == "_hangs_on_gloo" for step in cycle.steps)
    assert diagnosis.assumed == (
        "no dump lists the ranks of 3 groups (default_pg, dp, tp): taken from who recorded their calls",
        "a thread is taken to wait in its last call: Gloo does not record which calls are asynchronous",
    )


# Dumps that contradict what jobs are


def _at(folder: Path, name: str, *, ended: int = 3, written_s: int = 0, **fields: Any) -> Path:
    """A dump of three calls, of which ``ended`` have."""
    entries = [_entry(record_id=i, collective_seq_id=i + 1, retired=i < ended) for i in range(3)]
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"version": "2.10", "entries": entries, **fields}), encoding="utf-8")
    os.utime(path, ns=(START_NS + written_s * 10**9,) * 2)
    return path


@pytest.mark.parametrize("ranks", ["[0, 999999999]", "[0, 0, 1, 1]"])
def test_ranks_that_no_group_has_are_refused(tmp_path: Path, ranks: str) -> None:
    path = _at(tmp_path, "trace_rank_0.json", pg_config={"dp": {"ranks": ranks}})
    with pytest.raises(UsageError, match="expected ranks below 1048576, each once, in group dp"):
        read_dumps([path])


def test_a_date_in_a_name_is_no_rank() -> None:
    assert rank_in_name("dump0-20261128.json", or_last_number=True) is None


def test_the_dump_in_which_more_calls_have_ended_is_the_newer(tmp_path: Path) -> None:
    newer = _at(tmp_path / "a", "trace_rank_0.json", written_s=2)
    older = _at(tmp_path / "b", "trace_rank_0.json", ended=2, written_s=1)
    damaged: list[str] = []
    (dump,) = read_dumps([newer, older], damaged)
    assert dump.path == newer
    assert "the older one is left out" in damaged[0]


def test_a_copy_of_a_dump_is_no_error(tmp_path: Path) -> None:
    paths = [_at(tmp_path / name, "trace_rank_0.json") for name in "ab"]
    assert [dump.path for dump in read_dumps(paths)] == paths[:1]


def test_ranks_listed_in_another_order_are_the_same_group(tmp_path: Path) -> None:
    paths = [
        _at(tmp_path, f"trace_rank_{rank}.json", pg_config={"dp": {"ranks": ranks}})
        for rank, ranks in enumerate(["[1, 0]", "[0, 1]"])
    ]
    logs, _ = diagnose_dumps(read_dumps(paths))
    assert len({group.key for log in logs for group in log.groups}) == 1


def test_uneven_parts_make_no_group_of_millions(tmp_path: Path) -> None:
    entry = _entry(
        profiling_name="gloo:all_gather", process_group=("0", "x"), input_sizes=[[1]], output_sizes=[[1 << 30]]
    )
    path = tmp_path / "trace_rank_0.json"
    path.write_text(json.dumps({"version": "2.10", "entries": [entry]}), encoding="utf-8")
    assert len(DumpGroups(read_dumps([path])).ranks) < 3

"""Evidence that people have of a hanging job: files of all kinds, mixed, in folders and archives,
each taken for what it is."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from dumps_in_memory import write_dumps
from jobs_in_memory import Job, Op, run
from test_watchdog_lines import EP, hanging
from watchdogs_in_memory import Style, watchdog_lines

from commlayer.cli.main import main
from commlayer.diagnosis import evidence_files
from commlayer.diagnosis.evidence import gather_evidence
from commlayer.diagnosis.log_files import write_log

A, B = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)
STACK = """Process 4711: python train.py
Python v3.12.4 (/usr/bin/python3.12)

Thread 4711 (idle): "MainThread"
    wait (threading.py:355)
    get (queue.py:180)
    _get_data (torch/utils/data/dataloader.py:1284)
    load (batches.py:210)
    <module> (train.py:88)
Thread 4790 (active): "pin memory"
    do_one_step (torch/utils/data/_utils/pin_memory.py:37)
"""


def circle(folder: Path) -> list[Path]:
    """Dumps of two ranks that wait for each other."""
    job = Job({"dp": (0, 1), "tp": (0, 1)}, {0: [A, B], 1: [B, A]})
    run(job, random.Random(1))
    return write_dumps(folder, job, random.Random(2), has_timing=True)


def diagnose(*paths: Path | str) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, paths)])


def hung_log() -> bytes:
    """The log of a job of which a rank left out a call."""
    job, _ = hanging("skipped", 0)
    return "\n".join(watchdog_lines(job, random.Random(0), Style((2, 7), "torchrun"))).encode()


def test_a_mixed_folder_is_told_apart(tmp_path: Path) -> None:
    circle(tmp_path / "node0")
    (tmp_path / "job.log").write_bytes(b"step 1\nloss nan\n" + hung_log())
    (tmp_path / "stack_rank_1.txt").write_text(STACK, encoding="utf-8")
    (tmp_path / "notes.md").write_text("what we did", encoding="utf-8")
    (tmp_path / "weights.pt").write_bytes(bytes(5000))
    result = diagnose(tmp_path)
    assert result.exit_code == 1, result.output
    assert "ranks 0 and 1 wait for each other, in a circle of 2" in result.output
    assert (
        "2 dumps of torch's Flight Recorder (nccl): ranks 0 and 1; 1 log with lines of NCCL's watchdogs; "
        in result.output
    )
    assert "1 file with stacks of 1 rank; 2 files not understood: " in result.output
    assert "notes.md" in result.output
    assert "rank 1: the program is at batches.py:210 in load, in threading.py:355 in wait" in result.output


def test_logs_alone_are_judged_in_one_command(tmp_path: Path) -> None:
    (tmp_path / "slurm-1.out").write_bytes(hung_log())
    result = diagnose(tmp_path / "slurm-1.out")
    assert result.exit_code == 1, result.output
    assert f"of group {EP}" in result.output
    as_json = CliRunner().invoke(main, ["diagnose", str(tmp_path), "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["findings"][0]["type"] == "cycle"


def packed(folder: Path, kind: str) -> bytes:
    """The files of a folder in an archive."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in folder.iterdir():
                member = zipfile.ZipInfo(f"job/{path.name}")
                member.extra = struct.pack("<HHBi", 0x5455, 5, 1, int(path.stat().st_mtime))
                archive.writestr(member, path.read_bytes())
    else:
        with tarfile.open(fileobj=file, mode="w:gz" if kind == "tar.gz" else "w", encoding="utf-8") as archive_:
            archive_.add(folder, "job")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_archives_say_what_their_files_say(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    for path in circle(folder):
        if path.suffix == "":  # an archive within one
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=1_795_000_700))
            path.unlink()
    archive = tmp_path / f"job.{kind}"
    archive.write_bytes(packed(folder, kind))
    for path in folder.iterdir():
        path.unlink()
    evidence = gather_evidence([archive], [])
    assert sorted(dump.rank for dump in evidence.dumps) == [0, 1]
    assert "ranks 0 and 1 wait for each other" in diagnose(archive).output
    assert sorted(tmp_path.iterdir()) == [folder, archive], "nothing is written"


def test_logs_of_our_own_ranks_are_taken_from_an_archive(tmp_path: Path) -> None:
    job = Job({"world": (0, 1)}, {0: [Op("all_reduce", "world", 1, 10)], 1: []})
    run(job, random.Random(1))
    (tmp_path / "logs").mkdir()
    for rank in job.ranks:
        write_log(tmp_path / "logs", job.log(rank, "timeout"))
    archive = tmp_path / "job.zip"
    archive.write_bytes(packed(tmp_path / "logs", "zip"))
    result = diagnose(archive)
    assert "2 logs of commlayer's ranks" in result.output
    assert "rank 1 has not come to all_reduce #1 of group world" in result.output


# Bounds


def test_links_and_devices_in_archives_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(hung_log())
    with tarfile.open(tmp_path / "job.tar", "w", encoding="utf-8") as archive:
        for name, kind in (
            ("link", tarfile.SYMTYPE),
            ("hard", tarfile.LNKTYPE),
            ("fifo", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(f"../{name}_rank_1")
            member.type, member.linkname = kind, str(tmp_path / "secret")
            archive.addfile(member)
    assert gather_evidence([tmp_path / "job.tar"], []).is_empty


@pytest.mark.parametrize("nested", [1, 2])
def test_an_archive_that_unpacks_to_too_much_is_refused(
    nested: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_files, "MOST_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(evidence_files, "_MOST_UNPACKED", 1 << 21)
    data = gzip.compress(bytes(1 << 22))
    for _ in range(nested - 1):
        data = gzip.compress(data)
    (tmp_path / "bomb.gz").write_bytes(data)
    with tarfile.open(tmp_path / "many.tar", "w", encoding="utf-8") as members:
        for index in range(5):
            member = tarfile.TarInfo(f"log_{index}")
            member.size = 1 << 19
            members.addfile(member, io.BytesIO(bytes(1 << 19)))
    (tmp_path / "dumps").mkdir()
    circle(tmp_path / "dumps")
    damaged: list[str] = []
    evidence = gather_evidence([tmp_path], damaged)
    assert [error.partition(": ")[0] for error in damaged] == [
        str(tmp_path / "bomb.gz"),
        str(tmp_path / "many.tar"),
    ]
    assert len(evidence.dump_paths) == 2, "the others are used"


def test_archives_in_archives_have_an_end(tmp_path: Path) -> None:
    data = b"nothing"
    for _ in range(9):
        data = gzip.compress(data)
    (tmp_path / "deep.gz").write_bytes(data)
    damaged: list[str] = []
    assert gather_evidence([tmp_path], damaged).is_empty
    assert "deep at most" in damaged[0]


def test_a_damaged_file_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    circle(tmp_path)
    whole = packed(tmp_path, "tar.gz")
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "trace_rank_9").write_bytes(b"\x80\x04nonsense")
    (tmp_path / "ras.json").write_bytes(b'{"nccl_version": "2.28.3", "communicators": [{"hash": 3}]}')
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "ranks 0 and 1 wait for each other" in result.output
    for name in ("cut.tar.gz", "trace_rank_9", "ras.json"):
        assert name in result.output


def test_a_damaged_archive_in_another_one_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    whole = gzip.compress(hung_log())
    with tarfile.open(tmp_path / "job.tar", "w", encoding="utf-8") as archive:
        for name, data in (("cut.gz", whole[: len(whole) // 2]), ("log.gz", whole)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    damaged: list[str] = []
    assert len(gather_evidence([tmp_path], damaged).watchdogs) == 1
    assert damaged[0].startswith(f"{tmp_path / 'job.tar'}/cut.gz: ")


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip", "log", "ras", "json", "pickle"])
def test_changed_bytes_give_errors_that_name_the_file_and_no_other(kind: str, tmp_path: Path) -> None:
    """Bytes of real files are flipped, cut, repeated and put in: whatever comes, it is data."""
    random_ = random.Random(kind)
    circle(tmp_path / "dumps")
    dump = next(path for path in (tmp_path / "dumps").iterdir() if path.suffix == "").read_bytes()
    whole = {
        "log": hung_log() + STACK.encode(),
        "ras": (Path(__file__).parent / "ras_sample.json").read_bytes(),
        "json": json.dumps(pickle.loads(dump)).encode(),  # of this test's making
        "pickle": dump,
    }.get(kind) or packed(tmp_path / "dumps", kind)
    path = tmp_path / "fuzzed_rank_0"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(random_.randint(1, 8)):
            at = random_.randrange(len(data))
            change = random_.random()
            if change < 0.6:
                data[at] = random_.randrange(256)
            elif change < 0.75:
                del data[at : at + random_.randint(1, 50)]
            else:
                data[at:at] = data[: random_.randint(1, 50)]
        path.write_bytes(bytes(data))
        result = diagnose(path)
        assert result.exit_code in (0, 1, 2), result.output
        assert result.exit_code != 2 or "fuzzed_rank_0" in result.output
        assert "\x1b" not in result.output


def in_one_call(folder: Path, num_ranks: int, absent: tuple[int, ...] = ()) -> None:
    """Write the dumps of ranks, of which all have come to one call."""
    job = Job({"world": tuple(range(num_ranks))}, {rank: [replace(A, group="world")] for rank in range(num_ranks)})
    for rank in job.ranks:
        job.step(rank)
    write_dumps(folder, job, random.Random(1), has_timing=True, absent=absent)


def late_log(rank: int) -> str:
    """The log of a job of 8 ranks that says that one of them has not come to a call."""
    lines = [
        f"[rank{each}]:[E1031 10:00:00.100000000 ProcessGroupNCCL.cpp:616] [Rank {each}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for "
        f"600000 milliseconds before timing out.\n[rank{each}]:[E1031 10:00:00.400000000 ProcessGroupNCCL.cpp:1785] "
        f"[PG ID 0 PG GUID 0(default_pg) Rank {each}] Exception (either an error or timeout) detected by watchdog at "
        "work: 5, last enqueued NCCL work: 5, last completed NCCL work: 4."
        for each in range(8)
        if each != rank
    ]
    lines.append(
        f"[rank{rank}]:[E1031 10:01:00.400000000 ProcessGroupNCCL.cpp:1785] [PG ID 1 PG GUID 1(tp) Rank {rank}] "
        "First PG on this rank to signal dumping."
    )
    return "\n".join(lines)


def test_lines_of_watchdogs_do_not_contradict_dumps(tmp_path: Path) -> None:
    """All ranks have come by the dumps; rank 7 has not by the log."""
    (tmp_path / "job.log").write_text(late_log(7), encoding="utf-8")
    assert diagnose(tmp_path).output.splitlines()[3].startswith("likely cause: rank 7 is in no call, and has not come")
    in_one_call(tmp_path, 8)
    result = diagnose(tmp_path)
    assert "the cause cannot be told: all ranks have come to all_reduce #1" in result.output
    assert "rank 7 has not come" not in result.output


def test_lines_of_watchdogs_say_more_of_a_rank_without_a_dump(tmp_path: Path) -> None:
    """The log says more of the rank without a dump; of the others it may not."""
    in_one_call(tmp_path, 8, absent=(7,))
    words = (
        "rank 7 has left no dump or log (it is dead, stopped, or its files are not here), "
        "and may not have come to all_reduce #1"
    )
    assert f"likely cause: {words}" in diagnose(tmp_path).output
    (tmp_path / "job.log").write_text(late_log(7), encoding="utf-8")
    assert "likely cause: rank 7 is in no call" in diagnose(tmp_path).output
    (tmp_path / "job.log").write_text(late_log(6), encoding="utf-8")
    assert "likely cause: rank 7 has left no dump or log" in diagnose(tmp_path).output


def test_a_text_that_only_speaks_of_watchdogs_is_no_alarm(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("The last enqueued work of a group is printed.\n", encoding="utf-8")
    result = diagnose(tmp_path)
    assert result.exit_code == 0
    assert "cannot tell: no line names a rank and a call" in result.output
    assert "nothing is wrong" not in result.output
    assert "stacks" not in result.output


def test_sound_outputs_of_ras_beside_a_stack_are_no_alarm(tmp_path: Path) -> None:
    for number in (5, 6):
        ranks = [
            {"rank": rank, "host": "h", "pid": rank, "cuda_dev": 0, "collective_counts": {"AllReduce": number}}
            for rank in range(4)
        ]
        group = {"hash": "a", "secondary_hash": "1", "size": 4, "ranks": ranks, "missing_ranks": []}
        content = {"nccl_version": "2.28", "communicators": [group]}
        (tmp_path / f"ras{number}.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "stack_rank_0.txt").write_text(STACK, encoding="utf-8")
    result = diagnose(tmp_path)
    assert result.exit_code == 0
    assert "rank 0: the program is at batches.py:210 in load" in result.output


# Members of archives


def a_dump(folder: Path) -> bytes:
    """A dump of rank 0, in a group with a rank that leaves none."""
    job = Job({"dp": (0, 1)}, {0: [A], 1: []})
    run(job, random.Random(1))
    write_dumps(folder, job, random.Random(2), has_timing=True)
    return next(path for path in folder.iterdir() if "rank_0" in path.name).read_bytes()


@pytest.mark.parametrize("mtime", ["inf", "-inf", "nan", "1e30", "-1"])
def test_a_time_that_no_file_has_is_not_known(mtime: str, tmp_path: Path) -> None:
    data = a_dump(tmp_path / "dumps")
    with tarfile.open(tmp_path / "job.tar", "w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        member = tarfile.TarInfo("trace_rank_0")
        member.size, member.pax_headers = len(data), {"mtime": mtime}
        archive.addfile(member, io.BytesIO(data))
    damaged: list[str] = []
    evidence = gather_evidence([tmp_path / "job.tar"], damaged)
    assert [dump.written_ns for dump in evidence.dumps] == [0], damaged


def test_comments_of_members_are_not_kept(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for index in range(24):
            member = tarfile.TarInfo(f"log_{index}.txt")
            member.pax_headers = {"comment": "z" * 1_000_000}
            archive.addfile(member)
    tracemalloc.start()
    gather_evidence([tmp_path / "job.tar.gz"], [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000, "24 MB of comments"


def test_a_damaged_member_of_a_zip_hides_no_other(tmp_path: Path) -> None:
    data = a_dump(tmp_path / "dumps")
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("a.txt", b"hello" * 10)
        archive.writestr("trace_rank_0", data)
    raw = (tmp_path / "job.zip").read_bytes()
    (tmp_path / "job.zip").write_bytes(raw.replace(b"hello", b"jello", 1))
    damaged: list[str] = []
    evidence = gather_evidence([tmp_path / "job.zip"], damaged)
    assert [dump.rank for dump in evidence.dumps] == [0]
    assert damaged[0].startswith(f"{tmp_path / 'job.zip'}/a.txt: ")


def test_the_local_date_of_a_zips_member_is_not_its_time(tmp_path: Path) -> None:
    """A date of the packer's zone made calls overdue in another one; a date of zeros ended all."""
    data = a_dump(tmp_path / "dumps")
    extra = struct.pack("<HHBi", 0x5455, 5, 1, 1_795_000_700)
    for extra_field, written_ns in ((b"", 0), (extra, 1_795_000_700 * 10**9), (struct.pack("<HHB", 0x5455, 1, 0), 0)):
        with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
            member = zipfile.ZipInfo("trace_rank_0", (2026, 11, 18, 9, 0, 0))
            member.extra = extra_field
            archive.writestr(member, data)
        raw = bytearray((tmp_path / "job.zip").read_bytes())
        for mark, offset in ((b"PK\x03\x04", 10), (b"PK\x01\x02", 12)):
            at = raw.find(mark) + offset
            raw[at : at + 4] = bytes(4)
        (tmp_path / "job.zip").write_bytes(raw)
        damaged: list[str] = []
        evidence = gather_evidence([tmp_path / "job.zip"], damaged)
        assert [dump.written_ns for dump in evidence.dumps] == [written_ns], damaged
        is_open = "cannot tell how long rank 0 had been waiting" in diagnose(tmp_path / "job.zip").output
        assert is_open is not bool(written_ns)


def test_dumps_without_a_time_do_not_make_a_rank_that_is_behind_old(tmp_path: Path) -> None:
    """Its newest call is older than the one that others wait in."""
    calls = [Op("all_reduce", "dp", mark, 10) for mark in range(1, 6)]
    job = Job({"dp": (0, 1)}, {0: calls, 1: calls[:1]})
    run(job, random.Random(1))
    write_dumps(tmp_path, job, random.Random(2), has_timing=True)
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        for path in tmp_path.glob("*rank*"):
            dump = json.loads(data) if (data := path.read_bytes())[:1] == b"{" else pickle.loads(data)  # of this test's
            for entry in dump["entries"]:
                entry["time_created_ns"] += entry["record_id"] * 60 * 10**9
            archive.writestr(f"trace_{path.stem}.json", json.dumps(dump))
    result = diagnose(tmp_path / "job.zip")
    assert "rank 1 has not come to all_reduce #2" in result.output
    assert "older than this call" not in result.output


# One file ends nothing


def test_a_file_is_read_once(tmp_path: Path) -> None:
    paths = circle(tmp_path)
    (tmp_path / "link_rank_0").symlink_to(paths[0])
    result = diagnose(tmp_path, *paths)
    assert result.exit_code == 1, result.output
    assert "2 dumps of torch's Flight Recorder" in result.output


def test_pickles_beside_a_log_are_no_dumps(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes(hung_log())
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"a": 1}))
    result = diagnose(tmp_path)
    assert result.exit_code == 1, result.output
    assert "1 file not understood: " in result.output
    (tmp_path / "vocab_2.pkl").write_bytes(pickle.dumps({"a": 1}))
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "vocab_2.pkl: expected a dump of torch's Flight Recorder" in result.stderr
    assert "wait for each other" in result.stdout


def test_a_damaged_dump_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "trace_rank_0").write_bytes(b"\x80\x04nonsense")
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "trace_rank_0: expected a dump" in result.stderr


def test_a_foreign_dump_is_named_and_left_out(tmp_path: Path) -> None:
    circle(tmp_path)
    job = Job({"dp": (4, 5)}, {4: [A], 5: []})
    run(job, random.Random(1))
    write_dumps(tmp_path / "other", job, random.Random(2), has_timing=True, absent=(5,))
    (path,) = (tmp_path / "other").iterdir()
    path.rename(tmp_path / f"foreign_rank_3{path.suffix}")
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "foreign_rank_3" in result.stderr
    assert "expected rank 3 to be in its group dp, got ranks 4, 5" in result.stderr
    assert "ranks 0 and 1 wait for each other" in result.stdout


def test_a_stray_log_of_ours_hides_no_dumps(tmp_path: Path) -> None:
    circle(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "calls-00000.json").write_text("{}", encoding="utf-8")
    result = diagnose(tmp_path)
    assert "ranks 0 and 1 wait for each other" in result.stdout
    assert "calls-00000.json" in result.stderr


def test_of_two_logs_of_one_rank_the_newer_is_used_and_jobs_are_not_mixed(tmp_path: Path) -> None:
    job = Job({"world": (0, 1)}, {0: [], 1: []})
    older = job.log(0)
    logs = {"a": msgspec.structs.replace(older, now_ns=5), "b": older, "c": older}
    for name, log in logs.items():
        (tmp_path / name).mkdir()
        write_log(tmp_path / name, log)
    result = diagnose(tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
    assert f"{tmp_path}/b/calls-00000.json: expected one log of each rank, got a newer one of rank 0" in result.output
    assert "logs of rank 0 of 2" in result.output, "the newer one is used"
    assert diagnose(tmp_path / "b", tmp_path / "c").exit_code == 0, "a copy is read once"
    write_log(tmp_path / "b", msgspec.structs.replace(older, job="another"))
    assert "got several of rank 0" in diagnose(tmp_path / "a", tmp_path / "b").output


def test_names_of_files_forge_no_lines(tmp_path: Path) -> None:
    folder = tmp_path / "x\nproven cause: forged\x1b[31m"
    folder.mkdir()
    (folder / "trace_rank_0").write_bytes(b"\x80\x04nonsense")
    (folder / "calls-00001.json").write_text("{}", encoding="utf-8")
    (folder / "unknown.bin").write_bytes(b"\0")
    result = diagnose(folder)
    assert result.exit_code == 2
    assert "x\\nproven" in result.output or "x\\x0aproven" in result.output
    assert not any(line.startswith("proven cause") for line in result.output.splitlines()), result.output
    assert "\x1b" not in result.output


# Dumps that contradict others


def test_the_newer_of_two_dumps_of_a_rank_is_used(tmp_path: Path) -> None:
    circle(tmp_path)
    (path,) = tmp_path.glob("*rank_1*")
    dump = json.loads(path.read_bytes()) if path.suffix else pickle.loads(path.read_bytes())
    (tmp_path / "older").mkdir()
    dump["entries"] = dump["entries"][:1]
    (tmp_path / "older" / "trace_rank_1").write_bytes(pickle.dumps(dump))
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "ranks 0 and 1 wait for each other" in result.output
    assert (
        f"{tmp_path / 'older' / 'trace_rank_1'}: expected one dump of each rank, got a newer one of rank 1"
        in result.output
    )


def test_two_dumps_of_a_rank_that_are_not_of_one_run_are_left_out(tmp_path: Path) -> None:
    circle(tmp_path)
    (path,) = tmp_path.glob("*rank_1*")
    dump = json.loads(path.read_bytes()) if path.suffix else pickle.loads(path.read_bytes())
    for entry in dump["entries"]:
        entry["time_created_ns"] += 10**12
    (tmp_path / "restarted_rank_1").write_bytes(pickle.dumps(dump))
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "got several of rank 1 that are not of one run: they are left out" in result.output
    assert path.name in result.output
    assert "restarted_rank_1" in result.output
    assert "rank 1 has left no dump or log" in result.output, "the dump of rank 0 is used"


def test_a_dump_that_contradicts_the_groups_of_others_is_left_out(tmp_path: Path) -> None:
    circle(tmp_path)
    (path,) = tmp_path.glob("*rank_1*")
    dump = json.loads(path.read_bytes()) if path.suffix else pickle.loads(path.read_bytes())
    dump["pg_config"] = {}
    (tmp_path / "foreign_rank_7").write_bytes(pickle.dumps(dump))
    result = diagnose(tmp_path)
    assert result.exit_code == 2
    assert "foreign_rank_7: expected rank 7 to be in its group" in result.output
    assert "it is left out" in result.output
    assert "ranks 0 and 1 wait for each other" in result.output

"""Files of logs, and what is made of them: read back, refused, dumped for torch's analyzer, drawn; and the ring itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from jobs_in_memory import Groups, Job, Op, legal_program, run

from commlayer.calls import ring
from commlayer.calls.ring import ANY, Call, Silent, Track, open_track
from commlayer.cli.main import main
from commlayer.diagnosis import snapshot
from commlayer.diagnosis.call_logs import RankLog, Site
from commlayer.diagnosis.diagnosis_words import in_words, log_words
from commlayer.diagnosis.explaining import explain
from commlayer.diagnosis.findings import Cycle, diagnose
from commlayer.diagnosis.flight_recorder import write_flight_recorder
from commlayer.diagnosis.graph import View
from commlayer.diagnosis.log_files import folder_of, folder_path, log_name, read_logs, write_log
from commlayer.diagnosis.snapshot import rank_log
from commlayer.drawing.waits_page import waits_page
from commlayer.profiles.errors import UsageError

A, B = Op("all_reduce", "dp", 1, 10), Op("all_gather", "tp", 2, 20)


def hanging() -> list[RankLog]:
    """The logs of two ranks that wait for each other, and of a third."""
    groups = {"world": (0, 1, 2), "dp": (0, 1), "tp": (0, 1)}
    job = Job(groups, {0: [A, B], 1: [B, A], 2: [Op("barrier", "world", 3, 30)]})
    run(job, random.Random(1))
    return [job.log(rank, "timeout") for rank in job.ranks]


def written(folder: Path, logs: list[RankLog]) -> Path:
    folder.mkdir(exist_ok=True)
    for log in logs:
        write_log(folder, log)
    return folder


# Files and the command


def test_logs_are_read_as_they_were_written(tmp_path: Path) -> None:
    logs = hanging()
    assert read_logs(written(tmp_path, logs)) == logs


def test_a_page_is_not_written_by_another_name(tmp_path: Path) -> None:
    folder, page = written(tmp_path / "logs", hanging()), tmp_path / "page.txt"
    done = CliRunner().invoke(main, ["diagnose", str(folder), "-o", str(page)])
    assert done.exit_code == 2
    assert "ends with .html, got 'page.txt'" in done.output
    assert not page.exists()


def test_the_command_prints_the_circle_and_draws_it(tmp_path: Path) -> None:
    folder, page = written(tmp_path / "logs", hanging()), tmp_path / "page.html"
    done = CliRunner().invoke(main, ["diagnose", str(folder), "-o", str(page)])
    assert done.exit_code == 1, done.output
    assert "ranks 0 and 1 wait for each other, in a circle of 2:" in done.output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "needs all_gather #1" in text
    assert "train.py:10 in step" in text
    as_json = CliRunner().invoke(main, ["diagnose", str(folder), "--json"])
    assert as_json.exit_code == 1
    found = json.loads(as_json.stdout)
    assert [step["call"]["rank"] for step in found["findings"][0]["steps"]] == [0, 1]
    assert found["findings"][0]["type"] == "cycle"


def test_the_command_says_when_nothing_is_wrong(tmp_path: Path) -> None:
    groups, program = legal_program(random.Random(3), 4, 20)
    job = Job(groups, program)
    run(job, random.Random(3))
    done = CliRunner().invoke(main, ["diagnose", str(written(tmp_path / "logs", [job.log(0), job.log(1)]))])
    assert done.exit_code == 0, done.output
    assert "nothing is wrong" in done.output


def test_a_call_that_has_not_ended_is_told_of_where_nothing_else_is_wrong() -> None:
    """All of its ranks have come to it: perhaps its bytes do not arrive."""
    job = Job({"dp": (0, 1)}, {0: [A], 1: [A]})
    logs = []
    for rank in (0, 1):
        job.step(rank)
    for rank in (0, 1):
        log = job.log(rank)
        groups = tuple(msgspec.structs.replace(group, done=0) for group in log.groups)
        calls = tuple(msgspec.structs.replace(call, state="started") for call in log.calls)
        logs.append(msgspec.structs.replace(log, groups=groups, calls=calls))
    diagnosis = diagnose(logs)
    words = in_words(diagnosis)
    assert not diagnosis.has_found
    assert "nothing is wrong" not in words
    assert "ranks 0 and 1 wait for the end of calls:" in words
    assert "  ranks 0 and 1 wait in all_reduce #1 (float32, 64 B, SUM) of group dp, at train.py:10" in words


def test_a_rank_without_a_log_is_not_said_to_lack_a_dump_alone(tmp_path: Path) -> None:
    """Only logs are here, and each sentence calls a file that is not here the same."""
    folder, page = written(tmp_path / "logs", [hanging()[2]]), tmp_path / "page.html"
    words = CliRunner().invoke(main, ["diagnose", str(folder), "-o", str(page)]).output
    assert "rank 0 has left no dump or log (it is dead, stopped, or its files are not here)" in words
    assert "rank 0 left no dump or log, and may not have come to barrier #1" in words
    assert "left no dump or log" in page.read_text(encoding="utf-8")


def test_damaged_and_foreign_files_are_all_named(tmp_path: Path) -> None:
    folder = written(tmp_path, hanging())
    (folder / log_name(1)).write_bytes(b'{"format": 1')
    (folder / log_name(7)).write_bytes((folder / log_name(2)).read_bytes())
    (folder / log_name(8)).write_text('{"format": 99, "job": "", "rank": 8}', encoding="utf-8")
    done = CliRunner().invoke(main, ["diagnose", str(folder)])
    assert done.exit_code == 2
    for words in ("calls-00001.json", "damaged", "rename it to calls-00002.json", "got format 99"):
        assert words in done.stderr
    assert "logs of ranks 0 and 2 of 3" in done.stdout, "one damaged file hides no other"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": 1, "x": ' + "[" * 100_000, '{"format": 1, "job": ' + "{" * 9]
)
def test_a_nested_log_hides_no_other(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path, hanging())
    (folder / log_name(2)).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["diagnose", str(folder)])
    assert done.exit_code == 2, done.output
    assert "ranks 0 and 1 wait for each other" in done.stdout
    assert f"error: {folder / log_name(2)}: " in done.stderr
    with pytest.raises(UsageError, match=log_name(2)):
        read_logs(folder)


def test_files_of_two_jobs_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"calls-00000\.json, got none"):
        read_logs(tmp_path)
    first, second, _ = hanging()
    written(tmp_path, [first, msgspec.structs.replace(second, job="another")])
    with pytest.raises(UsageError, match=r"job another \(1 file, .* and job simulated \(1 file, .*: give every job"):
        read_logs(tmp_path)


def test_a_rank_that_could_not_read_the_name_of_its_job_is_read(tmp_path: Path) -> None:
    first, second, third = hanging()
    nameless = msgspec.structs.replace(first, job="")
    assert read_logs(written(tmp_path, [nameless, second, third])) == [nameless, second, third]


def test_calls_of_no_group_and_splits_for_others_are_refused(tmp_path: Path) -> None:
    log = hanging()[0]
    for call in (
        msgspec.structs.replace(log.calls[0], group=9),
        msgspec.structs.replace(log.calls[0], to=(1, 2, 3)),
    ):
        written(tmp_path, [msgspec.structs.replace(log, calls=(call,))])
        with pytest.raises(UsageError):
            read_logs(tmp_path)


def test_the_temporary_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = folder_of("abc", None)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        folder_of("abc", None)


def age(path: Path, days: float = 8.0) -> None:
    at = time.time() - days * 24 * 3600
    os.utime(path, (at, at))


def aged(folder: Path, num_logs: int = 1) -> Path:
    """A folder with logs, all of them eight days old."""
    folder.mkdir(mode=0o700)
    for log in written(folder, hanging()[:num_logs]).iterdir():
        age(log)
    age(folder)
    return folder


def test_logs_that_were_left_a_week_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, of_two = aged(folder_path("old", None)), aged(folder_path("of two ranks", None), 2)
    young = aged(folder_path("young", None))
    age(young, days=6.0)
    folder_of("new", None)
    assert not old.exists()
    assert not of_two.exists()
    assert (young / log_name(0)).exists()


def test_only_old_logs_of_this_users_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where others may read, behind a link, of another name, or written since the folder changed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = aged(tmp_path / "elsewhere")
    folder_path("a link", None).symlink_to(elsewhere)
    public = aged(folder_path("public", None))
    public.chmod(0o755)
    with_others = aged(folder_path("with others", None), 2)
    for name in ("calls-backup.json", "notes"):
        (with_others / name).touch()
        age(with_others / name)
    age(with_others / log_name(1), days=6.0)
    age(with_others)
    folder_of("new", None)
    assert (elsewhere / log_name(0)).exists()
    assert (public / log_name(0)).exists()
    assert sorted(path.name for path in with_others.iterdir()) == ["calls-00001.json", "calls-backup.json", "notes"]


def test_only_the_rank_that_makes_a_jobs_folder_removes_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes later finds a folder that looks old only where the clock was set anew; nor does it look for others."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running, old = aged(folder_path("running", None)), aged(folder_path("old", None))
    assert folder_of("running", None) == running
    assert (running / log_name(0)).exists()
    named = tmp_path / "named"
    assert folder_of("running", str(named)) == named
    assert (old / log_name(0)).exists()


def test_pages_of_all_kinds_of_findings_are_whole(tmp_path: Path) -> None:
    """Also of a circle of many, and with names that HTML would take for its own."""
    call = Op("all_reduce", "world", 1, 10)
    jobs = [Job({"world": (0, 1, 2)}, {0: [call], 1: [replace(call, dtype="<b>")], 2: []})]
    ring_of: Groups = {f"g{index}": (index, (index + 1) % 8) for index in range(8)}
    ops = [Op("all_reduce", f"g{index}", index, index) for index in range(8)]
    jobs.append(Job(ring_of, {rank: [ops[rank], ops[rank - 1]] for rank in range(8)}))
    for job in jobs:
        run(job, random.Random(1))
        logs = [job.log(rank, "timeout") for rank in job.ranks]
        text = waits_page(logs, diagnose(logs))
        assert text.count("<svg") == text.count("</svg>") >= 1
        assert "<b>" not in text.replace('<div class="card"><b>', "")


# torch's analyzer


def analysed(folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> str:
    """The words of torch's own analyzer of the dumps in ``folder``."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    args = JobConfig().parse_args([str(folder)])
    details, version = read_dir(args)
    caplog.clear()
    with caplog.at_level("INFO"):
        build_db(details, args, version)
    said = capsys.readouterr()
    return "\n".join(record.getMessage() for record in caplog.records) + said.out + said.err


@pytest.fixture
def analyzer(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Any:
    pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    return lambda folder: analysed(folder, caplog, capsys)


def test_torchs_analyzer_finds_nothing_in_a_program_that_is_right(tmp_path: Path, analyzer: Any) -> None:
    """With uneven splits among its calls."""
    calls = [
        *(Op(kind, "world", mark, mark) for mark, kind in enumerate(("all_reduce", "barrier", "reduce_scatter"), 1)),
        Op("all_to_all", "world", 8, 8, op=""),
    ]
    sizes = {0: (4, 8), 1: (12, 16)}
    program = {
        rank: [
            *calls[:3],
            replace(calls[3], to=sizes[rank], of=(sizes[0][rank], sizes[1][rank]), sent=sum(sizes[rank])),
        ]
        for rank in (0, 1)
    }
    job = Job({"world": (0, 1)}, program)
    run(job, random.Random(1))
    logs = [_with_received(job.log(rank)) for rank in (0, 1)]
    assert diagnose(logs).findings == ()
    write_flight_recorder(tmp_path / "dumps", logs)
    said = analyzer(tmp_path / "dumps")
    assert "mismatch" not in said.lower(), said
    assert "not all ranks" not in said.lower(), said


def _with_received(log: RankLog) -> RankLog:
    """The simulation does not say what comes out of calls."""
    calls = tuple(
        msgspec.structs.replace(
            call, received=sum(call.of) if call.of else call.sent // (1 + (call.kind[:6] == "reduce"))
        )
        for call in log.calls
    )
    return msgspec.structs.replace(log, calls=calls)


def test_torchs_analyzer_names_the_rank_that_is_missing(tmp_path: Path, analyzer: Any) -> None:
    write_flight_recorder(tmp_path / "dumps", hanging())
    said = analyzer(tmp_path / "dumps")
    assert "Not all ranks joining collective" in said
    dump = pickle.loads((tmp_path / "dumps" / "commlayer_rank_0").read_bytes())
    assert dump["entries"][0]["frames"] == [{"name": "step", "filename": "train.py", "line": 10}]


def test_dumps_of_our_rings_are_diagnosed_as_the_rings_are(tmp_path: Path) -> None:
    logs = hanging()
    write_flight_recorder(tmp_path, logs)
    (own,), (read,) = diagnose(logs).findings, explain(tmp_path).findings
    assert isinstance(own, Cycle)
    assert isinstance(read, Cycle)
    places = [
        [(step.call.rank, step.call.kind, step.call.number, step.site, step.missing.rank) for step in cycle.steps]
        for cycle in (own, read)
    ]
    assert places[0] == places[1]


def test_calls_that_other_rings_have_lost_are_left_out_of_the_dumps(tmp_path: Path) -> None:
    calls = [Op("all_reduce", "world", mark, mark) for mark in range(1, 6)]
    job = Job({"world": (0, 1)}, {0: calls, 1: calls})
    run(job, random.Random(1))
    full, short = job.log(0), job.log(1)
    short = msgspec.structs.replace(short, calls=short.calls[2:])
    write_flight_recorder(tmp_path, [full, short])
    numbers = [
        [
            entry["collective_seq_id"]
            for entry in pickle.loads((tmp_path / f"commlayer_rank_{rank}").read_bytes())["entries"]
        ]
        for rank in (0, 1)
    ]
    assert numbers == [[3, 4, 5], [3, 4, 5]]


# The ring


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    """A group's track in a ring of its own."""
    from collections import deque

    monkeypatch.setattr(ring, "_calls", deque(maxlen=0))
    monkeypatch.setattr(ring, "_waiting", {})
    monkeypatch.setattr(ring, "_tracks", type(ring._tracks)())
    return open_track(4, "key", "name", [5, 7], lambda: "dp", lambda: "ep")


def verb(track: Track, **how: Any) -> Call:
    """Stands for a verb of the backend."""
    opts = SimpleNamespace(reduceOp=SimpleNamespace(op=SimpleNamespace(name="MAX")), rootRank=1)
    return track.note("all_reduce", "torch.float32", 16, 16, opts, False, **how)


def test_a_call_is_logged_with_its_place(track: Track) -> None:
    line = sys._getframe().f_lineno + 1
    verb(track)
    (call,) = rank_log("job", 5, [5, 7], "signal", {}).calls
    assert (Path(call.site.file).name, call.site.function.rpartition(".")[2]) == (Path(__file__).name, "verb")
    assert call.site.line != line, "the verb of this test is no part of the package, and so is the place"
    assert (call.dtype, call.sent, call.op, call.root, call.state) == ("float32", 16, "MAX", 7, "started")


def test_the_ring_keeps_the_last_calls_and_counts_all(track: Track) -> None:
    for _ in range(10):
        track.done = verb(track).number
    verb(track)
    log = rank_log("job", 5, [5, 7], "signal", {})
    assert [call.number for call in log.calls] == [8, 9, 10, 11]
    assert [call.state for call in log.calls] == ["done", "done", "done", "started"]
    assert (log.groups[0].issued, log.groups[0].done, log.groups[0].lane) == (11, 10, "ep")


def test_a_refused_call_gives_its_number_back(track: Track) -> None:
    track.take_back(verb(track))
    assert verb(track).number == 1


def test_the_options_of_a_refused_call_are_not_those_of_the_one_before(track: Track) -> None:
    verb(track)
    track.take_back(track.note("broadcast", "torch.float32", 16, 16, SimpleNamespace(rootRank=0), False))
    (first, _) = rank_log("job", 5, [5, 7], "signal", {}).calls
    assert (first.op, first.root) == ("", ANY)


def test_ever_new_tags_are_forgotten_but_for_what_nobody_has_waited_for(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_MOST_COUNTED", 32)
    track._room = 32
    unsettled = track.note_message("recv", "torch.float32", 16, 1, 10_000)
    for tag in range(1000):
        for each in (tag, 5000):  # one tag is used all the time
            track.wait(track.note_message("send", "torch.float32", 16, 1, each))
            track.waited()
    assert len(track.messages) < 100
    assert len(track.settled) < 100
    assert track.messages["send", 7, 5000] == 1000
    assert track.messages[unsettled.collective, 7, 10_000] == 1
    calls = rank_log("job", 5, [5, 7], "signal", {}).calls
    assert {call.state for call in calls} == {"done"}


def test_what_other_threads_add_to_meanwhile_is_copied_again() -> None:
    class Changing:
        left = 3

        def __iter__(self) -> Iterator[int]:
            self.left -= 1
            if self.left:
                raise RuntimeError("Set changed size during iteration")
            return iter((1, 2))

    assert ring.copied(Changing()) == [1, 2]


def test_a_wait_is_seen_until_it_ends_well(track: Track) -> None:
    message = track.note_message("recv", "torch.float32", 16, 1, 3)
    track.wait(message)
    log = rank_log("job", 5, [5, 7], "signal", {})
    assert [(wait.kind, wait.number, wait.peer, wait.tag) for wait in log.waits] == [("recv", 1, 7, 3)]
    assert [(each.kind, each.peer, each.tag, each.count) for each in log.groups[0].messages] == [("recv", 7, 3, 1)]
    track.waited()
    after = rank_log("job", 5, [5, 7], "signal", {})
    assert (after.waits, after.calls[0].state) == ((), "done")
    from_any = track.note_message("recv", "torch.float32", 16, ANY, 0)
    assert (from_any.number, from_any.peer, from_any.tag) == (1, ANY, 0)


def log_beside(number: int) -> tuple[RankLog, set[int | None]]:
    """Return the log of a thread of ours where the program has so many beside the main one, and which those are."""
    over = threading.Event()
    beside = [threading.Thread(target=over.wait, name=f"loader {each}") for each in range(number)]
    found: list[RankLog] = []
    asks = threading.Thread(
        target=lambda: found.append(rank_log("job", 5, [5, 7], "timeout", {})), name="commlayer asks"
    )
    try:
        for thread in beside:
            thread.start()
        asks.start()
        asks.join()
    finally:
        over.set()
        for thread in beside:
            thread.join()
    return found[0], {thread.ident for thread in beside}


@pytest.mark.usefixtures("track")
def test_the_main_thread_is_shown_beside_a_hundred_younger_ones_and_others_are_counted() -> None:
    if not hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):
        pytest.skip("this Python does not export _Py_DumpTraceback, which writes one thread's places")
    log, beside = log_beside(130)
    (main,) = (thread for thread in log.threads if thread.ident == threading.main_thread().ident)
    assert main.site.line > 0
    shown = {thread.ident for thread in log.threads}
    assert len(beside.intersection(log.hidden)) >= 130 - 99, "a hundred are shown, of which one asks"
    assert shown.isdisjoint(log.hidden)
    assert beside <= shown | set(log.hidden)
    assert f"  {len(log.hidden)} more threads not shown\n" in log_words(log)


@pytest.mark.usefixtures("track")
def test_a_main_thread_that_is_not_shown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 exports no call that would show it."""
    monkeypatch.setattr(snapshot, "main_state", lambda: None)
    log, _ = log_beside(130)
    assert threading.main_thread().ident in log.hidden
    assert f"  {len(log.hidden)} more threads not shown, among them the main thread\n" in log_words(log)


@pytest.mark.usefixtures("track")
def test_a_thread_is_hidden_only_where_the_interpreter_leaves_threads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Thread(name="began or ended meanwhile")
    gone._ident = 1  # type: ignore[attr-defined]
    made_elsewhere = threading._DummyThread.__new__(threading._DummyThread)
    threading.Thread.__init__(made_elsewhere, name="Dummy-1")
    made_elsewhere._ident = 2  # type: ignore[attr-defined]
    there = threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [*there(), gone, made_elsewhere])
    monkeypatch.setattr(snapshot, "_stacks", lambda: ({}, False))
    assert rank_log("job", 5, [5, 7], "timeout", {}).hidden == ()
    monkeypatch.setattr(snapshot, "_stacks", lambda: ({}, True))
    hidden = rank_log("job", 5, [5, 7], "timeout", {}).hidden
    assert 1 in hidden
    assert 2 not in hidden


def test_the_main_threads_state_is_kept_on_that_thread_alone_and_renewed_in_a_child(
    monkeypatch: pytest.MonkeyPatch, track: Track
) -> None:
    of_main = ring.main_state()
    monkeypatch.setattr(ring, "_main_state", None)
    beside = threading.Thread(target=open_track, args=(4, "key", "name", [5, 7], str, str))
    beside.start()
    beside.join()
    assert ring.main_state() is None
    open_track(4, "key", "name", [5, 7], str, str)
    assert ring.main_state() == of_main is not None
    monkeypatch.setattr(ring, "_main_state", 1)
    ring._in_child()
    assert ring.main_state() == of_main


def test_the_programs_thread_that_asks_is_seen_to_wait_beside_other_threads(track: Track) -> None:
    over = threading.Event()
    beside = threading.Thread(target=over.wait, name="a loader of data")
    beside.start()
    try:
        verb(track)
        log = rank_log("job", 5, [5, 7], "timeout", {})
    finally:
        over.set()
        beside.join()
    (blocked,) = View(log).blocked.values()
    assert (blocked.wait.kind, blocked.wait.number, blocked.thread) == ("all_reduce", 1, (5, threading.get_ident()))


def waits_below(depth: int, is_there: threading.Event, over: threading.Event) -> None:
    """Calls itself so often, and then waits."""
    if depth:
        waits_below(depth - 1, is_there, over)
    else:
        is_there.set()
        over.wait()


@pytest.mark.parametrize("depth", [0, 50, 300])
def test_a_thread_is_where_the_program_last_was(depth: int) -> None:
    is_there, over = threading.Event(), threading.Event()
    beside = threading.Thread(target=waits_below, args=(depth, is_there, over), name="loader")
    beside.start()
    try:
        is_there.wait()
        found = {thread.name: thread for thread in rank_log("job", 0, [0], "signal", {}).threads}
    finally:
        over.set()
        beside.join()
    first_line = waits_below.__code__.co_firstlineno
    assert found["loader"].ident == beside.ident
    assert found["loader"].site == Site(__file__, first_line + 6, "waits_below")
    assert found["MainThread"].site.function == "test_a_thread_is_where_the_program_last_was"


def test_threads_may_run_while_they_are_looked_at() -> None:
    over = threading.Event()

    def runs() -> None:
        while not over.is_set():
            with contextlib.suppress(ValueError):
                int("no number")
            list(map(str, (each for each in range(9))))

    threads = [threading.Thread(target=runs, name="runs") for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for _ in range(200):
            places = [thread.site for thread in rank_log("job", 0, [0], "signal", {}).threads if thread.name == "runs"]
            assert len(places) == 3
            assert {place.file for place in places} == {__file__}
    finally:
        over.set()
        for each in threads:
            each.join()


def test_what_wraps_a_deprecated_function_of_torch_is_no_call_site() -> None:
    assert ring._is_inside["/elsewhere/site-packages/typing_extensions.py"]
    assert not ring._is_inside["/elsewhere/site-packages/trainer.py"]


def test_where_no_ring_is_kept_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = open_track(0, "key", "name", [0, 1], str, str)
    assert isinstance(silent, Silent)
    before = len(ring.recorded_calls())
    verb(silent)
    silent.wait(silent.note_message("send", "torch.float32", 16, 0, 0))
    silent.waited()
    assert len(ring.recorded_calls()) == before
    assert ring.waiting_threads() == {}

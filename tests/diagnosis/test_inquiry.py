"""Who answers SIGUSR1 and for how long, which answer belongs to which question, and hostile answers; without ranks."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers

from commlayer.calls import ring
from commlayer.diagnosis import inquiry
from commlayer.diagnosis.call_logs import CallLog, GroupLog, RankLog, Site, ThreadLog
from commlayer.diagnosis.inquiry import Inquiry
from commlayer.diagnosis.long_waits import LongWait
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import Asked


class Listening(FailureDetector):
    """A detector without a thread, which keeps what is to be read and what is told."""

    def __init__(self) -> None:
        super().__init__(None, 0, (0, 1, 2), 0.0)
        self.links: Any = self
        self.is_closed = True
        self.reading: dict[int, Callable[[], None]] = {}
        self.questions: list[Asked] = []

    def listen(self, descriptor: int, read: Callable[[], None]) -> bool:
        self.reading[descriptor] = read
        return True

    def forget(self, descriptor: int) -> None:
        self.reading.pop(descriptor)

    def tell(self, record: Any) -> None:
        self.questions.append(record)


@pytest.fixture(autouse=True)
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No inquiries at first, none that still answers afterwards, and the signal's default again."""
    monkeypatch.setattr(inquiry, "_inquiries", [])
    yield
    while made:
        made[-1].close()
        made.pop().linger()
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


made: list[Inquiry] = []


def asking(folder: Path, detector: FailureDetector | None = None) -> tuple[Inquiry, Listening]:
    detector = detector or Listening()
    assert isinstance(detector, Listening)
    made.append(Inquiry(detector, HashStore(), str(folder)))
    return made[-1], detector


def is_handled() -> bool:
    return inquiry._is_taken()


def test_the_signal_is_taken_and_given_back(tmp_path: Path) -> None:
    first, detector = asking(tmp_path)
    assert is_handled()
    os.kill(os.getpid(), signal.SIGUSR1)
    (read,) = detector.reading.values()
    read()
    assert [each.is_timeout for each in detector.questions] == [False]
    first.close()
    assert not is_handled()
    assert not detector.reading


def test_the_programs_own_faulthandler_keeps_the_signal(tmp_path: Path) -> None:
    """Python's own getsignal does not know of it."""
    with (tmp_path / "dump").open("w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        first, detector = asking(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)
        first.close()
        assert is_handled()
        assert not detector.reading
    assert "test_inquiry.py" in (tmp_path / "dump").read_text(encoding="utf-8")


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _, detector = asking(tmp_path)
    assert not detector.reading


def test_a_handler_that_came_later_stays(tmp_path: Path) -> None:
    first, _ = asking(tmp_path)
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_the_signal_can_be_taken_again_after_a_handler_that_came_later(tmp_path: Path) -> None:
    first, _ = asking(tmp_path)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    first.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    _, detector = asking(tmp_path)
    assert detector.reading
    assert is_handled()


def test_a_handler_in_c_that_came_later_stays(tmp_path: Path) -> None:
    first, _ = asking(tmp_path)
    heard: list[int] = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(heard.append)
    ctypes.CDLL(None).signal(int(signal.SIGUSR1), handler)
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_a_faulthandler_of_the_program_that_came_later_stays(tmp_path: Path) -> None:
    first, _ = asking(tmp_path)
    with (tmp_path / "dump").open("w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        first.close()
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_inquiry.py" in (tmp_path / "dump").read_text(encoding="utf-8")


def test_another_group_hears_the_signal_when_the_first_is_gone(tmp_path: Path) -> None:
    (first, gone), (_, other) = asking(tmp_path), asking(tmp_path)
    assert gone.reading
    assert not other.reading
    first.close()
    assert not gone.reading
    os.kill(os.getpid(), signal.SIGUSR1)
    (read,) = other.reading.values()
    read()
    assert len(other.questions) == 1


def test_a_signal_asks_the_ranks_of_a_group_that_stands_alone_too(tmp_path: Path) -> None:
    """But not twice those of the job, of which two groups may have an inquiry each."""
    alone = Listening()
    alone.numbering = "quorum"
    (_, first), (_, second), (_, third) = asking(tmp_path), asking(tmp_path), asking(tmp_path, alone)
    os.kill(os.getpid(), signal.SIGUSR1)
    (read,) = first.reading.values()
    read()
    assert [len(each.questions) for each in (first, second, third)] == [1, 0, 1]


def test_without_descriptors_the_job_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(flags: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe2", full)
    asking(tmp_path)
    assert "rank 0 does not answer SIGUSR1: [Errno 24] Too many open files" in capsys.readouterr().err
    assert not is_handled()


def test_a_timeout_after_a_signal_asks_anew_and_one_after_a_timeout_does_not(tmp_path: Path) -> None:
    first, detector = asking(tmp_path)
    first.signalled()
    first.timed_out()
    first.timed_out()
    assert [(each.round, each.is_timeout) for each in detector.questions] == [(0, False), (1, True)]
    first.observe(Asked(2, 1, is_timeout=False))
    first.timed_out()
    assert [each.round for each in detector.questions] == [0, 1, 3]
    first.observe(Asked(4, 1, is_timeout=True))
    first.timed_out()
    assert [each.round for each in detector.questions] == [0, 1, 3]


def test_an_older_answer_does_not_explain_a_newer_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = asking(tmp_path)
    monkeypatch.setattr(
        inquiry._Question, "lead", lambda self, *_: inquiry._Found("", f"found in {self.number}", False, 1)
    )
    monkeypatch.setattr(inquiry, "_AGAIN_S", 0.0)
    first.timed_out()
    assert first.diagnosed() == ("found in 0 (rank 1 has printed all of it)", False)
    monkeypatch.setattr(inquiry, "_RESULT_S", 0.01)
    monkeypatch.setattr(first, "_start", lambda *what: None)
    first.timed_out()
    assert first.diagnosed().words == ""
    first._lead_or_follow(0, first._snapshot("timeout"), 0.0)  # the first question's thread has been slow
    assert first.diagnosed().words == ""


def test_a_log_that_is_told_keeps_each_threads_last_call() -> None:
    calls = [CallLog(group=0, number=number, kind="barrier", site=Site("a.py", 1, "f"), thread=7) for number in (1, 2)]
    groups = (GroupLog(key="g", name="g", ranks=(0, 1)),)
    calls += [CallLog(group=0, number=3 + at, kind="barrier", site=Site("a.py", 2, "f"), thread=8) for at in range(200)]
    log = RankLog(job="", rank=0, ranks=(0, 1), reason="timeout", groups=groups, calls=tuple(calls))
    told = inquiry._unpacked(inquiry._packed(log), 0, (0, 1)).calls
    assert [call.number for call in told] == [2, *range(75, 203)]


def test_a_result_is_printed_once_and_by_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that has answered may then time out itself."""
    first, _ = asking(tmp_path)
    found = inquiry._Found("all of it", "in a line", has_cause=True, printer=0)
    for _ in range(2):
        assert first._say(3, found) == ("in a line (rank 0 has printed all of it)", True)
    assert capsys.readouterr().err == "commlayer: all of it\n"
    assert first._say(4, inquiry._Found("all of it", "in a line", has_cause=False, printer=1)).words
    assert first._say(5, None).words == ""
    assert capsys.readouterr().err == ""


# Hostile answers

EVIL = "\x1b]0;owned\x07\x1b[2J\nforged"


def told(rank: int, **changed: Any) -> bytes:
    """The log of ``rank``, as it puts it into the store."""
    calls = (CallLog(group=0, number=1, kind="all_reduce", site=Site("train.py", 7, "step"), state="started"),)
    groups = (GroupLog(key="g", name="g", ranks=(0, 1, 2), issued=1),)
    log = RankLog(job="", rank=rank, ranks=(0, 1, 2), reason="asked", host="host", groups=groups, calls=calls)
    return inquiry._packed(msgspec.structs.replace(log, **changed))


def evil_log() -> bytes:
    call = CallLog(group=0, number=1, kind=EVIL, dtype=EVIL, op=EVIL, site=Site(EVIL, 7, EVIL), thread=1)
    group = GroupLog(key="g", name=EVIL, description=EVIL, ranks=(0, 1, 2), issued=1)
    thread = ThreadLog(ident=1, name=EVIL, site=Site(EVIL, 7, EVIL))
    return told(1, host=EVIL, groups=(group,), calls=(call,), threads=(thread,), gone={2: EVIL})


HOSTILE = {
    "garbage": b"\x00garbage",
    "a part": told(1)[:-4],
    "bomb": zlib.compress(b"\x91" * (64 << 20), 9),
    "deep": zlib.compress(b"\x91" * 1_000_000),
    "another type": zlib.compress(msgspec.msgpack.encode([1, 2])),
    "another rank's": told(2),
    "another job's": told(1, ranks=(0, 1)),
    "no group": told(1, groups=()),
    "no state": told(1, calls=(CallLog(group=0, number=1, kind="all_reduce", site=Site("a", 1, "f"), state=EVIL),)),
}


def answer_to(first: Inquiry, **words: bytes | str) -> str:
    """Return what ``first`` finds out where the other ranks have put these words into the store."""
    for key, value in words.items():
        first._store.set(f"0/{key.replace('_', '/')}", value)  # type: ignore[arg-type]  # it takes bytes too
    first.timed_out()
    found = first.diagnosed().words
    first.linger()
    return found


@pytest.fixture
def shared_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A HashStore has no clients of its own."""
    monkeypatch.setattr(inquiry, "own_client", lambda store: store)


@pytest.mark.usefixtures("shared_store")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_log_of_one_rank_is_named_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    first, _ = asking(tmp_path)
    assert answer_to(first, log_1=HOSTILE[kind], log_2=told(2), prints="0").endswith("(rank 0 has printed all of it)")
    said = capsys.readouterr().err
    assert "2 of 3 answered" in said
    assert "the log of rank 1 cannot be read: what rank 1 says cannot be read: " in said
    assert "the job's store does not answer" not in said
    assert "\x1b" not in said


@pytest.mark.usefixtures("shared_store")
def test_a_damaged_log_is_named_behind_a_long_wait_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, detector = asking(tmp_path)
    track = ring.open_track(16, "long", "long", (0, 1, 2), str, str)
    number = track.note("all_reduce", None, 4, 4, None, False, depth=1).number
    first._store.set("0/log/1", HOSTILE["garbage"])  # type: ignore[arg-type]  # it takes bytes too
    for _ in range(2):
        first.waited_long(LongWait("long", 0, "all_reduce", number, perf_counter_ns()))
        first.linger()
    assert [(each.round, each.is_timeout) for each in detector.questions] == [(0, False)], "one call is told of once"
    said = capsys.readouterr().err
    assert said.count("rank 0 has waited for 0 s in all_reduce #1") == 1
    assert "the log of rank 1 cannot be read: what rank 1 says cannot be read: " in said


@pytest.mark.usefixtures("shared_store")
def test_a_log_that_unpacks_to_much_takes_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = HOSTILE["bomb"]
    tracemalloc.start()
    try:
        first, _ = asking(tmp_path)
        answer_to(first, log_1=bomb, log_2=told(2), prints="0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert "expected packed words of at most 4194304 bytes, got more" in capsys.readouterr().err


@pytest.mark.usefixtures("shared_store")
@pytest.mark.parametrize("prints", ["0", "-1", "99", "", EVIL, "9" * 10_000])
def test_no_word_of_a_peer_is_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str], prints: str) -> None:
    first, _ = asking(tmp_path)
    first._store.set("job", f"../../{EVIL}")
    line = answer_to(first, log_1=evil_log(), log_2=told(2), prints=prints)
    said = capsys.readouterr().err
    assert "3 of 3 answered" in said
    assert "owned" in said
    for text in (said, line):
        assert "\x1b" not in text
        assert "\nforged" not in text
    (kept,) = tmp_path.iterdir()
    assert kept.name == "calls-00000.json"
    assert "/" not in json.loads(kept.read_bytes())["job"], "it is a part of the name of a folder"


@pytest.mark.usefixtures("shared_store")
@pytest.mark.parametrize(
    "found", [b"garbage", b"\x91" * 100_000, msgspec.msgpack.encode({"text": "x" * (2 << 20)}), b""], ids=range(4)
)
def test_what_another_rank_has_found_is_read_or_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: bytes
) -> None:
    first, _ = asking(tmp_path)
    first._store.add("0/asked", 1)
    answer_to(first, found=found)
    said = capsys.readouterr().err
    assert "nothing was found out, because what the rank that asked first says cannot be read" in said
    assert "rank 0 (process" in said, "its own log is printed then"


@pytest.mark.usefixtures("shared_store")
def test_what_another_rank_has_found_is_shown_and_not_obeyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = asking(tmp_path)
    first._store.add("0/asked", 1)
    words = inquiry._Found(f"\x1b[2Jtext{EVIL}", f"\x1b[2Jline{EVIL}", has_cause=True, printer=0)
    line = answer_to(first, found=msgspec.msgpack.encode(words))
    assert line.startswith("\\x1b[2Jline\\x1b]0;owned\\x07\\x1b[2J\\x0aforged (rank 0")
    assert "\x1b" not in capsys.readouterr().err

"""The failure detector and the boards that read it: who is told of whom, and who is blamed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import meet
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
)  # torch.distributed has them too, but not for type checkers
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.failures import waits
from commlayer.failures.board import FailedConnection, FailedStep, Failure, FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import Absent, Asked, Gone, Left, Report, framed, frames
from commlayer.failures.rank_links import Links
from commlayer.profiles.errors import CollectiveTimeoutError, DisagreementError, PeerError
from commlayer.testing.plugin import ClusterFactory

KEY = "group"
RANKS = (0, 1, 2, 3)
CLOSED = Failure(RuntimeError("Connection closed by peer"), 0.1, 60.0)
LATE = Failure(RuntimeError("Timed out"), 0.05, 0.05)


def board(detector: FailureDetector, rank: int = 0) -> FailureBoard:
    return FailureBoard(detector, KEY, rank, RANKS)


def wait(rank: int = 0, *peers: int) -> FailedStep:
    return FailedStep(rank, peers, "world", "all_reduce", "flat", "all_reduce", 0, 7)


# Blame, without processes


def test_a_dead_rank_is_blamed_whoever_one_waited_for() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Report(KEY, 1, (2,), "died or closed its connection"))
    detector.tell(Gone(3, 2))
    error = board(detector).explain(wait(0, 1), CLOSED)
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 3 died: its process has ended (seen by rank 2); here: rank 0, group world")


def test_the_first_death_is_blamed_and_not_what_followed_from_it() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Left(2, "left with ValueError: no more data", is_failure=True))
    detector.tell(Gone(1, 3))
    assert str(board(detector).explain(wait(0, 1), CLOSED)).startswith(
        "rank 2 left with ValueError: no more data; here"
    )
    assert board(detector).judge.culprit() == "rank 2 left with ValueError: no more data"


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [Gone(2, 3), Left(2, "left with ValueError", is_failure=True)],
            "rank 2 left with ValueError",
        ),
        (
            [
                Gone(2, 3),
                Left(2, "left with PeerError", is_failure=True, is_consequence=True),
                Left(1, "left with ValueError", is_failure=True),
            ],
            "rank 1 left with ValueError",
        ),
        ([Gone(2, 3)], "rank 2 died: its process has ended (seen by rank 3)"),
        ([Gone(2, 0)], "rank 2 died: its process has ended"),
        ([Absent((1, 2), 6.0, 3)], "ranks 1, 2 did not come within 6 s (seen by rank 3)"),
    ],
    ids=["found gone, then heard", "found gone, and a consequence", "gone", "gone, seen here", "absent"],
)
def test_the_detector_and_a_groups_board_blame_the_same_rank_in_the_same_words(
    records: list[Gone | Left | Absent], words: str
) -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    for record in records:
        detector.tell(record)
    assert detector.knowledge.failure() == words
    assert board(detector).judge.culprit() == words


def test_who_waits_for_whom_leads_to_the_silent_rank() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    for rank, peer in ((1, 2), (2, 3)):
        detector.tell(Report(KEY, rank, (peer,), "did not answer within 2 s"))
    error = board(detector).explain(wait(0, 1), LATE)
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error).startswith("rank 3 did not answer within 2 s (seen by rank 2)")


def test_ranks_that_never_came_are_blamed_and_not_who_gave_up_on_them() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine = board(detector)
    detector.tell(Absent((2, 3), 6.0, 1))
    detector.tell(Absent((2,), 6.0, 0))  # who gives up later says less
    detector.tell(Left(1, "could not join its job: ranks 2, 3 did not come", is_failure=True, is_consequence=True))
    assert mine.is_broken
    error = mine.explain(wait(0, 1), CLOSED)
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error).startswith("ranks 2, 3 did not come within 6 s (seen by rank 1); here: rank 0, group world")
    other = FailureBoard(detector, "others", 0, (0, 1))
    assert other.judge.culprit() == ""


def test_a_member_that_left_because_of_another_groups_rank_is_not_blamed() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Gone(3, 2))
    detector.tell(Left(2, "left with PeerError: rank 3 died", is_failure=True, is_consequence=True))
    text = str(FailureBoard(detector, KEY, 0, (0, 1, 2)).explain(wait(0, 2), CLOSED))
    assert text.startswith(
        "rank 3 died: its process has ended (seen by rank 2), and rank 2 left because of it; here: rank 0, group world"
    ), text
    assert "look at the log of rank 3" in text


def test_a_group_that_lost_the_store_names_the_rank_that_had_it() -> None:
    """It is none of the group's ranks; one member has noticed already, the other one waits for it."""
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine, other = (FailureBoard(detector, KEY, rank, (0, 1)) for rank in (0, 1))
    detector.tell(Gone(3, 2))
    other.leave("lost the job's store: rank 3 died", is_consequence=True)
    text = str(mine.explain(wait(0, 1), CLOSED))
    assert text.startswith(
        "rank 3 died: its process has ended (seen by rank 2), and rank 1 left because of it; here"
    ), text
    text = str(other.explain(wait(1, 0), CLOSED))
    assert text.startswith("rank 3 died: its process has ended (seen by rank 2); here: rank 1"), text


def test_absence_of_a_stranger_is_no_news() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    for ranks in ((), (2, 9)):
        detector.tell(Absent(ranks, 6.0, 1))
    assert not detector.knowledge.ended


def test_a_rank_that_leaves_a_group_is_quoted() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    board(detector, 2).leave("left with MemoryError: 3 GB")
    assert str(board(detector).explain(wait(0, 1, 2, 3), CLOSED)).startswith("rank 2 left with MemoryError: 3 GB; here")


def test_a_rank_that_has_ended_in_good_order_is_named_with_its_reason() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Left(1, "its program has ended", is_failure=False))
    mine = board(detector)
    assert not mine.is_broken, "what it has sent may still be on its way"
    assert str(mine.explain(wait(0, 1), CLOSED)).startswith("rank 1 has left the job (its program has ended)")


def test_ranks_that_wait_for_each_other_blame_the_program() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Report(KEY, 1, (0,), "did not answer within 2 s"))
    text = str(board(detector).explain(wait(0, 1), LATE))
    assert "did all ranks call the same collectives in the same order?" in text


def test_a_woken_rank_does_not_blame_whom_it_happened_to_wait_for() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine, woken = board(detector), []

    class Sleeper:
        def wake(self) -> None:
            woken.append(1)

    sleeper = Sleeper()
    mine.on_break(sleeper.wake)
    detector.tell(Report(KEY, 2, (3,), "did not answer within 2 s"))
    detector.tell(Report(KEY, 1, (), "left with OSError: disk full"))
    assert (mine.is_broken, woken) == (True, [1])
    mine.blame(wait(0, 1), Failure(waits.woken(), 0.5, 60.0))
    assert detector.knowledge.reports[KEY, 0].what == "did not answer within 2 s"


def test_a_rank_that_is_woken_by_who_waited_for_it_names_whom_it_waited_for() -> None:
    """Rank 1 waits for rank 0, which waits for rank 2, and is a moment earlier with its timeout."""
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine = board(detector)
    detector.tell(Report(KEY, 1, (0,), "did not answer within 2 s"))
    error = mine.blame(wait(0, 2), Failure(waits.woken(), 1.9, 2.0))
    assert isinstance(error, CollectiveTimeoutError)
    assert str(error).startswith("rank 2 did not answer within 2 s; here")


def test_a_group_is_broken_by_its_own_members_only() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    others = FailureBoard(detector, "other", 0, (0, 1))
    detector.tell(Gone(3, 2))
    detector.tell(Report(KEY, 1, (3,), "died"))
    assert not others.is_broken
    assert board(detector).is_broken, "a board that is made later knows it too"
    detector.tell(Gone(1, 2))
    assert others.is_broken


def test_a_rank_that_connects_says_so() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Gone(1, 2))
    text = str(board(detector).explain(FailedConnection(0, (1, 2, 3), "world", "messages"), CLOSED))
    assert "rank 1 died" in text
    assert "rank 0 could not connect to ranks 1, 2, 3 (group world, messages)" in text


def nested() -> bytes:
    """A frame whose type is named behind a field that is nested deeper than any parser goes."""
    words = b"\x82\xa1x" + b"\x91" * 50_000 + b"\xc0\xa4type\xa4Gone"
    return len(words).to_bytes(4, "big") + words


JUNK = [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", framed(Gone(1, 2))[:-1] + b"\xc1", nested()]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_is_refused_and_halves_wait(junk: bytes) -> None:
    frame = framed(Report(KEY, 1, (2, 3), "died"))
    inbox = bytearray(frame + frame[:7])
    assert frames(inbox) == [Report(KEY, 1, (2, 3), "died")]
    assert bytes(inbox) == frame[:7]
    with pytest.raises((ValueError, DisagreementError)):
        frames(bytearray(junk))


def test_a_consequence_is_not_blamed_where_the_cause_is_known() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Report(KEY, 1, (3,), "did not answer within 2 s"))
    detector.tell(Left(1, "left with CollectiveTimeoutError: rank 3 did not answer", True, is_consequence=True))
    mine = board(detector)
    assert mine.is_broken
    assert str(mine.explain(wait(0, 1), LATE)).startswith("rank 3 did not answer within 2 s")
    elsewhere = FailureBoard(detector, "another group", 0, (0, 1))
    assert str(elsewhere.explain(wait(0, 1), CLOSED)).startswith("rank 1 left with CollectiveTimeoutError: rank 3")


def test_why_a_rank_left_is_told_by_those_who_heard_it() -> None:
    """A rank that comes too late for a connection sees a closed port only; its neighbours have been told more."""
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine = board(detector)
    detector.tell(Gone(3, 0, is_unheard=True))
    neighbour = threading.Timer(0.1, detector.tell, [Left(3, "left with ClusterError: no files", True)])
    neighbour.start()
    assert str(mine.explain(wait(0, 3), CLOSED)).startswith("rank 3 left with ClusterError: no files; here")
    neighbour.join()


def test_of_a_rank_that_nobody_heard_its_end_is_told() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Gone(3, 0, is_unheard=True))
    assert str(board(detector).explain(wait(0, 3), CLOSED)).startswith("rank 3 died: its process has ended; here")


def test_of_a_large_group_nobody_lists_all_ranks() -> None:
    detector, ranks = FailureDetector(None, 0, range(20_000), 0.0), range(20_000)
    mine = FailureBoard(detector, "g" * 5000, 0, ranks)
    mine.blame(wait(0, *ranks[1:]), LATE)
    (report,) = detector.knowledge.reports.values()
    assert report.is_all
    assert len(framed(report)) < 300
    for rank in ranks[1:-1]:
        detector.tell(Report(mine.key, rank, (), "did not answer within 2 s", is_all=True))
    assert str(mine.explain(wait(0, *ranks[1:]), LATE)).startswith("rank 19999 did not answer within 0.05 s; here")


def test_text_that_cannot_be_encoded_is_told_all_the_same() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    board(detector, 1).leave("left with OSError: no file " + chr(0xDCFF) + "x" * 10_000)
    (report,) = detector.knowledge.reports.values()
    assert frames(bytearray(framed(report))) == [report]


def test_an_observer_that_raises_keeps_nobody_else_from_hearing(capsys: pytest.CaptureFixture[str]) -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)

    class Raises:
        def observe(self, record: object) -> None:
            raise KeyError(record)

    mine, first, second = board(detector), Raises(), Raises()
    detector.knowledge.attach(first)
    detector.knowledge.attach(second)
    detector.tell(Gone(3, 1))
    assert mine.is_broken
    assert capsys.readouterr().err.count("KeyError: Gone") == 2


def test_a_timeout_is_told_where_nobody_can_be_asked_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise KeyError("group")

    mine = board(FailureDetector(None, 0, RANKS, 0.0))
    mine.on_timeout = fails
    assert "rank 2 did not answer" in str(mine.blame(wait(0, 2), LATE))
    assert mine.is_broken
    assert "rank 0 could not ask who waits for whom: KeyError: 'group'" in capsys.readouterr().err


def test_questions_are_news_however_many_there_have_been() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    heard: list[object] = []

    class Hears:
        def observe(self, record: object) -> None:
            heard.append(record)

    hears = Hears()
    detector.knowledge.attach(hears)
    questions = [Asked(number, 1, is_timeout=True) for number in range(300)]
    for each in questions:
        detector.tell(each)
        detector.tell(Asked(each.round, 2, is_timeout=True))
    for each in questions:  # what comes round once more, late
        detector.tell(each)
    assert heard == questions
    assert len(detector.knowledge.asked) <= 64


def test_a_closed_connection_is_told_once_its_cause_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's monitored_barrier, whose peer had heard of a death and left before the news came here."""
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine = board(detector)
    monkeypatch.setattr("commlayer.failures.waits.time.sleep", lambda _: detector.tell(Gone(3, 2)))

    def fails(words: str) -> None:
        raise RuntimeError(words)

    with pytest.raises(RuntimeError, match="Rank 1 failed to pass"):
        waits.bounded(lambda: fails("Rank 1 failed to pass monitoredBarrier in 9 ms"), mine, 60.0, "monitored_barrier")
    assert not mine.is_broken, "its own limit needs no other cause"
    with pytest.raises(RuntimeError, match="Connection closed"):
        waits.bounded(lambda: fails("Connection closed by peer"), mine, 60.0, "monitored_barrier")
    assert mine.is_broken


def test_a_rank_that_has_left_and_is_then_not_found_has_not_died() -> None:
    """One that did not hear why it left finds its port closed, and tells everybody."""
    detector = FailureDetector(None, 0, RANKS, 0.0)
    mine = board(detector)
    detector.tell(Left(3, "it destroyed its process group", is_failure=False))
    detector.tell(Gone(3, 1, is_unheard=True))
    assert not mine.is_broken
    assert (detector.knowledge.gone, detector.knowledge.ended) == ({}, [])


def test_a_rank_is_named_by_its_own_words_where_its_death_was_told_before() -> None:
    detector = FailureDetector(None, 0, RANKS, 0.0)
    detector.tell(Gone(3, 1, is_unheard=True))
    detector.tell(Left(3, "its program has ended", is_failure=False))
    assert board(detector).judge.culprit() == "rank 3 has left the job (its program has ended)"


class NeverDone:
    """A collective that nobody answers, on a clock that its waits move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[timedelta] = []

    def wait(self, patience: timedelta) -> None:
        self.asked.append(patience)
        self.now_s += patience.total_seconds()
        raise RuntimeError("Timed out")

    def is_completed(self) -> bool:
        return False


def test_a_wait_lasts_as_long_as_it_may_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    work = NeverDone()
    monkeypatch.setattr("commlayer.failures.waits.time.monotonic", lambda: work.now_s)
    for timeout_s, slices in ((0.6, [250, 250, 100]), (0.1, [100]), (0.0, [1])):
        work.asked.clear()
        with pytest.raises(RuntimeError, match="Timed out"):
            waits.wait(work, board(FailureDetector(None, 0, (0,), 0.0)), timeout_s)
        assert [round(asked / timedelta(milliseconds=1)) for asked in work.asked] == slices


# Two detectors of one process


@pytest.fixture
def detectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureDetector]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        two = list(pool.map(lambda rank: FailureDetector(store, rank, (0, 1), 20.0), (0, 1)))
    yield two
    for detector in two:
        detector.close("the test is over")


def links_of(detector: FailureDetector) -> Links:
    assert detector.links is not None
    return detector.links


def stranger_at(detector: FailureDetector) -> tuple[socket.socket, socket.socket]:
    """A connection to the detector whose other end never says who it is: that end, and the detector's own."""
    visitor = socket.create_connection(("127.0.0.1", links_of(detector).port))
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        for link in list(links_of(detector).strangers):
            if link.socket.getpeername()[1] == visitor.getsockname()[1]:
                return visitor, link.socket
        time.sleep(0.005)
    raise AssertionError("the detector has not let it in")


def test_a_detector_that_closes_shows_strangers_out(detectors: list[FailureDetector]) -> None:
    visitor, link = stranger_at(detectors[0])
    with visitor:
        detectors[0].close("it ends")
        links_of(detectors[0]).thread.join(20.0)
        assert link.fileno() == -1
        visitor.settimeout(20.0)
        assert visitor.recv(1) == b""


def test_the_last_words_of_a_rank_arrive_whatever_it_has_not_read(
    detectors: list[FailureDetector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To close a socket in which something is unread throws away what is still on its way to the other end."""
    monkeypatch.setattr("commlayer.failures.rank_links._FLUSH_S", 20.0)
    leaves, hears = detectors
    with hears.knowledge.changed:
        its = links_of(hears)
        links, its.links = its.links, []
        for link in links:
            its._selector.unregister(link.socket)  # the test reads for it
    reads_again, bell = threading.Event(), os.eventfd(1)

    def stall() -> None:
        reads_again.wait(60.0)
        os.eventfd_read(bell)

    assert links_of(leaves).listen(bell, stall)
    for link in links:
        link.socket.send(framed(Report(KEY, 1, (0,), "unread")))
    closing = threading.Thread(target=leaves.close, args=("it ends",))
    closing.start()
    for link in links:
        link.socket.settimeout(60.0)
        while data := link.socket.recv(1 << 16):
            link.inbox += data
        assert frames(link.inbox)[-1] == Left(0, "it ends", is_failure=False)
        link.socket.close()
    reads_again.set()
    closing.join()
    os.close(bell)


def test_who_finds_a_port_closed_first_asks_those_who_may_have_heard_more(detectors: list[FailureDetector]) -> None:
    """A rank that leaves has told its neighbours; one that it had no connection with hears of it through others."""
    detector, left = detectors[0], Left(1, "its program has ended", is_failure=False)
    links_of(detector).heard.clear()
    neighbour = threading.Timer(0.05, detector.tell, [left])
    neighbour.start()
    assert detector._dialler is not None
    detector._dialler._find_ended(1)
    neighbour.join()
    assert (detector.knowledge.gone, detector.knowledge.left) == ({}, {1: left})


def test_a_forked_child_lets_go_of_strangers_too(detectors: list[FailureDetector]) -> None:
    visitor, link = stranger_at(detectors[0])
    with visitor:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:  # detectors are disowned before this line
            os.write(writer, b"open" if link.fileno() >= 0 else b"gone")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 4) == b"gone"
        os.close(reader)
        os.close(writer)


# Processes


def detector_of(rank: int, timeout_s: float = 60.0) -> FailureDetector:
    return FailureDetector(
        PrefixStore("detectors/", _get_default_store()), rank, range(dist.get_world_size()), timeout_s
    )


def await_news(detector: FailureDetector, seconds: float = 60.0) -> bool:
    with detector.knowledge.changed:
        return detector.knowledge.changed.wait_for(
            lambda: bool(detector.knowledge.ended or detector.knowledge.left), seconds
        )


def start() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    return dist.get_rank()


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["kill", "_exit", "exit", "crash"])
def test_every_rank_hears_how_another_ended(emulated_cluster: ClusterFactory, way: str) -> None:
    """Rank 0, which hosts the store: nobody may need it."""

    def job() -> tuple[list[Any], list[Any]]:
        rank = start()
        detector = detector_of(rank)
        meet(0)
        if rank == 0:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif way == "_exit":
                os._exit(0)
            detector.close(
                "left with ValueError" if way == "crash" else "its program has ended", is_failure=way == "crash"
            )
            sys.exit(0)
        assert await_news(detector)
        ended = [r for r in detector.knowledge.ended if not isinstance(r, Absent)]
        return [(type(r).__name__, r.rank) for r in ended], [
            (r.rank, r.why) for r in detector.knowledge.left.values() if r.rank == 0
        ]

    outcomes = emulated_cluster(3, 2).run(job, check=False, grace_s=70.0)
    for outcome in outcomes[1:]:
        assert outcome.failure is None, outcome.failure
        ended, left = outcome.value
        if way in ("kill", "_exit"):
            assert (ended, left) == ([("Gone", 0)], [])
        elif way == "exit":
            assert (ended, left) == ([], [(0, "its program has ended")])
        else:
            assert (ended, left) == ([("Left", 0)], [(0, "left with ValueError")])


@pytest.mark.cluster
def test_a_child_that_outlives_a_rank_does_not_hide_its_death(emulated_cluster: ClusterFactory) -> None:
    """The child may be a worker of a DataLoader, which has inherited the connections."""

    def outlive(begun: int) -> None:
        os.setsid()  # or the cluster ends it with the rank
        os.write(begun, b"x")
        time.sleep(90)

    def job() -> list[int]:
        rank = start()
        detector = detector_of(rank)
        if rank == 1:
            under_way, begun = os.pipe()
            multiprocessing.get_context("fork").Process(target=outlive, args=(begun,)).start()
            os.read(under_way, 1)
        meet(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert await_news(detector), "the child holds the connections"
        return list(detector.knowledge.gone)

    outcomes = emulated_cluster(1, 3).run(job, check=False, grace_s=70.0)
    assert outcomes[0].value == outcomes[2].value == [1]


@pytest.mark.cluster
def test_a_connection_that_is_lost_is_no_death(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[list[int], int]:
        rank = start()
        detector = detector_of(rank)
        dist.barrier()
        if rank == 0:
            with detector.knowledge.changed:
                for link in links_of(detector).links:
                    link.socket.shutdown(socket.SHUT_RDWR)
        dist.barrier()
        time.sleep(0.5)  # for a wrong verdict to come
        gone = list(detector.knowledge.gone)
        dist.barrier()
        if rank == 0:  # and the new connections carry news
            detector.tell(Report(KEY, 0, (1,), "died"))
        with detector.knowledge.changed:
            assert detector.knowledge.changed.wait_for(lambda: detector.knowledge.reports, 60.0)
        num_links = len(links_of(detector).links)
        dist.barrier()
        return gone, num_links

    for gone, num_links in emulated_cluster(1, 4).run(job):
        assert gone == []
        assert num_links >= 2


@pytest.mark.cluster
def test_a_rank_that_has_no_time_to_answer_is_no_death(emulated_cluster: ClusterFactory) -> None:
    """It holds the interpreter lock for longer than a dial waits, while its connections are lost."""

    def job() -> list[int]:
        rank = start()
        detector = detector_of(rank)
        dist.barrier()
        if rank == 0:
            with detector.knowledge.changed:
                for link in links_of(detector).links:
                    if link.rank == 1:
                        link.socket.shutdown(socket.SHUT_RDWR)
        elif rank == 1:
            ctypes.PyDLL(None).usleep(3_000_000)
        dist.barrier()
        time.sleep(0.5)
        return list(detector.knowledge.gone)

    assert emulated_cluster(1, 3).run(job) == [[], [], []]


@pytest.mark.cluster
def test_a_stranger_is_sent_away(emulated_cluster: ClusterFactory) -> None:
    """Any process can connect; it can neither speak for a rank nor keep the detector from its work."""

    def job() -> list[int]:
        rank = start()
        detector = detector_of(rank)
        dist.barrier()
        if rank == 0:
            port = links_of(detector).port
            for words in (framed(Gone(1, 2)), b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
                with socket.create_connection(("127.0.0.1", port), 60.0) as stranger:
                    stranger.sendall(words)
                    stranger.settimeout(60.0)
                    assert stranger.recv(1) == b""
            assert not detector.knowledge.gone
        meet(2)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert await_news(detector)
        return list(detector.knowledge.gone)

    outcomes = emulated_cluster(1, 3).run(job, check=False, grace_s=70.0)
    assert [outcome.failure or outcome.value for outcome in outcomes[:2]] == [[2], [2]]


@pytest.mark.cluster
def test_what_a_detector_holds_it_gives_back(emulated_cluster: ClusterFactory) -> None:
    def job() -> bool:
        rank = start()
        dist.barrier()
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for nth in range(3):
            store = PrefixStore(f"{nth}/", _get_default_store())
            detector = FailureDetector(store, rank, range(dist.get_world_size()), 20.0)
            dist.barrier()
            detector.close("done")
            detector.close("again")
        return (len(os.listdir("/proc/self/fd")), threading.active_count()) == before

    assert all(emulated_cluster(1, 4).run(job))

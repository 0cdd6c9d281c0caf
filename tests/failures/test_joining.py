"""Ranks that end while a job is joined: who has said where it listens is missed at once, and those that come late hear of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, be_absent, tell, wait_until
from torch._C._distributed_c10d import (  # torch.distributed has them too, but not for type checkers
    HashStore,
    PrefixStore,
)

from commlayer.backend import store_barrier
from commlayer.backend.create import Connector
from commlayer.failures import detector as detectors
from commlayer.failures.board import why_left
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import Card
from commlayer.failures.store_answers import Deadline, PolledStore
from commlayer.profiles.errors import BLAMING, PeerError
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.gloo_groups import gloo_in_order

ELSEWHERE = "127.0.0.2"
"""An address at which no rank of these tests but the one that ends has ever listened, as on a node of one rank."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureDetector]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found: list[FailureDetector] = []
    yield found
    for each in found:
        each.close("the test is over")


def say_where(store: HashStore, rank: int, port: int) -> None:
    card = Card((ELSEWHERE,), port, b"secret")
    store.set(f"detector/{rank}", msgspec.msgpack.encode(card))  # type: ignore[arg-type]  # it takes bytes too


def end_once_dialled(listener: socket.socket) -> threading.Thread:
    def end() -> None:
        visitor, _ = listener.accept()
        listener.close()
        visitor.close()

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def await_death(detector: FailureDetector) -> list[int]:
    with detector.knowledge.changed:
        assert detector.knowledge.changed.wait_for(lambda: bool(detector.knowledge.gone), 30.0)
        return list(detector.knowledge.gone)


def test_a_rank_that_ends_before_its_first_answer_is_dead(opened: list[FailureDetector]) -> None:
    store = HashStore()
    with socket.create_server((ELSEWHERE, 0)) as listener:
        say_where(store, 1, listener.getsockname()[1])
        ends = end_once_dialled(listener)
        opened.append(FailureDetector(store, 0, (0, 1), 30.0))
        ends.join()
    assert await_death(opened[0]) == [1]


def test_a_refusal_alone_is_no_death(opened: list[FailureDetector], monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall refuses, too."""
    store = HashStore()
    with socket.create_server((ELSEWHERE, 0)) as listener:
        port = listener.getsockname()[1]
    say_where(store, 1, port)
    monkeypatch.setattr("commlayer.failures.rank_links._MOST_DIALS", 2)
    threads = [thread.name for thread in threading.enumerate()]
    opened.append(FailureDetector(store, 0, (0, 1), 30.0))
    for thread in threading.enumerate():
        if thread.name == "commlayer-ask" and thread.name not in threads:
            thread.join(30.0)
    assert not opened[0].knowledge.gone


@pytest.fixture
def refused(opened: list[FailureDetector]) -> FailureDetector:
    """The detector of rank 0, whose time for joining is over, and which ranks 1 and 2 have refused."""
    store = HashStore()
    with socket.create_server((ELSEWHERE, 0)) as listener:
        port = listener.getsockname()[1]
    for rank in (1, 2):
        say_where(store, rank, port)
    opened.append(FailureDetector(store, 0, (0, 1, 2), Deadline(30.0, until=time.monotonic())))
    return opened[0]


def test_a_rank_that_refuses_has_not_come_when_the_time_for_joining_is_over(
    refused: FailureDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has come, and a firewall refuses for it."""
    monkeypatch.setattr(detectors, "_CONNECTING_S", 0.0)
    with refused.expecting_all(lambda rank: rank == 1):
        assert refused.knowledge.await_failure(30.0) == "rank 2 did not come within 30 s"


def test_ranks_that_come_at_the_last_moment_have_time_to_connect(refused: FailureDetector) -> None:
    with refused.expecting_all(lambda rank: False):
        assert not refused.knowledge.await_failure(0.2)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_that_refuses_and_has_come_is_not_missed(
    refused: FailureDetector, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Where the store cannot say, nobody is missed either."""
    has_asked = threading.Event()

    def has_come(_: int) -> bool:
        has_asked.set()
        if is_lost:
            raise RuntimeError("the store is gone")
        return True

    monkeypatch.setattr(detectors, "_CONNECTING_S", 0.0)
    with refused.expecting_all(has_come):
        assert has_asked.wait(30.0)
        assert not refused.knowledge.await_failure(0.2)


def test_a_rank_is_not_missed_once_the_others_are_connected(
    refused: FailureDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store is just being asked."""
    is_asked, is_connected = threading.Event(), threading.Event()

    def has_come(_: int) -> bool:
        is_asked.set()
        assert is_connected.wait(30.0)
        return False

    monkeypatch.setattr(detectors, "_CONNECTING_S", 0.0)
    with refused.expecting_all(has_come):
        assert is_asked.wait(30.0)
    is_connected.set()
    assert not refused.knowledge.await_failure(0.2)


def test_only_the_first_group_of_a_job_expects_all(refused: FailureDetector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread can be started for it."""
    timers: list[Any] = []

    def timer(*_: Any) -> Any:
        timers.append(Mock())
        timers[-1].start.side_effect = RuntimeError("can't start new thread")
        return timers[-1]

    monkeypatch.setattr(threading, "Timer", timer)
    for _ in range(2):
        with refused.expecting_all(lambda rank: False):
            pass
    assert len(timers) == 1
    timers[0].start.assert_called_once()
    timers[0].cancel.assert_called_once()


def test_a_rank_that_comes_late_hears_why_others_have_left(
    opened: list[FailureDetector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detectors, "_LATE_S", 60.0)
    store = HashStore()
    with socket.create_server((ELSEWHERE, 0)) as listener:
        say_where(store, 1, listener.getsockname()[1])
        ends = end_once_dialled(listener)
        with pytest.raises(PeerError, match=r"^rank 0, joining the job of 3 ranks: rank 1 died: its process has ended"):
            FailureDetector(store, 0, (0, 1, 2), 30.0)  # it waits for rank 2
        ends.join()
    try:
        opened.append(FailureDetector(store, 2, (0, 1, 2), 30.0))
    except PeerError as error:  # it has heard before it had asked for all that it dials
        words = str(error)
    else:
        await_death(opened[0])
        words = opened[0].knowledge.failure()
    assert "rank 1 died: its process has ended (seen by rank 0)" in words


def test_whoever_fails_at_the_start_waits_for_nobody_that_has_heard(opened: list[FailureDetector]) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        opened += pool.map(lambda rank: FailureDetector(store, rank, (0, 1), 30.0), (0, 1))
    first, other = opened
    dialler = first._dialler
    assert dialler is not None
    with first.knowledge.changed:
        assert first.knowledge.changed.wait_for(lambda: 1 in dialler.links.heard, 30.0)
    dialler.await_heard(0.0)
    first.fail("left with ValueError")
    assert first.staying is not None
    first.staying.join()
    with other.knowledge.changed:
        assert other.knowledge.changed.wait_for(lambda: bool(other.knowledge.left), 30.0)
        assert other.knowledge.failure() == "rank 0 left with ValueError"


def test_a_name_is_looked_up_only_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take seconds, or lead another machine to itself."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    store: Any = HashStore()
    monkeypatch.setattr(detectors, "_address_towards", lambda store: "10.0.0.7")
    assert detectors._addresses(store) == ["10.0.0.7"]
    monkeypatch.setattr(detectors, "_address_towards", lambda store: "127.0.0.1")
    assert detectors._addresses(store) == ["127.0.0.1", "127.0.1.1"]


def test_a_rank_joins_before_it_loads_what_it_runs_on() -> None:
    program = (
        "import sys, torch.distributed, commlayer.backend.joining\n"
        "heavy = ('commlayer.backend.create', 'commlayer.engine', 'commlayer.scheduler.decision', 'scipy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


# Processes


def outcome() -> tuple[str, str]:
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    try:
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
    except Exception as error:  # noqa: BLE001  the tests ask which it was
        end_by(error)
        return type(error).__name__, str(error)
    return "nothing", ""


def end_by(error: Exception) -> None:
    """Leave as a program does that ends by ``error``: ranks that are late hear why."""
    detectors.leave_all(why_left(error), is_failure=True, is_consequence=isinstance(error, BLAMING))


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_that_has_said_where_it_listens_and_dies_is_named(emulated_cluster: ClusterFactory, victim: int) -> None:
    """Before it has dialled anybody, and before its thread runs."""

    def job() -> tuple[str, str]:
        if os.environ["RANK"] == str(victim):
            say = detectors._Cards.put

            def say_and_die(*arguments: Any) -> None:
                say(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

            detectors._Cards.put = say_and_die  # type: ignore[method-assign, assignment]
        return outcome()

    for each in emulated_cluster(2, 2).run(job, check=False, grace_s=40.0):
        if each.rank != victim:
            assert each.value is not None, each.failure
            kind, text = each.value
            assert kind == "PeerError", text
            assert f"rank {victim} died: its process has ended" in text.split("; here:")[0], text


def await_refusal(card: Card) -> None:
    while True:
        try:
            socket.create_connection((card.addresses[0], card.port)).close()
        except ConnectionRefusedError:  # noqa: PERF203  a test waits for it
            return
        except OSError:  # it ends just now
            continue


def patch_rank_that_dies_undialled(victim: int) -> None:
    """On each rank: the victim dies once it has said where it listens, and the others dial it later. Each has an address of its
    own, so that no rank has answered where the dead one refuses: it may be a firewall."""
    rank, say = int(os.environ["RANK"]), detectors._Cards.put

    def say_and_die(cards: Any) -> None:
        say(cards)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        await_refusal(cards.of(victim))

    detectors._addresses = lambda store: [f"127.0.0.{2 + rank}"]
    detectors._Cards.put = say_and_die  # type: ignore[method-assign, assignment]


def test_gloo_keeps_addresses_where_they_are_looked_for() -> None:
    """One of two ranks leaves its address, and waits in vain for the other one's."""
    store, ranks = HashStore(), (4, 7)
    connectors = [Connector(Mock(global_ranks=ranks, rank=rank), store, Mock(), Mock()) for rank in range(len(ranks))]
    polled = PolledStore(store, 0.2, lambda: False)
    with pytest.raises(RuntimeError, match="Timed out"):
        gloo_in_order(PrefixStore("gloo/", polled), 1, 2, timedelta(seconds=0.2))
    assert [connectors[0].has_come(rank) for rank in ranks] == [False, True]
    connectors[1]._take_back_address()
    assert not connectors[0].has_come(7)


@pytest.mark.cluster
def test_a_rank_that_dies_before_anybody_has_dialled_it_is_named(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    def job() -> tuple[str, str]:
        patch_rank_that_dies_undialled(1)
        (tmp_path / os.environ["RANK"]).touch()
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        os.environ["COMMLAYER_PROFILE"] = "none"
        try:
            dist.init_process_group("commlayer", timeout=timedelta(seconds=6))
        except RuntimeError as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    for each in emulated_cluster(1, 3).run(job, check=False, grace_s=60.0):
        if each.rank != 1:
            assert each.value is not None, each.failure
            kind, text = each.value
            assert kind == "CollectiveTimeoutError", text
            assert named(text) == {"1"}, text
            assert "rank 1 did not come within 6 s" in text, text


@pytest.mark.cluster
def test_a_death_ends_the_wait_for_a_rank_that_has_not_come(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Rank 0 waits for rank 2, which never comes, when rank 1 dies."""

    def job() -> tuple[str, str]:
        rank = int(os.environ["RANK"])

        def stay_away(*_: Any) -> None:
            while not heard.exists():
                time.sleep(0.01)
            os._exit(0)

        if rank == 2:  # it has come to the store, where rank 0 waits for all to come
            detectors._Cards.put = stay_away  # type: ignore[method-assign, assignment]
        if rank == 1:
            detectors._Cards.of = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        found = outcome()
        heard.touch()
        return found

    heard = tmp_path / "heard"
    outcomes = emulated_cluster(1, 3).run(job, check=False, grace_s=60.0)
    assert outcomes[0].value is not None, outcomes[0].failure
    kind, text = outcomes[0].value
    assert kind == "PeerError", text
    assert text.startswith("rank 0, joining the job of 3 ranks: rank 1 died: its process has ended"), text


def named(text: str) -> set[str]:
    """The ranks that an error names, but for the one that raises it and the one that has seen it."""
    said = text.split("; here:")[0].removeprefix(re.match(r"(rank \d+, [^:]*: )?", text)[0])  # type: ignore[index]
    said = re.sub(r" \(seen by rank \d+\)", "", said)
    return {number for ranks in re.findall(r"ranks? ([\d, ]+)", said) for number in ranks.strip(", ").split(", ")}


@pytest.mark.cluster
@pytest.mark.parametrize("absent", [(1,), (2, 3)])
def test_ranks_that_never_come_are_named_and_no_others(
    emulated_cluster: ClusterFactory, tmp_path: Path, absent: tuple[int, ...]
) -> None:
    """Not rank 0 either, which is the first to give up, and takes the job's store with it."""

    def job() -> tuple[str, str]:
        rank = int(os.environ["RANK"])
        (tmp_path / str(rank)).touch()
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        if rank in absent:
            os._exit(0)
        os.environ["COMMLAYER_PROFILE"] = "none"
        try:
            dist.init_process_group("commlayer", timeout=timedelta(seconds=6 if rank == 0 else 60))
        except RuntimeError as error:
            end_by(error)
            return type(error).__name__, str(error)
        return "nothing", ""

    for each in emulated_cluster(2, 2).run(job, check=False, grace_s=80.0):
        if each.rank not in absent:
            assert each.value is not None, each.failure
            kind, text = each.value
            assert kind in ("CollectiveTimeoutError", "PeerError"), text
            assert named(text) == {str(rank) for rank in absent}, text
            assert "did not come within 6 s" in text, text


def test_a_store_that_is_not_up_is_named_with_its_host() -> None:
    program = (
        "import socket, torch, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    port = server.getsockname()[1]\n"
        "dist.init_process_group('commlayer', init_method=f'tcp://127.0.0.1:{port}', rank=1, world_size=2,\n"
        "                        timeout=timedelta(seconds=0.5))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "commlayer.profiles.errors.CollectiveTimeoutError: rank 1, joining the job: the job's store at 127."
    ), last
    assert "did not answer within 0.5 s: rank 0 hosts it" in last


@pytest.mark.cluster
@pytest.mark.parametrize("dies", [True, False])
def test_torchs_barrier_behind_a_new_group_names_who_does_not_come(
    emulated_cluster: ClusterFactory, dies: bool
) -> None:
    """All ranks of the job wait in it, also rank 2, which the group does not have."""

    def job() -> tuple[str, str]:
        os.environ |= {"TORCH_DIST_INIT_BARRIER": "1", "COMMLAYER_PROFILE": "none"}
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
        if dist.get_rank() == 3:
            wait_until("comes", 3)
            if dies:
                os._exit(1)
            be_absent(3)
            return "", ""
        tell("comes")
        try:
            dist.new_group([0, 1], timeout=timedelta(seconds=HALF_AN_HOUR if dies else 1))
        except RuntimeError as error:
            return type(error).__name__, str(error)
        finally:
            if not dies:
                tell("done")
        return "", ""

    for each in emulated_cluster(2, 2).run(job, check=False, grace_s=60.0)[:3]:
        assert each.value is not None, each.failure
        kind, text = each.value
        assert text.startswith(f"rank {each.rank}, group 1, which has been made: waiting for 4 ranks"), text
        if dies:
            assert kind == "PeerError", text
            assert "rank 3 died: its process has ended" in text, text
        else:
            assert kind == "CollectiveTimeoutError", text
            assert "rank 3 has not come to new_group of group 1 (ranks 0, 1, 2, 3), for which" in text, text


@pytest.mark.cluster
def test_the_stores_host_that_dies_in_torchs_barrier_is_named(emulated_cluster: ClusterFactory) -> None:
    """Rank 0, which takes the store with it that the others ask in the barrier."""

    def job() -> tuple[str, str]:
        os.environ |= {"TORCH_DIST_INIT_BARRIER": "1", "COMMLAYER_PROFILE": "none"}
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
        check, torchs = PolledStore.check, store_barrier._wait

        def tell_and_check(store: PolledStore, keys: list[str]) -> bool:
            PolledStore.check = check  # type: ignore[method-assign]
            tell("waits in the barrier")
            return check(store, keys)

        def wait(*arguments: Any) -> None:
            if dist.get_rank() == 0:
                wait_until("waits in the barrier", 3)
                os.kill(os.getpid(), signal.SIGKILL)
            PolledStore.check = tell_and_check  # type: ignore[method-assign, assignment]
            torchs(*arguments)

        store_barrier._wait = wait  # type: ignore[assignment]
        try:
            dist.new_group([0, 1], timeout=timedelta(seconds=HALF_AN_HOUR))
        except RuntimeError as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    for each in emulated_cluster(2, 2).run(job, check=False, grace_s=60.0)[1:]:
        assert each.value is not None, each.failure
        kind, text = each.value
        assert kind == "PeerError", text
        assert text.startswith(f"rank {each.rank}, group 1, which has been made: waiting for 4 ranks"), text
        assert "rank 0 died: its process has ended" in text, text


@pytest.mark.cluster
def test_a_rank_that_cannot_load_what_it_runs_on_says_so(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        if os.environ["RANK"] == "1":
            sys.modules["commlayer.backend.new_groups"] = None  # type: ignore[assignment]
        return outcome()

    outcomes = emulated_cluster(1, 2).run(job, check=False, grace_s=40.0)
    assert outcomes[1].value[0] == "ModuleNotFoundError"
    kind, text = outcomes[0].value
    assert kind == "PeerError", text
    assert "rank 1 left with ModuleNotFoundError: import of commlayer.backend.new_groups halted" in text

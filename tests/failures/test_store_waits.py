"""Questions to the job's store are bounded, and its errors say who waits, for what, and who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from commlayer.agree.signature_check import SignatureCheck
from commlayer.backend.joining import GroupRequest, joining_group, own_keys
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.failures.store_answers import Deadline
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError, TensorError


class Silent:
    """A store whose host is stopped: nothing is answered until the test ends."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def _never(self, *_: object) -> None:
        self.over.wait(60.0)

    set = add = wait = get = check = _never


class Gone:
    """A store whose host has ended."""

    def _refused(self, *_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    set = add = wait = get = check = _refused


@pytest.fixture
def silent() -> Iterator[Any]:
    store = Silent()
    yield store
    store.over.set()


def explained(error: RuntimeError, call: str, *_: object) -> ClusterError:
    return ClusterError(f"{call}: {error}")


def test_all_ranks_that_do_not_join_are_named() -> None:
    with pytest.raises(CollectiveTimeoutError) as caught:
        FailureDetector(HashStore(), 1, range(5), 0.2)
    message = str(caught.value)
    assert message.startswith("rank 1, joining the job of 5 ranks: ranks 0, 2, 3, 4 did not come within 0.2 s")


def test_joining_takes_what_is_left_of_the_timeout() -> None:
    """Connecting with the job's store has taken most of it."""
    began = time.monotonic()
    request = GroupRequest("0", 1, (0, 1), HashStore(), timedelta(seconds=60), is_default=True, began=began - 59.8)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 did not come within 60 s"), joining_group(request):
        pass
    assert time.monotonic() - began < 30


def test_a_silent_store_ends_joining(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.failures.detector.STORE_GRACE_S", 0.1)
    with pytest.raises(
        CollectiveTimeoutError, match=r"^rank 1, joining the job of 2 ranks: the job's store did not answer"
    ):
        FailureDetector(silent, 1, range(2), 0.1)


def test_a_store_that_is_gone_ends_joining() -> None:
    gone: Any = Gone()
    with pytest.raises(
        PeerError, match=r"^rank 0, joining the job of 2 ranks: the job's store is gone: .*Connection reset"
    ):
        FailureDetector(gone, 0, range(2), 30.0)


@pytest.mark.parametrize(
    ("is_silent", "error", "words"),
    [(True, CollectiveTimeoutError, "did not answer within 0.1 s"), (False, PeerError, "is gone")],
)
def test_making_a_group(silent: Any, is_silent: bool, error: type[ClusterError], words: str) -> None:
    store: Any = silent if is_silent else Gone()
    with pytest.raises(error, match=f"^rank 3, group ep: the job's store {words}"):
        own_keys(store, range(4), Deadline.since(0.1), "rank 3, group ep")


def checked(store: Any) -> SignatureCheck:
    board = FailureBoard(FailureDetector(None, 0, (0,), 0.0), "ep", 4, (4, 5))
    return SignatureCheck(None, store, 0, [4, 5], "ep", board, explained)


def test_comparing_a_call(silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CollectiveTimeoutError, match=r"^rank 4, group ep, call #7 barrier\(\): the job's store did not"
    ):
        checked(silent).compare(7, "barrier()", 0.1)
    with pytest.raises(PeerError, match=r"rank 4, group ep, call #7 barrier\(\)"):
        checked(Gone()).compare(7, "barrier()", 30.0)
    monkeypatch.setattr("commlayer.agree.signature_check._STORE_PATIENCE_S", 0.1)
    refusals: list[Callable[..., None]] = [checked(silent).refuse, checked(Gone()).refuse]
    for refuse in refusals:
        refuse(7, "barrier", TensorError(f"a tensor of {torch.int8}"))  # the caller's own mistake matters more


@pytest.mark.parametrize(
    ("is_agents", "host"), [("False", "rank 0 hosts it, unless"), ("True", "torchrun.s agent hosts it")]
)
def test_whoever_hosts_a_store_that_is_gone_is_named(
    is_agents: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_agents)
    monkeypatch.setattr("commlayer.failures.detector._HOST_NEWS_S", 0.01)
    gone: Any = Gone()
    with pytest.raises(PeerError, match=f"the job's store is gone: {host}"):
        FailureDetector(gone, 1, range(2), 30.0)


def test_a_group_that_stands_alone_has_another_key_in_another_store() -> None:
    """Its name comes back where whoever makes it counts its groups from the start again; its ranks have one key nevertheless."""

    def keys() -> set[str]:
        store, found = HashStore(), []

        def join(rank: int) -> None:
            request = GroupRequest("quorum 1", rank, (0, 1), store, timedelta(seconds=20), stands_alone=True)
            with joining_group(request) as joined:
                found.append(joined.generation)
            joined.detector.close("ended")

        ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(found) == 2
        return set(found)

    assert len(keys()) == 1
    assert not keys() & keys()

"""The job's store is made within the timeout, and its error says who hosts it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from commlayer.backend.joining import GroupRequest
from commlayer.backend.store_host import _make_store, own_store_waits
from commlayer.profiles.errors import CollectiveTimeoutError

TRY_AGAIN = "The client socket has timed out after 7000ms while trying to connect to (node0, 29500)."
SILENT = r"^rank 3, joining the job: the job's store at 127.0.0.1:\d+ did not answer within 0.5 s: rank 0 hosts it"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A port that takes connections, and answers nothing."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


class Torchs:
    """A client of torch's whose host has ended each time it tries."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.sizes: list[int | None] = []
        self.limits_s: list[float] = []

    def __call__(self, host: str, port: int, rank: int, world_size: int | None, timeout: timedelta, *args: Any) -> None:
        self.sizes.append(world_size)
        self.limits_s.append(timeout.total_seconds())
        raise DistNetworkError(self.words)


def make(torchs: Any, listener: socket.socket) -> Any:
    return _make_store(torchs, "127.0.0.1", listener.getsockname()[1], 3, timedelta(seconds=0.5), True)


def test_where_nobody_listens_torch_is_not_asked(listener: socket.socket) -> None:
    torchs, address = Torchs(TRY_AGAIN), listener.getsockname()
    listener.close()
    began = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=SILENT):
        _make_store(torchs, *address, 3, timedelta(seconds=0.5), True)
    assert time.monotonic() - began >= 0.5
    assert not torchs.limits_s


@pytest.mark.parametrize("words", [TRY_AGAIN, "Connection reset by peer"])
def test_torch_is_given_a_part_of_the_time_that_is_left(listener: socket.socket, words: str) -> None:
    torchs = Torchs(words)
    with pytest.raises(CollectiveTimeoutError, match=SILENT):
        make(torchs, listener)
    assert len(torchs.limits_s) > 1
    assert max(torchs.limits_s) <= 0.5 / 8
    assert torchs.limits_s == sorted(torchs.limits_s, reverse=True)
    assert set(torchs.sizes) == {None}, "the host waits for nobody"


def test_a_host_that_listens_and_does_not_answer(listener: socket.socket) -> None:
    """torch's own client waits for ever for the first answer of a process that is stopped."""
    torchs: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    with pytest.raises(CollectiveTimeoutError, match=SILENT):
        make(torchs._create_c10d_store, listener)


def test_a_host_that_cannot_listen_says_so_at_once() -> None:
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        _make_store(Torchs("The server socket has failed. EADDRINUSE"), "node0", 29500, 0, timedelta(seconds=1800))


def test_the_time_for_joining_begins_with_init_process_group() -> None:
    class Options:
        group_id, group_rank, group_size, global_ranks_in_group = "0", 1, 2, ()
        store, timeout = None, timedelta(seconds=60)

    began = time.monotonic()
    with own_store_waits():
        entered = time.monotonic()
        requests = [GroupRequest.of_torch(Options()) for _ in range(2)]
    assert {began <= request.began <= entered for request in requests} == {True}
    assert GroupRequest.of_torch(Options()).began > entered

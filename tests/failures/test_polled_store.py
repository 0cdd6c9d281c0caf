"""A wait in a polled store ends with what it waits for, its time, or its board; others may ask meanwhile."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers

from commlayer.failures.store_answers import PolledStore


def test_what_comes_later_is_waited_for() -> None:
    store = HashStore()
    polled = PolledStore(store, 60.0, lambda: False)
    setter = threading.Timer(0.0, store.set, ["key", "value"])
    setter.start()
    assert polled.get("key") == b"value"
    polled.wait(["key"], timedelta(seconds=60))
    assert polled.check(["key"])
    assert polled.add("count", 2) == 2


def test_it_ends_after_its_time() -> None:
    with pytest.raises(RuntimeError, match=r"^Timed out after 0.01 s, waiting for one, two in the job's store"):
        PolledStore(HashStore(), 60.0, lambda: False).wait(["one", "two"], timedelta(seconds=0.01))


def test_a_store_that_is_gone_is_told_from_a_wait_that_is_over() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    over, lost = PolledStore(HashStore(), 0.0, lambda: True), PolledStore(Gone(), 60.0, lambda: False)
    for polled in (over, lost):
        with pytest.raises(RuntimeError):
            polled.get("key")
    assert lost.is_lost
    assert not over.is_lost


def test_it_ends_when_it_is_over() -> None:
    with pytest.raises(RuntimeError, match="Connection closed: another rank of the job has failed"):
        PolledStore(HashStore(), 1800.0, lambda: True).get("key")

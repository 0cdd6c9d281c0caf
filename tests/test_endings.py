"""What the program's end does with calls that nobody waited for. (Whole programs: tests/test_backend.py.)"""

from __future__ import annotations

import gc
import hashlib
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer import endings
from commlayer.endings import rest
from commlayer.testing.plugin import ClusterFactory


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc: elsewhere rest() sleeps for a fixed time"
)
def test_rest_waits_for_a_thread_that_works_without_the_interpreter_lock() -> None:
    started = threading.Event()

    def work() -> None:
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 300_000)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    rest(patience_s=60)
    assert not thread.is_alive()


def test_rest_is_bounded() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10_000)

    thread = threading.Thread(target=work)
    thread.start()
    rest(patience_s=0.02)
    assert thread.is_alive()
    stop.set()
    thread.join()


class Recorder:
    def __init__(self) -> None:
        self.asked: list[float] = []

    def end(self, patience_s: float) -> None:
        self.asked.append(patience_s)


@pytest.mark.parametrize(("crash", "patience_s"), [(None, 10.0), (ValueError, 1.0)])
def test_patience(monkeypatch: pytest.MonkeyPatch, crash: Any, patience_s: float) -> None:
    monkeypatch.setattr(sys, "last_type", crash, raising=False)
    monkeypatch.setattr(endings, "_watched", [recorder := Recorder()])
    endings._end_all()
    assert len(recorder.asked) == 1
    assert patience_s * 0.5 < recorder.asked[0] <= patience_s


@pytest.mark.parametrize("call", ["barrier", "all_reduce"])
def test_a_call_whose_peer_never_comes_is_broken(emulated_cluster: ClusterFactory, call: str) -> None:
    """A call on the progress thread, and one that is under way in Gloo; both end within the patience, not the timeout."""

    def job() -> bool:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        x = torch.ones(4)
        dist.all_reduce(x)
        broken = True
        if dist.get_rank() == 0:
            work: Any = dist.barrier(async_op=True) if call == "barrier" else dist.all_reduce(x, async_op=True)
            group.end(0.1)
            broken = work.exception() is not None
        dist.distributed_c10d._get_default_store().add("ended", 1)
        while dist.distributed_c10d._get_default_store().add("ended", 0) < 2:
            pass
        return broken

    assert emulated_cluster(nodes=1, ranks_per_node=2).run(job) == [True, True]


def test_a_late_peer_is_waited_for(emulated_cluster: ClusterFactory) -> None:
    def job() -> float:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        x = torch.ones(4)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            dist.barrier(async_op=True)
            dist.all_reduce(x, async_op=True)
            store.add("issued", 1)
        else:
            store.wait(["issued"])
            dist.barrier()
            dist.all_reduce(x)
        group.end(60.0)
        return float(x[0])

    assert emulated_cluster(nodes=1, ranks_per_node=2).run(job) == [2.0, 2.0]


def test_the_tensors_of_an_asynchronous_call_go_with_it(emulated_cluster: ClusterFactory) -> None:
    """Not with Python's next search for cycles: by then a training step would hold all that it has received."""

    def job() -> list[bool]:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        x, freed = torch.ones(4), list[bool]()
        gc.disable()
        for wait_late in (False, True):
            out = torch.empty(8)
            weakref.finalize(out, freed.append, wait_late)
            work: Any = dist.all_gather_single(out, x, async_op=True)
            work.wait()
            if wait_late:
                dist.all_reduce(x)
            del out, work
        end = (
            time.monotonic() + 10
        )  # on a busy machine the thread that ran the call lets go of it a moment after its end
        while len(freed) < 2 and time.monotonic() < end:
            time.sleep(0.001)
        return freed

    assert emulated_cluster(nodes=1, ranks_per_node=2).run(job) == [[False, True]] * 2

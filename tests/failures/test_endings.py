"""The program's end, and calls that nobody waited for. (Whole programs: tests/backend/test_backend.py.)"""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed has them too, but not for type checkers
    PrefixStore,
    TCPStore,
)

from commlayer.failures import endings
from commlayer.failures.endings import rest
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


# Groups that are destroyed


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def settled(most: tuple[int, int], seconds: float = 30.0) -> tuple[int, int]:
    """The numbers held once neither number is more than ``most``, or after ``seconds``. Nothing of ours is called meanwhile."""
    until = time.monotonic() + seconds
    while any(now > enough for now, enough in zip(held(), most, strict=True)) and time.monotonic() < until:
        time.sleep(0.01)
    return held()


def at_rest(seconds: float = 0.5) -> tuple[int, int]:
    """The numbers held once that has not changed for so long."""
    before, since = held(), time.monotonic()
    while time.monotonic() < since + seconds:
        time.sleep(0.01)
        if (now := held()) != before:
            before, since = now, time.monotonic()
    return before


class Cycles:
    """Groups of all ranks, one after the other, on a store of their own: torch's would be made anew each time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(address, port, self.size, self.rank == 0, wait_for_workers=False)
        self.made = 0

    def init(self) -> None:
        self.made += 1
        store = PrefixStore(f"{self.made}", self.store)
        dist.init_process_group("commlayer", store=store, rank=self.rank, world_size=self.size)

    def run(self) -> None:
        self.init()
        x = torch.ones(4096)
        dist.all_reduce(x)
        assert x[0] == self.size
        dist.destroy_process_group()

    def meet(self, where: str) -> None:
        """Wait on the store until all ranks have come here; no call of a group is in flight meanwhile."""
        self.store.add(where, 1)
        while self.store.add(where, 0) < self.size:
            time.sleep(0.01)

    def end(self) -> None:
        """Rank 0 holds the store."""
        self.store.add("ended", 1)
        while self.rank == 0 and self.store.add("ended", 0) < self.size:
            time.sleep(0.01)


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_groups_in_a_loop_under_a_low_limit_of_descriptors(emulated_cluster: ClusterFactory, plan: str) -> None:
    """Each has two inner groups and shared memory, of some ten descriptors; what the last ones held must be free again."""

    def job() -> None:
        os.environ["COMMLAYER_PLAN"] = plan
        cycles = Cycles()
        cycles.init()
        dist.all_reduce(torch.ones(4096))
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        for _ in range(25):
            group = dist.new_group(list(range(4)))
            x = torch.ones(4096)
            dist.all_reduce(x, group=group)
            assert x[0] == 4.0
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        for _ in range(10):
            cycles.run()
        cycles.end()

    emulated_cluster(2, 2).run(job)


@pytest.mark.parametrize("how", ["destroy", "abort", "debug", "one rank", "registered backend"])
def test_a_destroyed_group_gives_back_threads_and_descriptors(emulated_cluster: ClusterFactory, how: str) -> None:
    """They end by themselves, without a further call; ``registered backend``: C++ has called it without asking Python."""

    def job() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        os.environ["COMMLAYER_PLAN"] = "hierarchical"
        if how == "debug":
            os.environ["COMMLAYER_DEBUG"] = "detail"
        cycles = Cycles()
        cycles.run()  # what is made once for a process, such as clients of the store
        before = at_rest()
        cycles.init()
        x = torch.ones(4096)
        group: Any = dist.new_group([cycles.rank], use_local_synchronization=True) if how == "one rank" else None
        dist.all_reduce(x)
        dist.all_reduce(x, group=group)
        if how == "registered backend":
            direct: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
            direct.allreduce([x]).wait()
            del direct
        during = held()
        if how == "abort":
            cycles.meet("all have reduced")  # who has left a barrier of the group may end it before others have
            dist.group.WORLD.abort()  # type: ignore[union-attr]
        del group
        dist.destroy_process_group()
        after = settled((before[0], before[1] + 1))
        cycles.end()
        return before, during, after

    for before, during, after in emulated_cluster(2, 2).run(job):
        assert during[0] > before[0] + 2
        assert during[1] > before[1] + 10
        assert after[0] <= before[0]
        assert after[1] <= before[1] + 1


def test_memory_of_groups_in_a_loop_is_bounded(emulated_cluster: ClusterFactory) -> None:
    """Plain Gloo grows by some 8 KiB a time, and what waits to be freed by 170."""

    def job() -> float:
        os.environ["COMMLAYER_PLAN"] = "hierarchical"
        cycles, times = Cycles(), 40
        for _ in range(10):
            cycles.run()
        begin = resident_kib()
        for _ in range(times):
            cycles.run()
        cycles.end()
        return (resident_kib() - begin) / times

    assert max(emulated_cluster(2, 1).run(job)) < 60


def test_a_model_that_is_freed_right_after_its_group(emulated_cluster: ClusterFactory) -> None:
    """DDP's reducer is the last who refers to the group, and lets go of it with the interpreter lock: plain Gloo hangs here."""

    def job() -> None:
        cycles = Cycles()
        for _ in range(15):
            cycles.init()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            model(torch.ones(2, 64)).sum().backward()
            dist.destroy_process_group()
            del model
        cycles.end()

    emulated_cluster(1, 2).run(job)


def test_many_burials_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ends groups faster than they are freed is slowed down."""
    monkeypatch.setattr(endings, "_burials", burials := deque[threading.Thread]())
    monkeypatch.setattr(endings, "_MOST_BURIALS", 2)
    monkeypatch.setattr(endings, "_BURIAL_S", 60.0)
    gates = [threading.Event() for _ in range(3)]
    freed = list[int]()

    class Slow:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            gates[self.number].wait(60)
            freed.append(self.number)

    for number in range(2):
        endings.bury([Slow(number)])
    assert len(burials) == 2
    assert freed == []
    gates[0].set()
    endings.bury([Slow(2)])
    assert freed == [0]
    for gate in gates:
        gate.set()
    for thread in list(burials):
        thread.join()
    assert sorted(freed) == [0, 1, 2]

"""Groups that are no part of torch's job, as torchft makes them between replicas: made anew with those who are left."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, TCPStore

from commlayer.backend import group_extras, world
from commlayer.backend.group_options import GroupOptions
from commlayer.backend.new_groups import make_group
from commlayer.failures.detector import job_detector
from commlayer.profiles.errors import CollectiveTimeoutError, CommlayerError, GroupError, PeerError
from commlayer.testing.plugin import ClusterFactory

LIMIT = timedelta(seconds=20)


def total_of(group: Any) -> float:
    x = torch.full((2048,), 1.0 + group.rank())
    group.allreduce([x], AllreduceOptions()).wait()
    assert bool((x == x[0]).all())
    return float(x[0])


class Asked(Exception):
    """The communicator of a device was asked for, with these words."""


@pytest.mark.cluster
def test_its_communicator_on_cuda_is_no_part_of_the_jobs(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, is_split: bool, **__: Any) -> None:
        raise Asked(is_split)

    monkeypatch.setattr(group_extras, "is_usable", lambda: True)  # the ranks are forked
    monkeypatch.setattr(group_extras, "make_nccl", asked)

    def job() -> bool:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        given: dict[str, Any] = {"store": store, "timeout": LIMIT, "stands_alone": True}
        with pytest.raises(Asked) as found:
            make_group(name="one", rank=0, global_ranks=[0], options=GroupOptions(plan="flat"), **given)
        return bool(found.value.args[0])

    assert emulated_cluster(1, 1).run(job) == [False]


@pytest.mark.cluster
def test_a_group_between_replicas_is_made_anew_with_those_who_are_left(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        torch.set_num_threads(1)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # What torch's job of this replica says of itself, which the group between replicas is no part of.
        os.environ["COMMLAYER_TOPOLOGY"] = "1x1"
        os.environ["COMMLAYER_PROFILE"] = "emulated-2x4"
        own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        dist.init_process_group("commlayer", store=own, rank=0, world_size=1, timeout=LIMIT)
        replicas = world.current()
        os.environ["COMMLAYER_TOPOLOGY"] = f"{rank + 1}x1"  # and replicas need not be alike
        os.environ["COMMLAYER_PROFILE"] = ("emulated-2x4", "none", "auto")[rank]
        os.environ["COMMLAYER_TRACE"] = f"/nowhere/{rank}"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=LIMIT)

        def quorum(number: int, count: int) -> Any:
            return make_group(
                name=f"quorum {number}",
                rank=rank,
                global_ranks=range(count),
                store=PrefixStore(f"{number}/", store),
                timeout=LIMIT,
                options=GroupOptions(wire="bf16!", plan="flat_direct"),
                stands_alone=True,
            )

        first = quorum(1, size)
        assert first.shape == (1,) * size
        assert total_of(first) == size * (size + 1) / 2
        part = first.split_group([1, 2], opts=GroupOptions(plan="flat_direct"))
        if part is not None:
            assert part.shape == (1, 1), "a part stands alone as well"
            assert total_of(part) == 3
            part.leave(5.0)
        assert world.current() is replicas, "the job's own agreement stays"
        assert job_detector(range(size)) is None, "nobody else's groups are watched by it"
        first.leave(5.0)
        with pytest.raises(GroupError):
            total_of(first)
        second = quorum(2, size)
        store.set(f"made {rank}", "")
        store.wait([f"made {each}" for each in range(size)], LIMIT)
        if rank == size - 1:
            second.leave(0.0)
        else:
            with pytest.raises(PeerError):  # of the one that left, or of the one that heard of it first
                total_of(second)
            second.leave(0.1)
            third = quorum(3, size - 1)
            assert total_of(third) == (size - 1) * size / 2
            third.leave(5.0)
        if rank == 0:
            alone = quorum(4, 1)
            assert total_of(alone) == 1.0
            alone.leave(5.0)
        dist.all_reduce(one := torch.ones(1))
        assert float(one) == 1.0
        dist.destroy_process_group()
        if rank:  # the store's host ends last
            store.set(f"done {rank}", "")
        else:
            store.wait([f"done {each}" for each in range(1, size)], LIMIT)

    emulated_cluster(3, 1).run(job)


def held() -> tuple[int, int, int]:
    """The open files, the threads and the mapped memory files of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = sum("memfd" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), threading.active_count() + len(os.listdir("/proc/self/task")), shared


class Member:
    """A member of many quorums of up to three ranks, over one store."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_host = self.rank == 0
        self.store = TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=LIMIT)

    def meet(self, what: str) -> None:
        self.store.set(f"{what} {self.rank}", "")
        self.store.wait([f"{what} {each}" for each in range(3)], LIMIT)

    def quorum(self, number: int, count: int, limit: timedelta = LIMIT) -> Any:
        own = PrefixStore(f"{number}/", self.store)
        ranks, options = range(count), GroupOptions(plan="flat_direct")
        given: dict[str, Any] = {"store": own, "timeout": limit, "options": options, "stands_alone": True}
        return make_group(name=f"quorum {number}", rank=self.rank, global_ranks=ranks, **given)

    def breaks(self, number: int) -> None:
        group = self.quorum(number, 3)
        self.meet(f"made {number}")
        if self.rank < 2:
            with pytest.raises(CommlayerError):  # the last one is gone
                group.allreduce([torch.ones(1 << 20)], AllreduceOptions()).wait()
        group.abort()

    def misses_one(self, number: int) -> None:
        if self.rank < 2:
            with pytest.raises((CollectiveTimeoutError, PeerError)):  # its own, or that of the other
                self.quorum(number, 3, timedelta(seconds=0.2))

    def works(self, number: int, count: int) -> None:
        if self.rank < count:
            group = self.quorum(number, count)
            assert total_of(group) == count * (count + 1) / 2
            group.leave(5.0)

    def several(self, first: int, last: int) -> None:
        for number in range(first, last):
            if number % 16 == 3:
                self.misses_one(number)
            elif number % 8 == 1:
                self.breaks(number)
            else:
                self.works(number, 3 - number % 2)
            self.meet(f"over {number}")

    def end(self) -> None:
        if self.rank:  # the store's host ends last
            self.store.set(f"done {self.rank}", "")
        else:
            self.store.wait(["done 1", "done 2"], LIMIT)


def has_grown(before: tuple[int, int, int]) -> bool:
    return any(now > then for now, then in zip(held(), before, strict=True))


@pytest.mark.cluster
def test_many_quorums_leave_nothing_open(emulated_cluster: ClusterFactory) -> None:
    """Members come and go; some groups break in a call, and some are never made, because a member does not come."""

    def job() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        torch.set_num_threads(1)
        member = Member()
        member.several(0, 4)  # one of each kind: what a first group opens for good is open then
        time.sleep(1.0)  # what ended is freed beside the program
        before = held()
        member.several(4, 56)
        until = time.monotonic() + 60
        while time.monotonic() < until and has_grown(before):
            time.sleep(0.05)
        after = held()
        member.meet("ended")
        member.end()
        return before, after

    for before, after in emulated_cluster(3, 1).run(job):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)

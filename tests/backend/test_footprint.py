"""Threads and descriptors of a rank by the number of its groups, what shares one group's connections, and what groups leave."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from synthetic_profiles import synthetic_profile
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.auditing import ledger
from commlayer.calls import counters
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.contract import FIRST_TAG

pytestmark = pytest.mark.cluster

COUNT = 40_000
_MORE = 6
_GONE = 20


def start() -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PLAN": "hierarchical", "COMMLAYER_PROFILE": "none"})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return dist.get_rank()


def group_in_use() -> dist.ProcessGroup:
    """A group of all ranks that has run a planned call, an asynchronous one, a flat one and messages."""
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(COUNT), group=group)
    work: Any = dist.all_reduce(torch.ones(COUNT), group=group, async_op=True)
    work.wait()
    dist.barrier(group)
    got = torch.zeros(4)
    coming: Any = dist.irecv(got, group=group, group_src=(rank - 1) % size)
    dist.send(torch.full((4,), float(rank)), group=group, group_dst=(rank + 1) % size)
    coming.wait()
    assert torch.equal(got, torch.full((4,), float((rank - 1) % size)))
    return group  # type: ignore[no-any-return]


def held() -> tuple[int, int]:
    """Native threads and descriptors of this process."""
    dist.barrier()
    ours = {thread.native_id for thread in threading.enumerate()}
    native = [task for task in os.listdir("/proc/self/task") if int(task) not in ours]
    held = len(native), len(os.listdir("/proc/self/fd"))
    dist.barrier()
    return held


def test_a_group_takes_two_threads_and_a_connection_to_each_rank_twice(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[int, int]:
        start()
        groups = [group_in_use()]
        before = held()
        groups += [group_in_use() for _ in range(_MORE)]
        after = held()
        dist.destroy_process_group()
        assert len(groups) == 1 + _MORE
        return after[0] - before[0], after[1] - before[1]

    gloo, shared_memory = 2 * 3, 1 + 1 + 1  # two meshes; a neighbour, the memory, the poll
    for threads, descriptors in emulated_cluster(2, 2).run(job):
        assert threads == 2 * _MORE  # Gloo's own, of those two meshes
        assert descriptors == (gloo + shared_memory) * _MORE


def test_python_threads_do_not_grow_with_groups(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[int, int]:
        start()
        few = [group_in_use() for _ in range(2)]
        before = threading.active_count()
        many = [group_in_use() for _ in range(_MORE)]
        assert len(few + many) == 2 + _MORE
        return before, threading.active_count()

    for before, after in emulated_cluster(2, 2).run(job):
        assert after <= before + 1  # one that is just giving its group back


def objects() -> Counter[str]:
    """The objects that Python's garbage collector knows, by their type, once groups that are gone have been freed."""
    until = time.monotonic() + 30.0
    while any(thread.name == "commlayer end" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    gc.collect()
    counts: Counter[str] = Counter()
    # Not Counter(generator): it asks whether a generator is a Mapping, and every kind of mapping that is loaded notes the answer.
    for each in gc.get_objects():
        counts[f"{type(each).__module__}.{type(each).__qualname__}"] += 1
    return counts


def test_counting_objects_makes_none() -> None:
    kinds = [type("Kind", (Mapping,), {}) for _ in range(100)]
    Mapping.register(type("Other", (), {}))  # all answers that were noted before are void now
    before = objects()
    grown = objects() - before
    assert max(grown.values(), default=0) < len(kinds)


@pytest.mark.parametrize("is_planned", [False, True], ids=["flat", "planned"])
def test_a_group_that_is_gone_leaves_nothing(
    emulated_cluster: ClusterFactory, tmp_path: Path, is_planned: bool
) -> None:
    path = tmp_path / "profile.json"
    synthetic_profile(nodes=2, ranks_per_node=2).save(path)

    def job() -> dict[str, int]:
        torch.set_num_threads(1)
        os.environ.update({"COMMLAYER_PROFILE": str(path) if is_planned else "none", "COMMLAYER_RING": "8"})
        for module in (counters, ledger):
            vars(module)["MOST_ENDED"] = 2  # of the last groups, as of the last calls, something is kept
        dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
        for _ in range(4):
            dist.destroy_process_group(group_in_use())
        before = objects()
        for _ in range(_GONE):
            dist.destroy_process_group(group_in_use())
        # Threads of groups that are gone may hold something a moment longer.
        until = time.monotonic() + 30.0
        while (grown := objects() - before) and time.monotonic() < until:
            if not any(name.startswith("commlayer.") for name in grown):
                break
            time.sleep(0.1)
        return dict(grown)

    for grown in emulated_cluster(2, 2).run(job):
        ours = {name: count for name, count in grown.items() if name.startswith("commlayer.")}
        assert not ours, ours
        # torch itself keeps a list of each group; and some threads, and weak references to them, may be there a moment longer.
        others = {name: count for name, count in grown.items() if count >= 2 * _GONE}
        assert not others, others


def test_a_group_leaves_one_key_in_the_jobs_store(emulated_cluster: ClusterFactory) -> None:
    """The key holds the group's number among those of its name. Gloo leaves the address of each rank."""

    def job() -> list[int]:
        start()
        counts = []
        for _ in range(3):
            dist.destroy_process_group(group_in_use())
            dist.barrier()
            counts.append(_get_default_store().num_keys())
            dist.barrier()
        return counts

    for counts in emulated_cluster(2, 2).run(job):
        assert counts == [counts[0], counts[0] + 1, counts[0] + 2]


@pytest.mark.parametrize("tag", [0, FIRST_TAG - 1, FIRST_TAG, FIRST_TAG + 3 * (1 << 14), (1 << 31) - 1])
def test_messages_of_any_tag_do_not_meet_those_of_plans(emulated_cluster: ClusterFactory, tag: int) -> None:
    """Messages are posted before planned calls, whose messages go over the same connections, and sent after them."""

    def job() -> None:
        rank = start()
        peer = rank ^ 2  # on the other node
        got = torch.zeros(4096)
        coming: Any = dist.irecv(got, peer, tag=tag)
        for step in range(5):
            x = torch.full((COUNT,), float(rank + step))
            dist.all_reduce(x)
            assert torch.equal(x, torch.full((COUNT,), 6.0 + 4 * step))
        sent = dist.isend(torch.full((4096,), float(rank)), peer, tag=tag)
        assert sent is not None
        coming.wait()
        sent.wait()
        assert torch.equal(got, torch.full((4096,), float(peer)))
        any_source = torch.zeros(1)
        coming = dist.irecv(any_source, tag=tag)
        sent = dist.isend(torch.ones(1), peer, tag=tag)
        coming.wait()
        assert sent is not None
        sent.wait()
        assert any_source.item() == 1.0

    emulated_cluster(2, 2).run(job)

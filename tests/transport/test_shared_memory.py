"""Shared memory inside a node: every byte as sent, in any order, and failures that wake up whoever waits."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import HALF_AN_HOUR, await_others, be_absent, meet, tell, wait_until
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.calls.movement import Movement
from commlayer.emulation import rights
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError, TensorError
from commlayer.scheduler.plan import Op
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.contract import break_connections
from commlayer.transport.shared_memory import meeting
from commlayer.transport.shared_memory.shared_messages import AHEAD_BYTES, INLINE_BYTES, SharedMemoryGroup
from commlayer.transport.shared_memory.slabs import FirstFit, Segment

pytestmark = pytest.mark.cluster

WAIT = timedelta(seconds=20)
BYTES = torch.randint(0, 1 << 62, (2 << 20,)).view(torch.uint8)
SIZES = (0, 1, 7, 1000, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 100_001, 1 << 20)


def start(nodes: Sequence[Sequence[int]], timeout_s: float = 20.0) -> SharedMemoryGroup:
    """On a rank: the process group and a group over ``nodes``."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return another(nodes, timeout_s)


def another(nodes: Sequence[Sequence[int]], timeout_s: float = 20.0) -> SharedMemoryGroup:
    another.made = getattr(another, "made", 0) + 1  # type: ignore[attr-defined]
    store = PrefixStore(f"shared{another.made}", _get_default_store())  # type: ignore[attr-defined]
    world = sum(map(len, nodes))
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), world, timedelta(seconds=timeout_s))
    return SharedMemoryGroup(cast("dist.ProcessGroup", gloo), dist.get_rank(), nodes, timeout_s)


def pattern(size: int, *seed: int) -> torch.Tensor:
    """Bytes that only this message has."""
    start = hash(seed) % (1 << 20)
    return BYTES[start : start + size].clone()


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), st.randoms())
def test_first_fit_hands_out_no_byte_twice_and_forgets_none(
    steps: list[tuple[bool, int]], chance: random.Random
) -> None:
    space = FirstFit()
    used: dict[int, int] = {}
    for is_release, size in steps:
        if is_release and used:
            start = chance.choice(sorted(used))
            space.release(start, used.pop(start))
        else:
            start = space.allocate(size)
            assert all(start + size <= other or other + used[other] <= start for other in used)
            used[start] = size
        assert space.top == max((start + size for start, size in used.items()), default=0)
    for start, size in used.items():
        space.release(start, size)
    assert space.top == 0


def exchange(group: SharedMemoryGroup, world: int, seed: int, sizes: Sequence[int]) -> None:
    """Between every two ranks one message of each size, posted and waited for in an order of each rank's own."""
    me = dist.get_rank()
    chance = random.Random(f"{seed} {me}")
    everything = [(peer, tag) for peer in range(world) if peer != me for tag in range(len(sizes))]
    chance.shuffle(everything)
    late = chance.randrange(len(everything))  # receives that are posted after the sends
    expected, works = {}, []
    sources = {(peer, tag): pattern(sizes[tag], seed, me, peer, tag) for peer, tag in everything}

    def expect(peer: int, tag: int) -> None:
        expected[peer, tag] = torch.full((sizes[tag],), 255, dtype=torch.uint8)
        works.append(group.recv([expected[peer, tag]], peer, tag))

    for peer, tag in everything[late:]:
        expect(peer, tag)
    works += [group.send([sources[peer, tag]], peer, tag) for peer, tag in everything]
    for peer, tag in everything[:late]:
        expect(peer, tag)
    chance.shuffle(works)
    for work in works:
        assert work.wait(WAIT)
    for (peer, tag), got in expected.items():
        assert torch.equal(got, pattern(sizes[tag], seed, peer, me, tag)), (me, peer, tag)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_messages_arrive_as_sent(emulated_cluster: ClusterFactory, world: int) -> None:
    def job() -> tuple[bool, ...]:
        group = start([range(world)])
        for seed in range(4):
            chance = random.Random(seed)
            exchange(group, world, seed, chance.sample(SIZES, len(SIZES)))
        if world == 2:
            exchange(group, world, 9, (8 << 20, 3, (8 << 20) + 1, 12 << 20))
        dist.barrier()
        group.serve()  # what others said of our last messages
        assert group.slab.unread_bytes <= AHEAD_BYTES // 2  # what may be left unsaid
        return group.shares

    assert emulated_cluster(nodes=1, ranks_per_node=world).run(job) == [(True,)] * world


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2, 3), (1,)), ((3, 0, 1), (2,)), ((0,), (1,), (2,), (3,))])
def test_other_nodes_are_reached_through_gloo(
    emulated_cluster: ClusterFactory, nodes: tuple[tuple[int, ...], ...]
) -> None:
    def job() -> tuple[tuple[bool, ...], set[int]]:
        group = start(nodes)
        exchange(group, 4, 1, SIZES)
        exchange(group, 4, 2, SIZES[::-1])
        group.barrier().wait(WAIT)
        return group.shares, set(group._peers)

    shares = tuple(len(node) > 1 for node in nodes)
    here = {rank: set(node) - {rank} for node in nodes for rank in node}
    results = emulated_cluster(nodes=1, ranks_per_node=4).run(job)
    assert results == [(shares, here[rank]) for rank in range(4)]


def test_ranks_that_cannot_reach_each_other_say_so_and_use_gloo(emulated_cluster: ClusterFactory) -> None:
    """A node declared across two network namespaces, as containers with networks of their own are; the other one is fine."""

    def job() -> tuple[tuple[bool, ...], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = start([[0, 1], [2, 5], [3, 4]])
        exchange(group, 6, 1, SIZES)
        return group.shares, [str(each.message) for each in caught]

    cluster = emulated_cluster(nodes=2, ranks_per_node=3)
    if not cluster.shaped:
        pytest.skip(rights().reason)  # without network namespaces all ranks reach each other
    results = cluster.run(job)
    assert {shares for shares, _ in results} == {(True, False, True)}
    texts = {rank: texts for rank, (_, texts) in enumerate(results) if texts}
    assert set(texts) == {5}  # who tried
    assert "cannot be reached from rank 5" in texts[5][0]
    assert "network namespace" in texts[5][0]


@pytest.mark.parametrize("culprit", [0, 2])
def test_without_a_memory_file_all_ranks_of_the_node_use_gloo(emulated_cluster: ClusterFactory, culprit: int) -> None:
    """Rank 0 cannot make one, or rank 2 cannot map what it is given: nobody hangs, all agree."""

    def job() -> tuple[tuple[bool, ...], int]:
        def refuse(*_: Any) -> Any:
            raise OSError("refused by the test")

        if int(os.environ["RANK"]) == culprit:
            Segment.create = refuse  # type: ignore[method-assign, assignment]  # a fault
            Segment.bytes_of = refuse  # type: ignore[method-assign, assignment]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = start([[0, 1, 2]])
        exchange(group, 3, 1, SIZES)
        return group.shares, sum("refused by the test" in str(each.message) for each in caught)

    results = emulated_cluster(nodes=1, ranks_per_node=3).run(job)
    assert results == [((False,), int(rank == culprit)) for rank in range(3)]


def test_a_tensor_for_many_is_copied_once_and_may_change_after_the_wait(emulated_cluster: ClusterFactory) -> None:
    size, world, rounds = 200_000, 4, 5

    def job() -> int:
        group = start([range(world)])
        me = dist.get_rank()
        x = torch.empty(size, dtype=torch.uint8)  # one address for all rounds
        used = 0
        for k in range(rounds):
            x.copy_(pattern(size, k, me))
            got = {peer: torch.empty(size, dtype=torch.uint8) for peer in range(world) if peer != me}
            before = group.slab.unread_bytes
            sends = [group.send([x], peer, k) for peer in got]
            used = max(used, group.slab.unread_bytes - before)
            for work in sends:
                work.wait(WAIT)
            x.fill_(0)
            for work in [group.recv([target], peer, k) for peer, target in got.items()]:
                work.wait(WAIT)
            for peer, target in got.items():
                assert torch.equal(target, pattern(size, k, peer)), (k, me, peer)
        return used

    for used in emulated_cluster(nodes=1, ranks_per_node=world).run(job):
        assert size <= used < 2 * size  # not three copies


def test_the_slab_is_used_again(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[int, int]:
        group = start([range(4)])
        for seed in range(3):
            exchange(group, 4, seed, (300_000, 200_001, 70_000))
        before = group.slab.high_water
        for seed in range(3, 30):
            exchange(group, 4, seed, (70_000, 300_000, 200_001))
            dist.barrier()
        return before, group.slab.high_water

    for before, after in emulated_cluster(nodes=1, ranks_per_node=4).run(job):
        assert before <= after < AHEAD_BYTES  # of 46 MB that were sent


def test_a_sender_is_not_far_ahead_of_its_receiver(emulated_cluster: ClusterFactory) -> None:
    size, count = 3 << 20, 20

    def job() -> int:
        group = start([[0, 1]])
        most = 0
        if dist.get_rank() == 0:
            x = torch.empty(size, dtype=torch.uint8)
            for k in range(count):
                x.fill_(k)
                group.send([x], 1, k).wait(WAIT)
                most = max(most, group.slab.unread_bytes)
                if most > AHEAD_BYTES - size:
                    tell("it has sent all that it may")
        else:
            wait_until("it has sent all that it may")
            y = torch.empty(size, dtype=torch.uint8)
            for k in range(count):
                group.recv([y], 0, k).wait(WAIT)
                assert bool((y == k).all())
        return most

    most = emulated_cluster(nodes=1, ranks_per_node=2).run(job)[0]
    assert AHEAD_BYTES - size <= most <= AHEAD_BYTES


def test_more_small_messages_than_a_socket_holds(emulated_cluster: ClusterFactory) -> None:
    count = 200  # 6.5 MB in lines, each way

    def job() -> None:
        group = start([[0, 1]])
        me = dist.get_rank()
        sends = [group.send([pattern(INLINE_BYTES - k, me, k)], 1 - me, k) for k in range(count)]
        assert not sends[-1].is_completed()  # type: ignore[attr-defined]
        targets = [torch.empty(INLINE_BYTES - k, dtype=torch.uint8) for k in range(count)]
        for work in [group.recv([y], 1 - me, k) for k, y in enumerate(targets)] + sends:
            work.wait(WAIT)
        assert all(torch.equal(y, pattern(INLINE_BYTES - k, 1 - me, k)) for k, y in enumerate(targets))

    emulated_cluster(nodes=1, ranks_per_node=2).run(job)


def keep_lines(group: SharedMemoryGroup) -> None:
    """Have sockets take as little as Linux allows: lines of a few KiB are kept, as those of many messages would be."""
    for peer in group._peers.values():
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def test_lines_that_a_socket_refused_go_on_while_their_sender_waits_for_another_node(
    emulated_cluster: ClusterFactory,
) -> None:
    def job() -> None:
        group = start([[0, 1], [2, 3]])
        keep_lines(group)
        me, line = dist.get_rank(), torch.empty(INLINE_BYTES, dtype=torch.uint8)
        word = line[:1].clone()
        dist.barrier()
        # 1 waits for 3, which waits for the line of 2, which waits for 0, which waits for the line of 1.
        if me in (1, 2):
            send = group.send([pattern(INLINE_BYTES, me)], {1: 0, 2: 3}[me], 0)
            assert not send.is_completed()  # type: ignore[attr-defined]
            group.recv([word], {1: 3, 2: 0}[me], 0).wait(WAIT)
            send.wait(WAIT)
        else:
            near, far = {0: (1, 2), 3: (2, 1)}[me]
            group.recv([line], near, 0).wait(WAIT)
            assert torch.equal(line, pattern(INLINE_BYTES, near))
            group.send([word], far, 0).wait(WAIT)

    emulated_cluster(nodes=1, ranks_per_node=4).run(job)


def test_ranks_may_wait_for_their_calls_in_different_orders(emulated_cluster: ClusterFactory) -> None:
    """Two calls under way, each too large for a sender to go on before it is read; waiting for one must serve the other."""
    size = AHEAD_BYTES + 1

    def job() -> None:
        group = start([[0, 1]])
        me = dist.get_rank()
        calls = []
        for k in range(2):
            y = torch.zeros(size, dtype=torch.uint8)
            x = torch.full((size,), 10 * me + k, dtype=torch.uint8)
            calls.append((k, y, group.recv([y], 1 - me, k), group.send([x], 1 - me, k)))
        for k, y, receive, send in calls if me == 0 else calls[::-1]:
            send.wait(WAIT)
            receive.wait(WAIT)
            assert bool((y == 10 * (1 - me) + k).all())

    emulated_cluster(nodes=1, ranks_per_node=2).run(job)


def test_one_tag_many_times_keeps_its_order(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[int]:
        group = start([[0, 1]])
        me = dist.get_rank()
        sizes = [5, 50_000, 6, 60_000]
        targets = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        early = [group.recv([y], 1 - me, 7) for y in targets[:2]]
        sends = [group.send([torch.full((size,), k, dtype=torch.uint8)], 1 - me, 7) for k, size in enumerate(sizes)]
        for work in [*early, *sends]:
            work.wait(WAIT)
        dist.barrier()  # the others have arrived before they are expected
        group.serve()
        for work in [group.recv([y], 1 - me, 7) for y in targets[2:]]:
            work.wait(WAIT)
        return [int(y.unique()) for y in targets]

    assert emulated_cluster(nodes=1, ranks_per_node=2).run(job) == [[0, 1, 2, 3]] * 2


def test_several_threads_may_wait(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        group = start([range(3)])
        me, size = dist.get_rank(), 50_000
        targets = {
            (peer, k): torch.empty(size, dtype=torch.uint8) for peer in range(3) if peer != me for k in range(20)
        }
        works = {key: group.recv([y], *key) for key, y in targets.items()}
        failures: list[BaseException] = []

        def watch(peer: int) -> None:
            try:
                for k in range(20):
                    works[peer, k].wait(WAIT)
                    assert torch.equal(targets[peer, k], pattern(size, peer, me, k))
            except BaseException as error:  # noqa: BLE001  carried to the main thread
                failures.append(error)

        threads = [threading.Thread(target=watch, args=(peer,)) for peer in range(3) if peer != me]
        for thread in threads:
            thread.start()
        sends = [group.send([pattern(size, me, peer, k)], peer, k) for peer, k in works]
        for thread in threads:
            thread.join()
        for work in sends:
            work.wait(WAIT)
        assert not failures, failures

    emulated_cluster(nodes=1, ranks_per_node=3).run(job)


def test_tensors_of_the_wrong_kind_or_size_are_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        group = start([[0, 1]])
        me = dist.get_rank()
        for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]):
            with pytest.raises(TensorError, match="contiguous 1-D tensor of uint8"):
                group.send([wrong], 1 - me, 0)
            with pytest.raises(TensorError, match="contiguous 1-D tensor of uint8"):
                group.recv([wrong], 1 - me, 0)
        send = group.send([torch.zeros(40_000 + me, dtype=torch.uint8)], 1 - me, 1)
        text = raised(lambda: group.recv([torch.zeros(40_000, dtype=torch.uint8)], 1 - me, 1).wait(WAIT))
        send.wait(WAIT)
        return text

    texts = emulated_cluster(nodes=1, ranks_per_node=2).run(job)
    assert texts[1] == "nothing"
    assert "expected 40000 bytes from member 1 of the group, got 40001" in texts[0]


def expect_nothing(group: SharedMemoryGroup, peer: int, timeout_s: float = HALF_AN_HOUR) -> str:
    """Wait for a message that never comes; the error's text."""
    y = torch.empty(100_000, dtype=torch.uint8)
    return raised(lambda: group.recv([y], peer, 77).wait(timedelta(seconds=timeout_s)))


def test_a_killed_peer_is_noticed_at_once(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        group = start([range(3)])
        exchange(group, 3, 1, SIZES)
        if dist.get_rank() == 2:
            group.send([pattern(100_000, 5)], 0, 5).wait(WAIT)
            os.kill(os.getpid(), signal.SIGKILL)
        text = expect_nothing(group, 2)
        if dist.get_rank() == 0:  # what it had sent before is there, and its memory too
            y = torch.empty(100_000, dtype=torch.uint8)
            group.recv([y], 2, 5).wait(WAIT)
            assert torch.equal(y, pattern(100_000, 5))
        return text, raised(lambda: group.send([torch.zeros(9, dtype=torch.uint8)], 2, 1))

    outcomes = emulated_cluster(nodes=1, ranks_per_node=3).run(job, check=False, grace_s=30.0)
    for outcome in outcomes[:2]:
        assert outcome.failure is None, outcome.failure
        text, again = outcome.value
        assert "closed by peer" in text
        assert "closed by peer" in again


def test_a_timeout_wakes_up_whoever_waits(emulated_cluster: ClusterFactory) -> None:
    """Rank 0 runs out of patience with rank 1, which never comes. Ranks 2, near, and 3, far, wait for rank 0."""

    def job() -> tuple[str, float]:
        group = start([[0, 1, 2], [3]])
        if dist.get_rank() == 1:
            be_absent(3)
            return "", 0
        begin = time.monotonic()
        text = expect_nothing(group, 1, 0.5) if dist.get_rank() == 0 else expect_nothing(group, 0)
        tell("done")
        return text, time.monotonic() - begin

    results = emulated_cluster(nodes=1, ranks_per_node=4).run(job)
    assert "Timed out waiting 500ms for recv" in results[0][0]
    assert results[0][1] >= 0.5
    for text, _ in results[2:]:
        assert "closed" in text.lower(), text


@pytest.mark.parametrize("peer", [1, 2, 3])
def test_breaking_connections_wakes_up_near_and_far_ranks(emulated_cluster: ClusterFactory, peer: int) -> None:
    """Through a peer that is alive (near or far), or dead (rank 1)."""

    def job() -> tuple[str, str]:
        group = start([[0, 1, 2], [3]])
        await_others(1)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 0:
            text = expect_nothing(group, 1)
            break_connections(cast("dist.ProcessGroup", group), [peer])
            return text, raised(lambda: group.recv([torch.zeros(9, dtype=torch.uint8)], 2, 1))
        return expect_nothing(group, 0), ""

    outcomes = emulated_cluster(nodes=1, ranks_per_node=4).run(job, check=False, grace_s=30.0)
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.failure is None, outcome.failure
            text, _ = outcome.value
            assert "closed" in text.lower(), text
    assert "closed" in outcomes[0].value[1]


def mapped_files() -> set[str]:
    """The names of what is mapped into this process. What others have in /dev/shm meanwhile does not count."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split()) > 5}


def test_nothing_is_left_behind(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[int, ...]:
        def descriptors() -> int:
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        before = mapped_files()
        first = start([range(3)])
        exchange(first, 3, 0, SIZES)
        empty = descriptors()
        group = another([range(3)])
        for seed in range(3):
            exchange(group, 3, seed, SIZES)
        early = descriptors()
        for seed in range(200):
            exchange(group, 3, seed, (40_000, 9))
        late = descriptors()
        dist.barrier()
        # Memory without a name: nothing can be left in /dev/shm, however a rank ends.
        assert [name for name in mapped_files() - before if "shm" in name or "commlayer" in name] == [
            "/memfd:commlayer (deleted)"
        ]
        group.close()
        group.close()
        with pytest.raises(RuntimeError, match="closed"):
            group.send([torch.zeros(9, dtype=torch.uint8)], (dist.get_rank() + 1) % 3, 0)
        after = descriptors()
        del group
        gone = descriptors()
        meet(1)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return empty, early, late, after, gone

    outcomes = emulated_cluster(nodes=1, ranks_per_node=3).run(job, check=False, grace_s=15.0)
    for rank in (0, 2):
        assert outcomes[rank].failure is None, outcomes[rank].failure
        empty, early, late, after, gone = outcomes[rank].value
        assert late == early > empty
        # Gloo's own are still there; all of ours are not.
        assert after <= early - 4  # two sockets, the memory and the poll
        assert gone <= empty


def sharing(nodes: Sequence[Sequence[int]], plan: str, timeout_s: float = 20.0) -> PlannedGroup:
    """Plans whose messages go through shared memory."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    store, rank, everyone = (
        PrefixStore(f"sharing {plan}", _get_default_store()),
        dist.get_rank(),
        range(dist.get_world_size()),
    )
    board = FailureBoard(FailureDetector(store, rank, everyone, timeout_s), plan, rank, everyone)
    return PlannedGroup(
        name="world",
        rank=rank,
        nodes=nodes,
        global_ranks=everyone,
        store=store,
        planner=None,
        settings=Settings(plan=plan, intra="shared"),
        board=board,
        timeout_s=timeout_s,
    )


def shared_by(group: PlannedGroup) -> SharedMemoryGroup | None:
    """The transport of the group's messages, if anything does yet."""
    runner: Any = group._runner
    return cast("SharedMemoryGroup", runner.transport.channels[Op.ALL_GATHER].group) if runner is not None else None


@pytest.mark.parametrize("nodes", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 2), (1, 3))])
def test_plans_give_what_gloo_gives(emulated_cluster: ClusterFactory, nodes: tuple[tuple[int, ...], ...]) -> None:
    def job() -> None:
        for name in ("flat_direct", "hierarchical", "pipelined:3"):
            group = sharing(nodes, name)
            for size in (1, 1001, 60_000):
                check_collectives(group, size)
            # Where no plan is for these nodes nothing was called: who drops its group then has left before the others have come.
            dist.barrier()
            shared = shared_by(group)
            if name == "flat_direct":
                assert shared is not None
            if shared is not None and shared._peers:  # else no plan was for these nodes, or this rank is alone
                assert shared.slab.high_water > 0  # it was not Gloo

    emulated_cluster(nodes=1, ranks_per_node=4).run(job)


def check_collectives(group: PlannedGroup, size: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randint(0, 9, (world * size,), generator=torch.Generator().manual_seed(rank), dtype=torch.int32)
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        plan = group.choices.plan(collective, x.numel() * 4)
        if plan is None:  # not for this shape of nodes
            continue
        summed = x.clone()
        dist.all_reduce(summed)
        if collective == "all_gather":
            mine, target, expected = x[:size].clone(), torch.zeros_like(x), torch.zeros_like(x)
            dist.all_gather(list(expected.view(world, size).unbind(0)), mine)
            group.run(Movement(plan, mine, target))
        elif collective == "reduce_scatter":
            target, expected = torch.zeros(size, dtype=torch.int32), summed.view(world, size)[rank]
            group.run(Movement(plan, x, target))
        else:
            target, expected = x.clone(), summed
            group.run(Movement(plan, target, target))
        assert torch.equal(target, expected), (collective, size, plan.name)


def test_a_plan_of_many_chunks_runs_where_sockets_refuse_their_lines(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        group = sharing(((0, 1), (2, 3)), "pipelined:16")
        x = torch.ones(16 * 2 * (INLINE_BYTES // 4 - 200), dtype=torch.int32)
        plan = group.choices.plan("all_reduce", x.nbytes)
        assert plan is not None
        group.connected()
        shared = shared_by(group)
        assert shared is not None
        keep_lines(shared)
        for _ in range(60):  # ranks come to wait in a circle by chance
            x.fill_(1)
            group.run(Movement(plan, x, x))
            assert bool((x == 4).all())
        assert not shared.full
        dist.barrier()

    emulated_cluster(nodes=1, ranks_per_node=4).run(job)


def test_a_plan_of_other_sizes_blames_nobody_for_dying(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str]:
        group = sharing([[0, 1, 2]], "flat_direct")
        x = torch.ones(3 * 60_000)
        chosen = group.choices.plan("all_reduce", x.nbytes)
        assert chosen is not None
        group.run(Movement(chosen, x, x))
        dist.barrier()  # all have connected: who has not blames the one that left, too, but in other words
        x = torch.ones(6 * 60_000 if dist.get_rank() == 1 else 3 * 60_000)
        chosen = group.choices.plan("all_reduce", x.nbytes)
        assert chosen is not None
        with pytest.raises(ClusterError) as caught:
            group.run(Movement(chosen, x, x))
        dist.barrier()
        return type(caught.value).__name__, str(caught.value)

    outcomes = emulated_cluster(nodes=1, ranks_per_node=3).run(job)
    assert "DisagreementError" in {name for name, _ in outcomes}
    for rank, (name, text) in enumerate(outcomes):
        assert f"rank {rank}, group world, collective all_reduce #2, plan flat_direct" in text
        assert "died" not in text
        if name == "DisagreementError":
            assert "COMMLAYER_DEBUG=detail" in text
        else:  # it was told before it found out by itself
            assert name == "PeerError"
            assert "so it left the group" in text


@pytest.mark.parametrize("plan", ["flat_direct", "hierarchical"])
def test_a_plan_names_a_killed_rank_and_a_late_one(emulated_cluster: ClusterFactory, plan: str) -> None:
    nodes, size = ((0, 1, 2), (3, 4, 5)), 60_000

    def job(is_killed: bool) -> tuple[str, str]:
        group = sharing(nodes, plan, timeout_s=HALF_AN_HOUR if is_killed else 2.0)
        x = torch.ones(6 * size, dtype=torch.int32)
        chosen = group.choices.plan("all_reduce", x.numel() * 4)
        assert chosen is not None
        group.run(Movement(chosen, x, x))
        meet(1)
        if dist.get_rank() == 1:
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            be_absent(5)
            return "", ""
        with pytest.raises((PeerError, CollectiveTimeoutError)) as caught:
            group.run(Movement(chosen, x, x))
        if not is_killed:
            tell("done")
        return type(caught.value).__name__, str(caught.value)

    for is_killed in (True, False):
        outcomes = emulated_cluster(nodes=1, ranks_per_node=6).run(job, is_killed, check=False, grace_s=30.0)
        for outcome in outcomes:
            if outcome.rank != 1:
                assert outcome.failure is None, outcome.failure
                name, text = outcome.value
                assert name == ("PeerError" if is_killed else "CollectiveTimeoutError"), text
                assert text.startswith("rank 1 "), (outcome.rank, text)


def test_the_socket_is_only_for_who_knows_the_secret(emulated_cluster: ClusterFactory) -> None:
    """A stranger that connects in between, silently or with a guess, is sent away and disturbs nobody."""

    def job() -> tuple[bool, ...]:
        original, guess = meeting._connected, meeting._HELLO.pack(1, b"?" * 32)

        def with_strangers(meeting: Any, cards: Any, stack: Any) -> Any:
            if meeting.local_rank == 1:
                time.sleep(0.3)  # whom the strangers say they are
            if meeting.local_rank == 2:
                for word in (b"", b"x", guess):
                    stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                    stranger.connect(cards[0].name)
                    stranger.send(word)
            return original(meeting, cards, stack)

        meeting._connected = with_strangers
        group = start([range(3)])
        exchange(group, 3, 1, SIZES)
        return group.shares

    assert emulated_cluster(nodes=1, ranks_per_node=3).run(job) == [(True,)] * 3


def test_a_rank_that_accepts_nobody_keeps_nobody_waiting(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[bool, ...]:
        if int(os.environ["RANK"]) == 0:
            accept = meeting._accept
            meeting._accept = lambda *arguments: not accept(*arguments)  # as if one had not come
        return start([range(3)], HALF_AN_HOUR).shares

    assert emulated_cluster(nodes=1, ranks_per_node=3).run(job) == [(False,)] * 3


def test_no_room_left_is_an_error_of_that_message(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        group = start([[0, 1]])

        def refuse(*_: Any) -> Any:
            raise OSError("no room, says the test")

        group.slab.place = refuse  # type: ignore[method-assign, assignment]  # a fault
        return raised(lambda: group.send([torch.zeros(1 << 20, dtype=torch.uint8)], 1 - dist.get_rank(), 1))

    for text in emulated_cluster(nodes=1, ranks_per_node=2).run(job):
        assert "no shared memory for a message of 1048576 bytes: no room, says the test" in text

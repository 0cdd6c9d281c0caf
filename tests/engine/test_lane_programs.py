"""Programs of collectives on lanes, with real processes: they end, with the right bits, whoever is held and whoever is late."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, be_absent, group_with, tell
from torch._C._distributed_c10d import AllreduceOptions

from commlayer.backend.batches import Batches, Pace
from commlayer.collectives import GroupCommunicator
from commlayer.engine.lane_holds import lanes
from commlayer.profiles.errors import GroupError, UsageError
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.gloo import GlooCall

pytestmark = pytest.mark.cluster

WORLD = 4
LANE_NAMES = ("ep", "pp", "cp", "dp", "tp")
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")


def start(timeout_s: float = 30.0, **environment: str) -> int:
    """On a rank: the backend, every call cut into chunks. Returns the rank."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PLAN": "pipelined:4", **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def group_on(lane: str, timeout_s: float = 30.0) -> Any:
    group = group_with(timeout_s, backend="commlayer")
    group.use_lane(lane)
    return group


class Op:
    """One collective of a program: what each rank gives, what each must get. Numbers are whole, so that sums are exact."""

    def __init__(self, draw: random.Random, lane: str) -> None:
        self.lane, self.verb = lane, draw.choice(VERBS)
        self.count = draw.choice((0, 1, 3, 257, 4096)) if self.verb != "exchange" else draw.choice((1, 1000))
        self.seed = draw.randrange(1 << 30)

    def given(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + rank)
        rows = WORLD if self.verb in ("reduce_scatter", "all_to_all") else 1
        return torch.randint(-50, 50, (rows, self.count), generator=generator).float()

    def wanted(self, rank: int) -> torch.Tensor:
        all_given = [self.given(r) for r in range(WORLD)]
        if self.verb == "all_reduce":
            return torch.stack(all_given).sum(0)
        if self.verb == "all_gather":
            return torch.cat(all_given)
        if self.verb == "reduce_scatter":
            return torch.stack(all_given).sum(0)[rank : rank + 1]
        if self.verb == "all_to_all":
            return torch.stack([given[rank] for given in all_given])
        return all_given[(rank - 1) % WORLD]

    def start(self, rank: int, group: GroupCommunicator) -> tuple[Any, torch.Tensor]:
        self.expected = self.wanted(rank)
        x, out = self.given(rank), torch.full_like(self.expected, float("nan"))
        if self.verb == "exchange":
            return group.start_exchange([(x, (rank + 1) % WORLD)], [(out, (rank - 1) % WORLD)]), out
        if self.verb == "all_reduce":
            return dist.all_reduce(x, group=group.group, async_op=True), x
        calls: dict[str, Any] = {
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }
        return calls[self.verb](out, x, group=group.group, async_op=True), out


def run_program(seed: int, rank: int, groups: dict[str, GroupCommunicator]) -> None:
    """The same calls in every group on all ranks; between groups each rank has an order of its own, delays, and its own waits."""
    shared = random.Random(seed)
    queues = {lane: [Op(shared, lane) for _ in range(shared.randrange(4))] for lane in groups}
    mine = random.Random(seed * WORLD + rank)
    under_way: list[tuple[Op, Any, torch.Tensor]] = []
    while any(queues.values()) or under_way:
        if mine.random() < 0.1:
            time.sleep(mine.random() * 0.002)
        waiting = [lane for lane, queue in queues.items() if queue]
        # A wait may come before calls of other groups only where all ranks agree on it: else the program itself deadlocks.
        if waiting:
            op = queues[mine.choice(waiting)].pop(0)
            under_way.append((op, *op.start(rank, groups[op.lane])))
            continue
        op, work, result = under_way.pop(mine.randrange(len(under_way)))
        work.wait()
        assert torch.equal(result, op.expected), (seed, op.lane, op.verb, op.count)


@pytest.mark.parametrize(("nodes", "ranks", "num_programs"), [(2, 2, 200), (4, 1, 100), (1, 4, 100)])
def test_random_programs_end_with_the_right_bits(
    emulated_cluster: ClusterFactory, nodes: int, ranks: int, num_programs: int
) -> None:
    """In 200 programs each verb is called with each count on each lane, and beside each verb on each
    lane, twice or more often. In 100 programs two of the 325 pairs are missing."""

    def job() -> tuple[int, float]:
        rank = start(COMMLAYER_LANE_SHARE="0.3")
        groups = {lane: GroupCommunicator(dist.new_group(backend="commlayer"), lane) for lane in LANE_NAMES}
        for seed in range(num_programs):
            run_program(seed, rank, groups)
        return sum(held.times for held in lanes().held), lanes().held[0].seconds

    outcomes = emulated_cluster(nodes, ranks).run(job, timeout_s=300)
    assert sum(times for times, _ in outcomes) > 0, "nobody was ever held: these programs test nothing"
    assert all(seconds == 0 for _, seconds in outcomes)  # those that go first never are


def test_waits_in_the_order_that_a_strict_priority_would_deadlock_on(emulated_cluster: ClusterFactory) -> None:
    """Rank 0 issues both and waits for both; the others wait for the lower lane before they issue the higher one."""

    def job() -> list[bool]:
        rank = start()
        high, low = group_on("ep"), group_on("dp")
        found = []
        for _ in range(5):
            x, y = torch.full((50_000,), float(rank + 1)), torch.arange(4.0)
            works = [dist.all_reduce(x, group=low, async_op=True)]
            if rank:
                works[0].wait()
            out = torch.empty_like(y)
            works.append(dist.all_to_all_single(out, y, group=high, async_op=True))
            for work in works:
                work.wait()
            found.append(bool((x == 10).all()) and bool((out == rank).all()))
        return found

    assert all(all(found) for found in emulated_cluster(2, 2).run(job))  # within the time limit of a run


def test_a_lower_lane_gets_through_under_higher_traffic_without_end(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[bool, int, int]:
        rank = start(COMMLAYER_LANE_SHARE="0.5")
        high, low = group_on("ep"), group_on("dp")
        x, out = torch.ones(100_000), torch.empty(100_000)
        big = torch.full((200_000,), float(rank))
        dist.all_reduce(big.clone(), group=low)
        is_over, calls = threading.Event(), 0
        work = dist.all_reduce(big, group=low, async_op=True)
        flag = torch.zeros(1)

        def watch() -> None:
            work.wait()
            is_over.set()

        threading.Thread(target=watch, daemon=True).start()
        while not flag.item():  # all ranks leave after the same call
            works = [dist.all_to_all_single(out, x, group=high, async_op=True) for _ in range(3)]
            flag.fill_(float(is_over.is_set()))
            works.append(dist.all_reduce(flag, dist.ReduceOp.MIN, group=high, async_op=True))
            for each in works:
                each.wait()
            calls += 1
        return bool((big == 6).all()), calls, lanes().held[3].times

    outcomes = emulated_cluster(2, 2).run(job)
    assert all(is_right and calls > 0 for is_right, calls, _ in outcomes)
    assert any(times for _, _, times in outcomes)


def test_a_rank_that_never_issues_its_part_of_a_lower_lane(emulated_cluster: ClusterFactory) -> None:
    """The higher lane goes on; the call that nobody answers raises in its time, and names rank, group, collective and plan."""

    def job() -> tuple[bool, str]:
        rank = start()
        high, low = group_on("ep"), group_on("dp", timeout_s=3.0)
        dist.all_reduce(torch.ones(1), group=low)
        work = dist.all_reduce(torch.ones(50_000), group=low, async_op=True) if rank != 3 else None
        out = torch.empty(4)
        for _ in range(20):
            dist.all_to_all_single(out, torch.arange(4.0), group=high)
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            tell("done")
            return bool((out == rank).all()), str(error)
        be_absent(3)
        return bool((out == rank).all()), ""

    outcomes = emulated_cluster(2, 2).run(job, check=False, grace_s=30.0)
    for outcome in outcomes:
        assert outcome.failure is None, outcome.failure
        is_right, text = outcome.value
        assert is_right
        if outcome.rank != 3:
            assert "all_reduce" in text, text
            assert "pipelined×4" in text, text


def test_a_rank_killed_while_its_chunk_is_held(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start(timeout_s=HALF_AN_HOUR)
        high, low = group_on("ep"), group_on("dp")
        dist.all_reduce(torch.ones(50_000), group=low)
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=high)
        if rank == 3:  # nobody answers this one, so the chunks below are held
            lanes().enter(0)
            post = GlooCall.post
            GlooCall.post = lambda call, index: os.kill(os.getpid(), signal.SIGKILL) if index else post(call, index)  # type: ignore[method-assign, assignment]
        try:
            for _ in range(2):
                dist.all_reduce(torch.ones(50_000), group=low)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("a rank was killed, and nobody noticed")

    for outcome in emulated_cluster(2, 2).run(job, check=False, grace_s=30.0):
        if outcome.rank != 3:
            assert outcome.failure is None, outcome.failure
            assert outcome.value.startswith("PeerError"), outcome.value
            assert "rank 3" in outcome.value


def test_lanes_from_two_threads(emulated_cluster: ClusterFactory) -> None:
    """Each thread its own lane's group: the order in a group is still the same on all ranks."""

    def job() -> list[bool]:
        rank = start()
        groups = {lane: group_on(lane) for lane in ("ep", "dp")}
        found: list[bool] = []

        def calls(lane: str, count: int) -> None:
            for _ in range(30):
                x = torch.full((count,), float(rank))
                dist.all_reduce(x, group=groups[lane])
                found.append(bool((x == 6).all()))

        threads = [threading.Thread(target=calls, args=args) for args in (("ep", 100), ("dp", 20_000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert emulated_cluster(2, 2).run(job) == [[True] * 60] * WORLD


@pytest.mark.parametrize("debug", ["off", "detail"])
def test_an_order_that_differs_between_ranks(emulated_cluster: ClusterFactory, debug: str) -> None:
    """Sizes tell, or the timeout; the debug mode names both calls before anything moves."""

    def job() -> str:
        rank = start(COMMLAYER_DEBUG=debug)
        low = group_on("dp", timeout_s=4.0)
        dist.all_reduce(torch.ones(8), group=low)
        x, y = torch.ones(30_000), torch.ones(4, 2_000)
        try:
            if rank == 1:
                dist.all_to_all_single(torch.empty_like(y), y, group=low)
            dist.all_reduce(x, group=low)
            if rank != 1:
                dist.all_to_all_single(torch.empty_like(y), y, group=low)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    outcomes = emulated_cluster(2, 2).run(job, check=False, grace_s=30.0)
    texts = []
    for outcome in outcomes:
        assert outcome.failure is None, outcome.failure
        texts.append(outcome.value)
    assert all(texts), texts
    if debug == "detail":
        assert all(text.startswith("DisagreementError") for text in texts), texts
        assert any("all_to_all" in text and "all_reduce" in text for text in texts), texts


def test_a_lane_that_does_not_exist_and_a_group_that_has_one(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[str, str, bool]:
        start()
        group = group_on("ep")
        with pytest.raises(UsageError, match="lane must be one of") as caught:
            group.use_lane("xp")
        with pytest.raises(UsageError, match="lane must be one of"):
            GroupCommunicator(group, "xp")
        with pytest.warns(UserWarning, match="is on lane ep, and what is called for lane dp goes there too"):
            GroupCommunicator(group, "dp")
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        return str(caught.value), group.lane, bool((x == WORLD).all())

    for found in emulated_cluster(2, 2).run(job):
        assert found[1:] == ("ep", True)


def test_messages_of_every_kind_in_both_directions(emulated_cluster: ClusterFactory) -> None:
    """Sent before anybody receives, in any order of peers; no elements, one, other dtypes, not contiguous."""

    def job() -> bool:
        rank = start()
        pp = GroupCommunicator(dist.new_group(backend="commlayer"), "pp")
        others = [peer for peer in range(WORLD) if peer != rank]
        for dtype, shape in [
            (torch.float32, (300, 7)),
            (torch.bfloat16, (1,)),
            (torch.int64, (5,)),
            (torch.bool, (9,)),
            (torch.float8_e4m3fn, (4, 4)),
            (torch.float32, (0, 3)),
        ]:
            size = torch.Size(shape).numel()

            def made(source: int, target: int, dtype: torch.dtype = dtype, size: int = size) -> torch.Tensor:
                return ((torch.arange(size) + source * 3 + target) % 7).to(dtype)

            sends = [(made(rank, peer).view(shape), peer) for peer in others]
            got = {peer: torch.empty(shape, dtype=dtype) for peer in others}
            first = pp.start_exchange(sends[::-1])  # before anybody receives
            second = pp.start_exchange(receives=[(got[peer], peer) for peer in others])
            second.wait()
            first.wait()
            for peer, x in got.items():
                assert torch.equal(x.view(-1).view(torch.uint8), made(peer, rank).view(torch.uint8)), (dtype, peer)
        wide = torch.zeros(6, 4)
        pp.exchange([(torch.arange(24.0).view(4, 6).t(), (rank + 1) % WORLD)], [(wide[:, :], (rank - 1) % WORLD)])
        half = torch.zeros(6, 8)
        pp.exchange([(wide, (rank + 1) % WORLD)], [(half[:, ::2], (rank - 1) % WORLD)])
        return torch.equal(wide, torch.arange(24.0).view(4, 6).t()) and torch.equal(half[:, ::2], wide)

    assert all(emulated_cluster(2, 2).run(job))


def test_messages_that_nobody_takes_and_peers_that_are_none(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start()
        pp = GroupCommunicator(group_on("pp", timeout_s=2.0), "pp")
        with pytest.raises(UsageError, match="Invalid source rank 9"):
            pp.start_exchange(receives=[(torch.ones(1), 9)])
        dist.barrier()
        if rank != 0:
            be_absent(1)
            return ""
        try:
            pp.exchange(receives=[(torch.ones(4), 2)])
        except RuntimeError as error:
            tell("done")
            return f"{type(error).__name__}: {error}"
        return ""

    text = emulated_cluster(2, 2).run(job)[0]
    assert text.startswith("CollectiveTimeoutError"), text
    assert "recv from rank 2" in text


def test_messages_in_chunks_yield_and_keep_their_order(emulated_cluster: ClusterFactory) -> None:
    """Large and small ones, to another node and inside this one, one behind the other, beside a higher lane's calls."""

    def job() -> tuple[int, int, int]:
        rank = start(COMMLAYER_LANE_SHARE="0.5")
        Pace.chunk_bytes = 4096  # type: ignore[assignment]
        Pace.seconds_per_byte = 1e-8  # type: ignore[assignment]
        posted = []
        post = Batches._post

        def counted(self: Batches, batch: Any, verb: str, piece: torch.Tensor, peer: int, *more: Any) -> None:
            posted.append((verb, peer, piece.numel()))
            post(self, batch, verb, piece, peer, *more)

        Batches._post = counted  # type: ignore[method-assign, assignment]
        pp, high = GroupCommunicator(group_on("pp"), "pp"), group_on("ep")
        far, near = (rank + 2) % WORLD, rank ^ 1
        sizes = [100_001, 1, 5_000, 4_096, 33]
        for _ in range(3):
            experts = dist.all_to_all_single(torch.empty(40_000), torch.ones(40_000), group=high, async_op=True)
            under_way, wanted = [], []
            for nth, size in enumerate(sizes):
                for peer in (far, near):
                    out = torch.empty(size, dtype=torch.uint8)
                    x = ((torch.arange(size) * 7 + nth + rank) % 251).to(torch.uint8)
                    under_way.append(pp.start_exchange([(x, peer)], [(out, peer)]))
                    wanted.append((out, ((torch.arange(size) * 7 + nth + peer) % 251).to(torch.uint8)))
            for each in reversed(under_way):
                each.wait()
            experts.wait()
            for out, right in wanted:
                assert torch.equal(out, right), out.numel()
        largest_far = max(size for verb, peer, size in posted if verb == "send" and peer == far)
        chunks = sum(1 for verb, peer, _ in posted if verb == "send" and peer == far)
        return largest_far, chunks, max(size for verb, peer, size in posted if verb == "recv" and peer == near)

    for largest_far, chunks, largest_near in emulated_cluster(2, 2).run(job):
        assert largest_far == 4096
        assert chunks == 3 * (25 + 1 + 2 + 1 + 1)
        assert largest_near == 100_001


def test_a_batch_that_was_given_up_stays_so_and_sends_nothing_more(emulated_cluster: ClusterFactory) -> None:
    """The first wait is told to give up early; a later one must not say that all went well."""

    def job() -> list[str]:
        rank = start()
        Pace.chunk_bytes = 4096  # type: ignore[assignment]
        Pace.seconds_per_byte = 2e-4  # type: ignore[assignment]  # a second for each chunk
        group = group_on("pp")
        texts: list[str] = []
        if rank == 0:
            work = group.start_batch([(torch.ones(4096 * 3, dtype=torch.uint8), 2)], [])
            for _ in range(2):
                try:
                    work.wait(timedelta(seconds=0.2))
                except RuntimeError as error:
                    texts.append(type(error).__name__)
                time.sleep(1.5)
            assert not work.is_success()
        return texts

    assert emulated_cluster(2, 2).run(job)[0] == ["CollectiveTimeoutError"] * 2


def test_the_end_of_a_group_leaves_no_call_behind(emulated_cluster: ClusterFactory) -> None:
    """A call that is refused is not one that is under way: others would be held for it, or not for the next one."""

    def job() -> tuple[bool, bool, bool]:
        start()
        high = group_on("ep")
        x = torch.ones(8)
        dist.all_reduce(x, group=high)
        dist.destroy_process_group(high)
        for is_async in (False, True, False):
            with pytest.raises(GroupError):
                high.allreduce([x], _options(is_async))
        is_idle = lanes().is_free(3)
        call = lanes().enter(0)
        is_busy = not lanes().is_free(3)
        lanes().leave(call)
        return is_idle, is_busy, lanes().is_free(3)

    assert emulated_cluster(2, 2).run(job) == [(True, True, True)] * WORLD


def _options(is_async: bool) -> Any:
    options: Any = AllreduceOptions()
    options.asyncOp = is_async
    return options

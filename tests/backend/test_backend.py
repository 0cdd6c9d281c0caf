"""The backend `commlayer`: order, futures, errors, life cycle, agreement, statistics, and how programs get it."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, be_absent, group_with, meet, tell, wait_until
from torch._C._distributed_c10d import HashStore, PrefixStore, set_debug_level_from_env
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

import commlayer
import commlayer.backend.create  # ranks are forked: what is imported here they need not import
from commlayer.backend.patches import answer_to
from commlayer.emulation import RanksFailedError
from commlayer.profiles.errors import (
    CollectiveTimeoutError,
    DisagreementError,
    GroupError,
    PeerError,
    SettingsError,
    TensorError,
    TopologyError,
    UsageError,
)
from commlayer.statistics import print_stats
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces.rank_files import read_folder

pytestmark = pytest.mark.cluster


def start(timeout_s: float = 30.0, **environment: Any) -> tuple[int, int, Any]:
    """On a rank: its number, the number of ranks, the default group."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "none"} | environment)
    dist.init_process_group("commlayer", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def run(cluster: ClusterFactory, job: Callable[..., Any], *args: Any, nodes: int = 2, ranks: int = 2) -> list[Any]:
    return cluster(nodes=nodes, ranks_per_node=ranks).run(job, *args)


def calls_of(collective: str, group: int = 0) -> dict[str, int]:
    """How often this rank ran ``collective``, by plan."""
    rows = commlayer.stats()["groups"][group]["calls"]
    return {row["plan"]: row["calls"] for row in rows if row["collective"] == collective}


# Order


def test_sync_and_async_calls_keep_one_order(emulated_cluster: ClusterFactory) -> None:
    """Each call's result depends on those before it; ranks are late at different places."""

    def job() -> list[float]:
        rank, size, _ = start()
        x = torch.ones(1)
        works = []
        for step in range(60):
            if (step + rank) % 7 == 0:
                time.sleep(0.002)
            if step % 3 == 0:
                dist.all_reduce(x)
                x /= size
            elif step % 3 == 1:
                works.append(dist.all_reduce(x, async_op=True))
            else:
                works.append(dist.broadcast(x, src=step % size, async_op=True))
                works[-1].wait()
                x /= size
        assert all(work.is_completed() and work.is_success() for work in works)
        return x.tolist()

    assert run(emulated_cluster, job) == [[1.0]] * 4


def test_callbacks_issue_collectives(emulated_cluster: ClusterFactory) -> None:
    """A hook works as PowerSGD's does: a callback's collective runs right after the call that it belongs to, on every rank."""

    def job() -> list[float]:
        rank, size, _ = start()
        order: list[str] = []
        results = []
        for step in range(8):
            x = torch.full((1,), float(step))
            work = dist.all_reduce(x, async_op=True)

            def again(future: Any, step: int = step) -> list[torch.Tensor]:
                order.append(f"callback {step}")
                y = future.value()[0].clone()
                dist.all_reduce(y)  # synchronous, inside a callback
                nested = dist.all_reduce(y, async_op=True)
                assert nested is not None
                return nested.get_future().wait()  # type: ignore[no-any-return]

            results.append(work.get_future().then(again))
            late = torch.ones(1)
            if (rank + step) % 3 == 0:
                time.sleep(0.003)
            dist.all_reduce(late)
            assert late.item() == size
        values = [result.wait()[0].item() for result in results]
        assert order == [f"callback {step}" for step in range(8)]
        return values

    assert run(emulated_cluster, job) == [[step * 4.0**3 for step in range(8)]] * 4


def test_a_callback_may_wait_for_a_later_call(emulated_cluster: ClusterFactory) -> None:
    def job() -> float:
        _, size, _ = start()
        gate: list[Any] = []
        # Large: where it has ended before then() is called, the callback runs on this thread, and waits for what comes after it.
        first = dist.all_reduce(torch.ones(4_000_000), async_op=True)
        total = torch.ones(1)

        def wait_for_second(future: Any) -> float:
            while not gate:
                time.sleep(0.001)
            gate[0].wait()
            return total.item()

        result = first.get_future().then(wait_for_second)
        gate.append(dist.all_reduce(total, async_op=True))
        assert result.wait() == size
        return total.item()

    assert run(emulated_cluster, job, nodes=1) == [2.0] * 2


def test_a_message_to_nobody_is_the_callers_mistake(emulated_cluster: ClusterFactory) -> None:
    def job() -> float:
        rank, size, group = start()
        x = torch.ones(4)
        for nobody in (-1, size):
            with pytest.raises(
                UsageError, match=f"Invalid destination rank {nobody}: expected a rank of the group, 0 to 1"
            ):
                group.send([x], nobody, 0)
            with pytest.raises(UsageError, match=f"Invalid source rank {nobody}"):
                group.recv([x], nobody, 0)
        works = [dist.isend(torch.full((4,), float(rank)), 1 - rank), dist.irecv(x, 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()
        dist.destroy_process_group()
        return x[0].item()

    assert run(emulated_cluster, job, nodes=1) == [1.0, 0.0]


def test_messages_are_not_queued(emulated_cluster: ClusterFactory) -> None:
    """A recv that is posted behind an unfinished collective must not wait for it."""

    def job() -> list[float]:
        rank, _, _ = start()
        x, came = torch.ones(1), torch.empty(1)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)  # rank 1 joins only when it has the message
            dist.send(torch.tensor([7.0]), 1)
            dist.recv(came, 1)
        else:
            assert dist.recv(came) == 0  # from any rank
            work = dist.all_reduce(x, async_op=True)
            dist.send(came + 1, 0)
        assert work is not None
        work.wait()
        return [x.item(), came.item()]

    assert run(emulated_cluster, job, nodes=1) == [[2.0, 8.0], [2.0, 7.0]]


def test_works_and_futures(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, size, group = start()
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0].data_ptr() == x.data_ptr()
        assert work.get_future().value()[0].data_ptr() == x.data_ptr()
        seen = []
        work.get_future().add_done_callback(lambda future: seen.append(future.value()))
        assert len(seen) == 1
        if rank == 0:
            wait_until("rank 1 has waited in vain")
            dist.barrier()
        else:
            late = dist.barrier(async_op=True)
            assert late is not None
            assert not late.is_completed()
            with pytest.raises(UsageError, match="before the call has ended"):
                late.result()
            with pytest.raises(CollectiveTimeoutError, match="Timed out waiting 50ms"):
                late.wait(timedelta(milliseconds=50))
            tell("rank 1 has waited in vain")
            late.wait()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        done = group.allreduce([x], options)
        assert done.wait()
        with pytest.raises(UsageError, match="async_op=True"):
            done.get_future()
        # the forms in which torch's own code calls a group
        group.allreduce(x).wait()
        group.allreduce([x], dist.ReduceOp.MAX, timedelta(seconds=5)).wait()
        group.allreduce([x], op=dist.ReduceOp.SUM).wait()
        group.broadcast(x, root=0).wait()
        group.broadcast([x], 1, timedelta(seconds=5)).wait()
        group.allgather([torch.empty(2) for _ in range(size)], x).wait()
        group.reduce(x, 0).wait()
        group.barrier().wait()
        group.barrier(timeout=timedelta(seconds=5)).wait()
        with pytest.raises(TypeError, match="unexpected arguments colour"):
            group.broadcast(x, root=0, colour="red")

    run(emulated_cluster, job, nodes=1)


def test_a_failed_future_raises_what_the_call_raised(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        work = dist.all_reduce(torch.ones(2).to(torch.float8_e5m2), async_op=True)
        future = work.get_future()
        with pytest.raises(TensorError):
            work.wait()
        with pytest.raises(RuntimeError, match=r"TensorError.*float8_e5m2"):
            future.wait()
        assert isinstance(work.exception(), TensorError)
        assert work.is_completed()
        assert not work.is_success()

    run(emulated_cluster, job, nodes=1)


# Errors


def test_a_timeout_names_who_and_what(emulated_cluster: ClusterFactory) -> None:
    """A rank that does not come: rank, group, collective, number, and what Gloo said."""

    def job() -> str:
        rank, _, _ = start()
        dist.all_reduce(torch.ones(1))
        group = group_with(2.0, [0, 1], group_desc="experts")
        if rank == 1:
            be_absent(1)
            return ""
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 0, group .*experts.*broadcast #1.*rank 1.*Timed out"
        ) as e:
            dist.broadcast(torch.ones(1), src=1, group=group)
        tell("done")
        return str(e.value)

    assert "2 s" in run(emulated_cluster, job, nodes=1)[0]


def test_timeouts_of_one_call_and_of_a_group(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, _, default = start(timeout_s=HALF_AN_HOUR)
        groups = [dist.new_group([0, 1]) for _ in range(4)]
        if rank == 1:
            dist.barrier(groups[3])
            return
        with pytest.raises(CollectiveTimeoutError, match=r"0\.2 s"):
            dist.barrier(group=groups[0], timeout=timedelta(seconds=0.2))
        groups[1].set_timeout(timedelta(seconds=0.3))
        with pytest.raises(CollectiveTimeoutError, match=r"0\.3 s"):
            dist.all_reduce(torch.ones(1), group=groups[1])
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.4), groups[2])
        work = dist.all_reduce(torch.ones(1), group=groups[2], async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"0\.4 s"):
            work.wait()
        came = torch.empty(1)
        default.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(CollectiveTimeoutError, match="recv from rank 1, tag 9"):
            dist.recv(came, 1, tag=9)
        dist.barrier(groups[3])

    run(emulated_cluster, job, nodes=1)


def test_a_dead_rank_is_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank, _, _ = start()
        meet(1)
        if rank == 1:
            os._exit(7)
        try:
            dist.all_reduce(torch.ones(100_000))
        except PeerError as error:
            return str(error)
        return "no error"

    cluster = emulated_cluster(nodes=1, ranks_per_node=3)
    outcomes = cluster.run(job, check=False, grace_s=30)
    for rank in (0, 2):
        assert f"rank {rank}, group 0 (default_pg), all_reduce #2" in outcomes[rank].value
        assert "rank 1" in outcomes[rank].value


def test_a_group_after_its_end(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, _, default = start()
        group = dist.new_group([0, 1])
        pending = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.destroy_process_group(group)  # ends what is queued
        assert pending.is_success()
        with pytest.raises(GroupError, match=f"rank {rank}, group .*all_reduce after the group was destroyed"):
            group.allreduce([torch.ones(1)], dist.ReduceOp.SUM)
        options = dist.AllreduceOptions()
        options.asyncOp = False
        with pytest.raises(GroupError, match="destroyed"):
            group.allreduce([torch.ones(1)], options)
        with pytest.raises(GroupError, match="destroyed"):
            group.send([torch.ones(1)], 1 - rank, 0)
        group.shutdown()  # again: harmless
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        with pytest.raises(GroupError, match="destroyed"):
            default.barrier().wait()
        start()  # and once more, from nothing
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2

    run(emulated_cluster, job, nodes=1)


@pytest.mark.cluster
def test_the_default_group_is_made_again_with_fewer_ranks_on_the_same_store(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[float]:
        rank, *_ = start()
        store, sums = PrefixStore("again", _get_default_store()), []
        for size in (3, 2, 3):
            dist.barrier()
            dist.destroy_process_group()
            if rank < size:
                dist.init_process_group(
                    "commlayer", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10)
                )
                x = torch.ones(1)
                dist.all_reduce(x)
                sums.append(x.item())
            else:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return sums

    assert emulated_cluster(1, 3).run(job) == [[3.0, 2.0, 3.0], [3.0, 2.0, 3.0], [3.0, 3.0]]


def test_abort_frees_those_who_wait(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, _, group = start(timeout_s=HALF_AN_HOUR)
        dist.barrier()
        if rank == 0:
            time.sleep(0.3)  # so that the other one waits already, mostly
            group.abort()
        else:
            with pytest.raises(RuntimeError, match="rank 1, group 0"):
                dist.all_reduce(torch.ones(1))

    run(emulated_cluster, job, nodes=1)


def test_monitored_barrier(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank, _, _ = start()
        dist.monitored_barrier(timeout=timedelta(seconds=60))
        groups = [dist.new_group()]
        if rank == 1:
            be_absent(1)
            return ""
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            dist.monitored_barrier(groups[0], timeout=timedelta(0))
        with pytest.raises(RuntimeError, match="onitoredBarrier") as error:
            dist.monitored_barrier(timeout=timedelta(seconds=0.3))
        tell("done")
        return str(error.value)

    assert "Rank 1 failed to pass monitoredBarrier" in run(emulated_cluster, job, nodes=1)[0]


# Comparing calls


def test_detail_finds_different_calls(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        rank, size, _ = start(COMMLAYER_DEBUG="detail")
        found = []

        def differ(*calls: Callable[[], Any]) -> None:
            with pytest.raises(DisagreementError) as error:
                calls[min(rank, len(calls) - 1)]()
            found.append(str(error.value))

        x = torch.ones(4)
        differ(lambda: dist.all_reduce(x), lambda: dist.broadcast(x, src=0))
        differ(lambda: dist.all_reduce(x), lambda: dist.all_reduce(torch.ones(5)))
        differ(lambda: dist.all_reduce(x), lambda: dist.all_reduce(x.double()[:2]))
        differ(lambda: dist.broadcast(x, src=0), lambda: dist.broadcast(x, src=1))
        max_op = dist.ReduceOp.MAX
        differ(lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, max_op, async_op=True).wait())
        sends = [[1, 3, 0, 0], [2, 2, 0, 0], [4, 0, 0, 0], [0, 0, 0, 4]]
        wants = [sum(row[rank] for row in sends)] * 4
        differ(lambda: dist.all_to_all_single(torch.empty(sum(wants)), x, wants, sends[rank]))
        dist.all_reduce(x)  # nothing of all that was moved
        assert x.tolist() == [size] * 4
        dist.barrier()
        parts = [torch.empty(4) for _ in range(size)]
        dist.all_gather(parts, x)
        dist.all_to_all_single(torch.empty(4), x)
        return found

    results = run(emulated_cluster, job)
    assert all(result == results[0] for result in results)  # the same on all ranks
    texts = results[0]
    assert "rank 0 calls #1 all_reduce(16 bytes, float32, SUM, plan flat), but rank 1 calls #1 broadcast" in texts[0]
    assert "rank 1 calls #1 all_reduce(20 bytes" in texts[1]
    assert "float64" in texts[2]
    assert "root 1" in texts[3]
    assert "MAX" in texts[4]
    assert "sends 1 elements to rank 0, which expects 7" in texts[5]


def test_detail_names_the_rank_that_does_not_come(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank, _, _ = start(TORCH_DISTRIBUTED_DEBUG="DETAIL")
        set_debug_level_from_env()
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=group)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        if rank == 1:
            be_absent(1)
            return ""
        with pytest.raises(CollectiveTimeoutError) as error:
            dist.broadcast(torch.ones(3), src=0, group=group)
        tell("done")
        return str(error.value)

    text = run(emulated_cluster, job, nodes=1)[0]
    assert "rank 1 (its last call was #1 all_reduce(12 bytes" in text
    assert "call #2 broadcast" in text


def test_detail_says_that_a_call_was_refused_on_the_other_rank(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        rank, size, _ = start(timeout_s=60, COMMLAYER_DEBUG="detail")
        x, texts = torch.ones(size), []
        for collective in (dist.all_gather_single, dist.all_to_all_single):
            group = group_with(2.0)
            right = torch.empty(size * size if collective is dist.all_gather_single else size)
            if rank == 1:
                with pytest.raises(TensorError) as refused:
                    collective(right[1:], x, group=group)
                texts.append(str(refused.value))
                dist.barrier()
            else:
                with pytest.raises(CollectiveTimeoutError) as late:
                    collective(right, x, group=group)
                texts.append(str(late.value))
                dist.barrier()
        return texts

    waited, refused = run(emulated_cluster, job, nodes=1)
    for text, why in zip(waited, refused, strict=True):
        assert "rank 1 (its call #1 was refused there: all_" in text
        assert why in text


# Agreement


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        (
            {"COMMLAYER_REDUCTION": "ordered"},
            DisagreementError,
            "COMMLAYER_REDUCTION: rank 0 has native, rank 1 has ordered",
        ),
        ({"COMMLAYER_COLOUR": "red"}, DisagreementError, "rank 1 cannot take part: SettingsError: unknown variable"),
    ],
)
def test_ranks_must_agree(
    emulated_cluster: ClusterFactory, variables: dict[str, Any], error: type[Exception], text: str
) -> None:
    def job() -> None:
        if os.environ["RANK"] == "1":
            if "COMMLAYER_COLOUR" in variables:
                error_here: type[Exception] = SettingsError
                expected = "COLOUR"
            else:
                error_here, expected = error, text
            with pytest.raises(error_here, match=expected):
                start(**variables)
        else:
            with pytest.raises(error, match=text):
                start()

    run(emulated_cluster, job, nodes=1)


def test_nodes_are_discovered_or_declared(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[Any]:
        rank, _, group = start()
        found = [group._planned.nodes]
        sub = dist.new_group([1, 2, 3])
        if rank:
            found.append(sub._planned.nodes)
            assert sub._planned.global_ranks == (1, 2, 3)
        return found

    for nodes in run(emulated_cluster, job)[1:]:
        assert nodes == [((0, 1), (2, 3)), ((0,), (1, 2))]

    def declared() -> Any:
        return start(COMMLAYER_TOPOLOGY="1+3")[2]._planned.nodes

    assert run(emulated_cluster, declared) == [((0,), (1, 2, 3))] * 4

    def wrongly() -> None:
        with pytest.raises(TopologyError, match="declares 2x4, 8 ranks, but the job has 2"):
            start(COMMLAYER_TOPOLOGY="2x4")

    run(emulated_cluster, wrongly, nodes=1)


def test_beside_a_default_group_of_another_backend(emulated_cluster: ClusterFactory) -> None:
    """Members of two groups know more than those of one: they must not decide by that whether to ask."""

    def job() -> list[float]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        groups = [dist.new_group(ranks, backend="commlayer") for ranks in ([0, 1], [1, 2, 3], [0, 1, 2])]
        x = torch.ones(1)
        for group, ranks in zip(groups, ([0, 1], [1, 2, 3], [0, 1, 2]), strict=True):
            if rank in ranks:
                dist.all_reduce(x, group=group)
        if rank:
            assert groups[1]._planned.nodes == ((0,), (1, 2))
        dist.monitored_barrier()  # torch's own: the group is not ours
        return x.tolist()

    assert run(emulated_cluster, job) == [[10.0], [10.0], [10.0], [4.0]]


def test_split_group(emulated_cluster: ClusterFactory) -> None:
    def job() -> float:
        rank, _, group = start()
        if hasattr(dist.ProcessGroup, "register_pre_hook"):  # torch 2.15, which splits groups of the CPU too
            pair: Any = dist.split_group(split_ranks=[[0, 1], [2, 3]])
            assert (type(pair), dist.get_process_group_ranks(pair)) == (type(group), [[0, 1], [2, 3]][rank // 2])
            y = torch.full((2,), float(rank))
            dist.all_reduce(y, group=pair)
            assert y.tolist() == [[1.0, 1.0], [5.0, 5.0]][rank // 2]
        else:
            with pytest.raises(RuntimeError, match="No device associated"):
                dist.split_group(split_ranks=[[0, 1], [2, 3]])  # torch's own refusal, not a crash
        half = group.split_group([0, 3] if rank in (0, 3) else [2, 1])
        assert group.split_group([0, 1], group_name=f"other{rank}") is None if rank > 1 else True
        x = torch.full((1,), float(half.rank()))
        half.allreduce([x]).wait()
        half.barrier().wait()
        gathered = [torch.empty(1) for _ in range(2)]
        half.allgather([gathered], [torch.tensor([float(rank)])]).wait()
        assert [g.item() for g in gathered] == ([0, 3] if rank in (0, 3) else [2, 1])
        half.shutdown()
        return x.item()

    assert run(emulated_cluster, job) == [1.0] * 4


# Statistics


def test_a_planned_all_to_all_is_counted_and_its_steps_recorded(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    """Results by the splits of each call: the rank's own, which it has twice, and others."""

    def job() -> None:
        os.environ.update(COMMLAYER_PLAN="hierarchical", COMMLAYER_TRACE=str(tmp_path))
        dist.init_process_group("commlayer")
        rank, size = dist.get_rank(), 4
        for rows in ([1, 2, 3, 4], [1, 2, 3, 4], [0, 5, 0, 1]):
            mine = [rows[(rank + peer) % 4] for peer in range(size)]  # the same to me as from me
            out = torch.empty(sum(mine))
            dist.all_to_all_single(out, torch.full((sum(mine),), float(rank)), mine, mine)
            assert out.tolist() == [float(peer) for peer in range(size) for _ in range(mine[peer])]
            found = commlayer.stats()
            (row,) = found["groups"][0]["calls"]
            commlayer.reset_stats()
            near = rank ^ 1
            # Each rank brings its node's ranks what they pass on, and tells them how much: 8 bytes for each rank they relay for.
            brought = sum(mine[peer] for peer in (near, near ^ 2))
            passed = sum(rows[(source + (rank ^ 2)) % 4] for source in (rank, near))
            printed = io.StringIO()
            with contextlib.redirect_stderr(printed):
                print_stats(found)
            assert "all_to_all" in printed.getvalue()
            assert "?" not in printed.getvalue()
            assert row["wire_bytes"] == {"inter": 4 * passed, "intra": 4 * brought + 8}
        dist.destroy_process_group()

    emulated_cluster(2, 2).run(job)
    calls = [call for trace in read_folder(tmp_path) for call in trace.calls if call.collective == "all_to_all"]
    assert len(calls) == 3 * 4
    assert all(len(call.steps) == 4 for call in calls)
    assert all(sum(step.sent_bytes for step in call.steps) == call.inter_bytes + call.intra_bytes for call in calls)


def test_statistics_say_what_ran(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        rank, size, _ = start()
        for _ in range(3):
            dist.all_reduce(torch.ones(8))
        dist.all_gather_single(torch.empty(4 * size), torch.ones(4))
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        splits = [1, 0, 2, 1]
        dist.all_to_all_single(torch.empty(4 * splits[rank]), torch.ones(4), [splits[rank]] * 4, splits)
        group = dist.new_group([0, 1], group_desc="pair")
        if rank < 2:
            dist.barrier(group)
        found = commlayer.stats()
        assert found["rank"] == rank
        rows = {(row["collective"], row["plan"]): row for row in found["groups"][0]["calls"]}
        assert rows["all_reduce", "flat"]["calls"] == 3
        assert rows["all_reduce", "flat"]["logical_bytes"] == 96
        assert rows["all_reduce", "flat"]["wire_bytes"] is None
        assert rows["all_reduce", "flat"]["time_us"] > 0
        assert rows["all_gather", "flat"]["logical_bytes"] == 16 * size
        mine = [splits[peer] for peer in range(4)]
        near = {0: 1, 1: 0, 2: 3, 3: 2}[rank]
        far = [2, 3] if rank < 2 else [0, 1]
        assert rows["all_to_all", "flat"]["wire_bytes"] == {
            "inter": 4 * 2 + 4 * sum(mine[peer] for peer in far),
            "intra": 4 * 1 + 4 * mine[near],
        }
        assert len(found["groups"]) == (2 if rank < 2 else 1)
        dist.destroy_process_group()
        assert commlayer.stats() == found  # they outlive the groups
        commlayer.reset_stats()
        assert commlayer.stats()["groups"] == []

    run(emulated_cluster, job)


def test_answering_to_a_known_name(emulated_cluster: ClusterFactory, capfd: Any) -> None:
    def job(backend: str | None) -> list[str]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        answer_to("gloo")
        dist.init_process_group(backend)
        groups = [None, dist.new_group(), dist.new_group(backend="gloo"), dist.new_group(backend="cpu:gloo")]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        mesh = init_device_mesh("cpu", (2,))
        return [dist.get_backend(group) for group in [*groups, mesh.get_group()]]

    cluster = emulated_cluster(nodes=1, ranks_per_node=2)
    for backend in ("gloo", "cpu:gloo,cuda:nccl", None):
        assert cluster.run(job, backend) == [["commlayer"] * 5] * 2
        assert capfd.readouterr().err.count("COMMLAYER_AS=gloo") == 1  # rank 0 says so

    def other(name: str) -> str:
        answer_to("nccl")
        dist.init_process_group(name)
        return str(dist.get_backend())

    for name in ("gloo", "GLOO"):
        assert cluster.run(other, name) == ["gloo"] * 2
        said = capfd.readouterr().err
        assert said.count("which is not planned: COMMLAYER_AS=gloo would have it planned") == 1
    assert cluster.run(other, "COMMLAYER") == ["commlayer"] * 2
    assert "COMMLAYER_AS" not in capfd.readouterr().err, "it is what it asked for"


PROGRAM = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group(BACKEND)
assert dist.get_backend() == "commlayer", dist.get_backend()
x = torch.ones(4)
dist.all_reduce(x)
dist.all_reduce(x, async_op=True).wait()
assert x.tolist() == [4.0] * 4
END
"""


def run_program(cluster: ClusterFactory, capfd: Any, backend: str, end: str, **variables: str) -> str:
    """Two ranks run a program that imports nothing of ours; what they wrote."""
    code = PROGRAM.replace("BACKEND", backend).replace("END", end)
    variables |= {"COMMLAYER_PROFILE": "none", "COLUMNS": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        status = cluster(nodes=1, ranks_per_node=2).command([sys.executable, "-c", code], timeout_s=100)
    out = capfd.readouterr()
    assert status == 0, out.err
    return str(out.out + out.err)


def test_a_program_that_imports_nothing_of_ours(emulated_cluster: ClusterFactory, capfd: Any) -> None:
    """It finds the backend by its entry point; the table comes at exit, from rank 0 only, and nothing else."""
    text = run_program(
        emulated_cluster, capfd, '"gloo"', "dist.destroy_process_group()", COMMLAYER_STATS="1", COMMLAYER_AS="gloo"
    )
    assert text.count("commlayer, rank 0") == 1
    assert text.count("COMMLAYER_AS=gloo") == 1
    assert "rank 1" not in text
    assert "all_reduce" in text
    assert "Error" not in text


def test_a_program_that_forgets_to_destroy_ends_quietly(emulated_cluster: ClusterFactory, capfd: Any) -> None:
    text = run_program(emulated_cluster, capfd, '"commlayer"', "dist.barrier(async_op=True)")
    assert "terminate" not in text
    assert "Traceback" not in text


# Registration


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_import_torch_never_fails_and_loads_little() -> None:
    """Whatever is wrong with the installation or the environment. The processes run side by side: torch imports slowly."""
    shown = (
        "; print('commlayer' in torch.distributed.Backend.backend_list, "
        "sorted(m for m in sys.modules if m.startswith('commlayer')), 'msgspec' in sys.modules)"
    )
    sound = run_python("import torch, sys" + shown)
    unset = run_python("import torch; print('alive')", COMMLAYER_NONSENSE="1")
    broken = run_python(
        "import sys; sys.modules['commlayer.backend.patches'] = None; import torch; print('alive')", COMMLAYER_AS="gloo"
    )
    foreign = run_python(
        "import torch.distributed as dist; print('alive'); dist.init_process_group('gloo')", COMMLAYER_AS="mpi"
    )
    manual = run_python(
        "import commlayer.backend, torch; dist = torch.distributed\n"
        "dist.init_process_group('commlayer', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x.item(), dist.get_backend())",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        COMMLAYER_PROFILE="none",
    )
    loaded = [
        "commlayer",
        "commlayer.backend",
        "commlayer.backend.patches",
        "commlayer.profiles",
        "commlayer.profiles.lazy_names",
    ]
    assert sound.communicate()[0] == f"True {loaded} False\n"
    assert unset.communicate()[0] == "alive\n"
    out, err = broken.communicate()
    assert out == "alive\n"
    assert "the backend commlayer could not be registered" in err
    out, err = foreign.communicate()
    assert out == "alive\n"
    assert "COMMLAYER_AS must be one of gloo, nccl, got 'mpi'" in err
    out, err = manual.communicate()
    assert out == "1.0 commlayer\n", err


def test_groups_of_one_rank_are_never_planned(emulated_cluster: ClusterFactory) -> None:
    def job() -> dict[str, int]:
        rank, _, _ = start(COMMLAYER_PLAN="hierarchical")
        alone = [dist.new_group([r]) for r in range(2)][rank]
        x = torch.full((1000,), float(rank))
        dist.all_reduce(x, group=alone)
        out = torch.empty(1000)
        dist.all_to_all_single(out, x, group=alone)
        assert torch.equal(out, torch.full((1000,), float(rank)))
        return calls_of("all_reduce")

    assert run(emulated_cluster, job, nodes=1) == [{"flat": 1}] * 2


def test_a_failing_rank_ends_the_run(emulated_cluster: ClusterFactory) -> None:
    """The job of these tests can fail: a wrong value on one rank is reported."""

    def job() -> None:
        rank, _, _ = start()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == (2 if rank == 0 else 3)

    with pytest.raises(RanksFailedError, match="rank 1"):
        run(emulated_cluster, job, nodes=1)


@pytest.mark.parametrize("plan", ["", "flat", "hierarchical"])
def test_elements_whose_sign_is_put_off(emulated_cluster: ClusterFactory, plan: str) -> None:
    """The imaginary part of a conjugate is its memory with another sign, which plain Gloo does not see."""

    def job() -> None:
        os.environ.update(COMMLAYER_PLAN=plan, COMMLAYER_PROFILE="none")
        dist.init_process_group("commlayer")
        negated = [torch.tensor([complex(1, 2)]).conj().imag for _ in range(4)]
        assert all(x.is_neg() and x.is_contiguous() for x in negated)
        for turn in range(2):  # the second call could go to Gloo as it is
            dist.all_reduce(negated[0])
            gathered = torch.zeros(4)
            dist.all_gather_single(gathered, negated[1])
            assert gathered.tolist() == [-2.0] * 4, turn
            dist.reduce_scatter_single(negated[2], torch.full((4,), 3.0))
            assert negated[2].tolist() == [12.0], turn
            negated[3].fill_(float(dist.get_rank()))
            dist.broadcast(negated[3], 2)
            assert negated[3].tolist() == [2.0], turn
            dist.reduce(negated[3], 1)
            assert dist.get_rank() != 1 or negated[3].tolist() == [8.0], turn
        assert negated[0].tolist() == [-32.0]

    emulated_cluster(2, 2).run(job)

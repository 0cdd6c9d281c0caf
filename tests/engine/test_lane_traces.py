"""The records of ranks' calls on an emulated cluster, and what the timelines prove: overlap, overtaking, where it waits."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch._C._distributed_c10d import PrefixStore

from commlayer.auditing import job_traces
from commlayer.auditing.job_traces import begin, end
from commlayer.calls.ring import StepRecord
from commlayer.cli.main import main
from commlayer.emulation import EmulatedCluster
from commlayer.scheduler.plan import Plan
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces import recorder as recorder_module
from commlayer.traces.call_records import CallRecord
from commlayer.traces.recorder import close_recorder, recorder

pytestmark = pytest.mark.cluster

COUNT = 1 << 19
"""Elements of float32: 2 MiB, a third of a second on the wire."""


def start(folder: Path) -> int:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_TRACE": str(folder), "COMMLAYER_PLAN": "pipelined:8"})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return dist.get_rank()


def on(axis: str) -> Any:
    """A group on the lane that its description says, as torch's DeviceMesh writes it."""
    return dist.new_group(backend="commlayer", group_desc=f"mesh_{axis}")


def calls_of(lane: str) -> list[CallRecord]:
    found = recorder()
    assert found is not None
    return [call for call in found.calls if call.lane == lane]


def overlap_ns(first: StepRecord, second: StepRecord) -> int:
    return min(first.end_ns, second.end_ns) - max(first.start_ns, second.start_ns)


@pytest.fixture
def slow_wire(emulated_cluster: ClusterFactory) -> EmulatedCluster:
    """Two nodes of two ranks, and a wire so slow that everything waits for it."""
    cluster = emulated_cluster(2, 2, inter="40mbit")
    if not cluster.shaped:
        pytest.skip("NOT TESTED: this machine lets nobody shape a link")
    return cluster


def test_stages_of_different_chunks_overlap_and_wait_where_the_plan_says(
    slow_wire: EmulatedCluster, tmp_path: Path
) -> None:
    def job() -> tuple[int, int, int, int]:
        start(tmp_path)
        group = on("dp")
        dist.all_reduce(torch.ones(COUNT), group=group)  # connects
        dist.all_reduce(torch.ones(COUNT), group=group)
        call = calls_of("dp")[1]
        plan: Plan = group._planned.choices.plan("all_reduce", COUNT * 4, is_float=True)
        assert call.plan == plan.name == "pipelined×8"
        for index, (step, seen) in enumerate(zip(plan.steps, call.steps, strict=True)):
            assert call.start_ns <= seen.enqueue_ns <= seen.start_ns <= seen.end_ns <= call.end_ns
            for earlier in step.after:
                assert call.steps[earlier].end_ns <= seen.enqueue_ns, (index, earlier)
        for first, second in pairwise(call.steps):
            assert first.start_ns <= second.enqueue_ns
        across = sum(
            max(0, overlap_ns(inter, intra))
            for inter in call.steps
            for intra in call.steps
            if (inter.resource, intra.resource) == ("inter", "intra") and inter.chunk != intra.chunk
        )
        intra = sum(step.end_ns - step.start_ns for step in call.steps if step.resource == "intra")
        sent = sum(step.sent_bytes for step in call.steps if step.resource == "inter")
        dist.destroy_process_group()
        return across, intra, sent, call.inter_bytes

    for across, intra, sent, counted in slow_wire.run(job):
        assert across > 0.5 * intra  # which is short: nodes share memory
        assert sent == counted == COUNT * 2  # a quarter of the tensor, there and back


def test_an_expert_all_to_all_overtakes_gradients(slow_wire: EmulatedCluster, tmp_path: Path) -> None:
    def job() -> tuple[CallRecord, CallRecord]:
        os.environ["COMMLAYER_LANES"] = "on"  # by itself a lane's name holds nobody where there is no profile
        rank = start(tmp_path)
        dp, ep = on("dp"), on("ep")
        x, out = torch.arange(4.0).repeat_interleave(COUNT // 16), torch.empty(COUNT // 4)
        for is_first in (True, False):
            gradients = torch.full((COUNT,), float(rank))
            dist.barrier()
            works = [dist.all_reduce(gradients, group=dp, async_op=True)]
            works.append(dist.all_to_all_single(out, x, group=ep, async_op=True))
            for work in reversed(works):
                work.wait()
            assert bool((gradients == 6).all())
            assert bool((out == rank).all()), is_first
        return calls_of("dp")[1], calls_of("ep")[1]

    for gradients, experts in slow_wire.run(job):
        assert gradients.enqueue_ns < experts.enqueue_ns
        assert experts.end_ns < gradients.end_ns
        assert gradients.held_ns > 0
        assert experts.held_ns == 0
        # Chunks that were not on their way yet let it pass; what they keep is their share.
        posted = [
            step
            for step in gradients.steps
            if step.resource == "inter" and experts.start_ns + 10_000_000 < step.start_ns < experts.end_ns
        ]
        total = sum(1 for step in gradients.steps if step.resource == "inter")
        assert len(posted) <= total / 4, [step.chunk for step in posted]
        assert any(step.resource == "inter" and step.start_ns >= experts.end_ns for step in gradients.steps)


def test_copies_hide_behind_gathers(slow_wire: EmulatedCluster, tmp_path: Path) -> None:
    def job() -> tuple[int, int]:
        start(tmp_path)
        group, part = on("cp"), torch.ones(COUNT)
        out = torch.empty(COUNT * 4)
        for _ in range(2):
            dist.all_gather_into_tensor(out, part, group=group)
        call = calls_of("cp")[1]
        copies = [step for step in call.steps if step.op == "copy"]
        gathers = [step for step in call.steps if step.op == "all_gather" and step.resource == "inter"]
        assert copies
        assert gathers
        last = max(step.end_ns for step in gathers)
        return sum(step.end_ns - step.start_ns for step in copies if step.end_ns <= last), len(copies)

    for hidden, count in slow_wire.run(job):
        assert hidden > 0, count


def test_a_program_that_waits_late_is_exposed_less(slow_wire: EmulatedCluster, tmp_path: Path) -> None:
    def job() -> list[float]:
        start(tmp_path)
        group = on("dp")
        x = torch.ones(COUNT)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        work = dist.all_reduce(x, group=group, async_op=True)
        while not work.is_completed():
            torch.ones(1000, 100).sum()
        work.wait()
        shares = []
        for call in calls_of("dp"):
            exposed = sum(stop - begin for begin, stop in call.waited)
            shares.append(exposed / (call.end_ns - call.enqueue_ns))
        return shares

    for at_once, started, late in slow_wire.run(job):
        assert (
            min(at_once, started) > 0.5 > late
        )  # nearly 1 and nearly 0, but for what a busy machine does between two lines


def test_the_files_of_a_job_and_what_is_said_of_them(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> None:
        start(tmp_path)
        dp, ep, plain = on("dp"), on("ep"), dist.new_group(backend="commlayer", group_desc="mine")
        x = torch.ones(4096)
        for _ in range(3):
            work = dist.all_reduce(x, group=dp, async_op=True)
            dist.all_to_all_single(torch.empty(8), torch.ones(8), group=ep)
            dist.all_to_all_single(torch.empty(0), torch.ones(0), group=ep)
            dist.broadcast(x, 0, group=plain)
            work.wait()
        dist.destroy_process_group()

    emulated_cluster(2, 2).run(job)
    result = CliRunner().invoke(main, ["trace", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    lanes = {row["lane"]: row for row in found["lanes"]}
    assert lanes["dp"]["calls"] == 3 * 4
    assert lanes["ep"]["calls"] == 6 * 4
    assert (tmp_path / "merged.json").exists()
    assert sorted(path.name for path in tmp_path.glob("rank-*.json")) == [f"rank-{rank:05d}.json" for rank in range(4)]


def test_a_second_default_group_is_a_second_job(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> None:
        port = int(os.environ["MASTER_PORT"])
        for count in (1, 2):
            # Of its own: a rank may else reach the store of the job before, just as that is freed.
            os.environ["MASTER_PORT"] = str(port + count - 1)
            start(tmp_path)
            for _ in range(count):
                dist.all_reduce(torch.ones(8))
            dist.destroy_process_group()

    emulated_cluster(1, 2).run(job)
    names = ["rank-00000.json", "rank-00000-2.json", "rank-00001.json", "rank-00001-2.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    result = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert result.exit_code == 2
    assert "choose one with --job" in result.output
    for name, count in (("rank-00000.json", 1), ("rank-00000-2.json", 2)):
        job_name = json.loads((tmp_path / name).read_text(encoding="utf-8"))["commlayer"]["job"]
        result = CliRunner().invoke(main, ["trace", str(tmp_path), "--job", job_name, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["together"]["calls"] == 2 * count


class Groups:
    """Inner groups of all ranks, as the backend makes them for groups of its own."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        self.settings, self.made = Settings(trace=str(folder)), 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def make(self, global_ranks: list[int] | None = None) -> tuple[Any, bool]:
        """A group's own Gloo, and whether it opened the recorder."""
        ranks = global_ranks or list(range(self.size))
        me = ranks.index(self.rank)
        store = PrefixStore(f"{self.made}/", dist.distributed_c10d._get_default_store())
        self.made += 1
        gloo = dist.ProcessGroupGloo(store, me, len(ranks), timedelta(seconds=20))
        return gloo, begin(self.settings, gloo, ranks, me, self.size)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ranks_that_record_and_ranks_that_do_not_open_together(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    """After a fault, rank 1 is another process: it has no recorder, and knows of no earlier job."""

    def job() -> tuple[bool, bool, str | None, str]:
        groups = Groups(tmp_path)
        _first, was_opened = groups.make()
        if groups.rank == 1:
            recorder_module._recorder = None
            recorder_module._opened.clear()
        second, was_opened_again = groups.make()
        found = recorder()
        assert found is not None
        end(second, groups.size, with_others=True)
        return was_opened, was_opened_again, found.job, found.path.name

    found = emulated_cluster(1, 2).run(job)
    assert [each[:2] for each in found] == [(True, True)] * 2
    assert len({each[2] for each in found}) == 1
    assert [each[3] for each in found] == ["rank-00000-2.json", "rank-00001-2.json"]
    assert names(tmp_path) == ["rank-00000-2.json", "rank-00000.json", "rank-00001-2.json"]


def test_only_the_group_that_opened_a_recorder_ends_it(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> list[bool]:
        groups = Groups(tmp_path)
        first, was_opened = groups.make()
        other, was_opened_again = groups.make()  # as new_group() of all ranks: its calls belong to the same recording
        opened = [was_opened, was_opened_again]
        end(other, groups.size, with_others=True)
        assert recorder() is not None
        end(first, groups.size, with_others=False)  # as where it is aborted
        assert recorder() is None
        end(first, groups.size, with_others=False)
        second, is_again = groups.make()
        close_recorder()
        end(second, groups.size, with_others=True)  # the program was first
        return [*opened, is_again]

    assert emulated_cluster(1, 2).run(job) == [[True, False, True]] * 2
    assert names(tmp_path) == ["rank-00000-2.json", "rank-00000.json", "rank-00001-2.json", "rank-00001.json"]
    for path in tmp_path.iterdir():
        readings = json.loads(path.read_text(encoding="utf-8"))["commlayer"]["readings"]
        assert len(readings) == 1  # nobody was asked at the end


def test_a_recorder_of_a_default_group_that_is_gone_is_not_kept(
    emulated_cluster: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody was replaced, and nobody came to end it."""

    def job() -> list[bool]:
        groups = Groups(tmp_path)
        first, was_opened = groups.make()
        monkeypatch.setattr(dist, "is_initialized", lambda: False)  # as while a default group is made
        second, was_opened_again = groups.make()
        end(first, groups.size, with_others=True)
        end(second, groups.size, with_others=True)
        return [was_opened, was_opened_again]

    assert emulated_cluster(1, 2).run(job) == [[True, True]] * 2
    assert len(names(tmp_path)) == 4


def test_clocks_are_compared_by_rank_in_whatever_order_a_group_has_them(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    def job() -> tuple[list[int], str]:
        groups = Groups(tmp_path)
        gloo, was_opened = groups.make([2, 0, 1])
        found = recorder()
        assert was_opened
        assert job_traces._opener is not None
        assert found is not None
        gathered = job_traces._gather(gloo, job_traces._opener.places, 10.0, groups.rank)
        end(gloo, groups.size, with_others=True)
        return gathered, found.path.name

    assert emulated_cluster(1, 3).run(job) == [([0, 1, 2], f"rank-{rank:05d}.json") for rank in range(3)]

"""What ranks record of their calls on an emulated cluster, and what the timelines prove: overlap, overtaking, where it waits."""

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

from commlayer.cli.main import main
from commlayer.emulation import EmulatedCluster
from commlayer.recorder import CallRecord, StepRecord, recorder
from commlayer.scheduler.plan import Plan
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

COUNT = 1 << 19
"""Of float32: 2 MiB, a third of a second on the wire."""


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
        plan: Plan = group._planned.plan("all_reduce", COUNT * 4, is_float=True)
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
        inter = sum(step.end_ns - step.start_ns for step in call.steps if step.resource == "inter")
        sent = sum(step.sent_bytes for step in call.steps if step.resource == "inter")
        dist.destroy_process_group()
        return across, inter, sent, call.inter_bytes

    for across, inter, sent, counted in slow_wire.run(job):
        assert across > 0.05 * inter
        assert sent == counted == COUNT * 2  # a quarter of the tensor, there and back


def test_an_expert_all_to_all_overtakes_gradients(slow_wire: EmulatedCluster, tmp_path: Path) -> None:
    def job() -> tuple[CallRecord, CallRecord]:
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
        assert at_once > 0.9
        assert started > 0.9
        assert late < 0.5


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

    emulated_cluster(2, 2).run(job, timeout_s=60)
    result = CliRunner().invoke(main, ["trace", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    lanes = {row["lane"]: row for row in found["lanes"]}
    assert lanes["dp"]["calls"] == 3 * 4
    assert lanes["ep"]["calls"] == 6 * 4
    assert (tmp_path / "merged.json").exists()
    assert sorted(path.name for path in tmp_path.glob("rank-*.json")) == [f"rank-{rank:05d}.json" for rank in range(4)]

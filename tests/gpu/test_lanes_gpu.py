"""Lanes on CUDA: streams, priorities and NCCL's options of real groups (`make test-gpu`).

Ranks share a device (on_one_gpu.py), so bytes and order count, not
times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_one_gpu import LIMIT_S, needs_nccl, run_ranks
from ranks import check_holds

from commlayer.cli.lane_checks import at_hand, lane_lines
from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorStream
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import LANES
from commlayer.transport.nccl import apply_lane, config_fields, is_high_priority
from commlayer.transport.streams import StreamTransport, is_high_priority_of

pytestmark = needs_nccl

ROUNDS = 8


def transport_of(lane: str) -> StreamTransport:
    return StreamTransport(AcceleratorDevice(torch.device("cuda", 0)), lambda _: None, [], lane)


def torch_stream(transport: StreamTransport, resource: Resource) -> torch.cuda.Stream:
    stream = transport.streams[resource]
    assert isinstance(stream, AcceleratorStream)
    found: torch.cuda.Stream = stream.stream
    return found


@pytest.mark.parametrize("lane", ["", *LANES])
def test_streams_have_the_priority_of_their_lane(lane: str) -> None:
    transport = transport_of(lane)
    for resource in transport.streams:
        assert torch_stream(transport, resource).priority == (-1 if is_high_priority_of(resource, lane) else 0)
    assert len({torch_stream(transport, resource).cuda_stream for resource in transport.streams}) == len(
        transport.streams
    )
    transport.close()


def test_transports_of_two_lanes_have_streams_of_their_own() -> None:
    one, other = (transport_of(lane) for lane in ("ep", "dp"))
    mine, theirs = ({torch_stream(each, resource).cuda_stream for resource in each.streams} for each in (one, other))
    assert not mine & theirs


def test_torch_takes_the_options_of_each_lane() -> None:
    version = torch.cuda.nccl.version()
    for lane in LANES:
        options = dist.ProcessGroupNCCL.Options()
        written = apply_lane(options, lane, version, traffic_classes={"ep": 1})
        assert options.is_high_priority_stream == is_high_priority(lane)
        for name in written.keys() - {"is_high_priority_stream"}:
            assert getattr(options.config, name) == written[name]
    assert "max_ctas" in config_fields()


def test_doctor_knows_this_nccl() -> None:
    version, fields = at_hand(torch)
    assert version is not None
    assert not any("no CUDA" in value for _, _, value, _ in lane_lines({}, version, fields))


def two_lanes(rank: int) -> None:
    """Gradients and exchanges of experts are under way together, on groups of different lanes: all sums are right."""
    groups = {}
    for lane in ("dp", "ep"):
        options = dist.ProcessGroupNCCL.Options()
        apply_lane(options, lane, torch.cuda.nccl.version())
        groups[lane] = dist.new_group([0, 1], backend="nccl", pg_options=options)
    gradients = [torch.full((2**20,), float(rank + turn), device="cuda") for turn in range(ROUNDS)]
    works = [dist.all_reduce(gradient, group=groups["dp"], async_op=True) for gradient in gradients]
    for turn in range(ROUNDS):
        tokens = torch.tensor([10.0 * rank + turn, 10.0 * rank + turn + 1], device="cuda")
        arrived = torch.empty_like(tokens)
        dist.all_to_all_single(arrived, tokens, group=groups["ep"])
        assert arrived.tolist() == [turn + rank, 10.0 + turn + rank]
    for turn, (work, gradient) in enumerate(zip(works, gradients, strict=True)):
        work.wait()
        assert torch.equal(gradient, torch.full_like(gradient, 1.0 + 2 * turn))
    torch.cuda.synchronize()


def test_two_lanes_at_once(tmp_path: Path) -> None:
    run_ranks(two_lanes, 2, tmp_path, backend="nccl", nccl={"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})


def test_a_hold_ends_when_nothing_is_busy_or_its_time_is_over() -> None:
    pytest.importorskip("triton")
    check_holds(AcceleratorDevice(torch.device("cuda", 0)), LIMIT_S * 1e6)

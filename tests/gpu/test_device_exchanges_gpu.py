"""Exchanges with splits, wire formats and a captured call by plans for CUDA tensors, several ranks on one GPU (`make test-gpu`).

The same, but for the graph, runs on the simulated device too
(tests/backend/test_device_exchanges.py). Ranks share a device (on_one_gpu.py), so bytes and order count, not times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_one_gpu import needs_nccl, run_ranks

from commlayer.collectives import GroupCommunicator
from commlayer.scheduler.wire import WireFormat, WirePolicy

pytestmark = needs_nccl

SIZE = 4


def exchanges(rank: int) -> None:
    for turn in range(3):
        received = [(3 * k + 5 * rank + turn) % 4 for k in range(SIZE)]
        sent = [(3 * rank + 5 * k + turn) % 4 for k in range(SIZE)]
        x = torch.randn(sum(sent), 16, generator=torch.Generator().manual_seed(rank))
        wanted = x.new_empty(sum(received), 16)
        dist.all_to_all_single(wanted, x, received, sent)
        got = torch.empty_like(wanted, device="cuda")
        dist.all_to_all_single(got, x.cuda(), received, sent)
        assert torch.equal(got.cpu(), wanted), turn


def wires(rank: int) -> None:
    assert dist.group.WORLD is not None
    for wire in (WireFormat.BF16, WireFormat.FP8_E4M3):
        group = GroupCommunicator(dist.group.WORLD, wire=WirePolicy((wire,)), name="lane dp")
        x = torch.randn(12, 128, generator=torch.Generator().manual_seed(rank))
        on_device = x.cuda()
        group.all_reduce_in_place(x).wait()
        group.all_reduce_in_place(on_device).wait()
        assert torch.equal(on_device.cpu(), x), wire


def graphs(rank: int) -> None:
    """Two graphs of a planned call, each replayed with other values."""
    x = torch.ones(4096, device="cuda")
    dist.all_reduce(x)  # makes communicators and memory
    made = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        made.append(graph)
    for turn in range(3):
        for graph in made:
            x.fill_(float(rank + turn))
            graph.replay()
            assert x.eq(sum(range(SIZE)) + SIZE * turn).all().item(), turn
    dist.all_reduce(x.fill_(1.0))  # behind them, by itself
    assert x.eq(SIZE).all().item()


@pytest.mark.parametrize("job", [exchanges, wires, graphs])
def test_on_one_gpu(job: Callable[[int], None], tmp_path: Path) -> None:
    run_ranks(job, SIZE, tmp_path, topology="2x2", plan="hierarchical")

"""The executor on CUDA streams, with real NCCL: several ranks share one GPU (`make test-gpu`).

The jobs below run over Gloo too, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_one_gpu import needs_nccl, run_ranks
from synthetic_profiles import synthetic_profile

from commlayer.communicator import Communicator
from commlayer.measure.benchmark import world_groups
from commlayer.profiles.topology import Topology
from commlayer.scheduler import Gather, Plan, Strategy, Traffic, build

pytestmark = needs_nccl

Job = Callable[[Communicator, dist.ProcessGroup, torch.device], None]


def by_communicator(rank: int, job: Job, shape: str, device: str) -> None:
    """Run ``job`` on a rank, with a communicator of the shape; ``device``: also "cpu", where the jobs below were tried."""
    topology = Topology.parse(shape)
    ep_group, tp_group = world_groups(topology)
    profile = synthetic_profile(nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node)
    with Communicator(ep_group, tp_group, profile=profile) as communicator:
        job(communicator, ep_group, torch.device(device))


def tokens(communicator: Communicator, device: torch.device, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[2e, size] random bytes, the same on the ranks of a node, different between nodes."""
    generator = torch.Generator().manual_seed(1000 * seed + communicator.grid.ep_index)
    rows = 2 * len(communicator.grid.ep_ranks)
    content = torch.randint(0, 256, (rows * size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return content.to(device).view(dtype).view(rows, size)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def by_torch(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    target = torch.empty_like(as_bytes(x))
    dist.all_to_all_single(target, as_bytes(x), group=group)
    return target


def plans(communicator: Communicator, x: torch.Tensor) -> Iterator[Plan]:
    """Every strategy that applies, in both forms. One rank a node holds no replicated tokens: flat is all there is."""
    e, t = len(communicator.grid.ep_ranks), len(communicator.grid.tp_ranks)
    traffic = Traffic(x.numel() * x.element_size(), e, t, communicator.grid.link)
    yield build(traffic, Strategy.FLAT)
    if t > 1:
        for gather in Gather:
            yield build(traffic, Strategy.HIERARCHICAL, gather=gather)
            yield build(traffic, Strategy.PIPELINED, 3, gather)
            yield build(traffic, Strategy.PIPELINED_COPY, 3, gather)


# Jobs: what every rank does


def every_strategy(communicator: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sizes whose slices are equal (NCCL's own all_gather), unequal (messages) and empty."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        for size in (3 * 2**13, 1001, 3, 0):
            x = tokens(communicator, device, size, dtype, seed=size)
            expected = by_torch(x, group)
            for plan in (None, *(plans(communicator, x) if size else ())):
                got = communicator.all_to_all(x, plan=plan)
                assert got.shape == x.shape
                assert got.dtype == dtype
                assert torch.equal(as_bytes(got), expected), (plan and (plan.name, plan.gather), dtype, size)


def backward(communicator: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
    x = tokens(communicator, device, 4096, torch.int16, seed=1).bfloat16()
    gradient = tokens(communicator, device, 4096, torch.int16, seed=2).bfloat16()
    for plan in plans(communicator, x):
        leaf = x.clone().requires_grad_()
        output = communicator.all_to_all(leaf, plan=plan)
        output.backward(gradient)
        assert leaf.grad is not None
        assert torch.equal(as_bytes(output.detach()), by_torch(x, group)), plan.name
        assert torch.equal(as_bytes(leaf.grad), by_torch(gradient, group)), plan.name


def asynchronous(communicator: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
    """Several calls under way; the inputs are overwritten as soon as ``wait()`` allows it."""
    inputs = [tokens(communicator, device, 2**14, torch.bfloat16, seed) for seed in range(3)]
    expected = [by_torch(x, group) for x in inputs]
    for plan in plans(communicator, inputs[0]):
        sent = [x.clone() for x in inputs]
        works = [communicator.all_to_all(x, plan=plan, async_op=True) for x in sent]
        for x, work, right in zip(sent, works, expected, strict=True):
            output = work.wait()
            x.zero_()
            assert torch.equal(as_bytes(output), right), plan.name


def streams(communicator: Communicator, group: dist.ProcessGroup, device: torch.device) -> None:
    """The input is written late and overwritten early on the caller's stream, and nobody waits on the host.

    The calls come from two streams in turn: they share the communicator's staging memory.
    """
    inputs = [tokens(communicator, device, 2**18, torch.bfloat16, seed) for seed in range(4)]
    expected = [by_torch(x, group) for x in inputs]
    callers = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    for plan in plans(communicator, inputs[0]):
        torch.cuda.synchronize(device)
        outputs = []
        for turn, original in enumerate(inputs):
            with torch.cuda.stream(callers[turn % 2]):
                torch.cuda._sleep(20_000_000)  # some 10 ms
                x = original.clone()
                outputs.append(communicator.all_to_all(x, plan=plan).clone())
                x.zero_()
        torch.cuda.synchronize(device)
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(as_bytes(output), right), plan.name


@pytest.mark.parametrize("shape", ["2x1", "2x2"])
@pytest.mark.parametrize("job", [every_strategy, backward, asynchronous, streams])
def test_on_one_gpu(job: Job, shape: str, tmp_path: Path) -> None:
    size = Topology.parse(shape).world_size
    run_ranks(by_communicator, size, tmp_path, job, shape, "cuda:0", backend="nccl", topology=shape)

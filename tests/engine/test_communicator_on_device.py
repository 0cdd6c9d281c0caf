"""The Communicator for tensors on a device, the simulated one that torch sees: every plan, in many orders of its streams."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from synthetic_profiles import synthetic_profile

from commlayer import Communicator, discover_topology
from commlayer.measure.benchmark import world_groups
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler import Strategy, Traffic, build
from commlayer.scheduler.plan import Gather
from commlayer.testing.plugin import ClusterFactory

LAGGING = StreamDelays(chance=0.9)
CPU = torch.device("cpu")
ROWS = 12


def tokens(communicator: Communicator, device: torch.device, seed: int) -> torch.Tensor:
    """The same on all ranks of a node."""
    draw = torch.Generator().manual_seed(100 * seed + communicator.grid.ep_index)
    return torch.randn(ROWS, 37, generator=draw).to(device).requires_grad_()


def exchanged(communicator: Communicator, device: torch.device, seed: int, plan: object) -> list[torch.Tensor]:
    """Forward and backward; one call under way beside another, whose input nobody holds."""
    x = tokens(communicator, device, seed)
    out = communicator.all_to_all(x, plan=plan)  # type: ignore[call-overload]
    pending = communicator.all_to_all(x.detach() + 1, plan=plan, async_op=True)  # type: ignore[call-overload]
    torch.full_like(x, 5.0)
    out.backward(torch.arange(37.0).to(device).expand(ROWS, 37).contiguous())
    assert x.grad is not None
    return [out.detach().cpu(), x.grad.cpu(), pending.wait().cpu()]


def every_plan() -> None:
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    topology = discover_topology()
    ep, tp = world_groups(topology)
    profile = synthetic_profile(nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node)
    with pytest.raises(UsageError, match="device must be cpu or simulated here, got 'tpu'"):
        Communicator(ep, tp, profile=profile, device="tpu")
    make: Callable[[str | None], Communicator] = lambda name: Communicator(ep, tp, profile=profile, device=name)  # noqa: E731
    with make(None) as on_cpu, make("simulated") as on_device:
        with pytest.raises(TensorError, match=r"moves cpu tensors, got one on simulated:0.*device='simulated'"):
            on_cpu.all_to_all(torch.zeros(4, device=device))
        traffic = Traffic(4 * ROWS * 37, len(on_cpu.grid.ep_ranks), len(on_cpu.grid.tp_ranks), on_cpu.grid.link)
        plans = [None, build(traffic, Strategy.FLAT), build(traffic, Strategy.HIERARCHICAL)]
        plans += [
            build(traffic, strategy, 3, gather)
            for strategy in (Strategy.PIPELINED, Strategy.PIPELINED_COPY)
            for gather in Gather
        ]
        for seed, plan in enumerate(plans):
            simulated_device(StreamDelays(seed, LAGGING.chance))
            wanted = exchanged(on_cpu, CPU, seed, plan)
            for a, b in zip(exchanged(on_device, device, seed, plan), wanted, strict=True):
                assert torch.equal(a, b), plan
        assert on_device.plans_run == on_cpu.plans_run
    dist.destroy_process_group()


def test_every_plan_gives_the_cpus_bits(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(every_plan)

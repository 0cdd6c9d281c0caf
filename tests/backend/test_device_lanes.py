"""Two lanes on the simulated device that torch sees, in real processes: training has the CPU's losses, and lower calls wait."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from ranks import check_holds
from simulated.torch_device import simulated_device
from simulated.torch_simulator import TorchStream
from simulated.torch_streams import StreamDelays
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import commlayer
from commlayer.devices.accelerator import AcceleratorDevice
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.testing.plugin import ClusterFactory

HIDDEN, CLASSES, STEPS = 24, 6, 2
SEEDS = range(2)


class SummedOver(torch.autograd.Function):
    """Adds up over the ranks of a group on either way: calls that go before the gradients'."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grads[0].clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None


class Mixed(nn.Module):
    """Two layers, and between them a sum over the group of the higher lane."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, CLASSES)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = cast("Any", SummedOver).apply(self.first(x), self.group)
        out: torch.Tensor = self.second(functional.relu(hidden / dist.get_world_size()))
        return out


class Routed(Mixed):
    """The same with experts of all ranks behind it; the gradients of what all ranks hold are summed on the lower lane."""

    def __init__(self, group: Any, gradients: Any) -> None:
        super().__init__(group)
        mesh = FoldedMesh({"ep": dist.get_world_size()})
        self.moe = MoELayer(HIDDEN, 16, RouterConfig(num_experts=8, top_k=2), mesh=mesh, chunks=2)
        self.gradients = gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x + self.moe(x))
        return out

    def finish(self) -> None:
        shared = [p.grad for name, p in self.named_parameters() if "experts" not in name and p.grad is not None]
        works = [dist.all_reduce(grad, group=self.gradients, async_op=True) for grad in shared]
        for work in works:
            assert work is not None
            work.wait()


def with_ddp(device: torch.device, high: Any, low: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Mixed(high).to(device), process_group=low, bucket_cap_mb=0.004)


def with_fsdp(device: torch.device, high: Any, low: Any) -> nn.Module:
    model, mesh = Mixed(high).to(device), DeviceMesh.from_group(low, device.type)
    for layer in (model.first, model.second, model):
        fully_shard(layer, mesh=mesh)
    return model


def with_experts(device: torch.device, high: Any, low: Any) -> nn.Module:
    return Routed(high, low).to(device)


def losses(model: nn.Module, device: torch.device) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        x, y = torch.randn(8, HIDDEN, generator=draw), torch.randint(0, CLASSES, (8,), generator=draw)
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        if isinstance(model, Routed):
            model.finish()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def held_at() -> list[float]:
    """For how long each hold of this process's device may last, µs, from now on."""
    found: list[float] = []
    hold = TorchStream.hold

    def noted(self: TorchStream, busy: torch.Tensor, least: int, most_us: float) -> None:
        if most_us:  # else it is the one of their kind that is made beforehand
            found.append(most_us)
        hold(self, busy, least, most_us)

    TorchStream.hold = noted  # type: ignore[method-assign]
    return found


def group_on(lane: str) -> Any:
    group: Any = dist.new_group(backend="commlayer")
    group.use_lane(lane)
    return group


def trained() -> dict[str, tuple[list[float], list[list[float]], int]]:
    """Losses on the CPU and, by seed, on the device, by what trains; and how often a lower call came to an edge there."""
    device, holds = simulated_device(), held_at()
    dist.init_process_group("commlayer")
    high, low = group_on("ep"), group_on("dp")
    found = {}
    for make in (with_ddp, with_fsdp, with_experts):
        on_cpu = losses(make(torch.device("cpu"), high, low), torch.device("cpu"))
        holds.clear()
        on_device = []
        for seed in SEEDS:
            simulated_device(StreamDelays(seed, chance=0.5))
            on_device.append(losses(make(device, high, low), device))
        found[make.__name__] = on_cpu, on_device, len(holds)
    dist.destroy_process_group()
    return found


def test_what_trains_on_two_lanes_has_the_cpus_losses(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "pipelined:2")
    for found in emulated_cluster(2, 2).run(trained):
        assert found.keys() == {"with_ddp", "with_fsdp", "with_experts"}
        for name, (on_cpu, on_device, num_holds) in found.items():
            assert all(each == pytest.approx(on_cpu, rel=1e-5) for each in on_device), name
            assert num_holds > 0, f"{name}: no call of the lower lane came to an edge"


def different_members() -> tuple[list[float], dict[str, int]]:
    """Groups of other members on lanes of their own, each rank waiting when it likes. Returns what came out, and the plans."""
    device = simulated_device(StreamDelays(chance=0.9))
    dist.init_process_group("commlayer")
    rank, lanes = dist.get_rank(), ("dp", "ep", "pp")
    members = ((0, 1, 2), (1, 2, 3), (0, 2, 3))
    groups: list[Any] = [dist.new_group(list(each), backend="commlayer") for each in members]
    mine = [number for number, each in enumerate(members) if rank in each]
    for number in mine:
        groups[number].use_lane(lanes[number])
    found, under_way = [], []
    for turn in range(3):
        for number in mine:
            x = torch.full((3000,), float(turn + number), device=device)
            under_way.append((x, dist.all_reduce(x, group=groups[number], async_op=True)))
            while under_way and (turn + rank + number) % 3 == 0:
                found.append(_ended(*under_way.pop(rank % len(under_way))))
    found += [_ended(*each) for each in under_way]
    return sorted(found), {call["plan"]: 1 for group in commlayer.stats()["groups"] for call in group["calls"]}


def _ended(x: torch.Tensor, work: Any) -> float:
    work.wait()
    largest: float = (x + 0).max().item()
    return largest


def test_groups_of_other_members_on_lanes_of_their_own_end(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "flat_direct:3")
    outcomes = emulated_cluster(2, 2).run(different_members)
    for rank, (found, plans) in enumerate(outcomes):
        absent = {0: 1, 1: 2, 2: None, 3: 0}[rank]
        wanted = [3.0 * (turn + number) for turn in range(3) for number in range(3) if number != absent]
        assert found == sorted(wanted)
        assert "flat" not in plans


def edges() -> list[int]:
    """How often a call of the lower lane comes to an edge: before a higher one has calls, then, and off its lane."""
    device, holds = simulated_device(), held_at()
    dist.init_process_group("commlayer")
    low, high, found = group_on("dp"), group_on("ep"), []
    x = torch.ones(1000, device=device)

    def call() -> None:
        holds.clear()
        dist.all_reduce(x, group=low)
        found.append(len(holds))

    call()
    dist.all_reduce(x, group=high)
    call()
    low.use_lane("")
    call()
    low.use_lane("dp")
    call()
    return found


def test_edges_are_where_a_higher_lane_has_calls(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "flat_direct:3")
    for before, then, without, again in emulated_cluster(2, 1).run(edges):
        assert before == without == 0
        assert then == again >= 3


def held() -> None:
    """A stream goes on when nothing is busy any more, or after its time."""
    check_holds(AcceleratorDevice(simulated_device(StreamDelays(chance=0.0))), 1e9)


def test_a_held_stream_goes_on(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 1).run(held)

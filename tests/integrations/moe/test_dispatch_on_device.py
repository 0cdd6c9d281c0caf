"""The dispatch of tokens on a device, the simulated one that torch sees: counts are exchanged once, and the host waits once."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import seen_calls
from simulated.torch_device import simulated_device
from simulated.torch_streams import QueueRunner, StreamDelays
from torch import nn

import commlayer
from commlayer.backend import group_extras
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.profiles.errors import DisagreementError, TensorError
from commlayer.testing.plugin import ClusterFactory

HIDDEN, EXPERTS, TOP_K = 16, 8, 2
ROUTER = RouterConfig(num_experts=EXPERTS, top_k=TOP_K)
CPU = torch.device("cpu")
LAGGING = StreamDelays(chance=0.9)


def planned_exchanges() -> int:
    """How many exchanges of rows have run by plan."""
    calls = [call for group in commlayer.stats()["groups"] for call in group["calls"]]
    return sum(
        call["calls"] for call in calls if call["collective"].startswith("all_to_all") and call["plan"] != "flat"
    )


# The dispatcher


def drawn(device: torch.device, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, choices, some of which are dropped, and weights."""
    draw = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x = torch.randint(-4, 5, (num_tokens, HIDDEN), generator=draw).float()
    indices = torch.rand(num_tokens, EXPERTS, generator=draw).topk(TOP_K).indices
    indices[torch.rand(num_tokens, TOP_K, generator=draw) < 0.2] = -1
    weights = torch.full((num_tokens, TOP_K), 0.5)
    return x.to(device).requires_grad_(), indices.to(device), weights.to(device).requires_grad_()


def doubled(rows: torch.Tensor, counts: object, weights: torch.Tensor | None) -> torch.Tensor:
    return rows * 2


def moved(dispatcher: TokenDispatcher, device: torch.device, seed: int, capacity: int | None) -> list[torch.Tensor]:
    """One call, forward and backward; on a device, how often the host waited, in preparing and after."""
    x, indices, weights = drawn(device, 3 * dist.get_rank() + 4, seed)
    with seen_calls(QueueRunner, "until") as waits, seen_calls(group_extras, "everyones_numbers") as told:
        handle = dispatcher.prepare(indices, capacity=capacity, like=x, weights=weights)
        num_waits = len(waits)
        out, _ = dispatcher.run(x, handle, doubled, weights)
        (out * torch.arange(float(HIDDEN), device=device)).sum().backward()
        assert not told, "counts were exchanged again"
        assert len(waits) == num_waits, "the host waited again"
    if device is not CPU and dispatcher.decision is not None and dispatcher.decision.kind == "all_to_all":
        assert num_waits == 1
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def dispatches(kind: str) -> None:
    os.environ["COMMLAYER_PLAN"] = "hierarchical"
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    dist.all_reduce(torch.ones(64, device=device))  # a group's first planned call connects it, for which the host waits
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    dispatcher = TokenDispatcher(EXPERTS, ep=ep, kind=kind, chunks=2 if kind == "all_to_all" else "auto")
    whole = TokenDispatcher(EXPERTS, ep=ep, kind=kind)
    for seed, capacity in ((0, None), (1, None), (2, 16)):
        of = dispatcher if capacity is None else whole
        simulated_device(StreamDelays(seed, LAGGING.chance))
        wanted = moved(of, CPU, seed, capacity)
        before = planned_exchanges()
        with seen_calls(ChoiceCounts, "exchange") as exchanges:
            got = [each.cpu() for each in moved(of, device, seed, capacity)]
        assert len(exchanges) == 1
        assert planned_exchanges() > before
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b), (kind, seed)
    refusals(whole, device)
    dist.destroy_process_group()


def refusals(dispatcher: TokenDispatcher, device: torch.device) -> None:
    """A refusal of one rank is found where the host waits anyway, and all ranks hear of it."""
    for what in ("indices", "weights"):
        _, indices, weights = drawn(device, 4, 0)
        is_mine = dist.get_rank() == 1
        if is_mine and what == "indices":
            indices[1, 1] = EXPERTS
        if is_mine and what == "weights":
            weights = weights.detach().clone()
            weights[0, 0] = float("nan")
        message = {"indices": rf"expected 0 to {EXPERTS - 1}", "weights": "weights hold NaN"}[what]
        with pytest.raises((TensorError, DisagreementError), match=message if is_mine else "rank 1 refused"):
            dispatcher.prepare(indices, weights=weights)


@pytest.mark.parametrize("kind", ["all_to_all", "two_level"])
def test_counts_are_exchanged_once_and_kept(kind: str, emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(dispatches, kind)


# The layer


def losses(kind: str, device: torch.device, seeds: range) -> list[float]:
    mesh = FoldedMesh({"ep": dist.get_world_size()}, backend="commlayer")
    layer = MoELayer(HIDDEN, 24, ROUTER, mesh=mesh, dispatch=kind).to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = []
    for seed in seeds:
        draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        x, y = torch.randn(2, 9, HIDDEN, generator=draw).to(device)
        loss = nn.functional.mse_loss(layer(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(kind: str) -> None:
    os.environ["COMMLAYER_PLAN"] = "hierarchical"
    device = simulated_device(StreamDelays(chance=0.5))
    dist.init_process_group("commlayer")
    on_cpu = losses(kind, CPU, range(3))
    before = planned_exchanges()
    for seed in range(2):
        simulated_device(StreamDelays(seed, 0.5))
        with seen_calls(ChoiceCounts, "exchange") as exchanges, seen_calls(group_extras, "everyones_numbers") as told:
            assert losses(kind, device, range(3)) == pytest.approx(on_cpu, rel=1e-5)
        assert len(exchanges) == 3
        assert not told
    assert planned_exchanges() > before
    assert on_cpu[2] != on_cpu[0]
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["all_to_all", "two_level"])
def test_a_layer_trained_by_plans_has_the_cpus_losses(kind: str, emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(trained, kind)

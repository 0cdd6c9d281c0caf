"""The MoE layer: its options, one rank against several, replicated tokens, what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference_moe import reference_moe
from synthetic_profiles import synthetic_profile

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

HIDDEN, WIDTH = 8, 12
ROUTER = RouterConfig(num_experts=4, top_k=2)


def tokens(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(layer: MoELayer, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x.grad = None
    out = layer(x)
    out.backward(torch.ones_like(out) + torch.arange(out.shape[-1]))
    found = [tensor.grad for tensor in (x, *layer.parameters())]
    return [out.detach(), *(grad.clone() for grad in found if grad is not None)]


@pytest.mark.parametrize("shape", [(6, HIDDEN), (3, 2, HIDDEN), (0, HIDDEN), (1, 1, HIDDEN)], ids=str)
def test_one_rank_is_the_reference(shape: tuple[int, ...]) -> None:
    layer = MoELayer(HIDDEN, WIDTH, ROUTER, chunks=2)
    x = tokens(6)[: torch.Size(shape[:-1]).numel()].detach().reshape(shape)
    out = layer(x)
    assert layer.routing is not None
    experts = layer.experts
    triples = list(zip(experts.w_gate.unbind(), experts.w_up.unbind(), experts.w_down.unbind(), strict=True))
    wanted = reference_moe(x.reshape(-1, HIDDEN), layer.routing.indices, layer.routing.weights, triples)
    torch.testing.assert_close(out, wanted.view(shape))


def test_where_weights_are_applied_differs_by_rounding_only() -> None:
    found = [
        gradients(MoELayer(HIDDEN, WIDTH, ROUTER, weights_at=where), tokens(9)) for where in ("combine", "experts")
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_shared_experts_are_added() -> None:
    plain, both = MoELayer(HIDDEN, WIDTH, ROUTER), MoELayer(HIDDEN, WIDTH, ROUTER, shared_width=6)
    x = tokens(5)
    assert both.shared is not None
    torch.testing.assert_close(both(x), plain(x) + both.shared(x))


def test_dropped_and_padded_give_the_same() -> None:
    """Capacity 1: nearly everything is dropped, forward and backward, with zero rows in the padding."""
    configs = [RouterConfig(num_experts=4, top_k=2, capacity_factor=0.3, pad_to_capacity=pad) for pad in (False, True)]
    found = [gradients(MoELayer(HIDDEN, WIDTH, config), tokens(6)) for config in configs]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_copy_of_a_layer_gives_the_same() -> None:
    layer = MoELayer(HIDDEN, WIDTH, ROUTER)
    assert torch.equal(copy.deepcopy(layer)(tokens(4)), layer(tokens(4)))


def test_low_precision_runs() -> None:
    layer = MoELayer(HIDDEN, WIDTH, ROUTER).to(torch.bfloat16)
    out = layer(tokens(4).detach().to(torch.bfloat16))
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert layer.experts.w_gate.grad is not None


def test_bad_input() -> None:
    layer = MoELayer(HIDDEN, WIDTH, ROUTER)
    with pytest.raises(TensorError, match=r"expected tokens \[tokens, 8\], got shape \[3, 7\]"):
        layer(torch.zeros(3, 7))
    with pytest.raises(TensorError, match="NaN"):
        layer(torch.full((3, HIDDEN), float("nan")))


def job(padded: bool, with_communicator: bool) -> list[bool]:
    """Two nodes of two: EP between, tp and etp inside, all ranks of tp with the same tokens. Against one rank alone."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    config = RouterConfig(num_experts=4, top_k=2, capacity_factor=4.0 if padded else None, pad_to_capacity=padded)
    mesh = FoldedMesh({"tp": 2, "ep": 2, "etp": 2})
    x = tokens(5, seed=mesh.rank("ep"))
    communicator: Any = None
    if with_communicator:
        profile = synthetic_profile(nodes=2, ranks_per_node=2)
        communicator = Communicator(mesh.group("ep"), mesh.group("etp"), profile=profile)
        with pytest.raises(UsageError, match="take tokens='replicated'"):
            MoELayer(HIDDEN, WIDTH, config, mesh=mesh, communicator=communicator)  # sharded: nobody holds the same
    layer = MoELayer(HIDDEN, WIDTH, config, mesh=mesh, tokens="replicated", communicator=communicator)
    got = gradients(layer, x)
    alone = MoELayer(HIDDEN, WIDTH, RouterConfig(num_experts=4, top_k=2))
    wanted = gradients(alone, x)
    same = [torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got[:3], wanted[:3], strict=True)]
    held = GroupCommunicator(mesh.group("tp"), "tp").all_gather(got[0].unsqueeze(0))
    same.append(torch.equal(held[0], held[1]))
    if communicator is not None:
        same.append(sum(communicator.plans_run.values()) == 4)
        communicator.close()
    return same


@pytest.mark.parametrize(("padded", "with_communicator"), [(True, True), (True, False), (False, False)])
def test_replicated_tokens(emulated_cluster: ClusterFactory, padded: bool, with_communicator: bool) -> None:
    """Output, gradient of x and of the router's weight, and equal bits on the ranks of tp."""
    found = emulated_cluster(nodes=2, ranks_per_node=2).run(job, padded, with_communicator)
    assert all(all(same) for same in found), found


def chosen_chunks() -> list[tuple[str, tuple[int, ...], float | None, bool]]:
    """Under a profile that knows the group: auto measures the experts once, and all ranks choose alike."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    mesh = FoldedMesh({"ep": 4})
    layer = MoELayer(HIDDEN, WIDTH, ROUTER, mesh=mesh)
    found = []
    for _ in range(2):
        layer(tokens(64, seed=dist.get_rank())).sum().backward()
        decision = layer.dispatcher.decision
        assert decision is not None
        found.append((decision.kind, decision.slices, decision.predicted_us, bool(decision.kinds_us)))
    return found


def test_auto_decides_alike_on_all_ranks(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMLAYER_PROFILE", "auto")
    monkeypatch.setenv("COMMLAYER_CACHE", str(tmp_path))
    found = emulated_cluster(nodes=2, ranks_per_node=2).run(chosen_chunks)
    assert found == [found[0]] * 4
    assert all(was_predicted for *_, was_predicted in found[0])

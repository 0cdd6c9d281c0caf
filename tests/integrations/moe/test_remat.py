"""Selective rematerialisation: the same gradients bit for bit, and the bytes that the formula says."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paper_activations import LayerShape
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.remat import Rematerialise, promise_of, recomputable
from commlayer.profiles.errors import InternalError, UsageError
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention
from examples.norm import RMSNorm

RANKS = 4
SHAPE = LayerShape(tokens=1024, ranks=RANKS, hidden=256, heads=8, kv_heads=4, top_k=2, width=384)


class Layer(nn.Module):
    def __init__(self, mesh: FoldedMesh, kind: Any, **moe: Any) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(SHAPE.hidden), RMSNorm(SHAPE.hidden)
        tp = GroupCommunicator(mesh.group("tp"), "tp")
        generator = torch.Generator().manual_seed(0)
        self.attention = ParallelAttention(
            SHAPE.hidden, SHAPE.heads, SHAPE.kv_heads, tp=tp, kind=kind, generator=generator, rope_base=1e4
        )
        router = RouterConfig(num_experts=8, top_k=SHAPE.top_k)
        self.moe = MoELayer(SHAPE.hidden, SHAPE.width, router, mesh=mesh, **moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.moe(self.norm_2(x))  # type: ignore[no-any-return]


def run(layer: Layer, is_on: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of a forward and a backward pass, and the bytes kept in between."""
    x = torch.randn(SHAPE.tokens // RANKS, 1, SHAPE.hidden, generator=torch.Generator().manual_seed(dist.get_rank()))
    x.requires_grad_()
    layer.zero_grad()
    with Rematerialise(is_on=is_on) as counted:
        y = layer(x)
    y.square().mean().backward()
    return [tensor.grad.clone() for tensor in (x, *layer.parameters()) if tensor.grad is not None], counted.kept_bytes


def job() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ways: dict[str, dict[str, Any]] = {
        "chunks": {"dispatch": "all_to_all", "chunks": 2, "weights_at": "experts"},
        "one chunk": {"dispatch": "all_to_all", "chunks": 1, "shared_width": 64},
        "all_gather": {"dispatch": "all_gather"},
    }
    found: dict[str, Any] = {}
    with FoldedMesh({"tp": RANKS, "ep": RANKS}) as mesh:
        for name, moe in ways.items():
            layer = Layer(mesh, "tensor" if name == "all_gather" else "ulysses", **moe)
            plain, all_kept = run(layer, is_on=False)
            again, kept = run(layer, is_on=True)
            found[name] = all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), all_kept, kept
    return found


def test_a_layer_keeps_what_the_formula_says(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(nodes=1, ranks_per_node=RANKS).run(job)
    assert all(same for rank in found for same, _, _ in rank.values())
    # The mean over ranks: rows of experts are not spread evenly, but there are k of each token.
    all_kept, kept = (sum(rank["chunks"][index] for rank in found) / RANKS / 4 for index in (1, 2))
    assert kept == pytest.approx(SHAPE.selective, rel=0.05)
    assert all_kept == pytest.approx(SHAPE.autograd, rel=0.05)
    for way in ("one chunk", "all_gather"):
        assert sum(rank[way][2] for rank in found) < 0.7 * sum(rank[way][1] for rank in found)


def test_the_papers_numbers() -> None:
    """Mixtral-8x7B on 8 ranks: about half, as section 6.2 says."""
    mixtral = LayerShape(tokens=8192, ranks=8, hidden=4096, heads=32, kv_heads=8, top_k=2, width=14336)
    assert mixtral.paper_all_kept / mixtral.unit == pytest.approx(2 * 8 + 2 * 2 + 3 * 7 + 12 + 5 / 4)
    assert mixtral.selective / mixtral.unit == pytest.approx(2 * 7 + 4 + 2 / 4)
    assert 0.3 < mixtral.selective / mixtral.paper_all_kept < 0.55


def test_outside_nothing_is_promised() -> None:
    x = torch.ones(2)
    assert recomputable(x, lambda: torch.ones(2)) is None
    assert promise_of(x) is None


def test_views_are_made_again_once_for_all() -> None:
    made = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.arange(6.0).exp()

    weight = torch.ones(3, requires_grad=True)
    with Rematerialise() as counted:
        x = torch.arange(6.0).exp()
        recomputable(x, make)
        y = (x[:3] * weight).sum() + (x[3:] * weight).sum()
    expected = x[:3] + x[3:]
    del x
    y.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert made == [1]
    assert counted.promised_bytes == 24


def test_a_chain_is_made_from_its_source() -> None:
    order = []

    def source() -> torch.Tensor:
        order.append("source")
        return torch.full((3,), 2.0)

    def from_source(given: torch.Tensor) -> torch.Tensor:
        order.append("product")
        return given * 3

    weight = torch.ones(3, requires_grad=True)
    with Rematerialise():
        x = torch.full((3,), 2.0)
        promise = recomputable(x, source)
        y = x * 3
        recomputable(y, from_source, promise)
        z = (y * weight).sum() + (x * weight).sum()
    del x, y
    z.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0] * 3
    assert order == ["source", "product"]


def test_the_backward_pass_may_come_twice() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Rematerialise():
        x = torch.full((3,), 2.0)
        recomputable(x, lambda: torch.full((3,), 2.0))
        y = (x * weight).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 3


def test_another_tensor_in_the_same_memory_is_not_promised() -> None:
    """Memory is used again: what lies there later has nothing to do with the promise."""
    weight = torch.ones(1000, requires_grad=True)
    with Rematerialise():
        first = torch.full((1000,), 1.0)
        place = first.data_ptr()
        recomputable(first, lambda: torch.full((1000,), 1.0))
        del first
        gc.collect()
        others = [torch.full((1000,), 2.0) for _ in range(20)]
        reused = next((other for other in others if other.data_ptr() == place), others[0])
        y = (reused * weight).sum()
    y.backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == 2.0


def test_a_wrong_recomputation_is_caught() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Rematerialise():
        x = torch.full((3,), 2.0)
        recomputable(x, lambda: torch.full((4,), 2.0))
        y = (x * weight).sum()
    with pytest.raises(InternalError, match=r"gave \[4\] for \[3\]"):
        y.backward()


def test_a_change_in_place_is_not_overlooked() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Rematerialise():
        x = torch.full((3,), 2.0)
        recomputable(x, lambda: torch.full((3,), 2.0))
        x.mul_(3)  # what is promised is not this
        y = (x * weight).sum()
    y.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 3

    with Rematerialise():
        given = torch.full((3,), 2.0)
        x = given * 2
        recomputable(x, lambda: given * 2, inputs=(given,))
        y = (x * weight).sum()
    given.add_(1)
    with pytest.raises(UsageError, match="needs was changed in place"):
        y.backward()

    with Rematerialise(is_on=False):
        b = torch.ones(3)
        y = (weight * b).sum()
    b.mul_(5)
    with pytest.raises(UsageError, match="changed in place"):
        y.backward()


def test_promises_go_with_their_tensors() -> None:
    with Rematerialise() as counted:
        x = torch.ones(5)
        recomputable(x, lambda: torch.ones(5))
        assert promise_of(x) is not None
        assert promise_of(x[:3]) is None  # only a part of it
        del x
        assert not counted._promises
        with torch.no_grad():
            assert recomputable(torch.ones(5), lambda: torch.ones(5)) is None
    with pytest.raises(UsageError, match="entered before"):
        counted.__enter__()


def test_other_threads_are_not_affected() -> None:
    seen: list[object] = []
    with Rematerialise():
        thread = threading.Thread(target=lambda: seen.append(recomputable(torch.ones(2), lambda: torch.ones(2))))
        thread.start()
        thread.join()
    assert seen == [None]


def test_an_output_that_its_operator_saves_is_freed() -> None:
    """A hook that returns the tensor itself would make a cycle that nobody can see."""
    freed: list[int] = []
    with Rematerialise():
        y = torch.softmax(torch.randn(4, requires_grad=True), 0)
    weakref.finalize(y, freed.append, 1)
    del y
    gc.collect()
    assert freed == [1]


def idle_ranks() -> list[list[bool]]:
    """All tokens go to rank 0's expert, or only rank 0 has tokens; two backward passes each. Sends must pair up."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    found = []
    with FoldedMesh({"tp": 2, "ep": 2}) as mesh:
        for rows, experts in ((4, 3), (1, 2)):  # uneven experts; a sequence of one row over tp 2
            layer = Layer(mesh, "ulysses", dispatch="all_to_all", chunks=1, weights_at="experts")
            layer.moe = MoELayer(
                SHAPE.hidden, 8, RouterConfig(num_experts=experts, top_k=1), mesh=mesh, dispatch="all_to_all", chunks=1
            )
            with torch.no_grad():
                layer.moe.router.weight.zero_()  # ties: everybody chooses expert 0
            own = rows // 2 + (rows % 2 if dist.get_rank() == 0 else 0)
            gradients = []
            for is_on in (False, True):
                x = torch.ones(own, 1, SHAPE.hidden, requires_grad=True)
                layer.zero_grad()
                with Rematerialise(is_on=is_on):
                    y = x + layer.attention(layer.norm_1(x), rows)
                    y = y + layer.moe(layer.norm_2(y))
                y.sum().backward(retain_graph=True)
                y.sum().backward()
                gradients.append([p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None])
            found.append([torch.equal(a, b) for a, b in zip(*gradients, strict=True)])
    return found


def test_ranks_with_nothing_to_do_send_all_the_same(emulated_cluster: ClusterFactory) -> None:
    found = emulated_cluster(nodes=1, ranks_per_node=2).run(idle_ranks)
    assert all(all(same) for rank in found for same in rank)

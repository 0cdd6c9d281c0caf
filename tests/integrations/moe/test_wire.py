"""Tokens in a wire format between ranks: values, gradients, the ways they may go."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
import commlayer.backend.create  # once, before ranks are forked
from commlayer.collectives import GroupCommunicator
from commlayer.integrations import FoldedMesh, MoELayer, RouterConfig, TokenDispatcher
from commlayer.integrations.wire_choice import DispatchWire, dispatch_wire
from commlayer.profiles.errors import DisagreementError, NonFiniteError, UsageError
from commlayer.scheduler.wire import Scaling, WireFormat, WirePolicy
from commlayer.testing.plugin import ClusterFactory

H = 160
E4M3, BF16, NATIVE = WireFormat.FP8_E4M3, WireFormat.BF16, WireFormat.NATIVE


def test_what_a_name_means(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dispatch_wire("fp8_e4m3")
    assert found.dispatch.formats == (NATIVE, E4M3)
    assert found.combine.formats == (NATIVE, BF16)  # sums are not of FP8
    assert dispatch_wire("fp8_e4m3!").combine.formats == (BF16,)
    assert found.dispatch_gradient.formats == found.combine_gradient.formats == (NATIVE,)
    assert dispatch_wire(None).is_native
    monkeypatch.setenv("COMMLAYER_WIRE", "dp=bf16,ep=fp8_e4m3")
    assert dispatch_wire(None) == found
    with pytest.raises(UsageError, match="wire format must be"):
        dispatch_wire("fp9")
    with pytest.raises(UsageError, match="DispatchWire"):
        dispatch_wire(8)  # type: ignore[arg-type]


def layer_of(mesh: FoldedMesh | None, wire: Any, **options: Any) -> MoELayer:
    return MoELayer(H, 32, RouterConfig(num_experts=8, top_k=2), mesh=mesh, wire=wire, seed=7, **options)


def passes(layer: MoELayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, [p.grad.clone() for p in layer.parameters() if p.grad is not None]


def against_native(ranks: int, etp: int, tokens: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with FoldedMesh({"ep": ranks // etp, "etp": etp}, backend="commlayer") as mesh:
        x = torch.randn(tokens[rank], H, generator=torch.Generator().manual_seed(rank))
        native = passes(layer_of(mesh, None, **options), x)
        coarse = passes(layer_of(mesh, "fp8_e4m3!", **options), x)
        again = passes(layer_of(mesh, "fp8_e4m3!", **options), x)
        for mine, theirs in zip(coarse[:2], again[:2], strict=True):
            assert torch.equal(mine, theirs)
        for found, expected in (
            (coarse[0], native[0]),
            (coarse[1], native[1]),
            *zip(coarse[2], native[2], strict=True),
        ):
            assert found.isfinite().all()
            assert (found - expected).norm() <= 0.12 * expected.norm() + 1e-6
        assert not len(x) or not torch.equal(coarse[0], native[0])


MAPPINGS = [
    (2, 2, 1, (9, 5, 7, 8), {}),
    (2, 2, 1, (9, 0, 1, 40), {"chunks": 2}),  # nothing here, one token there, most of them there
    (2, 1, 1, (33, 6), {"chunks": 4, "weights_at": "experts"}),
    (2, 2, 2, (9, 5, 7, 8), {"dispatch": "all_to_all"}),
    (1, 3, 1, (4, 5, 6), {"dispatch": "all_gather"}),
    (2, 2, 2, (4, 5, 6, 0), {"dispatch": "all_gather"}),
]


@pytest.mark.parametrize(("nodes", "ranks", "etp", "tokens", "options"), MAPPINGS)
def test_fp8_tokens_stay_close(
    emulated_cluster: ClusterFactory,
    nodes: int,
    ranks: int,
    etp: int,
    tokens: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    cluster = emulated_cluster(nodes, ranks)
    cluster.run(against_native, nodes * ranks, etp, tokens, options)


def rows_arrive_rounded() -> list[str]:
    """Rows that were native stay bit-equal; those that crossed nodes are what the codec makes of it; the way home likewise."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PLAN"] = "flat_direct:3"
    dist.init_process_group("commlayer")
    rank, n = dist.get_rank(), dist.get_world_size()
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    policy = WirePolicy((E4M3,), Scaling.BLOCK, power_of_two=True)
    dispatcher = TokenDispatcher(n, ep=ep, kind="all_to_all", wire=DispatchWire(policy, policy, policy, policy))
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
    indices = (torch.arange(8) % n).unsqueeze(1)
    handle = dispatcher.prepare(indices, like=x)
    rows, counts = dispatcher.dispatch(x, handle)
    assert counts == (2 * n,)
    everyone = [torch.randn(8, H, generator=torch.Generator().manual_seed(k)).bfloat16() for k in range(n)]
    expected = torch.cat([theirs[rank::n] for theirs in everyone])
    near = torch.tensor([k // 2 == rank // 2 for k in range(n) for _ in range(2)])
    assert torch.equal(rows[near], expected[near])
    blocks = (x.detach().float() - 0).abs().amax()
    assert ((rows[~near] - expected[~near]).abs().float() <= 2.0**-3 * blocks).all()
    assert not torch.equal(rows[~near], expected[~near])
    back = dispatcher.combine(rows, handle)
    assert (back - x).abs().max() <= 2.0**-2 * blocks
    back.float().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(x))  # ones are exact in FP8
    return [call["plan"] for group in commlayer.stats()["groups"] for call in group["calls"]]


def test_rows_inside_a_node_are_native(emulated_cluster: ClusterFactory) -> None:
    for plans in emulated_cluster(2, 2).run(rows_arrive_rounded):
        assert "flat_direct×3/fp8_e4m3" in plans


def a_token_is_nan() -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with FoldedMesh({"ep": 2}, backend="commlayer") as mesh:
        layer = layer_of(mesh, "fp8_e4m3!")
        x = torch.randn(4, H)
        dispatcher = layer.dispatcher
        handle = dispatcher.prepare(torch.tensor([[0, 7]] * 4), like=x)
        if dist.get_rank() == 1:
            x[2, 3] = float("nan")
        with pytest.raises((NonFiniteError, RuntimeError)) as found:
            dispatcher.dispatch(x, handle)
        return str(found.value)


def test_nan_is_not_hidden(emulated_cluster: ClusterFactory) -> None:
    for text in emulated_cluster(1, 2).run(a_token_is_nan, check=False, grace_s=30.0):
        assert "NonFiniteError" in str(text.value) or "NaN" in str(text.value)


def recomputed() -> None:
    """Rematerialised: rows that are sent once more are the same rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with FoldedMesh({"ep": 2}, backend="commlayer") as mesh:
        x = torch.randn(6, H, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain = passes(layer_of(mesh, "fp8_e4m3!"), x)
        layer = layer_of(mesh, "fp8_e4m3!")
        x = x.clone().requires_grad_()
        with commlayer.integrations.Rematerialise():
            out = layer(x)
        out.square().sum().backward()
        assert torch.equal(out, plain[0])
        assert x.grad is not None
        assert torch.equal(x.grad, plain[1])


def test_recomputation_sends_the_same_rows(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(recomputed)


def formats_differ() -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with FoldedMesh({"ep": 2}, backend="commlayer") as mesh:
        layer = layer_of(mesh, "native" if dist.get_rank() else "fp8_e4m3!")
        with pytest.raises(DisagreementError, match="way of a dispatch") as found:
            layer(torch.randn(4, H))
        return str(found.value)


def test_ranks_that_differ_in_formats_hear_of_it_with_the_counts(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(formats_differ)


def nothing_comes_to_one_rank() -> None:
    """A rank without tokens, whose experts nobody chose, is in the exchange all the same."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    dispatcher = TokenDispatcher(3, ep=ep, kind="all_to_all", wire="fp8_e4m3!")
    is_idle = dist.get_rank() == 2
    x = torch.ones(0 if is_idle else 4, H)
    handle = dispatcher.prepare(torch.zeros(len(x), 1, dtype=torch.int64), like=x)
    rows, counts = dispatcher.dispatch(x, handle)
    assert counts == (8 if dist.get_rank() == 0 else 0,)
    assert torch.equal(dispatcher.combine(rows, handle), x)


def test_a_rank_that_has_nothing_at_all(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3).run(nothing_comes_to_one_rank)

"""Padding in the router, the MoE layer and attention: as if it were not there, bit for bit where nothing is summed anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from synthetic_profiles import synthetic_profile
from torch.utils._python_dispatch import TorchDispatchMode

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import Router, RouterConfig, Routing
from commlayer.integrations.remat import Rematerialise
from commlayer.profiles.errors import CommlayerError, TensorError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.llep import LlepRule
from commlayer.scheduler.placement.spilling import Spilling
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention
from examples.context_parallel import _visible
from examples.norm import RMSNorm
from examples.pass_parts import run_parts

HIDDEN, WIDTH = 16, 12
LOSSES: dict[str, Any] = {"aux_loss_coefficient": 0.5, "z_loss_coefficient": 0.1}
DROPS: dict[str, Any] = {"capacity_factor": 0.8}


def tokens(number: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(seed))


def mask(number: int, seed: int = 0, share: float = 0.6) -> torch.Tensor:
    return torch.rand(number, generator=torch.Generator().manual_seed(100 + seed)) < share


def padded(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Put NaN into the padding: a result that looks at it is NaN."""
    return x.masked_fill(~valid.view(-1, *[1] * (x.dim() - 1)), float("nan"))


# The router


def router_of(config: RouterConfig) -> Router:
    router = Router(config, HIDDEN, generator=torch.Generator().manual_seed(1))
    router.weight.data.mul_(20)  # drawn small: without this, all experts are nearly as good
    return router


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("options", [{}, DROPS, {"device_capacity_factor": 0.7, "num_devices": 4}], ids=str)
@pytest.mark.parametrize("number", [0, 1, 40])
def test_a_router_routes_valid_tokens_as_if_there_were_no_others(policy: Any, options: Any, number: int) -> None:
    """Choices, counts, capacity, losses and gradients, bit for bit; padding may hold NaN."""
    router = router_of(RouterConfig(num_experts=8, top_k=2, drop_policy=policy, **LOSSES, **options))
    valid = torch.zeros(64, dtype=torch.bool)
    valid[torch.randperm(64, generator=torch.Generator().manual_seed(2))[:number]] = True
    positions = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    found = []
    for x, at, given in ((padded(tokens(64), valid), positions, valid), (tokens(64)[valid], positions[valid], None)):
        x.requires_grad_()
        router.zero_grad()
        routing = router(x, at, given)
        kept = routing.indices, routing.weights
        if given is not None:
            assert routing.indices.shape == routing.weights.shape == (64, 2)
            assert bool((routing.indices[~valid] == -1).all())
            assert not routing.weights[~valid].any()
            kept = routing.indices[valid], routing.weights[valid]
        kept[1].sin().sum().backward()
        of_x = x.grad
        assert of_x is not None
        if given is not None:
            assert not of_x[~valid].any()
            of_x = of_x[valid]
        numbers = routing.capacity, routing.device_capacity, routing.dropped
        found.append(
            (numbers, *kept, routing.counts, routing.chosen, *routing.losses.values(), of_x, router.weight.grad)
        )
    assert found[0][0] == found[1][0]
    for mine, wanted in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(mine, wanted)


def test_a_mask_without_padding_is_no_mask() -> None:
    router = router_of(RouterConfig(num_experts=8, top_k=2, **LOSSES))
    x = tokens(9)
    plain, masked = router(x), router(x, valid=torch.ones(9, dtype=torch.bool))
    assert torch.equal(plain.weights, masked.weights)
    assert masked.valid_tokens.places is None


def test_rows_are_filled_up_to_the_capacity_of_all_tokens() -> None:
    """Ranks with other padding send equally many rows. What is dropped, the capacity of the valid tokens decides."""
    config = RouterConfig(num_experts=8, top_k=2, capacity_factor=1.0, pad_to_capacity=True)
    valid = torch.arange(64) < 48
    routing = router_of(config)(tokens(64), valid=valid)
    assert (routing.capacity, routing.padded_rows) == (12, 16)
    assert int(routing.counts.max()) == 12
    assert router_of(dataclasses.replace(config, pad_to_capacity=False))(tokens(64), valid=valid).padded_rows is None


def test_attached_losses_count_by_the_share_of_a_steps_tokens() -> None:
    """The z loss is a mean over tokens: in parts with other numbers of valid ones, it is still that of the whole."""
    config = RouterConfig(num_experts=8, top_k=2, z_loss_coefficient=0.1)
    x, valid = tokens(60), mask(60)
    whole = router_of(config)
    (whole(x, valid=valid).weights * 0).sum().backward()
    parts = router_of(config)
    parts.step_tokens = int(valid.sum())
    for part in (slice(0, 7), slice(7, 50), slice(50, 60)):
        (parts(x[part], valid=valid[part]).weights * 0).sum().backward()
    assert whole.weight.grad is not None
    assert parts.weight.grad is not None
    assert whole.weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("valid", "got"),
    [
        (torch.ones(9), r"torch.float32 of shape \[9\] on cpu"),
        (torch.ones(8, dtype=torch.bool), r"torch.bool of shape \[8\] on cpu"),
        (torch.ones(9, 1, dtype=torch.bool), r"torch.bool of shape \[9, 1\] on cpu"),
        (torch.ones(9, dtype=torch.bool, device="meta"), r"torch.bool of shape \[9\] on meta"),
    ],
    ids=["float", "fewer", "two dimensions", "another device"],
)
def test_masks_that_do_not_fit(valid: torch.Tensor, got: str) -> None:
    router = router_of(RouterConfig(num_experts=8, top_k=2))
    with pytest.raises(
        TensorError, match=rf"True where a token is no padding, as torch.bool of shape \[9\] on cpu; got {got}"
    ):
        router(tokens(9), valid=valid)


def test_nan_is_named_by_the_callers_number_of_its_token() -> None:
    router, x = router_of(RouterConfig(num_experts=8, top_k=2)), tokens(9)
    x[7] = float("nan")
    with pytest.raises(TensorError, match=r"at token 7, 1 of 9 tokens"):
        router(x, valid=torch.arange(9) > 4)


# The layer


def passes(
    layer: MoELayer, x: torch.Tensor, valid: torch.Tensor | None, *, remat: bool = False, in_parts: bool = False
) -> list[torch.Tensor]:
    """The output and the gradients of tokens and parameters: of valid tokens alone, after a look at the others'."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    norm = RMSNorm(x.shape[-1])
    with Rematerialise(is_on=remat):
        normed = norm(x)
        out = run_parts(layer.parts(normed, valid=valid)) if in_parts else layer(normed, valid=valid)
        loss = out.sin().sum()
    loss.backward()
    assert x.grad is not None
    out, of_x = out.detach(), x.grad
    if valid is not None:
        assert not out[~valid].any()
        assert not of_x[~valid].any()
        out, of_x = out[valid], of_x[valid]
    return [out, of_x, *(p.grad for p in layer.parameters() if p.grad is not None)]


def apart(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest magnitude of its tensor."""
    assert len(mine) == len(theirs)
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if b.numel() else 0.0
        for a, b in zip(mine, theirs, strict=True)
    )


EAGER = Spilling("llep", thresholds=LlepRule(imbalance=1.0, capacity=1.0, least_rows=1))
ROUTER: dict[str, Any] = {"num_experts": 8, "top_k": 2}
WAYS: dict[str, dict[str, Any]] = {
    "all_to_all": {"dispatch": "all_to_all", "chunks": 1},
    "chunks": {"dispatch": "all_to_all", "chunks": (1, 3, 3, 1)},
    "weights travel": {"dispatch": "all_to_all", "chunks": 4, "weights_at": "experts"},
    "all_gather": {"dispatch": "all_gather"},
    "two_level": {"dispatch": "two_level"},
    "spilling": {"dispatch": "all_to_all", "spilling": EAGER},
    "placement": {"dispatch": "all_to_all", "spare_slots": 1},
    "bf16 on the wire": {"dispatch": "all_to_all", "chunks": 1, "wire": "bf16!"},
    "losses": {"router": LOSSES},
    "capacity": {"router": DROPS},
}


def of_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and which of them are valid: on rank 1 one, on rank 2 none, on rank 3 all."""
    number = (37, 23, 11, 29)[rank]
    valid = (mask(37), torch.arange(23) == 20, torch.zeros(11, dtype=torch.bool), torch.ones(29, dtype=torch.bool))
    return tokens(number, rank), valid[rank]


def with_and_without(way: str) -> list[str]:
    """The passes of a layer whose results with padding are not those of the valid tokens alone."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    options = dict(WAYS[way])
    config, wrong = RouterConfig(**ROUTER, **options.pop("router", {})), []
    x, valid = of_rank(dist.get_rank())
    with FoldedMesh({"ep": 4}) as mesh:
        balance = GroupCommunicator(dist.group.WORLD, "dp")
        layer = MoELayer(HIDDEN, WIDTH, config, mesh=mesh, shared_width=6, balance=balance, **options)
        if layer.dispatcher.slots is not None:
            slots = layer.dispatcher.slots.placement.slots[::-1].copy()
            layer.dispatcher.slots.move_to(ExpertPlacement(slots, 8))
        wanted = passes(layer, x[valid], None)
        for name, how in (("", {}), ("remat", {"remat": True}), ("parts", {"in_parts": True})):
            found = passes(layer, x.masked_fill(~valid.unsqueeze(1), 1e4), valid, **how)
            if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
                wrong.append(f"rank {dist.get_rank()}, {way} {name}: off by {apart(found, wanted):.2g}")
        assert layer.routing is not None
        assert layer.routing.indices.shape == (len(x), 2)
        if way == "spilling":
            assert layer.dispatcher.spill_decision is not None
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_computes_the_same_bits_with_padding(emulated_cluster: ClusterFactory, way: str) -> None:
    found = emulated_cluster(2, 2).run(with_and_without, way)
    assert [line for lines in found for line in lines] == []


def rows_that_go(dispatch: Any) -> tuple[list[int], int, int]:
    """The tokens that each rank brings to a dispatch, the rows to all experts, and this rank's tokens by the statistics."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    reset_stats()
    x, valid = of_rank(dist.get_rank())
    with FoldedMesh({"ep": 4}) as mesh:
        layer = MoELayer(HIDDEN, WIDTH, RouterConfig(**ROUTER), mesh=mesh, dispatch=dispatch)
        seen: list[Any] = []
        layer.dispatcher.watch(lambda layout, slots: seen.append(layout))
        layer(padded(x, valid), valid=valid)
    (layout,), (counted,) = seen, stats()["dispatches"]
    return list(layout.tokens), int(layout.counts.sum()), counted["tokens"]


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather", "two_level"])
def test_padding_sends_no_row(emulated_cluster: ClusterFactory, dispatch: str) -> None:
    number = [int(of_rank(rank)[1].sum()) for rank in range(4)]
    assert number[1:] == [1, 0, 29]
    found = emulated_cluster(2, 2).run(rows_that_go, dispatch)
    assert found == [(number, 2 * sum(number), mine) for mine in number]


def filled_up() -> list[float]:
    """Rows padded to a capacity, on ranks with equally many tokens and other numbers of valid ones: as without filling up."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    rank = dist.get_rank()
    x = tokens(24, rank)
    valid = (mask(24), torch.arange(24) == 20, torch.zeros(24, dtype=torch.bool), torch.ones(24, dtype=torch.bool))[
        rank
    ]
    errors = []
    with FoldedMesh({"ep": 4}) as mesh:
        for scope in ("subsequence", "sequence"):
            found = []
            for is_filled in (False, True):
                config = RouterConfig(**ROUTER, **DROPS, drop_scope=scope, pad_to_capacity=is_filled)
                sequence = GroupCommunicator(dist.group.WORLD, "ep")
                layer = MoELayer(HIDDEN, WIDTH, config, mesh=mesh, dispatch="all_to_all", chunks=1, sequence=sequence)
                found.append(passes(layer, x, valid))
                assert layer.routing is not None
                number = 24 * 4 if scope == "sequence" else 24
                assert layer.routing.padded_rows == (-(-number * 2 * 4 // 40) if is_filled else None)  # 0.8 · T · 2 / 8
            errors.append(apart(found[1], found[0]))
    return errors


def test_rows_that_are_filled_up_give_the_same(emulated_cluster: ClusterFactory) -> None:
    for errors in emulated_cluster(2, 2).run(filled_up):
        assert max(errors) <= 1e-6


def replicated(how: str) -> float:
    """Tokens that the ranks of tp all hold, with the same padding: against one process without it."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    is_filled = how != "dropless"
    config = RouterConfig(num_experts=4, top_k=2, capacity_factor=2.0 if is_filled else None, pad_to_capacity=is_filled)
    with FoldedMesh({"tp": 2, "ep": 2, "etp": 2}) as mesh:
        communicator: Any = None
        if how == "by plans":
            profile = synthetic_profile(nodes=2, ranks_per_node=2)
            communicator = Communicator(mesh.group("ep"), mesh.group("etp"), profile=profile)
        options: dict[str, Any] = {"tokens": "replicated", "shared_width": 6, "communicator": communicator}
        layer = MoELayer(HIDDEN, WIDTH, config, mesh=mesh, **options)
        x, valid = tokens(19, mesh.rank("ep")), torch.arange(19) < (12, 3)[mesh.rank("ep")]
        found = passes(layer, x, valid)
        wanted = passes(MoELayer(HIDDEN, WIDTH, RouterConfig(num_experts=4, top_k=2), shared_width=6), x[valid], None)
        if communicator is not None:
            assert sum(communicator.plans_run.values()) == 4
            communicator.close()
    return apart(found[:3], wanted[:3])  # and not the experts', to which other tokens go here


@pytest.mark.parametrize("how", ["dropless", "filled up", "by plans"])
def test_tokens_that_are_replicated(emulated_cluster: ClusterFactory, how: str) -> None:
    assert max(emulated_cluster(2, 2).run(replicated, how)) <= 1e-5


def test_nan_in_padding_reaches_nothing() -> None:
    layer = MoELayer(HIDDEN, WIDTH, RouterConfig(**ROUTER, **LOSSES), shared_width=6)
    x, valid = tokens(5 * 8).view(5, 8, HIDDEN), mask(40).view(5, 8)
    x = x.masked_fill(~valid.unsqueeze(2), float("inf")).requires_grad_()
    out = layer(x, valid=valid)
    assert torch.equal(out[valid], layer(x[valid]))
    assert not out[~valid].any()
    out.sum().backward()
    assert x.grad is not None
    assert not x.grad[~valid].any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def said_of(layer: MoELayer, x: torch.Tensor, valid: torch.Tensor) -> str:
    try:
        layer(x, valid=valid).sum().backward()
    except CommlayerError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def test_valid_tokens_are_taken_again_and_not_kept() -> None:
    """Rematerialise keeps neither the norm's output nor the valid tokens among it: both can be made again."""
    layer, norm = MoELayer(HIDDEN, WIDTH, RouterConfig(**ROUTER)), RMSNorm(HIDDEN)
    x, valid = tokens(1024 + 256).requires_grad_(), torch.arange(1024 + 256) < 1024  # whole blocks of the router's
    kept = []
    for given, at in ((valid, slice(None)), (None, slice(1024))):
        with Rematerialise() as counted:
            layer(norm(x[at]), valid=given)
        kept.append(counted.kept_bytes)
    with_padding, without = kept
    assert with_padding - without < 1024 * HIDDEN * 4 / 2  # the bytes of the valid tokens


def one_mask_does_not_fit() -> tuple[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": 2}) as mesh:
        balance = GroupCommunicator(dist.group.WORLD, "dp")
        layer = MoELayer(HIDDEN, WIDTH, RouterConfig(**ROUTER, **LOSSES), mesh=mesh, balance=balance)
        x, valid = tokens(9), mask(9)
        return said_of(layer, x, valid[: 9 - dist.get_rank()]), said_of(layer, x, valid)


def test_a_mask_that_does_not_fit_is_told_to_all(emulated_cluster: ClusterFactory) -> None:
    (other, then), (own, then_own) = emulated_cluster(1, 2).run(one_mask_does_not_fit)
    assert own.startswith("TensorError: rank 1: expected valid, True where a token is no padding")
    assert other.startswith("DisagreementError")
    assert then == then_own == "went well"


# Attention


def attention_of(kind: Any, causal: bool, tp: GroupCommunicator, cp: GroupCommunicator) -> ParallelAttention:
    generator = torch.Generator().manual_seed(4)
    return ParallelAttention(
        HIDDEN, 4, 2, tp=tp, cp=cp, kind=kind, causal=causal, generator=generator, rope_base=1e4, dtype=torch.float64
    )


def alone(lane: Any) -> GroupCommunicator:
    return GroupCommunicator(None, lane)


LAID = {
    "at the end": (torch.arange(13) < 9),
    "at the beginning": (torch.arange(13) >= 4),
    "at both ends": (torch.arange(13) >= 2) & (torch.arange(13) < 10),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", LAID)
def test_nobody_attends_to_padding(where: str, causal: bool) -> None:
    """Positions are relative: a sequence between padding is what it is alone, values and gradients."""
    attention, valid = attention_of("ulysses", causal, alone("tp"), alone("cp")), LAID[where]
    x = torch.randn(13, 2, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    both = torch.stack((valid, torch.ones(13, dtype=torch.bool)), 1)  # beside a sequence without padding
    found = []
    for given, at in ((both, slice(None)), (None, valid)):
        mine = x[at].clone().requires_grad_()
        attention.zero_grad()
        y = attention(mine, valid=given)[:, 0]
        y = y if given is None else y[valid]
        y.sin().sum().backward()
        assert mine.grad is not None
        if given is not None:
            assert not mine.grad[~valid, 0].any()
        of_x = mine.grad[:, 0] if given is None else mine.grad[valid, 0]
        found.append([y.detach(), of_x, *(p.grad for p in attention.parameters() if p.grad is not None)])
    assert apart(found[0], found[1]) <= 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_the_output_of_padding_is_finite(causal: bool) -> None:
    """Also where nothing is valid that a query of padding may see: its softmax would be over nothing."""
    attention = attention_of("ulysses", causal, alone("tp"), alone("cp"))
    x = torch.randn(5, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
    y = attention(x, valid=valid)
    y.sum().backward()
    assert x.grad is not None
    assert bool(y.isfinite().all() and x.grad.isfinite().all())
    visible = _visible(torch.arange(5), valid, causal)  # torch's CPU kernel forgives it, others do not
    assert visible is not None
    assert bool(visible.any(-1).all())


class Questions(TorchDispatchMode):
    """Counts how often somebody waits for a number of a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_mask_is_asked_for_padding_once_by_all_layers() -> None:
    x = torch.randn(13, 1, HIDDEN, dtype=torch.float64)
    layers = [attention_of(kind, True, alone("tp"), alone("cp")) for kind in ("ulysses", "tensor", "ulysses")]
    valid = LAID["at the end"].clone().unsqueeze(1)
    for laid in ("at the end", "at both ends"):
        valid.copy_(LAID[laid].unsqueeze(1))
        with Questions() as questions:
            found = [layer(x, valid=valid) for layer in layers]
        assert questions.count == 1, laid
        again = [layer(x, valid=valid.clone()) for layer in layers]
        assert all(torch.equal(*pair) for pair in zip(found, again, strict=True)), (
            "what was known of the mask has changed"
        )


def test_masks_of_another_sequence() -> None:
    attention = attention_of("tensor", True, alone("tp"), alone("cp"))
    x = torch.zeros(5, 2, HIDDEN, dtype=torch.float64)
    for valid in (torch.ones(4, 2, dtype=torch.bool), torch.ones(5, dtype=torch.bool), torch.ones(5, 2)):
        with pytest.raises(
            TensorError, match=r"of the whole sequence is no padding, as torch.bool of shape \[5, 2\] on cpu"
        ):
            attention(x, valid=valid)


def test_a_routing_of_another_router_has_no_padding() -> None:
    routing = Routing.of(torch.tensor([[0, -1]]), torch.ones(1, 2), 4)
    assert routing.dropped == 1
    assert routing.valid_tokens.num_padding == 0

"""Wire formats in what trainers call: DDP, FSDP2, gradients on a mesh, parallel layers; against the same in FP32."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import runpy
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # optimizers load it: once, before ranks are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from commlayer.collectives import LANES, GroupCommunicator
from commlayer.integrations import (
    FoldedMesh,
    PlannedAllGather,
    PlannedReduceScatter,
    RouterConfig,
    all_reduce_hook,
    mark_replicated,
    plan_ddp,
    plan_fsdp,
    planned_group,
    synchronise_gradients,
)
from commlayer.integrations.flat_buffers import flat_rows
from commlayer.integrations.shares import even_rows
from commlayer.integrations.wire_choice import wire_policy
from commlayer.profiles.errors import DisagreementError, GroupError, SettingsError, UsageError
from commlayer.scheduler.wire import Scaling, WireFormat, WirePolicy
from commlayer.settings import Settings
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention
from examples.context_parallel import split_sequence
from examples.language_model import ModelConfig, MoELanguageModel
from examples.layer_wires import LaneWires, tensor_parallel_wire
from examples.linear import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.cluster
BF16, E4M3, E5M2, NATIVE = WireFormat.BF16, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2, WireFormat.NATIVE
ALWAYS = WirePolicy((BF16,))


def start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model everywhere
    dist.init_process_group("gloo")


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def gradients(model: torch.nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """The gradients of one batch, which differs between ranks; whole."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    model.zero_grad()
    model(torch.randn(6, 8, generator=generator)).square().mean().backward()
    return [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


def whole(x: torch.Tensor) -> torch.Tensor:
    gather = getattr(x, "full_tensor", None)  # a DTensor after fully_shard
    return gather().detach() if gather else x.detach()


def each_ranks(model: torch.nn.Module, seed: int = 0) -> list[list[torch.Tensor]]:
    """The gradients of every rank, before they meet."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, gradients(model, seed))
    return [list(of_one) for of_one in zip(*everyones, strict=True)]


def check_rounded_once(got: list[torch.Tensor], of_ranks: list[list[torch.Tensor]], unit: float, n: int) -> None:
    """The mean within one rounding of each rank's value, and one of the result; and not the exact one. Same bits on all ranks."""
    assert len(got) == len(of_ranks)
    is_exact = True
    for mean, values in zip(got, of_ranks, strict=True):
        stacked = torch.stack(values).double()
        exact = stacked.mean(0)
        bound = 2.01 * unit * stacked.abs().mean(0) + 1e-7
        assert ((mean.double() - exact).abs() <= bound).all()
        is_exact &= bool(((mean.double() - exact).abs() <= 1e-6 * exact.abs()).all())
    assert not is_exact
    everyones: list[Any] = [None] * n
    dist.all_gather_object(everyones, got)
    assert all(torch.equal(one, other) for theirs in everyones for one, other in zip(got, theirs, strict=True))


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def calls(plan: str) -> dict[str, int]:
    """The calls of planned groups, by collective: how often a plan with ``plan`` in its name ran."""
    found: dict[str, int] = {}
    for group in stats()["groups"]:
        for call in group["calls"]:
            if plan in call["plan"]:
                found[call["collective"]] = found.get(call["collective"], 0) + call["calls"]
    return found


# What a user writes


def test_a_word_a_policy_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire_policy("bf16", "dp") == WirePolicy((NATIVE, BF16))
    assert wire_policy("bf16!", "dp") == WirePolicy((BF16,))
    assert wire_policy("fp8_e4m3+bf16", "ep", scaling=Scaling.BLOCK) == WirePolicy((NATIVE, E4M3, BF16), Scaling.BLOCK)
    assert wire_policy(ALWAYS, "dp") is ALWAYS
    assert wire_policy(WirePolicy(), "dp") is wire_policy("native", "dp") is wire_policy(None, "dp") is None
    monkeypatch.setenv("COMMLAYER_WIRE", "dp=bf16!, tp = fp8_e4m3")
    assert wire_policy(None, "dp") == ALWAYS
    assert wire_policy(None, "tp", scaling=Scaling.CHANNEL) == WirePolicy((NATIVE, E4M3), Scaling.CHANNEL)
    assert wire_policy(None, "ep") is wire_policy("native", "dp") is None
    for wrong in ("int4", "bf16,fp8_e4m3", ""):
        with pytest.raises(UsageError, match="a wire format must be one of native, bf16"):
            wire_policy(wrong, "dp")
    with pytest.raises(UsageError, match="wire must be a WirePolicy, a text"):
        wire_policy(16, "dp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dp=int4", r"COMMLAYER_WIRE, lane dp: a wire format must be one of .* got 'int4'"),
        ("bf16", r"must be lane=format, .* lanes: ep, pp, cp, dp, tp; got 'bf16'"),
        ("xp=bf16", r"lanes: ep, pp, cp, dp, tp; got 'xp=bf16'"),
        ("dp=bf16,dp=native", r"each lane once, .* got 'dp=native'"),
        ("dp=", r"lane dp: a wire format must be one of"),
    ],
)
def test_a_malformed_variable(value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_environment({"COMMLAYER_WIRE": value})


def test_the_variable_knows_every_lane() -> None:
    text = ",".join(f"{lane}=bf16" for lane in LANES)
    assert set(Settings(wire=text).wires()) == set(LANES)
    assert Settings(wire="").wires() == Settings().wires() == {}


@pytest.mark.parametrize(("elements", "width"), [(4096, 1024), (384, 384), (1280, 640), (128 * 11, 128), (300, 300)])
def test_flat_tensors_as_rows(elements: int, width: int) -> None:
    x = torch.arange(float(3 * elements))
    rows = flat_rows(x, WirePolicy((E4M3,)), 3)
    assert rows.shape == (3 * elements // width, width)
    assert rows.data_ptr() == x.data_ptr()
    assert flat_rows(x, ALWAYS, 3) is x
    assert flat_rows(x[:127], WirePolicy((E4M3,))).shape == (1, 127)
    assert flat_rows(x[:0], WirePolicy((E4M3,))).shape == (0,)


# DistributedDataParallel


def ddp_rounds_once(wire: Any, unit: float) -> dict[str, int]:
    start()
    model, n = small_model(), dist.get_world_size()
    of_ranks = each_ranks(copy.deepcopy(model))
    hooked = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # several buckets, in flight together
    plan_ddp(hooked, wire=wire)
    gradients(hooked)  # the second step has other buckets than the first
    reset_stats()
    check_rounded_once(gradients(hooked), of_ranks, unit, n)
    return calls("bf16")


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2)])
def test_ddp_in_bf16(emulated_cluster: ClusterFactory, nodes: int, ranks: int) -> None:
    for found in emulated_cluster(nodes, ranks).run(ddp_rounds_once, "bf16!", 2.0**-8):
        assert found["all_reduce"] > 1, "one bucket a step would not test buckets"


def ddp_in_fp8() -> None:
    start()
    model = small_model()
    of_ranks = each_ranks(copy.deepcopy(model))
    hooked = DistributedDataParallel(model)
    plan_ddp(hooked, wire="fp8_e5m2!")
    for mean, values in zip(gradients(hooked), of_ranks, strict=True):
        exact, largest = torch.stack(values).double().mean(0), torch.stack(of_ranks[0]).abs().max()
        assert (mean.double() - exact).abs().max() <= 2.0**-2 * max(largest, torch.stack(values).abs().max())
    everyones: list[Any] = [None] * dist.get_world_size()
    got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    dist.all_gather_object(everyones, got)
    for theirs in everyones:
        assert_same(theirs, got)


def test_ddp_in_fp8(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3).run(ddp_in_fp8)


def ddp_by_environment(value: str | None) -> dict[str, int]:
    if value:
        os.environ["COMMLAYER_WIRE"] = value
    start()
    model = small_model()
    expected = gradients(DistributedDataParallel(copy.deepcopy(model)))
    hooked = DistributedDataParallel(copy.deepcopy(model))
    plan_ddp(hooked)
    got = gradients(hooked)
    overridden = DistributedDataParallel(model)
    plan_ddp(overridden, wire="native")
    assert_same(gradients(overridden), expected)
    if not value:
        assert_same(got, expected)
    return calls("bf16")


def test_ddp_by_the_environment(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(1, 2)
    assert cluster.run(ddp_by_environment, "dp=bf16!") == [{"all_reduce": 1}] * 2
    assert cluster.run(ddp_by_environment, None) == [{}] * 2


def without_a_profile() -> list[str]:
    start()
    model = small_model()
    expected = gradients(DistributedDataParallel(copy.deepcopy(model)))
    hooked = DistributedDataParallel(model)
    plan_ddp(hooked, wire="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same(gradients(hooked), expected)
    assert calls("bf16") == {}
    return [str(each.message) for each in caught if "commlayer" in str(each.message)]


def test_without_a_profile_bf16_stays_native_and_says_so_once(emulated_cluster: ClusterFactory) -> None:
    for texts in emulated_cluster(1, 2).run(without_a_profile):
        assert len(texts) == 1
        assert "bf16 is allowed, but there is no profile" in texts[0]


def training_goes_on() -> tuple[list[str], float]:
    """The gradients of one rank become such that FP8 leaves the budget: all ranks step back, and go on."""
    start()
    model = small_model()
    group: Any = GroupCommunicator(
        planned_group(), wire=WirePolicy((E4M3, BF16), Scaling.BLOCK, error_budget=0.01, sample_every=2), name="dp"
    )
    hooked = DistributedDataParallel(model)
    hooked.register_comm_hook(group, all_reduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(6):
            loss = hooked(torch.ones(4, 8) * (1 + dist.get_rank())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [p.detach() for p in model.parameters()])
    for theirs in everyones:
        assert_same(theirs, [p.detach() for p in model.parameters()])
    return [str(each) for each in group.governor.formats], group.governor.errors[BF16]


def test_training_goes_on_after_the_governor_stepped_back(emulated_cluster: ClusterFactory) -> None:
    for formats, error in emulated_cluster(1, 3).run(training_goes_on):
        assert formats == ["bf16"]
        assert 0 < error < 2.0**-8


# FSDP2


def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp_rounds_once(wire: Any) -> dict[str, int]:
    start()
    model, n = small_model(), dist.get_world_size()
    of_ranks = each_ranks(copy.deepcopy(model))
    planned = shard(model, mesh=init_device_mesh("cpu", (n,)))
    plan_fsdp(planned, wire=wire)
    reset_stats()
    check_rounded_once(gradients(planned), of_ranks, 2.0**-8, n)
    return calls("bf16")


@pytest.mark.parametrize("wire", ["bf16!", WirePolicy((BF16,), in_place=True)], ids=["bf16", "in place"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2)])
def test_fsdp_in_bf16(emulated_cluster: ClusterFactory, wire: Any, nodes: int, ranks: int) -> None:
    for found in emulated_cluster(nodes, ranks).run(fsdp_rounds_once, wire):
        assert found["reduce_scatter"] > 1
        assert "all_gather" not in found


def hsdp_rounds_once() -> None:
    start()
    model = small_model()
    of_ranks = each_ranks(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    planned = shard(model, mesh=mesh)
    plan_fsdp(planned, planned_group(mesh.get_group("shard")), wire="bf16!")
    check_rounded_once(gradients(planned), of_ranks, 2.0**-8, 4)


def test_hsdp_in_bf16(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(hsdp_rounds_once)


def parameters_in(wire: str, dtype: torch.dtype) -> dict[str, int]:
    """All ranks compute with the same rounded parameters; the sharded ones keep their bits."""
    start()
    n = dist.get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 40, bias=False))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    planned = shard(model, mesh=init_device_mesh("cpu", (n,)), mp_policy=policy)
    plan_fsdp(planned, parameter_wire=wire)
    seen: dict[str, torch.Tensor] = {}
    first: Any = planned.get_submodule("0")
    first.register_forward_pre_hook(lambda m, _: seen.update(weight=m.weight.detach().clone()))
    reset_stats()
    planned(torch.ones(2, 64)).square().mean().backward()
    error = ((seen["weight"].float() - before[0]).abs() / before[0].abs().max()).max()
    assert 0 < error <= (2.0**-4 if wire.startswith("fp8") else 2.0**-8)
    everyones: list[Any] = [None] * n
    dist.all_gather_object(everyones, seen["weight"])
    assert all(torch.equal(theirs, seen["weight"]) for theirs in everyones)
    assert_same([whole(parameter) for parameter in planned.parameters()], before)
    return calls(wire.rstrip("!"))


@pytest.mark.parametrize(
    ("wire", "dtype"), [("fp8_e4m3!", torch.bfloat16), ("fp8_e4m3!", torch.float32), ("bf16!", torch.float32)]
)
def test_fsdp_parameters(emulated_cluster: ClusterFactory, wire: str, dtype: torch.dtype) -> None:
    for found in emulated_cluster(2, 2).run(parameters_in, wire, dtype):
        assert found["all_gather"] >= 3
        assert "reduce_scatter" not in found


def gathers_where_input_and_output_share_memory(plan: str, elements: int) -> None:
    """The call is as FSDP2's: the input is this rank's slice of the output."""
    os.environ["COMMLAYER_PLAN"] = plan
    start()
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        gather = PlannedAllGather(planned_group(), "fp8_e4m3!")
        x = torch.randn(elements, generator=seeded(rank)).to(dtype)
        apart, within = torch.empty(n * elements, dtype=dtype), torch.empty(n * elements, dtype=dtype)
        gather(apart, x, gather.group)
        mine = within[rank * elements :][:elements]
        mine.copy_(x)
        work = gather(within, mine, gather.group, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(within, apart)
        assert not torch.equal(mine, x)
        assert (mine - x).abs().max() <= 2.0**-4 * x.abs().max()


@pytest.mark.parametrize("plan", ["flat_direct:3", "hierarchical", "pipelined:2"])
def test_parameters_are_gathered_in_place(emulated_cluster: ClusterFactory, plan: str) -> None:
    cluster = emulated_cluster(2, 2)
    for elements in (64 * 1024, 3001):
        cluster.run(gathers_where_input_and_output_share_memory, plan, elements)


def fsdp_refusals() -> None:
    start()
    with pytest.raises(GroupError, match="has backend gloo: make a planned one"):
        plan_ddp(DistributedDataParallel(small_model()), dist.new_group(), wire="bf16")
    planned = planned_group()
    with pytest.raises(UsageError, match="a wire format must be one of"):
        PlannedAllGather(planned, "fp4")
    scatter = PlannedReduceScatter(planned, "bf16!")
    out, x = torch.empty(3), torch.arange(6.0)
    for op in (dist.ReduceOp.MAX, cast("Any", dist)._make_nccl_premul_sum(0.5)):
        with pytest.raises(UsageError, match="summed or averaged"):
            scatter(out, x, planned, op)
    work = scatter(out, x, planned, dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.wait()  # once is enough, and twice changes nothing
    assert out.tolist() == x[3 * dist.get_rank() :][:3].tolist()
    assert scatter(out, x, planned, dist.ReduceOp.SUM) is None
    assert out.tolist() == (2 * x[3 * dist.get_rank() :][:3]).tolist()
    os.environ["COMMLAYER_WIRE"] = "dp=bf16!"
    assert PlannedAllGather(planned).compressed is None  # parameters: only where the program asks for it
    assert PlannedReduceScatter(planned).compressed is not None
    assert PlannedReduceScatter(planned, "native").compressed is None


def test_refusals(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(fsdp_refusals)


# Gradients on a mesh


def mesh_gradients() -> None:
    start()
    mesh = FoldedMesh({"tp": 2}, backend="commlayer")
    model = small_model()
    for layer in model.children():
        mark_replicated(layer, over=())
    of_ranks = each_ranks(model)
    for wire, unit in (("native", 2.0**-23), ("bf16!", 2.0**-8), ("bf16!", 2.0**-8)):
        for parameter, values in zip(model.parameters(), of_ranks, strict=True):
            parameter.grad = values[dist.get_rank()].clone()
        synchronise_gradients(model, mesh, wire)
        for parameter, values in zip(model.parameters(), of_ranks, strict=True):
            mine = torch.stack([values[rank] for rank in mesh.ranks("dp_cp")]).double()
            assert parameter.grad is not None
            error = (parameter.grad.double() - mine.sum(0)).abs()
            assert (error <= 2.01 * unit * mine.abs().sum(0) + 1e-7).all()
            assert wire == "native" or error.max() > 0
    from commlayer.integrations.gradients import _COMPRESSED

    (kept,) = _COMPRESSED.values()
    compressed = [key for key, made in kept.items() if made is not None]
    assert compressed == [("dp_cp", WirePolicy((BF16,), Scaling.BLOCK, non_finite="pass"))]  # one for both steps


def test_gradients_on_a_mesh(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(mesh_gradients)


# Parallel layers


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close_to(got: torch.Tensor, expected: torch.Tensor, unit: float, what: str) -> None:
    """``unit``: of the largest expected value; and not the same, which would mean that nothing was encoded."""
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    if expected.numel():
        error = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
        assert 0 < error <= unit, f"{what}: off by {error:.2g}"


def linear_layers(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, int]:
    """up and down, as a dense layer has them, in FP8 against natively: outputs, and gradients of input and weights."""
    start()
    n, rank = dist.get_world_size(), dist.get_rank()
    tp = GroupCommunicator(planned_group(), "tp")
    wire, gradient_wire = tensor_parallel_wire("fp8_e4m3!")
    results = []
    rows = even_rows(shape[0], n)
    whole_x = torch.randn(*shape, 48, generator=seeded(1)).to(dtype)
    for options in ({}, {"wire": wire, "gradient_wire": gradient_wire}):
        common: dict[str, Any] = {"tp": tp, "dtype": dtype, **options}
        up = ColumnParallelLinear(48, 96, generator=seeded(2), **common)
        down = RowParallelLinear(96, 48, generator=seeded(3), **common)
        x = whole_x.split(rows)[rank].clone().requires_grad_()
        reset_stats()
        y = down(torch.tanh(up(x, shape[0])))
        y.backward(torch.randn(y.shape, generator=seeded(4 + rank)).to(dtype))
        found = calls("fp8_e4m3")
        assert x.grad is not None
        results.append([y.detach(), x.grad, up.weight.grad, down.weight.grad])
        exact = up.full_weight(), down.full_weight()  # parameters are never rounded
        assert torch.equal(up.shard(exact[0]), up.weight)
        assert torch.equal(down.shard(exact[1]), down.weight)
        assert calls("fp8_e4m3") == found
    for what, native, coded in zip(("y", "x", "up", "down"), *results, strict=True):
        close_to(coded, native, 2.0**-4 * 1.5, what)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(256,), (131, 3), (2, 2)], ids=str)
def test_linear_layers(emulated_cluster: ClusterFactory, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for found in emulated_cluster(1, 3).run(linear_layers, dtype, shape):
        # forward: gathered, and scattered; backward: the other way round
        assert found == {"all_gather": 2, "reduce_scatter": 2}


def scales_are_per_token() -> None:
    """One huge token does not take the others' precision, also not those of its position in the batch."""
    start()
    tp = GroupCommunicator(planned_group(), "tp")
    wire, _ = tensor_parallel_wire("fp8_e4m3!")
    layer = RowParallelLinear(8, 4, tp=tp, wire=wire, generator=seeded())
    x = torch.randn(6, 5, 4, generator=seeded(dist.get_rank()))
    x[2, 3] *= 1e6
    native = RowParallelLinear(8, 4, tp=tp, wire="native", generator=seeded())
    got, expected = layer(x).detach(), native(x).detach()
    error = (got - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) < 0.2  # of each token's own largest
    empty = layer(x[:, :0])
    assert empty.shape == (3, 0, 4)
    assert layer(x[:0]).shape == (0, 5, 4)


def test_scales_are_per_token(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(scales_are_per_token)


def attention_in_fp8(kind: Any, is_by_environment: bool) -> dict[str, int]:
    if is_by_environment:
        os.environ["COMMLAYER_WIRE"] = "tp=fp8_e4m3!,cp=fp8_e4m3!"
    start()
    mesh = FoldedMesh({"tp": 2, "cp": 2}, backend="commlayer")
    tp, cp = GroupCommunicator(mesh.group("tp"), "tp"), GroupCommunicator(mesh.group("cp"), "cp")
    whole_x = torch.randn(20, 2, 32, generator=seeded(1))
    results = []
    wire, gradient_wire = (None, None) if is_by_environment else tensor_parallel_wire("fp8_e4m3!")
    for options in ({"wire": "native", "gradient_wire": "native"}, {"wire": wire, "gradient_wire": gradient_wire}):
        common: dict[str, Any] = {"tp": tp, "cp": cp, "kind": kind, "generator": seeded(2), **options}
        layer = ParallelAttention(32, 4, 2, **common)
        x = split_sequence(whole_x, tp=tp, cp=cp).clone().requires_grad_()
        reset_stats()
        y = layer(x)
        y.square().sum().backward()
        found = calls("fp8_e4m3")
        assert x.grad is not None
        results.append([y.detach(), x.grad, layer.q.weight.grad])
    for what, native, coded in zip(("y", "x", "q"), *results, strict=True):
        close_to(coded, native, 0.3, what)
    return found


@pytest.mark.parametrize("kind", ["ulysses", "tensor"])
def test_attention(emulated_cluster: ClusterFactory, kind: str) -> None:
    for found in emulated_cluster(1, 4).run(attention_in_fp8, kind, False):
        expected = {"all_to_all_v": 4} if kind == "ulysses" else {"all_gather": 2, "reduce_scatter": 2}
        assert found == expected


def test_attention_by_the_environment(emulated_cluster: ClusterFactory) -> None:
    for found in emulated_cluster(1, 4).run(attention_in_fp8, "ulysses", True):
        assert found == {"all_to_all_v": 4, "all_gather": 1, "reduce_scatter": 1}


def a_model_trains(wires: LaneWires | None) -> tuple[list[float], dict[str, int]]:
    start()
    mesh = FoldedMesh({"tp": 2, "ep": 2}, backend="commlayer")
    router = RouterConfig(num_experts=4, top_k=2)
    config = ModelConfig(
        router=router, vocabulary=32, hidden=32, width=32, attention="tensor", dispatch="all_to_all", wires=wires
    )
    model = MoELanguageModel(config, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(32, (17, 4), generator=seeded(5))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(float(model.train_step(tokens[:-1], tokens[1:])))
        optimizer.step()
    coded = {**calls("fp8_e4m3"), **{f"{name} bf16": count for name, count in calls("bf16").items()}}
    return losses, coded


def test_a_model_trains(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2)
    wire, gradient_wire = tensor_parallel_wire("fp8_e4m3!")
    wires = LaneWires(ep="fp8_e4m3!", tp=wire, tp_gradient=gradient_wire, dp="bf16!")
    native = cluster.run(a_model_trains, None)
    for (losses, found), (expected, none) in zip(cluster.run(a_model_trains, wires), native, strict=True):
        assert none == {}
        assert {"all_gather", "reduce_scatter", "all_to_all_v", "all_reduce bf16"} <= set(found)
        assert losses != expected
        assert losses == pytest.approx(expected, rel=0.05)
        assert losses[-1] < losses[0]


# The documentation


def the_program_of_the_page(path: Path) -> tuple[str, dict[str, int]]:
    printed = io.StringIO()
    reset_stats()
    with contextlib.redirect_stdout(printed):
        KEPT.append(runpy.run_path(str(path), run_name="__main__"))
    return printed.getvalue(), calls("bf16")


KEPT: list[object] = []
"""Freed in a rank after its groups, DDP's reducer may hang in the destructor of a Gloo group (docs/trainers/torch.md)."""


def test_the_program_of_the_page(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "compression.md"
    (program,) = re.findall(r"^```python\n(# train_compressed.py\n.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    path = tmp_path / "train_compressed.py"
    path.write_text(program, "utf-8")
    printed, found = emulated_cluster(2, 2).run(the_program_of_the_page, path)[0]
    assert len(re.findall(r"loss \d", printed)) == 3
    assert found["all_reduce"] >= 3


DIFFERING = r"ranks disagree on the wire formats of .*: rank 0 has .*bf16.*, rank 1 has .*native"


def formats_differ() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    with pytest.raises(DisagreementError, match=DIFFERING):
        plan_ddp(model, dist.group.WORLD, wire="native" if dist.get_rank() else "bf16!")


def test_ranks_that_were_given_different_formats_hear_of_it(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(formats_differ)

"""ShardedOptimizer: against the unsharded optimizer natively; parameters and gradients in wire formats; state."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers load it: once, before ranks are forked
import torch.distributed as dist
from torch import nn

from commlayer.integrations import ShardedOptimizer, planned_group
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.scheduler.wire import Scaling, Wire, WireFormat, WirePolicy
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from commlayer.wire.codecs import Codec

pytestmark = pytest.mark.cluster
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def start() -> dist.ProcessGroup:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model everywhere
    dist.init_process_group("gloo")
    return planned_group()


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(24, 65), nn.Tanh(), nn.Linear(65, 24)).to(dtype)


def set_gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Set the gradients of this rank and step, whatever the parameters are; returns their mean over ranks as DDP takes it."""
    means = []
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * step + 10 * index + dist.get_rank())
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        mean = parameter.grad.float() * (1.0 / dist.get_world_size())
        dist.all_reduce(mean)
        means.append(mean)
    return means


def everyones(x: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def flat_main(sharded: ShardedOptimizer) -> list[torch.Tensor]:
    """The whole main parameters of each buffer."""
    mains = everyones(sharded.state_dict()["main"])
    return [torch.cat([of_rank[i] for of_rank in mains]) for i in range(len(mains[0]))]


# Natively


def equals_the_unsharded() -> None:
    group = start()
    plain, model = model_of(), model_of()
    model.load_state_dict(plain.state_dict())
    decayed = [p for p in plain.parameters() if p.dim() > 1], [p for p in plain.parameters() if p.dim() == 1]
    expected = torch.optim.AdamW(
        [{"params": decayed[0], "weight_decay": 0.1}, {"params": decayed[1], "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2
    )
    mine = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    sharded = ShardedOptimizer(
        [{"params": mine[0], "weight_decay": 0.1}, {"params": mine[1], "weight_decay": 0.0, "lr": 3e-2}], ADAMW, group
    )
    assert [each["lr"] for each in sharded.param_groups] == [1e-2, 3e-2]
    for step in range(4):
        for parameter, mean in zip(plain.parameters(), set_gradients(model, step), strict=True):
            parameter.grad = mean
        expected.step()
        sharded.step()
        sharded.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        for got, wanted in zip(values(model), values(plain), strict=True):
            if dist.get_world_size() == 2:  # a + b = b + a
                assert torch.equal(got, wanted)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2)])
def test_natively_as_the_unsharded_optimizer(emulated_cluster: ClusterFactory, nodes: int, ranks: int) -> None:
    emulated_cluster(nodes, ranks).run(equals_the_unsharded)


def trains_alone() -> None:
    start()
    alone = [dist.new_group([rank], backend="commlayer") for rank in range(2)][dist.get_rank()]
    model = model_of()
    sharded = ShardedOptimizer(model.parameters(), ADAMW, alone, parameter_wire="fp8_e4m3!")
    before = values(model)
    model(torch.ones(2, 24)).sum().backward()
    sharded.step()
    flat = torch.cat([value.flatten() for value in values(model)])
    assert torch.equal(sharded.state_dict()["main"][0][: flat.numel()], flat)
    assert not torch.equal(before[0], values(model)[0])


def test_a_group_of_one(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(trains_alone)


# In wire formats


def decoded(main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that every rank is to hold: each block of 128 elements rounded to FP8 once."""
    rows = main.to(dtype).view(-1, 1024)
    codec = Codec(Wire(WireFormat.FP8_E4M3, 1024, Scaling.BLOCK), dtype)
    message = torch.empty(codec.wire_bytes(len(rows)), dtype=torch.uint8)
    codec.encode(rows, message)
    codec.decode(message, out := torch.empty_like(rows))
    return out.view(-1)


def parameters_in_fp8(dtype: torch.dtype) -> None:
    group = start()
    native, coded = model_of(dtype), model_of(dtype)
    coded.load_state_dict(native.state_dict())
    optimizers = [
        ShardedOptimizer(native.parameters(), ADAMW, group),
        ShardedOptimizer(coded.parameters(), ADAMW, group, parameter_wire="fp8_e4m3!"),
    ]
    for step in range(-1, 3):
        if step >= 0:  # before the first step too
            for model, optimizer in zip((native, coded), optimizers, strict=True):
                set_gradients(model, step)
                optimizer.step()
        (main,), (theirs,) = map(flat_main, optimizers)
        assert torch.equal(main, theirs)  # never rounded: the wire leaves no trace in it
        for model, expected in ((native, main.to(dtype)), (coded, decoded(main, dtype))):
            flat = torch.cat([value.flatten() for value in values(model)])
            assert torch.equal(flat, expected[: flat.numel()])
            assert all(torch.equal(other, flat) for other in everyones(flat))
    assert not torch.equal(values(native)[0], values(coded)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_in_fp8(emulated_cluster: ClusterFactory, dtype: torch.dtype) -> None:
    emulated_cluster(2, 2).run(parameters_in_fp8, dtype)


def bytes_of_a_step(dtype: torch.dtype, parameter_wire: str, wire: Any) -> dict[str, int]:
    os.environ["COMMLAYER_PLAN"] = "flat_direct"  # of flat calls only Gloo knows the bytes
    group = start()
    model = nn.Linear(256, 256, bias=False).to(dtype)
    sharded = ShardedOptimizer(model.parameters(), ADAMW, group, wire=wire, parameter_wire=parameter_wire)
    for _ in range(2):  # before the first, ranks compare what they are going to send
        reset_stats()
        set_gradients(model, 0)
        sharded.step()
    found: dict[str, int] = {}
    for each in stats()["groups"]:
        for call in each["calls"]:
            if call["collective"] != "all_reduce" and call["wire_bytes"] is not None:  # what ranks agree on first
                sent = sum(call["wire_bytes"].values())
                found[call["collective"]] = found.get(call["collective"], 0) + sent
    return found


def test_half_the_bytes(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(1, 2)

    def bytes_of(*args: Any) -> dict[str, int]:
        first, second = cluster.run(bytes_of_a_step, *args)
        assert first == second
        return first

    elements = 256 * 256 // 2  # that a rank sends
    native = bytes_of(torch.bfloat16, "native", "native")
    fp8 = bytes_of(torch.bfloat16, "fp8_e4m3!", "bf16!")
    assert native == {"all_gather": 2 * elements, "reduce_scatter": 4 * elements}
    assert fp8 == {"all_gather": elements + 4 * elements // 128, "reduce_scatter": 2 * elements}
    assert bytes_of(torch.float32, "bf16!", "native")["all_gather"] == 2 * elements


def gradients_in_bf16(wire: Any) -> None:
    group = start()
    model = model_of()
    sharded = ShardedOptimizer(model.parameters(), partial(torch.optim.SGD, lr=1.0), group, wire=wire, average=False)
    before = values(model)
    set_gradients(model, 0)
    of_ranks = everyones([parameter.grad for parameter in model.parameters()])
    sharded.step()
    for index, (old, new) in enumerate(zip(before, values(model), strict=True)):
        expected = torch.stack([theirs[index] for theirs in of_ranks]).bfloat16().float().sum(0)
        torch.testing.assert_close(old - new, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(theirs, values(model)[0]) for theirs in everyones(values(model)[0]))
    set_gradients(model, 0)  # once more: what lies behind the last parameter stays zero, for norms and scales
    sharded.reduce_gradients()
    mains = [main for options in sharded.param_groups for main in options["params"]]
    norm = sum(float(theirs) for theirs in everyones(sum(main.grad.square().sum() for main in mains)))
    whole = sum(
        float(torch.stack([theirs[index] for theirs in of_ranks]).bfloat16().float().sum(0).square().sum())
        for index in range(len(of_ranks[0]))
    )
    assert abs(norm - whole) <= 1e-4 * whole


@pytest.mark.parametrize("wire", ["bf16!", WirePolicy((WireFormat.BF16,), in_place=True)], ids=["bf16", "in place"])
def test_gradients_in_bf16(emulated_cluster: ClusterFactory, wire: Any) -> None:
    emulated_cluster(1, 3).run(gradients_in_bf16, wire)


def training_converges(dtype: torch.dtype) -> list[list[float]]:
    """A small regression with parameters natively, and in FP8."""
    group = start()
    found = []
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = torch.tanh(x @ torch.randn(24, 24, generator=torch.Generator().manual_seed(9)))
    first = model_of()
    for parameter_wire in ("native", "fp8_e4m3!"):
        model = copy.deepcopy(first).to(dtype)
        sharded = ShardedOptimizer(model.parameters(), ADAMW, group, wire="bf16!", parameter_wire=parameter_wire)
        losses = []
        for _ in range(60):
            loss = (model(x.to(dtype)).float() - y).square().mean()
            sharded.zero_grad()
            loss.backward()
            sharded.step()
            losses.append(float(loss))
        found.append(losses)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_with_parameters_in_fp8(emulated_cluster: ClusterFactory, dtype: torch.dtype) -> None:
    for native, fp8 in emulated_cluster(1, 2).run(training_converges, dtype):
        assert native[-1] < native[0] / 4
        assert fp8[-1] < native[0] / 4


# State, and what is refused


def state_is_kept() -> None:
    group = start()
    model = nn.ModuleList([model_of(), nn.Linear(3, 3).bfloat16()])  # two dtypes
    options: dict[str, Any] = {"parameter_wire": "fp8_e4m3!"}
    sharded = ShardedOptimizer(model.parameters(), ADAMW, group, **options)
    set_gradients(model, 0)
    sharded.step()
    state = copy.deepcopy(sharded.state_dict())
    assert [main.numel() for main in state["main"]] == [2048, 1024]
    set_gradients(model, 1)
    sharded.step()
    expected = values(model), sharded.state_dict()["main"]
    other = nn.ModuleList([model_of(), nn.Linear(3, 3).bfloat16()])
    restored = ShardedOptimizer(other.parameters(), ADAMW, group, **options)
    restored.load_state_dict(state)
    set_gradients(other, 1)
    restored.step()
    got = values(other), restored.state_dict()["main"]
    for ours, wanted in zip(got, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, wanted, strict=True))
    wrong = everyones(state)[1 - dist.get_rank()]
    with pytest.raises(UsageError, match=r"the state is of shard \([01], 2, .* each rank loads what it saved"):
        restored.load_state_dict(wrong)


def test_state(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(state_is_kept)


def refusals() -> None:
    group = start()
    model = model_of()
    with pytest.raises(TensorError, match=r"expected parameters of float32, .* got torch\.float64"):
        ShardedOptimizer([nn.Parameter(torch.ones(2, dtype=torch.float64))], ADAMW, group)
    with pytest.raises(UsageError, match="nothing to step"):
        ShardedOptimizer([nn.Parameter(torch.ones(2), requires_grad=False)], ADAMW, group)
    with pytest.raises(UsageError, match="comes twice"):
        ShardedOptimizer([*model.parameters(), *model.parameters()], ADAMW, group)
    with pytest.raises(GroupError, match="has backend gloo: make a planned one"):
        ShardedOptimizer(model.parameters(), ADAMW, None, wire="bf16")
    others: Any = [dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]
    with pytest.raises(GroupError, match="of which this rank is a member"):
        ShardedOptimizer(model.parameters(), ADAMW, others)


def test_refusals(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2).run(refusals)

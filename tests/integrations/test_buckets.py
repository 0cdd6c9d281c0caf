"""Gradients in buckets: the sums that synchronise_gradients makes, started in the backward pass, in one order on all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import re
import runpy
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.ddp import plan_ddp
from commlayer.integrations.fsdp import plan_fsdp
from commlayer.integrations.gradients import synchronise_gradients
from commlayer.integrations.groups import planned_group
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.parameter_marks import mark_experts, mark_replicated, mark_split
from commlayer.profiles.errors import DisagreementError, TensorError, UsageError
from commlayer.statistics import reset_stats, stats
from commlayer.testing.plugin import ClusterFactory
from examples import buckets as buckets_module
from examples.bucket_lines import needs_one_order
from examples.buckets import GradientBuckets
from examples.language_model import ModelConfig, MoELanguageModel


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")


class Layers(nn.Module):
    """Layers one after the other, of two dtypes: an expert, one that tp splits, and one that tp's ranks hold whole."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.expert = nn.Linear(8, 8, bias=False)
        self.nothing = nn.Parameter(torch.empty(0, 8))
        mark_experts(self.expert)
        mark_replicated(self.layers[0])
        for part in (self, self.low, *self.layers[1:]):
            mark_split(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.expert(x) + self.low(x.bfloat16()).float() + self.nothing.sum()
        return out


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    out: torch.Tensor = model(torch.randn(5, 8, generator=generator))
    return (out * torch.randn(5, 8, generator=generator)).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def wanted(seeds: list[int], mesh: FoldedMesh | None = None) -> dict[str, torch.Tensor]:
    """The gradients by synchronise_gradients."""
    model = Layers()
    for seed in seeds:
        loss(model, seed).backward()
    synchronise_gradients(model, mesh)
    return gradients(model)


def require_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, same_bits: bool = False) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        unit = 0.0 if same_bits else (2.0**-7 if gradient.dtype is torch.bfloat16 else 1e-6)
        torch.testing.assert_close({name: gradient}, {name: expected[name]}, rtol=unit, atol=unit)


def require_same_everywhere(
    got: dict[str, torch.Tensor], group: dist.ProcessGroup, names: Callable[[str], bool]
) -> None:
    mine = torch.cat([gradient.double().flatten() for name, gradient in sorted(got.items()) if names(name)])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    assert torch.equal(low, high)


# The same sums


def sums(degrees: dict[str, int], bucket_bytes: int, num_micro_batches: int, same_bits: bool) -> None:
    if same_bits:
        os.environ["COMMLAYER_REDUCTION"] = "ordered"
    start()
    with FoldedMesh(degrees) as mesh:
        for step in range(3):  # buffers are used again
            seeds = [1000 * step + 10 * dist.get_rank() + m for m in range(num_micro_batches)]
            expected = wanted(seeds, mesh)
            if step == 0:
                model = Layers()
                buckets = GradientBuckets(model, mesh, bucket_bytes=bucket_bytes)
            model.zero_grad(set_to_none=step != 1)  # None, and zeros in place
            with buckets.accumulating():
                for seed in seeds[:-1]:
                    loss(model, seed).backward()
            loss(model, seeds[-1]).backward()
            buckets.finish()
            found = gradients(model)
            require_close(found, expected, same_bits=same_bits)
            require_same_everywhere(found, mesh.group("dp_cp"), lambda name: name != "expert.weight")
            require_same_everywhere(found, mesh.group("edp"), lambda name: name == "expert.weight")
        buckets.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "degrees", "bucket_bytes", "micro_batches", "same_bits"),
    [
        (1, {}, 1 << 20, 2, True),
        (2, {}, 1 << 20, 1, True),
        (3, {}, 300, 3, True),
        (4, {"tp": 2, "ep": 2}, 1, 1, True),  # a bucket for each parameter
        (4, {"tp": 2, "ep": 2}, 1 << 20, 2, True),
        (4, {"ep": 4, "cp": 2}, 600, 2, False),  # experts have nobody to sum with
        (6, {"tp": 3, "ep": 2}, 600, 1, True),
    ],
)
def test_sums(
    emulated_cluster: ClusterFactory,
    world: int,
    degrees: dict[str, int],
    bucket_bytes: int,
    micro_batches: int,
    same_bits: bool,
) -> None:
    nodes = 2 if world >= 4 else 1
    cluster = emulated_cluster(nodes, world // nodes, mode="loopback")
    cluster.run(sums, degrees, bucket_bytes, micro_batches, same_bits)


def hierarchical() -> set[str]:
    os.environ["COMMLAYER_PLAN"] = "hierarchical"
    start()
    with FoldedMesh({}) as mesh:
        expected = wanted([dist.get_rank()], mesh)
        reset_stats()
        model = Layers()
        buckets = GradientBuckets(model, mesh, bucket_bytes=600)
        loss(model, dist.get_rank()).backward()
        buckets.finish()
        found = gradients(model)
        require_close(found, expected)
        require_same_everywhere(found, mesh.group("stage"), lambda name: True)
        return {
            call["plan"] for group in stats()["groups"] for call in group["calls"] if call["collective"] == "all_reduce"
        }


def test_between_nodes_they_go_by_the_plan(emulated_cluster: ClusterFactory) -> None:
    for plans in emulated_cluster(2, 2, mode="loopback").run(hierarchical):
        assert "hierarchical" in plans


# When they start, and in which order


class Order:
    """Notes the all_reduces that are started, by their number of elements, and what the backward pass computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        call = dist.all_reduce

        def noted(x: torch.Tensor, *rest: object, **named: object) -> object:
            self.seen.append(f"sum of {x.numel()}")
            return call(x, *rest, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(dist, "all_reduce", noted)

    def watch(self, layer: nn.Module, name: str) -> None:
        layer.register_full_backward_pre_hook(lambda *_: self.seen.append(name))


def overlapped(shares: bool) -> list[str]:
    start()
    with FoldedMesh({}) as mesh, pytest.MonkeyPatch.context() as monkeypatch:
        if shares:
            mesh._groups["ep"] = mesh.group("dp_cp")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7))
        buckets = GradientBuckets(model, mesh, bucket_bytes=4 * 36)
        order = Order(monkeypatch)
        for index, layer in enumerate(model):
            order.watch(layer, f"layer {index}")
        with buckets.accumulating():
            model(torch.ones(2, 4)).sum().backward()
        assert order.seen == ["layer 2", "layer 1", "layer 0"]
        order.seen.clear()
        model(torch.ones(2, 4)).sum().backward()
        order.seen.append("finish")
        buckets.finish()
        assert ("finish()" in repr(buckets)) == shares
        return order.seen


@pytest.mark.parametrize("shares", [False, True])
def test_they_start_while_earlier_layers_compute(emulated_cluster: ClusterFactory, shares: bool) -> None:
    # Largest 36 elements: the last layer's bias with nothing (its weight has 42), its weight, the middle layer, the first one.
    layers = ["layer 2", "sum of 7", "sum of 42", "layer 1", "sum of 36", "layer 0", "sum of 25", "finish"]
    for seen in emulated_cluster(1, 2, mode="loopback").run(overlapped, shares):
        if shares:
            assert seen[3:] == ["finish", "sum of 7", "sum of 42", "sum of 36", "sum of 25"]
        else:
            assert [s for s in seen if s.startswith("sum")] == [s for s in layers if s.startswith("sum")]
            assert seen.index("sum of 36") < seen.index("layer 0") < seen.index("finish")
            assert seen.index("sum of 42") < seen.index("layer 1")
            assert seen[-1] == "finish"  # nothing was left for it


def uneven(wire: str | None) -> None:
    """Rank r does not use layer r: it has no gradient there, and starts that bucket, and those behind it, at last."""
    start()
    rank, size = dist.get_rank(), dist.get_world_size()
    with FoldedMesh({}) as mesh:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(size + 1))
        buckets = GradientBuckets(model, mesh, bucket_bytes=1, wire=wire)
        for _ in range(2):
            model.zero_grad()
            backwards = model if rank % 2 else list(model)[::-1]  # also in another order
            total = torch.zeros(())
            for layer in backwards:
                if layer is not model[rank]:
                    total = total + (layer(torch.ones(1, 32)) * (rank + 1)).sum()
            total.backward()
            buckets.finish()
            for index, gradient in enumerate(gradients(model).values()):
                users = sum(r + 1 for r in range(size) if r != index)
                assert torch.equal(gradient, torch.full((32, 32), float(users)))


@pytest.mark.parametrize("wire", [None, "bf16!", "fp8_e4m3!"])
def test_ranks_with_other_gradients(emulated_cluster: ClusterFactory, wire: str | None) -> None:
    emulated_cluster(1, 3, mode="loopback").run(uneven, wire)


def exchanges_in_the_backward_pass() -> None:
    """Ranks meet in every layer's backward pass, while buckets are under way that one rank starts in finish() only."""
    start()
    rank = dist.get_rank()
    with FoldedMesh({}) as mesh:
        ep = GroupCommunicator(planned_group(), "ep")
        model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        buckets = GradientBuckets(model, mesh, bucket_bytes=1, wire="bf16!")
        x = torch.ones(4, 16)
        for index, layer in enumerate(model):
            if (rank, index) != (1, 3):  # the first that the others start
                x = layer(x)
            x = ep.all_to_all(x)
        x.sum().backward()
        buckets.finish()
        assert all(layer.weight.grad is not None for layer in model)


def test_a_rank_that_is_late_holds_nobody_up_in_the_backward_pass(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 4, mode="loopback").run(exchanges_in_the_backward_pass)


def order_over_groups(is_one: bool, wire: str | None) -> list[int]:
    """Experts and dense weights, of two groups, whose gradients come in another order on every other rank."""
    start()
    with FoldedMesh({"ep": 2}) as mesh, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(buckets_module, "needs_one_order", lambda parameters: is_one)
        torch.manual_seed(0)
        experts, dense = (nn.ModuleList(nn.Linear(32, n, bias=False) for n in sizes) for sizes in ((8, 16), (32, 64)))
        mark_experts(experts)
        model = nn.ModuleList([experts[0], dense[0], experts[1], dense[1]])
        buckets = GradientBuckets(model, mesh, bucket_bytes=1, wire=wire)
        seen: list[int] = []
        owner: Any = dist if wire is None else GroupCommunicator
        name = "all_reduce" if wire is None else "all_reduce_in_place"
        call = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            seen.append(arguments[-1].numel())
            return call(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)
        parts = [*experts, *dense] if dist.get_rank() % 2 else [*dense, *experts]
        total = torch.zeros(())
        for part in parts:
            total = total + part(torch.ones(1, 32)).sum()
        total.backward()
        buckets.finish()
        assert all((gradient == (4 if len(gradient) > 16 else 2)).all() for gradient in gradients(model).values())
        return seen


@pytest.mark.parametrize("wire", [None, "bf16!"])
def test_on_one_device_all_groups_have_one_order(emulated_cluster: ClusterFactory, wire: str | None) -> None:
    cluster = emulated_cluster(1, 4, mode="loopback")
    for seen in cluster.run(order_over_groups, True, wire):
        assert seen == [2048, 512, 1024, 256]  # the last registered first


def test_on_the_cpu_groups_do_not_wait_for_each_other(emulated_cluster: ClusterFactory) -> None:
    even, odd, *_ = emulated_cluster(1, 4, mode="loopback").run(order_over_groups, False, None)
    assert even == [512, 256, 2048, 1024]
    assert odd == [2048, 1024, 512, 256]


def test_a_cuda_device_needs_one_order() -> None:
    with FakeTensorMode():
        on_device = [nn.Parameter(torch.empty(3, device="cuda"))]
    assert needs_one_order(on_device)
    assert not needs_one_order(nn.Linear(2, 2).parameters())


# Wire formats


def compressed() -> dict[str, int]:
    start()
    with FoldedMesh({}) as mesh:
        results = {}
        for wire in (None, "bf16!", "fp8_e4m3!"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 33), nn.Linear(33, 31))  # buckets are no multiple of a row
            for overlaps in (False, True):
                model.zero_grad()
                buckets = GradientBuckets(model, mesh, wire=wire) if overlaps else None
                model(torch.full((2, 32), 0.1 * (dist.get_rank() + 1))).square().sum().backward()
                if buckets is None:
                    synchronise_gradients(model, mesh, wire)
                else:
                    buckets.finish()
                    buckets.close()
                results[wire, overlaps] = torch.cat([g.flatten() for g in gradients(model).values()])
        exact = results[None, False]
        for wire, unit in ((None, 1e-6), ("bf16!", 2.0**-7), ("fp8_e4m3!", 2.0**-3)):
            assert (results[wire, True] - exact).abs().max() <= unit * exact.abs().max()
            assert wire is None or not torch.equal(results[wire, True], exact)
        calls = [call for group in stats()["groups"] for call in group["calls"]]
        return {name: sum(call["calls"] for call in calls if name in call["plan"]) for name in ("bf16", "fp8")}


def test_wire_formats(emulated_cluster: ClusterFactory) -> None:
    for found in emulated_cluster(1, 2, mode="loopback").run(compressed):
        assert found == {"bf16": 2, "fp8": 2}


DIFFERING = r"ranks disagree on the wire formats of .*: rank 0 has .*bf16.*, rank 1 has .*native"


def formats_differ() -> None:
    start()
    with FoldedMesh({}) as mesh, pytest.raises(DisagreementError, match=DIFFERING):
        GradientBuckets(nn.Linear(8, 8), mesh, wire="native" if dist.get_rank() else "bf16!")


def test_ranks_that_were_given_different_formats_hear_of_it(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2, mode="loopback").run(formats_differ)


# Steps that go wrong, and other uses


def a_failed_step() -> None:
    """The backward pass raises on all ranks, elsewhere on each."""
    start()
    with FoldedMesh({}) as mesh:
        model = Layers()
        buckets = GradientBuckets(model, mesh, bucket_bytes=300)
        expected = wanted([dist.get_rank()], mesh)

        class Broken(Exception):
            pass

        def fail(*_: object) -> None:
            raise Broken

        for _ in range(2):
            handle = model.layers[dist.get_rank()].register_full_backward_pre_hook(fail)
            model.zero_grad()
            with pytest.raises(Broken):
                loss(model, 99).backward()
            handle.remove()
            with pytest.raises(UsageError, match=r"rank \d: .*came twice before finish\(\).*call reset\(\)"):
                loss(model, 99).backward()
            buckets.reset()
            assert all(parameter.grad is None for parameter in model.parameters())
            loss(model, dist.get_rank()).backward()
            buckets.finish()
            require_close(gradients(model), expected)


def test_a_step_that_failed_leaves_nothing_behind(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 3, mode="loopback").run(a_failed_step)


def one_gives_up(where: str, wire: str | None) -> None:
    """Rank 1 gives the second step up, and rank 0 hears nothing of it."""
    start()
    rank = dist.get_rank()
    with FoldedMesh({}) as mesh:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
        buckets = GradientBuckets(model, mesh, bucket_bytes=32 * 33 * 4, wire=wire)
        for step in range(3):
            model.zero_grad()
            fails = (rank, step, where) == (1, 1, "in the middle")
            if fails:
                handle = model[0].register_full_backward_pre_hook(lambda *_: torch.zeros(2).view(3))
            total = model(torch.full((1, 32), rank + step + 1.0)).sum()
            if (rank, step) != (1, 1):
                total.backward()
                buckets.finish()
            elif not fails:
                buckets.reset()
            else:
                with pytest.raises(RuntimeError, match="invalid for input of size"):
                    total.backward()
                handle.remove()
                buckets.reset()
            given_up = {name: False for name, _ in model.named_parameters()}
            if step == 1:
                given_up = {name: where.startswith("before") or name.startswith("0") for name in given_up}
            for name, parameter in model.named_parameters():
                if (rank, step) == (1, 1):
                    assert parameter.grad is None
                else:
                    assert parameter.grad is not None
                    is_nan = parameter.grad.isnan()
                    assert is_nan.all() if given_up[name] else not is_nan.any(), (step, name)


@pytest.mark.parametrize("wire", [None, "bf16!", "fp8_e4m3!"])
@pytest.mark.parametrize("where", ["before its backward pass", "in the middle"])
def test_nobody_steps_by_what_another_rank_gave_up(
    emulated_cluster: ClusterFactory, where: str, wire: str | None
) -> None:
    emulated_cluster(1, 2, mode="loopback").run(one_gives_up, where, wire)


def other_uses() -> None:
    start()
    rank = dist.get_rank()
    with FoldedMesh({}) as mesh:
        # Without a backward pass: what is there is summed, and what is not is zero.
        used, frozen, unused = (nn.Linear(2, 2) for _ in range(3))
        model = nn.ModuleList((used, frozen, unused))
        frozen.requires_grad_(False)
        used.weight.grad = torch.full((2, 2), rank + 1.0)
        with GradientBuckets(model, mesh) as buckets:
            buckets.finish()
            found = {name: gradient.tolist() for name, gradient in gradients(nn.ModuleList((used, unused))).items()}
            assert found["0.weight"] == [[3.0] * 2] * 2
            assert found["1.bias"] == [0.0] * 2
            assert frozen.weight.grad is None
            assert buckets.fit(model)
            frozen.requires_grad_(True)
            assert not buckets.fit(model)
            frozen.requires_grad_(False)
            # An optimizer steps by them, also when they are clipped.
            optimizer = torch.optim.AdamW(used.parameters(), lr=0.1)
            before = used.weight.detach().clone()
            torch.nn.utils.clip_grad_norm_(used.parameters(), 1.0)
            optimizer.step()
            assert ((used.weight - before).abs() > 0.01).all()
            # A copy has gradients of its own, and no hooks.
            copied = copy.deepcopy(used)
            own = gradients(used)
            for _ in range(2):
                copied(torch.ones(1, 2)).sum().backward()
            assert gradients(copied)["bias"].tolist() == [2.0, 2.0]
            require_close(gradients(used), own, same_bits=True)
        for _ in range(2):  # after close() nobody hears of gradients
            used(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UsageError, match="were closed"):
            buckets.finish()
        buckets.close()
        # Weights that are used twice have one gradient.
        tied = nn.Linear(3, 3, bias=False)
        nn.init.eye_(tied.weight)
        with GradientBuckets(tied, mesh) as buckets:
            tied(tied(torch.ones(1, 3))).sum().backward()
            buckets.finish()
            assert gradients(tied)["weight"].tolist() == [[4.0] * 3] * 3
        # Not kept by its parameters' hooks.
        buckets = GradientBuckets(tied, mesh)
        watched = weakref.ref(buckets)
        del buckets
        gc.collect()
        assert watched() is None
        tied(torch.ones(1, 3)).sum().backward()  # and a hook of nobody does nothing
        sparse = nn.Embedding(4, 2, sparse=True)
        with GradientBuckets(sparse, mesh), pytest.raises(UsageError, match=r"rank \d: .*gradient of weight is sparse"):
            sparse(torch.tensor([1])).sum().backward()


def test_other_uses(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2, mode="loopback").run(other_uses)


def test_fit_compares_what_the_constructor_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    buckets = GradientBuckets(model, None, bucket_bytes=100, wire="bf16")
    assert buckets.fit(model, bucket_bytes=100, wire="bf16")
    assert not buckets.fit(model, bucket_bytes=101, wire="bf16")
    assert not buckets.fit(model, bucket_bytes=100, wire="fp8_e4m3")
    assert not buckets.fit(model, bucket_bytes=100)
    monkeypatch.setenv("COMMLAYER_WIRE", "dp=bf16")
    assert buckets.fit(model, bucket_bytes=100)  # as if it had been written


def test_alone() -> None:
    """Without a mesh: what synchronise_gradients leaves too."""
    model = Layers()
    model.layers[1].requires_grad_(False)
    buckets = GradientBuckets(model, None)
    assert "nobody" in repr(buckets)
    buckets.finish()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("layers.1")
    expected = wanted([3])
    model.zero_grad()
    for _ in range(2):  # as often as anybody likes
        loss(model, 3).backward()
    buckets.finish()
    torch.testing.assert_close(gradients(model.expert), {"weight": 2 * expected["expert.weight"]})
    buckets.reset()
    assert all(parameter.grad is None for parameter in model.parameters())
    buckets.close()
    with pytest.raises(UsageError, match="bucket_bytes must be 1 or more"):
        GradientBuckets(model, None, bucket_bytes=0)


# In a model

CONFIG = ModelConfig(
    router=RouterConfig(num_experts=4, top_k=2, aux_loss_coefficient=0.1),
    hidden=16,
    num_layers=4,
    width=16,
    bucket_bytes=4096,
)


def trained(degrees: dict[str, int], **changes: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = MoELanguageModel(replace(CONFIG, **changes), mesh := FoldedMesh(degrees))  # type: ignore[arg-type]
    tokens = torch.randint(256, (9, 2), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(model.train_step(tokens[:-1], tokens[1:], num_micro_batches=2)))
        optimizer.step()
    found = gradients(model)
    mesh.destroy()
    return losses, found


def in_a_model(degrees: dict[str, int]) -> None:
    """2 samples: with dp 4 half of the ranks have no tokens."""
    start()
    losses, expected = trained(degrees, overlap_gradients=False)
    found = trained(degrees, overlap_gradients=True)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    require_close(found[1], expected)


@pytest.mark.parametrize("degrees", [{"ep": 4}, {"tp": 2, "cp": 2, "ep": 2}, {"pp": 2, "ep": 2}])
def test_in_a_model(emulated_cluster: ClusterFactory, degrees: dict[str, int]) -> None:
    emulated_cluster(2, 2, mode="loopback").run(in_a_model, degrees)


def a_model_goes_on() -> None:
    """After a step that raised, and with other parameters."""
    start()
    with FoldedMesh({"ep": 2}) as mesh:
        model = MoELanguageModel(CONFIG, mesh)
        tokens = torch.randint(256, (9, 2), generator=torch.Generator().manual_seed(1))
        inputs = tokens[:-1], tokens[1:]
        wanted_loss = float(model.train_step(*inputs))
        expected = gradients(model)
        handle = model.layers["1"].register_full_backward_pre_hook(lambda *_: torch.zeros(2).view(3))
        model.zero_grad()
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            model.train_step(*inputs)
        handle.remove()
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(TensorError):
            model.train_step(tokens[:0], tokens[:0])
        assert float(model.train_step(*inputs)) == pytest.approx(wanted_loss)
        require_close(gradients(model), expected)
        assert model.embedding is not None
        model.embedding.requires_grad_(False)
        model.zero_grad()
        model.train_step(*inputs)
        assert model.embedding.weight.grad is None
        assert model.head is not None
        head = {"weight": expected["head.weight"]}
        require_close(gradients(model.head), head)


def test_a_model_goes_on(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 2, mode="loopback").run(a_model_goes_on)


def test_a_model_takes_other_buckets_when_its_configuration_changes() -> None:
    model = MoELanguageModel(CONFIG)
    made = model._gradient_buckets(None)
    assert model._gradient_buckets(None) is made
    model.config = replace(CONFIG, bucket_bytes=1)
    smaller = model._gradient_buckets(None)
    assert smaller is not made
    encoded = model._gradient_buckets("bf16")
    assert encoded is not smaller
    assert model._gradient_buckets("bf16") is encoded


def test_a_copy_of_a_model_has_buckets_of_its_own() -> None:
    model = MoELanguageModel(CONFIG)
    tokens = torch.randint(256, (9, 2), generator=torch.Generator().manual_seed(1))
    model.train_step(tokens[:-1], tokens[1:])
    expected = gradients(model)
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied.train_step(tokens[:-1], tokens[1:])
    require_close(gradients(copied), expected, same_bits=True)
    require_close(gradients(model), expected, same_bits=True)


# Trainers with buckets of their own


def lanes_of_trainers() -> list[str]:
    start()
    model = DistributedDataParallel(nn.Linear(2, 2))
    sharded = nn.Linear(2, 2)
    fully_shard(sharded)
    given: Any = planned_group()
    others = DistributedDataParallel(nn.Linear(2, 2))
    made: list[Any] = [plan_ddp(model), plan_fsdp(sharded), plan_ddp(others, given)]
    model(torch.ones(1, 2)).sum().backward()
    return [group.lane for group in made]


def test_gradients_of_trainers_are_on_lane_dp(emulated_cluster: ClusterFactory) -> None:
    for found in emulated_cluster(1, 2, mode="loopback").run(lanes_of_trainers):
        assert found == ["dp", "dp", ""]  # a group that is given stays as it is


# The documentation


def the_program_of_the_page(path: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def test_the_program_of_the_page(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "overlap.md"
    (program,) = re.findall(r"^```python\n(# train_overlap.py\n.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    path = tmp_path / "train_overlap.py"
    path.write_text(program, "utf-8")
    printed = emulated_cluster(2, 2, mode="loopback").run(the_program_of_the_page, path)[0]
    assert len(re.findall(r"gradient \d", printed)) == 3


@pytest.mark.cluster
def test_two_sets_on_one_group_start_in_the_order_of_the_program(emulated_cluster: ClusterFactory) -> None:
    """One parameter has no gradient on one rank, so that hooks alone would start the sets in another order there."""

    def job() -> list[float]:
        start()
        rank = dist.get_rank()
        torch.manual_seed(0)
        first, second = (nn.ModuleDict({"u": nn.Linear(4, 4), "v": nn.Linear(4, 4)}) for _ in range(2))
        with FoldedMesh({}) as mesh, GradientBuckets(first, mesh) as one, GradientBuckets(second, mesh) as two:
            x = torch.ones(1, 4) * (rank + 1)
            (first["v"](x).sum() + (first["u"](x).sum() if rank else 0)).backward()
            (second["v"](x).sum() * 100 + second["u"](x).sum() * 100).backward()
            two.finish()
            one.finish()
            assert "started in finish()" in repr(one)
            found: list[Any] = [p.grad for p in (*first.parameters(), *second.parameters())]
            return [gradient.flatten()[0].item() for gradient in found]

    assert emulated_cluster(2, 2).run(job) == [[9, 3, 10, 4, 1000, 400, 1000, 400]] * 4


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["replaced", "dropped", "frozen"])
def test_gradients_that_the_program_changes_too_early(emulated_cluster: ClusterFactory, how: str) -> None:
    def job() -> str:
        start()
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with FoldedMesh({}) as mesh, GradientBuckets(model, mesh) as buckets:
            model(torch.ones(1, 4)).sum().backward()
            buckets.finish()
            weight: Any = model[0].weight
            if how == "frozen":
                weight.requires_grad_(False)
            model(torch.ones(1, 4)).sum().backward()
            if how == "replaced":
                assert weight.grad is not None
                weight.grad = weight.grad * 2
            elif how == "dropped":
                model.zero_grad()
            with pytest.raises(UsageError) as caught:
                buckets.finish()
            buckets.reset()
            return str(caught.value)

    for rank, text in enumerate(emulated_cluster(1, 2).run(job)):
        assert text.startswith(f"rank {rank}: ")
        assert ("was frozen since" if how == "frozen" else "was replaced between") in text

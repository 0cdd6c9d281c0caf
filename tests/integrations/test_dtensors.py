"""Functions that take a module or its parameters, given DTensors: they compute what one process does, or refuse them by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which fully_shard loads: once, before ranks are forked
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.clipping import clip_gradients
from commlayer.integrations.ddp import plan_ddp
from commlayer.integrations.fsdp import plan_fsdp
from commlayer.integrations.gradients import reduce_replicated_gradients, synchronise_gradients
from commlayer.integrations.groups import planned_group
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.expert_placer import ExpertPlacer
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.replica_gradients import sum_replica_gradients
from commlayer.integrations.moe.router import RouterConfig
from commlayer.integrations.parameter_marks import mark_experts, mark_replicated
from commlayer.integrations.training_state import TrainingState
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.testing.plugin import ClusterFactory
from examples.attention import ParallelAttention
from examples.buckets import GradientBuckets
from examples.linear import ColumnParallelLinear, RowParallelLinear

ROUTER = RouterConfig(num_experts=4, top_k=2)


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")


def rows(seed: int, num: int = 6) -> torch.Tensor:
    return torch.randn(num, 2, 8, generator=torch.Generator().manual_seed(seed))


def alone() -> GroupCommunicator:
    return GroupCommunicator(None, "tp")


def summing(module: nn.Module, mesh: Any) -> None:
    """Shard over ``mesh``, and sum gradients there, as functions of this package do; torch's default is the mean."""
    sharded: Any = fully_shard(module, mesh=mesh)
    sharded.set_gradient_divide_factor(1.0)


def norm_of(gradients: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([each.double().square().sum() for each in gradients]).sum().sqrt())


def whole(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


class Dense(nn.Module):
    """A norm that every rank of tp has whole, layers that tp splits, and a bias that every rank has whole."""

    def __init__(self, tp: GroupCommunicator, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 16, tp=tp, sequence_parallel=sequence_parallel, bias=True)
        self.down = RowParallelLinear(16, 8, tp=tp, sequence_parallel=sequence_parallel, bias=True)
        mark_replicated(self.norm, over=("tp",) if sequence_parallel else ())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def loss(out: torch.Tensor) -> torch.Tensor:
    return (out - 0.5).square().sum()


# The norm


def fully_sharded(sequence_parallel: bool) -> None:
    """Dense layers over dp_cp beside tp, and experts over edp, as docs/mesh.md has it."""
    start()
    one = nn.ModuleList([Dense(alone(), sequence_parallel), *(expert(number) for number in range(2))])
    with FoldedMesh({"tp": 2, "ep": 2}) as mesh:
        for rank in range(4):
            loss(one[1 + mesh.mapping.group_of("ep", rank).index(rank)](rows(rank))).backward()
        for dp in range(2):
            loss(one[0](rows(10 + dp))).backward()
        wanted = norm_of(whole(parameter.grad) for parameter in one.parameters())

        tp = GroupCommunicator(mesh.group("tp"), "tp")
        model = nn.ModuleDict({"dense": Dense(tp, sequence_parallel), "expert": expert(mesh.rank("ep"))})
        summing(model["dense"], mesh.device_mesh("dp_cp"))
        summing(model["expert"], mesh.device_mesh("edp"))
        mark_experts(model["expert"])
        x = rows(10 + mesh.rank("dp"))
        loss(model["dense"](x.chunk(2)[mesh.rank("tp")] if sequence_parallel else x)).backward()
        loss(model["expert"](rows(dist.get_rank()))).backward()
        reduce_replicated_gradients(model, tp)
        for name in ("norm.weight", "norm.bias", "down.bias"):
            got = whole(model["dense"].get_parameter(name).grad)
            torch.testing.assert_close(got, whole(one[0].get_parameter(name).grad), rtol=1e-4, atol=1e-5)
        before = [whole(parameter.grad) for parameter in model.parameters()]
        norm = clip_gradients(model, mesh, wanted / 4)
        assert not isinstance(norm, DTensor)
        assert float(norm) == pytest.approx(wanted, rel=1e-5)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(whole(parameter.grad), gradient / 4, rtol=1e-5, atol=1e-7)
        assert float(clip_gradients(model, mesh, 1e9)) == pytest.approx(wanted / 4, rel=1e-5)


def expert(number: int) -> nn.Linear:
    torch.manual_seed(100 + number)
    return nn.Linear(8, 8)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_norm_of_fully_shard_with_tp_and_experts(emulated_cluster: ClusterFactory, sequence_parallel: bool) -> None:
    emulated_cluster(2, 2).run(fully_sharded, sequence_parallel)


def experts_by_number() -> None:
    """A MoE layer whose stack of experts fully_shard cuts over edp."""
    start()
    one = MoELayer(8, 12, ROUTER)
    loss(one(torch.cat([rows(rank).flatten(0, 1) for rank in range(4)]))).backward()
    with FoldedMesh({"ep": 2}) as mesh:
        layer = MoELayer(8, 12, ROUTER, mesh=mesh, chunks=1)
        summing(layer.experts, mesh.device_mesh("edp"))
        loss(layer(rows(dist.get_rank()).flatten(0, 1))).backward()
        synchronise_gradients(layer.router, mesh)
        assert layer.experts.w_up.grad is not None
        assert layer.experts.w_up.grad.to_local().shape[0] == 1  # type: ignore[attr-defined]
        wanted = norm_of(whole(parameter.grad) for parameter in one.parameters())
        assert float(clip_gradients(layer, mesh, 1e9)) == pytest.approx(wanted, rel=1e-5)


def of_other_meshes() -> None:
    """HSDP without a folded mesh; torch's own tensor parallelism, whose norms have partial gradients; both kinds at once."""
    start()
    one = plain_model()
    for seed in range(2):
        loss(one(rows(seed).flatten(0, 1))).backward()
    wanted = norm_of(whole(parameter.grad) for parameter in one.parameters())

    hybrid: Any = plain_model()
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    hybrid.set_reshard_after_backward(False)  # the module shows whole parameters without gradients then
    loss(hybrid(rows(dist.get_rank() % 2).flatten(0, 1))).backward()  # the mean of four: half of the sum of two
    assert float(clip_gradients(hybrid, None, 1e9)) == pytest.approx(wanted / 2, rel=1e-5)

    with FoldedMesh({"tp": 2}) as mesh:
        for is_sharded in (False, True):
            model: Any = parallelize_module(
                plain_model(),
                mesh.attention_mesh["tp"],
                {"0": SequenceParallel(), "1": ColwiseParallel(), "3": RowwiseParallel()},
            )
            if is_sharded:
                summing(model, mesh.attention_mesh["dp"])
            loss(tensor_parallel(model, rows(mesh.rank("dp")).flatten(0, 1), mesh.rank("tp"))).backward()
            assert any(each.is_partial() for each in model[0].weight.grad.placements) or is_sharded
            if not is_sharded:
                synchronise_gradients(model, mesh)  # over dp_cp: each rank's own part
            assert float(clip_gradients(model, mesh, 1e9)) == pytest.approx(wanted, rel=1e-5)


def plain_model() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def tensor_parallel(model: nn.Module, x: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """SequenceParallel wants dims of batch and sequence, in this order, and takes a plain tensor for this rank's rows."""
    out: torch.Tensor = model(x.chunk(2)[tp_rank].unsqueeze(0)).squeeze(0)
    return out


def test_the_norm_of_experts_by_number_and_of_other_meshes(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2)
    cluster.run(experts_by_number)
    cluster.run(of_other_meshes)


# What is refused


def refused() -> None:
    start()
    with FoldedMesh({"ep": 2}) as mesh:
        model: Any = nn.ModuleDict({"dense": nn.Linear(8, 8), "expert": nn.Linear(8, 8)})
        mark_experts(model["expert"])
        fully_shard(model["dense"], mesh=mesh.device_mesh("dp_cp"))
        fully_shard(model["expert"], mesh=mesh.device_mesh("edp"))
        with pytest.raises(UsageError, match=r"sharded over edp.*call mark_experts\(module\) after it"):
            mesh.gradient_group(model["expert"].weight)
        with pytest.raises(UsageError, match=r"call mark_experts\(module\) after it"):
            mesh.gradient_scale(model["expert"].weight)
        assert mesh.gradient_group(model["dense"].weight) is mesh.dense_gradient_group

        placed = MoELayer(8, 12, ROUTER, mesh=mesh, spare_slots=1)
        fully_shard(placed, mesh=mesh.device_mesh("edp"))  # all of it: the experts are no FSDPModule of their own
        slots = placed.dispatcher.slots
        assert slots is not None
        copies = ExpertPlacement([[0, 1, 2], [2, 3, 0]], 4)
        flat = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu"))
        wrong = nn.Linear(8, 8)
        fully_shard(wrong, mesh=init_device_mesh("cpu", (4,)))
        mark_experts(wrong)
        by_number = {"w_up.0": torch.zeros(12, 8)}
        calls: list[tuple[Callable[[], object], str]] = [
            (
                partial(synchronise_gradients, model, mesh),
                "dense.weight is a DTensor.*reduce_replicated_gradients over tp",
            ),
            (partial(GradientBuckets, model, mesh), "dense.weight is a DTensor.*fully_shard reduces its gradients"),
            (
                lambda: ExpertPlacer(placed, torch.optim.SGD(placed.parameters(), lr=0.1), mesh),
                "experts that FSDP shards cannot be placed",
            ),
            (placed.experts.state_dict, "w_gate is a DTensor.*TrainingState"),
            (lambda: placed.experts.load_state_dict(by_number), "w_gate is a DTensor.*TrainingState"),
            (
                partial(clip_gradients, wrong, mesh, 1.0),
                r"weight is a DTensor over ranks \[0, 1, 2, 3\], of which \[\d, \d\] hold other experts: .*edp",
            ),
            (
                partial(clip_gradients, flat, mesh, 1.0),
                "clip_gradients cannot take .*weight, which belongs to FullyShardedDataParallel",
            ),
            (
                partial(synchronise_gradients, flat, mesh),
                "cannot take .*weight, which belongs to FullyShardedDataParallel",
            ),
            (partial(GradientBuckets, flat, mesh), "cannot take .*weight, which belongs to FullyShardedDataParallel"),
            (
                lambda: TrainingState(flat, torch.optim.SGD(flat.parameters(), lr=0.1), mesh),
                "TrainingState cannot take .*weight",
            ),
        ]
        for call, words in calls:
            with pytest.raises(UsageError, match=f"(?s){words}"):
                call()
        slots.placement = copies
        with pytest.raises(UsageError, match="sum_replica_gradients takes plain parameters, but w_gate is a DTensor"):
            sum_replica_gradients(placed)
    with FoldedMesh({"tp": 2}) as mesh:
        tp = GroupCommunicator(mesh.group("tp"), "tp")
        norm, column = nn.LayerNorm(8), ColumnParallelLinear(8, 8, tp=tp)
        mark_replicated(norm)
        for module in (norm, column):
            fully_shard(module, mesh=mesh.device_mesh("stage"))
        with pytest.raises(
            UsageError, match=r"reduce_replicated_gradients over ranks \[\d, \d\] takes plain parameters, but weight"
        ):
            reduce_replicated_gradients(norm, tp)
        with pytest.raises(UsageError, match=r"(?s)weight is split over tp by hand.*takes them for one.*dp_cp"):
            clip_gradients(column, mesh, 1.0)


def test_what_cannot_take_a_dtensor_names_it(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(refused)


# What works


def loaded_layers() -> None:
    """Whole weights given to, and gathered from, layers that fully_shard spreads over dp_cp beside tp."""
    start()
    one = Dense(alone(), True)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    attention = ParallelAttention(8, 4, 2, tp=alone(), kind="tensor", generator=torch.Generator().manual_seed(1))
    with FoldedMesh({"tp": 2}) as mesh:
        tp = GroupCommunicator(mesh.group("tp"), "tp")
        model, parallel = Dense(tp, True), ParallelAttention(8, 4, 2, tp=tp, kind="tensor")
        for module in (model, parallel):
            fully_shard(module, mesh=mesh.device_mesh("dp_cp"))
        for name in ("up", "down"):
            source: Any = getattr(one, name)
            layer: Any = getattr(model, name)
            layer.load_full(source.weight.detach(), source.bias.detach())
            assert isinstance(layer.weight, DTensor)
            assert torch.equal(layer.full_weight(), source.weight)
            assert torch.equal(layer.full_bias(), source.bias)
        parallel.load_full(attention.full_weights())
        for name, weight in parallel.full_weights().items():
            assert torch.equal(weight, attention.full_weights()[name]), name
        x = rows(4)
        got = parallel(x.chunk(2)[tp.rank])
        torch.testing.assert_close(got, attention(x).chunk(2)[tp.rank], rtol=1e-4, atol=1e-5)


def planned_hooks() -> None:
    """plan_fsdp and plan_ddp over dp, around torch's own tensor parallelism."""
    start()
    plan: Any = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    one = plain_model()
    torch.stack([loss(one(rows(seed).flatten(0, 1))) for seed in range(2)]).mean().backward()
    wanted = {name: whole(parameter.grad) for name, parameter in one.named_parameters()}
    with FoldedMesh({"tp": 2}) as mesh:
        dp = planned_group(mesh.group("dp"))
        x = rows(mesh.rank("dp")).flatten(0, 1)
        sharded = parallelize_module(plain_model(), mesh.attention_mesh["tp"], plan)
        fully_shard(sharded, mesh=mesh.attention_mesh["dp"])
        plan_fsdp(sharded, dp)
        loss(sharded(x)).backward()
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), wanted[name], rtol=1e-4, atol=1e-5)

        local = parallelize_module(plain_model(), mesh.attention_mesh["tp"], plan)
        _pre_dp_module_transform(local)  # torch's way to DTensors under DistributedDataParallel
        wrapped = DistributedDataParallel(local, process_group=mesh.group("dp"))
        plan_ddp(wrapped, dp)
        loss(wrapped(x)).backward()
        for name, parameter in local.named_parameters():
            part = parallelize_module(plain_model(), mesh.attention_mesh["tp"], plan).get_parameter(name)
            gradient = wanted[name]
            if isinstance(part, DTensor) and part.placements[0].is_shard():
                gradient = gradient.chunk(2, part.placements[0].dim)[mesh.rank("tp")]  # type: ignore[attr-defined]
            torch.testing.assert_close(whole(parameter.grad), gradient, rtol=1e-4, atol=1e-5)


def test_layers_are_loaded_and_hooks_planned(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2)
    cluster.run(loaded_layers)
    cluster.run(planned_hooks)


# Checkpoints


class Mixture(nn.Module):
    def __init__(self, mesh: FoldedMesh | None, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(8, 5)
        self.moe = MoELayer(8, 12, ROUTER, mesh=mesh, chunks=1, seed=seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.moe(x))
        return out


def sharded_checkpoint(folder: str, is_saved: bool) -> dict[str, torch.Tensor]:
    start()
    with FoldedMesh({"ep": 2}) as mesh:
        model = Mixture(mesh, seed=0 if is_saved else 9)
        fully_shard(model.dense, mesh=mesh.device_mesh("dp_cp"))
        fully_shard(model.moe.experts, mesh=mesh.device_mesh("edp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = TrainingState(model, optimizer, mesh)
        if is_saved:
            loss(model(rows(dist.get_rank()).flatten(0, 1))).backward()
            synchronise_gradients(model.moe.router, mesh)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(rows(dist.get_rank()).flatten(0, 1))  # leaves whole parameters in sight
            save_checkpoint({"training": state}, checkpoint_id=folder)
        else:
            load_checkpoint({"training": state}, checkpoint_id=folder)
        return {name: whole(tensor).clone() for name, tensor in state.state_dict().items()}


def test_a_checkpoint_of_shards_is_loaded_anywhere(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = emulated_cluster(2, 2).run(sharded_checkpoint, folder, True)
    every = {name: tensor for of_rank in saved for name, tensor in of_rank.items()}
    assert {name for name in every if re.search(r"w_up\.\d", name)} == {
        f"{kind}.moe.experts.w_up.{expert}{key}"
        for expert in range(4)
        for kind, key in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq"))
    }
    model = Mixture(None, seed=3)
    alone = TrainingState(model, torch.optim.AdamW(model.parameters(), lr=1e-2), None)
    load_checkpoint({"training": alone}, checkpoint_id=folder)
    found = alone.state_dict()
    assert found.keys() == every.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, every[name]), name
    for loaded in emulated_cluster(2, 2).run(sharded_checkpoint, folder, False):
        assert all(torch.equal(tensor, every[name]) for name, tensor in loaded.items())


def by_hand(saved: dict[str, torch.Tensor]) -> None:
    """A state of whole tensors, put together by hand, is taken by each rank's shards."""
    start()
    with FoldedMesh({"ep": 2}) as mesh:
        model = Mixture(mesh, seed=1)
        fully_shard(model.dense, mesh=mesh.device_mesh("dp_cp"))
        fully_shard(model.moe.experts, mesh=mesh.device_mesh("edp"))
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh).load_state_dict(saved)
        assert isinstance(model.dense.weight, DTensor)
        assert torch.equal(whole(model.dense.weight), saved["model.dense.weight"])
        rows_here = whole(model.moe.experts.w_down)
        for place, number in enumerate(model.moe.experts.numbers):
            assert torch.equal(rows_here[place], saved[f"model.moe.experts.w_down.{number}"])


def test_a_state_of_whole_tensors_is_loaded_into_shards(emulated_cluster: ClusterFactory) -> None:
    model = Mixture(None, seed=4)
    saved = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), None).state_dict()
    emulated_cluster(2, 2).run(by_hand, {name: tensor.clone() for name, tensor in saved.items()})

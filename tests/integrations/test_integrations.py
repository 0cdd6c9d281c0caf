"""DDP's hook and FSDP2's comm objects: the user's own group is Gloo's, parameters and gradients go through another one."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from commlayer.integrations import (
    FoldedMesh,
    MoELayer,
    PlannedAllGather,
    PlannedReduceScatter,
    RouterConfig,
    all_reduce_hook,
    plan_ddp,
    plan_fsdp,
    planned_group,
)
from commlayer.profiles.errors import CollectiveTimeoutError, GroupError, UsageError
from commlayer.statistics import stats
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster


def start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model everywhere
    dist.init_process_group("gloo")


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))


def train(model: torch.nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Train on data that differ between ranks; the parameters after each step, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    history = []
    for _ in range(steps):
        loss = model(torch.randn(6, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history += [whole(parameter).clone() for parameter in model.parameters()]
    return history


def whole(parameter: torch.Tensor) -> torch.Tensor:
    gather = getattr(parameter, "full_tensor", None)  # a DTensor after fully_shard
    return gather().detach() if gather else parameter.detach()


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(one, other), f"parameter {index} differs by {(one - other).abs().max()}"


class Recorder:
    """Runs a job's collectives as torch does, and notes on which group each was called."""

    def __init__(self, *names: str) -> None:
        self.groups: dict[str, list[Any]] = {name: [] for name in names}
        for name in names:
            setattr(dist, name, self.spy(name, getattr(dist, name)))  # in a forked rank: nobody else sees it

    def spy(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.groups[name].append(kwargs.get("group"))
            return original(*args, **kwargs)

        return call


# DistributedDataParallel


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1)])
def test_the_hook_gives_the_bits_of_ddp_without_a_hook(
    emulated_cluster: ClusterFactory, nodes: int, ranks_per_node: int
) -> None:
    def job() -> int:
        start()
        model = small_model()
        expected = train(DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1e-4))
        group = dist.new_group()
        hooked = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # several buckets, in flight together
        assert plan_ddp(hooked, group) is group
        recorder = Recorder("all_reduce")
        assert_same(train(hooked), expected)
        assert set(recorder.groups["all_reduce"]) == {group}
        return len(recorder.groups["all_reduce"])

    num_calls = emulated_cluster(nodes, ranks_per_node).run(job)
    assert min(num_calls) > 3, "one bucket a step would not test buckets"


def test_the_hook_with_accumulated_and_unused_gradients(emulated_cluster: ClusterFactory) -> None:
    def steps(model: Any) -> list[torch.Tensor]:
        unused = torch.nn.Linear(2, 2)
        model = DistributedDataParallel(torch.nn.ModuleList([model, unused]), find_unused_parameters=True)
        if hooked:
            plan_ddp(model, dist.new_group())
        model.module.forward = lambda x: model.module[0](x)
        generator = torch.Generator().manual_seed(dist.get_rank())
        with model.no_sync():
            model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        assert unused.weight.grad is None
        return [parameter.grad for parameter in model.module[0].parameters()]

    hooked = False

    def job() -> None:
        nonlocal hooked
        start()
        model = small_model()
        expected = steps(copy.deepcopy(model))
        hooked = True
        assert_same(steps(model), expected)

    emulated_cluster(2, 1).run(job)


def test_a_hook_that_does_not_average_is_noticed(emulated_cluster: ClusterFactory) -> None:
    """The comparison above can fail."""

    def job() -> None:
        start()
        model = small_model()
        expected = train(DistributedDataParallel(copy.deepcopy(model)))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        hooked = DistributedDataParallel(model)
        hooked.register_comm_hook(alone, all_reduce_hook)  # averages over one rank: plan_ddp would refuse it
        with pytest.raises(AssertionError, match="differs by"):
            assert_same(train(hooked), expected)
        with pytest.raises(GroupError, match=r"ranks \[[01]\], but DistributedDataParallel .* ranks \[0, 1\]"):
            plan_ddp(DistributedDataParallel(small_model()), alone)

    emulated_cluster(2, 1).run(job)


def test_experts_that_differ_between_ranks_are_refused(emulated_cluster: ClusterFactory) -> None:
    """DDP overwrites them by rank 0's, and would average their gradients with those of other experts."""

    def job() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        mesh = FoldedMesh({"ep": 2})
        model = nn.Sequential(nn.Linear(8, 8), MoELayer(8, 4, RouterConfig(num_experts=4, top_k=1), mesh=mesh))
        unmarked = copy.deepcopy(model)
        with pytest.raises(UsageError, match=r"given 1\.experts\.w_gate, which is other experts' on other ranks"):
            plan_ddp(DistributedDataParallel(unmarked))
        names = [name for name, parameter in model.named_parameters() if getattr(parameter, "is_expert", False)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        plan_ddp(DistributedDataParallel(model))
        alone = MoELayer(8, 4, RouterConfig(num_experts=4, top_k=1), mesh=FoldedMesh({"ep": 1}))
        plan_ddp(DistributedDataParallel(alone))  # every rank has all experts

    emulated_cluster(2, 1).run(job)


# FSDP2


def shard(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1)])
def test_comm_objects_give_the_bits_of_fsdp2_without_them(
    emulated_cluster: ClusterFactory, nodes: int, ranks_per_node: int
) -> None:
    def job() -> None:
        start()
        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        model = small_model()
        expected = train(shard(copy.deepcopy(model), **options))
        group = dist.new_group()
        planned = shard(model, **options)
        assert plan_fsdp(planned, group) is group
        recorder = Recorder("all_gather_into_tensor", "reduce_scatter_tensor")
        assert_same(train(planned), expected)
        gathers, scatters = recorder.groups.values()
        assert set(gathers) == set(scatters) == {group}
        assert len(gathers) >= 2 * len(scatters) > 3, "each layer is gathered forward and backward"

    emulated_cluster(nodes, ranks_per_node).run(job)


def test_comm_objects_in_hsdp_use_the_shard_dimension(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = small_model()
        expected = train(shard(copy.deepcopy(model), mesh=mesh))
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        planned = shard(model, mesh=mesh)
        plan_fsdp(planned, groups[dist.get_rank() // 2])
        assert_same(train(planned), expected)

    emulated_cluster(2, 2).run(job)


def test_comm_objects_refuse_other_ranks(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        world = dist.new_group()
        model = shard(small_model(), mesh=init_device_mesh("cpu", (2,)))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        plan_fsdp(model, alone)
        with pytest.raises(GroupError, match=r"ranks \[[01]\], but this FSDPModule .* ranks \[0, 1\]"):
            model(torch.zeros(1, 8))
        with pytest.raises(GroupError, match="FSDPModule"):
            PlannedReduceScatter(alone)(torch.zeros(1), torch.zeros(2), world, dist.ReduceOp.SUM)
        PlannedAllGather(alone).check(alone)

    emulated_cluster(2, 1).run(job)


def test_a_module_on_several_meshes_keeps_their_groups(emulated_cluster: ClusterFactory) -> None:
    """torch takes no custom communication there, as of a block whose experts are on a mesh of their own."""

    def sharded(model: torch.nn.Module, experts_mesh: FSDPMeshInfo) -> torch.nn.Module:
        experts = set(model[2].parameters())  # type: ignore[index]

        def place(parameter: torch.nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(Shard(0), experts_mesh) if parameter in experts else None

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=place)
        return model

    def job() -> str:
        start()
        experts_mesh = FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), "cpu"), shard_mesh_dim=0)
        model, said = small_model(), io.StringIO()
        expected = train(sharded(copy.deepcopy(model), experts_mesh))
        with contextlib.redirect_stderr(said):
            plan_fsdp(sharded(model, experts_mesh), dist.new_group())
        assert_same(train(model), expected)
        return said.getvalue()

    said, nothing = emulated_cluster(2, 1).run(job)
    assert "plan_fsdp leaves 1 of 1 FSDP modules as they are" in said
    assert "of backend gloo, which are not planned" in said
    assert not nothing


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(UsageError, match=r"wrapped in DistributedDataParallel, got Linear"):
        plan_ddp(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no module of this Sequential .* call torch\.distributed\.fsdp\.fully_shard"):
        plan_fsdp(small_model())


# On the backend: what the functions make for themselves


def close_to(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def moved() -> set[tuple[tuple[int, ...], str, str]]:
    """Ranks of the group, collective and plan of everything that this rank's planned groups have moved."""
    return {
        (tuple(group["ranks"]), call["collective"], call["plan"])
        for group in stats()["groups"]
        for call in group["calls"]
    }


@pytest.mark.parametrize("plan", ["flat", "hierarchical", "pipelined:2"])
def test_gradients_and_parameters_on_the_backend(emulated_cluster: ClusterFactory, plan: str) -> None:
    check: Callable[..., None] = assert_same if plan == "flat" else close_to

    def job() -> set[Any]:
        os.environ["COMMLAYER_PLAN"] = plan
        start()
        model = small_model()
        expected = train(DistributedDataParallel(copy.deepcopy(model)))
        hooked = DistributedDataParallel(copy.deepcopy(model))
        assert dist.get_backend(plan_ddp(hooked)) == "commlayer"
        check(train(hooked), expected)
        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        expected = train(shard(copy.deepcopy(model), **options))
        planned = shard(model, **options)
        assert dist.get_backend(plan_fsdp(planned)) == "commlayer"
        check(train(planned), expected)
        assert dist.get_backend() == "gloo"
        return moved()

    name = plan.replace(":", "×")
    for seen in emulated_cluster(2, 2).run(job):
        assert {(ranks, collective) for ranks, collective, _ in seen} == {
            ((0, 1, 2, 3), collective) for collective in ("all_reduce", "all_gather", "reduce_scatter")
        }
        assert {used for _, _, used in seen} == {name}


def test_each_rank_gets_the_planned_group_of_its_own_group(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[int]:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        if dist.get_rank() in (1, 2):
            dist.new_group([1, 2], use_local_synchronization=True)  # now ranks are in different numbers of groups
        group = planned_group(mesh.get_group("dp"))
        total = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(total, group=group)
        assert total.item() == (11.0 if dist.get_rank() < 2 else 1100.0)
        return dist.get_process_group_ranks(group)

    assert emulated_cluster(2, 2).run(job) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_all_ranks_for_one_are_fewer_for_another(emulated_cluster: ClusterFactory) -> None:
    """Each gets what it asked for: no rank makes a group while another still waits to hear of it."""

    def job() -> list[int]:
        os.environ["COMMLAYER_TIMEOUT_S"] = "20"
        start()
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        return dist.get_process_group_ranks(planned_group(alone if dist.get_rank() else None))

    assert emulated_cluster(2, 1).run(job) == [[0, 1], [1]]


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_timeout(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        os.environ["COMMLAYER_TIMEOUT_S"] = "1"
        start()
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["over"])
            return
        try:
            with pytest.raises(
                CollectiveTimeoutError, match=r"rank 0: ranks \[0, 1\] did not all come to make planned"
            ):
                planned_group()
        finally:
            store.set("over", "")

    emulated_cluster(2, 1).run(job)


def test_a_group_of_others_is_refused(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        with pytest.raises(GroupError, match="init_process_group first"):
            planned_group()
        start()
        others: Any = [dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]
        with pytest.raises(GroupError, match=r"rank [01] passed planned_group\(\) a group that it is not in"):
            planned_group(others)

    emulated_cluster(2, 1).run(job)

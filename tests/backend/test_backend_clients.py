"""The parts of torch that build on a process group, on this backend and on Gloo: the same numbers.

Every client runs three times: on gloo, on commlayer with flat calls (bit-equal), and on commlayer with one plan for every
call to which it applies (equal up to the order of sums). Models are tiny; ranks hold different data, and weights where
a rank's own are meant, so that misrouted bytes change a number.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import await_others
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import commlayer
import commlayer.backend.create  # ranks are forked: what is imported here they need not import
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

Numbers = dict[str, list[float]]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


def batch(step: int, rows: int = 6) -> torch.Tensor:
    """This rank's input of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 8, generator=generator)


def weights(module: nn.Module) -> list[float]:
    """All weights of this rank, exactly."""
    found = []
    for parameter in module.parameters():
        data = parameter.detach()
        found += (data.to_local() if isinstance(data, DTensor) else data).double().flatten().tolist()
    return found


def train(model: Any, steps: int = 3, sync: Callable[[int], Any] = lambda step: nullcontext()) -> list[float]:
    """A few steps; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        with sync(step):
            loss = model(batch(step)).square().mean()
            loss.backward()
        if not isinstance(sync(step), nullcontext):
            continue
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def fresh() -> Tiny:
    torch.manual_seed(7)
    return Tiny()


def three_ways(
    cluster: ClusterFactory,
    job: Callable[[], Numbers],
    planned: tuple[str, ...] | None,
    nodes: int = 2,
    ranks_per_node: int = 2,
) -> None:
    """``planned``: collectives of which the last run must have planned some; None: no such run."""

    def on(backend: str, plan: str | None) -> tuple[Numbers, list[str]]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        if plan is not None:
            os.environ["COMMLAYER_PLAN"] = plan
        dist.init_process_group(backend, timeout=timedelta(seconds=40))
        numbers = job()
        rows = [row for group in commlayer.stats()["groups"] for row in group["calls"]]
        dist.destroy_process_group()
        return numbers, [row["collective"] for row in rows if row["plan"] != "flat"]

    emulated = cluster(nodes=nodes, ranks_per_node=ranks_per_node)
    expected = emulated.run(on, "gloo", None)
    flat = emulated.run(on, "commlayer", None)
    plans = None if planned is None else emulated.run(on, "commlayer", "hierarchical")
    for rank in range(nodes * ranks_per_node):
        assert expected[rank][0]
        assert flat[rank][1] == []
        assert [name for name, values in expected[rank][0].items() if flat[rank][0][name] != values] == []
        if plans is None or planned is None:
            continue
        assert set(planned) <= set(plans[rank][1])
        for name, values in expected[rank][0].items():
            rounding = 1e-3 if "fp16" in name else 1e-6
            assert plans[rank][0][name] == pytest.approx(values, rel=1e-4, abs=rounding), (rank, name)


def test_ddp(emulated_cluster: ClusterFactory) -> None:
    def job() -> Numbers:
        found: Numbers = {}
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "static": {"static_graph": True},
            "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003},  # several buckets
        }
        for name, kwargs in options.items():
            model = DistributedDataParallel(fresh(), **kwargs)
            found[f"{name} losses"], found[name] = train(model), weights(model)
        hooks: dict[str, tuple[Any, Any]] = {
            "fp16": (None, default_hooks.fp16_compress_hook),
            "powersgd": (
                powerSGD_hook.PowerSGDState(
                    None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
                ),
                powerSGD_hook.powerSGD_hook,
            ),
        }
        for name, (state, hook) in hooks.items():
            model = DistributedDataParallel(fresh())
            model.register_comm_hook(state, hook)
            found[name] = train(model, steps=5) + weights(model)
        model = DistributedDataParallel(fresh())
        found["no_sync"] = train(model, 4, lambda step: nullcontext() if step % 2 else model.no_sync()) + weights(model)
        model = DistributedDataParallel(nn.Linear(8, 4))
        with Join([model]):  # ranks have different numbers of batches
            for step in range(1 + dist.get_rank()):
                model(batch(step)).sum().backward()
        found["join"] = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4)))
        found["objects"] = [float(len(converted))]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {"rank": dist.get_rank()})
        told: list[Any] = [None, None] if dist.get_rank() else ["a", 3.0]
        dist.broadcast_object_list(told, src=0)
        scattered: list[Any] = [None]
        dist.scatter_object_list(
            scattered, [10.0 * r for r in range(len(everyone))] if dist.get_rank() == 0 else None, src=0
        )
        found["objects"] = [float(each["rank"]) for each in everyone] + [float(told[1] or 0), float(scattered[0])]
        return found

    three_ways(emulated_cluster, job, ("all_reduce", "broadcast"))


def test_power_sgd_with_several_buckets(emulated_cluster: ClusterFactory) -> None:
    """Its callbacks issue collectives while the backward pass issues others. On Gloo itself this hangs or worse: callbacks
    run on Gloo's threads there, so that ranks issue in different orders."""

    def job() -> list[float]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        dist.init_process_group("commlayer", timeout=timedelta(seconds=20))
        model = DistributedDataParallel(fresh(), bucket_cap_mb=0.0003)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, steps=8)
        return weights(model)

    first, *others = emulated_cluster(nodes=2, ranks_per_node=2).run(job)
    assert all(weights_there == first for weights_there in others)


def test_a_failure_inside_ddps_backward_is_an_error(emulated_cluster: ClusterFactory) -> None:
    """C++ takes the future: what went wrong must arrive there as an error, with its text."""

    def job() -> str:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PROFILE"] = "none"
        dist.init_process_group("commlayer", timeout=timedelta(seconds=20))
        model = DistributedDataParallel(nn.Linear(8, 4))
        train(model, 2)
        loss = model(batch(9)).sum()
        await_others(1)
        if dist.get_rank() == 1:
            os._exit(3)
        with pytest.raises(RuntimeError, match="rank 1 died: its process has ended") as error:
            loss.backward()
        return str(error.value)

    outcomes = emulated_cluster(nodes=1, ranks_per_node=2).run(job, check=False, grace_s=30)
    assert "all_reduce #" in outcomes[0].value


def test_fully_sharded(emulated_cluster: ClusterFactory) -> None:
    def job() -> Numbers:
        found: Numbers = {}
        options: dict[str, dict[str, Any]] = {
            "fsdp1": {},
            "shard_grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
            "hsdp1": {
                "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
                "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
            },
        }
        for name, kwargs in options.items():
            model = FullyShardedDataParallel(fresh(), device_id=torch.device("cpu"), use_orig_params=True, **kwargs)
            found[name] = train(model) + weights(model)
        meshes = {
            "fsdp2": init_device_mesh("cpu", (4,)),
            "hsdp2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        }
        for name, mesh in meshes.items():
            sharded = fresh()
            for layer in (sharded.first, sharded.last):
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            found[name] = train(sharded) + weights(sharded)
        return found

    three_ways(emulated_cluster, job, ("all_gather", "reduce_scatter"))


def test_tensors_over_meshes(emulated_cluster: ClusterFactory) -> None:
    """Tensor parallel, DTensor's redistributions, functional collectives and their gradients."""

    def job() -> Numbers:
        found: Numbers = {}
        mesh = init_device_mesh("cpu", (4,))
        model = fresh()
        model.norm = nn.Identity()  # type: ignore[assignment]
        parallelize_module(model, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found["tensor parallel"] = losses + weights(model)

        torch.manual_seed(2)
        whole = torch.randn(10, 6)  # 4 ranks do not divide it
        placed: Any = distribute_tensor(whole, mesh, [Shard(0)])
        moved = placed.redistribute(mesh, [Shard(1)])
        found["shard"] = moved.to_local().flatten().tolist()
        found["replicate"] = moved.redistribute(mesh, [Replicate()]).to_local().flatten().tolist()
        found["matmul"] = (placed.t() @ placed).full_tensor().flatten().tolist()

        rank, size = dist.get_rank(), dist.get_world_size()
        x = batch(3, rows=4).requires_grad_()
        splits = [[1, 0, 2, 1], [2, 2, 0, 0], [0, 0, 1, 3], [1, 1, 1, 1]]
        sent, received = splits[rank], [row[rank] for row in splits]
        swapped = functional.all_to_all_single_autograd(x, received, sent, mesh.get_group())
        gathered = functional.all_gather_tensor_autograd(x, 0, mesh.get_group())
        scattered = functional.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, mesh.get_group())
        (swapped.square().sum() + scattered.square().sum()).backward()
        assert x.grad is not None
        found["autograd"] = x.grad.flatten().tolist() + swapped.flatten().tolist() + scattered.flatten().tolist()
        group = mesh.get_group()
        found["functional"] = [
            *functional.all_reduce(x.detach(), "max", group).flatten().tolist(),
            *functional.broadcast(x.detach(), 1, group).flatten().tolist(),
            *functional.all_reduce_coalesced([x.detach()], "avg", group)[0].flatten().tolist(),
            *functional.all_gather_into_tensor_coalesced([x.detach(), x.detach()[0]], group)[1].flatten().tolist(),
            *functional.reduce_scatter_tensor_coalesced([gathered.detach()], "sum", [0], group)[0].flatten().tolist(),
        ]
        assert size == 4
        return found

    three_ways(emulated_cluster, job, ("all_gather", "all_reduce"))


def test_pipeline_and_checkpoints(emulated_cluster: ClusterFactory) -> None:
    folder = tempfile.mkdtemp()

    def job() -> Numbers:
        found: Numbers = {}
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(9)
        x, wanted, losses = torch.randn(8, 8), torch.randn(8, 8), list[torch.Tensor]()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=wanted, losses=losses)
        else:
            schedule.step()
        found["pipeline"] = [loss.item() for loss in losses] + [
            float(p.grad.sum()) for p in layer.parameters() if p.grad is not None
        ]

        mesh = init_device_mesh("cpu", (size,))
        sharded = fresh()
        fully_shard(sharded, mesh=mesh)
        before = weights(sharded)
        where = os.path.join(folder, dist.get_backend() + os.environ.get("COMMLAYER_PLAN", ""))
        save({"model": sharded.state_dict()}, checkpoint_id=where)
        beside = dist.new_group()  # its thread must not share a group with ours
        state = {"model": sharded.state_dict()}
        handle: Any = async_save(state, checkpoint_id=where + "-async", process_group=beside)
        for _ in range(5):
            dist.barrier()
        handle.result()
        for path in (where, where + "-async"):
            with torch.no_grad():
                for parameter in sharded.parameters():
                    parameter.zero_()
            state = {"model": sharded.state_dict()}
            load(state, checkpoint_id=path)
            sharded.load_state_dict(state["model"])
            assert weights(sharded) == before
        found["checkpoint"] = before
        return found

    three_ways(emulated_cluster, job, ())


def test_compiled(emulated_cluster: ClusterFactory) -> None:
    """Dynamo must see a group as opaque; graphs with collectives in them, and compiled DDP."""

    def job() -> Numbers:
        group = dist.group.WORLD
        assert group is not None

        def step(x: torch.Tensor) -> torch.Tensor:
            y = functional.all_reduce(x * 2, "sum", group)
            z = functional.all_gather_tensor(y + 1, 0, group)
            dist.all_reduce(z)
            return functional.all_to_all_single(z, None, None, group) - 1

        found = {"eager": step(batch(0, rows=4)).flatten().tolist()}
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        found["compiled"] = compiled(batch(0, rows=4)).flatten().tolist()
        assert found["compiled"] == found["eager"]
        model = DistributedDataParallel(fresh())
        found["ddp"] = train(torch.compile(model, backend="aot_eager")) + weights(model)
        return found

    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1))  # ranks are forked: imports happen once
    three_ways(emulated_cluster, job, None, nodes=1, ranks_per_node=2)


def test_the_profiler_shows_collectives_and_plans(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_PLAN="hierarchical")
        dist.init_process_group("commlayer")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            dist.all_reduce(torch.ones(4096))
            dist.barrier()
            dist.all_reduce(torch.ones(4096), async_op=True).wait()
        return [event.name for event in profiler.events() if event.name.startswith("commlayer:")]

    for names in emulated_cluster(nodes=2, ranks_per_node=2).run(job):
        assert names == ["commlayer:all_reduce hierarchical", "commlayer:barrier flat", "commlayer:all_reduce (queued)"]


@contextmanager
def wrong_all_to_all() -> Iterator[None]:
    """Blocks come back in the wrong order, as a wrong plan would leave them."""
    from commlayer.backend.group import CommlayerGroup

    right = CommlayerGroup.all_to_all_single

    def wrong(self: Any, output: torch.Tensor, *rest: Any) -> Any:
        work = right(self, output, *rest)
        output.copy_(output.flip(0))
        return work

    CommlayerGroup.all_to_all_single = wrong
    try:
        yield
    finally:
        CommlayerGroup.all_to_all_single = right


def test_the_comparison_can_fail(emulated_cluster: ClusterFactory) -> None:
    def job() -> Numbers:
        x = torch.arange(4.0) + 10 * dist.get_rank()
        out = torch.empty(4)
        if dist.get_backend() == "gloo":
            dist.all_to_all_single(out, x)
        else:
            with wrong_all_to_all():
                dist.all_to_all_single(out, x)
        return {"out": out.tolist()}

    with pytest.raises(AssertionError):
        three_ways(emulated_cluster, job, ())

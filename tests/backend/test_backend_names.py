"""Torch's decisions by a backend's name and devices, where there is no CUDA: the same as on Gloo. See docs/names.md."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

Found = list[object]


def start(backend: str) -> None:
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    dist.init_process_group(backend)


def as_on_gloo(cluster: ClusterFactory, job: Callable[[], Found]) -> None:
    """Run ``job`` on both backends, on which it finds the same on each rank."""

    def on(backend: str) -> Found:
        start(backend)
        found = job()
        dist.destroy_process_group()
        return found

    there = cluster(nodes=1, ranks_per_node=2)
    assert there.run(on, "commlayer") == there.run(on, "gloo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_the_backend_is_for_devices_that_exist(emulated_cluster: ClusterFactory) -> None:
    """Also with a torch that was built for CUDA, on a machine without: that is known when a group is made."""

    def job() -> None:
        if not torch.backends.cuda.is_built():
            assert dist.Backend.backend_capability["commlayer"] == ["cpu"]
        dist.Backend.backend_capability["commlayer"] = ["cpu", "cuda"]
        start("commlayer")
        assert dist.BackendConfig(dist.Backend("commlayer")).get_device_backend_map() == {"cpu": "commlayer"}
        assert dist.get_backend() == "commlayer"

    emulated_cluster(nodes=1, ranks_per_node=2).run(job)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_sharded_tensors(emulated_cluster: ClusterFactory) -> None:
    """One is gathered, as a table of TorchRec is; a rank without a shard is asked for its device, and for another dtype."""

    def job() -> Found:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        sharded = sharded_tensor.rand(ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(size)]), 10, 4)
        whole = torch.empty(10, 4) if rank == 0 else None
        sharded.gather(0, whole)
        on_first = sharded_tensor.rand(ChunkShardingSpec(0, ["rank:0/cpu"]), 10, 4)
        return [
            None if whole is None else whole.tolist(),
            str(on_first.device),
            str(on_first.to(torch.float64).dtype),
            str(sharded.to(torch.float64).dtype),
        ]

    as_on_gloo(emulated_cluster, job)


def test_the_devices_of_a_group(emulated_cluster: ClusterFactory) -> None:
    """Where objects go, where FSDP1 and distributed checkpoints make tensors of their own, and how long calls may take."""

    def job() -> Found:
        group = dist.group.WORLD
        c10d = dist.distributed_c10d
        return [
            c10d._get_object_coll_device(group),
            str(c10d._get_pg_default_device(group)),
            c10d._get_default_timeout(dist.get_backend(group)),
        ]

    as_on_gloo(emulated_cluster, job)


def test_gradients_of_collectives(emulated_cluster: ClusterFactory) -> None:
    """torch.distributed.nn.functional, whose backward passes are others on NCCL than elsewhere."""

    def job() -> Found:
        from torch.distributed.nn import functional

        rank, size = dist.get_rank(), dist.get_world_size()
        found: Found = []
        weights = torch.arange(1.0, 1 + size)

        def gradient_of(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
            x = torch.arange(4.0 * size).add_(rank).requires_grad_()
            call(x).backward()
            assert x.grad is not None
            found.append(x.grad.tolist())

        gradient_of(lambda x: sum(w * each.sum() for w, each in zip(weights, functional.all_gather(x), strict=True)))
        gradient_of(
            lambda x: (weights[rank] * functional.reduce_scatter(torch.empty(4), list(x.split(4)))).square().sum()
        )
        gradient_of(
            lambda x: sum(
                w * each.square().sum()
                for w, each in zip(
                    weights,
                    functional.all_to_all([torch.empty(4) for _ in range(size)], list(x.split(4))),
                    strict=True,
                )
            )
        )
        gradient_of(lambda x: (weights[rank] * functional.all_reduce(x)).square().sum())
        gradient_of(lambda x: (weights[rank] * functional.broadcast(x * 1, 0)).square().sum())
        with pytest.raises(RuntimeError, match="Backend not supported"):  # of a backward pass that only NCCL has
            gradient_of(lambda x: functional._all_gather_base(torch.empty(4 * size * size), x).sum())
        return found

    as_on_gloo(emulated_cluster, job)

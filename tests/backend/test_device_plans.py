"""Plans for tensors on a device, the simulated one that torch sees: every verb, and training, in many orders of its streams."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from torch import nn
from torch.nn import functional
from training import sharded

import commlayer
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.nccl import Nccl
from commlayer.transport.streams import StreamCall

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)
LAGGING = StreamDelays(chance=0.9)
"""Nearly everything runs only when the host waits."""
SIZES = (1, 37, 1000)

Verb = Callable[[torch.device, int, torch.dtype], list[torch.Tensor]]


def filled(device: torch.device, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small integers, so that sums are exact in any order; other ones on every rank."""
    draw = torch.Generator().manual_seed(17 * dist.get_rank() + seed)
    return torch.randint(-3, 4, (count,), generator=draw).to(dtype).to(device)


def all_reduce(device: torch.device, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    found = []
    for op in OPS:
        if op != dist.ReduceOp.AVG or dtype.is_floating_point:
            x = filled(device, count, dtype)
            dist.all_reduce(x, op)
            found.append(x)
    return found


def all_gather(device: torch.device, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.zeros(dist.get_world_size() * count, dtype=dtype, device=device)
    dist.all_gather_into_tensor(whole, filled(device, count, dtype))
    return [whole]


def reduce_scatter(device: torch.device, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    out = torch.zeros(count, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(out, filled(device, dist.get_world_size() * count, dtype))
    return [out]


def broadcast(device: torch.device, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = filled(device, count, dtype)
    dist.broadcast(x, dist.get_world_size() - 1)
    return [x]


def careless(device: torch.device, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Several calls under way; each tensor is written late, let go of early, and its memory is wanted at once."""
    works, outputs = [], []
    for turn in range(4):
        x = filled(device, count, dtype, turn)
        whole = torch.zeros(dist.get_world_size() * count, dtype=dtype, device=device)
        works.append(dist.all_gather_into_tensor(whole, x, async_op=True))
        outputs.append(whole)
        del x
        torch.full((count,), 5, dtype=dtype, device=device)
    for work in works:
        assert work is not None
        work.wait()
    return outputs


def planned_calls() -> dict[str, int]:
    """How many calls each collective has had by plan."""
    found: dict[str, int] = {}
    for group in commlayer.stats()["groups"]:
        for call in group["calls"]:
            if call["plan"] != "flat":
                found[call["collective"]] = found.get(call["collective"], 0) + call["calls"]
    return found


def every_verb() -> dict[str, int]:
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    for seed, verb in enumerate((all_reduce, all_gather, reduce_scatter, broadcast, careless)):
        for dtype in DTYPES:
            for count in SIZES:
                simulated_device(StreamDelays(seed, LAGGING.chance))
                wanted = verb(torch.device("cpu"), count, dtype)
                before = sum(planned_calls().values())
                got = [each.cpu() for each in verb(device, count, dtype)]
                for a, b in zip(wanted, got, strict=True):
                    assert torch.equal(a, b), (verb.__name__, dtype, count, a, b)
                num_planned = sum(planned_calls().values()) - before
                assert num_planned == len(got) or verb is broadcast, f"{verb.__name__}: {num_planned} of {len(got)}"
    calls = planned_calls()
    dist.destroy_process_group()
    return calls


@pytest.mark.parametrize("plan", ["flat_direct", "hierarchical", "pipelined:3", "leaders"])
def test_every_verb_gives_the_cpus_bits(
    plan: str, emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", plan)
    for calls in emulated_cluster(2, 2).run(every_verb):
        assert {"all_reduce", "all_gather", "reduce_scatter"} <= calls.keys()
        assert ("broadcast" in calls) == (plan != "flat_direct")


def without_a_wait() -> bool:
    """Whether a call whose end nobody waits for gives what it should."""
    device = simulated_device(LAGGING)
    dist.init_process_group("commlayer")
    StreamCall.finish = lambda self: None  # type: ignore[method-assign]
    right = True
    for seed in range(5):
        simulated_device(StreamDelays(seed, LAGGING.chance))
        x = torch.ones(1000, device=device)
        dist.all_reduce(x)
        right = right and (x + 0).eq(dist.get_world_size()).all().item() is True
    return right


def test_a_wait_that_is_left_out_shows(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "hierarchical")
    assert not any(emulated_cluster(2, 2).run(without_a_wait))


# The end


def rank_1_is_late() -> None:
    """Rank 1 comes to each call only when rank 0 has seen that it is not over."""
    device = simulated_device(StreamDelays(chance=0.0))
    dist.init_process_group("commlayer")
    aside = dist.new_group(group_desc="aside")
    world: Any = dist.group.WORLD
    x = torch.ones(64, device=device)
    dist.all_reduce(x)  # connects
    for verb, words in ((dist.all_reduce, "all_reduce by plan flat_direct"), (partial(dist.reduce, dst=0), "reduce, ")):
        if dist.get_rank() == 0:
            work = verb(x, async_op=True)
            with pytest.warns(RuntimeWarning, match=f"rank 0.*{words}.* had not run on simulated"):
                assert not world._ending.is_over_within(0.05)
            dist.barrier(aside)
        else:
            dist.barrier(aside)
            work = verb(x, async_op=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert world._ending.is_over_within(30.0)
        work.wait()
    assert dist.get_rank() or x.eq(8).all().item()
    dist.destroy_process_group()


def test_a_group_is_not_over_while_its_calls_run_on_a_device(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "flat_direct")
    emulated_cluster(1, 2).run(rank_1_is_late)


def test_calls_of_nccls_own_are_waited_for_so_long_and_no_longer() -> None:
    has_run = threading.Event()
    verbs: Any = SimpleNamespace(_wait_for_pending_works=has_run.wait)
    inner = Nccl(verbs, verbs=verbs)
    assert inner.under_way_after(0.01) == "calls of NCCL's own"
    has_run.set()
    assert inner.under_way_after(30.0) == ""


# Messages


def ring() -> bool:
    """Everybody sends to the next rank before it receives, more than any connection holds."""
    device = simulated_device(StreamDelays(chance=0.0), timeout_s=20.0)
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = torch.full((1 << 22,), float(rank), device=device)
    come = torch.zeros(1 << 22, device=device)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, come, (rank - 1) % size)]
    )
    for work in works:
        work.wait()
    return len(works) == 1 and come.eq((rank - 1) % size).all().item() is True


def test_a_batch_of_messages_is_one_block(emulated_cluster: ClusterFactory) -> None:
    assert all(emulated_cluster(1, 3).run(ring))


# Training


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6))


def with_ddp(device: torch.device) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model_of().to(device), bucket_cap_mb=0.004)


def with_fsdp(device: torch.device) -> nn.Module:
    return sharded(model_of().to(device), device)


def losses(make: Callable[[torch.device], nn.Module], device: torch.device) -> list[float]:
    model = make(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(3):
        x, y = torch.randn(8, 24, generator=draw), torch.randint(0, 6, (8,), generator=draw)
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(make: Callable[[torch.device], nn.Module]) -> tuple[list[float], list[list[float]], dict[str, int]]:
    """Losses on the CPU; on the device, with several seeds; and how many calls were planned there."""
    device = simulated_device()
    dist.init_process_group("commlayer")
    on_cpu = losses(make, torch.device("cpu"))
    before = planned_calls()
    on_device = []
    for seed in range(3):
        simulated_device(StreamDelays(seed, chance=0.5))
        on_device.append(losses(make, device))
    calls = {name: count - before.get(name, 0) for name, count in planned_calls().items()}
    dist.destroy_process_group()
    return on_cpu, on_device, calls


@pytest.mark.parametrize(
    ("make", "collectives"), [(with_ddp, {"all_reduce"}), (with_fsdp, {"all_gather", "reduce_scatter"})]
)
def test_training_by_plans_gives_the_cpus_losses(
    make: Callable[[torch.device], nn.Module],
    collectives: set[str],
    emulated_cluster: ClusterFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMLAYER_PLAN", "pipelined:2")
    for on_cpu, on_device, calls in emulated_cluster(2, 2).run(partial(trained, make)):
        assert all(found == pytest.approx(on_cpu, rel=1e-5) for found in on_device)
        assert all(calls.get(name, 0) > 0 for name in collectives), calls

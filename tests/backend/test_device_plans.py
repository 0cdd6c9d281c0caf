"""Plans for tensors on a device, on the simulated one that torch sees: every verb, in many orders of its streams, and training."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.testing import StreamDelays, simulated_device
from commlayer.testing.plugin import ClusterFactory

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)
LAGGING = StreamDelays(chance=0.9, longest_s=0.5)
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
                simulated_device(StreamDelays(seed, LAGGING.chance, LAGGING.longest_s))
                wanted = verb(torch.device("cpu"), count, dtype)
                commlayer.reset_stats()
                got = [each.cpu() for each in verb(device, count, dtype)]
                for a, b in zip(wanted, got, strict=True):
                    assert torch.equal(a, b), (verb.__name__, dtype, count, a, b)
    calls = planned_calls()
    dist.destroy_process_group()
    return calls

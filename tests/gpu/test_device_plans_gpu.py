"""Plans of the backend for CUDA tensors, over NCCL, several ranks on one GPU (`make test-gpu`).

The same verbs run on the simulated device too
(tests/backend/test_device_plans.py). Ranks share a device (on_one_gpu.py), so bytes and order count, not times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_one_gpu import needs_nccl, run_ranks

import commlayer

pytestmark = needs_nccl

OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG)


def filled(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small integers, so that sums are exact in any order, on the CPU."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, (count,), generator=draw).to(dtype)


def every_verb(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 37, 4096):
            everyones = [filled(count, dtype, each) for each in range(size)]
            for op in OPS[: 3 if dtype.is_floating_point else 2]:
                stacked = torch.stack(everyones)
                wanted = stacked.amax(0) if op == OPS[1] else stacked.sum(0)
                wanted = wanted / size if op == OPS[2] else wanted
                x = everyones[rank].cuda()
                dist.all_reduce(x, op)
                assert torch.equal(x.cpu(), wanted.to(dtype)), (op, dtype, count)
            whole = torch.zeros(size * count, dtype=dtype, device="cuda")
            work = dist.all_gather_into_tensor(whole, everyones[rank].cuda(), async_op=True)
            assert work is not None
            torch.full((count,), 5, dtype=dtype, device="cuda")  # wants the input's memory, which is let go of
            work.wait()
            assert torch.equal(whole.cpu(), torch.cat(everyones)), (dtype, count)
            part = torch.zeros(count, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(part, torch.cat([everyones[rank]] * size).cuda())
            assert torch.equal(part.cpu(), torch.stack(everyones).sum(0).to(dtype)), (dtype, count)
            x = everyones[rank].cuda()
            dist.broadcast(x, size - 1)
            assert torch.equal(x.cpu(), everyones[-1]), (dtype, count)
    planned = {
        call["collective"] for group in commlayer.stats()["groups"] for call in group["calls"] if call["plan"] != "flat"
    }
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= planned, planned


@pytest.mark.parametrize("plan", ["flat_direct", "hierarchical", "pipelined:3", "leaders"])
def test_plans_on_one_gpu(plan: str, tmp_path: Path) -> None:
    run_ranks(every_verb, 4, tmp_path, 4, topology="2x2", plan=plan)


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_to_all"])
def test_verbs_of_one_tensor_without_plans(verb: str, tmp_path: Path) -> None:
    """NCCL's backend by itself has not their names."""
    run_ranks(unplanned, 2, tmp_path, verb, profile="none")


def unplanned(rank: int, verb: str) -> None:
    x = torch.tensor([10.0 * rank, 10.0 * rank + 1], device="cuda")
    out = torch.zeros(4 if verb == "all_gather" else 1 if verb == "reduce_scatter" else 2, device="cuda")
    runs: dict[str, Callable[..., object]] = {
        "all_gather": dist.all_gather_into_tensor,
        "reduce_scatter": dist.reduce_scatter_tensor,
        "all_to_all": dist.all_to_all_single,
    }
    runs[verb](out, x)
    wanted = {
        "all_gather": [0.0, 1.0, 10.0, 11.0],
        "reduce_scatter": [10.0 + 2 * rank],
        "all_to_all": [float(rank), 10.0 + rank],
    }[verb]
    assert out.tolist() == wanted

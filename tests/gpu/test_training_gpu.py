"""Programs that train on CUDA tensors by the backend, over NCCL, several ranks on one GPU (`make test-gpu`).

The same programs run on the CPU in the same job, by Gloo's plans: losses have to agree. Ranks share a device
(on_one_gpu.py), so that numbers count, not times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_one_gpu import needs_nccl, run_ranks
from training import MODELS, train

import commlayer

pytestmark = needs_nccl


def losses_are_the_cpus(rank: int, kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_cuda = (train(kind, torch.device(name)) for name in ("cpu", "cuda"))
    assert on_cuda == pytest.approx(on_cpu, rel=1e-4, abs=0)


@pytest.mark.parametrize("plan", ["hierarchical", "pipelined:3"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_training_by_a_plan(kind: str, plan: str, tmp_path: Path) -> None:
    run_ranks(losses_are_the_cpus, 4, tmp_path, kind, topology="2x2", plan=plan)


def by_measured_links(rank: int, kind: str) -> None:
    """Nothing is set: the group measures its links on the device at its first call, and decides by them."""
    losses_are_the_cpus(rank, kind)
    calls = [call for group in commlayer.stats()["groups"] for call in group["calls"]]
    assert sum(call["calls"] for call in calls) > 0, calls


@pytest.mark.parametrize("kind", list(MODELS))
def test_training_by_a_profile_that_is_measured_on_the_device(kind: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run_ranks(by_measured_links, 2, tmp_path, kind, topology="2x1", cache=str(cache), profile="auto")

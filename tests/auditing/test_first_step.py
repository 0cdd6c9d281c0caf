"""A line at the end of a job's first step: which heavy collective stayed flat, and why."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from synthetic_profiles import synthetic_profile

from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

HEAVY, LIGHT = 300_000, 1_000


def step(optimizer: torch.optim.Optimizer, size: int, calls: int, group: dist.ProcessGroup | None) -> None:
    """Some all_reduces of ``size`` floats, and a step of the optimizer."""
    for _ in range(calls):
        dist.all_reduce(torch.ones(size), group=group)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def job(profile: Path, size: int, plan: str, is_ours: bool = True) -> str:
    """Return what a rank says in three steps, of which the first has two calls. ``is_ours``: the default group; else that of
    gradients alone."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": str(profile)} | ({"COMMLAYER_PLAN": plan} if plan else {}))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        dist.init_process_group("commlayer" if is_ours else "gloo")
        group = dist.group.WORLD if is_ours else dist.new_group(backend="commlayer")
        dist.broadcast(torch.ones(4 * size), 0, group=group)  # parameters, before any step
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        step(optimizer, size, 2, group)
        step(optimizer, size, 1, group)
        step(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]), size, 1, group)
    return said.getvalue()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile with too few curves to plan an all_reduce."""
    synthetic_profile(nodes=2, ranks_per_node=2).save(tmp_path / "cluster.json")
    return tmp_path / "cluster.json"


@pytest.mark.parametrize("is_ours", [True, False], ids=["default group", "gradients' group"])
def test_the_heaviest_is_named_once_with_the_reason(
    emulated_cluster: ClusterFactory, profile: Path, is_ours: bool
) -> None:
    said, *others = emulated_cluster(2, 2).run(job, profile, HEAVY, "", is_ours)
    assert said.count("\n") == 1, said
    assert said.startswith(
        "commlayer: in the first step all_reduce over 4 ranks on 2 nodes stayed flat (2 calls, 2.4 MB in all): "
    )
    assert "all_reduce" in said.partition("in all): ")[2], "the reason names the curve that is not there"
    assert others == ["", "", ""]


@pytest.mark.parametrize(("size", "plan"), [(LIGHT, ""), (HEAVY, "flat")], ids=["light", "asked for"])
def test_nothing_is_said_where_it_would_not_matter(
    emulated_cluster: ClusterFactory, profile: Path, size: int, plan: str
) -> None:
    assert emulated_cluster(2, 2).run(job, profile, size, plan) == [""] * 4

"""Tiny Mixtral and Qwen3-MoE, trained with DDP and with FSDP2 on backend commlayer and on Gloo: the same losses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from judged import compare, no_alarms, plans  # noqa: F401  a fixture among them
from tiny_moe import STEPS, Run, Trained, mixtral_config, qwen3_moe_config, train, transformers

from commlayer.emulation import EmulatedCluster

pytestmark = pytest.mark.cluster


def on_two_nodes(run: Run) -> list[Trained]:
    """The results of each of 2 x 2 ranks."""
    _ = transformers().MixtralForCausalLM, transformers().Qwen3MoeForCausalLM  # before the fork: once, not in each rank
    with EmulatedCluster(nodes=2, ranks_per_node=2) as cluster:
        return cluster.run(train, run)


@cache
def on_gloo(run: Run) -> list[Trained]:
    return on_two_nodes(
        replace(run, backend="gloo", plan=None, cache=None, gradients=None, functional=False, break_all_to_all=None)
    )


@pytest.mark.parametrize("config", [mixtral_config, qwen3_moe_config])
def test_spreading_experts_leaves_the_models_computation(config: object) -> None:
    """The reference is right: with each rank holding all experts, without any all_to_all, losses are the same."""
    run = Run(config=config)  # type: ignore[arg-type]
    compare(on_gloo(run), on_two_nodes(replace(run, expert_parallel=False)), steps=STEPS, tolerance=1e-5)


def test_gloo_gives_the_same_bits_twice() -> None:
    compare(on_two_nodes(Run()), on_gloo(Run()), steps=STEPS, tolerance=0)


# Each with its tolerance, relative, and what must have been moved by which plan.
HIERARCHICAL = Run(backend="commlayer", plan="hierarchical")
FLAT = Run(backend="commlayer", plan="flat")
CASES = {
    "ddp flat": (FLAT, 0, {("all_reduce", "flat"), ("all_to_all", "flat")}),
    "ddp moves": (replace(HIERARCHICAL, gradients="gloo"), 0, {("all_to_all", "hierarchical")}),
    "ddp all": (HIERARCHICAL, 1e-6, {("all_reduce", "hierarchical"), ("all_to_all", "hierarchical")}),
    "ddp functional": (replace(HIERARCHICAL, gradients="gloo", functional=True), 0, {("all_to_all", "hierarchical")}),
    "fsdp flat": (
        replace(FLAT, wrapper="fsdp"),
        0,
        {("all_gather", "flat"), ("reduce_scatter", "flat"), ("all_to_all", "flat")},
    ),
    "fsdp all": (
        replace(HIERARCHICAL, wrapper="fsdp"),
        1e-6,
        {("all_gather", "hierarchical"), ("reduce_scatter", "hierarchical"), ("all_to_all", "hierarchical")},
    ),
    "fsdp pipelined": (
        replace(HIERARCHICAL, wrapper="fsdp", plan="pipelined:2"),
        1e-6,
        {("all_gather", "pipelined×2"), ("reduce_scatter", "pipelined×2")},
    ),
    "qwen3 ddp flat": (replace(FLAT, config=qwen3_moe_config), 0, {("all_reduce", "flat"), ("all_to_all", "flat")}),
    "qwen3 ddp all": (
        replace(HIERARCHICAL, config=qwen3_moe_config),
        1e-6,
        {("all_reduce", "hierarchical"), ("all_to_all", "hierarchical")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_gloos(name: str) -> None:
    run, tolerance, moved = CASES[name]
    trained = on_two_nodes(run)
    compare(trained, on_gloo(run), steps=STEPS, tolerance=tolerance)
    for one in trained:
        assert moved <= plans(one.stats)


def test_losses_are_gloos_with_plans_from_a_measured_profile(tmp_path: Path) -> None:
    run = Run(backend="commlayer", cache=str(tmp_path))
    trained = on_two_nodes(run)
    compare(trained, on_gloo(run), steps=STEPS, tolerance=1e-6)
    first, *others = (plans(one.stats) for one in trained)
    assert others == [first] * 3


@pytest.mark.parametrize("run", [Run(), HIERARCHICAL], ids=["gloo", "commlayer"])
@pytest.mark.parametrize("in_pass", ["forward", "backward"])
def test_a_wrong_all_to_all_is_caught(run: Run, in_pass: Literal["forward", "backward"]) -> None:
    """Two peers' blocks change places: the comparison must fail, even with a tolerance a thousand times wider."""
    broken = on_two_nodes(replace(run, break_all_to_all=in_pass))
    assert all(trained.num_misplaced > 0 for trained in broken), "nothing was broken"
    with pytest.raises(AssertionError, match=r"rank \d, step \d: loss"):
        compare(broken, on_gloo(run), steps=STEPS, tolerance=1e-3)

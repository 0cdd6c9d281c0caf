"""Tiny Mixtral and Qwen3-MoE, trained with DDP and with FSDP2 on backend commlayer and on Gloo: the same losses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tiny_moe import STEPS, Run, Trained, mixtral_config, qwen3_moe_config, train, transformers

from commlayer.emulation import EmulatedCluster

pytestmark = pytest.mark.cluster


def on_two_nodes(run: Run) -> list[Trained]:
    """What each of 2 x 2 ranks saw."""
    _ = transformers().MixtralForCausalLM, transformers().Qwen3MoeForCausalLM  # before the fork: once, not in each rank
    with EmulatedCluster(nodes=2, ranks_per_node=2) as cluster:
        return cluster.run(train, run, timeout_s=60)


@cache
def on_gloo(run: Run) -> list[Trained]:
    return on_two_nodes(replace(run, backend="gloo", plan=None, gradients=None, break_all_to_all=None))


def compare(got: list[Trained], expected: list[Trained], *, tolerance: float) -> None:
    """Every rank's loss at every step; ``tolerance`` is relative, 0: the same bits."""
    assert len(got) == len(expected) == 4
    for rank, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert len(one.losses) == len(other.losses) == STEPS
        for step, (loss, wanted) in enumerate(zip(one.losses, other.losses, strict=True)):
            difference = abs(loss - wanted) / abs(wanted)
            assert difference <= tolerance, (
                f"rank {rank}, step {step}: loss {loss}, expected {wanted}: {difference:.1e}"
            )


@pytest.mark.parametrize("config", [mixtral_config, qwen3_moe_config])
def test_spreading_experts_leaves_the_models_computation(config: object) -> None:
    """The reference is right: with each rank holding all experts, without any all_to_all, losses are the same."""
    run = Run(config=config)  # type: ignore[arg-type]
    compare(on_gloo(run), on_two_nodes(replace(run, expert_parallel=False)), tolerance=1e-5)


def test_gloo_gives_the_same_bits_twice() -> None:
    compare(on_two_nodes(Run()), on_gloo(Run()), tolerance=0)


@pytest.mark.parametrize("in_pass", ["forward", "backward"])
def test_a_wrong_all_to_all_is_caught(in_pass: str) -> None:
    broken = on_two_nodes(Run(break_all_to_all=in_pass))  # type: ignore[arg-type]
    assert all(trained.num_misplaced > 0 for trained in broken), "nothing was broken"
    with pytest.raises(AssertionError, match=r"rank \d, step \d: loss"):
        compare(broken, on_gloo(Run()), tolerance=1e-3)

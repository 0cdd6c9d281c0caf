"""DeepSpeed's MoE layers under its engine, on Gloo and planned: the same losses at every step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judged import compare, no_alarms, nothing_is_light, plans, said  # noqa: F401  fixtures among them
from model_size import Size
from tiny_deepspeed import Run, Trained, deepspeed, exchange_as_auto_ep, load, train

from commlayer.integrations import plan_deepspeed_moe
from commlayer.integrations.deepspeed import _planned_forward
from commlayer.profiles.errors import UsageError
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster


def run_all(cluster: Any, run: Run) -> list[Trained]:
    load()
    return cluster.run(train, run)  # type: ignore[no-any-return]


@pytest.mark.trainers
def test_the_backends_name_passes_through(emulated_cluster: ClusterFactory) -> None:
    """Experts over all ranks, without tensor parallelism: DeepSpeed's own calls, planned by the backend."""
    run = Run("commlayer", environment=(("COMMLAYER_PLAN", "hierarchical"),))
    got = run_all(emulated_cluster(2, 2), run)
    expected = run_all(emulated_cluster(2, 2), replace(run, backend="gloo"))
    compare(got, expected, steps=run.steps, tolerance=1e-6)
    for each, without in zip(got, expected, strict=True):
        assert each.lanes == {"ep"}
        assert without.lanes == {None}
        assert {("all_to_all", "hierarchical"), ("all_reduce", "hierarchical")} <= plans(each.stats)


@pytest.mark.trainers
def test_replicated_tokens_go_by_a_communicator(
    emulated_cluster: ClusterFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensor parallelism in the node, experts over the nodes; against DeepSpeed's own three steps in flat calls of the backend,
    because Gloo's all_gather refuses the shapes that its gather_tokens asks for."""
    plan = (("COMMLAYER_PLAN", "pipelined:2"), ("COMMLAYER_PROFILE", "emulated-2x4"))
    run = Run("commlayer", tp=4, ep=2, environment=plan)
    got = run_all(emulated_cluster(2, 4), run)
    (line,) = said(capfd).ours
    assert "planned from profile emulated-2x4; replicated tokens by a Communicator" in line
    stock = replace(run, is_planned=False, environment=(("COMMLAYER_PLAN", "flat"),))
    expected = run_all(emulated_cluster(2, 4), stock)
    compare(got, expected, steps=run.steps, tolerance=1e-6)
    for each, without in zip(got, expected, strict=True):
        moved = plans(each.stats, "Communicator on lane ep")
        assert {collective for collective, _ in moved} == {"all_to_all"}
        assert all(plan.startswith("pipelined") for _, plan in moved)
        assert not plans(without.stats, "Communicator")
    wrong = run_all(emulated_cluster(2, 4), replace(run, steps=2, wrong=True))
    with pytest.raises(AssertionError, match=r"rank \d, step \d: loss"):
        compare(wrong, expected, steps=2, tolerance=1e-3)


@pytest.mark.trainers
def test_the_exchanges_of_auto_ep_are_planned(emulated_cluster: ClusterFactory) -> None:
    load()
    run = Run("commlayer", environment=(("COMMLAYER_PLAN", "hierarchical"),))
    for found in emulated_cluster(2, 2).run(exchange_as_auto_ep, run):
        calls = [call for group in found["groups"] for call in group["calls"] if call["collective"] == "all_to_all"]
        assert [(call["plan"], call["calls"]) for call in calls] == [("hierarchical", 5)]


@pytest.mark.usefixtures("nothing_is_light")
@pytest.mark.parametrize("kind", ["all_to_all", "two_level"])
def test_tokens_of_each_rank_go_by_our_dispatcher(
    emulated_cluster: ClusterFactory, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Two experts on a rank, of which some get no token, and others more than their capacity."""
    size = Size(sequence=16, num_experts=16, top_k=4)
    run = Run("commlayer", ep=8, kind=kind, environment=(("COMMLAYER_PROFILE", "emulated-2x4"),), size=size, steps=10)
    got = run_all(emulated_cluster(2, 4), run)
    planned, *flat = said(capfd).ours
    assert (
        f"over EP 8 by our dispatcher, planned from profile emulated-2x4; the first {kind} × 1 by {kind} as" in planned
    )
    assert len(flat) == (1 if kind == "all_to_all" else 0), (
        "in two levels everything is planned, of which nothing is said"
    )
    assert all(line.startswith("in the first step all_to_all ") for line in flat)
    for each in got:
        assert {(one["dispatcher"], one["kind"]) for one in each.stats["dispatches"]} == {("DeepSpeed", f"{kind} × 1")}
    expected = run_all(emulated_cluster(2, 4), replace(run, backend="gloo"))
    compare(got, expected, steps=run.steps, tolerance=1e-6)
    wrong = run_all(emulated_cluster(2, 4), replace(run, steps=2, wrong=True))
    with pytest.raises(AssertionError, match=r"rank \d, step \d: loss"):
        compare(wrong, expected, steps=2, tolerance=1e-6)


def test_what_is_no_model_of_deepspeeds_is_refused() -> None:
    deepspeed()
    with pytest.raises(UsageError, match="Linear has no MoE layer of DeepSpeed's"):
        plan_deepspeed_moe(torch.nn.Linear(2, 2))
    layer = deepspeed("deepspeed.moe.layer").MoE(8, torch.nn.Linear(8, 8), 2)
    with pytest.raises(UsageError, match=r"call deepspeed.initialize\(\) first"):
        plan_deepspeed_moe(layer)


def test_a_layer_that_sends_in_another_way_is_refused() -> None:
    class Other:
        def forward(self) -> None: ...

    with pytest.raises(UsageError, match="Other does not use _AllToAll, drop_tokens, gather_tokens"):
        _planned_forward(Other, SimpleNamespace())  # type: ignore[arg-type]

"""Megatron-Core's GPT with experts, on its own dispatcher over Gloo and on ours: the same losses at every step."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judged import compare_losses, no_alarms, plans  # noqa: F401  a fixture among them
from model_size import Size
from tiny_megatron import SPEC, Case, Trained, core, job, load

from commlayer.integrations import megatron_moe, plan_megatron_moe
from commlayer.integrations.megatron_chunks import why_in_one_chunk
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "trainers" / "megatron.md"
DROPPING = {"moe_expert_capacity_factor": 0.75}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
WHOLLY_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
EVEN = {"moe_token_dispatcher_type": "allgather"}
"""The stock dispatcher that Gloo can run where experts are sharded: the other one's reduce_scatter has uneven parts."""
FLAT = (
    Case("dropless", steps=20),
    Case("by the layer's spec, gradients beside", by_spec=True, overlap=True),
    Case(
        "by the name of a spec, one layer dense",
        by_name=True,
        kind="auto",
        size=Size(layers=2),
        options={"moe_layer_freq": [0, 1]},
        tolerance=1e-6,
    ),
    Case("dropped by probability, two layers", options=DROPPING, size=Size(layers=2)),
    Case("dropped by position", options=DROPPING | {"moe_token_drop_policy": "position"}),
    Case("padded", options=DROPPING | {"moe_pad_expert_input_to_capacity": True}, tolerance=1e-6),
    Case("tensor parallel, experts too", layout=(2, 2, 2), options=EVEN, tolerance=1e-6),
    Case("tensor parallel, experts not", layout=(2, 4, 1)),
    Case("recomputed", options=RECOMPUTED),
    Case("of BF16", options=BF16),
    Case("shared experts beside", options=SHARED, tolerance=1e-6),
    Case("in chunks", chunks=4, steps=20, tolerance=1e-6),
    Case("in chunks, shared experts beside the first", (2, 4, 1), SHARED, chunks=(1, 3, 3, 1), tolerance=1e-6),
    Case("in chunks, recomputed", chunks=2, options=RECOMPUTED | DROPPING, tolerance=1e-6),
    Case(
        "in chunks, all recomputed, by the layer's spec",
        chunks=2,
        options=WHOLLY_RECOMPUTED,
        tolerance=1e-6,
        by_spec=True,
    ),
    Case("in chunks, sharded experts", layout=(2, 2, 2), chunks=8, options=EVEN, tolerance=1e-6),
)
TWO_NODES = (
    Case("in two levels", layout=(1, 8, 1), kind="two_level", tolerance=1e-6, steps=20),
    Case("gathered", kind="all_gather", tolerance=1e-6),
    Case("auto, with gradients of experts", kind="auto", tolerance=1e-6, options=DROPPING),
    Case("two nodes in chunks", (1, 8, 1), chunks=(1, 3, 3, 1), tolerance=1e-6, steps=20, size=Size(top_k=4)),
    Case("in BF16", layout=(1, 8, 1), wire="bf16!", tolerance=1e-2),
)


Found = dict[str, list[tuple[Trained, Trained]]]


def run(cluster: Any, cases: tuple[Case, ...], **environment: str) -> Found:
    """The results of each rank, stock and planned, by case."""
    load()
    ranks = cluster.run(job, cases, environment, timeout_s=120)
    return {case.name: [rank[place] for rank in ranks] for place, case in enumerate(cases)}


def check(found: Found, cases: tuple[Case, ...]) -> None:
    for case in cases:
        ranks = found[case.name]
        try:
            compare_losses(
                [ours.losses for _, ours in ranks], [stock.losses for stock, _ in ranks], tolerance=case.tolerance
            )
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None
        if case.wire:
            assert any(ours.losses != stock.losses for stock, ours in ranks), "nothing went in another format"
        for stock, ours in ranks:
            assert ours.dispatchers == {"MegatronDispatcher"} != stock.dispatchers
            assert ours.warnings <= stock.warnings
            dispatches = ours.stats["dispatches"]
            assert {ran["dispatcher"] for ran in dispatches} == {"Megatron-Core"}
            assert all(ran["kind"].startswith(case.kind) or case.kind == "auto" for ran in dispatches)
            wanted = case.chunks if isinstance(case.chunks, int) else len(case.chunks)
            assert case.chunks == "auto" or {ran["kind"].split()[2] for ran in dispatches} == {str(wanted)}
            passes = 2 if "recompute_granularity" in case.options else 1
            assert sum(ran["calls"] for ran in dispatches) == case.moe_layers * case.steps * passes


def test_losses_are_the_stock_dispatchers_bit_for_bit(emulated_cluster: ClusterFactory) -> None:
    """Moves and sums of two are exact, so all of training is, forward and backward, at every step."""
    wrong = [replace(case, name=f"wrong {case.name}", steps=3, wrong=True) for case in FLAT if case.steps == 20]
    found = run(emulated_cluster(2, 2), (*FLAT, *wrong), COMMLAYER_PLAN="flat")
    check(found, FLAT)
    assert len(wrong) == 2
    for case in wrong:
        with pytest.raises(AssertionError, match=r"rank \d, step \d: loss"):  # a wrong map of rows is noticed
            check(found, (replace(case, tolerance=1e-3),))


def test_two_nodes_of_four(emulated_cluster: ClusterFactory, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(emulated_cluster(2, 4), TWO_NODES, COMMLAYER_PLAN="hierarchical", COMMLAYER_PROFILE="emulated-2x4")
    check(found, TWO_NODES)
    moved = {pair for ranks in found.values() for _, ours in ranks for pair in plans(ours.stats)}
    assert ("all_reduce", "hierarchical") in moved
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("commlayer: ")]
    assert len([line for line in lines if "Megatron-Core's MoE layers dispatch over EP 8" in line]) == 1
    assert all("from profile emulated-2x4" in line for line in lines), lines


def test_choices_are_those_of_the_map() -> None:
    routing_map = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    probs = torch.tensor([[9.0, 0.25, 0.75], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    indices, weights = megatron_moe._choices(routing_map, probs, 2)
    assert indices.tolist() == [[1, 2], [0, -1], [-1, -1]]
    assert weights.tolist() == [[0.25, 0.75], [0.5, 0.0], [0.0, 0.0]]
    with pytest.raises(TensorError, match="sends a token to 2 experts, expected 1 at most"):
        megatron_moe._choices(routing_map, probs, 1)


def test_what_is_no_model_of_megatrons_is_refused() -> None:
    core("transformer")
    with pytest.raises(UsageError, match="Linear has no MoELayer of Megatron-Core's"):
        plan_megatron_moe(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"takes a model, a list of its chunks, or the ModuleSpec .* got 'local'"):
        plan_megatron_moe("local")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_padding_for_quantization", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("cuda_graph_impl", "local"),
    ],
)
def test_what_needs_megatrons_own_dispatcher_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"Megatron-Core's {name} is {value!r}"):
        megatron_moe.check_config(SimpleNamespace(**{name: value}))


class SwappingLayer(torch.nn.Module):
    """A layer of Megatron-Core 0.20's that in each forward takes a dispatcher of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(transformer_impl="inference_optimized")
        self.token_dispatcher = "stock"


def test_layers_that_choose_their_dispatcher_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that they are given would be lost at their first forward, in silence."""
    monkeypatch.setattr(megatron_moe, "_moe_layer", lambda: SwappingLayer)
    model = torch.nn.Sequential(SwappingLayer())
    with pytest.raises(UsageError, match=r"go back to dispatchers of their own, .* train with 'transformer_engine'"):
        plan_megatron_moe(model)
    assert type(model[0]) is SwappingLayer
    assert model[0].token_dispatcher == "stock"


class Layer:
    """A layer of Megatron's, as far as tokens pass through it."""

    config = SimpleNamespace(fp8=None, fp4=None, delay_wgrad_compute=False)

    def forward(self) -> None: ...

    dispatch = routed_experts_compute = combine = forward


class Own(Layer):
    def combine(self) -> None: ...


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (Layer, {}, None),
        (Own, {}, "Own has a combine of its own"),
        (Layer, {"fp8": "hybrid"}, "recipes of FP8 and FP4"),
        (Layer, {"fp4": "e2m1"}, "recipes of FP8 and FP4"),
        (Layer, {"delay_wgrad_compute": True}, "weight gradients of one pass"),
    ],
)
def test_a_layer_says_why_its_tokens_go_in_one_chunk(kind: type, options: dict[str, Any], why: str | None) -> None:
    layer = kind()
    layer.config = SimpleNamespace(**vars(Layer.config) | options)
    found = why_in_one_chunk(layer, Layer)
    assert found == why or (found is not None and why is not None and why in found)
    assert why_in_one_chunk(layer, object) == "this Megatron-Core's MoELayer has no routed_experts_compute"


def test_chunks_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core("transformer")
    monkeypatch.setattr(megatron_moe, "_moe_layer", lambda: Layer)
    layer = Layer()
    vars(layer).update(config=SimpleNamespace(fp8="hybrid"), token_dispatcher=None)
    with pytest.raises(UsageError, match=r"chunks=4 cannot be had, recipes of FP8 and FP4 .*: leave chunks out"):
        megatron_moe._Dispatchers("auto", 4, None).give_to_layer(layer)
    with pytest.raises(UsageError, match="chunks must be auto, 1, 2, 4 or 8"):
        plan_megatron_moe(torch.nn.Linear(2, 2), chunks=3)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_moe_experts", None, r"is for models with experts \(--num-experts\)"),
        ("transformer_impl", "inference_optimized", "train with 'transformer_engine'"),
        ("transformer_impl", "another", "makes layers with 'local' or 'transformer_engine'"),
        ("heterogeneous_block_specs", True, "makes layers with False"),
        ("experimental_attention_variant", "dsa", r"call plan_megatron_moe\(\) in the model_provider instead"),
    ],
)
def test_layers_of_another_list_are_refused(name: str, value: object, words: str) -> None:
    megatron_spec = import_module(SPEC[0])
    asked = {"num_moe_experts": 8, "transformer_impl": "local", name: value}
    with pytest.raises(UsageError, match=words):
        megatron_spec._check_layers(SimpleNamespace(**asked))


def test_the_page_names_the_spec() -> None:
    words = re.findall(r"--spec (\S+) (\S+)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert words == [SPEC]

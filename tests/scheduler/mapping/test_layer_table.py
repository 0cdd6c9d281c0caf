"""The table of a layer's operations: everything that is said of a layer follows from its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from commlayer.profiles.errors import InternalError
from commlayer.scheduler.mapping import catalog, clusters, flops, layer_table, layer_work, layers, memory, parameters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import WHOLE, Exchange, LayerCut, LayerOp, Product, Saved, Weight
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON
from commlayer.scheduler.mapping.step_collectives import layer_backward, layer_forward
from commlayer.scheduler.programs import Compute, Issue

_softmax = layer_table._softmax  # the kind to which rows are added below


def _indexed(model: ModelShape, cut: LayerCut, scores: Any) -> Iterator[LayerOp]:
    """Attention with one more projection, whose output all tp ranks need, and keep unless norms are made again."""
    yield LayerOp(
        "indexer",
        weights=(Weight("sharded", WHOLE, model.hidden * 128),),
        products=(Product("token", model.hidden, 128),),
        saved=(Saved(128, frozenset({"layernorm"})),),
        remade=frozenset({"layernorm"}),
    )
    yield LayerOp(
        "index", exchange=Exchange("index", "tp", "all_gather", 128 * cut.tp), remade=frozenset({"layernorm"})
    )
    yield from _softmax(model, cut, scores)


def _forget() -> None:
    """Drop what is remembered of layers."""
    caches: tuple[Any, ...] = (
        layer_table.layer_table,
        parameters._layer,
        memory.kept_elements,
        layer_work._layer_work,
        layer_work._order_of,
        flops.forward,
    )
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def _no_tables() -> Iterator[None]:
    """Nothing that an attention changes is remembered before or after."""
    _forget()
    yield
    _forget()


@pytest.mark.usefixtures("_no_tables")
def test_a_new_kind_of_attention_is_rows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = catalog.load("mixtral-8x7b")
    job = Job(model=model, gpus=16, global_batch=16, sequence=4096)
    setup, again = Setup(gpus=16, tp=4, ep=4), Setup(gpus=16, tp=4, ep=4, recompute="layernorm")
    cut = parameters.cut_of(setup, MEGATRON)
    estimator = Estimator(job, clusters.load("h100-eos"), MEGATRON)
    plain = estimator.work(setup, True)
    held = parameters.layer_parameters(model, setup, MEGATRON, True)
    plain_flops = flops.forward(model, 4096).total
    kept = [memory.kept_elements(model, way, cut) for way in ("none", "layernorm")]
    with monkeypatch.context() as patched:
        patched.setattr(layer_table, "_softmax", _indexed)
        _forget()
        assert parameters.layer_parameters(model, setup, MEGATRON, True) == {
            **held,
            "dp_cp": held["dp_cp"] + model.hidden * 128,
        }
        more_flops = model.layers * 2 * model.hidden * 128
        assert flops.forward(model, 4096).total == pytest.approx(plain_flops + more_flops, rel=1e-12)
        more = [memory.kept_elements(model, way, cut).token for way in ("none", "layernorm")]
        assert more == [kept[0].token + 128, kept[1].token]
        estimator = Estimator(job, clusters.load("h100-eos"), MEGATRON)
        work = estimator.work(setup, True)
        us = estimator.compute.gemm_us(1024, model.hidden, 128)
        assert work.forward == pytest.approx(plain.forward + us)
        assert work.remade("layernorm") == pytest.approx(plain.remade("layernorm") + us)
        assert "index" in [each.name for each in layer_forward(job, setup, MEGATRON)]
        back = [[each.name for each in layer_backward(job, way, MEGATRON)] for way in (setup, again)]
        assert "index_gradient" in back[0]
        assert "index_again" not in back[0]
        assert "index_again" in back[1]
        forward, backward = estimator.programs(setup, True)
        names = [item.name if isinstance(item, Compute) else item.call.name for item in forward]
        assert names.index("dense") < names.index("index") < names.index("attention")
        assert sum(isinstance(item, Issue) and item.call.name == "index" for item in forward) == 1
        assert sum(isinstance(item, Issue) and item.call.name == "index_gradient" for item in backward) == 1


@pytest.mark.parametrize(
    "row",
    [
        LayerOp("index", exchange=Exchange("index", "tp", "all_gather", 128), overlaps="router"),
        LayerOp("index", exchange=Exchange("index", "tp", "all_gather", 128), is_routed=True),
    ],
)
def test_rows_whose_exchange_no_program_would_send_are_refused(row: LayerOp) -> None:
    with pytest.raises(InternalError, match="the exchange index of a layer would not be sent"):
        layer_work.SegmentOrder((row,))


def test_calls_without_a_place_in_a_layer_are_refused() -> None:
    job = Job(model=catalog.load("mixtral-8x7b"), gpus=16, global_batch=16, sequence=4096)
    setup = Setup(gpus=16, ep=8)
    builder = Estimator(job, clusters.load("h100-eos"), MEGATRON)._parts.builder(setup)
    passes = layers._Passes(builder, setup, True, None)
    calls = layer_forward(job, setup, MEGATRON)
    with pytest.raises(InternalError, match="calls at nowhere have no place"):
        passes.places([*calls, replace(calls[-1], place="nowhere")])

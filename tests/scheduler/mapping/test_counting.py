"""Parameters, FLOPs and memory, against closed forms, and their properties over random models and mappings."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layer_parts import layer_parts
from paper_activations import LayerShape, monta_activation_bytes, monta_parallel_activation_bytes

from commlayer.profiles.errors import GroupError, UsageError
from commlayer.scheduler.mapping import catalog, clusters, flops, layer_table, memory, parameters
from commlayer.scheduler.mapping.hardware import GPUS
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_table import LayerCut
from commlayer.scheduler.mapping.layer_work import expert_rows
from commlayer.scheduler.mapping.model import AttentionWindow, LatentAttention, LinearAttention, ModelShape, layer_kinds
from commlayer.scheduler.mapping.parameters import stage_parameters
from commlayer.scheduler.mapping.pipeline_layout import Pipeline
from commlayer.scheduler.mapping.pipeline_orders import order
from commlayer.scheduler.mapping.pipeline_schedule import PipelineSchedule
from commlayer.scheduler.mapping.precisions import Precision, recipe_of
from commlayer.scheduler.mapping.recomputation import MODULES, canonical
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software, with_optimizer
from commlayer.scheduler.mapping.step_collectives import (
    axis_size,
    dispatched_rows,
    layer_backward,
    layer_forward,
    step_exchanges,
)

_software = st.sampled_from((MEGATRON, COMMLAYER))
SHORT_SUMS = dataclasses.replace(MEGATRON, gradient_bytes=2)
_powers = st.sampled_from((1, 2, 4))


@st.composite
def _models(draw: st.DrawFn) -> ModelShape:
    layers = draw(st.integers(4, 12))
    dense_at = (
        tuple(sorted(draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1)))) if draw(st.booleans()) else ()
    )
    dense = len(dense_at) or draw(st.integers(0, 2))
    latent = LatentAttention(draw(st.sampled_from((0, 64))), 32, 16, 8, 16) if draw(st.booleans()) else None
    window = AttentionWindow(draw(st.integers(1, 1024)), draw(st.integers(1, layers)), draw(st.booleans()))
    return ModelShape(
        name="drawn",
        layers=layers,
        hidden=128 * draw(st.integers(1, 4)),
        heads=16,
        kv_heads=draw(st.sampled_from((4, 8, 16))),
        head_dim=draw(st.sampled_from((16, 32))),
        experts=draw(st.sampled_from((8, 16))),
        top_k=draw(st.integers(1, 4)),
        width=64 * draw(st.integers(1, 8)),
        vocabulary=1024,
        shared_width=64 * draw(st.integers(0, 4)),
        dense_layers=dense,
        dense_width=512 if dense else 0,
        dense_at=dense_at,
        window=window if draw(st.booleans()) else None,
        gated_attention=latent is None and draw(st.booleans()),
        vectors=draw(st.integers(0, 9)),
        moe_vectors=draw(st.integers(0, 9)),
        expert_vectors=16 * draw(st.integers(0, 4)),
        end_vectors=draw(st.integers(0, 9)),
        gated=draw(st.booleans()),
        ties_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        latent=latent,
    )


def _setup(**degrees: Any) -> Setup:
    """On as many GPUs as the degrees and ``dp`` ask for; ``edp`` follows."""
    dp = degrees.pop("dp", 1)
    gpus = dp * degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("pp", 1)
    return Setup(gpus=gpus, **degrees)


def _job(model: ModelShape, gpus: int = 1, **rest: Any) -> Job:
    return Job(model=model, gpus=gpus, **({"global_batch": 64, "sequence": 512} | rest))


def per_gpu(model: ModelShape, setup: Setup, software: Software = MEGATRON) -> tuple[int, int]:
    """(dense, expert) parameters of the fullest GPU."""
    fullest = max(parameters.held(model, setup, software), key=lambda each: each.total).elements
    return fullest.split + fullest.whole, fullest.expert


def _states(found: Memory) -> tuple[float, float, float]:
    return found.weights, found.gradients, found.optimizer


# Parameters


@st.composite
def _setups(draw: st.DrawFn, layers: int) -> Setup:
    """Up to three stages, all of which ``held`` lists."""
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    assume(pp * vpp <= layers)
    tp, ep, etp = draw(_powers), draw(_powers), draw(_powers)
    attention, zero = draw(st.sampled_from(("tensor", "ulysses"))), draw(st.integers(0, 3))
    cp = draw(st.sampled_from((1, 2)))
    return _setup(pp=pp, vpp=vpp, tp=tp, cp=cp, ep=ep, etp=etp, dp=ep * etp, attention=attention, zero=zero)


@given(_models(), st.data(), _software)
def test_parameters_of_all_gpus_are_those_of_the_model(
    model: ModelShape, data: st.DataObject, software: Software
) -> None:
    """Each replica counted once."""
    setup = data.draw(_setups(model.layers))
    found = parameters.held(model, setup, software)
    counted = parameters.count(model)
    assert sum(each.elements.expert for each in found) * setup.etp * setup.ep == counted.experts
    second_copy = counted.embedding if model.ties_embeddings and setup.pp > 1 else 0
    dense = sum(each.elements.split * setup.tp + each.elements.whole for each in found)
    assert dense == counted.dense + second_copy
    assert sum(each.stage.layers for each in found) == model.layers
    assert sum(each.stage.dense for each in found) == model.dense_layers
    fullest = max(each.total for each in found)
    assert sum(per_gpu(model, setup, software)) == parameters.held_elements(model, setup, software) == fullest


@given(_models(), st.sampled_from((1, 2, 4, 8, 16)), st.data(), _software)
def test_what_is_held_is_what_is_summed(model: ModelShape, tp: int, data: st.DataObject, software: Software) -> None:
    """On every stage, also where tp exceeds the key-value heads: as many gradients as parameters, over as many ranks as hold
    them. Optimizer states are theirs."""
    setup = data.draw(_setups(model.layers))
    setup = dataclasses.replace(setup, gpus=setup.gpus // setup.tp * tp, tp=tp)
    shards = []
    for each in parameters.held(model, setup, software):
        by_axis: dict[str, int] = {}
        for axis, elements in stage_parameters(model, setup, software, each.stage.number):
            by_axis[axis] = by_axis.get(axis, 0) + elements
        assert sum(by_axis.values()) == each.total
        assert by_axis.get("edp", 0) == each.elements.expert
        over = parameters.replicas(setup, software)
        kept = sum(elements / number for elements, number in zip(each.elements, over, strict=True))
        assert kept == pytest.approx(sum(elements / axis_size(setup, axis) for axis, elements in by_axis.items()))
        shards.append(kept if setup.zero else each.total)
    assert parameters.shard_elements(model, setup, software) == pytest.approx(max(shards))
    found = memory.estimate(_job(model, global_batch=64 * 16), setup, software=software)
    if setup.pp == 1:
        assert found.optimizer == pytest.approx(12 * shards[0])


@pytest.mark.parametrize("software", [MEGATRON, COMMLAYER])
@pytest.mark.parametrize("name", ["internal-352b", "hunyuan-large", "deepseek-v3"])
def test_ulysses_splits_no_ffn(name: str, software: Software) -> None:
    """MegaScale-MoE, section 3.1: it is not gathered for, not split, and not refused for its width."""
    model = catalog.load(name)
    setup = _setup(tp=8, dp=8, ep=8, attention="ulysses")
    job = _job(model, 64)
    for moe in (True, False):
        calls = (*layer_forward(job, setup, software, moe=moe), *layer_backward(job, setup, software, moe=moe))
        assert not [each.name for each in calls if each.place in ("before_ffn", "after_ffn")]
    counted = parameters.count(model)
    tables = (counted.embedding + counted.head) * (1 if software is COMMLAYER else 1 / 8)
    rest = counted.dense - counted.embedding - counted.head
    assert per_gpu(model, setup, software)[0] == pytest.approx(rest + tables)
    odd = dataclasses.replace(model, shared_width=model.shared_width + 1, dense_width=model.dense_width + 1)
    parameters.check(odd, setup, software)
    tensor = _setup(tp=8, dp=8, ep=8)
    assert ("ffn_sum" in [each.name for each in layer_forward(job, tensor, software)]) == (software is MEGATRON)
    if software is MEGATRON:
        with pytest.raises(UsageError, match=r"tp=8: expected a divisor of the (shared|dense) width"):
            parameters.check(odd, tensor, software)


def test_counts_every_part_of_a_small_model_by_hand() -> None:
    model = ModelShape(
        name="tiny", layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, experts=4, top_k=2, width=6, vocabulary=10,
        shared_width=5, dense_layers=1, dense_width=7, qkv_bias=True,
    )  # fmt: skip
    found = parameters.count(model)
    assert (found.embedding, found.head) == (80, 80)
    assert found.attention == 3 * (8 * 8 + 8 + 2 * (8 * 4 + 4) + 8 * 8)
    assert (found.router, found.experts, found.active_experts) == (2 * 32, 2 * 4 * 3 * 48, 2 * 2 * 3 * 48)
    assert (found.shared, found.dense_ffn) == (2 * 3 * 40, 3 * 56)
    assert found.norms == 3 * 16 + 8
    assert found.total == found.dense + found.expert
    assert found.total - found.active == found.experts - found.active_experts


def test_latent_attention_counts_its_projections_and_their_norms() -> None:
    """DeepSeek-V3's attention: 187.1e6 parameters a layer, by its weights' shapes."""
    one = layer_parts(catalog.load("deepseek-v3"))
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert one["sharded"] + one["keys_values"] + one["copied"] == by_hand
    assert one["copied"] == 7168 * (1536 + 576)
    assert one["norms"] == 2 * 7168 + 1536 + 512


def test_a_key_value_head_is_on_several_ranks_where_tp_exceeds_their_number() -> None:
    model = catalog.load("qwen3-235b-a22b")  # 4 key-value heads
    keys = layer_parts(model)["keys_values"] * model.layers
    for software in (MEGATRON, COMMLAYER):
        four, eight = (parameters.held(model, Setup(gpus=8, tp=tp), software)[0].elements for tp in (4, 8))
        if software is MEGATRON:  # one head each
            assert (four.split - keys / 4) / 2 == eight.split - keys / 4
            assert eight.whole == four.whole
        else:  # all heads
            assert (four.split - keys / 4) / 2 == eight.split
            assert eight.whole == four.whole + keys


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, r"tp=3: expected a divisor of the heads of mixtral-8x7b, 32: take 2 or 4"),
        ({"ep": 3}, r"ep=3: expected a divisor of the experts of mixtral-8x7b, 8: take 2 or 4"),
        ({"ep": 16}, r"experts of mixtral-8x7b, 8: take 8$"),
        ({"etp": 3}, r"etp=3: expected a divisor of the width of an expert of mixtral-8x7b, 14336: take 2 or 4"),
        (
            {"pp": 33},
            r"32 layers do not fill pp=33 × vpp=1 = 33 chunks: .* take at most pp=32, or a pipeline layout with",
        ),
        ({"pp": 16, "vpp": 3}, r"take at most pp=10 or vpp=2$"),
        ({"pp": 64, "vpp": 33}, r"take at most 32 chunks$"),
    ],
)
def test_refuses_degrees_that_do_not_divide_the_model(degrees: dict[str, Any], message: str) -> None:
    setup = Setup(gpus=3 * 11 * 64, **degrees)
    for ask in (parameters.check, parameters.held):
        with pytest.raises(UsageError, match=message):
            ask(catalog.load("mixtral-8x7b"), setup)


def test_refuses_widths_and_key_value_heads_that_tp_does_not_divide() -> None:
    model = dataclasses.replace(catalog.load("mixtral-8x7b"), shared_width=100, heads=36, kv_heads=6)
    with pytest.raises(UsageError, match="divisor or a multiple of the 6 key-value heads"):
        parameters.check(dataclasses.replace(model, shared_width=0), Setup(gpus=4, tp=4))
    with pytest.raises(UsageError, match="shared width"):
        parameters.check(model, Setup(gpus=3, tp=3))
    parameters.check(model, Setup(gpus=3, tp=3, attention="ulysses"))


@given(st.integers(1, 100), st.integers(0, 5), st.integers(1, 12), st.integers(1, 6))
def test_stages_cut_layers_as_evenly_as_they_go(layers: int, dense: int, pp: int, vpp: int) -> None:
    small: dict[str, Any] = {"layers": layers, "dense_layers": min(dense, layers), "dense_width": 64, "published": 0.0}
    model = dataclasses.replace(catalog.load("mixtral-8x7b"), **small)
    if pp * vpp > layers:
        with pytest.raises(UsageError, match="do not fill"):
            parameters.stages(model, Pipeline(pp, vpp))
        return
    found = parameters.stages(model, Pipeline(pp, vpp))
    assert sum(stage.alike for stage in found) == pp
    assert sum(stage.alike * stage.layers for stage in found) == layers
    assert sum(stage.alike * stage.dense for stage in found) == min(dense, layers)
    assert found[0].layers == max(stage.layers for stage in found)
    assert found[0].layers - found[-1].layers <= vpp
    assert -(-layers // pp) <= found[0].layers <= vpp * -(-layers // (pp * vpp))


def _alternating(**rest: Any) -> ModelShape:
    """Eight layers, of which every second one has experts."""
    return dataclasses.replace(
        catalog.load("mixtral-8x7b"),
        layers=8,
        dense_layers=4,
        dense_at=(0, 2, 4, 6),
        dense_width=1024,
        published=0.0,
        **rest,
    )


def test_stages_of_interleaved_layers_have_both_kinds_in_order() -> None:
    model = _alternating()
    assert layer_kinds(model) == (False, True) * 4
    one, *_ = parameters.stages(model, Pipeline(4))
    assert (one.dense, one.sparse, one.kinds) == (1, 1, (False, True))
    chunks = parameters.stages(model, Pipeline(4, 2))  # of one layer each: a stage has all of one kind
    assert [(each.dense, each.sparse) for each in chunks] == [(2, 0), (0, 2), (2, 0), (0, 2)]
    assert [parameters.layers_of(model, Setup(gpus=4, pp=4, vpp=2), stage) for stage in range(4)] == [
        (each.dense, each.sparse) for each in chunks
    ]
    late = dataclasses.replace(model, dense_at=(0, 1, 4, 5))
    assert [each.kinds for each in parameters.stages(late, Pipeline(4))] == [(False, False), (True, True)] * 2


def test_memory_is_that_of_the_fullest_stage_wherever_its_experts_lie() -> None:
    """The third of four stages has the experts: neither the first, nor the second, nor the last."""
    model = _alternating(experts=64, vocabulary=1000)
    late = dataclasses.replace(model, dense_layers=6, dense_at=(0, 1, 2, 3, 6, 7))
    setup = Setup(gpus=4, pp=4)
    held = parameters.held(late, setup)
    assert [each.stage.number for each in held] == [0, 1, 2, 3]
    assert per_gpu(late, setup)[1] == held[2].elements.expert > 0
    assert memory.estimate(_job(late, 4), setup).weights == pytest.approx(2 * held[2].total)


def test_windows_and_chunks_of_attention_by_counting_positions() -> None:
    """Each token meets what is before it in its window, or in its chunk; half a position more or less, as without windows."""
    model = dataclasses.replace(catalog.load("mixtral-8x7b"), layers=4, published=0.0)
    for sequence, size in ((4096, 128), (1000, 300), (512, 512), (512, 4096)):
        for chunked in (False, True):
            seen = [i % size + 1 if chunked else min(i + 1, size) for i in range(sequence)]
            mean = (sum(seen) / sequence + (sequence + 1) / 2) / 2
            windowed = dataclasses.replace(model, window=AttentionWindow(size, 2, chunked))
            found = flops.forward(windowed, sequence).attention_core / (4 * 4 * 32 * 128)
            assert found == pytest.approx(mean, abs=0.5)


def test_linear_attention_counts_by_hand_and_its_core_does_not_grow_with_the_sequence() -> None:
    soft = dataclasses.replace(catalog.load("mixtral-8x7b"), layers=8, published=0.0)
    lightning = dataclasses.replace(soft, linear=LinearAttention("lightning", 7, 64, 64, 96, 96))
    assert parameters.count(lightning).attention == 4096 * (4096 * 2 + 1024 * 2) + 7 * 4096 * 64 * 96 * 5
    delta = dataclasses.replace(soft, linear=LinearAttention("gated_delta", 8, 16, 32, 128, 64, 4))
    keys, values = 16 * 128, 32 * 64
    assert parameters.count(delta).attention == 8 * (
        4096 * (2 * keys + 2 * values + 2 * 32) + values * 4096 + 4 * (2 * keys + values)
    )
    cores = [flops.forward(delta, sequence).attention_core for sequence in (1024, 4096)]
    assert cores[0] == cores[1] == 8 * 8 * 32 * 128 * 64
    for model in (lightning, delta):
        held = parameters.held(model, Setup(gpus=1))[0].elements  # a layer is the mean of the kinds
        assert held.split + held.whole == pytest.approx(parameters.count(model).dense, abs=8 * model.layers)
    with pytest.raises(UsageError, match="cp=2: mixtral-8x7b has layers of linear attention"):
        parameters.check(delta, Setup(gpus=2, cp=2))
    with pytest.raises(UsageError, match="key heads of linear attention of mixtral-8x7b, 16: take 16"):
        parameters.check(delta, Setup(gpus=32, tp=32))


# FLOPs


@given(_models(), st.integers(1, 4096))
def test_flops_are_twice_the_active_parameters_and_the_core(model: ModelShape, sequence: int) -> None:
    """But for the embedding, a look-up, norms and biases, which multiply nothing; a tied head multiplies all the same."""
    found, counted = flops.forward(model, sequence), parameters.count(model)
    bias = 0
    if model.qkv_bias and model.latent is None:
        queries = model.heads * (2 if model.gated_attention else 1)
        bias = model.layers * (queries + 2 * model.kv_heads) * model.head_dim
    bias += model.moe_layers * (model.moe_vectors + model.top_k * model.expert_vectors)
    head = counted.embedding
    products = counted.active - counted.embedding - counted.head + head - counted.norms - bias
    assert found.total - found.attention_core == pytest.approx(2 * products)
    twice, whole = flops.forward(model, 2 * sequence).attention_core, dataclasses.replace(model, window=None)
    assert twice == pytest.approx(2 * found.attention_core) if model.window is None else twice >= found.attention_core
    assert found.attention_core <= flops.forward(whole, sequence).attention_core * (1 + 1e-12)


def test_mixtral_flops_by_hand() -> None:
    found = flops.forward(catalog.load("mixtral-8x7b"), 4096)
    assert found.attention_projections == 2 * 32 * 4096 * (4096 + 2 * 1024 + 4096)
    assert found.attention_core == 32 * (2 * 2 * 4096 * 4096) / 2  # 2 products, 2 FLOPs, s keys of h elements, by half
    assert found.experts == 2 * 32 * 2 * 3 * 4096 * 14336
    assert (found.router, found.head) == (2 * 32 * 4096 * 8, 2 * 4096 * 32000)
    assert found.shared == found.dense_ffn == 0


def test_a_step_is_three_forward_passes() -> None:
    job = _job(catalog.load("mixtral-8x7b"), gpus=8)
    step = flops.of_step(job)
    assert step == 3 * flops.forward(job.model, 512).total * 64 * 512


# Weights, gradients and optimizer state


@given(_models(), _powers, _powers)
def test_without_zero_a_parameter_takes_sixteen_bytes(model: ModelShape, tp: int, ep: int) -> None:
    """MoNTA's table 3, baseline: 16 P1 / (p t) and 16 P2 / (p t e), with BF16 gradients."""
    setup = _setup(tp=tp, ep=ep, dp=ep, zero=0)
    found = memory.estimate(_job(model), setup, software=SHORT_SUMS)
    assert sum(_states(found)) == pytest.approx(16 * sum(per_gpu(model, setup)))
    assert found.optimizer == pytest.approx(6 * found.weights)
    assert found.gradients == pytest.approx(found.weights)
    assert memory.estimate(_job(model), setup).gradients == pytest.approx(2 * found.gradients)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_the_table_of_zero(zero: int, gradient_bytes: int) -> None:
    """docs/counting.md: with d replicas 2 + g + 12/d, 2 + (g + 12)/d, (2 + g + 12)/d bytes."""
    for replicas in (1, 2, 8):
        d = replicas
        expected = {
            0: 2 + gradient_bytes + 12,
            1: 2 + gradient_bytes + 12 / d,
            2: 2 + (gradient_bytes + 12) / d,
            3: (2 + gradient_bytes + 12) / d,
        }
        assert sum(memory.state_bytes_per_parameter(zero, d, gradient_bytes)) == pytest.approx(expected[zero])


def test_limits_of_zero() -> None:
    model = catalog.load("mixtral-8x7b")

    def at(gpus: int, zero: int, **degrees: Any) -> Memory:
        return memory.estimate(
            _job(model, gpus, global_batch=4096), Setup(gpus=gpus, zero=zero, **degrees), software=SHORT_SUMS
        )

    baseline = at(1, 0)
    assert all(at(1, zero) == baseline for zero in (1, 2, 3))  # alone there is nothing to shard over
    assert _states(at(4096, 3)) == pytest.approx([each / 4096 for each in _states(baseline)])
    assert at(4096, 1).weights == baseline.weights
    # Experts are sharded over edp alone: ep = the whole world leaves them whole, whatever ZeRO does.
    experts = parameters.count(model).experts
    for zero in (1, 2, 3):
        assert sum(_states(at(8, zero, ep=8))) > 16 * experts / 8
    assert sum(_states(at(8, 3, ep=8))) == pytest.approx(16 * parameters.count(model).total / 8)


@given(_models(), _powers, _powers, st.sampled_from((2, 4)), st.sampled_from((MEGATRON, COMMLAYER)))
def test_memory_falls_with_zero(model: ModelShape, tp: int, ep: int, gradient_bytes: int, software: Any) -> None:
    software = dataclasses.replace(software, gradient_bytes=gradient_bytes)
    found = [
        memory.estimate(_job(model), _setup(tp=tp, ep=ep, dp=8, zero=zero), software=software) for zero in range(4)
    ]
    totals = [each.total for each in found]
    assert all(more >= less * (1 - 1e-12) for more, less in pairwise(totals))
    assert sum(_states(found[3])) < sum(_states(found[2])) < sum(_states(found[1])) < sum(_states(found[0]))


# Activations


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "phi-3.5-moe"])
def test_kept_elements_are_those_of_megascale(name: str) -> None:
    """Where heads · head_dim = hidden and no expert is shared. ``none`` is what autograd keeps but for kf, as the gating weights
    are applied inside the SwiGLU."""
    model, ranks, tokens = catalog.load(name), 8, 4096
    ulysses = LayerCut(tp=ranks, splits_attention=False)
    layer = LayerShape(tokens, ranks, model.hidden, model.heads, model.kv_heads, model.top_k, model.width)

    def kept(recompute: Any) -> float:
        found = memory.kept_elements(model, recompute, ulysses)
        return tokens / ranks * (found.token + model.top_k * found.row)

    assert kept("megascale") == pytest.approx(layer.selective)
    product = model.top_k * model.width * tokens / ranks
    assert kept("none") == pytest.approx(layer.autograd - product)
    assert kept("none") < layer.paper_all_kept
    assert kept("full") == layer.unit
    tensor = memory.kept_elements(model, "none", LayerCut(tp=ranks))
    assert tensor.token == memory.kept_elements(model, "none", ulysses).token - model.hidden


def test_activations_of_a_stage_by_hand() -> None:
    model = catalog.load("mixtral-8x7b")
    setup = _setup(tp=2, pp=4, ep=4, dp=4, micro_batch=2)
    job = _job(model, 32, sequence=1024)
    found = memory.estimate(job, setup)  # stage 0: 8 layers, 4 micro-batches
    tokens, row = 1024, 4096 + 3 * 14336
    layer = tokens * (4 * 4096 + 4096 + 2048 + 4096) + tokens * 2 * row
    assert found.activations == pytest.approx(2 * layer * 8 * 4)
    dropped = memory.estimate(dataclasses.replace(job, capacity_factor=0.5), setup)
    assert found.activations - dropped.activations == pytest.approx(2 * tokens * row * 8 * 4)
    busy = memory.estimate(dataclasses.replace(job, imbalance=1.5), setup)
    assert busy.activations - found.activations == pytest.approx(2 * tokens * row * 8 * 4)


def test_a_capacity_leaves_no_routing_uneven() -> None:
    """Every expert's rows are filled up or dropped to as many: an imbalance beside it would change nothing, silently."""
    model = catalog.load("mixtral-8x7b")
    ways: list[dict[str, Any]] = [{"imbalance": 1.5}, {"loads": Loads.zipf(model.experts, 1.0)}]
    for uneven in ways:
        with pytest.raises(
            UsageError, match=f"{next(iter(uneven))}: with capacity_factor=1.25 every expert has as many"
        ):
            _job(model, 8, capacity_factor=1.25, **uneven)
        assert _job(model, 8, **uneven).capacity_factor is None


@pytest.mark.parametrize(("capacity_factor", "imbalance"), [(None, 1.0), (None, 1.7), (1.25, 1.0)])
def test_rows_are_those_of_the_step_time(capacity_factor: float | None, imbalance: float) -> None:
    model = catalog.load("mixtral-8x7b")
    setup = _setup(tp=2, ep=2, etp=4, dp=4)
    job = _job(model, 8, capacity_factor=capacity_factor, imbalance=imbalance)
    full, zero = (memory.kept_elements(model, recompute, LayerCut(tp=2, etp=4)).row for recompute in ("none", "full"))
    assert zero == 0
    alone = _job(model, 8, capacity_factor=1e-9)
    difference = memory.estimate(job, setup).activations - memory.estimate(alone, setup).activations
    assert difference == pytest.approx(2 * expert_rows(job, setup) * full * model.layers)


@pytest.mark.parametrize("etp", [1, 4])
def test_who_has_all_experts_is_no_busier_than_others(etp: int) -> None:
    setup = _setup(etp=etp, dp=4)
    even = _job(catalog.load("mixtral-8x7b"), 4)
    uneven = dataclasses.replace(even, imbalance=1.7)
    assert memory.estimate(uneven, setup) == memory.estimate(even, setup)
    assert dispatched_rows(uneven, setup) == dispatched_rows(even, setup) == 2 * 512
    assert expert_rows(uneven, setup) == expert_rows(even, setup) == 2 * 512 * etp


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b"])
def test_buffers_hold_what_context_parallelism_moves(name: str, tp: int) -> None:
    """All that is gathered, or two blocks of the ring. Software that does not gather again keeps it, in every layer."""
    model = dataclasses.replace(catalog.load(name), layers=1, dense_layers=0)
    setup = _setup(tp=tp, cp=8, ep=8)
    job = _job(model, 8 * tp, sequence=1 << 17)
    found = {}
    for software in (COMMLAYER, MEGATRON):
        (context,) = (each for each in layer_forward(job, setup, software) if each.place == "context")
        without = dataclasses.replace(setup, gpus=setup.gpus // 8, cp=1, ep=1)
        alone = _job(model, tp, sequence=1 << 14)
        buffers, kept = (
            getattr(memory.estimate(job, setup, software=software), part)
            - getattr(memory.estimate(alone, without, software=software), part)
            for part in ("buffers", "activations")
        )
        found[software.name] = context.logical_bytes, buffers, kept
    gathered, buffers, kept = found["commlayer"]
    assert (buffers, kept) == (pytest.approx(gathered), pytest.approx(gathered * 7 / 8))
    block, buffers, kept = found["megatron"]
    assert (buffers, kept) == (pytest.approx(2 * block), 0)
    assert gathered == 8 * block


def test_the_last_stage_may_be_the_fullest() -> None:
    wide = dataclasses.replace(catalog.load("mixtral-8x7b"), vocabulary=4_000_000, ties_embeddings=True)
    found = memory.estimate(_job(wide, 4, sequence=4096), _setup(pp=4))
    assert found.activations > 4096 * 4_000_000 * 6


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_in_flight_is_what_the_pipeline_holds(pp: int, vpp: int, rounds: int, data: st.DataObject) -> None:
    micro_batches = rounds * pp if vpp > 1 else data.draw(st.integers(1, 12))
    stage = data.draw(st.integers(0, pp - 1))
    steps = [1 if slot.is_forward else -1 for slot in order(pp, stage, micro_batches, vpp)]
    held = max(accumulate(steps)) / vpp
    assert memory.in_flight(_setup(pp=pp, vpp=vpp), stage, micro_batches) == pytest.approx(held)
    if stage == 0 and vpp > 1 and rounds > 2:
        assert held == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))


@given(
    _models(),
    st.sampled_from(("tp", "cp", "pp", "ep")),
    st.sampled_from((1, 2)),
    st.sampled_from(("none", "megascale", "full")),
    st.integers(0, 3),
    st.sampled_from(("tensor", "ulysses")),
    st.sampled_from((MEGATRON, COMMLAYER)),
)
def test_memory_falls_with_sharding(
    model: ModelShape, axis: str, degree: int, recompute: Any, zero: int, attention: Any, software: Any
) -> None:
    """A degree doubled, at the same data parallelism; more ep at the same number of GPUs."""
    base: dict[str, Any] = {"recompute": recompute, "zero": zero, "attention": attention, "ep": 2, axis: degree}
    if axis == "pp":
        assume(model.layers % (2 * degree) == 0 and model.dense_layers == 0)
    less, more = (_setup(**(base | {axis: each}), dp=8) for each in (degree, 2 * degree))
    before, after = (memory.estimate(_job(model), setup, software=software) for setup in (less, more))
    assert after.total <= before.total * (1 + 1e-12)
    same = {("cp", 0), ("ep", 3)}  # replicas without ZeRO; ZeRO 3 has sharded experts as far as ep would
    if attention == "ulysses":
        same.add(("tp", 0))
    states = [sum(_states(each)) for each in (after, before)]
    assert states[0] < states[1] or ((axis, zero) in same and states[0] <= states[1] * (1 + 1e-12))


@given(_models(), st.sampled_from((1, 2, 4)), st.integers(0, 3))
def test_expert_tensor_parallelism_halves_experts_and_keeps_their_rows_width(
    model: ModelShape, etp: int, zero: int
) -> None:
    setups = [_setup(tp=8, etp=each, zero=zero) for each in (etp, 2 * etp)]
    before, after = (per_gpu(model, setup)[1] for setup in setups)
    assert after == before / 2
    rows = [memory.kept_elements(model, "none", LayerCut(tp=8, etp=each)).row * each for each in (etp, 2 * etp)]
    assert rows[1] - rows[0] == pytest.approx(etp * model.hidden)  # gathered inputs; the products are as many


@given(_models(), st.booleans())
def test_recomputation_keeps_less(model: ModelShape, ulysses: bool) -> None:
    setups = [
        _setup(tp=2, ep=2, pp=2, dp=4, recompute=word, attention="ulysses" if ulysses else "tensor")
        for word in ("none", "megascale", "full")
    ]
    none, megascale, full = (memory.estimate(_job(model), setup) for setup in setups)
    assert none.activations > megascale.activations > full.activations
    assert none.buffers <= megascale.buffers <= full.buffers  # of one layer, what is made again
    assert none.total >= megascale.total >= full.total


@given(_models())
def test_software_that_keeps_gathered_sequences_and_whole_ends_takes_more(model: ModelShape) -> None:
    setup = _setup(tp=4, dp=2)
    ours, megatron = (memory.estimate(_job(model), setup, software=each) for each in (COMMLAYER, MEGATRON))
    assert ours.activations > megatron.activations
    assert ours.weights > megatron.weights
    alone = _setup(dp=2)
    assert memory.estimate(_job(model), alone, software=COMMLAYER) == memory.estimate(_job(model), alone)


def test_refuses_gradients_of_other_sizes_and_batches_that_do_not_split() -> None:
    model = catalog.load("mixtral-8x7b")
    with pytest.raises(UsageError, match=r"gradient_bytes: expected 2 \(BF16\) or 4 \(FP32\), got 3"):
        memory.estimate(_job(model), Setup(gpus=1), software=dataclasses.replace(MEGATRON, gradient_bytes=3))
    with pytest.raises(GroupError, match="global_batch=64 is no multiple of dp=3"):
        memory.estimate(_job(model), Setup(gpus=3))


def test_the_best_mappings_of_the_folding_paper_fit_its_gpus() -> None:
    """Table 3, 80 GB, no recomputation: what was trained must fit."""
    mappings: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("mixtral-8x22b", 128, {"tp": 2, "ep": 8, "pp": 8, "vpp": 7}),
        ("qwen2-57b-a14b", 64, {"tp": 2, "ep": 4, "pp": 4, "vpp": 7}),
        ("mixtral-8x22b-g8t8", 128, {"tp": 4, "ep": 8, "pp": 8, "vpp": 7}),
        ("llama3-8x70b", 256, {"tp": 8, "ep": 8, "pp": 16, "vpp": 5}),
    )
    for name, gpus, degrees in mappings:
        job = Job(model=catalog.load(name), gpus=gpus, global_batch=256, sequence=4096, capacity_factor=1.0)
        assert 30e9 < memory.estimate(job, Setup(gpus=gpus, **degrees)).total < 80e9, name


# MoNTA's closed forms


def test_monta_activations_are_korthikantis_with_one_expert() -> None:
    """bshl (34 + 5as/h), arXiv:2205.05198, equation 1."""
    one = monta_activation_bytes(2, 1024, 512, 3, 8, top_k=1)
    assert one == 2 * 1024 * 512 * 3 * (34 + 5 * 8 * 1024 / 512)
    two = monta_activation_bytes(2, 1024, 512, 3, 8, top_k=2)
    assert two - one == 21 * 2 * 1024 * 512 * 3


def test_limits_of_montas_table_of_activations() -> None:
    shape = (2, 1024, 512, 3, 8, 2)
    whole = monta_activation_bytes(*shape)
    assert monta_parallel_activation_bytes(*shape, 1, "none") == whole
    for tp in (1, 2, 8):
        none, selective, full = (
            monta_parallel_activation_bytes(*shape, tp, word) for word in ("none", "selective", "full")
        )
        assert none == whole / tp
        assert none - selective == pytest.approx(5 * 8 * 1024**2 * 2 * 3 / tp)  # scores alone
        assert full * tp == 2 * 2 * 1024 * 512 * 3
        apart = monta_parallel_activation_bytes(*shape, tp, "none", sequence_parallel=False)
        assert apart - none == pytest.approx(2 * 1024 * 512 * 3 * (5 + 5 * 2) * (1 - 1 / tp))


@given(_models(), _powers, _powers)
def test_montas_table_of_weights(model: ModelShape, tp: int, ep: int) -> None:
    """Derived in docs/counting.md: with BF16 gradients, d data-parallel ranks and e experts' ranks among them."""
    data = 4 * ep
    for zero, (kept, sharded) in enumerate(((16, 0), (4, 12), (2, 14), (0, 16))):
        setup = _setup(tp=tp, etp=tp, ep=ep, dp=data, zero=zero, folded=False)
        dense, expert = per_gpu(model, setup)
        expected = dense * (kept + sharded / data) + expert * (kept + sharded * ep / data)
        assert sum(_states(memory.estimate(_job(model), setup, software=SHORT_SUMS))) == pytest.approx(expected)


# Multi-token prediction


V3 = catalog.load("deepseek-v3")
V3_MTP = dataclasses.replace(V3, mtp_layers=1)


def test_the_catalog_s_file_has_no_field_that_models_lack() -> None:
    """msgspec reads a dataclass without what it does not know: a misspelt field would be left out in silence."""
    models = json.loads((files("commlayer.scheduler.mapping") / "models.json").read_text(encoding="utf-8"))["models"]
    known = {each.name for each in dataclasses.fields(ModelShape)}
    assert [each["name"] for each in models] == catalog.names()
    assert not [each["name"] for each in models if each.keys() - known]


def test_a_module_for_more_tokens_has_the_published_size() -> None:
    """DeepSeek-V3's README: 685B on Hugging Face, 671B of the model and 14B of its module, with a copy of embedding and head."""
    more = parameters.count(V3_MTP).total - parameters.count(V3).total
    copies = 2 * V3.vocabulary * V3.hidden
    assert round((more + copies) / 1e9) == 13  # 13.46; the README rounds 14 from 685 - 671
    assert parameters.count(V3_MTP).total + copies == pytest.approx(685e9, rel=0.002)
    # two norms, the projection, a layer, a norm
    assert more == 3 * 7168 + 2 * 7168**2 + sum(layer_parts(V3).values()) - layer_parts(V3)["dense_ffn"]


def test_a_module_for_more_tokens_costs_a_layer_and_a_head() -> None:
    one, two = flops.forward(V3, 4096), flops.forward(V3_MTP, 4096)
    assert two.head == 2 * one.head
    assert two.mtp_projections == 2 * 2 * 7168 * 7168
    assert two.attention_core / one.attention_core == pytest.approx(62 / 61)
    assert two.experts / one.experts == pytest.approx(59 / 58)
    assert two.dense_ffn == one.dense_ffn


@pytest.mark.parametrize(("pp", "vpp", "schedule"), [(1, 1, "1f1b"), (61, 1, "1f1b"), (8, 1, "dualpipe")])
def test_modules_for_more_tokens_are_on_the_rank_with_the_head(pp: int, vpp: int, schedule: PipelineSchedule) -> None:
    setup = Setup(gpus=8 * pp, pp=pp, vpp=vpp, schedule=schedule, ep=8)
    for stage in range(pp):
        plain, more = (parameters.layers_of(model, setup, stage) for model in (V3, V3_MTP))
        assert (more[0] - plain[0], more[1] - plain[1]) == (0, int(parameters.ends_at(V3, setup, stage).head))
    held = sum(elements for _, elements in parameters.stage_parameters(V3_MTP, setup, MEGATRON, pp - 1))
    plain_held = sum(elements for _, elements in parameters.stage_parameters(V3, setup, MEGATRON, pp - 1))
    ends = parameters.ends_at(V3, setup, pp - 1)
    if ends.head:
        copy = 0 if ends.embedding else V3.vocabulary * V3.hidden
        layer = parameters.layer_parameters(V3, setup, MEGATRON, True)
        assert held - plain_held == sum(layer.values()) + 2 * 7168**2 + 3 * 7168 + copy


@pytest.mark.parametrize(
    ("pp", "vpp", "most", "last"),
    [(16, 1, 4, 2), (8, 1, 8, 6), (4, 4, 16, 14), (8, 4, 8, 8), (2, 8, 32, 30), (7, 1, 9, 8)],
)
def test_the_chunk_with_modules_for_more_tokens_has_the_fewest_layers(pp: int, vpp: int, most: int, last: int) -> None:
    """Megatron-Bridge's layouts of DeepSeek-V3: with 16 stages 4 layers each, and one and the module on the last."""
    setup = Setup(gpus=8 * pp, pp=pp, vpp=vpp, ep=8)
    layers = [sum(parameters.layers_of(V3_MTP, setup, stage)) for stage in range(pp)]
    assert sum(layers) == 62
    assert (max(layers), layers[-1]) == (most, last)


def test_modules_for_more_tokens_take_time_and_memory_on_the_last_stage() -> None:
    setup = Setup(gpus=256, ep=64)
    found = []
    for model in (V3, V3_MTP):
        job = Job(model=model, gpus=256, global_batch=1024, sequence=4096)
        estimator = Estimator(job, clusters.load("h100-eos"), MEGATRON, efficiency=0.9)
        found.append(estimator.estimate(setup, detail=False))
    plain, more = found
    # the head of every micro-batch twice, and its gradients and weights
    assert more.parts["head"] > 2 * plain.parts["head"]
    assert more.step_us > plain.step_us
    whole = Setup(gpus=256, ep=64)
    plain_bytes, more_bytes = (
        memory.estimate(Job(model=model, gpus=256, global_batch=1024, sequence=4096), whole) for model in (V3, V3_MTP)
    )
    assert more_bytes.weights - plain_bytes.weights == 2 * (
        sum(parameters.layer_parameters(V3, whole, MEGATRON, True).values()) + 2 * 7168**2 + 3 * 7168
    )
    assert more_bytes.activations > plain_bytes.activations


def test_modules_for_more_tokens_have_the_attention_with_scores() -> None:
    """Where layers differ, a module is counted as one with scores (as Qwen3-Next's is)."""
    plain = catalog.load("qwen3-next-80b-a3b")
    full = layer_table.attention_kinds(plain, LayerCut())[0][0]
    attention = sum(each.elements for op in full for each in op.weights)
    one, hidden = layer_parts(plain), plain.hidden
    both = parameters.count(dataclasses.replace(plain, mtp_layers=2)).total - parameters.count(plain).total
    rest = one["router"] + one["experts"] + one["shared"] + 2 * hidden
    assert both == 2 * (attention + rest + 2 * hidden**2 + 3 * hidden)
    with pytest.raises(UsageError, match="mtp_layers: expected a whole number of at least 0"):
        dataclasses.replace(V3, mtp_layers=-1)


# Recomputation by module, FP8 and the optimizer's formats


def _output_by_hand(output: float, operand: float, precision: str) -> float:
    """Attention's output: its own backward pass needs it in BF16, the projection behind it cast, or both in E5M6."""
    if precision == "fp8-deepgemm":
        return (12 / 8 + 4 / 128) / 2 * output
    return output + (operand * output if operand < 1 else 0)


def _kept_by_hand(model: ModelShape, modules: set[str], operand: float, precision: str, is_moe: bool) -> float:
    """Count what a layer keeps of a token, tensor by tensor as Megatron-Core's modules do, in BF16 elements."""
    is_fp8 = operand < 1
    latent = model.latent
    heads = model.heads * (latent.nope_dim + latent.rope_dim) if latent else model.heads * model.head_dim
    values = model.heads * latent.value_dim if latent else model.kv_heads * model.head_dim
    keys = heads if latent else model.kv_heads * model.head_dim
    output = model.heads * latent.value_dim if latent else model.heads * model.head_dim
    kept: dict[str, float] = {"input": model.hidden, "middle": model.hidden}
    if latent:
        kept["down"] = latent.q_rank + latent.kv_rank + latent.rope_dim
        if "mla_up_proj" not in modules:  # the norms are in the layers that project up
            kept["into up"] = operand * (latent.q_rank + latent.kv_rank)
    if "mla_up_proj" not in modules:
        kept["qkv"] = heads + keys + values
    kept["attention"] = _output_by_hand(output, operand, precision)
    if "layernorm" not in modules:
        kept["into qkv"] = operand * model.hidden
        kept["second norm"] = model.hidden if is_moe or not is_fp8 else operand * model.hidden
    if not is_moe:
        if "mlp" not in modules:
            kept["ffn"] = 2 * model.dense_width + operand * model.dense_width
        elif is_fp8 and "layernorm" not in modules:
            kept["second norm"] = model.hidden  # what the FFN is made from again
        return sum(kept.values())
    if model.shared_width and not modules & {"moe", "shared_experts"}:
        kept["shared"] = (2 + operand) * model.shared_width
        kept["into shared"] = operand * model.hidden if is_fp8 and "layernorm" not in modules else 0
    if "moe" not in modules:
        activated = 0 if "moe_act" in modules else operand * model.width
        kept["rows"] = model.top_k * (operand * model.hidden + 2 * model.width + activated)
    return sum(kept.values())


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "deepseekmoe-16b"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-current", "fp8-blockwise", "fp8-deepgemm"])
@pytest.mark.parametrize("modules", [(), *((module,) for module in MODULES), MODULES[1:], ("moe_act", "layernorm")])
def test_modules_that_are_made_again_are_not_kept(name: str, precision: Precision, modules: tuple[str, ...]) -> None:
    model = catalog.load(name)
    if "mla_up_proj" in modules and model.latent is None:
        modules = tuple(module for module in modules if module != "mla_up_proj")
    recompute = canonical("+".join(modules) or "none")
    gpu = GPUS["h100"]
    recipe = recipe_of(precision, gpu)
    operand = 1.0 if recipe is None else recipe.copy_bytes() / 2
    setup = Setup(gpus=1, recompute=recompute, precision=precision)
    job = Job(model=model, gpus=1, global_batch=1, sequence=1024)
    found = memory.estimate(job, setup, gpu=gpu).activations
    layers = sum(_kept_by_hand(model, set(modules), operand, precision, is_moe) for is_moe in layer_kinds(model))
    assert found == pytest.approx(1024 * (2 * layers + 6 * model.vocabulary), rel=1e-9)


def test_weights_have_fp8_copies_beside_them_or_in_their_place() -> None:
    model = catalog.load("mixtral-8x7b")
    job = Job(model=model, gpus=8, global_batch=8, sequence=1024)

    def weights(precision: Precision, gpu: str, software: Software = MEGATRON) -> float:
        setup = Setup(gpus=8, ep=8, precision=precision)
        return memory.estimate(job, setup, software=software, gpu=GPUS[gpu]).weights

    setup = Setup(gpus=8, ep=8)
    cast = parameters.held(model, setup, MEGATRON)[0].multiplied
    left = 2 * model.vocabulary * model.hidden + 32 * (8 * model.hidden + 2 * model.hidden) + model.hidden
    assert cast == parameters.held_elements(model, setup, MEGATRON) - left
    plain = weights("bf16", "h100")
    assert weights("fp8-current", "h100") - plain == 2 * cast  # a transposed copy
    assert weights("fp8-current", "b200") - plain == cast
    assert weights("fp8-mxfp8", "b200") - plain == pytest.approx(2 * (1 + 1 / 32) * cast)
    alone = with_optimizer(MEGATRON, fp8_param_gather=True)
    assert weights("fp8-current", "b200", alone) - plain == -cast
    assert weights("bf16", "b200", alone) == plain


def test_an_optimizer_may_keep_less_than_fp32() -> None:
    job, setup = Job(model=catalog.load("mixtral-8x7b"), gpus=8, global_batch=8, sequence=1024), Setup(gpus=8, ep=8)
    plain = memory.estimate(job, setup)

    def with_state(**formats: Any) -> Memory:
        software = with_optimizer(MEGATRON, **formats)
        return memory.estimate(job, setup, software=software)

    # DeepSeek-V3, section 3.3.3: both moments in BF16
    assert with_state(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16").optimizer == pytest.approx(
        plain.optimizer * 8 / 12
    )
    assert with_state(exp_avg_dtype="fp8", main_params_dtype="fp16").optimizer == pytest.approx(
        plain.optimizer * 7 / 12
    )
    assert with_state(main_grads_dtype="bf16").gradients == plain.gradients / 2
    assert with_state(optimizer_offload_fraction=0.75).optimizer == plain.optimizer / 4
    assert with_optimizer(MEGATRON) == MEGATRON
    with pytest.raises(UsageError, match="main_params_dtype: expected fp32, fp16, got 'fp8'"):
        with_optimizer(MEGATRON, main_params_dtype="fp8")
    with pytest.raises(UsageError, match="expected 0 to 1, got 2"):
        with_optimizer(MEGATRON, optimizer_offload_fraction=2)


def test_an_optimizer_in_the_host_takes_its_link() -> None:
    job, setup = Job(model=catalog.load("mixtral-8x7b"), gpus=8, global_batch=64, sequence=1024), Setup(gpus=8, ep=8)
    times = []
    for software in (MEGATRON, with_optimizer(MEGATRON, optimizer_offload_fraction=1)):
        found = Estimator(job, clusters.load("h100-eos"), software, efficiency=1).estimate(setup, detail=False)
        times.append(found.parts["optimizer"])
    share = parameters.shard_elements(job.model, setup, MEGATRON)
    kept = parameters.held_elements(job.model, setup, MEGATRON) * 4
    assert times[1] - times[0] == pytest.approx(
        share * (4 + 2) / 53e3 - share * (8 + 24 + 2) / (3350e3 * 0.8), rel=1e-3
    )
    assert times[1] > kept / 3350e3
    assert any("what its own Adam takes is not modelled" in note for note in found.notes)


# Attention that chooses positions, compresses them, or has other heads in windows; experts on a latent space


def test_an_indexer_scores_all_positions_and_attention_reads_those_that_it_chooses() -> None:
    """DeepSeek-V3.2 by hand: 64 heads of 128 score, and 128 heads read 2,048 positions of 576 + 512 elements."""
    model, sequence = catalog.load("deepseek-v3.2"), 65536
    mean = 2048 - 2048**2 / 2 / sequence
    scored, read = 2 * 64 * 128 * sequence / 2, 2 * 128 * (576 + 512) * mean
    assert flops.forward(model, sequence).attention_core == pytest.approx(61 * (scored + read), rel=1e-12)
    assert model.indexer is not None
    shared = dataclasses.replace(model.indexer, scored_layers=21)  # others take over what these chose
    fewer = flops.forward(dataclasses.replace(model, indexer=shared), sequence).attention_core
    assert fewer == pytest.approx(21 * scored + 61 * read, rel=1e-12)


def test_compressed_attention_reads_its_window_and_entries_behind_it() -> None:
    """DeepSeek-V4-Flash by hand: 43 layers have a window of 128, 21 choose 512 entries of 4 tokens, 20 read all of 128."""
    sequence = 32768
    each, window = 2 * 2 * 64 * 512, 128 - 128**2 / 2 / sequence
    entries = 512 - 512**2 / 2 / (sequence / 4)
    scored = 2 * 64 * 128 * sequence / 4 / 2
    by_hand = 43 * each * window + 21 * (each * entries + scored) + 20 * each * sequence / 128 / 2
    assert flops.forward(catalog.load("deepseek-v4-flash"), sequence).attention_core == pytest.approx(
        by_hand, rel=1e-12
    )


def test_windowed_layers_may_have_heads_of_their_own() -> None:
    """MiMo-V2-Flash by hand: keys of 192 elements, values of 128; the window of 128 tokens is in 39 of 48 layers."""
    model, sequence = catalog.load("mimo-v2-flash"), 16384
    each, window = 2 * 64 * (192 + 128), catalog.load("mimo-v2-flash").window
    assert window is not None
    assert (window.layers, window.kv_heads, model.kv_heads) == (39, 8, 4)
    mean = window.tokens - window.tokens**2 / 2 / sequence
    by_hand = each * (39 * mean + 9 * sequence / 2)
    assert flops.forward(model, sequence).attention_core == pytest.approx(by_hand, rel=1e-12)


def test_experts_on_a_latent_space_exchange_its_width() -> None:
    """Kimi-K3 moves 3,584 of 7,168 elements of a token to each of its experts."""
    latent = catalog.load("kimi-k3")
    plain = dataclasses.replace(latent, expert_hidden=0)
    setup = Setup(gpus=64, ep=64)
    sent = [
        {each.name: each.logical_bytes for each in layer_forward(_job(model, 64, sequence=4096), setup, MEGATRON)}
        for model in (latent, plain)
    ]
    assert latent.routed_hidden == 3584
    assert all(2 * sent[0][name] == sent[1][name] for name in ("dispatch", "combine"))


def test_residual_streams_are_kept_and_sent_each() -> None:
    model = catalog.load("deepseek-v4-flash")
    one = dataclasses.replace(model, streams=1)
    cut = LayerCut()
    more = memory.kept_elements(model, "none", cut).token - memory.kept_elements(one, "none", cut).token
    assert more == 2 * 4 * model.hidden
    assert memory.kept_elements(model, "full", cut).token == 4 * model.hidden
    boundaries = [
        next(
            each for each in step_exchanges(_job(shape, 2), Setup(gpus=2, pp=2), MEGATRON) if each.name == "activations"
        )
        for shape in (model, one)
    ]
    assert boundaries[0].logical_bytes == 4 * boundaries[1].logical_bytes


def test_layers_without_an_ffn_have_one_norm_and_nothing_behind_attention() -> None:
    model = catalog.load("nemotron-3-nano-30b-a3b")
    assert (model.layers, model.dense_layers, model.without_ffn) == (29, 6, True)
    bare = layer_table.layer_table(model, LayerCut(), is_moe=False)
    assert "middle" not in {op.name for op in bare}
    with pytest.raises(UsageError, match="dense_width: expected 0, as no dense layer has an FFN"):
        dataclasses.replace(model, dense_width=8)


@pytest.mark.parametrize("name", catalog.names()[25:])
def test_whatever_is_in_the_catalogue_is_estimated(name: str) -> None:
    """Each by one mapping with tensor, expert and pipeline parallelism."""
    model = catalog.load(name)
    setup = Setup(gpus=64, tp=2, ep=8, pp=4, recompute="full")
    estimator = Estimator(
        Job(model=model, gpus=64, global_batch=64, sequence=4096), clusters.load("h100-eos"), MEGATRON
    )
    found = estimator.estimate(setup)
    assert found.step_us > 0
    assert found.memory.total > 0

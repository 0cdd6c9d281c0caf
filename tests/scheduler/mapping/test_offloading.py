"""Activations in the host's memory: what leaves the GPU by module, what crosses for it, what of that a step waits for, and what
Megatron-Core refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters, memory
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.exports import export
from commlayer.scheduler.mapping.hardware import GPUS, Gpu
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.offloading import KEPT, OFFLOADABLE, canonical_offload, unfit_offload
from commlayer.scheduler.mapping.rank_graph import rank_graph
from commlayer.scheduler.mapping.result import Memory
from commlayer.scheduler.mapping.search import CLOSEST, search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software
from commlayer.scheduler.mapping.space import Space, setups, simplicity

EOS = clusters.load("h100-eos")
ALL = "+".join(OFFLOADABLE)
TOKENS = 4096


def model_of(name: str, layers: int = 4) -> ModelShape:
    shape = catalog.load(name)
    return replace(shape, layers=layers + shape.dense_layers)


def on_host(gbps: float) -> Cluster:
    return EOS.replace(gpu=replace(EOS.gpu, host_gbps=gbps))


def needed(model: ModelShape, gpu: Gpu | None = None, **words: Any) -> Memory:
    job = Job(model=model, gpus=8, global_batch=16, sequence=TOKENS)
    return memory.estimate(job, Setup(gpus=8, ep=8, **words), gpu=gpu)


# What leaves


def by_hand(model: ModelShape, module: str) -> float:
    """Elements of a token that leave in BF16, straight from the modules' definitions."""
    heads, kv_heads, size = model.heads, model.kv_heads, model.head_dim
    elements = {
        "attn_norm": 0,
        "qkv_linear": 2 * model.hidden,  # the norm's input, which is in the same kernel, and its output
        "core_attn": heads * size + 2 * kv_heads * size,
        "mlp_norm": model.hidden,
        "expert_fc1": model.top_k * model.hidden,
        "moe_act": model.top_k * 2 * model.width,
    }
    if module == "core_attn+attn_proj":
        return elements["core_attn"] + heads * size
    return elements[module]


@pytest.mark.parametrize("module", [*(word for word in OFFLOADABLE if word != "attn_proj"), "core_attn+attn_proj"])
def test_a_module_takes_its_input_along(module: str) -> None:
    model = model_of("mixtral-8x22b")
    plain, without = needed(model), needed(model, offload=module)
    layer = 2 * TOKENS * by_hand(model, module)
    assert plain.activations - without.activations == pytest.approx(model.layers * layer)
    # the layer that computes, and its neighbour, whose copies are under way
    assert without.buffers - plain.buffers == pytest.approx(2 * layer)
    both = layer + 2 * TOKENS * model.heads * model.head_dim * ("core_attn" in module)
    assert without.offloaded == pytest.approx(model.layers * both)


def test_latent_attention_has_a_norm_of_its_own() -> None:
    model = model_of("deepseek-v3")
    latent = model.latent
    assert latent is not None
    layers, layer = model.layers, 2 * TOKENS
    plain = needed(model)
    norm, projections = (needed(model, offload=word) for word in ("attn_norm", "qkv_linear"))
    assert plain.activations - norm.activations == pytest.approx(layers * layer * model.hidden)
    between = model.hidden + 2 * (latent.q_rank + latent.kv_rank) + latent.rope_dim
    assert plain.activations - projections.activations == pytest.approx(layers * layer * between)
    experts = needed(model, offload="expert_fc1")  # which the three dense layers do not have
    assert plain.activations - experts.activations == pytest.approx(
        model.moe_layers * layer * model.top_k * model.hidden
    )


@pytest.mark.parametrize("name", ["mixtral-8x22b", "deepseek-v3"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-blockwise"])
@pytest.mark.parametrize("recompute", ["none", "megascale", "layernorm", "moe_act+layernorm"])
@pytest.mark.parametrize("attention", ["tensor", "ulysses"])
def test_more_modules_take_more_along_and_never_more_than_there_is(
    name: str, precision: str, recompute: str, attention: str
) -> None:
    model = model_of(name)
    words = {"precision": precision, "recompute": recompute, "attention": attention, "tp": 2, "etp": 1}
    found = {}
    for count in range(len(OFFLOADABLE) + 1):
        for modules in combinations(OFFLOADABLE, count):
            offload = "+".join(modules) or KEPT
            if unfit_offload(offload, recompute):
                continue
            job = Job(model=model, gpus=8, global_batch=16, sequence=TOKENS)
            setup = Setup(gpus=8, ep=8, offload=offload, **words)  # type: ignore[arg-type]
            found[frozenset(modules)] = memory.estimate(job, setup, gpu=GPUS["h100"])
    plain = found[frozenset()]
    for named, each in found.items():
        left = plain.activations - each.activations
        assert -1e-6 <= left <= plain.activations
        assert each.offloaded >= left - 1e-6 * plain.total
        for module in named:
            if (fewer := found.get(named - {module})) is not None:
                assert each.activations <= fewer.activations + 1e-6
                assert each.offloaded >= fewer.offloaded - 1e-6


def test_fp8_crosses_in_its_own_format_but_for_the_input_of_experts() -> None:
    """Megatron-Core keeps that input in BF16 where it is offloaded, but with MXFP8."""
    model = model_of("mixtral-8x22b")
    rows = 2 * TOKENS * model.layers * model.top_k
    blocks = needed(model, GPUS["h100"], precision="fp8-blockwise", offload="expert_fc1")
    assert blocks.offloaded == pytest.approx(rows * model.hidden)
    small = needed(model, GPUS["b200"], precision="fp8-mxfp8", offload="expert_fc1")
    assert small.offloaded == pytest.approx(rows * model.hidden * (1 + 1 / 32) / 2)
    plain = needed(model, GPUS["h100"], precision="fp8-blockwise")
    assert plain.activations - blocks.activations == pytest.approx(rows * model.hidden * (1 + 4 / 128) / 2)


# What it takes


def estimator(
    cluster: Cluster, model: ModelShape, gpus: int = 8, batch: int = 16, software: Software = MEGATRON
) -> Estimator:
    job = Job(model=model, gpus=gpus, global_batch=batch, sequence=TOKENS)
    return Estimator(job, cluster, software, efficiency=0.8)


def test_what_a_neighbouring_layer_hides_costs_its_part_of_the_memory_alone() -> None:
    model = model_of("mixtral-8x22b")
    setups = [Setup(gpus=8, ep=8, offload=word) for word in (KEPT, "expert_fc1")]
    of = estimator(on_host(400.0), model, software=replace(MEGATRON, host="unknown"))
    plain, offloaded = map(of.estimate, setups)
    assert "offload" not in offloaded.parts
    assert plain.step_us < offloaded.step_us < plain.step_us * 1.01
    # While a GPU waits for launches, a copy takes memory's rate from nobody.
    plain, offloaded = map(estimator(on_host(400.0), model).estimate, setups)
    assert offloaded.step_us == plain.step_us


def test_what_a_slow_link_takes_is_waited_for() -> None:
    """A layer takes as long as its copies, forward and backward, where these take longer than it computes."""
    model, gbps = model_of("mixtral-8x22b"), 1.0
    of = estimator(on_host(gbps), model)
    setup = Setup(gpus=8, ep=8, offload="moe_act")
    plain, offloaded = of.estimate(replace(setup, offload=KEPT)), of.estimate(setup)
    copy_us = memory.offloaded_layer_bytes(of.job, setup, of.cluster.gpu) / (gbps * 1e3)
    passes = setup.micro_batches(of.job) * model.layers
    head = of.ends_us(setup)
    ends = plain.parts["optimizer"] + setup.micro_batches(of.job) * (head[0] + head[1])
    edges = sum(offloaded.parts.get(part, 0.0) for part in ("gradients", "parameters", "bubble"))
    assert offloaded.step_us == pytest.approx(2 * passes * copy_us + ends + edges, rel=1e-3)
    assert offloaded.parts["offload"] == offloaded.exposed_us["offload"] == offloaded.links_us["host"]
    assert offloaded.bottleneck == "host"
    assert sum(offloaded.parts.values()) == pytest.approx(offloaded.step_us)


def test_merged_passes_have_both_ways_beside_them() -> None:
    model = model_of("deepseek-v3", 8)
    setup = Setup(gpus=16, ep=8, pp=2, vpp=2, schedule="1f1b-overlap", offload="expert_fc1")
    slow = estimator(on_host(2.0), model, 16, 64)
    one, other = (slow.estimate(replace(setup, offload=word)) for word in (KEPT, "expert_fc1"))
    assert other.step_us > one.step_us
    assert other.merged is not None
    copy = next(each for name, each in other.merged.calls.items() if name.startswith("offload and reload"))
    nbytes = memory.offloaded_layer_bytes(slow.job, setup, slow.cluster.gpu)
    assert copy.end_us - copy.start_us == pytest.approx(nbytes / 2e3)


def test_a_wider_link_never_takes_longer() -> None:
    model = model_of("mixtral-8x22b")
    setup = Setup(gpus=16, ep=8, pp=2, vpp=2, offload=ALL)
    times = [estimator(on_host(gbps), model, 16).estimate(setup, detail=False).step_us for gbps in (5, 25, 50, 180)]
    assert times == sorted(times, reverse=True)


def test_notes_say_what_crosses_and_what_frees_nothing() -> None:
    of = estimator(EOS, model_of("mixtral-8x22b"))
    notes = of.estimate(Setup(gpus=8, ep=8, offload="attn_norm+expert_fc1")).notes
    assert any("101 MB of a layer and a micro-batch cross to the host and back, at 53 GB/s" in note for note in notes)
    assert "offloading attn_norm frees nothing here" in notes
    assert not any("expert_fc1 frees nothing" in note for note in notes)


# The search


@pytest.mark.parametrize("gbps", [0.5, 50.0])
def test_the_search_with_offloading_is_that_of_brute_force(gbps: float) -> None:
    """On a slow link too, where computing again is quicker than fetching."""
    model = model_of("mixtral-8x7b")
    of = estimator(on_host(gbps), model, 8, 16)
    of.memory_limit = 60e9
    space = Space(
        tp=(1, 2),
        cp=(1,),
        ep=(4, 8),
        etp=(1,),
        pp=(1, 2),
        vpp=(1,),
        micro_batch=(1, 2),
        exchange=("all_to_all",),
        recompute=("none", "megascale", "full", "moe_act"),
        offload=(KEPT, "expert_fc1+moe_act", ALL),
    )
    every = []
    for setup in setups(of.job, of.cluster, space):
        found = of.estimate(setup, detail=False)
        for level in range(CLOSEST + 1):
            assert of.bound_us(setup, level) <= found.step_us * (1 + 1e-9), (level, setup)
        if of.memory(setup).total <= of.memory_limit:
            every.append(found)
    every.sort(key=lambda found: (found.step_us, simplicity(found.setup)))
    result = search(of.job, of, space, top=len(every))
    assert [found.step_us for found in result.ranked] == pytest.approx([found.step_us for found in every])
    assert {found.setup.offload for found in every} == set(space.offload)
    assert not any(found.setup.recompute == "full" and found.setup.offload != KEPT for found in every)


def test_a_space_without_a_pair_that_goes_says_why() -> None:
    of = estimator(EOS, model_of("mixtral-8x7b"))
    with pytest.raises(UsageError, match="with recompute full a layer keeps its input alone"):
        search(of.job, of, Space(offload=("moe_act",), recompute=("full",)))


# What is refused


@pytest.mark.parametrize(
    ("offload", "recompute", "said"),
    [
        ("attn_proj", "none", "add core_attn"),
        ("attn_proj+expert_fc1", "none", "add core_attn"),
        ("expert_fc1", "moe", "moe is computed again as a whole, expert_fc1 in it"),
        ("core_attn+expert_fc1+moe_act", "layernorm+moe", "expert_fc1 and moe_act in it"),
        ("mlp_norm", "full", "keeps its input alone"),
        ("expert_fc2", "none", "expected none, or some of attn_norm"),
        ("moe_act+expert_fc1", "none", "in this order: 'expert_fc1[+]moe_act'"),
    ],
)
def test_what_does_not_go_together_is_refused(offload: str, recompute: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Setup(gpus=8, ep=8, offload=offload, recompute=recompute)


def test_words_come_in_one_order() -> None:
    assert canonical_offload("moe_act+core_attn+moe_act") == "core_attn+moe_act"
    assert canonical_offload(KEPT) == KEPT
    with pytest.raises(UsageError, match="got 'full'"):
        canonical_offload("full")


def test_our_own_layers_offload_nothing() -> None:
    job = Job(model=model_of("mixtral-8x7b"), gpus=8, global_batch=16, sequence=TOKENS)
    with pytest.raises(UsageError, match="commlayer keeps activations on the GPU: take the software megatron"):
        Estimator(job, EOS, COMMLAYER).estimate(Setup(gpus=8, ep=8, offload="moe_act"))


# For trainers and simulators


def test_megatron_has_flags_for_it_and_others_do_not() -> None:
    job = Job(model=catalog.load("mixtral-8x22b"), gpus=128, global_batch=256, sequence=TOKENS)
    setup = Setup(gpus=128, ep=8, pp=8, recompute="moe_act+layernorm", offload="core_attn+attn_proj+expert_fc1")
    exported = export("megatron", job, setup)
    lines = exported.text.splitlines()
    assert "--fine-grained-activation-offloading" in lines
    assert "--offload-modules core_attn attn_proj expert_fc1" in lines
    assert any("NVTE_CPU_OFFLOAD_V1=1" in note for note in exported.notes)
    assert "offload" not in export("megatron", job, replace(setup, offload=KEPT)).text
    setup = replace(setup, recompute="none")
    with pytest.raises(UsageError, match="it offloads no modules by name"):
        export("torchtitan", job, setup)
    with pytest.raises(UsageError, match="cpu_checkpointing"):
        export("deepspeed", job, setup)
    of = Estimator(job, EOS, MEGATRON, efficiency=0.8)
    with pytest.raises(UsageError, match="copies to the host"):
        rank_graph(of, setup, 0)


def test_all_modules_are_named_in_their_place() -> None:
    """Every module counts for something somewhere: none of the words is idle."""
    counted = set()
    for name, recompute in (("mixtral-8x22b", "none"), ("deepseek-v3", "none")):
        for module in OFFLOADABLE:
            offload = "core_attn+attn_proj" if module == "attn_proj" else module
            less = needed(model_of(name), recompute=recompute, offload=offload)
            base = needed(model_of(name), recompute=recompute, offload="core_attn" if module == "attn_proj" else KEPT)
            if less.activations < base.activations:
                counted.add(module)
    assert counted == set(chain(OFFLOADABLE))

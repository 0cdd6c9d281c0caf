"""Launches of a layer's kernels: what is counted, what graphs hold, and what of it a step waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.compute import MeasuredCompute
from commlayer.scheduler.mapping.host_launches import LayerLaunches, host_calls, layer_launches, waits_for_counts
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import (
    COMMLAYER,
    MEGATRON,
    Software,
    with_dispatcher,
    with_fused_experts,
    with_graphs,
)

_JOB = Job(model=catalog.load("qwen3-30b-a3b"), gpus=8, global_batch=64, sequence=4096)
_SETUP = Setup(gpus=8, ep=8)
_B200 = clusters.load("b200-hgx")


def _us(setup: Setup = _SETUP, software: object = MEGATRON, job: Job = _JOB, cluster: str = "b200-hgx") -> float:
    return Estimator(job, clusters.load(cluster), software).estimate(setup, detail=False).step_us  # type: ignore[arg-type]


def test_a_layer_is_counted_by_hand() -> None:
    around = 1 + 2  # two norms, the second of them with the first residual sum, and the last residual sum
    attention = 2 + 1 + 1  # two products, one rotation of both, the core
    router, calls = 31, 4  # counts, tokens, their weights, and back
    experts = 2 * 16 + 1  # 16 experts on a rank, and their activation function
    orders = 2 * 2  # by rank, then by expert; and back
    counted = layer_launches(_JOB, _SETUP, MEGATRON)
    assert counted.forward == around + attention + router + calls + experts + orders


def test_fp8_casts_what_goes_into_each_product_but_the_routers() -> None:
    bf16, fp8 = (layer_launches(_JOB, replace(_SETUP, precision=word), MEGATRON) for word in ("bf16", "fp8"))
    products = 2 + 2 * 16
    assert (fp8.forward - bf16.forward, fp8.backward - bf16.backward) == (products, products)


def test_full_recomputation_launches_the_forward_pass_once_more() -> None:
    once = layer_launches(_JOB, _SETUP, MEGATRON)
    again = layer_launches(_JOB, replace(_SETUP, recompute="full"), MEGATRON)
    assert again.forward == once.forward
    assert again.backward >= once.backward + once.forward


@pytest.mark.parametrize("graphs", ["router", "attention", "attention+router"])
def test_graphs_leave_fewer_launches(graphs: str) -> None:
    all_alone, held = (layer_launches(_JOB, _SETUP, each) for each in (MEGATRON, with_graphs(MEGATRON, graphs)))
    assert held.forward < all_alone.forward
    assert held.backward < all_alone.backward


def test_a_graph_holds_the_whole_step_where_the_host_reads_no_counts() -> None:
    graphs = with_graphs(MEGATRON, "full-iteration")
    kernels, even = with_dispatcher(graphs, "hybridep"), replace(_JOB, capacity_factor=1.0)
    assert layer_launches(_JOB, _SETUP, graphs) == layer_launches(_JOB, _SETUP, MEGATRON)
    assert layer_launches(_JOB, _SETUP, kernels) == layer_launches(even, _SETUP, graphs) == LayerLaunches(0, 0)
    assert layer_launches(_JOB, _SETUP, kernels, posts=True).forward > 0


def test_fused_experts_are_launched_together() -> None:
    apart, fused = (layer_launches(_JOB, _SETUP, each) for each in (MEGATRON, with_fused_experts(MEGATRON)))
    assert apart.forward - fused.forward == 2 * 15


def test_the_host_waits_for_counts_where_calls_bring_as_many_rows_as_routing_has() -> None:
    assert waits_for_counts(_JOB, _SETUP, MEGATRON)
    assert not waits_for_counts(_JOB, _SETUP, with_dispatcher(MEGATRON, "deepep"))
    assert not waits_for_counts(replace(_JOB, capacity_factor=1.0), _SETUP, MEGATRON)
    assert not waits_for_counts(_JOB, replace(_SETUP, ep=1), MEGATRON)


def test_launches_of_chunks_are_said_not_to_be_counted() -> None:
    def notes(setup: Setup, software: Software) -> str:
        return " ".join(Estimator(_JOB, _B200, software).estimate(setup, detail=False).notes)

    words = "launches counted without chunks"
    assert words in notes(_SETUP, COMMLAYER)
    assert words not in notes(_SETUP, MEGATRON)
    assert words not in notes(replace(_SETUP, ep=1), COMMLAYER)
    assert words not in notes(_SETUP, replace(COMMLAYER, host="unknown"))


def test_small_micro_batches_cost_more_than_in_proportion() -> None:
    """Published on 8 B200: 27,136 tokens/s of a GPU with micro-batches of 4 (a release later), 9,691 with 1."""
    one, four = (_us(replace(_SETUP, micro_batch=number, precision="fp8")) for number in (1, 4))
    assert one / four > 1.8
    free = replace(MEGATRON, host="unknown")
    one, four = (_us(replace(_SETUP, micro_batch=number, precision="fp8"), free) for number in (1, 4))
    assert one / four < 1.5


def test_a_step_is_longer_by_the_exposed_part_of_each_launch() -> None:
    setup = replace(_SETUP, micro_batch=8)  # whose GPU is busy for longer than its host
    gpu, passes, layers = _B200.gpu, setup.micro_batches(_JOB), _JOB.model.layers
    more_us = sum(layer_launches(_JOB, setup, MEGATRON)) * gpu.waited_launch_us * passes * layers
    less_us = _us(setup) - _us(setup, replace(MEGATRON, host="unknown"))
    assert less_us <= more_us  # sums of gradients go on while the GPU waits for its host
    assert less_us == pytest.approx(more_us, rel=0.01)


def test_a_grace_launches_more_slowly() -> None:
    x86, grace = (clusters.load(name).gpu for name in ("b200-hgx", "gb200-nvl72"))
    assert grace.exposed_launch_us == 1.5 * x86.exposed_launch_us
    assert grace.waited_launch_us == 1.5 * x86.waited_launch_us
    assert grace.call_launch_us == 1.2 * x86.call_launch_us


def test_a_hosts_calls_are_as_many_however_many_experts_a_rank_has() -> None:
    counted = host_calls(_JOB, _SETUP, MEGATRON)
    launches = layer_launches(_JOB, _SETUP, MEGATRON)
    assert counted.forward == launches.forward - 2 * (16 - 1)
    assert host_calls(replace(_JOB, gpus=16), Setup(gpus=16, ep=16), MEGATRON) == counted
    assert host_calls(_JOB, _SETUP, with_dispatcher(MEGATRON, "deepep")) == counted


_P5 = Setup(gpus=64, tp=8, pp=4, ep=16)


@pytest.mark.parametrize("dispatcher", ["nccl", "deepep"])
def test_a_host_that_waits_is_what_small_micro_batches_wait_for(dispatcher: str) -> None:
    """AWS, Qwen3-30B on 64 H100: a layer takes 17.7 ms with micro-batches of 1 and 20.5 with 4 (18.3 and 21.8 by DeepEP)."""
    job, cluster = replace(_JOB, gpus=64, global_batch=256), clusters.load("aws-p5")
    layer_us = sum(host_calls(job, _P5, MEGATRON)) * cluster.gpu.call_launch_us
    assert layer_us == pytest.approx(17.7e3, rel=0.05)
    step_us = _us(_P5, with_dispatcher(MEGATRON, dispatcher), job, "aws-p5")
    assert step_us == pytest.approx(layer_us * 12 * (128 + 3), rel=0.02)
    four_us = _us(replace(_P5, micro_batch=4), with_dispatcher(MEGATRON, dispatcher), job, "aws-p5")
    assert step_us / four_us > 3.3


def test_a_host_that_runs_ahead_holds_nothing_up() -> None:
    job = replace(_JOB, gpus=64, global_batch=256)
    ahead = _us(_P5, replace(MEGATRON, host="runs ahead"), job, "aws-p5")
    padded = _us(_P5, MEGATRON, replace(job, capacity_factor=1.0), "aws-p5")
    assert max(ahead, padded) < 0.5 * _us(_P5, MEGATRON, job, "aws-p5")


def test_measured_times_have_their_launches_in_them() -> None:
    compute = MeasuredCompute([(1e9, 10.0), (1e12, 2000.0)], 2000.0)
    estimator = Estimator(replace(_JOB, gpus=64, global_batch=256), clusters.load("aws-p5"), MEGATRON, compute=compute)
    assert "host" not in {part for part, us in estimator.estimate(_P5, detail=False).parts.items() if us}


def test_merged_passes_wait_for_their_host_as_well() -> None:
    """The same on AWS: merged, a layer takes 17.1 ms with micro-batches of 4."""
    merged = replace(_P5, micro_batch=4, vpp=2, schedule="1f1b-overlap")
    job = replace(_JOB, gpus=64, global_batch=256)
    assert _us(merged, MEGATRON, job, "aws-p5") == pytest.approx(6.87e6, rel=0.1)


@pytest.mark.parametrize("setup", [_P5, replace(_P5, micro_batch=4, vpp=2, schedule="1f1b-overlap")])
def test_bounds_have_a_hosts_calls_too(setup: Setup) -> None:
    estimator = Estimator(replace(_JOB, gpus=64, global_batch=256), clusters.load("aws-p5"), MEGATRON)
    step_us = estimator.estimate(setup, detail=False).step_us
    bounds = [estimator.bound_us(setup, level) for level in range(4)]
    assert bounds == sorted(bounds)
    assert 0.9 * step_us < bounds[0] <= bounds[-1] <= step_us * (1 + 1e-9)


def test_bounds_have_launches_too() -> None:
    estimator = Estimator(_JOB, _B200, MEGATRON)
    step_us = estimator.estimate(_SETUP, detail=False).step_us
    bounds = [estimator.bound_us(_SETUP, level) for level in range(4)]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= step_us * (1 + 1e-9)
    assert bounds[0] > 0.7 * step_us


def test_graphs_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="cuda graphs: expected none, router"):
        with_graphs(MEGATRON, "experts")
    with pytest.raises(UsageError, match="commlayer has no CUDA graphs: take --software megatron"):
        with_graphs(COMMLAYER, "router")

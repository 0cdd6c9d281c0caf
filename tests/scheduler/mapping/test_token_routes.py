"""Dispatch by kernels that send a token once to each node: what crosses, what that takes, and what an estimate says of it."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations

import pytest

from commlayer.profiles import catalog as profile_catalog
from commlayer.profiles.errors import DispatchError, PlanError, UsageError
from commlayer.scheduler.mapping import catalog, clusters, hardware
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.dispatch_kernels import (
    DEEPEP,
    DEEPEP_V2,
    HYBRIDEP,
    NCCL_EP,
    UCCL_EP,
    DispatchKernels,
)
from commlayer.scheduler.mapping.imbalance import Loads
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.model import ModelShape
from commlayer.scheduler.mapping.search import CLOSEST, search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, DISPATCHERS, MEGATRON, with_dispatcher, with_overlap
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.step_collectives import layer_forward
from commlayer.scheduler.mapping.token_routes import TokenRoutes
from commlayer.scheduler.rails import distinct_nodes

H800, EOS = clusters.load("h800"), clusters.load("h100-eos")
DEEPSEEK, QWEN = catalog.load("deepseek-v3"), catalog.load("qwen3-235b-a22b")
JOB = Job(model=QWEN, gpus=64, global_batch=256, sequence=4096)
SETUP = Setup(gpus=64, ep=16, recompute="full")


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (2, 1), (4, 2), (4, 3), (4, 4), (8, 4)])
def test_distinct_nodes_of_a_router_with_groups(nodes: int, groups: int, limit: int) -> None:
    experts, top_k, size = 8, 2, 8 // groups
    found = [
        len({choice * nodes // experts for choice in choices})
        for chosen in combinations(range(groups), limit)
        for choices in combinations([g * size + each for g in chosen for each in range(size)], top_k)
    ]
    expected = sum(found) / len(found) if found else None
    if expected is None:
        with pytest.raises(UsageError, match="groups"):
            distinct_nodes(experts, nodes, top_k, groups, limit)
    else:
        assert distinct_nodes(experts, nodes, top_k, groups, limit) == pytest.approx(expected)


@pytest.mark.parametrize(("groups", "limit"), [(3, 1), (4, 5), (4, 0), (8, 1)])
def test_groups_that_cannot_be(groups: int, limit: int) -> None:
    with pytest.raises(UsageError, match="groups"):
        distinct_nodes(8, 2, 2, groups, limit)
    with pytest.raises(UsageError, match="router_group"):
        replace(DEEPSEEK, experts=8, top_k=2, router_groups=groups, router_group_limit=limit)


@pytest.mark.parametrize(("ep", "dispatch", "combine"), [(8, 153, 158), (16, 43, 43), (32, 58, 57), (64, 51, 50)])
def test_rates_that_deepep_publishes(ep: int, dispatch: float, combine: float) -> None:
    """Its table counts what stays as sent: over NVLink of EP 8, else over the network. Its router's groups are the nodes."""
    nodes = ep // 8
    model = replace(DEEPSEEK, router_groups=nodes, router_group_limit=min(nodes, 4))
    job = Job(model=model, gpus=ep, global_batch=ep, sequence=4096)
    for published, element_bytes in ((dispatch, 1), (combine, 2)):
        routes = TokenRoutes.of(
            DEEPEP, job, Setup(gpus=ep, ep=ep), (8,) * nodes, replace(MEGATRON, activation_bytes=element_bytes)
        )
        assert routes is not None
        assert routes.row_bytes == 7168 * element_bytes
        counted = routes.ranks if nodes == 1 else routes.nodes
        logical = 4096 * counted * routes.row_bytes / routes.us(H800) * 1e-3
        assert logical == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("ep", "published"), [(32, (46.54, 50.68)), (64, (41.46, 47.68))])
def test_rates_that_hybridep_publishes_between_nodes(ep: int, published: tuple[float, float]) -> None:
    """H100, BF16, 8 multiprocessors, whole calls; any router, eight experts a rank."""
    model = replace(DEEPSEEK, router_groups=1, router_group_limit=1, experts=8 * ep)
    job = Job(model=model, gpus=ep, global_batch=ep, sequence=4096)
    routes = TokenRoutes.of(HYBRIDEP, job, Setup(gpus=ep, ep=ep), (8,) * (ep // 8), MEGATRON)
    assert routes is not None
    assert 4096 * routes.nodes * routes.row_bytes / routes.us(EOS) * 1e-3 == pytest.approx(sum(published) / 2, rel=0.1)


def _reached(kernels: DispatchKernels, cluster: Cluster, nodes: int) -> float:
    """The logical rate of rows in BF16 by kernels, GB/s: what stays on a rank, or in a node, counts as sent."""
    model = replace(DEEPSEEK, router_groups=1, router_group_limit=1)
    job = Job(model=model, gpus=8 * nodes, global_batch=8 * nodes, sequence=8192)
    routes = TokenRoutes.of(kernels, job, Setup(gpus=8 * nodes, ep=8 * nodes), (8,) * nodes, MEGATRON)
    assert routes is not None
    return 8192 * (routes.ranks if nodes == 1 else routes.nodes) * routes.row_bytes / routes.us(cluster) * 1e-3


@pytest.mark.parametrize(
    ("kernels", "cluster", "nodes", "published", "rel"),
    [
        (DEEPEP_V2, "h100-eos", 4, 61.0, 0.05),
        (DEEPEP_V2, "b200-hgx", 1, (643 + 675) / 2, 0.05),
        (UCCL_EP, "mi300x", 4, (61 + 60) / 2, 0.06),
        (UCCL_EP, "mi300x", 8, (53 + 51) / 2, 0.06),
        (UCCL_EP, "mi300x", 1, (295 + 304) / 2, 0.06),
    ],
    ids=["v2-4", "v2-inside", "uccl-4", "uccl-8", "uccl-inside"],
)
def test_rates_that_newer_libraries_publish(
    kernels: DispatchKernels, cluster: str, nodes: int, published: float, rel: float
) -> None:
    assert _reached(kernels, clusters.load(cluster), nodes) == pytest.approx(published, rel=rel)


@pytest.mark.parametrize("kernels", [HYBRIDEP, DEEPEP_V2, NCCL_EP], ids=lambda each: each.name)
def test_kernels_that_nobody_ran_on_efa_have_no_time_between_nodes(kernels: DispatchKernels) -> None:
    job = replace(JOB, model=_ON_EFA)
    estimator = Estimator(job, P5, with_dispatcher(MEGATRON, kernels.name), efficiency=0.8)
    with pytest.raises(
        PlanError, match=f"^{kernels.name} has no time between nodes .*: {re.escape(kernels.not_posted)}"
    ):
        estimator.estimate(SETUP)
    assert estimator.estimate(replace(SETUP, ep=8)).step_us > 0  # NVLink, where no card is asked


@pytest.mark.parametrize("kernels", [DEEPEP_V2, UCCL_EP, NCCL_EP], ids=lambda each: each.name)
def test_an_estimate_says_which_rates_are_assumed(kernels: DispatchKernels) -> None:
    notes = Estimator(JOB, EOS, with_dispatcher(MEGATRON, kernels.name), efficiency=0.8).estimate(SETUP).notes
    assert any(note.endswith(f"; assumed: {kernels.assumed}") for note in notes)


P5, B300 = clusters.load("aws-p5"), clusters.load("aws-p6-b300")
_ON_EFA = replace(DEEPSEEK, router_groups=1, router_group_limit=1)


def _logical_gbps(cluster: Cluster, nodes: int, kernels: DispatchKernels = DEEPEP) -> float:
    """The rate of a dispatch of rows of DeepSeek-V3 between nodes, as DeepEP counts it."""
    job = Job(model=_ON_EFA, gpus=8 * nodes, global_batch=8 * nodes, sequence=4096)
    setup = Setup(gpus=8 * nodes, ep=8 * nodes)
    routes = TokenRoutes.of(kernels, job, setup, (8,) * nodes, MEGATRON)
    assert routes is not None
    dispatch = next(each for each in layer_forward(job, setup, MEGATRON) if each.name == "dispatch")
    return 4096 * routes.nodes * routes.row_bytes / routes.call_us(dispatch, cluster) * 1e-3


@pytest.mark.parametrize(
    ("cluster", "nodes", "published"),
    [(P5, 4, 43.7), (P5, 8, 39.6), (B300, 2, 126.6), (B300, 4, 97.1), (B300, 8, 84.2)],
    ids=["p5-4", "p5-8", "b300-2", "b300-4", "b300-8"],
)
def test_a_host_posts_no_faster_than_published(cluster: Cluster, nodes: int, published: float) -> None:
    """AWS's ep-backend-comparison, DeepEP by NVSHMEM on EFA, with the best chunks; the library's own ones are smaller, and
    take up to four times as long."""
    assert published / 5 < _logical_gbps(cluster, nodes) < published


@pytest.mark.parametrize(
    ("cluster", "nodes", "published"),
    [(P5, 4, 38.2), (P5, 8, 29.9), (B300, 2, 91.9), (B300, 4, 102.1), (B300, 8, 93.9)],
    ids=["p5-4", "p5-8", "b300-2", "b300-4", "b300-8"],
)
def test_uccl_posts_about_as_fast_as_published(cluster: Cluster, nodes: int, published: float) -> None:
    """The same comparison; its dispatches take chunks nearly as large as the best ones."""
    assert published / 2.5 < _logical_gbps(cluster, nodes, UCCL_EP) < 1.2 * published


_AWS = [
    # awslabs/awsome-distributed-ai, megatron-bridge: qwen3-30b/benchmarks/RESULTS.md and qwen3-235b/benchmarks/RESULTS.md
    # (commit 95b939c), s a step by NCCL and by DeepEP with NVSHMEM.
    (P5, "qwen3-30b-a3b", {"ep": 16, "pp": 4, "micro_batch": 4}, 8.60, 9.16),
    (P5, "qwen3-30b-a3b", {"ep": 16, "pp": 4, "micro_batch": 1}, 27.89, 28.69),
    (P5, "qwen3-30b-a3b", {"ep": 32, "pp": 2, "micro_batch": 4}, 9.24, 17.21),
    (P5, "qwen3-30b-a3b", {"ep": 32, "pp": 2, "micro_batch": 1}, 27.14, 34.66),
    (B300, "qwen3-235b-a22b", {"ep": 32, "pp": 2, "micro_batch": 4, "recompute": "core_attn"}, 15.76, 21.12),
    (B300, "qwen3-235b-a22b", {"ep": 32, "pp": 2, "micro_batch": 1, "recompute": "core_attn"}, 33.36, 44.81),
    (B300, "qwen3-235b-a22b", {"ep": 16, "pp": 4, "micro_batch": 4, "recompute": "core_attn"}, 12.21, 11.57),
]


@pytest.mark.parametrize(("cluster", "model", "degrees", "nccl", "deepep"), _AWS)
def test_the_order_of_dispatchers_on_efa(
    cluster: Cluster, model: str, degrees: dict[str, object], nccl: float, deepep: float
) -> None:
    """All to all is faster there but where few nodes are close to a fast card."""
    job = Job(model=catalog.load(model), gpus=64, global_batch=256, sequence=4096)
    setup = Setup(gpus=64, tp=8, **degrees)  # type: ignore[arg-type]
    by_calls, by_kernels = (
        Estimator(job, cluster, with_dispatcher(MEGATRON, name)).estimate(setup, detail=False).step_us
        for name in ("nccl", "deepep")
    )
    assert (by_calls < by_kernels) is (nccl < deepep)


_UCCL: list[tuple[Cluster, str, int, int, dict[str, object], float, float]] = [
    # The same pages: GPUs, batch, s a step by NCCL and by UCCL-EP.
    (P5, "qwen3-30b-a3b", 64, 256, {"ep": 16, "pp": 4, "micro_batch": 4}, 8.60, 14.81),
    (P5, "qwen3-30b-a3b", 64, 256, {"ep": 16, "pp": 4, "micro_batch": 1}, 27.89, 37.23),
    (P5, "qwen3-30b-a3b", 64, 256, {"ep": 32, "pp": 2, "micro_batch": 4}, 9.24, 26.51),
    (P5, "qwen3-30b-a3b", 64, 256, {"ep": 32, "pp": 2, "micro_batch": 1}, 27.14, 48.22),
    (B300, "qwen3-235b-a22b", 64, 256, {"ep": 32, "pp": 2, "micro_batch": 4, "recompute": "core_attn"}, 15.76, 19.16),
    (B300, "qwen3-235b-a22b", 64, 256, {"ep": 32, "pp": 2, "micro_batch": 1, "recompute": "core_attn"}, 33.36, 46.88),
    (B300, "qwen3-235b-a22b", 64, 256, {"ep": 16, "pp": 4, "micro_batch": 4, "recompute": "core_attn"}, 12.21, 13.06),
    (B300, "qwen3-235b-a22b", 64, 256, {"ep": 16, "pp": 4, "micro_batch": 1, "recompute": "core_attn"}, 34.17, 40.00),
    (B300, "qwen3-235b-a22b", 32, 128, {"ep": 16, "pp": 2, "micro_batch": 4, "recompute": "full"}, 15.18, 17.85),
    (B300, "qwen3-235b-a22b", 32, 128, {"ep": 16, "pp": 2, "micro_batch": 1, "recompute": "full"}, 46.81, 56.00),
    (B300, "qwen3-235b-a22b", 32, 128, {"ep": 32, "pp": 1, "micro_batch": 4, "recompute": "full"}, 22.20, 20.96),
    (B300, "qwen3-235b-a22b", 32, 128, {"ep": 32, "pp": 1, "micro_batch": 1, "recompute": "full"}, 45.45, 57.94),
]


def test_the_order_of_nccl_and_uccl_on_efa() -> None:
    """Right in 9 of 12, as docs/clusters.md says."""
    right = 0
    for cluster, model, gpus, batch, degrees, nccl, uccl in _UCCL:
        job = Job(model=catalog.load(model), gpus=gpus, global_batch=batch, sequence=4096)
        setup = Setup(gpus=gpus, tp=8, **degrees)  # type: ignore[arg-type]
        by_calls, by_kernels = (
            Estimator(job, cluster, with_dispatcher(MEGATRON, name)).estimate(setup, detail=False).step_us
            for name in ("nccl", "uccl")
        )
        right += (by_calls < by_kernels) is (nccl < uccl)
    assert right >= 9


@pytest.mark.parametrize("kernels", [DEEPEP, HYBRIDEP, NCCL_EP])
def test_kernels_for_nvidia_alone_are_refused_on_amd(kernels: DispatchKernels) -> None:
    words = f"{kernels.name} does not run on MI300X.*, which is AMD's: take nccl .RCCL. or uccl"
    job = Job(model=catalog.load("qwen3-30b-a3b"), gpus=16, global_batch=64, sequence=4096)
    with pytest.raises(DispatchError, match=words):  # also for a mapping whose tokens would go another way
        Estimator(job, clusters.load("mi300x"), with_dispatcher(MEGATRON, kernels.name))


@pytest.mark.parametrize("dispatcher", ["hybridep", "uccl"])
def test_a_search_passes_over_mappings_whose_tokens_cannot_be_sent(dispatcher: str) -> None:
    job = Job(model=catalog.load("qwen3-30b-a3b"), gpus=16, global_batch=64, sequence=4096)
    estimator = Estimator(job, P5, with_dispatcher(MEGATRON, dispatcher))
    space = Space(tp=(1,), cp=(1,), pp=(1,), recompute=("none",))
    found = search(job, estimator, space)
    passed_over = [
        note for note in found.best.notes if note.startswith("mappings were passed over: hybridep has no time")
    ]
    assert bool(passed_over) is (dispatcher == "hybridep")
    assert any((each.setup.ep, each.setup.exchange) == (16, "all_to_all") for each in found.ranked) is (
        dispatcher == "uccl"
    )
    if dispatcher == "hybridep":
        with pytest.raises(UsageError, match="hybridep has no time between nodes"):
            search(job, estimator, replace(space, ep=(16,), exchange=("all_to_all",)))


def test_popular_experts_that_lie_together_are_met_on_fewer_nodes() -> None:
    even, together = Loads.even(QWEN.experts), Loads.of_counts([9.0] * 16 + [1.0] * (QWEN.experts - 16))
    routes = [
        TokenRoutes.of(DEEPEP, replace(JOB, loads=loads), SETUP, (8, 8), MEGATRON) for loads in (None, even, together)
    ]
    nodes = [each.nodes for each in routes if each is not None]
    assert nodes[1] == pytest.approx(nodes[0])
    assert nodes[2] < nodes[0]


@pytest.mark.parametrize("loads", [Loads.even(16), Loads.zipf(16, 1.0), Loads.of_counts([1.0] * 8 + [0.0] * 8)])
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_distinct_parts_by_popularity_are_those_of_drawn_tokens(loads: Loads, parts: int) -> None:
    """Against tokens whose experts are drawn one after the other, without putting any back."""
    draw, top_k, tokens, met = random.Random(7), 4, 4000, 0
    for _ in range(tokens):
        left = list(loads.shares)
        for _ in range(top_k):
            left[draw.choices(range(16), left)[0]] = 0.0
        chosen = [index for index, share in enumerate(left) if share == 0.0 and loads.shares[index] > 0]
        met += len({index * parts // 16 for index in chosen})
    expected = distinct_nodes(16, parts, top_k) * loads.togetherness(parts, top_k)
    assert met / tokens == pytest.approx(expected, rel=0.07)  # of 16 experts; the formula is that of many


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "batch", "degrees", "published"),
    [
        # Megatron-MoE-ModelZoo, Qwen3-235B, cross-node EP, DeepEP, without 1F1B overlap
        (QWEN, EOS, 256, 2048, {"tp": 2, "ep": 32, "pp": 8, "vpp": 4, "recompute": "megascale"}, 245),
        # Megatron-Core MoE report, DeepSeek-V3 on H100; its batch is assumed
        (DEEPSEEK, EOS, 1024, 8192, {"tp": 2, "ep": 64, "pp": 8, "vpp": 4, "precision": "fp8"}, 368),
    ],
    ids=["qwen3", "deepseek"],
)
def test_published_runs_with_experts_between_nodes(
    model: ModelShape, cluster: Cluster, gpus: int, batch: int, degrees: dict[str, object], published: float
) -> None:
    job = Job(model=model, gpus=gpus, global_batch=batch, sequence=4096)
    setup = Setup(gpus=gpus, **degrees)  # type: ignore[arg-type]
    found = Estimator(job, cluster, with_dispatcher(MEGATRON, "deepep")).estimate(setup, detail=False)
    assert found.tflops == pytest.approx(published, rel=0.15)
    flat = Estimator(job, cluster, MEGATRON).estimate(setup, detail=False)
    assert flat.tflops < 0.7 * published


@pytest.mark.parametrize("kernels", [DEEPEP, HYBRIDEP], ids=lambda each: each.name)
def test_a_step_by_kernels(kernels: object) -> None:
    name = getattr(kernels, "name", "")
    software = with_dispatcher(MEGATRON, name)
    estimator = Estimator(JOB, EOS, software, efficiency=0.8)
    found, flat = estimator.estimate(SETUP), Estimator(JOB, EOS, MEGATRON, efficiency=0.8).estimate(SETUP)
    assert found.software == f"megatron, {name} dispatcher"
    assert found.step_us < flat.step_us
    assert sum(found.parts.values()) == pytest.approx(found.step_us)
    plans = {traffic.name: traffic for traffic in found.traffics}
    assert "dispatch_weights" not in plans
    assert {
        plans[each].plan for each in ("dispatch", "combine", "dispatch_gradient", "combine_gradient", "dispatch_again")
    } == {name}
    ranks = distinct_nodes(QWEN.experts, 16, QWEN.top_k)
    assert plans["dispatch"].logical_bytes == round(4096 * ranks * QWEN.hidden * 2)
    assert [note for note in found.notes if note.startswith(f"{name}: a token crosses to 1 of 1 other nodes")]
    for level in range(CLOSEST + 1):
        assert estimator.bound_us(SETUP, level) <= found.step_us * (1 + 1e-9)


def test_inside_a_node_nothing_crosses() -> None:
    routes = TokenRoutes.of(DEEPEP, JOB, replace(SETUP, ep=8), (8,), MEGATRON)
    assert routes is not None
    assert routes.network_rows == 0
    ranks = distinct_nodes(QWEN.experts, 8, QWEN.top_k)
    row_bytes = (QWEN.hidden * 2 + 740) * 14336 / (14336 + 740)
    assert routes.us(EOS) == pytest.approx(12 + 4096 * ranks * 7 / 8 * row_bytes / (0.68 * 450e3))
    assert "crosses" not in routes.note()


def test_busy_ranks_send_more_but_a_token_only_once() -> None:
    even, skewed, worst = (
        TokenRoutes.of(DEEPEP, replace(JOB, imbalance=ratio), SETUP, (8, 8), MEGATRON) for ratio in (1.0, 1.2, 9.0)
    )
    assert even is not None
    assert skewed is not None
    assert worst is not None
    assert skewed.ranks == pytest.approx(1.2 * even.ranks)
    assert (worst.nodes, worst.ranks) == (2, 16)


@pytest.mark.parametrize(
    ("setup", "job"),
    [
        (replace(SETUP, etp=2), JOB),
        (SETUP, replace(JOB, capacity_factor=1.0)),
        (replace(SETUP, exchange="all_gather"), JOB),
    ],
    ids=["etp", "capacity", "all_gather"],
)
def test_flat_and_said_so_where_kernels_do_not_dispatch(setup: Setup, job: Job) -> None:
    found = Estimator(job, EOS, with_dispatcher(MEGATRON, "deepep"), efficiency=0.8).estimate(setup)
    flat = Estimator(job, EOS, MEGATRON, efficiency=0.8).estimate(setup)
    assert found.step_us == flat.step_us
    said = f"deepep does not dispatch this mapping, whose tokens go by {setup.exchange}"
    assert len([note for note in found.notes if said in note]) == 1


def test_dispatchers_by_name() -> None:
    assert DISPATCHERS == ("nccl", "deepep", "hybridep", "deepepv2", "uccl", "ncclep", "commlayer")
    with pytest.raises(UsageError, match="dispatcher: expected nccl, deepep"):
        with_dispatcher(MEGATRON, "nvshmem")
    assert with_dispatcher(COMMLAYER, "commlayer") == COMMLAYER
    flat = with_dispatcher(COMMLAYER, "nccl")
    assert (flat.hides_dispatch, flat.two_levels, flat.kernels) == (False, False, None)
    ours = with_dispatcher(MEGATRON, "commlayer")
    assert (ours.hides_dispatch, ours.two_levels, ours.sends_weights) == (True, True, False)


@pytest.mark.parametrize("dispatcher", ["nccl", "deepep"])
def test_rows_go_out_in_fp8_and_come_home_in_bf16(dispatcher: str) -> None:
    """Forward and backward (DeepSeek-V3): what goes to the experts has a byte for each element and a scale for 128."""
    plain = with_dispatcher(MEGATRON, dispatcher)
    narrow = with_overlap(plain, dispatch_precision="fp8")
    wide, found = (Estimator(JOB, EOS, software, efficiency=0.8).estimate(SETUP) for software in (plain, narrow))
    before, after = ({each.name: each.logical_bytes for each in one.traffics} for one in (wide, found))
    part = (1 + 4 / 128) / 2
    for name in ("dispatch", "dispatch_again", "combine_gradient"):
        assert after[name] == pytest.approx(part * before[name], rel=1e-6)
    for name in ("combine", "combine_again", "dispatch_gradient"):
        assert after[name] == before[name]
    assert found.step_us < wide.step_us
    assert found.software == f"{plain.name}, FP8 dispatch"


def test_shared_experts_beside_the_exchange() -> None:
    job = replace(JOB, model=replace(DEEPSEEK, layers=8, dense_layers=0))
    plain = with_dispatcher(MEGATRON, "deepep")
    setup = Setup(gpus=64, ep=16, tp=2)
    alone, beside = (
        Estimator(job, EOS, software, efficiency=0.8).estimate(setup)
        for software in (plain, with_overlap(plain, overlaps_shared=True))
    )
    assert sum(beside.parts.values()) == pytest.approx(beside.step_us)
    saved = alone.step_us - beside.step_us
    # What is hidden is the exchange, by as much as shared experts take; less what these lack beside it.
    assert 0.5 * alone.parts["dense"] < saved < alone.parts["dense"]
    assert beside.parts["dispatch"] < alone.parts["dispatch"]
    dense = replace(job, model=replace(job.model, shared_width=0))
    without = [
        Estimator(dense, EOS, software, efficiency=0.8).estimate(setup, detail=False).step_us
        for software in (plain, with_overlap(plain, overlaps_shared=True))
    ]
    assert without[0] == pytest.approx(without[1])


def test_chunks_have_no_such_overlap() -> None:
    with pytest.raises(UsageError, match="in chunks, without FP8 dispatch and shared experts beside it"):
        with_overlap(COMMLAYER, dispatch_precision="fp8", overlaps_shared=True)
    assert with_overlap(COMMLAYER) == COMMLAYER


def test_measured_clusters_have_no_rates_of_kernels() -> None:
    cluster = Cluster.from_profile(profile_catalog.load("emulated-2x4-8to1"), hardware.GPUS["h100"])
    with pytest.raises(UsageError, match="nobody measured deepep on it: take a declared cluster"):
        Estimator(JOB, cluster, with_dispatcher(MEGATRON, "deepep"))
    routes = TokenRoutes.of(DEEPEP, JOB, SETUP, (8, 8), MEGATRON)
    assert routes is not None
    with pytest.raises(PlanError, match="nothing is declared"):
        routes.us(cluster)


def test_kernels_inside_a_mesh_have_the_links_of_their_group() -> None:
    """Two of eight GPUs have one of a GPU's seven links between them, through a switch all of its peak."""
    mesh, switch = (clusters.load(name) for name in ("mi300x", "h100-eos"))

    def us(cluster: Cluster, ranks: int) -> float:
        routes = TokenRoutes(DEEPEP, 1, ranks, tokens=1 << 20, nodes=1, ranks=8, row_bytes=14336, out_bytes=14336)
        return routes.us(cluster) / (routes.sent_rows * (ranks - 1) / ranks)

    assert us(mesh, 2) == pytest.approx(7 * us(mesh, 8), rel=0.01)
    assert us(switch, 2) == pytest.approx(us(switch, 8), rel=0.01)

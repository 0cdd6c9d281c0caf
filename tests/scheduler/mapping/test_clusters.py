"""Declared and measured clusters: their shapes, their curves, and prices that behave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles import catalog
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Peaks, Resource, bus_factor
from commlayer.profiles.profile import Profile, parse_profile
from commlayer.readers.cluster_files import parse, resolve
from commlayer.scheduler.decision import Policy, choose
from commlayer.scheduler.mapping import clusters, declared_links, hardware
from commlayer.scheduler.mapping.catalog import load as load_model
from commlayer.scheduler.mapping.cluster import Cluster, Link
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON, with_dispatcher
from commlayer.scheduler.mapping.validity import assess, kind_of
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.traffic import GROUP_COLLECTIVES, Traffic
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat

DOC = Path(__file__).parents[3] / "docs" / "clusters.md"
MIB = 1 << 20
FLAT = (Strategy.FLAT,)
GROUPS = [(2,), (8,), (1, 1), (1,) * 16, (8,) * 2, (4,) * 4, (8,) * 32, (3, 5), (8, 4)]
FEW = settings(max_examples=25)

sizes = st.integers(1, 1 << 33)
groups = st.sampled_from(GROUPS)
collectives = st.sampled_from(GROUP_COLLECTIVES)


def flat_us(cluster: Cluster, collective: str, size: float, nodes: tuple[int, ...]) -> float:
    return Pricer(cluster, FLAT).us(collective, size, nodes)


def busbw(cluster: Cluster, collective: str, size: int, nodes: tuple[int, ...]) -> float:
    """The bus bandwidth as nccl-tests prints it, GB/s."""
    return size / flat_us(cluster, collective, size, nodes) / 1e3 * bus_factor(collective, sum(nodes))


H100 = clusters.load("h100-eos")


def as_measured(num: int, each: int) -> Profile:
    """A profile with the curves that `commlayer measure` takes on ``num`` nodes of ``each`` ranks."""
    shapes = [(each,) * num, (each,), (1,) * num]
    curves = {curve.key: curve for nodes in shapes for curve in H100.profile_of(nodes).curves}
    return H100.profile_of(shapes[0]).replace(name=f"ours-{num}x{each}", kind="measured", curves=curves.values())


OURS = as_measured(2, 4)


# Shapes


def in_domains(ranks: tuple[int, ...], domain: int) -> tuple[int, ...]:
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // domain] = counts.get(rank // domain, 0) + 1
    return tuple(counts.values())


def first_ranks(layout: tuple[tuple[int, int], ...], ranks: int) -> list[int]:
    """The spans of all groups that lie within the job, by trying each rank."""
    reach = sum((size - 1) * stride for size, stride in layout)
    at_start = (rank for rank in range(ranks) if all(rank // stride % size == 0 for size, stride in layout))
    return [rank for rank in at_start if rank + reach < ranks]


def all_shapes(layout: tuple[tuple[int, int], ...], ranks: int, domain: int) -> set[tuple[int, ...]]:
    offsets = [0]
    for size, stride in layout:
        offsets = [offset + index * stride for index in range(size) for offset in offsets]
    return {in_domains(tuple(sorted(first + at for at in offsets)), domain) for first in first_ranks(layout, ranks)}


def slowest_of(shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The shapes that leave a domain; of these the emptiest domain; of these the most domains, and the fullest."""
    crossing = {nodes for nodes in shapes if len(nodes) > 1} or shapes
    emptiest = {nodes for nodes in crossing if min(nodes) == min(map(min, crossing))}
    most = {nodes for nodes in emptiest if len(nodes) == max(map(len, emptiest))}
    return min(nodes for nodes in most if max(nodes) == max(map(max, most)))


@FEW
@given(st.sampled_from([1, 2, 3]), st.data(), st.sampled_from([4, 6, 8, 72]))
def test_nodes_of_an_axis_are_those_of_its_slowest_group(odd: int, data: st.DataObject, domain: int) -> None:
    def part(left: int) -> int:
        return 1 << data.draw(st.integers(0, left))

    power = data.draw(st.integers(0, 7))
    tp = part(power)
    cp = part(power - tp.bit_length() + 1)
    etp = part(power)
    ep = part(power - etp.bit_length() + 1)
    cluster, gpus = H100.replace(domain=domain), odd << power
    setup, mapping = Setup(gpus=gpus, tp=tp, cp=cp, etp=etp, ep=ep), FoldedMapping(gpus, tp, cp, 1, ep, etp)
    for axis in ("tp", "cp", "dp", "etp", "ep", "edp", "tp_cp", "dp_cp", "etp_ep"):
        shapes = {in_domains(group, domain) for group in mapping.groups(axis)}
        assert cluster.nodes_of(setup.layout(axis), gpus) == slowest_of(shapes)


@pytest.mark.parametrize("domain", [6, 8, 72])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 12])
def test_nodes_of_looks_at_every_group(domain: int, size: int, stride: int) -> None:
    cluster, period = H100.replace(domain=domain), size * stride
    layout = ((size, stride),)
    for count in (1, 2, 5):
        assert cluster.nodes_of(layout, count * period) == slowest_of(all_shapes(layout, count * period, domain))
    # Of a job without end there is each alignment that a job of as many periods as the domain has ranks has.
    assert cluster.nodes_of(layout) == slowest_of(all_shapes(layout, domain * period, domain))


@pytest.mark.parametrize("domain", [6, 8, 72])
@pytest.mark.parametrize("layout", [((2, 2), (4, 8)), ((4, 1), (3, 8)), ((2, 1), (2, 2), (2, 16)), ((3, 2), (2, 12))])
def test_nodes_of_a_group_of_several_parts(domain: int, layout: tuple[tuple[int, int], ...]) -> None:
    period = layout[-1][0] * layout[-1][1]
    for count in (1, 3, 7):
        expected = slowest_of(all_shapes(layout, count * period, domain))
        assert H100.replace(domain=domain).nodes_of(layout, count * period) == expected


def test_unfolded_groups_are_those_of_their_ranks() -> None:
    setup = Setup(gpus=64, tp=2, cp=4, ep=2, etp=2, folded=False)
    for axis in ("ep", "edp", "etp_ep"):
        assert H100.nodes_of(setup.layout(axis), 64) == slowest_of(all_shapes(setup.layout(axis), 64, 8))


def test_experts_of_64_gpus_leave_a_rack_of_72() -> None:
    rack, layout = clusters.load("gb200-nvl72"), ((64, 1),)
    assert rack.nodes_of(layout, 64) == (64,)
    assert rack.nodes_of(layout, 512) == rack.nodes_of(layout) == (8, 56)
    assert sum(len(in_domains(tuple(range(first, first + 64)), 72)) > 1 for first in range(0, 512, 64)) == 7
    inside, across = (flat_us(rack, "all_to_all_v", 256 * MIB, nodes) for nodes in ((64,), (8, 56)))
    assert 14 < across / inside < 15
    # Jobs that use 64 of each rack stay inside.
    assert rack.replace(domain=64).nodes_of(layout, 512) == (64,)


@FEW
@given(
    collectives, st.sampled_from([1 << 26, 1 << 30]), st.integers(3, 20), st.integers(1, 3), st.sampled_from([6, 72])
)
def test_no_group_of_an_axis_is_slower_than_the_one_that_is_priced(
    collective: str, size: int, ranks: int, stride: int, domain: int
) -> None:
    cluster, layout = clusters.load("gb200-nvl72").replace(domain=domain), ((ranks, stride),)
    worst = cluster.nodes_of(layout, 32 * ranks * stride)
    for nodes in all_shapes(layout, 32 * ranks * stride, domain):
        # The rest is hops and messages inside domains, which the shapes are not ordered by.
        assert flat_us(cluster, collective, size, nodes) <= flat_us(cluster, collective, size, worst) * 1.05


def test_nodes_of_is_the_same_object_each_time() -> None:
    assert H100.nodes_of(((16, 8),)) is H100.nodes_of(((16, 8),)) is H100.nodes_of(((16, 16),))
    assert H100.nodes_of(((16384, 1),)) == (8,) * 2048


def test_nodes_of_refuses_what_is_no_layout() -> None:
    with pytest.raises(UsageError, match="layout: expected sizes and strides of at least 1"):
        H100.nodes_of(((0, 1),))
    with pytest.raises(
        UsageError, match="expected each stride to be a multiple of what lies inside it, 4 x 1 = 4, got 2"
    ):
        H100.nodes_of(((4, 1), (2, 2)))
    with pytest.raises(UsageError, match=r"ranks: expected 0 \(any number\) or at least the 57 that"):
        H100.nodes_of(((8, 8),), 56)


# Curves


@pytest.mark.parametrize("name", ["a800-monta", "gb200-nvl72", "h100-eos"])
def test_every_plan_on_every_cluster_finds_its_curves(name: str) -> None:
    cluster = clusters.load(name)
    wires = (NATIVE, Wire(WireFormat.BF16, 1024), Wire(WireFormat.FP8_E4M3, 1024))
    for nodes in GROUPS:
        profile = cluster.profile_of(nodes)
        assert cluster.profile_of(tuple(nodes)) is profile
        assert parse_profile(profile.to_json(), name) == profile
        link = Resource.INTER if len(nodes) > 1 else Resource.INTRA
        for collective in GROUP_COLLECTIVES:
            traffic = Traffic(
                24 * MIB, sum(nodes), link=link, collective=collective, nodes=nodes, wires=wires, element_bytes=4
            )
            decision = choose(traffic, profile)
            assert decision.predicted_us > 0
            assert not decision.unpriced


def test_a_whole_rack_is_one_domain() -> None:
    rack = clusters.load("gb200-nvl72")
    assert rack.nodes_of(((64, 1),), 64) == (64,)
    assert flat_us(rack, "all_to_all_v", 64 * MIB, (64,)) < flat_us(rack, "all_to_all_v", 64 * MIB, (8,) * 8) / 5


def test_a_group_that_fits_no_domain_is_refused() -> None:
    with pytest.raises(PlanError, match=r"expected 1 to 8 ranks on each node, got the group 1x16"):
        H100.profile_of((16,))


@pytest.mark.parametrize("name", clusters.names())
def test_every_known_cluster_says_where_it_comes_from(name: str) -> None:
    cluster = clusters.load(name)
    assert cluster.name == name
    assert cluster.source
    assert cluster.gpu.source
    assert all(cluster.link(link).source for link in (Resource.INTER, Resource.INTRA, Resource.DEVICE))
    assert f"`{name}`" in DOC.read_text(encoding="utf-8")


# What was measured comes back: nccl-tests' bus bandwidths, which the points do not state as such


@pytest.mark.parametrize(
    ("name", "collective", "nodes", "published"),
    [
        ("h100-eos", "all_to_all_v", (8,), 320),  # NVIDIA GTC 2025 S72583
        ("a100", "all_to_all_v", (8,), 210),
        ("b200-hgx", "all_to_all_v", (8,), 640),
        ("gb200-nvl72", "all_to_all_v", (32,), 640),
        ("h100-eos", "all_to_all_v", (8,) * 4, 48),
        ("a100", "all_to_all_v", (8,) * 4, 24),
        ("h200", "all_gather", (8,), 361.4),  # ml-engineering
        ("h200", "reduce_scatter", (8,), 362.9),
        ("b200-hgx", "all_reduce", (8,), 682),
        ("a100", "all_reduce", (8,), 234.9),
    ],
)
def test_large_calls_have_the_published_bus_bandwidth(
    name: str, collective: str, nodes: tuple[int, ...], published: float
) -> None:
    assert busbw(clusters.load(name), collective, 8 << 30, nodes) == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize(
    ("megabytes", "us"),  # AWS's awsome-distributed-training, two p5.48xlarge
    [
        (4, 168.6),
        (16, 298.1),
        (64, 601.5),
        (256, 1468.2),
    ],  # larger ones are summed in NVLink's switch, which is not modelled
)
def test_rings_over_efa_take_the_published_times(megabytes: int, us: float) -> None:
    assert flat_us(clusters.load("aws-p5"), "all_reduce", megabytes * MIB, (8, 8)) == pytest.approx(us, rel=0.25)


@pytest.mark.parametrize(("ranks", "published"), [(2, 47.7), (8, 312.9)])
def test_two_gpus_of_a_mesh_have_one_link(ranks: int, published: float) -> None:
    """ml-engineering: an all_reduce of 4 GiB among MI300X, bus bandwidth."""
    assert busbw(clusters.load("mi300x"), "all_reduce", 4 << 30, (ranks,)) == pytest.approx(published, rel=0.08)


def test_a_message_in_a_mesh_has_one_link_and_a_switch_all() -> None:
    mesh, switch = (clusters.load(name) for name in ("mi355x", "h100-eos"))
    assert flat_us(mesh, "send_recv", 1 << 30, (2,)) > (1 << 30) / 76.5e3
    assert flat_us(switch, "send_recv", 1 << 30, (2,)) < (1 << 30) / 225e3


def test_sockets_reach_what_is_published_and_take_no_dispatcher() -> None:
    ethernet = clusters.load("ethernet-400")
    # Of two nodes each card carries S/8, where the bus bandwidth counts 15/8 of S.
    assert busbw(ethernet, "all_reduce", 8 << 30, (8, 8)) == pytest.approx(0.6 * 50 * 15 / 8, rel=0.05)
    job = Job(model=load_model("deepseek-v3"), gpus=256, global_batch=512, sequence=4096)
    setup = Setup(gpus=256, ep=32, pp=8, pipeline_layout="auto", recompute="full")
    with pytest.raises(PlanError, match="deepep needs RDMA between nodes, which ethernet-400 has not"):
        Estimator(job, ethernet, with_dispatcher(MEGATRON, "deepep")).estimate(setup, detail=False)


def test_a_domain_is_no_larger_than_the_mesh_of_its_links() -> None:
    with pytest.raises(UsageError, match="expected at most the 8 GPUs of the mesh"):
        clusters.load("mi300x").replace(domain=72)


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "vr200-nvl72"])
def test_no_interval_of_a_published_run_is_taken_for_another_maker_or_generation(name: str) -> None:
    job = Job(model=load_model("mixtral-8x7b"), gpus=72, global_batch=576, sequence=4096)
    kind = kind_of(job, Setup(gpus=72, ep=8), clusters.load(name), MEGATRON, 1e6)
    assert assess(kind).is_new


def test_another_fabric_changes_the_network_alone() -> None:
    on_efa = H100.on("efa")
    assert (on_efa.fabric, on_efa.inter) == ("efa", clusters.load("aws-p5").inter)
    assert (on_efa.intra, on_efa.peaks) == (H100.intra, H100.peaks)
    with pytest.raises(UsageError, match="fabric: expected infiniband, roce, efa, tcp, got 'ethernet'"):
        H100.on("ethernet")
    measured = Cluster.from_profile(H100.profile_of((8, 8)), H100.gpu)
    with pytest.raises(UsageError, match="was measured, and its fabric is in its curves: leave"):
        measured.on("efa")


@pytest.mark.parametrize(
    ("name", "nodes", "published"),
    [
        ("aws-p5", 4, 45.1),
        ("aws-p5", 8, 40.4),
        ("aws-p6-b300", 2, 104.9),
        ("aws-p6-b300", 4, 94.0),
        ("aws-p6-b300", 8, 74.0),
    ],
)
def test_exchanges_over_efa_have_half_the_published_rates(name: str, nodes: int, published: float) -> None:
    """AWS's ep-backend-comparison: nccl-tests' alltoall of 64 MiB, bus bandwidth, of which trainings reach half."""
    assert busbw(clusters.load(name), "all_to_all", 64 * MIB, (8,) * nodes) == pytest.approx(published / 2, rel=0.2)


def test_kernels_are_slower_than_calls_where_the_host_posts_for_them() -> None:
    """DeepSeek-V3 over 4 nodes for a group of experts: on InfiniBand DeepEP is far ahead of all_to_all, on EFA about as
    fast (of Kimi-K2's steps on 256 B300 DeepEP's takes 0.71 of all_to_all's time with micro-batches of 4, and 1.05 with 1)."""
    job = Job(model=load_model("deepseek-v3"), gpus=256, global_batch=512, sequence=4096)
    setup = Setup(gpus=256, ep=32, pp=8, pipeline_layout="auto", recompute="full")
    ratios = []
    for cluster in (clusters.load("h200"), clusters.load("aws-p5en")):
        steps = [
            Estimator(job, cluster, with_dispatcher(MEGATRON, name)).estimate(setup, detail=False).step_us
            for name in ("deepep", "nccl")
        ]
        ratios.append(steps[0] / steps[1])
    assert ratios[0] < 0.7
    assert 0.71 < ratios[1] < 1.05


def test_a_ring_over_nodes_uses_every_card() -> None:
    # NVIDIA/nccl-tests#290: 46 to 48 GB/s a card. With NVLink out of the way each of eight cards carries 2·S·(3/4)/8.
    wide = H100.replace(peaks=Peaks(50, 4500, 1675))
    assert busbw(wide, "all_reduce", 8 << 30, (8,) * 4) == pytest.approx(47 * 8 * (4 / 3) * (31 / 32), rel=0.02)


@pytest.mark.parametrize(
    ("collective", "nodes", "megabytes", "milliseconds"),
    [
        ("all_to_all_v", (1, 1), 256, 6.909),
        ("all_to_all_v", (1, 1), 32, 1.012),
        ("all_to_all_v", (1, 1), 8, 0.374),
        ("all_gather", (8,), 256, 1.443),
        ("all_gather", (8,), 64, 0.385),
    ],
)
def test_montas_table_8(collective: str, nodes: tuple[int, ...], megabytes: int, milliseconds: float) -> None:
    found = flat_us(clusters.load("a800-monta"), collective, megabytes * 1e6, nodes)
    assert found == pytest.approx(milliseconds * 1e3, rel=0.015)  # the curve's points are powers of two


# Properties


@FEW
@given(collectives, groups, sizes, sizes)
def test_time_never_falls_with_bytes(collective: str, nodes: tuple[int, ...], a: int, b: int) -> None:
    few, many = sorted((a, b))
    assert flat_us(H100, collective, few, nodes) <= flat_us(H100, collective, many, nodes) * (1 + 1e-12)


@FEW
@given(
    collectives,
    groups,
    sizes,
    st.sampled_from(["inter_gbps", "intra_gbps", "device_gbps"]),
    st.floats(1.0, 16.0),
)
def test_time_falls_or_stays_with_bandwidth(
    collective: str, nodes: tuple[int, ...], size: int, link: str, faster: float
) -> None:
    fields = {name: getattr(H100.peaks, name) for name in Peaks.__struct_fields__}
    other = H100.replace(peaks=Peaks(**{**fields, link: fields[link] * faster}))
    # Interpolated between powers of two: both are at most 1.5 % high, and by different parts of it.
    assert flat_us(other, collective, size, nodes) <= flat_us(H100, collective, size, nodes) * 1.015


@FEW
@given(collectives, st.sampled_from([2, 4, 8]), sizes)
def test_one_domain_is_never_slower_than_a_rank_on_each(collective: str, ranks: int, size: int) -> None:
    inside, across = flat_us(H100, collective, size, (ranks,)), flat_us(H100, collective, size, (1,) * ranks)
    assert inside <= across


@FEW
@given(collectives, sizes, st.sampled_from([(3, 5), (1, 7), (2, 6)]))
def test_uneven_nodes_are_never_faster_than_even_ones(collective: str, size: int, nodes: tuple[int, ...]) -> None:
    assert flat_us(H100, collective, size, nodes) >= flat_us(H100, collective, size, (4, 4))


@pytest.mark.parametrize("collective", GROUP_COLLECTIVES)
@pytest.mark.parametrize("size", [MIB, 64 * MIB, 1024 * MIB])
def test_plans_on_uneven_nodes_never_take_less_time_than_their_emptiest_node(collective: str, size: int) -> None:
    """Bytes that come into a domain of one rank, or leave it, cross the one card there is, whatever the plan."""
    rack = clusters.load("gb200-nvl72")
    times = [Pricer(rack).us(collective, size, nodes) for nodes in ((32, 32), (16, 48), (8, 56), (2, 62), (1, 63))]
    assert times == sorted(times)
    assert times[-1] >= size * 63 / 64 / (rack.peaks.inter_gbps * 1e3)


@FEW
@given(collectives, groups, st.integers(1, 1 << 30))
def test_another_strategy_never_makes_it_slower(collective: str, nodes: tuple[int, ...], size: int) -> None:
    # Declared curves state no error, so that the fastest plan is chosen.
    assert Pricer(H100).us(collective, size, nodes) <= flat_us(H100, collective, size, nodes)


@FEW
@given(st.integers(1, 1 << 28), st.sampled_from([1, 2, 8, 64, 72, 256]))
def test_more_nodes_of_a_ring_never_take_less_time(size: int, num: int) -> None:
    assert flat_us(H100, "all_gather", size, (8,) * num) <= flat_us(H100, "all_gather", size, (8,) * (num + 1)) * 1.015


# The price is the run time's own decision


@pytest.mark.parametrize("lane", ["", "dp"])
@pytest.mark.parametrize("nodes", [(8,) * 2, (8,) * 16])
def test_the_price_is_what_choose_says(nodes: tuple[int, ...], lane: str) -> None:
    pricer = Pricer(H100)
    traffic = Traffic(200 * MIB, sum(nodes), collective="reduce_scatter", nodes=nodes, lane=lane)
    expected = choose(traffic, H100.profile_of(nodes), Policy(min_bytes=0))
    decision = pricer.decide("reduce_scatter", 200 * MIB, nodes, lane)
    assert (decision.plan, decision.timeline) == (expected.plan, expected.timeline)
    assert pricer.us("reduce_scatter", 200 * MIB, nodes, lane) == expected.predicted_us
    assert pricer.decide("reduce_scatter", 200 * MIB, nodes, lane) is decision


def test_a_group_of_one_and_no_bytes_take_no_time() -> None:
    pricer = Pricer(H100)
    assert pricer.us("all_gather", 1e9, (1,)) == 0.0
    assert pricer.us("all_to_all_v", 0, (8,)) == 0.0
    assert pricer.decide("all_gather", 1e9, (1,)).predicted_us == 0.0


def test_equal_nodes_of_other_identity_have_the_same_price() -> None:
    pricer = Pricer(H100)
    first = tuple([8] * 4)
    assert pricer.us("all_gather", MIB, first) == pricer.us("all_gather", MIB, tuple([8] * 4))
    for num in range(1, 6000):  # more identities than are kept
        pricer.us("all_gather", MIB, tuple([1] * (1 + num % 3)))
    assert pricer.us("all_gather", MIB, first) == flat_us(H100, "all_gather", MIB, (8,) * 4)


def test_traffic_below_min_bytes_stays_flat() -> None:
    nodes = (8,) * 16
    assert Pricer(H100).decide("all_gather", 4 * MIB, nodes).plan.strategy is not Strategy.FLAT
    assert Pricer(H100, min_bytes=8 * MIB).decide("all_gather", 4 * MIB, nodes).plan.strategy is Strategy.FLAT


def test_sending_takes_the_bytes_at_their_rate() -> None:
    pricer = Pricer(H100)
    large = 1 << 33
    assert pricer.us("send_recv", large, (1, 1)) == pytest.approx(large / (50e3 * 0.744), rel=0.02)
    assert pricer.us("send_recv", large, (2,)) == pytest.approx(large / (450e3 * 0.711), rel=0.02)
    with pytest.raises(PlanError, match=r"expected two ranks, nodes \(2,\) or \(1, 1\), got \(4,\)"):
        pricer.us("send_recv", large, (4,))


@pytest.mark.parametrize("nodes", [(1,) * 2048, (8,) * 256])
@pytest.mark.parametrize("collective", GROUP_COLLECTIVES)
def test_groups_of_thousands_can_be_priced(collective: str, nodes: tuple[int, ...]) -> None:
    pricer = Pricer(H100)
    assert pricer.us(collective, 256 * MIB, nodes) > pricer.us(collective, 256 * MIB, nodes[:16])


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(PlanError, match="expected all_to_all or one of"):
        Pricer(H100).us("gossip", MIB, (8,))


# Measured clusters


def test_a_measured_cluster_uses_its_profile_for_the_groups_that_were_measured() -> None:
    cluster = Cluster.from_profile(OURS, hardware.GPUS["h100"])
    assert (cluster.domain, cluster.kind, H100.kind) == (4, "profile", "declared")
    for nodes in ((4, 4), (4,), (1, 1)):
        assert cluster.profile_of(nodes) is OURS
        assert Pricer(cluster).us("all_reduce", MIB, nodes) == Pricer(H100).us("all_reduce", MIB, nodes)


def test_sending_on_a_measured_cluster_is_half_an_exchange() -> None:
    measured = OURS.replace(curves=[curve for curve in OURS.curves if curve.collective != "send_recv"])
    pricer = Pricer(Cluster.from_profile(measured, hardware.GPUS["h100"]))
    assert pricer.us("send_recv", MIB, (1, 1)) == OURS.curve("all_to_all", Resource.INTER, 2).at(2 * MIB)


def test_a_profile_without_the_curve_says_which() -> None:
    # This one was measured when profiles knew exchanges of replicated tokens only.
    cluster = Cluster.from_profile(catalog.load("emulated-2x4-8to1"), hardware.GPUS["h100"])
    with pytest.raises(PlanError, match=r"a curve of all_reduce on inter for group size 8, got none; .*Measure it"):
        Pricer(cluster).us("all_reduce", MIB, (4, 4))


def test_a_group_of_another_shape_has_curves_between_those_that_were_measured() -> None:
    # Four ranks on two nodes: the profile has curves for four ranks of one node, which must not stand in.
    cluster = Cluster.from_profile(OURS, hardware.GPUS["h100"])
    assert cluster.profile_of((2, 2)).curve("all_reduce", Resource.INTER, 4).basis == "interpolated"
    with pytest.raises(PlanError, match=r"a group of 10 ranks on nodes \(5, 5\) does not fit it; measured were"):
        cluster.profile_of((5, 5))


def test_further_profiles_bring_further_shapes() -> None:
    smaller = as_measured(2, 2)
    cluster = Cluster.from_profile(OURS, hardware.GPUS["h100"], smaller)
    assert cluster.profile_of((2, 2)) is smaller
    assert cluster.profile_of((4, 4)) is OURS
    with pytest.raises(UsageError, match="expected profiles of at most 2 ranks on a node"):
        Cluster.from_profile(smaller, hardware.GPUS["h100"], OURS)


# Names, files, errors


def test_unknown_names_bring_close_ones() -> None:
    with pytest.raises(UsageError, match=r"got 'h100'. Did you mean h100-(eos|roce)"):
        clusters.load("h100")
    with pytest.raises(UsageError, match=r"got 'h100-eoss'. Did you mean h100-eos"):
        clusters.load("h100-eoss")
    assert clusters.load("h800") is resolve("h800")


def test_what_is_not_declared_cannot_be_asked() -> None:
    with pytest.raises(PlanError, match="nothing is declared for inter"):
        Cluster.from_profile(OURS, hardware.GPUS["h100"]).link(Resource.INTER)
    with pytest.raises(UsageError, match="expected one of the fields name, gpu, domain"):
        H100.replace(domains=4)
    with pytest.raises(UsageError, match="domain: expected a whole number of at least 1, got 0"):
        H100.replace(domain=0)
    with pytest.raises(UsageError, match="expected inter, intra and device, or a measured profile"):
        H100.replace(inter=None)


def test_a_changed_copy_has_curves_of_its_own() -> None:
    before = H100.profile_of((8, 8))
    slower = H100.replace(peaks=Peaks(25, 450, 1675))
    assert slower.profile_of((8, 8)) != before
    assert H100.profile_of((8, 8)) is before
    assert hash(slower) != hash(H100)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "ring: expected at least one point"),
        (((1e6, 0.5), (1e6, 0.6)), r"ring\[1\]: expected sizes that increase"),
        (((1e6, 1.5),), r"ring\[0\]: expected more than 0 and at most 1, got 1.5"),
        (((0, 0.5),), r"ring\[0\]: expected a size of at least 1 byte"),
        (((1e6, 0.1), (2e6, 0.9)), r"ring\[1\]: expected that more bytes take no less time"),
    ],
)
def test_efficiencies_that_cannot_be(points: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Link(ring=points, messages=((1e6, 0.5),), gbps=50, latency_us=1)


def example() -> str:
    found = re.search(r"```json\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found.group(1)


def test_the_documented_file_is_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(example(), encoding="utf-8")
    cluster = resolve(str(path))
    assert (cluster.name, cluster.domain, cluster.gpu) == ("ours", 8, hardware.GPUS["h100"])
    assert cluster.peaks.device_gbps == 1675
    assert cluster.intra is declared_links.NVLINK
    assert cluster.link(Resource.INTER).gbps == 25
    assert cluster.profile_of((8, 8)).slowdown(Resource.INTRA, Resource.DEVICE) == 1.2
    assert busbw(cluster, "all_to_all_v", 8 << 30, (1,) * 8) == pytest.approx(25 * 0.8, rel=0.02)


def test_a_file_may_name_profiles(tmp_path: Path) -> None:
    OURS.save(tmp_path / "measured.json")
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"name": "ours", "gpu": "a100", "profiles": ["measured.json"]}), encoding="utf-8")
    cluster = resolve(str(path))
    assert cluster.name == "ours"
    assert cluster.profile_of((4, 4)) == OURS


SOUND = {"name": "ours", "gpu": "h100", "domain": 8, "peaks": {"inter_gbps": 50, "intra_gbps": 450}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domian": 8}, "ours.json: field domian: unknown field; .* Did you mean domain"),
        ({"gpu": "h10"}, "gpu: expected one of .* got 'h10'. Did you mean h100"),
        ({"gpu": {"name": "X", "bf16_tflop": 1}}, "field gpu.bf16_tflop: unknown field; .* Did you mean bf16_tflops"),
        ({"inter": {"rings": []}}, "field inter.rings: unknown field; .* Did you mean ring"),
        ({"domain": 0}, "expected domain, of at least 1, and peaks; or profiles"),
        ({"domain": "8"}, r"expected `int`, got `str` - at `\$.domain`"),
        ({"peaks": {"inter_gbps": -1, "intra_gbps": 1}}, "inter_gbps: expected a number of GB/s from 1e-06"),
        (
            {"peaks": {"inter_gbps": 1e30, "intra_gbps": 1}},
            "inter_gbps: expected a number of GB/s from .*, got 1e",
        ),
        ({"peaks": {"inter_gbps": 1e-300, "intra_gbps": 1}}, "inter_gbps: expected a number of GB/s from 1e-06"),
        ({"peaks": {"inter_gbps": 0, "intra_gbps": 1}}, "inter_gbps: expected a number of GB/s from 1e-06"),
        ({"profiles": ["x.json"]}, "domain: expected it not beside profiles"),
        ({"format": "commlayer-profile"}, 'this is a profile, .* "profiles": \\["ours.json"\\]'),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({**SOUND, **changes}), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        resolve(str(path))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a cluster file, got no such file$"):
        resolve(str(tmp_path / "none.json"))
    for text, message in (("{", "line 1, column 2: expected JSON"), ("[]", "expected a JSON object with a cluster")):
        with pytest.raises(UsageError, match=message):
            parse(text, "ours.json")
    with pytest.raises(UsageError, match=r"ours\.json: none\.json: expected a profile"):
        parse(json.dumps({"name": "ours", "gpu": "h100", "profiles": ["none.json"]}), "ours.json")


@pytest.mark.parametrize(
    ("name", "gpus", "used"),
    [
        ("gb200-nvl72", 64, 72),
        ("gb200-nvl72", 256, 64),
        ("gb300-nvl72", 1024, 64),
        ("gb200-nvl72", 1152, 72),
        ("gb200-nvl72", 73, 72),  # a prime: nothing does
        ("h100-eos", 1024, 8),
    ],
)
def test_a_job_uses_as_much_of_each_domain_as_divides_it(name: str, gpus: int, used: int) -> None:
    cluster, note = clusters.fitted(clusters.load(name), gpus)
    assert cluster.domain == used
    assert bool(note) == (gpus > 72 and gpus % 72 != 0 and name != "h100-eos")
    if used == 64:
        # the slowest group of 64 neighbours stays on NVLink, which on domains of 72 it would not
        assert cluster.nodes_of(((64, 1),), gpus) == (64,)
        assert len(clusters.load(name).nodes_of(((64, 1),), gpus)) == 2
        assert f"64 of each 72 GPUs on NVLink are used, in {gpus // 64} such domains" in note

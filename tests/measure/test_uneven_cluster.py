"""A cluster whose nodes hold different numbers of ranks is measured, and what runs on it is planned from that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commlayer
import commlayer.backend.create
import commlayer.measure.calibrate  # before the ranks fork, or each of them loads it
from commlayer.emulation import EmulatedCluster
from commlayer.measure.profiler import SweepOptions, measure_cluster
from commlayer.profiles.errors import TopologyError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, read_profile
from commlayer.profiles.sweep import Repeats
from commlayer.profiles.topology import Topology
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.probes import probes, probes_of_group
from commlayer.testing import run_on_nodes

SIZES = (16 << 10, 256 << 10, (1 << 20) + 4, 16 << 20)
QUICK = SweepOptions(
    min_bytes=1024,
    max_bytes=65536,
    factor=8.0,
    repeats=Repeats(warmup=0, min_repeats=2, max_repeats=2),
    group_max_bytes=65536,
    group_repeats=Repeats(warmup=0, min_repeats=2, max_repeats=2),
    timeout_s=60.0,
)


def results(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Integers in FP32: whatever order adds them, the bits are the same."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for size in SIZES:
        count = size // 4 // n * n
        whole = ((torch.arange(count) * 7 + rank * 101) % 251).float()
        total = whole.clone()
        dist.all_reduce(total, group=group)
        part = torch.empty(count // n)
        dist.reduce_scatter_single(part, whole, group=group)
        gathered = torch.empty(count)
        dist.all_gather_single(gathered, whole[: count // n].contiguous(), group=group)
        found += [total, part, gathered]
    return found


def job_without_a_profile(folder: str) -> tuple[list[bool], set[tuple[str, str]], bool]:
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PROFILE="auto", COMMLAYER_CACHE=folder)
    dist.init_process_group("gloo")
    expected = results(None)
    found = results(dist.new_group(backend="commlayer"))
    (mine,) = (group for group in commlayer.stats()["groups"] if group["calls"])
    plans = {(row["collective"], row["plan"]) for row in mine["calls"] if row["calls"]}
    unplanned = bool(mine.get("reasons"))
    dist.destroy_process_group()
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)], plans, unplanned


@pytest.mark.cluster
@pytest.mark.parametrize("sizes", [(3, 1), (2, 1, 3)], ids=lambda sizes: "+".join(map(str, sizes)))
def test_a_job_measures_uneven_nodes_and_plans_on_them(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    with EmulatedCluster(len(sizes), max(sizes), inter="400mbit") as cluster:
        ranks = run_on_nodes(cluster, sizes, job_without_a_profile, str(tmp_path))
    (path,) = tmp_path.iterdir()
    shape = "+".join(map(str, sizes))
    profile = read_profile(path)
    assert profile.topology == shape
    assert {curve.key for curve in profile.curves} == {p.key for p in probes(Topology.parse(shape), is_brief=True)}
    for are_equal, plans, unplanned in ranks:
        assert all(are_equal)
        assert not unplanned
        assert plans == ranks[0][1]
        ran = {collective: {plan for name, plan in plans if name == collective} for collective, _ in plans}
        assert set(ran) == {"all_reduce", "reduce_scatter", "all_gather"}
        over_nodes = {
            name for names in ran.values() for name in names if name.startswith(("hierarchical", "pipelined"))
        }
        assert over_nodes, ran  # 16 MiB over a wire of 400 Mbit/s: several times faster than a ring


def finely_measured() -> Profile:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    profile = measure_cluster(QUICK, name="uneven", kind="emulated", source="a test")
    dist.destroy_process_group()
    return profile


@pytest.mark.cluster
def test_all_curves_of_uneven_nodes_are_measured_and_checked() -> None:
    with EmulatedCluster(3, 3) as cluster:
        profiles = run_on_nodes(cluster, (2, 1, 3), finely_measured)
    assert all(profile == profiles[0] for profile in profiles)
    assert {curve.key for curve in profiles[0].curves} == {p.key for p in probes(Topology.parse("2+1+3"))}
    assert not profiles[0].interference
    peaks = profiles[0].peaks
    assert min(peaks.inter_gbps, peaks.intra_gbps, peaks.device_gbps) > 0


def test_a_smaller_node_works_beside_the_fullest_on_as_many_bytes() -> None:
    for probe in probes_of_group("node", (3,)):
        beside = probe.among(2)
        assert (beside.leg, beside.where) == (probe.leg, "node")
        assert beside.unit.traffic.nodes == (2,)
        for size in (6000, 1 << 20):
            (here,), (there,) = probe.plan(size).steps, beside.plan(size).steps
            assert here.bytes == pytest.approx(there.bytes, abs=24)
    assert all(probe.among(2) is probe for probe in probes_of_group("rail", (1, 1)))


def test_uneven_nodes_have_no_grid() -> None:
    found = probes(Topology.parse("5+3"))
    assert not any(probe.is_on_grid for probe in found)
    keys = {probe.key for probe in found if not probe.is_own_call}
    assert {("all_to_all", Resource.INTRA, 5), ("all_gather", Resource.INTRA, 5)} <= keys
    assert {("all_to_all", Resource.INTER, 2), ("all_gather", Resource.INTER, 2)} <= keys
    assert {probe.unit.strategy for probe in found} <= {Strategy.FLAT, Strategy.DIRECT}


def refused_on_gpus() -> str:
    class Gpus:
        rank, size, device_type = 0, 4, "cuda"

    with pytest.raises(TopologyError) as caught:
        measure_cluster(
            QUICK,
            name="uneven",
            kind="measured",
            source="a test",
            topology=Topology.parse("3+1"),
            ranks=Gpus(),  # type: ignore[arg-type]
        )
    return str(caught.value)


def test_uneven_nodes_of_gpus_are_refused_by_name() -> None:
    assert "expected the same number of ranks on every node, got 3+1" in refused_on_gpus()

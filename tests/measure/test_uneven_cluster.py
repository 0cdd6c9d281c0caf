"""A cluster whose nodes hold different numbers of ranks is measured, and what runs on it is planned from that."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

import commlayer
import commlayer.backend.create
import commlayer.measure.calibrate  # before the ranks fork, or each of them loads it
from commlayer.emulation import EmulatedCluster
from commlayer.measure.profiler import SweepOptions, measure_cluster
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, read_profile
from commlayer.profiles.sweep import Repeats
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import choose
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.probes import probes, probes_of_group
from commlayer.scheduler.traffic import Traffic
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


def job(profile: str, folder: str) -> tuple[list[bool], dict[str, set[str]], dict[str, int]]:
    """Which results are Gloo's, the plans that ran by collective, and why calls were not planned."""
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PROFILE=profile, COMMLAYER_CACHE=folder)
    dist.init_process_group("gloo")
    expected = results(None)
    found = results(dist.new_group(backend="commlayer"))
    (mine,) = commlayer.stats()["groups"]
    plans: dict[str, set[str]] = {}
    for row in mine["calls"]:
        plans.setdefault(row["collective"], set()).add(row["plan"])
    dist.destroy_process_group()
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)], plans, mine["unplanned"]


def slow_calls(profile: Profile) -> Profile:
    """Where the backend's own calls are slow, plans are chosen whatever this machine was busy with."""
    ours = {
        p.key for p in probes(Topology.parse(profile.topology)) if p.where in ("node", "rail") and not p.is_own_call
    }
    slower = [
        msgspec.structs.replace(curve, time_us=tuple(100 * us for us in curve.time_us))
        if curve.link != "device" and curve.key not in ours
        else curve
        for curve in profile.curves
    ]
    return profile.replace(curves=slower)


@pytest.mark.cluster
@pytest.mark.parametrize("sizes", [(3, 1), (2, 1, 3)], ids=lambda sizes: "+".join(map(str, sizes)))
def test_a_job_measures_uneven_nodes_and_plans_on_them(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    shape, folder = "+".join(map(str, sizes)), tmp_path / "cache"
    with EmulatedCluster(len(sizes), max(sizes), inter="400mbit") as cluster:
        measuring = run_on_nodes(cluster, sizes, job, "auto", str(folder))
        (path,) = folder.iterdir()
        profile = read_profile(path)
        slow_calls(profile).save(tmp_path / "slow.json")
        planning = run_on_nodes(cluster, sizes, job, str(tmp_path / "slow.json"), str(folder))
    assert profile.topology == shape
    assert {curve.key for curve in profile.curves} == {p.key for p in probes(Topology.parse(shape), is_brief=True)}
    for ranks in (measuring, planning):
        for are_equal, plans, unplanned in ranks:
            assert all(are_equal)
            assert unplanned == {}  # each has a price, so each call a decision
            assert plans == ranks[0][1]
            assert set(plans) == {"all_reduce", "reduce_scatter", "all_gather"}
    for plans_of_one in planning[0][1].values():
        assert any(name.startswith(("hierarchical", "pipelined")) for name in plans_of_one), plans_of_one
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        decision = choose(Traffic.on_nodes(collective, 16 << 20, sizes), profile)
        assert {Strategy.FLAT, Strategy.HIERARCHICAL, Strategy.PIPELINED} <= {
            t.plan.strategy for t in decision.candidates
        }


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
    assert {("gather", Resource.INTRA, 5), ("scatter", Resource.INTRA, 5), ("leaders", Resource.INTER, 2)} <= keys
    assert {probe.unit.strategy for probe in found} <= {Strategy.FLAT, Strategy.DIRECT, Strategy.LEADERS}

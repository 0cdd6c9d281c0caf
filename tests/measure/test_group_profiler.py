"""Curves of the groups that mappings have, which are not all ranks, whole nodes or one rank of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commlayer.measure.profiler import SweepOptions
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.profiles.sweep import Repeats
from commlayer.profiles.topology import Topology
from commlayer.scheduler.mapping.cluster import Cluster, Gpu
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.plan import Strategy
from commlayer.testing.plugin import ClusterFactory

QUICK = SweepOptions(
    min_bytes=1024, max_bytes=4096, factor=4.0, repeats=Repeats(warmup=0, min_repeats=2, max_repeats=2), timeout_s=20.0
)
MAPPING = FoldedMapping(8, tp=2)


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def profiled() -> list[Profile]:
    from shape_profiles import measure_groups

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for axis, name in (("tp", "pair"), ("dp", "spread")):
        found.append(measure_groups(MAPPING.groups(axis), QUICK, name=name, source="a test"))
    with pytest.raises(UsageError, match=r"expected each of 8 ranks in one group, got \[\[0, 1\]\]"):
        measure_groups([[0, 1]], QUICK, name="some", source="a test")
    with pytest.raises(UsageError, match="expected groups of two ranks or more that lie alike on the nodes"):
        measure_groups([[0, 1], [2, 4], [3, 5], [6, 7]], QUICK, name="mixed", source="a test")
    with pytest.raises(UsageError, match=r"expected some of all_gather_single, .* or send_recv, got 'gossip'"):
        measure_groups(MAPPING.groups("tp"), QUICK, name="x", source="a test", collectives=["gossip"])
    dist.destroy_process_group()
    return found


@pytest.mark.cluster
def test_every_shape_has_curves_of_its_own(emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ranks = emulated_cluster(2, 4).run(profiled)
    pair, spread = ranks[0]
    assert all(found == ranks[0] for found in ranks)
    assert (pair.topology, spread.topology) == ("1x2", "2x2")
    own = {"all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_to_all_v"}
    assert {curve.key for curve in pair.curves} == {(name, Resource.INTRA, 2) for name in {*own, "send_recv"}}
    assert {curve.key for curve in spread.curves} == {(name, Resource.INTER, 4) for name in own}
    assert all(curve.bytes == (1024, 4096) for profile in (pair, spread) for curve in profile.curves)
    gpu = Gpu(name="a core", bf16_tflops=1.0, fp8_tflops=0.0, memory_bytes=1e9, memory_gbps=1.0)
    cluster = Cluster(name="both", gpu=gpu, domain=4, peaks=pair.peaks, measured=(pair, spread))
    pricer = Pricer(cluster, (Strategy.FLAT,))
    for collective, curve in (("all_reduce", "all_reduce"), ("all_gather", "all_gather_single")):
        assert pricer.us(collective, 2048, (2, 2)) == spread.curve(curve, Resource.INTER, 4).at(2048)
        assert pricer.us(collective, 2048, (2,)) == pair.curve(curve, Resource.INTRA, 2).at(2048)
    assert pricer.us("send_recv", 2048, (2,)) == pair.curve("send_recv", Resource.INTRA, 2).at(2048)
    with pytest.raises(PlanError, match="a group of 8 ranks on nodes \\(4, 4\\) does not fit"):
        pricer.us("all_reduce", 2048, (4, 4))


def test_parts_of_a_group() -> None:
    topology = Topology.parse("2x4")
    assert topology.parts_of([6, 1, 3, 4]) == ((1, 3), (6, 4))
    assert topology.parts_of([]) == ()

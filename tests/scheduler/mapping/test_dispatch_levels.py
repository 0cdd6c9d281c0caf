"""An estimate's dispatch in two levels: where it is taken, what it sends, and that it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.profiles.errors import PlanError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.dispatch_levels import DispatchLevels
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.step_collectives import layer_backward, layer_forward
from commlayer.scheduler.plan import Plan, Span
from commlayer.scheduler.rails import distinct_nodes

EOS = clusters.load("h100-eos")
MODEL = catalog.load("qwen2-57b-a14b")
JOB = Job(model=MODEL, gpus=64, global_batch=256, sequence=4096)
SETUP = Setup(gpus=64, ep=16, recompute="full")


def slower(part: float) -> Cluster:
    peaks = EOS.peaks
    return EOS.replace(peaks=type(peaks)(peaks.inter_gbps * part, peaks.intra_gbps, peaks.device_gbps))


def estimate(cluster: Cluster, software: Software = COMMLAYER, setup: Setup = SETUP) -> StepEstimate:
    return Estimator(JOB, cluster, software, efficiency=0.8).estimate(setup)


def test_two_levels_where_the_network_is_what_a_step_waits_for() -> None:
    slow = slower(0.25)
    found, flat = estimate(slow), estimate(slow, replace(COMMLAYER, two_levels=False))
    assert found.step_us < flat.step_us
    (note,) = [note for note in found.notes if "two levels" in note]
    assert "of 2 nodes" in note
    assert "flat" in note
    assert not [note for note in flat.notes if "two levels" in note]
    plans = {traffic.name: traffic.plan for traffic in found.traffics}
    assert plans["dispatch_rails"] == plans["combine_rails_gradient"] == "rows on rails"
    assert plans["dispatch_inside"] == plans["combine_inside"] == "rows in node"
    assert "dispatch" not in plans
    assert sum(found.parts.values()) == pytest.approx(found.step_us)


@pytest.mark.parametrize(
    ("setup", "software"),
    [
        (SETUP, MEGATRON),
        (replace(SETUP, ep=8), COMMLAYER),  # one node
        (replace(SETUP, etp=2), COMMLAYER),
        (replace(SETUP, exchange="all_gather"), COMMLAYER),
    ],
)
def test_flat_where_a_dispatcher_knows_no_levels(setup: Setup, software: Software) -> None:
    found = estimate(slower(0.25), software, setup)
    assert not [traffic for traffic in found.traffics if "rails" in traffic.name]
    assert not [note for note in found.notes if "two levels" in note]


def test_flat_where_two_levels_have_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpriced(_: Pricer, span: Span, __: int, ___: tuple[int, ...]) -> tuple[Plan, float]:
        raise PlanError(f"no curve over {span.value}")

    monkeypatch.setattr(Pricer, "over", unpriced)
    found = estimate(slower(0.25))
    assert not [traffic for traffic in found.traffics if "rails" in traffic.name]
    assert not [note for note in found.notes if "two levels" in note]


def test_flat_in_chunks_where_experts_hide_more_than_two_levels_save() -> None:
    found = estimate(slower(8.0))
    assert {traffic.plan for traffic in found.traffics if traffic.name == "dispatch"} == {"flat"}


def test_never_slower_for_the_choice() -> None:
    without = replace(COMMLAYER, two_levels=False)
    for part in (0.1, 0.3, 0.5, 0.7, 1.0, 2.0):
        cluster = slower(part)
        assert estimate(cluster).step_us <= estimate(cluster, without).step_us * (1 + 1e-9)


def test_exchanges_of_a_layer() -> None:
    levels = DispatchLevels.of(JOB, SETUP, COMMLAYER, (8, 8))
    assert levels is not None
    row = MODEL.hidden * 2
    forward = [each for each in levels.replaced(layer_forward(JOB, SETUP, COMMLAYER)) if each.axis == "ep"]
    assert [each.name for each in forward] == [
        *("counts", "dispatch_choices", "dispatch_rails", "dispatch_inside"),
        *("combine_weights", "combine_inside", "combine_rails"),
    ]
    sizes = {each.name: each.logical_bytes for each in forward}
    assert sizes["dispatch_rails"] == round(4096 * distinct_nodes(MODEL.experts, 2, MODEL.top_k)) * row
    assert sizes["dispatch_inside"] == round(4096 * distinct_nodes(MODEL.experts, 16, MODEL.top_k)) * row
    assert {each.name: each.over for each in forward}["combine_inside"] is Span.NODE
    plain = replace(SETUP, recompute="none")
    back = [each for each in levels.replaced(layer_backward(JOB, plain, COMMLAYER)) if each.axis == "ep"]
    assert [each.name for each in back] == [
        *("combine_rails_gradient", "combine_inside_gradient", "combine_weights_gradient"),
        *("dispatch_inside_gradient", "dispatch_rails_gradient"),
    ]
    assert [each.collective for each in back if "weights" in each.name] == ["reduce_scatter"]


def test_no_levels_of_uneven_or_single_ranks() -> None:
    for shape in ((8, 4, 4), (16,), (1,) * 16):
        assert DispatchLevels.of(JOB, SETUP, COMMLAYER, shape) is None
    assert DispatchLevels.of(replace(JOB, capacity_factor=1.0), SETUP, COMMLAYER, (8, 8)) is None


def test_a_search_ranks_by_it() -> None:
    """A search's bounds hold with two levels too (it raises where one does not), and its best names them."""
    space = Space(ep=(16,), etp=(1,), tp=(1,), cp=(1,), pp=(1, 2), micro_batch=(1,), exchange=("all_to_all",))
    found = search(JOB, Estimator(JOB, slower(0.25), COMMLAYER, efficiency=0.8), space, top=3)
    assert any("two levels" in note for note in found.best.notes)

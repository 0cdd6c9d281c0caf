"""Variations: what would be different, and where two ways change places."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.profiles import catalog as profiles
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters, parameters
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layout_balance import LaidOut
from commlayer.scheduler.mapping.result import Memory, StepEstimate
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import COMMLAYER, MEGATRON, Software
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.variations import (
    ALTERNATIVES,
    Alternative,
    Crossover,
    MakeEstimates,
    Progress,
    Variation,
    VariedWay,
    at_value,
    crossover,
    split_experts,
    vary,
)

EOS = clusters.load("h100-eos")
JOB = Job(model=replace(catalog.load("mixtral-8x7b"), layers=4), gpus=16, global_batch=64, sequence=4096)
SETUP = Setup(gpus=16, tp=2, ep=8, folded=True)


class Fake:
    """Compute that tp divides, and an exchange over the link between nodes that tp multiplies."""

    def __init__(self, job: Job, cluster: Cluster, software: Software = COMMLAYER) -> None:
        self.job, self.cluster, self.software = job, cluster, software
        self.memory_limit = 80e9

    def memory(self, setup: Setup) -> Memory:
        return Memory(weights=40e9 if setup.gpus <= 64 else 90e9, gradients=0, optimizer=0, activations=0, buffers=0)

    def laid_out(self, setup: Setup, limit: float) -> LaidOut:
        return LaidOut(replace(setup, pipeline_layout="even"), True)

    def _us(self, setup: Setup) -> float:
        rate = 2.0 if setup.precision == "fp8" else 1.0
        compute = self.job.tokens / setup.gpus / rate
        slower = 2.0 if self.software is MEGATRON else 1.0
        inter = 1e6 * (0.1 if setup.folded else 1.0) * slower / self.cluster.peaks.inter_gbps
        return compute + inter + 100.0 * setup.folded + 1e-3 * (setup.tp + setup.cp + setup.pp + setup.ep)

    def bound_us(self, setup: Setup, level: int) -> float:
        return 0.0 if level == 0 else self._us(setup)

    def estimate(self, setup: Setup, *, detail: bool = True) -> StepEstimate:
        us = self._us(setup)
        return StepEstimate(
            job=self.job,
            setup=setup,
            cluster=self.cluster.name,
            software=self.software.name,
            step_us=us,
            mfu=0.5,
            tflops=500.0,
            memory=self.memory(setup),
            memory_limit=self.memory_limit,
            parts={"experts": us},
            exposed_us={},
            traffics=(),
            bubble=0.0,
            bottleneck="inter",
        )


# Crossings


@given(root=st.floats(-50, 50), slope=st.sampled_from([-3.0, -0.1, 0.1, 3.0]), tolerance=st.floats(1e-6, 1.0))
def test_the_crossing_of_a_line_is_found_within_the_tolerance(root: float, slope: float, tolerance: float) -> None:
    found = crossover(lambda x: slope * (x - root), (-60, 60), tolerance, first="A", second="B")
    assert found.at == pytest.approx(root, abs=tolerance)
    assert (found.at_low, found.at_high) == (("A", "B") if slope > 0 else ("B", "A"))


def test_every_crossing_that_samples_show_is_found() -> None:
    found = crossover(math.sin, range(1, 11), 1e-6, first="A", second="B")
    assert found.crossings == pytest.approx((math.pi, 2 * math.pi, 3 * math.pi), abs=1e-6)
    assert found.at_low == "B"
    assert "change places at 3.142, 6.283, 9.425" in str(found)


def test_a_jump_is_a_crossing() -> None:
    found = crossover(lambda x: -1.0 if x < 0.3 else 5.0, (0.0, 1.0), 1e-9)
    assert found.at == pytest.approx(0.3, abs=1e-9)


def test_no_crossing_says_who_wins() -> None:
    always = crossover(lambda x: -1.0 - x, (0.0, 0.5, 1.0), 0.1, first="A", second="B")
    assert not always.crossings
    assert str(always) == "no crossing between 0 and 1: A is always faster"
    assert "equally fast" in str(crossover(lambda x: 0.0, (0.0, 1.0), 0.1))
    touches = crossover(lambda x: abs(x - 0.5), (0.0, 0.5, 1.0), 0.1, first="A", second="B")
    assert not touches.crossings
    assert "B is always faster" in str(touches)
    begins_equal = crossover(lambda x: x, (0.0, 0.5, 1.0), 0.1, first="A", second="B")
    assert str(begins_equal) == "no crossing between 0 and 1: B is never slower, and as fast at 0"


def test_one_crossing_is_said_in_words() -> None:
    said = str(crossover(lambda x: x - 3.0, (1.0, 9.0), 1e-9, first="folded", second="unfolded"))
    assert said == "folded is faster below 3, unfolded from there on (between 1 and 9)"


def test_a_crossing_of_values_is_the_first_on_the_other_side() -> None:
    found = crossover(
        lambda x: {8.0: -2.0, 16.0: -1.0, 32.0: 0.0, 64.0: 4.0}[x], (8, 16, 32, 64), first="A", second="B"
    )
    assert list(found.crossings) == [64]
    assert not found.is_exact
    assert crossover(lambda x: {8.0: -2.0, 16.0: 0.0}[x], (8, 16), first="A").crossings == ()


@pytest.mark.parametrize("values", [(1.0,), (1.0, 1.0), (2.0, 1.0), (0.0, math.inf)])
def test_a_crossing_needs_an_interval(values: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="at least two ascending values"):
        crossover(lambda x: x, values)


def test_a_crossing_needs_numbers() -> None:
    with pytest.raises(UsageError, match="is no number"):
        crossover(lambda x: math.nan, (0.0, 1.0))


# Variations


def test_each_kind_changes_its_own_thing() -> None:
    assert at_value(JOB, EOS, "gpus", 32)[0] == replace(JOB, gpus=32)
    assert at_value(JOB, EOS, "sequence", 8192)[0].sequence == 8192
    assert at_value(JOB, EOS, "global_batch", 128)[0].global_batch == 128
    assert at_value(JOB, EOS, "top_k", 4)[0].model.top_k == 4
    assert at_value(JOB, EOS, "domain", 72)[1].domain == 72
    assert at_value(JOB, EOS, "inter_gbps", 25)[1].peaks.inter_gbps == 25
    assert at_value(JOB, EOS, "inter_factor", 0.5)[1].peaks.inter_gbps == EOS.peaks.inter_gbps / 2
    assert at_value(JOB, EOS, "intra_factor", 2)[1].peaks.intra_gbps == EOS.peaks.intra_gbps * 2
    assert at_value(JOB, EOS, "intra_gbps", 200.0)[1].peaks.inter_gbps == EOS.peaks.inter_gbps
    later = at_value(JOB, EOS, "gpu", "b200-hgx")[1]
    assert later.gpu == clusters.load("b200-hgx").gpu
    assert later.peaks == EOS.peaks
    assert at_value(JOB, EOS, "precision", "fp8") == (JOB, EOS)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_fine_grained_experts_have_as_many_parameters(parts: int) -> None:
    model = catalog.load("mixtral-8x22b")
    fine = split_experts(model, parts)
    before, after = parameters.count(model), parameters.count(fine)
    assert (after.experts, after.active_experts) == (before.experts, before.active_experts)
    assert after.total - before.total == (parts - 1) * before.router
    assert (fine.family or fine.name) == (model.family or model.name)  # of the same efficiency


def test_experts_split_only_where_their_width_does() -> None:
    with pytest.raises(UsageError, match="split=3: expected a divisor"):
        split_experts(catalog.load("mixtral-8x7b"), 3)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("colour", (1,), "what varies: expected one of gpus"),
        ("gpus", (), "gpus: expected at least one value"),
        ("gpus", (1.5,), "gpus: expected a whole number"),
        ("inter_gbps", (-1.0,), "inter_gbps: expected a positive number"),
        ("inter_gbps", (True,), "inter_gbps: expected a positive number"),
        ("precision", ("fp4",), "precision: expected one of bf16, fp8, fp8-delayed"),
        ("gpu", (8,), "gpu: expected the name of a cluster"),
    ],
)
def test_a_variation_says_what_is_wrong(kind: str, values: tuple[object, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Variation(kind, values)  # type: ignore[arg-type]


# What if


def only(
    variation: Variation,
    cluster: Cluster = EOS,
    *,
    make: MakeEstimates | None = Fake,
    progress: Progress | None = None,
    **way: Any,
) -> VariedWay:
    """The one way, at every value."""
    found = vary(JOB, cluster, variation, Alternative(**way), make=make, progress=progress)
    assert found.crossover is None
    return found.ways[0]


def crossing(variation: Variation, *ways: Alternative) -> Crossover | None:
    return vary(JOB, EOS, variation, *ways, make=Fake).crossover


def test_one_setup_runs_at_every_value() -> None:
    found = only(Variation("gpus", (16, 32, 48, 128)), setup=SETUP)
    steps = [point.estimate.step_us if point.estimate else None for point in found.points]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0] > steps[1]
    assert found.points[1].estimate is not None
    assert found.points[1].estimate.setup == replace(SETUP, gpus=32)
    assert steps[3] is None
    assert "does not fit: 90.0 GB of 80.0 GB (weights 90.0" in found.points[3].note


def test_the_best_of_a_space_runs_at_every_value() -> None:
    seen: list[tuple[float, int]] = []
    space = Space(tp=(1,), cp=(1, 2), pp=(1,))
    found = only(
        Variation("inter_gbps", (1, 100_000)),
        space=space,
        progress=lambda *done: seen.append(done),
    )
    slow, fast = (point.estimate for point in found.points)
    assert slow is not None
    assert fast is not None
    assert (slow.setup.folded, fast.setup.folded) == (True, False)
    assert slow.step_us > fast.step_us
    assert [seen[0], seen[-1]] == [(0, 2), (2, 2)]  # from before the first point is searched
    assert seen == sorted(seen)
    assert len([done for done, _ in seen if 0 < done < 1]) > 1
    assert found.fastest is found.points[1]


def test_a_precision_is_that_of_the_setup_or_of_the_space() -> None:
    for setup in (SETUP, None):
        found = only(Variation("precision", ("bf16", "fp8")), setup=setup, space=Space(tp=(2,), cp=(1,)))
        got = [point.estimate.setup.precision for point in found.points if point.estimate]
        assert got == ["bf16", "fp8"]


def test_a_value_that_cannot_be_says_why() -> None:
    found = only(Variation("split", (1, 3)), setup=SETUP)
    assert found.points[0].estimate is not None
    assert found.points[1].estimate is None
    assert "expected a divisor" in found.points[1].note
    nowhere = only(Variation("gpus", (17,)), setup=SETUP)
    assert "17" in nowhere.points[0].note
    assert nowhere.fastest is None


def test_what_if_leaves_a_margin_of_memory() -> None:
    """Half of 80 GB is left free: a setup of more than 40 GB does not fit."""
    variation = Variation("inter_gbps", (10.0, 40.0))
    for setup in (None, SETUP):
        kept = only(variation, setup=setup, margin=0.5)
        assert [point.note for point in kept.points] == ["", ""]
        left = only(variation, setup=setup, margin=0.51)
        assert [point.estimate for point in left.points] == [None, None]
        assert all("40.0 GB of 39.2 GB" in point.note for point in left.points)
    with pytest.raises(UsageError, match="margin: expected a part"):
        only(variation, margin=1.0)


def test_ways_cross_where_their_times_are_equal() -> None:
    fixed = [
        Alternative(name=name, setup=replace(SETUP, tp=2, etp=2, ep=4, folded=name == "folded"))
        for name in ("folded", "unfolded")
    ]
    found = crossing(Variation("inter_gbps", (100, 100_000)), *fixed)
    assert found is not None
    assert found.at == pytest.approx(9000, rel=0.03)  # 0.9e6 / rate = 100
    assert (found.at_low, found.at_high) == ("folded", "unfolded")
    gpus = crossing(Variation("gpus", (64, 16, 32)), *fixed)
    assert gpus is not None
    assert gpus.at is None
    assert "folded is always faster" in str(gpus)


def test_named_alternatives_are_compared() -> None:
    first, second = ALTERNATIVES["software"]
    narrow = [replace(each, space=Space(tp=(1,), cp=(1,), pp=(1,))) for each in (first, second)]
    found = crossing(Variation("inter_factor", (0.5, 2)), *narrow)
    assert "commlayer is always faster" in str(found)
    for one, other in ALTERNATIVES.values():
        assert (one.space, one.software) != (other.space, other.software)


def test_the_search_of_a_value_is_not_repeated_for_a_crossing() -> None:
    asked: list[float] = []

    def make(job: Job, cluster: Cluster, software: Software) -> Fake:
        asked.append(cluster.peaks.inter_gbps)
        return Fake(job, cluster, software)

    ways = [Alternative(name=name, setup=replace(SETUP, etp=2, ep=4, folded=name == "a")) for name in ("a", "b")]
    vary(JOB, EOS, Variation("inter_gbps", (100.0, 100_000.0)), *ways, make=make)
    assert asked.count(100.0) == asked.count(100_000.0) == 2
    assert any(100.0 < rate < 100_000.0 for rate in asked)


def test_nothing_crosses_without_an_order_or_two_values_at_which_both_run() -> None:
    ways = [Alternative(name="a", setup=SETUP), Alternative(name="b", setup=SETUP)]
    for kind, values in (("precision", ("bf16", "fp8")), ("gpus", (16, 16)), ("gpus", (16, 128))):
        assert crossing(Variation(kind, values), *ways) is None  # type: ignore[arg-type]
    said = str(crossing(Variation("gpus", (16, 32, 128)), *ways))
    assert said == "no crossing between 16 and 32: a and b are equally fast"


def test_measured_links_are_not_varied() -> None:
    profile = profiles.load(profiles.names()[0])
    measured = Cluster.from_profile(profile, EOS.gpu)
    for kind in ("inter_factor", "domain"):
        with pytest.raises(UsageError, match="were measured"):
            only(Variation(kind, (2,)), measured, setup=SETUP)


@pytest.mark.parametrize(
    ("kind", "slow", "fast"),
    [
        ("inter_factor", 0.25, 1.0),
        ("intra_factor", 0.25, 1.0),
        ("precision", "bf16", "fp8"),
        ("gpu", "a100", "h100-eos"),
    ],
)
def test_the_real_estimator_is_faster_with_more(kind: str, slow: float | str, fast: float | str) -> None:
    setup = Setup(gpus=16, tp=2, ep=8, pp=2)
    found = only(Variation(kind, (slow, fast)), make=None, setup=setup)  # type: ignore[arg-type]
    times = [point.estimate.step_us for point in found.points if point.estimate]
    assert len(times) == 2, [point.note for point in found.points]
    assert times[0] > times[1]


def test_the_real_estimator_is_what_is_asked_unless_another_is_given() -> None:
    found = only(Variation("inter_gbps", (25.0,)), make=None, setup=SETUP)
    slower = EOS.replace(name=found.points[0].cluster, peaks=at_value(JOB, EOS, "inter_gbps", 25.0)[1].peaks)
    assert found.points[0].estimate is not None
    assert found.points[0].estimate.step_us == Estimator(JOB, slower).estimate(SETUP).step_us

"""The model fitted to measured runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.fitted_estimator import FittedEstimator
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity
from commlayer.scheduler.mapping.run_fit import FITTED_PARTS, NOISE, MeasuredRun, RunFit, fit_to, measured_step_us
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.validity import after_fit, assess, fitted_errors

JOB = Job(model=catalog.load("mixtral-8x7b"), gpus=16, global_batch=64, sequence=4096)
SETUP = Setup(gpus=16, ep=8)
CLUSTER = clusters.load("h100-eos")


@pytest.fixture(scope="module")
def estimate() -> StepEstimate:
    return Estimator(JOB, CLUSTER, MEGATRON).estimate(SETUP)


def run_of(estimate: StepEstimate, ratio: float) -> MeasuredRun:
    assert estimate.validity is not None
    return MeasuredRun(estimate=estimate, kind=estimate.validity.kind, step_us=estimate.step_us * ratio)


def only(estimate: StepEstimate, *parts: str) -> StepEstimate:
    return replace(estimate, parts={part: estimate.step_us / len(parts) for part in parts})


def test_one_run_of_compute_alone_passes_a_part_of_its_deviation_on(estimate: StepEstimate) -> None:
    factors = fit_to([run_of(only(estimate, "experts"), 1.5)]).factors
    assert factors["compute"] == pytest.approx(1.5 ** (1 / (1 + NOISE)))
    assert factors["exchange"] == pytest.approx(1.0)
    waits = fit_to([run_of(only(estimate, "dispatch", "tp"), 1.5)]).factors
    assert (waits["compute"], waits["exchange"]) == pytest.approx((1.0, 1.5 ** (1 / (1 + NOISE))))


def test_runs_that_differ_tell_the_factors_apart(estimate: StepEstimate) -> None:
    computes, waits = only(estimate, "experts"), only(estimate, "combine", "head")
    runs = [run_of(computes, 1.1), run_of(waits, 0.5 * 1.1 + 0.5 * 2.0)]
    factors = fit_to(runs * 200).factors  # so many that they outweigh what is their own
    assert factors["compute"] == pytest.approx(1.1, rel=0.03)
    assert factors["exchange"] == pytest.approx(2.0, rel=0.03)


def test_what_is_as_estimated_changes_nothing(estimate: StepEstimate) -> None:
    fit = fit_to([run_of(estimate, 1.0)])
    assert list(fit.factors.values()) == pytest.approx([1.0] * len(FITTED_PARTS))
    assert FittedEstimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(SETUP).step_us == pytest.approx(estimate.step_us)


def test_a_slower_run_makes_estimates_slower_by_less(estimate: StepEstimate) -> None:
    fit = fit_to([run_of(estimate, 1.4)])
    slower = FittedEstimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(SETUP)
    assert 1.1 * estimate.step_us < slower.step_us < 1.4 * estimate.step_us
    assert slower.validity is not None
    assert fit.note(slower.validity.kind) in slower.notes
    assert "host takes 1 times" not in fit.note(slower.validity.kind)
    assert slower.tflops / slower.mfu == pytest.approx(estimate.tflops / estimate.mfu)  # the peak is no rate


def test_a_fit_narrows_an_interval_or_leaves_it(estimate: StepEstimate) -> None:
    before = estimate.validity
    assert before is not None
    wide, narrow = replace(before, low=-0.5, high=5.0), replace(before, low=-0.001, high=0.001)
    after = after_fit(wide, 0)
    assert after.fitted == fitted_errors()[0]
    assert after.low <= 0 <= after.high
    assert "fitted to what was measured" in describe_validity(replace(estimate, validity=after))[0]
    assert after_fit(narrow, 0) == narrow
    words = describe_validity(replace(estimate, validity=after))[0]
    assert f"{after.fitted.num_pairs} pairs of published runs that differ in no trait" in words


@pytest.mark.parametrize("ratio", [0.45, 1.4, 3.0])
def test_the_interval_of_a_run_has_what_it_was_measured_at(estimate: StepEstimate, ratio: float) -> None:
    run = run_of(estimate, ratio)
    fitted = FittedEstimator(JOB, CLUSTER, MEGATRON, fit=fit_to([run])).estimate(SETUP)
    low, high = fitted.interval_us
    assert low <= run.step_us * (1 + 1e-9)
    assert high >= run.step_us * (1 - 1e-9)
    assert run.is_of(fitted)
    assert not run.is_of(replace(fitted, job=replace(JOB, global_batch=128)))
    assert not run.is_of(replace(fitted, cluster="h200"))


def test_a_surprising_run_widens_the_intervals_of_others(estimate: StepEstimate) -> None:
    other = replace(SETUP, tp=2)
    for ratio in (0.3, 4.0):
        fit = fit_to([run_of(estimate, ratio)])
        (surprise,) = fit.surprises
        validity = FittedEstimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(other).validity
        assert validity is not None
        plain = assess(validity.kind)
        assert validity.low == min(plain.low, surprise)
        assert validity.high == max(plain.high, surprise)
        assert validity.ratio > plain.ratio
    assert not fit_to([run_of(estimate, 1.0)]).surprises


def test_a_fit_fades_with_traits_that_differ(estimate: StepEstimate) -> None:
    fit = fit_to([run_of(estimate, 1.4)])
    assert estimate.validity is not None
    kind, factor = estimate.validity.kind, fit.factors["compute"]
    alike = [kind, kind._replace(short=not kind.short)]  # which follows from the estimate
    assert {fit.faded(each).factors["compute"] for each in alike} == {factor}
    one = kind._replace(precision="fp8")
    assert 1 < fit.faded(one).factors["compute"] < factor
    assert fit.note(one).endswith("faded, as the most alike run differs in precision")
    three = one._replace(family="other", attention="mla")
    assert set(fit.faded(three).factors.values()) == {1.0}
    assert fit.note(three).startswith(
        "not fitted to 1 measured run (+40.0% beside the estimate): the most alike run differs"
    )


@pytest.mark.parametrize("trait", ["generation", "fabric", "software"])
def test_a_fit_is_not_applied_to_other_machines_or_software(estimate: StepEstimate, trait: str) -> None:
    fit = fit_to([run_of(estimate, 1.4)])
    assert estimate.validity is not None
    changes: dict[str, Any] = {trait: "other"}
    kind = estimate.validity.kind._replace(**changes)
    assert set(fit.faded(kind).factors.values()) == {1.0}
    assert fit.note(kind).endswith("no run was of such GPUs, network and software")


def test_an_estimate_on_another_machine_is_as_without_a_fit(estimate: StepEstimate) -> None:
    fit, cluster = fit_to([run_of(estimate, 4.0)]), clusters.load("b200-hgx")
    plain = Estimator(JOB, cluster, MEGATRON).estimate(SETUP)
    fitted = FittedEstimator(JOB, cluster, MEGATRON, fit=fit).estimate(SETUP)
    assert fitted.step_us == pytest.approx(plain.step_us)
    assert fitted.validity == plain.validity


def test_no_bound_of_a_fitted_search_exceeds_an_estimate(estimate: StepEstimate) -> None:
    fitted = FittedEstimator(JOB, CLUSTER, MEGATRON, fit=fit_to([run_of(estimate, 3.0)]))
    best = search(JOB, fitted, Space(ep=(4, 8), zero=(1, 3), precision=("bf16", "fp8"), pp=(1, 2)), top=2)
    assert best.num_estimated >= 2
    sharded = replace(SETUP, zero=3)
    assert fitted.bound_us(sharded, 0) <= fitted.estimate(SETUP, detail=False).step_us


def test_the_exchange_slows_links_and_not_memory(estimate: StepEstimate) -> None:
    fit = RunFit(factors={"compute": 2.0, "exchange": 3.0, "host": 1.0}, runs=(run_of(estimate, 1.4),))
    assert fit.slowed(CLUSTER).peaks.inter_gbps == pytest.approx(CLUSTER.peaks.inter_gbps / 3)
    assert fit.slowed(CLUSTER).peaks.device_gbps == CLUSTER.peaks.device_gbps
    assert fit.slowed(CLUSTER).gpu.memory_gbps == pytest.approx(CLUSTER.gpu.memory_gbps / 2)


@pytest.mark.parametrize(
    ("text", "step_us"),
    [
        ("2 s", 2e6),
        ("812.5 ms", 812.5e3),
        (" 1.5min ", 9e7),
        ("131,072 tokens/s", 2e6),
        ("1,234,567.5 ms", 1234567.5e3),
        (".5 s", 5e5),
        ("2. s", 2e6),
        ("1e3 ms", 1e6),
        ("8192 Tokens/s/GPU", 2e6),
    ],
)
def test_a_measured_speed_is_a_step(text: str, step_us: float) -> None:
    assert measured_step_us(text, JOB) == pytest.approx(step_us)


def test_tflops_are_by_our_count(estimate: StepEstimate) -> None:
    assert measured_step_us(f"{estimate.tflops} TFLOP/s", JOB) == pytest.approx(estimate.step_us)


@pytest.mark.parametrize(
    "text",
    [
        *("", "12", "s", "0 s", "-3 s", "nan s", "1e999 s", "3 h", "٣ s", "1.2.3 s"),
        *("2,0 s", "1,2345 s", "1,234,5 s", ",5 s", ". s"),
    ],
)
def test_no_speed_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number and s, ms, min"):
        measured_step_us(text, JOB)


def test_a_step_that_cannot_be_of_this_mapping_is_refused(estimate: StepEstimate) -> None:
    with pytest.raises(UsageError, match="at most 10 times as much or as little: check the unit"):
        run_of(estimate, 11.0)

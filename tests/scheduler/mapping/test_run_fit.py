"""The model fitted to measured runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import catalog, clusters
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity
from commlayer.scheduler.mapping.run_fit import FITTED_PARTS, NOISE, MeasuredRun, RunFit, fit_to, measured_step_us
from commlayer.scheduler.mapping.simulate import Estimator
from commlayer.scheduler.mapping.software import MEGATRON
from commlayer.scheduler.mapping.validity import after_fit, fitted_errors

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
    assert Estimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(SETUP).step_us == pytest.approx(estimate.step_us)


def test_a_slower_run_makes_estimates_slower_by_less(estimate: StepEstimate) -> None:
    fit = fit_to([run_of(estimate, 1.4)])
    slower = Estimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(SETUP)
    assert 1.1 * estimate.step_us < slower.step_us < 1.4 * estimate.step_us
    assert str(fit) in slower.notes
    assert slower.tflops / slower.mfu == pytest.approx(estimate.tflops / estimate.mfu)  # the peak is no rate


def test_a_fit_narrows_an_interval_or_leaves_it(estimate: StepEstimate) -> None:
    before = estimate.validity
    assert before is not None
    wide, narrow = replace(before, low=-0.5, high=5.0), replace(before, low=-0.001, high=0.001)
    after = after_fit(wide, 0, is_surprising=False)
    assert after.fitted == fitted_errors()[0]
    assert after.low <= 0 <= after.high
    assert "fitted to what was measured" in describe_validity(replace(estimate, validity=after))[0]
    assert after_fit(narrow, 0, is_surprising=False) == narrow
    assert after_fit(narrow, 0, is_surprising=True).fitted == fitted_errors()[0]
    assert fit_to([run_of(estimate, 1 + 2 * before.high + 0.01)]).is_surprising
    assert not fit_to([run_of(estimate, 1.0)]).is_surprising


def test_what_a_fit_is_worth_for_another_machine_nobody_knows(estimate: StepEstimate) -> None:
    fit = fit_to([run_of(estimate, 4.0)])
    other = Estimator(JOB, clusters.load("b200-hgx"), MEGATRON, fit=fit).estimate(SETUP).validity
    assert other is not None
    assert other.fitted is None
    near = Estimator(JOB, CLUSTER, MEGATRON, fit=fit).estimate(replace(SETUP, precision="fp8")).validity
    assert near is not None
    assert near.fitted is not None
    assert near.fitted.differences > 0


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
        ("8192 Tokens/s/GPU", 2e6),
    ],
)
def test_a_measured_speed_is_a_step(text: str, step_us: float) -> None:
    assert measured_step_us(text, JOB) == pytest.approx(step_us)


def test_tflops_are_by_our_count(estimate: StepEstimate) -> None:
    assert measured_step_us(f"{estimate.tflops} TFLOP/s", JOB) == pytest.approx(estimate.step_us)


@pytest.mark.parametrize("text", ["", "12", "s", "0 s", "-3 s", "nan s", "1e999 s", "3 h", "٣ s", "1.2.3 s"])
def test_no_speed_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number and s, ms, min"):
        measured_step_us(text, JOB)


def test_a_step_that_cannot_be_of_this_mapping_is_refused(estimate: StepEstimate) -> None:
    with pytest.raises(UsageError, match="at most 10 times as much or as little: check the unit"):
        run_of(estimate, 11.0)

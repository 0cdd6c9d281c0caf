from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.measure import (
    COLUMNS,
    MAX_SLOWDOWN,
    Point,
    Repeats,
    Row,
    interference,
    measure,
    sizes_between,
    summarize,
    sweep,
)

UNHURRIED = settings(deadline=None)  # a busy machine is no failure


class Script:
    """Plays a list of times, the last one for ever, and counts the runs."""

    def __init__(self, *times_us: float) -> None:
        self.times_us = times_us
        self.num_runs = 0

    def __call__(self) -> float:
        self.num_runs += 1
        return self.times_us[min(self.num_runs, len(self.times_us)) - 1]


def test_steady_times_stop_as_soon_as_the_median_has_an_interval() -> None:
    run = Script(500.0, 100.0)
    samples = measure(run, Repeats(warmup=2))
    # 5 times hold the median between their extremes with 93.75 % only; 6 with 96.9 %
    assert (samples.num, run.num_runs) == (6, 8)
    assert (samples.p50_us, samples.p99_us, samples.mean_us, samples.cv) == (100.0, 100.0, 100.0, 0.0)
    assert (samples.half_width, samples.num_outliers) == (0.0, 0)


def test_fewer_repeats_suffice_for_less_confidence() -> None:
    assert measure(Script(1.0), Repeats(min_repeats=5, confidence=0.9)).num == 5


def test_noisy_times_go_on_until_the_bound() -> None:
    samples = measure(Script(*[100.0, 200.0] * 30), Repeats(max_repeats=40))
    assert samples.num == 40
    assert samples.half_width > 0.05


def test_the_budget_ends_a_slow_measurement_at_the_least_number_of_repeats() -> None:
    samples = measure(Script(*[5e5, 9e5] * 20), Repeats(min_repeats=5, budget_us=2e6))
    assert samples.num == 5


def test_two_runs_suffice_when_each_takes_over_half_of_the_budget() -> None:
    run = Script(1.5e6)
    samples = measure(run, Repeats(warmup=3, min_repeats=5, budget_us=2e6))
    assert samples.num == 2
    assert run.num_runs == 3  # one warm-up, which took most of the budget, was enough
    assert samples.half_width == math.inf


def test_one_hiccup_does_not_cut_a_measurement_short() -> None:
    samples = measure(Script(100.0, 100.0, 1.9e6, 100.0), Repeats(warmup=0, min_repeats=5, budget_us=2e6))
    assert samples.num >= 5
    assert samples.num_outliers == 1
    assert samples.p99_us == 100.0
    assert max(samples.raw) == 1.9e6


@UNHURRIED
@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60), st.integers(0, 3), st.integers(1, 6))
def test_ranks_that_hear_the_same_times_run_equally_often(times: list[float], warmup: int, least: int) -> None:
    repeats = Repeats(warmup=warmup, min_repeats=least, max_repeats=30)
    runs = [Script(*times) for _ in range(2)]
    first, second = (measure(run, repeats) for run in runs)
    assert first == second
    assert runs[0].num_runs == runs[1].num_runs <= warmup + 30
    assert first.num >= min(least, 2)


def test_outliers_are_counted_and_left_out() -> None:
    steady = [98.0, 99.0, 100.0, 101.0, 102.0]
    samples = summarize([*steady, 400.0])
    assert (samples.num, samples.num_outliers) == (6, 1)
    assert (samples.p50_us, samples.p99_us) == (100.0, 102.0)
    assert samples.mean_us == 100.0
    assert samples.cv == pytest.approx(math.sqrt(2.5) / 100)
    assert samples.raw == (*steady, 400.0)
    assert summarize(steady).num_outliers == 0


def test_a_coarse_clock_makes_no_outliers_of_a_tick() -> None:
    assert summarize([100.0] * 5 + [100.5]).num_outliers == 0
    assert summarize([100.0] * 5 + [110.0]).num_outliers == 1


@UNHURRIED
@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=50))
def test_statistics_stay_within_the_times(times: list[float]) -> None:
    samples = summarize(times)
    assert min(times) <= samples.p50_us <= samples.p99_us <= max(times)
    assert samples.num == len(times)
    assert samples.num_outliers < samples.num
    assert samples.half_width >= 0
    assert (samples.half_width == math.inf) == (len(times) < 6)


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.nan, math.inf])
def test_a_run_must_return_a_time(time_us: float) -> None:
    with pytest.raises(UsageError, match="positive, finite time in us"):
        measure(lambda: time_us, Repeats())
    with pytest.raises(UsageError, match="positive, finite"):
        interference(1.0, 1.0, time_us, 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"warmup": -1},
        {"min_repeats": 0},
        {"max_repeats": 4},
        {"confidence": 1.0},
        {"half_width": 0.0},
        {"budget_us": 0.0},
    ],
)
def test_repeats_out_of_range_are_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"Repeats\.{next(iter(fields))}: expected .*, got "):
        Repeats(**fields)  # type: ignore[arg-type]


def test_a_sweep_makes_a_curve_and_reports_each_point() -> None:
    points: list[Point] = []
    prepared: list[int] = []

    def prepare(nbytes: int) -> Callable[[], float]:
        prepared.append(nbytes)
        return lambda: 10 + nbytes / 1000

    curve = sweep(
        "all_to_all", Resource.INTER, 2, [1000, 4000, 16000], prepare, Repeats(), points.append, source="a test"
    )
    assert prepared == [1000, 4000, 16000] == [point.nbytes for point in points]
    assert curve.time_us == curve.p50_us == curve.p99_us == (11.0, 14.0, 26.0)
    assert curve.samples == (6, 6, 6)
    assert (curve.key, curve.source) == (("all_to_all", Resource.INTER, 2), "a test")
    # left out, 4000 is predicted as the geometric mean of its neighbours
    assert curve.holdout_error == pytest.approx(math.sqrt(11 * 26) / 14 - 1)


@pytest.mark.parametrize("sizes", [[], [0, 1], [2, 2], [2, 1]])
def test_a_sweep_refuses_sizes_that_make_no_curve(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="expected sizes"):
        sweep("all_to_all", Resource.INTER, 2, sizes, lambda _: lambda: 1.0, Repeats())


def test_sizes_follow_nccl_tests() -> None:
    assert sizes_between(1024, 8192, 2) == (1024, 2048, 4096, 8192)
    assert sizes_between(1024, 8191, 2) == (1024, 2048, 4096)
    assert sizes_between(7, 7, 4) == (7,)
    assert sizes_between(1, 4, 1.25) == (1, 2, 3, 4)
    for wrong in [(0, 8, 2.0), (8, 4, 2.0), (1, 8, 1.0), (1, 8, math.nan)]:
        with pytest.raises(UsageError, match="expected 1 <= min_bytes"):
            sizes_between(*wrong)


def test_a_row_has_nccl_tests_columns() -> None:
    point = Point("all_gather", Resource.INTRA, 8, 64_000_000, summarize([400.0] * 6))
    row = Row.of(point, dtype="bfloat16", element_bytes=2, num_wrong=0)
    assert row.algbw_gbps == pytest.approx(160)
    assert row.busbw_gbps == pytest.approx(140)
    assert row.cells() == ("64000000", "32000000", "bfloat16", "400.0", "160.0", "140.0", "0", "400.0", "400.0")
    assert len(row.cells()) == len(COLUMNS)
    assert Row.of(point).cells()[6] == "N/A"


def together(alone_a_us: float, alone_b_us: float, slow_a: float, slow_b: float) -> tuple[float, float]:
    """The fluid model forwards: when two steps that start together end."""
    both_a, both_b = alone_a_us * slow_a, alone_b_us * slow_b
    if both_a <= both_b:
        return both_a, both_a + alone_b_us - both_a / slow_b
    return both_b + alone_a_us - both_b / slow_a, both_b


TIMES = st.floats(1, 1e6)
SLOWDOWNS = st.floats(1, 5)


@UNHURRIED
@given(TIMES, TIMES, SLOWDOWNS, SLOWDOWNS)
def test_interference_inverts_the_fluid_model(a_us: float, b_us: float, slow_a: float, slow_b: float) -> None:
    beside = together(a_us, b_us, slow_a, slow_b)
    found = interference(a_us, b_us, *beside)
    # what the longer one lost is a small difference of large times when the other was very short
    tolerance = 1e-10 * max(beside) / min(beside)
    assert found[0] == pytest.approx(slow_a, rel=tolerance)
    assert found[1] == pytest.approx(slow_b, rel=tolerance)


@UNHURRIED
@given(TIMES, TIMES, TIMES, TIMES)
def test_interference_of_any_times_is_a_slowdown(a: float, b: float, beside_a: float, beside_b: float) -> None:
    slowdowns = interference(a, b, beside_a, beside_b)
    assert all(1 <= slowdown <= max(MAX_SLOWDOWN, beside_a / a, beside_b / b) for slowdown in slowdowns)


def test_interference_by_example() -> None:
    assert interference(10, 10, 10, 10) == (1.0, 1.0)
    assert interference(10, 10, 9, 9.5) == (1.0, 1.0)  # faster together is noise
    assert interference(10, 10, 15, 15) == (1.5, 1.5)
    # a ends at 15; until then b did 15 / 1.5 = 10 of its 20, and the rest takes 10 more
    assert interference(10, 20, 15, 25) == (1.5, 1.5)
    # one after the other: b stood still while a ran
    assert interference(10, 10, 10, 20) == (1.0, MAX_SLOWDOWN)

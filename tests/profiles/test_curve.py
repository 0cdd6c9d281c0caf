from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ProfileError, UsageError
from commlayer.profiles.links import Resource

UNHURRIED = settings(deadline=None)  # a busy machine is no failure

KIB = 1024
ROUNDING = 1e-12


def make(sizes: list[int], times: list[float], **fields: object) -> Curve:
    return Curve("all_to_all", Resource.INTER, 2, tuple(sizes), tuple(times), **fields)  # type: ignore[arg-type]


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 1 << 34), min_size=1, max_size=12)))
    times = sorted(draw(st.lists(st.floats(1e-2, 1e8), min_size=len(sizes), max_size=len(sizes))))
    return make(sizes, times)


@UNHURRIED
@given(curves())
def test_measured_points_come_back_exactly(curve: Curve) -> None:
    for size, time_us in zip(curve.bytes, curve.time_us, strict=True):
        assert curve.at(size) == time_us
        assert not curve.is_extrapolated(size)


@UNHURRIED
@given(curves(), st.lists(st.floats(1e-3, 1e12), min_size=2, max_size=20))
def test_more_bytes_never_take_less_time(curve: Curve, asked: list[float]) -> None:
    asked = sorted([*asked, *curve.bytes])
    times = [curve.at(nbytes) for nbytes in asked]
    for before, after in pairwise(times):
        assert after >= before * (1 - ROUNDING)
    assert all(0 < time_us < math.inf for time_us in times)


@UNHURRIED
@given(curves())
def test_the_curve_is_continuous_where_the_fits_begin(curve: Curve) -> None:
    steepest = max((b / a for a, b in zip(*_logs(curve), strict=True)), default=1.0)
    for end in (curve.bytes[0], curve.bytes[-1]):
        for nearby in (end * (1 - 1e-15), end * (1 + 1e-15)):
            assert curve.at(nearby) == pytest.approx(curve.at(end), rel=1e-14 * (1 + steepest))


def _logs(curve: Curve) -> tuple[list[float], list[float]]:
    """The lengths of the curve's segments along both axes, in logarithms."""
    return tuple(  # type: ignore[return-value]
        [math.log(b / a) for a, b in pairwise(values)] for values in (curve.bytes, curve.time_us)
    )


@UNHURRIED
@given(curves())
def test_the_fits_are_a_latency_and_a_bandwidth(curve: Curve) -> None:
    assert 0 <= curve.latency_us <= curve.time_us[0]
    assert 0 < curve.bandwidth_gbps < math.inf
    far = curve.bytes[-1] * 1e6
    assert curve.algbw_gbps(far) <= curve.bandwidth_gbps * (1 + 1e-9)
    assert curve.is_extrapolated(far)
    assert curve.at(1e-9) == pytest.approx(curve.latency_us, abs=1e-6 * curve.time_us[0])


@UNHURRIED
@given(st.floats(0.1, 1e3), st.floats(0.01, 1e3), st.floats(1, 1e10))
def test_latency_plus_bandwidth_is_recovered_outside_and_at_most_6_percent_high_inside(
    latency_us: float, gbps: float, asked: float
) -> None:
    sizes = [KIB * 4**i for i in range(11)]
    curve = make(sizes, [latency_us + size / gbps / 1e3 for size in sizes])
    true_us = latency_us + asked / gbps / 1e3
    if curve.is_extrapolated(asked):
        assert curve.at(asked) == pytest.approx(true_us, rel=1e-6)
    else:
        assert true_us * (1 - 1e-9) <= curve.at(asked) <= true_us * 1.0607


@UNHURRIED
@given(st.floats(0.01, 1e3), st.floats(1, 1e12))
def test_time_in_proportion_to_bytes_is_exact_everywhere(gbps: float, asked: float) -> None:
    sizes = [KIB * 4**i for i in range(6)]
    curve = make(sizes, [size / gbps / 1e3 for size in sizes])
    assert curve.at(asked) == pytest.approx(asked / gbps / 1e3, rel=1e-9)


def test_no_bytes_take_no_time() -> None:
    curve = make([10, 100], [5.0, 8.0])
    assert curve.at(0) == 0.0
    assert curve.algbw_gbps(0) == 0.0
    assert not curve.is_extrapolated(0)
    assert curve.at(1) > 4


@pytest.mark.parametrize("nbytes", [-1, float("nan")])
def test_a_size_that_is_none_is_refused(nbytes: float) -> None:
    with pytest.raises(UsageError, match="all_to_all on inter with group size 2"):
        make([10, 100], [5.0, 8.0]).at(nbytes)


def test_one_point_is_pure_bandwidth() -> None:
    curve = make([1000], [2.0])
    assert [curve.at(nbytes) for nbytes in (500, 1000, 4000)] == [1.0, 2.0, 8.0]
    assert (curve.latency_us, curve.bandwidth_gbps) == (0.0, 0.5)
    assert curve.is_extrapolated(999)


def test_a_flat_end_does_not_promise_endless_bandwidth() -> None:
    curve = make([1000, 2000, 4000], [3.0, 3.0, 3.0])
    assert curve.at(1500) == 3.0
    assert curve.at(8000) == 6.0


def test_a_flat_start_is_latency_and_not_bandwidth() -> None:
    curve = make([1000, 2000, 4000], [3.0, 3.0, 5.0])
    assert [curve.at(nbytes) for nbytes in (1, 100, 999)] == [3.0, 3.0, 3.0]
    assert curve.latency_us == 3.0


def test_efficiency_is_bus_bandwidth_over_peak() -> None:
    curve = Curve.from_efficiency("all_to_all", Resource.INTER, 2, [(256e6, 0.741)], 25)
    assert curve.at(256e6) == pytest.approx(6909.58, abs=0.01)
    assert curve.busbw_gbps(256e6) == pytest.approx(25 * 0.741)
    assert curve.algbw_gbps(256e6) == pytest.approx(2 * 25 * 0.741)
    assert curve.efficiency(256e6, 25) == pytest.approx(0.741)
    assert curve.bytes == (256_000_000,)
    with pytest.raises(ProfileError, match=r"points\[0\]"):
        Curve.from_efficiency("all_to_all", Resource.INTER, 2, [(256e6, 0.0)], 25)
    with pytest.raises(ProfileError, match="peak_gbps"):
        Curve.from_efficiency("all_to_all", Resource.INTER, 2, [(256e6, 0.5)], float("nan"))


@UNHURRIED
@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=12))
def test_noisy_medians_become_a_curve_that_does_not_fall(medians: list[float]) -> None:
    sizes = [KIB << i for i in range(len(medians))]
    curve = Curve.from_samples("all_gather", Resource.INTRA, 4, sizes, medians)
    assert curve.p50_us == tuple(medians)
    assert (curve.holdout_error is None) == (len(medians) < 3)
    if sorted(medians) == medians:
        assert curve.time_us == tuple(medians)
    assert min(medians) * (1 - ROUNDING) <= curve.time_us[0]
    assert curve.time_us[-1] <= max(medians) * (1 + ROUNDING)


def test_pooling_is_in_relative_error() -> None:
    curve = Curve.from_samples("all_gather", Resource.INTRA, 4, [1, 2, 3], [1.0, 16.0, 4.0])
    assert curve.time_us == pytest.approx((1.0, 8.0, 8.0))


def test_holdout_error_predicts_each_inner_point_from_the_others() -> None:
    exact = Curve.from_samples("copy", Resource.DEVICE, 1, [1, 2, 4, 8], [10.0, 20.0, 40.0, 80.0], source="s")
    assert exact.holdout_error == pytest.approx(0, abs=1e-12)
    # 2 is predicted as 20 from 1 and 4, where 25 was measured
    off = Curve.from_samples("copy", Resource.DEVICE, 1, [1, 2, 4], [10.0, 25.0, 40.0], samples=[5, 6, 7])
    assert off.holdout_error == pytest.approx(0.2)
    assert off.samples == (5, 6, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "alltoall"}, r"collective: expected one of .*all_to_all.*'alltoall'"),
        ({"link": "compute"}, "link: expected the link class"),
        ({"group_size": 0}, "group_size: expected at least 1"),
        ({"collective": "copy"}, "group_size: .*1 for a copy, got 2"),
        ({"bytes": (), "time_us": ()}, "bytes: expected at least one"),
        ({"bytes": (0, 1)}, r"bytes\[0\]: expected a size of at least 1"),
        ({"bytes": (2, 2)}, r"bytes\[1\]: expected sizes that increase, got 2 after 2"),
        ({"time_us": (1.0,)}, "time_us: expected 2 values"),
        ({"time_us": ()}, "time_us: expected 2 values"),
        ({"time_us": (2.0, 1.0)}, r"time_us\[1\]: expected times that do not fall, got 1.0 after 2.0"),
        ({"time_us": (1.0, math.nan)}, r"time_us\[1\]: expected a positive, finite time in µs, got nan"),
        ({"time_us": (-1.0, 1.0)}, r"time_us\[0\]: .*got -1.0"),
        ({"p50_us": (1.0,)}, "p50_us: expected 2 values"),
        ({"p99_us": (1.0, math.inf)}, r"p99_us\[1\]"),
        ({"samples": (1, 2, 3)}, "samples: expected 2 values"),
        ({"holdout_error": -0.1}, "holdout_error"),
    ],
)
def test_a_damaged_curve_is_refused_with_the_field(fields: dict[str, object], message: str) -> None:
    sound = {"collective": "all_to_all", "link": "inter", "group_size": 2, "bytes": (1, 2), "time_us": (1.0, 2.0)}
    with pytest.raises(ProfileError, match=message):
        Curve(**{**sound, **fields})  # type: ignore[arg-type]


def test_a_curve_is_a_value() -> None:
    curve = make([1, 2], [1, 2])
    curve.at(1.5)  # fills the cache, which must not count
    assert curve == make([1, 2], [1.0, 2.0], holdout_error=None)
    assert len({curve, make([1, 2], [1.0, 2.0])}) == 1
    assert pickle.loads(pickle.dumps(curve)) == copy.deepcopy(curve) == curve
    assert curve.key == ("all_to_all", Resource.INTER, 2)

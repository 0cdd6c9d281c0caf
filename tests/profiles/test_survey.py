"""A survey of many curves: what it asks for, in which order, and what it leaves out where time is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.profiles.survey import Ladder, Survey, SurveyLimits, Wanted, survey

SIZES = (4096, 98304, 2359296)
PLENTY = SurveyLimits(budget_us=1e9, longest_us=4e4)


class Links:
    """Calls that take ``latency_us`` and ``us_per_byte`` of their curve; timing one costs ``overhead_us`` beside."""

    def __init__(self, *curves: tuple[float, float], overhead_us: float = 1e3) -> None:
        self.curves, self.overhead_us, self.spent_us = curves, overhead_us, 0.0
        self.rounds: list[list[Wanted]] = []

    def __call__(self, calls: Sequence[Wanted], until_us: float) -> tuple[list[float], float]:
        times: list[float] = []
        self.rounds.append([])
        for place, size in calls:
            if self.spent_us >= until_us:
                break
            self.rounds[-1].append((place, size))
            times.append(self.curves[place][0] + self.curves[place][1] * size)
            self.spent_us += times[-1] + self.overhead_us
        return times, self.spent_us

    @property
    def asked(self) -> Counter[Wanted]:
        return Counter(call for calls in self.rounds for call in calls)


def ladders(*loads: float, sizes: tuple[int, ...] = SIZES, link: Resource = Resource.INTER) -> list[Ladder]:
    return [Ladder(sizes, link, load) for load in loads]


def test_every_size_is_timed_twice_where_there_is_time() -> None:
    links = Links((1e3, 0.001), (2e3, 0.002))
    found = survey(ladders(1.0, 2.0), links, PLENTY)
    assert links.asked == {(place, size): 2 for place in (0, 1) for size in SIZES}
    for place, (latency_us, us_per_byte) in enumerate(links.curves):
        for rung, size in zip(found.curve(place), SIZES, strict=True):
            assert (rung.size, rung.samples) == (size, 2)
            assert rung.time_us == pytest.approx(latency_us + us_per_byte * size)


def test_without_time_every_size_is_timed_once() -> None:
    links = Links((1e3, 0.001), (2e3, 0.002))
    survey(ladders(1.0, 2.0), links, SurveyLimits(budget_us=0.0, longest_us=4e4))
    assert links.asked == {(place, size): 1 for place in (0, 1) for size in SIZES}


def test_what_is_left_out_first_is_the_largest_size_again_and_then_the_small_ones_of_the_last_curves() -> None:
    curves = [(1e3, 0.001)] * 10
    whole, none = Links(*curves), Links(*curves)
    survey(ladders(*[1.0] * 10), whole, PLENTY)
    survey(ladders(*[1.0] * 10), none, SurveyLimits(0.0, 4e4))
    seen = []
    for part in (0.0, 0.3, 0.6, 1.0):
        links = Links(*curves)
        budget_us = none.spent_us + part * (whole.spent_us - none.spent_us)
        survey(ladders(*[1.0] * 10), links, SurveyLimits(budget_us, 8e3))
        assert links.spent_us <= max(budget_us, none.spent_us) * (1 + 1e-9)
        twice = [call for call, count in links.asked.items() if count > 1]
        small = [place for place, size in twice if size < SIZES[-1]]
        assert set(small) == set(range(len(set(small))))  # the first curves
        seen.append((len(small), len(twice) - len(small)))
    assert seen == sorted(seen)
    assert seen[0] == (0, 0)
    assert seen[-1] == (20, 10)


def test_no_call_takes_much_longer_than_the_longest_however_slow_the_link_is() -> None:
    for us_per_byte in (0.001, 0.02, 0.2, 2.0):
        links = Links((3e3, us_per_byte), (3e3, 4 * us_per_byte), (3e3, 2 * us_per_byte))
        found = survey(ladders(1.0, 4.0, 2.0), links, SurveyLimits(1e6, 4e4))
        first, *others = (found.sizes(place)[-1] for place in range(3))
        least = SIZES[1] * 4
        assert links.curves[0][1] * first <= 4 * 4e4 + 1 or first == least
        for size, (latency_us, slope_us) in zip(others, links.curves[1:], strict=True):
            took_us = latency_us + slope_us * size
            assert took_us <= 4e4 + 1 or (size == least and took_us <= 4 * 4e4) or size == SIZES[1]
        for place, (latency_us, slope_us) in enumerate(links.curves):  # a curve goes on at the link's rate
            rung = found.curve(place)[-1]
            assert rung.size == SIZES[-1]
            assert rung.time_us == pytest.approx(latency_us + slope_us * SIZES[-1], rel=0.05)
            assert bool(rung.samples) == (found.sizes(place)[-1] == SIZES[-1])


def test_a_curve_that_is_much_slower_than_its_link_goes_on_at_its_own_rate() -> None:
    links = Links((3e3, 0.02), (3e3, 0.16), (3e3, 0.03))
    found = survey(ladders(1.0, 1.0, 1.0), links, SurveyLimits(1e6, 4e4))
    assert found.curve(1)[-1].time_us == pytest.approx(3e3 + 0.16 * SIZES[-1])
    near = found.curve(2)[-2]
    assert found.curve(2)[-1].time_us == pytest.approx(near.time_us + 0.02 * (SIZES[-1] - near.size), rel=0.05)


@pytest.mark.parametrize("deadline_us", [0.0, 2e4, 5e4, 1e5, 2e5])
def test_no_call_begins_behind_the_deadline_but_those_of_each_links_first_curve(deadline_us: float) -> None:
    """Wherever time is up: curves are whole, go on at the link's rate, or are not there."""
    inter, intra = ladders(*[1.0] * 6), ladders(*[1.0] * 6, link=Resource.INTRA)
    links = Links(*[(1e3, 0.001)] * 12)
    found = survey([*inter, *intra], links, SurveyLimits(1e9, 4e4, deadline_us))
    needed = sum(1e3 + 0.001 * size + links.overhead_us for size in SIZES) * 2
    assert links.spent_us <= max(deadline_us, 0.0) + needed + (1e3 + 0.001 * SIZES[-1] + links.overhead_us)
    for place in (0, 6):
        assert found.sizes(place) == SIZES
    curves = [found.curve(place) for place in range(12)]
    for place, curve in enumerate(curves):
        assert bool(curve) == bool(found.sizes(place))
        if curve:
            assert curve[-1].size == SIZES[-1]
            assert curve[-1].time_us == pytest.approx(1e3 + 0.001 * SIZES[-1], rel=0.01)
    if deadline_us == 0.0:
        assert [place for place, curve in enumerate(curves) if curve] == [0, 6]
    if deadline_us == 2e5:
        assert all(curves)


def alternating(*times_us: float) -> Callable[[Sequence[Wanted], float], tuple[list[float], float]]:
    seen: Counter[Wanted] = Counter()

    def run(calls: Sequence[Wanted], _: float) -> tuple[list[float], float]:
        found = []
        for call in calls:
            found.append(times_us[min(seen[call], len(times_us) - 1)])
            seen[call] += 1
        return found, float(sum(seen.values()))

    return run


def test_a_third_time_settles_two_that_differ_and_the_faster_of_two_counts() -> None:
    found = survey(ladders(1.0), alternating(300.0, 100.0, 120.0), PLENTY)
    assert found.curve(0)[0] == (SIZES[0], 120.0, 3)
    assert found.curve(0)[-1] == (SIZES[-1], 100.0, 2)
    alike = survey(ladders(1.0), alternating(120.0, 100.0, 1.0), PLENTY)
    assert alike.curve(0)[0] == (SIZES[0], 100.0, 2)


@pytest.mark.parametrize("sizes", [(4096,), (4096, 98304)])
def test_curves_of_fewer_sizes(sizes: tuple[int, ...]) -> None:
    found = survey(ladders(1.0, sizes=sizes), Links((1e3, 0.001)), PLENTY)
    assert [rung.size for rung in found.curve(0)] == list(sizes)


def test_a_link_whose_larger_size_was_the_faster_asks_for_all_of_the_others() -> None:
    found = survey(ladders(1.0, 1.0), alternating(100.0), PLENTY)
    assert found.sizes(1) == SIZES
    assert survey([], alternating(1.0), PLENTY) == Survey([])


def test_a_point_that_was_not_measured_says_so_in_its_curve() -> None:
    found = survey(ladders(1.0, 4.0), Links((3e3, 0.2), (3e3, 0.8)), SurveyLimits(1e6, 4e4))
    sizes, times_us, samples = zip(*found.curve(1), strict=True)
    curve = Curve.from_samples("all_to_all", Resource.INTER, 2, sizes, times_us, samples=samples)
    assert curve.samples[-1] == 0
    assert curve.time_us[-1] > curve.time_us[-2]

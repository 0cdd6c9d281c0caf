"""Calls that depart from what is usual: a change is found when it lasts, and noise is not taken for it."""

from __future__ import annotations

import random

import pytest

from commlayer.scheduler.experience.departures import Departures


def fed(departures: Departures, ratios: list[float], kinds: int = 1) -> int | None:
    """After how many of the calls a change was found; None: after none."""
    for index, ratio in enumerate(ratios):
        departures.add(index % kinds, ratio)
        if departures.change() is not None:
            return index + 1
    return None


def noisy(rng: random.Random, count: int, level: float = 1.0, scatter: float = 0.05) -> list[float]:
    return [level * rng.lognormvariate(0.0, scatter) for _ in range(count)]


@pytest.mark.parametrize("factor", [4.0, 1.5, 0.25])
def test_a_change_that_lasts_is_found_within_six_calls_and_measured(factor: float) -> None:
    rng, departures = random.Random(1), Departures()
    assert fed(departures, noisy(rng, 40), kinds=6) is None
    assert fed(departures, noisy(rng, 12, factor), kinds=6) in (4, 5, 6)
    assert departures.change() == pytest.approx(factor, rel=0.2)
    assert not departures.is_of_prices


def test_one_outlier_or_two_are_no_change() -> None:
    rng, departures = random.Random(2), Departures()
    ratios = noisy(rng, 200)
    for index in range(10, 200, 7):
        ratios[index] *= 10.0
        ratios[index + 1 if index < 199 else 0] *= 5.0
    assert fed(departures, ratios) is None


def test_a_change_below_a_tenth_is_none() -> None:
    departures = Departures()
    assert fed(departures, [1.0] * 20 + [1.08] * 50) is None


def test_calls_that_scatter_need_a_larger_change() -> None:
    found = [fed(Departures(), noisy(random.Random(seed), 300, scatter=0.3), kinds=3) for seed in range(200)]
    assert (
        sum(each is not None for each in found) <= 100
    )  # in 60,000 calls: what is found is measured before anything follows
    departures = Departures()
    assert fed(departures, [1.3, 0.7] * 20 + [1.2] * 20) is None
    assert fed(departures, [1.6] * 6) is not None


def test_kinds_are_compared_with_themselves() -> None:
    """A kind that has always taken longer than promised is no change, however calls are mixed."""
    departures = Departures()
    for index in range(100):
        departures.add("as promised" if index % 3 else "slower", 1.0 if index % 3 else 1.5)
        assert departures.change() is None


def test_prices_that_are_wrong_from_the_start_are_found() -> None:
    departures = Departures()
    assert fed(departures, [3.0] * 10) == 5
    assert departures.is_of_prices
    assert departures.change() == pytest.approx(3.0)


def test_what_was_accepted_is_usual_from_then_on() -> None:
    departures = Departures()
    fed(departures, [3.0] * 10)
    departures.accept()
    assert fed(departures, [3.0] * 50) is None
    assert fed(departures, [1.0] * 10) in (4, 5, 6)


def test_a_group_whose_calls_are_all_of_another_kind_keeps_little() -> None:
    departures = Departures()
    for kind in range(10_000):
        departures.add(kind, 1.0)
    assert len(departures._usual) <= 256
    assert departures.change() is None


def rounds(
    departures: Departures, kinds: int, level: float, biases: list[float], num_rounds: int, rng: random.Random
) -> int | None:
    """After how many calls of mixed kinds, each with a bias of its own, a change was found; None: after none."""
    for number in range(num_rounds * kinds):
        kind = number % kinds
        departures.add(kind, level * biases[kind] * rng.lognormvariate(0.0, 0.1))
        if departures.change() is not None:
            return number + 1
    return None


BIASES = [1.3, 1.35, 1.0, 0.75, 0.8, 0.9]
"""Measured over predicted time by kind of call, as seen after a change of plans."""


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_kinds_that_are_new_are_evidence_together(before: int, factor: float) -> None:
    """Few calls of each kind were seen when links change: it is found within six all the same."""
    rng, departures = random.Random(before), Departures()
    assert rounds(departures, 6, 1.0, BIASES, before, rng) is None
    assert (rounds(departures, 6, factor, BIASES, 2, rng) or 99) <= 6
    assert not departures.is_of_prices


def test_kinds_whose_predictions_err_both_ways_are_no_change() -> None:
    for seed in range(50):
        assert rounds(Departures(), 6, 1.0, BIASES, 5, random.Random(seed)) is None


def test_a_change_is_not_learnt_as_usual_before_anybody_has_looked() -> None:
    """While nobody may measure, a change that was found stays one."""
    rng, departures = random.Random(3), Departures()
    rounds(departures, 6, 1.0, BIASES, 2, rng)
    for number in range(120):
        departures.add(number % 6, 0.25 * BIASES[number % 6])
    assert (departures.change() or 1.0) < 1 / 1.6


def test_calls_that_are_usual_again_are_known_at_once_after_a_change_was_accepted() -> None:
    """The delay was no link's, and was taken for usual; when it ends, nobody waits until that is learnt anew."""
    rng, departures = random.Random(4), Departures()
    rounds(departures, 6, 1.0, BIASES, 6, rng)
    assert rounds(departures, 6, 3.0, BIASES, 2, rng) is not None
    departures.accept()
    assert rounds(departures, 6, 3.0, BIASES, 1, rng) is None
    assert (rounds(departures, 6, 1.0, BIASES, 2, rng) or 99) <= 8


def test_calls_that_all_take_longer_than_predicted_are_doubted_together_once() -> None:
    rng, departures = random.Random(5), Departures()
    assert rounds(departures, 6, 3.0, BIASES, 2, rng) == 12  # the first call of each kind says nothing
    assert not departures.is_of_prices  # it may be the links, or what delays calls
    departures.accept()
    assert rounds(departures, 6, 3.0, BIASES, 1, rng) is None
    assert rounds(departures, 6, 3.0, BIASES, 6, rng) is not None
    assert departures.is_of_prices  # four calls of a kind say so

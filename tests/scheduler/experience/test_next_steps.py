"""Steps that a group's experience asks for: when links are timed, what is believed of them, and
when plans are tried."""

from __future__ import annotations

from typing import Any

import pytest

from commlayer.scheduler.experience.experience import CONFIRM, MEASURE, TRY, Experience, LinksSeen, NextStep
from commlayer.scheduler.experience.link_rates import LinkRates, LinkTimes

WHERE_MEASURED: dict[str, Any] = {"calls": 100, "call_us": 1e4, "measuring_us": 2e4, "may_measure": True}


def slowed(factor: float = 3.0, *, before: int = 6) -> Experience:
    """A group whose calls were as promised, and then took longer."""
    experience = Experience()
    for ratio in [1.0] * before + [factor] * 6:
        experience.told("a kind", 100.0, 100.0 * ratio)
    return experience


def step(experience: Experience, now_s: float = 0.0, **how: Any) -> NextStep | None:
    return experience.next_step(now_s, **{**WHERE_MEASURED, **how})


def look(experience: Experience, *taken_us: float, waited_us: float = 0.0, is_second: bool = False) -> LinksSeen:
    """Time the links of two nodes, whose message usually takes 100 µs; the last time holds for all
    further looks."""
    times = list(taken_us)

    def looked(larger: float) -> LinkTimes:
        time_us = times.pop(0) if len(times) > 1 else times[0]
        return LinkTimes({(0, 1): time_us}, {(0, 1): time_us - waited_us})

    return experience.look_at_links(looked, expected_us=100.0, siblings=1, slowdown=1.0, is_second=is_second)


def test_calls_that_are_as_promised_ask_for_nothing() -> None:
    assert step(slowed(1.0)) is None


def test_links_are_measured_where_that_costs_less_than_is_lost() -> None:
    found = step(slowed())
    assert found is not None
    assert (found.purpose, found.event) == (MEASURE, "")
    assert found.value == pytest.approx(3.0)
    assert step(slowed(), measuring_us=1e7) is None


def test_where_plans_stay_a_change_is_an_event_and_taken_for_usual() -> None:
    experience = slowed()
    found = step(experience, may_measure=False)
    assert found is not None
    assert found.purpose == ""
    assert "3.00 times as long" in found.event
    assert step(experience, 10.0, may_measure=False) is None


def test_links_that_seem_slower_are_believed_when_they_are_seen_twice() -> None:
    experience = slowed()
    first = look(experience, 400.0)
    assert not first.has_changed
    assert experience.suspected == LinkRates(0.25)
    assert experience.settle(first, 10.0, with_trials=True) == ""
    assert step(experience, 10.1) is None
    assert step(experience, 10.6) == NextStep(CONFIRM, pytest.approx(3.0))  # type: ignore[arg-type]
    assert look(experience, 400.0, is_second=True) == LinksSeen(LinkRates(0.25), has_changed=True)
    assert experience.after(LinkRates(0.25)).links == LinkRates(0.25)


def test_a_second_look_that_differs_is_a_new_suspicion() -> None:
    experience = Experience()
    look(experience, 400.0)
    assert not look(experience, 900.0, is_second=True).has_changed
    assert experience.suspected == LinkRates(100.0 / 900.0)


def test_links_that_seem_faster_are_believed_at_once() -> None:
    assert look(Experience(), 25.0) == LinksSeen(LinkRates(4.0), has_changed=True)
    assert not look(Experience(), 25.0, 100.0).has_changed, "a burst that a larger message does not have"


def test_a_wait_for_a_processor_is_no_slow_link() -> None:
    experience = slowed()
    found = look(experience, 400.0, waited_us=300.0)
    assert (found.has_changed, found.is_doubtful, experience.suspected) == (False, True, None)
    assert "processors were busy" in experience.settle(found, 10.0, with_trials=True)
    assert step(experience, 10.1) is None
    assert step(experience, 10.3) is not None, "slow calls are not taken for usual"


def test_pauses_grow_and_end_with_a_result() -> None:
    experience, now_s, pauses = slowed(), 0.0, []
    for _ in range(10):
        experience.settle(LinksSeen(LinkRates(), is_doubtful=True), now_s, with_trials=True)
        begin_s = now_s
        while step(experience, now_s) is None:
            now_s += 0.25
        pauses.append(now_s - begin_s)
    assert pauses[:4] == [0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == 60.0
    after = experience.after(LinkRates(0.5))
    for _ in range(10):
        after.told("a kind", 100.0, 300.0)
    assert step(after, now_s) is not None


def wrong_prices() -> Experience:
    """A group whose calls have always taken three times their price, on links that are as they
    were."""
    experience = slowed(3.0, before=0)
    assert step(experience) is not None
    assert experience.settle(LinksSeen(LinkRates()), 0.0, with_trials=True) == ""
    return experience


def test_trials_wait_until_calls_have_taken_long_enough_for_them() -> None:
    experience = wrong_prices()
    assert step(experience, call_us=5e3, calls=1000) is None, "a twentieth of five seconds is less than trials take"
    found = step(experience, call_us=5e3, calls=1400)
    assert found is not None
    assert (found.purpose, round(found.value)) == (TRY, 350_000)
    assert "plans are tried" in found.event
    assert step(experience, call_us=5e3, calls=1500) is None


def test_plans_are_tried_twice_for_the_same_links_and_no_more() -> None:
    experience = wrong_prices()
    for tries in (1, 2):
        assert step(experience, call_us=1e4, calls=1000) is not None
        experience = experience.doubted(5e5)
        for _ in range(6):
            experience.told("a kind", 100.0, 300.0)
        event = experience.settle(LinksSeen(LinkRates()), 1e3, with_trials=True)
        assert (event == "") == (tries == 1)


def test_where_trials_are_off_wrong_prices_are_taken_for_usual() -> None:
    experience = slowed(3.0, before=0)
    assert "plans stay" in experience.settle(LinksSeen(LinkRates()), 0.0, with_trials=False)
    assert step(experience, 10.0) is None


def test_calls_by_other_prices_are_forgotten() -> None:
    experience = slowed()
    experience.forget_calls()
    assert step(experience) is None

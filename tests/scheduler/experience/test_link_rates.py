"""Rates of links from messages between nodes, and profiles at such rates."""

from __future__ import annotations

import itertools

import pytest

from commlayer.profiles import Profile, load_profile
from commlayer.profiles.links import Resource
from commlayer.scheduler import Planner
from commlayer.scheduler.experience.link_rates import LinkRates, card_gbps, profile_at, rates_from


@pytest.fixture
def profile() -> Profile:
    return load_profile("emulated-2x4")


def times(num_nodes: int, expected_us: float, rates: dict[int, float] | None = None) -> dict[tuple[int, int], float]:
    rates = rates or {}
    pairs = itertools.combinations(range(num_nodes), 2)
    return {(a, b): expected_us / min(rates.get(a, 1.0), rates.get(b, 1.0)) for a, b in pairs}


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7])
@pytest.mark.parametrize("off", [1.0, 1.2, 0.8])
def test_rates_within_a_probes_error_are_the_profiles(num_nodes: int, off: float) -> None:
    assert rates_from(times(num_nodes, 100.0 * off), 100.0, siblings=1, slowdown=1.3) == LinkRates()


@pytest.mark.parametrize("rate", [0.25, 0.5, 4.0])
def test_a_fabric_is_told_from_a_card(rate: float) -> None:
    everyone = dict.fromkeys(range(4), rate)
    assert rates_from(times(4, 100.0, everyone), 100.0, siblings=1, slowdown=2.0).fabric == pytest.approx(rate)
    assert rates_from(times(4, 100.0, everyone), 100.0, siblings=1, slowdown=2.0).nodes == ()


def test_a_slow_card_is_told_from_a_fabric() -> None:
    found = rates_from(times(4, 100.0, {2: 0.25}), 100.0, siblings=1, slowdown=4.0)
    assert found == LinkRates(1.0, (1.0, 1.0, 0.25, 1.0))
    assert "node 2 of the group has 25% of the others' rate" in str(found)


def test_of_two_nodes_nobody_can_say_which_card_it_is() -> None:
    assert rates_from(times(2, 100.0, {1: 0.25}), 100.0, siblings=1, slowdown=4.0) == LinkRates(0.25)


def test_siblings_on_the_same_card_are_no_slow_fabric() -> None:
    assert rates_from(times(2, 400.0), 100.0, siblings=4, slowdown=1.2) == LinkRates()


def test_beside_siblings_calls_decide_within_what_the_links_leave_open() -> None:
    found = rates_from(times(2, 800.0), 100.0, siblings=2, slowdown=5.0)
    assert found.fabric == pytest.approx(0.2)
    found = rates_from(times(2, 800.0), 100.0, siblings=2, slowdown=50.0)
    assert found.fabric == pytest.approx(1 / 8)


def test_a_profile_at_its_own_rate_is_itself(profile: Profile) -> None:
    assert profile_at(profile, 1.0) is profile


def test_a_profile_at_another_rate_keeps_latencies_and_scales_bandwidth(profile: Profile) -> None:
    slow = profile_at(profile, 0.25)
    assert slow.peaks.inter_gbps == pytest.approx(profile.peaks.inter_gbps / 4)
    assert slow.fingerprint != profile.fingerprint
    for curve in profile.curves:
        other = slow.curve(*curve.key)
        if curve.link is not Resource.INTER:
            assert other == curve
            continue
        assert other.basis == "derived"
        large, small = curve.bytes[-1] / 8, curve.bytes[0] / 8
        assert other.at(large) == pytest.approx(curve.at(large * 4), rel=1e-6)
        assert other.at(small) <= curve.at(small) * 4.001


def test_the_rate_of_a_card(profile: Profile) -> None:
    assert card_gbps(profile) == pytest.approx(0.05, rel=0.3)  # 400 Mbit/s


def test_all_prices_exist_at_any_rate(profile: Profile) -> None:
    from commlayer.scheduler import Traffic

    for fabric in (1e-3, 0.1, 10.0, 1e3):
        planner = Planner(profile_at(profile, fabric))
        for size in (4, 1 << 10, 1 << 24):
            traffic = Traffic(size, 8, 1, Resource.INTER, "all_reduce", (4, 4))
            assert planner.decide(traffic).predicted_us > 0


def test_rates_differ_by_more_than_they_are_known_to() -> None:
    usual = LinkRates()
    assert not LinkRates(0.7).differs(usual)
    assert LinkRates(0.25).differs(usual)
    assert LinkRates(4.0).differs(usual)
    assert not LinkRates(0.3).differs(LinkRates(0.25))  # a probe that was a fifth wrong is wrong each time
    assert not LinkRates(1.0, (1.0, 0.9, 1.0)).differs(usual)
    assert LinkRates(1.0, (1.0, 0.6, 1.0)).differs(usual)


def test_slower_is_said_of_the_fabric_and_of_each_card() -> None:
    usual = LinkRates()
    assert LinkRates(0.25).slower(usual) == [True]
    assert LinkRates(4.0).slower(usual) == [False]
    assert LinkRates(4.0, (1.0, 0.5, 1.0)).slower(usual) == [False, False, True, False]
    assert usual.slower(LinkRates(1.0, (1.0, 0.5, 1.0))) == [False] * 4  # it has recovered

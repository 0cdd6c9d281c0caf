"""Prices that trials correct, and which plans are tried, without processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.profiles.catalog import load_profile
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler import Strategy, Traffic
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.experience import contenders
from commlayer.scheduler.experience.contenders import Trial
from commlayer.scheduler.experience.experience import Experience
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.wire import NATIVE, Wire, WireFormat

NODES = (2, 2)


def coarse(error: float = 0.25) -> Profile:
    """A measured cluster whose profile says that it knows little."""
    import msgspec

    profile = load_profile("emulated-2x4")
    curves = [msgspec.structs.replace(curve, holdout_error=error) for curve in profile.curves]
    return group_profile(profile.replace(curves=curves), NODES)


def traffic(size: int, collective: str = "all_reduce") -> Traffic:
    return Traffic.on_nodes(collective, size, NODES)


def test_plans_that_contend_are_tried_once_and_the_fastest_one_wins() -> None:
    planner, experience = Planner(coarse()), Experience()
    trial = experience.find_trial(planner, traffic(1 << 19), is_wanted=False)
    assert trial is not None
    assert {plan.strategy for plan in trial.plans} >= {Strategy.FLAT, Strategy.HIERARCHICAL}
    assert sum(timeline.total_us for timeline in trial.contenders) <= 0.75e5
    slow = {Strategy.FLAT: 0.5}
    experience.learn([[t.total_us * slow.get(t.plan.strategy, 2.0) for t in trial.contenders]])
    assert experience.best(planner.decide(traffic(1 << 19))).strategy is Strategy.FLAT
    assert experience.best(planner.decide(traffic(3 << 18))).strategy is Strategy.FLAT  # it holds for sizes like it
    large = planner.decide(traffic(64 << 20))
    assert experience.best(large) is large.plan  # and for no others
    for size in (1 << 19, trial.plans[0].traffic.logical_bytes):
        assert experience.find_trial(planner, traffic(size), is_wanted=True) is None
    assert experience.spent_us > 0


def test_nothing_is_learnt_for_other_collectives() -> None:
    planner, experience = Planner(coarse()), Experience()
    trial = experience.find_trial(planner, traffic(1 << 19), is_wanted=False)
    assert trial is not None
    experience.learn([[t.total_us * (1.0 if t.plan.strategy is Strategy.FLAT else 9.0) for t in trial.contenders]])
    decision = planner.decide(traffic(1 << 19, "all_gather"))
    assert experience.best(decision) is decision.plan


def test_a_good_profile_is_believed_unless_trials_are_asked_for() -> None:
    planner = Planner(coarse(0.02))
    assert Experience().find_trial(planner, traffic(1 << 19), is_wanted=False) is None
    assert Experience().find_trial(planner, traffic(1 << 19), is_wanted=True) is not None
    cheap = Experience().find_trial(planner, traffic(1 << 16), is_wanted=False)
    assert cheap is None or sum(timeline.total_us for timeline in cheap.contenders) <= 2e4


def test_a_good_profile_is_not_believed_on_groups_of_fewer_nodes_than_were_measured() -> None:
    import msgspec

    profile = coarse(0.02)
    alike = profile.replace(curves=[msgspec.structs.replace(curve, basis="interpolated") for curve in profile.curves])
    assert Experience().find_trial(Planner(alike), traffic(1 << 19), is_wanted=False) is None
    derived = profile.replace(
        curves=[
            msgspec.structs.replace(curve, basis="derived") if curve.link is Resource.INTER else curve
            for curve in profile.curves
        ]
    )
    trial = Experience().find_trial(Planner(derived), traffic(1 << 19), is_wanted=False)
    assert trial is not None
    assert sum(timeline.total_us for timeline in trial.contenders) <= 0.75e5


def test_what_was_not_tried_is_not_taken_because_all_others_were_slow() -> None:
    planner, experience = Planner(coarse()), Experience()
    trial = experience.find_trial(planner, traffic(1 << 19), is_wanted=False)
    assert trial is not None
    slow = trial.contenders[0]
    experience.pending = Trial((slow,))
    experience.learn([[slow.total_us * 50.0]] * 2)
    assert experience.best(planner.decide(traffic(1 << 19))).strategy is slow.plan.strategy


@pytest.mark.parametrize("size", [0, 64, 1 << 30])
def test_a_trial_takes_a_bounded_time_or_is_none(size: int) -> None:
    trial = Experience().find_trial(Planner(coarse()), traffic(size), is_wanted=True)
    assert trial is None or sum(timeline.total_us for timeline in trial.contenders) <= 0.75e5


def test_a_large_call_whose_simpler_plan_is_kept_is_settled_at_a_smaller_size() -> None:
    planner, experience = Planner(coarse(1.5)), Experience()
    large = planner.decide(traffic(8 << 20))
    fastest = min(large.candidates, key=lambda timeline: timeline.total_us)
    assert (large.plan.strategy, fastest.plan.strategy) == (Strategy.FLAT, Strategy.PIPELINED)
    trial = experience.find_trial(planner, traffic(8 << 20), is_wanted=False)
    assert trial is not None
    assert trial.holds_at == 8 << 20
    assert sum(timeline.total_us for timeline in trial.contenders) <= 0.75e5
    assert {plan.strategy for plan in trial.plans} <= {Strategy.FLAT, Strategy.PIPELINED, Strategy.HIERARCHICAL}
    experience.learn([[t.total_us for t in trial.contenders]])
    assert experience.best(large).strategy is fastest.plan.strategy
    assert experience.find_trial(planner, traffic(8 << 20), is_wanted=False) is None
    other = Experience()
    other.pending = trial
    other.learn([[t.total_us * (3.0 if t.plan.strategy is not Strategy.FLAT else 1.0) for t in trial.contenders]])
    assert other.best(large) is large.plan


def test_a_large_call_is_not_settled_where_the_smaller_size_is_predicted_to_compare_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contenders, "_IN_PROPORTION", 1.0)
    assert Experience().find_trial(Planner(coarse(1.5)), traffic(8 << 20), is_wanted=False) is None


def test_a_large_call_whose_plan_is_predicted_fastest_is_not_tried() -> None:
    planner = Planner(coarse(0.0))
    assert planner.decide(traffic(8 << 20)).plan.strategy is Strategy.PIPELINED
    assert Experience().find_trial(planner, traffic(8 << 20), is_wanted=True) is None


def test_trials_of_a_group_end_when_their_time_is_spent() -> None:
    planner, experience = Planner(coarse()), Experience()
    trial = experience.find_trial(planner, traffic(1 << 19), is_wanted=False)
    assert trial is not None
    experience.learn([[1e6] * len(trial.contenders)])
    assert experience.find_trial(planner, traffic(1 << 19, "all_gather"), is_wanted=True) is None


def test_a_plan_far_off_does_not_keep_the_others_from_a_doubted_trial() -> None:
    planner, call = Planner(coarse()), traffic(1 << 19)
    everything = Experience(doubted_us=1e9).find_trial(planner, call, is_wanted=False)
    assert everything is not None
    times = sorted(timeline.total_us for timeline in everything.contenders)
    assert len(times) > 3
    two = Experience(doubted_us=sum(times[:2]) * contenders.RUNS * 1.001).find_trial(planner, call, is_wanted=False)
    assert two is not None
    assert [timeline.total_us for timeline in two.contenders] == times[:2]


def test_what_others_go_before_and_what_is_ordered_is_not_tried() -> None:
    planner = Planner(coarse())
    for others in (
        Traffic.on_nodes("all_reduce", 1 << 19, NODES, lane="dp"),
        Traffic.on_nodes("all_to_all_v", 1 << 19, NODES),
        Traffic(1 << 19, 4, 1, traffic(1).link, "all_reduce", NODES, is_ordered=True),
    ):
        assert Experience().find_trial(planner, others, is_wanted=True) is None


def test_what_was_learnt_leaves_wire_formats_and_lanes_alone() -> None:
    planner, experience = Planner(coarse()), Experience()
    trial = experience.find_trial(planner, traffic(1 << 19), is_wanted=False)
    assert trial is not None
    plain = planner.decide(traffic(1 << 19))
    experience.learn(
        [[t.total_us * (9.0 if t.plan.strategy is plain.plan.strategy else 1.0) for t in trial.contenders]]
    )
    assert experience.best(plain).strategy is not plain.plan.strategy
    for others in (
        replace(traffic(1 << 19), lane="dp"),
        replace(traffic(1 << 19), wires=(NATIVE, Wire(WireFormat.BF16, 1)), element_bytes=4),
    ):
        assert experience.find_trial(planner, others, is_wanted=True) is None
        decision = planner.decide(others)
        assert experience.best(decision) is decision.plan

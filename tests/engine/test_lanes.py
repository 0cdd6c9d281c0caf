"""Lanes without processes: names, chunks, credits, and how long a hold may be."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from commlayer.engine.lane_holds import Gate, Lanes
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Peaks, Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.decision import Planner, Policy
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.lanes import (
    CHUNKS_IN_FLIGHT,
    LANES,
    LanePolicy,
    lane_of,
    level_of,
    longest_hold_us,
)
from commlayer.scheduler.plan import Op, Plan, Strategy
from commlayer.scheduler.price import price
from commlayer.scheduler.traffic import Traffic
from commlayer.settings import Settings

SIZES = tuple(4**k for k in range(3, 14))
LEVEL = {"ep": 0, "pp": 1, "cp": 2, "dp": 3}


def profile(latency_us: float = 300.0, inter: float = 12.5) -> Profile:
    """2 × 4 ranks; bytes over µs on each link: a message of 64 KiB and more fills the wire."""

    def curve(collective: str, link: Resource, size: int, latency: float, rate: float) -> Curve:
        return Curve(collective, link, size, SIZES, tuple(latency + nbytes / rate for nbytes in SIZES))

    curves = [curve("copy", Resource.DEVICE, 1, 1.0, 4000.0), curve("reduce", Resource.DEVICE, 1, 1.0, 4000.0)]
    for size, link, latency, rate in ((2, Resource.INTER, latency_us, inter), (4, Resource.INTRA, 20.0, 400.0)):
        curves += [curve(name, link, size, latency, rate) for name in ("all_to_all", "all_gather")]
    for name in (
        "all_gather_single",
        "reduce_scatter_single",
        "all_reduce",
        "all_to_all",
        "all_gather",
        "all_to_all_v",
    ):
        curves.append(curve(name, Resource.INTER, 8, latency_us, inter / 4))
    return Profile.create(
        name="made up",
        kind="measured",
        source="a test",
        topology="2x4",
        peaks=Peaks(inter / 1e3, 0.4, 4.0),
        gather="remote",
        curves=tuple(curves),
    )


def traffic(size: int, lane: str = "", collective: str = "all_reduce", nodes: tuple[int, ...] = (4, 4)) -> Traffic:
    return Traffic(size, sum(nodes), 1, Resource.INTER, collective, nodes, lane=lane)


def exchanges(plan: Plan) -> list[float]:
    return [step.bytes for step in plan.steps if step.resource is Resource.INTER]


# Names


def test_who_goes_first_is_as_montas_figure_11_has_it() -> None:
    assert [level_of(lane) for lane in ("ep", "tp", "pp", "cp", "dp", "")] == [0, 0, 1, 2, 3, 0]


def test_a_lane_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="lane must be one of ep, pp, cp, dp, tp, got 'xp'"):
        level_of("xp")


@pytest.mark.parametrize(
    ("description", "lane"),
    [
        ("mesh_ep", "ep"),
        ("mesh_dp_shard", "dp"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_pp", "pp"),
        ("folded etp", "ep"),
        ("folded edp", "dp"),
        ("folded dp_cp", "dp"),
        ("folded stage", "dp"),
        ("folded world", ""),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("undefined", ""),
        ("default_pg", ""),
        ("mesh_other", ""),
        ("my ep group", ""),
        ("", ""),
    ],
)
def test_the_lane_of_a_group_that_a_trainer_has_described(description: str, lane: str) -> None:
    assert lane_of(description) == lane


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"efficiency": 0.0}, {"most_loss": -0.1}, {"share": float("nan")}]
)
def test_a_policy_out_of_its_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"LanePolicy.{next(iter(wrong))}: expected"):
        LanePolicy(**wrong)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COMMLAYER_LANES", "maybe", "COMMLAYER_LANES must be one of auto, on, off"),
        ("COMMLAYER_LANE_SHARE", "0", "COMMLAYER_LANE_SHARE must be a number, more than 0 and at most 1, got .0."),
        ("COMMLAYER_LANE_SHARE", "half", "COMMLAYER_LANE_SHARE must be a number"),
    ],
)
def test_settings_that_are_wrong(variable: str, value: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        Settings.from_environment({variable: value})


# Chunks


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_lane_that_yields_is_cut_finely_and_no_more_finely_than_the_link_bears(collective: str) -> None:
    planner = Planner(profile())
    whole = planner.decide(traffic(32 << 20, collective=collective))
    fine = planner.decide(traffic(32 << 20, "dp", collective))
    assert max(exchanges(fine.plan)) < max(exchanges(whole.plan))
    curve = planner.profile.curve("all_to_all", Resource.INTER, 2)
    for size in exchanges(fine.plan):
        assert curve.algbw_gbps(size) >= 0.85 * curve.algbw_gbps(SIZES[-1])
    assert fine.predicted_us <= whole.predicted_us * 1.08
    assert f"lane dp yields to others between chunks, so they are fine ones; {whole.plan.name}" in fine.reason()


def test_efficiency_and_loss_bound_the_chunks() -> None:
    size = 32 << 20
    found = [
        max(exchanges(Planner(profile(latency_us=3000.0), Policy(lanes=lanes)).decide(traffic(size, "dp")).plan))
        for lanes in (LanePolicy(efficiency=0.5, most_loss=1.0), LanePolicy(), LanePolicy(efficiency=1.0))
    ]
    assert found[0] < found[1] < found[2]


def test_a_small_call_is_not_cut() -> None:
    planner = Planner(profile())
    for size in (64, 4096, 64 << 10):
        assert planner.decide(traffic(size, "dp")).plan == planner.decide(traffic(size)).plan or (
            planner.decide(traffic(size, "dp")).plan.name == planner.decide(traffic(size)).plan.name
        )


def test_the_lane_that_goes_first_is_planned_as_if_there_were_no_lanes() -> None:
    planner = Planner(profile())
    for lane in ("ep", "tp"):
        assert planner.decide(traffic(32 << 20, lane)).plan.name == planner.decide(traffic(32 << 20)).plan.name


def test_one_rank_on_each_node_is_cut_on_one_level() -> None:
    """Two levels need several ranks on a node."""
    plan = build(traffic(1 << 20, "dp", nodes=(1, 1)), Strategy.DIRECT, 8)
    assert plan.chunks == 8
    assert len(exchanges(plan)) == 16  # there and back


def test_no_more_than_the_credits_are_on_the_link() -> None:
    """Count as the executor does: when a chunk's exchange is posted, how many of its kind have not been waited for?"""
    plan = build(traffic(1 << 20, "dp"), Strategy.PIPELINED, 16)
    waited: set[int] = set()
    for index, step in enumerate(plan.steps):
        waited.update(step.after)
        same = [
            earlier
            for earlier, other in enumerate(plan.steps[:index])
            if other.resource is Resource.INTER and (other.op, other.target) == (step.op, step.target)
        ]
        if step.resource is Resource.INTER:
            assert len([earlier for earlier in same if earlier not in waited]) < CHUNKS_IN_FLIGHT
    free = build(traffic(1 << 20), Strategy.PIPELINED, 16)
    assert [step.op for step in free.steps] == [step.op for step in plan.steps]
    assert price(plan, profile()).total_us == pytest.approx(price(free, profile()).total_us)


# Holding


class Clock:
    """A clock that only waiting moves, and what happens at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Any]] = []

    def at(self, when: float, what: Any) -> None:
        self.events.append((when, what))
        self.events.sort(key=lambda event: event[0])

    def wait(self, condition: threading.Condition, left: float) -> None:
        until = self.now + left
        if self.events and self.events[0][0] <= until:
            self.now, what = self.events.pop(0)
            condition.release()
            what()
            condition.acquire()
        else:
            self.now = until


def made(share: float = 0.05) -> tuple[Lanes, Clock]:
    clock = Clock()
    return Lanes(LanePolicy(share=share), lambda: clock.now, clock.wait), clock


@pytest.mark.parametrize("first", list(LEVEL))
@pytest.mark.parametrize("second", list(LEVEL))
def test_a_chunk_is_held_by_higher_lanes_only(first: str, second: str) -> None:
    lanes, _ = made()
    lanes.enter(LEVEL[first])
    held = lanes.hold(LEVEL[second], 1e5)
    assert (held > 0) == (LEVEL[first] < LEVEL[second])


def test_a_hold_ends_with_the_last_higher_call() -> None:
    lanes, clock = made()
    first, second = lanes.enter(0), lanes.enter(1)
    clock.at(0.02, lambda: lanes.leave(first))
    clock.at(0.05, lambda: lanes.leave(second))
    assert lanes.hold(3, 1e6) == pytest.approx(0.05)
    assert lanes.is_free(3)
    assert lanes.hold(3, 1e6) == 0.0
    assert lanes.held[3].times == 1
    assert lanes.held[3].seconds == pytest.approx(0.05)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 1.0])
def test_a_lane_keeps_its_share_under_higher_traffic_without_end(share: float) -> None:
    lanes, clock = made(share)
    lanes.enter(0, expected_s=1e9)
    chunk_s, num_chunks = 0.005, 40
    gate = Gate(lanes, 3, [(chunk_s * 1e6, True)], 1e9)
    for _ in range(num_chunks):
        gate(0)
        clock.now += chunk_s
    longest = min(chunk_s * (1 / share - 1), 0.2)
    assert clock.now == pytest.approx(num_chunks * (longest + chunk_s))
    if longest < 0.2:
        assert num_chunks * chunk_s / clock.now == pytest.approx(share)


def test_no_hold_is_longer_than_a_fifth_of_a_second() -> None:
    assert longest_hold_us(1e9, LanePolicy()) == 200_000
    assert longest_hold_us(100.0, LanePolicy(share=1.0)) == 0


def test_groups_of_one_lane_share_what_it_keeps() -> None:
    lanes, clock = made()
    lanes.enter(0)
    first = lanes.hold(3, 1e5)
    clock.now -= first  # another group's thread, at the same time
    assert lanes.hold(3, 1e5) == pytest.approx(2 * first)


def test_a_higher_call_that_waits_for_a_late_rank_stops_holding_others() -> None:
    lanes, clock = made()
    lanes.enter(0, expected_s=0.1)
    assert lanes.hold(3, 1e9) == pytest.approx(0.3)
    assert lanes.hold(3, 1e9) == 0.0
    lanes.enter(0, expected_s=0.1)  # the next one does again
    assert lanes.hold(3, 1e9) == pytest.approx(0.3)
    assert clock.now == pytest.approx(0.6)


def test_what_passes_without_being_asked() -> None:
    lanes, _ = made()
    lanes.enter(0)
    gate = Gate(lanes, 3, [(0.0, True), (1000.0, True)], 1.0)
    assert gate(0) == 0
    assert gate(1) == pytest.approx(19e6)


def test_a_call_is_held_for_a_part_of_its_timeout_at_most() -> None:
    lanes, clock = made()
    lanes.enter(0)
    gate = Gate(lanes, 3, [(1000.0, True)], 0.1)
    for _ in range(50):
        gate(0)
    assert 0.1 <= clock.now <= 0.12


def test_what_stays_in_a_node_holds_nothing_that_leaves_it() -> None:
    lanes, clock = made()
    inside = lanes.enter(0, crosses=False)
    assert lanes.hold(3, 1e5, crosses=True) == 0.0
    assert lanes.hold(3, 1e5, crosses=False) == pytest.approx(0.1)
    lanes.leave(inside)
    lanes.enter(0, crosses=True)
    assert lanes.hold(3, 1e5, crosses=False) == pytest.approx(0.1)
    assert clock.now == pytest.approx(0.2)


def test_a_call_leaves_once() -> None:
    lanes, _ = made()
    first, second = lanes.enter(0), lanes.enter(0)
    lanes.leave(first)
    lanes.leave(first)
    assert not lanes.is_free(3)
    lanes.leave(second)
    assert lanes.is_free(3)


def test_calls_that_have_ended_leave_no_patience_behind() -> None:
    lanes, clock = made()
    for _ in range(100):
        lanes.leave(lanes.enter(0, expected_s=1.0))
    lanes.leave(lanes.enter(0))
    lanes.enter(0, expected_s=0.0)  # no bytes: it holds others for the least time, not for ever
    assert lanes.hold(3, 1e9) == pytest.approx(0.02)
    assert clock.now == pytest.approx(0.02)


def test_lanes_that_are_off_hold_nobody() -> None:
    lanes, _ = made()
    lanes.is_on = False
    lanes.enter(0)
    assert lanes.hold(3, 1e9) == 0.0


def test_all_lanes_have_a_level() -> None:
    assert set(LANES) == {"ep", "tp", "pp", "cp", "dp"}
    assert {step.op for step in build(traffic(1 << 20, "dp"), Strategy.PIPELINED, 4).steps} >= {Op.ALL_TO_ALL}

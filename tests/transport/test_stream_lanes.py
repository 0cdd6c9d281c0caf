"""Lanes on simulated devices: who is held and who passes, the bits, and that no order of groups deadlocks."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any, NoReturn

import pytest
import torch
from simulated.device_programs import call_of, traffic_of
from simulated.judge import RaceJudge
from simulated.lane_calls import (
    LaneCall,
    LaneGroup,
    LaneProgram,
    LaneWatch,
    drawn_program,
    run_on_lanes,
)
from simulated.machine import Deadlock, SimulatedMachine, SimulatedProgram, SimulatedStream
from simulated.mutants import ordering_lines
from simulated.plan_calls import DeviceCall, start_on_device

from commlayer.devices.accelerator import AcceleratorDevice, why_no_holds
from commlayer.engine.lane_holds import HELD_OF_TIMEOUT, longest_holds_us
from commlayer.engine.runner import Runner
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.lanes import LANES, LanePolicy
from commlayer.scheduler.plan import Strategy
from commlayer.transport import stream_lanes, streams
from commlayer.transport.stream_lanes import DeviceLanes, StreamLane
from commlayer.transport.stream_scripts import StepMessenger
from commlayer.transport.streams import StreamTransport

SHAPE = (2, 2)
RANKS = range(4)
LOW, HIGH = 0, 1
CALL, WAIT = True, False
SEEDS = range(10)
HELD_SEEDS = range(12)


def two_lanes(*actions: tuple[tuple[bool, int], ...], high_shape: tuple[int, ...] = SHAPE) -> LaneProgram:
    """Gradients in many chunks on dp, and one call on ep; ``actions``: of each rank, or of all."""
    low = LaneGroup("dp", tuple(RANKS), SHAPE)
    high = LaneGroup("ep", tuple(RANKS), high_shape)
    gradients = build(traffic_of("all_reduce", SHAPE, lane="dp"), Strategy.PIPELINED, 6)
    way = Strategy.HIERARCHICAL if len(high_shape) > 1 else Strategy.DIRECT
    experts = build(traffic_of("all_gather", high_shape, lane="ep"), way)
    calls = LaneCall(LOW, call_of(gradients, 1)), LaneCall(HIGH, call_of(experts, 2))
    each = actions * len(RANKS) if len(actions) == 1 else actions
    return LaneProgram((low, high), calls, tuple(each))


ALL_FIRST = ((CALL, LOW), (CALL, HIGH), (WAIT, HIGH), (WAIT, LOW))
LOW_FIRST = ((CALL, LOW), (WAIT, LOW), (CALL, HIGH), (WAIT, HIGH))
HIGH_FIRST = ((CALL, HIGH), (CALL, LOW), (WAIT, HIGH), (WAIT, LOW))


def watched(program: LaneProgram, seeds: range = HELD_SEEDS, *, is_held: bool = True) -> tuple[int, int, int]:
    """The most exchanges of one communicator that the higher call found in its way, how many passed only behind it, and how many
    holds ended by themselves."""
    most = passed = overdue = 0
    for seed in seeds:
        watch = LaneWatch()
        machine = run_on_lanes(program, seed, watcher=watch, impatience=0.0, is_held=is_held)
        most, passed, overdue = max(most, watch.most), passed + watch.passed, overdue + machine.overdue
    return most, passed, overdue


# Who passes


def test_a_higher_call_passes_chunks_that_were_launched_before_it() -> None:
    """All ranks launch the gradients whole before the experts' call. Of those chunks it finds one on the way, of each
    communicator; the others begin when it has ended."""
    most, passed, overdue = watched(two_lanes(ALL_FIRST))
    assert most == 1
    assert overdue == 0
    assert passed > len(HELD_SEEDS) * len(RANKS)
    unheld, *_ = watched(two_lanes(ALL_FIRST), is_held=False)
    assert unheld > 2, "without holds they go out beside it"


def test_what_stays_inside_nodes_holds_nothing_that_leaves_them() -> None:
    """A call of one node's ranks lets exchanges between nodes pass, and holds those inside."""
    beside, most = 0, 0
    for seed in HELD_SEEDS:
        watch = LaneWatch()
        run_on_lanes(two_lanes(ALL_FIRST, high_shape=(4,)), seed, watcher=watch, impatience=0.0)
        beside, most = beside + watch.beside, max(most, watch.most)
        assert all(name.startswith("intra") for *_, name in watch.meanwhile)
    assert most == 1
    assert beside > 0


MUTANTS: dict[str, Callable[..., Any]] = {
    "holds": lambda self, plan: (),
    "hold": lambda self, stream, most_us, *, crosses: None,
    "begun": lambda self, *, crosses: lambda: None,
    "ended": lambda self: lambda: None,
}


def test_the_mutants_are_all_that_a_call_asks_of_its_lane() -> None:
    calls = [node.func for node in ast.walk(ast.parse(inspect.getsource(streams))) if isinstance(node, ast.Call)]
    asked = [func for func in calls if isinstance(func, ast.Attribute) and ast.unparse(func.value) == "lane"]
    assert {func.attr for func in asked} == MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_each_part_of_a_hold_is_missed_where_it_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamLane, name, MUTANTS[name])
    most, passed, overdue = watched(two_lanes(ALL_FIRST))
    assert (most, overdue) != (1, 0) or not passed


# Whether it ends


@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_groups_of_any_members_on_any_lanes_end_with_their_bits(num_groups: int) -> None:
    """There is one order of all calls; what each rank waits for, and when, differs. Each group has two communicators, and for so
    many exchanges the devices have room."""
    for seed in SEEDS:
        run_on_lanes(drawn_program(seed, num_groups=num_groups), seed, slots=2 * num_groups)


SUBSETS = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
WAITS = [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]


@cache
def call_on(lane: str, size: int) -> DeviceCall:
    """Three chunks, of ranks that are alone on their nodes."""
    plan = build(traffic_of("all_reduce", (1,) * size, lane=lane), Strategy.DIRECT, 3)
    return call_of(plan, size)


def pair_of(
    members: Sequence[tuple[int, ...]], lanes: tuple[str, str], order: str, waits: Sequence[bool]
) -> LaneProgram:
    """Two groups, a call of each twice. ``order``: of calls, the same on all ranks, or turned round on the last.

    ``waits``: whether a rank waits for each call before the next.
    """
    groups = [LaneGroup(lane, each, (1,) * len(each)) for lane, each in zip(lanes, members, strict=True)]
    calls = [LaneCall(number % 2, call_on(lanes[number % 2], len(members[number % 2]))) for number in range(4)]
    actions = []
    for rank, is_waiting in enumerate(waits):
        mine = [number for number in range(4) if rank in members[number % 2]]
        if order == "turned" and rank == 2:
            mine = [number ^ 1 for number in mine] if len(mine) == 4 else mine
        in_turn = [action for number in mine for action in ((CALL, number), (WAIT, number))]
        actions.append(in_turn if is_waiting else [(CALL, n) for n in mine] + [(WAIT, n) for n in reversed(mine)])
    return LaneProgram(tuple(groups), tuple(calls), tuple(tuple(each) for each in actions))


@pytest.mark.parametrize("lanes", [("dp", "ep"), ("pp", "dp")])
def test_no_two_groups_deadlock_whatever_their_members_and_wherever_ranks_wait(lanes: tuple[str, str]) -> None:
    for seed, (one, other) in enumerate(product(SUBSETS, repeat=2)):
        for waits in WAITS:
            run_on_lanes(pair_of((one, other), lanes, "same", waits), seed, impatience=0.0)
        run_on_lanes(pair_of((one, other), lanes, "turned", (False,) * 3), seed, impatience=0.0)


def test_calls_of_different_lanes_may_be_made_in_different_orders() -> None:
    for seed in SEEDS:
        run_on_lanes(two_lanes(ALL_FIRST, HIGH_FIRST, ALL_FIRST, HIGH_FIRST), seed)


def test_ranks_may_wait_for_gradients_before_they_call_the_experts_or_not() -> None:
    for seed in SEEDS:
        run_on_lanes(two_lanes(ALL_FIRST, LOW_FIRST, LOW_FIRST, LOW_FIRST), seed, impatience=0.0)


def deadlock_of(program: LaneProgram, seed: int) -> str:
    """The deadlock in which a program ends, in words; empty for none."""
    try:
        run_on_lanes(program, seed, impatience=0.0)
    except Deadlock as error:
        return str(error)
    return ""


def test_an_event_in_the_place_of_a_hold_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program as above, with a hold that does not end by itself."""

    def lasts(machine: SimulatedMachine) -> None:
        raise Deadlock(machine.explain("and holds do not end"))

    monkeypatch.setattr(SimulatedMachine, "_end_hold", lasts)
    found = [
        text for seed in SEEDS if (text := deadlock_of(two_lanes(ALL_FIRST, LOW_FIRST, LOW_FIRST, LOW_FIRST), seed))
    ]
    assert found, "some order of the streams holds the gradients of rank 0 until the others call the experts"
    assert all("of group 0 on dp" in text and "of group 1 on ep" in text for text in found), found


# Whether it is right


def test_lanes_order_nothing() -> None:
    """No wait, record or keep is there, so bits cannot depend on lanes. Those of the transport have mutants of their own."""
    assert ordering_lines(stream_lanes) == set()


def test_no_program_has_a_race() -> None:
    programs = [drawn_program(seed, num_calls=4) for seed in range(2)]
    for number, program in enumerate([*programs, two_lanes(ALL_FIRST), two_lanes(HIGH_FIRST)]):
        judge = RaceJudge()
        run_on_lanes(program, number, watcher=judge)
        assert judge.races == []


def test_holds_keep_a_share_of_the_link_and_of_the_timeout() -> None:
    plan = build(traffic_of("all_reduce", SHAPE, lane="dp"), Strategy.PIPELINED, 6)
    longest = longest_holds_us(plan, None, LanePolicy(share=0.2), 60.0)
    assert [us > 0 for us in longest] == [step.leg.is_exchange for step in plan.steps]
    assert max(longest) == pytest.approx(4 * 100.0, rel=0.05), "four times what an exchange of few bytes takes"
    brief = longest_holds_us(plan, None, LanePolicy(), 1e-3)
    assert sum(brief) == pytest.approx(HELD_OF_TIMEOUT * 1e3)


# Where streams can be held


def test_why_streams_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert why_no_holds("simulated", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}) == ""
    assert "on CUDA and on the simulated device" in why_no_holds("xpu", {})
    assert why_no_holds("cuda", {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == ""
    assert "in the order of the program" in why_no_holds("cuda", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})
    assert "one queue" in why_no_holds("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'triton>=3.2'" in why_no_holds("cuda", {})


def test_a_device_that_cannot_hold_streams_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    monkeypatch.setattr(stream_lanes, "_of_devices", {})
    device = AcceleratorDevice(torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="lower lanes are not held on cuda:0: NCCL_LAUNCH_ORDER_IMPLICIT"):
        assert stream_lanes.lanes_of_device(device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stream_lanes.lanes_of_device(device) is None


def test_a_device_whose_kernel_cannot_be_compiled_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: object) -> NoReturn:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(stream_lanes, "_of_devices", {})
    monkeypatch.setattr(stream_lanes, "why_no_holds", lambda kind, environment: "")
    monkeypatch.setattr(stream_lanes, "DeviceLanes", fails)
    device = AcceleratorDevice(torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="not held on cuda:0: the kernel .* RuntimeError: Failed to find C compiler"):
        assert stream_lanes.lanes_of_device(device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stream_lanes.lanes_of_device(device) is None


def test_the_first_hold_of_each_kind_is_when_lanes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have to be compiled, which is not to happen inside a step."""
    held = set[tuple[int, float]]()
    monkeypatch.setattr(SimulatedStream, "hold", lambda self, busy, least, most_us: held.add((len(busy), most_us)))
    lanes = DeviceLanes(SimulatedMachine(1).devices[0])
    assert held == {(len(lanes.above(level)), 0.0) for level in sorted(set(LANES.values()) - {0})}


def test_a_call_that_is_broken_off_gives_its_note_back() -> None:
    """It was announced, and failed before its end was launched."""

    class Torn:
        def exchange(self, sends: object, receives: object) -> NoReturn:
            raise RuntimeError("a peer is gone")

        def abort(self) -> None:
            raise RuntimeError("and it cannot be aborted either")

    machine = SimulatedMachine(1)
    device = machine.devices[0]
    lanes = DeviceLanes(device)
    lower, mine = StreamLane(lanes, 3, lambda plan: ()), StreamLane(lanes, 0, lambda plan: ())
    line = StepMessenger(Torn(), (0, 1))  # type: ignore[arg-type]
    transport = StreamTransport(device, lambda step: line, [line], "ep", mine)
    call = call_of(build(traffic_of("all_reduce", (2,)), Strategy.DIRECT), 1)

    def program() -> SimulatedProgram:
        x = device.empty(call.inputs[0].numel())
        with pytest.raises(RuntimeError, match="a peer is gone"):
            start_on_device(Runner(transport), call, 0, x, x)
        yield device.current.record()
        transport.streams[Resource.INTRA].launch(lambda: busy.append(bool(lanes.above(1).any())))
        with pytest.raises(RuntimeError, match="cannot be aborted"):
            transport.abort()
        return []

    busy: list[bool] = []
    machine.run([program()])
    assert busy == [True], "it had been announced"
    assert not lanes.notes.any()
    lower.leave()


def test_groups_share_places_where_there_are_none_left() -> None:
    lanes = DeviceLanes(SimulatedMachine(1).devices[0])
    places = [lanes.enter(0) for _ in range(9)]
    assert sorted(places) == [0, *range(8)]
    assert lanes.is_anybody(range(1))
    assert not lanes.is_anybody(range(1, 4))
    for place in places:
        lanes.leave(0, place)
    assert not lanes.is_anybody(range(4))

"""Plans on streams, on simulated devices: every strategy, collective and wire format, in many orders of the streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commlayer.devices.device_contract import StreamEvent
from commlayer.engine.reducers import reducer
from commlayer.engine.runner import Runner, drive
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Gather, Strategy
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic
from commlayer.testing.simulated.device_programs import (
    DEVICE_COLLECTIVES,
    call_of,
    exchanges,
    nodes_of,
    plans_of,
    replicated,
    traffic_of,
    turns,
)
from commlayer.testing.simulated.judge import RaceJudge
from commlayer.testing.simulated.machine import (
    Deadlock,
    SimulatedDevice,
    SimulatedMachine,
    SimulatedProgram,
    SimulatedStream,
)
from commlayer.testing.simulated.mutants import OrderingSite, ordering_lines, ordering_sites, without
from commlayer.testing.simulated.plan_calls import DeviceCall, run_calls, transports_of
from commlayer.transport import streams
from commlayer.transport.contract import CallMemory
from commlayer.transport.streams import StreamTransport

SHAPES = ((2,), (3,), (2, 2), (3, 1), (2, 1, 3), (4, 4))
JUDGED = ((3,), (2, 2), (2, 1))
SEEDS = 2


def expect_bits(calls: list[DeviceCall], seeds: range) -> None:
    for seed in seeds:
        outcome = run_calls(calls, seed)
        assert outcome.wrong == [], f"{calls[0].plan.name}, seed {seed}: wrong at (turn, rank) {outcome.wrong}"


def expect_no_race(calls: list[DeviceCall]) -> None:
    judge = RaceJudge()
    run_calls(calls[:3], 0, watcher=judge)
    assert judge.races == [], calls[0].plan.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", DEVICE_COLLECTIVES)
def test_every_plan_gives_its_bits_in_any_order_of_streams(collective: str, shape: tuple[int, ...]) -> None:
    for number, plan in enumerate(plans_of(collective, shape)):
        expect_bits(turns(call_of(plan, number)), range(number, number + SEEDS))


@pytest.mark.parametrize("shape", JUDGED, ids=str)
@pytest.mark.parametrize("collective", DEVICE_COLLECTIVES)
def test_no_plan_has_a_race(collective: str, shape: tuple[int, ...]) -> None:
    for number, plan in enumerate(plans_of(collective, shape)):
        expect_no_race(turns(call_of(plan, number)))


def test_exchanges_of_rows_give_their_bits_in_any_order_of_streams() -> None:
    for number, calls in enumerate(exchanges()):
        expect_bits(calls, range(number, number + 6 * SEEDS))
        expect_no_race(calls)


def test_replicated_tokens_give_their_bits_in_any_order_of_streams() -> None:
    for number, calls in enumerate(replicated()):
        expect_bits(calls, range(number, number + 6 * SEEDS))
        expect_no_race(calls)


def test_a_rank_that_is_alone_on_its_node_takes_no_exchange_for_an_all_gather() -> None:
    """It sends to all others and gets from all, equal slices even; those exchange with it alone."""
    expect_bits(turns(call_of(build(traffic_of("all_reduce", (1, 2)), Strategy.HIERARCHICAL), 0)), range(SEEDS))


def test_two_exchanges_at_a_time_are_room_enough_for_every_plan() -> None:
    """A plan has two communicators; all ranks launch in one order, so two kernels that wait for their peers suffice."""
    for number, plan in enumerate(plans_of("all_reduce", (2, 2))):
        for seed in range(SEEDS):
            assert not run_calls(turns(call_of(plan, number)), seed, slots=2).wrong


# Graphs


def test_what_is_captured_waits_for_no_call_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a later call wait for a part of a graph: both are errors of CUDA. Inside a graph calls wait for each other."""
    call = call_of(build(traffic_of("all_reduce", (2, 2)), Strategy.PIPELINED, 3), 0)
    machine = SimulatedMachine(call.size, 0)
    waited: list[StreamEvent] = []
    wait = SimulatedStream.wait

    def noting(stream: SimulatedStream, event: StreamEvent) -> None:
        waited.append(event)
        wait(stream, event)

    monkeypatch.setattr(SimulatedStream, "wait", noting)

    def program(device: SimulatedDevice, transport: StreamTransport, rank: int) -> SimulatedProgram:
        runner, mine, found = Runner(transport), call.moves[rank], []
        prepared = runner.prepare(call.plan, mine.steps, mine.sizes)
        for is_capturing in (False, False, True, True, False):
            device.is_capturing = is_capturing
            before = list(transport.ended.values())
            waited.clear()
            memory = CallMemory(device.empty(call.inputs[rank].numel()))
            drive(call.plan, runner.start(prepared, memory, memory, 1.0, reducer(call.dtype, "sum")))
            found.append(any(event is other for event in waited for other in before))
        yield None
        return found

    pairs = zip(machine.devices, transports_of(machine, call), strict=True)
    found = machine.run([program(device, transport, rank) for rank, (device, transport) in enumerate(pairs)])
    assert found == [[False, True, False, True, False]] * call.size


# Mutants


def telling_calls() -> list[list[DeviceCall]]:
    """Calls that have, together, all that orders streams: stages on several, staging, sums, callers on two streams."""
    shape = (2, 2)
    plans = [
        build(traffic_of("all_reduce", shape), Strategy.PIPELINED, 3),
        build(traffic_of("reduce_scatter", shape), Strategy.HIERARCHICAL),
        build(traffic_of("all_gather", shape), Strategy.PIPELINED, 3),
        build(traffic_of("all_gather", (3,)), Strategy.DIRECT),
    ]
    grid = build(Traffic(768, 2, 2, Resource.INTER), Strategy.PIPELINED_COPY, 3, Gather.WHOLE)
    found = [turns(replace(call_of(plan, 0), is_doubled=number < 2)) for number, plan in enumerate(plans)]
    return [*found, turns(DeviceCall("replicated", grid, nodes_of(shape)))]


def sites() -> set[OrderingSite]:
    return ordering_sites(streams.__name__, lambda: [run_calls(calls, 0) for calls in telling_calls()])


def is_noticed(calls: list[DeviceCall], seeds: int) -> bool:
    try:
        return any(run_calls(calls, seed).wrong for seed in range(seeds))
    except Deadlock:
        return True


def is_a_race(calls: list[DeviceCall]) -> bool:
    judge = RaceJudge()
    run_calls(calls, 0, watcher=judge)
    return bool(judge.races)


def test_whatever_orders_streams_is_missed_where_it_is_left_out() -> None:
    """Each wait, record and keep of the transport, one at a time: some order of the streams gives wrong bits, and the judge of
    races sees it in any."""
    found = sites()
    assert {site.line for site in found} == ordering_lines(streams), "no call here runs all of them"
    for site in sorted(found):
        with without(site):
            assert any(is_noticed(calls, 60) for calls in telling_calls()), f"nobody notices that {site} is left out"
            assert any(is_a_race(calls) for calls in telling_calls()), (
                f"the judge of races does not see {site} left out"
            )

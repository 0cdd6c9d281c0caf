"""Plans on streams, on simulated devices: every strategy, collective and wire format, in many orders of the streams."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from simulated.device_programs import (
    DEVICE_COLLECTIVES,
    call_of,
    exchanges,
    nodes_of,
    plans_of,
    replicated,
    traffic_of,
    turns,
)
from simulated.judge import RaceJudge
from simulated.machine import (
    Deadlock,
    SimulatedDevice,
    SimulatedMachine,
    SimulatedProgram,
    SimulatedStream,
)
from simulated.mutants import OrderingSite, ordering_lines, ordering_sites, without
from simulated.plan_calls import DeviceCall, run_calls, start_on_device, transports_of

from commlayer.devices.device_contract import StreamEvent
from commlayer.engine.runner import Runner, drive
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Gather, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.transport import streams
from commlayer.transport.call_memory import CallMemory, reducer
from commlayer.transport.contract import StartedPlan
from commlayer.transport.streams import StreamTransport

SHAPES = ((2,), (3,), (2, 2), (3, 1), (2, 1, 3), (4, 4))
JUDGED = ((3,), (2, 2), (2, 1))
SEEDS = 2
OVERLAPPING_SEEDS = 16


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


# Calls under way together


def overlapping_calls() -> list[list[DeviceCall]]:
    """Three calls of one group each, of which the ranks share staging memory and streams."""
    shape = (2, 2)
    summed = build(traffic_of("all_reduce", shape), Strategy.PIPELINED, 3)
    gathered = build(traffic_of("all_gather", shape), Strategy.HIERARCHICAL)
    scattered = build(traffic_of("reduce_scatter", shape), Strategy.PIPELINED, 2)
    direct = build(traffic_of("all_reduce", shape), Strategy.DIRECT)
    orders = [(summed, scattered, gathered), (gathered, summed, direct), (scattered, direct, summed)]
    return [
        [call_of(plan, 3 * number + turn) for turn, plan in enumerate(order)] for number, order in enumerate(orders)
    ]


def slow_reference(call: DeviceCall, rank: int) -> torch.Tensor:
    """The result by what the collective is, without any plan."""
    if call.plan.traffic.collective == "all_gather":
        return torch.cat(call.inputs)
    total = torch.stack([x.view(call.dtype) for x in call.inputs]).sum(0, dtype=call.dtype)
    is_whole = call.plan.traffic.collective == "all_reduce"
    return (total if is_whole else total.chunk(call.size)[rank]).view(torch.uint8)


@pytest.mark.parametrize("is_captured", [False, True], ids=["called", "captured"])
def test_a_call_behind_one_that_was_waited_for_and_one_that_was_not_gives_its_bits(is_captured: bool) -> None:
    """A, B, wait for A, C: C comes behind B, for which nobody has waited; A's memory is another's by then."""

    def program(
        device: SimulatedDevice, transport: StreamTransport, rank: int, calls: list[DeviceCall]
    ) -> SimulatedProgram:
        runner = Runner(transport)
        results = [torch.empty(call.output_bytes[rank], dtype=torch.uint8) for call in calls]

        def begin(turn: int) -> tuple[StartedPlan, torch.Tensor]:
            call = calls[turn]
            x = device.empty(call.inputs[rank].numel())
            device.main.launch(partial(x.copy_, call.inputs[rank]))
            output = x if call.is_in_place else device.empty(call.output_bytes[rank])
            return start_on_device(runner, call, rank, x, output), output

        def take(turn: int, begun: tuple[StartedPlan, torch.Tensor]) -> None:
            begun[0].finish()
            device.main.launch(partial(results[turn].copy_, begun[1]))

        if is_captured:  # behind calls that were not, which take the staging memory
            for turn in range(3):
                take(turn, begin(turn))
            yield device.main.record()
            device.is_capturing = True
        a = begin(0)
        b = begin(1)
        yield None
        take(0, a)
        del a
        c = begin(2)
        yield None
        take(2, c)
        take(1, b)
        yield None
        return results

    for calls in overlapping_calls():
        wanted = [[slow_reference(call, rank) for call in calls] for rank in range(calls[0].size)]
        for seed in range(OVERLAPPING_SEEDS):
            machine = SimulatedMachine(calls[0].size, seed)
            pairs = enumerate(zip(machine.devices, transports_of(machine, calls[0]), strict=True))
            found = machine.run([program(*pair, rank, calls) for rank, pair in pairs])
            for rank, (got, each) in enumerate(zip(found, wanted, strict=True)):
                assert all(map(torch.equal, got, each)), (seed, rank, calls[0].plan.name)


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

"""Programs of several groups on lanes, on simulated devices: whether they end, with which bits, and who finds whom in its way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from commlayer.engine.lane_holds import longest_holds_us
from commlayer.engine.runner import Runner
from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.lanes import LANES, LanePolicy, level_of
from commlayer.scheduler.plan import Plan, Step, Strategy
from commlayer.transport.contract import StartedPlan
from commlayer.transport.stream_lanes import DeviceLanes, StreamLane
from commlayer.transport.stream_scripts import StepMessenger
from commlayer.transport.streams import StreamTransport
from simulated.communicators import SimulatedCommunicator
from simulated.device_programs import DEVICE_COLLECTIVES, call_of, traffic_of
from simulated.machine import (
    SimulatedDevice,
    SimulatedMachine,
    SimulatedProgram,
    SimulatedStream,
    Watcher,
)
from simulated.plan_calls import DeviceCall, start_on_device

__all__ = ["LaneCall", "LaneGroup", "LaneProgram", "LaneWatch", "drawn_program", "run_on_lanes"]

_LIMIT_S = 60.0
_WAYS = ((Strategy.PIPELINED, 4, 1), (Strategy.PIPELINED, 2, 2), (Strategy.HIERARCHICAL, 1, 1))
Action = tuple[bool, int]
"""One line of a rank's program: call (True), or wait for (False), the call of that number."""


@dataclass(frozen=True)
class LaneGroup:
    """A group of the machine's ranks. ``shape``: how many of them each node holds, in their order."""

    lane: str
    members: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LaneCall:
    """A call of a group, by its number among the program's."""

    group: int
    call: DeviceCall


@dataclass(frozen=True)
class LaneProgram:
    """The calls and waits of each rank, in its order: ``actions[rank]``. Every call is waited for."""

    groups: tuple[LaneGroup, ...]
    calls: tuple[LaneCall, ...]
    actions: tuple[tuple[Action, ...], ...]


class LaneWatch(Watcher):
    """Sees who finds whom in its way.

    ``meanwhile``: how many exchanges of a communicator have begun on a rank while one call of a higher lane was under way there
    for which they are held; ``passed``: how many after one had ended; ``beside``: how many went between nodes while one was
    under way that stayed inside.
    """

    def __init__(self) -> None:
        self.meanwhile: Counter[tuple[int, int, int, str]] = Counter()
        self.passed = self.beside = 0
        self.communicators: dict[str, tuple[int, bool]] = {}
        """The level of each, and whether it goes between nodes."""
        self.lanes: list[DeviceLanes] = []
        self._calls: Counter[tuple[int, int]] = Counter()  # that have begun on a rank, by level
        self._under_way: dict[tuple[int, int], int] = {}  # the largest of the level's notes

    @property
    def most(self) -> int:
        """The most that one call found in its way, of one communicator."""
        return max(self.meanwhile.values(), default=0)

    def ran(self, stream: SimulatedStream, work: Callable[[], object]) -> None:
        work()
        if not self.lanes:
            return
        rank = stream.device.rank
        by_level = self.lanes[rank].notes.view(len(set(LANES.values())), -1).amax(1).tolist()
        for level, note in enumerate(by_level):
            if note and not self._under_way.get((rank, level)):
                self._calls[rank, level] += 1
            self._under_way[rank, level] = note

    def began(self, stream: SimulatedStream, communicator: str, number: int) -> None:
        rank = stream.device.rank
        mine, crosses = self.communicators[communicator]
        for level in range(mine):
            note = self._under_way.get((rank, level), 0)
            if note >= (2 if crosses else 1):
                self.meanwhile[rank, level, self._calls[rank, level], communicator] += 1
            elif note:
                self.beside += 1
            elif self._calls[rank, level]:
                self.passed += 1


def run_on_lanes(
    program: LaneProgram,
    seed: int,
    *,
    watcher: Watcher | None = None,
    slots: int | None = None,
    impatience: float | None = None,
    is_held: bool = True,
) -> SimulatedMachine:
    """Run a program in an order of streams that ``seed`` decides, and return the machine that ran it.

    ``is_held`` False: calls are announced, and nobody is held. Others as for the machine. Raises Deadlock; AssertionError for
    bits that are not as expected.
    """
    size = len(program.actions)
    machine = SimulatedMachine(size, seed, watcher=watcher, slots=slots, impatience=impatience)
    lanes = [DeviceLanes(device) for device in machine.devices]
    if isinstance(watcher, LaneWatch):
        watcher.lanes = lanes
    runners: list[dict[int, Runner]] = [{} for _ in range(size)]
    for number, group in enumerate(program.groups):
        transports = _transports(machine, lanes, number, group, is_held=is_held)
        for member, transport in zip(group.members, transports, strict=True):
            runners[member][number] = Runner(transport)
    results = machine.run([_program(machine.devices[rank], rank, runners[rank], program) for rank in range(size)])
    for rank, found in enumerate(results):
        for number, got in found.items():
            made = program.calls[number]
            wanted = made.call.expected[program.groups[made.group].members.index(rank)]
            assert torch.equal(got, wanted), (
                f"seed {seed}: wrong bits of call {number} ({made.call.plan.name}) on rank {rank}"
            )
    return machine


def _longest_us(plan: Plan) -> Sequence[float]:
    return longest_holds_us(plan, None, LanePolicy(), _LIMIT_S)


def _never(plan: Plan) -> Sequence[float]:
    return [0.0] * len(plan.steps)


def _transports(
    machine: SimulatedMachine, lanes: Sequence[DeviceLanes], number: int, group: LaneGroup, *, is_held: bool
) -> list[StreamTransport]:
    """A transport for each member, with a communicator inside nodes and one between them."""
    level, places = level_of(group.lane), tuple(range(len(group.members)))
    found = {
        each: SimulatedCommunicator(machine, f"{each.value} of group {number} on {group.lane}", group.members)
        for each in (Resource.INTRA, Resource.INTER)
    }
    if isinstance(machine.watcher, LaneWatch):
        for each, of in found.items():
            machine.watcher.communicators[of.name] = level, each is Resource.INTER

    def made(member: int) -> StreamTransport:
        mine = {each: StepMessenger(of.messenger(member), places) for each, of in found.items()}

        def line_of(step: Step) -> StepMessenger:
            return mine[Resource.INTER if step.resource is Resource.INTER else Resource.INTRA]

        among = StreamLane(lanes[member], level, _longest_us if is_held else _never)
        return StreamTransport(machine.devices[member], line_of, [*mine.values()], group.lane, among)

    return [made(member) for member in group.members]


def _program(device: SimulatedDevice, rank: int, runners: dict[int, Runner], program: LaneProgram) -> SimulatedProgram:
    results: dict[int, torch.Tensor] = {}
    under_way: dict[int, tuple[StartedPlan, torch.Tensor]] = {}
    for is_call, number in program.actions[rank]:
        made = program.calls[number]
        place = program.groups[made.group].members.index(rank)
        if is_call:
            x = device.empty(made.call.inputs[place].numel())
            device.main.launch(partial(x.copy_, made.call.inputs[place]))
            output = x if made.call.is_in_place else device.empty(made.call.output_bytes[place])
            under_way[number] = start_on_device(runners[made.group], made.call, place, x, output), output
            del x, output
        else:
            call, output = under_way.pop(number)
            call.finish()
            results[number] = torch.empty(made.call.output_bytes[place], dtype=torch.uint8)
            device.main.launch(partial(results[number].copy_, output))
            del output
        yield None
    assert not under_way, "the program waits for every call"
    return results


# Programs that are drawn


def drawn_program(seed: int, size: int = 4, *, num_groups: int = 3, num_calls: int = 5) -> LaneProgram:
    """Draw groups of any members on any lanes, and calls of them.

    There is one order of all calls, in which every rank makes those of its groups; what it waits for, and when, is its own.
    """
    draw = random.Random(seed)
    groups = tuple(_drawn_group(draw, size) for _ in range(num_groups))
    calls = []
    for number in range(num_calls):
        group = draw.randrange(num_groups)
        calls.append(LaneCall(group, call_of(_drawn_plan(draw, groups[group]), seed + number)))
    actions = []
    for rank in range(size):
        mine: list[Action] = []
        under_way: list[int] = []
        for number, made in enumerate(calls):
            if rank in groups[made.group].members:
                mine.append((True, number))
                under_way.append(number)
            while under_way and draw.random() < 0.3:
                mine.append((False, under_way.pop(draw.randrange(len(under_way)))))
        draw.shuffle(under_way)
        actions.append((*mine, *((False, number) for number in under_way)))
    return LaneProgram(groups, tuple(calls), tuple(actions))


def _drawn_group(draw: random.Random, size: int) -> LaneGroup:
    members = tuple(sorted(draw.sample(range(size), draw.randint(2, size))))
    half = len(members) // 2
    return LaneGroup(draw.choice([*LANES]), members, draw.choice([(len(members),), (half, len(members) - half)]))


def _drawn_plan(draw: random.Random, group: LaneGroup) -> Plan:
    traffic = traffic_of(draw.choice(DEVICE_COLLECTIVES[:3]), group.shape, lane=group.lane)
    strategy, chunks, pieces = draw.choice(_WAYS)
    try:
        return build(traffic, strategy, chunks, pieces=pieces)
    except PlanError:  # on one level there is always one
        return build(traffic, Strategy.DIRECT, 3)

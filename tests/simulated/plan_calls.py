"""Calls of plans on simulated devices: every rank's program, what it must find in the end, and what a machine makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from plans_in_memory import everyones_moves, run_in_memory

from commlayer.engine.runner import Runner, drive
from commlayer.profiles.links import Resource
from commlayer.scheduler.call_moves import RankMoves
from commlayer.scheduler.plan import Buffer, Plan, Step
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.transport.call_memory import CallMemory, reducer
from commlayer.transport.contract import Coder, StartedPlan
from commlayer.transport.stream_scripts import StepMessenger
from commlayer.transport.streams import StreamCall, StreamTransport
from commlayer.wire.codecs import Codec
from simulated.communicators import SimulatedCommunicator
from simulated.machine import SimulatedDevice, SimulatedMachine, SimulatedProgram, Watcher

__all__ = ["DeviceCall", "Outcome", "run_calls", "start_on_device", "transports_of"]

_LIMIT_S = 60.0


@dataclass(frozen=True)
class DeviceCall:
    """One call of a plan by all ranks of a group.

    ``kind``: one of :data:`commlayer.scheduler.call_moves.MovesKind`, or ``replicated``. ``splits``: of an exchange, the
    bytes that each rank sends to each member, and gets from each. ``seed``: of the data: small integers, so that sums are
    exact in any order. ``is_doubled``: the result is doubled behind the call, as a mean is divided.
    """

    kind: str
    plan: Plan
    nodes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.int32
    root: int = 0
    splits: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    seed: int = 0
    is_doubled: bool = False

    @property
    def size(self) -> int:
        """How many ranks call."""
        return sum(map(len, self.nodes))

    @property
    def is_in_place(self) -> bool:
        """Whether input and output are one memory."""
        return self.plan.traffic.collective in ("all_reduce", "broadcast")

    @cached_property
    def moves(self) -> list[RankMoves]:
        """The moves of every rank."""
        if self.kind == "replicated":
            width = len(self.nodes[0])
            staging = staging_bytes(self.plan)
            sizes = {Buffer.STAGING: staging} if staging else {}
            places = [(node, index) for node in range(len(self.nodes)) for index in range(width)]
            return [RankMoves(tuple(replicated_moves(self.plan, *place)), sizes) for place in places]
        is_callers = self.plan.traffic.collective in ("all_gather", "reduce_scatter")
        blocks = [self.plan.traffic.logical_bytes // self.size] * self.size if is_callers else None
        return everyones_moves(self.kind, self.plan, self.nodes, root=self.root, blocks=blocks, splits=self.splits)

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The input of every rank, 1-D uint8 [bytes]."""
        draw = torch.Generator().manual_seed(self.seed)
        count = [size // self.dtype.itemsize for size in self._input_bytes()]
        data = [torch.randint(-3, 9, (each,), generator=draw).to(self.dtype).view(torch.uint8) for each in count]
        if self.kind == "replicated":  # the ranks of a node hold the same tokens
            width = len(self.nodes[0])
            data = [data[rank // width * width] for rank in range(self.size)]
        return data

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """The output that every rank must have: that of the plan's moves, one step after the other, in plain memory."""
        if self.kind == "replicated":
            return self._exchanged()
        outputs = [torch.zeros(size, dtype=torch.uint8) for size in self.output_bytes]
        given = [
            {Buffer.INPUT: (whole := x.clone()), Buffer.OUTPUT: whole}
            if self.is_in_place
            else {Buffer.INPUT: x.clone(), Buffer.OUTPUT: output}
            for x, output in zip(self.inputs, outputs, strict=True)
        ]
        run_in_memory(self.plan, self.moves, given, reducer(self.dtype, "sum"), self.coder)
        for each in given if self.is_doubled else ():
            each[Buffer.OUTPUT].view(self.dtype).mul_(2)
        return [each[Buffer.OUTPUT] for each in given]

    @property
    def output_bytes(self) -> list[int]:
        """The bytes of every rank's output."""
        total = self.plan.traffic.logical_bytes
        if self.splits:
            return [sum(received) for _, received in self.splits]
        return [total // self.size if self.plan.traffic.collective == "reduce_scatter" else total] * self.size

    @property
    def coder(self) -> Coder | None:
        """The codec of its wire format; None for the tensor's own."""
        return None if self.plan.wire.is_native else Codec(self.plan.wire, self.dtype, "pass").on_bytes()

    def _input_bytes(self) -> list[int]:
        total = self.plan.traffic.logical_bytes
        if self.splits:
            return [sum(sent) for sent, _ in self.splits]
        return [total // self.size if self.plan.traffic.collective == "all_gather" else total] * self.size

    def _exchanged(self) -> list[torch.Tensor]:
        """The all_to_all of replicated tokens: node a's block for node b goes to b's ranks."""
        width, e = len(self.nodes[0]), len(self.nodes)
        blocks = [self.inputs[node * width].chunk(e) for node in range(e)]
        return [torch.cat([blocks[a][rank // width] for a in range(e)]) for rank in range(self.size)]


def transports_of(machine: SimulatedMachine, call: DeviceCall) -> list[StreamTransport]:
    """A transport for each rank: one communicator inside nodes and one between them, each of all ranks; those of a grid for
    replicated tokens."""
    if call.kind == "replicated":
        return _of_grid(machine, call.nodes)
    ranks = range(call.size)
    found = {each: SimulatedCommunicator(machine, each.value, ranks) for each in (Resource.INTRA, Resource.INTER)}
    lines = [{each: StepMessenger(of.messenger(rank), tuple(ranks)) for each, of in found.items()} for rank in ranks]

    def line_of(mine: dict[Resource, StepMessenger], step: Step) -> StepMessenger:
        return mine[Resource.INTER if step.resource is Resource.INTER else Resource.INTRA]

    return [
        StreamTransport(
            machine.devices[rank], partial(line_of, lines[rank]), [*lines[rank].values()], call.plan.traffic.lane
        )
        for rank in ranks
    ]


def _of_grid(machine: SimulatedMachine, nodes: Sequence[Sequence[int]]) -> list[StreamTransport]:
    width, e = len(nodes[0]), len(nodes)
    columns = [SimulatedCommunicator(machine, f"ep {t}", [node * width + t for node in range(e)]) for t in range(width)]
    rows = [SimulatedCommunicator(machine, f"tp {n}", [n * width + t for t in range(width)]) for n in range(e)]
    found = []
    for rank in range(e * width):
        between = StepMessenger(columns[rank % width].messenger(rank), tuple(range(e)))
        inside = StepMessenger(rows[rank // width].messenger(rank), tuple(range(width)))

        def line_of(step: Step, between: StepMessenger = between, inside: StepMessenger = inside) -> StepMessenger:
            return between if step.op.value == "all_to_all" else inside

        found.append(StreamTransport(machine.devices[rank], line_of, [between, inside]))
    return found


@dataclass
class Outcome:
    """The results of every rank and turn. ``wrong``: (turn, rank) of those that are not as expected."""

    results: list[list[torch.Tensor]]
    wrong: list[tuple[int, int]] = field(default_factory=list)


def run_calls(
    calls: Sequence[DeviceCall], seed: int, *, watcher: Watcher | None = None, slots: int | None = None
) -> Outcome:
    """Run calls of one group, one after the other and some under way together, in an order of streams that ``seed`` decides.

    Every rank is as careless as the contract of a collective allows: it calls on two streams in turn, frees the input before the
    call has run, allocates at once, and waits with the stream on which it reads. Raises Deadlock.
    """
    machine = SimulatedMachine(calls[0].size, seed, watcher=watcher, slots=slots)
    transports = transports_of(machine, calls[0])
    programs = [_program(machine.devices[rank], transports[rank], rank, calls) for rank in range(calls[0].size)]
    outcome = Outcome(machine.run(programs))
    for rank, results in enumerate(outcome.results):
        for turn, (got, call) in enumerate(zip(results, calls, strict=True)):
            if not torch.equal(got, call.expected[rank]):
                outcome.wrong.append((turn, rank))
    return outcome


def _program(
    device: SimulatedDevice, transport: StreamTransport, rank: int, calls: Sequence[DeviceCall]
) -> SimulatedProgram:
    runner = Runner(transport)
    other = device.new_stream("the caller's other")
    results = [torch.empty(call.output_bytes[rank], dtype=torch.uint8) for call in calls]
    under_way: list[tuple[int, StartedPlan, torch.Tensor]] = []
    for turn, call in enumerate(calls):
        caller = other if turn % 2 else device.main
        x = device.empty(call.inputs[rank].numel())
        device.main.launch(partial(x.copy_, call.inputs[rank]))
        if caller is other:
            other.wait(device.main.record())
        with device.on(caller):
            output = x if call.is_in_place else device.empty(call.output_bytes[rank])
            if call.is_in_place:
                caller.keep(x)
            under_way.append((turn, start_on_device(runner, call, rank, x, output), output))
        del x, output
        yield None
        if turn % 3 != 1 or turn == len(calls) - 1:  # else the next one begins before this one is waited for
            while under_way:
                _take(device, other, results, *under_way.pop(0))
            for spare in (512, 1024, 2048, 4096):
                device.empty(spare)
            yield None
    return results


def start_on_device(runner: Runner, call: DeviceCall, rank: int, x: torch.Tensor, output: torch.Tensor) -> StartedPlan:
    """Launch a call of this rank of the group from ``x`` to ``output``, 1-D uint8 of its device."""
    mine = call.moves[rank]
    prepared = runner.prepare(call.plan, mine.steps, mine.sizes)
    source = CallMemory(x)
    target = source if call.is_in_place else CallMemory(output)
    started = runner.start(prepared, source, target, _LIMIT_S, reducer(call.dtype, "sum"), call.coder)
    drive(call.plan, started)
    if call.is_doubled:
        assert isinstance(started, StreamCall)  # of the transports that were made here
        started.then(partial(target[0, output.numel(), call.dtype].mul_, 2))
    return started


def _take(
    device: SimulatedDevice,
    other: object,
    results: list[torch.Tensor],
    turn: int,
    call: StartedPlan,
    output: torch.Tensor,
) -> None:
    caller = other if turn % 2 else device.main
    with device.on(caller):  # type: ignore[arg-type]
        call.finish()
        device.current.launch(partial(results[turn].copy_, output))

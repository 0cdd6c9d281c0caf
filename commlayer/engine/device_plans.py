"""Planned collectives of one group on tensors of a device: which plan a call gets, and launching it
on streams.

The other executor is :class:`commlayer.engine.planned.PlannedGroup`, for CPU tensors. A call talks
to nobody before it is launched: what decides is the same on all ranks. Its communicators, one for
what goes between nodes and one for what stays inside, are made at the first planned call, which all
members make together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorStream
from commlayer.devices.device_contract import Messenger
from commlayer.devices.event_clock import EventClock
from commlayer.engine.executor import Executor, Ran
from commlayer.engine.group_plans import Choices
from commlayer.engine.kept_calls import KeptCall, KeptCalls
from commlayer.engine.lane_holds import lanes, longest_holds_us
from commlayer.engine.runner import Runner
from commlayer.failures.board import FailureBoard
from commlayer.profiles.errors import ClusterError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Buffer, Plan, Step
from commlayer.settings import Settings
from commlayer.transport.bound_steps import bind
from commlayer.transport.call_memory import CallMemory, reducer
from commlayer.transport.stream_lanes import StreamLane, lanes_of_device
from commlayer.transport.streams import StepMessenger, StreamCall, StreamScript, StreamTimes, StreamTransport

if TYPE_CHECKING:
    from commlayer.engine.planned import PlannedGroup

__all__ = ["DevicePlans"]

_AS_IT_IS = contextlib.nullcontext()
_LOOK_S = 0.0002


def _memory_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in one piece, as 1-D uint8 [bytes]; writing there is no change of
    which autograd hears, as NCCL's is none."""
    return x.data.as_strided((x.numel(),), (1,)).view(torch.uint8)


class DevicePlans(Executor):
    """Plans and launches the collectives of one group on its device's tensors.

    ``nodes``: the members on each node, as ranks of the group, of which this is ``rank``.
    ``connect(purpose, device)`` makes a communicator of all members, connected, and is collective.
    ``lane()``: the class of traffic, as it is at the first planned call. ``timeout_s()``: of calls.
    ``survey``: finds out, with all members, by what to plan; asked before the first call that could
    be planned. ``group``: runs the same group's plans for CPU tensors. ``is_timing``: calls are to
    be timed. Not thread-safe: one call at a time, in the same order on all ranks.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        rank: int,
        choices: Choices,
        connect: Callable[[str, torch.device], Messenger],
        lane: Callable[[], str],
        timeout_s: Callable[[], float],
        survey: Callable[[torch.device], Planner | None] | None = None,
        group: PlannedGroup | None = None,
    ) -> None:
        super().__init__(nodes, rank, choices)
        self._connect, self._lane, self._timeout_s, self._survey = connect, lane, timeout_s, survey
        self._group, self.is_timing = group, False
        self.held_s = 0.0
        """For how long the host has held calls: never. A device holds them itself."""
        self.found_out: Callable[[], None] | None = None
        """Called once it is known by what to plan."""
        self._clock: EventClock | None = None
        self._runner: Runner | None = None
        self._transport: StreamTransport
        self._held_lane = ""  # for which calls are held, or hold others; empty: neither
        self._calls, self._staged = KeptCalls(), dict[Buffer, CallMemory]()
        self._messengers: list[StepMessenger] = []
        self._device: AcceleratorDevice
        self._told: AcceleratorStream  # of futures, so that nobody's callbacks hold a stage up

    @property
    def group(self) -> PlannedGroup:
        """Runs the same group's plans for CPU tensors: its ranks meet there on the host."""
        assert self._group is not None  # of whoever measures links there is none
        return self._group

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.group.global_ranks

    @property
    def settings(self) -> Settings:
        """The group's, but for trials: the host, which runs them, does not see a device's steps."""
        return replace(self.group.settings, trials="off")

    @property
    def board(self) -> FailureBoard:
        return self.group.board

    @property
    def timeout_s(self) -> float:
        return self._timeout_s()

    def explain(
        self, error: RuntimeError, collective: str, sequence: int, waited_s: float, timeout_s: float
    ) -> ClusterError:
        """See :meth:`commlayer.engine.planned.PlannedGroup.explain`."""
        return self.group.explain(error, collective, sequence, waited_s, timeout_s)

    def swap_us(self, peer: int, num_bytes: int) -> float:
        """Send ``peer``, on another node, so many bytes while as many come from it, and return how
        long that took, µs.

        The host waits. Raises RuntimeError where the group fails meanwhile, or the timeout passes.
        """
        stream, device = self._transport.streams[Resource.INTER], self._device
        with device.on(stream):
            data, arrived = device.empty(num_bytes), device.empty(num_bytes)
            began = stream.record_time()
            self._messengers[-1].messenger.exchange([(peer, data)], [(peer, arrived)]).wait()
            ended = stream.record_time()
        until = monotonic() + self.timeout_s
        while not ended.is_done():
            if self.board.is_broken:
                raise self.board.woken()
            if monotonic() > until:
                raise RuntimeError(f"Timed out waiting for a message of rank {self.global_ranks[peer]}")
            sleep(_LOOK_S)
        return ended.elapsed_us(began)

    def plan(self, collective: str, x: torch.Tensor, num_bytes: int) -> Plan | None:
        """The plan for a call, or None: flat, which is the inner backend's own. The same on every
        rank."""
        if not num_bytes:
            return None
        if self._survey is not None:
            self.find_out(x.device)
        return self.choices.plan(collective, num_bytes, is_float=x.dtype.is_floating_point)

    def find_out(self, device: torch.device) -> None:
        """Have ``choices`` know by what to plan, before they are asked for a first call. Collective
        then, later nothing."""
        survey, self._survey = self._survey, None  # once, whatever comes of it
        planner = None if survey is None else survey(device)
        if planner is not None:
            self.choices.use_planner(planner)
        found_out, self.found_out = self.found_out, None
        if found_out is not None:
            found_out()

    @property
    def is_unknown(self) -> bool:
        """Whether the ranks have still to find out together by what to plan."""
        return self._survey is not None

    def prepare(self, plan: Plan, device: torch.device, root: int = 0) -> None:
        """Have ready what a call of ``plan`` needs beside its data. The group's first is
        collective."""
        self.prepared(self._runner or self._connected(device), Movement(plan, None, None, root=root))

    def run(self, movement: Movement, *, timeout_s: float | None = None, issued: Call | None = None) -> Ran:
        """Launch a call behind the current stream's work; see :meth:`Executor.run`. The host waits
        for nothing.

        ``finish`` of what is :attr:`Ran.under_way` makes the stream that is current then wait for
        it. Tensors in one piece of memory, whatever the order of their elements there. An exchange
        that is ``split`` says its counts.
        """
        del timeout_s  # of the host
        runner = self.runner_on(movement.source.device)
        times = None
        if self.is_timing and issued is not None and not self._device.is_capturing:
            times = StreamTimes(has_steps=issued.steps is not None)
        # Tensors that were made in inference mode are written in it only; others stay as they are.
        with torch._C._InferenceMode(True) if movement.target.is_inference() else _AS_IT_IS:
            kept_call = self._kept(runner, movement) if movement.kind == "whole" else self._bound(runner, movement)
            call = StreamCall(self._transport, kept_call.script, kept_call.bound, times)
            call.post_all()
        return Ran(kept_call.sent, call)

    def runner_on(self, device: torch.device) -> Runner:
        """The runner of plans for tensors on ``device``; made at the first call of this, which is
        collective.

        Raises UsageError for another device than the first one.
        """
        runner = self._runner or self._connected(device)
        if device != self._device.device:
            raise UsageError(
                f"this group plans for tensors on {self._device.device}, got one on {device}: calls of a process with "
                "several devices go by NCCL alone (COMMLAYER_PROFILE=none)"
            )
        return runner

    def _moves(
        self, movement: Movement, owned: Sequence[int] | None = None
    ) -> tuple[Sequence[Moves], Mapping[Buffer, int]]:
        steps, sizes = super()._moves(movement, owned)
        return steps, {buffer: size for buffer, size in sizes.items() if size}

    def _kept(self, runner: Runner, movement: Movement) -> KeptCall:
        """A call on the same tensors again is launched from what was kept of the first."""
        plan, source, target = movement.plan, movement.source, movement.target
        key = id(plan), id(source), id(target), source.dtype, movement.op, movement.root
        call = self._calls.find(key, source, target)
        if call is None:
            call = self._bound(runner, movement)
            self._calls.add(key, source, target, call)
        return call

    def _bound(self, runner: Runner, movement: Movement) -> KeptCall:
        source, target, prepared = movement.source, movement.target, self.prepared(runner, movement)
        output = CallMemory(_memory_of(target))
        data = output if source is target else CallMemory(_memory_of(source))
        buffers = runner.buffers(prepared, data, output)
        staged = {buffer: memory for buffer, memory in buffers.items() if buffer in prepared.sizes}
        if any(self._staged.get(buffer, memory) is not memory for buffer, memory in staged.items()):
            self._calls.clear()  # they hold the smaller staging memory that there was
        self._staged.update(staged)
        script = prepared.script
        assert isinstance(script, StreamScript)  # compiled by the transport that was made here
        reduce = None if movement.kind in ("split", "over", "encoded exchange") else reducer(source.dtype, movement.op)
        coder = None if movement.codec is None else movement.codec.on_bytes()
        return KeptCall(movement.plan, script, bind(script, buffers, reduce, coder), prepared.sent)

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched now is captured in a graph, to be run later."""
        return self._runner is not None and self._device.is_capturing

    @property
    def clock(self) -> EventClock:
        """The clock of its device."""
        if self._clock is None:
            self._clock = EventClock(self._device.stream(is_high=False))  # on which nothing waits
        return self._clock

    def future(self, call: StreamCall, outputs: Any) -> torch.futures.Future[Any]:
        """A future of a call's outputs, for C++ and its callbacks: on CUDA of its stream's time,
        else of the host's."""
        stream, device = self._told, self._device
        with device.on(stream):
            call.finish()
            if device.device.type == "cuda":
                future: torch.futures.Future[Any] = torch.futures.Future(devices=[device.device])
                future.set_result(outputs)  # it records an event on the stream that is current
                return future
        future = torch.futures.Future()
        stream.call_host(partial(future.set_result, outputs))
        return future

    def _connected(self, device: torch.device) -> Runner:
        places = tuple(range(sum(map(len, self.nodes))))
        inside = between = StepMessenger(self._connect("messages inside nodes", device), places)
        if len(self.nodes) > 1:
            between = StepMessenger(self._connect("messages between nodes", device), places)

        def messenger_of(step: Step) -> StepMessenger:
            return between if step.resource is Resource.INTER else inside

        messengers = self._messengers = [inside] if between is inside else [inside, between]
        self._device = AcceleratorDevice(device)
        self._told = self._device.stream(is_high=False)
        self._transport = StreamTransport(self._device, messenger_of, messengers, self._lane(), self._place())
        self._runner = Runner(self._transport, self.near)
        return self._runner

    def use_lane(self, lane: str, is_cut: bool) -> None:
        """Hold what is called from now on as ``lane`` says, and cut it finely. The same on all
        ranks, between the same calls."""
        self.choices.use_lane(lane if level_of(lane) and is_cut else "")
        self._held_lane = lane
        self._change_place()

    def _place(self) -> StreamLane | None:
        """Its place among the lanes of the device; None where it has none."""
        lanes = lanes_of_device(self._device) if self._held_lane else None
        return None if lanes is None else StreamLane(lanes, level_of(self._held_lane), self._longest_us)

    def _longest_us(self, plan: Plan) -> Sequence[float]:
        return longest_holds_us(plan, self.choices.planner, lanes().policy, self._timeout_s())

    def _change_place(self) -> None:
        if self._runner is not None:
            if self._transport.among is not None:
                self._transport.among.leave()
            self._transport.among = self._place()

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the communicators that there are; later ones are made with the
        group's."""
        for each in self._messengers:
            each.messenger.set_timeout(timeout)
        self._change_place()  # which also bounds holds

    def under_way(self) -> str:
        """The latest planned call in words, while some of what was launched has not run; empty
        afterwards. Does not wait."""
        return "" if self._runner is None else self._transport.under_way()

    def abort(self) -> None:
        """Break its communicators."""
        if self._runner is not None:
            self._runner.transport.abort()

    def close(self) -> None:
        """Let go of them, when what was launched has run."""
        self._calls.clear()
        self._staged.clear()
        self._exchanges.clear()
        if self._runner is not None:
            self._runner.transport.close()
            self._runner = None

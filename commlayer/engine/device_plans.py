"""Planned collectives of one group on tensors of a device: which plan a call gets, and launching it
on streams.

The other executor is :class:`commlayer.engine.planned.PlannedGroup`, for CPU tensors. A call talks
to nobody before it is launched: what decides is the same on all ranks. Its connections
(device_connections.py) are made at the first planned call, which all members make together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_connections import DeviceConnections
from commlayer.engine.executor import Executor, Ran
from commlayer.engine.group_plans import Choices
from commlayer.engine.kept_calls import KeptCall, KeptCalls
from commlayer.engine.lane_holds import lanes, longest_holds_us
from commlayer.engine.runner import Runner
from commlayer.failures.board import FailureBoard
from commlayer.profiles.errors import ClusterError
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.moves import Moves
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.settings import Settings
from commlayer.transport.call_memory import CallMemory, reducer
from commlayer.transport.stream_scripts import StreamScript, bind
from commlayer.transport.streams import StreamCall, StreamTimes

if TYPE_CHECKING:
    from commlayer.engine.planned import PlannedGroup

__all__ = ["DevicePlans"]

_AS_IT_IS = contextlib.nullcontext()


def _memory_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in one piece, as 1-D uint8 [bytes]; writing there is no change of
    which autograd hears, as NCCL's is none."""
    return x.data.as_strided((x.numel(),), (1,)).view(torch.uint8)


class DevicePlans(Executor):
    """Plans and launches the collectives of one group on its device's tensors.

    ``nodes``: the members on each node, as ranks of the group, of which this is ``rank``.
    ``connect``, ``lane``: see :class:`DeviceConnections`. ``timeout_s()``: of calls.
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
        self.connections = DeviceConnections(self.nodes, self.near, connect, lane, self._longest_us)
        self._timeout_s, self._survey = timeout_s, survey
        self._group, self.is_timing = group, False
        self.held_s = 0.0
        """For how long the host has held calls: never. A device holds them itself."""
        self.found_out: Callable[[], None] | None = None
        """Called once it is known by what to plan."""
        self._calls, self._staged = KeptCalls(), dict[Buffer, CallMemory]()

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
        self.prepared(self.connections.runner_on(device), Movement(plan, None, None, root=root))

    def run(self, movement: Movement, *, timeout_s: float | None = None, issued: Call | None = None) -> Ran:
        """Launch a call behind the current stream's work; see :meth:`Executor.run`. The host waits
        for nothing.

        ``finish`` of what is :attr:`Ran.under_way` makes the stream that is current then wait for
        it. Tensors in one piece of memory, whatever the order of their elements there. An exchange
        that is ``split`` says its counts.
        """
        del timeout_s  # of the host
        connections = self.connections
        runner = connections.runner_on(movement.source.device)
        times = None
        if self.is_timing and issued is not None and not connections.device.is_capturing:
            times = StreamTimes(has_steps=issued.steps is not None)
        # Tensors that were made in inference mode are written in it only; others stay as they are.
        with torch._C._InferenceMode(True) if movement.target.is_inference() else _AS_IT_IS:
            kept_call = self._kept(runner, movement) if movement.kind == "whole" else self._bound(runner, movement)
            call = StreamCall(connections.transport, kept_call.script, kept_call.bound, times)
            call.post_all()
        return Ran(kept_call.sent, call)

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

    def use_lane(self, lane: str, is_cut: bool) -> None:
        """Hold what is called from now on as ``lane`` says, and cut it finely. The same on all
        ranks, between the same calls."""
        self.choices.use_lane(lane if level_of(lane) and is_cut else "")
        self.connections.use_lane(lane)

    def _longest_us(self, plan: Plan) -> Sequence[float]:
        return longest_holds_us(plan, self.choices.prices.planner, lanes().policy, self._timeout_s())

    def end(self, *, drain: bool) -> None:
        """Let go of connections, when what was launched has run (``drain``), or break them."""
        if drain:
            self._calls.clear()
            self._staged.clear()
            self._exchanges.clear()
        self.connections.end(drain=drain)

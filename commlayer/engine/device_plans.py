"""Planned collectives of one group on tensors of a device: which plan a call gets, and launching it on streams.

Beside :class:`commlayer.engine.planned.PlannedGroup`, which is the same for CPU tensors. A call talks to nobody before it is
launched: what decides is the same on all ranks. Its communicators, one for what goes between nodes and one for what stays inside,
are made at the first planned call, which all members make together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorStream
from commlayer.devices.device_contract import Messenger
from commlayer.engine.group_plans import Choices
from commlayer.engine.plain import as_bytes
from commlayer.engine.reducers import reducer
from commlayer.engine.runner import Runner, Sent, drive
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_moves import moves_of_call
from commlayer.scheduler.plan import Plan, Step
from commlayer.transport.contract import CallMemory
from commlayer.transport.streams import StepMessenger, StreamCall, StreamTransport

__all__ = ["DevicePlans"]

_NO_TIMEOUT = 0.0
"""Nothing is waited for here: the inner backend's watchdog has the group's timeout."""


class DevicePlans:
    """Plans and launches the collectives of one group on its device's tensors.

    ``nodes``: the members on each node, as ranks of the group, of which this is ``rank``. ``connect(purpose, device)`` makes a
    communicator of all members, connected, and is collective. ``lane()``: the class of traffic, as it is at the first planned
    call. Not thread-safe: one call at a time, in the same order on all ranks.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        rank: int,
        choices: Choices,
        connect: Callable[[str, torch.device], Messenger],
        lane: Callable[[], str],
    ) -> None:
        self.nodes, self.rank, self.choices = tuple(tuple(node) for node in nodes), rank, choices
        self._connect, self._lane = connect, lane
        self._runner: Runner | None = None
        self._messengers: list[StepMessenger] = []
        self._device: AcceleratorDevice
        self._told: AcceleratorStream  # of futures, so that nobody's callbacks hold a stage up

    def plan(self, collective: str, x: torch.Tensor, num_bytes: int) -> Plan | None:
        """The plan for a call, or None: flat, which is the inner backend's own. The same on every rank."""
        return self.choices.plan(collective, num_bytes, is_float=x.dtype.is_floating_point) if num_bytes else None

    def launch(
        self, plan: Plan, source: torch.Tensor, target: torch.Tensor, *, op: str = "sum", root: int = 0
    ) -> tuple[StreamCall, Sent]:
        """Launch a call of ``plan`` behind the current stream's work, and return it, and what this rank sends in it.

        Its ``finish`` makes the stream that is current then wait for it. Contiguous tensors, as in
        :meth:`commlayer.engine.planned.PlannedGroup.run`.
        """
        runner = self._runner or self._connected(source.device)
        if source.device != self._device.device:
            raise UsageError(
                f"this group plans for tensors on {self._device.device}, got one on {source.device}: calls of a process with "
                "several devices go by NCCL alone (COMMLAYER_PROFILE=none)"
            )
        prepared = runner.prepared(plan, root, lambda: moves_of_call(plan, self.nodes, self.rank, root))
        output = CallMemory(as_bytes(target))
        data = output if source is target else CallMemory(as_bytes(source))
        # Tensors that were made in inference mode are written in it only; others stay as they are.
        with torch._C._InferenceMode(True) if target.is_inference() else contextlib.nullcontext():
            call = runner.start(prepared, data, output, _NO_TIMEOUT, reducer(source.dtype, op))
            assert isinstance(call, StreamCall)  # of the transport that was made here
            drive(plan, call)
        return call, prepared.sent

    def future(self, call: StreamCall, outputs: Any) -> torch.futures.Future[Any]:
        """A future of a call's outputs, for C++ and its callbacks: on CUDA of its stream's time, else of the host's."""
        told, device = self._told, self._device
        with device.on(told):
            call.finish()
            if device.device.type == "cuda":
                future: torch.futures.Future[Any] = torch.futures.Future(devices=[device.device])
                future.set_result(outputs)  # it records an event on the stream that is current
                return future
        future = torch.futures.Future()
        told.call_host(partial(future.set_result, outputs))
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
        transport = StreamTransport(self._device, messenger_of, messengers, self._lane())
        near = next(members for members in self.nodes if self.rank in members)
        self._runner = Runner(transport, near)
        return self._runner

    def use_siblings(self, siblings: int) -> None:
        """Plan for so many groups that use a node's links at the same time. The same on all ranks, between the same calls."""
        self.choices.use_siblings(siblings)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the communicators that there are; later ones are made with the group's."""
        for each in self._messengers:
            each.messenger.set_timeout(timeout)

    def abort(self) -> None:
        """Break its communicators."""
        if self._runner is not None:
            self._runner.transport.abort()

    def close(self) -> None:
        """Let go of them, when what was launched has run."""
        if self._runner is not None:
            self._runner.transport.close()
            self._runner = None

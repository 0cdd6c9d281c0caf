"""Connections of one group on a device: streams, and communicators, once a first call is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from commlayer.devices.accelerator import AcceleratorDevice, AcceleratorStream
from commlayer.devices.device_contract import Messenger
from commlayer.engine.runner import Runner
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import level_of
from commlayer.scheduler.plan import Plan, Step
from commlayer.transport.stream_lanes import StreamLane, lanes_of_device
from commlayer.transport.stream_scripts import StepMessenger
from commlayer.transport.streams import StreamCall, StreamTransport

__all__ = ["DeviceConnections"]


class DeviceConnections:
    """Connects the members of one group on a device, and holds what they send there on its lane.

    ``nodes``: the members on each node, of which ``near`` are those of this rank's.
    ``connect(purpose, device)`` makes a communicator of all members, connected, and is collective.
    ``lane()``: the class of traffic, as it is when they connect. ``longest_us(plan)``: for how long
    each step of a plan may be held.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        near: tuple[int, ...],
        connect: Callable[[str, torch.device], Messenger],
        lane: Callable[[], str],
        longest_us: Callable[[Plan], Sequence[float]],
    ) -> None:
        self._nodes, self._near, self._connect, self._lane, self._longest_us = nodes, near, connect, lane, longest_us
        self._held_lane = ""  # for which calls are held, or hold others; empty: neither
        self._runner: Runner | None = None
        self.transport: StreamTransport
        self.device: AcceleratorDevice
        self.messengers: list[StepMessenger] = []
        """For what stays inside nodes, and behind it for what goes between them, if there are several."""
        self._told: AcceleratorStream  # of futures, so that nobody's callbacks hold a stage up

    def runner_on(self, device: torch.device) -> Runner:
        """The runner of plans for tensors on ``device``; made at the first call of this, which is
        collective.

        Raises UsageError for another device than the first one.
        """
        if self._runner is None:
            self._runner = Runner(self._connected(device), self._near)
            self._change_place()
        if device != self.device.device:
            raise UsageError(
                f"this group plans for tensors on {self.device.device}, got one on {device}: calls of a process with "
                "several devices go by NCCL alone (COMMLAYER_PROFILE=none)"
            )
        return self._runner

    def _connected(self, device: torch.device) -> StreamTransport:
        places = tuple(range(sum(map(len, self._nodes))))
        inside = between = StepMessenger(self._connect("messages inside nodes", device), places)
        if len(self._nodes) > 1:
            between = StepMessenger(self._connect("messages between nodes", device), places)

        def messenger_of(step: Step) -> StepMessenger:
            return between if step.resource is Resource.INTER else inside

        self.messengers = [inside] if between is inside else [inside, between]
        self.device = AcceleratorDevice(device)
        self._told = self.device.stream(is_high=False)
        self.transport = StreamTransport(self.device, messenger_of, self.messengers, self._lane())
        return self.transport

    @property
    def is_capturing(self) -> bool:
        """Whether what is launched now is captured in a graph, to be run later."""
        return self._runner is not None and self.device.is_capturing

    def future(self, call: StreamCall, outputs: Any) -> torch.futures.Future[Any]:
        """A future of a call's outputs, for C++ and its callbacks: on CUDA of its stream's time,
        else of the host's."""
        stream, device = self._told, self.device
        with device.on(stream):
            call.finish()
            if device.device.type == "cuda":
                future: torch.futures.Future[Any] = torch.futures.Future(devices=[device.device])
                future.set_result(outputs)  # it records an event on the stream that is current
                return future
        future = torch.futures.Future()
        stream.call_host(partial(future.set_result, outputs))
        return future

    def use_lane(self, lane: str) -> None:
        """Hold what is launched from now on as ``lane`` says. The same on all ranks, between the same
        calls."""
        self._held_lane = lane
        self._change_place()

    def _change_place(self) -> None:
        """Take its place among the lanes of the device, in the stead of the one that it has; none where
        calls are not held."""
        if self._runner is not None:
            if self.transport.among is not None:
                self.transport.among.leave()
            others = lanes_of_device(self.device) if self._held_lane else None
            self.transport.among = None
            if others is not None:
                self.transport.among = StreamLane(others, level_of(self._held_lane), self._longest_us)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of the communicators that there are; later ones are made with the
        group's."""
        for each in self.messengers:
            each.messenger.set_timeout(timeout)
        self._change_place()  # which also bounds holds

    def under_way(self) -> str:
        """The latest planned call in words, while some of what was launched has not run; empty
        afterwards. Does not wait."""
        return "" if self._runner is None else self.transport.under_way()

    def end(self, *, drain: bool) -> None:
        """Let go of communicators, when what was launched has run (``drain``), or break them."""
        if self._runner is not None and drain:
            self.transport.close()
            self._runner = None
        elif self._runner is not None:
            self.transport.abort()

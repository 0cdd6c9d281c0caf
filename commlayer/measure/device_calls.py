"""Calls that are timed on a device: launched on the stream that is current, which then waits for them; the host does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.calls.movement import Movement
from commlayer.devices.device_contract import Messenger
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.measure.calls import CALL_OPTIONS, GroupCall
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.settings import Settings
from commlayer.transport.c10d import verb_of
from commlayer.transport.inner_messages import InnerMessenger
from commlayer.transport.nccl import Nccl

__all__ = ["DeviceGroup", "DeviceMessageCall", "DeviceOwnCall", "DeviceStepCall"]


class DeviceGroup:
    """A group whose calls are timed on ``device``. ``inner``, the communicator of the backend's own calls, carries the messages
    of its plans too, for one call runs at a time. ``nodes``: the members on each, as ranks of the group; this is ``rank``."""

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, device: torch.device, inner: Nccl) -> None:
        self.rank, self.device, self.inner = rank, device, inner
        self.size = sum(map(len, nodes))
        self.messenger: Messenger = InnerMessenger(inner, lambda: None)  # it is the group's to close
        choices = Choices(tuple(map(len, nodes)), None, Settings(plan=Strategy.DIRECT.value))
        self.plans = DevicePlans(nodes, rank, choices, lambda purpose, device: self.messenger, lambda: "", lambda: 0.0)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum ``x`` over the members, by the backend's own call."""
        backend: Any = self.inner.backend
        backend.allreduce([x], CALL_OPTIONS["all_reduce"]()).wait()


class DeviceStepCall(GroupCall):
    """A plan of a group, or one step of it."""

    def __init__(self, group: DeviceGroup, plan: Plan) -> None:
        super().__init__(group.rank, plan, group.device)
        self._plans = group.plans
        self._plans.prepare(plan, group.device)  # not between the events

    def run(self) -> None:
        self._run(self.plan)

    def run_whole(self) -> None:
        self._run(build(self.plan.traffic, self.plan.strategy))

    def _run(self, plan: Plan) -> None:
        self._plans.run(Movement(plan, self.source, self.target)).under_way.finish()


class DeviceOwnCall(GroupCall):
    """A collective as a call of the inner backend's own."""

    def __init__(self, group: DeviceGroup, plan: Plan) -> None:
        super().__init__(group.rank, plan, group.device)
        self._backend: Any = group.inner.backend
        self._verbs: Any = group.inner.verbs or group.inner.backend

    def run(self) -> None:
        self._work().wait()

    def _work(self) -> Any:
        options = CALL_OPTIONS[self.collective]()
        if self.collective == "all_gather":
            return verb_of(self._verbs, "all_gather_single")(self.target, self.source, options)
        if self.collective == "reduce_scatter":
            return verb_of(self._verbs, "reduce_scatter_single")(self.target, self.source, options)
        if self.collective == "all_to_all_v":
            return verb_of(self._verbs, "all_to_all_single")(self.target, self.source, [], [], options)
        verb = self._backend.allreduce if self.collective == "all_reduce" else self._backend.broadcast
        return verb([self.target], options)


class DeviceMessageCall:
    """A message from the first rank of two to the second."""

    def __init__(self, group: DeviceGroup, size: int) -> None:
        if group.size != 2:
            raise UsageError(f"send_recv is measured on groups of two ranks, got one of {group.size}")
        self._group = group
        self.message = torch.zeros(size, dtype=torch.uint8, device=group.device)

    def run(self) -> None:
        is_sender, message = self._group.rank == 0, (1 - self._group.rank, self.message)
        self._group.messenger.exchange([message] if is_sender else [], [] if is_sender else [message]).wait()

    def num_wrong(self) -> int:
        self.message.fill_(7 if self._group.rank == 0 else 0)
        self.run()
        return int((self.message != 7).sum())

"""Simulated communicators, with NCCL's order: one exchange after the other, on a stream of its own, each of which ends when all
peers have come."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch

from commlayer.devices.device_contract import Addressed
from commlayer.profiles.errors import UsageError
from simulated.machine import (
    SimulatedDevice,
    SimulatedEvent,
    SimulatedMachine,
    SimulatedStream,
    StreamTask,
)

__all__ = ["ArrivedMessages", "SimulatedCommunicator", "SimulatedMessenger"]


class _End(NamedTuple):
    """One end of a message: the memory that goes, or to which it comes."""

    sender: int
    receiver: int
    is_sent: bool
    tensor: torch.Tensor


class ArrivedMessages:
    """An exchange that has been enqueued."""

    __slots__ = ("_device", "_end")

    def __init__(self, device: SimulatedDevice, end: SimulatedEvent) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        self._device.current.wait(self._end)


class _Exchange(StreamTask):
    """One rank's part of an exchange. It begins when its stream comes to it and the device has room, and ends with its last
    message, which goes once its other end has begun too."""

    __slots__ = ("_communicator", "_has_begun", "ends", "left", "number", "rank", "stream")

    def __init__(
        self,
        communicator: SimulatedCommunicator,
        rank: int,
        stream: SimulatedStream,
        number: int,
        ends: Sequence[_End],
    ) -> None:
        self._communicator, self.rank, self.stream, self.number = communicator, rank, stream, number
        self.ends = ends
        self.left = len(ends)
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        return self._has_begun

    def is_ready(self, stream: SimulatedStream) -> bool:
        machine, rank = stream.device.machine, stream.device.rank
        if self._has_begun:
            return False
        if machine.slots is not None and machine.occupied[rank] >= machine.slots:
            self._communicator.crowded[rank].append(stream)
            return False
        return True

    def run(self, stream: SimulatedStream) -> bool:
        machine, rank = stream.device.machine, stream.device.rank
        if (
            machine.slots is not None and machine.occupied[rank] >= machine.slots
        ):  # another has begun since it was ready
            self._communicator.crowded[rank].append(stream)
            return False
        machine.occupied[rank] += 1
        self._has_begun = True
        if machine.watcher is not None:
            machine.watcher.began(stream, self._communicator.name, self.number)
        if self.left == 0:
            self._communicator.leave(rank)
            return True
        for end in self.ends:
            self._communicator.meet(self, end)
        return False

    def one_less(self) -> None:
        """A message has gone, or come."""
        self.left -= 1
        if self.left == 0:
            self._communicator.leave(self.stream.device.rank)
            self.stream.device.machine.ended(self.stream)

    def waits_in_words(self) -> str:
        if not self._has_begun:
            return f"room on the device for exchange {self.number} of communicator {self._communicator.name}"
        absent = sorted({self._other(end) for end in self._communicator.absent(self)})
        them = ", ".join(str(self._communicator.ranks[other]) for other in absent)
        return f"ranks {them} in exchange {self.number} of communicator {self._communicator.name}"

    def _other(self, end: _End) -> int:
        return end.receiver if end.is_sent else end.sender


class SimulatedCommunicator:
    """A communicator of ``ranks`` of a machine. Each rank has its end of it: :meth:`messenger`."""

    def __init__(self, machine: SimulatedMachine, name: str, ranks: Sequence[int]) -> None:
        self.machine, self.name, self.ranks = machine, name, tuple(ranks)
        self.crowded: defaultdict[int, list[SimulatedStream]] = defaultdict(list)
        self._came: dict[tuple[int, int], deque[tuple[_Exchange, _End]]] = defaultdict(deque)
        """For each sender and receiver the ends that have begun and whose others have not: all of one side."""
        machine.communicators.append(self)

    def messenger(self, rank: int) -> SimulatedMessenger:
        """The end of ``rank``, of the machine."""
        return SimulatedMessenger(self, self.machine.devices[rank], self.ranks.index(rank))

    def meet(self, exchange: _Exchange, end: _End) -> None:
        """An end of the next message between two ranks has begun: once both have, it may go at any moment."""
        waiting = self._came[end.sender, end.receiver]
        if not waiting or waiting[0][1].is_sent == end.is_sent:
            waiting.append((exchange, end))
            return
        mine, theirs = (exchange, end), waiting.popleft()
        (sender, sent), (receiver, received) = (mine, theirs) if end.is_sent else (theirs, mine)
        if sent.tensor.numel() != received.tensor.numel():
            raise UsageError(
                f"communicator {self.name}: rank {self.ranks[end.sender]} sends {sent.tensor.numel()} bytes in its exchange "
                f"{sender.number}, and rank {self.ranks[end.receiver]} receives {received.tensor.numel()} in its exchange "
                f"{receiver.number}"
            )
        self.machine.movable.append(partial(self._move, sender, sent.tensor, receiver, received.tensor))

    def _move(self, sender: _Exchange, source: torch.Tensor, receiver: _Exchange, target: torch.Tensor) -> None:
        target.copy_(source)
        watcher = self.machine.watcher
        if watcher is not None:
            watcher.moved(sender.stream, f"send of {self.name}", [source], [])
            watcher.moved(receiver.stream, f"receive of {self.name}", [], [target])
        sender.one_less()
        receiver.one_less()

    def leave(self, rank: int) -> None:
        """An exchange of ``rank`` has ended: its device has room for another one, of any communicator."""
        self.machine.occupied[rank] -= 1
        for communicator in self.machine.communicators:
            crowded = communicator.crowded.pop(rank, [])
            for stream in crowded:
                self.machine.look_at(stream)

    def absent(self, exchange: _Exchange) -> list[_End]:
        """The ends of ``exchange`` whose others have not begun."""
        return [end for waiting in self._came.values() for mine, end in waiting if mine is exchange]


class SimulatedMessenger:
    """One rank's end of a communicator: see :class:`commlayer.devices.device_contract.Messenger`."""

    def __init__(self, communicator: SimulatedCommunicator, device: SimulatedDevice, rank: int) -> None:
        self._communicator, self._device, self._rank = communicator, device, rank
        self.stream = device.new_stream(f"of communicator {communicator.name}")
        self._exchanges = 0

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> ArrivedMessages:
        return self._enqueue([*self._ends(sends, is_sent=True), *self._ends(receives, is_sent=False)], None)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> ArrivedMessages:
        parts = whole.chunk(len(self._communicator.ranks))
        own = parts[self._rank]
        others = [place for place in range(len(parts)) if place != self._rank]
        sends = self._ends([(place, mine) for place in others], is_sent=True)
        receives = self._ends([(place, parts[place]) for place in others], is_sent=False)
        in_place = own.data_ptr() == mine.data_ptr()
        return self._enqueue([*sends, *receives], None if in_place else partial(own.copy_, mine))

    def _ends(self, addressed: Sequence[Addressed], *, is_sent: bool) -> list[_End]:
        unheld = self._device.memory.unheld
        return [
            _End(self._rank, place, True, unheld(tensor)) if is_sent else _End(place, self._rank, False, unheld(tensor))
            for place, tensor in addressed
        ]

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: a deadlock is known at once."""

    def abort(self) -> None:
        """Nothing: ranks of a machine do not die."""

    def close(self) -> None:
        """Nothing is held."""

    def _enqueue(self, ends: Sequence[_End], own: Callable[[], object] | None) -> ArrivedMessages:
        self._exchanges += 1
        stream = self.stream
        stream.wait(self._device.current.record())
        if own is not None:
            stream.launch(own)
        stream.enqueue(_Exchange(self._communicator, self._rank, stream, self._exchanges, ends))
        return ArrivedMessages(self._device, stream.record())

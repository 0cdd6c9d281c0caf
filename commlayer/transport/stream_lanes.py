"""Lanes on a device: it holds calls of a lower lane itself, at the edges of their chunks, while a
higher one is under way.

The host launches every call whole, when the program makes it, and so in the program's order, which
is the same on all ranks; it waits for nothing, and decides nothing by what has run. The device adds
a delay: a call of a higher lane writes in the device's memory when it begins there and when it has
ended (:class:`DeviceLanes`), and before each exchange of a lower lane's call its stream is held
while such a note says so, for a bounded time
(:meth:`commlayer.devices.device_contract.Stream.hold`).

*Credits.* A communicator runs one exchange at a time, and the edge comes behind the one before. So
a higher call finds one exchange between nodes of each lower group in its way, and one inside; no
more of them begin while it is under way.

*Why this cannot deadlock.* As on the CPU (:mod:`commlayer.scheduler.lanes`): a hold ends by itself,
after a time that depends on nobody. So a program on lanes is the same program without them, with
other finite delays. That holds for groups of any members.

Rejected: an event of the higher call, for which the chunk waits. It has no bound. Rank 0 launches
gradients, then experts; rank 1 has its stream wait for the gradients before it launches the
experts. Rank 0's next chunk would wait for the experts, those for rank 1, and that one for the
chunk.

Rejected: launching only the first chunks, and the others behind a later call. A rank whose program
waits for the gradients earlier than the others' has to launch them earlier, so ranks launch in
different orders; what is not launched makes no headway while the host is busy; and where hosts run
ahead of their devices, as they do in training, a later call is launched long before it can begin,
so that nothing would be gained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commlayer.devices.accelerator import AcceleratorDevice, why_no_holds
from commlayer.devices.device_contract import Device, Stream
from commlayer.forked_child import in_forked_child
from commlayer.profiles.printable import warn
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.lanes import LANES
from commlayer.scheduler.plan import Plan

__all__ = ["DeviceLanes", "StreamLane", "lanes_of_device"]

_NUM_LEVELS = max(LANES.values()) + 1
_NUM_PLACES = 8
"""On each level. Groups that share one announce less: the first to end says that both have."""
_NOTE_BYTES = 16
"""Each note is written by other streams: the least that the judge of races
(tests/simulated/judge.py) tells apart."""
_FREE, _INSIDE, _CROSSING = 0, 1, 2
"""A note: no call is under way; one that stays inside nodes; one that goes between them."""
_MAX_KEPT = 1024


class DeviceLanes:
    """Which lanes have calls under way on a device, noted in its own memory. Its making waits for
    the device, and holds a stream once as each lane will, for no time: the first hold of a kind may
    have to be compiled.

    Notes lie by level, so that those of all levels above one are one piece of memory.
    """

    def __init__(self, device: Device) -> None:
        self.notes = device.empty(_NUM_LEVELS * _NUM_PLACES * _NOTE_BYTES)
        device.current.launch(partial(self.notes.fill_, _FREE))
        for level in range(1, _NUM_LEVELS):
            device.current.hold(self.above(level), _INSIDE, 0.0)
        device.synchronize()  # once, where communicators are connected, which waits too
        self._groups = [[0] * _NUM_PLACES for _ in range(_NUM_LEVELS)]

    def enter(self, level: int) -> int:
        """A group has calls of this level from now on. Returns its place there."""
        groups = self._groups[level]
        index = groups.index(min(groups))
        groups[index] += 1
        return index

    def leave(self, level: int, place: int) -> None:
        """A group has no calls of this level from now on, and gives back its place there."""
        self._groups[level][place] -= 1

    def note(self, level: int, place: int) -> torch.Tensor:
        """The note of a place, 1-D uint8."""
        start = (level * _NUM_PLACES + place) * _NOTE_BYTES
        return self.notes[start : start + _NOTE_BYTES]

    def above(self, level: int) -> torch.Tensor:
        """The notes of all levels that go before ``level``, 1-D uint8."""
        return self.notes[: level * _NUM_PLACES * _NOTE_BYTES]

    def is_anybody(self, levels: range) -> bool:
        """Whether a group has calls of one of these levels."""
        return any(any(self._groups[level]) for level in levels)


class StreamLane:
    """One group's place among the lanes of its device. ``level``: 0 goes first.

    ``longest_us(plan)``: for how long each step of a plan may be held at most, 0 for one that
    passes without being asked. As what decides here only delays, ranks need not agree on it.
    """

    def __init__(self, lanes: DeviceLanes, level: int, longest_us: Callable[[Plan], Sequence[float]]) -> None:
        self._lanes, self._level, self._longest_us = lanes, level, longest_us
        self._place: int | None = lanes.enter(level)
        self._note = lanes.note(level, self._place)
        self._above = lanes.above(level)
        self._kept = Kept[int, tuple[Plan, Sequence[float]]](_MAX_KEPT)

    def holds(self, plan: Plan) -> Sequence[float]:
        """For how long each step of a call that is made now may be held, µs; empty where nobody
        goes before it."""
        if not self._lanes.is_anybody(range(self._level)):
            return ()
        longest = self._kept.get(id(plan)) or self._kept.add(id(plan), (plan, self._longest_us(plan)))
        return longest[1]

    def hold(self, stream: Stream, most_us: float, *, crosses: bool) -> None:
        """Hold a stream that comes to an edge. ``crosses``: it goes between nodes, and so waits
        only for calls that do."""
        stream.hold(self._above, _CROSSING if crosses else _INSIDE, most_us)

    @property
    def is_awaited(self) -> bool:
        """Whether calls of this group are to be announced: there are lanes below."""
        return self._lanes.is_anybody(range(self._level + 1, _NUM_LEVELS))

    def begun(self, *, crosses: bool) -> Callable[[], object]:
        """The work of a stream where a call begins. Calls of one group follow each other, so their
        notes do."""
        return partial(self._note.fill_, _CROSSING if crosses else _INSIDE)

    def ended(self) -> Callable[[], object]:
        """The work of a stream where it has ended."""
        return partial(self._note.fill_, _FREE)

    def leave(self) -> None:
        """Have no more calls: those that were launched have notes of their ends, unless they were
        broken off (:meth:`give_back`). Harmless when repeated."""
        if self._place is not None:
            self._lanes.leave(self._level, self._place)
            self._place = None

    def give_back(self, stream: Stream) -> None:
        """Free the note of a call that was broken off, whose own end may never be launched.
        ``stream``: on which it was announced, so that this comes behind."""
        stream.launch(self.ended())


_of_devices: dict[torch.device, DeviceLanes | None] = {}

in_forked_child(_of_devices.clear)  # a child has other devices than its parent


def lanes_of_device(device: AcceleratorDevice) -> DeviceLanes | None:
    """The lanes of a device, made when they are first asked for, which waits for it; None where its
    streams cannot be held: that warns once. Ranks need not agree on it, as a hold only delays."""
    where = device.device
    if where not in _of_devices:
        _of_devices[where] = None
        why = why_no_holds(where.type, os.environ)
        if not why:
            try:
                _of_devices[where] = DeviceLanes(device)
            except Exception as error:  # noqa: BLE001  whatever a compiler says: this rank alone would fail, and others wait for it
                why = f"the kernel that holds a stream failed: {type(error).__name__}: {error}"
        if why:
            warn(f"commlayer: lower lanes are not held on {where}: {why}", stacklevel=2)
    return _of_devices[where]

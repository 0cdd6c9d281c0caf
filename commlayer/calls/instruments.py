"""Instruments: who listens to a group's calls, and where they come from.

What runs a call names the moments of its life, and knows nobody who listens: a moment to which nobody listens costs a look at an
empty tuple. Those of ours that act on a group, such as the watch, are handed what runs its calls when the group is made. Trio's
instruments have this shape; other than there an error of an instrument in a call is the call's: a rank that cannot take part in
what an instrument does with all ranks must not go on.

The ring and the counters listen to every call, and so are written out in the verbs themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

from commlayer.calls.counters import GroupCounters
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.profiles.printable import warn

__all__ = [
    "OWN",
    "AsksRanks",
    "Instrument",
    "Instruments",
    "NewGroup",
    "attach_own",
    "attach_own_on_device",
    "inquiries",
    "listen_to_all",
    "stop_listening_to_all",
]

OWN = ("commlayer.auditing.group_instruments", "commlayer.measure.trials")
"""Our own instruments, and the trials of plans: modules with a function ``attach(group)``, which is
called for every group that is made. They are named here, and imported when the first group is made,
because nothing that runs calls may depend on them. The trials give ``Calls`` what it asks of plans
that contend, so that no group runs calls without them."""

INQUIRIES = "commlayer.diagnosis.inquiry"
"""The module that asks ranks what they wait for, named and imported in the same way."""

_Kind = TypeVar("_Kind", bound="Instrument")


class Instrument:
    """Listens to calls. An instrument overrides the moments that it wants to hear of; it is not called for others.

    All moments of one call come in this order, ``issued`` and ``waited`` on the program's thread, the others on the thread that
    runs the call. What an instrument raises the call raises.

    ``lets_pass``: whether plain calls of CPU tensors that no plan can run may go to the inner backend as they are; of those the
    instrument hears ``moved`` at most. Otherwise a group with this instrument takes every call the long way.
    """

    lets_pass = False

    def issued(self, call: Call) -> None:
        """The program has made the call, which is about to run or to be queued. It may wait."""

    def began(self, call: Call) -> None:
        """The call's turn has come, and nothing of it has moved."""

    def moving(self, call: Call, movement: Movement) -> None:
        """A plan is about to move the call's bytes."""

    def moved(self, call: Call) -> None:
        """The call's bytes have been moved, by a plan or by the inner backend: ``sequence``, ``plan``, ``logical_bytes``,
        ``moved_ns``, ``inter_bytes`` and ``intra_bytes`` say how. A call of several pairs of tensors comes here for each."""

    def ended(self, call: Call) -> None:
        """The call has ended, well or not."""

    def waited(self, call: Call, start_ns: int, end_ns: int) -> None:
        """A thread of the program was blocked so long by the call; of a synchronous call all the time of it."""

    def ending(self) -> None:
        """The group is to end; calls may be under way."""

    def closing(self, *, with_others: bool) -> None:
        """The group ends now. ``with_others``: all ranks come here, and nothing is under way."""

    def closed(self) -> None:
        """The group is gone: what is kept of it must not keep it alive."""

    def inherited(self) -> None:
        """This process is a forked child, in which the group lives no more."""


_CALL_MOMENTS = ("issued", "began", "moving", "moved", "ended", "waited")


class Instruments:
    """The instruments of one group.

    Attributes:
        issued, began, moving, moved, ended, waited: the functions that hear of each moment, in the order in which their
            instruments were added.
        is_watched: whether one of them lets no call pass.
        changed: called when that changes, for who remembers it.
        beside: those of the group's calls on devices, which an instrument that is added here hears of, too.
    """

    __slots__ = (
        "__weakref__",
        "_all",
        "began",
        "beside",
        "changed",
        "ended",
        "is_watched",
        "issued",
        "moved",
        "moving",
        "waited",
    )

    issued: tuple[Callable[[Call], None], ...]
    began: tuple[Callable[[Call], None], ...]
    moving: tuple[Callable[[Call, Movement], None], ...]
    moved: tuple[Callable[[Call], None], ...]
    ended: tuple[Callable[[Call], None], ...]
    waited: tuple[Callable[[Call, int, int], None], ...]

    def __init__(self) -> None:
        self._all: list[Instrument] = []
        self.beside: list[Instruments] = []
        self.changed: Callable[[], None] = _nothing
        self._list()
        for instrument in _of_all:
            self.add(instrument)
        _open.add(self)

    def add(self, instrument: Instrument) -> None:
        """Have ``instrument`` hear of the group's calls from now on. Nothing where it does already."""
        for each in (self, *self.beside):
            each.add_here(instrument)

    def add_here(self, instrument: Instrument) -> None:
        """The same, for these calls alone: not for those on a device, which are beside them."""
        if instrument not in self._all:
            self._all.append(instrument)
            self._list()

    def remove(self, instrument: Instrument) -> None:
        """Have it hear of no more. Nothing where it does not listen."""
        for each in (self, *self.beside):
            if instrument in each._all:
                each._all.remove(instrument)
                each._list()

    def find(self, kind: type[_Kind]) -> _Kind | None:
        """Return the instrument of this kind; None where there is none."""
        return next((each for each in self._all if isinstance(each, kind)), None)

    def ending(self) -> None:
        """Tell all that the group is to end."""
        for each in list(self._all):
            _at_end(each.ending)

    def closing(self, *, with_others: bool) -> None:
        """Tell all that the group ends now."""
        for each in list(self._all):
            _at_end(partial(each.closing, with_others=with_others))

    def closed(self, *, in_child: bool = False) -> None:
        """Tell all that the group is gone, or stayed with the parent of this forked child, and let go
        of them."""
        for each in list(self._all):
            _at_end(each.inherited if in_child else each.closed)
        self._all.clear()
        self.beside.clear()
        self.changed = _nothing
        self._list()
        _open.discard(self)

    def _list(self) -> None:
        for moment in _CALL_MOMENTS:
            base = getattr(Instrument, moment)
            heard = [getattr(each, moment) for each in self._all if getattr(type(each), moment) is not base]
            setattr(self, moment, tuple(heard))
        self.is_watched = not all(each.lets_pass for each in self._all)
        self.changed()


def _nothing() -> None:
    return None


def _at_end(tell: Callable[[], None]) -> None:
    """Tell an instrument that a group ends. Whatever it raises, the group must end: others wait for that."""
    try:
        tell()
    except Exception as error:  # noqa: BLE001  an instrument's own
        warn(f"commlayer: an instrument failed at the end of its group: {type(error).__name__}: {error}", stacklevel=2)


_open: weakref.WeakSet[Instruments] = weakref.WeakSet()
_of_all: list[Instrument] = []


def listen_to_all(instrument: Instrument) -> None:
    """Have ``instrument`` hear of the calls of all groups of this process, and of those that are made from now on."""
    _of_all.append(instrument)
    for each in list(_open):
        each.add(instrument)


def stop_listening_to_all(instrument: Instrument) -> None:
    """Undo :func:`listen_to_all`."""
    if instrument in _of_all:
        _of_all.remove(instrument)
    for each in list(_open):
        each.remove(instrument)


@dataclass(frozen=True)
class NewGroup:
    """A group that is being made, for those who may give it instruments.

    Attributes:
        instruments: the group's.
        counters: of its calls.
        order, calls, planned: what runs them, which an instrument that acts on them is told of here, and knows no other way.
        gloo: the inner group that runs its collectives.
        store: the group's own.
        settings: the group's, with its options.
        options: what the program gave for this group.
        rank: this rank in the job.
        ranks: of the group, as its own numbers name them.
        world_size: how many ranks the job has.
        is_planning: whether some of its calls may have plans.
        is_default: whether it is the job's default group.
        is_of_job: whether what is told once of a job that plans is told from this group on.
        stands_alone: whether its ranks have other numbers in the job, or are not in it.
        device: the type of device of its calls; empty: the CPU's.
        connecting: makes a context in which a failure is told to the other ranks: for what is collective.
        time_links: times the links between the group's nodes by messages of so many bytes, with all ranks, between calls.
    """

    instruments: Instruments
    counters: GroupCounters
    order: Any
    calls: Any
    planned: Any
    gloo: Any
    store: Any
    settings: Any
    options: Any
    rank: int
    ranks: Sequence[int]
    world_size: int
    is_planning: bool
    is_default: bool
    is_of_job: bool
    stands_alone: bool
    connecting: Callable[[str, str], AbstractContextManager[None]]
    time_links: Callable[[int], Any]
    device: str = ""


def attach_own(group: NewGroup) -> None:
    """Give a group that is being made the instruments that its settings ask for. Collective over the group."""
    for name in OWN:
        import_module(name).attach(group)


def attach_own_on_device(group: NewGroup) -> None:
    """The same for its calls on a device, once it is known by what they are planned. On all ranks, before the same call."""
    for name in OWN:
        import_module(name).attach_of_calls(group)


class AsksRanks(Protocol):
    """Asks the ranks of a job what they wait for, and answers for this one."""

    def timed_out(self) -> None:
        """A call of this rank has taken too long: ask everybody."""

    def diagnosed(self) -> Any:
        """Return the finding, in a line."""

    def linger(self) -> None:
        """Wait until what was asked has been answered."""

    def close(self) -> None:
        """Answer no more."""


def inquiries() -> Any:
    """The module that makes and finds those who ask the ranks."""
    return import_module(INQUIRIES)

"""Appointments: something that all ranks of a group do at the same call, which they have agreed on
before any of them makes it.

Member 0 names the call, some calls ahead, in the group's store. Every other member answers on its
own thread: yes, if it has not come to that call yet. When all have said yes, member 0 writes that
it is kept, else, or where one does not answer in time, that it is off. A member that comes to the
call reads that one record, and waits for it if it has to. So none can miss it, none guesses, calls
exchange nothing beyond what they do anyway, and when a rank dies in between nothing changes for the
others.

Prior art, and why it is not done so here: Horovod's autotuner broadcasts new parameters with a
collective of its own in every cycle; ByteScheduler announces a change at a future step, and a rank
that hears of it too late never follows.

Where calls run, in the group's order, :meth:`Appointments.pass_by` and
:meth:`Appointments.next_call` count; on another thread :meth:`Appointments.turn` talks to the
store, and never waits in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from commlayer.agree.messages import ControlMessage
from commlayer.peer_words import read_words
from commlayer.profiles.errors import InternalError

__all__ = ["PATIENCE_S", "Appointment", "AppointmentStore", "Appointments"]

PATIENCE_S = 5.0
"""How long member 0 waits for answers: threads answer, whatever the calls do, so more than this
means that one is stopped."""
_POLL_S = 0.002
_KEPT, _OFF = b"kept", b"off"


class AppointmentStore(Protocol):
    """The store of a group, as appointments use it; torch's stores are such."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class Appointment(ControlMessage, frozen=True):
    """An appointment. ``call``: before which call of the group, counted from 1 as they run;
    ``purpose``, ``value``: what for."""

    number: int
    call: int
    purpose: str
    value: float


class _Open:
    """An appointment that is neither kept nor off, and what was decided, once that is known
    here."""

    def __init__(self, appointment: Appointment) -> None:
        self.appointment = appointment
        self.decision: bytes | None = None


class Appointments:
    """The appointments of one group as one of its ``size`` members knows them; ``member`` 0 makes
    them in ``store()``.

    ``refuse(waited_s)`` raises what a wait for the decision means that has gone on for
    ``waited_s``, or returns where it may go on.
    """

    def __init__(
        self, store: Callable[[], AppointmentStore], member: int, size: int, refuse: Callable[[float], None]
    ) -> None:
        self._stored, self._member, self._size, self._refuse = store, member, size, refuse
        self._lock = threading.Lock()
        self.calls = 0
        """How many calls have begun to run."""
        self._open: _Open | None = None
        self._last = 0
        self._until = 0.0
        self.lost: Exception | None = None
        """Why :meth:`turn` is not called any more: who waits for a decision must hear of it."""

    @property
    def is_open(self) -> bool:
        """Whether there is an appointment that has not been called off, and whose purpose has not
        been fulfilled."""
        return self._open is not None

    # Where calls run

    def pass_by(self) -> bool:
        """Count the call that runs now, and return True; False, with nothing counted, where
        :meth:`next_call` has to say what comes before it."""
        with self._lock:
            due = self._open
            if due is not None and self.calls + 1 >= due.appointment.call:
                return False
            self.calls += 1
            return True

    def next_call(self) -> Appointment | None:
        """Count the call that runs now; the appointment to be kept before it, if there is one:
        :meth:`end` it then.

        Talks to nobody: the other thread does. Raises what ``refuse`` raises, and RuntimeError
        where the store is lost.
        """
        with self._lock:
            self.calls += 1
            due = self._open
            if due is None or self.calls < due.appointment.call:
                return None
        begin = time.monotonic()
        while (decision := due.decision) is None:
            if self.lost is not None:
                raise RuntimeError(f"the store of the group does not answer any more: {self.lost}") from self.lost
            self._refuse(time.monotonic() - begin)
            time.sleep(_POLL_S)
        if decision == _KEPT:
            return due.appointment
        self._close(due)
        return None

    def end(self) -> None:
        """Note that the purpose of the appointment which is kept now has been fulfilled."""
        if self._open is not None:
            self._close(self._open)

    # On the thread that talks to the store

    def make(self, purpose: str, value: float, ahead: int, patience_s: float = PATIENCE_S) -> Appointment:
        """Name the call that is ``ahead`` calls from now, and wait ``patience_s`` for answers: for
        member 0.

        Raises InternalError while an appointment is open: it would never be decided on.
        """
        self._until = time.monotonic() + patience_s
        with self._lock:
            if self._open is not None:
                raise InternalError(f"an appointment for call {self._open.appointment.call} is still open")
            self._last += 1
            made = Appointment(self._last, self.calls + max(1, ahead), purpose, value)
            self._open = _Open(made)
        self._stored().set(f"appointment/{made.number}", msgspec.msgpack.encode(made))
        return made

    def turn(self) -> None:
        """Do what there is to do now: look for an appointment and answer, count answers and decide,
        hear of the decision.

        Raises RuntimeError where the store is lost, DisagreementError for what cannot be read
        there.
        """
        due = self._open
        if due is None:
            if self._member:
                self._look()
            return
        if due.decision is None and self._member == 0:
            number = due.appointment.number
            if self._stored().add(f"yes/{number}", 0) == self._size - 1:
                due.decision = _KEPT
            elif time.monotonic() > self._until or self._stored().check([f"no/{number}"]):
                due.decision = _OFF
            if due.decision is not None:
                self._stored().set(f"decision/{number}", due.decision)
        elif due.decision is None and self._stored().check([key := f"decision/{due.appointment.number}"]):
            due.decision = bytes(self._stored().get(key))
        if due.decision == _OFF:
            self._close(due)

    def _look(self) -> None:
        key = f"appointment/{self._last + 1}"
        if not self._stored().check([key]):
            return
        appointment: Appointment = read_words(self._stored().get(key), Appointment, "rank 0")
        with self._lock:
            self._last = appointment.number
            is_early = self.calls < appointment.call
            if is_early:
                self._open = _Open(appointment)
        self._stored().add(f"{'yes' if is_early else 'no'}/{appointment.number}", 1)

    def _close(self, found: _Open) -> None:
        with self._lock:
            if self._open is found:
                self._open = None

"""Watching the audits of a process's groups while its job runs, and having all ranks re-plan at the
same call.

One sleeping thread a process, woken by calls. Every rank publishes how long its latest calls took
(:mod:`commlayer.auditing.told_times`); the first rank of each group compares them, and decides what
the ranks are to do (:mod:`commlayer.auditing.watch_lead`). For that they make an appointment
(:mod:`commlayer.agree.appointments`): they time their links at it, and go on with plans for what
these can do (:mod:`commlayer.auditing.link_checks`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from commlayer.agree.appointments import Appointments
from commlayer.auditing.audited_plans import AuditedChoices, AuditedPlans
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.link_checks import LinkChecks
from commlayer.auditing.told_times import ToldTimes
from commlayer.auditing.watch_lead import WatchLead
from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call
from commlayer.failures.board import own_client
from commlayer.forked_child import in_forked_child
from commlayer.profiles.printable import say
from commlayer.scheduler.experience.link_rates import LinkTimes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["GroupWatch"]

_IDLE_S, _TURN_S, _STORE_PER_S = 30.0, 0.25, 1024
"""A group is looked at this often while it makes calls, and until it has made none for so long;
less often where all ranks of the job, with all their groups, would ask the store more than so many
times a second."""
_SHARE, _LONGEST_TURN_S = 0.0015, 4.0
"""The part of a core that the watch of all groups may take, by its thread's clock: they are looked
at less often where a look costs more, but no less often than this; and as often as ever while an
appointment is open, for which calls may wait. Waking up, handing the interpreter over and the
store's own work cost twice as much again: all of it stays below half a percent."""
_OPEN_TURNS = 4
"""So many times as often a group is looked at while an appointment is open: what ranks wait for at
its call."""
_END_S = 2.0
"""How long the end of the program waits for the thread: for one question to the store."""


def _at_once(work: Callable[[], None]) -> None:
    work()


class GroupWatch(Instrument):
    """Watches one group, on one of its ranks: its calls on the CPU, or those on a device.

    ``plan_anew`` has the group plan by other choices, from the next call on. ``time_links`` times
    its links by messages of so many bytes, with all ranks.

    Attributes:
        appointments: that the group's ranks make. Where calls run they are kept; the watch's thread
            talks about them.
        checks: the work of the ranks at an appointment.
        lead: the part of the group's first rank; None on others.
        in_turn: runs what the ranks do together on the host: for calls on a device, in the turn of
            the group's calls there.
    """

    lets_pass = True

    def __init__(
        self,
        planned: AuditedPlans,
        ledger: Ledger,
        store: Store,
        plan_anew: Callable[[Any], None],
        time_links: Callable[[int], LinkTimes],
    ) -> None:
        self._planned = planned
        self._own_store = partial(own_client, store)  # another thread that waits in the group's would hold up decisions
        self._store: Any = None
        self.in_turn: Callable[[Callable[[], None]], None] = _at_once

        def use_choices(choices: AuditedChoices) -> None:
            plan_anew(choices)
            ledger.use_choices(choices)

        size = len(planned.global_ranks)
        self.appointments = Appointments(self._asked, planned.rank, size, self._refuse)
        self.checks = LinkChecks(planned, time_links, use_choices)
        self.times = ToldTimes(self._asked, ledger, planned.rank, size)
        is_first = planned.rank == 0
        self.lead = WatchLead(planned, ledger, self.appointments, self.times, self.checks) if is_first else None
        self._latest_s = self._next_s = 0.0  # when there were calls, and when to look again
        self._rest_s = self._cost_s = 0.0  # between looks, by what they cost
        self._is_closed = False
        me = weakref.ref(self)  # ledgers are kept for who reads them later, groups are not

        def heard() -> None:
            watch = me()
            # Sooner the watch's thread would only look at the clock, and take the interpreter's
            # lock for it.
            if watch is not None and time.monotonic() >= watch._next_s:
                _watching.wake()

        ledger.heard = heard
        _watching.add(self)

    # Where calls run

    def began(self, call: Call) -> None:
        """Count the call that runs now, and keep the appointment before it, if there is one.

        Raises PeerError and CollectiveTimeoutError where the decision on one does not come, as a
        call does.
        """
        del call
        if self.appointments.pass_by():
            return
        began = time.monotonic()
        try:
            appointment = self.appointments.next_call()
        except RuntimeError as error:
            waited_s, planned = time.monotonic() - began, self._planned
            raise planned.explain(error, "re-planning", self.appointments.calls, waited_s, planned.timeout_s) from error
        if appointment is not None:
            self.in_turn(partial(self.checks.keep, appointment.purpose, appointment.value))
            self.appointments.end()
            _watching.wake()

    def _refuse(self, waited_s: float) -> None:
        planned = self._planned
        _watching.wake()
        if planned.board.is_broken:
            raise RuntimeError("the group is broken")
        if waited_s > planned.timeout_s:
            first = planned.global_ranks[0]
            raise RuntimeError(f"Timed out waiting for rank {first} to say whether plans change: look at its log")

    def ending(self) -> None:
        """Look at the group no more."""
        self._is_closed = True
        _watching.discard(self)

    # On the thread of the watch

    def turn(self, now_s: float) -> bool:
        """Do what there is to do now. Returns whether to look at the group again soon though nobody
        wakes the thread."""
        known = self._planned.board.detector.knowledge
        is_ending = bool(known.left or known.gone) and not self.appointments.is_open
        if self._is_closed or is_ending:
            return False  # a job that ends, or has lost a rank, changes no plans; and its store may be gone
        if now_s < self._next_s:
            return True
        # All groups of the job's ranks together ask the store no more often than it bears.
        turn_s = max(_TURN_S, len(_watching) * len(self._planned.board.detector.ranks) / _STORE_PER_S)
        self._next_s, begin_s = now_s + turn_s / 2, time.thread_time()
        try:
            self.appointments.turn()
            if self.times.tell():
                self._latest_s = now_s
            if self.lead is not None:
                self.lead.turn(now_s, turn_s, self._rest_s)
        except Exception as error:  # noqa: BLE001  the store is lost, or holds what is not ours: calls go on as planned
            self._give_up(error)
            return False
        self._rest(now_s, time.thread_time() - begin_s)
        if self.appointments.is_open:  # whoever comes to the call waits for what becomes of it
            self._next_s = now_s + turn_s / (2 * _OPEN_TURNS)
        return self.appointments.is_open or now_s - self._latest_s < _IDLE_S

    def _rest(self, now_s: float, cost_s: float) -> None:
        """Look again no sooner than what this look cost allows; connecting to the store, which is
        done once, does not count."""
        usual_s, self._cost_s = min(cost_s, self._cost_s), cost_s
        self._rest_s = min(usual_s * len(_watching) / _SHARE, _LONGEST_TURN_S)
        if not self.appointments.is_open:
            self._next_s = max(self._next_s, now_s + self._rest_s)

    def _asked(self) -> Any:
        """The group's store, asked by nobody else in this process."""
        if self._store is None:
            self._store = self._own_store()
        return self._store

    def _give_up(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.appointments.lost = error
        if not self._planned.board.has_leaver:
            text = f"group {self._planned.name} is not watched any more, and keeps its plans: {error}"
            say(text)


class _Watching:
    """The watches of this process, and their thread, which is there once a group has made calls."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, watch: GroupWatch) -> None:
        with self._lock:
            self._watches.add(watch)

    def discard(self, watch: GroupWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def wake(self) -> None:
        """Have the thread look at all groups now."""
        if self._thread is None:
            self._start()
        self._bell.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_over:
                atexit.register(self.end)
                self._thread = threading.Thread(target=self._work, name="commlayer-watch", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is ending
                    self._thread.start()

    def end(self) -> None:
        """End the thread, before the interpreter does: one that came back from C++ then would end
        the process by SIGABRT."""
        self._is_over = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _work(self) -> None:
        pause_s: float | None = _TURN_S
        while not self._is_over:
            self._bell.wait(pause_s)
            self._bell.clear()
            with self._lock:
                watches = list(self._watches)
            now_s = time.monotonic()
            busy = [watch for watch in watches if watch.turn(now_s)]
            pause_s = (
                _TURN_S / (_OPEN_TURNS if any(watch.appointments.is_open for watch in busy) else 1) if busy else None
            )
            del watches, busy


_watching = _Watching()


@in_forked_child
def _in_child() -> None:
    """A forked child has no thread, and no group of its own yet."""
    global _watching
    _watching = _Watching()

"""How groups end without taking the program with them: where inner Gloo groups are freed, and what
the program's end does.

Freeing a Gloo group joins its threads, and one that has just finished a call may be waiting for
Python's interpreter lock, to let go of the call's tensors. torch gives the lock away while it frees
what Python alone refers to; not so where C++ lets go last. A DDP model that is freed right after
``destroy_process_group`` frees the group's registered backend so, and then neither thread goes on:
a hang of torch's own, seen on plain Gloo. So :func:`bury` frees at once what Python alone refers
to, on a thread of its own, because a call may be under way. The registered backend it lets go of
too where that has run no calls, and so has nothing to wait for the lock with; else
:func:`bury_when_idle` holds it for a moment more.

At the program's end, a thread that comes back from C++ and asks for the lock is ended by Python
(before 3.14) in the middle of C++ frames that do not allow it: "terminate called without an active
exception". So calls that nobody waited for are ended first (:func:`end_with_program`), and then the
process's other threads are given the lock until all of them sleep.

Programs end by ``os._exit(0)`` too, as every child does that ``multiprocessing`` forks, and then
nothing of what is registered for the program's end is called. The others would take such a rank for
one that died, and break calls of which it has done its part. So once there is a group,
``os._exit(0)`` first says that the rank leaves, and ends what is under way. With any other status,
and by a signal, a rank has died.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from commlayer.failures.detector import leave_all  # registered at exit before this module's end, and so called after it
from commlayer.failures.waits import join_abandoned
from commlayer.forked_child import in_forked_child
from commlayer.profiles.errors import BLAMING

__all__ = ["Ends", "bury", "bury_when_idle", "end_with_program", "rest"]

_MOST_BURIALS = 8
_BURIAL_S = 1.0
"""For how long a program that ends groups faster than they can be freed waits for an earlier one.
Freeing takes up to 10 ms for each peer, until Gloo's I/O thread looks up; longer where a call is
under way."""
_IDLE_S = 0.5
"""After which a thread that had finished its last call has let go of the call's tensors."""
_HANDOVERS = 10
_PATIENCE_S = 10.0
"""The time that a call under way at the program's end may still take: its peers may be late."""
_CRASH_PATIENCE_S = 1.0
"""The time that such a call may take after an exception that nobody caught: the peers are to see soon that this rank is
gone."""
_ABANDONED_PATIENCE_S = 1.0
"""The time that is left for waits that were let go of: for what they wait nobody knows, but where a rank died
they end at once."""
_IN_HASTE_S = 3.0
"""How long ``os._exit(0)`` may take: whatever holds it up, the process ends."""
_REST_S = 0.5
_NAP_S = 0.005
_NAPS = 2
_BLIND_REST_S = 0.05
_TASKS = Path("/proc/self/task")

_burials: deque[threading.Thread] = deque()
_has_buried = False


class Ends(Protocol):
    """Something with calls under way on threads of its own."""

    def end(self, patience_s: float) -> None:
        """Let what is under way end, within ``patience_s`` seconds in good order, then by breaking
        it; 0: break it at once, also where another thread waits for it. Raises nothing."""


_watched: weakref.WeakSet[Ends] = weakref.WeakSet()
_exit = os._exit


def end_with_program(thing: Ends) -> None:
    """Have ``thing.end`` called when the program ends, if ``thing`` still is there."""
    _watched.add(thing)
    os._exit = _leave_and_exit


def _leave_and_exit(status: int) -> NoReturn:
    """End the process without a clean-up, as Python's own ``os._exit`` does; with status 0 tell the
    other ranks before."""

    def leave() -> None:
        for thing in list(_watched):
            thing.end(0.0)
        leave_all("its program has ended", is_failure=False, is_in_haste=True)

    if status == 0 and _watched:
        # On a thread of its own: this one may hold a lock, or have been stopped by a signal's
        # handler in the middle of a call.
        thread = threading.Thread(target=leave, name="commlayer-leave", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as may be, or the interpreter is ending
            thread.start()
            thread.join(_IN_HASTE_S)
    _exit(status)


def bury(dead: list[Any]) -> None:
    """Let go of what is in ``dead``, inner groups, now and beside the program: their threads,
    connections, memory.

    The list is emptied; the caller must not refer to them any more. Some burials may be under way
    at once; a further one waits for the first of them, for a second at most.
    """
    with contextlib.suppress(IndexError):  # another thread has been quicker
        while len(_burials) >= _MOST_BURIALS or not _burials[0].is_alive():
            _burials.popleft().join(_BURIAL_S)
    thread = _started(dead.clear)
    if thread is not None:
        _burials.append(thread)


def bury_when_idle(dead: list[Any]) -> None:
    """Bury, in a moment and without waiting for it, groups to which C++ refers too, and whose calls
    have ended."""

    def free() -> None:
        for _ in range(_HANDOVERS):  # others who wait for the lock have it in between
            time.sleep(_IDLE_S / _HANDOVERS)
        dead.clear()

    _started(free)


def _started(free: Callable[[], None]) -> threading.Thread | None:
    """A daemon thread that runs ``free``; None where there is none to be had, and this one has run
    it."""
    global _has_buried
    _has_buried = True
    thread = threading.Thread(target=free, name="commlayer end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # as many threads as may be, or the interpreter is ending
        free()
        return None
    return thread


def rest(patience_s: float = _REST_S) -> None:
    """Give the interpreter lock away until all other threads of this process sleep, ``patience_s``
    seconds at most.

    Twice in a row: a thread that waits for the lock sleeps too, but has it once we have slept.
    """
    if not _TASKS.is_dir():
        time.sleep(_BLIND_REST_S)
        return
    until = time.monotonic() + patience_s
    me, quiet = str(threading.get_native_id()), 0
    while quiet < _NAPS and time.monotonic() < until:
        time.sleep(_NAP_S)
        states = set()  # of the other threads, as in proc(5)
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if task.name != me:
                    stat = (task / "stat").read_text(encoding="utf-8", errors="replace")
                    states.add(stat.rpartition(")")[2].split()[0])
        quiet = 0 if "R" in states else quiet + 1


@atexit.register
def _end_all() -> None:
    things = list(_watched)
    crash = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)  # of a prompt it is any earlier one
    has_crashed = crash is not None
    if crash is not None:  # the others need not wait for what is under way here
        with contextlib.suppress(Exception):  # an exception whose text cannot be had
            why = f"left with {crash.__name__}: {getattr(sys, 'last_value', None)}"
            leave_all(why, is_failure=True, is_consequence=issubclass(crash, BLAMING))
    until = time.monotonic() + (_CRASH_PATIENCE_S if has_crashed else _PATIENCE_S)
    for thing in things:
        thing.end(max(0.0, until - time.monotonic()))
    for thread in list(_burials):
        thread.join(max(0.0, until - time.monotonic()))
    if join_abandoned(_ABANDONED_PATIENCE_S) or things or _has_buried:
        rest()


@in_forked_child
def _forget_watched() -> None:
    """Let the parent end what is under way there."""
    global _watched, _burials, _has_buried
    _watched, _burials, _has_buried = weakref.WeakSet(), deque(), False

"""How groups end without taking the program with them: where inner Gloo groups wait to be freed, and what the program's end does.

Freeing a Gloo group joins its threads while holding Python's interpreter lock; a thread that has just finished a call may be
waiting for that lock, to let go of the call's tensors. Then neither goes on: a hang of torch's own, seen on plain Gloo when a
DDP model is freed right after ``destroy_process_group``. Some seconds later those threads are idle, so :func:`bury` waits.

At the program's end, a thread that comes back from C++ and asks for the lock is ended by Python (before 3.14) in the middle
of C++ frames that do not allow it: "terminate called without an active exception". So calls that nobody waited for are ended
first (:func:`end_with_program`), and then the process's other threads are given the lock until all of them sleep.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from commlayer.detector import leave_all  # registered at exit before this module's end, and so called after it

__all__ = ["Ends", "bury", "end_with_program", "rest"]

_GRAVE_S = 5.0
_PATIENCE_S = 10.0
"""What a call that is under way at the program's end may still take: its peers may be late."""
_CRASH_PATIENCE_S = 1.0
"""The same after an exception that nobody caught: the peers are to see soon that this rank is gone."""
_REST_S = 0.5
_NAP_S = 0.005
_NAPS = 2
_BLIND_REST_S = 0.05
_TASKS = Path("/proc/self/task")

_graves: deque[tuple[float, Any]] = deque()


class Ends(Protocol):
    """Something with calls under way on threads of its own."""

    def end(self, patience_s: float) -> None:
        """Let what is under way end, within ``patience_s`` seconds in good order, then by breaking it. Raises nothing."""


_watched: weakref.WeakSet[Ends] = weakref.WeakSet()


def end_with_program(thing: Ends) -> None:
    """Have ``thing.end`` called when the program ends, if ``thing`` still is there."""
    _watched.add(thing)


def bury(gloo: Any) -> None:
    """Keep ``gloo`` alive for some seconds more, until the next call of this function after them or the program's end."""
    now = time.monotonic()
    while _graves and now - _graves[0][0] > _GRAVE_S:
        _graves.popleft()
    _graves.append((now, gloo))


def rest(patience_s: float = _REST_S) -> None:
    """Give the interpreter lock away until all other threads of this process sleep, ``patience_s`` seconds at most.

    Twice in a row: a thread that waits for the lock sleeps too, but has it once we have slept.
    """
    if not _TASKS.is_dir():
        time.sleep(_BLIND_REST_S)
        return
    until = time.monotonic() + patience_s
    quiet = 0
    while quiet < _NAPS and time.monotonic() < until:
        time.sleep(_NAP_S)
        quiet = 0 if any(state == "R" for state in _other_threads()) else quiet + 1


def _other_threads() -> Iterator[str]:
    """The states of the other threads, as in proc(5)."""
    me = str(os.getpid())  # this runs on the main thread
    for task in _TASKS.iterdir():
        if task.name != me:
            try:
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has ended


@atexit.register
def _end_all() -> None:
    things = list(_watched)
    crash = getattr(sys, "last_type", None)
    has_crashed = crash is not None
    if crash is not None:  # the others need not wait for what is under way here
        leave_all(f"left with {crash.__name__}: {getattr(sys, 'last_value', None)}", is_failure=True)
    if not things and not _graves:
        return
    until = time.monotonic() + (_CRASH_PATIENCE_S if has_crashed else _PATIENCE_S)
    for thing in things:
        thing.end(max(0.0, until - time.monotonic()))
    rest()

"""The calls of this process that are under way, of all its groups: which calls run beside those of other groups.

Such a call shares its links and this rank's cores with them, which its promise knows nothing of: a small one behind a large one
takes many times what was promised, and its plan is not to blame. Groups of other ranks on the same links are not seen from here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Protocol

from commlayer.forked_child import in_forked_child

__all__ = [
    "CallsUnderWay",
    "calls_under_way",
    "never",
    "settle_calls",
    "settle_when_asked",
    "watch_calls_under_way",
]


class Settles(Protocol):
    """Runs calls on a device, of which it takes note once they have run."""

    def settle(self) -> None: ...


_settling: weakref.WeakSet[Settles] = weakref.WeakSet()


def settle_when_asked(calls: Settles) -> None:
    """Have :func:`settle_calls` settle these calls too."""
    _settling.add(calls)


def settle_calls() -> None:
    """Take note of the calls on devices that have run by now: before somebody reads what calls took."""
    for each in list(_settling):
        with contextlib.suppress(RuntimeError):  # a device's error, which whoever waits for its work is told
            each.settle()


def never() -> bool:
    """Say that a call has not ended: whoever began it notes its end."""
    return False


class CallsUnderWay:
    """The calls under way in a process. Groups are told apart by numbers of their own, so that none is kept alive.

    What is kept is added and looked up in single steps, so that calls on several threads need no lock; a call that begins or ends
    in that very moment may be missed.
    """

    __slots__ = ("_ended", "_other", "_running", "is_watched")

    def __init__(self) -> None:
        self.is_watched = False
        """True once somebody asks what runs beside: until then those who run calls note none."""
        self._running: dict[object, tuple[int, Callable[[], bool]]] = {}
        self._ended = (0, 0)
        """The group whose call ended last, and when, ns; before it the last of another group's."""
        self._other = 0

    def begin(self, call: object, group: int, is_over: Callable[[], bool] = never) -> None:
        """Note that ``call`` of ``group`` has begun. ``is_over``: whether it has ended, where perhaps nobody notes that."""
        self._running[call] = group, is_over

    def end(self, call: object, ended_ns: int) -> None:
        """Note that a call has ended; harmless when repeated."""
        running = self._running.pop(call, None)
        if running is None:
            return
        last, at_ns = self._ended
        if last != running[0]:
            self._other = at_ns
        self._ended = running[0], ended_ns

    def is_beside(self, group: int, began_ns: int) -> bool:
        """Whether a call of ``group`` that began then, and ends now, ran beside one of another group."""
        last, at_ns = self._ended
        if (at_ns if last != group else self._other) > began_ns:
            return True
        if not self._running:
            return False
        is_beside = False
        for call, (other, is_over) in list(self._running.items()):
            if is_over():
                self._running.pop(call, None)
            elif other != group:
                is_beside = True
        return is_beside


_under_way = CallsUnderWay()


def calls_under_way() -> CallsUnderWay:
    """The calls of this process."""
    return _under_way


def watch_calls_under_way() -> CallsUnderWay:
    """The calls of this process, which are noted from now on."""
    _under_way.is_watched = True
    return _under_way


@in_forked_child
def _in_child() -> None:
    """Begin anew in a forked child, whose parent's calls never end here."""
    _under_way.__init__()  # type: ignore[misc]

"""The calls of this process that are under way, of all its groups: which calls run beside those of other groups.

Such a call shares its links and this rank's cores with them, which its promise knows nothing of: a small one behind a large one
takes many times what was promised, and its plan is not to blame. Groups of other ranks on the same links are not seen from here.
"""

from __future__ import annotations

import os

__all__ = ["Traffic", "traffic"]


class Traffic:
    """The calls under way in a process. Groups are told apart by numbers of their own, so that none is kept alive.

    What is kept is added and looked up in single steps, so that calls on several threads need no lock; a call that begins or ends
    in that very moment may be missed.
    """

    __slots__ = ("_ended", "_other", "_running")

    def __init__(self) -> None:
        self._running: dict[object, int] = {}
        self._ended = (0, 0)
        """The group whose call ended last, and when, ns; before it the last of another group's."""
        self._other = 0

    def begin(self, call: object, group: int) -> None:
        """Note that ``call`` of ``group`` has begun."""
        self._running[call] = group

    def end(self, call: object, ended_ns: int) -> None:
        """Note that a call has ended; harmless when repeated."""
        group = self._running.pop(call, None)
        if group is None:
            return
        last, at_ns = self._ended
        if last != group:
            self._other = at_ns
        self._ended = group, ended_ns

    def is_beside(self, group: int, began_ns: int) -> bool:
        """Whether a call of ``group`` that began then, and ends now, ran beside one of another group."""
        last, at_ns = self._ended
        if (at_ns if last != group else self._other) > began_ns:
            return True
        return any(other != group for other in list(self._running.values()))


_traffic = Traffic()


def traffic() -> Traffic:
    """The traffic of this process."""
    return _traffic


def _in_child() -> None:
    """Begin anew in a forked child, whose parent's calls never end here."""
    _traffic.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_in_child)

"""A moment between SIGABRT and this process's end by it, in which a rank tells what it knows of its
calls.

Gloo ends a process that is sent more than its call expects: its thread throws, and C++ aborts. The
other ranks then see a death, and what this rank called is lost, though just that would say which
calls differ.

The handler is a function of Python's that the system calls on the thread that aborts; that thread
ends the process when it returns.

A process that is broken may never come so far: an alarm of the system's ends it, once the handler
has begun. It cannot begin while another thread holds Python's lock for ever; such a process hangs,
as it would in any other call. What was there before (the system's default, ``faulthandler``, a
handler in C) is put back, and ends the process as it would have. Where the program has a handler of
its own in Python, nothing is done.

Rejected: ``faulthandler``, as for SIGTERM (:mod:`commlayer.failures.last_words`): it registers no
signals that end a process. And a file that is written at each call, which would cost every call
more than its place in the ring.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import signal
import weakref
from typing import Any, Protocol

from commlayer.forked_child import in_forked_child

__all__ = ["AbortSpeaker", "SignalAction", "speak_before_abort"]

_LONGEST_S = 8
"""After so long the process ends, whatever the speakers do."""
_DEFAULT = ctypes.c_void_p(0)
_ACTION_BYTES = 512
"""More than the system's struct sigaction has."""


class SignalAction:
    """The action of the system for the signal ``number``, as it is when this is made, read and put
    back: Python does not know of handlers in C. Raises OSError where it cannot be read."""

    def __init__(self, number: int) -> None:
        self._number, self._action = int(number), ctypes.create_string_buffer(_ACTION_BYTES)
        if _system_library().sigaction(self._number, None, self._action) != 0:
            raise OSError(f"the action of signal {self._number} cannot be read")

    @property
    def handler(self) -> bytes:
        """The address of the handler: the first field; of others parts are left as they were."""
        return self._action.raw[: ctypes.sizeof(ctypes.c_void_p)]

    def put_back(self) -> None:
        """Have the system do so again."""
        _system_library().sigaction(self._number, self._action, None)


class AbortSpeaker(Protocol):
    """Something that has to say something before the process aborts."""

    def aborting(self) -> None:
        """Say it, within some seconds. Called at most once, on the thread that aborts."""


_speakers: weakref.WeakSet[AbortSpeaker] = weakref.WeakSet()
_alarm: list[Any] = []
"""The system's ``alarm``, looked up ahead of time."""
_before: SignalAction | None = None
"""The action that ours has replaced, while ours is there."""


def speak_before_abort(speaker: AbortSpeaker) -> None:
    """Have ``speaker.aborting`` called when this process aborts, if ``speaker`` is still there.
    Raises nothing."""
    global _before
    _speakers.add(speaker)
    if _before is not None or signal.getsignal(signal.SIGABRT) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError):
        before, system = SignalAction(signal.SIGABRT), _system_library()
        _alarm.append(system.alarm)
        system.signal(int(signal.SIGABRT), _handler)
        _before = before


def _on_abort(number: int) -> None:
    _alarm[0](_LONGEST_S)  # before all else: what comes next may wait for a lock of the allocator's or the loader's
    system = _system_library()
    system.signal(int(signal.SIGALRM), _DEFAULT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    try:
        for speaker in list(_speakers):
            with contextlib.suppress(Exception):  # the end comes, whatever they say
                speaker.aborting()
    finally:
        _give_back()
        getattr(system, "raise")(number)  # comes when this handler returns, to whatever was there before


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_abort)


@atexit.register
def _give_back() -> None:
    """Put back what was there: where the interpreter ends, no thread may enter it any more."""
    global _before
    before, _before = _before, None
    if before is not None:
        before.put_back()


def _system_library() -> Any:
    """The functions of the system's library: Python's own ``signal`` would put handlers of its own
    in their place."""
    system: Any = ctypes.CDLL(None)
    system.signal.restype = ctypes.c_void_p
    system.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return system


@in_forked_child
def _forget_speakers() -> None:
    """A forked child has no calls, and none of the threads that would tell of them."""
    _speakers.clear()
    _give_back()

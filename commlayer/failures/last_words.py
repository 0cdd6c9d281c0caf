"""A moment between SIGTERM and this process's end by it, in which a rank says who has failed, and
that it leaves.

Launchers send SIGTERM to the ranks of a job as soon as one of them has ended, often before the
others have heard of it. The moment is short, and the process then ends by the signal as it would
have. Only a process that leaves SIGTERM to the system is given it: where the program has a handler,
or ignores the signal, or sets a handler later, that counts, and nothing is done here.

Rejected: a handler in Python. It would run on the main thread only, which is in C++ while it waits
for a call; and trainers look whether there is one before they set theirs. ``faulthandler`` has one
in C that runs wherever the signal comes, writes to a file (here a pipe), and that Python's own
table of handlers does not show. What it writes is not read, only that it does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import threading
import weakref
from typing import Protocol

from commlayer.forked_child import in_forked_child

__all__ = ["Speaker", "say_nothing_more", "speak_before_sigterm"]


class Speaker(Protocol):
    """Something that has to say something before the process ends by a signal."""

    def last_words(self) -> None:
        """Say it, within a second. Called at most once, on a thread of this module's."""


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()
_lock = threading.RLock()  # a speaker may be freed, and say so, while this thread is in here
_ends: tuple[int, int] | None = None
"""The pipe's two ends, while there is one: that which is read, and that which is written."""
_reader: threading.Thread | None = None
"""The thread that reads it."""
_PARTING_S = 1.0
_OVER = b"\n"
"""Written where nobody is left to speak; what the signal's handler writes begins with another
letter."""


def speak_before_sigterm(speaker: Speaker) -> None:
    """Have ``speaker.last_words`` called when SIGTERM comes, if ``speaker`` is still there. Raises
    nothing."""
    global _ends, _reader
    with _lock, contextlib.suppress(OSError, RuntimeError, AttributeError):  # no descriptors, threads, or such signals
        _speakers.add(speaker)
        if _ends is not None or not _is_default():
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)  # the signal's handler is never to wait
        try:
            _reader = threading.Thread(target=_await, args=(reader, writer), name="commlayer-sigterm", daemon=True)
            _reader.start()
        except RuntimeError:
            os.close(reader)
            os.close(writer)
            raise
        _ends = reader, writer
        faulthandler.register(signal.SIGTERM, writer, all_threads=False, chain=False)


def say_nothing_more(speaker: Speaker) -> None:
    """The opposite of :func:`speak_before_sigterm`. Harmless when repeated."""
    global _ends
    with _lock:
        _speakers.discard(speaker)
        if _ends is not None and not _speakers:
            _step_aside()
            reader, writer, _ends = _reader, _ends[1], None
            os.write(writer, _OVER)  # its reader then lets go of both ends
            if reader is not None and reader is not threading.current_thread():
                reader.join(_PARTING_S)


def _is_default() -> bool:
    """Whether Python knows of no handler: one of this module's is not in its table."""
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _await(reader: int, writer: int) -> None:
    if os.read(reader, len(_OVER)) == _OVER:
        os.close(reader)
        os.close(writer)
        return
    try:
        for speaker in list(_speakers):
            with contextlib.suppress(Exception):  # the end comes, whatever they say
                speaker.last_words()
    finally:
        _step_aside()
        os.kill(os.getpid(), signal.SIGTERM)


@atexit.register
def _step_aside() -> None:
    """Leave SIGTERM to the system again: where the interpreter ends, no thread would answer it."""
    if _is_default():
        faulthandler.unregister(signal.SIGTERM)


@in_forked_child
def _forget_speakers() -> None:
    """A forked child has no thread that would end it, and its parent's pipe."""
    global _ends, _lock
    _step_aside()
    _lock = threading.RLock()
    _speakers.clear()
    if _ends is not None:
        for end in _ends:
            with contextlib.suppress(OSError):
                os.close(end)
    _ends = None

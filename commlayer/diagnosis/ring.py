"""The ring of calls: what this rank called last on every group, from where, and what its threads wait for.

It is on in every job, so a call pays for it: one tuple of what is at hand anyway. Nothing is turned into text, no tensor is kept
alive, and a call site is a code object and an offset into it, of which :mod:`commlayer.diagnosis.snapshot` makes a line of a file
once somebody asks. The calls of a group run in the order in which they are made, so that two counters a group say which of them
are done; a call that is issued and not done has been started if it is the next one.

A wait that fails stays where it is until its thread calls or waits again: who asks a moment later is to see what it waited for.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from sys import _getframe
from threading import get_ident
from time import perf_counter_ns as now
from types import CodeType, FrameType
from typing import Any, TypeVar

from commlayer.diagnosis.call_logs import MESSAGES

__all__ = [
    "ANY",
    "Entry",
    "Silent",
    "Track",
    "Waiting",
    "copied",
    "is_of_program",
    "main_state",
    "open_track",
    "opened_tracks",
    "recorded_calls",
    "ring_size",
    "waiting_threads",
]

ANY = -1
"""The peer of a receive from whoever sends first."""

Entry = tuple["Track", int, str, Any, int, int, Any, Any, CodeType, int, int, int]
"""A call: its group, number, kind, dtype, bytes sent and received (−1: no two ranks need have them alike), whether it returns
before its end (of a message its peer and tag), splits, call site (code, offset), thread, and when it was issued, ns."""


Waiting = tuple["Track", str, int, int, int, CodeType, int, int]
"""A thread's wait for a call that was made earlier: its group, kind, number, peer and tag, the place of the wait (code, offset),
and since when, ns."""
_Each = TypeVar("_Each")
_NO_MESSAGES: OrderedDict[tuple[str, int, int], int] = OrderedDict()
_NONE_SETTLED: dict[tuple[str, int, int], int] = {}
_MOST_COUNTED = 8192
"""Peers and tags of messages that a group counts; a ring of more than half as many calls counts more."""


class _Inside(dict[str, bool]):
    """Whether a file, by its name, is part of Python, torch or this package: whose call it is says the first one that is not."""

    def __missing__(self, name: str) -> bool:
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        here, library = str(Path(__file__).parent.parent), str(Path(os.__file__).parent)
        homes = [here + os.sep] + ([str(Path(torch).parent) + os.sep] if torch else [])
        is_example = name.startswith(os.path.join(here, "integrations", "examples"))
        is_pythons = name.startswith((library + os.sep, "<frozen")) and "-packages" not in name
        is_pythons = is_pythons or os.path.basename(name) == "typing_extensions.py"  # it wraps what torch deprecates
        self[name] = found = is_pythons or (name.startswith(tuple(homes)) and not is_example)
        return found


_is_inside = _Inside()
_tracks: weakref.WeakSet[Track] = weakref.WeakSet()
_waiting: dict[int, Waiting] = {}
_calls: deque[Entry] = deque(maxlen=0)
_main_state: int | None = None
_usual: CodeType | None = None
"""The code whose caller is the program, in most calls."""


class Track:
    """One group's calls as this rank made them. ``key``: the group's alone in the job; ``ranks``: its members (global).

    ``numbering``: whose numbers ``ranks`` are: empty: the job's; else those of a group that stands alone, by its key.
    ``issued``: how many collectives the program has called; ``done``: how many have ended well; ``messages``: how many messages
    of a kind, with that peer (global) and tag, those that were used last at the end; ``settled``: how many of them somebody has
    waited for. Where a program takes ever new tags, the oldest are forgotten, once all of theirs are settled. ``ended``
    knows of calls that have ended and that nobody has waited for; it must not keep the group alive, which the ring outlives.
    ``is_broken``: whether the group has failed, so that no wait in it goes on.
    ``latest``: torch's options of the last call; to keep those of all calls costs as much as all else.
    ``stage``: what the last call is at, where it has stages: those that make a group.
    """

    __slots__ = (
        "__weakref__",
        "_append",
        "_room",
        "describe",
        "done",
        "ended",
        "is_broken",
        "issued",
        "key",
        "lane",
        "latest",
        "messages",
        "name",
        "numbering",
        "ranks",
        "settled",
        "stage",
    )

    def __init__(
        self,
        append: Callable[[Entry], None],
        key: str,
        name: str,
        ranks: Sequence[int],
        describe: Callable[[], str],
        lane: Callable[[], str],
        numbering: str = "",
    ) -> None:
        self._append, self.key, self.name, self.ranks = append, key, name, tuple(ranks)
        self.describe, self.lane, self.numbering = describe, lane, numbering
        self.issued = self.done = 0
        self.ended: Callable[[], int] | None = None
        self.is_broken: Callable[[], bool] = bool
        self.latest: Any = None
        self.stage = ""
        self.messages: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self.settled: dict[tuple[str, int, int], int] = {}
        self._room = _MOST_COUNTED

    def close(self) -> None:
        """The group is gone: keep what is told of it, and nothing else of it, for as long as the ring has a call of it."""
        self.describe, self.lane = _saying(self.describe()), _saying(self.lane())
        self.ended = self.latest = None
        if not self.messages:  # as in most groups: one empty table for all of them
            self.messages, self.settled = _NO_MESSAGES, _NONE_SETTLED
        self.is_broken = _closed  # a wait that failed is kept until its thread waits elsewhere: it goes on no more
        _tracks.discard(self)

    def note(
        self,
        kind: str,
        dtype: Any,
        sent: int,
        received: int,
        opts: Any,
        is_async: bool,
        splits: Any = None,
        issued_ns: int = 0,
        depth: int = 3,
    ) -> int:
        """A collective is called by the caller of the function that calls this. Returns its number, from 1.

        ``depth``: so many frames away is the outermost of torch's own, as a rule.
        """
        global _usual
        try:
            inner = _getframe(depth)
        except ValueError:  # a thread that begins here
            inner = _getframe(1)
        code = inner.f_code
        frame = inner.f_back if code is _usual else None
        if frame is None or _is_inside[frame.f_code.co_filename]:
            frame = _outside(_getframe(1))
            if frame is inner.f_back:
                _usual = code
        self.issued = number = self.issued + 1
        self.latest = opts
        self._append(
            (
                self,
                number,
                kind,
                dtype,
                sent,
                received,
                is_async,
                splits,
                frame.f_code,
                frame.f_lasti,
                get_ident(),
                issued_ns or now(),
            )
        )
        return number

    def take_back(self, number: int) -> None:
        """Call ``number`` was refused on this rank, before anything of it was sent: the next one has its number."""
        if self.issued == number:
            self.issued = number - 1
            self.latest = None  # they are not those of the call before

    def note_message(self, kind: str, dtype: Any, num_bytes: int, member: int, tag: int) -> tuple[str, int, int, int]:
        """A message to or from ``member`` of the group, or :data:`ANY`, is posted. Returns what :meth:`wait` takes."""
        peer = self.ranks[member] if member >= 0 else ANY
        code, offset = _site(2)
        key = kind, peer, tag
        number = self.messages[key] = self.messages.get(key, 0) + 1
        self.messages.move_to_end(key)
        if len(self.messages) > self._room:
            self._forget()
        sent, received = (num_bytes, 0) if kind == "send" else (0, num_bytes)
        self._append((self, number, kind, dtype, sent, received, (peer, tag), None, code, offset, get_ident(), now()))
        return kind, number, peer, tag

    def _forget(self) -> None:
        """Forget the older half of what is counted, but for messages that nobody has waited for."""
        most = max(_MOST_COUNTED, 2 * (_calls.maxlen or 0))  # those of the calls in the ring stay
        for key in list(islice(self.messages, len(self.messages) - most // 2)):
            if self.settled.get(key, 0) >= self.messages[key]:
                del self.messages[key], self.settled[key]
        self._room = max(most, len(self.messages) + most // 2)

    def wait(self, kind: str, number: int, peer: int = ANY, tag: int = 0) -> None:
        """This thread waits from now on for call ``number``, or for that message."""
        frame = _getframe(2)
        if _is_inside[frame.f_code.co_filename]:
            frame = _outside(frame)
        _waiting[get_ident()] = self, kind, number, peer, tag, frame.f_code, frame.f_lasti, now()

    def waited(self) -> None:
        """The wait has ended well."""
        found = _waiting.pop(get_ident(), None)
        if found is not None and found[1] in MESSAGES:
            key = found[1], found[3], found[4]
            self.settled[key] = max(self.settled.get(key, 0), found[2])


@lru_cache(maxsize=64)
def _saying(text: str) -> Callable[[], str]:
    """Return a function that returns ``text``."""
    return partial(str, text)


def _closed() -> bool:
    return True


class Silent(Track):
    """A track where no ring is kept."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_calls.append, "", "", (), str, str)

    def note(self, *_: Any, **__: Any) -> int:
        return 0

    def note_message(self, kind: str, dtype: Any, num_bytes: int, member: int, tag: int) -> tuple[str, int, int, int]:
        return kind, 0, ANY, tag

    def wait(self, kind: str, number: int, peer: int = ANY, tag: int = 0) -> None:
        return None

    def waited(self) -> None:
        return None


def is_of_program(file: str) -> bool:
    """Whether a file belongs to the program, and not to Python, torch or this package."""
    return not _is_inside[file]


def _outside(first: FrameType) -> FrameType:
    """The first of a frame and its callers that is the program's; of a thread that is all ours, ``first``."""
    frame: FrameType | None = first
    while frame is not None and _is_inside[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame or first


def _site(depth: int) -> tuple[CodeType, int]:
    """Whose call it is: the code, and where in it."""
    frame = _outside(_getframe(depth + 1))
    return frame.f_code, frame.f_lasti


def open_track(
    size: int,
    key: str,
    name: str,
    ranks: Sequence[int],
    describe: Callable[[], str],
    lane: Callable[[], str],
    numbering: str = "",
) -> Track:
    """The track of a new group, in the ring of this process, which keeps the last ``size`` calls of all groups; 0: none."""
    global _calls
    if size <= 0:
        return Silent()
    if _calls.maxlen != size and not _calls:  # groups that are there go on in the ring that they know
        _calls = deque(maxlen=size)
    if _main_state is None and threading.current_thread() is threading.main_thread():
        _keep_main_state()
    track = Track(_calls.append, key, name, ranks, describe, lane, numbering)
    _tracks.add(track)
    return track


def ring_size() -> int:
    """How many calls the ring of this process keeps; 0: there is none."""
    return _calls.maxlen or 0


def main_state() -> int | None:
    """Where the interpreter keeps the state of the main thread, which ends with the process; None: it has opened no track."""
    return _main_state


def _keep_main_state() -> None:
    """Keep where the interpreter has the state of this thread, the main one."""
    global _main_state
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    _main_state = get()


def recorded_calls() -> list[Entry]:
    """The calls in the ring, oldest first. From any thread."""
    return copied(_calls)


def copied(items: Iterable[_Each]) -> list[_Each]:
    """Copy what is in ``items``, to which other threads add."""
    while True:
        try:
            return list(items)
        except RuntimeError:  # noqa: PERF203  something came meanwhile
            continue


def opened_tracks() -> list[Track]:
    """The tracks of the groups that are there."""
    return sorted(copied(_tracks), key=lambda track: track.key)


def waiting_threads() -> dict[int, Waiting]:
    """The wait of each thread that waits for a call made earlier; threads that have ended are left out."""
    alive = {thread.ident for thread in threading.enumerate()}
    return {ident: waiting for ident, waiting in copied(_waiting.items()) if ident in alive}


def _in_child() -> None:
    """A forked child has made no calls."""
    global _calls
    _calls = deque(maxlen=_calls.maxlen)
    _waiting.clear()
    _tracks.clear()
    if _main_state is not None:
        _keep_main_state()  # the main thread is now the one that forked


os.register_at_fork(after_in_child=_in_child)

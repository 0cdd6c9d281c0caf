"""A call, and the ring of calls: what this rank called last on every group, from where, and what its threads wait for.

A :class:`Call` is made once, where the program issues it, and says all that is known of it until it is
forgotten: what was asked for from the start, and how it ran once it has. Rooms are given it, and none
describes the call again. It is a ``msgspec.Struct`` because one is made in every call: that takes less time
than a tuple of as many things, and a quarter of that of a class of Python's.

The ring is on in every job, so a call pays for it. Nothing is turned into text, no tensor is kept alive, and
a call site is a code object and an offset into it, of which :mod:`commlayer.diagnosis.snapshot` makes a line
of a file once somebody asks. The calls of a group run in the order in which they are made, so that two
counters a group say which of them are done; a call that is issued and not done has been started if it is the
next one.

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

import msgspec

from commlayer.forked_child import in_forked_child

__all__ = [
    "ANY",
    "MESSAGES",
    "Call",
    "Silent",
    "StepRecord",
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
"""The peer of a receive from whoever sends first; and the peer of a collective, which has none."""
MESSAGES = ("send", "recv")
"""The kinds of messages between two ranks; all others are collectives."""


class StepRecord(msgspec.Struct, frozen=True):
    """One step of a plan on this rank.

    ``op``, ``resource``, ``chunk``, ``bytes``: as the plan's step has them. ``sent_bytes``: by this rank. ``enqueue_ns``: when
    what the step waits for had ended; ``start_ns``: when it was posted, after any hold by a higher lane; ``end_ns``.
    """

    op: str
    resource: str
    chunk: int
    bytes: float
    sent_bytes: int
    enqueue_ns: int
    start_ns: int
    end_ns: int


class Call(msgspec.Struct, eq=False, weakref=True):
    """A call of a group's collective, or a message.

    Attributes:
        track: the calls of its group on this rank.
        number: of the call in its group, from 1, as the program makes them; of a message, among those of its kind, peer and tag.
        collective: its name in statistics, traces and errors; ``send`` or ``recv`` for a message.
        dtype: of its tensors; None where it has none.
        sent_bytes, received_bytes: bytes that it was given and asked for; −1: no two ranks need have them alike.
        is_async: whether it returns before its end, as every call on a device does.
        splits: rows (received, sent) for each member of an exchange; None for any other call.
        code, offset: the place in the program that made it.
        thread: that made it.
        issued_ns: when the program made it.
        peer, tag: of a message; ``peer`` is a global rank, or :data:`ANY`.
        sequence: of the collective in its group, the same on all ranks; 0 before it runs. A call of several pairs of tensors
            runs several, and has the number of the last; so with what follows.
        plan: that moved its bytes; None for the inner backend's own call, and before it runs.
        logical_bytes: what the caller moved, by nccl-tests' sizes.
        inter_bytes, intra_bytes: sent by this rank over each link class; −1: only the inner backend knows; −2: by the group's
            ``shares``.
        started_ns, ended_ns: when it began to run, and when it ended; 0 before, and for a CPU call that goes to the inner
            backend as it is. On a device: when it was launched, and once it has run when it began and ended there.
        run_bytes, moved_ns: what the last collective that it ran moved, and how long that took, without waiting in the queue.
        held_ns: held at chunk edges for higher lanes, in all.
        begins_after_s: when this process's device (:mod:`commlayer.device_time`), by its own clock, has done what the caller has
            launched, before which the call does not begin; None: at once.
        steps: of its plan, as they ran; None: nobody asked for them.
        error: the name of the error that it raised.
        is_awaited: an instrument wants the host to wait for the end of the call, where it would go on: on a device.

    Times are of ``time.perf_counter_ns``.
    """

    track: Track
    number: int
    collective: str
    dtype: Any
    sent_bytes: int
    received_bytes: int
    is_async: bool
    splits: Any
    code: CodeType
    offset: int
    thread: int
    issued_ns: int
    peer: int = ANY
    tag: int = 0
    sequence: int = 0
    plan: Any = None
    logical_bytes: int = 0
    inter_bytes: int = -1
    intra_bytes: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    run_bytes: int = 0
    moved_ns: int = 0
    held_ns: int = 0
    begins_after_s: float | None = None
    steps: tuple[StepRecord, ...] | None = None
    error: str = ""
    is_awaited: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks."""
        return self.collective in MESSAGES


class Waiting(msgspec.Struct, frozen=True):
    """A thread's wait for a call that was made earlier, or for the end of a group.

    Attributes:
        track: the group's.
        kind, number, peer, tag: the call's, as of :class:`commlayer.calls.ring.Call`.
        code, offset: the place in the program that waits.
        since_ns: when it began to.
    """

    track: Track
    kind: str
    number: int
    peer: int
    tag: int
    code: CodeType
    offset: int
    since_ns: int


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
        is_pythons = name.startswith((library + os.sep, "<frozen")) and "-packages" not in name
        is_pythons = is_pythons or os.path.basename(name) == "typing_extensions.py"  # it wraps what torch deprecates
        self[name] = is_inside = is_pythons or name.startswith(tuple(homes))
        return is_inside


_is_inside = _Inside()
_tracks: weakref.WeakSet[Track] = weakref.WeakSet()
_waiting: dict[int, Waiting] = {}
_calls: deque[Call] = deque(maxlen=0)
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
    ``rank``: this rank, as one of ``ranks``; −1: not said.
    ``predict``: gives what is promised for a call: (start, end) of each step of its plan and of the whole, µs; None: nothing is.
    ``shares``: how much of an even all_to_all leaves the node, and goes to others on it.
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
        "predict",
        "rank",
        "ranks",
        "settled",
        "shares",
        "stage",
    )

    def __init__(
        self,
        append: Callable[[Call], None],
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
        self.predict: Callable[[Call], tuple[tuple[tuple[float, float], ...], float] | None] = _promises_nothing
        self.shares = 0.0, 0.0
        self.rank = -1

    def close(self) -> None:
        """The group is gone: keep what is told of it, and nothing else of it, for as long as the ring has a call of it."""
        self.describe, self.lane = _saying(self.describe()), _saying(self.lane())
        self.ended = self.latest = None
        self.predict = _promises_nothing
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
    ) -> Call:
        """Make the call of a collective, which the caller of the function that calls this has called.

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
        call = Call(
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
        self._append(call)
        return call

    def unnumbered(self, kind: str, num_bytes: int) -> Call:
        """Make a call that is none of the ring's: of several messages at once, each of which is."""
        return Call(self, 0, kind, None, num_bytes, 0, True, None, _NOWHERE, 0, get_ident(), now())

    def take_back(self, call: Call) -> None:
        """Forget that ``call`` was made: it was refused on this rank, before anything of it was sent, and the next one has its
        number."""
        if self.issued == call.number:
            self.issued = call.number - 1
            self.latest = None  # they are not those of the call before

    def note_message(self, kind: str, dtype: Any, num_bytes: int, member: int, tag: int) -> Call:
        """Make the call of a message to or from ``member`` of the group, or :data:`ANY`, that is posted."""
        peer = self.ranks[member] if member >= 0 else ANY
        code, offset = _site(2)
        key = kind, peer, tag
        number = self.messages[key] = self.messages.get(key, 0) + 1
        self.messages.move_to_end(key)
        if len(self.messages) > self._room:
            self._forget()
        sent, received = (num_bytes, 0) if kind == "send" else (0, num_bytes)
        call = Call(self, number, kind, dtype, sent, received, True, None, code, offset, get_ident(), now(), peer, tag)
        self._append(call)
        return call

    def _forget(self) -> None:
        """Forget the older half of what is counted, but for messages that nobody has waited for."""
        most = max(_MOST_COUNTED, 2 * (_calls.maxlen or 0))  # those of the calls in the ring stay
        for key in list(islice(self.messages, len(self.messages) - most // 2)):
            if self.settled.get(key, 0) >= self.messages[key]:
                del self.messages[key], self.settled[key]
        self._room = max(most, len(self.messages) + most // 2)

    def wait(self, call: Call) -> None:
        """This thread waits from now on for ``call``."""
        frame = _getframe(2)
        if _is_inside[frame.f_code.co_filename]:
            frame = _outside(frame)
        _waiting[get_ident()] = Waiting(
            self, call.collective, call.number, call.peer, call.tag, frame.f_code, frame.f_lasti, now()
        )

    def wait_for_end(self, kind: str) -> None:
        """This thread waits from now on for all calls of the group, in a function of this name that ends it."""
        code, offset = _site(2)
        _waiting[get_ident()] = Waiting(self, kind, self.issued, ANY, 0, code, offset, now())

    def waited(self) -> None:
        """The wait has ended well."""
        wait = _waiting.pop(get_ident(), None)
        if wait is not None and wait.kind in MESSAGES:
            key = wait.kind, wait.peer, wait.tag
            self.settled[key] = max(self.settled.get(key, 0), wait.number)


@lru_cache(maxsize=64)
def _saying(text: str) -> Callable[[], str]:
    """Return a function that returns ``text``."""
    return partial(str, text)


def _closed() -> bool:
    return True


def _promises_nothing(_: Call) -> None:
    return None


_NOWHERE = _closed.__code__
"""The place of a call that nobody asks for."""


class Silent(Track):
    """A track where no ring is kept: its calls have no numbers, and are forgotten once they have ended."""

    __slots__ = ()

    def __init__(
        self,
        key: str = "",
        name: str = "",
        ranks: Sequence[int] = (),
        describe: Callable[[], str] = str,
        lane: Callable[[], str] = str,
        numbering: str = "",
    ) -> None:
        super().__init__(_calls.append, key, name, ranks, describe, lane, numbering)

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
    ) -> Call:
        return Call(self, 0, kind, dtype, sent, received, is_async, splits, _NOWHERE, 0, 0, issued_ns or now())

    def note_message(self, kind: str, dtype: Any, num_bytes: int, member: int, tag: int) -> Call:
        sent, received = (num_bytes, 0) if kind == "send" else (0, num_bytes)
        return Call(self, 0, kind, dtype, sent, received, True, None, _NOWHERE, 0, 0, now(), ANY, tag)

    def wait(self, call: Call) -> None:
        return None

    def wait_for_end(self, kind: str) -> None:
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
        return Silent(key, name, ranks, describe, lane, numbering)
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


def recorded_calls() -> list[Call]:
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


@in_forked_child
def _in_child() -> None:
    """A forked child has made no calls."""
    global _calls
    _calls = deque(maxlen=_calls.maxlen)
    _waiting.clear()
    _tracks.clear()
    if _main_state is not None:
        _keep_main_state()  # the main thread is now the one that forked

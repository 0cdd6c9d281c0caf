"""A snapshot of this process: its ring as the log of a rank, with lines of files for offsets, and
where its threads are."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from time import perf_counter_ns as now
from types import CodeType
from typing import IO, Any

from commlayer.calls.ring import (
    ANY,
    Call,
    Track,
    copied,
    is_of_program,
    main_state,
    opened_tracks,
    recorded_calls,
    waiting_threads,
)
from commlayer.diagnosis.call_logs import CallLog, GroupLog, MessageCount, RankLog, Site, ThreadLog, WaitLog

__all__ = ["rank_log"]

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\):")
_PLACE = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_CUT = "..."
"""In place of further threads; where places of a thread are left out, it is indented."""
OUR_THREADS = "commlayer"
"""The beginning of the names of our own threads, which no program waits in."""


def rank_log(
    job: str,
    rank: int,
    ranks: Sequence[int],
    reason: str,
    gone: Mapping[int, str],
    numbering: str = "",
) -> RankLog:
    """The log of this rank, of the groups whose ranks have numbers of this ``numbering`` (see
    :class:`commlayer.calls.ring.Track`). From any thread.
    """
    calls = [call for call in recorded_calls() if call.track.numbering == numbering]
    waiting = waiting_threads()
    opened = (track for track in opened_tracks() if track.numbering == numbering)
    tracks = list(dict.fromkeys([*opened, *(call.track for call in calls)]))
    index = {track: place for place, track in enumerate(tracks)}
    done = [_ended(track) for track in tracks]
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
    made_elsewhere = {thread.ident for thread in threading.enumerate() if isinstance(thread, threading._DummyThread)}
    stacks, is_cut = _stacks()
    threads = _threads(names, stacks)
    known = {thread.ident for thread in threads} | made_elsewhere  # of whose ends nobody hears
    hidden = [ident for ident, name in names.items() if ident not in known and not name.startswith(OUR_THREADS)]
    return RankLog(
        job=job,
        rank=rank,
        ranks=tuple(ranks),
        reason=reason,
        host=socket.gethostname(),
        pid=os.getpid(),
        now_ns=now(),
        groups=tuple(_group(track, done[place]) for place, track in enumerate(tracks)),
        calls=tuple(_call(call, index[call.track], done[index[call.track]]) for call in calls),
        waits=tuple(
            WaitLog(
                thread=ident,
                group=index[wait.track],
                kind=wait.kind,
                number=wait.number,
                peer=wait.peer,
                tag=wait.tag,
                site=_site(wait.code, wait.offset),
                since_ns=wait.since_ns,
            )
            for ident, wait in waiting.items()
            if wait.track in index and not names.get(ident, "").startswith(OUR_THREADS)
        ),
        threads=tuple(threads),
        hidden=tuple(hidden) if is_cut else (),
        main=threading.main_thread().ident or 0,
        gone=dict(gone),
    )


def _ended(track: Track) -> int:
    if track.ended is not None:
        with contextlib.suppress(Exception):  # a group that is being made, or let go of
            return max(track.done, track.ended())
    return track.done


def _group(track: Track, done: int) -> GroupLog:
    described = track.describe()
    return GroupLog(
        key=track.key,
        name=track.name,
        ranks=track.ranks,
        description="" if described == "undefined" else described,
        lane=track.lane(),
        issued=track.issued,
        done=done,
        messages=tuple(MessageCount(*key, count) for key, count in copied(track.messages.items())),
    )


def _call(call: Call, group: int, done: int) -> CallLog:
    track, number = call.track, call.number
    common: dict[str, Any] = {
        "group": group,
        "number": number,
        "kind": call.collective,
        "site": _site(call.code, call.offset),
        "dtype": "" if call.dtype is None else str(call.dtype).removeprefix("torch."),
        "sent": call.sent_bytes,
        "received": call.received_bytes,
        "thread": call.thread,
        "issued_ns": call.issued_ns,
    }
    if call.is_message:
        is_done = track.settled.get((call.collective, call.peer, call.tag), 0) >= number
        return CallLog(peer=call.peer, tag=call.tag, is_async=True, state="done" if is_done else "started", **common)
    coming, going = (None, None) if call.splits is None else call.splits
    state = "done" if number <= done else "started" if number == done + 1 else "issued"
    opts = track.latest if number == track.issued else None
    root = getattr(opts, "rootRank", ANY)
    reduce = getattr(opts, "reduceOp", None)
    return CallLog(
        op="" if reduce is None else str(getattr(getattr(reduce, "op", reduce), "name", reduce)),
        stage=track.stage if state != "done" and number == track.issued else "",
        root=track.ranks[root] if 0 <= root < len(track.ranks) else ANY,
        to=_shares(going, call.sent_bytes, len(track.ranks)),
        of=_shares(coming, call.received_bytes, len(track.ranks)),
        is_async=call.is_async,
        state=state,
        **common,
    )


def _shares(rows: Sequence[int] | None, num_bytes: int, size: int) -> tuple[int, ...] | None:
    """The bytes for or from each member; ``rows``: how many go there, empty: even; None: not
    known."""
    if rows is None or num_bytes < 0 or (rows and len(rows) != size):
        return None
    if not rows:
        return (num_bytes // size,) * size
    total = sum(rows)
    return tuple(count * num_bytes // total if total else 0 for count in rows)


def _site(code: CodeType, offset: int) -> Site:
    line = 0
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
            break
    return Site(code.co_filename, line or code.co_firstlineno, getattr(code, "co_qualname", code.co_name))


def _threads(names: Mapping[int, str], stacks: Mapping[int, Sequence[Site]]) -> list[ThreadLog]:
    """The threads of the program, where they are: the innermost place that is neither torch's nor
    ours."""
    threads = []
    for ident, stack in stacks.items():
        name = names.get(ident, "")
        if stack and not name.startswith(OUR_THREADS):  # the program's thread that asks is one that waits
            site = next((site for site in stack if is_of_program(site.file)), stack[0])
            threads.append(ThreadLog(ident=ident, name=name, site=site))
    return threads


def _stacks() -> tuple[dict[int, list[Site]], bool]:
    """The places of all threads, innermost first, by thread; of the 100 youngest threads and the
    main one, 100 places of each. And whether there are more threads.

    Written by ``faulthandler`` and read again: it reads the interpreter's stacks as they lie there,
    while no thread runs. Walking the frame objects of running threads (``sys._current_frames``)
    would be handier, but it has ended a rank of a job with a segmentation fault (Python 3.11.7),
    and a diagnosis must not be what kills a job.

    It comes to the main thread last, so not at all where there are more than a hundred. What it
    calls itself for each thread, with the interpreter's lock held, is called for that one then. The
    state of the main thread was kept by that thread itself: to look for it among those of all
    threads takes several calls, between which others end. Nothing is written where the interpreter
    does not export the call (Python 3.13), or the main thread has made no group.
    """
    with _memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        stacks, is_cut = _read_stacks(file, {})
    main = threading.main_thread().ident
    dump: Any = getattr(ctypes.pythonapi, "_Py_DumpTraceback", None)
    state = main_state()
    if is_cut and main is not None and main not in stacks and dump is not None and state is not None:
        with _memory_file() as file:
            dump.restype = None
            dump(ctypes.c_int(file.fileno()), ctypes.c_void_p(state))
            _read_stacks(file, stacks, main)
    return stacks, is_cut


def _read_stacks(
    file: IO[bytes], stacks: dict[int, list[Site]], thread_of_all: int = 0
) -> tuple[dict[int, list[Site]], bool]:
    """Add to ``stacks`` what was written, and return it, and whether threads were left out.

    ``thread_of_all``: whose places those are before which no thread stands.
    """
    file.seek(0)
    is_cut = False
    stack: list[Site] = []
    if thread_of_all:
        stack = stacks.setdefault(thread_of_all, stack)
    for line in file.read().decode("ascii", "replace").splitlines():
        if thread := _THREAD.match(line):
            stack = stacks.setdefault(int(thread[1], 16), [])
        elif place := _PLACE.match(line):
            path = _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), place[1])
            stack.append(Site(path, int(place[2]) if place[2].isdigit() else 0, place[3]))
        is_cut = is_cut or line == _CUT
    return stacks, is_cut


def _memory_file() -> IO[bytes]:
    """A file that nobody else sees, on no disk where the system has such files: a job may hang
    because its disk is full."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("commlayer-stacks"), "w+b")
    return tempfile.TemporaryFile()

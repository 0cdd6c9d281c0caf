"""Programs that have ended, from a job's text log: the exception of a rank, as torch's hook prints
it behind ``[rank3]:``, and the first failure that torchrun names.

Rejected: every exception in a log. A rank whose call was broken off, or which its launcher has
ended, is a consequence of the hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from commlayer.diagnosis.findings import Diagnosis, Missing
from commlayer.profiles.printable import printable, shortened

__all__ = ["ProgramEnd", "has_ends", "read_ends", "with_ends"]

_MOST_LINE = 1000
_MOST_WORDS = 200
_MARKS = (b"]: Traceback (most recent call last):", b"Root Cause (first observed failure):")
_OF_RANK = re.compile(r"\[rank(\d{1,7})\]: ?(.*)$")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]{0,200}(?::|$)")
_FRAME = re.compile(r'\s+File "(.{1,400})", line (\d{1,9}), in (\S{1,200})')
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib/python3\.|^<")
_FIRST_FAILURE = "Root Cause (first observed failure):"
_FAILED_RANK = re.compile(r"\brank +: (\d{1,7}) \(local_rank: \d{1,7}\)")
_EXIT = re.compile(r"\bexitcode +: (-?\d{1,5}) \(pid: \d{1,10}\)")
_SIGNALS = {4: "SIGILL", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
"""Signals that end a process for a reason of its own: watchdogs abort, and launchers terminate."""
_CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "KeyboardInterrupt")
_CONSEQUENCE_WORDS = re.compile(r"NCCL|Gloo|gloo|watchdog|onnection (?:closed|reset)|imed out|roken pipe")


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a rank's program. ``how``: its exception, or the signal that ended it."""

    rank: int
    how: str


def has_ends(data: bytes) -> bool:
    """Tell whether a text looks as if it told how programs ended."""
    return any(mark in data for mark in _MARKS)


def read_ends(data: bytes) -> list[ProgramEnd]:
    """Read which ranks' programs ended by themselves, the first end of each."""
    lines = [line[:_MOST_LINE] for line in data.decode("utf-8", "replace").splitlines()]
    ends: dict[int, ProgramEnd] = {}
    places: dict[int, str] = {}  # the innermost one of each exception's that is no library's
    for match in filter(None, map(_OF_RANK.search, lines)):
        number, text = int(match[1]), match[2]
        frame = _FRAME.match(text)
        if text.startswith(_TRACEBACK):
            places[number] = ""
        elif number in places and frame and not _LIBRARY.search(frame[1]):
            places[number] = f" at {frame[1]}:{frame[2]} in {frame[3]}"
        elif number in places and _EXCEPTION.match(text):
            place = printable(places.pop(number), keep="")
            name = text.partition(":")[0].rpartition(".")[2]
            if name not in _CONSEQUENCES and not _CONSEQUENCE_WORDS.search(text):
                words = shortened(printable(text, keep=""), _MOST_WORDS)
                ends.setdefault(number, ProgramEnd(number, f"by {words}{place}"))
    for at in (at for at, line in enumerate(lines) if _FIRST_FAILURE in line):  # as torchrun tells of it
        after = "\n".join(lines[at + 1 : at + 8])
        rank, code = _FAILED_RANK.search(after), _EXIT.search(after)
        ended_by = _SIGNALS.get(-int(code[1])) if code else None
        if rank and ended_by:  # a signal has ended the process
            ends.setdefault(int(rank[1]), ProgramEnd(int(rank[1]), f"by {ended_by}"))
    return list(ends.values())


def with_ends(diagnosis: Diagnosis, ends: Iterable[ProgramEnd]) -> Diagnosis:
    """Return the diagnosis in which ranks that others wait for, and whose programs have ended, are
    gone."""
    how = {end.rank: end.how for end in ends}
    gone, others = list[Missing](), list[Missing]()
    for missing in diagnosis.waits:
        if missing.why in ("late", "silent") and missing.call.rank in how:
            gone.append(msgspec.structs.replace(missing, why="gone", how=how[missing.call.rank]))
        else:
            others.append(missing)
    return msgspec.structs.replace(diagnosis, findings=(*diagnosis.findings, *gone), waits=tuple(others))

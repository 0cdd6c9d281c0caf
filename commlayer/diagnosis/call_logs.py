"""The log of one rank: what it called, what its threads wait for, who is gone; as it is written to
files and told to others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from commlayer.calls.ring import MESSAGES
from commlayer.profiles.printable import printable, shortened

__all__ = [
    "LOG_FORMAT",
    "MAKING",
    "NO_THREAD",
    "CallLog",
    "GroupLog",
    "MessageCount",
    "RankLog",
    "Site",
    "ThreadLog",
    "WaitLog",
    "as_foreign",
    "inferred_log",
]

LOG_FORMAT = 1
MAKING = ("init_process_group", "new_group")
"""The kinds of calls that make a group."""
NO_THREAD = -1
"""In place of a call's thread, where none waits in it."""
_STATES = ("issued", "started", "done")
_MOST_TEXT = 1000


class Site(msgspec.Struct, frozen=True, array_like=True):
    """A place in a program. ``line`` 0: not known; ``file`` empty: nothing is."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return printable(f"{self.file}:{self.line} in {self.function}") if self.file else "an unknown place"


class CallLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call of a rank.

    ``group``: the index of its group; ``number``: among the collectives of the group, or the
    messages of this kind, peer and tag; ``sent``, ``received``: bytes, −1 where ranks need not have
    them alike; ``elements``: how many are sent, where bytes are not known, −1: neither are they;
    ``to``, ``of``: bytes for and from each member, where they may differ; ``root``, ``peer``:
    global ranks, −1: none (of a receive: any). ``issued_ns``: on the rank's own clock.
    ``stage``: of a call that makes a group, what the rank is at. ``made_by``: the program's thread
    that made it, where ``thread`` waits on a device.
    """

    group: int
    number: int
    kind: str
    site: Site
    state: str = "issued"
    dtype: str = ""
    sent: int = -1
    received: int = -1
    elements: int = -1
    op: str = ""
    root: int = -1
    to: tuple[int, ...] | None = None
    of: tuple[int, ...] | None = None
    peer: int = -1
    tag: int = 0
    thread: int = 0
    is_async: bool = False
    issued_ns: int = 0
    stage: str = ""
    made_by: int = NO_THREAD

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGES

    @property
    def maker(self) -> int:
        """The thread of the program that made it."""
        return self.thread if self.made_by == NO_THREAD else self.made_by


class WaitLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread's wait for a call that it, or another thread, made earlier: a point where the host
    waits for communication."""

    thread: int
    group: int
    kind: str
    number: int
    site: Site
    peer: int = -1
    tag: int = 0
    since_ns: int = 0

    @classmethod
    def of(cls, call: CallLog, thread: int) -> WaitLog:
        """Return the wait of ``thread`` for ``call``, from when it was issued on."""
        return cls(
            thread=thread,
            group=call.group,
            kind=call.kind,
            number=call.number,
            site=call.site,
            peer=call.peer,
            tag=call.tag,
            since_ns=call.issued_ns,
        )


class MessageCount(msgspec.Struct, frozen=True, array_like=True):
    """How many messages of a kind, with that peer and tag, a rank has posted in a group."""

    kind: str
    peer: int
    tag: int
    count: int


class GroupLog(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group as a rank knows it. ``key``: the same on all its members, and no other group's;
    ``ranks``: global; ``is_assumed``: ``issued`` and ``done`` are taken for granted, as the ring
    has lost all calls of the group."""

    key: str
    name: str
    ranks: tuple[int, ...]
    description: str = ""
    lane: str = ""
    issued: int = 0
    done: int = 0
    messages: tuple[MessageCount, ...] = ()
    is_assumed: bool = False

    def __str__(self) -> str:
        return printable(self.description or self.name)


class ThreadLog(msgspec.Struct, frozen=True, kw_only=True):
    """A thread of the rank's program, and where it is now."""

    ident: int
    name: str
    site: Site


class RankLog(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank knows. ``reason``: why it was written: ``timeout``, ``asked`` (by another
    rank), ``signal`` or ``abort``.

    ``hidden``: threads of the program that are there, and of which it is not known where they are.
    ``main``: its main thread. ``gone``: ranks of which the failure detector knows that they have
    ended, and how. ``now_ns``: the rank's own clock.
    """

    job: str
    rank: int
    ranks: tuple[int, ...]
    reason: str
    host: str = ""
    pid: int = 0
    now_ns: int = 0
    groups: tuple[GroupLog, ...] = ()
    calls: tuple[CallLog, ...] = ()
    waits: tuple[WaitLog, ...] = ()
    threads: tuple[ThreadLog, ...] = ()
    hidden: tuple[int, ...] = ()
    main: int = 0
    gone: dict[int, str] = {}
    format: int = LOG_FORMAT


def inferred_log(
    *,
    rank: int,
    ranks: tuple[int, ...],
    reason: str,
    groups: Sequence[GroupLog],
    calls: Sequence[CallLog],
    job: str = "",
    now_ns: int = 0,
    is_on_device: bool = True,
    gone: dict[int, str] | None = None,
) -> RankLog:
    """Return a log made from what others have recorded of a rank. Of one ``is_on_device`` a thread
    (1, 2, ...) waits in each call that the device is in; where it is in none, one of the host (0),
    which no call holds."""
    waits = [WaitLog.of(call, call.thread) for call in calls if is_on_device and call.thread > 0]
    return as_foreign(
        RankLog(
            job=job,
            rank=rank,
            ranks=ranks,
            reason=reason,
            now_ns=now_ns,
            groups=tuple(groups),
            calls=tuple(calls),
            waits=tuple(waits),
            hidden=(tuple(wait.thread for wait in waits) or (0,)) if is_on_device else (),
            gone=gone or {},
        )
    )


def as_foreign(log: RankLog) -> RankLog:
    """Return a log that another rank or a file has given, its texts in one line each and fit to be
    shown.

    Raises ValueError for one that contradicts itself: it points to nothing, or is longer than its
    group.
    """
    if log.format != LOG_FORMAT:
        raise ValueError(f"expected a log of format {LOG_FORMAT}, got format {log.format}")
    if log.rank not in log.ranks or min(log.ranks) < 0:
        raise ValueError(f"expected a rank of its job, got rank {log.rank}")
    places = {call.group for call in log.calls} | {wait.group for wait in log.waits}
    if any(not 0 <= place < len(log.groups) for place in places):
        raise ValueError(f"expected calls of the {len(log.groups)} groups of the log, got one of another group")
    for call in log.calls:
        size = len(log.groups[call.group].ranks)
        if any(parts is not None and len(parts) != size for parts in (call.to, call.of)):
            raise ValueError(f"expected splits for {size} members, got others in {shortened(call.kind)} #{call.number}")
        if call.state not in _STATES:
            raise ValueError(f"expected a state of {', '.join(_STATES)}, got {shortened(call.state)!r}")
    shown: RankLog = _shown(log)
    return shown


def _shown(value: Any) -> Any:
    """Return a part of a log with its texts fit to be shown; the part itself where they are."""
    if isinstance(value, str):
        return printable(shortened(value, _MOST_TEXT), keep="")
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        shown = {name: _shown(each) for name, each in fields if each and not isinstance(each, int)}
        changed = {name: each for name, each in shown.items() if each is not getattr(value, name)}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        return {_shown(key): _shown(each) for key, each in value.items()} if value else value
    if isinstance(value, tuple) and not isinstance(value[0], int):  # ranks and splits are many, and no texts
        parts = tuple(map(_shown, value))
        return value if all(map(operator.is_, parts, value)) else parts
    return value

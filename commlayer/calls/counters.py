"""Counters of what a group's calls have moved: a few additions a call, on every call; read by :mod:`commlayer.statistics`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypedDict

from commlayer.forked_child import in_forked_child

__all__ = [
    "ENDED_GROUPS",
    "MOST_ENDED",
    "CallStats",
    "GroupCounters",
    "GroupStats",
    "Row",
    "counted_groups",
    "reset_groups",
]


class CallStats(TypedDict):
    """The statistics of one collective, moved by one plan, in one group.

    ``plan``: a plan's name, ``flat`` for the inner backend's own call. ``logical_bytes``: what the callers moved, by
    nccl-tests' sizes: the gathered total of an all_gather, the whole input of a reduce_scatter, the input of an all_to_all,
    else the tensor. ``wire_bytes``: what this rank sent, by link class (``inter``, ``intra``), or None where only the inner
    backend knows it. ``time_us``: from the call's start to its end, without waiting in the queue.
    """

    collective: str
    plan: str
    calls: int
    logical_bytes: int
    wire_bytes: dict[str, int] | None
    time_us: float


class GroupStats(TypedDict):
    """The statistics of one process group. ``ranks`` are global. ``unplanned``: how often which reason kept a call flat."""

    group: str
    description: str
    ranks: list[int]
    calls: list[CallStats]
    unplanned: dict[str, int]


class Row:
    """Counters of one collective moved by one plan. ``inter``, ``intra``: bytes sent; ``even``: bytes of calls that sent
    every rank of the group the same share, whose links are told apart when somebody reads."""

    __slots__ = ("calls", "even", "inter", "intra", "is_known", "logical_bytes", "time_ns")
    UNKNOWN, EVEN = -1, -2
    """The values in place of the bytes between nodes: not known; by shares."""

    def __init__(self) -> None:
        self.calls = self.logical_bytes = self.time_ns = self.inter = self.intra = self.even = 0
        self.is_known = True

    def add(self, num_bytes: int, time_ns: int, inter: int = UNKNOWN, intra: int = 0) -> None:
        """Count one call, which sent so many bytes over each link class."""
        self.calls += 1
        self.logical_bytes += num_bytes
        self.time_ns += time_ns
        if inter >= 0:
            self.inter += inter
            self.intra += intra
        elif inter == Row.EVEN:
            self.even += num_bytes
        else:
            self.is_known = False

    def take(self, other: Row, shares: tuple[float, float]) -> None:
        """Add the calls of ``other``, of a group with these ``shares``."""
        self.calls += other.calls
        self.logical_bytes += other.logical_bytes
        self.time_ns += other.time_ns
        sent = other.wire_bytes(shares)
        if sent is None:
            self.is_known = False
        else:
            self.inter += sent["inter"]
            self.intra += sent["intra"]

    def wire_bytes(self, shares: tuple[float, float]) -> dict[str, int] | None:
        """The bytes that were sent, by link class; None where only the inner backend knows."""
        if not self.is_known:
            return None
        return {"inter": self.inter + round(self.even * shares[0]), "intra": self.intra + round(self.even * shares[1])}


class GroupCounters:
    """The counters of one group of this rank. ``describe`` and ``reasons`` are asked when somebody reads."""

    def __init__(self, group: str, rank: int, ranks: list[int]) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks
        self.describe: Callable[[], str] = str
        self.reasons: Callable[[], Mapping[str, int]] = dict
        self.shares = 0.0, 0.0
        """How much of an even all_to_all leaves the node, and goes to others on it."""
        self._reasons_before: dict[str, int] = {}
        self.is_closed = False
        self.flat: defaultdict[str, Row] = defaultdict(Row)
        """Counters of the inner backend's own calls, by collective."""
        self.planned: defaultdict[tuple[str, str], Row] = defaultdict(Row)
        """Counters of planned calls, by collective and plan."""
        _groups.append(self)

    def _rows(self) -> list[tuple[str, str, Row]]:
        # Lists of the items, which are made at once: threads that run calls add rows meanwhile.
        flat = [(collective, "flat", row) for collective, row in list(self.flat.items())]
        planned = [(collective, plan, row) for (collective, plan), row in list(self.planned.items())]
        return sorted(flat + planned, key=lambda row: row[:2])

    def close(self) -> None:
        """Note that the group is gone: keep its numbers, but nothing of it."""
        reasons, description = dict(self.reasons()), self.describe()
        self.reasons, self.describe = (lambda: reasons), (lambda: description)
        self.is_closed = True
        _fold_closed()

    def take(self, other: GroupCounters) -> None:
        """Add the numbers of ``other``, a group that is gone."""
        for own, rows in ((self.flat, other.flat), (self.planned, other.planned)):
            for key, row in rows.items():
                own[key].take(row, other.shares)  # type: ignore[index]  # both tables have keys of one kind
        reasons = dict(self.reasons())
        for reason, count in other.read()["unplanned"].items():
            reasons[reason] = reasons.get(reason, 0) + count
        self.reasons = lambda: reasons
        self.ranks = sorted({*self.ranks, *other.ranks})

    def reset(self) -> None:
        self.flat.clear()
        self.planned.clear()
        self._reasons_before = dict(self.reasons())

    def read(self) -> GroupStats:
        before = self._reasons_before
        unplanned = {reason: count - before.get(reason, 0) for reason, count in list(self.reasons().items())}
        return {
            "group": self.group,
            "description": self.describe(),
            "ranks": list(self.ranks),
            "calls": [
                {
                    "collective": collective,
                    "plan": plan,
                    "calls": row.calls,
                    "logical_bytes": row.logical_bytes,
                    "wire_bytes": row.wire_bytes(self.shares),
                    "time_us": row.time_ns / 1000,
                }
                for collective, plan, row in self._rows()
            ],
            "unplanned": {reason: count for reason, count in unplanned.items() if count},
        }


MOST_ENDED = 64
"""The groups that are gone and still have numbers of their own: a job that makes one with every quorum has no end of them."""
ENDED_GROUPS = "ended groups"

_groups: list[GroupCounters] = []
_ended: GroupCounters | None = None
"""The sum of all that were gone before those."""
_folding = threading.Lock()


def _fold_closed() -> None:
    """Add up the groups that have been gone for longest, and forget which of them did what."""
    global _ended
    with _folding:
        closed = [group for group in _groups if group.is_closed]
        for group in closed[:-MOST_ENDED]:
            if _ended is None:
                _ended = GroupCounters(ENDED_GROUPS, _groups[0].rank, [])
                _groups.insert(0, _groups.pop(_groups.index(_ended)))  # its rank is that of the first group
            _ended.take(group)
            _groups.remove(group)


def counted_groups() -> tuple[int | None, list[GroupStats]]:
    """Return this rank, or None before the first group, and the statistics of all groups of this process."""
    with _folding:
        return _groups[0].rank if _groups else None, [group.read() for group in _groups]


def reset_groups() -> None:
    """Start counting anew."""
    with _folding:
        for group in _groups:
            group.reset()


@in_forked_child
def _in_child() -> None:
    """Begin without the groups of a forked child's parent."""
    global _ended, _folding
    _folding, _ended = threading.Lock(), None  # another thread of the parent may hold it
    _groups.clear()

"""Knowledge of a job: who is gone, who has left and said why, who waits for whom; what one rank
knows of all others, and whom it blames, in the words in which all tell of a failure.

It is made of records (:mod:`commlayer.failures.failure_records`), of which the first one about a
rank counts, and knows nothing of connections: :mod:`commlayer.failures.rank_links` brings records and
passes them on.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from commlayer.failures.failure_records import Absent, Asked, Ended, Gone, Left, Record, Report
from commlayer.profiles.counted import listed
from commlayer.profiles.printable import say

__all__ = ["Blame", "Knowledge", "Observer", "blame_of", "rank_or_one_of"]

_MOST_NAMED = 32
_MOST_ROUNDS = 64
"""So many of the last questions are remembered; older ones are no news."""


class Observer(Protocol):
    """Somebody who wants to know of every record as it comes."""

    def observe(self, record: Record) -> None:
        """Called once for each record, on the thread that brings it: the detector's, or one that
        tells it."""


class Knowledge:
    """The knowledge of the rank ``rank`` about the job of ``ranks`` (global ranks)."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.members = frozenset(self.ranks)
        self.changed = threading.Condition()
        """Guards all of it, and is notified of each record; its lock is one that a thread may take
        twice."""
        self.gone: dict[int, Gone] = {}
        self.left: dict[int, Left] = {}
        self.ended: list[Ended] = []
        """The ranks that died, never came or left by an exception, in the order of cause and
        effect: a rank tells before it acts on it."""
        self.reports: dict[tuple[str, int], Report] = {}
        self.asked: dict[int, Asked] = {}
        """The first question of each of the last rounds."""
        self._observers: weakref.WeakSet[Observer] = weakref.WeakSet()

    def attach(self, observer: Observer) -> None:
        """Have ``observer`` called for each record, those that are there already included; it is
        not kept alive."""
        with self.changed:
            self._observers.add(observer)
            known = self.records()
        for record in known:
            observer.observe(record)

    def detach(self, observer: Observer) -> None:
        """The opposite of :meth:`attach`."""
        with self.changed:
            self._observers.discard(observer)

    def records(self) -> list[Record]:
        """All records but questions, which are for those who are there when they are asked."""
        absent = [record for record in self.ended if isinstance(record, Absent)]  # first: who left did so because of it
        return [*absent, *self.gone.values(), *self.left.values(), *self.reports.values()]

    def learn(self, record: Record, pass_on: Callable[[Record], None] = lambda _: None) -> None:
        """Take in ``record``. If it is news, ``pass_on`` is called with the lock held, and then the
        observers. Raises nothing."""
        with self.changed:
            if not self._is_news(record):
                return
            pass_on(record)
            observers = list(self._observers)
            self.changed.notify_all()
        for observer in observers:
            try:
                observer.observe(record)
            except Exception:  # noqa: BLE001, PERF203  the next ones are to hear of it as well, and of the next death
                say(traceback.format_exc(), keep="\n")

    def first_failure(self, ranks: Container[int]) -> Blame | None:
        """Find the ones of ``ranks`` that failed first, and not because of other ranks. None where
        none has failed so far. What ranks that left have said themselves counts more than that
        another one found them gone."""
        for record in self.ended:
            if isinstance(record, Absent):
                absent = tuple(rank for rank in record.ranks if rank in ranks)
                if absent:
                    return Blame(absent, record.what, record.seen_by, are_all=True)
            elif record.rank in ranks:
                said = self.left.get(record.rank)
                if said is None or not said.is_consequence:
                    return blame_of(record if said is None else said)
        return None

    def failure(self) -> str:
        """Who has failed first, in words, as far as is known; where only consequences are known,
        the first of them; empty: nobody."""
        with self.changed:
            verdict = self.first_failure(self.ranks)
            if verdict is None and self.ended:
                verdict = blame_of(self.ended[0])
        return "" if verdict is None else verdict.words(self.rank)

    def await_failure(self, seconds: float) -> str:
        """:meth:`failure`, once there is one, or after ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended, seconds)
            return self.failure()

    def _is_news(self, record: Record) -> bool:
        """Remember ``record``, unless it is known, or about nobody of this job; return whether it
        was remembered."""
        if isinstance(record, Asked):
            return _is_asked_first(self.asked, record)
        if isinstance(record, Absent):
            # Ranks run out of patience one after the other, each for the same ranks: the first one counts.
            is_known = any(isinstance(each, Absent) for each in self.ended)
            if is_known or not record.ranks or not self.members.issuperset(record.ranks):
                return False
            self.ended.append(record)
            return True
        known: dict[Any, Any] = self.left if isinstance(record, Left) else self.gone
        key: Any = record.rank
        if isinstance(record, Report):
            known, key = self.reports, (record.key, record.rank)
        elif record.rank not in self.members:
            return False
        elif isinstance(record, Gone) and (record.rank == self.rank or record.rank in self.left):
            return False  # a rank that has said why it left, and was then not found by one that had not heard it
        if key in known:
            return False
        known[key] = record
        if isinstance(record, Gone) or (isinstance(record, Left) and record.is_failure):
            self.ended.append(record)
        return True


def _is_asked_first(known: dict[int, Asked], asked: Asked) -> bool:
    """Put ``asked`` into ``known`` unless its round is there, or long over; return whether it was put
    there."""
    if asked.round <= max(known, default=-1) - _MOST_ROUNDS or asked.round in known:
        return False
    known[asked.round] = asked
    for old in [each for each in known if each <= asked.round - _MOST_ROUNDS]:
        del known[old]
    return True


@dataclass(frozen=True, slots=True)
class Blame:
    """The ranks that are to blame, and ``what`` became of them, as ``seen_by`` tells."""

    ranks: tuple[int, ...]
    what: str
    seen_by: int
    is_unheard: bool = False
    """Whether a rank died that others may have heard."""
    are_all: bool = False
    """Whether it is all of these ranks, and not one of them."""
    leaver: int | None = None
    """The member that left because of these ranks, which are not in the group."""

    @property
    def culprit(self) -> str:
        """The ranks in words."""
        return listed("rank", self.ranks, _MOST_NAMED) if self.are_all else rank_or_one_of(self.ranks)

    def fate(self, reader: int) -> str:
        """Say what became of them, and who has seen it: not where that is the rank ``reader``,
        which is told, or one of them."""
        return self.what if self.seen_by in (reader, *self.ranks) else f"{self.what} (seen by rank {self.seen_by})"

    def words(self, reader: int) -> str:
        """Say to the rank ``reader`` who is to blame, and for what."""
        return f"{self.culprit} {self.fate(reader)}"


def blame_of(record: Ended) -> Blame:
    """Blame the ranks of ``record``, where nothing else is known."""
    if isinstance(record, Absent):
        return Blame(record.ranks, record.what, record.seen_by, are_all=True)
    if isinstance(record, Gone):
        return Blame((record.rank,), record.what, record.seen_by, record.is_unheard)
    return Blame((record.rank,), record.what, record.rank)


def rank_or_one_of(ranks: Iterable[int]) -> str:
    """The rank, or the ranks one of which it is (a collective call of the backend does not say
    which)."""
    numbers = list(ranks)
    names = ", ".join(map(str, numbers[:_MOST_NAMED])) + ("" if len(numbers) <= _MOST_NAMED else f", … {numbers[-1]}")
    return f"one of ranks {names}" if len(numbers) > 1 else f"rank {names}"

"""Who failed: turns a broken wait into an error that names the rank that failed first, also on
ranks that never spoke to it.

A rank that dies is seen by the job's failure detector (failures/detector.py), which tells all
ranks; each breaks its calls in the groups that the dead rank is in. A rank whose wait breaks
otherwise reports for whom it waited, which breaks the group on all of its ranks, and each follows
what the others report: from the rank it waited for to the rank that one waited for, to one that
reports nothing (it is stuck, or never came) or that says why it left. Rejected: the first to see a
failure names its neighbour for all. Where ranks did not start together, the first to run out of
patience is often one that waits for an innocent rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.failures.descriptors import CLIENT, require
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import Absent, Asked, Left, Record, Report, told
from commlayer.failures.knowledge import Blame, Knowledge, blame_of, rank_or_one_of
from commlayer.failures.waits import is_timeout
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, InternalError, PeerError
from commlayer.profiles.printable import say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = [
    "Diagnosed",
    "FailedConnection",
    "FailedStep",
    "FailedWait",
    "Failure",
    "FailureBoard",
    "inquire",
    "own_client",
    "why_left",
]


def why_left(error: BaseException) -> str:
    """The words by which the other ranks hear of an error that made this one leave."""
    name, text = type(error).__name__, str(error)
    return f"left with {name}: {text}" if text else f"left with {name}"


_SETTLE_BROKEN_S = 5.0
"""Whoever closes a connection in good order has reported before, and of a dead rank the detector
knows."""
_SETTLE_TIMEOUT_S = 5.0
"""Ranks that started later run out of patience later."""
_SETTLE_UNHEARD_S = 1.0
"""A rank that leaves at once has told its neighbours why; those pass it on to whoever came too late
to hear it."""
_MOST_LISTED = 8
"""The most ranks that a report lists as waited for; more are all others of the group."""
_LONGEST_KEY = 200
_LATE = "did not answer"


_PHASE = "_commlayer_phase"
"""The attribute of an error that says what was going on: notes of exceptions are younger than
Python 3.10."""


class Diagnosed(NamedTuple):
    """The words of what was found out about who waits for whom, empty: nothing; and whether they
    say what is to be mended."""

    words: str = ""
    is_cause: bool = False


@dataclass(frozen=True, slots=True)
class FailedWait:
    """The wait in which a rank failed, and the ranks (global) of its group that it waited for."""

    rank: int
    peers: tuple[int, ...]
    group: str


@dataclass(frozen=True, slots=True)
class FailedStep(FailedWait):
    """A wait for a step of a call; all of it goes into the message."""

    collective: str
    plan: str
    step: str
    chunk: int
    sequence: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, group {self.group}, collective {self.collective} #{self.sequence}, plan {self.plan}, "
            f"step {self.step} of chunk {self.chunk}, waiting for {rank_or_one_of(self.peers)}"
        )


@dataclass(frozen=True, slots=True)
class FailedConnection(FailedWait):
    """A wait for connections with others. ``purpose``: what they are for."""

    purpose: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} could not connect to {rank_or_one_of(self.peers).removeprefix('one of ')} (group {self.group}, "
            f"{self.purpose})"
        )


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Have what breaks inside say, where :meth:`FailureBoard.connecting` explains it, that this was
    going on."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        setattr(error, _PHASE, getattr(error, _PHASE, text))  # the innermost knows best
        raise


@dataclass(frozen=True, slots=True)
class Failure:
    """How the wait ended: what the backend raised, after how long, and how long it was allowed to
    take, seconds."""

    cause: BaseException
    waited_s: float
    timeout_s: float

    @property
    def is_timeout(self) -> bool:
        return self.waited_s >= self.timeout_s or is_timeout(self.cause)

    @property
    def what(self) -> str:
        return f"{_LATE} within {self.timeout_s:g} s" if self.is_timeout else "died or closed its connection"


def own_client(store: Any) -> Store:
    """The same store through a connection of its own: a wait on one client holds up everybody else
    who asks it.

    Raises ClusterError where this process has no descriptors left: the store would try again and
    again for half an hour.
    """
    require(CLIENT, "a connection to the job's store")
    clone: Store = store.clone()  # torch's annotations lack it
    return clone


class FailureBoard:
    """The failures of one group as one rank knows them: reads and writes the job's detector.
    ``key`` is the group's alone in the job.

    ``rank`` is this rank, ``ranks`` are the group's (all global). It is broken once, for good: when
    a member dies or leaves by an exception, or when a member's wait in this group breaks.
    """

    def __init__(self, detector: FailureDetector, key: str, rank: int, ranks: Sequence[int]) -> None:
        self.detector, self.rank = detector, rank
        self._knowledge = detector.knowledge
        self.key = key if len(key) <= _LONGEST_KEY else sha256(key.encode()).hexdigest()
        self.ranks = frozenset(ranks)
        self.is_broken = False
        self.has_abandoned = False
        """Whether a collective was let go of: then a thread of Gloo's still waits in one of the
        group's inner groups."""
        self.on_timeout: Callable[[], None] = lambda: None
        """Called when a wait of this rank has lasted too long, before anybody is told and any
        connection is closed."""
        self.diagnosed: Callable[[], Diagnosed] = Diagnosed
        """Says what has been found out since about who waits for whom, and waits a moment for
        it."""
        self._breaking = threading.Lock()
        self.judge = Judge(self._knowledge, self.key, rank, self.ranks)
        self._wakers: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._knowledge.attach(self)

    def on_break(self, wake: Callable[[], None]) -> None:
        """Have ``wake``, a method whose object is not kept alive, called when the board breaks; at
        once where it has."""
        self._wakers.append(weakref.WeakMethod(wake))
        if self.is_broken:
            wake()

    def close(self) -> None:
        """The group is over: nothing breaks it any more."""
        self._knowledge.detach(self)

    def observe(self, record: Record) -> None:
        """See :class:`commlayer.failures.knowledge.Observer`."""
        if isinstance(record, Asked):
            return
        if isinstance(record, Report):
            if record.key != self.key or record.rank == self.rank:
                return
            with self._breaking:
                self.judge.first = self.judge.first or record
        elif isinstance(record, Absent):
            if self.ranks.isdisjoint(record.ranks):
                return
        elif record.rank not in self.ranks or record.rank == self.rank:
            return
        elif isinstance(record, Left) and not record.is_failure:
            return  # what it has sent before still arrives
        self._break()

    def _break(self) -> None:
        with self._breaking:
            if self.is_broken:
                return
            self.is_broken = True
        for waker in list(self._wakers):
            wake = waker()
            if wake is not None:
                wake()

    @contextlib.contextmanager
    def connecting(
        self,
        ranks: Iterable[int],
        group: str,
        purpose: str,
        timeout_s: float,
        wake: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Inside, this rank connects with ``ranks``, for ``timeout_s`` at most. What breaks is told
        to the other ranks, ``wake`` is called, and what is raised names the rank that failed first;
        an error of this rank's own is raised as it is."""
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, (ClusterError, InternalError)) and not isinstance(error, PeerError):
                self.leave(why_left(error))
                wake()
                raise
            innermost = getattr(error, _PHASE, "")
            inside = f": {innermost}" if innermost else ""
            others = tuple(rank for rank in ranks if rank != self.rank)
            wait = FailedConnection(self.rank, others, group, f"{purpose}{inside}")
            raise self.blame(wait, Failure(error, time.monotonic() - began, timeout_s), wake) from error

    def blame(self, wait: FailedWait, failure: Failure, wake: Callable[[], None] = lambda: None) -> ClusterError:
        """The error to raise for a broken wait. Before it is explained the others are told for whom
        this rank waited, and then woken by ``wake``, which closes its connections: others must find
        the report when they wake up."""
        if failure.is_timeout:
            inquire(self)
        first = self.judge.first
        is_woken = self.is_broken and not failure.is_timeout
        what = first.what if is_woken and first is not None and not first.is_leaving else failure.what
        is_all = len(wait.peers) > _MOST_LISTED
        with self._knowledge.changed:
            is_known = self.judge.dead() is not None  # then nobody needs to follow who waited for whom
        if not is_known:
            self.detector.tell(Report(self.key, self.rank, () if is_all else wait.peers, told(what), is_all))
        self._break()
        wake()
        return self.explain(wait, failure)

    def leave(self, why: str, *, is_consequence: bool = False) -> None:
        """Tell that this rank leaves the group on its own account, and why; ``is_consequence``: of
        another rank's failure."""
        self.detector.tell(Report(self.key, self.rank, (), told(why), is_consequence=is_consequence))
        self._break()

    def explain(self, wait: FailedWait, failure: Failure) -> ClusterError:
        """The error to raise for a broken wait. Never raises itself, and takes five seconds at
        most, after a timeout 7.5: what was found out about it (:attr:`diagnosed`) is waited for,
        too."""
        settle_s = min(_SETTLE_TIMEOUT_S, failure.timeout_s) if failure.is_timeout else _SETTLE_BROKEN_S
        verdict = self.judge.verdict(wait, failure, settle_s)
        leaver = "" if verdict.leaver is None else f", and rank {verdict.leaver} left because of it"
        is_late = verdict.are_all or verdict.what.startswith(_LATE)
        kind = CollectiveTimeoutError if is_late else PeerError
        diagnosis = self.diagnosed() if failure.is_timeout else Diagnosed()
        # On lines of its own: the first one is what programs search.
        diagnosed = f"\n{diagnosis.words}" if diagnosis.words else ""
        remedy = "mend what is found below" if diagnosis.is_cause else f"look at the log of {verdict.culprit}"
        return kind(
            f"{verdict.words(wait.rank)}{leaver}; here: {wait}. Nothing more can be sent here: {remedy}, then restart the job"
            f"{diagnosed}"
        )

    @property
    def has_leaver(self) -> bool:
        """Whether a member has left the job, in good order or not: no connection with it can be
        made any more."""
        return self.is_broken or any(rank in self.ranks for rank in list(self._knowledge.left))


def inquire(board: FailureBoard) -> None:
    """Call the ``on_timeout`` of a board. Raises nothing: the wait's own error is to be told,
    whatever becomes of the inquiry."""
    try:
        board.on_timeout()
    except Exception as error:  # noqa: BLE001
        say(f"rank {board.rank} could not ask who waits for whom: {type(error).__name__}: {error}")


class Judge:
    """The judge of the broken waits in one group, by what this rank knows: follows reports from the
    rank that one waited for to the rank that this one waited for."""

    def __init__(self, knowledge: Knowledge, key: str, rank: int, ranks: frozenset[int]) -> None:
        self._knowledge, self._key, self._rank, self._ranks = knowledge, key, rank, ranks
        self.first: Report | None = None
        """The first report of another member."""

    def verdict(self, wait: FailedWait, failure: Failure, settle_s: float) -> Blame:
        """Who is to blame, when it is certain, or as far as is known after ``settle_s`` seconds."""
        until = time.monotonic() + settle_s
        unheard_until = until - settle_s + min(settle_s, _SETTLE_UNHEARD_S)
        with self._knowledge.changed:
            while True:
                verdict, is_certain = self._follow(wait, failure)
                left_s = (unheard_until if verdict.is_unheard else until) - time.monotonic()
                if is_certain or left_s <= 0:
                    return verdict
                self._knowledge.changed.wait(left_s)

    def culprit(self) -> str:
        """The rank that failed first and what became of it, for messages; empty where none is
        known."""
        failure = Failure(RuntimeError("Connection closed"), 0.0, 1.0)
        verdict = self.verdict(FailedWait(self._rank, (), ""), failure, _SETTLE_BROKEN_S)
        return verdict.words(self._rank) if verdict.ranks else ""

    def _follow(self, wait: FailedWait, failure: Failure) -> tuple[Blame, bool]:
        """Who is to blame as far as is known, and whether nothing that may still come would change
        it."""
        dead = self.dead()
        if dead is not None:
            return dead, not dead.is_unheard
        own = self._knowledge.reports.get((self._key, self._rank))
        if own is not None and own.is_leaving:
            return self._of_leaver(own), True
        first = None if failure.is_timeout else self.first
        # Who was woken by a rank that waited for this one follows its own wait, too.
        seen = {wait.rank} if first is None else set()
        sources = dict.fromkeys(wait.peers if first is None else (first.rank,), (failure.what, wait.rank))
        while True:
            reports = {peer: self._knowledge.reports.get((self._key, peer)) for peer in sources}
            leaving = next((report for report in reports.values() if report is not None and report.is_leaving), None)
            if leaving is not None:
                return self._of_leaver(leaving), True
            silent = [peer for peer, report in reports.items() if report is None]
            if silent:  # they have left the job in good order, or are to be waited for
                farewells = [self._knowledge.left[peer] for peer in silent if peer in self._knowledge.left]
                if not farewells:
                    return Blame(tuple(silent), *sources[silent[0]]), False
                farewell = farewells[0]
                return self._of_leaver(farewell) if farewell.is_failure else blame_of(farewell), True
            seen |= set(sources)
            sources = self._waited_for(report for report in reports.values() if report is not None)
            sources = {rank: source for rank, source in sources.items() if rank not in seen}
            if not sources:  # they wait for each other, as ranks do that called different things
                what = f"{failure.what}, and waits in turn: did all ranks call the same collectives in the same order?"
                return Blame(wait.peers, what, wait.rank), False

    def _waited_for(self, reports: Iterable[Report]) -> dict[int, tuple[str, int]]:
        """The ranks that these waited for; what each of them reports, and who."""
        sources: dict[int, tuple[str, int]] = {}
        has_all = False
        for report in reports:
            if not report.is_all:
                sources |= dict.fromkeys(report.peers, (report.what, report.rank))
            elif not has_all:  # once: in a large group each of them waits for all
                has_all = True
                sources |= dict.fromkeys(self._ranks, (report.what, report.rank))
        return sources

    def dead(self) -> Blame | None:
        """The member that died first, or left by an exception: what came later may be a consequence
        of it."""
        return self._knowledge.first_failure(self._ranks)

    def _of_leaver(self, record: Report | Left) -> Blame:
        """Who is to blame for it that a member left: itself, or the rank of the job because of
        which it did."""
        cause = self._knowledge.first_failure(self._knowledge.ranks) if record.is_consequence else None
        if cause is None:
            return Blame((record.rank,), record.what, record.rank)
        return replace(cause, leaver=None if record.rank in (self._rank, *cause.ranks) else record.rank)

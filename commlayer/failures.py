"""Who failed: turns a broken wait into an error that names the rank that failed first, also on ranks that never spoke to it.

A rank that dies is seen at once only by those who wait for it; the others wait for *those*, and would blame the wrong
rank. So a rank whose wait breaks writes for whom it waited to the job's store, then closes its connections (which wakes
whoever waits for it), then follows what the others wrote: from the rank it waited for to the rank that one waited for,
to one that wrote nothing (it is dead, stuck, or never came) or that wrote why it left.
Rejected: the first to see a failure names its neighbour for all. Where ranks did not start together, the first to run
out of patience is often one that waits for an innocent rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = ["Failure", "FailureBoard", "Wait", "own_client"]

Answer = TypeVar("Answer")

_SETTLE_BROKEN_S = 0.3
"""Whoever closes a connection in good order has written before; a dead rank never will."""
_SETTLE_TIMEOUT_S = 5.0
"""Ranks that started later run out of patience later."""
_STORE_PATIENCE_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank was waiting for when it failed; all of it goes into the message."""

    rank: int
    peers: tuple[int, ...]
    group: str
    collective: str
    plan: str
    step: str
    chunk: int
    sequence: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, group {self.group}, collective {self.collective} #{self.sequence}, plan {self.plan}, "
            f"step {self.step} of chunk {self.chunk}, waiting for {_named(self.peers)}"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """How the wait ended: what the backend raised, after how long, and how long it was allowed to take, seconds."""

    cause: BaseException
    waited_s: float
    timeout_s: float

    @property
    def is_timeout(self) -> bool:
        return self.waited_s >= self.timeout_s or "timed out" in str(self.cause).lower()

    @property
    def what(self) -> str:
        return f"did not answer within {self.timeout_s:g} s" if self.is_timeout else "died or closed its connection"


@dataclass(frozen=True, slots=True)
class _Verdict:
    ranks: tuple[int, ...]
    what: str
    seen_by: int


def own_client(store: Any) -> Store:
    """The same store through a connection of its own: a wait on one client holds up everybody else who asks it."""
    clone: Store = store.clone()  # torch's annotations lack it
    return clone


class FailureBoard:
    """The place where the ranks of one grid write and read what broke. ``key`` is theirs alone in the job's store."""

    def __init__(self, store: Store, key: str, rank: int) -> None:
        self.store = store
        self.key = key
        self.rank = rank
        self._is_unreachable = False
        self._client: Store | None = None

    def report(self, wait: Wait, failure: Failure) -> None:
        """Write for whom this rank waited. Before it closes its connections: others must find it when they wake up."""
        self._write({"peers": wait.peers, "what": failure.what})

    def leave(self, why: str) -> None:
        """Write that this rank leaves on its own account, and why."""
        self._write({"peers": [], "what": why})

    def explain(self, wait: Wait, failure: Failure) -> ClusterError:
        """The error to raise for a broken wait. Never raises itself, and takes ten seconds at most."""
        settle_s = min(_SETTLE_TIMEOUT_S, failure.timeout_s) if failure.is_timeout else _SETTLE_BROKEN_S
        note = ""
        try:
            until = time.monotonic() + settle_s
            verdict = self._bounded(
                lambda store: self._follow(store, wait, failure, until), settle_s + _STORE_PATIENCE_S
            )
        except Exception:  # noqa: BLE001  any failure of the store means the same here, and the first error matters more
            verdict = _Verdict(wait.peers, failure.what, wait.rank)
            note = " The store cannot be reached either: perhaps the rank that hosts it (rank 0) is gone."
        culprit = _named(verdict.ranks)
        seen = "" if verdict.seen_by == wait.rank else f" (seen by rank {verdict.seen_by})"
        kind = CollectiveTimeoutError if verdict.what.startswith("did not answer") else PeerError
        return kind(
            f"{culprit} {verdict.what}{seen}; here: {wait}.{note} Nothing more can be sent here: look at the "
            f"log of {culprit}, then restart the job"
        )

    def _follow(self, store: Store, wait: Wait, failure: Failure, until: float) -> _Verdict:
        """From rank to rank along what they wait for, to those who wait for nobody."""
        seen = {wait.rank}
        sources = dict.fromkeys(wait.peers, (failure.what, wait.rank))
        while True:
            following: dict[int, tuple[str, int]] = {}
            reports = {peer: self._read(store, peer, until) for peer in sources}
            silent = tuple(peer for peer, report in reports.items() if report is None)
            for peer, report in reports.items():
                if report is None:
                    continue
                if not report["peers"]:
                    return _Verdict((peer,), report["what"], peer)
                following |= dict.fromkeys(report["peers"], (report["what"], peer))
            if silent:
                what, seen_by = sources[silent[0]]
                return _Verdict(silent, what, seen_by)
            seen |= set(sources)
            sources = {rank: source for rank, source in following.items() if rank not in seen}
            if not sources:  # they wait for each other, as ranks do that called different things
                what = f"{failure.what}, and waits in turn: did all ranks call the same collectives in the same order?"
                return _Verdict(wait.peers, what, wait.rank)

    def _bounded(self, ask: Callable[[Store], Answer], seconds: float) -> Answer:
        """``ask(store)``, which waits for ever where the way to it is cut and nothing says so."""
        if self._is_unreachable:
            raise TimeoutError
        answer: Future[Answer] = Future()

        def run() -> None:
            try:
                if self._client is None:  # made when it is needed, which is hardly ever
                    self._client = own_client(self.store)
                answer.set_result(ask(self._client))
            except BaseException as error:  # noqa: BLE001  carried to the thread that asks
                answer.set_exception(error)

        threading.Thread(target=run, name="commlayer-store", daemon=True).start()
        try:
            return answer.result(seconds)
        except FutureTimeoutError:
            self._is_unreachable = True  # the thread still holds the store's lock: nobody may ask again
            raise

    def _read(self, store: Store, rank: int, until: float) -> dict[str, Any] | None:
        """What ``rank`` wrote, or None when it has not until then. The clock runs once for all reads of one verdict."""
        key = f"{self.key}/{rank}"
        while not store.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)
        report: dict[str, Any] = json.loads(store.get(key))
        return report

    def _write(self, report: dict[str, Any]) -> None:
        key, text = f"{self.key}/{self.rank}", json.dumps(report)
        try:
            self._bounded(lambda store: store.compare_set(key, "", text), _STORE_PATIENCE_S)  # the first one counts
        except Exception:  # noqa: BLE001  see explain
            return


def _named(ranks: Iterable[int]) -> str:
    """The rank, or the ranks one of which it is (a collective call of the backend does not say which)."""
    names = ", ".join(map(str, ranks))
    return f"one of ranks {names}" if "," in names else f"rank {names}"

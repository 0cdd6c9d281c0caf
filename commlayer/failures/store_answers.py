"""Waiting for an answer of the job's store, and the errors where it is silent or gone.

A wait in C++ has the store's own timeout, half an hour perhaps, and holds the lock of this
process's only connection to it: whoever asks anything else waits behind it, also where the rank
that was waited for is known to be dead. So :class:`PolledStore` asks again and again: the lock is
free between two questions, and the wait ends when its board breaks. Questions become rarer the
longer a wait lasts, so that many ranks that wait for one do not keep the process busy that hosts
the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.failures.waits import within
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

__all__ = ["Deadline", "PolledStore", "asked_store", "is_agents_store", "store_gone", "store_host", "store_silent"]

_Answer = TypeVar("_Answer")
_LEAST_S = 0.5
"""How long an answer is waited for at least: a store that connected at the last moment is not silent yet."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_PAUSE = 0.1
"""The part of the time waited so far that is let go by before the next question."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True)
class Deadline:
    """A timeout, seconds, which messages name, and the time of the monotonic clock at which it is
    over.

    Several waits share one, so that together they take no longer than the timeout.
    """

    timeout_s: float
    until: float

    @classmethod
    def since(cls, timeout_s: float, began: float | None = None) -> Deadline:
        """The deadline ``timeout_s`` seconds after ``began`` (monotonic clock; None: now)."""
        return cls(timeout_s, (time.monotonic() if began is None else began) + timeout_s)

    def left_s(self) -> float:
        """The seconds that are left, at least 0."""
        return max(self.until - time.monotonic(), 0.0)


def asked_store(
    ask: Callable[[], _Answer],
    deadline: Deadline,
    where: str,
    lost: Callable[[], str] | None = None,
    wait: Callable[[Callable[[], _Answer]], _Answer] | None = None,
) -> _Answer:
    """``ask()``, of the job's store, before ``deadline``. ``lost``: says which rank has taken the
    store with it; ``wait``: waits for it in the place of :func:`commlayer.failures.waits.within`,
    and raises TimeoutError when it gives up.

    Raises CollectiveTimeoutError where the store does not answer, PeerError where it is gone; both
    begin with ``where``. Errors of ``ask`` and ``wait`` that are commlayer's own are raised as they
    are.
    """
    try:
        return within(max(deadline.left_s(), _LEAST_S), ask) if wait is None else wait(ask)
    except ClusterError:
        raise
    except TimeoutError as error:
        raise store_silent(where, deadline.timeout_s) from error
    except NotImplementedError:  # a RuntimeError of Python's, but the store is there: it lacks a verb
        raise
    except RuntimeError as error:
        raise store_gone(where, store_host() if lost is None else lost(), error) from error


def store_silent(where: str, timeout_s: float, address: str = "") -> CollectiveTimeoutError:
    """The error of a store that has not answered. ``address``: where it was looked for, if that has
    not connected."""
    at, reached = (f" at {address}", "that address (MASTER_ADDR, MASTER_PORT)") if address else ("", "it")
    return CollectiveTimeoutError(
        f"{where}: the job's store{at} did not answer within {timeout_s:g} s: {store_host()}, and whether {reached} "
        "can be reached from here"
    )


def store_gone(where: str, why: str, error: RuntimeError) -> PeerError:
    """The error of a store that is no more; ``error``: what it has raised."""
    return PeerError(f"{where}: the job's store is gone: {why} ({error})")


def is_agents_store() -> bool:
    """Whether torchrun's agent hosts the job's store, and no rank."""
    return os.environ.get(_AGENT_STORE) == str(True)


def store_host() -> str:
    """Who hosts the job's store, and what to look at where it does not answer."""
    if is_agents_store():
        return "torchrun's agent hosts it: look at torchrun's log"
    return "rank 0 hosts it, unless the program has made a store of its own: look at the log of rank 0"


class PolledStore(Store):
    """``store``, whose waits end after ``timeout_s`` seconds, and when ``is_over()`` says so: both
    raise RuntimeError.

    Whoever gives it to C++ keeps this object alive meanwhile, since C++ does not.
    """

    def __init__(self, store: Store, timeout_s: float, is_over: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._timeout_s, self._is_over = store, timeout_s, is_over
        self.is_lost = False
        """Whether a question to the store has failed: the process that hosts it is gone."""

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            self.is_lost = True
            raise

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``."""
        with self._asking():
            self._store.set(key, value)  # type: ignore[arg-type]  # it takes bytes too

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is there. Raises as :meth:`wait`."""
        self.wait([key])
        with self._asking():
            return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a number; return the sum."""
        with self._asking():
            return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are there."""
        with self._asking():
            return self._store.check(keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``; return what it is then."""
        with self._asking():
            return self._store.compare_set(key, expected, desired)  # type: ignore[arg-type]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all of ``keys`` are there. Raises RuntimeError."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        began, names = time.monotonic(), list(keys)
        while not self.check(names):
            waited_s = time.monotonic() - began
            if self._is_over():
                raise RuntimeError("Connection closed: another rank of the job has failed")
            if waited_s > limit_s:
                raise RuntimeError(f"Timed out after {limit_s:g} s, waiting for {', '.join(names)} in the job's store")
            time.sleep(min(max(_FIRST_PAUSE_S, _PAUSE * waited_s), _LONGEST_PAUSE_S, max(limit_s - waited_s, 0.0)))

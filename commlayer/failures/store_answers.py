"""Waiting for an answer of the job's store, and the errors where it is silent or gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from commlayer.failures.waits import within
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

__all__ = ["Deadline", "asked_store", "is_agents_store", "store_gone", "store_host", "store_silent"]

_Answer = TypeVar("_Answer")
_LEAST_S = 0.5
"""How long an answer is waited for at least: a store that connected at the last moment is not silent yet."""
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

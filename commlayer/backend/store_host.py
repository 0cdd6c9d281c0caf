"""Making the job's store for ``init_process_group``: within the timeout, by name, and without a
wait for all ranks.

torch makes the store before it asks a backend for anything. Its own waits name nobody and are not
bounded by its timeout:

- A client connects with pauses at random, gives up up to one pause before its timeout, sleeps once
  more (at random, as long as it has tried so far) and then has the whole timeout again. Given 3 s
  at an address where nobody listens, torch 2.13 came back after 3.6 to 9.7 s. A host name of two
  families of addresses may double that.
- A client that has connected waits without a limit for the first answer: for ever where the process
  at the other end is stopped.
- The rank that hosts the store waits for as many clients as there are ranks. Where one does not
  come it says how many came, leaves, and takes the store with it; so the others blame it.

So here a client first looks, again and again, whether anybody listens there, and torch's client is
made only then, given an eighth of the time that is left. All of it runs on a thread, which is let
go of where the store has connected and does not answer. The host does not wait: the failure
detector, which all ranks join next, knows who has not come. What is left of the timeout then is the
time for joining (:func:`joining_since`).

Rejected: torch's client alone on a thread that is let go of. Nearly every rank would let go of one
where nobody listens, and it comes back while the interpreter ends, which aborts the process.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError

from commlayer.failures.store_answers import Deadline, is_agents_store, store_silent
from commlayer.failures.waits import is_timeout, within

__all__ = ["joining_since", "own_store_waits"]

_replacing = threading.Lock()
_began: ContextVar[float | None] = ContextVar("commlayer_joining_since", default=None)
_SHARE = 1 / 8
"""The part of the time that is left which torch's client is given: it may take six times as
much."""
_DIAL_S = 2.0
"""How long one look whether anybody listens may take for each address."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_PAUSE = 0.1
"""The part of the time waited so far that is let go by before the next look."""
_GRACE_S = 1.0
"""How much longer than the timeout the thread is waited for, which ends by itself unless the store
is silent."""


def joining_since() -> float:
    """When the ``init_process_group`` that is under way on this thread began (monotonic clock);
    now, where there is none."""
    began = _began.get()
    return time.monotonic() if began is None else began


@contextmanager
def own_store_waits() -> Iterator[None]:
    """Inside, a job is joined (:func:`joining_since`), and torch's rendezvous makes the job's store
    by :func:`_make_store`."""
    torchs: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    token = _began.set(time.monotonic())
    is_ours = _replacing.acquire(blocking=False)  # else another thread joins a job too, and has replaced it
    original = torchs._create_c10d_store

    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any) -> Any:
        return _make_store(original, hostname, port, rank, timeout, *args)

    if is_ours:
        torchs._create_c10d_store = create
    try:
        yield
    finally:
        _began.reset(token)
        if is_ours:
            torchs._create_c10d_store = original
            _replacing.release()


def _make_store(original: Any, hostname: str, port: int, rank: int, timeout: timedelta, *args: Any) -> Any:
    """The store at ``hostname:port``, which torch's function ``original`` makes; for no certain
    number of ranks, so that nobody waits for all of them. Raises CollectiveTimeoutError where it
    does not answer within ``timeout``; else as torch."""
    is_host = rank == 0 and not is_agents_store()
    deadline = Deadline.since(timeout.total_seconds(), joining_since())

    def make() -> Any:
        began, failure = time.monotonic(), None
        while (left_s := deadline.left_s()) > 0:
            if is_host or _listens(hostname, port, left_s):
                try:
                    return original(hostname, port, rank, None, timedelta(seconds=left_s * _SHARE), *args)
                except DistNetworkError as error:
                    if is_host and not is_timeout(error):  # it cannot listen there
                        raise
                    failure = error
            waited_s = time.monotonic() - began
            time.sleep(min(max(_FIRST_PAUSE_S, _PAUSE * waited_s), _LONGEST_PAUSE_S, deadline.left_s()))
        raise TimeoutError("nobody listens there") from failure

    try:
        return within(deadline.left_s() + _GRACE_S, make)
    except TimeoutError as error:
        raise store_silent(f"rank {rank}, joining the job", deadline.timeout_s, f"{hostname}:{port}") from error


def _listens(hostname: str, port: int, left_s: float) -> bool:
    """Whether anybody listens at ``hostname:port``, as far as that is known within ``left_s``
    seconds."""
    try:
        socket.create_connection((hostname, port), min(left_s, _DIAL_S)).close()
    except OSError:
        return False
    except ValueError:  # a name that Python cannot look up: torch says what is wrong with it
        pass
    return True

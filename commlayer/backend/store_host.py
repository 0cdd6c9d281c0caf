"""Making the job's store for ``init_process_group``: within the timeout, by name, and without a wait for all ranks.

torch makes the store before it asks a backend for anything, and its own waits name nobody. A client of a store that is not up
gives up after twice the timeout, because it has the whole of it for addresses of IPv6, and again for those of IPv4. The rank that
hosts the store waits for as many clients as there are ranks, and where one does not come it says how many came, leaves, and takes
the store with it; so the others blame it. Here a client is given half of what is left of the timeout at a time, and the host does
not wait: the failure detector, which all ranks join next, knows who has not come.

Rejected: a wait on a thread that is let go of. It comes back while the interpreter ends, which aborts the process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from commlayer.failures.store_answers import store_silent
from commlayer.failures.waits import is_timeout

__all__ = ["own_store_waits"]

_replacing = threading.Lock()
_LAST = 0.1
"""The part of the timeout that is too short for another try."""


@contextmanager
def own_store_waits() -> Iterator[None]:
    """Inside, torch's rendezvous makes the job's store by :func:`_make_store`."""
    torchs: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    if not _replacing.acquire(blocking=False):  # another thread joins a job too, with torch's own waits or with ours
        yield
        return
    original = torchs._create_c10d_store

    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any) -> Any:
        return _make_store(original, hostname, port, rank, timeout, *args)

    torchs._create_c10d_store = create
    try:
        yield
    finally:
        torchs._create_c10d_store = original
        _replacing.release()


def _make_store(original: Any, hostname: str, port: int, rank: int, timeout: timedelta, *args: Any) -> Any:
    """The store at ``hostname:port``, which torch's function ``original`` makes; for no certain number of ranks, so that nobody
    waits for all of them. Raises CollectiveTimeoutError where it does not answer within ``timeout``; else as torch."""
    limit_s, until = timeout.total_seconds(), time.monotonic() + timeout.total_seconds()
    left_s = limit_s
    while True:
        try:
            return original(hostname, port, rank, None, timedelta(seconds=left_s / 2), *args)
        except RuntimeError as error:  # noqa: PERF203  it tries for seconds
            left_s = until - time.monotonic()
            if not is_timeout(error):
                raise
            if left_s < _LAST * limit_s:
                where = f"rank {rank}, joining the job"
                raise store_silent(where, limit_s, f"{hostname}:{port}") from error

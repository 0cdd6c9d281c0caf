"""The barrier that torch adds behind making a group where TORCH_DIST_INIT_BARRIER is 1, ended by a death in the job.

All ranks of the job wait in it, also those that the group does not have, and torch's own wait in the store ends with the timeout
and names nobody. It is torch's barrier, on a store that is asked again and again (:mod:`commlayer.failures.polled_store`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlayer.diagnosis.group_life import making_group
from commlayer.diagnosis.inquiry import inquiry_of
from commlayer.diagnosis.ring import ring_size
from commlayer.failures.detector import FailureDetector
from commlayer.failures.polled_store import PolledStore
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, PeerError

__all__ = ["wait_at_barrier"]


class _GivenUp(Exception):
    """The end of the wait: no RuntimeError, after which torch would wait again. ``error``: why."""

    def __init__(self, error: ClusterError) -> None:
        super().__init__()
        self.error = error


def wait_at_barrier(
    barrier: Callable[..., None],
    detector: FailureDetector,
    store: Any,
    name: str,
    count: int,
    timeout: timedelta,
) -> None:
    """torch's ``barrier`` of ``count`` ranks of the job in ``store``, behind making the group ``name``.

    Raises PeerError where a rank of the job has failed, CollectiveTimeoutError where not all come within ``timeout``.
    """
    rank, limit_s = detector.rank, timeout.total_seconds()
    until = time.monotonic() + limit_s
    where = f"rank {rank}, group {name}, which has been made: waiting for {count} ranks (TORCH_DIST_INIT_BARRIER=1)"

    def is_over() -> bool:
        failure = detector.failure()
        if failure:
            raise _GivenUp(PeerError(f"{where}: {failure}"))
        if time.monotonic() > until:
            raise _GivenUp(CollectiveTimeoutError(f"{where}: not all have come within {limit_s:g} s"))
        return False

    is_of_job = count == len(detector.ranks)  # else all of them have just made the group together
    key = f"{name}#barrier.{detector.life}"
    try:
        with making_group(ring_size() if is_of_job else 0, "new_group", key, name, detector.ranks):
            barrier(rank, PolledStore(store, limit_s, is_over), name, count, timeout)
    except _GivenUp as given_up:
        error, inquiry = given_up.error, inquiry_of(detector)
        if inquiry is not None and isinstance(error, CollectiveTimeoutError):
            inquiry.timed_out()
            found = inquiry.diagnosed()
            error = CollectiveTimeoutError(f"{error}\n{found.words}") if found.words else error
        raise error from None

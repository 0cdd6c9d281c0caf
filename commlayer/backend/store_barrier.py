"""The barrier that torch adds behind making a group where TORCH_DIST_INIT_BARRIER is 1, ended by a death in the job.

All ranks of the job wait in it, also those that the group does not have, and torch's own wait in the
store ends with the timeout and names nobody. It is torch's barrier, on a store that is asked again and
again (:class:`commlayer.failures.store_answers.PolledStore`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlayer.calls.group_life import making_group
from commlayer.calls.instruments import inquiries
from commlayer.calls.ring import ring_size
from commlayer.failures.detector import FailureDetector, host_lost
from commlayer.failures.store_answers import PolledStore, store_gone
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
        failure = detector.knowledge.failure()
        if failure:
            raise _GivenUp(PeerError(f"{where}: {failure}"))
        if time.monotonic() > until:
            raise _GivenUp(CollectiveTimeoutError(f"{where}: not all have come within {limit_s:g} s"))
        return False

    polled, key = PolledStore(store, limit_s, is_over), f"{name}#barrier.{detector.life}"
    try:
        with making_group(ring_size(), "new_group", key, name, detector.ranks):
            _wait(barrier, polled, detector, where, rank, name, count, timeout)
    except CollectiveTimeoutError as error:
        inquiry = inquiries().inquiry_of(detector)
        if inquiry is None:
            raise
        inquiry.timed_out()
        diagnosis = inquiry.diagnosed()
        raise CollectiveTimeoutError(f"{error}\n{diagnosis.words}" if diagnosis.words else str(error)) from None


def _wait(
    barrier: Callable[..., None],
    polled: PolledStore,
    detector: FailureDetector,
    where: str,
    *args: Any,
) -> None:
    """torch's barrier on ``polled``, its errors in our words."""
    rank, *others = args
    try:
        barrier(rank, polled, *others)
    except _GivenUp as given_up:
        raise given_up.error from None
    except RuntimeError as error:
        if not polled.is_lost:
            raise
        raise store_gone(where, host_lost(detector.knowledge), error) from error

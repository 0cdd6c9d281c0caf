"""Barriers: bodies, which run in the group's order."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

from commlayer.backend.calls import Calls
from commlayer.failures.waits import bounded

__all__ = ["barrier", "monitored_barrier"]


def barrier(calls: Calls, opts: Any) -> None:
    """Return when all ranks have come."""
    if calls.needs_look:
        calls.look("barrier", None, 0, timeout=opts.timeout, plannable=False)
    calls.flat("barrier", 0, calls.inner.gloo.barrier, opts)


def monitored_barrier(calls: Calls, limit: timedelta, wait_all_ranks: bool) -> None:
    """A barrier that names the ranks that do not come within ``limit``."""
    # Gloo's own text names ranks of the group; it is what programs look for, so it is left as it is.
    task = partial(calls.inner.gloo.monitored_barrier, limit, wait_all_ranks)
    if calls.members.size == 1:
        task()
        return
    began, limit_s, planned = time.monotonic(), limit.total_seconds(), calls.inner.planned
    try:
        bounded(task, planned.board, 2 * limit_s + 5.0, "monitored_barrier")  # it names ranks itself at its limit
    except RuntimeError as error:
        if not planned.board.is_broken:
            raise
        waited_s = time.monotonic() - began
        raise planned.explain(error, "monitored_barrier", calls.order.sequence, waited_s, limit_s) from error

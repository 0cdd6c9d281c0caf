"""Where inner Gloo groups wait before they are freed.

Freeing one joins its threads while holding Python's interpreter lock; a thread that has just finished a call may be waiting
for that lock, to let go of the call's tensors. Then neither goes on: a hang of torch's own (seen on plain Gloo when a DDP
model is freed right after ``destroy_process_group``, in 4 of 25 runs). Some seconds later those threads are idle.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from typing import Any

__all__ = ["bury"]

_REST_S = 5.0
_GOING_IDLE_S = 0.05
_graves: deque[tuple[float, Any]] = deque()


def bury(gloo: Any) -> None:
    """Keep ``gloo`` alive for some seconds more, until the next call of this function after them or the program's end."""
    if not _graves:
        atexit.register(_wait_for_the_latest)
    now = time.monotonic()
    while _graves and now - _graves[0][0] > _REST_S:
        _graves.popleft()
    _graves.append((now, gloo))


def _wait_for_the_latest() -> None:
    """The interpreter frees what is left: give the threads of the latest a moment with the lock."""
    if _graves and time.monotonic() - _graves[-1][0] < _GOING_IDLE_S:
        time.sleep(_GOING_IDLE_S)

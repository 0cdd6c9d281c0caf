"""A store that is asked again and again where it would be waited on, so that a wait can be given
up.

A wait in C++ has the store's own timeout, half an hour perhaps, and holds the lock of this
process's only connection to it: whoever asks anything else waits behind it, also where the rank
that was waited for is known to be dead. Here the lock is free between two questions, and the wait
ends when its board breaks. Questions become rarer the longer a wait lasts, so that many ranks that
wait for one do not keep the process busy that hosts the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = ["PolledStore"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_PAUSE = 0.1
"""The part of the time waited so far that is let go by before the next question."""


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

"""Asynchronous calls: a handle to wait for, and the queue that keeps all calls of a Communicator in one order.

Synchronous calls run on the caller's thread when nothing is queued, otherwise behind what is queued; asynchronous ones
on one worker thread. So there is one issuing thread at a time, and first in, first out on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar

__all__ = ["OrderedQueue", "Work"]

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class Work(Generic[Result]):
    """A call under way. ``wait()`` returns its result, or raises what the call raised."""

    def __init__(self, future: Future[None], result: Result) -> None:
        self._future = future
        self._result = result

    def wait(self) -> Result:
        """Block until the call has ended and return its output. Bounded by the Communicator's timeout."""
        self._future.result()
        return self._result

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What the call raised, or None while it runs and when it went well."""
        return self._future.exception() if self._future.done() else None


class OrderedQueue:
    """First in, first out; inline where that keeps the order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # held while a task runs
        self._count = threading.Lock()  # guards the counter
        self._queued = 0
        self._worker: ThreadPoolExecutor | None = None

    def run(self, task: Callable[Parameters, None], *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Run ``task(*args)`` after everything that was submitted before, and return when it has ended."""
        if self._queued == 0:  # only submit() raises it, and a caller's own submissions come before its runs
            with self._lock:
                task(*args, **kwargs)
        else:
            self.submit(task, *args, **kwargs).result()

    def submit(
        self, task: Callable[Parameters, None], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[None]:
        """Queue ``task`` behind everything submitted before."""
        with self._count:
            self._queued += 1
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            return self._worker.submit(self._guarded, partial(task, *args, **kwargs))

    def close(self) -> None:
        """Wait for what is queued and stop the worker."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            with self._lock:
                task()
        finally:
            with self._count:
                self._queued -= 1

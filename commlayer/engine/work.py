"""Asynchronous calls: a handle to wait for, and the queue that keeps all calls of a Communicator in one order.

Synchronous calls run on the caller's thread when nothing is queued, otherwise behind what is queued; asynchronous ones
on one worker thread. So there is one issuing thread at a time, and first in, first out on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from commlayer.failures.forks import disown_in_child

__all__ = ["Join", "OrderedQueue", "Work"]

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
Join = Callable[[], None] | None
"""Makes the current CUDA stream wait for a call; None where nothing is left to wait for."""


class Work(Generic[Result]):
    """A call under way. ``wait()`` returns its result, or raises what the call raised."""

    def __init__(self, future: Future[Join], result: Result) -> None:
        self._future = future
        self._result = result

    def wait(self) -> Result:
        """Return the call's output when it may be used, bounded by the Communicator's timeout.

        On the CPU that is when the call has ended. On CUDA the host does not wait: what the current stream does from now
        on comes after the call.
        """
        join_stream = self._future.result()
        if join_stream is not None:
            join_stream()
        return self._result

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not (on CUDA: whether it has been issued)."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What the call raised, or None while it runs and when it went well."""
        return self._future.exception() if self._future.done() else None


class OrderedQueue:
    """First in, first out; inline where that keeps the order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # held while a task runs
        self._count = threading.Lock()  # guards the counter, and the order of the queue
        self._queued = 0
        self._tasks: SimpleQueue[tuple[Future[Join], Callable[[], None]] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        disown_in_child(self)

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`. What was queued before runs in the parent."""
        self._lock, self._count = threading.Lock(), threading.Lock()
        self._queued, self._tasks, self._worker = 0, SimpleQueue(), None

    def run(self, task: Callable[Parameters, None], *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Run ``task(*args)`` after everything that was submitted before, and return when it has ended."""
        if self._queued == 0:  # only submit() raises it, and a caller's own submissions come before its runs
            with self._lock:
                task(*args, **kwargs)
        else:
            self.submit(task, *args, **kwargs).result()

    def submit(
        self, task: Callable[Parameters, None], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Join]:
        """Queue ``task`` behind everything submitted before."""
        future: Future[Join] = Future()
        with self._count:
            self._queued += 1
            if self._worker is None:
                # A daemon, unlike a ThreadPoolExecutor's: a rank whose main thread dies must end at once, so that its
                # peers see it, not after the timeout of the call that it left behind.
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()
            self._tasks.put((future, partial(task, *args, **kwargs)))
        return future

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for what is queued and stop the worker. False where it did not end in time (seconds; None: no limit)."""
        with self._count:
            worker, self._worker = self._worker, None
        if worker is None:
            return True
        self._tasks.put(None)
        worker.join(timeout_s)
        return not worker.is_alive()

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            failure: BaseException | None = None
            try:
                with self._lock:
                    task()
            except BaseException as error:  # noqa: BLE001  carried to whoever waits
                failure = error
            with self._count:
                self._queued -= 1
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

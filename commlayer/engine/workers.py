"""The threads of a process on which groups run what they have queued: as many as there are groups
with something queued.

A group has one thread while it has something to run, so that its calls keep their order, and then
gives it back. One thread for all groups would not do: a call waits for its peers, and they may be
waiting in another group for a call that this rank has queued behind it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

from commlayer.forked_child import in_forked_child

__all__ = ["Queue", "Workers", "workers"]

_IDLE = "commlayer calls"


class Queue(Protocol):
    """Something with work to do on a thread."""

    name: str

    def work(self) -> None:
        """Do it. Raises nothing."""


class _Worker:
    """One thread, and what it is to do next; None: end."""

    def __init__(self, pool: Workers) -> None:
        self._pool = pool
        self.next: SimpleQueue[Queue | None] = SimpleQueue()
        # A daemon: a rank whose main thread dies must end at once, so that its peers see it.
        self.thread = threading.Thread(target=self._run, name=_IDLE, daemon=True)

    def _run(self) -> None:
        while (queue := self.next.get()) is not None:
            self.thread.name = queue.name
            queue.work()
            self.thread.name = _IDLE
            del queue  # or it would live until the next one comes
            if not self._pool.rest(self):
                return


class Workers:
    """Threads that do what queues have for them, made when they are needed.

    A queue joins before its first work, and leaves when it will have no more: there are never more
    idle threads than queues.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._num_queues = 0

    def join(self) -> None:
        """A queue will have work."""
        with self._lock:
            self._num_queues += 1

    def leave(self) -> None:
        """A queue will have no more work; returns when the threads that nobody needs have ended."""
        with self._lock:
            self._num_queues -= 1
            over = [self._idle.pop() for _ in range(len(self._idle) - self._num_queues)]
        for worker in over:
            worker.next.put(None)
            if worker.thread is not threading.current_thread():
                worker.thread.join()

    def run(self, queue: Queue) -> None:
        """Have a thread do ``queue.work()``. Raises RuntimeError where there is no thread to be
        had."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.thread.start()
        worker.next.put(queue)

    def rest(self, worker: _Worker) -> bool:
        """``worker`` has nothing to do. False: nobody will need it, so that it ends."""
        with self._lock:
            if len(self._idle) >= self._num_queues:
                return False
            self._idle.append(worker)
            return True


_WORKERS = Workers()


@in_forked_child
def _in_child() -> None:
    """The parent's threads are not there."""
    global _WORKERS
    _WORKERS = Workers()


def workers() -> Workers:
    """Return the threads of this process."""
    return _WORKERS

"""Handles of flat calls: one that the inner backend has under way already, and those of a coalesced
block, waited for as one.

A call is under way at once where nothing else of its group was when it was made. No thread of ours
waits for it, as none does on Gloo itself, until somebody wants a future. Then the progress thread
does, and what the program issues from then on is queued behind the future's callbacks. Where that
is, the program's text says, so it is the same place on every rank.

There is one such call in a group at most: Gloo, which has two threads, would start a second before
the first has ended, and two calls on one tensor would race. (One thread would keep them apart, but
makes every call 10 to 20 % slower.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.calls.ring import Call
from commlayer.engine.progress import OwnWork, ProgressQueue, QueuedWork, too_long
from commlayer.failures.board import FailureBoard
from commlayer.failures.forks import inherited
from commlayer.failures.waits import NO_TIMEOUT, SLICE, wait
from commlayer.profiles.errors import GroupError, UsageError

__all__ = ["IssuedWork", "Together"]

End = Callable[["IssuedWork", RuntimeError | None], None]
"""Counts the call, or raises what its failure means."""


class IssuedWork(OwnWork):
    """A call under way, with its options. Waiting raises what its failure means. ``end`` is called
    once, by whichever thread sees the end."""

    _queued: QueuedWork | None = None

    def __init__(
        self, queue: ProgressQueue, call: Call, outputs: Any, inner: Work, board: FailureBoard, opts: Any, end: End
    ) -> None:
        super().__init__()
        self._board, self.opts, self._end = board, opts, end
        self._queue, self.call, self._outputs, self._inner = queue, call, outputs, inner
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when the outputs may be used. ``timeout``: give up earlier than the call
        itself would.

        Raises PeerError, CollectiveTimeoutError: also where ``timeout`` passes first (the call goes
        on).
        """
        if not self._done:
            if self._queue.is_inherited:
                raise GroupError(inherited(f"{self._queue.who()}: wait for {self.call.collective}"))
            seconds = timeout.total_seconds()
            self.call.track.wait(self.call)
            try:
                if seconds > 0:
                    wait(self._inner, self._board, seconds)
                else:
                    try:  # its first look, without a call
                        self._inner.wait(SLICE)
                    except RuntimeError:
                        wait(self._inner, self._board)
            except RuntimeError as error:
                if seconds > 0 and not self.is_completed():
                    self.call.track.waited()
                    raise too_long(self._queue, self.call.collective, seconds) from error
                self._close(error)
            else:
                self._close(None)
                self.call.track.waited()
        if self._error is not None:
            raise self._error
        return True

    @property
    def has_come(self) -> bool:
        """Whether the call has ended well, as far as is known without waiting for it."""
        return self._done or bool(self._inner.is_completed() and self._inner.is_success())

    def settle(self, timeout_s: float = 0) -> bool:
        """Return when the call has ended, well or not: whoever waits for it is told which.

        ``timeout_s``: give up sooner than the call itself would; False says that it goes on.
        """
        with contextlib.suppress(RuntimeError):
            self.wait(timedelta(seconds=timeout_s))
        return self._done

    def _close(self, error: RuntimeError | None) -> None:
        with self._lock:
            if self._done:
                return
            try:
                self._end(self, error)
            except Exception as explained:  # noqa: BLE001  carried to whoever waits
                self._error = explained
            self._done = True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not: of a group that is broken nothing more comes."""
        return self._done or bool(self._inner.is_completed()) or self._board.is_broken

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if not self._done and self.is_completed():
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001
                return error
        return self._error

    def result(self) -> Any:
        """The call's outputs. Raises UsageError before it has ended."""
        if not self.is_completed():
            raise UsageError(
                f"{self._queue.who()}, {self.call.collective}: result() before the call has ended: wait() first"
            )
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs. Its callbacks run before the group's next collective."""
        with self._lock:
            if self._queued is None:
                if self._done:  # also after the group's end
                    self._queued = QueuedWork(self._queue, self.call.collective, self._outputs)
                    self._queued.finish(self._error)
                else:
                    self._queued = self._queue.submit(self.call.collective, self._outputs, self.wait, ())
        return self._queued.get_future()


class Together(Work):
    """All works of one coalesced block."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])

"""One order for all collectives of a group, and the Work objects that callers hold.

Per group: first in, first out, the same on all ranks, because all ranks issue in program order. A
synchronous call runs on its caller's thread when nothing is queued; everything else runs on one
progress thread, which the group has while something is queued (:mod:`commlayer.engine.workers`
lends it). A call made *on* the progress thread (by a callback of a future, such as PowerSGD's hook)
runs there and then: queued, it would wait behind itself. Futures complete on the progress thread,
and the next call waits for their callbacks, so that what a callback issues comes right after the
call that it belongs to, on every rank.

Rejected: issuing asynchronous calls on the caller's thread and letting Gloo's threads complete
them. Callbacks then run on Gloo's threads while the caller issues the next call, and two threads
that issue on one Gloo group mix up its messages: wrong results, not an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.calls.instruments import Instruments
from commlayer.calls.ring import Call
from commlayer.engine.workers import workers
from commlayer.failures.forks import inherited
from commlayer.failures.waits import NO_TIMEOUT
from commlayer.profiles.errors import CollectiveTimeoutError, GroupError, InternalError, UsageError

__all__ = ["DONE", "HostWork", "OwnWork", "ProgressQueue", "QueuedCall", "QueuedWork", "StreamWork", "too_long"]

QueuedCall = Callable[..., object]
"""A call that the queue runs in its turn, with the arguments that were queued beside it."""

Outputs = Any
"""The value of a future: a list of tensors, or for the ``coalesced`` gathers a list of lists."""


def too_long(queue: ProgressQueue, label: str, timeout_s: float) -> CollectiveTimeoutError:
    """The error of a wait() that was told to give up early."""
    return CollectiveTimeoutError(
        f"{queue.who()}, {label}: Timed out waiting {timeout_s * 1000:.0f}ms in wait(); the call itself goes on and ends by "
        "the group's timeout: wait longer, or look at the log of the rank that is late"
    )


class OwnWork(Work):
    """A handle of a call whose end is noted here: ``_done``, and the error that waiting raises."""

    _done = False
    _error: BaseException | None = None

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()


class QueuedWork(OwnWork):
    """An asynchronous collective. Waiting raises what the call raised."""

    def __init__(self, queue: ProgressQueue, label: str, outputs: Outputs) -> None:
        super().__init__()
        self._queue, self.label, self._outputs = queue, label, outputs
        self._gate = threading.Lock()  # held until the call has ended: cheaper than an Event
        self._gate.acquire()
        self.call: Call | None = None
        self.instruments: Instruments | None = None
        self._ended: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Outputs] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when the outputs may be used. ``timeout``: give up earlier than the call
        itself would.

        Raises what the call raised; CollectiveTimeoutError where ``timeout`` passes first (the call
        goes on).
        """
        if not self._done:
            call = self.call
            if call is not None:
                call.track.wait(call)
            began = now()
            try:
                self._wait(timeout.total_seconds())
            finally:
                if call is not None and self._error is None:
                    call.track.waited()
                if call is not None and self.instruments is not None:
                    for hear in self.instruments.waited:
                        hear(call, began, now())
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout_s: float) -> None:
        if self._queue.is_progress_thread():
            self._queue.help_until(self)  # a callback that waits for a later call
        elif self._queue.is_inherited:
            raise GroupError(inherited(f"{self._queue.who()}: wait for {self.label}"))
        elif self._gate.acquire(timeout=timeout_s if timeout_s > 0 else -1):
            self._gate.release()
        else:
            raise too_long(self._queue, self.label, timeout_s)

    def result(self) -> Outputs:
        """The call's outputs. Raises UsageError before it has ended."""
        if not self._done:
            raise UsageError(f"{self._queue.who()}, {self.label}: result() before the call has ended: wait() first")
        return self._outputs

    def get_future(self) -> torch.futures.Future[Outputs]:
        """A future of the outputs. Its callbacks run before the group's next collective.

        Of a call that failed it raises RuntimeError with the text of what the call raised.
        """
        with self._queue.futures_lock:
            if self._future is None:
                ended: torch.futures.Future[None] = torch.futures.Future()
                # What C++ sees as an error can only come out of a callback.
                # ``Future.set_exception`` is a value there, and DDP, which takes it for the
                # tensors, dies of it.
                self._future = ended.then(self._deliver)
                if self._done:
                    ended.set_result(None)
                else:
                    self._ended = ended
            return self._future

    def finish(self, error: BaseException | None) -> None:
        """The call has ended; called once, on the thread that ran it."""
        with self._queue.futures_lock:
            self._error, self._done = error, True
            ended = self._ended
        if ended is not None:
            ended.set_result(None)

    def open(self) -> None:
        """Let those go on who wait."""
        self._gate.release()

    def _deliver(self, _: object) -> Outputs:
        if self._error is not None:
            raise self._error
        return self._outputs


class _Done(Work):
    """The work of every synchronous call: it has ended when its caller sees this."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def result(self) -> Outputs:
        raise UsageError(
            "a synchronous call keeps no result: it is in the tensors that were passed, or use async_op=True"
        )

    def get_future(self) -> torch.futures.Future[Outputs]:
        raise UsageError("a synchronous call has no future: use async_op=True")


DONE = _Done()


class HostWork(_Done):
    """An asynchronous call that has run on the host when it is returned. ``outputs``: the
    call's."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class StreamWork(_Done):
    """A call whose steps have been enqueued on CUDA streams. ``join`` makes the current stream wait
    for them."""

    def __init__(self, join: Callable[[], None] | None) -> None:
        super().__init__()
        self._join = join

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once: what the current stream does from now on comes after the call."""
        if self._join is not None:
            self._join()
        return True

    def synchronize(self) -> None:
        self.wait()


class ProgressQueue:
    """The order of one group's collectives. ``name`` is the progress thread's; ``who`` names rank
    and group in errors."""

    def __init__(self, name: str, who: Callable[[], str]) -> None:
        self.name, self.who = name, who
        self.running = threading.Lock()
        """Held while a call runs."""
        # Guards the counter, the order of the queue, and who has a thread; told when the thread is
        # given back.
        self._counting = threading.Condition(threading.Lock())
        self.futures_lock = threading.Lock()
        self.pending = 0  # calls that are queued or under way
        self._tasks: SimpleQueue[tuple[QueuedWork, QueuedCall, tuple[Any, ...]] | None] = SimpleQueue()
        self._has_thread = self._has_joined = False
        self._thread_id = 0
        self._closed = False
        self._failure: BaseException | None = None  # what the thread died of
        self.is_inherited = False  # by a forked child: what was queued before the fork runs in the parent

    @property
    def is_running(self) -> bool:
        """Whether some thread runs a call at this moment."""
        return self.running.locked()

    def is_progress_thread(self) -> bool:
        return threading.get_ident() == self._thread_id

    def run(self, label: str, task: QueuedCall, args: tuple[Any, ...]) -> None:
        """Run ``task(*args)`` after everything that was submitted before, and return when it has
        ended."""
        if self.pending and not self.is_progress_thread():
            self.submit(label, None, task, args).wait()
            return
        with self.running:
            task(*args)

    def submit(self, label: str, outputs: Outputs, task: QueuedCall, args: tuple[Any, ...]) -> QueuedWork:
        """Queue ``task(*args)``; on the progress thread itself, run it at once.

        Raises GroupError after the group's end, InternalError where the progress thread has died.
        """
        work = QueuedWork(self, label, outputs)
        if torch.is_inference_mode_enabled():  # a mode of threads: tensors that were made in it are written in it only
            task = torch.inference_mode()(task)
        if self.is_progress_thread():
            self._execute(work, task, args)
            work.open()
            return work
        with self._counting:
            if self._failure is not None:
                raise self._died(label)
            if self._closed:
                raise GroupError(
                    f"{self.who()}: {label} after the group was destroyed (or aborted): make another with "
                    "torch.distributed.new_group, or call destroy_process_group later"
                )
            if not self._has_joined:
                workers().join()
                self._has_joined = True
            if not self._has_thread:
                workers().run(self)
                self._has_thread = True
            self.pending += 1
            self._tasks.put((work, task, args))
        return work

    def help_until(self, work: QueuedWork) -> None:
        """On the progress thread: run what is queued, in order, until ``work`` has ended."""
        while not work.is_completed():
            item = self._tasks.get()
            if item is None:
                self._tasks.put(None)
                raise GroupError(f"{self.who()}: destroyed while a callback waited for a later call")
            self._run_item(*item)

    def drain(self, timeout_s: float = -1) -> bool:
        """Wait for what is queued and give the thread back. False where it did not end in time
        (seconds; -1: no limit)."""
        with self._counting:
            self._closed = True
            if self._has_thread and not self.is_progress_thread():
                self._tasks.put(None)
                if not self._counting.wait_for(lambda: not self._has_thread, None if timeout_s < 0 else timeout_s):
                    return False
            has_joined, self._has_joined = self._has_joined, False
        if has_joined:
            workers().leave()
        return True

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`. What is called from
        now on runs here, and is refused."""
        self.running, self.futures_lock = threading.Lock(), threading.Lock()
        self._counting = threading.Condition(threading.Lock())
        self._tasks, self.pending = SimpleQueue(), 0
        self._has_thread, self._has_joined, self._thread_id = False, False, 0
        self.is_inherited = True

    def work(self) -> None:
        """Run what is queued, to its end, on the thread that :mod:`commlayer.engine.workers` has
        given for it."""
        self._thread_id = threading.get_ident()
        try:
            while (item := self._next()) is not None:
                self._run_item(*item)
                del item  # or the last call's tensors would live until the next call
        except BaseException as error:  # noqa: BLE001  not of a call, whose errors are its own: carried to all that wait
            self._give_up(error)

    def _next(self) -> tuple[QueuedWork, QueuedCall, tuple[Any, ...]] | None:
        """Return the work to be run next; None: nothing, and whoever queues something now asks for a
        thread."""
        with self._counting:
            item = None if self._tasks.empty() else self._tasks.get()
            if item is None:
                self._give_back()
        return item

    def _give_back(self) -> None:
        self._thread_id = 0  # others have it now
        self._has_thread = False
        self._counting.notify_all()

    def _give_up(self, error: BaseException) -> None:
        """Nobody runs what is queued: whoever waits for it must hear so. It stays ``pending``, so
        that later calls do too."""
        with self._counting:
            self._failure = error
        while not self._tasks.empty():
            item = self._tasks.get()
            if item is not None:
                work = item[0]
                with contextlib.suppress(Exception):  # the next ones are to hear of it as well
                    work.finish(self._died(work.label))
                work.open()
        with self._counting:
            self._give_back()

    def _died(self, label: str) -> InternalError:
        cause = self._failure
        error = InternalError(
            f"{self.who()}: {label} was not run: the thread of this group's asynchronous calls died of "
            f"{type(cause).__name__}: {cause}. Please report it; restart the job"
        )
        error.__cause__ = cause
        return error

    def _run_item(self, work: QueuedWork, task: QueuedCall, args: tuple[Any, ...]) -> None:
        try:
            self._execute(work, task, args)  # with the callbacks of its future
        finally:
            with self._counting:
                self.pending -= 1
            work.open()  # last, so that a caller who then makes a synchronous call finds nothing queued

    def _execute(self, work: QueuedWork, task: QueuedCall, args: tuple[Any, ...]) -> None:
        error: BaseException | None = None
        try:
            with self.running:
                task(*args)
        except BaseException as raised:  # noqa: BLE001  carried to whoever waits
            error = raised
        work.finish(error)

"""The streams of a simulated device that torch sees: queues of work, which one thread runs in an order drawn by a seed.

A stream's work runs in the order in which it was launched, and a stream waits where it was told to; nothing else orders two
streams. The thread draws, by a seed, which stream goes on, and makes a stream pause before some of its work, for as long as other
streams have work, or the host does not wait for the device. So what lacks a wait runs too early under most seeds.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic, perf_counter

from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, UsageError

__all__ = ["QueueMark", "QueueRunner", "StreamDelays", "StreamQueue"]

_POLL_S = 2e-4
"""How often a message that is under way is asked whether it has come, where nothing else can run."""


@dataclass(frozen=True)
class StreamDelays:
    """How streams are delayed: before a share ``chance`` of its work a stream pauses, until the host waits for the device and no
    other stream can go on, or has launched nothing for ``idle_s``: a program may wait in ways that a device does not see."""

    seed: int = 0
    chance: float = 0.25
    idle_s: float = 0.005

    def __post_init__(self) -> None:
        """Raises UsageError for what is no seed, no share, or no time."""
        if not isinstance(self.seed, int) or not 0 <= self.chance <= 1 or not self.idle_s >= 0:
            raise UsageError(f"expected an integer seed, a chance from 0 to 1 and a time of at least 0 s, got {self}")


class QueueMark:
    """A point in a stream's work: ``is_done`` once all that was launched before it has run, at ``reached_s``."""

    __slots__ = ("is_done", "reached_s")

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done, self.reached_s = is_done, 0.0


@dataclass
class _Piece:
    """A piece of a stream's work: ``steps`` yields, to be called until true, what is waited for between its steps."""

    label: str
    steps: Callable[[], Iterator[Callable[[], bool]] | None] | None = None
    after: QueueMark | None = None
    mark: QueueMark | None = None
    under_way: Iterator[Callable[[], bool]] | None = None
    has_come: Callable[[], bool] | None = None


class StreamQueue:
    """One stream's work that has not run yet."""

    __slots__ = ("is_looked_at", "name", "pieces", "rests")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pieces: deque[_Piece] = deque()
        self.is_looked_at = False  # whether it was drawn if the first piece is delayed
        self.rests = False


class QueueRunner:
    """Runs the work of one process's streams, in a thread that starts with the first of it.

    ``timeout_s``: how long the host waits for a device on which nothing moves.
    """

    def __init__(self, delays: StreamDelays, timeout_s: float) -> None:
        self.delays, self.timeout_s = delays, timeout_s
        self.who = "this process"
        self._draw = random.Random(delays.seed)
        self._queues: list[StreamQueue] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waiting_hosts = 0
        self._num_run = 0
        self._launched_s = 0.0
        self._pid = os.getpid()

    def reseed(self, delays: StreamDelays) -> None:
        """Delay streams by other draws from now on."""
        with self._changed:
            self.delays, self._draw = delays, random.Random(delays.seed)

    def queue(self, name: str) -> StreamQueue:
        """A new stream's."""
        queue = StreamQueue(name)
        with self._changed:
            self._queues.append(queue)
        return queue

    @property
    def is_bad_fork(self) -> bool:
        """Whether this process was forked from the one whose device this is."""
        return os.getpid() != self._pid

    # The host's side

    def launch(self, queue: StreamQueue, label: str, work: Callable[[], object]) -> None:
        """Run ``work`` behind what ``queue`` was given before. The host does not wait."""

        def steps() -> None:
            work()

        self._put(queue, _Piece(label, steps))

    def launch_steps(self, queue: StreamQueue, label: str, steps: Callable[[], Iterator[Callable[[], bool]]]) -> None:
        """The same for work that waits: ``steps`` yields functions that say whether what they wait for has come."""
        self._put(queue, _Piece(label, steps))

    def record(self, queue: StreamQueue) -> QueueMark:
        """The point behind all that ``queue`` was given so far."""
        mark = QueueMark()
        self._put(queue, _Piece("an event", mark=mark))
        return mark

    def wait_for(self, queue: StreamQueue, mark: QueueMark) -> None:
        """Let nothing that ``queue`` is given from now on run before ``mark`` is reached. The host does not wait."""
        if not mark.is_done:
            self._put(queue, _Piece("a wait for an event", after=mark))

    def has_reached(self, mark: QueueMark) -> bool:
        """Whether ``mark`` is reached. Raises what the device's work raised, where it never will be."""
        if not mark.is_done:
            self._raise_error()
        return mark.is_done

    def until(self, mark: QueueMark, purpose: str) -> None:
        """Have the host wait for ``mark``.

        Raises what the device's work raised; CollectiveTimeoutError where nothing has moved for the device's timeout.
        """
        self._require_own()
        if threading.current_thread() is self._thread:
            raise UsageError(f"{self.who}: the device's own work cannot wait for the device ({purpose})")
        with self._changed:
            self._waiting_hosts += 1
            self._changed.notify_all()
            try:
                self._await(mark, purpose)
            finally:
                self._waiting_hosts -= 1

    def _await(self, mark: QueueMark, purpose: str) -> None:
        seen, since = self._num_run, monotonic()
        while not mark.is_done:
            self._raise_error()
            if self._num_run != seen:
                seen, since = self._num_run, monotonic()
            left = since + self.timeout_s - monotonic()
            if left <= 0:
                raise CollectiveTimeoutError(
                    f"{self.who}, {purpose}: nothing has moved on the simulated device for {self.timeout_s:g} s; "
                    f"first in its streams: {self._heads()}"
                )
            self._changed.wait(min(left, 1.0))

    def stop(self) -> None:
        """Run nothing more: for the end of the program."""
        with self._changed:
            self._error = self._error or ClusterError(f"{self.who}: the simulated device was stopped")
            self._changed.notify_all()
        if self._thread is not None and not self.is_bad_fork:
            self._thread.join(5.0)

    def _put(self, queue: StreamQueue, piece: _Piece) -> None:
        self._require_own()
        with self._changed:
            self._raise_error()
            queue.pieces.append(piece)
            self._launched_s = monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="commlayer simulated device", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _require_own(self) -> None:
        if self.is_bad_fork:
            raise UsageError(
                f"{self.who}: a forked child cannot use the simulated device of its parent: use it first in the child, or spawn"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            kind = type(self._error) if isinstance(self._error, ClusterError) else ClusterError
            raise kind(
                f"{self.who}: the simulated device failed, and runs nothing more: {self._error}"
            ) from self._error

    def _heads(self) -> str:
        heads = [f"{queue.name}: {queue.pieces[0].label}" for queue in self._queues if queue.pieces]
        return "; ".join(heads) or "nothing"

    # The thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    queue = self._next()
                    if queue is None:
                        return
                    piece = queue.pieces[0]
                is_over = self._advance(piece)
                with self._changed:
                    if is_over:
                        queue.pieces.popleft()
                        queue.is_looked_at = False
                        if piece.mark is not None:
                            piece.mark.reached_s = perf_counter()
                            piece.mark.is_done = True
                        self._num_run += 1
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  carried to whoever waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @staticmethod
    def _advance(piece: _Piece) -> bool:
        """Run the next step of a piece. Returns whether it was the last."""
        if piece.under_way is None:
            piece.under_way = piece.steps() if piece.steps is not None else None
        piece.has_come = next(piece.under_way, None) if piece.under_way is not None else None
        return piece.has_come is None

    def _next(self) -> StreamQueue | None:
        """The stream that goes on now, when there is one; None: the device has stopped."""
        while self._error is None:
            ready = [queue for queue in self._queues if queue.pieces and self._can_go_on(queue.pieces[0])]
            lively = [queue for queue in ready if not self._rests(queue)]
            if lively:
                return self._draw.choice(lively)
            if ready and self._waiting_hosts:
                return self._draw.choice(ready)
            is_polled = any(queue.pieces and queue.pieces[0].has_come is not None for queue in self._queues)
            self._changed.wait(_POLL_S if is_polled else 1e-3 if ready else None)
        return None

    @staticmethod
    def _can_go_on(piece: _Piece) -> bool:
        if piece.after is not None:
            return piece.after.is_done
        return piece.has_come is None or piece.has_come()

    def _rests(self, queue: StreamQueue) -> bool:
        piece = queue.pieces[0]
        if piece.steps is None or piece.under_way is not None:
            return False
        if not queue.is_looked_at:
            queue.is_looked_at = True
            queue.rests = self._draw.random() < self.delays.chance
        return queue.rests and monotonic() < self._launched_s + self.delays.idle_s

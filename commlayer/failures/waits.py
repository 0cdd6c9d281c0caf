"""Waiting for Gloo: bounded where it connects, and ended from another thread where nobody will ever
answer.

Gloo tells an error on a connection to the operations that are pending there, but not to a message
of which some bytes have come or gone already (gloo/transport/tcp/pair.cc, ``signalException``): its
wait lasts until its timeout, torch's half hour perhaps, also when the peer is known to be dead and
every connection has been closed. Three ways out of a wait, one for each kind:

- A *message* (send, recv): :func:`end_wait` calls its C++ object's ``abort()``, which Gloo made for
  this, and which torch does not show to Python. The object's type is checked first by its table of
  virtual functions, which torch's library exports. How torch lays out its objects is its own
  affair, so this is done with the releases of torch only with which it has been tested
  (:data:`TESTED_TORCH`). With others each message is waited for on a thread, which is let go of
  where the board says so (:func:`wait_for_message`): that works with any torch, and costs a thread
  for each wait.
- A *collective* runs on a thread of Gloo's own: :func:`wait` looks up from it four times a second,
  and lets go of it when the board says that it is over. A collective that was let go of holds that
  thread, and freeing its group would wait for it, so such a group is never freed (:func:`keep`).
- *Making a group* is done on a thread of ours (:func:`bounded`), which is let go of likewise.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import AllreduceOptions, Work

from commlayer.forked_child import in_forked_child

__all__ = [
    "NO_TIMEOUT",
    "SLICE",
    "TESTED_TORCH",
    "Board",
    "Watched",
    "bounded",
    "bounded_reduce_scatter",
    "can_end_waits",
    "end_wait",
    "is_timeout",
    "join_abandoned",
    "keep",
    "on_a_thread",
    "wait",
    "wait_for_message",
    "within",
    "woken",
]

NO_TIMEOUT = timedelta(0)
"""torch's value for "as long as the call itself is allowed to take"."""

TESTED_TORCH = ("2.13.0",)
"""The releases of torch whose objects :func:`end_wait` may read. Add one once ``make test-torch``
has passed with it: tests/failures/test_ended_waits.py tries it with whatever torch is there."""

SLICE = timedelta(milliseconds=250)
"""How long a collective is waited for before its waiter looks up."""
_SHORTEST = timedelta(milliseconds=1)
"""Gloo counts milliseconds, and waits without a limit for none."""
_LOOK_S = 0.05
_PARTING_S = 1.0
_BEYOND = timedelta(seconds=30)
"""How much later than ours Gloo's own timeout of a message is: its last resort."""
_NEWS_S = 2.0
_OBJECT_HEAD_BYTES = object.__basicsize__
"""The head of a Python object: its count of references and its type. pybind11 keeps the address of
the C++ object behind it."""
_VTABLE_HEAD_BYTES = 2 * ctypes.sizeof(ctypes.c_void_p)
_WORKS = ("_ZN4c10d16ProcessGroupGloo8RecvWork", "_ZN4c10d16ProcessGroupGloo8SendWork")

Result = TypeVar("Result")

_asked: list[threading.Thread] = []
"""The threads on which something is waited for that may be let go of."""
_asking = threading.Lock()


class Board(Protocol):
    """The part of a failure board that a wait looks at."""

    has_abandoned: bool
    """Set where a collective is let go of."""

    @property
    def is_broken(self) -> bool:
        """Whether somebody whom the group needs is gone."""

    @property
    def has_leaver(self) -> bool:
        """Whether a rank of the group has left the job."""

    def on_break(self, wake: Callable[[], None]) -> None:
        """Have ``wake``, a method whose object is not kept alive, called when the board breaks; at
        once where it has."""


def woken() -> RuntimeError:
    """The error of a wait that is given up because its board is broken."""
    return RuntimeError("Connection closed: another rank of the group has failed")


def is_timeout(error: BaseException) -> bool:
    """Whether a wait that raised ``error``, Gloo's or ours, had lasted too long."""
    return "timed out" in str(error).lower()


def wait(work: Any, board: Board, timeout_s: float | None = None) -> None:
    """Wait for a Gloo collective, which has a timeout of its own; ``timeout_s``: give up before
    that.

    Raises RuntimeError: Gloo's, :func:`woken`, or that it timed out.
    """
    until, patience = (None, SLICE) if timeout_s is None else (time.monotonic() + timeout_s, _slice(timeout_s))
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError:  # noqa: PERF203  four times a second
            if work.is_completed():  # it has failed, or came in the meantime
                work.wait()
                return
            if board.is_broken:
                board.has_abandoned = True
                raise woken() from None
            if until is not None:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise
                patience = _slice(left_s)


def _slice(left_s: float) -> timedelta:
    return min(SLICE, max(timedelta(seconds=left_s), _SHORTEST))


class _SummedBlock:
    """This rank's block of a sum under way."""

    __slots__ = ("_output", "_summed", "_work")

    def __init__(self, work: Any, summed: torch.Tensor, output: torch.Tensor) -> None:
        self._work, self._summed, self._output = work, summed, output

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._work.wait(timeout)
        if self._output.requires_grad or self._output.is_inference():
            with torch.inference_mode():
                self._output.copy_(self._summed)
        else:  # entering that mode costs three times the copy of a small block
            self._output.copy_(self._summed)
        return True


def bounded_reduce_scatter(gloo: Any, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
    """Gloo's ``_reduce_scatter_base``, which is an all_reduce of a copy; but its work waits without
    a limit, and this one's not.

    1-D contiguous tensors of one dtype: ``input`` [n·s], ``output`` [s]. The same bits as Gloo's.
    """
    options = AllreduceOptions()
    options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
    summed, size = (input.detach() if input.requires_grad else input).clone(), output.numel()
    work = gloo.allreduce([summed], options)
    if gloo.size() > 1:
        start = gloo.rank() * size
        summed = summed[start : start + size]
    return _SummedBlock(work, summed, output)


class Watched:
    """A Gloo group's collectives and messages, waited for as long as its ranks live. For what is
    not on the way of every call."""

    def __init__(self, group: Any, board: Board) -> None:
        self._group, self._board = group, board
        self._waited_for: set[Work] = set()
        self._is_listening = False

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        call = getattr(self._group, verb)

        def watched(*arguments: Any) -> Any:
            answer = call(*arguments)
            return _WatchedWork(answer, self._board) if isinstance(answer, Work) else answer

        return watched

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _WatchedMessage:
        """Gloo's, to the member ``peer``."""
        return _WatchedMessage(self._group.send(tensors, peer, tag), self)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _WatchedMessage:
        """Gloo's, of the member ``peer``."""
        return _WatchedMessage(self._group.recv(tensors, peer, tag), self)

    def wait_for_message(self, work: Work, timeout: timedelta) -> None:
        """Return when a message has gone or come. Raises RuntimeError: Gloo's, or that the board
        has been broken meanwhile.

        Not in slices, as for a collective, and not until Gloo's own timeout: when the wait for a
        message times out, Gloo closes all connections of the group, and those who wait at its other
        ends take this rank for dead. What a rank has sent before it left may still be on its way
        through others, so a message has a moment more.
        """
        if not self._is_listening:
            self._is_listening = True
            self._board.on_break(self._wake)
        self._waited_for.add(work)  # before the look at the board: whoever breaks it looks here afterwards
        limit = timedelta(seconds=_PARTING_S) if self._board.is_broken else timeout
        try:
            if _waited_until(work, limit, self._board):
                return
        except RuntimeError:
            if not self._board.is_broken:
                raise
        finally:
            self._waited_for.discard(work)
        if self._board.is_broken:
            raise woken()
        raise RuntimeError(f"Timed out after {limit.total_seconds():g} s, waiting for a message")

    def _wake(self) -> None:
        timer = threading.Timer(_PARTING_S, self._end_waits)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # as many threads as may be, or the interpreter is ending
            self._end_waits()

    def _end_waits(self) -> None:
        for work in list(self._waited_for):
            end_wait(work)


class _WatchedMessage:
    def __init__(self, work: Work, watched: Watched) -> None:
        self._work, self._watched = work, watched

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._watched.wait_for_message(self._work, timeout or NO_TIMEOUT)
        return True


class _WatchedWork:
    def __init__(self, work: Any, board: Board) -> None:
        self._work, self._board = work, board

    def wait(self, timeout: timedelta | None = None) -> bool:
        wait(self._work, self._board, timeout.total_seconds() if timeout else None)
        return True


def _waited_until(work: Work, limit: timedelta, board: Board) -> bool:
    """Wait for a message by our own clock, for ``limit`` (zero: as long as Gloo does); return
    whether it has gone or come."""
    backstop = limit + _BEYOND if limit else limit
    if _is_out_of_reach(work):
        return _waited_on_a_thread(work, backstop, board, limit.total_seconds() or None, _PARTING_S)
    if not limit:
        return work.wait(limit)
    alarm = threading.Timer(limit.total_seconds(), end_wait, [work])
    alarm.daemon = True
    alarm.start()
    try:
        return work.wait(backstop)
    finally:
        alarm.cancel()


def wait_for_message(work: Any, timeout: timedelta, board: Board) -> bool:
    """Wait for a Gloo message, for ``timeout`` by Gloo's clock. Return whether it has gone or come;
    False where :func:`end_wait` has ended the wait, or, where that cannot, the board has broken.
    Raises RuntimeError: Gloo's."""
    return _waited_on_a_thread(work, timeout, board) if _is_out_of_reach(work) else bool(work.wait(timeout))


def _waited_on_a_thread(
    work: Any, timeout: timedelta, board: Board, limit_s: float | None = None, parting_s: float = 0.0
) -> bool:
    """``work.wait(timeout)`` on a thread, which is let go of ``parting_s`` seconds after the board
    broke, or after ``limit_s``: then return False. Raises what the wait raises."""
    answer = on_a_thread(lambda: bool(work.wait(timeout)))
    until = None if limit_s is None else time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FutureTimeoutError):
            return answer.result(_LOOK_S)
        if answer.done():
            return answer.result()
        if board.is_broken:
            parting_s -= _LOOK_S
        if (board.is_broken and parting_s <= 0) or (until is not None and time.monotonic() > until):
            board.has_abandoned = True
            return False


def bounded(task: Callable[[], Result], board: Board, timeout_s: float, what: str) -> Result:
    """``task()``, which may wait in C++ for ever: on a thread that is let go of after ``timeout_s``
    seconds, or when the board breaks. Raises what it raises, TimeoutError, :func:`woken`.

    Where it raises that a connection was closed, the board is given a moment to break: on a busy
    machine a peer that has heard of a death, and lets go of its connections, may be quicker than
    the news of that death.
    """

    def heard() -> Result:
        try:
            return task()
        except RuntimeError as error:
            if "closed" in str(error).lower():
                _await_news(board)
            raise

    if board.is_broken:  # those who have given up must not be connected with
        raise woken()
    answer = on_a_thread(heard)
    until = time.monotonic() + timeout_s
    patience_s = _PARTING_S  # a rank that leaves in good order may have made its connection first
    while True:
        with contextlib.suppress(FutureTimeoutError):
            return answer.result(min(_LOOK_S, max(until - time.monotonic(), 0.001)))
        if answer.done():  # the task's own timeout
            return answer.result()
        if board.has_leaver:
            patience_s -= _LOOK_S
        if board.is_broken or patience_s <= 0:
            raise woken()
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: Timed out after {timeout_s:g} s")


def _await_news(board: Board) -> None:
    until = time.monotonic() + _NEWS_S
    while not board.is_broken and time.monotonic() < until:
        time.sleep(_LOOK_S)


def on_a_thread(task: Callable[[], Result]) -> Future[Result]:
    """``task()``, which may wait for ever, on a thread that its caller may let go of
    (:func:`join_abandoned`)."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(task())
        except BaseException as error:  # noqa: BLE001  carried to the thread that waits
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="commlayer-bounded", daemon=True)
    with _asking:
        _asked[:] = [each for each in _asked if each.is_alive()]
        _asked.append(thread)
        thread.start()
    return answer


def join_abandoned(patience_s: float) -> bool:
    """Wait, ``patience_s`` seconds at most, for what :func:`bounded` and :func:`within` have let go
    of; return whether there was anything.

    For the program's end, at which a thread that comes back from C++ takes the process down.
    """
    until = time.monotonic() + patience_s
    with _asking:
        threads = [each for each in _asked if each.is_alive()]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return bool(threads)


@in_forked_child
def _forget_asked() -> None:
    """The parent's threads are not there."""
    global _asked, _asking
    _asked, _asking = [], threading.Lock()


def within(seconds: float, ask: Callable[[], Result]) -> Result:
    """``ask()``, which may wait for ever, on a thread that is let go of after ``seconds``.

    Raises what it raises, TimeoutError.
    """
    answer = on_a_thread(ask)
    try:
        return answer.result(seconds)
    except FutureTimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def keep(group: object) -> None:
    """Never free ``group``: a thread of it waits for what will not come, and freeing it would wait
    for that thread."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_wait(work: object) -> None:
    """Make the wait for a Gloo message return False, now or when it begins; other works are left
    alone. From any thread.

    ``work``: torch's, or something that waits for the one in its attribute ``inner``. Does nothing
    where this torch is none of :data:`TESTED_TORCH`: then :func:`wait_for_message` looks at the
    board itself.
    """
    work, aborts = getattr(work, "inner", work), _aborts()
    if not aborts or not _is_torchs(work):
        return
    address = ctypes.c_void_p.from_address(id(work) + _OBJECT_HEAD_BYTES).value
    if address:
        abort = aborts.get(ctypes.c_void_p.from_address(address).value or 0)
        if abort is not None:
            abort(address)


def can_end_waits() -> bool:
    """Whether :func:`end_wait` can end waits for messages of Gloo's with this torch."""
    return bool(_aborts())


def _is_out_of_reach(work: object) -> bool:
    """Whether ``work`` is, or waits for, a message of Gloo's whose wait cannot be ended."""
    return not can_end_waits() and _is_torchs(getattr(work, "inner", work))


def _is_torchs(work: object) -> bool:
    """Whether ``work`` is an object of torch's own, and no subclass in Python: its memory is then
    as pybind11 lays it out."""
    return type(work) is torch._C._distributed_c10d.Work


@cache
def _aborts() -> dict[int, Callable[[int], None]]:
    """``abort()`` of Gloo's works, by the address of their table of virtual functions; empty where
    this torch has not been tested, or exports none."""
    if torch.__version__.partition("+")[0] not in TESTED_TORCH:
        return {}
    aborts: dict[int, Callable[[int], None]] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _WORKS:
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name.removeprefix('_Z')}E"))
            abort = library[f"{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            aborts[table + _VTABLE_HEAD_BYTES] = abort
    return aborts

"""The forked side: what a rank does between its fork and its end.

It tells its parent its result as a pickle, over a socket pair between the two: one process tree of
one user, so neither could do to the other what it cannot do by itself. Ranks tell each other
nothing this way (:mod:`commlayer.agree.messages`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from commlayer.emulation import syscalls
from commlayer.emulation.accelerators.starting import DEVICE
from commlayer.emulation.namespaces import RankSpaces, enter
from commlayer.emulation.output import RankOutput

__all__ = ["FRAME_ERROR", "FRAME_HEADER", "FRAME_RESULT", "RaisedInRank", "RankJob", "flush_stdio", "rank_main"]

FRAME_HEADER = struct.Struct("<cQ")
"""The header of every message from a rank: kind, length of the payload."""
FRAME_RESULT = b"R"
"""The kind of message whose payload is the pickled return value."""
FRAME_ERROR = b"E"
"""The kind of message whose payload is a pickled `RaisedInRank`."""

STACKS_SIGNAL = signal.SIGUSR2
"""The signal on which a rank writes where its threads are. SIGUSR1 asks a job who waits for whom,
also on an emulated cluster."""


@dataclass(frozen=True)
class RaisedInRank:
    """An exception on its way to the parent; `pickled` is None if it cannot be pickled."""

    when_s: float
    summary: str
    traceback: str
    pickled: bytes | None


@dataclass(frozen=True)
class RankJob:
    """One process to start."""

    rank: int
    node: int
    environment: dict[str, str]
    removed: tuple[str, ...]
    """Variables that the rank must not inherit."""
    spaces: RankSpaces | None
    """The node to enter; None on loopback."""
    call: Callable[[], Any] | None = None
    argv: Sequence[str] = field(default=())
    """A program to become, where `call` is None."""
    output: RankOutput | None = None
    """Where the program's output goes; None: where the parent's goes."""


def flush_stdio() -> None:
    """Empty Python's and C's output buffers, before a fork and before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    syscalls.flush_c_stdio()


def rank_main(job: RankJob, channel: socket.socket, stacks_fd: int, parent_pid: int, close: Iterable[int]) -> NoReturn:
    """Body of a forked rank; leaves by `os._exit`, so that none of the parent's clean-up runs
    twice."""
    status = 1
    try:
        _set_up(job, stacks_fd, parent_pid, close)
        if job.call is None:
            for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            os.execv(shutil.which(job.argv[0]) or job.argv[0], list(job.argv))
        value = job.call()
        try:
            pickled = pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"the rank's return value of type {type(value).__name__} cannot be pickled ({error}): "
                "return plain data, tensors or None"
            ) from error
        _send(channel, FRAME_RESULT, pickled)
        flush_stdio()
        # Stay until all ranks have reported: a rank that left early would cut the connections of
        # those still in their last collective, and rank 0 would take the rendezvous store with it.
        channel.recv(1)
        status = 0
    except BaseException as error:  # noqa: BLE001 - also SystemExit and KeyboardInterrupt end here, the process ends
        if isinstance(error, SystemExit):
            status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        with contextlib.suppress(BaseException):
            if isinstance(error, SystemExit) and status == 0:
                _send(channel, FRAME_RESULT, pickle.dumps(None))
            else:
                _send(channel, FRAME_ERROR, pickle.dumps(_raised(error)))
    finally:
        flush_stdio()
        os._exit(status)


def _set_up(job: RankJob, stacks_fd: int, parent_pid: int, close: Iterable[int]) -> None:
    os.setpgid(0, 0)
    if job.spaces is not None:
        enter(job.spaces)
    # After `enter`: the kernel forgets the wish when a process gains rights.
    syscalls.die_with_parent(parent_pid)
    for fd in close:
        os.close(fd)
    if job.output is not None:
        job.output.attach()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    num_threads = os.environ.get("OMP_NUM_THREADS")
    for name in job.removed:
        os.environ.pop(name, None)
    os.environ.update(job.environment)
    # Have the kernel run this rank as a batch job: what wakes up waits until a core's present task has
    # had its turn. An emulated cluster mostly has more ranks than this machine has cores. Each message
    # would wake up its receiver in place of its sender, which then still holds the lock of their
    # connection. Gloo's thread asks for that lock again and again, which takes up to half of all
    # processor time. Ranks with emulated accelerators stay as they are: their timers must be in time.
    if DEVICE not in job.environment and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a container may refuse it: ranks are slower then
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if job.call is not None:
        gc.freeze()  # what the parent had is no garbage of this rank: a search for cycles would copy all of the parent's pages
        faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
        torch = sys.modules.get("torch")
        if torch is not None and num_threads is None:
            # OMP_NUM_THREADS came too late for a torch that is loaded. One thread also keeps clear
            # of OpenMP's pool, which does not survive a fork.
            torch.set_num_threads(1)


def _raised(error: BaseException) -> RaisedInRank:
    when_s = time.monotonic()
    own_frame = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, own_frame.tb_next if own_frame else None))
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - a class with its own __init__ or from a function; the text is enough
        pickled = None
    return RaisedInRank(when_s, f"{type(error).__name__}: {error}", text, pickled)


def _send(channel: socket.socket, kind: bytes, payload: bytes) -> None:
    channel.sendall(FRAME_HEADER.pack(kind, len(payload)))
    channel.sendall(payload)

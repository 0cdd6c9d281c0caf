"""The parent's handle of one rank: fork it, read what it says, kill it, collect it.

What a rank says is a pickle, which nowhere else is loaded as such: here the sender is a process that this one
has forked, of the same user, over a socket pair that nobody else holds. It could run nothing that
it cannot run by itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile

from commlayer.emulation import syscalls
from commlayer.emulation.forked_ranks import (
    FRAME_HEADER,
    FRAME_RESULT,
    RaisedInRank,
    RankJob,
    flush_stdio,
    rank_main,
)
from commlayer.emulation.outcomes import RankFailure, RankOutcome, signal_name

__all__ = ["RankProcess", "launch", "masked_signals"]

_READ_BYTES = 1 << 20
_STACKS_BYTES = 1 << 16


class RankProcess:
    """One forked rank. Its descriptors: the line to it, its pidfd, and a memfd for its stacks."""

    def __init__(self, job: RankJob, pid: int, channel: socket.socket, stacks_fd: int) -> None:
        self.job = job
        self.pid = pid
        self.channel = channel
        self.pid_fd = os.pidfd_open(pid)
        self.stacks_fd = stacks_fd
        self.ended = False
        self.ended_at_s = 0.0
        self.killed_because: str | None = None
        self._status: int | None = None
        self._buffer = bytearray()
        self._frame: tuple[bytes, bytes] | None = None

    @property
    def reported(self) -> bool:
        """Tell whether the rank has nothing more to say: its message is here, or it has ended."""
        return self.ended or self._frame is not None

    @property
    def failed(self) -> bool:
        """Tell whether it is known already that the rank failed."""
        if self._frame is not None:
            return self._frame[0] != FRAME_RESULT
        return self.ended and (self.job.call is not None or self._status != 0)

    def read(self) -> bool:
        """Take in what the rank has sent; False at the end of its line."""
        while True:
            try:
                data = self.channel.recv(_READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._buffer += data
            if self._frame is None and len(self._buffer) >= FRAME_HEADER.size:
                kind, length = FRAME_HEADER.unpack_from(self._buffer)
                if len(self._buffer) >= FRAME_HEADER.size + length:
                    self._frame = kind, bytes(self._buffer[FRAME_HEADER.size : FRAME_HEADER.size + length])
                    self._buffer.clear()

    def kill(self, because: str) -> None:
        """Kill the rank's whole process group."""
        if not self.ended:
            if not self.reported and self.killed_because is None:
                self.killed_because = because
            for send in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self.pid, signal.SIGKILL)

    def collect(self) -> None:
        """Take the exit status of an ended rank, and kill what it left in its process group."""
        if self.ended:
            return
        self.read()
        with contextlib.suppress(ChildProcessError, PermissionError, ProcessLookupError):
            # Not reaped yet: the process group's number cannot belong to anyone else.
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.ended, self.ended_at_s = True, time.monotonic()

    def has_written_stacks(self) -> bool:
        """Tell whether the stacks that STACKS_SIGNAL asks for are whole: the main thread's is the
        last, and ends where the rank was begun."""
        return b" in rank_main\n" in os.pread(self.stacks_fd, _STACKS_BYTES, 0)

    def outcome(self) -> tuple[float, RankOutcome]:
        """Return what became of the rank, and when (seconds, monotonic); call it once the rank has
        ended."""
        rank, node = self.job.rank, self.job.node
        raised: RaisedInRank | None = None
        if not self.failed:
            value = None
            try:
                value = pickle.loads(self._frame[1]) if self._frame is not None else None
                return self.ended_at_s, RankOutcome(rank, node, value, None)
            except Exception as error:  # noqa: BLE001 - a class whose pickle does not load: the rank's fault
                summary = f"TypeError: the rank's return value cannot be unpickled: {error}"
                raised = RaisedInRank(self.ended_at_s, summary, summary, None)
        elif self._frame is not None:
            raised = pickle.loads(self._frame[1])
        when_s = self.ended_at_s if raised is None else raised.when_s
        return when_s, RankOutcome(rank, node, None, self._failure(raised))

    def _failure(self, raised: RaisedInRank | None) -> RankFailure:
        status = self._status
        by_signal = -status if status is not None and status < 0 else None
        exitcode = status if by_signal is None else None
        exception = None
        if raised is not None:
            reason, text = f"raised {raised.summary.splitlines()[0]}", raised.traceback
            if raised.pickled is not None:
                with contextlib.suppress(Exception):
                    exception = pickle.loads(raised.pickled)
        else:
            if self.job.output is not None:
                text = self.job.output.last_words()
            else:  # the stacks that the rank has written, without the frames of this package and of the forked parent
                written = os.pread(self.stacks_fd, _STACKS_BYTES, 0).decode(errors="replace")
                threads = (thread.split("\n") for thread in written.rstrip().split("\n\n"))
                own = (takewhile(lambda line: not line.endswith(" in rank_main"), lines) for lines in threads)
                text = "\n".join("\n".join(lines) for lines in own)
            if self.killed_because is not None:
                reason = f"killed by the cluster {self.killed_because}"
            elif by_signal is not None:
                reason = f"killed by signal {signal_name(by_signal)}"
            else:
                reason = f"exited with code {exitcode}"
        return RankFailure(
            rank=self.job.rank,
            node=self.job.node,
            exitcode=exitcode,
            signal=by_signal,
            exception=exception,
            traceback=text,
            reason=reason,
            by_cluster=self.killed_because is not None and raised is None,
        )

    def close(self) -> None:
        """Give the descriptors back."""
        if self.job.output is not None:
            self.job.output.close()
        self.channel.close()
        os.close(self.pid_fd)
        os.close(self.stacks_fd)


@contextlib.contextmanager
def masked_signals() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and alarms back for a moment in which half a rank exists."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def launch(jobs: Sequence[RankJob], started: list[RankProcess], private_fds: Sequence[int]) -> None:
    """Fork one process per job, appending to `started` (so that the caller can kill them if a later
    fork fails).

    `private_fds` are descriptors of the parent that no rank may keep open.
    """
    flush_stdio()
    parent_pid = os.getpid()
    for job in jobs:
        channel, childs_end = socket.socketpair()
        stacks_fd = os.memfd_create("commlayer-stacks")
        pid = syscalls.fork()
        if pid == 0:
            siblings = [fd for other in started for fd in (other.channel.fileno(), other.pid_fd, other.stacks_fd)]
            rank_main(job, childs_end, stacks_fd, parent_pid, [*private_fds, *siblings, channel.fileno()])
        childs_end.close()
        channel.setblocking(False)
        if job.output is not None:
            job.output.close_writers()
        with contextlib.suppress(OSError):
            # Also done by the rank itself: whoever comes first, the group is there before anyone
            # kills it.
            os.setpgid(pid, pid)
        started.append(RankProcess(job, pid, channel, stacks_fd))

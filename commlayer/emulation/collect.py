"""One run: start the ranks, follow them, end them, tell what became of each."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from commlayer.emulation.forked_ranks import STACKS_SIGNAL, RankJob
from commlayer.emulation.outcomes import RankFailure, RankOutcome, timed_out_error
from commlayer.emulation.output import OutputStream, drain
from commlayer.emulation.rank_process import RankProcess, launch, masked_signals

__all__ = ["RunResult", "run_jobs"]

_STACKS_PATIENCE_S = 2.0
_LEAVE_PATIENCE_S = 10.0
_OUTPUT_PATIENCE_S = 1.0


@dataclass(frozen=True)
class RunResult:
    """Outcomes by rank, and the failures in the order of time."""

    outcomes: list[RankOutcome]
    failures: list[RankFailure]


class _Run:
    def __init__(self, timeout_s: float | None, grace_s: float) -> None:
        self.ranks: list[RankProcess] = []
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._grace_s = grace_s
        self._first_failed: RankProcess | None = None
        self._grace_deadline = 0.0
        self._selector = selectors.DefaultSelector()
        self.timed_out: list[int] = []

    def follow(self) -> None:
        """Until every rank has reported or ended; kills stragglers when the grace or the time is
        over."""
        for rank in self.ranks:
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)
            self._selector.register(rank.pid_fd, selectors.EVENT_READ, rank)
        for stream in self._streams():
            stream.follow(self._selector)
        while not all(rank.reported for rank in self.ranks):
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self.timed_out = [rank.job.rank for rank in self.ranks if not rank.reported]
                return self._kill("because the time was up")
            if self._first_failed is not None and now >= self._grace_deadline:
                return self._kill(f"after rank {self._first_failed.job.rank} failed")
            self._step(now)
        return None

    def leave(self) -> None:
        """Let the ranks go, and collect every one."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.channel.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _LEAVE_PATIENCE_S
        for rank in self.ranks:
            if not rank.ended:
                with selectors.DefaultSelector() as selector:
                    selector.register(rank.pid_fd, selectors.EVENT_READ)
                    selector.select(max(0.0, deadline - time.monotonic()))
                rank.kill("because it did not end after its function had")
                rank.collect()
        drain(self._streams(), _OUTPUT_PATIENCE_S)

    def _streams(self) -> list[OutputStream]:
        outputs = [rank.job.output for rank in self.ranks]
        return [stream for output in outputs if output is not None for stream in output.streams]

    def _step(self, now: float) -> None:
        limits = [] if self._deadline is None else [self._deadline]
        if self._first_failed is not None:
            limits.append(self._grace_deadline)
        events = self._selector.select(max(0.0, min(limits) - now) if limits else None)
        # Deaths first: a rank that was killed says nothing, and what its peers say is the
        # consequence.
        for key, _ in sorted(events, key=lambda event: isinstance(event[0].fileobj, int), reverse=True):
            if isinstance(key.data, OutputStream):
                key.data.take_from(self._selector)
                continue
            rank: RankProcess = key.data
            if key.fd == rank.pid_fd:
                rank.collect()
                self._selector.unregister(rank.pid_fd)
            elif not rank.read():
                self._selector.unregister(rank.channel)
        failed = [rank for rank in self.ranks if rank.failed]
        if failed and self._first_failed is None:
            self._first_failed = min(failed, key=lambda rank: rank.outcome()[0])
            self._grace_deadline = time.monotonic() + self._grace_s

    def _kill(self, because: str) -> None:
        # Have the ranks write down where they hang; a stopped one never will, so the wait is short.
        running = [rank for rank in self.ranks if not rank.reported and rank.job.call is not None]
        for rank in running:  # not a program that a rank became: it would only die of the signal
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(rank.pid_fd, STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_PATIENCE_S
        while not all(rank.has_written_stacks() for rank in running) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in self.ranks:
            rank.kill(because)

    def end(self) -> None:
        """Kill and collect whatever is left, whatever happened, and give every descriptor back."""
        for rank in self.ranks:
            rank.kill("because the run was interrupted")
        for rank in self.ranks:
            rank.collect()
            rank.close()
        self._selector.close()


def run_jobs(
    jobs: Sequence[RankJob], *, timeout_s: float | None, grace_s: float, private_fds: Sequence[int]
) -> RunResult:
    """Run the jobs to their end.

    Returns when every process has ended and was collected, in every case, also when it raises.

    Raises:
        RanksTimedOutError: some were still running after `timeout_s` seconds; all were killed.
    """
    run = _Run(timeout_s, grace_s)
    try:
        with masked_signals():
            launch(jobs, run.ranks, private_fds)
        run.follow()
        run.leave()
        timed = [rank.outcome() for rank in run.ranks]
    finally:
        with masked_signals():
            run.end()
    outcomes = [outcome for _, outcome in timed]
    by_time = sorted(timed, key=lambda item: (item[1].failure is not None and item[1].failure.by_cluster, item[0]))
    failures = [outcome.failure for _, outcome in by_time if outcome.failure is not None]
    if run.timed_out and timeout_s is not None:
        raise timed_out_error(outcomes, failures, run.timed_out, timeout_s)
    return RunResult(outcomes, failures)

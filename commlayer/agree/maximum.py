"""Agreement of a group on the largest of its ranks' numbers: at once, or without waiting for each
other.

The latter is the largest of the call before.

With uneven splits every rank sees other byte counts, and a plan that depends on a rank's own
deadlocks the job. Asking everybody before each call would cost a small message its time again. So
the exchange for one call is started with that call, and read at the next one, when it has long
ended.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from commlayer.agree.messages import Peers, blaming
from commlayer.failures.board import FailureBoard
from commlayer.failures.waits import wait

__all__ = ["AgreedMaximum", "settle_maximum"]

_profiling = torch._C._autograd._profiler_enabled
_record = torch._C._autograd._enable_record_function


def settle_maximum(value: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> None:
    """Put the largest of all ranks' numbers into ``value``, on the CPU. Collective; ``purpose``:
    "to choose a format".

    Raises CollectiveTimeoutError where a rank does not come, PeerError where one is gone; both name
    the ranks and the purpose.
    """
    with blaming(Peers.of(group), None, purpose):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=group)


class AgreedMaximum:
    """``group`` is used for nothing else. All ranks call :meth:`exchange` equally often."""

    def __init__(self, group: dist.ProcessGroup, board: FailureBoard) -> None:
        self.group, self._board = group, board
        with torch.inference_mode(False):  # a tensor made in that mode can be written in it only
            self._value = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.calls = 0

    def exchange(self, value: int, timeout_s: float) -> int:
        """Give this call's ``value``; returns the largest of the previous call, 0 at the first one.

        Raises RuntimeError (Gloo's) where a rank is gone or does not come within ``timeout_s``.
        """
        previous = 0
        if self._work is not None:
            wait(self._work, self._board, timeout_s)
            previous = int(self._value)
        self.calls += 1
        self._value.fill_(value)
        # Unseen by a profiler: the exchange may end after that, and Gloo's thread, which tells the
        # profiler so, would write to memory that is no longer the profiler's.
        is_profiled = _profiling()
        if is_profiled:
            _record(False)
        try:
            self._work = self.group.allreduce([self._value], self._options)
        finally:
            if is_profiled:
                _record(True)
        return previous

    def finish(self) -> None:
        """Wait a moment for the latest exchange: a group that is freed with one under way waits for
        it, out of our hands."""
        if self._work is not None:
            with contextlib.suppress(RuntimeError):  # nobody will read it
                self._work.wait(timedelta(seconds=1))
            self._work = None

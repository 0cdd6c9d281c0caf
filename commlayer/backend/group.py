"""The process group of the backend ``commlayer``: every verb of c10d, a life cycle, and what torch asks of a group beside.

All verbs are overridden under their old and their new names. Those that C++ calls without going through Python (gather,
scatter, reduce, the ``_single`` forms from some functional operators) reach an inner Gloo of their own, which is registered
as this group's backend: right, but neither planned nor counted nor in this group's order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import BarrierOptions, PrefixStore, Store, Work

from commlayer.backend.base import Destroyed, Inherited
from commlayer.backend.batches import Batches
from commlayer.backend.options import make
from commlayer.backend.recording import end
from commlayer.failures.detector import FailureDetector, job_detector, set_job_detector
from commlayer.failures.endings import bury, bury_when_idle
from commlayer.failures.waits import bounded, keep

__all__ = ["CommlayerGroup", "Together"]

_NO_TIMEOUT = timedelta(0)


class Together(Work):
    """All works of one coalesced block."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((found for work in self._works if (found := work.exception()) is not None), None)

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


class CommlayerGroup(Batches):
    """A process group whose CPU collectives are planned. Made by ``init_process_group("commlayer")`` and ``new_group``.

    CUDA tensors go to an inner NCCL group, made when CUDA is there (never run so far: see :mod:`commlayer.transport.nccl`).
    """

    _detector: FailureDetector | None = None

    def own_detector(self, detector: FailureDetector) -> None:
        """This group was the first of its ranks, and ends their failure detector with itself."""
        self._detector = detector

    # Synchronisation

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Return when all ranks have come, and all that was queued before has ended."""
        opts = make(BarrierOptions, opts, timeout, {})
        if opts.device is not None and opts.device.type == "cuda" and self._nccl is not None:
            return self._nccl.backend.barrier(opts)
        return self._issue(opts, "barrier", [], self._barrier, opts)

    def _barrier(self, opts: Any) -> None:
        if self._needs_look:
            self._look("barrier", None, 0, timeout=opts.timeout, plannable=False)
        self._flat("barrier", 0, self._gloo.barrier, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that do not come within ``timeout`` (on rank 0; the others learn that it failed)."""
        is_given = timeout is not None and timeout.total_seconds() >= 0  # 0 is one: torch's tests give it
        limit = timeout if is_given else timedelta(seconds=self._timeout_s)
        # Gloo's own text names ranks of the group; it is what programs look for, so it is left as it is.
        self._progress.run("monitored_barrier", self._monitored_barrier, (limit, wait_all_ranks))

    def _monitored_barrier(self, limit: timedelta, wait_all_ranks: bool) -> None:
        task = partial(self._gloo.monitored_barrier, limit, wait_all_ranks)
        if self._size == 1:
            task()
            return
        began, limit_s = time.monotonic(), limit.total_seconds()
        try:
            bounded(
                task, self._planned.board, 2 * limit_s + 5.0, "monitored_barrier"
            )  # it names ranks itself at its limit
        except RuntimeError as error:
            if not self._planned.board.is_broken:
                raise
            waited_s = time.monotonic() - began
            raise self._planned.explain(error, "monitored_barrier", self._sequence, waited_s, limit_s) from error

    def _start_coalescing(self, device: torch.device) -> None:
        """Until :meth:`_end_coalescing`, asynchronous calls are waited for as one."""
        if device.type == "cuda" and self._nccl is not None:
            self._nccl.backend._start_coalescing()
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl.backend._end_coalescing()
        works, self._coalescing = self._coalescing or [], None
        return Together(works)

    # What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "commlayer"

    def name(self) -> str:
        return "commlayer"

    @property
    def shape(self) -> tuple[int, ...]:
        """How many of the group's ranks each node holds."""
        shape: tuple[int, ...] = self._planned.choices.shape
        return shape

    def predicted_us(
        self, collective: str, num_bytes: int, shape: tuple[int, ...] | None = None, **wire: Any
    ) -> float | None:
        """What the profile predicts for a call, µs, also in ``wire``: see :meth:`commlayer.engine.choices.Choices.predicted_us`.
        Talks to nobody."""
        predicted: float | None = self._planned.choices.predicted_us(collective, num_bytes, shape, **wire)
        return predicted

    def get_group_store(self) -> Store:
        """The store that the members of this group share."""
        store: Store = self._store
        return store

    def set_timeout(self, timeout: timedelta) -> None:
        """The timeout of calls that bring none of their own."""
        for gloo in (self._gloo, self._direct):
            gloo._set_default_timeout(timeout)
        self._planned.timeout_s = timeout.total_seconds()
        if self._nccl is not None:
            self._nccl.backend._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the numbers start at 0 on every rank, because a group is made by all of them together."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has run in this group."""
        return self._sequence

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> CommlayerGroup | None:
        """A group of the members ``new_ranks`` (ranks of this group, in the new order), or None on ranks outside it.

        Collective over ``new_ranks``. torch's own ``split_group`` refuses groups without a CUDA device before it asks here;
        ``new_group`` has no such condition.
        """
        from commlayer.backend.create import make_group  # it makes groups, so it imports this module

        del device_types, opts  # one group serves all devices; options are NCCL's, whose split is not used
        if self._rank not in new_ranks:
            return None
        # No counter of calls: a rank that is in several splits has made more of them than its peers.
        name = group_name or f"{self._name}/split:{'_'.join(map(str, new_ranks))}"
        group = make_group(
            name=name,
            rank=new_ranks.index(self._rank),
            global_ranks=[self._global_ranks[member] for member in new_ranks],
            store=PrefixStore(f"{name}/", self._store),
            timeout=timeout or timedelta(seconds=self._timeout_s),
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    # End

    def shutdown(self) -> None:
        """End what is queued and let go of threads and connections. What is called afterwards raises GroupError."""
        self._stop(drain=True)

    def abort(self) -> None:
        """Break what is under way, here and on the ranks that wait for this one."""
        self._stop(drain=False)

    def end(self, patience_s: float) -> None:
        """At the program's end, of a group that nobody destroyed: see :class:`commlayer.failures.endings.Ends`."""
        if isinstance(self._gloo, Destroyed):
            return
        until = time.monotonic() + patience_s
        has_ended = self._progress.drain(patience_s)
        if self._sender is not None:
            has_ended &= self._sender.drain(max(0.001, until - time.monotonic()))
        if self._latest is not None:
            has_ended &= self._latest.settle(max(0.001, until - time.monotonic()))
        if not has_ended:
            with contextlib.suppress(Exception):  # the program is over: nobody is left to be told
                self.abort()

    def _stop(self, *, drain: bool) -> None:
        if isinstance(self._gloo, Destroyed):
            return
        if drain:
            self._finish()
            end(self._gloo, self._size, with_others=True)
            self._planned.close()
        elif self._break():
            self._planned.close()
        if self._nccl is not None:
            (self._nccl.backend.shutdown if drain else self._nccl.backend.abort)()
        self.counters.close()
        self._forget_world()
        if self._detector is not None:
            if job_detector(self._global_ranks) is self._detector:
                set_job_detector(None)
            self._detector.close("it destroyed its process group" if drain else "it aborted its process group")
        self._free_inner()

    def _break(self) -> bool:
        """Break what is under way. Whether all of it has ended then, on this rank."""
        end(self._gloo, self._size, with_others=False)
        self._planned.abort("aborted the group")
        self._gloo.abort()
        self._direct.abort()
        has_ended = self._progress.drain(timeout_s=1.0)
        if self._sender is not None:
            has_ended &= self._sender.drain(timeout_s=1.0)
        return has_ended

    def _free_inner(self) -> None:
        """Whoever still holds this object must not keep threads, connections and the store with it."""
        dead = [] if self._direct is self._gloo else [self._gloo]
        if self._signatures is not None:
            dead.append(self._signatures.gloo)
        # The C++ half of this object refers to the last one too, and is freed with the last who refers to that.
        is_idle = not self._direct._get_sequence_number_for_group()
        has_abandoned = self._planned.board.has_abandoned
        late = [] if is_idle else [self._direct]
        if is_idle:
            dead.append(self._direct)
        self._stand_in(Destroyed(self.who))
        if has_abandoned:
            for each in (*dead, *late):
                keep(each)
        else:
            bury_when_idle(late)
            bury(dead)

    def _stand_in(self, destroyed: Destroyed) -> None:
        """Let ``destroyed`` answer whatever is asked of this group from now on."""
        self._gloo = self._direct = self._planned = self._store = destroyed
        self._nccl = self._signatures = None

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`."""
        if isinstance(self._gloo, Destroyed):
            return
        for queue in (self._progress, self._sender):
            if queue is not None:
                queue.disown()
        self._latest = None
        self._forget_world()
        self._stand_in(Inherited(self.who))

    def _finish(self) -> None:
        """Let what is queued end."""
        if self._latest is not None:
            self._latest.settle()
        for queue in (self._progress, self._sender):
            if queue is not None:
                queue.drain()

    def _forget_world(self) -> None:
        from commlayer.backend import world

        world.forget(self)

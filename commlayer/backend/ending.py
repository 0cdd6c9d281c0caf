"""How a group ends: in good order, broken off, with its program, or as a forked child's inheritance."""

from __future__ import annotations

import contextlib
import time

from commlayer.backend.batches import Batches
from commlayer.backend.inner import Destroyed, Inherited
from commlayer.backend.order import Order
from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import AsksRanks, Instruments
from commlayer.failures.detector import FailureDetector, job_detector, set_job_detector
from commlayer.failures.endings import bury, bury_when_idle
from commlayer.failures.waits import keep
from commlayer.profiles.printable import warn

__all__ = ["Ending"]


class Ending:
    """The end of one group. ``detector``: of a group that was the first of its ranks, and ends their failure detector with it."""

    def __init__(self, order: Order, batches: Batches, counters: GroupCounters) -> None:
        self._order, self._members, self._inner = order, order.members, order.inner
        self._batches, self._counters = batches, counters
        self.detector: FailureDetector | None = None
        self.inquiry: AsksRanks | None = None

    def stop(self, *, drain: bool) -> None:
        """End what is queued (``drain``), or break it, and let go of everything."""
        inner = self._inner
        if inner.is_ended:
            return
        for each in self._instruments:
            each.ending()
        if drain:
            self._finish()
            for each in self._instruments:
                each.closing(with_others=True)
            inner.planned.close()
        elif self._break():
            inner.planned.close()
        with contextlib.ExitStack() as stack:  # a device's error is raised in the end: the others are told first
            stack.callback(self._let_go, drain=drain)
            for on_device in inner.on_devices.values():
                stack.callback(on_device.end, drain=drain)

    @property
    def _instruments(self) -> list[Instruments]:
        """The instruments of all calls; those on devices come first, for a job's files are written by those of the group."""
        return [*(each.instruments for each in self._inner.on_devices.values()), self._order.instruments]

    def _let_go(self, *, drain: bool) -> None:
        self._counters.close()
        self._order.track.close()
        if self.inquiry is not None:
            self.inquiry.close()
        if self.detector is not None:
            if job_detector(self._members.global_ranks) is self.detector:
                set_job_detector(None)
            self.detector.close("it destroyed its process group" if drain else "it aborted its process group")
        self._order.instruments.closed()  # late: a job's files may take a while, and others are told by now
        self._free_inner()

    def is_over_within(self, patience_s: float) -> bool:
        """Wait so long for what is under way, on the host and on devices; whether all of it has ended then. Warns of calls that
        a device has not run by then, by their names.

        Without patience the calls that other threads wait for count too; else their threads go on, and wait for them."""
        if self._inner.is_ended:
            return True
        is_busy = self._order.track.issued > self._order.ended or self._order.progress.is_running
        if not patience_s and is_busy and not self._inner.planned.board.is_broken:
            return False
        until = time.monotonic() + patience_s
        has_ended = self._order.progress.drain(patience_s)
        if self._batches.sender is not None:
            has_ended &= self._batches.sender.drain(max(0.001, until - time.monotonic()))
        if self._order.latest is not None:
            has_ended &= self._order.latest.settle(max(0.001, until - time.monotonic()))
        for kind, each in self._inner.on_devices.items():
            words = each.under_way_after(max(0.001, until - time.monotonic()))
            if words:
                has_ended = False
                warn(
                    f"commlayer: {self._members.who}: {words} had not run on {kind} {patience_s:g} s after the group was to end; "
                    "it is broken off: look at the log of the rank that is late, or wait for calls before the end",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return has_ended

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`."""
        if self._inner.is_ended:
            return
        for queue in (self._order.progress, self._batches.sender):
            if queue is not None:
                queue.disown()
        self._order.latest, self._order.may_pass = None, None
        for each in self._instruments:
            each.closed(in_child=True)  # whose locks and stores are the parent's
        self._inner.stand_in(Inherited(self._members.who))

    def _finish(self) -> None:
        """Let what is queued end: who asks what this rank waits for hears of the last call that has not."""
        track = self._order.track
        if track.issued > track.done:
            track.wait_for_end("destroy_process_group")
        if self._order.latest is not None:
            self._order.latest.settle()
        for queue in (self._order.progress, self._batches.sender):
            if queue is not None:
                queue.drain()
        for each in self._inner.on_devices.values():
            try:
                each.finish(self._inner.timeout.total_seconds())
            except Exception as error:  # noqa: BLE001, PERF203  a device's, or an instrument's: the group must end
                warn(f"commlayer: {self._members.who}: at the end of calls on a device: {error}", stacklevel=2)
        track.waited()

    def _break(self) -> bool:
        """Break what is under way. Whether all of it has ended then, on this rank."""
        inner = self._inner
        for each in self._instruments:
            each.closing(with_others=False)
        inner.planned.connections.abort("aborted the group")
        inner.gloo.abort()
        inner.direct.abort()
        has_ended = self._order.progress.drain(timeout_s=1.0)
        if self._batches.sender is not None:
            has_ended &= self._batches.sender.drain(timeout_s=1.0)
        return has_ended

    def _free_inner(self) -> None:
        """Whoever still holds the group must not keep threads, connections and the store with it."""
        inner = self._inner
        dead = [] if inner.direct is inner.gloo else [inner.gloo]
        if inner.signatures is not None:
            dead.append(inner.signatures.gloo)
        # The C++ half of the group refers to the last one too, and is freed with the last who refers to that.
        is_idle = not inner.direct._get_sequence_number_for_group()
        has_abandoned = inner.planned.board.has_abandoned
        late = [] if is_idle else [inner.direct]
        if is_idle:
            dead.append(inner.direct)
        inner.stand_in(Destroyed(self._members.who))
        if has_abandoned:
            for each in (*dead, *late):
                keep(each)
        else:
            bury_when_idle(late)
            bury(dead)

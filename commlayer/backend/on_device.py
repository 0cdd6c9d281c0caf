"""The calls of a group on tensors of one type of device, in the order in which the program makes
them.

A call is launched where it is made, and the host waits for nothing. What a plan cannot do as it is
(an operation that it does not know, a tensor that is not in one piece, a coalesced block) goes to
the inner backend, which on CUDA is NCCL. Of a planned call events say when it ran, where an
instrument wants to know: that is read when a later call is made, or somebody asks. Of a call that
goes to the inner backend as it is, nothing more is known here than that it was launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.device_launches import LAUNCHES, launch_exchange, launch_known, launch_own
from commlayer.backend.launched_calls import LOOK_S
from commlayer.backend.launcher import Launcher
from commlayer.backend.members import Noted
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.engine.group_plans import Choices
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.call_moves import Counts
from commlayer.transport.nccl import use_lane

__all__ = ["OnDevice"]


class OnDevice:
    """A group's tensors on one type of device: the inner backend's calls, those by plan, and who
    listens to both."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.launched, self.track = launcher, launcher.launched, launcher.track
        self.inner, self.plans, self.order = launcher.inner, launcher.plans, launcher.order
        self.instruments = launcher.instruments
        self._backend: Any = self.inner.backend
        self.sequence = 0

    # Issuing

    def issue(self, name: str, collective: str, noted: Noted, *args: Any) -> Work:
        """Launch a call of the verb ``name``; ``args``: its tensors (and splits), and torch's
        options."""
        launch = LAUNCHES.get(name)
        if launch is None:
            return self._issue(collective, noted, args[-1], launch_own, name, collective, *args)
        return self._issue(collective, noted, args[-1], launch, *args)

    def _issue(self, collective: str, noted: Noted, opts: Any, body: Callable[..., Work], *args: Any) -> Work:
        launched = self.launched
        if launched.pending:
            launched.settle()
        dtype, sent, received, splits = noted
        # The host waits for no call of a device, whatever the program does: to those who look for
        # hangs none is a wait.
        launched.launching = call = self.track.note(collective, dtype, sent, received, opts, True, splits, depth=5)
        instruments = self.instruments
        try:
            for hear in instruments.issued:
                hear(call)
            call.started_ns = now()
            # While a graph is captured nobody may wait, or launch what is not of it.
            if instruments.began and not self.plans.connections.is_capturing:
                for hear in instruments.began:
                    hear(call)
            self.sequence = call.sequence = self.sequence + 1
            work = body(self.launcher, *args)
        except BaseException as error:
            call.error = type(error).__name__
            self._end(call)
            if isinstance(error, UsageError):
                self.track.take_back(call)
                if call.sequence:
                    self.sequence -= 1
                self.order.say_refused(call.collective, error)
            raise
        finally:
            launched.launching = None
        self._end(call)
        if not launched.pending:
            self.track.done = call.number
        return work

    def _end(self, call: Call) -> None:
        """Tell of its end, unless that is told when the device has run the call, or has been."""
        pending = self.launched.pending
        if not call.ended_ns and not (pending and pending[-1].call is call):
            call.ended_ns = now()
            for hear in self.instruments.ended:
                hear(call)

    # Deciding

    def known_choices(self, device: torch.device) -> Choices:
        """The choices of plans, once it is known by what to plan: before the first call that could
        have one. Collective then, later nothing."""
        self.plans.find_out(device)
        return self.plans.choices

    def use_lane(self, lane: str, cut: tuple[str, bool]) -> None:
        """Put calls from now on on ``lane``; ``cut``: see :attr:`GroupLane.cut`."""
        use_lane(self.inner, lane)
        self.plans.use_lane(*cut)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of calls that bring none of their own."""
        self._backend._set_default_timeout(timeout)
        self.plans.connections.set_timeout(timeout)

    def when_known(self, attach: Callable[[], None]) -> None:
        """Call ``attach`` once it is known by what to plan: now, or at the first call that could
        have a plan."""
        if not self.plans.is_unknown:
            attach()
        else:
            self.plans.found_out = attach

    def plan_anew(self, choices: Choices) -> None:
        """Plan by ``choices`` from the next call on. In the group's order; the host waits for calls
        by the earlier ones."""
        self.finish(self.plans.timeout_s)
        self.plans.choices = choices

    def stop_planning(self, instead: Callable[[Movement], None]) -> None:
        """Use no plans any more. ``instead`` runs calls whose plans were chosen before."""
        self.launcher.is_planning, self.launcher.instead = False, instead

    def start(self, movement: Movement) -> Work:
        """Launch a call of a plan that is known already, in a wire format, or over rails or
        nodes."""
        noted = movement.source.dtype, -1, -1, None  # ranks may have sizes of their own
        return self._issue(movement.plan.traffic.collective, noted, None, launch_known, movement)

    def start_exchange(
        self, source: torch.Tensor, target: torch.Tensor, rows: tuple[Sequence[int], Sequence[int]], counts: Counts
    ) -> Work:
        """Launch an all_to_all of which all ranks know ``counts``, in bytes; ``rows`` that go to
        each rank, and come from it."""
        noted = source.dtype, source.nbytes, target.nbytes, (list(rows[1]), list(rows[0]))
        return self._issue("all_to_all", noted, None, launch_exchange, source, target, rows, counts)

    def finish(self, patience_s: float) -> None:
        """Wait so long for planned calls that are noted to be under way, and take note of them."""
        self.launched.finish(patience_s)

    # Blocks, barriers and messages, which are the inner backend's

    def start_coalescing(self) -> None:
        """Give the inner backend all calls until :meth:`end_coalescing`, which waits for them as
        one."""
        self.launcher.is_coalescing = True
        self._backend._start_coalescing()

    def end_coalescing(self) -> Work:
        """End the block."""
        self.launcher.is_coalescing = False
        work: Work = self._backend._end_coalescing()
        return work

    # The end

    def under_way_after(self, patience_s: float) -> str:
        """Wait so long for what was launched; what has not run by then in words, empty: all has, or
        the device has failed, on which nothing runs any more."""
        until = monotonic() + patience_s
        try:
            while (words := self.plans.connections.under_way()) and monotonic() < until:
                sleep(LOOK_S)
            return words or self.inner.under_way_after(max(0.001, until - monotonic()))
        except RuntimeError:  # a device's error, which whoever waits for its work is told
            return ""

    def end(self, *, drain: bool) -> None:
        """Let go of communicators, when what was launched has run (``drain``), or at once."""
        self.launched.pending.clear()
        self.plans.found_out = None
        with contextlib.ExitStack() as stack:  # both, whatever fails
            stack.callback(self.inner.backend.shutdown if drain else self.inner.backend.abort)
            stack.callback(self.plans.end, drain=drain)
            stack.callback(self.track.close)
            stack.callback(self.instruments.closed)

"""The first rank's part of a group's watch: it compares the ranks' times, and has them make
appointments.

The group's experience (:mod:`commlayer.scheduler.experience.experience`) is told what calls took,
and says what the ranks are to do.
"""

from __future__ import annotations

import math
import time
from collections import deque

from commlayer.agree.appointments import PATIENCE_S, Appointments
from commlayer.auditing.audited_plans import AuditedPlans
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.link_checks import LinkChecks
from commlayer.auditing.told_times import TELL_EVERY, ToldTimes
from commlayer.profiles.printable import say

__all__ = ["LEAST_AHEAD", "WatchLead"]

_AHEAD_TURNS, LEAST_AHEAD = 1.5, 4
"""How far ahead an appointment is: as many calls as the group makes in so many turns, for every
rank must have heard of it."""
_MOST_MISSED = 3
"""The number of times in turn that an appointment which was called off is made again, each time twice as far ahead,
before there is a pause."""


class WatchLead:
    """The first rank of a group, on the thread of its watch.

    ``is_replanning``: whether links may be measured, and plans changed.
    """

    def __init__(
        self,
        planned: AuditedPlans,
        ledger: Ledger,
        appointments: Appointments,
        times: ToldTimes,
        checks: LinkChecks,
    ) -> None:
        self._planned, self._ledger = planned, ledger
        self.appointments, self._times, self._checks = appointments, times, checks
        self.is_replanning = planned.settings.replan == "on"
        self._awaits_outcome = False  # of the appointment that was made last
        self._num_missed = 0
        self._pace: deque[tuple[int, float]] = deque([(0, time.monotonic())])  # calls made, and when
        self._calls_per_s = 0.0

    def turn(self, now_s: float, turn_s: float, rest_s: float) -> None:
        """Compare, and have the others act. The group is looked at every ``turn_s``, or every
        ``rest_s`` if that is longer."""
        for call in self._times.compare():
            self._ledger.came_last(self._planned.global_ranks[call.last], call.waited_us)
            self._planned.choices.experience.told(call.sample.kind, call.sample.promised_us, call.last_us)
        # The pace of the group is that of the last two turns, or of the last one where that was faster.
        made, pace = self.appointments.calls, self._pace
        if now_s - pace[-1][1] >= turn_s / 2:
            while len(pace) > 1 and now_s - pace[1][1] >= 2 * turn_s:
                pace.popleft()
            self._calls_per_s = max((made - before) / (now_s - then_s) for before, then_s in (pace[0], pace[-1]))
            pace.append((made, now_s))
        if self.appointments.is_open:
            return  # or its purpose is being fulfilled
        if self._awaits_outcome:
            self._settle(now_s)
            return
        recent = self._ledger.samples[-TELL_EVERY:]
        step = self._planned.choices.experience.next_step(
            now_s,
            calls=self.appointments.calls,
            call_us=sum(sample.measured_us for sample in recent) / max(1, len(recent)),
            measuring_us=self._checks.measuring_us,
            may_measure=self.is_replanning,
        )
        if step is None:
            return
        if step.purpose:
            self._awaits_outcome = True
            # Who is in more groups may rest longer: then the appointment is missed, and made anew.
            longest_s = max(turn_s, rest_s)
            ahead = max(LEAST_AHEAD, math.ceil(self._calls_per_s * longest_s * _AHEAD_TURNS)) << self._num_missed
            self.appointments.make(step.purpose, step.value, ahead, max(PATIENCE_S, 3 * longest_s))
        if step.event:
            self._happened(step.event, is_said=True)

    def _settle(self, now_s: float) -> None:
        """Take note of what has become of the last appointment."""
        checks, experience = self._checks, self._planned.choices.experience
        seen, are_plans_tried = checks.seen, checks.are_plans_tried
        self._awaits_outcome, checks.seen, checks.are_plans_tried = False, None, False
        if are_plans_tried:
            experience.forget_calls()
        elif seen is None:  # it was called off: a rank had passed its call already, or did not answer
            self._num_missed = (self._num_missed + 1) % (_MOST_MISSED + 1)
            if not self._num_missed:
                experience.rest(now_s, PATIENCE_S)
        elif seen.has_changed:
            self._num_missed = 0
            experience.forget_calls()
            self._times.forget()
            self._happened(f"{seen.rates}: plans are made anew", is_said=True)
        else:
            self._num_missed = 0
            event = experience.settle(seen, now_s, with_trials=self._planned.settings.trials != "off")
            if event:
                self._happened(event)

    def _happened(self, what: str, *, is_said: bool = False) -> None:
        self._ledger.happened(self.appointments.calls, what)
        if is_said:
            text = f"group {self._planned.name}, call {self.appointments.calls}: {what}"
            say(text)

"""Watching the audits of a process's groups while its job runs, and having all ranks re-plan at the same call.

One sleeping thread a process, woken by calls. Every rank publishes how long its latest calls took; the first rank of
each group compares them. Of the times of one call the shortest is that of the rank that came last, and waited for
nobody: that one is held against what was promised. The group's experience
(:mod:`commlayer.scheduler.experience.experience`) is told, and says what the ranks are to do. For that they make an
appointment (:mod:`commlayer.agree.appointments`): they time their links at it, and go on with plans for what these can
do.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from commlayer.agree.appointments import PATIENCE_S, Appointments
from commlayer.auditing.audited_plans import AuditedChoices, AuditedPlans
from commlayer.auditing.ledger import Ledger
from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call
from commlayer.failures.board import own_client
from commlayer.forked_child import in_forked_child
from commlayer.peer_words import read_times
from commlayer.profiles.pairs import pair_rounds
from commlayer.profiles.printable import say
from commlayer.profiles.topology import Topology
from commlayer.scheduler.experience.experience import CONFIRM, MEASURE, TRY, Experience, LinksSeen
from commlayer.scheduler.experience.link_rates import LinkTimes, card_gbps
from commlayer.scheduler.group_profiles import most_siblings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["GroupWatch"]

_IDLE_S, _TURN_S, _STORE_PER_S = 30.0, 0.25, 1024
"""A group is looked at this often while it makes calls, and until it has made none for so long; less often where all ranks of the
job, with all their groups, would ask the store more than so many times a second."""
_SHARE, _LONGEST_TURN_S = 0.0015, 4.0
"""The part of a core that the watch of all groups may take, by its thread's clock: they are looked at less often where a look
costs more, but no less often than this; and as often as ever while an appointment is open, for which calls may wait. Waking up,
handing the interpreter over and the store's own work cost twice as much again: all of it stays below half a percent."""
_PUBLISHED = 4
"""After how many calls a rank tells what they took, or after :data:`_TURN_S`."""
_MOST_PUBLISHERS = 64
"""How many ranks of a group tell, evenly spread: the first one reads them all."""
_AHEAD_TURNS, _LEAST_AHEAD = 1.5, 4
"""How far ahead an appointment is: as many calls as the group makes in so many turns, for every rank must have heard of it."""
_OPEN_TURNS = 4
"""So many times as often a group is looked at while an appointment is open: what ranks wait for at its call."""
_MOST_MISSED = 3
"""So often in turn an appointment that was called off is made again, each time twice as far ahead, before there is a pause."""
_MEASURED_US, _LEAST_BYTES, _MOST_BYTES = 2e4, 64 << 10, 8 << 20
"""How long a message between two nodes takes that is measured, if the profile is right."""
_MOST_LOOKS = 6
"""How often such a message usually goes between two nodes."""
_END_S = 2.0
"""How long the end of the program waits for the thread: for one question to the store."""


def _at_once(work: Callable[[], None]) -> None:
    work()


class GroupWatch(Instrument):
    """Watches one group, on one of its ranks: its calls on the CPU, or those on a device.

    ``plan_anew`` has the group plan by other choices, from the next call on. ``time_links`` times its links by messages of
    so many bytes, with all ranks.
    """

    lets_pass = True

    def __init__(
        self,
        planned: AuditedPlans,
        ledger: Ledger,
        store: Store,
        plan_anew: Callable[[Any], None],
        time_links: Callable[[int], LinkTimes],
    ) -> None:
        assert planned.choices.job_planner is not None
        self._profile = planned.choices.job_planner.profile
        self._planned, self._ledger, self._plan_anew = planned, ledger, plan_anew
        self._time_links = time_links
        self.in_turn: Callable[[Callable[[], None]], None] = _at_once
        """Runs what the ranks do together on the host: for calls on a device, in the turn of the group's calls there."""
        self._own_store = partial(own_client, store)  # another thread that waits in the group's would hold up decisions
        self._store: Any = None
        size = len(planned.global_ranks)
        every = -(-size // _MOST_PUBLISHERS)
        self._publishers = list(range(0, size, every))
        self._is_publishing = planned.rank % every == 0
        self._is_replanning = planned.settings.replan == "on"
        self._appointments = Appointments(self._asked, planned.rank, size, self._refuse)
        rounds = _MOST_LOOKS * len(pair_rounds(len(planned.nodes), 3))
        self._measuring_us = rounds * _MEASURED_US
        self._published = self._compared = 0
        self._latest_s = self._next_s = 0.0
        self._rest_s = self._cost_s = 0.0  # between looks, by what they cost
        self._has_all_told = False
        self._pace: deque[tuple[int, float]] = deque([(0, time.monotonic())])
        self._calls_per_s = 0.0
        self._num_missed = 0
        self._awaits_outcome = False  # of the appointment that was made last
        self._seen: LinksSeen | None = None  # at that appointment
        self._are_plans_tried = False  # since that appointment
        self._is_closed = False
        me = weakref.ref(self)  # ledgers are kept for who reads them later, groups are not
        ledger.heard = lambda: None if (watch := me()) is None else watch._heard()
        ledger.told_from = _PUBLISHED
        _watching.add(self)

    # Where calls run

    def began(self, call: Call) -> None:
        """Count the call that runs now, and keep the appointment before it."""
        del call
        self.next_call()

    def ending(self) -> None:
        self.close()

    def next_call(self) -> None:
        """Count the call that runs now, and keep the appointment before it, if there is one.

        Raises PeerError and CollectiveTimeoutError where the decision on one does not come, as a call does.
        """
        if self._appointments.pass_by():
            return
        began = time.monotonic()
        try:
            appointment = self._appointments.next_call()
        except RuntimeError as error:
            waited_s, planned = time.monotonic() - began, self._planned
            raise planned.explain(
                error, "re-planning", self._appointments.calls, waited_s, planned.timeout_s
            ) from error
        if appointment is not None:
            purposes = {MEASURE: self._measure, CONFIRM: self._confirm, TRY: self._doubt}
            self.in_turn(partial(purposes[appointment.purpose], appointment.value))
            self._appointments.end()
            _watching.wake()

    def pass_by(self) -> bool:
        """Count the call that runs now, if no appointment can be before it; else leave that to :meth:`next_call`."""
        return self._appointments.pass_by()

    def _heard(self) -> None:
        if (
            time.monotonic() >= self._next_s
        ):  # before that its thread would only look at the clock, and take the lock for it
            _watching.wake()

    def _refuse(self, waited_s: float) -> None:
        planned = self._planned
        _watching.wake()
        if planned.board.is_broken:
            raise RuntimeError("the group is broken")
        if waited_s > planned.timeout_s:
            first = planned.global_ranks[0]
            raise RuntimeError(f"Timed out waiting for rank {first} to say whether plans change: look at its log")

    @property
    def _experience(self) -> Experience:
        """The group's experience with the prices by which it plans now."""
        return self._planned.choices.experience

    def _measure(self, slowdown: float, *, is_second: bool = False) -> None:
        """Time the links, with all ranks, and plan by what they can do now. ``is_second``: to confirm what was seen."""
        choices = self._planned.choices
        cluster = tuple(map(len, Topology.parse(self._profile.topology).nodes))
        seen = choices.experience.look_at_links(
            self._look,
            expected_us=self._measured_bytes / (card_gbps(self._profile) * 1e3),
            siblings=choices.siblings or most_siblings(cluster, choices.shape),
            slowdown=slowdown,
            is_second=is_second,
        )
        if seen.has_changed:
            self._take(choices.at_other_rates(seen.rates))
        self._seen = seen

    @property
    def _measured_bytes(self) -> int:
        """How large a message between two nodes is that is measured."""
        return round(min(max(card_gbps(self._profile) * 1e3 * _MEASURED_US, _LEAST_BYTES), _MOST_BYTES))

    def _look(self, larger: float) -> LinkTimes:
        """Time links by a message that is so many times larger, and say what the usual one would have taken."""
        num_bytes = min(round(self._measured_bytes * larger), _MOST_BYTES)
        return self._time_links(num_bytes).over(num_bytes / self._measured_bytes)

    def _confirm(self, slowdown: float) -> None:
        """Measure as :meth:`_measure` does, to confirm what that has seen."""
        self._measure(slowdown, is_second=True)

    def _doubt(self, budget_us: float) -> None:
        """Try the plans of calls to come, whatever they are priced at; unless links have changed since they were
        measured, which trials would take for wrong prices."""
        self._measure(1.0)
        if self._seen is not None and not self._seen.has_changed and self._experience.suspected is None:
            self._are_plans_tried = True
            self._take(self._planned.choices.doubted(budget_us))

    def _take(self, choices: AuditedChoices) -> None:
        self._plan_anew(choices)
        self._ledger.use_choices(choices)

    # On the thread of the watch

    def turn(self, now_s: float) -> bool:
        """Do what there is to do now. Whether the group is to be looked at again soon though nobody wakes the thread."""
        known = self._planned.board.detector.knowledge
        is_ending = bool(known.left or known.gone) and not self._appointments.is_open
        if self._is_closed or is_ending:
            return False  # a job that ends, or has lost a rank, changes no plans; and its store may be gone
        if now_s < self._next_s:
            return True
        self._next_s, begin_s = now_s + self._turn_s / 2, time.thread_time()
        try:
            self._turn(now_s)
        except Exception as error:  # noqa: BLE001  the store is lost, or holds what is not ours: calls go on as planned
            self._give_up(error)
            return False
        self._rest(now_s, time.thread_time() - begin_s)
        if self._appointments.is_open:  # whoever comes to the call waits for what becomes of it
            self._next_s = now_s + self._turn_s / (2 * _OPEN_TURNS)
        return self._appointments.is_open or now_s - self._latest_s < _IDLE_S

    def _rest(self, now_s: float, cost_s: float) -> None:
        """Look again no sooner than what this look cost allows; connecting to the store, which is done once, does not count."""
        usual_s, self._cost_s = min(cost_s, self._cost_s), cost_s
        self._rest_s = min(usual_s * len(_watching) / _SHARE, _LONGEST_TURN_S)
        if not self._appointments.is_open:
            self._next_s = max(self._next_s, now_s + self._rest_s)

    @property
    def has_open(self) -> bool:
        """Whether there is an appointment here that ranks may soon wait for."""
        return self._appointments.is_open

    @property
    def _turn_s(self) -> float:
        return max(_TURN_S, len(_watching) * len(self._planned.board.detector.ranks) / _STORE_PER_S)

    def _asked(self) -> Any:
        """The group's store, asked by nobody else in this process."""
        if self._store is None:
            self._store = self._own_store()
        return self._store

    def _turn(self, now_s: float) -> None:
        self._appointments.turn()
        if self._ledger.numbered != self._published:
            self._latest_s = now_s
            if self._is_publishing:
                self._publish()
            self._published = self._ledger.numbered
            self._ledger.told_from = self._published + _PUBLISHED
        if self._planned.rank == 0:
            self._lead(now_s)

    def _publish(self) -> None:
        self._asked().set(f"times/{self._planned.rank}", self._ledger.durations().tobytes())

    def _lead(self, now_s: float) -> None:
        """Compare, and have the others act: on the group's first rank."""
        self._compare()
        self._keep_pace(now_s)
        if self._appointments.is_open:
            return  # or its purpose is being fulfilled
        if self._awaits_outcome:
            self._settle(now_s)
            return
        recent = self._ledger.samples[-_PUBLISHED:]
        step = self._experience.next_step(
            now_s,
            calls=self._appointments.calls,
            call_us=sum(sample.measured_us for sample in recent) / max(1, len(recent)),
            measuring_us=self._measuring_us,
            may_measure=self._is_replanning,
        )
        if step is None:
            return
        if step.purpose:
            self._appoint(step.purpose, step.value)
        if step.event:
            self._happened(step.event, is_said=True)

    def _appoint(self, purpose: str, value: float) -> None:
        self._awaits_outcome = True
        # Who is in more groups may rest longer: then the appointment is missed, and made anew.
        turn_s = max(self._turn_s, self._rest_s)
        ahead = max(_LEAST_AHEAD, math.ceil(self._calls_per_s * turn_s * _AHEAD_TURNS)) << self._num_missed
        self._appointments.make(purpose, value, ahead, max(PATIENCE_S, 3 * turn_s))

    def _settle(self, now_s: float) -> None:
        """Take note of what has become of the last appointment."""
        seen, are_plans_tried = self._seen, self._are_plans_tried
        self._awaits_outcome, self._seen, self._are_plans_tried = False, None, False
        if are_plans_tried:
            self._experience.forget_calls()
        elif seen is None:
            self._miss(now_s)
        elif seen.has_changed:
            self._num_missed = 0
            self._experience.forget_calls()
            self._compared = self._ledger.numbered
            self._happened(f"{seen.rates}: plans are made anew", is_said=True)
        else:
            self._num_missed = 0
            event = self._experience.settle(seen, now_s, with_trials=self._planned.settings.trials != "off")
            if event:
                self._happened(event)

    def _miss(self, now_s: float) -> None:
        """Take note that the last appointment was called off: a rank had passed its call already, or did not answer."""
        self._num_missed = (self._num_missed + 1) % (_MOST_MISSED + 1)
        if not self._num_missed:
            self._experience.rest(now_s, PATIENCE_S)

    def _happened(self, what: str, *, is_said: bool = False) -> None:
        self._ledger.happened(self._appointments.calls, what)
        if is_said:
            text = f"group {self._planned.name}, call {self._appointments.calls}: {what}"
            say(text)

    def _compare(self) -> None:
        """Compare the times of the ranks, call by call."""
        told = self._told()
        if told is None:
            return
        for sample in self._ledger.samples:
            if sample.number <= self._compared:
                continue
            times = {rank: _time_of(windows, sample.number) for rank, windows in told.items()}
            if any(time is None for time in times.values()):
                continue
            known = {rank: time for rank, time in times.items() if time}
            if not known:
                continue
            self._compared = sample.number
            last = min(known, key=known.__getitem__)
            others_us = median(known.values())
            self._ledger.came_last(self._planned.global_ranks[last], others_us - known[last])
            self._experience.told(sample.kind, sample.promised_us, known[last])

    def _told(self) -> dict[int, array[float]] | None:
        """The times that the ranks have published; None while one has not yet."""
        others = [rank for rank in self._publishers if rank]
        keys = [f"times/{rank}" for rank in others]
        self._has_all_told = self._has_all_told or self._asked().check(keys)
        if not self._has_all_told:
            return None
        told = {0: self._ledger.durations()}
        for rank, data in zip(others, self._asked().multi_get(keys), strict=True):
            told[rank] = read_times(bytes(data), f"rank {rank} of the group")
        return told

    def _keep_pace(self, now_s: float) -> None:
        """Note how many calls are made in a second: by the last two turns, or by the last one where that was faster."""
        calls, pace = self._appointments.calls, self._pace
        if now_s - pace[-1][1] < self._turn_s / 2:
            return
        while len(pace) > 1 and now_s - pace[1][1] >= 2 * self._turn_s:
            pace.popleft()
        self._calls_per_s = max((calls - made) / (now_s - then_s) for made, then_s in (pace[0], pace[-1]))
        pace.append((calls, now_s))

    def _give_up(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._appointments.fail(error)
        if not self._planned.board.has_leaver:
            text = f"group {self._planned.name} is not watched any more, and keeps its plans: {error}"
            say(text)

    def close(self) -> None:
        """The group is over."""
        self._is_closed = True
        _watching.discard(self)


def _time_of(window: array[float], number: int) -> float | None:
    """A rank's time of the call of this number; 0.0 where it has forgotten it, None where it has not told of it yet."""
    behind = int(window[0]) - number
    if behind < 0:
        return None
    return window[len(window) - 1 - behind] if behind < len(window) - 1 else 0.0


class _Watching:
    """The watches of this process, and their thread, which is there once a group has made calls."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __len__(self) -> int:
        return len(self._watches)

    def add(self, watch: GroupWatch) -> None:
        with self._lock:
            self._watches.add(watch)

    def discard(self, watch: GroupWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def wake(self) -> None:
        """Have the thread look at all groups now."""
        if self._thread is None:
            self._start()
        self._bell.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_over:
                atexit.register(self.end)
                self._thread = threading.Thread(target=self._work, name="commlayer-watch", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter is ending
                    self._thread.start()

    def end(self) -> None:
        """End the thread, before the interpreter does: one that came back from C++ then would end the process by SIGABRT."""
        self._is_over = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _work(self) -> None:
        pause_s: float | None = _TURN_S
        while not self._is_over:
            self._bell.wait(pause_s)
            self._bell.clear()
            with self._lock:
                watches = list(self._watches)
            now_s = time.monotonic()
            busy = [watch for watch in watches if watch.turn(now_s)]
            pause_s = _TURN_S / (_OPEN_TURNS if any(watch.has_open for watch in busy) else 1) if busy else None
            del watches, busy


_watching = _Watching()


@in_forked_child
def _in_child() -> None:
    """A forked child has no thread, and no group of its own yet."""
    global _watching
    _watching = _Watching()

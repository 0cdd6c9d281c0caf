"""Watching the audits of a process's groups while its job runs: finding drift, and having all ranks re-plan at the same call.

One sleeping thread a process, woken by calls. Every rank publishes how long its latest calls took; the first rank of each group
compares them. Of the times of one call the shortest is that of the rank that came last, and waited for nobody: that is held
against what was promised (the others waited for it). Where calls have drifted (:mod:`commlayer.scheduler.drift`), and measuring
costs less than is lost, the group's ranks make an appointment (:mod:`commlayer.agree.appointments`), time their links at it, and
go on with plans for the rates that they found. What was found to be as before is not measured again soon.
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
from operator import and_
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from commlayer.agree.appointments import PATIENCE_S, Appointments
from commlayer.auditing.ledger import Ledger
from commlayer.calls.instruments import Instrument
from commlayer.calls.ring import Call
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.group_plans import Choices
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import own_client
from commlayer.forked_child import in_forked_child
from commlayer.peer_words import read_times
from commlayer.profiles.pairs import Pair, pair_rounds
from commlayer.profiles.printable import say
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner
from commlayer.scheduler.drift import Drift
from commlayer.scheduler.group_profiles import most_siblings
from commlayer.scheduler.link_rates import LinkRates, card_gbps, profile_at, rates_from

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from commlayer.measure.link_times import LinkTimes

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
_MORE_LOOKS = 2
"""How often as much is measured again where links are seen to be other than they were."""
_MOST_LOOKS = 6
"""How often such a message usually goes between two nodes."""
_MOST_TRIED = 2
"""How often plans are tried anew for the same links: prices that are wrong then are taken for what they are."""
_LEAST_CALLS = 32
"""A group is expected to make as many more calls as it has made, and at least so many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 60.0
"""How long nothing is measured after a measurement that found nothing, at first; twice as long each time after that."""
_END_S = 2.0
"""How long the end of the program waits for the thread: for one question to the store."""
_MEASURE, _CONFIRM, _TRY = "measure", "confirm", "try"
_CONFIRM_S, _LAPSE_S = 0.5, 5.0
"""How long after links were seen to be slower they are measured again, at the earliest and at the latest: work that keeps a
processor busy comes and goes."""
_TRIED, _LEAST_TRIED_US, _MOST_TRIED_US = 0.05, 3e5, 3e6
"""The part of the time of as many more calls as have been made that trials may take where prices are wrong; they wait until that
is the least with which plans can be compared, and take no more than the most, µs."""


def _at_once(task: Callable[[], None]) -> None:
    task()


class _Found(NamedTuple):
    """The outcome of measuring links. ``is_doubtful``: they were slower, but waits for a processor may explain that."""

    rates: LinkRates
    has_changed: bool
    is_doubtful: bool


class GroupWatch(Instrument):
    """Watches one group, on one of its ranks: its calls on the CPU, or those on a device.

    ``plan_anew`` has the group plan by other choices, from the next call on. ``in_turn`` runs what the ranks do together on
    the host in the turn of the group's calls there.
    """

    lets_pass = True

    def __init__(
        self,
        planned: PlannedGroup | DevicePlans,
        ledger: Ledger,
        store: Store,
        plan_anew: Callable[[Choices], None],
        in_turn: Callable[[Callable[[], None]], None] = _at_once,
    ) -> None:
        base = planned.choices.job_planner
        assert base is not None
        self._base, self._planned, self._ledger, self._plan_anew = base, planned, ledger, plan_anew
        self._in_turn = in_turn
        self._own_store = partial(own_client, store)  # another thread that waits in the group's would hold up decisions
        self._store: Any = None
        size = len(planned.global_ranks)
        every = -(-size // _MOST_PUBLISHERS)
        self._publishers = list(range(0, size, every))
        self._is_publishing = planned.rank % every == 0
        self._is_replanning = planned.settings.replan == "on"
        self._appointments = Appointments(self._asked, planned.rank, size, self._refuse)
        self._drift = Drift()
        self._rates = LinkRates(1.0, planned.choices.rates)
        self._published = self._compared = 0
        self._latest_s = self._next_s = self._quiet_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._rest_s = self._cost_s = 0.0  # between looks, by what they cost
        self._has_all_told = False
        self._pace: deque[tuple[int, float]] = deque([(0, time.monotonic())])
        self._calls_per_s = 0.0
        self._num_tried = self._num_missed = 0
        self._owes_trials = False  # prices are wrong, and calls have not taken long enough for trials yet
        self._has_doubted = False  # trials were begun at the latest appointment
        self._asked_for = ""  # the purpose of the appointment that was made last, until its outcome is known
        self._found: _Found | None = None
        self._suspected: LinkRates | None = None  # seen once, equal on all ranks
        self._lapses_s = 0.0
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
            purposes = {_MEASURE: self._measure, _CONFIRM: self._confirm, _TRY: self._doubt}
            self._in_turn(partial(purposes[appointment.purpose], appointment.value))
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

    def _measure(self, slowdown: float, *, is_second: bool = False) -> None:
        """Time the links, with all ranks, and plan by what they can do now.

        Nothing but a link makes calls faster. Slower they become by a busy processor, too: what the links may owe to that is not
        believed, nor is what was not seen at two appointments, of which this one ``is_second``.
        """
        profile, choices = self._base.profile, self._planned.choices
        cluster = tuple(map(len, Topology.parse(profile.topology).nodes))
        rates = partial(
            rates_from,
            expected_us=self._measured_bytes / (card_gbps(profile) * 1e3),
            siblings=choices.siblings or most_siblings(cluster, choices.shape),
            slowdown=slowdown / self._rates.fabric,  # since the profile was measured
        )
        times = self._look(1.0)
        for _ in range(_MORE_LOOKS):
            found = rates(times.taken_us)
            if not found.differs(self._rates):
                break
            faster = (
                found.fabric / self._rates.fabric
            )  # a burst that a card lets pass at once is no rate: then it takes more
            times = self._look(faster) if faster > 1.0 else times.shorter(self._look(1.0))
        found, suspected, is_doubtful = rates(times.taken_us), self._suspected, False
        self._suspected = None
        slower = found.slower(self._rates)
        if any(slower):
            least = rates(_certain_us(times, slower)).slower(self._rates)
            if not any(map(and_, slower, least)):
                found, is_doubtful = self._rates, True
            elif not is_second or suspected is None or found.differs(suspected):
                self._suspected, found = found, self._rates
        has_changed = found.differs(self._rates)
        if has_changed:
            self._rates = found
            planner = Planner(profile_at(profile, found.fabric), self._base.policy)
            self._take(choices.at_other_rates(planner, found.nodes or (1.0,) * len(choices.shape)))
        self._found = _Found(found, has_changed, is_doubtful)

    @property
    def _measured_bytes(self) -> int:
        """How large a message between two nodes is that is measured."""
        return round(min(max(card_gbps(self._base.profile) * 1e3 * _MEASURED_US, _LEAST_BYTES), _MOST_BYTES))

    def _look(self, larger: float) -> LinkTimes:
        """Time links by a message that is so many times larger, and say what the usual one would have taken."""
        from commlayer.measure.link_times import time_links  # not for those who only import the backend

        num_bytes = min(round(self._measured_bytes * larger), _MOST_BYTES)
        return time_links(self._planned, num_bytes).over(num_bytes / self._measured_bytes)

    def _confirm(self, slowdown: float) -> None:
        """Measure as :meth:`_measure` does, to confirm what that has found."""
        self._measure(slowdown, is_second=True)

    def _doubt(self, budget_us: float) -> None:
        """Try the plans of calls to come, whatever they are priced at; unless links have changed since they were measured, which
        trials would take for wrong prices."""
        self._measure(1.0)
        if self._found is not None and not self._found.has_changed and self._suspected is None:
            self._found, self._has_doubted = None, True
            self._take(self._planned.choices.doubted(budget_us))

    def _take(self, choices: Choices) -> None:
        self._plan_anew(choices)
        self._ledger.use_choices(choices)

    # On the thread of the watch

    def turn(self, now_s: float) -> bool:
        """Do what there is to do now. Whether the group is to be looked at again soon though nobody wakes the thread."""
        detector = self._planned.board.detector
        is_ending = bool(detector.left or detector.gone) and not self._appointments.is_open
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
        """On the group's first rank: compare, and have the others act."""
        self._compare()
        self._keep_pace(now_s)
        if self._appointments.is_open:
            return  # or its purpose is being fulfilled
        if self._asked_for:
            self._settle(now_s)
            return
        if self._owes_trials and self._trials_us >= _LEAST_TRIED_US:
            self._try_plans()
            return
        slowdown = self._drift.change()
        if slowdown is None or now_s < self._quiet_until_s:
            return
        if not self._is_replanning:
            self._pause(now_s)
            self._drift.accept()
            self._happened(
                f"calls take {slowdown:.2f} times as long as they did; plans stay, by COMMLAYER_REPLAN=audit",
                is_said=True,
            )
        elif self._is_worth_measuring(slowdown):
            self._appoint(_CONFIRM if now_s < self._lapses_s else _MEASURE, slowdown)

    def _appoint(self, purpose: str, value: float) -> None:
        self._asked_for = purpose
        turn_s = max(
            self._turn_s, self._rest_s
        )  # who is in more groups may rest longer: then it is missed, and made anew
        ahead = max(_LEAST_AHEAD, math.ceil(self._calls_per_s * turn_s * _AHEAD_TURNS)) << self._num_missed
        self._appointments.make(purpose, value, ahead, max(PATIENCE_S, 3 * turn_s))

    def _settle(self, now_s: float) -> None:
        """Take note of what has become of the last appointment."""
        purpose, outcome = self._asked_for, self._found
        self._asked_for, self._found = "", None
        if purpose == _TRY and self._has_doubted:
            self._has_doubted = False
            self._drift.begin_anew()  # trials have corrected what is promised: it is believed again
            self._quiet_until_s = now_s
            return
        if outcome is None:
            self._miss(now_s)
            return
        self._num_missed = 0
        if self._suspected is not None:
            self._quiet_until_s, self._lapses_s = now_s + _CONFIRM_S, now_s + _LAPSE_S
            return
        if outcome.has_changed:
            self._drift.begin_anew()
            self._quiet_until_s, self._pause_s, self._num_tried = now_s, _FIRST_PAUSE_S, 0
            self._owes_trials = False
            self._compared = self._ledger.numbered
            self._happened(f"{outcome.rates}: plans are made anew", is_said=True)
            return
        may_try = self._planned.settings.trials != "off" and self._num_tried < _MOST_TRIED
        is_of_prices = self._drift.is_of_prices and may_try
        self._pause(now_s)
        if outcome.is_doubtful and not is_of_prices:
            # What is seen is not accepted, or it would never be looked into again.
            self._happened(
                "calls had become slower, and links between nodes may have, or processors were busy: measured again later"
            )
            return
        self._drift.accept()
        if is_of_prices:
            self._owes_trials = True
        else:
            self._happened("calls had become slower or faster, but links between nodes are as they were: plans stay")

    @property
    def _trials_us(self) -> float:
        """The time that trials may take now, µs."""
        return min(_TRIED * self._call_us * self._appointments.calls, _MOST_TRIED_US)

    def _try_plans(self) -> None:
        self._owes_trials = False
        self._num_tried += 1
        self._appoint(_TRY, self._trials_us)
        self._happened(
            "links between nodes have not changed, but calls do not take what was promised: plans are tried",
            is_said=True,
        )

    def _miss(self, now_s: float) -> None:
        """Take note that the last appointment was called off: a rank had passed its call already, or did not answer."""
        self._num_missed = (self._num_missed + 1) % (_MOST_MISSED + 1)
        if not self._num_missed:
            self._quiet_until_s = now_s + max(self._pause_s, PATIENCE_S)

    def _pause(self, now_s: float) -> None:
        """Leave calls alone for a while, the longer the more often."""
        self._quiet_until_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _happened(self, what: str, *, is_said: bool = False) -> None:
        self._ledger.happened(self._appointments.calls, what)
        if is_said:
            text = f"group {self._planned.name}, call {self._appointments.calls}: {what}"
            say(text)

    @property
    def _call_us(self) -> float:
        """The time that a call takes at present, µs."""
        recent = self._ledger.samples[-_PUBLISHED:]
        return sum(sample.measured_us for sample in recent) / len(recent)

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
            self._drift.add(sample.kind, known[last] / sample.promised_us)

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

    def _is_worth_measuring(self, slowdown: float) -> bool:
        """Whether what a measurement costs is less than what drift costs, over as many more calls as have been made."""
        lost_us = self._call_us * abs(1.0 - 1.0 / slowdown) * max(self._appointments.calls, _LEAST_CALLS)
        rounds = _MOST_LOOKS * len(pair_rounds(len(self._planned.nodes), 3))
        return lost_us >= rounds * _MEASURED_US * max(slowdown, 1.0)

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


def _certain_us(times: LinkTimes, slower: list[bool]) -> dict[Pair, float]:
    """The least that those pairs can have taken that are said to be slower; of others what they took.

    ``slower``: whether the fabric is, which all pairs are of, then each node's card.
    """
    cards = {node for node, is_slower in enumerate(slower[1:]) if is_slower}
    return {
        pair: times.certain_us[pair] if slower[0] or cards & set(pair) else time_us
        for pair, time_us in times.taken_us.items()
    }


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

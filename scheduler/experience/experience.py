"""Experience: the one object that doubts a price. It is told what plans, calls and links took, and
asked what follows. Pure.

- *By what factor is a price wrong?* A group's curves may be interpolated, or come from a probe that
  knows little. What a trial shows at one size holds for sizes like it of the same collective too,
  so that a few trials settle a group.
- *Which plans contend?* Where plans are closer to each other than the profile's error, running them
  says more than the profile does: in trials before a call, or in turns of the program's calls.
- *Have the links changed?* Calls that have become slower or faster are a reason to measure links,
  and nothing more: a busy processor slows calls too. What is measured twice is believed.

An experience belongs to the prices by which a group plans: where these change, a new one begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import and_
from typing import NamedTuple

from commlayer.scheduler.decision import Decision, Planner
from commlayer.scheduler.experience.contenders import (
    Contender,
    Contest,
    Trial,
    contenders,
    find_trial,
    may_try,
    unchunked,
)
from commlayer.scheduler.experience.departures import Departures
from commlayer.scheduler.experience.link_rates import AS_PRICED, LinkRates, LinkTimes, rates_from
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic

__all__ = ["CONFIRM", "MEASURE", "TRY", "Experience", "LinksSeen", "NextStep"]

MEASURE, CONFIRM, TRY = "measure", "confirm", "try"
"""The steps that the ranks of a group take together: time their links, time them again to confirm
what was seen, or try the plans of calls to come because prices are wrong."""

_SIMPLER = 0.03
"""A simpler plan is kept that takes longer by no more than this fraction."""
_ALIKE = 8
"""Sizes within this factor say something about each other: a smaller call is more latency and less
bandwidth."""
_MORE_LOOKS = 2
"""How often links are timed again in one measurement, where they seem to be other than they
were."""
_MOST_TRIED = 2
"""How often plans are tried anew for the same links: prices that are wrong then are taken for what
they are."""
_LEAST_CALLS = 32
"""A group is expected to make as many more calls as it has made, and at least so many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 60.0
"""How long nothing is measured after a measurement without a result, at first; twice as long each
time after that."""
_CONFIRM_S, _LAPSE_S = 0.5, 5.0
"""How long after links were seen to be slower they are measured again, at the earliest and at the
latest: work that keeps a processor busy comes and goes."""
_TRIED, _LEAST_TRIED_US, _MOST_TRIED_US = 0.05, 3e5, 3e6
"""Where prices are wrong, trials may take this part of the time of as many more calls as have been
made. They wait until that is the least with which plans can be compared, and take no more than the
most, µs."""
_SIMPLICITY = {strategy: place for place, strategy in enumerate(Strategy)}


class LinksSeen(NamedTuple):
    """The outcome of timing links: their rates; whether those are believed, and others than the
    group's prices have; whether links seemed slower, but waits for a processor may explain that."""

    rates: LinkRates
    has_changed: bool = False
    is_doubtful: bool = False


class NextStep(NamedTuple):
    """A step that the ranks of a group take together: its purpose, a number for it, and an event to
    note; "": none.

    ``value``: by what factor calls have become slower, or for how long plans may be tried, µs.
    """

    purpose: str
    value: float
    event: str = ""


class Experience:
    """The experience of one group with its prices.

    It knows only times on which all ranks have agreed, but for those of :meth:`told`, which the
    group's first rank knows.

    ``links``: the rates of the group's links, as the prices have them. ``doubted_us``: above 0
    where calls have shown that prices are wrong; plans may then be tried for so long in all, µs.
    """

    def __init__(self, links: LinkRates = AS_PRICED, *, doubted_us: float = 0.0) -> None:
        self.links = links
        self.suspected: LinkRates | None = None
        """Rates that links were seen to have once, slower than :attr:`links`; equal on all
        ranks."""
        self._departures = Departures()
        self._quiet_until_s = self._lapses_s = 0.0
        """Until when nothing is measured, and until when a measurement confirms the one before."""
        self._pause_s = _FIRST_PAUSE_S
        self._num_tried = 0
        self._owes_trials = False
        """Whether prices are wrong, and calls have not taken long enough for trials yet."""
        self._doubted_us = doubted_us
        self._factors: dict[tuple[str, Strategy], dict[int, float]] = {}
        """How many times its price each plan takes: by collective and strategy, then by size in
        bytes."""
        self._tried: set[tuple[str, int]] = set()
        """The collectives and classes of sizes whose plans were tried."""
        self.spent_us = 0.0
        """The time of the trials so far, µs."""
        self.pending: Trial | None = None
        """Plans that all ranks of the group are to run before the call whose plan was asked for
        last."""
        self._contests: dict[tuple[object, ...], Contest] = {}
        self._contest: Contest | None = None
        """The contest to which the call belongs whose plan was asked for last."""

    def after(self, links: LinkRates) -> Experience:
        """Return the experience that begins with the prices of other links."""
        new = Experience(links)
        new._lapses_s = self._lapses_s
        return new

    def doubted(self, budget_us: float) -> Experience:
        """Return the experience that begins where prices are wrong: the fastest plan of every
        strategy is tried before the next call of its size, for so long in all, µs."""
        new = Experience(self.links, doubted_us=budget_us)
        new._pause_s, new._lapses_s, new._num_tried = self._pause_s, self._lapses_s, self._num_tried
        return new

    def forget_prices(self) -> None:
        """Forget what trials have taught: calls are priced otherwise from now on. Contests, which
        know no price, go on."""
        self._doubted_us, self.spent_us, self.pending = 0.0, 0.0, None
        self._factors.clear()
        self._tried.clear()

    # By what factor is a price wrong?

    def factor(self, plan: Plan) -> float:
        """Return how many times its price a plan takes, as was learnt at a size like its own; 1.0
        where nothing was."""
        return self._learnt(plan) or 1.0

    def best(self, decision: Decision) -> Plan:
        """Return the plan of the decision that is the fastest by what was learnt; the decision's
        own where nothing was.

        It is one of a strategy that was tried: what delayed them all is no reason to take another
        one unseen.
        """
        if not may_try(decision.traffic):
            return decision.plan
        tried = [timeline for timeline in decision.candidates if self._learnt(timeline.plan)]
        times = [(timeline.total_us * self.factor(timeline.plan), timeline.plan) for timeline in tried]
        if not times:
            return decision.plan
        most_us = min(time_us for time_us, _ in times) * (1.0 + _SIMPLER)
        return min((plan for time_us, plan in times if time_us <= most_us), key=_simplicity)

    def _learnt(self, plan: Plan) -> float | None:
        factors = self._factors.get((plan.traffic.collective, plan.strategy), {})
        size = max(1, plan.traffic.logical_bytes)
        near = min(factors, key=lambda other: abs(math.log(other / size)), default=0)
        return factors[near] if size <= near * _ALIKE and near <= size * _ALIKE else None

    # Which plans contend, in a trial before the call?

    def find_trial(self, planner: Planner, traffic: Traffic, *, is_wanted: bool) -> Trial | None:
        """Find the plans to run before the call of ``traffic`` is planned; None where there are
        none. They are :attr:`pending` then.

        ``is_wanted``: however good the profile is. Each collective is tried once for all sizes of a
        class.
        """
        if not may_try(traffic):
            return None
        asked = traffic.collective, _size_class(traffic.logical_bytes)
        self.pending = None
        if asked not in self._tried:
            self._tried.add(asked)
            self.pending = find_trial(planner, traffic, self.spent_us, self._doubted_us, is_wanted=is_wanted)
        return self.pending

    def learn(self, rounds: Sequence[Sequence[float]]) -> None:
        """Take what each plan of the pending trial took in each round, µs, the largest over
        ranks."""
        trial, self.pending = self.pending, None
        assert trial is not None
        self.spent_us += sum(map(sum, rounds))
        for timeline, times_us in zip(trial.contenders, zip(*rounds, strict=True), strict=True):
            plan, factor = timeline.plan, min(times_us) / timeline.total_us
            collective, size = plan.traffic.collective, plan.traffic.logical_bytes
            self._tried.add((collective, _size_class(size)))
            self._factors.setdefault((collective, plan.strategy), {})[size] = factor
            if trial.holds_at:  # in one chunk or several: they err alike
                for strategy in Strategy:
                    if unchunked(strategy) is unchunked(plan.strategy):
                        self._factors.setdefault((collective, strategy), {})[trial.holds_at] = factor

    # Which plans contend, in the program's calls?

    def contender(self, plan: Plan, connections: Sequence[int] | None) -> Contender | None:
        """Return the contender whose turn it is for a call like that of ``plan``, the simplest;
        None where none contend.

        ``connections``: the numbers of connections to try; None: the usual ones.
        """
        traffic, self._contest = plan.traffic, None
        if traffic.is_ordered or traffic.lane:  # keeps the order of ranks, or yields to others between its chunks
            return None
        key = traffic.collective, traffic.logical_bytes.bit_length(), plan.wire
        contest = self._contests.get(key)
        if contest is None:
            contest = self._contests[key] = Contest(contenders(traffic, plan.wire, connections))
        self._contest = None if contest.is_over else contest
        return contest.current

    @property
    def is_contested(self) -> bool:
        """Whether :meth:`ran` waits to be told what the latest call took."""
        return self._contest is not None

    def ran(self, plan: Plan, time_us: float, agree: Callable[[list[float]], list[float]]) -> None:
        """Take what a call of ``plan`` took whose turn was asked for last.

        ``agree`` returns each number's largest over ranks, and is called on all of them after the
        same call, or on none.
        """
        contest, self._contest = self._contest, None
        if contest is None or contest.current != Contender(plan.strategy, plan.chunks, plan.connections):
            return  # another call's, where the one that was asked for went another way
        if times := contest.ran(time_us / plan.traffic.logical_bytes):
            contest.settle(agree(times))

    def leave_out_connections(self, connections: int) -> bool:
        """Have no plan over so many connections or more contend: on all ranks, before the same
        call, whose plan is to be asked for again then. Returns False where nothing else
        contends."""
        return all(contest.leave_out(connections) for contest in self._contests.values())

    # Have the links changed?

    def told(self, kind: Hashable, promised_us: float, measured_us: float) -> None:
        """Take what the next call of this kind took: on the rank that came last, and waited for
        nobody."""
        self._departures.add(kind, measured_us / promised_us)

    def next_step(
        self, now_s: float, *, calls: int, call_us: float, measuring_us: float, may_measure: bool
    ) -> NextStep | None:
        """Say what the ranks of the group are to do together now; None: nothing.

        ``calls``: how many the group has made, of which one takes ``call_us`` at present.
        ``measuring_us``: the time of a measurement of links as they were. Where the ranks may not
        measure, calls that have changed are an event without a purpose.
        """
        trials_us = min(_TRIED * call_us * calls, _MOST_TRIED_US)
        if self._owes_trials and trials_us >= _LEAST_TRIED_US:
            self._owes_trials = False
            self._num_tried += 1
            event = "links between nodes have not changed, but calls do not take what was promised: plans are tried"
            return NextStep(TRY, trials_us, event)
        slowdown = self._departures.change()
        if slowdown is None or now_s < self._quiet_until_s:
            return None
        if not may_measure:
            self._pause(now_s)
            self._departures.accept()
            event = f"calls take {slowdown:.2f} times as long as they did; plans stay, by COMMLAYER_REPLAN=audit"
            return NextStep("", slowdown, event)
        lost_us = call_us * abs(1.0 - 1.0 / slowdown) * max(calls, _LEAST_CALLS)
        if lost_us < measuring_us * max(slowdown, 1.0):
            return None
        return NextStep(CONFIRM if now_s < self._lapses_s else MEASURE, slowdown)

    def look_at_links(
        self,
        look: Callable[[float], LinkTimes],
        *,
        expected_us: float,
        siblings: int,
        slowdown: float,
        is_second: bool = False,
    ) -> LinksSeen:
        """Time the links by ``look``, as often as it takes to believe what is seen. The same on all
        ranks.

        Nothing but a link makes calls faster. They become slower by a busy processor, too: what the
        links may owe to that is not believed, nor is what was not seen in two measurements, of
        which this one ``is_second``.

        ``look`` times links by a message that is so many times larger than the usual one, and
        returns what that one would have taken; by the job's profile it takes ``expected_us``.
        ``siblings`` groups may share the cards. ``slowdown``: by what factor calls have become
        slower.
        """
        slowdown /= self.links.fabric  # since the profile was measured
        rates_of = partial(rates_from, expected_us=expected_us, siblings=siblings, slowdown=slowdown)
        times = look(1.0)
        for _ in range(_MORE_LOOKS):
            rates = rates_of(times.taken_us)
            if not rates.differs(self.links):
                break
            # A burst that a card lets pass at once is no rate: then it takes more bytes.
            faster = rates.fabric / self.links.fabric
            times = look(faster) if faster > 1.0 else times.shorter(look(1.0))
        rates, suspected = rates_of(times.taken_us), self.suspected
        self.suspected = None
        slower = rates.slower(self.links)
        if any(slower):
            certainly = rates_of(times.least_us(slower)).slower(self.links)
            if not any(map(and_, slower, certainly)):
                return LinksSeen(self.links, is_doubtful=True)
            if not is_second or suspected is None or rates.differs(suspected):
                self.suspected = rates
                return LinksSeen(self.links)
        return LinksSeen(rates, rates.differs(self.links))

    def settle(self, seen: LinksSeen, now_s: float, *, with_trials: bool) -> str:
        """Take note of a measurement after which the group's prices are what they were. Returns an
        event; "": none.

        ``with_trials``: plans may be tried where prices are wrong.
        """
        if self.suspected is not None:
            self._quiet_until_s, self._lapses_s = now_s + _CONFIRM_S, now_s + _LAPSE_S
            return ""
        are_prices_wrong = self._departures.is_of_prices and with_trials and self._num_tried < _MOST_TRIED
        self._pause(now_s)
        if seen.is_doubtful and not are_prices_wrong:  # not accepted, or it would never be looked into again
            return "calls had become slower, and links between nodes may have, or processors were busy: measured again later"
        self._departures.accept()
        if are_prices_wrong:
            self._owes_trials = True
            return ""
        return "calls had become slower or faster, but links between nodes are as they were: plans stay"

    def rest(self, now_s: float, least_s: float) -> None:
        """Leave links alone for as long as at present after a measurement without a result, and for
        ``least_s``."""
        self._quiet_until_s = now_s + max(self._pause_s, least_s)

    def forget_calls(self) -> None:
        """Forget the calls of which it was told: they were made by other prices."""
        self._departures = Departures()

    def _pause(self, now_s: float) -> None:
        """Leave calls alone for a while, the longer the more often."""
        self._quiet_until_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _size_class(num_bytes: int) -> int:
    """Sizes within a factor of four are of one class."""
    return num_bytes.bit_length() // 2


def _simplicity(plan: Plan) -> tuple[int, int]:
    return _SIMPLICITY[plan.strategy], plan.chunks

"""Corrections: how much longer plans took on a group than its profile predicts, and which plan is the fastest then.

A group's curves may be interpolated, or of a probe that knows little. Where the plans that contend are closer to each other
than the profile's error, running them says more than the profile does (:class:`Trial`); what is learnt there holds for
sizes like it of the same collective too, so that a few trials settle a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler.decision import Decision, Planner
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE

__all__ = ["RUNS", "Corrections", "Trial", "may_try"]

_LEAST_TOLERANCE, _CHEAP_US = 0.1, 4e4
"""A profile that knows its plans' times better than this is believed, but where a trial costs as little as this."""
_CONTENDS, _LEAST_ERROR = 2.0, 0.2
"""A plan contends that is predicted slower by no more than this many times the profile's error, which is taken to be as large as
this at least: two curves may err both ways, and not all that is uncertain shows when a point is left out."""
_SIMPLER = 0.03
"""A simpler plan is kept that takes longer by no more than this fraction."""
_LONGEST_US, _BUDGET_US = 1.5e5, 3e5
"""The longest trial, as predicted, and all trials of a group together; one that takes longer than that ends with its first
round."""
RUNS = 2
"""How often each plan of a trial runs at least, in turn; the fastest time counts, for others' work only adds to it."""
_MOST_RUNS = 8
_ALIKE = 8
"""Sizes within this factor say something about each other: a smaller call is more latency and less bandwidth."""
_SMALLER = (1, 2, 4)
"""The parts of a call's size at which it may be tried."""
_SMALLER_YET = (6, 8, 12, 16, 20, 24, 32)
"""The parts at which two plans of a large call may be tried that the profile cannot tell apart."""
_IN_PROPORTION = 1.2
"""So much may the predicted ratio of those two be another at the smaller size, for that to say something of the large one."""
_TRIED = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")
_SIMPLICITY = {strategy: place for place, strategy in enumerate(Strategy)}


@dataclass(frozen=True)
class Trial:
    """Plans of one call that contend, to be run in turn, each :attr:`runs` times.

    ``asked``: the size class of the call that it is for. ``longest_us``: after so long it ends with the round that is under way.
    ``holds_at``: a larger size, bytes, for which they are taken to say as much; 0: for sizes like their own only.
    """

    contenders: tuple[Timeline, ...]
    asked: int
    longest_us: float = _LONGEST_US
    holds_at: int = 0

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(timeline.plan for timeline in self.contenders)

    @property
    def runs(self) -> int:
        """How often each plan runs: the shorter it is, the more often, for the more others' work adds to its time."""
        round_us = sum(timeline.total_us for timeline in self.contenders)
        return min(max(RUNS, int(_CHEAP_US / max(round_us, 1.0))), _MOST_RUNS)


def may_try(traffic: Traffic) -> bool:
    """Whether trials may decide on a call: not where precision, an order of sums, or others' turn on the link does."""
    is_plain = traffic.wires == (NATIVE,) and not traffic.is_ordered and not traffic.lane
    return traffic.collective in _TRIED and is_plain


class Corrections:
    """The corrections of one group that its trials have taught. Pure: it knows only times that all ranks have agreed on.

    ``doubted_us``: above 0 where calls have shown that the profile's prices are wrong: then the fastest plan of every strategy is
    tried, whatever its price, for so long in all, µs.
    """

    def __init__(self, doubted_us: float = 0.0) -> None:
        self._is_doubted = doubted_us > 0
        self._longest_us, self._budget_us = (doubted_us, doubted_us) if doubted_us else (_LONGEST_US, _BUDGET_US)
        self.spent_us = 0.0
        """The time of the trials so far, µs."""
        self._factors: dict[tuple[str, Strategy], dict[int, float]] = {}
        self._tried: set[tuple[str, int]] = set()

    def factor(self, plan: Plan) -> float:
        """How many times its predicted time a plan takes, as was learnt at a size like its own; 1.0 where nothing was."""
        return self._learnt(plan) or 1.0

    def best(self, decision: Decision) -> Plan:
        """The plan of the decision that is the fastest by what was learnt; the decision's own where nothing was.

        Among strategies that were tried: what delayed them all is no reason to take another one unseen.
        """
        tried = [timeline for timeline in decision.candidates if self._learnt(timeline.plan)]
        times = [(timeline.total_us * self.factor(timeline.plan), timeline.plan) for timeline in tried]
        if not times:
            return decision.plan
        most_us = min(time_us for time_us, _ in times) * (1.0 + _SIMPLER)
        return min((plan for time_us, plan in times if time_us <= most_us), key=_simplicity)

    def trial(self, planner: Planner, traffic: Traffic, *, is_wanted: bool) -> Trial | None:
        """The plans to run before a call is planned; None where they would not pay. ``is_wanted``: however good the profile is.

        A profile whose curves of such a group lie beyond the groups that were measured does not know how good it is. A call that
        takes long is tried at a smaller size, down to a fourth of its own. One that takes longer yet is tried only where the
        simpler plan is kept though another is predicted faster: these two, at a size still smaller, where they are
        predicted to compare as they do at its own.
        """
        asked = _size_class(traffic.logical_bytes)
        if not may_try(traffic) or (traffic.collective, asked) in self._tried:
            return None
        self._tried.add((traffic.collective, asked))
        is_wanted = is_wanted or self._is_doubted or _is_beyond(planner.profile)
        for size in (traffic.logical_bytes // part for part in _SMALLER):
            decision = planner.decide(_of_size(traffic, size))
            limit_us = self._limit_us(decision, is_wanted)
            contenders = _contenders(decision, math.inf if self._is_doubted else _CONTENDS)
            if self._is_doubted:
                contenders = _fitting(contenders, limit_us)
            if sum(timeline.total_us for timeline in contenders) <= limit_us:
                return Trial(contenders, asked, self._longest_us) if len(contenders) > 1 else None
        return self._smaller_trial(planner, traffic, is_wanted)

    def _limit_us(self, decision: Decision, is_wanted: bool) -> float:
        """The longest that a round of a trial may take, µs."""
        limit_us = min(self._longest_us, self._budget_us - self.spent_us) / RUNS
        return limit_us if is_wanted or decision.tolerance >= _LEAST_TOLERANCE else min(limit_us, _CHEAP_US / RUNS)

    def _smaller_trial(self, planner: Planner, traffic: Traffic, is_wanted: bool) -> Trial | None:
        """The trial of the plan that is kept because it is simpler, and of the one that is predicted faster."""
        decision, asked = planner.decide(traffic), _size_class(traffic.logical_bytes)
        large = decision.timeline, min(decision.candidates, key=lambda timeline: timeline.total_us)
        kinds = [_unchunked(timeline.plan.strategy) for timeline in large]
        if kinds[0] is kinds[1]:
            return None
        for part in _SMALLER_YET:
            smaller = planner.decide(_of_size(traffic, traffic.logical_bytes // part))
            small = [timeline for kind in kinds for timeline in _fastest_of(kind, smaller.candidates)]
            if len(small) < len(kinds):
                return None  # a size at which nothing is planned
            if sum(timeline.total_us for timeline in small) <= self._limit_us(smaller, is_wanted):
                change = small[0].total_us / small[1].total_us / (large[0].total_us / large[1].total_us)
                is_alike = 1 / _IN_PROPORTION <= change <= _IN_PROPORTION
                return Trial(tuple(small), asked, self._longest_us, traffic.logical_bytes) if is_alike else None
        return None

    def learn(self, trial: Trial, rounds: Sequence[Sequence[float]]) -> None:
        """Take what each plan of a trial took in each round, µs, as agreed on by all ranks."""
        self.spent_us += sum(map(sum, rounds))
        for timeline, times_us in zip(trial.contenders, zip(*rounds, strict=True), strict=True):
            time_us = min(times_us)
            plan = timeline.plan
            size = plan.traffic.logical_bytes
            self._tried.add((plan.traffic.collective, _size_class(size)))
            self._factors.setdefault((plan.traffic.collective, plan.strategy), {})[size] = time_us / timeline.total_us
            if trial.holds_at:  # in one chunk or several: they err alike
                for strategy in (each for each in Strategy if _unchunked(each) is _unchunked(plan.strategy)):
                    known = self._factors.setdefault((plan.traffic.collective, strategy), {})
                    known[trial.holds_at] = time_us / timeline.total_us

    def _learnt(self, plan: Plan) -> float | None:
        known = self._factors.get((plan.traffic.collective, plan.strategy), {})
        size = max(1, plan.traffic.logical_bytes)
        near = min(known, key=lambda other: abs(math.log(other / size)), default=0)
        return known[near] if size <= near * _ALIKE and near <= size * _ALIKE else None


def _is_beyond(profile: Profile) -> bool:
    """Whether what it says of messages between nodes is derived from groups that all touch more nodes, or fewer."""
    return any(curve.basis == "derived" and curve.link is Resource.INTER for curve in profile.curves)


def _contenders(decision: Decision, errors: float) -> tuple[Timeline, ...]:
    """The fastest plan of each strategy, as predicted, which is slower than the fastest of all by no more than so many errors."""
    fastest: dict[Strategy, Timeline] = {}
    for timeline in sorted(decision.candidates, key=lambda each: each.total_us):
        fastest.setdefault(timeline.plan.strategy, timeline)
    return tuple(_near(fastest.values(), 1.0 + errors * max(decision.tolerance, _LEAST_ERROR)))


def _fitting(contenders: tuple[Timeline, ...], limit_us: float) -> tuple[Timeline, ...]:
    """The contenders without the slowest of them, as predicted, so many that one run of each fits; two at least. One plan that is
    far off must not keep the others from being tried."""
    while len(contenders) > 2 and sum(timeline.total_us for timeline in contenders) > limit_us:
        contenders = tuple(sorted(contenders, key=lambda timeline: timeline.total_us)[:-1])
    return contenders


def _unchunked(strategy: Strategy) -> Strategy:
    """The strategy that has the same legs in one chunk."""
    return Strategy.HIERARCHICAL if strategy is Strategy.PIPELINED else strategy


def _fastest_of(kind: Strategy, candidates: Iterable[Timeline]) -> list[Timeline]:
    """The fastest plan with the legs of a strategy, as predicted; none where there is none."""
    return sorted(
        (each for each in candidates if _unchunked(each.plan.strategy) is kind), key=lambda each: each.total_us
    )[:1]


def _near(timelines: Iterable[Timeline], most: float) -> list[Timeline]:
    found = list(timelines)
    best_us = min((timeline.total_us for timeline in found), default=0.0)
    return [timeline for timeline in found if timeline.total_us <= best_us * most]


def _of_size(traffic: Traffic, size: int) -> Traffic:
    """The same traffic of about ``size`` bytes: so many elements that every rank's block has as many."""
    unit = 8 * traffic.group_size
    return replace(traffic, logical_bytes=max(unit, size // unit * unit))


def _size_class(num_bytes: int) -> int:
    """Sizes within a factor of four are of one class."""
    return num_bytes.bit_length() // 2


def _simplicity(plan: Plan) -> tuple[int, int]:
    return _SIMPLICITY[plan.strategy], plan.chunks

"""Experience: the one object that doubts a price. It is told what plans took, and asked what follows from that. Pure.

A group's curves may be interpolated, or come from a probe that knows little. Where the plans that contend are closer to
each other than the profile's error, running them says more than the profile does. What is learnt at one size holds for
sizes like it of the same collective too, so that a few trials settle a group.

An experience belongs to the prices by which a group plans: where these change, a new one begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commlayer.scheduler.decision import Decision, Planner
from commlayer.scheduler.experience.contenders import (
    Contender,
    Contest,
    Doubt,
    Trial,
    contenders,
    find_trial,
    may_try,
    unchunked,
)
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic

__all__ = ["Experience"]

_SIMPLER = 0.03
"""A simpler plan is kept that takes longer by no more than this fraction."""
_ALIKE = 8
"""Sizes within this factor say something about each other: a smaller call is more latency and less bandwidth."""
_SIMPLICITY = {strategy: place for place, strategy in enumerate(Strategy)}


class Experience:
    """The experience of one group with its prices. It knows only times on which all ranks have agreed.

    ``doubted_us``: above 0 where calls have shown that prices are wrong; plans may then be tried for so long in all, µs.
    """

    def __init__(self, doubted_us: float = 0.0) -> None:
        self._doubt = Doubt(doubted_us, doubted_us, of_all=True) if doubted_us else Doubt()
        self._factors: dict[tuple[str, Strategy], dict[int, float]] = {}
        """How many times its price each plan takes: by collective and strategy, then by size in bytes."""
        self._tried: set[tuple[str, int]] = set()
        """The collectives and classes of sizes whose plans were tried."""
        self.spent_us = 0.0
        """The time of the trials so far, µs."""
        self.pending: Trial | None = None
        """Plans that all ranks of the group are to run before the call whose plan was asked for last."""
        self._contests: dict[tuple[object, ...], Contest] = {}
        self._contest: Contest | None = None
        """The contest to which the call belongs whose plan was asked for last."""

    def forget_prices(self) -> None:
        """Forget what trials have taught: calls are priced otherwise from now on. Contests, which know no price, go on."""
        self._doubt, self.spent_us, self.pending = Doubt(), 0.0, None
        self._factors.clear()
        self._tried.clear()

    # By what factor is a price wrong?

    def factor(self, plan: Plan) -> float:
        """Return how many times its price a plan takes, as was learnt at a size like its own; 1.0 where nothing was."""
        return self._learnt(plan) or 1.0

    def best(self, decision: Decision) -> Plan:
        """Return the plan of the decision that is the fastest by what was learnt; the decision's own where nothing was.

        It is one of a strategy that was tried: what delayed them all is no reason to take another one unseen.
        """
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
        """Find the plans to run before the call of ``traffic`` is planned; None where there are none. They are
        :attr:`pending` then.

        ``is_wanted``: however good the profile is. Each collective is tried once for all sizes of a class.
        """
        asked = traffic.collective, _size_class(traffic.logical_bytes)
        self.pending = None
        if may_try(traffic) and asked not in self._tried:
            self._tried.add(asked)
            self.pending = find_trial(planner, traffic, self._doubt, self.spent_us, is_wanted=is_wanted)
        return self.pending

    def learn(self, rounds: Sequence[Sequence[float]]) -> None:
        """Take what each plan of the pending trial took in each round, µs, the largest over ranks."""
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
        """Return the contender whose turn it is for a call like that of ``plan``, the simplest; None where none contend.

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

        ``agree`` returns each number's largest over ranks, and is called on all of them after the same call, or on none.
        """
        contest, self._contest = self._contest, None
        if contest is None or contest.current != Contender(plan.strategy, plan.chunks, plan.connections):
            return  # another call's, where the one that was asked for went another way
        if times := contest.ran(time_us / plan.traffic.logical_bytes):
            contest.settle(agree(times))

    def leave_out_connections(self, connections: int) -> bool:
        """Have no plan over so many connections or more contend: on all ranks, before the same call, whose plan is to be
        asked for again then. Returns False where nothing else contends."""
        return all(contest.leave_out(connections) for contest in self._contests.values())


def _size_class(num_bytes: int) -> int:
    """Sizes within a factor of four are of one class."""
    return num_bytes.bit_length() // 2


def _simplicity(plan: Plan) -> tuple[int, int]:
    return _SIMPLICITY[plan.strategy], plan.chunks

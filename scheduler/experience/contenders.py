"""Contenders: the plans that run in turn until it is known which of them is the fastest. Pure.

They contend in one of two ways. In a *trial* they run before a call, on tensors of their own,
because the profile cannot tell them apart; their times correct its prices. In a *contest* they run
the program's first calls, in a group of which no profile is known or wanted, between sites above
all. A profile takes as long there as many calls, the group is made anew whenever members change,
and the time over a long link depends on what no profile has: the number of connections between two
ranks. One TCP connection has no more bytes under way than its buffers hold. Where the product of a
link's rate and its delay is larger, several connections fill the link; where it is smaller, they
only compete.

A contest costs nothing beside the calls, for every plan's result is right. Its first round is
lenient, because new connections begin slowly. All ranks count the same calls, and decide by each
plan's fastest time, the largest over ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.decision import Decision, Planner
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.price import Timeline
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import NATIVE, Wire

__all__ = [
    "LEAST_BYTES",
    "RUNS",
    "Contender",
    "Contest",
    "Trial",
    "contenders",
    "find_trial",
    "may_try",
    "unchunked",
]

# Trials

_LEAST_TOLERANCE = 0.1
"""A profile that knows its plans' times better than this is believed, unless a trial is cheap."""
_CHEAP_US = 4e4
"""The time of a cheap trial."""
_CONTENDS = 2.0
"""A plan contends that is predicted slower by no more than this many times the profile's error: two
curves may err both ways."""
_LEAST_ERROR = 0.2
"""The profile's error is taken to be as large as this at least: leaving out a point does not show
all of it."""
_LONGEST_US, _BUDGET_US = 1.5e5, 3e5
"""The longest trial, as predicted, and all trials of a group together."""
RUNS = 2
"""How often each plan of a trial runs at least, in turn; the fastest time counts, for others' work
only adds to it."""
_MOST_RUNS = 8
_PARTS = (1, 2, 4)
"""The divisors of a call's size at which its plans may be tried."""
_SMALLER_PARTS = (6, 8, 12, 16, 20, 24, 32)
"""The divisors at which two plans of a large call may be tried that the profile cannot tell
apart."""
_IN_PROPORTION = 1.2
"""The ratio of those two plans' prices may differ by this factor at the smaller size, for a trial
there to say something of the large call."""
_TRIED = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")

# Contests

LEAST_BYTES = 1 << 20
"""A smaller call takes a link's delay, whatever its plan."""
_CONNECTIONS = (1, 2, 4, 8)
_CODED_CHUNKS = 4
"""The chunks of elements in another format. While some of them are under way others are encoded,
and sums leave as they are made, so that a long link is not idle between the two halves of a sum."""
_FAR_BEHIND = (2.0, 1.1, 1.03)
"""A contender that takes more than this many times the fastest one's time is out after the first,
second and last round. Then the simplest of those that are left is kept."""


@dataclass(frozen=True)
class Trial:
    """The plans of one call that contend, to be run in turn, each :attr:`runs` times.

    ``longest_us``: after so long the trial ends with the round that is under way. ``holds_at``: a
    larger size, bytes, for which the result holds too; 0: none.
    """

    contenders: tuple[Timeline, ...]
    longest_us: float = _LONGEST_US
    holds_at: int = 0

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(timeline.plan for timeline in self.contenders)

    @property
    def runs(self) -> int:
        """How often each plan runs: the shorter it is the more often, because others' work adds
        more to its time."""
        return min(max(RUNS, int(_CHEAP_US / max(_round_us(self.contenders), 1.0))), _MOST_RUNS)


def may_try(traffic: Traffic) -> bool:
    """Whether trials may decide on a call: not where precision, an order of sums, or others' turn
    on the link does."""
    is_plain = traffic.wires == (NATIVE,) and not traffic.is_ordered and not traffic.lane
    return traffic.collective in _TRIED and is_plain


def find_trial(
    planner: Planner, traffic: Traffic, spent_us: float, doubted_us: float, *, is_wanted: bool
) -> Trial | None:
    """Find the plans to run before a call is planned; None where trying them would not pay.

    A call that takes long is tried at a smaller size, down to a fourth of its own. One that takes
    longer yet is tried only where the simpler plan is kept though another is predicted faster.
    These two run at a size still smaller, where they are predicted to compare as they do at the
    call's own.

    ``spent_us``: the time of earlier trials. ``doubted_us``: above 0 where calls have shown that
    prices are wrong: then the fastest plan of every strategy is tried, whatever its price, for so
    long in all. ``is_wanted``: however good the profile is. A profile whose curves of such a group
    are derived from other groups does not know how good it is, and is tried too.
    """
    # Curves between nodes may be derived from groups that all touch more nodes, or fewer.
    is_derived = any(curve.basis == "derived" and curve.link is Resource.INTER for curve in planner.profile.curves)
    is_wanted = is_wanted or doubted_us > 0 or is_derived
    longest_us = doubted_us or _LONGEST_US
    round_us = min(longest_us, (doubted_us or _BUDGET_US) - spent_us) / RUNS

    def limit_us(decision: Decision) -> float:
        """The longest that a round may take, µs."""
        is_doubted = is_wanted or decision.tolerance >= _LEAST_TOLERANCE
        return round_us if is_doubted else min(round_us, _CHEAP_US / RUNS)

    for part in _PARTS:
        decision = planner.decide(_of_size(traffic, traffic.logical_bytes // part))
        timelines = _near_fastest(decision, math.inf if doubted_us else _CONTENDS)
        if doubted_us:  # one plan that is far off must not keep the others from being tried
            while len(timelines) > 2 and _round_us(timelines) > limit_us(decision):
                timelines.pop()
        if _round_us(timelines) <= limit_us(decision):
            return Trial(tuple(timelines), longest_us) if len(timelines) > 1 else None

    decision = planner.decide(traffic)
    large = decision.timeline, min(decision.candidates, key=_price)
    kinds = [unchunked(timeline.plan.strategy) for timeline in large]
    if kinds[0] is kinds[1]:
        return None
    for part in _SMALLER_PARTS:
        smaller = planner.decide(_of_size(traffic, traffic.logical_bytes // part))
        by_price = sorted(smaller.candidates, key=_price)
        small = [
            next((timeline for timeline in by_price if unchunked(timeline.plan.strategy) is kind), None)
            for kind in kinds
        ]
        if small[0] is None or small[1] is None:
            return None  # a size at which nothing is planned
        pair = small[0], small[1]
        if _round_us(pair) <= limit_us(smaller):
            change = pair[0].total_us / pair[1].total_us / (large[0].total_us / large[1].total_us)
            is_alike = 1 / _IN_PROPORTION <= change <= _IN_PROPORTION
            return Trial(pair, longest_us, traffic.logical_bytes) if is_alike else None
    return None


def unchunked(strategy: Strategy) -> Strategy:
    """Return the strategy that has the same legs in one chunk."""
    return Strategy.HIERARCHICAL if strategy is Strategy.PIPELINED else strategy


def _near_fastest(decision: Decision, errors: float) -> list[Timeline]:
    """The fastest plan of each strategy, by price, that is slower than the fastest of all by no
    more than so many errors."""
    fastest: dict[Strategy, Timeline] = {}
    for timeline in sorted(decision.candidates, key=_price):
        fastest.setdefault(timeline.plan.strategy, timeline)
    best_us = min(map(_price, fastest.values()), default=0.0)
    most_us = best_us * (1.0 + errors * max(decision.tolerance, _LEAST_ERROR))
    return [timeline for timeline in fastest.values() if timeline.total_us <= most_us]


def _of_size(traffic: Traffic, size: int) -> Traffic:
    """The same traffic of about ``size`` bytes: a number of elements that every rank's block
    divides evenly."""
    unit = 8 * traffic.group_size
    return replace(traffic, logical_bytes=max(unit, size // unit * unit))


def _price(timeline: Timeline) -> float:
    return timeline.total_us


def _round_us(timelines: Sequence[Timeline]) -> float:
    return sum(timeline.total_us for timeline in timelines)


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender of a contest: a plan but for its traffic and wire format."""

    strategy: Strategy
    chunks: int = 1
    connections: int = 1

    def plan(self, traffic: Traffic, wire: Wire) -> Plan:
        """Return the plan for ``traffic``. Raises PlanError where the strategy does not apply."""
        return replace(build(traffic, self.strategy, self.chunks, wire=wire), connections=self.connections)


_OTHERS = (Contender(Strategy.HIERARCHICAL), Contender(Strategy.PIPELINED, 4), Contender(Strategy.RING, 4))
"""The contenders beside ``flat_direct``."""


def contenders(traffic: Traffic, wire: Wire, connections: Sequence[int] | None = None) -> list[Contender]:
    """List what contends for calls of ``traffic``, simple ones first. ``connections``: the numbers
    to try, if not the usual ones. A call that is small, or that stays inside a node, has one
    contender.
    """
    counts = connections or _CONNECTIONS
    if traffic.logical_bytes < LEAST_BYTES or traffic.link is not Resource.INTER:
        return [Contender(Strategy.DIRECT, connections=counts[0])]
    direct = [Contender(Strategy.DIRECT, connections=count) for count in counts]
    if not wire.is_native:
        direct = [direct[0], *(replace(each, chunks=_CODED_CHUNKS) for each in direct)]
    contending = direct
    for each in _OTHERS:
        with contextlib.suppress(PlanError):  # it does not apply
            each.plan(traffic, wire)
            contending.append(replace(each, connections=counts[0]))
    return contending


class Contest:
    """A contest in the program's calls. It knows only times that it is told, in any unit."""

    def __init__(self, candidates: Sequence[Contender]) -> None:
        self._left = list(candidates)
        self._times = [math.inf] * len(self._left)
        """The fastest of each on this rank, until :meth:`settle` puts the largest over ranks
        there."""
        self._turn = self._round = 0

    @property
    def current(self) -> Contender:
        """The contender whose turn it is; once that is known, the fastest."""
        return self._left[self._turn]

    @property
    def is_over(self) -> bool:
        """Whether the fastest is known."""
        return len(self._left) == 1

    def ran(self, time: float) -> list[float]:
        """Note how long the current contender took on this rank. At the end of a round, return all
        contenders' times, of which ranks take the largest for :meth:`settle`; else []."""
        self._times[self._turn] = min(self._times[self._turn], time)
        self._turn = (self._turn + 1) % len(self._left)
        return [] if self._turn else list(self._times)

    def settle(self, times: Sequence[float]) -> None:
        """End a round: ``times`` of each contender, the largest over ranks, equal on all of
        them."""
        limit = min(times) * _FAR_BEHIND[self._round]
        self._round += 1
        kept = [place for place, time in enumerate(times) if time <= limit]
        kept = kept[:1] if self._round == len(_FAR_BEHIND) else kept
        self._left = [self._left[place] for place in kept]
        self._times = [times[place] for place in kept]

    def leave_out(self, connections: int) -> bool:
        """Leave out contenders over so many connections or more, which cannot be made: on all
        ranks, before the same call. Returns whether there are others; where there are none, all
        stay."""
        kept = [place for place, each in enumerate(self._left) if each.connections < connections]
        if not kept:
            return False
        self._turn = sum(place < self._turn for place in kept) % len(kept)  # behind the last one a round begins again
        self._left = [self._left[place] for place in kept]
        self._times = [self._times[place] for place in kept]
        return True

"""Contests: the plans of one kind of call take turns in a group's first calls, and the fastest is kept.

For groups of which no profile is known or wanted, between sites above all: there a profile takes as long as many calls, the group
is made anew whenever members change, and what a long link carries depends on what no profile has, the number of connections
between two ranks. One TCP connection has no more bytes under way than its buffers hold; where the product of a link's rate and
its delay is larger, the rest of the link is idle, and several connections fill it. Where it is smaller, they only compete.

A contest costs nothing beside the calls: every plan's result is right. The first round is lenient, for new connections begin
slowly; who is far behind is out. All ranks count the same calls, and decide by each plan's fastest time, the largest over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from commlayer.profiles.errors import PlanError
from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.scheduler.wire import Wire

__all__ = ["LEAST_BYTES", "Contender", "Contest", "contenders"]

LEAST_BYTES = 1 << 20
"""Below it a call takes a link's delay, whatever the plan."""
_CONNECTIONS = (1, 2, 4, 8)
_CODED_CHUNKS = 4
"""Chunks of elements in another format. While some of them are under way others are encoded, and sums leave as they are made, so
that a long link is not idle between the two halves of a sum."""
_FAR_BEHIND = (2.0, 1.1, 1.03)
"""Who takes more than so many times as long as the fastest is out after the first round, the second and the last. Then the
simplest is kept of those that are left."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A plan but for the traffic and the wire format: a strategy, its chunks and connections."""

    strategy: Strategy
    chunks: int = 1
    connections: int = 1

    def plan(self, traffic: Traffic, wire: Wire) -> Plan:
        """The plan for ``traffic``. Raises PlanError where the strategy does not apply."""
        return replace(build(traffic, self.strategy, self.chunks, wire=wire), connections=self.connections)


_OTHERS = (Contender(Strategy.HIERARCHICAL), Contender(Strategy.PIPELINED, 4), Contender(Strategy.RING, 4))
"""The ways that contend with ``flat_direct``."""


class Contest:
    """A contest of ``ways``, simple ones first. Pure: it knows only times that it is told, in any unit."""

    def __init__(self, ways: Sequence[Contender]) -> None:
        self._ways = list(ways)
        self._times = [math.inf] * len(self._ways)
        """The fastest of each way on this rank, until :meth:`settle` puts the largest over ranks there."""
        self._turn = self._round = 0

    @property
    def way(self) -> Contender:
        """The way whose turn it is; once that is known, the fastest."""
        return self._ways[self._turn]

    @property
    def is_over(self) -> bool:
        """Whether the fastest is known."""
        return len(self._ways) == 1

    def ran(self, time: float) -> list[float]:
        """Note what the way whose turn it was took here. Returns what to agree on: the times of all ways, where this was the last
        of a round, for :meth:`settle`; else nothing."""
        self._times[self._turn] = min(self._times[self._turn], time)
        self._turn = (self._turn + 1) % len(self._ways)
        return [] if self._turn else list(self._times)

    def leave_out(self, connections: int) -> bool:
        """Leave out the ways over so many connections or more, which cannot be made: on all ranks, before the same call. Returns
        whether there are others; where there are none, all stay."""
        kept = [place for place, way in enumerate(self._ways) if way.connections < connections]
        if not kept:
            return False
        self._turn = sum(place < self._turn for place in kept) % len(kept)  # behind the last one a round begins again
        self._ways = [self._ways[place] for place in kept]
        self._times = [self._times[place] for place in kept]
        return True

    def settle(self, times: Sequence[float]) -> None:
        """End a round: ``times`` of each way, the largest over ranks, equal on all of them."""
        limit = min(times) * _FAR_BEHIND[self._round]
        self._round += 1
        kept = [place for place, time in enumerate(times) if time <= limit]
        kept = kept[:1] if self._round == len(_FAR_BEHIND) else kept
        self._ways = [self._ways[place] for place in kept]
        self._times = [times[place] for place in kept]


def contenders(traffic: Traffic, wire: Wire, connections: Sequence[int] | None = None) -> list[Contender]:
    """Find what contends for calls of ``traffic``, simple ones first. ``connections``: the numbers to try, if not the
    usual. A call that is small, or that stays inside a node, has one way.
    """
    counts = connections or _CONNECTIONS
    if traffic.logical_bytes < LEAST_BYTES or traffic.link is not Resource.INTER:
        return [Contender(Strategy.DIRECT, connections=counts[0])]
    ways = [Contender(Strategy.DIRECT, connections=count) for count in counts]
    if not wire.is_native:
        ways = [ways[0], *(replace(way, chunks=_CODED_CHUNKS) for way in ways)]
    return ways + [replace(way, connections=counts[0]) for way in _OTHERS if _applies(way, traffic, wire)]


def _applies(way: Contender, traffic: Traffic, wire: Wire) -> bool:
    try:
        way.plan(traffic, wire)
    except PlanError:
        return False
    return True

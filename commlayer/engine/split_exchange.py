"""A two-level all_to_all of one rank: what it moves, of which half is known only when its node's ranks have told their counts."""

from __future__ import annotations

from array import array
from functools import partial
from itertools import chain

from commlayer.engine.runner import require_tags
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.two_level import TwoLevel
from commlayer.transport.contract import CallMemory
from commlayer.transport.gloo import GlooStep, GlooTransport

__all__ = ["SplitExchange", "Splits"]

Splits = tuple[tuple[int, ...], tuple[int, ...]]
"""Bytes that go to each member, and that come from each."""


class SplitExchange:
    """A two-level all_to_all of certain splits on this rank: what it moves before its node's ranks have told each other their
    counts (``script``), and then."""

    def __init__(self, plan: Plan, two_level: TwoLevel, transport: GlooTransport) -> None:
        require_tags(plan, len(plan.steps))
        self.plan, self.two_level = plan, two_level
        self.script = transport.compile(plan, two_level.before())
        self.counts = array("q", chain.from_iterable(two_level.counts())).tobytes()
        """What this rank tells the others of its node: int64 [local ranks, nodes]."""
        self._transport = transport
        self._revealed: tuple[bytes, tuple[GlooStep, GlooStep, int]] | None = None

    def revealed(self, staging: CallMemory) -> tuple[GlooStep, GlooStep, int]:
        """Steps 1 and 2, and the bytes in transit, by the counts that have arrived in ``staging``."""
        region, two_level = self.two_level.counts_region, self.two_level
        arrived, width = staging.bytes[region.start : region.stop], len(two_level.nodes)
        own = slice(two_level.i * width * 8, (two_level.i + 1) * width * 8)
        arrived[own] = self.counts[own]  # nobody sends it; what lies there is of another call
        if self._revealed is None or self._revealed[0] != arrived:
            found = arrived.cast("q").tolist()
            theirs = [found[at : at + width] for at in range(0, len(found), width)]
            sorted_, passed, transit = two_level.after(theirs)
            step = partial(self._transport.compile_step, self.plan)
            self._revealed = arrived.tobytes(), (step(1, sorted_), step(2, passed), transit)
        return self._revealed[1]

"""A two-level all_to_all of one rank: what it moves, of which half is known only when its node's
ranks have told their counts."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from commlayer.engine.runner import Runner, Sent, require_tags
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.two_level import TwoLevel
from commlayer.transport.call_memory import CallMemory
from commlayer.transport.gloo import GlooCall, GlooStep, GlooTransport

__all__ = ["Revealed", "SplitCall", "SplitExchange"]

_SORT, _PASS_ON = 1, 2
"""The steps that need the counts."""


class Revealed(NamedTuple):
    """The rest of an exchange, by the counts of a node's ranks: two steps, the bytes in transit,
    and what this rank sends in all."""

    sort: GlooStep
    pass_on: GlooStep
    transit_bytes: int
    sent: Sent


class SplitExchange:
    """A two-level all_to_all of certain splits, as one rank of it runs it, any number of times.
    ``near``: see Runner."""

    def __init__(self, plan: Plan, two_level: TwoLevel, transport: GlooTransport, near: Collection[int]) -> None:
        require_tags(plan, len(plan.steps))
        self.plan, self.two_level = plan, two_level
        self._before = two_level.before()
        self._script = transport.compile(plan, self._before)
        self._counts = array("q", chain.from_iterable(two_level.counts())).tobytes()
        """The counts that this rank tells the others of its node, each of them about those that it
        relays for: int64."""
        self._transport, self._near = transport, near
        self._revealed: tuple[bytes, Revealed] | None = None

    def start(self, runner: Runner, source: CallMemory, target: CallMemory, timeout_s: float) -> SplitCall:
        """Begin a call from ``source`` to ``target``. To be driven, and finished."""
        staging = runner.stage(self.two_level.staging_bytes, Buffer.STAGING, source.tensor.device)
        staging.bytes[: len(self._counts)] = self._counts
        buffers = {Buffer.INPUT: source, Buffer.OUTPUT: target, Buffer.STAGING: staging}
        call = self._transport.start(self._script, buffers, timeout_s)
        assert isinstance(call, GlooCall)  # a plan in two levels
        return SplitCall(self, call, buffers)

    def reveal(self, staging: CallMemory) -> Revealed:
        """Find out the rest by the counts that have arrived in ``staging``; the same ones as last
        time need no work."""
        region, two_level = self.two_level.counts_region, self.two_level
        arrived, width = staging.bytes[region.start : region.stop], len(two_level.relayed[two_level.i])
        own, telling = two_level.row(two_level.i), two_level.told(two_level.i)
        # Nobody sends it; what lies there is of another call.
        staging.bytes[telling.start : telling.stop] = self._counts[own.start : own.stop]
        if self._revealed is None or self._revealed[0] != arrived:
            counts = arrived.cast("q").tolist()
            ranks = range(len(two_level.here))
            sort, pass_on, transit = two_level.after([counts[j * width : (j + 1) * width] for j in ranks])
            steps = [self._transport.compile_step(self.plan, *each) for each in ((_SORT, sort), (_PASS_ON, pass_on))]
            sent = Sent.by((*self._before, sort, pass_on), self._near)
            self._revealed = arrived.tobytes(), Revealed(steps[0], steps[1], transit, sent)
        return self._revealed[1]


class SplitCall:
    """A call of a :class:`SplitExchange`, which learns what it moves in its second step when the
    first has ended. See :class:`~commlayer.transport.contract.StartedPlan`.

    ``sent``: the bytes that this rank sends, once that is known.
    """

    __slots__ = ("_buffers", "_call", "_exchange", "sent")

    def __init__(self, exchange: SplitExchange, call: GlooCall, buffers: dict[Buffer, CallMemory]) -> None:
        self._exchange, self._call, self._buffers = exchange, call, buffers
        self.sent = Sent(0, 0)

    @property
    def steps(self) -> Sequence[Moves]:
        return self._call.steps

    def require(self, earlier: int, index: int) -> None:
        self._call.require(earlier, index)

    def post(self, index: int) -> None:
        if index == _SORT:
            revealed = self._exchange.reveal(self._buffers[Buffer.STAGING])
            self._buffers[Buffer.TRANSIT] = CallMemory(torch.empty(revealed.transit_bytes, dtype=torch.uint8))
            self._call.revise(_SORT, revealed.sort, self._buffers)
            self._call.revise(_PASS_ON, revealed.pass_on, self._buffers)
            self.sent = revealed.sent
        self._call.post(index)

    def finish(self) -> None:
        self._call.finish()

"""The contract of who runs the plans of one group: by messages of the CPU, or on the streams of a
device.

Both find a call's moves in the same way, and keep what they have found; they differ in how bytes
move, and in who waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.engine.group_plans import Choices
from commlayer.engine.runner import Prepared, Runner, Sent
from commlayer.scheduler.call_moves import owned_of, rank_moves
from commlayer.scheduler.kept import Kept
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.plan import Plan

__all__ = ["Executor", "Ran"]

_MAX_EXCHANGES = 64
"""Exchanges whose moves are kept: some kilobytes each, and a dropless layer never has the same
splits again."""


class Ran(msgspec.Struct, frozen=True):
    """A plan that has been run. ``sent``: by this rank; ``under_way``: what a device still runs of
    it, None: nothing."""

    sent: Sent
    under_way: Any = None


class Executor(ABC):
    """Runs the plans of one group on one kind of memory. One call at a time, in the same order on
    all ranks.

    ``nodes``: for each node that the group touches, its members as ranks of the group, of which
    this is ``rank``. ``choices`` decides.
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, choices: Choices) -> None:
        self.nodes = tuple(tuple(node) for node in nodes)
        self.rank, self.choices = rank, choices
        self._exchanges = Kept[tuple[object, ...], Prepared](_MAX_EXCHANGES)

    @abstractmethod
    def run(self, movement: Movement, *, timeout_s: float | None = None, issued: Call | None = None) -> Ran:
        """Run a plan on contiguous tensors of one dtype. ``issued``, the call that it is run for,
        gets its steps' times, where somebody has asked for them.

        In a wire format sums are FP32. Raises PeerError, CollectiveTimeoutError (naming rank,
        group, collective, plan, step, chunk, peers); NonFiniteError as the codec does.
        """

    @property
    def never_plans_exchanges(self) -> bool:
        """Whether :meth:`plan_exchange` is None for every size. The same on all ranks."""
        if len(self.nodes) == 1 or sum(map(len, self.nodes)) == 1:
            return True
        if self.choices.is_forced:
            return self.choices.plan("all_to_all_v", 1) is None
        return not self.choices.prices.two_level_may_pay

    def plan_exchange(self, largest: int) -> Plan | None:
        """The plan of an all_to_all of which no rank sends or receives more than ``largest`` bytes,
        which is above 0."""
        if self.choices.is_forced:
            return self.choices.plan("all_to_all_v", 1)  # the size decides nothing
        return self.choices.plan("all_to_all_v", 1 << (largest - 1).bit_length())

    def prepared(self, runner: Runner, movement: Movement) -> Prepared:
        """The moves of this rank in a call, found out once for calls that are alike."""
        plan, kind = movement.plan, movement.kind
        if kind == "whole":
            return runner.prepared(plan, movement.root, lambda: self._moves(movement))
        if kind == "encoded":
            owned = owned_of(plan, self.nodes, movement.blocks)
            return runner.prepared(plan, owned, lambda: self._moves(movement, owned))
        counts = () if movement.counts is None else tuple(map(tuple, movement.counts))
        key = id(plan), kind, tuple(movement.splits[0]), tuple(movement.splits[1]), counts
        return self._exchanges.get(key) or self._exchanges.add(key, runner.prepare(plan, *self._moves(movement)))

    def _moves(
        self, movement: Movement, owned: Sequence[int] | None = None
    ) -> tuple[Sequence[Moves], Mapping[Buffer, int]]:
        moves = rank_moves(
            movement.kind,
            movement.plan,
            self.nodes,
            self.rank,
            root=movement.root,
            blocks=owned,
            splits=movement.splits,
            counts=movement.counts or (),
        )
        return moves.steps, moves.sizes

    @property
    def near(self) -> tuple[int, ...]:
        """The members on this rank's node."""
        return next(members for members in self.nodes if self.rank in members)

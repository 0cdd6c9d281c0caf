"""The groups of a dispatch: EP × ETP ranks with the experts over EP, and their communicators in the wire formats of each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.levels import Levels
from commlayer.integrations.shares import even_rows
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import GroupError, UsageError

__all__ = ["ExpertGrid", "WireGroups"]


@dataclass(frozen=True, eq=False)
class ExpertGrid:
    """EP × ETP ranks, and the E experts over EP. ``levels``: of the EP group, where tokens may go in two of them. ``guests``: how
    many each EP rank has behind its own for one call; they are counted among the E."""

    num_experts: int
    ep: GroupCommunicator
    etp: GroupCommunicator
    all: GroupCommunicator
    levels: Levels | None = None
    guests: tuple[int, ...] = ()

    @property
    def num_reached(self) -> int:
        """The count of numbers that ranks tell each other of the nodes and ranks that their tokens reach.

        It is the same for every layout of nodes, of which a group of EP ranks touches EP at most.
        """
        return 2 * self.ep.size if self.etp.size == 1 else 0

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """The number of experts of each EP rank, guests too; the first ones one more of their own where these do not divide."""
        own = even_rows(self.num_experts - sum(self.guests), self.ep.size)
        return tuple(map(sum, zip(own, self.guests, strict=True))) if self.guests else own

    def with_guests(self, guests: Sequence[int]) -> ExpertGrid:
        """The same grid, with so many guests on each EP rank, of this call alone."""
        grid = replace(self, num_experts=self.num_experts + sum(guests), guests=tuple(guests))
        return grid if self.levels is None else replace(grid, levels=replace(self.levels, experts=grid.experts))

    @property
    def num_local_experts(self) -> int:
        return self.experts[self.ep.rank]

    @property
    def first_local_expert(self) -> int:
        return sum(self.experts[: self.ep.rank])

    @classmethod
    def of(
        cls,
        num_experts: int,
        ep: GroupCommunicator,
        etp: GroupCommunicator | None = None,
        etp_ep: GroupCommunicator | None = None,
    ) -> ExpertGrid:
        """Make the grid of these groups; see :class:`~commlayer.integrations.moe.dispatcher.TokenDispatcher`.

        Raises UsageError for fewer experts than EP ranks, GroupError for groups that are no grid.
        """
        if not isinstance(ep, GroupCommunicator):
            raise UsageError(
                f"ep must be a GroupCommunicator, such as GroupCommunicator(mesh.group('ep'), 'ep'), got {ep!r}"
            )
        if num_experts < ep.size:
            raise UsageError(
                f"{num_experts} experts over EP {ep.size}: some ranks would have none; use EP {num_experts} or less"
            )
        etp = etp or GroupCommunicator(None, ep.lane)
        if etp.size > 1 and etp_ep is None:
            raise GroupError("ETP has several ranks: pass the group of both, etp_ep, too (mesh.group('etp_ep'))")
        both = etp_ep or ep
        if both.size != ep.size * etp.size:
            raise GroupError(
                f"EP {ep.size} × ETP {etp.size} must be the size of their common group, which is {both.size}"
            )
        return cls(num_experts, ep, etp, both, Levels.of(ep, etp, even_rows(num_experts, ep.size)))


class WireGroups:
    """The communicators of a dispatcher: ``out`` and ``home`` over the EP ranks, and over all ranks for tokens that are
    gathered.
    """

    def __init__(self, ep: GroupCommunicator, both: GroupCommunicator, wire: DispatchWire) -> None:
        self.wire = wire
        self.out, self.home = _pair(ep, wire)
        self.all_out, self.all_home = (self.out, self.home) if both is ep else _pair(both, wire)


def _pair(group: GroupCommunicator, wire: DispatchWire) -> tuple[GroupCommunicator, GroupCommunicator]:
    if wire.is_native:
        return group, group
    return (
        group.with_wire(wire.dispatch, wire.dispatch_gradient),
        group.with_wire(wire.combine, wire.combine_gradient),
    )

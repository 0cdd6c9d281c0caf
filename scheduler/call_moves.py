"""The moves of a call, of whatever kind: what one rank does in each step of its plan.

All kinds are found here, for messages of the CPU and for streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from commlayer.scheduler.encoded_moves import encoded_moves, exchange_moves
from commlayer.scheduler.group_moves import Group, Nodes, moves_of_call, owned_blocks
from commlayer.scheduler.moves import Buffer, Moves
from commlayer.scheduler.plan import Plan
from commlayer.scheduler.rails import SplitRows
from commlayer.scheduler.two_level import TwoLevel

__all__ = ["Counts", "MovesKind", "RankMoves", "Splits", "owned_of", "rank_moves"]

MovesKind = Literal["whole", "split", "over", "encoded", "encoded exchange", "in place"]
"""How the moves of a call are found: of a ``whole`` tensor, an all_to_all in two levels (``split``) or ``over`` rails or nodes,
and those in a wire format, ``in place`` too."""
Splits = tuple[Sequence[int], Sequence[int]]
"""The bytes of a rank's tensor that go to each member, and that come from each."""
Counts = Sequence[Sequence[int]]
"""The bytes that each member of a group sends to each other one."""


@dataclass(frozen=True)
class RankMoves:
    """The moves of one rank in each step, and the bytes of the buffers that it needs for them beside its tensors."""

    steps: tuple[Moves, ...]
    sizes: Mapping[Buffer, int]


def owned_of(plan: Plan, nodes: Nodes, blocks: Sequence[int] | None) -> tuple[int, ...]:
    """Bytes of the tensor of a call in a wire format that each member owns: ``blocks``, or as the plan deals them out."""
    return tuple(owned_blocks(plan, nodes, plan.traffic.cut_bytes(plan.wire)) if blocks is None else blocks)


def rank_moves(
    kind: str,
    plan: Plan,
    nodes: Nodes,
    rank: int,
    *,
    root: int = 0,
    blocks: Sequence[int] | None = None,
    splits: Splits = ((), ()),
    counts: Counts = (),
) -> RankMoves:
    """The moves of ``rank``, a member of a group on ``nodes``, in one call.

    ``kind``: of :data:`MovesKind`; not ``in place``, which a plan does not say. ``root``: the sender of a broadcast. ``blocks``:
    bytes that each owns, where the caller says it. ``splits``: of an exchange; ``counts``: of one that is ``split``, everybody's.
    """
    if kind == "split":
        place = TwoLevel(nodes, rank, *splits)
        steps, transit = place.known(counts)  # without the step in which counts are told
        return RankMoves(steps, {Buffer.STAGING: place.staging_bytes, Buffer.TRANSIT: transit})
    if kind == "over":
        return RankMoves(plan.moves(SplitRows(rank, *splits)), {})
    if kind == "encoded exchange":
        steps, encoded, arrived = exchange_moves(plan, Group(nodes, rank, ()), *splits)
        return RankMoves(steps, {Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived})
    if kind == "encoded":
        group = Group(nodes, rank, owned_of(plan, nodes, blocks))
        steps, staging, encoded, arrived = encoded_moves(plan, group)
        return RankMoves(steps, {Buffer.STAGING: staging, Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived})
    return RankMoves(*moves_of_call(plan, nodes, rank, root))

"""A movement: what a plan moves, from which tensor into which, and how its moves are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from commlayer.scheduler.call_moves import Counts, MovesKind, Splits

__all__ = ["Movement"]


class Movement(msgspec.Struct, frozen=True, eq=False):
    """The tensors that a plan is about to move. An instrument that looks at them must not keep them longer than the call.

    Attributes:
        plan, source, target: what moves which tensor into which. all_gather: source [s], target [n·s]; reduce_scatter:
            source [n·s], target [s]; all_reduce and broadcast: source is target, in place.
        kind: how the plan's moves are found.
        op: the plans' name of a reduction: sum, product, min, max, band, bor, bxor.
        root: a member of the group.
        splits: of exchanges, the bytes that go to each member, and that come from each; none for members that are not of the
            plan's span.
        blocks: bytes that each member owns, whole rows, where the caller says it.
        codec: of a call in a wire format.
        dtype: of the call's elements, where that is not the source's: an all_to_all is moved in bytes.
        counts: of an exchange, what each member sends to each, where all ranks know it.
    """

    plan: Any
    source: Any
    target: Any
    kind: MovesKind = "whole"
    op: str = "sum"
    root: int = 0
    splits: Splits = ((), ())
    blocks: Sequence[int] | None = None
    codec: Any = None
    dtype: Any = None
    counts: Counts | None = None

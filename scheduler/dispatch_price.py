"""The price of a dispatch: the time of a layer's tokens to their experts and back, by each kind.

One formula, :func:`dispatch_us`, for all who ask which way tokens go; :func:`flat_us` and
:func:`two_level_us` say which rows it counts of these kinds. They bring the times of its terms from
what they know:

- The layer (integrations/moe/planning.py) knows the counts of a call, the curves of its groups, and
  what a row takes in memory, which its first call measures.
- The placement (placement/placement_price.py) knows a load and the curves of an expert group. Its
  times are arrays. It leaves out choices and gating weights, which no placement changes.
- The mapping planner (mapping/layers.py) knows what is expected of even routing. It times the same
  calls as a program, because software may compute beside them. So its terms are calls and work of
  that program, and what the row maps of all tokens cost is a term of its own (:func:`row_maps_us`),
  where the others ask for a margin (:func:`is_worth_it`).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "INDEX_BYTES",
    "WEIGHT_BYTES",
    "dispatch_us",
    "flat_us",
    "is_worth_it",
    "packed_index_bytes",
    "row_maps_us",
    "two_level_us",
]

INDEX_BYTES = 8
"""The bytes of a choice that goes to all ranks as it is (all_gather): int64."""
WEIGHT_BYTES = 4
"""The bytes of a gating weight: FP32."""
_LEAST_GAIN = 0.1
"""Other kinds than all_to_all also compute maps of all ranks' tokens. These take less than this
part of the time of the exchanges."""

Micros = Any
"""A time in µs: a float, or an array of them."""


def packed_index_bytes(num_experts: int) -> int:
    """The bytes of a choice that goes to all ranks in two levels: as few as the number of experts
    needs, int16 or int32."""
    return 2 if num_experts < 1 << 15 else 4


def dispatch_us(
    passes: int,
    *,
    out_us: Micros,
    home_us: Micros,
    weights_us: Micros = 0.0,
    choices_us: Micros = 0.0,
    moves_us: Micros = 0.0,
) -> Micros:
    """The time of a dispatch and its combine, µs.

    Args:
        passes: 2 where the gradient goes the same ways, else 1.
        out_us: tokens to the experts, on all levels, with the all_gather over ETP.
        home_us: what comes back, in the same way.
        weights_us: gating weights that go apart from their rows, to all ranks.
        choices_us: the choices of all tokens, to all ranks. They have no gradient.
        moves_us: rows that are moved in memory, in all passes.
    """
    return passes * (out_us + home_us + weights_us) + choices_us + moves_us


def flat_us(passes: int, *, out_us: Micros, home_us: Micros, rows: Micros, row_us: float) -> Micros:
    """The time of an all_to_all, µs: ``row_us`` is what moving each of the busiest rank's ``rows``
    in memory takes."""
    return dispatch_us(passes, out_us=out_us, home_us=home_us, moves_us=rows * row_us)


def two_level_us(
    passes: int,
    *,
    way_us: Micros,
    rows: tuple[Micros, Micros, Micros],
    row_us: float,
    weights_us: Micros = 0.0,
    choices_us: Micros = 0.0,
) -> Micros:
    """The time of a dispatch in two levels, µs: ``way_us`` over rails and inside nodes, one way;
    the busiest rank's ``rows`` on its rail, inside its node, and of its experts, each moved in
    memory in ``row_us``. The rest is as of :func:`dispatch_us`."""
    on_rail, in_node, of_experts = rows
    return dispatch_us(
        passes,
        out_us=way_us,
        home_us=way_us,
        weights_us=weights_us,
        choices_us=choices_us,
        moves_us=(on_rail + in_node + of_experts) * row_us,
    )


def is_worth_it(us: Micros, flat_us: Micros) -> Any:
    """Whether another kind that takes ``us`` is taken in place of an all_to_all of ``flat_us``:
    where it is faster by more than what its row maps may take."""
    return us * (1 + _LEAST_GAIN) < flat_us


def row_maps_us(exchanges_us: float) -> float:
    """The time that row maps of all ranks' tokens are taken to cost, beside exchanges of so many
    µs."""
    return _LEAST_GAIN * exchanges_us

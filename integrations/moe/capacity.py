"""Capacity: which choices are kept where experts, or devices, take a limited number.

Capacity counts choices, as MoE Parallel Folding's text has it; its equation 4 is for one choice per token.

Shapes: T tokens, K choices per token, E experts, D devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import DisagreementError

__all__ = ["RoutedChoices", "capacity", "gather_choices", "keep_within"]


@dataclass(frozen=True, slots=True, eq=False)
class RoutedChoices:
    """The choices that capacity is applied to: ``indices`` [T, K] of experts; ``priority`` [T, K], the higher are kept;
    ``positions`` [T] of the tokens in their sequence, None: the order in which they lie here. Where priorities are
    equal the earlier is kept. ``num_padding``: how many tokens of padding lie beside them.
    """

    indices: torch.Tensor
    priority: torch.Tensor
    positions: torch.Tensor | None
    num_padding: int = 0


def capacity(factor: float, num_choices: int, num_bins: int) -> int:
    """The capacity of a bin, ``ceil(factor · T·K / bins)``, at least 1 unless there are no tokens.

    ``factor`` counts as the decimal that was written: 0.07 · 100 is 7, not 7.000000000000001, whose ceiling is 8.
    """
    return max(min(num_choices, 1), math.ceil(Fraction(str(factor)) * num_choices / num_bins))


def keep_within(bins: torch.Tensor, choices: RoutedChoices, num_bins: int, capacity: int) -> torch.Tensor:
    """Mark, in every bin, the ``capacity`` choices of highest priority: [T, K] of bool.

    ``bins`` [T, K]: 0 ≤ bin < ``num_bins``, or −1: out of the contest, not kept. Sorts are stable, so that the decision
    depends on nothing but the choices: highest priority first, then earliest token, then the token's earlier choice.
    """
    order = torch.arange(bins.numel(), device=bins.device)
    if choices.positions is not None:
        order = torch.argsort(choices.positions.repeat_interleave(bins.shape[1]), stable=True)
    order = order[torch.argsort(choices.priority.flatten()[order], descending=True, stable=True)]
    bins_in_order = torch.where(bins < 0, num_bins, bins).flatten()[order]
    sorted_bins, by_bin = torch.sort(bins_in_order, stable=True)
    first = torch.searchsorted(sorted_bins, torch.arange(num_bins + 1, device=bins.device))
    order_in_bin = torch.arange(bins.numel(), device=bins.device) - first[sorted_bins]
    keep = torch.empty(bins.numel(), dtype=torch.bool, device=bins.device)
    keep[order[by_bin]] = (order_in_bin < capacity) & (sorted_bins < num_bins)
    return keep.view_as(bins)


@torch.no_grad()
def gather_choices(
    choices: RoutedChoices, sequence: GroupCommunicator, *, is_refused: bool = False
) -> tuple[RoutedChoices, slice]:
    """The choices of all ranks of ``sequence``, and which of them are this rank's. Ranks may have different T.

    Raises DisagreementError, on every rank, where only some ranks pass positions, or one comes with ``is_refused``.
    """
    positions = choices.positions
    device = choices.indices.device
    own = [choices.indices.shape[0], positions is not None, is_refused, choices.num_padding]
    everyone = sequence.all_gather(torch.tensor([own], dtype=torch.int64, device=device))
    rows, has_positions, refused, num_padding = everyone.t().tolist()
    if any(refused):
        raise DisagreementError(
            f"{who()}rank {refused.index(1)} of those that share the sequence refused its tokens: look at its log"
        )
    if len(set(has_positions)) > 1:
        lacking = [rank for rank, has in enumerate(has_positions) if not has]
        raise DisagreementError(
            f"ranks {lacking} of the {sequence.size} that share the sequence route without positions, the others with: "
            "pass positions on all of them, or on none"
        )
    start = sum(rows[: sequence.rank])
    everyones = RoutedChoices(
        sequence.all_gather(choices.indices, rows),
        sequence.all_gather(choices.priority.detach().double(), rows),  # in one dtype, whatever the weights' is here
        None if positions is None else sequence.all_gather(positions, rows),
        sum(num_padding),
    )
    return everyones, slice(start, start + rows[sequence.rank])

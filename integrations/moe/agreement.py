"""Agreement of the ranks before tokens move: what must be equal on all of them is compared with the exchange of counts.

Shapes: T tokens of this rank, K choices of each, E experts.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.routing import who
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.profiles.errors import DisagreementError, TensorError

__all__ = [
    "FINEST",
    "HEAD",
    "Offer",
    "agree_on_experts",
    "check_capacity",
    "number_of",
    "number_of_wire",
    "require_agreement",
    "weights_error",
]

FINEST = 8
"""The number of slices in which tokens are counted, so that their chunks may be chosen when all counts are known."""
HEAD = (
    "place in EP",
    "place in ETP",
    "tokens",
    "choices",
    "capacity",
    "hidden size",
    "dtype",
    "way",
    "grad mode",
    "needs a gradient",
    "refusal",
    "neighbours of EP",
    "neighbours of ETP",
)
"""The fields that go before the counts. From ``choices`` to ``grad mode`` all ranks must say the same: else one would
hang in the rows.
"""
_AGREED = slice(HEAD.index("choices"), HEAD.index("needs a gradient"))
_PRIME = (1 << 61) - 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """The part of one rank in the exchange of counts.

    ``like``: its tokens [T, H], where they are known. ``way``: a number for how the dispatcher is set up. ``needs_gradient``:
    whether the backward pass comes through here. ``error``: why this rank refuses; then nothing else is looked at. ``weights``:
    on a device, to be looked at with the indices, for which the host waits once.
    """

    indices: torch.Tensor
    capacity: int | None = None
    like: torch.Tensor | None = None
    way: int = 0
    needs_gradient: bool = False
    error: Exception | None = None
    weights: torch.Tensor | None = None

    def message(self, grid: ExpertGrid) -> torch.Tensor:
        """Return what goes to the other ranks, int64: the head, then rows for each slice of the tokens and expert, then how many
        tokens reach each node and rank, where they may go in two levels (else zeros). On the host. Raises TensorError.
        """
        if self.error is not None:
            empty = torch.zeros(len(HEAD) + FINEST * grid.num_experts + grid.num_reached, dtype=torch.int64)
            empty[HEAD.index("refusal")] = 1
            return empty
        if self.like is not None and (self.like.dim() != 2 or self.like.shape[0] != self.indices.shape[0]):
            raise TensorError(
                f"{who()}indices of {list(self.indices.shape)} for tokens {list(self.like.shape)}: expected tokens [tokens, "
                "hidden], and a row of choices for each"
            )
        seen = _see(self.indices, grid, self.weights)
        low, high = seen.bounds
        if low < -1 or high >= grid.num_experts:
            raise TensorError(
                f"{who()}indices from {low} to {high}: expected 0 to {grid.num_experts - 1}, or -1 for a dropped choice"
            )
        if not seen.is_finite:
            raise weights_error()
        counts = seen.counts
        if self.capacity is not None:
            check_capacity(counts.sum(0), self.capacity)
            counts = torch.zeros_like(counts)
            counts[0] = self.capacity
        hidden, dtype = -1, -1
        if self.like is not None:
            hidden = self.like.shape[-1]
            dtype = _DTYPES.index(self.like.dtype) if self.like.dtype in _DTYPES else len(_DTYPES)
        head = [grid.ep.rank, grid.etp.rank, *self.indices.shape, -1 if self.capacity is None else self.capacity]
        head += [hidden, dtype, self.way, torch.is_grad_enabled(), self.needs_gradient, 0, *_neighbours(grid)]
        reached = torch.zeros(grid.num_reached, dtype=torch.int64)
        reached[: len(seen.reached)] = seen.reached
        return torch.cat([torch.tensor(head), counts.reshape(-1), reached])


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a process group is opaque to the compiler
def _neighbours(grid: ExpertGrid) -> tuple[int, int]:
    """How many groups EP's and ETP's share a node with, on this rank: on others they may be other groups."""
    return grid.ep.siblings, grid.etp.siblings


def require_agreement(grid: ExpertGrid, offer: Offer, everyone: torch.Tensor) -> None:
    refused = [grid.all.ranks[index] for index in everyone[:, HEAD.index("refusal")].nonzero().flatten().tolist()]
    if offer.error is not None:
        raise offer.error
    if refused:
        raise DisagreementError(
            f"rank {grid.all.ranks[grid.all.rank]}: rank {refused[0]} refused to dispatch its tokens, so nothing was sent: look "
            "at its log"
        )
    said = everyone[:, _AGREED].tolist()
    for index, words in enumerate(said):
        for name, first, other in zip(HEAD[_AGREED], said[0], words, strict=True):
            if first != other:
                raise DisagreementError(
                    f"ranks disagree on the {name} of a dispatch: rank {grid.all.ranks[0]} says {first}, "
                    f"rank {grid.all.ranks[index]} {other} (-1: none): call alike on all ranks"
                )


_agreed_experts: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
"""The numbers of experts that the ranks of each group have agreed on."""


def agree_on_experts(grid: ExpertGrid) -> None:
    """Check, once for a group, that its ranks have as many experts: counts of another number of experts are a message
    of another length, of which a rank may die.

    Collective at the first call with a number. Not seen: a later layer with a number that is new on some ranks only. Raises
    DisagreementError.
    """
    owner = grid.all.group
    if owner is None or grid.num_experts in _agreed_experts.setdefault(owner, set()):
        return
    everyone = grid.all.all_gather(torch.tensor([grid.num_experts])).tolist()
    for index, number in enumerate(everyone):
        if number != everyone[0]:
            raise DisagreementError(
                f"ranks disagree on the number of experts: rank {grid.all.ranks[0]} says {everyone[0]}, rank "
                f"{grid.all.ranks[index]} {number}: make the dispatcher alike on all ranks"
            )
    _agreed_experts[owner].add(grid.num_experts)


def number_of(parts: Sequence[int]) -> int:
    """Return one number that stands for what all ranks must have alike, of 61 bits: ranks tell it each other as an int64."""
    number = 1
    for part in parts:
        number = number * (FINEST + 1) + part
    return (
        number % _PRIME
    )  # eight chunks and a wire format would need 66 bits; different ones still differ, but for chance


def number_of_wire(wire: DispatchWire) -> int:
    """Return a number below 2¹⁸ that differs where ranks allow different things, but for chance."""
    return 0 if wire.is_native else 1 + zlib.crc32(repr(wire).encode()) % ((1 << 18) - 1)


def check_capacity(counts: torch.Tensor, capacity: int) -> None:
    """Raise TensorError where an expert has more choices, ``counts`` [E], than its capacity."""
    fullest = int(counts.max())
    if fullest > capacity:
        raise TensorError(
            f"{who()}an expert has {fullest} choices and a capacity of {capacity}: drop them first (index -1)"
        )


class _Seen(NamedTuple):
    """The choices of a rank, counted on the host: the least and the greatest expert, rows of each slice and expert [FINEST, E],
    tokens that reach each node and rank, where they may go in two levels; whether its weights are finite.
    """

    bounds: tuple[int, int]
    counts: torch.Tensor
    reached: torch.Tensor
    is_finite: bool = True


def _see(indices: torch.Tensor, grid: ExpertGrid, weights: torch.Tensor | None) -> _Seen:
    if indices.dim() != 2 or indices.dtype != torch.int64:
        raise TensorError(
            f"{who()}indices must be [tokens, choices] of int64, got {list(indices.shape)} of {indices.dtype}"
        )
    num_experts, num_tokens, device = grid.num_experts, indices.shape[0], indices.device
    num_counts = FINEST * num_experts
    if not indices.numel():
        counts = torch.zeros(FINEST, num_experts, dtype=torch.int64)
        return _Seen((-1, -1), counts, counts.new_zeros(grid.num_reached))
    # Counted on the device, and brought to the host in one piece, for which it waits once.
    is_choice = (indices >= 0) & (indices < num_experts)
    bounds = torch.arange(1, FINEST, device=device) * num_tokens // FINEST
    slices = torch.bucketize(torch.arange(num_tokens, device=device), bounds, right=True)
    keys = torch.where(is_choice, slices.unsqueeze(1) * num_experts + indices, num_counts).reshape(-1)
    if indices.is_cpu:
        counts = torch.bincount(keys, minlength=num_counts + 1)
    else:  # where bincount would wait for the greatest key
        counts = indices.new_zeros(num_counts + 1).scatter_add_(0, keys, torch.ones_like(keys))
    is_finite = indices.new_ones(1) if weights is None else torch.isfinite(weights).all().to(torch.int64).view(1)
    parts = [torch.stack(torch.aminmax(indices)), counts[:-1], is_finite]
    if grid.levels is not None:
        parts.append(grid.levels.reached(torch.where(is_choice, indices, -1)))
    extremes, counts, finite, reached = torch.cat(parts).cpu().split([2, num_counts, 1, sum(map(len, parts[3:]))])
    lowest, highest = extremes.tolist()
    return _Seen((lowest, highest), counts.view(FINEST, num_experts), reached, bool(finite))


def weights_error() -> TensorError:
    """The error for gating weights that are NaN or infinite."""
    return TensorError(f"{who()}weights hold NaN or Inf: look at the router's input and learning rate")

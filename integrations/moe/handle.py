"""The handle of a dispatch: the way of every token, found by one exchange of counts, for combine,
backward and recompute; and :class:`Chunk`, what a kind of dispatch does.

Shapes: T tokens of this rank, K choices of each, E experts, R rows that this rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol

import torch

from commlayer.collectives import Pending
from commlayer.integrations.moe.agreement import FINEST, HEAD, Offer, require_agreement, weights_error
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.expert_slots import ExpertSlots
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.moe.levels import RowsOnLevel
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement

__all__ = ["ChoiceCounts", "Chunk", "DispatchHandle", "Experts", "check_weights", "sums_of_ranks"]

Experts = Callable[[torch.Tensor, Sequence[int], torch.Tensor | None], torch.Tensor]
"""Rows [R, H], sorted by expert; how many each local expert has; their gating weights [R, 1], or
None → [R, H]."""


class Chunk(Protocol):
    """The contract of a kind of dispatch: the way of one chunk of a rank's tokens. See
    :mod:`commlayer.integrations.moe.dispatch_kinds`, whose legend names the shapes.

    The backward pass of each phase goes the way of its mirror.
    """

    takes_chunks: ClassVar[bool]
    """Whether tokens may go in several chunks."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def expert_rows(self) -> tuple[int, ...]:
        """The rows of each local expert, R together."""

    @classmethod
    def chunks(cls, layout: ChoiceCounts, ways: WireGroups, slices: Sequence[int], /) -> tuple[Chunk, ...]:
        """Divide a call's tokens: each chunk gets so many of the FINEST slices. Collective where the
        choices travel."""

    def dispatch_preprocess(self, x: torch.Tensor, /) -> torch.Tensor:
        """Permute tokens [T, H] into the rows to send [S, H]."""

    def token_dispatch(self, rows: torch.Tensor, /) -> Pending:
        """Start their exchange. The backward pass waits for their gradient here."""

    def dispatch_postprocess(self, rows: torch.Tensor, /) -> torch.Tensor:
        """Make the rows of the local experts [R, H], sorted by expert, of what arrived. Collective."""

    def combine_preprocess(self, rows: torch.Tensor, weights: torch.Tensor | None, /) -> torch.Tensor:
        """Mirror :meth:`dispatch_postprocess`. Partial sums are made with ``weights`` [T, K]; None: they
        are plain. Collective."""

    def token_combine(self, rows: torch.Tensor, /) -> Pending:
        """Start the way back."""

    def combine_postprocess(self, rows: torch.Tensor, weights: torch.Tensor | None, /) -> torch.Tensor:
        """Mirror :meth:`dispatch_preprocess`: sum what came back to tokens [T, H], with ``weights`` where
        no partial sum was made with them."""

    def fetch_weights(self, weights: torch.Tensor, /) -> torch.Tensor:
        """Bring the gating weights [T, K] of all ranks' tokens to the rows of the local experts: [R, 1].
        Collective."""


@dataclass(slots=True)
class Use:
    """The use of a handle: how often its tokens went out and came back, their H and their dtype."""

    dispatched: int = 0
    combined: int = 0
    hidden: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class DispatchHandle:
    """The handle of a dispatch, with all that combine, backward and recompute need."""

    kind: str
    """A name of :data:`commlayer.integrations.moe.dispatch_kinds.DISPATCH_KINDS`."""
    num_tokens: int
    """T of this rank."""
    top_k: int
    """K."""
    chunks: tuple[Chunk, ...]
    owner: object
    """The dispatcher that prepared it: no other takes it."""
    needs_gradient: bool = False
    """Whether any rank's tokens, weights or experts need one: the backward pass is collective."""
    sound_weights: weakref.ref[torch.Tensor] | None = None
    """Weights that were found finite, and need not be looked at again."""
    placement: ExpertPlacement | None = None
    """Where experts lay, if they can be placed anew: the handle is no good once they have moved."""
    lent: LentExperts | None = None
    """The experts whose weights go along for this call, where some rank's do."""
    use: Use = field(default_factory=Use)

    def require(
        self,
        owner: object,
        slots: ExpertSlots | None,
        x: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Raise UsageError where another than ``owner`` has prepared it, or experts have moved since
        then; TensorError where ``x`` or ``weights`` are not of its tokens, or weights are NaN or
        infinite."""
        if self.owner is not owner:
            raise UsageError(
                "the handle was prepared by another dispatcher, perhaps on another group: prepare it on this one"
            )
        if slots is not None and self.placement is not slots.placement:
            raise UsageError(f"{who()}experts have moved since the handle was prepared: prepare another")
        if x is not None and (x.dim() != 2 or x.shape[0] != self.num_tokens):
            raise TensorError(
                f"{who()}expected the {self.num_tokens} tokens of the handle as [tokens, hidden], got {list(x.shape)}"
            )
        if weights is not None:
            sound = self.sound_weights  # which prepare() has looked at
            is_sound = sound is not None and sound() is weights
            check_weights(weights, (self.num_tokens, self.top_k), is_sound=is_sound)

    def in_graph(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, in the graph where any rank's is: the gradient is a collective too."""
        if self.needs_gradient and not x.requires_grad and torch.is_grad_enabled():
            return x.detach().requires_grad_()
        return x


def check_weights(weights: torch.Tensor, shape: Sequence[int], *, is_sound: bool) -> None:
    """Raise TensorError for gating weights that are not of ``shape``, or are NaN or infinite;
    ``is_sound``: the latter need not be looked for."""
    if tuple(weights.shape) != tuple(shape):
        raise TensorError(f"{who()}weights must be {list(shape)}, got {list(weights.shape)}")
    if not is_sound and not bool(torch.isfinite(weights).all()):
        raise weights_error()


@dataclass(frozen=True, eq=False)
class ChoiceCounts:
    """The counts of all ranks, and the choices of this one."""

    grid: ExpertGrid
    indices: torch.Tensor
    """[T, K] int64: the expert of each choice of this rank, −1 where dropped."""
    capacity: int | None
    """The rows to which each rank pads what it sends to an expert; None: they are not padded."""
    tokens: tuple[int, ...]
    """How many each rank of EP × ETP has."""
    counts: torch.Tensor
    """[EP, ETP, FINEST, E]: rows of each slice of a rank's tokens for each expert."""
    needs_gradient: bool = False
    on_levels: tuple[RowsOnLevel, RowsOnLevel] | None = None
    """Rows on rails and inside nodes, where tokens may go in two levels."""
    neighbours: tuple[tuple[int, int], ...] = ()
    """How many groups share a node with each rank's EP group, and with its ETP group; empty: nobody
    said."""

    @classmethod
    def exchange(cls, grid: ExpertGrid, offer: Offer) -> ChoiceCounts:
        """Exchange the counts of all ranks. Collective over EP × ETP.

        Raises what this rank refuses; DisagreementError where another one does, or where ranks offer
        different things; GroupError for groups that are no grid.
        """
        try:
            message = offer.message(grid)
        except Exception as error:  # noqa: BLE001  others hear of it before it is raised, or they wait
            offer = Offer(offer.indices, error=error)
            message = offer.message(grid)
        everyone = grid.all.all_gather(message.unsqueeze(0))
        require_agreement(grid, offer, everyone)
        places = everyone[:, 0] * grid.etp.size + everyone[:, 1]
        if places.sort().values.tolist() != list(range(grid.all.size)):
            raise GroupError(
                f"the ranks of the common group have these places in (EP, ETP): {everyone[:, :2].tolist()}; expected each of "
                f"{grid.ep.size} × {grid.etp.size} once: pass groups of one mapping"
            )
        by_place = everyone[places.argsort()].view(grid.ep.size, grid.etp.size, -1)
        counts, reached = by_place[:, :, len(HEAD) :].split([FINEST * grid.num_experts, grid.num_reached], 2)
        counts = counts.reshape(grid.ep.size, grid.etp.size, FINEST, grid.num_experts)
        needs_gradient = bool(everyone[:, HEAD.index("needs a gradient")].any())
        on_levels = None if grid.levels is None else RowsOnLevel.of_call(grid.levels, reached[:, 0])
        tokens = tuple(everyone[:, 2].tolist())
        neighbours = tuple(map(tuple, everyone[:, HEAD.index("neighbours of EP") : len(HEAD)].tolist()))
        return cls(grid, offer.indices, offer.capacity, tokens, counts, needs_gradient, on_levels, neighbours)

    @cached_property
    def most_rows(self) -> int:
        """The most rows that any rank sends or receives over EP: what all ranks know alike."""
        return self.most_rows_of(self.counts.sum(2))

    def most_rows_of(self, counts: torch.Tensor) -> int:
        """The most rows of ``counts`` [EP, ETP, E]."""
        received = sums_of_ranks(counts.sum(0), self.grid.experts)
        return int(torch.maximum(counts.sum(2).max(), received.max()))

    @cached_property
    def most_rows_of_nodes(self) -> int:
        """The same number, if what crosses the links of the fullest node were its ranks' in equal shares:
        where one rank is hot, its node's link is not so full. Of groups with two levels.
        """
        assert self.grid.levels is not None
        nodes = self.grid.levels.nodes
        m, width = len(nodes), len(nodes[0])
        by_rank = sums_of_ranks(self.counts.sum((1, 2)), self.grid.experts)  # [from, to]
        by_node = by_rank[torch.tensor(nodes)].sum(1)[:, torch.tensor(nodes)].sum(2)
        away = by_node * ~torch.eye(m, dtype=torch.bool)
        fullest = max(int(away.sum(0).max()), int(away.sum(1).max()))
        return min(self.most_rows, -(-fullest * m // ((m - 1) * width)))

    @property
    def most_expert_rows(self) -> int:
        """The most rows that the experts of any rank work on."""
        return max(self.gathered_rows)

    @cached_property
    def gathered_rows(self) -> tuple[int, ...]:
        """Add up, for each EP rank, the rows of all its ETP ranks together."""
        return tuple(sums_of_ranks(self.counts.sum((0, 1, 2)), self.grid.experts).tolist())


def sums_of_ranks(counts: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """[…, E] → [EP, …]: the sums over each rank's experts."""
    if len(set(experts)) == 1:  # one call of torch, where it would be one for each rank
        sums: torch.Tensor = counts.unflatten(-1, (len(experts), experts[0])).sum(-1)
        return sums.movedim(-1, 0)
    ends = torch.tensor(list(accumulate(experts, initial=0)))
    return torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).index_select(-1, ends).diff(dim=-1).movedim(-1, 0)

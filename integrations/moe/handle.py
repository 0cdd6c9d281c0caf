"""The handle of a dispatch: the way of every token, found by one exchange of counts, for combine, backward and recompute.

Shapes: T tokens of this rank, K choices of each, E experts, R rows that this rank's experts receive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from commlayer.integrations.moe.agreement import FINEST, HEAD, Offer, neighbours_of, require_agreement
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.lent_experts import LentExperts
from commlayer.integrations.moe.levels import RowsOnLevel, TwoLevelWay, two_level_way
from commlayer.integrations.moe.row_maps import Permutation, RowMap, make_row_map, regroup
from commlayer.profiles.errors import GroupError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement

__all__ = ["ChoiceCounts", "Chunk", "DispatchHandle", "Experts"]

Experts = Callable[[torch.Tensor, Sequence[int], torch.Tensor | None], torch.Tensor]
"""Rows [R, H], sorted by expert; how many each local expert has; their gating weights [R, 1], or None → [R, H]."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The way of one slice of the tokens.

    ``rows``: of the permute (``all_gather``: of all ranks' tokens, whose choices of local experts come first, in the order
    ``choices`` [ΣT, K']). ``send_rows``, ``receive_rows``: for each EP rank. ``gather_rows``: what each rank brings to the
    all_gather: rows for the ETP ranks, or, where all tokens are gathered, tokens. ``by_expert`` sorts what arrived by expert,
    then ETP rank, then source. ``expert_rows``: rows of each local expert. ``most_rows``: that any rank sends or receives over
    EP, which all ranks know. ``two_level``: the way to what arrives here, of which ``rows`` are then the experts'.
    ``everyones``: for tokens on a device, the rows that each EP rank sends to each other: no exchange asks for them again.
    """

    num_tokens: int
    rows: RowMap
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    gather_rows: tuple[int, ...]
    by_expert: Permutation | None
    expert_rows: tuple[int, ...]
    choices: torch.Tensor | None = None
    most_rows: int = 0
    two_level: TwoLevelWay | None = None
    everyones: tuple[tuple[int, ...], ...] | None = None

    @property
    def home(self) -> tuple[tuple[int, ...], ...] | None:
        """The same of the way home."""
        return None if self.everyones is None else tuple(zip(*self.everyones, strict=True))

    @property
    def is_gathered(self) -> bool:
        """Whether all tokens go to all ranks."""
        return self.choices is not None

    @property
    def is_whole(self) -> bool:
        """Whether it brings all tokens at once, to all ranks or in two levels: gating weights then go apart from rows."""
        return self.is_gathered or self.two_level is not None


@dataclass(slots=True)
class Use:
    """The use of a handle: how often its tokens went out and came back, and what they were: [T, H] of which dtype."""

    dispatched: int = 0
    combined: int = 0
    hidden: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class DispatchHandle:
    """The handle of a dispatch, with all that combine, backward and recompute need. ``kind``: one of ``DISPATCH_KINDS``.
    ``num_tokens`` and ``top_k`` are this rank's T and K. ``owner``: the dispatcher that prepared it.
    ``needs_gradient``: whether any rank's tokens, weights or experts need one. ``sound_weights``: those that were found
    finite. ``placement``: where experts lay, if they can be placed anew. ``lent``: whose weights go along, where some rank's do.
    """

    kind: str
    num_tokens: int
    top_k: int
    chunks: tuple[Chunk, ...]
    owner: object
    needs_gradient: bool = False
    sound_weights: weakref.ref[torch.Tensor] | None = None
    placement: ExpertPlacement | None = None
    lent: LentExperts | None = None
    use: Use = field(default_factory=Use)


@dataclass(frozen=True, eq=False)
class ChoiceCounts:
    """The counts of all ranks. ``tokens`` [ranks of the common group]; ``counts`` [EP, ETP, FINEST, E]: rows for each expert.
    ``on_levels``: rows on rails and inside nodes, where tokens may go in two levels. ``neighbours``, of each of those ranks: how
    many groups share a node with its EP group, and with its ETP group; empty: nobody said.
    """

    grid: ExpertGrid
    indices: torch.Tensor
    capacity: int | None
    tokens: tuple[int, ...]
    counts: torch.Tensor
    needs_gradient: bool = False
    on_levels: tuple[RowsOnLevel, RowsOnLevel] | None = None
    neighbours: tuple[tuple[int, int], ...] = ()

    @classmethod
    def exchange(cls, grid: ExpertGrid, offer: Offer) -> ChoiceCounts:
        """Exchange the counts of all ranks. Collective over EP × ETP.

        Raises what this rank refuses; DisagreementError where another one does, or where ranks offer different things;
        GroupError for groups that are no grid.
        """
        try:
            message = offer.message(grid)
        except Exception as error:  # noqa: BLE001  the others must hear of it before it is raised, or they wait for this rank
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
        neighbours = tuple(map(neighbours_of, everyone[:, HEAD.index("neighbours")].tolist()))
        return cls(grid, offer.indices, offer.capacity, tokens, counts, needs_gradient, on_levels, neighbours)

    @cached_property
    def most_rows(self) -> int:
        """The most rows that any rank sends or receives over EP: what all ranks know alike."""
        return self._most(self.counts.sum(2))

    def _most(self, counts: torch.Tensor) -> int:
        """The most rows of ``counts`` [EP, ETP, E]."""
        received = _by_rank(counts.sum(0), self.grid.experts)
        return int(torch.maximum(counts.sum(2).max(), received.max()))

    @cached_property
    def most_rows_of_nodes(self) -> int:
        """The same number, if what crosses the links of the fullest node were its ranks' in equal shares: where one rank is
        hot, its node's link is not so full. Of groups with two levels.
        """
        assert self.grid.levels is not None
        nodes = self.grid.levels.nodes
        m, width = len(nodes), len(nodes[0])
        by_rank = _by_rank(self.counts.sum((1, 2)), self.grid.experts)  # [from, to]
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
        return tuple(_by_rank(self.counts.sum((0, 1, 2)), self.grid.experts).tolist())

    def chunks(self, slices: Sequence[int]) -> tuple[Chunk, ...]:
        """Divide the tokens into as many chunks as ``slices``, each so many of the FINEST slices, exchanged over EP."""
        total = self.indices.shape[0]
        if self.capacity is not None:  # padded: all rows go in one chunk
            return (self._chunk(self.indices, self.counts.sum(2)),)
        ends = list(accumulate(slices, initial=0))
        return tuple(
            self._chunk(
                self.indices[total * start // FINEST : total * end // FINEST], self.counts[:, :, start:end].sum(2)
            )
            for start, end in pairwise(ends)
        )

    def _chunk(self, indices: torch.Tensor, counts: torch.Tensor) -> Chunk:
        """``counts`` [EP, ETP, E]: rows that each rank sends to each expert."""
        grid = self.grid
        arriving = counts.narrow(2, grid.first_local_expert, grid.num_local_experts)  # [source, ETP, local expert]
        lying = arriving.transpose(0, 1)  # after the all_gather: ETP, source, expert
        by_expert = regroup(lying, (2, 0, 1))
        if by_expert is not None and not indices.is_cpu:
            by_expert = by_expert.on(indices.device)
        sent = counts[grid.ep.rank, grid.etp.rank]
        # Padded rows are not choices: how many choices were dropped these counts do not say.
        dropped = None if self.capacity is not None else indices.numel() - int(sent.sum())
        return Chunk(
            num_tokens=indices.shape[0],
            rows=make_row_map(indices, grid.num_experts, self.capacity, dropped),
            send_rows=tuple(_by_rank(sent, grid.experts).tolist()),
            receive_rows=tuple(arriving[:, grid.etp.rank].sum(1).tolist()),
            gather_rows=tuple(arriving.sum((0, 2)).tolist()),
            by_expert=by_expert,
            expert_rows=tuple(arriving.sum((0, 1)).tolist()),
            most_rows=self._most(counts),
            everyones=None if indices.is_cpu else self._between_ranks(counts),
        )

    def _between_ranks(self, counts: torch.Tensor) -> tuple[tuple[int, ...], ...]:
        """The rows of ``counts`` [EP, ETP, E] that each EP rank of this one's place in ETP sends to each other."""
        to_from = _by_rank(counts[:, self.grid.etp.rank], self.grid.experts)
        return tuple(tuple(row) for row in to_from.t().tolist())

    def gathered(self) -> tuple[Chunk, ...]:
        """Make the one chunk of an all_gather: all tokens come here, and each rank takes the rows of its experts.
        Collective: the indices travel.
        """
        grid = self.grid
        everyones = grid.all.all_gather(self.indices, self.tokens) - grid.first_local_expert
        is_local = (everyones >= 0) & (everyones < grid.num_local_experts)
        counts = torch.bincount(everyones[is_local], minlength=grid.num_local_experts)
        # Few of a token's choices are here: the combine is to look at no more columns than that.
        local, choices = torch.where(is_local, everyones, -1).sort(dim=1, descending=True, stable=True)
        most = int(is_local.sum(1).max()) if is_local.numel() else 0
        rows = make_row_map(local[:, :most], grid.num_local_experts)
        counted = tuple(counts.tolist())
        return (Chunk(self.indices.shape[0], rows, (), (), self.tokens, None, counted, choices[:, :most]),)

    def two_level(self) -> tuple[Chunk, ...]:
        """Make the one chunk of a dispatch in two levels, with the rows that a flat one brings. Collective: the indices
        travel.
        """
        grid = self.grid
        assert grid.levels is not None  # the decision, or the user, was told where there are none
        assert self.on_levels is not None
        everyones = _gather_indices(grid, self.indices, self.tokens)
        way, rows = two_level_way(grid.levels, everyones, self.tokens, self.on_levels, self.capacity)
        local = self.counts.narrow(3, grid.first_local_expert, grid.num_local_experts)
        expert_rows = tuple(local.sum((0, 1, 2)).tolist())
        return (Chunk(self.indices.shape[0], rows, (), (), self.tokens, None, expert_rows, two_level=way),)


def _gather_indices(grid: ExpertGrid, indices: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The indices of all ranks, [ΣT, K] int64: they travel in as few bytes as the number of experts needs."""
    narrow = torch.int16 if grid.num_experts <= torch.iinfo(torch.int16).max else torch.int32
    small = indices.to(narrow)
    if not indices.shape[1]:
        return small.new_zeros(sum(tokens), 0, dtype=torch.int64)
    everyones = grid.all.all_gather(small.contiguous().view(torch.uint8), tokens)
    return everyones.view(narrow).to(torch.int64)


def _by_rank(counts: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """[…, E] → [EP, …]: the sums over each rank's experts."""
    if len(set(experts)) == 1:  # one call of torch, where it would be one for each rank
        sums: torch.Tensor = counts.unflatten(-1, (len(experts), experts[0])).sum(-1)
        return sums.movedim(-1, 0)
    ends = torch.tensor(list(accumulate(experts, initial=0)))
    return torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).index_select(-1, ends).diff(dim=-1).movedim(-1, 0)

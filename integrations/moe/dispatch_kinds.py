"""The kinds of dispatch. A class is one kind. An object of it is the way of one chunk of a rank's tokens,
out and back.

- :class:`AllToAll` sends a row for each choice of a token to the rank that holds the chosen expert.
- :class:`AllGather` sends all tokens to all ranks. Each takes what its experts need (MegaScale-MoE,
  section 3.2).
- :class:`TwoLevels` sends a token once to each node that holds any of its experts, and on from there
  (:mod:`commlayer.integrations.moe.levels`).

Each class reads from top to bottom in the order in which tokens go: what the exchanged counts say of
the chunk, the way out (reorder, exchange, reorder), the way back as its mirror, the gating weights.
The contract of all three is :class:`~commlayer.integrations.moe.handle.Chunk`.

A new kind is one more class here and its name in :data:`DISPATCH_KINDS`. What it costs is priced by
:func:`commlayer.scheduler.dispatch_price.dispatch_us`, of its terms in
:meth:`commlayer.integrations.moe.planning.DispatchPlanner.decide`.

A name ends with the shape of its tensor: ``x_TH`` is [T, H].

===  ======================================================================
T    tokens of the chunk on this rank
K    choices of each token
E    experts
H    hidden size
S    rows that this rank sends
D    rows that this rank holds to pass on inside its node (two levels)
A    rows that arrive at this rank
R    rows of this rank's experts
G    tokens of all ranks together
===  ======================================================================
"""

# ruff: noqa: N803, N806  shapes are suffixes of names

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch

from commlayer.collectives import Pending
from commlayer.integrations.moe.agreement import FINEST
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.handle import ChoiceCounts, Chunk, sums_of_ranks
from commlayer.integrations.moe.levels import TwoLevelWay, two_level_way
from commlayer.integrations.moe.row_maps import (
    Permutation,
    RowMap,
    combine_rows,
    gather_rows,
    make_row_map,
    permute_rows,
    regroup,
    weights_of_rows,
)
from commlayer.scheduler.dispatch_price import packed_index_bytes
from commlayer.scheduler.plan import Span

__all__ = ["DISPATCH_KINDS", "AllGather", "AllToAll", "TwoLevels"]


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll:
    """Each choice is a row of its own. Rows go over EP; where ETP has several ranks, each of them then
    gets the rows of all.

    Attributes:
        sent: the row that each choice is, of the S rows, which are sorted by expert.
        send_rows, receive_rows: for each EP rank, and from each.
        etp_rows: what each ETP rank brings to the all_gather of arrived rows.
        by_expert: sorts what was gathered by expert, then ETP rank, then source; None: it lies so.
        most_rows: the most that any rank sends or receives over EP, which all ranks know.
        everyones_rows: the rows from each EP rank to each other, where tokens are on a device: then no
            exchange asks for them again.
    """

    takes_chunks: ClassVar[bool] = True

    grid: ExpertGrid
    """The groups: EP, ETP, and both together."""
    ways: WireGroups
    """The same in the wire formats of the way out and of the way home."""
    num_tokens: int
    expert_rows: tuple[int, ...]
    sent: RowMap
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    etp_rows: tuple[int, ...]
    by_expert: Permutation | None
    most_rows: int
    everyones_rows: tuple[tuple[int, ...], ...] | None

    @classmethod
    def chunks(cls, layout: ChoiceCounts, ways: WireGroups, slices: Sequence[int]) -> tuple[AllToAll, ...]:
        """Divide the tokens into as many chunks as ``slices``, each so many of the FINEST slices."""
        indices_TK, counts = layout.indices, layout.counts
        if layout.capacity is not None:  # padded: all rows go in one chunk
            return (cls._of(layout, ways, indices_TK, counts.sum(2)),)
        num_tokens = indices_TK.shape[0]
        return tuple(
            cls._of(
                layout,
                ways,
                indices_TK[num_tokens * start // FINEST : num_tokens * end // FINEST],
                counts[:, :, start:end].sum(2),
            )
            for start, end in pairwise(accumulate(slices, initial=0))
        )

    @classmethod
    def _of(cls, layout: ChoiceCounts, ways: WireGroups, indices_TK: torch.Tensor, counts: torch.Tensor) -> AllToAll:
        """``counts`` [EP, ETP, E]: rows that each rank sends to each expert."""
        grid = layout.grid
        sent_E = counts[grid.ep.rank, grid.etp.rank]
        # Padded rows are not choices, so these counts do not say how many choices were dropped.
        num_dropped = None if layout.capacity is not None else indices_TK.numel() - int(sent_E.sum())
        arriving = counts.narrow(2, grid.first_local_expert, grid.num_local_experts)  # [source, ETP, local expert]
        by_expert = regroup(arriving.transpose(0, 1), (2, 0, 1))  # after the all_gather: [ETP, source, expert]
        everyones_rows = None
        if not indices_TK.is_cpu:
            by_expert = by_expert and by_expert.on(indices_TK.device)
            from_to = sums_of_ranks(counts[:, grid.etp.rank], grid.experts).t()
            everyones_rows = tuple(map(tuple, from_to.tolist()))
        return cls(
            grid,
            ways,
            num_tokens=indices_TK.shape[0],
            expert_rows=tuple(arriving.sum((0, 1)).tolist()),
            sent=make_row_map(indices_TK, grid.num_experts, layout.capacity, num_dropped),
            send_rows=tuple(sums_of_ranks(sent_E, grid.experts).tolist()),
            receive_rows=tuple(arriving[:, grid.etp.rank].sum(1).tolist()),
            etp_rows=tuple(arriving.sum((0, 2)).tolist()),
            by_expert=by_expert,
            most_rows=layout.most_rows_of(counts),
            everyones_rows=everyones_rows,
        )

    # Out

    def dispatch_preprocess(self, x_TH: torch.Tensor) -> torch.Tensor:
        return gather_rows(x_TH, self.sent)

    def token_dispatch(self, rows_SH: torch.Tensor) -> Pending:
        return self.ways.out.start_all_to_all(
            rows_SH, self.send_rows, self.receive_rows, most_rows=self.most_rows, everyones=self.everyones_rows
        )

    def dispatch_postprocess(self, rows_AH: torch.Tensor) -> torch.Tensor:
        rows_RH = self.grid.etp.all_gather(rows_AH, self.etp_rows)
        return permute_rows(rows_RH, self.by_expert)

    # Back

    def combine_preprocess(self, rows_RH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        rows_RH = permute_rows(rows_RH, self.by_expert and self.by_expert.reversed())
        return self.grid.etp.reduce_scatter(rows_RH, self.etp_rows)

    def token_combine(self, rows_AH: torch.Tensor) -> Pending:
        home = None if self.everyones_rows is None else tuple(zip(*self.everyones_rows, strict=True))
        return self.ways.home.start_all_to_all(
            rows_AH, self.receive_rows, self.send_rows, most_rows=self.most_rows, everyones=home
        )

    def combine_postprocess(self, rows_SH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        return combine_rows(rows_SH, weights_TK, self.sent)

    # Gating weights for experts that apply them: each may go beside its row, as it is

    def weights_dispatch(self, weights_TK: torch.Tensor) -> Pending:
        """Start their exchange, in the order of rows; :meth:`dispatch_postprocess` goes on with them."""
        weights_S1 = weights_of_rows(weights_TK, self.sent)
        return self.grid.ep.start_all_to_all(
            weights_S1, self.send_rows, self.receive_rows, everyones=self.everyones_rows
        )

    def fetch_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        return self.dispatch_postprocess(self.weights_dispatch(weights_TK).wait())


@dataclass(frozen=True, slots=True, eq=False)
class AllGather:
    """All tokens go to all ranks of EP × ETP. Each rank sums over its experts, and the sums are
    scattered back.

    Attributes:
        tokens: how many of the G tokens each rank has.
        row_map: the R rows of local experts, among the G tokens.
        local_choices: [G, K']: which of a token's K choices are local experts, those first.
    """

    takes_chunks: ClassVar[bool] = False

    grid: ExpertGrid
    ways: WireGroups
    num_tokens: int
    expert_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    row_map: RowMap
    local_choices: torch.Tensor

    @classmethod
    def chunks(cls, layout: ChoiceCounts, ways: WireGroups, slices: Sequence[int]) -> tuple[AllGather, ...]:
        """Make the one chunk. Collective: the indices travel."""
        grid = layout.grid
        local_GK = grid.all.all_gather(layout.indices, layout.tokens) - grid.first_local_expert
        is_local = (local_GK >= 0) & (local_GK < grid.num_local_experts)
        counts = torch.bincount(local_GK[is_local], minlength=grid.num_local_experts)
        # Few of a token's choices are here. The combine is to look at no more columns than that.
        local_GK, choices_GK = torch.where(is_local, local_GK, -1).sort(dim=1, descending=True, stable=True)
        most = int(is_local.sum(1).max()) if is_local.numel() else 0
        chunk = cls(
            grid,
            ways,
            num_tokens=layout.indices.shape[0],
            expert_rows=tuple(counts.tolist()),
            tokens=layout.tokens,
            row_map=make_row_map(local_GK[:, :most], grid.num_local_experts),
            local_choices=choices_GK[:, :most],
        )
        return (chunk,)

    # Out

    def dispatch_preprocess(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH

    def token_dispatch(self, x_TH: torch.Tensor) -> Pending:
        return self.ways.all_out.start_all_gather(x_TH, self.tokens)

    def dispatch_postprocess(self, x_GH: torch.Tensor) -> torch.Tensor:
        return gather_rows(x_GH, self.row_map)

    # Back

    def combine_preprocess(self, rows_RH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        weights_GK = None if weights_TK is None else self._local_weights(weights_TK)
        return combine_rows(rows_RH, weights_GK, self.row_map)

    def token_combine(self, sums_GH: torch.Tensor) -> Pending:
        return self.ways.all_home.start_reduce_scatter(sums_GH, self.tokens)

    def combine_postprocess(self, sums_TH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        return sums_TH

    # Gating weights: those of all tokens come here, apart from the tokens

    def _local_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        return self.grid.all.all_gather(weights_TK, self.tokens).gather(1, self.local_choices)

    def fetch_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        return weights_of_rows(self._local_weights(weights_TK), self.row_map)


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevels:
    """A token goes over the rail to each node that holds any of its experts, and there to the ranks that
    hold them. On the way back sums are made at each stop.

    Rows take the dispatcher's wire formats on the rails. Inside nodes they go as they are.

    Attributes:
        tokens: how many of the G tokens each rank has.
        way: which rows go where on both levels.
        row_map: the R rows of local experts, among the A tokens that arrive.
    """

    takes_chunks: ClassVar[bool] = False

    grid: ExpertGrid
    ways: WireGroups
    num_tokens: int
    expert_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    way: TwoLevelWay
    row_map: RowMap

    @classmethod
    def chunks(cls, layout: ChoiceCounts, ways: WireGroups, slices: Sequence[int]) -> tuple[TwoLevels, ...]:
        """Make the one chunk, with the rows that a flat one brings. Collective: the indices travel."""
        grid = layout.grid
        assert grid.levels is not None  # the decision, or the user, was told where there are none
        assert layout.on_levels is not None
        # The choices of all ranks travel in as few bytes as the number of experts needs.
        narrow = torch.int16 if packed_index_bytes(grid.num_experts) == 2 else torch.int32
        small_TK = layout.indices.to(narrow)
        if layout.indices.shape[1]:
            bytes_G = grid.all.all_gather(small_TK.contiguous().view(torch.uint8), layout.tokens)
            indices_GK = bytes_G.view(narrow).to(torch.int64)
        else:
            indices_GK = small_TK.new_zeros(sum(layout.tokens), 0, dtype=torch.int64)
        way, row_map = two_level_way(grid.levels, indices_GK, layout.tokens, layout.on_levels, layout.capacity)
        arriving = layout.counts.narrow(3, grid.first_local_expert, grid.num_local_experts)
        chunk = cls(
            grid,
            ways,
            num_tokens=layout.indices.shape[0],
            expert_rows=tuple(arriving.sum((0, 1, 2)).tolist()),
            tokens=layout.tokens,
            way=way,
            row_map=row_map,
        )
        return (chunk,)

    # Out

    def dispatch_preprocess(self, x_TH: torch.Tensor) -> torch.Tensor:
        return gather_rows(x_TH, self.way.rails)

    def token_dispatch(self, rows_SH: torch.Tensor) -> Pending:
        way = self.way
        return self.ways.out.start_all_to_all(
            rows_SH, way.rail_send, way.rail_receive, most_rows=way.rail_rows.whole, over=Span.RAIL
        )

    def dispatch_postprocess(self, rows_DH: torch.Tensor) -> torch.Tensor:
        way = self.way
        rows_AH = self.grid.ep.all_to_all(
            gather_rows(rows_DH, way.inside),
            way.inside_send,
            way.inside_receive,
            most_rows=way.inside_rows.whole,
            over=Span.NODE,
        )
        return gather_rows(rows_AH, self.row_map)

    # Back

    def combine_preprocess(self, rows_RH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        way = self.way
        weights_AK = None if weights_TK is None else self._arriving_weights(weights_TK)
        sums_DH = self.grid.ep.all_to_all(
            combine_rows(rows_RH, weights_AK, self.row_map),
            way.inside_receive,
            way.inside_send,
            most_rows=way.inside_rows.whole,
            over=Span.NODE,
        )
        return combine_rows(sums_DH, None, way.inside)

    def token_combine(self, sums_DH: torch.Tensor) -> Pending:
        way = self.way
        return self.ways.home.start_all_to_all(
            sums_DH, way.rail_receive, way.rail_send, most_rows=way.rail_rows.whole, over=Span.RAIL
        )

    def combine_postprocess(self, sums_SH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        return combine_rows(sums_SH, None, self.way.rails)

    # Gating weights: those of all tokens come here, apart from the rows

    def _arriving_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        weights_GK = self.grid.all.all_gather(weights_TK, self.tokens)
        places_AK = self.way.weights
        return weights_GK.reshape(-1).index_select(0, places_AK.reshape(-1)).view(places_AK.shape)

    def fetch_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        return weights_of_rows(self._arriving_weights(weights_TK), self.row_map)


DISPATCH_KINDS: dict[str, type[Chunk]] = {"all_to_all": AllToAll, "all_gather": AllGather, "two_level": TwoLevels}
"""The kinds by the names that users give them."""

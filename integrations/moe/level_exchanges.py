"""The exchanges of a two-level dispatch: over rails and inside nodes, out and back, and the gating weights. Differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.collectives import Held, Pending
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.levels import TwoLevelWay
from commlayer.integrations.moe.row_maps import combine_rows, gather_rows
from commlayer.scheduler.plan import Span

__all__ = ["LevelExchanges"]


class LevelExchanges:
    """The exchanges of one dispatcher. Rows take its wire formats on the rails; inside nodes they go as they are."""

    def __init__(self, grid: ExpertGrid, ways: WireGroups) -> None:
        self._grid, self._ways = grid, ways

    def start_out(self, rows: torch.Tensor | Held, way: TwoLevelWay) -> Pending:
        """Start the way over the rails: this rank's tokens, once for each node → the rows [D, H] that it holds."""
        most, group = way.rail_rows.whole, self._ways.out
        return group.start_all_to_all(rows, way.rail_send, way.rail_receive, most_rows=most, over=Span.RAIL)

    def pass_on(self, held: torch.Tensor, way: TwoLevelWay) -> torch.Tensor:
        """Pass on what is held [D, H], once to each rank of the node that needs it: → [A, H]."""
        rows, most = gather_rows(held, way.inside), way.inside_rows.whole
        return self._grid.ep.all_to_all(rows, way.inside_send, way.inside_receive, most_rows=most, over=Span.NODE)

    def weights_here(self, weights: torch.Tensor, tokens: Sequence[int], way: TwoLevelWay) -> torch.Tensor:
        """The gating weights of what arrives here, [A, K'], out of those of all ranks' tokens: [T, K] here."""
        everyones = self._grid.all.all_gather(weights, tokens).reshape(-1)
        return everyones.index_select(0, way.weights.reshape(-1)).view(way.weights.shape)

    def pass_back(self, sums: torch.Tensor, way: TwoLevelWay) -> torch.Tensor:
        """Mirror :meth:`pass_on`: the sums [A, H] of the ranks go to who passed the tokens on, which adds them up: → [D, H]."""
        most = way.inside_rows.whole
        back = self._grid.ep.all_to_all(sums, way.inside_receive, way.inside_send, most_rows=most, over=Span.NODE)
        return combine_rows(back, None, way.inside)

    def start_home(self, sums: torch.Tensor, way: TwoLevelWay) -> Pending:
        """Mirror :meth:`start_out`."""
        most, group = way.rail_rows.whole, self._ways.home
        return group.start_all_to_all(sums, way.rail_receive, way.rail_send, most_rows=most, over=Span.RAIL)

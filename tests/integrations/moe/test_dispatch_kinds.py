"""The kinds of dispatch: each keeps the contract, is priced, and sends choices of the size that is priced."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe import measuring
from commlayer.integrations.moe.dispatch_groups import ExpertGrid, WireGroups
from commlayer.integrations.moe.dispatch_kinds import DISPATCH_KINDS, TwoLevels
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.levels import RowsOnLevel
from commlayer.integrations.moe.planning import DispatchPlanner
from commlayer.integrations.wire_choice import DispatchWire
from commlayer.scheduler.dispatch_price import packed_index_bytes

NODES = ((0, 1), (2, 3))


class Alone(GroupCommunicator):
    """One rank of four that are not there; what it gathers is counted, and all have the same."""

    def __init__(self) -> None:
        super().__init__(None, "ep")
        self.size, self.gathered_bytes = 4, 0

    nodes = NODES
    shape = (2, 2)

    def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
        self.gathered_bytes += 4 * x.nbytes
        return torch.cat([x] * self.size) if x.shape[0] > 1 else x.expand(self.size, *x.shape[1:])

    def predicted_us(self, collective: str, num_bytes: int, *_: object, **__: object) -> float:
        return float(num_bytes)


def layout(ep: Alone, num_experts: int, num_tokens: int = 6, top_k: int = 2) -> ChoiceCounts:
    """The counts of four ranks with the same tokens, whose choices are drawn evenly."""
    grid = ExpertGrid.of(num_experts, ep)
    assert grid.levels is not None
    indices = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    counts = torch.zeros(4, 1, 8, num_experts, dtype=torch.int64)
    counts[:, 0, 0] = torch.bincount(indices.flatten(), minlength=num_experts)
    on_levels = RowsOnLevel.of_call(grid.levels, grid.levels.reached(indices).expand(4, -1))
    return ChoiceCounts(grid, indices, None, (num_tokens,) * 4, counts, on_levels=on_levels)


def test_every_kind_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_moves", lambda *_: (1.0, 1.0, 1.0))
    found = layout(Alone(), 8)
    decision = DispatchPlanner(found.grid, "auto", (8,)).decide(found, torch.zeros(6, 4), None)
    assert list(decision.kinds_us) == list(DISPATCH_KINDS)


@pytest.mark.parametrize("num_experts", [8, 32_767, 32_768])
def test_choices_travel_in_as_many_bytes_as_are_priced(num_experts: int) -> None:
    ep = Alone()
    found = layout(ep, num_experts)
    ep.gathered_bytes = 0
    (chunk,) = TwoLevels.chunks(found, WireGroups(ep, ep, DispatchWire()), (8,))
    assert ep.gathered_bytes == 4 * 6 * 2 * packed_index_bytes(num_experts)
    assert sum(chunk.expert_rows) == int(found.counts[..., : found.grid.num_local_experts].sum())


@pytest.mark.parametrize("kind", DISPATCH_KINDS)
def test_the_fields_of_a_kind_are_all_its_own(kind: str) -> None:
    """No field is empty because it means nothing for this kind."""
    found = layout(Alone(), 8, 32)
    ways = WireGroups(found.grid.ep, found.grid.all, DispatchWire())
    (chunk,) = DISPATCH_KINDS[kind].chunks(found, ways, (8,))
    empty = [each.name for each in fields(chunk) if getattr(chunk, each.name) in (None, ())]  # type: ignore[arg-type]
    assert empty in ([], ["everyones_rows"])  # which are for tokens on a device
    assert chunk.num_tokens == 32
    assert len(chunk.expert_rows) == 2

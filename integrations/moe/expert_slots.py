"""The slots in which a layer's experts lie: what a placement means for the choices of tokens, and for counts of them.

A router chooses *logical* experts, whose numbers never change. Weights lie in *slots*, as many on every rank, numbered rank after
rank (EPLB's physical experts). Between the two stands one table: so dispatch, combine and experts know slots alone, and routing,
losses and capacities experts alone.

Shapes: T tokens of this rank, K choices of each, E experts, S slots of all ranks.
"""

from __future__ import annotations

import torch

from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.placement.expert_placement import ExpertPlacement

__all__ = ["ExpertSlots"]


class ExpertSlots:
    """The slots of one layer as rank ``rank`` of its expert group uses them.

    Where an expert has copies, its rows go to them in turn: choice number n of an expert on source rank r, in the order
    of tokens, to copy (n + r) mod copies. So each copy gets as many rows of every rank, but for one, and which choice goes where
    depends on nothing that another rank would have to know.

    Args:
        placement: where experts lie now.
        rank: place in the expert group.
        source: number of this rank among all whose tokens the group takes: over ETP too.

    Raises:
        UsageError: ranks that are not in the placement.
    """

    def __init__(self, placement: ExpertPlacement, rank: int, source: int = 0) -> None:
        if not 0 <= rank < placement.num_ranks:
            raise UsageError(f"rank {rank} of a placement on {placement.num_ranks} ranks")
        self.placement, self.rank, self._source = placement, rank, source
        self.has_summed = False
        """Whether gradients of copies were summed in this step."""
        self.are_changing = False
        """Whether experts are on their way, to be in other slots from the optimizer's next step on."""
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_experts(self) -> int:
        return self.placement.num_experts

    @property
    def num_slots(self) -> int:
        """The slots of all ranks, S."""
        return int(self.placement.slots.size)

    @property
    def here(self) -> tuple[int, ...]:
        """The expert in each slot of this rank; −1: none."""
        return tuple(self.placement.slots[self.rank].tolist())

    def require_still(self) -> None:
        """Raises UsageError while experts are on their way: those that arrive would write over what is loaded now."""
        if self.are_changing:
            raise UsageError(
                f"{who()}experts are on their way to other slots: load weights and optimizer state after the optimizer's next "
                "step, or close the ExpertPlacer before, on all ranks"
            )

    def move_to(self, placement: ExpertPlacement) -> None:
        """Take another placement from the next dispatch on. Whoever calls it has moved the weights.

        Raises UsageError for one of other experts, ranks or numbers of slots.
        """
        was = self.placement
        if (placement.num_experts, placement.slots.shape) != (was.num_experts, was.slots.shape):
            raise UsageError(
                f"{who()}expected a placement of {was.num_experts} experts on ranks and slots {list(was.slots.shape)}, got "
                f"{placement.num_experts} on {list(placement.slots.shape)}"
            )
        self.placement = placement
        self._tables.clear()

    def slots_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Find the slot of each choice: ``indices`` [T, K] int64 of experts, −1 where dropped → the same of slots.

        Raises TensorError for another shape or dtype, and for experts that there are not (of indices on a device the exchange of
        counts finds these).
        """
        if indices.dim() != 2 or indices.dtype != torch.int64:
            raise TensorError(
                f"{who()}indices must be [tokens, choices] of int64, got {list(indices.shape)} of {indices.dtype}"
            )
        if not indices.numel():
            return indices
        if indices.is_cpu:
            low, high = (int(bound) for bound in torch.aminmax(indices))
            if low < -1 or high >= self.num_experts:
                raise TensorError(
                    f"{who()}indices from {low} to {high}: expected 0 to {self.num_experts - 1}, or -1 for a dropped choice"
                )
            return self._found(indices)
        is_expert = (indices >= -1) & (indices < self.num_experts)
        return torch.where(is_expert, self._found(torch.where(is_expert, indices, -1)), self.num_slots)

    def by_expert(self, counts: torch.Tensor) -> torch.Tensor:
        """Add up numbers of slots [S], on the host, by their experts: [E]."""
        experts = torch.from_numpy(self.placement.phy2log.copy())
        held = experts >= 0
        return counts.new_zeros(self.num_experts).index_add_(0, experts[held], counts[held])

    def _found(self, indices: torch.Tensor) -> torch.Tensor:
        slots, copies = self._table(indices.device)
        if slots.shape[1] == 1:
            return slots[:, 0][indices]
        flat = indices.reshape(-1)
        experts, order = torch.sort(flat, stable=True)
        number = torch.empty_like(flat)
        number[order] = torch.arange(flat.numel(), device=flat.device) - torch.searchsorted(experts, experts)
        return slots[flat, (number + self._source) % copies[flat]].view(indices.shape)

    def _table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of each expert [E + 1, most copies], and how many; the last row is that of index −1."""
        if device not in self._tables:
            slots = torch.nn.functional.pad(torch.from_numpy(self.placement.log2phy), (0, 0, 0, 1), value=-1)
            copies = torch.nn.functional.pad(torch.from_numpy(self.placement.logcnt), (0, 1), value=1)
            self._tables[device] = slots.to(device), copies.to(device)
        return self._tables[device]

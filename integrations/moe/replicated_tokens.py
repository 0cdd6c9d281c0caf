"""Dispatch of tokens that all ranks of a tensor-parallel group hold: attention without sequence parallelism leaves them so.

Two ways to the experts, neither of which sends a token twice between nodes:

- *Padded to a capacity*: one even all_to_all of tokens that are replicated inside the node, which is what MoNTA plans (drop,
  all_to_all between nodes, all_gather inside, in chunks; its table 6) and :class:`commlayer.Communicator` runs. Every rank of the
  group ends with all rows of its experts: where ETP is that group, the all_gather of the plan is the one over ETP.
- *Dropless*: each rank takes its share of the tokens through a :class:`TokenDispatcher`, whose all_gather over ETP brings the
  shares together again, and the outputs are gathered over the group.

Shapes: T tokens, the same on all ranks of the group; K choices; E experts; H hidden.
"""

from __future__ import annotations

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.moe.agreement import check_capacity
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import Experts
from commlayer.integrations.moe.row_maps import combine_rows, gather_rows, make_row_map
from commlayer.integrations.shares import gather_shares, take_share
from commlayer.profiles.errors import UsageError

__all__ = ["ReplicatedDispatcher", "run_shares"]


class ReplicatedDispatcher:
    """Dispatch, experts and combine for padded tokens that all ranks of ``etp`` hold.

    Args:
        num_experts: E; the EP group divides it.
        communicator: over the EP group and the ranks that hold the same tokens.
        etp: these ranks, which hold shards of the same experts.

    Raises:
        UsageError: EP does not divide the experts, or ``etp`` is not the communicator's group of holders.
    """

    def __init__(self, num_experts: int, communicator: Communicator, etp: GroupCommunicator) -> None:
        self._ep_size = len(communicator.grid.ep_ranks)
        if num_experts % self._ep_size:
            raise UsageError(
                f"an even all_to_all over EP {self._ep_size} needs a multiple of experts, got {num_experts}"
            )
        holders = tuple(communicator.grid.tp_ranks)
        if holders != etp.ranks:
            raise UsageError(
                f"ETP has ranks {list(etp.ranks)}, but {list(holders)} hold the same tokens: both must be one group"
            )
        self.num_experts, self.communicator, self.etp = num_experts, communicator, etp

    def run(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, capacity: int, experts: Experts
    ) -> torch.Tensor:
        """Run experts on ``x`` [T, H], with ``indices`` [T, K] (−1: dropped) and ``weights`` [T, K], the same on all
        ranks of the group → [T, H].

        ``capacity``: rows of every expert, from each rank of EP. Collective over the grid, and differentiable.
        Raises TensorError where an expert has more choices than that.
        """
        check_capacity(torch.bincount(indices[indices >= 0], minlength=self.num_experts), capacity)
        rows = make_row_map(indices, self.num_experts, capacity)
        local = self.num_experts // self._ep_size
        arrived = self.communicator.all_to_all(gather_rows(x, rows))  # [EP, local expert, capacity, H]
        shape = (self._ep_size, local, capacity, x.shape[1])
        by_expert = self.etp.copy_to_group(arrived.view(shape).transpose(0, 1).reshape(-1, x.shape[1]))
        computed = self.etp.reduce_from_group(experts(by_expert, (self._ep_size * capacity,) * local, None))
        by_source = computed.view(local, self._ep_size, capacity, -1).transpose(0, 1).reshape(arrived.shape)
        return combine_rows(self.communicator.all_to_all(by_source), weights, rows)


def run_shares(
    dispatcher: TokenDispatcher,
    group: GroupCommunicator,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    experts: Experts,
) -> torch.Tensor:
    """Run experts without dropping: each rank of ``group``, which all hold ``x`` [T, H], takes its share of the tokens
    through ``dispatcher``.
    """
    share = take_share(x, group)
    of_share = take_share(weights, group)
    handle = dispatcher.prepare(take_share(indices, group), like=share, weights=of_share, experts=experts)
    out, _ = dispatcher.run(share, handle, experts, of_share)
    return gather_shares(out, group, x.shape[0])

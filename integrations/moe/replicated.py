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

from collections.abc import Callable
from typing import Any, cast

import torch

from commlayer.collectives import GroupCommunicator
from commlayer.communicator import Communicator
from commlayer.integrations.linear import even_rows
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.integrations.moe.handle import Experts
from commlayer.integrations.moe.rows import combine_rows, gather_rows, make_row_map
from commlayer.profiles.errors import TensorError, UsageError

__all__ = ["ReplicatedDispatcher", "gather_shares", "run_shares", "take_share"]


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
        kept = indices[indices >= 0]
        fullest = int(torch.bincount(kept, minlength=self.num_experts).max())
        if fullest > capacity:
            raise TensorError(
                f"an expert has {fullest} choices and a capacity of {capacity}: drop them first (index -1)"
            )
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
    own = indices.split(list(even_rows(indices.shape[0], group.size)))[group.rank]
    of_share = take_share(weights, group)
    handle = dispatcher.prepare(own, like=share, weights=of_share, experts=experts)
    out, _ = dispatcher.run(share, handle, experts, of_share)
    return gather_shares(out, group, x.shape[0])


def take_share(x: torch.Tensor, group: GroupCommunicator) -> torch.Tensor:
    """Take this rank's rows of ``x`` [T, …], which all ranks of ``group`` hold; the gradient is gathered, so all hold
    it too.
    """
    return x if group.size == 1 else _take(x, group)


def gather_shares(x: torch.Tensor, group: GroupCommunicator, num_tokens: int) -> torch.Tensor:
    """Undo :func:`take_share`: [T, …] on all ranks of ``group``, whose gradients are the same."""
    return x if group.size == 1 else _gather(x, group, num_tokens)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: GroupCommunicator) -> torch.Tensor:
        ctx.group, ctx.num_tokens = group, x.shape[0]
        share: torch.Tensor = x.split(list(even_rows(x.shape[0], group.size)))[group.rank]
        return share.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_shares(gradient, ctx.group, ctx.num_tokens), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: GroupCommunicator, num_tokens: int) -> torch.Tensor:
        ctx.group = group
        return group.all_gather(x, even_rows(num_tokens, group.size))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return take_share(gradient, ctx.group), None, None


_take: Callable[[torch.Tensor, GroupCommunicator], torch.Tensor] = cast("Any", _Take.apply)
_gather: Callable[[torch.Tensor, GroupCommunicator, int], torch.Tensor] = cast("Any", _Gather.apply)

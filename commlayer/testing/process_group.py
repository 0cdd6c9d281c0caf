"""The verbs on any torch process group: Gloo, NCCL, commlayer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commlayer.profiles.errors import TensorError, UsageError
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp

__all__ = ["ProcessGroupVerbs"]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

# Newer names of all_gather_into_tensor and reduce_scatter_tensor, which warn since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupVerbs:
    """An adapter: `Verbs` that are torch.distributed's calls on ``group`` (None: the world). See `Verbs` for each of them.

    Raises:
        UsageError: this process is not a member of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)  # asked for in every check, and torch looks it up in its tables each time
        if self._rank < 0:
            raise UsageError(f"rank {dist.get_rank()} is not a member of the group of ranks {self._ranks}")

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._ranks)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> AsyncCall | None:
        received, sent = (None if each is None else list(each) for each in (output_splits, source_splits))
        return self._call(dist.all_to_all_single, output, source, received, sent, async_op=async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        return self._call(_all_gather, output, source, async_op=async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call(_reduce_scatter, output, source, op=_OPS[op], async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        return self._call(dist.all_reduce, tensor, op=_OPS[op], async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False) -> AsyncCall | None:
        return self._call(dist.broadcast, tensor, src=self._global(root), async_op=async_op)

    def gather(
        self, output: torch.Tensor | None, source: torch.Tensor, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        blocks = self._blocks(output, source, root)
        return self._call(dist.gather, source, blocks, dst=self._global(root), async_op=async_op)

    def scatter(
        self, output: torch.Tensor, source: torch.Tensor | None, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        blocks = self._blocks(source, output, root)
        return self._call(dist.scatter, output, blocks, src=self._global(root), async_op=async_op)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call(dist.reduce, tensor, dst=self._global(root), op=_OPS[op], async_op=async_op)

    def send(self, tensor: torch.Tensor, to: int, *, async_op: bool = False) -> AsyncCall | None:
        return self._call(dist.isend if async_op else dist.send, tensor, dst=self._global(to))

    def recv(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> AsyncCall | None:
        pending = self._call(dist.irecv if async_op else dist.recv, tensor, src=self._global(source))
        return pending if async_op else None  # torch's blocking one returns who sent

    def barrier(self) -> None:
        self._call(dist.barrier)

    def _call(self, collective: Callable[..., Any], *arguments: object, **options: object) -> AsyncCall | None:
        work: AsyncCall | None = collective(*arguments, group=self._group, **options)
        return work

    def _global(self, rank: int) -> int:
        """torch names the peers of a group by their ranks in the job."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {self.rank}: expected a rank from 0 to {self.size - 1}, got {rank}")
        return self._ranks[rank]

    def _blocks(self, whole: torch.Tensor | None, block: torch.Tensor, root: int) -> list[torch.Tensor] | None:
        """``whole`` as the list of blocks that torch takes on the root."""
        if self.rank != root:
            return None
        if whole is None or whole.numel() != self.size * block.numel():
            got = "None" if whole is None else f"{whole.numel()} elements"
            raise TensorError(f"rank {root}: expected {self.size} blocks of {block.numel()} elements, got {got}")
        return list(whole.view(self.size, *block.shape).unbind(0))

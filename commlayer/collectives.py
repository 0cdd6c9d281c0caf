"""Collectives of one process group for model code: differentiable, with uneven rows, planned, on a lane.

``GroupCommunicator`` is to layers what ``torch.distributed`` is to trainers. Tensors are [rows, …]; ranks exchange rows.
The plain verbs are differentiable and return when their result may be used. The ``start_`` verbs return at once; autograd
does not see them: they are for code that writes its own backward pass, such as a pipeline of chunks.

All ranks of the group call the same verbs in the same order, also with zero rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.profiles.errors import GroupError, TensorError, UsageError

__all__ = ["LANES", "GroupCommunicator", "Pending"]

LANES = ("ep", "pp", "cp", "dp", "tp")
"""Classes of traffic, by the groups they belong to."""
Rows = Sequence[int] | None
"""How many rows each rank has; None: all as many."""


class Pending:
    """A result under way. ``wait()`` returns it when it may be used, or raises what the call raised."""

    __slots__ = ("_result", "_work")

    def __init__(self, result: torch.Tensor, work: dist.Work | None) -> None:
        self._result, self._work = result, work

    def wait(self) -> torch.Tensor:
        """The call's output, bounded by the group's timeout. May be called again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class GroupCommunicator:
    """The collectives of ``group`` as this rank calls them.

    Args:
        group: one of backend ``commlayer``, such as :func:`commlayer.integrations.planned_group` or a
            :class:`commlayer.integrations.FoldedMesh` makes; None: a group of this rank alone, which sends nothing.
        lane: the class of traffic that it carries, one of ``ep``, ``pp``, ``cp``, ``dp``, ``tp``.

    Raises:
        GroupError: the group has another backend, or this rank is not in it.
        UsageError: the lane is none.
    """

    def __init__(self, group: dist.ProcessGroup | None, lane: str) -> None:
        if lane not in LANES:
            raise UsageError(f"lane must be one of {', '.join(LANES)}, got {lane!r}")
        self.lane, self.group = lane, group
        self.rank, self.size = 0, 1
        if group is None:
            return
        if not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
            raise GroupError(f"rank {dist.get_rank()} is not in the group of lane {lane}: pass the group it belongs to")
        self.rank, self.size = group.rank(), group.size()
        if self.size > 1 and dist.get_backend(group) != "commlayer":
            raise GroupError(
                f"rank {dist.get_rank()}: the group of lane {lane} has backend {dist.get_backend(group)}: make a planned one "
                "with commlayer.integrations.planned_group(group)"
            )

    def __repr__(self) -> str:
        return f"GroupCommunicator(lane={self.lane!r}, rank={self.rank}, size={self.size})"

    # Differentiable

    def all_to_all(self, x: torch.Tensor, send_rows: Rows = None, receive_rows: Rows = None) -> torch.Tensor:
        """Send ``send_rows[r]`` consecutive rows of ``x`` [Σ send_rows, …] to rank r.

        Returns [Σ receive_rows, …], the rows of rank 0 first. None: as many to and from each. The gradient goes the way back.
        Raises TensorError where ``x`` does not have these rows.
        """
        if not _needs_grad(x):
            return self.start_all_to_all(x, send_rows, receive_rows).wait()
        return _apply(
            x,
            lambda t: self.start_all_to_all(t, send_rows, receive_rows).wait(),
            lambda t: self.start_all_to_all(t, receive_rows, send_rows).wait(),
        )

    def all_gather(self, x: torch.Tensor, rows: Rows = None) -> torch.Tensor:
        """The rows of all ranks, rank 0's first: [Σ rows, …]. ``x`` is [rows[rank], …]. Its gradient: reduce_scatter.

        Raises TensorError where ``x`` does not have these rows.
        """
        if not _needs_grad(x):
            return self.start_all_gather(x, rows).wait()
        return _apply(
            x, lambda t: self.start_all_gather(t, rows).wait(), lambda t: self.start_reduce_scatter(t, rows).wait()
        )

    def reduce_scatter(self, x: torch.Tensor, rows: Rows = None) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' ``x`` [Σ rows, …]: [rows[rank], …]. Its gradient: all_gather.

        Raises TensorError where ``x`` does not have these rows.
        """
        if not _needs_grad(x):
            return self.start_reduce_scatter(x, rows).wait()
        return _apply(
            x, lambda t: self.start_reduce_scatter(t, rows).wait(), lambda t: self.start_all_gather(t, rows).wait()
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``. Its gradient is the sum of all ranks' gradients (each rank's loss counts)."""
        return _apply(x, self._summed, self._summed)

    def copy_to_group(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, which is equal on all ranks, on its way into shards: its gradient is their sum (Megatron's f)."""
        return _apply(x, lambda t: t.view_as(t), self._summed)

    def reduce_from_group(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, used alike by all: the gradient passes unchanged (Megatron's g)."""
        return _apply(x, self._summed, lambda t: t)

    # Started, and waited for later

    def start_all_to_all(self, x: torch.Tensor, send_rows: Rows = None, receive_rows: Rows = None) -> Pending:
        """As :meth:`all_to_all`, without autograd. ``x`` must not change before the wait."""
        self._check_rows("all_to_all", x, send_rows)
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        rows = x.shape[0] if receive_rows is None else sum(receive_rows)
        out = x.new_empty(rows, *x.shape[1:])
        outs = None if receive_rows is None else list(receive_rows)
        work = dist.all_to_all_single(
            out, x, outs, None if send_rows is None else list(send_rows), group=self.group, async_op=True
        )
        return Pending(out, cast("dist.Work", work))

    def start_all_gather(self, x: torch.Tensor, rows: Rows = None) -> Pending:
        """As :meth:`all_gather`, without autograd. ``x`` must not change before the wait."""
        self._check_length("all_gather", rows)
        if rows is not None and x.shape[:1] != (rows[self.rank],):
            raise TensorError(f"{self._who('all_gather')}: expected {rows[self.rank]} rows, got shape {list(x.shape)}")
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        total = x.shape[0] * self.size if rows is None else sum(rows)
        out = x.new_empty(total, *x.shape[1:])
        if rows is None or len(set(rows)) == 1:
            work = dist.all_gather_into_tensor(out, x, group=self.group, async_op=True)
        else:
            work = dist.all_gather(list(out.split(list(rows))), x, group=self.group, async_op=True)
        return Pending(out, cast("dist.Work", work))

    def start_reduce_scatter(self, x: torch.Tensor, rows: Rows = None) -> Pending:
        """As :meth:`reduce_scatter`, without autograd. ``x`` must not change before the wait."""
        self._check_rows("reduce_scatter", x, rows)
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        mine = x.shape[0] // self.size if rows is None else rows[self.rank]
        out = x.new_empty(mine, *x.shape[1:])
        if rows is None or len(set(rows)) == 1:
            work = dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True)
        else:
            work = dist.reduce_scatter(out, list(x.split(list(rows))), group=self.group, async_op=True)
        return Pending(out, cast("dist.Work", work))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(out, group=self.group)
        return out

    # Checks

    def _check_rows(self, verb: str, x: torch.Tensor, rows: Rows) -> None:
        self._check_length(verb, rows)
        if rows is None and (x.dim() == 0 or x.shape[0] % self.size):
            raise TensorError(
                f"{self._who(verb)}: {self.size} must divide the rows, got shape {list(x.shape)}: name them"
            )
        if rows is not None and x.shape[:1] != (sum(rows),):
            raise TensorError(
                f"{self._who(verb)}: rows {list(rows)} are {sum(rows)} together, got shape {list(x.shape)}"
            )

    def _check_length(self, verb: str, rows: Rows) -> None:
        if rows is not None and (len(rows) != self.size or min(rows) < 0):
            raise TensorError(
                f"{self._who(verb)}: expected {self.size} counts of rows, none negative, one for each rank; got {list(rows)}"
            )

    def _who(self, verb: str) -> str:
        where = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        return f"{where}{verb} on lane {self.lane}"


Move = Callable[[torch.Tensor], torch.Tensor]


class _Moved(torch.autograd.Function):
    """A linear map between ranks, and the one that its gradient takes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.moves = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        forward, backward = ctx.moves
        return _apply(gradient, backward, forward), None, None


_apply: Callable[[torch.Tensor, Move, Move], torch.Tensor] = cast("Any", _Moved.apply)


def _needs_grad(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()

"""Rows, or other lines of a tensor, shared out over the ranks of a group as evenly as can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from commlayer.collectives import GroupCommunicator

__all__ = ["even_rows", "gather_shares", "take_share"]


def even_rows(total: int, parts: int) -> tuple[int, ...]:
    """Return how many of ``total`` consecutive rows each of ``parts`` ranks has: as even as can be, the first ranks one
    more.
    """
    short, num_longer = divmod(total, parts)
    return tuple(short + (part < num_longer) for part in range(parts))


def take_share(x: torch.Tensor, group: GroupCommunicator, dim: int = 0) -> torch.Tensor:
    """Take this rank's share of ``x`` along ``dim``, a copy; all ranks of ``group`` hold ``x``. The gradient is gathered, so
    all hold it too.
    """
    return x if group.size == 1 else _take(x, group, dim)


def gather_shares(x: torch.Tensor, group: GroupCommunicator, total: int, dim: int = 0) -> torch.Tensor:
    """Undo :func:`take_share`: all ``total`` lines along ``dim``, on all ranks of ``group``.

    All ranks go on alike, so their gradients are equal: each takes its own share of one, where ``all_gather`` would add up
    ``size`` equal ones.
    """
    return x if group.size == 1 else _gather(x, group, total, dim)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: GroupCommunicator, dim: int) -> torch.Tensor:
        ctx.group, ctx.total, ctx.dim = group, x.shape[dim], dim
        share: torch.Tensor = x.split(list(even_rows(x.shape[dim], group.size)), dim)[group.rank]
        return share.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_shares(gradient, ctx.group, ctx.total, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: GroupCommunicator, total: int, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x.movedim(dim, 0), even_rows(total, group.size)).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return take_share(gradient, ctx.group, ctx.dim), None, None, None


_take: Callable[[torch.Tensor, GroupCommunicator, int], torch.Tensor] = cast("Any", _Take.apply)
_gather: Callable[[torch.Tensor, GroupCommunicator, int, int], torch.Tensor] = cast("Any", _Gather.apply)

"""Flat buffers of many tensors: where each lies, and their collectives in wire formats, whose scales are those of rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from commlayer.collectives import GroupCommunicator
from commlayer.scheduler.wire import WireFormat, WirePolicy, row_width

__all__ = [
    "all_gather_flat",
    "all_reduce_flat",
    "flat_rows",
    "reduce_scatter_flat",
    "views_in",
]


def views_in(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the place of each of ``tensors`` in ``flat``, in its shape: one behind the other, from the beginning."""
    tensors = list(tensors)
    ends = accumulate((tensor.numel() for tensor in tensors), initial=0)
    return [flat[start:end].view(tensor.shape) for (start, end), tensor in zip(pairwise(ends), tensors, strict=True)]


def all_reduce_flat(group: GroupCommunicator, flat: torch.Tensor) -> dist.Work:
    """Start making ``flat`` the sum over ranks."""
    return group.all_reduce_in_place(flat_rows(flat, group.wire, is_shared=True))


def reduce_scatter_flat(group: GroupCommunicator, out: torch.Tensor, x: torch.Tensor) -> dist.Work:
    """Start making ``out`` [s] this rank's part of the sum of all ranks' ``x`` [n·s]."""
    return group.reduce_scatter_into(flat_rows(out, group.wire), flat_rows(x, group.wire, group.size))


def all_gather_flat(group: GroupCommunicator, out: torch.Tensor, x: torch.Tensor) -> dist.Work:
    """Start making ``out`` [n·s] all ranks' ``x`` [s]."""
    return group.all_gather_into(flat_rows(out, group.wire, group.size), flat_rows(x, group.wire))


def flat_rows(
    flat: torch.Tensor, policy: WirePolicy | None, parts: int = 1, *, is_shared: bool = False
) -> torch.Tensor:
    """View ``flat`` [parts · s] as the rows [parts · s / W, W] that share scales, of which each part has whole ones; a view.

    Itself where no format of ``policy`` has scales. Where no width suits, a part is one row, which is not cut. ``is_shared``: for
    an all_reduce, whose ranks share its rows out; one row would all be summed by one rank, so it goes natively where it may.
    """
    if policy is None or not flat.numel() or not any(each.is_scaled for each in policy.formats):
        return flat
    width = row_width(flat.numel() // parts)
    if width is None:
        return flat if is_shared and WireFormat.NATIVE in policy.formats else flat.view(parts, -1)
    return flat.view(-1, width)

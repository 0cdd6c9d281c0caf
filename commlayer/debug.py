"""``COMMLAYER_DEBUG=detail``: compare every call across ranks before it moves a byte.

It costs two small exchanges a call, and finds what otherwise ends in a timeout or, worse, in wrong numbers: ranks that
call with different sizes or dtypes, and tokens (or gradients) that were declared replicated and are not.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from commlayer.groups import Grid
from commlayer.profiles.errors import DisagreementError

__all__ = ["Signature", "check_signatures", "signature"]


@dataclass(frozen=True, slots=True)
class Signature:
    sequence: int
    direction: str
    plan: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int


def signature(sequence: int, direction: str, plan: str, x: torch.Tensor, source: torch.Tensor) -> Signature:
    """What a rank is about to do. ``source``: ``x`` as 1-D uint8 [bytes]."""
    weights = torch.arange(1, source.numel() + 1, dtype=torch.int64) % 65_521  # order matters, not only the sum
    checksum = int((source.cpu().to(torch.int64) * weights).sum())
    return Signature(sequence, direction, plan, tuple(x.shape), str(x.dtype), checksum)


def check_signatures(
    mine: Signature, grid: Grid, ep_group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None
) -> None:
    """Compare with every rank of the grid's row and column. Raises DisagreementError naming both ranks and both calls."""
    _compare(mine, ep_group, grid.ep_ranks, is_replicated=False)
    if tp_group is not None:
        _compare(mine, tp_group, grid.tp_ranks, is_replicated=True)


def _compare(mine: Signature, group: dist.ProcessGroup, ranks: tuple[int, ...], *, is_replicated: bool) -> None:
    gathered: list[Signature | None] = [None] * len(ranks)
    dist.all_gather_object(gathered, mine, group=group)
    here = dist.get_rank()
    for rank, theirs in zip(ranks, gathered, strict=True):
        if theirs is None:
            continue
        if astuple(theirs)[:-1] != astuple(mine)[:-1]:
            raise DisagreementError(
                f"rank {here} calls {mine}, but rank {rank} calls {theirs}: all ranks must call in the same order with "
                "the same shape and dtype"
            )
        if is_replicated and theirs.checksum != mine.checksum:
            raise DisagreementError(
                f"the {mine.direction} tensor of call #{mine.sequence} was declared replicated over the tp group, but ranks "
                f"{here} and {rank} hold different bytes (checksums {mine.checksum} and {theirs.checksum}): reduce it over "
                "the tp group first, or call with replicated=False"
            )

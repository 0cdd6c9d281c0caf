"""``COMMLAYER_DEBUG=detail``: compare every call across ranks before it moves a byte.

It costs two small exchanges a call, and finds what otherwise ends in a timeout or, worse, in wrong numbers: ranks that
call with different sizes or dtypes, and tokens (or gradients) that were declared replicated and are not.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from commlayer.agree.messages import ControlMessage, Peers, gather_grid
from commlayer.failures.board import FailureBoard
from commlayer.profiles.errors import DisagreementError

__all__ = ["Signature", "check_signatures", "signature"]


class Signature(ControlMessage, frozen=True):
    """A call that a rank is about to make."""

    sequence: int
    direction: str
    plan: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int

    def without_checksum(self) -> tuple[object, ...]:
        """The part that must be equal on all ranks; the bytes must be only where they are replicated."""
        return self.sequence, self.direction, self.plan, self.shape, self.dtype


def signature(sequence: int, direction: str, plan: str, x: torch.Tensor, source: torch.Tensor) -> Signature:
    """Describe what a rank is about to do. ``source``: ``x`` as 1-D uint8 [bytes]."""
    weights = torch.arange(1, source.numel() + 1, dtype=torch.int64) % 65_521  # order matters, not only the sum
    checksum = int((source.cpu().to(torch.int64) * weights).sum())
    return Signature(sequence, direction, plan, tuple(x.shape), str(x.dtype), checksum)


def check_signatures(
    mine: Signature,
    ep_group: dist.ProcessGroup,
    tp_group: dist.ProcessGroup | None,
    *,
    replicated: bool,
    timeout_s: float,
    board: FailureBoard | None = None,
) -> None:
    """Compare the calls of all ranks of the grid; every one of them raises the same DisagreementError, or none.

    Two exchanges, along the row and then along the column: a rank that compared after the first would raise while others
    still wait for it in the second. ``board``: where failures of the grid are known; of groups of CPU tensors.
    """
    purpose = f"to compare their call #{mine.sequence}"
    row = None if tp_group is None else Peers.of(tp_group, board)
    rows = gather_grid(mine, Signature, row, Peers.of(ep_group, board), timeout_s, purpose)
    first_rank, first = rows[0][0]
    for rank, theirs in itertools.chain.from_iterable(rows):
        if theirs.without_checksum() != first.without_checksum():
            raise DisagreementError(
                f"rank {first_rank} calls {first}, but rank {rank} calls {theirs}: all ranks must call in the same order "
                "with the same shape and dtype"
            )
    for holders in rows if replicated else ():
        first_rank, first = holders[0]
        for rank, theirs in holders:
            if theirs.checksum != first.checksum:
                raise DisagreementError(
                    f"the {first.direction} tensor of call #{first.sequence} was declared replicated over the tp group, but "
                    f"ranks {first_rank} and {rank} hold different bytes (checksums {first.checksum} and "
                    f"{theirs.checksum}): reduce it over the tp group first, or call with replicated=False"
                )

"""Shared parts of the checks of a communicator: its claims, sizes, and tensors that every rank can compute by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from commlayer.testing.payload import bits
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs

__all__ = ["FEW", "ROWS", "WIDTH", "Check", "Claims", "Pieces", "named", "short"]

Check = tuple[str, Callable[[], None]]
"""A name, and what raises AssertionError where the communicator does not keep its contract."""

WIDTH = 3
"""Elements of a row: more than one, so that rows and elements cannot be mistaken for each other."""
ROWS = (0, 1, 5, 257)
"""Rows of a block: none, one, few, and many that no usual chunk size divides."""
FEW = 5


@dataclass(frozen=True)
class Claims:
    """The capabilities that a communicator claims; see `check_communicator`."""

    dtypes: tuple[torch.dtype, ...]
    reduce_dtypes: tuple[torch.dtype, ...]
    ops: tuple[ReduceOp, ...]
    device: torch.device
    one_clock: bool
    rows: tuple[int, ...] = field(default=ROWS)


class Pieces:
    """One rank of the communicator under test, and its test data."""

    def __init__(self, verbs: Verbs, claims: Claims) -> None:
        self.verbs, self.claims = verbs, claims
        self.rank, self.n, self.device = verbs.rank, verbs.size, claims.device

    def block(self, rows: int, dtype: torch.dtype, *key: int) -> torch.Tensor:
        """Make a block [rows, WIDTH], the same wherever it is made with the same key."""
        return bits((rows, WIDTH), dtype, *key).to(self.device)

    def join(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = blocks[0].dtype
        flat = torch.cat([block.view(-1).view(torch.uint8) for block in blocks])
        return flat.view(dtype).view(-1, WIDTH)

    def finish(self, pending: AsyncCall | None, async_op: bool) -> None:
        if async_op:
            assert pending is not None, f"rank {self.rank}: async_op=True returned nothing to wait for"
            pending.wait()
        else:
            assert pending is None, f"rank {self.rank}: a blocking call returned {pending!r}"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named(verb: str, what: str, async_op: bool) -> str:
    return f"{verb}[{what}{', async' if async_op else ''}]"

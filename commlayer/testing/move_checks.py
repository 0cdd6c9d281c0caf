"""Checks of the verbs that move bytes: every byte must arrive as it was, where it belongs. See
conformance_checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from commlayer.testing.payload import bits, expect_bits, stale
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs

__all__ = ["FEW", "ROWS", "WIDTH", "Check", "Claims", "MoveChecks", "Pieces", "patterns", "short"]

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


def patterns(n: int) -> dict[str, list[list[int]]]:
    """Splits for n ranks by name: ``counts[a][b]`` rows go from rank a to b."""
    ranks = range(n)
    return {
        "zero tokens": [[0] * n for _ in ranks],
        "one token": [[int((a, b) == (0, n - 1)) for b in ranks] for a in ranks],
        "one hot rank": [[17 * (b == n - 1) for b in ranks] for _ in ranks],
        "self only": [[(a + 2) * (a == b) for b in ranks] for a in ranks],
        "others only": [[(a + 2 * b + 1) * (a != b) for b in ranks] for a in ranks],
        "one silent rank": [[0 if 0 in (a, b) else a + b for b in ranks] for a in ranks],
        "uneven": [[(5 * a + 3 * b) % 7 for b in ranks] for a in ranks],
        "large and small": [[257 if (a + b) % n == 0 else 1 for b in ranks] for a in ranks],
    }


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


class MoveChecks(Pieces):
    """The checks of all_to_all, all_gather, broadcast, gather, scatter, send and recv."""

    def moves(self) -> Iterator[Check]:
        for name, counts in patterns(self.n).items():
            for async_op in (False, True):
                yield named("all_to_all", name, async_op), partial(self.all_to_all, counts, torch.float32, async_op)
        for rows in self.claims.rows:
            yield f"all_to_all[equal, {rows} rows]", partial(self.all_to_all_equal, rows)
        yield "all_to_all[same buffers twice]", self.buffers_twice
        for dtype in self.claims.dtypes:
            uneven = patterns(self.n)["uneven"]
            yield f"all_to_all[{short(dtype)}]", partial(self.all_to_all, uneven, dtype, False)
            for rows in self.claims.rows:
                what = f"{short(dtype)}, {rows} rows"
                yield f"all_gather[{what}]", partial(self.all_gather, rows, dtype, rows == FEW)
                yield f"broadcast[{what}]", partial(self.broadcast, rows, dtype, rows % self.n, rows == FEW)
        for root in range(self.n):
            for async_op in (False, True):
                yield (
                    named("broadcast", f"root {root}", async_op),
                    partial(self.broadcast, FEW, torch.uint8, root, async_op),
                )
                yield named("gather", f"root {root}", async_op), partial(self.gather, FEW, root, async_op)
                yield named("scatter", f"root {root}", async_op), partial(self.scatter, FEW, root, async_op)
        if self.n > 1:
            for dtype in self.claims.dtypes:
                yield f"send and recv[{short(dtype)}]", partial(self.ring, dtype, False)
            yield "send and recv[async]", partial(self.ring, torch.uint8, True)
            yield "send and recv[in order]", self.messages_in_order

    def all_to_all(self, counts: list[list[int]], dtype: torch.dtype, async_op: bool) -> None:
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        source = self.join([self.block(a_to_b, dtype, self.rank, b) for b, a_to_b in enumerate(sent)])
        wanted = self.join([self.block(count, dtype, a, self.rank) for a, count in enumerate(received)])
        output, before = stale(wanted), source.clone()
        self.finish(self.verbs.all_to_all(output, source, received, sent, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)
        expect_bits(source, before, self.rank, "the input, which must not change")

    def all_to_all_equal(self, rows: int) -> None:
        source = self.join([self.block(rows, torch.float32, self.rank, b) for b in range(self.n)])
        wanted = self.join([self.block(rows, torch.float32, a, self.rank) for a in range(self.n)])
        output = stale(wanted)
        self.verbs.all_to_all(output, source)
        expect_bits(output, wanted, self.rank)

    def buffers_twice(self) -> None:
        """The second result must not be the first one, kept."""
        source = torch.empty((self.n * FEW, WIDTH), device=self.device)
        output = torch.empty_like(source)
        results = []
        for turn in range(3):
            source.copy_(self.join([self.block(FEW, torch.float32, self.rank, b, turn) for b in range(self.n)]))
            self.verbs.all_to_all(output, source)
            results.append(output.clone())
        for turn, result in enumerate(results):
            wanted = self.join([self.block(FEW, torch.float32, a, self.rank, turn) for a in range(self.n)])
            expect_bits(result, wanted, self.rank, f"the output of turn {turn}")

    def all_gather(self, rows: int, dtype: torch.dtype, async_op: bool) -> None:
        source = self.block(rows, dtype, self.rank)
        wanted = self.join([self.block(rows, dtype, a) for a in range(self.n)])
        output, before = stale(wanted), source.clone()
        self.finish(self.verbs.all_gather(output, source, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)
        expect_bits(source, before, self.rank, "the input, which must not change")

    def broadcast(self, rows: int, dtype: torch.dtype, root: int, async_op: bool) -> None:
        wanted = self.block(rows, dtype, root)
        tensor = wanted.clone() if self.rank == root else stale(wanted)
        self.finish(self.verbs.broadcast(tensor, root, async_op=async_op), async_op)
        expect_bits(tensor, wanted, self.rank)

    def gather(self, rows: int, root: int, async_op: bool) -> None:
        wanted = self.join([self.block(rows, torch.float32, a) for a in range(self.n)])
        output = stale(wanted) if self.rank == root else None
        source = self.block(rows, torch.float32, self.rank)
        self.finish(self.verbs.gather(output, source, root, async_op=async_op), async_op)
        if output is not None:
            expect_bits(output, wanted, self.rank)

    def scatter(self, rows: int, root: int, async_op: bool) -> None:
        parts = self.join([self.block(rows, torch.float32, root, b) for b in range(self.n)])
        wanted = self.block(rows, torch.float32, root, self.rank)
        output = stale(wanted)
        self.finish(self.verbs.scatter(output, parts if self.rank == root else None, root, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)

    def ring(self, dtype: torch.dtype, async_op: bool) -> None:
        """Everyone sends to the next rank; even ranks send first, so that sends that wait for their
        receiver are fine too."""
        to, source = (self.rank + 1) % self.n, (self.rank - 1) % self.n
        message, wanted = self.block(FEW, dtype, self.rank), self.block(FEW, dtype, source)
        output = stale(wanted)
        if async_op:
            for pending in (
                self.verbs.recv(output, source, async_op=True),
                self.verbs.send(message, to, async_op=True),
            ):
                self.finish(pending, async_op)
        elif self.rank % 2 == 0 and self.rank != self.n - 1:
            self.verbs.send(message, to)
            self.verbs.recv(output, source)
        else:  # the last rank too: with an odd number of them both its neighbours are even
            self.verbs.recv(output, source)
            self.verbs.send(message, to)
        expect_bits(output, wanted, self.rank)

    def messages_in_order(self) -> None:
        wanted = [self.block(FEW, torch.uint8, 0, self.n - 1, turn) for turn in range(3)]
        if self.rank == 0:
            sends = [self.verbs.send(message, self.n - 1, async_op=True) for message in wanted]
            for pending in sends:
                self.finish(pending, True)
        elif self.rank == self.n - 1:
            outputs = [stale(message) for message in wanted]
            receives = [self.verbs.recv(output, 0, async_op=True) for output in outputs]
            for pending in reversed(receives):
                self.finish(pending, True)
            for turn, (output, message) in enumerate(zip(outputs, wanted, strict=True)):
                expect_bits(output, message, self.rank, f"message {turn}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named(verb: str, what: str, async_op: bool) -> str:
    return f"{verb}[{what}{', async' if async_op else ''}]"

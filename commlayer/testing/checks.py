"""What `check_communicator` checks, each check under its name.

Expected results are computed locally, from seeds that all ranks know, so that no check relies on the communicator that it
judges. A check makes all its calls before it compares anything: a rank that sees a wrong result must not leave the others
alone in the next call. (More than 300 lines: one list of checks, which share their pieces.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from commlayer.testing.payload import bits, expect_bits, expect_sum, fractions, integers, reduced, stale
from commlayer.testing.verbs import Pending, ReduceOp, Verbs

__all__ = ["Check", "Claims", "checks"]

Check = tuple[str, Callable[[], None]]
"""A name, and what raises AssertionError where the communicator does not keep its contract."""

WIDTH = 3
"""Elements of a row: more than one, so that rows and elements cannot be mistaken for each other."""
ROWS = (0, 1, 5, 257)
"""Rows of a block: none, one, few, and many that no usual chunk size divides."""
FEW = 5


@dataclass(frozen=True)
class Claims:
    """What a communicator says it can do; see `check_communicator`."""

    dtypes: tuple[torch.dtype, ...]
    reduce_dtypes: tuple[torch.dtype, ...]
    ops: tuple[ReduceOp, ...]
    device: torch.device
    one_clock: bool
    rows: tuple[int, ...] = field(default=ROWS)


def checks(verbs: Verbs, claims: Claims) -> Iterator[Check]:
    """All checks, in the same order on all ranks."""
    group = _Checks(verbs, claims)
    yield from group.moves()
    yield from group.reductions()
    yield from group.order()
    yield from group.refusals()


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


class _Checks:
    def __init__(self, verbs: Verbs, claims: Claims) -> None:
        self.verbs, self.claims = verbs, claims
        self.rank, self.n, self.device = verbs.rank, verbs.size, claims.device

    # Moves

    def moves(self) -> Iterator[Check]:
        for name, counts in patterns(self.n).items():
            for async_op in (False, True):
                yield _name("all_to_all", name, async_op), partial(self.all_to_all, counts, torch.float32, async_op)
        for rows in self.claims.rows:
            yield f"all_to_all[equal, {rows} rows]", partial(self.all_to_all_equal, rows)
        yield "all_to_all[same buffers twice]", self.buffers_twice
        for dtype in self.claims.dtypes:
            uneven = patterns(self.n)["uneven"]
            yield f"all_to_all[{_short(dtype)}]", partial(self.all_to_all, uneven, dtype, False)
            for rows in self.claims.rows:
                what = f"{_short(dtype)}, {rows} rows"
                yield f"all_gather[{what}]", partial(self.all_gather, rows, dtype, rows == FEW)
                yield f"broadcast[{what}]", partial(self.broadcast, rows, dtype, rows % self.n, rows == FEW)
        for root in range(self.n):
            for async_op in (False, True):
                yield (
                    _name("broadcast", f"root {root}", async_op),
                    partial(self.broadcast, FEW, torch.uint8, root, async_op),
                )
                yield _name("gather", f"root {root}", async_op), partial(self.gather, FEW, root, async_op)
                yield _name("scatter", f"root {root}", async_op), partial(self.scatter, FEW, root, async_op)
        if self.n > 1:
            for dtype in self.claims.dtypes:
                yield f"send and recv[{_short(dtype)}]", partial(self.ring, dtype, False)
            yield "send and recv[async]", partial(self.ring, torch.uint8, True)
            yield "send and recv[in order]", self.messages_in_order

    def all_to_all(self, counts: list[list[int]], dtype: torch.dtype, async_op: bool) -> None:
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        source = self._join([self._block(a_to_b, dtype, self.rank, b) for b, a_to_b in enumerate(sent)])
        wanted = self._join([self._block(count, dtype, a, self.rank) for a, count in enumerate(received)])
        output, before = stale(wanted), source.clone()
        self._finish(self.verbs.all_to_all(output, source, received, sent, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)
        expect_bits(source, before, self.rank, "the input, which must not change")

    def all_to_all_equal(self, rows: int) -> None:
        source = self._join([self._block(rows, torch.float32, self.rank, b) for b in range(self.n)])
        wanted = self._join([self._block(rows, torch.float32, a, self.rank) for a in range(self.n)])
        output = stale(wanted)
        self.verbs.all_to_all(output, source)
        expect_bits(output, wanted, self.rank)

    def buffers_twice(self) -> None:
        """The second result must not be the first one, kept."""
        source = torch.empty((self.n * FEW, WIDTH), device=self.device)
        output = torch.empty_like(source)
        results = []
        for turn in range(3):
            source.copy_(self._join([self._block(FEW, torch.float32, self.rank, b, turn) for b in range(self.n)]))
            self.verbs.all_to_all(output, source)
            results.append(output.clone())
        for turn, result in enumerate(results):
            wanted = self._join([self._block(FEW, torch.float32, a, self.rank, turn) for a in range(self.n)])
            expect_bits(result, wanted, self.rank, f"the output of turn {turn}")

    def all_gather(self, rows: int, dtype: torch.dtype, async_op: bool) -> None:
        source = self._block(rows, dtype, self.rank)
        wanted = self._join([self._block(rows, dtype, a) for a in range(self.n)])
        output, before = stale(wanted), source.clone()
        self._finish(self.verbs.all_gather(output, source, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)
        expect_bits(source, before, self.rank, "the input, which must not change")

    def broadcast(self, rows: int, dtype: torch.dtype, root: int, async_op: bool) -> None:
        wanted = self._block(rows, dtype, root)
        tensor = wanted.clone() if self.rank == root else stale(wanted)
        self._finish(self.verbs.broadcast(tensor, root, async_op=async_op), async_op)
        expect_bits(tensor, wanted, self.rank)

    def gather(self, rows: int, root: int, async_op: bool) -> None:
        wanted = self._join([self._block(rows, torch.float32, a) for a in range(self.n)])
        output = stale(wanted) if self.rank == root else None
        source = self._block(rows, torch.float32, self.rank)
        self._finish(self.verbs.gather(output, source, root, async_op=async_op), async_op)
        if output is not None:
            expect_bits(output, wanted, self.rank)

    def scatter(self, rows: int, root: int, async_op: bool) -> None:
        whole = self._join([self._block(rows, torch.float32, root, b) for b in range(self.n)])
        wanted = self._block(rows, torch.float32, root, self.rank)
        output = stale(wanted)
        self._finish(
            self.verbs.scatter(output, whole if self.rank == root else None, root, async_op=async_op), async_op
        )
        expect_bits(output, wanted, self.rank)

    def ring(self, dtype: torch.dtype, async_op: bool) -> None:
        """Everyone sends to the next rank; even ranks send first, so that sends that wait for their receiver are fine too."""
        to, source = (self.rank + 1) % self.n, (self.rank - 1) % self.n
        message, wanted = self._block(FEW, dtype, self.rank), self._block(FEW, dtype, source)
        output = stale(wanted)
        if async_op:
            for pending in (
                self.verbs.recv(output, source, async_op=True),
                self.verbs.send(message, to, async_op=True),
            ):
                self._finish(pending, async_op)
        elif self.rank % 2 == 0 and self.rank != self.n - 1:
            self.verbs.send(message, to)
            self.verbs.recv(output, source)
        else:  # the last rank too: with an odd number of them both its neighbours are even
            self.verbs.recv(output, source)
            self.verbs.send(message, to)
        expect_bits(output, wanted, self.rank)

    def messages_in_order(self) -> None:
        wanted = [self._block(FEW, torch.uint8, 0, self.n - 1, turn) for turn in range(3)]
        if self.rank == 0:
            sends = [self.verbs.send(message, self.n - 1, async_op=True) for message in wanted]
            for pending in sends:
                self._finish(pending, True)
        elif self.rank == self.n - 1:
            outputs = [stale(message) for message in wanted]
            receives = [self.verbs.recv(output, 0, async_op=True) for output in outputs]
            for pending in reversed(receives):
                self._finish(pending, True)
            for turn, (output, message) in enumerate(zip(outputs, wanted, strict=True)):
                expect_bits(output, message, self.rank, f"message {turn}")

    # Reductions

    def reductions(self) -> Iterator[Check]:
        for dtype in self.claims.reduce_dtypes:
            for op in self.claims.ops:
                for rows in self.claims.rows:
                    what = f"{_short(dtype)}, {op}, {rows} rows"
                    yield f"all_reduce[{what}]", partial(self.all_reduce, rows, dtype, op, rows == FEW)
                    yield f"reduce_scatter[{what}]", partial(self.reduce_scatter, rows, dtype, op, rows == FEW)
                yield f"reduce[{_short(dtype)}, {op}]", partial(self.reduce, dtype, op, self.n - 1)
            if dtype.is_floating_point and "sum" in self.claims.ops:
                yield f"all_reduce[{_short(dtype)}, same bits everywhere and always]", partial(self.same_bits, dtype)
                yield f"reduce_scatter[{_short(dtype)}, same bits always]", partial(self.same_bits_scattered, dtype)

    def all_reduce(self, rows: int, dtype: torch.dtype, op: ReduceOp, async_op: bool) -> None:
        shape = (rows, WIDTH)
        tensor = integers(shape, dtype, op, self.rank).to(self.device)
        self._finish(self.verbs.all_reduce(tensor, op, async_op=async_op), async_op)
        expect_bits(tensor, reduced([integers(shape, dtype, op, a) for a in range(self.n)], op), self.rank)

    def reduce_scatter(self, rows: int, dtype: torch.dtype, op: ReduceOp, async_op: bool) -> None:
        shape = (self.n * rows, WIDTH)
        source = integers(shape, dtype, op, self.rank).to(self.device)
        wanted = reduced([integers(shape, dtype, op, a) for a in range(self.n)], op)
        wanted = wanted[self.rank * rows : (self.rank + 1) * rows].to(self.device)
        output, before = stale(wanted), source.clone()
        self._finish(self.verbs.reduce_scatter(output, source, op, async_op=async_op), async_op)
        expect_bits(output, wanted, self.rank)
        expect_bits(source, before, self.rank, "the input, which must not change")

    def reduce(self, dtype: torch.dtype, op: ReduceOp, root: int) -> None:
        shape = (FEW, WIDTH)
        tensor = integers(shape, dtype, op, self.rank).to(self.device)
        self.verbs.reduce(tensor, root, op)
        if self.rank == root:
            expect_bits(tensor, reduced([integers(shape, dtype, op, a) for a in range(self.n)], op), self.rank)

    def same_bits(self, dtype: torch.dtype) -> None:
        """Values whose sum depends on the order of addition: any order may be taken, but one."""
        shape = (max(self.claims.rows), WIDTH)
        results = []
        for _ in range(2):
            tensor = fractions(shape, dtype, self.rank).to(self.device)
            self.verbs.all_reduce(tensor)
            results.append(tensor)
        mine = results[0].view(1, -1).view(torch.uint8)
        everyones = torch.empty((self.n, mine.shape[1]), dtype=torch.uint8, device=self.device)
        self.verbs.all_gather(everyones, mine)
        expect_sum(results[0], [fractions(shape, dtype, a) for a in range(self.n)], self.rank)
        expect_bits(results[1], results[0], self.rank, "a second run")
        for rank in range(self.n):
            expect_bits(
                everyones[rank].view(dtype), results[0], self.rank, f"rank {rank}'s result, against this rank's"
            )

    def same_bits_scattered(self, dtype: torch.dtype) -> None:
        rows = max(self.claims.rows)
        source = fractions((self.n * rows, WIDTH), dtype, self.rank).to(self.device)
        results = []
        for _ in range(2):
            output = stale(source[:rows])
            self.verbs.reduce_scatter(output, source)
            results.append(output)
        parts = [fractions((self.n * rows, WIDTH), dtype, a) for a in range(self.n)]
        expect_sum(results[0], [part[self.rank * rows : (self.rank + 1) * rows] for part in parts], self.rank)
        expect_bits(results[1], results[0], self.rank, "a second run")

    # Order

    def order(self) -> Iterator[Check]:
        yield "order[waited for in reverse]", partial(self.many_at_once, reverse=True)
        yield "order[blocking calls between asynchronous ones]", partial(self.many_at_once, reverse=False)
        yield "wait[a second time]", self.second_wait
        if self.claims.one_clock:
            yield "barrier", self.barrier

    def many_at_once(self, reverse: bool) -> None:
        """Calls of different verbs and sizes under way together: each must meet its like on the other ranks."""
        under_way: list[tuple[Pending | None, torch.Tensor, torch.Tensor, str]] = []
        for turn in range(4):
            rows = 1 + 64 * (turn % 2)
            whole = self._join([self._block(rows, torch.float32, a, turn) for a in range(self.n)])
            output = stale(whole)
            mine = self._block(rows, torch.float32, self.rank, turn)
            pending = self.verbs.all_gather(output, mine, async_op=True)
            under_way.append((pending, output, whole, f"all_gather {turn}"))
            tensor = torch.full((rows,), float(self.rank + turn), device=self.device)
            total = torch.full_like(tensor, float(sum(range(self.n)) + self.n * turn))
            async_op = reverse or turn % 2 == 0
            pending = self.verbs.all_reduce(tensor, async_op=async_op)
            under_way.append((pending, tensor, total, f"all_reduce {turn}"))
        for pending, *_ in reversed(under_way) if reverse else under_way:
            if pending is not None:
                pending.wait()
        for _, got, wanted, what in under_way:
            expect_bits(got, wanted, self.rank, what)

    def second_wait(self) -> None:
        tensor = torch.ones(WIDTH, device=self.device)
        pending = self.verbs.all_reduce(tensor, async_op=True)
        for _ in range(2):
            self._finish(pending, True)
        expect_bits(tensor, torch.full_like(tensor, float(self.n)), self.rank)

    def barrier(self) -> None:
        """Rank k comes 10 k ms late; nobody may leave before the last one came."""
        time.sleep(0.01 * self.rank)
        came = time.monotonic_ns()
        self.verbs.barrier()
        left = time.monotonic_ns()
        times = torch.empty((self.n, 2), dtype=torch.int64, device=self.device)
        self.verbs.all_gather(times, torch.tensor([[came, left]], device=self.device))
        early = int(times[:, 0].max() - times[:, 1].min())
        assert early <= 0, f"rank {self.rank}: a rank left the barrier {early / 1e6:g} ms before the last one came"

    # Refusals

    def refusals(self) -> Iterator[Check]:
        two = torch.zeros((2 * self.n, WIDTH), device=self.device)
        one = torch.zeros((self.n, WIDTH), device=self.device)
        even, wrong = [2] * self.n, [2] * (self.n - 1) + [3]
        verbs = self.verbs
        calls: dict[str, Callable[[], object]] = {
            "all_to_all, splits beyond the input": lambda: verbs.all_to_all(two.clone(), two, even, wrong),
            "all_to_all, splits beyond the output": lambda: verbs.all_to_all(two.clone(), two, wrong, even),
            "all_to_all, too many splits": lambda: verbs.all_to_all(two.clone(), two, even, [*even, 0]),
            "all_gather, small output": lambda: verbs.all_gather(two[:-1].clone(), two[:2]),
            "reduce_scatter, large output": lambda: verbs.reduce_scatter(two[:2].clone(), one),
            "broadcast, no such root": lambda: verbs.broadcast(one.clone(), self.n),
            "send, no such rank": lambda: verbs.send(one, self.n),
        }
        for name, call in calls.items():
            yield f"refused[{name}]", partial(self.refused, call)

    def refused(self, call: Callable[[], object]) -> None:
        taken = True
        try:
            call()
        except Exception:  # noqa: BLE001 - the contract leaves the kind of error open
            taken = False
        tensor = torch.ones(1, device=self.device)
        self.verbs.all_reduce(tensor)
        assert not taken, f"rank {self.rank}: a call that cannot be was taken"
        expect_bits(tensor, torch.full_like(tensor, float(self.n)), self.rank, "an all_reduce after the refusal")

    # Pieces

    def _block(self, rows: int, dtype: torch.dtype, *key: int) -> torch.Tensor:
        """[rows, WIDTH], the same wherever it is made with the same key."""
        return bits((rows, WIDTH), dtype, *key).to(self.device)

    def _join(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = blocks[0].dtype
        flat = torch.cat([block.view(-1).view(torch.uint8) for block in blocks])
        return flat.view(dtype).view(-1, WIDTH)

    def _finish(self, pending: Pending | None, async_op: bool) -> None:
        if async_op:
            assert pending is not None, f"rank {self.rank}: async_op=True returned nothing to wait for"
            pending.wait()
        else:
            assert pending is None, f"rank {self.rank}: a blocking call returned {pending!r}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(verb: str, what: str, async_op: bool) -> str:
    return f"{verb}[{what}{', async' if async_op else ''}]"

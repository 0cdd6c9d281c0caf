"""The checks that `check_communicator` makes, each under its name.

Expected results are computed locally, from seeds that all ranks know, so that no check relies on
the communicator that it judges. A check makes all its calls before it compares anything: a rank
that sees a wrong result must not leave the others alone in the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from commlayer.testing.move_checks import FEW, WIDTH, Check, Claims, MoveChecks, Pieces, short
from commlayer.testing.payload import expect_bits, expect_sum, fractions, integers, reduced, stale
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs

__all__ = ["checks"]


def checks(verbs: Verbs, claims: Claims) -> Iterator[Check]:
    """List all checks, in the same order on all ranks."""
    yield from MoveChecks(verbs, claims).moves()
    yield from _Reductions(verbs, claims).reductions()
    calls = _Calls(verbs, claims)
    yield from calls.order()
    yield from calls.refusals()


class _Reductions(Pieces):
    def reductions(self) -> Iterator[Check]:
        for dtype in self.claims.reduce_dtypes:
            for op in self.claims.ops:
                for rows in self.claims.rows:
                    what = f"{short(dtype)}, {op}, {rows} rows"
                    yield f"all_reduce[{what}]", partial(self.all_reduce, rows, dtype, op, rows == FEW)
                    yield f"reduce_scatter[{what}]", partial(self.reduce_scatter, rows, dtype, op, rows == FEW)
                yield f"reduce[{short(dtype)}, {op}]", partial(self.reduce, dtype, op, self.n - 1)
            if dtype.is_floating_point and "sum" in self.claims.ops:
                yield f"all_reduce[{short(dtype)}, same bits everywhere and always]", partial(self.same_bits, dtype)
                yield f"reduce_scatter[{short(dtype)}, same bits always]", partial(self.same_bits_scattered, dtype)

    def all_reduce(self, rows: int, dtype: torch.dtype, op: ReduceOp, async_op: bool) -> None:
        shape = (rows, WIDTH)
        tensor = integers(shape, dtype, op, self.rank).to(self.device)
        self.finish(self.verbs.all_reduce(tensor, op, async_op=async_op), async_op)
        expect_bits(tensor, reduced([integers(shape, dtype, op, a) for a in range(self.n)], op), self.rank)

    def reduce_scatter(self, rows: int, dtype: torch.dtype, op: ReduceOp, async_op: bool) -> None:
        shape = (self.n * rows, WIDTH)
        source = integers(shape, dtype, op, self.rank).to(self.device)
        wanted = reduced([integers(shape, dtype, op, a) for a in range(self.n)], op)
        wanted = wanted[self.rank * rows : (self.rank + 1) * rows].to(self.device)
        output, before = stale(wanted), source.clone()
        self.finish(self.verbs.reduce_scatter(output, source, op, async_op=async_op), async_op)
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
        own = results[0].view(1, -1).view(torch.uint8)
        everyones = torch.empty((self.n, own.shape[1]), dtype=torch.uint8, device=self.device)
        self.verbs.all_gather(everyones, own)
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


class _Calls(Pieces):
    """The checks of calls under way together, and of calls that cannot be."""

    def order(self) -> Iterator[Check]:
        yield "order[waited for in reverse]", partial(self.many_at_once, reverse=True)
        yield "order[blocking calls between asynchronous ones]", partial(self.many_at_once, reverse=False)
        yield "wait[a second time]", self.second_wait
        if self.claims.one_clock:
            yield "barrier", self.barrier

    def many_at_once(self, reverse: bool) -> None:
        """Calls of different verbs and sizes under way together: each must meet its like on the
        other ranks."""
        under_way: list[tuple[AsyncCall | None, torch.Tensor, torch.Tensor, str]] = []
        for turn in range(4):
            rows = 1 + 64 * (turn % 2)
            gathered = self.join([self.block(rows, torch.float32, a, turn) for a in range(self.n)])
            output = stale(gathered)
            own = self.block(rows, torch.float32, self.rank, turn)
            pending = self.verbs.all_gather(output, own, async_op=True)
            under_way.append((pending, output, gathered, f"all_gather {turn}"))
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
            self.finish(pending, True)
        expect_bits(tensor, torch.full_like(tensor, float(self.n)), self.rank)

    def barrier(self) -> None:
        """Rank k comes 10 k ms late; nobody may leave before the last one came."""
        time.sleep(0.01 * self.rank)
        came_ns = time.monotonic_ns()
        self.verbs.barrier()
        left_ns = time.monotonic_ns()
        times = torch.empty((self.n, 2), dtype=torch.int64, device=self.device)
        self.verbs.all_gather(times, torch.tensor([[came_ns, left_ns]], device=self.device))
        early = int(times[:, 0].max() - times[:, 1].min())
        assert early <= 0, f"rank {self.rank}: a rank left the barrier {early / 1e6:g} ms before the last one came"

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
        accepted = True
        try:
            call()
        except Exception:  # noqa: BLE001 - the contract leaves the kind of error open
            accepted = False
        tensor = torch.ones(1, device=self.device)
        self.verbs.all_reduce(tensor)
        assert not accepted, f"rank {self.rank}: a call that cannot be was taken"
        expect_bits(tensor, torch.full_like(tensor, float(self.n)), self.rank, "an all_reduce after the refusal")

"""A communicator inside one process: n threads that share memory, for unit tests of code that
communicates.

    world = FakeWorld(4)
    results = world.run(lambda verbs: my_code(verbs))       # one thread per rank

Slow and obvious on purpose: the last rank to arrive computes everyone's result, reductions in rank
order. It blocks as a real communicator does, and it is stricter: a rank that calls something else,
or has left, is named at once, and a rank that does not come is named when the time is up.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from fake_results import Contribution, complete

from commlayer.profiles.errors import (
    ClusterError,
    CollectiveTimeoutError,
    DisagreementError,
    PeerError,
    TensorError,
    UsageError,
)
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp

__all__ = ["FakeVerbs", "FakeWorld"]

T = TypeVar("T")


@dataclass
class _Call:
    """One collective: the parts that have come, and its end."""

    parts: dict[int, Contribution] = field(default_factory=dict)
    done: bool = False
    error: ClusterError | None = None


class FakeWorld:
    """A world of n ranks in one process. Calls wait ``timeout_s`` seconds for their peers."""

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        if size < 1:
            raise UsageError(f"size: expected 1 or more ranks, got {size}")
        self.size, self.timeout_s = size, timeout_s
        self.ranks = tuple(FakeVerbs(self, rank) for rank in range(size))
        """Each rank's end; one thread may use one of them."""
        self._changed = threading.Condition()
        self._calls: defaultdict[int, _Call] = defaultdict(_Call)
        self._num_calls = [0] * size
        self._mail: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self._num_received: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._gone: dict[int, str] = {}

    def run(self, fn: Callable[[FakeVerbs], T]) -> list[T]:
        """Call ``fn`` with each rank's verbs, in a thread each; the results by rank.

        A rank that has returned or raised is gone: a call that waits for it raises PeerError.
        Raises what the first rank to fail raised, when all threads have ended. A world runs once.
        """
        if self._gone:
            raise UsageError("this FakeWorld has run already: make another")
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            end = "has returned"
            try:
                results[rank] = fn(self.ranks[rank])
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller's thread, which raises it
                end = f"raised {type(error).__name__}: {error}"
                errors.append(error)
            finally:
                with self._changed:
                    self._gone[rank] = end
                    self._changed.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _join(self, rank: int, part: Contribution) -> _FakeAsyncCall:
        """Bring a part to the rank's next collective; the last one computes it."""
        with self._changed:
            sequence = self._num_calls[rank]
            self._num_calls[rank] += 1
            call = self._calls[sequence]
            call.parts[rank] = part
            if len(call.parts) == self.size:
                try:
                    complete([call.parts[each] for each in range(self.size)])
                except ClusterError as error:
                    call.error = error
                call.done = True
                del self._calls[sequence]
                self._changed.notify_all()

        def finish() -> None:
            with self._changed:
                self._wait(
                    rank,
                    f"{part}, call {sequence}",
                    lambda: call.done,
                    lambda: [each for each in range(self.size) if each not in call.parts],
                )
                if call.error is not None:
                    raise type(call.error)(f"rank {rank}: {call.error}")

        return _FakeAsyncCall(finish)

    def _send(self, rank: int, to: int, tensor: torch.Tensor) -> None:
        with self._changed:
            self._mail[rank, to].append(tensor.detach().clone())
            self._changed.notify_all()

    def _receive(self, rank: int, source: int, tensor: torch.Tensor) -> _FakeAsyncCall:
        pair = source, rank
        number = self._num_received[pair]  # the order of receives is the order of their calls, not of their waits
        self._num_received[pair] += 1

        def finish() -> None:
            with self._changed:
                self._wait(rank, f"recv from rank {source}", lambda: len(self._mail[pair]) > number, lambda: [source])
                message = self._mail[pair][number]
            if (message.dtype, message.numel()) != (tensor.dtype, tensor.numel()):
                raise DisagreementError(
                    f"rank {rank}: expected {tensor.numel()} {tensor.dtype} from rank {source}, which sent "
                    f"{message.numel()} {message.dtype}"
                )
            tensor.copy_(message.view(tensor.shape))

        return _FakeAsyncCall(finish)

    def _wait(self, rank: int, what: str, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Until ``done``; raises where a missing rank is gone, or the time is up. Called with the
        lock held."""

        def gone() -> list[int]:
            return [each for each in missing() if each in self._gone]

        self._changed.wait_for(lambda: done() or gone(), self.timeout_s)
        if done():
            return
        if absent := gone():
            raise PeerError(f"rank {rank}: {what}: rank {absent[0]} {self._gone[absent[0]]}")
        raise CollectiveTimeoutError(
            f"rank {rank}: {what}: ranks {missing()} did not come within {self.timeout_s:g} s: every rank must call it"
        )


class _FakeAsyncCall:
    """`AsyncCall`; a second wait is free."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class FakeVerbs:
    """One rank's end of a `FakeWorld`; see `Verbs` for what each method does.

    Raises TensorError and UsageError for a call that cannot be, DisagreementError where ranks call
    different things, PeerError where a rank is gone, CollectiveTimeoutError where one does not
    come.
    """

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> AsyncCall | None:
        splits = self._splits("source", source, source_splits), self._splits("output", output, output_splits)
        return self._collective(Contribution("all_to_all", (source.dtype,), source, output, *splits), async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        self._check_blocks("output", output, source)
        return self._collective(Contribution("all_gather", (source.dtype,), source, output), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        self._check_blocks("source", source, output)
        return self._collective(Contribution("reduce_scatter", (source.dtype, op), source, output), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        return self._collective(Contribution("all_reduce", (tensor.dtype, op), tensor, tensor), async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False) -> AsyncCall | None:
        self._check_rank(root)
        return self._collective(Contribution("broadcast", (tensor.dtype, root), tensor, tensor), async_op)

    def gather(
        self, output: torch.Tensor | None, source: torch.Tensor, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        self._check_rank(root)
        if self.rank == root:
            self._check_blocks("output", output, source)
        return self._collective(Contribution("gather", (source.dtype, root), source, output), async_op)

    def scatter(
        self, output: torch.Tensor, source: torch.Tensor | None, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        self._check_rank(root)
        if self.rank == root:
            self._check_blocks("source", source, output)
        return self._collective(Contribution("scatter", (output.dtype, root), source, output), async_op)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        self._check_rank(root)
        return self._collective(Contribution("reduce", (tensor.dtype, root, op), tensor, tensor), async_op)

    def send(self, tensor: torch.Tensor, to: int, *, async_op: bool = False) -> AsyncCall | None:
        self._check_rank(to, other=True)
        self._world._send(self.rank, to, tensor)
        return _FakeAsyncCall(lambda: None) if async_op else None

    def recv(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> AsyncCall | None:
        self._check_rank(source, other=True)
        return _started(self._world._receive(self.rank, source, tensor), async_op)

    def barrier(self) -> None:
        self._collective(Contribution("barrier", ()), async_op=False)

    def _collective(self, part: Contribution, async_op: bool) -> AsyncCall | None:
        return _started(self._world._join(self.rank, part), async_op)

    def _splits(self, name: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> tuple[int, ...]:
        rows = tensor.shape[0]
        if splits is None:
            if rows % self.size:
                raise TensorError(
                    f"rank {self.rank}: {name} has {rows} rows, which {self.size} ranks cannot share equally"
                )
            return (rows // self.size,) * self.size
        if len(splits) != self.size or min(splits) < 0 or sum(splits) != rows:
            raise TensorError(
                f"rank {self.rank}: {name}_splits: expected {self.size} counts of {rows} rows together, got {list(splits)}"
            )
        return tuple(splits)

    def _check_blocks(self, name: str, whole: torch.Tensor | None, block: torch.Tensor) -> None:
        if whole is None or whole.numel() != self.size * block.numel() or whole.dtype != block.dtype:
            got = "None" if whole is None else f"{whole.numel()} {whole.dtype}"
            raise TensorError(
                f"rank {self.rank}: {name}: expected {self.size} blocks of {block.numel()} {block.dtype}, got {got}"
            )

    def _check_rank(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            which = f"another rank than {rank}" if other and rank == self.rank else f"a rank from 0 to {self.size - 1}"
            raise UsageError(f"rank {self.rank}: expected {which}, got {rank}")


def _started(pending: _FakeAsyncCall, async_op: bool) -> AsyncCall | None:
    if async_op:
        return pending
    pending.wait()
    return None

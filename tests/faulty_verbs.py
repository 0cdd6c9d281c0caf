"""Faults on purpose: a communicator that fails, is late or lies at a chosen call of a chosen rank.

    verbs = FaultyVerbs(verbs, fail_at(rank=1, call=3))
    verbs = FaultyVerbs(verbs, wrong_bytes_at(rank=0, call="all_to_all"))
    …
    verbs.assert_fired()      # a fault that never struck proves nothing

A call is its number on that rank, counted from 0 over all verbs, or the name of a verb: every call of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from commlayer.profiles.errors import ClusterError, UsageError
from commlayer.testing.verbs_contract import AsyncCall, ReduceOp, Verbs
from commlayer.transport.call_memory import as_row

__all__ = ["Fault", "FaultyVerbs", "InjectedFault", "delay_at", "fail_at", "wrong_bytes_at"]

_VERBS = (
    *("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast"),
    *("gather", "scatter", "reduce", "send", "recv", "barrier"),
)


class InjectedFault(ClusterError):
    """The error that a `fail_at` raises: the rank's call fails before anything was moved."""


@dataclass
class Fault:
    """One fault; made by `fail_at`, `delay_at` and `wrong_bytes_at`. ``num_fired`` counts how often it struck."""

    kind: Literal["fail", "delay", "wrong_bytes"]
    rank: int
    call: int | str
    seconds: float = 0.0
    num_fired: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.call, str) and self.call not in _VERBS:
            raise UsageError(f"call: expected a number or one of {', '.join(_VERBS)}, got {self.call!r}")

    def __str__(self) -> str:
        return f"{self.kind} at rank {self.rank}, call {self.call}"


def fail_at(rank: int, call: int | str) -> Fault:
    """Make that call of that rank raise `InjectedFault`; its peers are left waiting, as for a rank that died."""
    return Fault("fail", rank, call)


def delay_at(rank: int, call: int | str, seconds: float) -> Fault:
    """Make that rank come ``seconds`` late to that call."""
    return Fault("delay", rank, call, seconds)


def wrong_bytes_at(rank: int, call: int | str) -> Fault:
    """Flip one bit of what that rank gets from that call, in the last element; nothing is raised.

    Has no effect, and does not count as fired, where the rank gets nothing (no elements, `send`, `barrier`).
    """
    return Fault("wrong_bytes", rank, call)


class FaultyVerbs:
    """A communicator with faults: ``inner``, unless a fault strikes. See `Verbs` for what each method does.

    Every rank may be given all faults: each strikes on its own rank only. `InjectedFault` is the only new error.
    """

    def __init__(self, inner: Verbs, *faults: Fault) -> None:
        self._inner, self._faults, self._num_calls = inner, faults, 0
        for fault in faults:
            if not 0 <= fault.rank < inner.size:
                raise UsageError(f"{fault}: expected a rank from 0 to {inner.size - 1}")

    def assert_fired(self) -> None:
        """Raise AssertionError where a fault of this rank never struck."""
        silent = [str(fault) for fault in self._faults if fault.rank == self.rank and not fault.num_fired]
        if silent:
            raise AssertionError(
                f"rank {self.rank} made {self._num_calls} calls, and these faults never struck: {'; '.join(silent)}"
            )

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> AsyncCall | None:
        return self._call("all_to_all", output, output, source, output_splits, source_splits, async_op=async_op)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, async_op: bool = False) -> AsyncCall | None:
        return self._call("all_gather", output, output, source, async_op=async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call("reduce_scatter", output, output, source, op, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum", *, async_op: bool = False) -> AsyncCall | None:
        return self._call("all_reduce", tensor, tensor, op, async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, root: int, *, async_op: bool = False) -> AsyncCall | None:
        return self._call("broadcast", tensor, tensor, root, async_op=async_op)

    def gather(
        self, output: torch.Tensor | None, source: torch.Tensor, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call("gather", output, output, source, root, async_op=async_op)

    def scatter(
        self, output: torch.Tensor, source: torch.Tensor | None, root: int, *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call("scatter", output, output, source, root, async_op=async_op)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum", *, async_op: bool = False
    ) -> AsyncCall | None:
        return self._call("reduce", tensor if self.rank == root else None, tensor, root, op, async_op=async_op)

    def send(self, tensor: torch.Tensor, to: int, *, async_op: bool = False) -> AsyncCall | None:
        return self._call("send", None, tensor, to, async_op=async_op)

    def recv(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> AsyncCall | None:
        return self._call("recv", tensor, tensor, source, async_op=async_op)

    def barrier(self) -> None:
        self._call("barrier", None)

    def _call(self, verb: str, result: torch.Tensor | None, *arguments: object, **how: bool) -> AsyncCall | None:
        """Call the inner communicator's ``verb``; ``result`` is the argument that holds what this rank gets, if it gets any."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        due = [fault for fault in self._faults if fault.rank == self.rank and fault.call in (number, verb)]
        for fault in due:
            if fault.kind == "delay":
                fault.num_fired += 1
                time.sleep(fault.seconds)
            elif fault.kind == "fail":
                fault.num_fired += 1
                raise InjectedFault(f"rank {self.rank}: {verb}, call {number}: failed on purpose")
        pending: AsyncCall | None = getattr(self._inner, verb)(*arguments, **how)
        lies = [fault for fault in due if fault.kind == "wrong_bytes"]
        if not lies or result is None or not result.numel():
            return pending
        for fault in lies:
            fault.num_fired += 1
        if pending is None:
            _flip_bit(result)
            return None
        return _LyingAsyncCall(pending, result)


class _LyingAsyncCall:
    """Falsifies the result when it is there."""

    def __init__(self, inner: AsyncCall, result: torch.Tensor) -> None:
        self._inner, self._result, self._told = inner, result, False

    def wait(self) -> object:
        value = self._inner.wait()
        if not self._told:
            self._told = True
            _flip_bit(self._result)
        return value


def _flip_bit(tensor: torch.Tensor) -> None:
    """The lowest bit of the last element: a value that is a little wrong, also for bool."""
    last = as_row(tensor.view(-1)[-1:]).view(torch.uint8)
    last[0] ^= 1

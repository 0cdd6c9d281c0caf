"""Calls of one process group that move rows, as model code makes them and without autograd: by a
plan in a wire format where a policy allows one, else natively.

A verb in memory of its own returns what it started, whose output is waited for; a verb with
``_into`` or ``_in_place`` works in memory that the caller has, and returns the call's work. Outputs
are contiguous. In a wire format sums are FP32, in an order that does not depend on the run, and all
ranks hold the same bits. In a group of one rank a result is its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.calls.movement import Movement
from commlayer.engine.progress import DONE
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.scheduler.plan import Span
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.wire import WirePolicy
from commlayer.transfers import Pending
from commlayer.transport.c10d import all_gather_single, reduce_scatter_single
from commlayer.transport.call_memory import plain
from commlayer.wire_decider import WireDecider, row_elements

__all__ = ["IN_PLACE", "Everyones", "RowCalls", "Rows", "nodes_of"]

IN_PLACE = "in_place leaves its input undefined, which autograd may still need: leave it out here"
Rows = Sequence[int] | None
"""How many rows each rank has; None: all as many."""
Everyones = Sequence[Sequence[int]] | None
"""The rows that each rank sends to each other one."""


def nodes_of(group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of ``group`` on each node, in its order; None: of this rank alone."""
    alone = tuple(range(1 if group is None else group.size()))
    nodes: tuple[tuple[int, ...], ...] = getattr(group, "nodes", (alone,))
    return nodes


class RowCalls:
    """The calls of ``group`` under one policy of wire formats.

    ``group`` None: this rank's alone. ``policy`` None: all go in their own format. ``name``: what
    they carry, for messages.
    """

    def __init__(self, group: dist.ProcessGroup | None, policy: WirePolicy | None, name: str) -> None:
        self._group = group
        self._rank, self._size = (0, 1) if group is None else (group.rank(), group.size())
        self._checks = _Checks(name, self._rank, self._size)
        self.wire: WireDecider | None = None
        """Decides the format in which each call goes; None: all go in their own."""
        if group is not None and self._size > 1 and policy is not None and policy.allows_encoding:
            self.wire = WireDecider(group, policy, name)

    def all_to_all(
        self,
        x: torch.Tensor,
        send_rows: Rows,
        receive_rows: Rows,
        most_rows: int | None = None,
        over: Span = Span.GROUP,
        everyones: Everyones = None,
    ) -> Pending:
        """Start what :meth:`commlayer.collectives.GroupCommunicator.all_to_all` says, and likewise
        for the next two."""
        self._checks.rows("all_to_all", x, send_rows)
        x = x.detach().contiguous()
        if self._size == 1:
            return Pending(x, None)
        wire, native = self.wire, None
        rows = x.shape[0] if receive_rows is None else sum(receive_rows)
        out = x.new_empty(rows, *x.shape[1:])
        if over is not Span.GROUP:
            native = self._over(out, x, send_rows, receive_rows, most_rows, over)
            wire = wire if over is Span.RAIL else None
        elif everyones is not None and not x.is_cpu:
            start = getattr(self._group, "start_known_exchange", None)
            if start is not None:  # else by the group's own call, which wants no counts
                row_bytes = _row_bytes(x)
                counts = tuple(tuple(count * row_bytes for count in row) for row in everyones)
                own_rows = everyones[self._rank], [row[self._rank] for row in everyones]
                native = partial(start, x, out, own_rows, counts)
        return Pending(out, self._exchange(out, x, send_rows, receive_rows, wire, most_rows, native), sent=x)

    def _over(
        self, out: torch.Tensor, x: torch.Tensor, send_rows: Rows, receive_rows: Rows, most_rows: int | None, over: Span
    ) -> Callable[[], Any] | None:
        """The start of an all_to_all among the ranks of each rail or node; None: the group's own
        call, which sends nothing to the others either.

        Raises TensorError for rows to or from ranks that are not among them.
        """
        if send_rows is None or receive_rows is None or most_rows is None:
            why = f"over {over.value} every rank says send_rows, receive_rows and most_rows"
            raise self._checks.error("all_to_all", why)
        self._checks.counts("all_to_all", receive_rows)
        nodes = nodes_of(self._group)
        here = next(members for members in nodes if self._rank in members)
        among = here if over is Span.NODE else [members[here.index(self._rank)] for members in nodes]
        outside = [k for k in range(self._size) if k not in among and (send_rows[k] or receive_rows[k])]
        if outside:
            raise self._checks.error(
                "all_to_all",
                f"over {over.value} rank {self._rank} of the group exchanges rows with ranks {list(among)}, got rows "
                f"for {outside}",
            )
        start = getattr(self._group, "start_planned", None)
        if start is None or not (x.is_cpu or cast("Any", self._group).plans_on_device(x)):
            return None  # what is in parts goes as the group's own call
        row_bytes = _row_bytes(x)
        splits = [count * row_bytes for count in send_rows], [count * row_bytes for count in receive_rows]
        plan = exchange_over(over, tuple(map(len, nodes)), most_rows * row_bytes)
        return partial(start, Movement(plan, x, out, "over", splits=splits))

    def all_gather(self, x: torch.Tensor, rows: Rows) -> Pending:
        self._checks.counts("all_gather", rows)
        if x.dim() == 0:
            raise self._checks.error("all_gather", "expected rows, got a tensor without dimensions: view it as [1]")
        if rows is not None and x.shape[:1] != (rows[self._rank],):
            raise self._checks.error("all_gather", f"expected {rows[self._rank]} rows, got shape {list(x.shape)}")
        x = x.detach().contiguous()
        if self._size == 1:
            return Pending(x, None)
        total = x.shape[0] * self._size if rows is None else sum(rows)
        out = x.new_empty(total, *x.shape[1:])
        return Pending(out, self.all_gather_into(out, x, rows), sent=x)

    def reduce_scatter(self, x: torch.Tensor, rows: Rows) -> Pending:
        own_rows = self._checks.rows("reduce_scatter", x, rows)
        if self.wire is not None and self.wire.policy.in_place:
            raise UsageError(f"{self._checks.who('reduce_scatter')}: {IN_PLACE}")
        x = x.detach().contiguous()
        if self._size == 1:
            return Pending(x, None)
        out = x.new_empty(own_rows, *x.shape[1:])
        return Pending(out, self.reduce_scatter_into(out, x, rows), sent=x)

    def all_reduce_in_place(self, x: torch.Tensor) -> dist.Work:
        """See :meth:`commlayer.collectives.GroupCommunicator.all_reduce_in_place`, and likewise for
        the next three."""
        self._checks.output("all_reduce", x, x, x.numel())
        x = x.detach()
        if self._group is None:
            return DONE
        plan = None if self.wire is None else self.wire.plan("all_reduce", x, x.nbytes, x)
        if plan is not None and self.wire is not None:
            return self.wire.start(plan, x, x, None)
        return cast("dist.Work", dist.all_reduce(x, group=self._group, async_op=True))

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        own_rows = self._checks.rows("reduce_scatter", x, rows)
        self._checks.output("reduce_scatter", out, x, own_rows * row_elements(x))
        wire = self.wire
        if wire is not None and wire.policy.in_place:
            return wire.start_in_place(out, x, _block_bytes(x, rows, self._size))
        out, x = out.detach(), plain(x)
        if self._group is None:
            return _copied(out, x)
        plan = None if wire is None else wire.plan("reduce_scatter", x, x.nbytes, x)
        if plan is not None and wire is not None:
            return wire.start(plan, out, x, _block_bytes(x, rows, self._size))
        if rows is None or len(set(rows)) == 1:
            return cast("dist.Work", reduce_scatter_single(out, x, group=self._group, async_op=True))
        return cast("dist.Work", dist.reduce_scatter(out, list(x.split(list(rows))), group=self._group, async_op=True))

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        own_rows = self._checks.rows("all_gather", out, rows)
        if x.numel() != own_rows * row_elements(out):
            raise self._checks.error(
                "all_gather",
                f"into {list(out.shape)}, rows {rows}, expected this rank's rows, got shape {list(x.shape)}",
            )
        self._checks.output("all_gather", out, x, out.numel())
        out, x, wire = out.detach(), plain(x), self.wire
        if self._group is None:
            return _copied(out, x)
        plan = None if wire is None else wire.plan("all_gather", x, out.nbytes, out)
        if plan is not None and wire is not None:
            return wire.start(plan, out, x, _block_bytes(out, rows, self._size))
        if rows is None or len(set(rows)) == 1:
            return cast("dist.Work", all_gather_single(out, x, group=self._group, async_op=True))
        return cast("dist.Work", dist.all_gather(list(out.split(list(rows))), x, group=self._group, async_op=True))

    def all_to_all_into(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        most_rows: int | None = None,
    ) -> dist.Work:
        self._checks.rows("all_to_all", x, send_rows)
        self._checks.rows("all_to_all", out, receive_rows)
        self._checks.output("all_to_all", out, x, out.numel())
        if row_elements(out) != row_elements(x):
            why = f"rows of {row_elements(x)} elements into rows of {row_elements(out)}"
            raise self._checks.error("all_to_all", why)
        return self._exchange(out.detach(), plain(x), send_rows, receive_rows, self.wire, most_rows)

    def _exchange(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        send_rows: Rows,
        receive_rows: Rows,
        wire: WireDecider | None,
        most_rows: int | None,
        native: Callable[[], Any] | None = None,
    ) -> dist.Work:
        """``native``: starts the call where nothing is encoded; None: as one of the group's own."""
        if self._group is None:
            return _copied(out, x)
        if wire is not None:
            most_rows = wire.agree_rows(x, out) if most_rows is None else most_rows
            plan = wire.plan("all_to_all_v", x, _rounded(most_rows) * _row_bytes(x), x)
            if plan is not None:
                splits = _block_bytes(x, send_rows, self._size), _block_bytes(out, receive_rows, self._size)
                return wire.start(plan, out, x, splits=splits)
        if native is not None:
            return cast("dist.Work", native())
        outs = None if receive_rows is None else list(receive_rows)
        ins = None if send_rows is None else list(send_rows)
        return cast("dist.Work", dist.all_to_all_single(out, x, outs, ins, group=self._group, async_op=True))


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of what the rank ``rank`` of a group of ``size`` is called with."""

    name: str
    rank: int
    size: int

    def output(self, verb: str, out: torch.Tensor, x: torch.Tensor, numel: int) -> None:
        """Check that ``out`` can take the result as it is. Raises TensorError."""
        if out.dtype != x.dtype or out.device != x.device or out.numel() != numel or not out.is_contiguous():
            raise self.error(
                verb,
                f"a tensor of {x.dtype} on {x.device} needs a contiguous output of {numel} elements of the same, got "
                f"shape {list(out.shape)}, strides {list(out.stride())}, {out.dtype} on {out.device}",
            )

    def rows(self, verb: str, x: torch.Tensor, rows: Rows) -> int:
        """Check that ``x`` has these rows; return how many of them are this rank's. Raises TensorError."""
        if rows is None:
            if x.dim() == 0 or x.shape[0] % self.size:
                raise self.error(verb, f"{self.size} must divide the rows, got shape {list(x.shape)}: name them")
            return x.shape[0] // self.size
        self.counts(verb, rows)
        if x.shape[:1] != (sum(rows),):
            raise self.error(verb, f"rows {list(rows)} are {sum(rows)} together, got shape {list(x.shape)}")
        return rows[self.rank]

    def counts(self, verb: str, rows: Rows) -> None:
        """Check that there is a count for each rank, and none negative. Raises TensorError."""
        if rows is not None and (len(rows) != self.size or min(rows) < 0):
            raise self.error(
                verb, f"expected {self.size} counts of rows, none negative, one for each rank; got {list(rows)}"
            )

    def error(self, verb: str, why: str) -> TensorError:
        return TensorError(f"{self.who(verb)}: {why}")

    def who(self, verb: str) -> str:
        where = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        return f"{where}{verb} on {self.name}"


def _copied(out: torch.Tensor, x: torch.Tensor) -> dist.Work:
    """The call of a group of this rank alone."""
    out.view(-1).copy_(x.view(-1))
    return DONE


def _block_bytes(x: torch.Tensor, rows: Rows, size: int) -> tuple[int, ...]:
    """Bytes of each rank's rows of ``x``, which has those of all ``size`` ranks."""
    rows = (x.shape[0] // size,) * size if rows is None else rows
    return tuple(count * _row_bytes(x) for count in rows)


def _rounded(count: int) -> int:
    """``count``, rounded up to three leading bits: sizes that are a fifth apart, at most, are
    planned alike, and not anew in each call."""
    bits = max(0, count.bit_length() - 3)
    return -(-count >> bits) << bits


def _row_bytes(x: torch.Tensor) -> int:
    return row_elements(x) * x.element_size()

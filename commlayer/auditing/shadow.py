"""``COMMLAYER_SHADOW``: one in so many planned calls of a group runs flat too, and both results are
compared.

Which calls is counted, alike on all ranks. A difference on one rank is told to all before any of
them goes on, in the order of the group's calls: from the same call on none of them plans again, and
the caller has the right result. docs/shadow.md says more.

Rejected: keeping the tensors of such a call in files, and a command that runs its plan on them
again; and naming the step of the plan that brought the element. The suite and the fence compare
the bits that every plan gives in memory, and the warning names plan, call, rank and first element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from time import perf_counter_ns as now
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)

from commlayer.auditing.comparing import (
    Allowance,
    ResultDifference,
    compare_results,
    is_sampled,
    memory_of,
    sizes_of,
)
from commlayer.auditing.ledger import Ledger
from commlayer.calls.counters import Row
from commlayer.calls.instruments import Instrument, NewGroup
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.failures.waits import bounded_reduce_scatter
from commlayer.profiles.counted import listed
from commlayer.profiles.printable import warn
from commlayer.scheduler.plan import Plan

__all__ = ["Shadow"]

_MOST_NAMED = 4
_REASON = "a planned call differed from flat (COMMLAYER_SHADOW)"


class Shadow(Instrument):
    """Compares one in ``every`` planned calls of a group; in its order, on the thread that runs
    them. ``is_over``: a call has differed, and no plan of the group is used any more, which
    ``ledger`` is told.
    """

    lets_pass = True

    def __init__(self, group: NewGroup, every: int, ledger: Ledger | None) -> None:
        self._order, self._calls, self._counters = group.order, group.calls, group.counters
        self._every, self._ledger = every, ledger
        self.count = self.num_compared = 0
        self.is_over = False
        self._sample: _Sample | None = None

    def moving(self, call: Call, movement: Movement) -> None:
        """Count a planned call; copy the input of one that is to be compared."""
        self._sample = self.before(movement)
        call.is_awaited = self._sample is not None

    def moved(self, call: Call) -> None:
        """Compare the result of a planned call whose input was copied."""
        del call
        sample, self._sample = self._sample, None
        if sample is not None and sample.flat.movement.target.is_cpu:
            sample.check()
        elif sample is not None:
            self._order.in_turn(f"shadow of {sample.flat.plan.name}", sample.check)

    def ended(self, call: Call) -> None:
        """Let go of the input of a call that failed."""
        del call
        self._sample = None

    def before(self, movement: Movement) -> _Sample | None:
        """Count a planned call; for one that is to be compared, copy its input."""
        number, self.count = self.count, self.count + 1
        if not is_sampled(number, self._every):
            return None
        self.num_compared += 1
        return _Sample(self, self._order, _Flat(self._order, movement), number)

    def instead(self, movement: Movement) -> None:
        """Run a call flat whose plan was chosen before :attr:`is_over` was known."""
        started, planned = now(), self._order.inner.planned

        def run() -> None:
            with torch._C._InferenceMode(True):
                memory_of(movement.target).copy_(_Flat(self._order, movement).run())

        try:
            if movement.target.is_cpu:
                run()
            else:
                self._order.in_turn("a call without its plan", run)
        except BaseException as error:
            planned.tell(error)
            raise
        row = self._counters.flat[movement.plan.traffic.collective]
        row.add(movement.source.nbytes, now() - started, Row.UNKNOWN, 0)

    def stop(self, why: str) -> None:
        """Use no plan of the group any more. On all ranks, between the same calls."""
        self.is_over = True
        self._order.inner.planned.choices.reasons[_REASON] += 1
        self._calls.stop_planning(self.instead)
        if self._ledger is not None:
            self._ledger.happened(self.count, why)


class _Sample(NamedTuple):
    """A call that is compared: ``number`` among the planned ones, and the flat call with a copy of
    its input."""

    shadow: Shadow
    order: Any
    flat: _Flat
    number: int

    def check(self) -> None:
        """Compare the plan's result with that of the backend's own call. Collective.

        Where any rank's differs, all ranks go on flat, and each gets the own call's result. Raises
        as calls do.
        """
        try:
            with torch._C._InferenceMode(True):
                self._check()
        except BaseException as error:
            self.order.inner.planned.tell(error)
            raise

    def _check(self) -> None:
        flat = self.flat
        got, expected = memory_of(flat.movement.target).cpu(), flat.run()
        difference = compare_results(got, expected, flat.dtype, flat.allowance())
        verdict = torch.tensor([difference.num_wrong], dtype=torch.int64)
        flat.reduce(verdict, ReduceOp.MAX)
        if not int(verdict):
            return
        reports = self._gather(difference, got, expected)
        memory_of(flat.movement.target).copy_(expected)
        members = self.order.members
        what = f"planned call {self.number}: {flat.collective} by {flat.plan.name} differs from flat"
        event = f"group {members.name}, {what} {_in_words(reports, flat.dtype, members.global_ranks)}"
        self.shadow.stop(event)
        if members.rank == 0:
            warn(
                f"commlayer: {event}. This call has flat's result, and the group goes on flat. Run the job again: where "
                "this plan is named again, please report it; else check the memory and links of these ranks",
                stacklevel=2,
            )

    def _gather(self, difference: ResultDifference, got: torch.Tensor, expected: torch.Tensor) -> list[_Report]:
        """Have all ranks tell each other how their results differ."""
        width = self.flat.dtype.itemsize
        report = torch.zeros(len(_Report._fields), dtype=torch.int64)
        report[0], report[1] = difference
        if difference.first >= 0 and width <= 8:
            element = slice(difference.first * width, (difference.first + 1) * width)
            report[2:3].view(torch.uint8)[:width] = got[element]
            report[3:4].view(torch.uint8)[:width] = expected[element]
        return [_Report(*row) for row in self.flat.gather(report).view(self.flat.size, -1).tolist()]


class _Report(NamedTuple):
    """How a rank's result differs: its first wrong element, −1 for none, and how many are; and the
    bits of both its values, where they have 64 at most."""

    first: int
    num_wrong: int
    got_bits: int
    flat_bits: int


class _Flat:
    """The backend's own call that gives what a planned one should, on a copy of that one's input.

    Attributes:
        movement: that of the planned call.
        plan, collective: of the planned call.
        dtype: of its elements.
        size: how many ranks make it.
    """

    def __init__(self, order: Any, movement: Movement) -> None:
        self._order, self._gloo = order, order.inner.gloo
        self._input = memory_of(movement.source).clone() if movement.source.is_cpu else memory_of(movement.source).cpu()
        self.movement = movement
        self.plan: Plan = movement.plan
        self.collective = self.plan.traffic.collective
        self.dtype: torch.dtype = movement.source.dtype if movement.dtype is None else movement.dtype
        self.size: int = order.members.size

    def run(self) -> torch.Tensor:
        """Make the call, and return its result in bytes."""
        if self.movement.splits[0] or self.movement.splits[1]:
            sent, received = map(list, self.movement.splits)
            result = torch.empty(sum(received), dtype=torch.uint8)
            data = self._input if self.movement.codec is None else self._rounded(sent)
            self._call(self._gloo.alltoall_base, result, data, received, sent, options=AllToAllOptions())
            return result
        if self.collective == "all_gather":
            return self._gathered()
        if self.collective == "broadcast":
            result, options = self._input.clone(), BroadcastOptions()
            options.rootRank = self.movement.root
            self._call(self._gloo.broadcast, [result], options=options)
            return result
        return self._reduced()

    def allowance(self) -> Allowance | None:
        """How far the plan's result may be from this one; None where all bits must be the same.
        Collective over the group for sums of floating point, whose bound follows from the sizes of
        all terms."""
        if self.collective not in ("all_reduce", "reduce_scatter") or not self.dtype.is_floating_point:
            return None
        movement, plan = self.movement, self.plan
        op = ReduceOp.PRODUCT if movement.op == "product" else ReduceOp.SUM
        sizes = [self.reduce(each, op) for each in sizes_of(self._input.view(self.dtype), movement.op)]
        magnitude, *smallest = map(self._own_part, sizes)
        return Allowance(
            op=movement.op,
            num_terms=self.size,
            dtype=self.dtype,
            magnitude=magnitude,
            smallest=smallest[0] if smallest else None,
            wire=plan.wire,
            is_result_encoded=self.collective == "all_reduce" and not plan.wire.is_native,
        )

    def reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """All_reduce ``tensor`` in place, by Gloo, and return it."""
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(op)
        self._call(self._gloo.allreduce, [tensor], options=options)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors [s] of all ranks, [n·s], by Gloo."""
        everyones = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype)
        self._call(self._gloo._allgather_base, everyones, tensor, options=AllgatherOptions())
        return everyones

    def _rounded(self, blocks: Sequence[int]) -> torch.Tensor:
        """The input after encoding and decoding; of an exchange what leaves the node, or of a
        single node the rank."""
        codec, rank, nodes = self.movement.codec, self._order.members.rank, self._order.inner.planned.nodes
        near = (rank,) if len(nodes) == 1 else next(node for node in nodes if rank in node)
        edges, rounded = [0, *accumulate(blocks)], self._input.clone()
        for member, (start, stop) in enumerate(pairwise(edges)):
            if start == stop or (member in near and self.collective != "all_gather"):
                continue
            rows = rounded[start:stop].view(codec.dtype).view(-1, codec.wire.row_elements)
            coded = torch.empty(codec.wire.wire_bytes(len(rows)), dtype=torch.uint8)
            codec.encode(rows, coded)
            codec.decode(coded, rows)
        return rounded

    def _gathered(self) -> torch.Tensor:
        num_bytes = self._input.numel()
        data = self._input if self.movement.codec is None else self._rounded([num_bytes])
        blocks = self.movement.blocks or (num_bytes,) * self.size
        widest = max(blocks)
        padded = data if num_bytes == widest else torch.zeros(widest, dtype=torch.uint8)
        padded[:num_bytes] = data
        result = self.gather(padded)
        if len(set(blocks)) == 1:
            return result
        rows = zip(result.view(self.size, widest), blocks, strict=True)
        return torch.cat([row[:block] for row, block in rows])

    def _reduced(self) -> torch.Tensor:
        op, terms = getattr(ReduceOp, self.movement.op.upper()), self._input.view(self.dtype)
        is_whole = self.movement.kind == "whole"
        if is_whole and self.collective == "reduce_scatter":
            result = torch.empty(terms.numel() // self.size, dtype=terms.dtype)
            options = ReduceScatterOptions()
            options.reduceOp = ReduceOp(op)
            self._call(bounded_reduce_scatter, self._gloo, result, terms, options=options)
        else:  # in a wire format sums are FP32, and rows need not be as many on each rank
            dtype = self.dtype if is_whole else torch.float32
            total = self.reduce(terms.to(dtype, copy=True), op)
            result = self._own_part(total.to(terms.dtype)).contiguous()
        return memory_of(result)

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements that this rank gets of a tensor as long as the input of a sum."""
        if self.collective != "reduce_scatter":
            return whole
        rank, width, size = self._order.members.rank, self.dtype.itemsize, self.size
        blocks = self.movement.blocks or (self.plan.traffic.logical_bytes // size,) * size
        start = sum(blocks[:rank]) // width
        return whole[start : start + blocks[rank] // width]

    def _call(self, call: Callable[..., Work], *args: Any, options: Any) -> None:
        """Make a call of Gloo's, within the group's timeout, and wait for its end."""
        options.timeout = self._order.inner.timeout
        self._order.settle_own(f"shadow of {self.plan.name}", call(*args, options))


def _in_words(reports: Sequence[_Report], dtype: torch.dtype, global_ranks: Sequence[int]) -> str:
    """Which ranks' results differ, and where; behind "differs from flat"."""
    wrong = [member for member, report in enumerate(reports) if report.num_wrong]
    lead = min(wrong, key=lambda member: (reports[member].first, member))
    report, values = reports[lead], ""
    if dtype.itemsize <= 8:
        bits = torch.tensor([report.got_bits, report.flat_bits]).view(torch.uint8).view(2, 8)
        got, expected = (each[: dtype.itemsize].clone().view(dtype).item() for each in bits)
        values = f" ({got!r}, flat {expected!r})"
    return (
        f"on {listed('rank', (global_ranks[member] for member in wrong), _MOST_NAMED)}: first in element {report.first} of "
        f"rank {global_ranks[lead]}{values}, {report.num_wrong} in all"
    )

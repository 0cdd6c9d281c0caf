"""``COMMLAYER_SHADOW``: one in so many planned calls of a group runs flat too, and both results are compared.

Which calls is counted, alike on all ranks. What is found on one rank is told to all before any of them goes on, in the order of
the group's calls: from the same call on none of them plans again, and the caller has the right result. docs/shadow.md says more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any

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

from commlayer.auditing.comparing import ResultDifference, compare_results, is_sampled, sizes_of
from commlayer.auditing.ledger import Ledger
from commlayer.auditing.retracing import Hop, suspects
from commlayer.auditing.saved_calls import CallShape, SavedCall, SavedHeader, write_call
from commlayer.calls.counters import Row
from commlayer.calls.instruments import Instrument, NewGroup
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call
from commlayer.engine.encoded import RowCoder
from commlayer.engine.plain import as_bytes
from commlayer.failures.waits import bounded_reduce_scatter
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable, warn
from commlayer.scheduler.call_moves import everyones_moves
from commlayer.scheduler.plan import Plan

__all__ = ["Shadow"]

_MOST_NAMED = 4
_KEPT_OF_NAME = 40
_REASON = "a planned call differed from flat (COMMLAYER_SHADOW)"


class Shadow(Instrument):
    """Compares one in ``every`` planned calls of a group; in its order, on the thread that runs them. ``is_over``: a call has
    differed, and no plan of the group is used any more, which ``ledger`` is told.
    """

    lets_pass = True

    def __init__(self, group: NewGroup, every: int, ledger: Ledger | None) -> None:
        self._order, self._calls, self._counters = group.order, group.calls, group.counters
        self._every, self._ledger = every, ledger
        self.count = self.num_compared = 0
        self.is_over = False
        self._sample: _Sample | None = None

    def moving(self, call: Call, movement: Movement) -> None:
        """Count a planned call; of one that is to be compared, keep what goes into it."""
        self._sample = self.before(movement)
        call.is_awaited = self._sample is not None

    def moved(self, call: Call) -> None:
        """Compare the result of a planned call that was kept."""
        del call
        sample, self._sample = self._sample, None
        if sample is not None and sample.call.target.is_cpu:
            sample.check()
        elif sample is not None:
            self._order.in_turn(f"shadow of {sample.call.plan.name}", sample.check)

    def ended(self, call: Call) -> None:
        """Let go of what a call that failed has left."""
        del call
        self._sample = None

    def before(self, call: Movement) -> _Sample | None:
        """Count a planned call; for one that is to be compared, keep what goes into it."""
        number, self.count = self.count, self.count + 1
        if not is_sampled(number, self._every):
            return None
        self.num_compared += 1
        return _Sample(self, self._order, call, number, _copied(call.source))

    def instead(self, call: Movement) -> None:
        """Run a call flat whose plan was chosen before :attr:`is_over` was known."""
        started, planned = now(), self._order.inner.planned

        def run() -> None:
            with torch._C._InferenceMode(True):
                flat, _ = _Flat(self._order, call, _copied(call.source)).run(needs_sizes=False)
                _land(flat, call.target)

        try:
            if call.target.is_cpu:
                run()
            else:
                self._order.in_turn("a call without its plan", run)
        except BaseException as error:
            planned.tell(error)
            raise
        row = self._counters.flat[call.plan.traffic.collective]
        row.add(call.source.nbytes, now() - started, Row.UNKNOWN, 0)

    def stop(self, said: str) -> None:
        """Use no plan of the group any more. On all ranks, between the same calls."""
        self.is_over = True
        self._order.inner.planned.choices.reasons[_REASON] += 1
        self._calls.stop_planning(self.instead)
        if self._ledger is not None:
            self._ledger.happened(self.count, said)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, 1-D; those of a device's copied, for which the host waits."""
    if x.is_cpu:
        return as_bytes(x.detach())
    return x.data.as_strided((x.numel(),), (1,)).view(torch.uint8).cpu()


def _copied(x: torch.Tensor) -> torch.Tensor:
    return _on_host(x).clone() if x.is_cpu else _on_host(x)


def _land(flat: torch.Tensor, target: torch.Tensor) -> None:
    """Put these bytes where a result is wanted."""
    if target.is_cpu:
        as_bytes(target.detach()).copy_(flat)
    else:
        target.data.as_strided((target.numel(),), (1,)).view(torch.uint8).copy_(flat)


@dataclass(frozen=True)
class _Sample:
    """A call that is compared: its ``number`` among the planned ones, and its input as it was, in bytes."""

    shadow: Shadow
    order: Any
    call: Movement
    number: int
    given: torch.Tensor

    def check(self) -> None:
        """Compare what the plan has given with what the backend's own call gives. Collective.

        Where any rank's differs, all ranks go on flat, and each gets the own call's result. Raises as calls do.
        """
        try:
            with torch._C._InferenceMode(True):
                self._check()
        except BaseException as error:
            self.order.inner.planned.tell(error)
            raise

    def _check(self) -> None:
        shape, got = _shape(self.order, self.call), _on_host(self.call.target)
        flat, sizes = _Flat(self.order, self.call, self.given).run(needs_sizes=shape.is_float_sum)
        found = compare_results(got, flat, shape.torch_dtype, shape.allowance(sizes))
        verdict = torch.tensor([found.num_wrong], dtype=torch.int64)
        _Flat(self.order, self.call, self.given).reduce(verdict, ReduceOp.MAX)
        if int(verdict):
            self._differs(shape, found, got, flat)

    def _differs(self, shape: CallShape, found: ResultDifference, got: torch.Tensor, flat: torch.Tensor) -> None:
        """On all ranks, because of one: tell all, keep the call, say so, and use no plan of the group from now on."""
        told = self._tell(shape, found, got, flat)
        folder = self._folder(told)
        what = _Report(shape, self.call.plan, self.order.members.global_ranks, told).text()
        name, traffic = self.order.members.name, self.call.plan.traffic
        said = f"group {name}, planned call {self.number}: {traffic.collective} by {self.call.plan.name} differs from flat {what}"
        kept = self._keep(folder, shape, found, printable(said), got, flat)
        _land(flat, self.call.target)
        self.shadow.stop(said)
        if self.order.members.rank == 0:
            warn(
                f"commlayer: {said}. This call has flat's result, and the group goes on flat. {kept}",
                stacklevel=2,
            )

    def _tell(
        self, shape: CallShape, found: ResultDifference, got: torch.Tensor, flat: torch.Tensor
    ) -> list[list[int]]:
        """Each rank's findings: its first wrong element and how many are, both its values as bits, its clock, and its splits."""
        size, width = shape.size, shape.torch_dtype.itemsize
        mine = torch.zeros(5 + 2 * size, dtype=torch.int64)
        mine[0], mine[1], mine[4] = found.first, found.num_wrong, time.time_ns()
        if found.first >= 0 and width <= 8:
            place = slice(found.first * width, (found.first + 1) * width)
            for nth, data in ((2, got), (3, flat)):
                mine[nth : nth + 1].view(torch.uint8)[:width] = data[place]
        sent, received = self.call.splits
        if sent:
            mine[5 : 5 + size], mine[5 + size :] = torch.tensor(sent), torch.tensor(received)
        everyones = torch.empty(size * mine.numel(), dtype=torch.int64)
        flat_call = _Flat(self.order, self.call, self.given)
        flat_call.settle(self.order.inner.gloo._allgather_base(everyones, mine, flat_call.options(AllgatherOptions)))
        return everyones.view(size, -1).tolist()

    def _folder(self, told: Sequence[Sequence[int]]) -> Path:
        from commlayer.measure.calibrate import (
            cache_folder,
        )  # numpy and scipy: not for those who only import the backend

        name = re.sub(r"[^\w-]", "_", self.order.members.name, flags=re.ASCII)[:_KEPT_OF_NAME]
        return cache_folder(self.order.inner.planned.settings) / "shadow" / f"{told[0][4]}-{name}-{self.number}"

    def _keep(
        self, folder: Path, shape: CallShape, found: ResultDifference, said: str, got: torch.Tensor, flat: torch.Tensor
    ) -> str:
        """Write this rank's file; returns what is to be said of it."""
        members, (sent, received) = self.order.members, self.call.splits
        header = SavedHeader(
            call=shape,
            group=members.name,
            number=self.number,
            made_ns=int(folder.name.partition("-")[0]),
            global_ranks=tuple(members.global_ranks),
            rank=members.rank,
            sent=tuple(sent),
            received=tuple(received),
            first=found.first,
            said=said,
        )
        try:
            write_call(folder, SavedCall(header, self.given, got, flat))
        except OSError as error:
            return f"Its inputs could not be kept: {error}"
        return f"Each rank has kept its inputs and results in {folder}: see commlayer replay {folder}"


class _Flat:
    """The backend's own call that gives what a planned one should; ``given``: its input, in bytes, which stays as it is."""

    def __init__(self, order: Any, call: Movement, given: torch.Tensor) -> None:
        self._order, self._call, self._given = order, call, given
        self._gloo: Any = order.inner.gloo

    def run(self, *, needs_sizes: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result, in bytes, and the sizes that say how far another order of sums may be off, where they are asked for."""
        call, collective = self._call, self._call.plan.traffic.collective
        if call.splits[0] or call.splits[1]:
            return self._exchanged(), []
        if collective == "all_gather":
            return self._gathered(), []
        if collective == "broadcast":
            moved, options = self._given.clone(), self.options(BroadcastOptions)
            options.rootRank = call.root
            self.settle(self._gloo.broadcast([moved], options))
            return moved, []
        return self._reduced(needs_sizes=needs_sizes)

    def _exchanged(self) -> torch.Tensor:
        sent, received = map(list, self._call.splits)
        flat = torch.empty(sum(received), dtype=torch.uint8)
        given = self._given if self._call.codec is None else self._rounded(sent)
        self.settle(self._gloo.alltoall_base(flat, given, received, sent, self.options(AllToAllOptions)))
        return flat

    def _rounded(self, blocks: Sequence[int]) -> torch.Tensor:
        """The input as it is after encoding and decoding: of an exchange what leaves the node, or of a single node the rank."""
        assert self._call.codec is not None
        members, coder = self._order.members, RowCoder(self._call.codec)
        nodes = self._order.inner.planned.nodes
        is_gather = self._call.plan.traffic.collective == "all_gather"
        near = (members.rank,) if len(nodes) == 1 else next(node for node in nodes if members.rank in node)
        edges, rounded = [0, *accumulate(blocks)], self._given.clone()
        row_bytes = coder.width * self._call.codec.dtype.itemsize
        for member, (start, stop) in enumerate(pairwise(edges)):
            if start == stop or (member in near and not is_gather):
                continue
            coded = torch.empty(self._call.codec.wire.wire_bytes((stop - start) // row_bytes), dtype=torch.uint8)
            coder.encode(rounded[start:stop], coded)
            coder.decode(coded, rounded[start:stop])
        return rounded

    def _gathered(self) -> torch.Tensor:
        shape, size = _shape(self._order, self._call), self._order.members.size
        given = self._given if self._call.codec is None else self._rounded([self._given.numel()])
        blocks = shape.blocks or (given.numel(),) * size
        widest = max(blocks)
        padded = given if given.numel() == widest else torch.zeros(widest, dtype=torch.uint8)
        padded[: given.numel()] = given
        flat = torch.empty(size * widest, dtype=torch.uint8)
        self.settle(self._gloo._allgather_base(flat, padded, self.options(AllgatherOptions)))
        if len(set(blocks)) == 1:
            return flat
        return torch.cat([row[:block] for row, block in zip(flat.view(size, widest), blocks, strict=True)])

    def _reduced(self, *, needs_sizes: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        shape = _shape(self._order, self._call)
        op, terms = getattr(ReduceOp, shape.op.upper()), self._given.view(shape.torch_dtype)
        sizes = [self.reduce(each, _product_or_sum(op)) for each in sizes_of(terms, shape.op)] if needs_sizes else []
        if shape.kind == "whole" and shape.traffic.collective == "reduce_scatter":
            flat, options = (
                torch.empty(terms.numel() // shape.size, dtype=terms.dtype),
                self.options(ReduceScatterOptions),
            )
            options.reduceOp = ReduceOp(op)
            self.settle(bounded_reduce_scatter(self._gloo, flat, terms, options))
            whole = [flat]
        else:  # in a wire format sums are FP32, and rows need not be as many on each rank
            total = self.reduce(
                terms.clone() if self._call.codec is None and shape.kind == "whole" else terms.float(), op
            )
            whole = shape.own_part([total.to(terms.dtype)], self._order.members.rank)
        return as_bytes(whole[0].contiguous()), shape.own_part(sizes, self._order.members.rank)

    def reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """All_reduce ``tensor`` in place, by Gloo, and return it."""
        options = self.options(AllreduceOptions)
        options.reduceOp = ReduceOp(op)
        self.settle(self._gloo.allreduce([tensor], options))
        return tensor

    def options(self, kind: Any) -> Any:
        """Options of this kind, with the group's timeout."""
        options = kind()
        options.timeout = self._order.inner.timeout
        return options

    def settle(self, work: Work) -> None:
        """Wait for a call of Gloo's."""
        self._order.settle_own(f"shadow of {self._call.plan.name}", work)


def _shape(order: Any, call: Movement) -> CallShape:
    """The call as all ranks know it."""
    return CallShape.of(
        call.kind,
        call.plan,
        order.inner.planned.nodes,
        call.source.dtype if call.dtype is None else call.dtype,
        op=call.op,
        root=call.root,
        blocks=call.blocks,
        non_finite="raise" if call.codec is None else call.codec.non_finite,
    )


def _product_or_sum(op: Any) -> Any:
    return op if op == ReduceOp.PRODUCT else ReduceOp.SUM


class _Report:
    """Which ranks differ, where, and by which step; ``told``: what each rank has told."""

    def __init__(
        self, shape: CallShape, plan: Plan, global_ranks: Sequence[int], told: Sequence[Sequence[int]]
    ) -> None:
        self._shape, self._plan, self._ranks, self._told = shape, plan, global_ranks, told

    def text(self) -> str:
        """In words, behind "differs from flat"."""
        wrong = [member for member, each in enumerate(self._told) if each[1]]
        first = min(wrong, key=lambda member: (self._told[member][0], member))
        element, count = self._told[first][:2]
        where = f"on {listed('rank', (self._ranks[member] for member in wrong), _MOST_NAMED)}"
        what = f"first in element {element} of rank {self._ranks[first]}{self._values(first)}"
        return f"{where}: {what}, {count} in all; {self._blame()}"

    def _values(self, member: int) -> str:
        dtype = self._shape.torch_dtype
        if dtype.itemsize > 8:
            return ""
        bits = torch.tensor(self._told[member][2:4], dtype=torch.int64).view(torch.uint8).view(2, 8)
        got, expected = (each[: dtype.itemsize].clone().view(dtype).tolist()[0] for each in bits)
        return f" ({got!r}, flat {expected!r})"

    def _blame(self) -> str:
        try:
            hops = self.suspects()
        except (UsageError, RuntimeError, ValueError, IndexError, StopIteration) as error:
            return f"which step brought it could not be found out ({error})"
        if not hops:
            return "no step alone has brought it: a rank's own input or result has changed, or several did"
        words = [hop.describe(self._plan, self._ranks) for hop in hops[:_MOST_NAMED]]
        more = f", or one of {len(hops) - _MOST_NAMED} more" if len(hops) > _MOST_NAMED else ""
        return f"brought by {', or '.join(words)}{more}"

    def suspects(self) -> list[Hop]:
        """The moves that alone can have brought what differs first."""
        shape = self._shape
        if shape.kind == "in place":
            return []
        size = shape.size
        splits = [(each[5 : 5 + size], each[5 + size :]) for each in self._told]
        moves = everyones_moves(
            shape.kind, self._plan, shape.nodes, root=shape.root, blocks=shape.blocks, splits=splits
        )
        firsts = [each[0] for each in self._told]
        is_shared = shape.traffic.collective in ("all_gather", "all_reduce", "broadcast")
        width = shape.torch_dtype.itemsize
        return suspects(moves, firsts, width, is_in_place=shape.is_in_place, is_shared=is_shared)

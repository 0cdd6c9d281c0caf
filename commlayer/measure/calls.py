"""Calls that are timed: each runs once what a probe stands for, and knows whether the right bytes arrive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from commlayer.engine.planned import PlannedGroup
from commlayer.engine.runner import GridRunner
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.plan import Buffer, Op, Plan
from commlayer.scheduler.replicated import replicated_moves
from commlayer.scheduler.strategies import build
from commlayer.scheduler.wire import Wire
from commlayer.wire.codecs import Codec

__all__ = ["CodedCall", "GridCall", "MessageCall", "OwnCall", "StepCall", "TimedCall"]


class TimedCall(Protocol):
    """A call to be timed. Its buffers are made before, and touched, so that page faults are not timed."""

    def run(self) -> None:
        """Run once."""

    def num_wrong(self) -> int:
        """Run on known values; how many arrived wrong here."""


class GridCall:
    """A plan on the grid of replicated tokens."""

    def __init__(self, runner: GridRunner, plan: Plan, ep_index: int, tp_index: int, device: torch.device) -> None:
        self.runner, self.plan, self.place = runner, plan, (ep_index, tp_index)
        self.source = torch.zeros(plan.traffic.logical_bytes, dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)

    def run(self) -> None:
        self.runner.run(self.plan, self.source, self.target)

    def num_wrong(self) -> int:
        (ep, _), traffic, target = self.place, self.plan.traffic, self.target
        size, block = traffic.logical_bytes, traffic.block_bytes
        blocks = [_pattern(size, k)[ep * block : (ep + 1) * block] for k in range(traffic.group_size)]
        expected = torch.cat(blocks).to(target.device)
        self.source.copy_(_pattern(size, ep))
        target.zero_()
        steps = replicated_moves(self.plan, *self.place)
        for move in steps:  # an all_gather sends from the output what an earlier all_to_all would have brought
            for message in move.sends:
                if message.region.buffer is Buffer.OUTPUT:
                    here = slice(message.region.start, message.region.stop)
                    target[here] = expected[here]
        self.run()
        wrong = 0
        for move in steps:
            for region in [m.region for m in move.receives] + [copy.target for copy in move.copies]:
                here = slice(region.start, region.stop)
                wrong += int((target[here] != expected[here]).sum())
        return wrong


def _pattern(size: int, row: int) -> torch.Tensor:
    """Bytes that differ by place and by sender: a misplaced or foreign byte shows. The period is a prime."""
    place = torch.arange(65_521, dtype=torch.int64)
    tile = ((place * 7 + (place >> 8) * 31 + row * 101) & 255).to(torch.uint8)
    return tile.repeat(-(-size // tile.numel()))[:size]


class StepCall:
    """A plan of a group, of one step."""

    def __init__(self, planned: PlannedGroup, plan: Plan) -> None:
        self.planned, self.plan = planned, plan
        self.values = _Values(planned.rank, plan)

    def run(self) -> None:
        self._run(self.plan)

    def _run(self, plan: Plan) -> None:
        self.planned.run(plan, self.values.source, self.values.target)

    def num_wrong(self) -> int:
        """Wrong elements of the call that has such a step."""
        whole = build(self.plan.traffic, self.plan.strategy)
        return self.values.num_wrong(lambda: self._run(whole))


class OwnCall:
    """A call of Gloo's own."""

    def __init__(self, planned: PlannedGroup, own: dist.ProcessGroup, plan: Plan) -> None:
        self._own, self._collective = own, plan.traffic.collective
        self.values = _Values(planned.rank, plan)
        self._timeout = timedelta(seconds=planned.timeout_s)

    def run(self) -> None:
        self._work().wait(self._timeout)

    def _work(self) -> dist.Work:
        own, source, target = self._own, self.values.source, self.values.target
        if self._collective == "all_gather":
            return own._allgather_base(target, source)
        if self._collective == "reduce_scatter":
            return own._reduce_scatter_base(target, source, dist.ReduceScatterOptions())
        if self._collective == "all_to_all_v":
            return own.alltoall_base(target, source, [], [])
        return own.allreduce([target]) if self._collective == "all_reduce" else own.broadcast([target])

    def num_wrong(self) -> int:
        return self.values.num_wrong(self.run)


class _Values:
    """The tensors of a group's call; ``source`` is ``target`` where the collective works in place."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self.rank, self.collective, self.n = rank, plan.traffic.collective, plan.traffic.group_size
        self.count = plan.traffic.block_bytes // torch.float32.itemsize
        whole, block = torch.zeros(self.count * self.n), torch.zeros(self.count)
        self.source = block if self.collective == "all_gather" else whole
        self.target = {"reduce_scatter": block, "all_to_all_v": torch.zeros_like(whole)}.get(self.collective, whole)

    def num_wrong(self, run: Callable[[], None]) -> int:
        """Wrong elements of what ``run`` brings, on small integers: rank r has k + r for rank k."""
        ramp = torch.arange(0.0, self.n).repeat_interleave(self.count)
        total = self.n * (self.n - 1) / 2
        self.target.fill_(-1.0)
        self.source.copy_(
            torch.full((self.count,), float(self.rank)) if self.collective == "all_gather" else ramp + self.rank
        )
        run()
        expected = {
            "all_gather": ramp,
            "reduce_scatter": torch.full((self.count,), self.n * self.rank + total),
            "all_to_all_v": ramp + self.rank,
            "all_reduce": ramp * self.n + total,
            "broadcast": ramp,
        }[self.collective]
        return int((self.target != expected).sum())


class CodedCall:
    """Encoding, or decoding, of ``size`` bytes: FP32 into BF16, and back into the sum that gradients need; BF16 into FP8, with a
    scale for each row, and back."""

    def __init__(self, op: Op, wire: Wire, size: int) -> None:
        dtype = torch.bfloat16 if wire.format.is_scaled else torch.float32
        self.codec, width = Codec(wire, dtype), wire.row_elements
        rows = max(1, size // (width * dtype.itemsize))
        self.rows = torch.arange(rows * width).remainder_(15).view(rows, width).to(dtype)
        self.decoded = torch.zeros_like(self.rows)
        self.message = torch.zeros(self.codec.wire_bytes(rows), dtype=torch.uint8)
        self.codec.encode(self.rows, self.message)
        self._is_encoding = op is Op.ENCODE

    def run(self) -> None:
        if self._is_encoding:
            self.codec.encode(self.rows, self.message)
        elif self.codec.wire.format.is_scaled:
            self.codec.decode(self.message, self.decoded)
        else:
            self.codec.add(self.message, self.decoded)

    def num_wrong(self) -> int:
        """Values beyond the format's rounding."""
        self.codec.decode(self.message, self.decoded)
        allowed = self.codec.wire.format.unit_roundoff * 15
        wrong = int(((self.decoded.float() - self.rows.float()).abs() > allowed).sum())
        self.decoded.zero_()
        return wrong


class MessageCall:
    """A message from the first rank of two to the second."""

    def __init__(self, planned: PlannedGroup, own: dist.ProcessGroup, size: int) -> None:
        if len(planned.global_ranks) != 2:
            raise UsageError(f"send_recv is measured on groups of two ranks, got {list(planned.global_ranks)}")
        self._own, self._rank = own, planned.rank
        self.message = torch.zeros(size, dtype=torch.uint8)
        self._timeout = timedelta(seconds=planned.timeout_s)

    def run(self) -> None:
        work = self._own.send([self.message], 1, 0) if self._rank == 0 else self._own.recv([self.message], 0, 0)
        work.wait(self._timeout)

    def num_wrong(self) -> int:
        self.message.fill_(7 if self._rank == 0 else 0)
        self.run()
        return int((self.message != 7).sum())

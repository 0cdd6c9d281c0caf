"""Calls that are timed: each runs once what a probe stands for, and knows whether the right bytes
arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.engine.runner import Runner
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.group_moves import moves_of_call
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.plan import Buffer, Op, Plan
from commlayer.scheduler.wire import Wire
from commlayer.transport.c10d import verb_of
from commlayer.transport.call_memory import CallMemory
from commlayer.transport.contract import StartedPlan
from commlayer.wire.codecs import Codec

__all__ = [
    "CALL_OPTIONS",
    "CodedCall",
    "GridCall",
    "GroupCall",
    "IdleCall",
    "MessageCall",
    "TimedCall",
    "TimedGroup",
    "begin_own",
]


class TimedCall(Protocol):
    """A call to be timed. Its buffers are made before, and touched, so that page faults are not
    timed; and so are its moves."""

    def run(self) -> None:
        """Run once."""

    def num_wrong(self) -> int:
        """Run on known values; how many arrived wrong here."""


class IdleCall:
    """The part of a rank that has none in what the others measure."""

    def run(self) -> None:
        """Do nothing."""

    def num_wrong(self) -> int:
        return 0


class GridCall:
    """A plan on the grid of replicated tokens."""

    def __init__(self, runner: Runner, plan: Plan, grid: Grid, device: torch.device, timeout_s: float) -> None:
        self.runner, self.plan, self.row = runner, plan, grid.ep_index
        self.source = torch.zeros(plan.traffic.logical_bytes, dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)
        self.prepared = runner.prepared(plan, None, lambda: moves_of_call(plan, grid.rows, grid.member))
        self._timeout_s = timeout_s

    def start(self) -> StartedPlan:
        """Begin a call, to be driven and finished by the caller."""
        return self.runner.start(self.prepared, CallMemory(self.source), CallMemory(self.target), self._timeout_s)

    def run(self) -> None:
        self.runner.launch(self.prepared, self.source, self.target, self._timeout_s)()

    def num_wrong(self) -> int:
        ep, traffic, target = self.row, self.plan.traffic, self.target
        size, block = traffic.logical_bytes, traffic.block_bytes
        blocks = [_pattern(size, k)[ep * block : (ep + 1) * block] for k in range(traffic.group_size)]
        expected = torch.cat(blocks).to(target.device)
        self.source.copy_(_pattern(size, ep))
        target.zero_()
        steps = self.prepared.steps
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
    """Bytes that differ by place and by sender: a misplaced or foreign byte shows. The period is a
    prime."""
    index = torch.arange(65_521, dtype=torch.int64)
    tile = ((index * 7 + (index >> 8) * 31 + row * 101) & 255).to(torch.uint8)
    return tile.repeat(-(-size // tile.numel()))[:size]


CALL_OPTIONS: dict[str, Any] = {
    "all_gather": AllgatherOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "all_to_all_v": dist.AllToAllOptions,
    "all_reduce": dist.AllreduceOptions,
    "broadcast": dist.BroadcastOptions,
}


class TimedGroup(ABC):
    """A group whose calls are timed, of CPU ranks or on a ``device``, where their tensors are."""

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def prepare(self, plan: Plan) -> None:
        """Do what the first call of ``plan`` would otherwise do while it is timed."""

    @abstractmethod
    def run(self, plan: Plan, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run ``plan`` once."""

    @abstractmethod
    def run_own(self, collective: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run a collective once, by a call of the backend's own."""

    @abstractmethod
    def send(self, message: torch.Tensor) -> None:
        """Send ``message`` from the first of two ranks to the second."""


def begin_own(
    backend: Any, verbs: Any, collective: str, source: torch.Tensor, target: torch.Tensor, options: Any
) -> Any:
    """Begin a collective as a call of a backend's own, and return its work. ``verbs``: has those of
    one tensor."""
    if collective == "all_to_all_v":
        return verb_of(verbs, "all_to_all_single")(target, source, [], [], options)
    if collective in ("all_gather", "reduce_scatter"):
        return verb_of(verbs, f"{collective}_single")(target, source, options)
    return (backend.allreduce if collective == "all_reduce" else backend.broadcast)([target], options)


class GroupCall:
    """A plan of a group on FP32, or one step of it, or with ``is_own`` the collective as a call of
    the backend's own. ``source`` is ``target`` where it works in place."""

    def __init__(self, group: TimedGroup, plan: Plan, *, is_own: bool) -> None:
        self.group, self.plan, self.collective = group, plan, plan.traffic.collective
        self.is_own = is_own
        self.count = plan.traffic.block_bytes // torch.float32.itemsize
        tensor = torch.zeros(self.count * plan.traffic.group_size, device=group.device)
        block = torch.zeros(self.count, device=group.device)
        self.source = block if self.collective == "all_gather" else tensor
        others = {"reduce_scatter": block, "all_to_all_v": torch.zeros_like(tensor)}
        self.target = others.get(self.collective, tensor)
        if not is_own:
            group.prepare(plan)

    def run(self) -> None:
        self._run(self.plan)

    def _run(self, plan: Plan) -> None:
        if self.is_own:
            self.group.run_own(self.collective, self.source, self.target)
        else:
            self.group.run(plan, self.source, self.target)

    def num_wrong(self) -> int:
        """Count wrong elements of the whole collective, on small integers: rank r has k + r for
        rank k."""
        rank, n = self.group.rank, self.plan.traffic.group_size
        ramp, total = torch.arange(0.0, n).repeat_interleave(self.count), n * (n - 1) / 2
        block = torch.ones(self.count)
        self.target.fill_(-1.0)
        self.source.copy_(block * rank if self.collective == "all_gather" else ramp + rank)
        # Where the plan is one step, all of it.
        self._run(self.plan if self.is_own else build(self.plan.traffic, self.plan.strategy))
        expected = {
            "all_gather": ramp,
            "reduce_scatter": block * (n * rank + total),
            "all_to_all_v": ramp + rank,
            "all_reduce": ramp * n + total,
            "broadcast": ramp,
        }[self.collective]
        return int((self.target != expected.to(self.target.device)).sum())


class MessageCall:
    """A message from the first rank of two to the second."""

    def __init__(self, group: TimedGroup, size: int) -> None:
        if group.size != 2:
            raise UsageError(f"send_recv is measured on groups of two ranks, got one of {group.size}")
        self._group = group
        self.message = torch.zeros(size, dtype=torch.uint8, device=group.device)

    def run(self) -> None:
        self._group.send(self.message)

    def num_wrong(self) -> int:
        self.message.fill_(7 if self._group.rank == 0 else 0)
        self.run()
        return int((self.message != 7).sum())


class CodedCall:
    """Encoding, or decoding, of ``size`` bytes: FP32 into BF16, and back into the sum that
    gradients need; BF16 into FP8, with a scale for each row, and back."""

    def __init__(self, op: Op, wire: Wire, size: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if wire.format.is_scaled else torch.float32
        self.codec, width = Codec(wire, dtype), wire.row_elements
        rows = max(1, size // (width * dtype.itemsize))
        self.rows = torch.arange(width).remainder_(15).to(dtype).repeat(rows, 1).to(device)
        self.decoded = torch.zeros_like(self.rows)
        self.message = torch.zeros(self.codec.wire_bytes(rows), dtype=torch.uint8, device=device)
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
        allowed = 15 * (self.codec.wire.format.unit_roundoff + torch.finfo(self.rows.dtype).eps / 2)
        wrong = int(((self.decoded.float() - self.rows.float()).abs() > allowed).sum())
        self.decoded.zero_()
        return wrong

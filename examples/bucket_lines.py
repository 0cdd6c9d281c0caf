"""Buckets of gradients, and the lines in which they wait until their sum may start.

A bucket is a flat buffer of parameters of one axis (:func:`~commlayer.integrations.gradients.gradient_axes`), dtype and device,
last registered first. A hook moves each gradient into its place when autograd has accumulated it, and ``grad`` is a view of that
place from then on: one copy in a step, while the values are still in a cache, and none where ``zero_grad(set_to_none=False)``
leaves the views. Rejected: copying sums back into gradients of their own, which costs another copy and as much memory once
more; and handing autograd zeroed views to add to, which reads and writes twice what a copy does, and ends at the first
``zero_grad()``.

The buckets of a line start in one order, each when it is full and those before it have started: autograd finds its own order,
which may differ between ranks, and collectives must not. On the CPU each group is a line. The groups of one CUDA device are one
line together: kernels of two NCCL communicators that two ranks launch in two orders may wait for each other, so what is of one
device has one order on all ranks, whatever group it goes over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.engine.progress import ProgressQueue, QueuedWork
from commlayer.integrations.flat_buffers import all_reduce_flat, views_in
from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.wire import ROW_ELEMENTS

__all__ = ["Bucket", "BucketLine", "lines_of", "needs_one_order"]


@dataclass(eq=False)
class Bucket:
    """Parameters, and the buffer in which their gradients lie side by side; ``flat`` is made at its first use.

    Attributes:
        group: whose ranks sum them, under ``compressed`` where that is not None.
        is_free: nothing but gradients uses ``group`` in a backward pass; else the sum waits for the pass's end.
    """

    axis: str
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    compressed: GroupCommunicator | None = None
    is_free: bool = True
    is_there: list[bool] = field(default_factory=list)
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        self.names.append(name)
        self.parameters.append(parameter)
        self.is_there.append(False)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def buffer(self) -> torch.Tensor:
        if self.flat is None:
            numel = sum(parameter.numel() for parameter in self.parameters)
            policy = None if self.compressed is None else self.compressed.wire
            if policy is not None and any(each.is_scaled for each in policy.formats):
                numel = -(-numel // ROW_ELEMENTS) * ROW_ELEMENTS  # cut into whole rows that share scales
            self.flat = self.parameters[0].new_zeros(numel)
            self.views = views_in(self.flat, self.parameters)
        return self.flat

    def take(self, slot: int) -> None:
        """Put the gradient into the buffer; zeros where there is none."""
        self.buffer()
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise UsageError(
                f"{who()}the gradient of {self.names[slot]} is sparse: buckets are of dense ones; use sparse=False, or "
                "freeze it"
            )
        elif gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride():
            return
        else:
            view.copy_(gradient)
        parameter.grad = view

    def check(self) -> None:
        """Check that the gradients which came are still there. Raises UsageError."""
        for name, parameter, view, is_there in zip(
            self.names, self.parameters, self.views, self.is_there, strict=False
        ):
            if not parameter.requires_grad:
                raise UsageError(
                    f"{who()}{name} was frozen since these GradientBuckets were made: close them and make others"
                )
            if is_there and (parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr()):
                raise UsageError(
                    f"{who()}the gradient of {name} was replaced between its backward pass and finish(), where it may be on its "
                    "way to other ranks: scale, clip or drop gradients after finish()"
                )

    def all_reduce(self, flat: torch.Tensor) -> dist.Work | None:
        if self.compressed is None:
            work: dist.Work | None = dist.all_reduce(flat, group=self.group, async_op=True)
            return work
        return all_reduce_flat(self.compressed, flat)


class BucketLine:
    """Buckets in the order in which all ranks start them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self._started: list[_Started] = []
        # Before some calls in a wire format the ranks agree on it, and wait for each other. In a hook that would be a
        # deadlock where another rank has no gradient of this bucket, and starts it in finish(). So they, and all that keeps
        # one order with them, start on a thread of the line.
        is_queued = any(bucket.compressed is not None for bucket in self.buckets)
        self._queue = (
            ProgressQueue("commlayer gradients", lambda: f"rank {dist.get_rank()}, gradients") if is_queued else None
        )

    def start_full(self) -> None:
        while len(self._started) < len(self.buckets) and self._next.is_free and all(self._next.is_there):
            self._start(self._next)

    def start_rest(self) -> None:
        while len(self._started) < len(self.buckets):
            for slot, is_there in enumerate(self._next.is_there):
                if not is_there:
                    self._next.take(slot)
            self._start(self._next)

    def wait(self) -> None:
        for started in self._started:
            started.wait()
        self._begin_anew()

    def give_up(self) -> None:
        """Start what is left with NaN, so that no peer takes the sums for gradients, and leave the memory to the transfers."""
        broken = set()
        for bucket in self.buckets[len(self._started) :]:
            if bucket.group in broken:
                continue
            try:
                bucket.buffer().fill_(float("nan"))
                self._start(bucket)
            except Exception:  # noqa: BLE001  of a group that is broken: whoever gives up is told why elsewhere
                broken.add(bucket.group)
        for bucket in self.buckets:
            bucket.flat = None
            for parameter in bucket.parameters:
                parameter.grad = None
        self._begin_anew()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.drain(0)

    @property
    def _next(self) -> Bucket:
        return self.buckets[len(self._started)]

    def _begin_anew(self) -> None:
        self._started = []
        for bucket in self.buckets:
            bucket.is_there = [False] * len(bucket.parameters)

    def _start(self, bucket: Bucket) -> None:
        flat, started = bucket.buffer(), _Started()
        if flat.numel() and self._queue is None:
            started.work = bucket.all_reduce(flat)
        elif flat.numel() and self._queue is not None:
            # A stream is current on one thread only: here it is the one on which the gradients are computed.
            streams = None if flat.is_cpu else torch.get_device_module(flat.device)
            stream = None if streams is None else streams.current_stream(flat.device)

            def start() -> None:
                with contextlib.nullcontext() if streams is None else streams.stream(stream):
                    started.work = bucket.all_reduce(flat)

            started.issued = self._queue.submit("all_reduce", None, start, ())
        self._started.append(started)


@dataclass
class _Started:
    """An all_reduce under way; or, until ``issued``, on its way to its group."""

    work: dist.Work | None = None
    issued: QueuedWork | None = None

    def wait(self) -> None:
        if self.issued is not None:
            self.issued.wait()
        if self.work is not None:
            self.work.wait()


def needs_one_order(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the sums of these must start in one order over all groups, and not only within each: of a device with streams."""
    return any(not parameter.is_cpu for parameter in parameters)


def lines_of(buckets: Sequence[Bucket], *, is_one: bool) -> list[BucketLine]:
    """A line for each group; ``is_one``: one for all, those that do not start in the backward pass last, or nothing behind them
    would either."""
    if is_one:
        return [BucketLine(sorted(buckets, key=lambda bucket: not bucket.is_free))]
    groups: dict[dist.ProcessGroup | None, list[Bucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.group, []).append(bucket)
    return [BucketLine(each) for each in groups.values()]

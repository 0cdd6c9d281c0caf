"""Gradients in buckets, summed over the ranks that share them while the backward pass still computes earlier layers.

Prior art: DistributedDataParallel's reducer, and MegaScale's (figure 5), whose all_reduce between replicas is hierarchical and in
chunks; here the planner decides that for each bucket, as for any all_reduce of a planned group.

A bucket is a flat buffer of parameters of one axis (:func:`~commlayer.integrations.gradients.gradient_axes`), dtype and device,
last registered first. A hook moves each gradient into its place when autograd has accumulated it, and ``grad`` is a view of that
place from then on: one copy in a step, while the values are still in a cache, and none where ``zero_grad(set_to_none=False)``
leaves the views. Rejected: copying sums back into gradients of their own, which costs another copy and as much memory once
more; and handing autograd zeroed views to add to, which reads and writes twice what a copy does, and ends at the first
``zero_grad()``.

The buckets of one group start in one order, each when it is full and those before it have started: autograd finds its own order,
which may differ between ranks, and collectives must not.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.compressed import CompressedGroup
from commlayer.integrations.gradients import compressed_axis, gradient_axes
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.mesh_ranks import AXES
from commlayer.integrations.wire import WireChoice, flat_policy, flat_rows
from commlayer.profiles.errors import UsageError
from commlayer.work import Join, OrderedQueue

__all__ = ["BUCKET_BYTES", "GradientBuckets"]

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's: enough that a link runs at its speed, and a fraction of a model."""
_OF_GRADIENTS = {"dp", "dp_cp", "edp", "stage", "world"}
"""Axes on whose groups nothing else happens in a backward pass."""
_WHOLE_ROWS = 1024
"""Elements: a multiple of these can be cut into the rows that share scales (flat_rows)."""


class GradientBuckets:
    """The sums of ``module``'s gradients, as :func:`~commlayer.integrations.gradients.synchronise_gradients` makes them, started
    during the backward pass::

        buckets = GradientBuckets(model, mesh)
        for step in …:
            optimizer.zero_grad()
            with buckets.accumulating():            # all micro-batches but the last
                loss_of(first).backward()
            loss_of(last).backward()
            buckets.finish()
            optimizer.step()

    ``grad`` of each parameter is a view of its bucket, whose memory the next step uses again: clone what shall outlive that.
    Where an axis shares its process group with one that is not of gradients (``separate`` of FoldedMesh), its buckets start in
    :meth:`finish`: ranks whose graphs differ would make the calls of the two in different orders.

    All ranks that share gradients have the same parameters, in one order, with the same ones frozen. One thread at a time.
    Hooks do not follow parameters that are replaced: make new buckets (:meth:`fit` tells). Reentrant checkpoints
    (``use_reentrant=True``) of a parameter that is used in two of them are refused, as gradients that come twice.

    Args:
        module: what this rank holds of the model. Dense gradients of any dtype that can be summed.
        mesh: the groups; None: the model is whole on this rank, and nothing is sent.
        bucket_bytes: a bucket's largest size; a larger parameter has one of its own.
        wire: as for synchronise_gradients, with which it shares what it learns of a format.

    Raises:
        UsageError: ``bucket_bytes`` below 1; no such format. DisagreementError: ranks were given different ones.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: FoldedMesh | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        wire: WireChoice = None,
    ) -> None:
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes must be 1 or more, got {bucket_bytes}")
        policy = flat_policy(wire, "dp")
        self._signature = _signature(module)
        self._alone: list[nn.Parameter] = []
        self._lines: dict[dist.ProcessGroup, _Line] = {}
        self._is_last = True
        self._places: dict[int, tuple[_Line, _Bucket, int]] = {}
        self._handles: list[Any] = []
        axes = {id(parameter): axis for axis, found in gradient_axes(module).items() for parameter in found}
        shared = {
            id(p) for p in module.parameters() if id(p) in axes and mesh is not None and mesh.size(axes[id(p)]) > 1
        }
        self._alone = [p for p in module.parameters() if id(p) in axes and id(p) not in shared]
        if mesh is None:
            return
        for axis, bucket in _cut(module, {key: axes[key] for key in shared}, bucket_bytes):
            group = mesh.group(axis)
            line = self._lines.setdefault(group, _Line(GroupCommunicator(group, "dp"), _is_free(mesh, axis)))
            bucket.compressed = compressed_axis(mesh, axis, policy)
            line.buckets.append(bucket)
        for line in self._lines.values():
            for bucket in line.buckets:
                for slot, parameter in enumerate(bucket.parameters):
                    self._places[id(parameter)] = line, bucket, slot
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_hook(self)))

    def __repr__(self) -> str:
        lines = ", ".join(
            f"{len(line.buckets)} over {line.communicator.size} ranks, {sum(b.nbytes for b in line.buckets)} bytes"
            f"{'' if line.is_free else ', started in finish()'}"
            for line in self._lines.values()
        )
        return f"GradientBuckets({lines or 'nobody to sum with'})"

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around backward passes after which more follow in this step: nothing is sent, gradients add up."""
        was_last, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = was_last

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not been started, and return when every ``grad`` is the sum over ranks. Collective, once a step.

        A parameter without a gradient counts as zero, and has one afterwards. Without a backward pass before it sums the
        gradients that are there.

        Raises PeerError and CollectiveTimeoutError as collectives do, UsageError for a sparse gradient or after :meth:`close`.
        """
        if self._lines and not self._handles:
            raise UsageError("these GradientBuckets were closed: make others")
        for parameter in self._alone:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        try:
            for line in self._lines.values():
                line.start_rest()
            for line in self._lines.values():
                line.wait()
        except BaseException:
            self.reset()
            raise

    @torch.no_grad()
    def reset(self) -> None:
        """Give a step up, such as one whose backward pass raised: gradients are None, and the next step starts anew.

        Waits for nobody. All ranks that share gradients give up alike: what one has not started yet it starts here, to no
        end, so that all have made the same calls, wherever each one stopped.
        """
        self._is_last = True
        for line in self._lines.values():
            line.give_up()
        for parameter in self._alone:
            parameter.grad = None

    def fit(self, module: nn.Module) -> bool:
        """Whether these are buckets for the parameters that ``module`` has now, with the same ones frozen."""
        return self._signature == _signature(module)

    def close(self) -> None:
        """Remove all hooks. Gradients stay. Harmless when repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for line in self._lines.values():
            line.close()

    def __enter__(self) -> GradientBuckets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @torch.no_grad()
    def _arrived(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient."""
        line, bucket, slot = self._places[id(parameter)]
        if bucket.is_there[slot]:
            raise UsageError(
                f"the gradient of {bucket.names[slot]} came twice before finish(): run all backward passes of a step but the "
                "last under accumulating(); after a step that failed, call reset()"
            )
        bucket.take(slot)  # also of a micro-batch that is not the last: later ones are added in place then
        if self._is_last:
            bucket.is_there[slot] = True
            line.start_full()


def _hook(buckets: GradientBuckets) -> Callable[[torch.Tensor], None]:
    """A parameter keeps its hooks, which must not keep all buckets."""
    me = weakref.ref(buckets)

    def hook(parameter: torch.Tensor) -> None:
        alive = me()
        if alive is not None:
            alive._arrived(parameter)

    return hook


@dataclass(eq=False)
class _Bucket:
    """Parameters, and the buffer in which their gradients lie side by side; ``flat`` is made at its first use."""

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    compressed: CompressedGroup | None = None
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
            policy = None if self.compressed is None else self.compressed.policy
            if policy is not None and any(each.is_scaled for each in policy.formats):
                numel = -(-numel // _WHOLE_ROWS) * _WHOLE_ROWS
            self.flat = self.parameters[0].new_zeros(numel)
            ends = list(accumulate((parameter.numel() for parameter in self.parameters), initial=0))
            self.views = [
                self.flat[start:end].view(parameter.shape)
                for (start, end), parameter in zip(pairwise(ends), self.parameters, strict=True)
            ]
        return self.flat

    def take(self, slot: int) -> None:
        """Let the gradient lie in the buffer; zeros where there is none."""
        self.buffer()
        parameter, view = self.parameters[slot], self.views[slot]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.names[slot]} is sparse: buckets are of dense ones; use sparse=False, or freeze it"
            )
        elif gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride():
            return
        else:
            view.copy_(gradient)
        parameter.grad = view


class _Line:
    """The buckets of one process group, in the order in which all its ranks start them."""

    def __init__(self, communicator: GroupCommunicator, is_free: bool) -> None:
        self.communicator, self.is_free = communicator, is_free
        self.buckets: list[_Bucket] = []
        self._works: list[_Started] = []
        self._queue: OrderedQueue | None = None

    def start_full(self) -> None:
        while self.is_free and len(self._works) < len(self.buckets) and all(self._next.is_there):
            self._start(self._next)

    def start_rest(self) -> None:
        while len(self._works) < len(self.buckets):
            for slot, is_there in enumerate(self._next.is_there):
                if not is_there:
                    self._next.take(slot)
            self._start(self._next)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._begin_anew()

    def give_up(self) -> None:
        with contextlib.suppress(Exception):  # of a group that is broken: whoever gives up is told why elsewhere
            while len(self._works) < len(self.buckets):
                self._next.buffer()
                self._start(self._next)
        for bucket in self.buckets:
            bucket.flat = None  # transfers may still write there
            for parameter in bucket.parameters:
                parameter.grad = None
        self._begin_anew()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close(timeout_s=0)

    @property
    def _next(self) -> _Bucket:
        return self.buckets[len(self._works)]

    def _begin_anew(self) -> None:
        self._works = []
        for bucket in self.buckets:
            bucket.is_there = [False] * len(bucket.parameters)

    def _start(self, bucket: _Bucket) -> None:
        flat = bucket.buffer()
        if not flat.numel():
            self._works.append(_Started(None, None))
        elif bucket.compressed is None:
            self._works.append(_Started(dist.all_reduce(flat, group=self.communicator.group, async_op=True), None))
        else:
            self._works.append(self._start_compressed(flat, bucket.compressed))

    def _start_compressed(self, flat: torch.Tensor, compressed: CompressedGroup) -> _Started:
        """On a thread of this group: before some calls its ranks agree on the format, and wait for each other. In a hook that
        would be a deadlock where another rank has no gradient of this bucket, and starts it in finish()."""
        if self._queue is None:
            self._queue = OrderedQueue("commlayer gradients")
        started = _Started(None, None)

        def start() -> None:
            started.work = compressed.all_reduce(flat_rows(flat, compressed.policy, is_shared=True))

        started.issued = self._queue.submit(start)
        return started


@dataclass
class _Started:
    """An all_reduce under way; or, until ``issued``, on its way to its group."""

    work: dist.Work | None
    issued: Future[Join] | None

    def wait(self) -> None:
        if self.issued is not None:
            self.issued.result()
        if self.work is not None:
            self.work.wait()


def _cut(module: nn.Module, axes: dict[int, str], bucket_bytes: int) -> list[tuple[str, _Bucket]]:
    """Buckets with their axes, in the order in which a backward pass is expected to fill them."""
    open_: dict[tuple[object, ...], _Bucket] = {}
    last: dict[_Bucket, tuple[int, str]] = {}
    for place, (name, parameter) in enumerate(reversed(list(module.named_parameters()))):
        axis = axes.get(id(parameter))
        if axis is None:
            continue
        key = axis, parameter.dtype, parameter.device
        bucket = open_.get(key)
        if bucket is None or bucket.nbytes + parameter.nbytes > bucket_bytes:
            bucket = open_[key] = _Bucket()
        bucket.add(name, parameter)
        last[bucket] = place, axis
    return [(axis, bucket) for bucket, (_, axis) in sorted(last.items(), key=lambda item: item[1][0])]


def _is_free(mesh: FoldedMesh, axis: str) -> bool:
    """Whether nothing but gradients uses the group of ``axis`` in a backward pass. The same on all ranks."""
    group = mesh.group(axis)
    return all(mesh.group(other) is not group for other in AXES if other not in _OF_GRADIENTS)


def _signature(module: nn.Module) -> tuple[object, ...]:
    return tuple((id(p), p.dtype, p.device, p.numel()) for p in module.parameters() if p.requires_grad)

"""Gradients in buckets, summed over the ranks that share them while the backward pass still
computes earlier layers.

Prior art: DistributedDataParallel's reducer, and MegaScale's (figure 5), whose all_reduce between
replicas is hierarchical and in chunks; here the planner decides that for each bucket, as for any
all_reduce of a planned group. What a bucket is, and the order in which they start:
:mod:`~examples.bucket_lines`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.gradients import compressed_axis, gradient_axes, sum_over_etp
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.replica_gradients import placed_layers, sum_replica_gradients
from commlayer.integrations.moe.routing import who
from commlayer.integrations.parameter_marks import replicated_parameters
from commlayer.integrations.spread_parameters import refuse_spread
from commlayer.integrations.wire_choice import WireChoice, flat_policy
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.folded import AXES
from examples.bucket_lines import Bucket, BucketLine, lines_of, needs_one_order

__all__ = ["BUCKET_BYTES", "GradientBuckets"]

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's: enough that a link runs at its speed, and a fraction of a model."""
_OF_GRADIENTS = {"dp", "dp_cp", "edp", "stage", "world"}
"""Axes on whose groups nothing else happens in a backward pass."""


_ALIVE: weakref.WeakSet[GradientBuckets] = weakref.WeakSet()
"""All that have hooks."""


class GradientBuckets:
    """The sums of ``module``'s gradients, as
    :func:`~commlayer.integrations.gradients.synchronise_gradients` makes them, started during the
    backward pass::

        buckets = GradientBuckets(model, mesh)
        for step in …:
            optimizer.zero_grad()
            with buckets.accumulating():            # all micro-batches but the last
                loss_of(first).backward()
            loss_of(last).backward()
            buckets.finish()
            optimizer.step()

    ``grad`` of each parameter is a view of its bucket, whose memory the next step uses again: clone
    what shall outlive that. Where an axis shares its process group with one that is not of
    gradients (``separate`` of FoldedMesh), its buckets start in :meth:`finish`: ranks whose graphs
    differ would make the calls of the two in different orders.

    All ranks that share gradients have the same parameters, in one order, with the same ones
    frozen. One thread at a time. Hooks do not follow parameters that are replaced: make new buckets
    (:meth:`fit` tells). Reentrant checkpoints (``use_reentrant=True``) of a parameter that is used
    in two of them are refused, as gradients that come twice.

    Args:
        module: what this rank holds of the model. Dense gradients of any dtype that can be summed.
        mesh: the groups; None: the model is whole on this rank, and nothing is sent.
        bucket_bytes: a bucket's largest size; a larger parameter has one of its own.
        wire: as for synchronise_gradients, with which it shares what it learns of a format.

    Raises:
        UsageError: ``bucket_bytes`` below 1; no such format; a DTensor, or a parameter of FSDP1;
            one of which nothing says over which ranks its gradient is summed
            (:func:`~commlayer.integrations.gradients.gradient_axes`).
        DisagreementError: ranks were given different formats.
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
            raise UsageError(f"{who()}bucket_bytes must be 1 or more, got {bucket_bytes}")
        policy = flat_policy(wire, "dp")
        self._made_for = _signature(module), bucket_bytes, policy
        self._lines: list[BucketLine] = []
        self._shared_groups: set[dist.ProcessGroup | None] = set()
        self._is_last = True
        self._places: dict[int, tuple[BucketLine, Bucket, int]] = {}
        self._handles: list[Any] = []
        self._placed = nn.ModuleList(placed_layers(module))
        self._mesh, self._over_etp = mesh, list(replicated_parameters(module, "etp"))
        refuse_spread(
            ((name, each) for name, each in module.named_parameters() if each.requires_grad),
            "GradientBuckets",
            "fully_shard reduces its gradients beside the backward pass already; make the buckets for the other modules alone, "
            "or call synchronise_gradients for what other DTensors spread",
        )
        axes = {
            id(parameter): axis for axis, parameters in gradient_axes(module, mesh).items() for parameter in parameters
        }
        shared = {
            id(p) for p in module.parameters() if id(p) in axes and mesh is not None and mesh.size(axes[id(p)]) > 1
        }
        self._alone = [p for p in module.parameters() if id(p) in axes and id(p) not in shared]
        if mesh is None:
            return
        buckets = _cut(module, {key: axes[key] for key in shared}, bucket_bytes)
        for bucket in buckets:
            bucket.group = mesh.group(bucket.axis)
            # Nothing but gradients uses the group in a backward pass; the same on all ranks.
            bucket.is_free = all(mesh.group(axis) is not bucket.group for axis in AXES if axis not in _OF_GRADIENTS)
            GroupCommunicator(bucket.group, "dp")  # puts the group on its lane
            bucket.compressed = compressed_axis(mesh, bucket.axis, policy)
        # A group's sums start in one order on all ranks. That of one set's hooks is its buckets';
        # of several sets' it is when autograd comes to them, which ranks may see differently. So
        # all sets on one group start in their finish().
        groups = {bucket.group for bucket in buckets}
        others = [bucket for other in _ALIVE for line in other._lines for bucket in line.buckets]
        for bucket in others:
            if bucket.group in groups:
                bucket.is_free = False
                self._shared_groups.add(bucket.group)
        _ALIVE.add(self)
        for bucket in buckets:
            bucket.is_free &= bucket.group not in self._shared_groups
        is_one = needs_one_order(parameter for bucket in buckets for parameter in bucket.parameters)
        self._lines = lines_of(buckets, is_one=is_one)
        for line in self._lines:
            for bucket in line.buckets:
                for slot, parameter in enumerate(bucket.parameters):
                    self._places[id(parameter)] = line, bucket, slot
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_hook(self)))

    def __repr__(self) -> str:
        groups: dict[dist.ProcessGroup | None, list[Bucket]] = {}
        for line in self._lines:
            for bucket in line.buckets:
                groups.setdefault(bucket.group, []).append(bucket)
        words = ", ".join(
            f"{len(buckets)} over {1 if group is None else group.size()} ranks, {sum(b.nbytes for b in buckets)} bytes"
            f"{'' if buckets[0].is_free else ', started in finish()'}"
            for group, buckets in groups.items()
        )
        return f"GradientBuckets({words or 'nobody to sum with'})"

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """A context for backward passes after which more follow in this step: nothing is sent,
        gradients add up."""
        was_last, self._is_last = self._is_last, False
        try:
            yield
        finally:
            self._is_last = was_last

    @torch.no_grad()
    def finish(self) -> None:
        """Start what has not been started, and return when every ``grad`` is the sum over ranks,
        and of experts over their copies too. Collective, once a step.

        A parameter without a gradient counts as zero, and has one afterwards. Without a backward
        pass before it sums the gradients that are there.

        Raises PeerError and CollectiveTimeoutError as collectives do; UsageError for a sparse
        gradient, for one that was replaced after it came, for a parameter that was frozen since the
        buckets were made, and after :meth:`close`.
        """
        if self._lines and not self._handles:
            raise UsageError(f"{who()}these GradientBuckets were closed: make others")
        for parameter in self._alone:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for line in self._lines:
            for bucket in line.buckets:
                bucket.check()
        try:
            for line in self._lines:
                line.start_rest()
            for line in self._lines:
                line.wait()
            sum_over_etp(self._over_etp, self._mesh)
            sum_replica_gradients(self._placed)
        except BaseException:
            self.reset()
            raise

    @torch.no_grad()
    def reset(self) -> None:
        """Give a step up, such as one whose backward pass raised: gradients are None, and the next
        step starts anew.

        Waits for nobody. What this rank has not started yet it starts here, to no end, so that all
        ranks have made the same calls, wherever each one stopped. All ranks that share gradients
        should give up alike. A rank that does not, but calls :meth:`finish`, gets the right sums of
        the buckets that were started here before, and NaN in all others (or PeerError, where a wire
        format was told to raise at NaN, which ends that group): it must not step by them, as under
        a GradScaler. Having finished it needs no ``reset()``, which would start the next step's
        calls.
        """
        self._is_last = True
        for line in self._lines:
            line.give_up()
        for parameter in self._alone:
            parameter.grad = None

    def fit(self, module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES, wire: WireChoice = None) -> bool:
        """Whether these are the buckets that the same arguments would make now: of these
        parameters, with the same ones frozen, this size and these formats. Give it what you give
        the constructor."""
        return self._made_for == (_signature(module), bucket_bytes, flat_policy(wire, "dp"))

    def close(self) -> None:
        """Remove all hooks. Gradients stay. Harmless when repeated."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _ALIVE.discard(self)
        for line in self._lines:
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
                f"{who()}the gradient of {bucket.names[slot]} came twice before finish(): run all backward passes of a step "
                "but the last under accumulating(); after a step that failed, call reset()"
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


def _cut(module: nn.Module, axes: dict[int, str], bucket_bytes: int) -> list[Bucket]:
    """In the order in which a backward pass is expected to fill them."""
    open_: dict[tuple[object, ...], Bucket] = {}
    last: dict[Bucket, int] = {}
    for position, (name, parameter) in enumerate(reversed(list(module.named_parameters()))):
        axis = axes.get(id(parameter))
        if axis is None:
            continue
        key = axis, parameter.dtype, parameter.device
        bucket = open_.get(key)
        if bucket is None or bucket.nbytes + parameter.nbytes > bucket_bytes:
            bucket = open_[key] = Bucket(axis)
        bucket.add(name, parameter)
        last[bucket] = position
    return sorted(last, key=lambda bucket: last[bucket])


def _signature(module: nn.Module) -> tuple[object, ...]:
    return tuple((id(p), p.dtype, p.device, p.numel()) for p in module.parameters() if p.requires_grad)

"""Collectives of one process group for model code: differentiable, with uneven rows, planned, on a lane, in wire formats.

``GroupCommunicator`` is to layers what ``torch.distributed`` is to trainers. Tensors are [rows, …]; ranks exchange rows.
The plain verbs return when their result may be used. The ``start_`` verbs return at once, and so do their gradients: the
backward pass starts a gradient's way back where the forward pass waited, and waits for it where the forward pass started.
Autograd runs backward what it ran forward, last first, so what ran beside the transfer in one pass does in the other too.
Verbs with ``_into`` or ``_in_place`` work in memory that the caller has, and autograd hears nothing of them. One module for all
three forms of a verb, because they share their checks.

All ranks of the group call the same verbs in the same order, also with zero rows; and where a tensor needs a gradient on one
rank, it does on all, because the gradient is a collective too. In a group of one rank a result is its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist

from commlayer.profiles.errors import GroupError, UsageError
from commlayer.profiles.printable import warn
from commlayer.profiles.profile import Profile
from commlayer.row_calls import IN_PLACE, Everyones, RowCalls, Rows, nodes_of
from commlayer.scheduler.lanes import LANES, level_of
from commlayer.scheduler.plan import Span
from commlayer.scheduler.wire import NATIVE, Wire, WirePolicy
from commlayer.transfers import Pending, Start, moved, needs_gradient, started
from commlayer.wire.governor import Governor

__all__ = ["LANES", "Exchange", "GroupCommunicator", "Pending"]


class Exchange:
    """Messages under way, bounded by the group's timeout."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when all have arrived and what was sent may be changed. Raises PeerError, CollectiveTimeoutError."""
        if self._work is not None:
            self._work.wait()


class GroupCommunicator:
    """The collectives of ``group`` as this rank calls them.

    Args:
        group: one of backend ``commlayer``, such as :func:`commlayer.integrations.planned_group` or a
            :class:`commlayer.integrations.FoldedMesh` makes; None: a group of this rank alone, which sends nothing.
        lane: the class of traffic that it carries, one of ``ep``, ``pp``, ``cp``, ``dp``, ``tp`` (docs/lanes.md). A group has
            one, that of its first communicator. None: the group stays as it is.
        wire: in which formats the elements of what the verbs send may cross the links (docs/compression.md); None: in their own.
            The gradients of these verbs go in their own as well, unless ``gradient_wire`` says more. The differentiable
            all_reduce and its kin are native.
        gradient_wire: the same for gradients in the backward pass.
        name: what it carries, for messages; None: its lane.

    Raises:
        GroupError: the group has another backend, or this rank is not in it.
        UsageError: the lane is none, or a policy is.
    """

    backends: ClassVar[tuple[str, ...]] = ("commlayer",)
    """The backends whose groups are taken. Comparisons add others: there nothing is planned, held or encoded."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        lane: str | None = None,
        *,
        wire: WirePolicy | None = None,
        gradient_wire: WirePolicy | None = None,
        name: str | None = None,
    ) -> None:
        if lane is not None and lane not in LANES:
            raise UsageError(f"lane must be one of {', '.join(LANES)}, got {lane!r}")
        self._arguments, self.group = (lane, name), group
        own_lane: str = getattr(group, "lane", "")
        self.lane = lane or own_lane
        self.name = name or (f"lane {self.lane}" if self.lane else "a group without a lane")
        for policy in (wire, gradient_wire):
            if policy is not None and not isinstance(policy, WirePolicy):
                raise UsageError(
                    "wire must be a WirePolicy, such as WirePolicy(parse_wire('bf16')) of commlayer.scheduler.wire, got "
                    f"{policy!r}"
                )
        self.wire, self.gradient_wire = wire, gradient_wire
        if gradient_wire is not None and gradient_wire.in_place:
            raise UsageError(f"{self.name}: {IN_PLACE}")
        if group is not None and not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
            raise GroupError(f"rank {dist.get_rank()} is not in the group of {self.name}: pass the group it belongs to")
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        if group is not None and self.size > 1:
            if dist.get_backend(group) not in self.backends:
                raise GroupError(
                    f"rank {dist.get_rank()}: the group of {self.name} has backend {dist.get_backend(group)}: make a planned "
                    "one with commlayer.integrations.planned_group(group)"
                )
            if lane is not None and dist.get_backend(group) == "commlayer":
                _put_on_lane(group, lane)
        self._forward = RowCalls(group, wire, self.name)
        self._backward = RowCalls(group, gradient_wire, f"{self.name}, gradients")

    def with_wire(self, wire: WirePolicy | None, gradient_wire: WirePolicy | None) -> GroupCommunicator:
        """The same group and lane under other policies. Its transfers keep one order with this one's."""
        lane, name = self._arguments
        return GroupCommunicator(self.group, lane, wire=wire, gradient_wire=gradient_wire, name=name)

    def __deepcopy__(self, memo: object) -> GroupCommunicator:
        return self  # a copied model, such as an average of weights, communicates in the same group

    def __copy__(self) -> GroupCommunicator:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError("a group of processes cannot be saved with a module: save its state_dict()")

    def __repr__(self) -> str:
        return f"GroupCommunicator(lane={self.lane!r}, rank={self.rank}, size={self.size})"

    # Differentiable

    def all_to_all(
        self,
        x: torch.Tensor,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        *,
        most_rows: int | None = None,
        over: Span = Span.GROUP,
        everyones: Everyones = None,
    ) -> torch.Tensor:
        """Send ``send_rows[r]`` consecutive rows of ``x`` [Σ send_rows, …] to rank r.

        Returns [Σ receive_rows, …], the rows of rank 0 first. None: as many to and from each. The gradient goes the way back.
        ``most_rows``: that any rank sends or receives, where all know it: with a wire format, ranks else agree on it first.
        ``over`` RAIL or NODE: all ranks exchange rows only with those of the same place on the other nodes, or with those of
        their node (:attr:`nodes`, with equally many ranks each); then all three numbers are needed, and inside nodes rows go as
        they are. ``everyones[k][j]``: the rows that rank k sends to rank j, where all ranks know all of them: for a plan of
        tensors on a device ranks else tell each other first. Raises TensorError where ``x`` does not have these rows, or some
        are for a rank that is not among those.
        """
        return self._run(x, *self._exchanging(send_rows, receive_rows, most_rows, over, everyones))

    def all_gather(self, x: torch.Tensor, rows: Rows = None) -> torch.Tensor:
        """The rows of all ranks, rank 0's first: [Σ rows, …]. ``x`` is [rows[rank], …]. Its gradient: reduce_scatter.

        Raises TensorError where ``x`` does not have these rows.
        """
        return self._run(x, *self._gathering(rows))

    def reduce_scatter(self, x: torch.Tensor, rows: Rows = None) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' ``x`` [Σ rows, …]: [rows[rank], …]. Its gradient: all_gather.

        Raises TensorError where ``x`` does not have these rows.
        """
        return self._run(x, *self._scattering(rows))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``. Its gradient is the sum of all ranks' gradients (each rank's loss counts)."""
        return x if self.size == 1 else moved(x, self._sum, self._sum)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in its own format."""
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.group)
        return out

    def copy_to_group(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, which is equal on all ranks, on its way into shards: its gradient is their sum (Megatron's f)."""
        return x if self.size == 1 else moved(x, lambda t: t.view_as(t), self._sum)

    def reduce_from_group(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, used alike by all: the gradient passes unchanged (Megatron's g)."""
        return x if self.size == 1 else moved(x, self._sum, lambda t: t)

    # In memory that the caller has. Each starts a call and returns its Work; outputs are contiguous. In a wire format sums are
    # FP32, in an order that does not depend on the run, and all ranks hold the same bits.

    def all_reduce_in_place(self, x: torch.Tensor) -> dist.Work:
        """``x`` becomes the sum over ranks. In a wire format: one rounding of each rank's values (between nodes: of each node's
        sum), and one of the result. Raises TensorError where ``x`` is not contiguous."""
        return self._forward.all_reduce_in_place(x)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` becomes this rank's rows of the sum of all ranks' ``x`` [Σ rows, …]; None: as many for each.

        With the policy's ``in_place`` ``x`` is left undefined, and ``out`` may be this rank's rows of it.
        Raises TensorError where ``in_place`` cannot be: uneven rows, or another dtype than FP32.
        """
        return self._forward.reduce_scatter_into(out, x, rows)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` [Σ rows, …] becomes all ranks' ``x`` [rows[rank], …]; in a wire format each rounded once, this rank's too."""
        return self._forward.all_gather_into(out, x, rows)

    def all_to_all_into(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        *,
        most_rows: int | None = None,
    ) -> dist.Work:
        """``send_rows[k]`` rows of ``x`` go to rank k, ``receive_rows[k]`` of ``out`` come from it; None: even.

        ``most_rows``: as in :meth:`all_to_all`.
        """
        return self._forward.all_to_all_into(out, x, send_rows, receive_rows, most_rows)

    # Started, and waited for later

    def start_all_to_all(
        self,
        x: torch.Tensor,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        *,
        most_rows: int | None = None,
        over: Span = Span.GROUP,
        everyones: Everyones = None,
    ) -> Pending:
        """Start :meth:`all_to_all`; ``x`` must not change before the wait. Differentiable once."""
        return self._start(x, *self._exchanging(send_rows, receive_rows, most_rows, over, everyones))

    def start_all_gather(self, x: torch.Tensor, rows: Rows = None) -> Pending:
        """Start :meth:`all_gather`; ``x`` must not change before the wait. Differentiable once."""
        return self._start(x, *self._gathering(rows))

    def start_reduce_scatter(self, x: torch.Tensor, rows: Rows = None) -> Pending:
        """Start :meth:`reduce_scatter`; ``x`` must not change before the wait. Differentiable once."""
        return self._start(x, *self._scattering(rows))

    def start_exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]] = (), receives: Sequence[tuple[torch.Tensor, int]] = ()
    ) -> Exchange:
        """Start a batch of messages: each a tensor and the member of the group that it goes to, or comes from.

        Not part of autograd's graph. Any dtype and layout; tensors without elements are not sent. What is sent must not change,
        and what is received not be used, before ``wait()``. Two ranks' messages keep the order of the calls. Large ones
        yield to higher lanes between chunks. Raises UsageError for this rank itself or one that is not in the group.
        """
        if self.size == 1 and (sends or receives):
            where = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
            raise UsageError(f"{where}exchange on {self.name}: there is nobody to send to in a group of one rank")
        sends = [(x.detach(), peer) for x, peer in sends]
        receives = [(x.detach(), peer) for x, peer in receives]
        group: Any = self.group
        return Exchange(group.start_batch(sends, receives) if sends or receives else None)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]] = (), receives: Sequence[tuple[torch.Tensor, int]] = ()
    ) -> None:
        """:meth:`start_exchange`, waited for. Raises PeerError, CollectiveTimeoutError."""
        self.start_exchange(sends, receives).wait()

    @property
    def has_wire(self) -> bool:
        """Whether a policy of its own allows formats other than native."""
        return self._forward.wire is not None or self._backward.wire is not None

    @property
    def governor(self) -> Governor | None:
        """The governor of the formats in which the verbs send; None where all goes in its own."""
        return None if self._forward.wire is None else self._forward.wire.governor

    def wires(self, width: int, dtype: torch.dtype) -> tuple[Wire, ...]:
        """The forms in which ``wire`` allows rows of ``width`` elements to go: equal on all ranks of all groups that have it."""
        return (NATIVE,) if self._forward.wire is None else self._forward.wire.wires(width, dtype)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, in its order."""
        if self.group is None:
            return (dist.get_rank() if dist.is_initialized() else 0,)
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many of the group's ranks each node holds; (1,) for this rank alone."""
        shape: tuple[int, ...] = getattr(self.group, "shape", (self.size,))
        return shape

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the group on each node, in its order."""
        return nodes_of(self.group)

    @property
    def siblings(self) -> int:
        """How many groups like this one use a node's links at the same time, as ``group.use_siblings()`` was told; 0: nobody
        said."""
        siblings: int = getattr(self.group, "siblings", 0)
        return siblings

    @property
    def profile(self) -> Profile | None:
        """The profile by which the group's calls are planned; None: there is none."""
        profile: Profile | None = getattr(self.group, "profile", None)
        return profile

    def predicted_us(
        self,
        collective: str,
        num_bytes: int,
        shape: tuple[int, ...] | None = None,
        *,
        siblings: int = 0,
        rows_of: tuple[int, torch.dtype] | None = None,
        over: Span = Span.GROUP,
    ) -> float | None:
        """Predict by the profile what a call takes, µs; None where there is none, or it knows no such group. Talks to nobody.

        ``collective``: all_to_all_v (``num_bytes``: the most that a rank sends or receives), all_gather (the gathered total)
        or reduce_scatter (a rank's whole input): numbers that all ranks know alike. ``shape``: of another group, where the
        answer is to be the same on ranks of several, and ``siblings``, how many such groups share a node. ``rows_of``: (elements,
        dtype) of a row, where it may go in a wire format. ``over``: see :meth:`all_to_all`; rows go as they are. 0 for a group of
        one rank.
        """
        if self.size == 1:
            return 0.0
        predict = getattr(self.group, "predicted_us", None)
        if predict is None:
            return None
        if over is not Span.GROUP:
            return cast("float | None", predict(collective, num_bytes, shape, over=over))
        if self._forward.wire is None or rows_of is None:
            return cast("float | None", predict(collective, num_bytes, shape, siblings=siblings))
        wires = self.wires(*rows_of)
        return cast(
            "float | None",
            predict(collective, num_bytes, shape, siblings=siblings, wires=wires, element_bytes=rows_of[1].itemsize),
        )

    # How a differentiable verb starts, and how its gradient does

    def _exchanging(
        self, send_rows: Rows, receive_rows: Rows, most_rows: int | None, over: Span, everyones: Everyones
    ) -> tuple[Start, Start]:
        def back(gradient: torch.Tensor) -> Pending:
            turned = None if everyones is None else tuple(zip(*everyones, strict=True))
            return self._backward.all_to_all(gradient, receive_rows, send_rows, most_rows, over, turned)

        return lambda t: self._forward.all_to_all(t, send_rows, receive_rows, most_rows, over, everyones), back

    def _gathering(self, rows: Rows) -> tuple[Start, Start]:
        return lambda t: self._forward.all_gather(t, rows), lambda t: self._backward.reduce_scatter(t, rows)

    def _scattering(self, rows: Rows) -> tuple[Start, Start]:
        return lambda t: self._forward.reduce_scatter(t, rows), lambda t: self._backward.all_gather(t, rows)

    def _run(self, x: torch.Tensor, forward: Start, backward: Start) -> torch.Tensor:
        if self.size == 1:
            forward(x)  # for its checks
            return x
        if not needs_gradient(x):
            return forward(x).wait()
        return moved(x, lambda t: forward(t).wait(), lambda t: backward(t).wait())

    def _start(self, x: torch.Tensor, forward: Start, backward: Start) -> Pending:
        if self.size > 1:
            return started(x, forward, backward)
        forward(x)  # for its checks
        return Pending(x, None)


def _put_on_lane(group: dist.ProcessGroup, lane: str) -> None:
    """Put ``group`` on ``lane``, unless it is on one: the calls of a group keep one order, so one lane."""
    made: Any = group
    if not made.lane or (made.lane == lane and not made.lane_is_told):
        made.use_lane(lane)
    elif level_of(made.lane) != level_of(lane):
        warn(
            f"commlayer: group {made.group_desc!r} is on lane {made.lane}, and what is called for lane {lane} goes there too, "
            "because the calls of a group keep one order: make another group of its ranks with planned_group()",
            stacklevel=4,
        )

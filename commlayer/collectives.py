"""Collectives of one process group for model code: differentiable, with uneven rows, planned, on a lane, in wire formats.

``GroupCommunicator`` is to layers what ``torch.distributed`` is to trainers. Tensors are [rows, …]; ranks exchange rows.
The plain verbs return when their result may be used. The ``start_`` verbs return at once, and so do their gradients: the
backward pass starts a gradient's way back where the forward pass waited, and waits for it where the forward pass started, or
where what was sent was held (:meth:`GroupCommunicator.hold`). Autograd runs backward what it ran forward, last first, so what
ran beside the transfer in one pass does in the other too. Verbs with ``_into`` or ``_in_place`` work in memory that the caller
has, and autograd hears nothing of them. One module for all three forms of a verb, because they share their checks.

All ranks of the group call the same verbs in the same order, also with zero rows; and where a tensor needs a gradient on one
rank, it does on all, because the gradient is a collective too. In a group of one rank a result is its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist

from commlayer.calls.movement import Movement
from commlayer.engine.progress import DONE
from commlayer.profiles.errors import GroupError, TensorError, UsageError
from commlayer.profiles.printable import warn
from commlayer.profiles.profile import Profile
from commlayer.scheduler.lanes import LANES, level_of
from commlayer.scheduler.plan import Span
from commlayer.scheduler.rails import exchange_over
from commlayer.scheduler.wire import NATIVE, Wire, WirePolicy
from commlayer.transfers import Held, Pending, Start, hold, moved, needs_gradient, started
from commlayer.transport.c10d import all_gather_single, reduce_scatter_single
from commlayer.transport.call_memory import plain
from commlayer.wire.governor import Governor
from commlayer.wire_decider import WireDecider, row_elements

__all__ = ["LANES", "Exchange", "GroupCommunicator", "Held", "Pending"]

_IN_PLACE = "in_place leaves its input undefined, which autograd may still need: leave it out here"
Rows = Sequence[int] | None
"""How many rows each rank has; None: all as many."""
Everyones = Sequence[Sequence[int]] | None
"""The rows that each rank sends to each other one."""


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
        self._told, self.group = (lane, name), group
        own_lane: str = getattr(group, "lane", "")
        self.lane = lane or own_lane
        self.name = name or (f"lane {self.lane}" if self.lane else "a group without a lane")
        self.wire, self.gradient_wire = _policy(wire), _policy(gradient_wire)
        if gradient_wire is not None and gradient_wire.in_place:
            raise UsageError(f"{self.name}: {_IN_PLACE}")
        self.rank, self.size = 0, 1
        self._forth: WireDecider | None = None
        self._back: WireDecider | None = None
        if group is None:
            return
        if not isinstance(group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
            raise GroupError(f"rank {dist.get_rank()} is not in the group of {self.name}: pass the group it belongs to")
        self.rank, self.size = group.rank(), group.size()
        if self.size > 1 and dist.get_backend(group) not in self.backends:
            raise GroupError(
                f"rank {dist.get_rank()}: the group of {self.name} has backend {dist.get_backend(group)}: make a planned one "
                "with commlayer.integrations.planned_group(group)"
            )
        if self.size > 1 and lane is not None and dist.get_backend(group) == "commlayer":
            _on_lane(group, lane)
        self._forth = self._decider(wire, self.name)
        self._back = self._decider(gradient_wire, f"{self.name}, gradients")

    def with_wire(self, wire: WirePolicy | None, gradient_wire: WirePolicy | None) -> GroupCommunicator:
        """The same group and lane under other policies. Its transfers keep one order with this one's."""
        lane, name = self._told
        return GroupCommunicator(self.group, lane, wire=wire, gradient_wire=gradient_wire, name=name)

    def _decider(self, policy: WirePolicy | None, name: str) -> WireDecider | None:
        """Make the decider of the format in which each call goes; None: all go in their own."""
        if self.size == 1 or policy is None or not policy.allows_encoding:
            return None
        assert isinstance(self.group, dist.ProcessGroup)
        return WireDecider(self.group, policy, name)

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
        return x if self.size == 1 else moved(x, self._summed, self._summed)

    def copy_to_group(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, which is equal on all ranks, on its way into shards: its gradient is their sum (Megatron's f)."""
        return x if self.size == 1 else moved(x, lambda t: t.view_as(t), self._summed)

    def reduce_from_group(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, used alike by all: the gradient passes unchanged (Megatron's g)."""
        return x if self.size == 1 else moved(x, self._summed, lambda t: t)

    # In memory that the caller has. Each starts a call and returns its Work; outputs are contiguous. In a wire format sums are
    # FP32, in an order that does not depend on the run, and all ranks hold the same bits.

    def all_reduce_in_place(self, x: torch.Tensor) -> dist.Work:
        """``x`` becomes the sum over ranks. In a wire format: one rounding of each rank's values (between nodes: of each node's
        sum), and one of the result. Raises TensorError where ``x`` is not contiguous."""
        self._check_output("all_reduce", x, x, x.numel())
        x = x.detach()
        if self.group is None:
            return DONE
        plan = None if self._forth is None else self._forth.plan("all_reduce", x, x.nbytes, x)
        if plan is not None and self._forth is not None:
            return self._forth.start(plan, x, x, None)
        return cast("dist.Work", dist.all_reduce(x, group=self.group, async_op=True))

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` becomes this rank's rows of the sum of all ranks' ``x`` [Σ rows, …]; None: as many for each.

        With the policy's ``in_place`` ``x`` is left undefined, and ``out`` may be this rank's rows of it.
        Raises TensorError where ``in_place`` cannot be: uneven rows, or another dtype than FP32.
        """
        self._check_rows("reduce_scatter", x, rows)
        own_rows = x.shape[0] // self.size if rows is None else rows[self.rank]
        self._check_output("reduce_scatter", out, x, own_rows * row_elements(x))
        if self._forth is not None and self._forth.policy.in_place:
            return self._forth.start_in_place(out, x, self._blocks(x, rows))
        return self._scatter(out.detach(), plain(x), rows, self._forth)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, rows: Rows = None) -> dist.Work:
        """``out`` [Σ rows, …] becomes all ranks' ``x`` [rows[rank], …]; in a wire format each rounded once, this rank's too."""
        self._check_rows("all_gather", out, rows)
        own_rows = out.shape[0] // self.size if rows is None else rows[self.rank]
        if x.numel() != own_rows * row_elements(out):
            raise TensorError(
                f"{self._who('all_gather')}: into {list(out.shape)}, rows {rows}, expected this rank's rows, got shape "
                f"{list(x.shape)}"
            )
        self._check_output("all_gather", out, x, out.numel())
        return self._gather(out.detach(), plain(x), rows, self._forth)

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
        self._check_rows("all_to_all", x, send_rows)
        self._check_rows("all_to_all", out, receive_rows)
        self._check_output("all_to_all", out, x, out.numel())
        if row_elements(out) != row_elements(x):
            raise TensorError(
                f"{self._who('all_to_all')}: rows of {row_elements(x)} elements into rows of {row_elements(out)}"
            )
        return self._exchange(out.detach(), plain(x), send_rows, receive_rows, self._forth, most_rows)

    # Started, and waited for later

    def hold(self, x: torch.Tensor) -> Held:
        """``x``, for one ``start_`` verb later on: the backward pass waits for its gradient here, not where it is sent.

        What the forward pass runs between the two then runs before the wait. Nothing but the verb may use what is held.
        For one call; the verb raises UsageError at a second.
        """
        return hold(x) if self.size > 1 else Held(x, None)

    def start_all_to_all(
        self,
        x: torch.Tensor | Held,
        send_rows: Rows = None,
        receive_rows: Rows = None,
        *,
        most_rows: int | None = None,
        over: Span = Span.GROUP,
        everyones: Everyones = None,
    ) -> Pending:
        """Start :meth:`all_to_all`; ``x`` must not change before the wait. Differentiable once."""
        return self._start(x, *self._exchanging(send_rows, receive_rows, most_rows, over, everyones))

    def start_all_gather(self, x: torch.Tensor | Held, rows: Rows = None) -> Pending:
        """Start :meth:`all_gather`; ``x`` must not change before the wait. Differentiable once."""
        return self._start(x, *self._gathering(rows))

    def start_reduce_scatter(self, x: torch.Tensor | Held, rows: Rows = None) -> Pending:
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
            raise UsageError(f"{self._who('exchange')}: there is nobody to send to in a group of one rank")
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
        return self._forth is not None or self._back is not None

    @property
    def governor(self) -> Governor | None:
        """The governor of the formats in which the verbs send; None where all goes in its own."""
        return None if self._forth is None else self._forth.governor

    def wires(self, width: int, dtype: torch.dtype) -> tuple[Wire, ...]:
        """The forms in which ``wire`` allows rows of ``width`` elements to go: equal on all ranks of all groups that have it."""
        return (NATIVE,) if self._forth is None else self._forth.wires(width, dtype)

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
        nodes: tuple[tuple[int, ...], ...] = getattr(self.group, "nodes", (tuple(range(self.size)),))
        return nodes

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
        if self._forth is None or rows_of is None:
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
            return self._all_to_all(gradient, receive_rows, send_rows, self._back, most_rows, over, turned)

        return lambda t: self._all_to_all(t, send_rows, receive_rows, self._forth, most_rows, over, everyones), back

    def _gathering(self, rows: Rows) -> tuple[Start, Start]:
        return lambda t: self._all_gather(t, rows, self._forth), lambda t: self._reduce_scatter(t, rows, self._back)

    def _scattering(self, rows: Rows) -> tuple[Start, Start]:
        return lambda t: self._reduce_scatter(t, rows, self._forth), lambda t: self._all_gather(t, rows, self._back)

    def _run(self, x: torch.Tensor, forward: Start, backward: Start) -> torch.Tensor:
        if self.size == 1:
            forward(x)  # for its checks
            return x
        if not needs_gradient(x):
            return forward(x).wait()
        return moved(x, lambda t: forward(t).wait(), lambda t: backward(t).wait())

    def _start(self, x: torch.Tensor | Held, forward: Start, backward: Start) -> Pending:
        if self.size > 1:
            return started(x, forward, backward)

        def stay(x: torch.Tensor, _: object) -> Pending:
            forward(x)  # for its checks
            return Pending(x, None)

        return x.send(stay) if isinstance(x, Held) else stay(x, None)

    # Without autograd

    def _all_to_all(
        self,
        x: torch.Tensor,
        send_rows: Rows,
        receive_rows: Rows,
        wire: WireDecider | None = None,
        most_rows: int | None = None,
        over: Span = Span.GROUP,
        everyones: Everyones = None,
    ) -> Pending:
        self._check_rows("all_to_all", x, send_rows)
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        native: Callable[[], Any] | None = None
        rows = x.shape[0] if receive_rows is None else sum(receive_rows)
        out = x.new_empty(rows, *x.shape[1:])
        if over is not Span.GROUP:
            native = self._over(out, x, send_rows, receive_rows, most_rows, over)
            wire = wire if over is Span.RAIL else None
        elif everyones is not None:
            native = self._known(out, x, everyones)
        return Pending(out, self._exchange(out, x, send_rows, receive_rows, wire, most_rows, native), sent=x)

    def _over(
        self, out: torch.Tensor, x: torch.Tensor, send_rows: Rows, receive_rows: Rows, most_rows: int | None, over: Span
    ) -> Callable[[], Any] | None:
        """The start of an all_to_all among the ranks of each rail or node; None: the group's own call, which sends nothing to the
        others either. Raises TensorError for rows to or from ranks that are not among them."""
        if send_rows is None or receive_rows is None or most_rows is None:
            raise TensorError(
                f"{self._who('all_to_all')}: over {over.value} every rank says send_rows, receive_rows and most_rows"
            )
        self._check_length("all_to_all", receive_rows)
        here = next(members for members in self.nodes if self.rank in members)
        among = here if over is Span.NODE else [members[here.index(self.rank)] for members in self.nodes]
        outside = [k for k in range(self.size) if k not in among and (send_rows[k] or receive_rows[k])]
        if outside:
            raise TensorError(
                f"{self._who('all_to_all')}: over {over.value} rank {self.rank} of the group exchanges rows with ranks "
                f"{list(among)}, got rows for {outside}"
            )
        start = getattr(self.group, "start_planned", None)
        if start is None or not (x.is_cpu or cast("Any", self.group).plans_on_device(x)):
            return None  # what is in parts goes as the group's own call
        row_bytes = _row_bytes(x)
        splits = [count * row_bytes for count in send_rows], [count * row_bytes for count in receive_rows]
        plan = exchange_over(over, tuple(map(len, self.nodes)), most_rows * row_bytes)
        return partial(start, Movement(plan, x, out, "over", splits=splits))

    def _known(
        self, out: torch.Tensor, x: torch.Tensor, everyones: Sequence[Sequence[int]]
    ) -> Callable[[], Any] | None:
        """The start of an all_to_all of which all ranks know all counts; None: the group's own call, which wants none of them."""
        start = getattr(self.group, "start_known_exchange", None)
        if start is None or x.is_cpu:
            return None
        row_bytes = _row_bytes(x)
        counts = tuple(tuple(count * row_bytes for count in row) for row in everyones)
        return partial(start, x, out, (everyones[self.rank], [row[self.rank] for row in everyones]), counts)

    def _all_gather(self, x: torch.Tensor, rows: Rows, wire: WireDecider | None) -> Pending:
        self._check_length("all_gather", rows)
        if x.dim() == 0:
            raise TensorError(
                f"{self._who('all_gather')}: expected rows, got a tensor without dimensions: view it as [1]"
            )
        if rows is not None and x.shape[:1] != (rows[self.rank],):
            raise TensorError(f"{self._who('all_gather')}: expected {rows[self.rank]} rows, got shape {list(x.shape)}")
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        total = x.shape[0] * self.size if rows is None else sum(rows)
        out = x.new_empty(total, *x.shape[1:])
        return Pending(out, self._gather(out, x, rows, wire), sent=x)

    def _reduce_scatter(self, x: torch.Tensor, rows: Rows, wire: WireDecider | None) -> Pending:
        self._check_rows("reduce_scatter", x, rows)
        if wire is not None and wire.policy.in_place:
            raise UsageError(f"{self._who('reduce_scatter')}: {_IN_PLACE}")
        x = x.detach().contiguous()
        if self.size == 1:
            return Pending(x, None)
        own_rows = x.shape[0] // self.size if rows is None else rows[self.rank]
        out = x.new_empty(own_rows, *x.shape[1:])
        return Pending(out, self._scatter(out, x, rows, wire), sent=x)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(out, group=self.group)
        return out

    # Started: by a plan in a wire format, or natively

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
        if self.group is None:
            return _kept(out, x)
        if wire is not None:
            most_rows = wire.agree_rows(x, out) if most_rows is None else most_rows
            plan = wire.plan("all_to_all_v", x, _rounded(most_rows) * _row_bytes(x), x)
            if plan is not None:
                return wire.start_exchange(plan, out, x, (self._blocks(x, send_rows), self._blocks(out, receive_rows)))
        if native is not None:
            return cast("dist.Work", native())
        outs = None if receive_rows is None else list(receive_rows)
        ins = None if send_rows is None else list(send_rows)
        return cast("dist.Work", dist.all_to_all_single(out, x, outs, ins, group=self.group, async_op=True))

    def _gather(self, out: torch.Tensor, x: torch.Tensor, rows: Rows, wire: WireDecider | None) -> dist.Work:
        if self.group is None:
            return _kept(out, x)
        plan = None if wire is None else wire.plan("all_gather", x, out.nbytes, out)
        if plan is not None and wire is not None:
            return wire.start(plan, out, x, self._blocks(out, rows))
        if rows is None or len(set(rows)) == 1:
            return cast("dist.Work", all_gather_single(out, x, group=self.group, async_op=True))
        return cast("dist.Work", dist.all_gather(list(out.split(list(rows))), x, group=self.group, async_op=True))

    def _scatter(self, out: torch.Tensor, x: torch.Tensor, rows: Rows, wire: WireDecider | None) -> dist.Work:
        if self.group is None:
            return _kept(out, x)
        plan = None if wire is None else wire.plan("reduce_scatter", x, x.nbytes, x)
        if plan is not None and wire is not None:
            return wire.start(plan, out, x, self._blocks(x, rows))
        if rows is None or len(set(rows)) == 1:
            return cast("dist.Work", reduce_scatter_single(out, x, group=self.group, async_op=True))
        return cast("dist.Work", dist.reduce_scatter(out, list(x.split(list(rows))), group=self.group, async_op=True))

    def _blocks(self, whole: torch.Tensor, rows: Rows) -> tuple[int, ...]:
        """Bytes of each rank's rows of ``whole``, which has them."""
        rows = (whole.shape[0] // self.size,) * self.size if rows is None else rows
        return tuple(each * _row_bytes(whole) for each in rows)

    # Checks

    def _check_output(self, verb: str, out: torch.Tensor, x: torch.Tensor, numel: int) -> None:
        """Check that ``out`` can take the result as it is. Raises TensorError."""
        if out.dtype != x.dtype or out.device != x.device or out.numel() != numel or not out.is_contiguous():
            raise TensorError(
                f"{self._who(verb)}: a tensor of {x.dtype} on {x.device} needs a contiguous output of {numel} elements of the "
                f"same, got shape {list(out.shape)}, strides {list(out.stride())}, {out.dtype} on {out.device}"
            )

    def _check_rows(self, verb: str, x: torch.Tensor, rows: Rows) -> None:
        self._check_length(verb, rows)
        if rows is None and (x.dim() == 0 or x.shape[0] % self.size):
            raise TensorError(
                f"{self._who(verb)}: {self.size} must divide the rows, got shape {list(x.shape)}: name them"
            )
        if rows is not None and x.shape[:1] != (sum(rows),):
            raise TensorError(
                f"{self._who(verb)}: rows {list(rows)} are {sum(rows)} together, got shape {list(x.shape)}"
            )

    def _check_length(self, verb: str, rows: Rows) -> None:
        if rows is not None and (len(rows) != self.size or min(rows) < 0):
            raise TensorError(
                f"{self._who(verb)}: expected {self.size} counts of rows, none negative, one for each rank; got {list(rows)}"
            )

    def _who(self, verb: str) -> str:
        where = f"rank {dist.get_rank()}, " if dist.is_initialized() else ""
        return f"{where}{verb} on {self.name}"


def _policy(policy: WirePolicy | None) -> WirePolicy | None:
    """``policy``. Raises UsageError for what is none."""
    if policy is not None and not isinstance(policy, WirePolicy):
        raise UsageError(
            f"wire must be a WirePolicy, such as WirePolicy(parse_wire('bf16')) of commlayer.scheduler.wire, got {policy!r}"
        )
    return policy


def _kept(out: torch.Tensor, x: torch.Tensor) -> dist.Work:
    """The call of a group of this rank alone."""
    out.view(-1).copy_(x.view(-1))
    return DONE


def _rounded(count: int) -> int:
    """Up to three leading bits: sizes that are a fifth apart, at most, are planned alike, and not anew in each call."""
    bits = max(0, count.bit_length() - 3)
    return -(-count >> bits) << bits


def _row_bytes(x: torch.Tensor) -> int:
    return row_elements(x) * x.element_size()


def _on_lane(group: dist.ProcessGroup, lane: str) -> None:
    """The calls of a group keep one order, so one lane."""
    made: Any = group
    if not made.lane or (made.lane == lane and not made.lane_is_told):
        made.use_lane(lane)
    elif level_of(made.lane) != level_of(lane):
        warn(
            f"commlayer: group {made.group_desc!r} is on lane {made.lane}, and what is called for lane {lane} goes there too, "
            "because the calls of a group keep one order: make another group of its ranks with planned_group()",
            stacklevel=4,
        )

"""Transfers between ranks as part of autograd's graph: made at once, or started in one place and waited for in another.

A transfer that is started is two nodes, and three where what it sends was held before::

    forward    hold ──► start ──► wait
    backward   wait ◄── (pass on) ◄── start

so that its gradient's way back is started where the forward pass waited, and waited for where the forward pass started, or
held. Between the two the gradient is not there yet: nothing but these nodes may see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from commlayer.profiles.errors import UsageError

__all__ = ["Held", "Move", "Pending", "Start", "differentiable_once", "hold", "moved", "needs_gradient", "started"]

Move = Callable[[torch.Tensor], torch.Tensor]
_Result = TypeVar("_Result")


def differentiable_once(backward: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make an autograd function's ``backward`` raise UsageError where a gradient of the gradient is asked for.

    torch's own decorator notices that only where the incoming gradient needs one itself, which that of a sum does not.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> _Result:
        if torch.is_grad_enabled():
            raise UsageError(
                "commlayer's layers and transfers are differentiable once: leave create_graph=True out of the backward pass"
            )
        return backward(ctx, *gradients)

    return checked


class Pending:
    """The result of a call under way. ``wait()`` returns it when it may be used, or raises what the call raised.

    On the CPU that is when the call has ended. On CUDA the host does not wait: what the current stream does from now on comes
    after the call.
    """

    __slots__ = ("_finish", "_result", "_sent", "_work")

    def __init__(
        self,
        result: torch.Tensor,
        work: dist.Work | None,
        finish: Move | None = None,
        sent: torch.Tensor | None = None,
    ) -> None:
        self._result, self._work, self._finish = result, work, finish
        self._sent = sent  # until then: autograd drops gradients that it has passed on

    @property
    def unfinished(self) -> torch.Tensor:
        """The tensor that will hold the result."""
        return self._result

    def cut(self, result: torch.Tensor) -> None:
        """Take ``result`` for :attr:`unfinished` from now on: a leaf of the same memory, where a graph is cut before the wait.

        Its gradient is under way when the graph behind the cut has run backward, and is waited for before it.
        """
        self._result = result

    def wait(self) -> torch.Tensor:
        """Return the call's output; the wait is bounded by the group's timeout. May be called again."""
        if self._work is not None:
            self._work.wait()
            self._sent = None
            if self._result.is_cpu:  # elsewhere each stream that waits is made to
                self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not (on CUDA: whether it has been issued)."""
        return self._work is None or self._work.is_completed()

    def exception(self) -> BaseException | None:
        """The error that the call raised, or None while it runs and when it went well."""
        return None if self._work is None or not self._work.is_completed() else self._work.exception()

    def on_gradient(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the backward pass, when the gradient of this result has been sent on its way and before it is
        waited for. Before :meth:`wait`, in the forward pass; nothing where the result has no gradient."""
        if self._result.requires_grad:
            self._result.register_hook(lambda _: call())


Start = Callable[[torch.Tensor], Pending]


class Held:
    """A tensor that one ``start_`` verb is to send later. Made by :meth:`commlayer.collectives.GroupCommunicator.hold`."""

    __slots__ = ("_sent", "_way", "tensor")

    def __init__(self, tensor: torch.Tensor, way: _Way | None, sent: list[bool] | None = None) -> None:
        self.tensor, self._way = tensor, way
        self._sent = [False] if sent is None else sent

    def with_tensor(self, tensor: torch.Tensor) -> Held:
        """Return the same transfer, with something made of the tensor that passes its gradient on untouched, such as a
        probe.
        """
        return Held(tensor, self._way, self._sent)

    def send(self, begin: Callable[[torch.Tensor, _Way | None], Pending]) -> Pending:
        """Send the tensor by ``begin``. UsageError at a second time; what is refused has not been sent."""
        if self._sent[0]:
            raise UsageError("what was held has been sent already: hold it again for another call")
        pending = begin(self.tensor, self._way)
        self._sent[0] = True
        return pending


def hold(x: torch.Tensor) -> Held:
    """Hold ``x`` for one :func:`started`: the backward pass waits for its gradient here."""
    if not needs_gradient(x):
        return Held(x, None)
    way = _Way()
    return Held(_apply_hold(x, way), way)


def moved(x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    """Return ``forward(x)``, a linear map between ranks, whose gradient takes the way ``backward``. Differentiable twice."""
    return cast("torch.Tensor", cast("Any", _Moved).apply(x, forward, backward))


def started(x: torch.Tensor | Held, forward: Start, backward: Start) -> Pending:
    """Start ``forward(x)``, whose gradient goes by ``backward``. UsageError for what was held and has been sent."""

    def begin(x: torch.Tensor, held: _Way | None) -> Pending:
        if not needs_gradient(x):
            return forward(x)
        way = held or _Way(is_held=False)
        way.set(forward, backward)
        return Pending(_apply_start(x, way), None, lambda t: _apply_wait(t, way))

    return x.send(begin) if isinstance(x, Held) else begin(x, None)


def needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
        ctx.moves = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        forward, backward = ctx.moves
        return moved(gradient, backward, forward), None, None


class _Way:
    """There and back: how a transfer and its gradient's are started, and whichever is under way."""

    __slots__ = ("_backward", "_forward", "_pending", "is_held")

    def __init__(self, *, is_held: bool = True) -> None:
        self.is_held = is_held
        self._forward: Start | None = None
        self._backward: Start | None = None
        self._pending: Pending | None = None

    def set(self, forward: Start, backward: Start) -> None:
        self._forward, self._backward = forward, backward

    def go(self, x: torch.Tensor) -> torch.Tensor:
        assert self._forward is not None  # whoever starts has said how
        self._pending = self._forward(x)
        return self._pending.unfinished

    def come_back(self, gradient: torch.Tensor) -> None:
        assert self._backward is not None
        self._pending = self._backward(gradient)

    @property
    def unfinished(self) -> torch.Tensor:
        assert self._pending is not None
        return self._pending.unfinished

    @property
    def is_under_way(self) -> bool:
        return self._pending is not None

    def wait(self) -> torch.Tensor:
        assert self._pending is not None  # whoever waits comes after whoever started
        result = self._pending.wait()
        self._pending = None  # not where that raised: it does again
        return result


class _Hold(torch.autograd.Function):
    """In the backward pass waits for what :class:`_Started` has passed on unfinished."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.way.wait() if ctx.way.is_under_way else gradient, None


class _Started(torch.autograd.Function):
    """Starts in the forward pass; in the backward pass waits for the gradient that :class:`_Waited` has started, unless
    :class:`_Hold` will."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return way.go(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Anomaly detection looks for NaN in whatever a function returns, also in memory that is not filled yet.
        is_passed_on = ctx.way.is_held and not torch.is_anomaly_enabled()
        return ctx.way.unfinished if is_passed_on else ctx.way.wait(), None


class _Waited(torch.autograd.Function):
    """Waits in the forward pass; in the backward pass starts the gradient's way back."""

    @staticmethod
    def forward(ctx: Any, unfinished: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return way.wait().detach()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.way.come_back(gradient)
        return gradient, None


_apply_hold: Callable[[torch.Tensor, _Way], torch.Tensor] = cast("Any", _Hold.apply)
_apply_start: Callable[[torch.Tensor, _Way], torch.Tensor] = cast("Any", _Started.apply)
_apply_wait: Callable[[torch.Tensor, _Way], torch.Tensor] = cast("Any", _Waited.apply)

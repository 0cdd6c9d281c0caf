"""Transfers between ranks as part of autograd's graph: made at once, or started in one place and waited for in another.

A transfer that is started is two nodes::

    forward    start ──► wait
    backward   wait ◄── start

so that its gradient's way back is started where the forward pass waited, and waited for where the forward pass started.
Between the two the gradient is not there yet: nothing but these nodes may see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from commlayer.profiles.errors import UsageError

__all__ = ["Move", "Pending", "Start", "differentiable_once", "moved", "needs_gradient", "started"]

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


def moved(x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    """Return ``forward(x)``, a linear map between ranks, whose gradient takes the way ``backward``. Differentiable twice."""
    return cast("torch.Tensor", cast("Any", _Moved).apply(x, forward, backward))


def started(x: torch.Tensor, forward: Start, backward: Start) -> Pending:
    """Start ``forward(x)``, whose gradient goes by ``backward``."""
    if not needs_gradient(x):
        return forward(x)
    way = _Way(forward, backward)
    return Pending(_apply_start(x, way), None, lambda t: _apply_wait(t, way))


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

    __slots__ = ("_backward", "_forward", "_pending")

    def __init__(self, forward: Start, backward: Start) -> None:
        self._forward, self._backward = forward, backward
        self._pending: Pending | None = None

    def go(self, x: torch.Tensor) -> torch.Tensor:
        self._pending = self._forward(x)
        return self._pending.unfinished

    def come_back(self, gradient: torch.Tensor) -> None:
        self._pending = self._backward(gradient)

    def wait(self) -> torch.Tensor:
        assert self._pending is not None  # whoever waits comes after whoever started
        result = self._pending.wait()
        self._pending = None  # not where that raised: it does again
        return result


class _Started(torch.autograd.Function):
    """Starts in the forward pass; in the backward pass waits for the gradient that :class:`_Waited` has started."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return way.go(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.way.wait(), None


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


_apply_start: Callable[[torch.Tensor, _Way], torch.Tensor] = cast("Any", _Started.apply)
_apply_wait: Callable[[torch.Tensor, _Way], torch.Tensor] = cast("Any", _Waited.apply)

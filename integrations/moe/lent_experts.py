"""Experts lent for one call: their weights travel to ranks that compute some of their rows, and the gradients come back.

One lends what lies in its place to a *helper*, where it is a *guest* behind that rank's own experts. Weights set out when tokens
have, and are waited for when a rank's own experts are computed; in the backward pass the guests' gradients set out when they are
there, and are waited for when those of the rank's own experts are. There the owner adds them up, in the order in which its
experts were lent, in FP32 at least. So weights pass through the graph here, which makes this an order of calls that all ranks
have: those that neither lend nor help send nothing, and take no part.

Messages go from rank to rank, as the gradients of copies do. Rejected: an all_to_all, in which all ranks would wait for
the two that have something to send; and a pack of all weights of a guest, which copies them once more at each end.

Shapes: L experts that are here, G guests; weights [L, …] of this rank, [G, …] of guests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from commlayer.collectives import Exchange, GroupCommunicator
from commlayer.transfers import differentiable_once

__all__ = ["LentExperts"]


class LentExperts:
    """The experts that this rank lends in one call, and those that it is lent.

    Args:
        ep: over whose ranks experts lie.
        lent: (place of the expert here, rank that helps), in the order of the decision, which is the same on all ranks.
        guests: the owner of each guest, in the same order.

    Attributes:
        own: the weights of this rank's own experts, to be computed with: to their gradients those of helpers are added.
    """

    def __init__(self, ep: GroupCommunicator, lent: Sequence[tuple[int, int]], guests: Sequence[int]) -> None:
        self._way = _Way(ep, tuple(lent), tuple(guests))
        self._guests: tuple[torch.Tensor, ...] | None = None
        self.own: tuple[torch.Tensor, ...] = ()
        self._ties: torch.Tensor | None = None
        """A tensor without elements, by which guests hang together with what was sent, in the graph."""

    @property
    def num_guests(self) -> int:
        return len(self._way.owners)

    def start(self, weights: Sequence[torch.Tensor]) -> None:
        """Send what is lent of ``weights``, each [L, …]."""
        trained = [weight.requires_grad for weight in weights]
        self._ties, *own = _lend(self._way, *weights)
        self.own = tuple(
            lent if is_trained else weight for lent, weight, is_trained in zip(own, weights, trained, strict=True)
        )

    @property
    def crossing(self) -> tuple[torch.Tensor, ...]:
        """The tensors that stand in the graph between the start and the first use."""
        assert self._ties is not None  # since start()
        return *self.own, self._ties

    def cut(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take others for :attr:`crossing`, where a graph is cut there; return what was given beside them."""
        *own, self._ties = tensors[: len(self.own) + 1]
        tensors, self.own = tensors[len(self.own) + 1 :], tuple(own)
        return tensors

    def guests(self) -> tuple[torch.Tensor, ...]:
        """Return the weights of guests, each [G, …]; the first time they are waited for. Raises PeerError and
        CollectiveTimeoutError as collectives do."""
        if self._guests is None:
            self._guests = _be_lent(self._way, self._ties)
        return self._guests


class _Way:
    """The way of the weights, and of the gradients back. The graph holds it, so it holds nothing that hangs in the graph."""

    def __init__(self, ep: GroupCommunicator, lent: tuple[tuple[int, int], ...], owners: tuple[int, ...]) -> None:
        self._ep, self._lent, self.owners = ep, lent, owners
        self._shapes: list[torch.Size] = []
        self._coming: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []
        self._under_way: Exchange | None = None
        self._returning: dict[tuple[int, int], torch.Tensor] = {}
        self.trained: tuple[bool, ...] = ()

    def send(self, weights: Sequence[torch.Tensor]) -> None:
        self._shapes, self.trained = [weight.shape for weight in weights], tuple(each.requires_grad for each in weights)
        self._coming = [weight.new_empty(len(self.owners), *weight.shape[1:]) for weight in weights]
        sends = [(weight[place], peer) for place, peer in self._lent for weight in weights]
        receives = [(coming[at], owner) for at, owner in enumerate(self.owners) for coming in self._coming]
        self._under_way = self._ep.start_exchange(sends, receives)

    def receive(self) -> tuple[torch.Tensor, ...]:
        self._wait()
        coming, self._coming = tuple(self._coming), []
        return coming

    def send_back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start the way back of the guests' gradients; None: of a weight that is not trained."""
        places = [at for at, each in enumerate(gradients) if each is not None]
        self._sent = [each.contiguous() for each in gradients if each is not None]
        self._returning = {
            (number, at): each.new_empty(each.shape[1:])
            for number in range(len(self._lent))
            for at, each in zip(places, self._sent, strict=True)
        }
        sends = [(each[at], owner) for at, owner in enumerate(self.owners) for each in self._sent]
        receives = [(tensor, self._lent[number][1]) for (number, _), tensor in self._returning.items()]
        self._under_way = self._ep.start_exchange(sends, receives)

    def add_returned(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Wait for what helpers send back, and add it to the gradients of the own weights, in place: they have just been made."""
        self._wait()
        totals, self._sent = list(gradients), []
        for (number, at), came in self._returning.items():
            total = totals[at]
            if total is None:  # nothing was computed with the own ones
                total = totals[at] = came.new_zeros(self._shapes[at])
            gradient = total[self._lent[number][0]]
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            gradient.copy_(gradient.to(dtype) + came.to(dtype))
        self._returning = {}
        return tuple(totals)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        ctx.set_materialize_grads(False)
        way.send(weights)
        return weights[0].new_empty(0), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.way.add_returned(gradients)


class _BeLent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, ties: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        guests = way.receive()
        ctx.mark_non_differentiable(
            *(each for each, is_trained in zip(guests, way.trained, strict=True) if not is_trained)
        )
        return guests

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        trained = zip(gradients, ctx.way.trained, strict=True)
        ctx.way.send_back([each if is_trained else None for each, is_trained in trained])
        return None, gradients[0].new_empty(0)


_lend: Callable[..., tuple[torch.Tensor, ...]] = cast("Any", _Lend.apply)
_be_lent: Callable[..., tuple[torch.Tensor, ...]] = cast("Any", _BeLent.apply)

"""Messages of experts' tensors: all that one rank sends another goes as one, whatever its shapes and dtypes.

Both ends name what goes between them in the same order, and so find it without being told where it lies. What is sent is a copy,
made when the tensor is named, which may change then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.collectives import Exchange, GroupCommunicator

__all__ = ["ExpertMessages"]

_ALIGNED = 16
"""A tensor's bytes begin at a multiple of it: those of any dtype can be viewed there."""


class ExpertMessages:
    """The messages of this rank to members of ``group``, and those from them."""

    def __init__(self, group: GroupCommunicator) -> None:
        self._group = group
        self._sent: dict[int, list[torch.Tensor]] = {}
        self._wanted: dict[int, list[torch.Tensor]] = {}
        self._arriving: dict[int, torch.Tensor] = {}
        self._exchange: Exchange | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank sends."""
        return sum(part.numel() for parts in self._sent.values() for part in parts)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Name a tensor that goes to ``peer``; it is copied."""
        self._sent.setdefault(peer, []).append(_padded(tensor))

    def receive(self, target: torch.Tensor, peer: int) -> None:
        """Name a tensor that comes from ``peer``; :meth:`received` has it, or :meth:`store` writes it to ``target``, which is not
        touched before."""
        self._wanted.setdefault(peer, []).append(target)

    def start(self) -> None:
        """Start the exchange. Nothing more can be named."""
        sends = [(torch.cat(parts), peer) for peer, parts in sorted(self._sent.items())]
        for peer, places in self._wanted.items():
            self._arriving[peer] = places[0].new_empty(sum(map(_room, places)), dtype=torch.uint8)
        if sends or self._arriving:
            self._exchange = self._group.start_exchange(
                sends, [(arriving, peer) for peer, arriving in sorted(self._arriving.items())]
            )
        self._sent.clear()

    def wait(self) -> None:
        """Wait for what was started. Raises PeerError and CollectiveTimeoutError as collectives do."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def received(self, peer: int) -> Sequence[torch.Tensor]:
        """Return what came from ``peer``, in the order in which it was named: views of the message."""
        tensors, at = [], 0
        for target in self._wanted.get(peer, ()):
            tensors.append(self._arriving[peer][at : at + target.nbytes].view(target.dtype).view(target.shape))
            at += _room(target)
        return tensors

    def store(self) -> None:
        """Write all that came to its place."""
        for peer, targets in self._wanted.items():
            for target, came in zip(targets, self.received(peer), strict=True):
                target.copy_(came)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    padded = tensor.new_zeros(_room(tensor), dtype=torch.uint8)
    padded[: tensor.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return padded


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED

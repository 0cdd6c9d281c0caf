"""Planned calls on the same tensors again: what was found out for the first is kept until one of
the tensors is gone.

Gradients' buckets are the same tensors in every step. What is kept holds their memory by slices,
not the tensors, so that it is let go of with them; and it is known by where the memory lies, for a
program may put other memory under a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch

from commlayer.engine.runner import Sent
from commlayer.scheduler.plan import Plan
from commlayer.transport.stream_scripts import BoundScript, StreamScript

__all__ = ["KeptCall", "KeptCalls"]

_MOST = 256


class KeptCall(NamedTuple):
    """A call as it is launched, and what this rank sends in it. The plan is kept, so that its id
    stays its own."""

    plan: Plan
    script: StreamScript
    bound: BoundScript
    sent: Sent


class _Entry(NamedTuple):
    call: KeptCall
    where: tuple[int, int]
    tensors: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]


class KeptCalls:
    """The calls of one group. Of more than ``most`` the oldest is let go of."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable, source: torch.Tensor, target: torch.Tensor) -> KeptCall | None:
        """The call that was kept under ``key``, which has the ids of both tensors, if their memory
        is where it was."""
        entry = self._entries.get(key)
        if entry is None or entry.where != (source.data_ptr(), target.data_ptr()):
            return None
        return entry.call

    def add(self, key: Hashable, source: torch.Tensor, target: torch.Tensor, call: KeptCall) -> None:
        """Keep ``call`` until one of the tensors is gone."""
        entries = self._entries

        def forget(_: weakref.ref[torch.Tensor]) -> None:
            entries.pop(key, None)

        if len(entries) >= self._most:
            entries.pop(next(iter(entries)), None)
        tensors = weakref.ref(source, forget), weakref.ref(target, forget)
        entries[key] = _Entry(call, (source.data_ptr(), target.data_ptr()), tensors)

    def clear(self) -> None:
        """Let go of all."""
        self._entries.clear()

"""Devices beside the CPU whose tensors an inner backend of their own moves: CUDA's, and those that are registered here.

A simulated device (tests/simulated/torch_device.py) registers here with what makes its inner
backend, before groups are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

from torch._C._distributed_c10d import Store

from commlayer.transport.nccl import Nccl

__all__ = ["MakeInner", "register_accelerator", "registered_accelerators"]

MakeInner = Callable[[Store, int, Sequence[int], timedelta, str], Nccl]
"""Makes the inner backend of a group, with all its ranks: its store, this rank in it, its global ranks, its timeout, its name."""

_registered: dict[str, MakeInner] = {}


def register_accelerator(device_type: str, make: MakeInner) -> None:
    """Have groups that are made from now on move tensors of ``device_type`` by what ``make`` makes. On all ranks, or on none."""
    _registered[device_type] = make


def registered_accelerators() -> Mapping[str, MakeInner]:
    """The functions that were registered, by the type of the device."""
    return MappingProxyType(_registered)

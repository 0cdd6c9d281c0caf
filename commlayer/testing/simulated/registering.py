"""Registering the simulated device that torch sees: with torch, and with the backend, whose groups then take its tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlayer.testing.simulated.torch_communicator import make_communicator
from commlayer.testing.simulated.torch_device import made_device
from commlayer.testing.simulated.torch_operators import DEVICE_NAME
from commlayer.testing.simulated.torch_streams import StreamDelays
from commlayer.transport.accelerators import register_accelerator

__all__ = ["simulated_device"]


def simulated_device(
    delays: StreamDelays | None = None, *, memory_bytes: int = 1 << 28, timeout_s: float = 60.0
) -> torch.device:
    """Register the simulated device with torch, once in a process, and return it; again: with other delays.

    Before ``init_process_group``, whose groups then have an inner backend for it. ``delays``: how its streams are delayed, by
    which seed; ``memory_bytes``: what it has; ``timeout_s``: how long the host waits for a device on which nothing moves.

    Raises UsageError where torch's place for such a device is another's.
    """
    made = made_device(delays, memory_bytes=memory_bytes, timeout_s=timeout_s)
    if made is not None:
        register_accelerator(DEVICE_NAME, make_communicator(made))
        devices: dict[str, list[str]] = dist.Backend.backend_capability
        if DEVICE_NAME not in devices.setdefault("commlayer", []):
            devices["commlayer"].append(DEVICE_NAME)
    return torch.device(DEVICE_NAME, 0)

"""The lanes of this process's devices, which is one rank's: see :mod:`commlayer.transport.stream_lanes`."""

from __future__ import annotations

import os

import torch

from commlayer.devices.accelerator import AcceleratorDevice
from commlayer.devices.hold_support import why_no_holds
from commlayer.forked_child import in_forked_child
from commlayer.profiles.printable import warn
from commlayer.transport.stream_lanes import DeviceLanes

__all__ = ["lanes_of_device"]

_of_devices: dict[torch.device, DeviceLanes | None] = {}

in_forked_child(_of_devices.clear)  # a child has other devices than its parent


def lanes_of_device(device: AcceleratorDevice) -> DeviceLanes | None:
    """The lanes of a device, made when they are first asked for, which waits for it; None where its streams cannot be held: that
    warns once. Ranks need not agree on it, as a hold only delays."""
    where = device.device
    if where not in _of_devices:
        _of_devices[where] = None
        why = why_no_holds(where.type, os.environ)
        if not why:
            try:
                _of_devices[where] = DeviceLanes(device)
            except Exception as error:  # noqa: BLE001  whatever a compiler says: this rank alone would fail, and others wait for it
                why = f"the kernel that holds a stream failed: {type(error).__name__}: {error}"
        if why:
            warn(f"commlayer: lower lanes are not held on {where}: {why}", stacklevel=2)
    return _of_devices[where]

"""Gloo groups that are used by one call at a time, on one device for all groups of a process.

A device of Gloo's is a listener, and a thread that reads and writes what the connections of its
groups have for it. torch makes one for every group, which is a thread and four descriptors each.
One serves as well: it copies bytes and waits for nobody, and what happens to one group's
connections does not touch another's.

Rejected: Gloo's connections that are made at the first message (torch's ``lazy_init``, which
TORCH_GLOO_LAZY_INIT sets where nobody says it). In torch 2.13 who sends or receives is blocked
until its peer does the same, in C++ and beyond the timeout, also where the peer is dead.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

from commlayer.calls.group_life import INNER_NAME
from commlayer.failures.descriptors import GLOO_DEVICE, of_gloo
from commlayer.failures.waits import keep
from commlayer.forked_child import in_forked_child
from commlayer.transport.foreign_variables import refuse_variables

__all__ = ["gloo_in_order", "needed_descriptors"]

_devices: dict[tuple[str, ...], list[Any]] = {}
"""The devices of this process, by the names of their interfaces."""
_making = threading.Lock()


def gloo_in_order(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A Gloo group whose collectives run one after the other, on one thread; torch gives each two
    for every interface.

    For groups of which never two collectives are under way, or where the second may wait for the
    first. Interfaces are those that torch chooses.
    """
    names = _interfaces()
    with _making:
        devices = _devices.get(names)
        if devices is None:
            devices = [_device("create_device", interface=name) for name in names] or [_device("create_default_device")]
            for device in devices:  # freeing one joins its thread, which a forked child does not have
                keep(device)
            _devices[names] = devices
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = list(devices), 1, timeout
    if hasattr(options, "group_name"):  # torch before 2.8 has no such field
        options.group_name = INNER_NAME
    group: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return group


def needed_descriptors(size: int) -> int:
    """Count the descriptors that another group of ``size`` ranks takes here, with those of the
    device where there is none yet."""
    return of_gloo(size) + (0 if _interfaces() in _devices else GLOO_DEVICE)


def _interfaces() -> tuple[str, ...]:
    return tuple(name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name)


def _device(maker: str, **where: str) -> Any:
    """A device that connects when a group is made. Raises SettingsError for a transport that is
    refused."""
    refuse_variables(os.environ)
    make = getattr(dist.ProcessGroupGloo, maker)
    if "lazy_init" in (make.__doc__ or ""):  # torch before 2.8 has no other way to connect
        where["lazy_init"] = False  # type: ignore[assignment]
    return make(**where)


@in_forked_child
def _forget_devices() -> None:
    """The parent's devices have their threads in the parent."""
    global _making
    _making = threading.Lock()
    _devices.clear()

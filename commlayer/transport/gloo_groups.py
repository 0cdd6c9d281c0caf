"""Gloo groups that are used by one call at a time."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = ["gloo_in_order"]


def gloo_in_order(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A Gloo group whose collectives run one after the other, on one thread; torch gives each two for every interface.

    For groups of which never two collectives are under way: a process in twenty groups has forty threads less. Interfaces are
    those that torch chooses.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._threads, options._timeout = 1, timeout
    group: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return group

"""The inner NCCL group for CUDA tensors.

Written from torch's source and never run: the project's tests have no machine with CUDA for it. What it must get right is
that torch may split NCCL communicators: with ``init_process_group(device_id=…)``, ranks outside a new group take part in
the split, so members must split too, not connect anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work
from torch.distributed import distributed_c10d as c10d

__all__ = ["Inner", "Nccl", "is_usable", "make_nccl"]


class Inner(Protocol):
    """An inner backend, whose verbs torch's annotations lack."""

    def __getattr__(self, verb: str) -> Callable[..., Work]: ...


@dataclass(frozen=True)
class Nccl:
    """The inner group of a group."""

    backend: Inner


def is_usable() -> bool:
    """Whether CUDA tensors can exist here, and NCCL is built in."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def make_nccl(
    store: Store,
    rank: int,
    global_ranks: Sequence[int],
    timeout: timedelta,
    name: str,
    options: Any,
    *,
    is_default: bool,
) -> Nccl:
    """The inner group, as torch itself makes one for the backend nccl. It connects at its first call."""
    options = options if isinstance(options, dist.ProcessGroupNCCL.Options) else dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    source = None if is_default else _split_source()
    if source is not None:
        options.split_from = source
        options.split_color = c10d._process_group_color(list(global_ranks))
    options.global_ranks_in_group = [] if is_default else list(global_ranks)
    options.group_name = name
    backend = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, len(global_ranks), options)
    made: Any = backend
    made._set_sequence_number_for_group()
    return Nccl(made)


def _split_source() -> Any:
    default = c10d._get_default_group()
    return c10d._get_split_source(default) if default.bound_device_id else None

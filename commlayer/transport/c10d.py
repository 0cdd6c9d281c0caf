"""The installed torch: its collectives on whole tensors, to which 2.13 gave new names, and NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "all_gather_single",
    "device_type",
    "is_usable",
    "reduce_scatter_single",
    "start_sequence",
    "verb_of",
]

_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def is_usable() -> bool:
    """Whether CUDA tensors can exist here, and NCCL is built in."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def device_type(group: dist.ProcessGroup | None) -> str:
    """``cuda`` for a group whose backend is NCCL, else ``cpu``."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def verb_of(group: Any, name: str) -> Any:
    """Return a process group's method ``name``, a verb's present name in torch, or its older one where this torch has no other.

    Raises AttributeError where the group has neither.
    """
    verb = getattr(group, name, None)
    return getattr(group, _OLDER_NAMES.get(name, name)) if verb is None else verb


def start_sequence(backend: Any) -> None:
    """Start the numbers of a backend's calls at 0 on every rank. torch 2.15 does so by itself, and warns who asks."""
    if not hasattr(backend, "supports_reconfigure"):
        backend._set_sequence_number_for_group()

"""Parameters that torch has spread over ranks: DTensors (``fully_shard``, ``parallelize_module``) and those of FSDP1.

Functions of this package that take a module or its parameters meet them by what stands here. Some work on each rank's own
part (:func:`local_part`). The others refuse such a parameter by its name (:func:`refuse_spread`): operations on a DTensor may
communicate, and a parameter of FSDP1 looks like a whole one, though it is this rank's part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlayer.integrations.moe.routing import who
from commlayer.profiles.errors import UsageError

__all__ = [
    "fill_whole",
    "first_row",
    "is_dtensor",
    "local_part",
    "mesh_ranks",
    "refuse_fsdp1",
    "refuse_spread",
    "reshard",
    "shard_groups",
    "summed",
]


def is_dtensor(x: torch.Tensor) -> bool:
    """Tell whether ``x`` is a DTensor. Where torch.distributed.tensor was never imported, which takes seconds, nothing is one."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(x, kind)


def reshard(module: nn.Module) -> None:
    """Have every part of ``module`` that went through ``fully_shard`` hold its shards: after a forward pass alone, or under
    ``set_reshard_after_backward(False)``, it shows whole parameters instead, which have no gradients and no optimizer."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for part in () if kind is None else module.modules():
        if isinstance(part, kind):
            part.reshard()


def local_part(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, which shares its memory; any other tensor as it is. Call it without gradients."""
    tensor: Any = x
    part: torch.Tensor = tensor.to_local() if is_dtensor(x) else x
    return part


def mesh_ranks(x: torch.Tensor) -> tuple[int, ...]:
    """Return the global ranks over which a DTensor lies, in increasing order; none of another tensor."""
    if not is_dtensor(x):
        return ()
    mesh: Any = x.device_mesh  # type: ignore[attr-defined]
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def shard_groups(x: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups whose ranks hold different parts of a DTensor, one for each dim of its mesh that cuts it."""
    if not is_dtensor(x):
        return ()
    mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if mesh.size(dim) > 1 and not placement.is_replicate() and not placement.is_partial()
    )


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, and where it is a DTensor of which ranks hold summands, the sum. Collective over its mesh then."""
    if not is_dtensor(x) or not any(each.is_partial() for each in x.placements):  # type: ignore[attr-defined]
        return x
    from torch.distributed.tensor import Replicate

    tensor: Any = x
    total: torch.Tensor = tensor.redistribute(
        placements=[Replicate() if each.is_partial() else each for each in tensor.placements]
    )
    return total


def first_row(x: torch.Tensor) -> int:
    """Return the place in the whole tensor, along its first dim, at which this rank's part of a DTensor begins; else 0."""
    return _local_slices(x)[0].start if is_dtensor(x) else 0


def _local_slices(x: torch.Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a DTensor lies in the whole, in each dim."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensor: Any = x
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def fill_whole(x: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy ``whole``, of which every rank has all, into ``x``: of a DTensor this rank's part. Sends nothing."""
    local_part(x).copy_(whole[_local_slices(x)] if is_dtensor(x) else whole)


def refuse_spread(named: Iterable[tuple[str, torch.Tensor]], what: str, instead: str) -> None:
    """Raise UsageError for the first DTensor or parameter of FSDP1 among ``named``.

    ``what``: the function that takes none. ``instead``: what to do.
    """
    named = list(named)
    refuse_fsdp1(named, what)
    for name, parameter in named:
        if is_dtensor(parameter):
            tensor: Any = parameter
            raise UsageError(
                f"{who()}{what} takes plain parameters, but {name} is a DTensor, spread over ranks "
                f"{list(mesh_ranks(parameter))} as {tuple(tensor.placements)}: {instead}"
            )


def refuse_fsdp1(named: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Raise UsageError for the first parameter of FSDP1 among ``named``: it cannot tell which part of what it is."""
    for name, parameter in named:
        if getattr(parameter, "_fsdp_flattened", False):
            raise UsageError(
                f"{who()}{what} cannot take {name}, which belongs to FullyShardedDataParallel (FSDP1): use the methods of "
                "FullyShardedDataParallel itself, such as clip_grad_norm_, or fully_shard (FSDP2) in its place"
            )

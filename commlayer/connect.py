"""From a grid of ranks to a transport: process groups of our own, so that our messages never meet the caller's."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from commlayer.failures import FailureBoard
from commlayer.groups import Grid
from commlayer.profiles.errors import GroupError
from commlayer.scheduler.plan import Op
from commlayer.transport import Channel, GlooTransport, Transport

__all__ = ["connect", "device_type"]


def device_type(group: dist.ProcessGroup | None) -> str:
    """``cuda`` for a group whose backend is NCCL, else ``cpu``."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def connect(grid: Grid, device: str, board: FailureBoard, timeout_s: float) -> Transport:
    """Make the groups of this rank's row and column, and the transport over them. Collective over the grid."""
    channels = {}
    if len(grid.ep_ranks) > 1:
        channels[Op.ALL_TO_ALL] = _channel("ep", grid.ep_ranks, device, timeout_s)
    if len(grid.tp_ranks) > 1:
        channels[Op.ALL_GATHER] = _channel("tp", grid.tp_ranks, device, timeout_s)
    if device == "cuda":
        from commlayer.cuda import NcclTransport

        return NcclTransport(channels, torch.device("cuda", torch.cuda.current_device()))
    return GlooTransport(channels, board)


def _channel(name: str, ranks: tuple[int, ...], device: str, timeout_s: float) -> Channel:
    backend = "nccl" if device == "cuda" else "gloo"
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"commlayer:{name}",
    )
    if group is None:
        raise GroupError(f"torch made no group for ranks {ranks}: is the default process group initialised?")
    return Channel(name, group, tuple((rank, dist.get_group_rank(group, rank)) for rank in ranks))

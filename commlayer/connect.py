"""From a grid of ranks to a transport: process groups of our own, so that our messages never meet the caller's."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

from commlayer.failures import FailureBoard
from commlayer.groups import Grid
from commlayer.profiles.errors import ClusterError, GroupError
from commlayer.scheduler.plan import Op
from commlayer.transport import Channel, GlooTransport, Transport

__all__ = ["connect", "device_type", "gloo_channel"]


def device_type(group: dist.ProcessGroup | None) -> str:
    """``cuda`` for a group whose backend is NCCL, else ``cpu``."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def connect(grid: Grid, device: str, board: FailureBoard, timeout_s: float) -> Transport:
    """Make the groups of this rank's row and column, and the transport over them. Collective over the grid.

    Raises ClusterError where a rank does not come.
    """
    wanted = {Op.ALL_TO_ALL: ("ep", grid.ep_ranks), Op.ALL_GATHER: ("tp", grid.tp_ranks)}
    make = _nccl_channel if device == "cuda" else gloo_channel
    channels = {}
    for op, (name, ranks) in wanted.items():
        if len(ranks) < 2:
            continue
        try:
            channels[op] = make(name, ranks, board, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ClusterError(
                f"rank {board.rank} could not connect to ranks {list(ranks)} (group {name}): {error}; look at their logs"
            ) from error
    if device == "cuda":
        from commlayer.cuda import NcclTransport

        return NcclTransport(channels, torch.device("cuda", torch.cuda.current_device()))
    return GlooTransport(channels, board, board.rank)


def gloo_channel(name: str, ranks: tuple[int, ...], board: FailureBoard, timeout: timedelta) -> Channel:
    """Straight from the store, under a name that all ranks agreed on.

    Rejected: ``dist.new_group(…, use_local_synchronization=True)``. It makes the name from the number of groups that this
    rank is in; ranks that are in different numbers of groups, as in any trainer, then wait for each other for ever.
    """
    store = PrefixStore(f"{board.key}/{name}/{'.'.join(map(str, ranks))}", board.store)
    group = dist.ProcessGroupGloo(store, ranks.index(board.rank), len(ranks), timeout)
    verbs = cast("dist.ProcessGroup", group)  # a backend has those of a group that we call
    return Channel(name, verbs, tuple((rank, index) for index, rank in enumerate(ranks)))


def _nccl_channel(name: str, ranks: tuple[int, ...], board: FailureBoard, timeout: timedelta) -> Channel:
    """A registered group, because torch's batched messages need one; so ranks must be in equal numbers of groups here."""
    del board
    group = dist.new_group(
        list(ranks), timeout=timeout, backend="nccl", use_local_synchronization=True, group_desc=f"commlayer:{name}"
    )
    if group is None:
        raise GroupError(f"torch made no group for ranks {ranks}: is the default process group initialised?")
    return Channel(name, group, tuple((rank, dist.get_group_rank(group, rank)) for rank in ranks))

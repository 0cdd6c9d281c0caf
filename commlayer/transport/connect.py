"""Transports of a grid of ranks: process groups of our own, so that our messages never meet the
caller's."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed has it too, but not for type checkers

from commlayer.agree.discovery import Grid
from commlayer.devices.device_contract import Messenger
from commlayer.failures.board import FailureBoard, own_client
from commlayer.failures.descriptors import CLIENT, require
from commlayer.failures.forks import never_free_in_child
from commlayer.failures.waits import bounded
from commlayer.profiles.errors import GroupError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.plan import Op
from commlayer.settings import Settings
from commlayer.transport.accelerators import registered_accelerators
from commlayer.transport.c10d import is_usable
from commlayer.transport.contract import Channel, Transport
from commlayer.transport.gloo import GlooTransport
from commlayer.transport.gloo_groups import gloo_in_order, needed_descriptors
from commlayer.transport.nccl import Inner, InnerMessenger, Nccl, connect_now
from commlayer.transport.shared_memory.shared_messages import sharing_memory

__all__ = ["connect", "gloo_of_grid", "require_device_type"]


def require_device_type(name: str) -> None:
    """Raises UsageError for a type of device that nothing here moves tensors of."""
    known = ["cpu", *(["cuda"] if is_usable() else []), *registered_accelerators()]
    if name not in known:
        raise UsageError(
            f"device must be {' or '.join(known)} here, got {name!r}: torch has no such device, or no NCCL"
        )


def connect(grid: Grid, device: str, board: FailureBoard, store: Store, timeout_s: float) -> Transport:
    """Make the groups of this rank's row and column, and the transport over them. Collective over
    the grid.

    Raises PeerError, CollectiveTimeoutError where a rank does not come.
    """
    timeout = timedelta(seconds=timeout_s)
    wanted = [
        (Op.ALL_TO_ALL, "ep", grid.ep_ranks, grid.link is Resource.INTRA),
        (Op.ALL_GATHER, "tp", grid.tp_ranks, True),
    ]
    wanted = [each for each in wanted if len(each[2]) > 1]
    if device == "cpu":
        channels = {}
        for op, name, ranks, is_inside in wanted:
            with board.connecting(ranks, name, "messages", timeout_s):
                group = gloo_of_grid(name, ranks, board, store, timeout, is_inside=is_inside)
            channels[op] = Channel(name, group, tuple((rank, index) for index, rank in enumerate(ranks)))
        return GlooTransport(channels, board)
    from commlayer.devices.accelerator import AcceleratorDevice
    from commlayer.transport.stream_scripts import StepMessenger
    from commlayer.transport.streams import StreamTransport

    lines = {}
    for op, name, ranks, _ in wanted:
        with board.connecting(ranks, name, "messages", timeout_s):
            lines[op] = StepMessenger(*_device_line(device, name, ranks, board, store, timeout))
    index: int = torch.get_device_module(device).current_device()
    accelerator = AcceleratorDevice(torch.device(device, index))
    return StreamTransport(accelerator, lambda step: lines.get(step.op), list(lines.values()))


def _device_line(
    device_type: str, name: str, ranks: tuple[int, ...], board: FailureBoard, store: Store, timeout: timedelta
) -> tuple[Messenger, tuple[int, ...]]:
    """A communicator of ``ranks``, connected, and which rank in it each of them is.

    NCCL's is that of a registered group, which torch connects as it connects the user's; so ranks
    must be in equal numbers of groups here. The group leaves torch's list when it is closed.
    """
    maker = registered_accelerators().get(device_type)
    if maker is not None:
        own = PrefixStore(f"{board.key}/{device_type}/{name}/{'.'.join(map(str, ranks))}", own_client(store))
        make = partial(maker, own, ranks.index(board.rank), ranks, timeout, f"{name} of a Communicator")
        registered = bounded(make, board, timeout.total_seconds(), f"connecting group {name}")
        return InnerMessenger(registered), tuple(range(len(ranks)))
    group: dist.ProcessGroup | None = dist.new_group(
        list(ranks),
        timeout=timeout,
        backend="nccl",
        use_local_synchronization=True,
        group_desc=f"commlayer:{name}",
    )
    if group is None:
        raise GroupError(f"torch made no group for ranks {ranks}: is the default process group initialised?")
    device = torch.device("cuda", torch.cuda.current_device())
    inner = Nccl(cast("Inner", group._get_backend(device)), verbs=group)
    connect_now(inner, device)
    messenger = InnerMessenger(inner, partial(dist.destroy_process_group, group))
    return messenger, tuple(dist.get_group_rank(group, rank) for rank in ranks)


def gloo_of_grid(
    name: str, ranks: tuple[int, ...], board: FailureBoard, store: Store, timeout: timedelta, *, is_inside: bool = False
) -> dist.ProcessGroup:
    """Make a Gloo group of some ranks of a grid, straight from the store, under a name that all
    ranks agreed on. Collective.

    ``is_inside``: they are of one node, and share its memory.

    Rejected: ``dist.new_group(…, use_local_synchronization=True)``. It makes the name from the
    number of groups that this rank is in; ranks that are in different numbers of groups, as in any
    trainer, then wait for each other for ever.
    """
    require(needed_descriptors(len(ranks)) + CLIENT, f"rank {board.rank}, group {name}: a group of {len(ranks)} ranks")
    member, timeout_s = ranks.index(board.rank), timeout.total_seconds()

    def make() -> dist.ProcessGroup:
        own = PrefixStore(f"{board.key}/{name}/{'.'.join(map(str, ranks))}", own_client(store))
        group = gloo_in_order(own, member, len(ranks), timeout)
        never_free_in_child(group)
        verbs = cast("dist.ProcessGroup", group)  # a backend has those of a group that we call
        return sharing_memory(verbs, member, [range(len(ranks))], timeout_s, settings, board) if is_inside else verbs

    settings = Settings.from_environment()
    return bounded(make, board, timeout_s, f"connecting group {name}")

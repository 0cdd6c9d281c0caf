"""Neighbours: which groups of a job communicate at the same time, and so share cards and memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commlayer.backend import world
from commlayer.profiles.errors import GroupError, UsageError

__all__ = ["is_planned", "tell_neighbours", "use_neighbours"]


def is_planned(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is of backend ``commlayer``, in a job of which all ranks' nodes are known."""
    return hasattr(group, "use_siblings") and world.current() is not None


def use_neighbours(group: dist.ProcessGroup, groups: Sequence[Sequence[int]]) -> None:
    """Plan the calls of ``group`` for ``groups``, lists of global ranks, which communicate at the same time as it does.

    Collective: all ranks of ``group`` call this between the same calls, and agree on what it comes to. How many of ``groups``
    share a node with this one decides, as
    :meth:`CommlayerGroup.use_siblings <commlayer.backend.group.CommlayerGroup.use_siblings>` does.

    Raises:
        GroupError: the default group, or ``group``, is not of backend ``commlayer``: then nobody knows which ranks share a node.
        UsageError: ``group`` is not among ``groups``, or two of these have a rank in common.
        DisagreementError: the ranks of ``group`` were given lists that come to different numbers; names who said what.
    """
    job = world.current()
    planned: Any = group
    if job is None or not is_planned(group):
        raise GroupError(
            "use_neighbours() needs a group of backend commlayer in a job whose default group is one too: "
            'init_process_group("commlayer"), or say the number itself with group.use_siblings()'
        )
    own = dist.get_process_group_ranks(group)
    try:
        listed = [[operator.index(rank) for rank in members] for members in groups]
    except TypeError as error:
        raise UsageError(
            f"rank {dist.get_rank()}: expected lists of ranks, one for each group, got {groups!r}"
        ) from error
    ranks = [rank for members in listed for rank in members]
    is_sound = len(set(ranks)) == len(ranks) and all(listed) and set(ranks) <= set(job.ranks)
    if not is_sound or sorted(own) not in [sorted(members) for members in listed]:
        raise UsageError(
            f"rank {dist.get_rank()}: expected groups of the job's ranks without common ones, {own} among them, got {listed}"
        )
    index_of = {rank: index for index, rank in enumerate(job.ranks)}
    own_nodes, *others = ({job.topology.node_of(index_of[rank]) for rank in members} for members in (own, *listed))
    # How many groups have ranks on that node of this group which most of them share.
    planned.use_siblings(max(sum(node in nodes for nodes in others) for node in own_nodes))


def tell_neighbours(mesh: DeviceMesh) -> None:
    """Tell every group of ``mesh`` that the groups of its dimension communicate at the same time, as training steps do.

    Collective: all ranks of the mesh call this between the same calls. Groups that are not planned stay as they are; a
    group that serves two dimensions goes by the last one.
    """
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if is_planned(group):
            groups = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            use_neighbours(group, groups)

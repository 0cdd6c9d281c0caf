"""Whole numbers of every rank of a group, told over the host in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commlayer.agree.messages import Peers, blaming

__all__ = ["everyones_numbers"]


def everyones_numbers(group: dist.ProcessGroup, mine: Sequence[int], purpose: str) -> list[list[int]]:
    """Tell all ranks of ``group`` as many numbers as each of them tells, and return everybody's, in the group's order.

    Collective; ``purpose``: "to exchange counts".

    Raises CollectiveTimeoutError where a rank does not come, PeerError where one is gone; both name the ranks and the purpose.
    """
    told = torch.tensor(mine, dtype=torch.int64)
    everyones = [torch.empty_like(told) for _ in range(group.size())]
    with blaming(Peers.of(group), None, purpose):
        dist.all_gather(everyones, told, group=group)
    return [each.tolist() for each in everyones]

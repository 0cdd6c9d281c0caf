"""Messages of plans over NCCL: grouped sends and receives, and all_gather, on the stream that is current."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commlayer.devices.contract import Addressed, Received

__all__ = ["NcclMessenger"]


class _All:
    """Several works as one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()  # makes the current stream wait, not the host


class NcclMessenger:
    """A process group with the NCCL backend. ``global_ranks[i]`` is the rank in the job of its member i."""

    def __init__(self, group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
        self.group, self._ranks = group, tuple(global_ranks)

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Received:
        messages = [dist.P2POp(dist.irecv, tensor, self._ranks[place], self.group) for place, tensor in receives]
        messages += [dist.P2POp(dist.isend, tensor, self._ranks[place], self.group) for place, tensor in sends]
        return _All(dist.batch_isend_irecv(messages))

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Received:
        work = dist.all_gather_into_tensor(whole, mine, group=self.group, async_op=True)
        return _All([] if work is None else [work])

    def abort(self) -> None:
        group: Any = self.group
        group.abort()

    def close(self) -> None:
        dist.destroy_process_group(self.group)

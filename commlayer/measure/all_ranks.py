"""All ranks of the job, as measuring needs them: also before there is a default process group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.agree import messages
from commlayer.agree.messages import ControlMessage, Peers
from commlayer.agree.tree import gather_by_tree
from commlayer.failures.detector import FailureDetector
from commlayer.transport.c10d import device_type

__all__ = ["AllRanks", "ProfileText"]

M = TypeVar("M", bound=ControlMessage)
_PURPOSE = "to agree on a profile"


class ProfileText(ControlMessage, frozen=True):
    """A profile on its way to another rank: the text of its file, which the ordinary loader checks where it arrives."""

    json: str


@dataclass(frozen=True)
class AllRanks:
    """``group`` has c10d's verbs (a process group, or a backend of one) over all ranks. ``device_type``: cpu or cuda.

    ``global_ranks``: what errors call the ranks of ``group``, in its order. Every method is collective.
    """

    rank: int
    size: int
    store: Store
    group: dist.ProcessGroup
    device_type: str
    global_ranks: tuple[int, ...]
    detector: FailureDetector | None = None
    """The failure detector of these ranks, where there is one already."""
    timeout_s: float | None = None
    """The longest wait for what ranks tell each other; None: the group's own timeout."""

    @classmethod
    def default(cls) -> AllRanks:
        """The initialised default process group."""
        group = dist.group.WORLD
        assert group is not None  # callers initialise it
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(rank, size, _get_default_store(), group, device_type(None), tuple(range(size)))

    @property
    def device(self) -> torch.device:
        """Where the group's tensors are."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def maximum(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        return self.maxima([value])[0]

    def maxima(self, values: Sequence[float]) -> list[float]:
        """The largest of each of ``values`` over ranks, all of which give as many."""
        largest: list[float] = self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
        return largest

    def time_all_reduce(self, num_bytes: int) -> float:
        """The time of one all_reduce of the group's own, µs: the largest over ranks, and equal on all of them."""
        value = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=self.device)
        self.group.barrier().wait()
        begin = time.perf_counter()
        float(self._reduced(value, dist.ReduceOp.SUM)[0])  # which a device has to have ended
        return self.maximum((time.perf_counter() - begin) * 1e6)

    def total(self, value: int) -> int:
        """The sum of ``value`` over ranks."""
        return int(self._reduced(torch.tensor([value], dtype=torch.int64), dist.ReduceOp.SUM))

    def from_first(self, value: M, type_: type[M]) -> M:
        """Rank 0's ``value``. Raises DisagreementError on the ranks that cannot read it."""
        return messages.from_first(value, type_, self._peers, self.timeout_s, _PURPOSE)

    def gather(self, value: M, type_: type[M]) -> list[M]:
        """``value`` of every rank, in rank order. Raises DisagreementError naming a rank whose words cannot be read."""
        gather = (
            gather_by_tree if self.device_type == "cpu" else messages.gather_messages
        )  # NCCL connects for each message
        return gather(value, type_, self._peers, self.timeout_s, _PURPOSE)

    @property
    def _peers(self) -> Peers:
        return Peers(self.group, self.global_ranks, self.rank, self.device)

    def _reduced(self, value: torch.Tensor, op: Any) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        value = value.to(self.device)
        self.group.allreduce([value], options).wait()
        return value

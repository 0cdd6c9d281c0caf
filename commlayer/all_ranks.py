"""All ranks of the job, as measuring needs them: also before there is a default process group."""

from __future__ import annotations

import pickle
import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.connect import device_type
from commlayer.detector import FailureDetector

__all__ = ["AllRanks"]


@dataclass(frozen=True)
class AllRanks:
    """``group`` has c10d's verbs (a process group, or a backend of one) over all ranks. ``device_type``: cpu or cuda.

    Every method is collective, and waits as long as the group's timeout.
    """

    rank: int
    size: int
    store: Store
    group: dist.ProcessGroup
    device_type: str
    detector: FailureDetector | None = None
    """Of these ranks, where there is one already."""

    @classmethod
    def default(cls) -> AllRanks:
        """The initialised default process group."""
        group = dist.group.WORLD
        assert group is not None  # callers initialise it
        return cls(dist.get_rank(), dist.get_world_size(), _get_default_store(), group, device_type(None))

    @property
    def device(self) -> torch.device:
        """Where the group's tensors are."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.group.barrier().wait()

    def maximum(self, value: float) -> float:
        """The largest ``value`` over ranks."""
        return float(self._reduced(torch.tensor([value], dtype=torch.float64), dist.ReduceOp.MAX))

    def total(self, value: int) -> int:
        """The sum of ``value`` over ranks."""
        return int(self._reduced(torch.tensor([value], dtype=torch.int64), dist.ReduceOp.SUM))

    def from_first(self, value: Any) -> Any:
        """Rank 0's ``value``, which can be pickled."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = int(self._sent(torch.tensor([content.numel()], dtype=torch.int64)))
        if self.rank != 0:
            content = torch.empty(length, dtype=torch.uint8)
        return pickle.loads(self._sent(content).cpu().numpy().tobytes())

    def name(self) -> str:
        """Another name each time, the same on all ranks, for what they make together in their store."""
        return str(self.from_first(uuid.uuid4().hex))

    def gather(self, text: str) -> list[str]:
        """``text`` of every rank, in rank order."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        longest = int(self.maximum(mine.numel()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        padded = padded.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.group.allgather([parts], [padded]).wait()
        return [part.cpu().numpy().tobytes().rstrip(b"\0").decode() for part in parts]

    def _reduced(self, value: torch.Tensor, op: Any) -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        value = value.to(self.device)
        self.group.allreduce([value], options).wait()
        return value

    def _sent(self, value: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        value = value.to(self.device)
        self.group.broadcast([value], options).wait()
        return value

"""Messages of plans over an inner backend with NCCL's order: grouped sends and receives, and all_gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from commlayer.devices.device_contract import Addressed, Received
from commlayer.transport.c10d import verb_of
from commlayer.transport.nccl import Nccl

__all__ = ["InnerMessenger"]


class InnerMessenger:
    """A communicator of an inner backend (``dist.ProcessGroupNCCL``), whose works make streams wait, not the host.

    ``close`` ends it where that is not its own ``shutdown``.

    Its messages are posted without a process group around it: torch's batched messages need a registered one, which all ranks of
    the job would have to make in the same order.
    """

    def __init__(self, inner: Nccl, close: Callable[[], object] | None = None) -> None:
        self.backend: Any = inner.backend
        self._close: Callable[[], object] = close or self.backend.shutdown
        self._verbs: Any = inner.verbs or inner.backend

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Received:
        backend = self.backend
        backend._start_coalescing()
        for place, tensor in receives:
            backend.recv([tensor], place, 0)
        for place, tensor in sends:
            backend.send([tensor], place, 0)
        return backend._end_coalescing()  # type: ignore[no-any-return]

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> Received:
        return verb_of(self._verbs, "all_gather_single")(whole, mine, AllgatherOptions())  # type: ignore[no-any-return]

    def abort(self) -> None:
        self.backend.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self.backend._set_default_timeout(timeout)

    def close(self) -> None:
        self._close()

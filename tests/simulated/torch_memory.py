"""The memory of a simulated device that torch sees: handed on as early as streams allow, and spoiled before that.

A block belongs to the stream on which it was allocated. Freed, it is handed on to that stream at once, as by CUDA's caching
allocator: what other streams still do to it is lost, unless they were recorded. Whoever gets a block finds it overwritten, in the
order of the stream, with bytes of which every float is not a number: so what reads it too late reads these.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from commlayer.profiles.errors import UsageError
from simulated.torch_streams import QueueMark, QueueRunner, StreamQueue

__all__ = ["TorchMemory"]

_GRAIN = 512
_SPOILED = 0xFF
"""A byte of which FP32, BF16 and FP16 numbers are NaN, and integers are -1."""


@dataclass(eq=False)
class _Block:
    """A piece of the memory, in bytes. ``users``: the streams beside its own that were recorded."""

    start: int
    size: int
    queue: StreamQueue
    users: set[StreamQueue] = field(default_factory=set)


class TorchMemory:
    """Hands out pieces of one CPU tensor, whose bytes are the device's memory."""

    def __init__(self, num_bytes: int, runner: QueueRunner) -> None:
        self._runner = runner
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._array: Any = self._bytes.numpy()
        self._base = self._bytes.data_ptr()
        self._fresh = -self._base % _GRAIN  # where nobody has been yet
        self._lock = threading.RLock()
        self._free: dict[tuple[StreamQueue, int], list[_Block]] = {}
        self._taken: dict[int, tuple[_Block, Any]] = {}
        self._dropped: deque[int] = deque()  # by whatever thread let go of a tensor
        self._in_use: list[tuple[_Block, list[QueueMark]]] = []

    @property
    def allocated(self) -> int:
        """How many bytes tensors hold."""
        with self._lock:
            self.collect()
            return sum(block.size for block, _ in self._taken.values())

    def take(self, num_bytes: int, queue: StreamQueue) -> Any:
        """TorchMemory for the stream ``queue``: an array of bytes, which is given back when nobody holds it any more.

        Raises UsageError where there is none left.
        """
        size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        with self._lock:
            self.collect()
            block = self._find(size, queue)
            self._spoil(block)
            array = self._array[block.start : block.start + num_bytes]
            start = block.start
            self._taken[start] = block, weakref.ref(array, lambda _: self._dropped.append(start))
        return array

    def _find(self, size: int, queue: StreamQueue) -> _Block:
        free = self._free.get((queue, size))
        if free:
            return free.pop()  # the one that was given back last
        if self._fresh + size <= len(self._array):
            block = _Block(self._fresh, size, queue)
            self._fresh += size
            return block
        for marks in [self._runner.record(each) for each in self._queues()]:
            self._runner.until(marks, "to find free memory")
        self.collect()
        for (_, each), blocks in self._free.items():  # those of other streams, too: nothing is under way
            if each >= size and blocks:
                block = blocks.pop()
                return _Block(block.start, block.size, queue)
        raise UsageError(
            f"{self._runner.who}: the simulated device has no {size} bytes left of {len(self._array)}: "
            "give simulated_device more memory_bytes"
        )

    def _queues(self) -> set[StreamQueue]:
        return {queue for queue, _ in self._free}

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor with the same bytes as ``tensor``. It holds no memory: that may be handed on."""
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        where = tensor.data_ptr() - self._base
        typed = self._bytes if tensor.dtype is torch.uint8 else self._typed(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), where // tensor.element_size())

    def _typed(self, dtype: torch.dtype) -> torch.Tensor:
        size = torch.empty((), dtype=dtype).element_size()
        return self._bytes[: len(self._bytes) // size * size].view(dtype)

    def use(self, tensor: torch.Tensor, queue: StreamQueue) -> None:
        """Have the memory of ``tensor``, once it is freed, not handed on before what ``queue`` was given until then has run."""
        with self._lock:
            taken = self._taken.get(tensor.untyped_storage().data_ptr() - self._base)
            if taken is not None and taken[0].queue is not queue:
                taken[0].users.add(queue)

    def spoil(self, storage: Any) -> None:
        """Overwrite a storage that is freed though somebody still holds it, as torch's FSDP does."""
        with self._lock:
            taken = self._taken.get(storage.data_ptr() - self._base)
            if taken is not None:
                block = taken[0]
                for user in block.users:
                    self._runner.wait_for(block.queue, self._runner.record(user))
                self._spoil(block)

    def collect(self) -> None:
        """Take back what was dropped, and hand it on where no recorded stream uses it any more."""
        with self._lock:
            while self._dropped:
                block, _ = self._taken.pop(self._dropped.popleft())
                users, block.users = block.users, set()
                if users:
                    self._in_use.append((block, [self._runner.record(queue) for queue in users]))
                else:
                    self._give_back(block)
            still = []
            for block, marks in self._in_use:
                if all(mark.is_done for mark in marks):
                    self._give_back(block)
                else:
                    still.append((block, marks))
            self._in_use = still

    def _give_back(self, block: _Block) -> None:
        self._free.setdefault((block.queue, block.size), []).append(block)

    def _spoil(self, block: _Block) -> None:
        whole = self._bytes[block.start : block.start + block.size]
        self._runner.launch(block.queue, "new memory", lambda: whole.fill_(_SPOILED))

"""The memory of a simulated device, handed on as early as CUDA's caching allocator may, and spoilt when it is."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from commlayer.devices.device_contract import StreamEvent

__all__ = ["SPOILT", "SimulatedMemory"]

SPOILT = 0xDB
"""The byte that memory holds when it is handed out: what reads it before it is written shows."""
_GRAIN = 512


class _Held(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that a tensor's storage refers to: they are freed with it, whatever views there were. An array itself cannot be
    referred to weakly."""


class _Stream(Protocol):
    """Streams as memory sees them: ``number`` tells them apart, ``mark`` records an event without running anything."""

    number: int

    def launch(self, work: Callable[[], object]) -> None: ...

    def mark(self) -> StreamEvent: ...


class _Block:
    __slots__ = ("bytes", "pending", "stream", "users")

    def __init__(self, stream: _Stream, size: int) -> None:
        self.bytes = np.full(size, SPOILT, dtype=np.uint8)
        self.stream = stream
        self.users: set[_Stream] = set()
        self.pending: list[StreamEvent] = []


class SimulatedMemory:
    """Blocks of one device, each of the stream that was current when it was allocated.

    When the last tensor in a block is gone, the block goes to the next allocation of its size on the same stream, at once: what
    that stream was given before runs before. What other streams were given may not have run: for those which :meth:`keep` has
    named the block is held back until they have. ``known_done(stream, event)`` is told where an allocation on the stream has seen
    the event done.
    """

    def __init__(self, current: Callable[[], Any], known_done: Callable[[Any, Any], None]) -> None:
        self._current: Callable[[], _Stream] = current
        self._known_done = known_done
        self._free: defaultdict[tuple[int, int], list[_Block]] = defaultdict(list)
        self._blocks: dict[int, _Block] = {}
        self._freed: list[_Block] = []
        self.handed_on = 0  # how often a block had been another tensor's before

    def empty(self, num_bytes: int) -> torch.Tensor:
        """A block of the current stream, 1-D uint8 [num_bytes], which holds :data:`SPOILT` when the stream comes to it."""
        self.take_back()
        stream = self._current()
        size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        block = self._reused(stream, size)
        if block is None:
            block = _Block(stream, size)
        else:
            self.handed_on += 1
            whole = torch.from_numpy(block.bytes)
            stream.launch(lambda: whole.fill_(SPOILT))
        held = block.bytes.view(_Held)
        tensor = torch.frombuffer(held, dtype=torch.uint8)[:num_bytes]
        self._blocks[block.bytes.ctypes.data] = block
        # Only noted: the last reference may go while the machine is in the middle of something.
        weakref.finalize(held, self._freed.append, block).atexit = False
        return tensor

    def keep(self, tensor: torch.Tensor, stream: _Stream) -> None:
        """``stream`` uses the tensor's memory, which is then not handed on before all has run that was launched there until it is
        freed."""
        block = self.block_of(tensor)
        if block is not None and stream is not block.stream:
            block.users.add(stream)

    def unheld(self, value: Any) -> Any:
        """``value`` with tensors that do not hold the device's memory: what a GPU was given to run does not hold it either.

        Looks into partials, methods of tensors, lists and tuples; what else has tensors, a lambda, holds them until it has run.
        """
        if isinstance(value, torch.Tensor):
            return self._alias(value)
        if isinstance(value, partial):
            args, keywords = self.unheld(value.args), {name: self.unheld(each) for name, each in value.keywords.items()}
            return partial(self.unheld(value.func), *args, **keywords)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.unheld, value))
        owner = getattr(value, "__self__", None)
        if isinstance(owner, torch.Tensor):
            return getattr(self._alias(owner), value.__name__)
        return value

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self.block_of(tensor)
        if block is None:
            return tensor
        whole = torch.from_numpy(block.bytes).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def block_of(self, tensor: torch.Tensor) -> _Block | None:
        """The block in which a tensor lies; None for memory of another kind."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""
        return self.block_of(tensor) is not None

    def _reused(self, stream: _Stream, size: int) -> _Block | None:
        free = self._free[stream.number, size]
        for index in range(len(free) - 1, -1, -1):
            block = free[index]
            if all(event.is_done() for event in block.pending):
                del free[index]
                for event in block.pending:
                    self._known_done(stream, event)
                block.pending.clear()
                return block
        return None

    def take_back(self) -> None:
        """Take in what has been freed since the program has launched something last."""
        freed, self._freed[:] = self._freed[:], []
        for block in freed:
            block.pending = [stream.mark() for stream in sorted(block.users, key=lambda stream: stream.number)]
            block.users.clear()
            self._free[block.stream.number, len(block.bytes)].append(block)

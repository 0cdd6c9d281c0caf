"""The memory that the ranks of one node share: one nameless file, in which each rank has a slab of
its own.

The file is sparse: a slab may grow to ``_SLAB_BYTES`` without a word to anybody, and costs memory
only where it was written. Rejected: a memory file for each rank. A slab that grows must be
announced, and every rank holds a descriptor for each. Memory that was once written is kept until
the group ends, as staging memory is: giving it back and taking it again costs more than the copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

__all__ = ["Block", "FirstFit", "Segment", "Slab"]

_SLAB_BYTES = 1 << 40
_SMALLEST_MAP_BYTES = 16 << 20
"""Addresses, not memory: a map that need not be made again soon."""
_PAGE_BYTES = 4096


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a slab. ``readers``: the ranks who have not read them yet, once for each message."""

    start: int
    size: int
    readers: list[int] = field(default_factory=list)


class FirstFit:
    """Which bytes of a slab are in use. The lowest hole is taken first, so that what caches hold is
    used again."""

    def __init__(self) -> None:
        self.top = 0
        """The first byte behind everything in use."""
        self._holes: list[tuple[int, int]] = []  # (start, stop) below top, in order, never touching each other

    def allocate(self, size: int) -> int:
        """The start of ``size`` free bytes; there always are some."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= size:
                if stop - start == size:
                    del self._holes[index]
                else:
                    self._holes[index] = start + size, stop
                return start
        start = self.top
        self.top += size
        return start

    def release(self, start: int, size: int) -> None:
        """Give back what ``allocate`` gave."""
        stop = start + size
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        if stop == self.top:
            self.top = start
        else:
            self._holes.insert(index, (start, stop))


class Segment:
    """The shared file as one process sees it; slab k belongs to local rank k. Takes over the
    descriptor ``fd``."""

    def __init__(self, fd: int, num_slabs: int) -> None:
        self._fd = fd
        self._slabs = [torch.empty(0, dtype=torch.uint8)] * num_slabs

    @classmethod
    def create(cls, num_slabs: int) -> Segment:
        """A new, empty file without a name. Raises OSError where the system has none to give."""
        fd = os.memfd_create("commlayer", os.MFD_CLOEXEC)
        segment = cls(fd, num_slabs)
        os.ftruncate(fd, num_slabs * _SLAB_BYTES)
        return segment

    def fileno(self) -> int:
        """The descriptor, to be passed on."""
        return self._fd

    def bytes_of(self, slab: int, start: int, size: int) -> torch.Tensor:
        """Bytes of a slab as they lie in shared memory: 1-D uint8 [size]. Raises OSError where they
        cannot be mapped."""
        stop = start + size
        if stop > self._slabs[slab].numel():
            if stop > _SLAB_BYTES:
                raise OSError(f"{stop} bytes in flight, and a rank's part of the shared memory ends at {_SLAB_BYTES}")
            # The old map lives on where it is in use. Maps are twice as large each time, so there
            # are few.
            length = max(_SMALLEST_MAP_BYTES, 1 << (stop - 1).bit_length())
            memory = _mapped(self._fd, length, slab * _SLAB_BYTES)
            with torch.inference_mode(
                False
            ):  # it outlives this call, and an inference tensor can be written in that mode only
                self._slabs[slab] = torch.frombuffer(memory, dtype=torch.uint8)
        return self._slabs[slab][start:stop]

    def close(self) -> None:
        """Let go of the memory; the kernel takes it back with the last process that has it."""
        self._slabs = [torch.empty(0, dtype=torch.uint8)] * len(self._slabs)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def _mapped(fd: int, length: int, offset: int) -> Any:
    """A buffer over bytes of the file ``fd``, shared with who else maps them. Raises OSError.

    Without a descriptor of its own: Python's mmap keeps a copy of ``fd`` for each map, unless told
    otherwise (from 3.13 on).
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, length, offset=offset, trackfd=False)
    libc = _libc()
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * length).from_address(address)
    weakref.finalize(
        memory, libc.munmap, address, length
    ).atexit = False  # who reads it may be younger than the program's end
    return memory


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    libc.munmap.argtypes, libc.munmap.restype = [pointer, size], number
    return libc


class Slab:
    """The slab that this rank writes, and what in it is still to be read."""

    def __init__(self, segment: Segment, index: int) -> None:
        self._segment, self._index = segment, index
        self._space = FirstFit()
        self._blocks: dict[int, Block] = {}
        self.high_water = 0
        """Bytes of memory that the slab takes."""
        self.unread_bytes = 0
        self.sent: dict[tuple[int, int], tuple[Block, torch.Tensor]] = {}
        """Tensors that were sent since the last wait, by address and size; cleared by it. They
        cannot have changed: nobody can know yet that they may be. Kept alive, so that another
        tensor cannot have got their address."""

    def find(self, tensor: torch.Tensor) -> Block | None:
        """The block that holds ``tensor``'s bytes already, because it was sent to somebody else
        just now."""
        sent = self.sent.get((tensor.data_ptr(), tensor.numel()))
        return sent[0] if sent is not None and sent[0].readers else None  # read by all: overwritten, perhaps

    def would_grow(self, size: int) -> bool:
        """Whether ``size`` more bytes might not fit into the memory that the slab takes."""
        return self._space.top + size + _PAGE_BYTES > self.high_water

    def place(self, tensor: torch.Tensor) -> Block:
        """Copy ``tensor`` into the slab. Raises OSError where there is no memory to be mapped."""
        size = tensor.numel()
        rounded = -(-size // _PAGE_BYTES) * _PAGE_BYTES
        start = self._space.allocate(rounded)
        self._segment.bytes_of(self._index, start, size).copy_(tensor)
        self.high_water = max(self.high_water, start + rounded)
        block = self._blocks[start] = Block(start, rounded)
        self.sent[tensor.data_ptr(), size] = block, tensor
        self.unread_bytes += rounded
        return block

    def was_read(self, start: int, reader: int) -> None:
        """One of its readers needs the block at ``start`` no more."""
        block = self._blocks[start]
        block.readers.remove(reader)
        if not block.readers:
            del self._blocks[start]
            self._space.release(start, block.size)
            self.unread_bytes -= block.size

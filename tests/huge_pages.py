"""Huge pages for the memory of the process that forks ranks.

A fork copies an entry for each page that its parent has written, and the end of a child frees as
many. A process that has imported all tests has written ninety thousand pages of 4 KiB. In huge
pages of 2 MiB, starting and ending a rank that does nothing takes a third of the processor time.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["gather"]

_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20
_WORTHWHILE_BYTES = 32 << 20
"""So much new memory is worth another search: it is that of libraries which a test has imported."""

_resident_bytes = 0
"""The memory in use when it was last searched."""


def gather() -> None:
    """Have the kernel move what this process has written into huge pages, where much of it is new.

    A kernel that cannot (Linux before 6.1) changes nothing. Pages that are written while ranks live
    become small ones again: few.
    """
    global _resident_bytes
    if _in_use() < _resident_bytes + _WORTHWHILE_BYTES:
        return
    madvise = ctypes.CDLL(None).madvise
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights != "rw-p" or inode != "0" or name == ["[stack]"]:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if first < end:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
    _resident_bytes = _in_use()


def _in_use() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")

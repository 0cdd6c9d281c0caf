"""How many files this process may still open (``ulimit -n``), and whether what is about to be made
fits into that.

It is counted before, because nobody below takes a lack of descriptors well: Gloo throws on a thread
of its own when it cannot accept a connection, which ends the process with SIGABRT; c10d's store
tries to connect for its whole timeout, half an hour, and a program that ends meanwhile is aborted
too.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from typing import Protocol

from commlayer.profiles.errors import ClusterError

__all__ = [
    "CLIENT",
    "GLOO_DEVICE",
    "Awaiting",
    "explained",
    "of_gloo",
    "of_shared_memory",
    "require",
    "set_aside",
    "shortfall",
]

CLIENT = 4
"""Descriptors that connecting to the store takes for a moment: its socket, and the files that
looking up a name opens."""
GLOO_DEVICE = 4
"""Descriptors of a device of Gloo's: its listener, its poll, and the two ends of the pipe that
wakes its thread."""
_ADVISED = 1024
_RESERVE = 64
_TABLE = "/proc/self/fd"


class Awaiting(Protocol):
    """Something that opens files later, on a thread of its own."""

    @property
    def awaited(self) -> int:
        """How many more it will open."""


_awaiting: weakref.WeakSet[Awaiting] = weakref.WeakSet()


def set_aside(holder: Awaiting) -> None:
    """Count what ``holder`` will open as open already; it is not kept alive."""
    _awaiting.add(holder)


def of_gloo(size: int) -> int:
    """Count the descriptors of a Gloo group of ``size`` ranks: a connection to each other rank. Its
    device is counted apart."""
    return size - 1


def of_shared_memory(size: int) -> int:
    """Count the descriptors of ``size`` ranks that share memory: a connection to each other rank,
    the memory, the poll, and for a moment the socket at which they meet."""
    return size + 2


def limit() -> int:
    """The most descriptors that this process may have, or -1: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if soft == resource.RLIM_INFINITY else soft


def shortfall(needed: int, what: str) -> str:
    """Why ``what``, which takes ``needed`` descriptors, cannot be made here, and what to do; empty
    where it can, or nobody knows."""
    most = limit()
    if most < 0:
        return ""
    try:
        num_open = len(os.listdir(_TABLE)) - 1  # one was that of the listing
        free = max(0, most - num_open - sum(holder.awaited for holder in list(_awaiting)))
    except FileNotFoundError:
        return ""
    except OSError:  # EMFILE, ENFILE
        free = 0
    if free >= needed:
        return ""
    return f"{what} needs {needed} more open files, and this process may open {free} more. {_advice(needed - free)}"


def _advice(missing: int) -> str:
    most = limit()
    wanted = max(_ADVISED, 1 << (most + missing + _RESERVE).bit_length())
    return f"Its limit is {most}: raise it with `ulimit -n {wanted}` before the job starts"


def require(needed: int, what: str) -> None:
    """Raises ClusterError where ``what`` cannot have ``needed`` descriptors."""
    if short := shortfall(needed, what):
        raise ClusterError(short)


def explained(error: OSError) -> str:
    """The error as text, with what to do where descriptors lack."""
    return f"{error}. {_advice(1)}" if error.errno == errno.EMFILE else str(error)

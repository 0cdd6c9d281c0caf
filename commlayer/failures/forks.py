"""Forked children and what they inherit: a child has copies of this process's groups, but none of
their threads.

A call in such a group would wait for ever. So would freeing its inner Gloo group, which waits for a
thread that is not there: a child that leaves plain Gloo by ``sys.exit`` can hang. Breaking its
connections would break the parent's, because sockets, and the epoll behind them, are shared.
Whoever forks may not know of groups at all, as the workers of a DataLoader. So in a child

- groups, queues and Communicators are disowned (:func:`disown_in_child`): what is asked of them
  raises an error,
- inner Gloo groups are never freed (:func:`never_free_in_child`),
- what is kept for the whole process (statistics, traces, lanes) begins anew: each module sees to
  its own (:mod:`commlayer.forked_child`).

Sockets of shared memory are closed in the child: peers see at once when the parent is gone. Which
sockets are Gloo's nobody says; a child keeps them open until its end, as with plain Gloo.

Rejected: comparing process ids at every call and in every finaliser. It costs every call, and comes
too late for locks that another thread held when the process forked.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from commlayer.failures.waits import keep
from commlayer.forked_child import in_forked_child

__all__ = ["Disowned", "disown_in_child", "inherited", "never_free_in_child"]


class Disowned(Protocol):
    """Something that works in the process that made it only."""

    def disown(self) -> None:
        """This is a forked child's copy, and the child's only thread: take no lock of it, wait for
        nothing, send nothing."""


_things: weakref.WeakSet[Disowned] = weakref.WeakSet()
_immortal: weakref.WeakSet[Any] = weakref.WeakSet()


def disown_in_child(thing: Disowned) -> None:
    """Have ``thing.disown`` called in every child that is forked while ``thing`` is there."""
    _things.add(thing)


def never_free_in_child(inner: Any) -> None:
    """In every child that is forked, keep ``inner``, an inner group with threads, until the child's
    end."""
    _immortal.add(inner)


def inherited(what: str) -> str:
    """The text of the error for a use of ``what`` in a forked child."""
    return (
        f"{what} in a process that was forked after the group was made (this is process {os.getpid()}): a child has none "
        "of the group's threads. Call it in the process that made the group; or, in the child, call "
        "destroy_process_group and make a group of its own"
    )


@in_forked_child
def _disown_things() -> None:
    for inner in list(_immortal):
        keep(inner)  # whoever else lets go of it, also the interpreter at its end
    for thing in list(_things):
        thing.disown()
    _things.clear()

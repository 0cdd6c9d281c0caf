"""The list of what modules forget in a forked child, before it does anything else.

A child has copies of this process's memory, but none of its threads, so locks that another thread held stay locked. Groups and
inner groups, of which there are many, are in :mod:`commlayer.failures.forks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

__all__ = ["in_forked_child"]

_Task = TypeVar("_Task", bound=Callable[[], object])
_tasks: list[Callable[[], object]] = []


def in_forked_child(task: _Task) -> _Task:
    """Run ``task`` in every child that is forked from now on; a decorator.

    Tasks run in the order in which they were given, on the child's only thread: none takes a lock, waits or sends. All of them
    run where one raises; Python then prints its error.
    """
    _tasks.append(task)
    return task


def _run_tasks() -> None:
    with ExitStack() as stack:
        for task in reversed(_tasks):
            stack.callback(task)


os.register_at_fork(after_in_child=_run_tasks)

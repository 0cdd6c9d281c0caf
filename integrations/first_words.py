"""The one line that a trainer's hook says when it first plans: what, how, and from which profile."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist

from commlayer.backend import world
from commlayer.profiles.printable import printable

__all__ = ["planned_from", "say_first"]

_said: set[str] = set()


def planned_from() -> str:
    """Name the profile that this job plans from, in words for a line's end."""
    job = world.current()
    if job is None or job.planner is None:
        return "without a profile"
    return f"from profile {job.planner.profile.name}"


def say_first(whose: str, text: Callable[[], str]) -> None:
    """Print what ``text`` returns on stderr, the first time that ``whose`` planning is spoken of; on the job's rank 0 alone."""
    if whose in _said:
        return
    _said.add(whose)
    if dist.get_rank() == 0:
        print(f"commlayer: {printable(text())}", file=sys.stderr, flush=True)

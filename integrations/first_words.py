"""The one line that a trainer's hook says when it first plans: what, how, and from which profile."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from commlayer.backend import world
from commlayer.collectives import GroupCommunicator
from commlayer.profiles.printable import say

__all__ = ["planned_from", "say_first"]

_said: set[str] = set()


def planned_from(group: GroupCommunicator) -> str:
    """Name the profile that ``group`` plans from, in words for a line's end: the job's, or the group's own, where the default
    group is another backend's."""
    job = world.current()
    if job is not None and job.planner is not None:
        return f"from profile {job.planner.profile.name}"
    return "without a profile" if group.profile is None else f"from profile {group.profile.name}"


def say_first(whose: str, text: Callable[[], str]) -> None:
    """Print what ``text`` returns on stderr, the first time that ``whose`` planning is spoken of; on the job's rank 0 alone."""
    if whose in _said:
        return
    _said.add(whose)
    if dist.get_rank() == 0:
        say(text())

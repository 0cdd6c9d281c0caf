"""The lane of one group: its calls are announced to the process's lanes, and those of its own yield to higher ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from commlayer.lanes import lanes
from commlayer.planned import PlannedGroup
from commlayer.scheduler.lanes import level_of, longest_hold_us

__all__ = ["GroupLane"]


class GroupLane:
    """``name`` None: nobody has said yet; "" is none. ``is_on``: whether calls are announced and held."""

    __slots__ = ("_bytes_per_s", "_is_allowed", "_planned", "is_on", "level", "name")

    def __init__(self, planned: PlannedGroup) -> None:
        self._planned = planned
        self._is_allowed = planned.settings.lanes == "on" and len(planned.global_ranks) > 1
        planner = planned.choices.planner
        self._bytes_per_s = 0.0 if planner is None else planner.profile.peaks.of(planned.choices.link) * 1e9
        self.name: str | None = None
        self.is_on = False
        self.level = 0

    def use(self, name: str) -> None:
        """Raises UsageError for a lane that does not exist."""
        level = level_of(name)
        self.name, self.level = name, level
        self.is_on = self._is_allowed and bool(name)
        self._planned.use_lane(name if self.is_on else "")

    def enter(self, outputs: Any) -> int:
        """A call with these outputs is issued. Returns the level that :meth:`leave` wants: the lane may be changed meanwhile."""
        expected_s = _num_bytes(outputs) / self._bytes_per_s if self._bytes_per_s else 0.0
        lanes().enter(self.level, expected_s)
        return self.level

    def hold(self, num_bytes: int) -> int:
        """Before a call that is not cut: its beginning is the only edge that it has. Returns ns held."""
        if not (self.level and self.is_on):
            return 0
        alone_us = num_bytes / self._bytes_per_s * 1e6 if self._bytes_per_s else num_bytes / 1e3
        return int(lanes().hold(self.level, longest_hold_us(max(alone_us, 100.0), lanes().policy)) * 1e9)


def _num_bytes(outputs: Any) -> int:
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    return sum(map(_num_bytes, outputs)) if isinstance(outputs, Iterable) else 0

"""The lane of one group: its calls are announced to the process's lanes, and those of its own yield to higher ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from commlayer.engine.lanes import Issued, lanes
from commlayer.engine.planned import PlannedGroup
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import level_of, longest_hold_us

__all__ = ["GroupLane"]


class GroupLane:
    """``name`` None: nobody has said yet; "" is none. ``is_on``: whether calls are announced and held. ``is_told``: the program
    has said the lane, and not only a group's description."""

    __slots__ = ("_bytes_per_s", "_crosses", "_planned", "_wanted", "is_on", "is_told", "level", "name")

    def __init__(self, planned: PlannedGroup) -> None:
        self._planned = planned
        self._wanted = planned.settings.lanes if len(planned.global_ranks) > 1 else "off"
        planner = planned.choices.planner
        self._bytes_per_s = 0.0 if planner is None else planner.profile.peaks.of(planned.choices.link) * 1e9
        self._crosses = planned.choices.link is Resource.INTER
        self.name: str | None = None
        self.is_on = self.is_told = False
        self.level = 0

    def use(self, name: str, *, is_told: bool) -> None:
        """Raises UsageError for a lane that does not exist."""
        level = level_of(name)
        self.name, self.level, self.is_told = name, level, is_told
        # A name alone must cost a program nothing: without a profile there are no chunks to hold.
        is_wanted = self._wanted == "on" or (self._wanted == "auto" and (is_told or self._bytes_per_s > 0))
        self.is_on = is_wanted and bool(name)

    @property
    def cut(self) -> tuple[str, bool]:
        """For :meth:`PlannedGroup.use_lane`: the lane on which calls are held, and whether they are cut finely for it."""
        return (self.name or "") if self.is_on else "", self.is_told or self._wanted == "on"

    @property
    def cut_for(self) -> str:
        """The lane for which a call that is made now is cut finely; "" for none."""
        name, is_cut = self.cut
        return name if is_cut and level_of(name) else ""

    def enter(self, outputs: Any) -> Issued:
        """A call with these outputs is issued; :meth:`commlayer.engine.lanes.Lanes.leave` takes what is returned."""
        expected_s = _num_bytes(outputs) / self._bytes_per_s if self._bytes_per_s else None
        return lanes().enter(self.level, expected_s, crosses=self._crosses)

    def hold(self, num_bytes: int) -> int:
        """Before a call that is not cut: its beginning is the only edge that it has. Returns ns held."""
        if not (self.level and self.is_on):
            return 0
        alone_us = num_bytes / self._bytes_per_s * 1e6 if self._bytes_per_s else num_bytes / 1e2
        longest_us = longest_hold_us(max(alone_us, 100.0), lanes().policy)
        return int(lanes().hold(self.level, longest_us, crosses=self._crosses) * 1e9)


def _num_bytes(outputs: Any) -> int:
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    return sum(map(_num_bytes, outputs)) if isinstance(outputs, Iterable) else 0

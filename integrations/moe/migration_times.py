"""The times of migrations of experts, and of training steps before and behind them, beside what was
promised.

They are written into the statistics, and nothing is decided by them: what plans and links are
promised and take is the business of :mod:`commlayer.scheduler.experience`.

A step's time is the host's, from the end of one call of :meth:`ExpertPlacer.step` to the beginning
of the next, so all that is trained is in it, and what the placer does itself is not. The median of
some steps before experts begin to move, less what the decision promises to save, is what steps are
promised to take; the median of those behind the migration is what they take. Steps beside which
experts travel count in neither. Rejected: the time of MoE layers alone, which on a device is known
only to who waits for it, and which says nothing of what the rest of a step hides.

A migration has arrived on a rank long before this waits for it. What it took is known on each rank
by a thread that does wait (:class:`~commlayer.integrations.moe.expert_migration.ExpertMigration`);
ranks tell each other behind the switch, and the slowest counts.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from commlayer.auditing.group_audits import audit_placement
from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe.expert_migration import ExpertMigration
from commlayer.statistics import PlacementStats, note_placement

__all__ = ["MigrationTimes", "PlacementPromise", "note_decision"]

_WINDOW, _LEAST = 16, 3
"""The steps of a median, at most and at least."""


@dataclass(frozen=True)
class PlacementPromise:
    """The promise of a decision: the time of its migration, and what each step shall save, of all
    layers together, µs."""

    migration_us: float
    saving_us: float


def note_decision(step: int, layers: int, copies: int, copy_bytes: int, reason: str) -> PlacementStats:
    """Note a decision in the statistics and, where experts move, in the audit: its times are written
    into what is returned, as they are known."""
    noted: PlacementStats = {
        "step": step,
        "layers": layers,
        "copies": copies,
        "copy_bytes": copy_bytes,
        "reason": reason,
        "promised_migration_us": None,
        "migration_us": None,
        "waited_us": None,
        "step_before_us": None,
        "promised_step_us": None,
        "step_us": None,
    }
    note_placement(noted)
    if copies:
        audit_placement(noted)
    return noted


class MigrationTimes:
    """The times around the migrations of one placer. ``group``: the ranks of the stage, which agree
    on them."""

    def __init__(self, group: GroupCommunicator) -> None:
        self._group = group
        self._began_s: float | None = None
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._is_disturbed = False
        self._before_us: float | None = None
        self._noted: PlacementStats | None = None
        self._switched: tuple[ExpertMigration, PlacementStats | None] | None = None
        self._asked: tuple[torch.Tensor, dist.Work, PlacementStats | None] | None = None

    def begin_step(self) -> None:
        """Note that the placer has done its part, and the next training step begins."""
        self._began_s = time.perf_counter()

    def end_step(self, *, is_moving: bool) -> None:
        """Note that a training step is over; ``is_moving``: experts are on their way still.
        Collective over the stage in the step of a switch and the one behind it. Raises PeerError
        and CollectiveTimeoutError as collectives do."""
        if self._began_s is not None and not self._is_disturbed:
            self._steps.append((time.perf_counter() - self._began_s) * 1e6)
            if self._noted is not None:
                self._noted["step_us"] = self._median_us
        self._is_disturbed = is_moving
        self._note_times()
        self._ask_for_times()

    def begins(self) -> None:
        """Note that experts are on their way from now on."""
        self._before_us, self._is_disturbed = self._median_us, True
        self._noted = None

    def switched(
        self, migration: ExpertMigration, noted: PlacementStats | None, promise: PlacementPromise | None
    ) -> None:
        """Note that experts have been moved, and write into ``noted``, on the rank that keeps one,
        what is known of it, now and later. ``promise``: None, where the program chose the
        placements."""
        self._steps.clear()
        self._switched, self._noted = (migration, noted), noted
        if noted is None:
            return
        noted["step_before_us"] = self._before_us
        if promise is None:
            return
        noted["promised_migration_us"] = promise.migration_us
        if self._before_us is not None:
            noted["promised_step_us"] = max(0.0, self._before_us - promise.saving_us)

    def close(self) -> None:
        """Note the times of the last migration before the group closes. Collective over the
        stage."""
        self._note_times()
        self._ask_for_times()
        self._note_times()

    @property
    def _median_us(self) -> float | None:
        return median(self._steps) if len(self._steps) >= _LEAST else None

    def _ask_for_times(self) -> None:
        """Begin to find the slowest rank's times of a migration that has just been made."""
        switched, self._switched = self._switched, None
        if switched is None:
            return
        migration, noted = switched
        times = [-1 if us is None else round(us * 1e3) for us in (migration.took_us, migration.waited_us)]
        message = torch.tensor(times)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group.group, async_op=True)
        self._asked = message, work, noted

    def _note_times(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        message, work, noted = asked
        work.wait()
        if noted is not None:
            noted["migration_us"], noted["waited_us"] = (ns / 1e3 if ns >= 0 else None for ns in message.tolist())

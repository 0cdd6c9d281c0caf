"""Migrations of experts, promised and measured, as :func:`commlayer.audit` tells them: on the first rank of each pipeline stage.

The records are those of :func:`commlayer.stats`, which go on to be written as steps pass; those that moved nothing are not here.
"""

from __future__ import annotations

from collections import deque

from commlayer.forked_child import in_forked_child
from commlayer.statistics import PlacementStats

__all__ = ["audit_placement", "audited_placements"]

_MOST = 256
_migrations: deque[PlacementStats] = deque(maxlen=_MOST)


def audit_placement(noted: PlacementStats) -> None:
    """Keep a migration, of which more may become known."""
    _migrations.append(noted)


def audited_placements() -> list[PlacementStats]:
    """Return the last migrations, at most 256, as they are known by now."""
    return [each.copy() for each in list(_migrations)]


in_forked_child(_migrations.clear)  # a child's migrations are its own

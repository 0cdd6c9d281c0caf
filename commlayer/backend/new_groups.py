"""New groups, for torch and for programs: what makes a group, put together with what it is handed.

That is measuring, which finds the profile to plan by, and what only some groups have.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from commlayer.backend import group_extras, patches
from commlayer.backend.create import create_group
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.joining import GroupRequest, Joined, joining_group
from commlayer.measure import calibrate

__all__ = ["make_group", "new_group"]


def make_group(
    *,
    name: str,
    rank: int,
    global_ranks: Sequence[int],
    store: Store,
    timeout: timedelta,
    options: Any = None,
    stands_alone: bool = False,
) -> CommlayerGroup:
    """A group of ``global_ranks``, of which this is the one at ``rank``. ``store`` is the group's
    alone; ``options``: as of :func:`commlayer.backend.create.create_group`; ``stands_alone``: as of
    :class:`commlayer.backend.joining.GroupRequest`."""
    request = GroupRequest(name, rank, tuple(global_ranks), store, timeout, stands_alone=stands_alone)
    with joining_group(request) as joined:
        return new_group(request, joined, options)


def new_group(request: GroupRequest, joined: Joined, options: Any) -> CommlayerGroup:
    """See :func:`commlayer.backend.create.create_group`."""
    patches.teach_torch()
    patches.correct_devices()
    return create_group(
        request,
        joined,
        options,
        measuring=calibrate,
        extras=group_extras,
        make=make_group,
    )

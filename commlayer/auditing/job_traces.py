"""When the recorder of ``COMMLAYER_TRACE`` opens and closes: with a group of all ranks, which
compare their clocks over it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from commlayer.failures.waits import Board, Watched
from commlayer.forked_child import in_forked_child
from commlayer.profiles.printable import warn
from commlayer.settings import Settings
from commlayer.traces.recorder import close_recorder, open_recorder, recorder

__all__ = ["begin", "end"]

_END_S = 10.0
"""For how long a rank waits at the end for the others, to compare clocks once more."""


class _Opener(NamedTuple):
    """The group that opened the recorder of ``job``. ``gloo``: its own; a group's threads must not
    live on for its trace. ``places``: where in a gather over it each global rank is."""

    gloo: weakref.ref[Any]
    places: list[int]
    job: str


_opener: _Opener | None = None


@in_forked_child
def _in_child() -> None:
    """See :mod:`commlayer.traces.recorder`."""
    global _opener
    _opener = None


def begin(
    settings: Settings,
    gloo: Any,
    global_ranks: Sequence[int],
    rank: int,
    world_size: int,
    board: Board | None = None,
) -> bool:
    """Open the recorder that ``COMMLAYER_TRACE`` asks for, at a group of all ranks. Collective over
    it, whether or not this rank records already: the others may have been replaced since. It goes
    on where all record one job, and otherwise all begin anew.

    ``board``: where failures of the ranks are known; then nobody waits for a dead one. Raises
    RuntimeError where a rank is gone. Returns whether this group has opened it: then its
    :func:`end` writes the file.
    """
    global _opener
    if not settings.trace:
        return False
    if len(global_ranks) != world_size:
        if recorder() is None:
            warn(
                "COMMLAYER_TRACE: nothing is recorded before there is a group of all ranks, whose clocks can be compared: make "
                "the default group with backend commlayer, or one with planned_group()",
                stacklevel=2,
            )
        return False
    places = sorted(range(world_size), key=global_ranks.__getitem__)
    gather = partial(_gather, gloo if board is None else Watched(gloo, board), places, None)
    open_one, job = recorder(), 0  # which this rank records and can go on with
    if open_one is not None and open_one.pid == os.getpid() and open_one.world_size == world_size:
        opener = _opener if _opener is not None and _opener.job == open_one.job else None
        if opener is None or (opener.gloo() is not None and dist.is_initialized()):
            job = int(open_one.job, 16)  # else a default group is being made: there was another
    jobs = gather(job)
    if jobs[0] and len(set(jobs)) == 1:
        return False
    folder = str(settings.in_replica(settings.trace))
    try:
        opened = open_recorder(folder, global_ranks[rank], world_size, gather)
    except OSError as error:  # the job's results are worth more than its trace
        warn(
            f"COMMLAYER_TRACE: rank {global_ranks[rank]} records nothing, because it cannot make the folder "
            f"{folder}: {error}",
            stacklevel=2,
        )
        return False
    _opener = _Opener(weakref.ref(gloo), places, opened.job)
    return True


def end(gloo: Any, world_size: int, *, with_others: bool) -> None:
    """Write the file, at the end of the group that opened it; of any other group: nothing.

    ``with_others``: all ranks come here, and compare their clocks again. Without, as where the
    group is aborted, nobody is asked.
    """
    global _opener
    if _opener is None or _opener.gloo() is not gloo:
        return
    opener, _opener = _opener, None
    open_one = recorder()
    if open_one is None or open_one.job != opener.job:  # the program has closed it, or opened one of its own
        return
    close_recorder(partial(_gather, gloo, opener.places, _END_S) if with_others else None)


def _gather(gloo: Any, places: Sequence[int], timeout_s: float | None, value: int) -> list[int]:
    """``value`` of every rank, by global rank."""
    options = AllgatherOptions()
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    gathered = torch.empty(len(places), dtype=torch.int64)
    gloo._allgather_base(gathered, torch.tensor([value], dtype=torch.int64), options).wait()
    values: list[int] = gathered.tolist()
    return [values[index] for index in places]

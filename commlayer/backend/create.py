"""Making a group: the creator that torch calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, Store, get_debug_level

from commlayer.backend import world
from commlayer.backend.cuda import is_usable, make_nccl
from commlayer.backend.dynamo import skip_methods
from commlayer.backend.group import CommlayerGroup
from commlayer.backend.patches import teach_monitored_barrier, teach_timeouts
from commlayer.backend.recording import begin
from commlayer.backend.signature import SignatureCheck
from commlayer.endings import end_with_program
from commlayer.forks import disown_in_child, never_free_in_child
from commlayer.lanes import lanes
from commlayer.planned import PlannedGroup
from commlayer.scheduler.lanes import LanePolicy
from commlayer.statistics import print_at_exit

__all__ = ["create_group", "make_group"]

_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


def create_group(opts: Any, pg_options: Any) -> CommlayerGroup:
    """What ``init_process_group`` and ``new_group`` call (torch's extended_api). Collective over the group's ranks.

    Raises DisagreementError, SettingsError, TopologyError where the ranks cannot work together.
    """
    is_default = not opts.global_ranks_in_group
    return make_group(
        name=opts.group_id,
        rank=opts.group_rank,
        global_ranks=list(range(opts.group_size)) if is_default else list(opts.global_ranks_in_group),
        store=opts.store,
        timeout=opts.timeout,
        is_default=is_default,
        nccl_options=pg_options,
    )


def make_group(
    *,
    name: str,
    rank: int,
    global_ranks: Sequence[int],
    store: Store,
    timeout: timedelta,
    is_default: bool = False,
    nccl_options: Any = None,
) -> CommlayerGroup:
    """A group of ``global_ranks``, of which this is the one at ``rank``. ``store`` is the group's alone."""
    skip_methods()
    teach_monitored_barrier()
    teach_timeouts()
    store = _own_keys(store, len(global_ranks))
    gloo = _gloo(store, "gloo", rank, len(global_ranks), timeout)
    job = None if is_default else world.current()
    if job is None:
        job = world.agree(gloo, store, rank, global_ranks, timeout)
    settings = job.settings
    lanes().policy = LanePolicy(share=settings.lane_share)
    begin(settings, gloo, global_ranks, rank, len(global_ranks) if is_default else dist.get_world_size())
    if settings.stats == "1":
        print_at_exit()
    planned = PlannedGroup(
        name=name,
        rank=rank,
        nodes=job.nodes_of(global_ranks),
        global_ranks=global_ranks,
        store=PrefixStore("planned/", store),
        planner=job.planner if len(global_ranks) > 1 else None,
        settings=settings,
        timeout_s=timeout.total_seconds(),
    )
    planned.own_calls = gloo
    is_compared = settings.debug == "detail" or get_debug_level() == DebugLevel.DETAIL
    control = _gloo(store, "control", rank, len(global_ranks), timeout) if is_compared else None
    group = CommlayerGroup(
        name=name,
        rank=rank,
        global_ranks=global_ranks,
        store=store,
        gloo=gloo,
        planned=planned,
        is_planning=job.planner is not None or settings.plan is not None or settings.reduction == "ordered",
        signatures=None if control is None else SignatureCheck(control, store, rank, global_ranks, name),
    )
    # What C++ calls without asking Python goes to the inner backend of the device: one of its own, because a Gloo group whose
    # collectives come from two threads (theirs, and the progress thread) mixes them up.
    direct = _gloo(store, "direct", rank, len(global_ranks), timeout) if len(global_ranks) > 1 else gloo
    group.use_direct(direct)
    group._register_backend(torch.device("cpu"), _CUSTOM, direct)
    group._set_default_backend(_CUSTOM)
    if is_usable():
        nccl = make_nccl(store, rank, global_ranks, timeout, name, nccl_options, is_default=is_default)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl.backend)
        group.use_nccl(nccl)
    if is_default:
        world.remember(job, group)
    end_with_program(group)
    disown_in_child(group)
    return group


def _own_keys(store: Store, size: int) -> Store:
    """``store`` without what an earlier group of the same name has left in it.

    Names are given anew after destroy_process_group, and the store may be the same one: addresses that are no more would be
    found there. All ranks come once for each group, so the count of arrivals says which group of the name this is.
    """
    return PrefixStore(f"{(store.add('commlayer/arrivals', 1) - 1) // size}/", store)


def _gloo(store: Store, tag: str, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo(PrefixStore(f"{tag}/", store), rank, size, timeout)
    never_free_in_child(gloo)
    gloo._set_sequence_number_for_group()
    return gloo

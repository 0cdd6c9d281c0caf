"""The collectives of the backend, as a table: a row for each form in which c10d has one.

To add a verb: write its body (gathers.py, reductions.py, exchanges.py), and a row here; where plans
run it on a device, a body in device_launches.py too. What the columns mean says
:class:`commlayer.backend.verb_methods.Verb`; the form of a row makes the method of the group that torch calls. Barriers, which
have no tensors, and messages, which have no place in the order of calls, are no rows.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from commlayer.backend import exchanges, gathers, reductions
from commlayer.backend.arithmetic import FLOATS
from commlayer.backend.tensors import MOVABLE
from commlayer.backend.verb_methods import (
    ONE_EACH_RANK,
    Direct,
    Verb,
    exchange,
    in_place,
    lists_in,
    lists_out,
    pair,
    pairs,
    rows_out,
)
from commlayer.failures.waits import bounded_reduce_scatter

__all__ = ["VERBS"]

_ALL_GATHER = Direct(attrgetter("_allgather_base"), MOVABLE, refuses=RuntimeError)  # for shapes and dtypes, at once
_BROADCAST = Direct(attrgetter("broadcast"), MOVABLE)
# Asking for the operation costs as much as all else on the direct path. Gloo has those that floats commonly get, and says before
# it sends anything where it has not; to a caller who does not wait, it says so too late.
_ALL_REDUCE = Direct(attrgetter("allreduce"), FLOATS, fits=reductions.is_native)
_REDUCE_SCATTER = Direct(partial(partial, bounded_reduce_scatter), FLOATS, scatters=True)
_ALL_TO_ALL = Direct(attrgetter("alltoall_base"), MOVABLE)

VERBS = (
    Verb(
        "all_gather_single _allgather_base",
        "all_gather",
        pair,
        AllgatherOptions,
        gathers.all_gather,
        _ALL_GATHER,
        changes=ONE_EACH_RANK,
    ),
    Verb(
        "all_gather_single_coalesced allgather_into_tensor_coalesced",
        "all_gather",
        pairs,
        AllgatherOptions,
        gathers.all_gather_each,
        changes=ONE_EACH_RANK,
    ),
    Verb("allgather", "all_gather", lists_out, AllgatherOptions, gathers.all_gather_list, changes=1),
    Verb(
        "allgather_coalesced",
        "all_gather",
        rows_out,
        AllgatherOptions,
        gathers.all_gather_rows,
        check=gathers.check_lists_of_rows,
        changes=1,
    ),
    Verb(
        "broadcast",
        "broadcast",
        in_place,
        BroadcastOptions,
        gathers.broadcast,
        _BROADCAST,
    ),
    Verb("gather", "gather", lists_out, GatherOptions, gathers.gather, is_rooted=True, changes=1),
    Verb("scatter", "scatter", lists_in, ScatterOptions, gathers.scatter, is_rooted=True),
    Verb(
        "allreduce",
        "all_reduce",
        in_place,
        AllreduceOptions,
        reductions.all_reduce,
        _ALL_REDUCE,
        may_be_sparse=True,
    ),
    Verb(
        "allreduce_coalesced",
        "all_reduce",
        in_place,
        AllreduceCoalescedOptions,
        reductions.all_reduce_joined,
        may_be_sparse=True,
        title="all_reduce_coalesced",
        also=(AllreduceOptions,),
        changes=1,
    ),
    Verb("reduce", "reduce", in_place, ReduceOptions, reductions.reduce),
    Verb(
        "reduce_scatter_single _reduce_scatter_base",
        "reduce_scatter",
        pair,
        ReduceScatterOptions,
        reductions.reduce_scatter,
        _REDUCE_SCATTER,
        changes=1,
    ),
    Verb(
        "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
        "reduce_scatter",
        pairs,
        ReduceScatterOptions,
        reductions.reduce_scatter_each,
        changes=1,
    ),
    Verb("reduce_scatter", "reduce_scatter", lists_in, ReduceScatterOptions, reductions.reduce_scatter_list, changes=1),
    Verb(
        "all_to_all_single alltoall_base",
        "all_to_all",
        exchange,
        AllToAllOptions,
        exchanges.all_to_all,
        _ALL_TO_ALL,
    ),
    Verb(
        "alltoall",
        "all_to_all",
        pairs,
        AllToAllOptions,
        exchanges.all_to_all_lists,
        check=exchanges.check_lists,
        changes=1,
    ),
)

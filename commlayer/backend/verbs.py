"""The collectives of the backend, as a table: a row for each form in which c10d has one.

To add a verb: write its body (moves.py, reductions.py, exchanges.py), a row here, and its line in
:class:`commlayer.backend.group.CommlayerGroup`. What a column means says :class:`commlayer.backend.forms.Verb`; from a row its
form makes the method that torch calls. ``send``, ``recv`` and ``barrier``, which have no tensors or no order, are no rows.
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

from commlayer.backend import exchanges, moves, reductions
from commlayer.backend.arithmetic import FLOATS
from commlayer.backend.forms import Direct, Verb, exchange, in_place, lists_in, lists_out, pair, pairs, rows_out
from commlayer.backend.tensors import MOVABLE
from commlayer.failures.waits import reduce_scatter

__all__ = [
    "ALL_GATHER",
    "ALL_GATHER_COALESCED",
    "ALL_GATHER_LIST",
    "ALL_GATHER_ROWS",
    "ALL_REDUCE",
    "ALL_REDUCE_COALESCED",
    "ALL_TO_ALL",
    "ALL_TO_ALL_LISTS",
    "BROADCAST",
    "GATHER",
    "REDUCE",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_COALESCED",
    "REDUCE_SCATTER_LIST",
    "SCATTER",
]

ALL_GATHER = Verb(
    "all_gather_single",
    "all_gather",
    pair,
    AllgatherOptions,
    moves.all_gather,
    "``output`` holds n times the elements of ``input``, in any shape; block k comes from rank k.",
    direct=Direct(attrgetter("_allgather_base"), MOVABLE, refuses=RuntimeError),  # its shapes and dtypes are fewer
)
ALL_GATHER_COALESCED = Verb(
    "all_gather_single_coalesced",
    "all_gather",
    pairs,
    AllgatherOptions,
    moves.all_gather_each,
    ":meth:`all_gather_single` of each pair, as one call.",
)
ALL_GATHER_LIST = Verb(
    "allgather",
    "all_gather",
    lists_out,
    AllgatherOptions,
    moves.all_gather_list,
    "``outputs[0]`` is a list of n tensors, whose k-th has as many elements as the input of rank k.",
)
ALL_GATHER_ROWS = Verb(
    "allgather_coalesced",
    "all_gather",
    rows_out,
    AllgatherOptions,
    moves.all_gather_rows,
    "``outputs[k][i]`` becomes input i of rank k.",
    check=moves.check_rows,
)
BROADCAST = Verb(
    "broadcast",
    "broadcast",
    in_place,
    BroadcastOptions,
    moves.broadcast,
    "The tensors of rank ``opts.rootRank`` become those of all.",
    direct=Direct(attrgetter("broadcast"), MOVABLE),
)
GATHER = Verb(
    "gather",
    "gather",
    lists_out,
    GatherOptions,
    moves.gather,
    "The inputs of all ranks, on rank ``opts.rootRank``; elsewhere ``outputs`` is empty.",
    is_rooted=True,
)
SCATTER = Verb(
    "scatter",
    "scatter",
    lists_in,
    ScatterOptions,
    moves.scatter,
    "Input k of rank ``opts.rootRank`` goes to rank k; elsewhere ``inputs`` is empty.",
    is_rooted=True,
)
ALL_REDUCE = Verb(
    "allreduce",
    "all_reduce",
    in_place,
    AllreduceOptions,
    reductions.all_reduce,
    "Every element becomes its reduction over all ranks, the same bits on every rank. In place.",
    may_be_sparse=True,
    # Asking for the operation costs as much as all else on the direct path. Gloo has those that floats commonly get, and says
    # before it sends anything where it has not; to who does not wait for it, it says so too late.
    direct=Direct(attrgetter("allreduce"), FLOATS, fits=reductions.is_native),
)
ALL_REDUCE_COALESCED = Verb(
    "allreduce_coalesced",
    "all_reduce",
    in_place,
    AllreduceCoalescedOptions,
    reductions.all_reduce_joined,
    ":meth:`allreduce` of all ``tensors`` (one dtype), as one call.",
    may_be_sparse=True,
    title="all_reduce_coalesced",
    also=(AllreduceOptions,),
)
REDUCE = Verb(
    "reduce",
    "reduce",
    in_place,
    ReduceOptions,
    reductions.reduce,
    "As :meth:`allreduce`, but only rank ``opts.rootRank`` gets the result; the others' tensors are undefined after it.",
)
REDUCE_SCATTER = Verb(
    "reduce_scatter_single",
    "reduce_scatter",
    pair,
    ReduceScatterOptions,
    reductions.reduce_scatter,
    "``input`` holds n times the elements of ``output``, in any shape; rank k gets the reduction of block k.",
    direct=Direct(partial(partial, reduce_scatter), FLOATS, counts_input=True, fits=reductions.is_row_of_blocks),
)
REDUCE_SCATTER_COALESCED = Verb(
    "reduce_scatter_single_coalesced",
    "reduce_scatter",
    pairs,
    ReduceScatterOptions,
    reductions.reduce_scatter_each,
    ":meth:`reduce_scatter_single` of each pair, as one call.",
)
REDUCE_SCATTER_LIST = Verb(
    "reduce_scatter",
    "reduce_scatter",
    lists_in,
    ReduceScatterOptions,
    reductions.reduce_scatter_list,
    "``inputs[0]`` is a list of n tensors; rank k gets the reduction of the k-th. They may differ in size.",
)
ALL_TO_ALL = Verb(
    "all_to_all_single",
    "all_to_all",
    exchange,
    AllToAllOptions,
    exchanges.all_to_all,
    "Rows of ``input`` by ``input_split_sizes`` (empty: even) go to the ranks; ``output`` receives by its own.",
    direct=Direct(attrgetter("alltoall_base"), MOVABLE),
)
ALL_TO_ALL_LISTS = Verb(
    "alltoall",
    "all_to_all",
    pairs,
    AllToAllOptions,
    exchanges.all_to_all_lists,
    "``inputs[k]`` goes to rank k, ``outputs[k]`` comes from it; shapes may all differ.",
    check=exchanges.check_lists,
)

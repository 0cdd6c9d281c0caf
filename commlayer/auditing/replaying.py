"""A kept call, run again: whether its plan gives by itself what it gave in the job, and what the backend's own call gave.

The plan is run in the memory of one process (:mod:`commlayer.auditing.retracing`), by its own moves, sums and codecs, without the
transport, the links and the other machines. What differs here too is the plan's fault; what does not was done on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlayer.auditing.comparing import ResultDifference, compare_results, sizes_of
from commlayer.auditing.retracing import run_in_memory
from commlayer.auditing.saved_calls import SavedCall
from commlayer.engine.encoded import RowCoder
from commlayer.engine.reducers import reducer
from commlayer.profiles.errors import InternalError, UsageError
from commlayer.scheduler.call_moves import everyones_moves
from commlayer.scheduler.plan import Buffer
from commlayer.wire.codecs import Codec

__all__ = ["RankReplayed", "Replayed", "replay_call"]


class RankReplayed(NamedTuple):
    """One rank of a call that was run again.

    ``repeated``: where the plan, run here, differs from what the backend's own call gave in the job, and ``in_job`` where it did
    there, by the rule of the call: bits, or a sum's bound. ``unlike_job``: where the plan gives other bits here than there.
    """

    rank: int
    repeated: ResultDifference
    in_job: ResultDifference
    unlike_job: ResultDifference


class Replayed(NamedTuple):
    """A call that was run again. ``outputs``: of each rank, the bytes that the plan gives."""

    ranks: list[RankReplayed]
    outputs: list[torch.Tensor]

    @property
    def is_repeated(self) -> bool:
        """Whether the plan differs here too."""
        return any(each.repeated.num_wrong for each in self.ranks)


def replay_call(saved: Sequence[SavedCall]) -> Replayed:
    """Run a call again, of whose ranks these are the files. Raises UsageError for numbers that no plan can have had."""
    call = saved[0].header.call
    try:
        outputs = _in_place(saved) if call.kind == "in place" else _by_moves(saved)
        ranks = [_compared(saved, rank, output) for rank, output in enumerate(outputs)]
    except (InternalError, RuntimeError, ValueError, IndexError, StopIteration) as error:
        raise UsageError(f"the call cannot be run again: {error}") from error
    return Replayed(ranks, outputs)


def _compared(saved: Sequence[SavedCall], rank: int, output: torch.Tensor) -> RankReplayed:
    each, call = saved[rank], saved[0].header.call
    allowance, dtype = call.allowance(_sizes(saved, rank)), call.torch_dtype
    return RankReplayed(
        each.header.global_ranks[rank],
        compare_results(output, each.flat, dtype, allowance),
        compare_results(each.planned, each.flat, dtype, allowance),
        compare_results(output, each.planned, dtype, None),
    )


def _sizes(saved: Sequence[SavedCall], rank: int) -> list[torch.Tensor]:
    """The sizes of the terms of a rank's own result, summed over ranks; of other calls none."""
    call = saved[0].header.call
    if not call.is_float_sum:
        return []
    parts = [sizes_of(each.input.view(call.torch_dtype), call.op) for each in saved]
    reduced = [torch.stack(of_ranks) for of_ranks in zip(*parts, strict=True)]
    whole = [each.prod(0) if call.op == "product" else each.sum(0) for each in reduced]
    return call.own_part(whole, rank)


def _by_moves(saved: Sequence[SavedCall]) -> list[torch.Tensor]:
    call, plan = saved[0].header.call, saved[0].header.call.plan()
    splits = [(each.header.sent, each.header.received) for each in saved]
    ranks = everyones_moves(call.kind, plan, call.nodes, root=call.root, blocks=call.blocks, splits=splits)
    buffers = []
    for each in saved:
        if call.is_in_place:
            whole = each.input.clone()
            buffers.append({Buffer.INPUT: whole, Buffer.OUTPUT: whole})
        else:
            buffers.append({Buffer.INPUT: each.input.clone(), Buffer.OUTPUT: torch.zeros_like(each.planned)})
    coder = None
    if not call.wire.is_native:
        coder = RowCoder(Codec(call.wire, call.torch_dtype, call.non_finite))
    run_in_memory(plan, ranks, buffers, reducer(call.torch_dtype, call.op), coder)
    return [each[Buffer.OUTPUT] for each in buffers]


def _in_place(saved: Sequence[SavedCall]) -> list[torch.Tensor]:
    """A reduce_scatter in its input's memory has moves of its own, whose result is the sum of BF16 in rank order, in FP32."""
    rounded = [each.input.view(torch.float32).bfloat16().view(len(saved), -1) for each in saved]
    outputs = []
    for rank in range(len(saved)):
        total = torch.zeros(rounded[0].shape[1])
        for part in rounded:
            total.add_(part[rank])
        outputs.append(total.view(torch.uint8))
    return outputs

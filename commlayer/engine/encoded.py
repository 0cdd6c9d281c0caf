"""Calls in a wire format: who is told of a value that a format refuses, and a sum that takes no
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlayer.calls.movement import Movement
from commlayer.engine.runner import Runner, Sent
from commlayer.profiles.errors import NonFiniteError
from commlayer.scheduler.moves import Message, Moves, Region
from commlayer.scheduler.plan import Buffer
from commlayer.transport.call_memory import Buffers, CallMemory, as_bytes
from commlayer.transport.contract import Script

__all__ = ["explain_non_finite", "reduce_scatter_in_place"]

_SUM_ELEMENTS = 16384
"""Elements that an in-place call rounds, or sums, at a time: 64 KiB of FP32, which stay in a core's
own cache."""


def explain_non_finite(source: torch.Tensor, width: int, where: str, error: NonFiniteError) -> NonFiniteError:
    """Say which values of ``source``, rows of ``width`` elements, a format refused. ``where``: the
    rank and its group."""
    wrong = ~source.view(-1, width).isfinite()
    if not wrong.any():
        return NonFiniteError(f"{where}, in a sum of this node: {error}")
    return NonFiniteError(
        f"{where}: {int(wrong.sum())} of {source.numel()} elements of the tensor are NaN or infinite, the first in row "
        f"{int(wrong.any(1).nonzero()[0])} of {width} elements, and their format was told to raise: look for where they come "
        "from, or allow them with WirePolicy(non_finite='pass'). Nothing more can be sent here: restart the job"
    )


def reduce_scatter_in_place(
    runner: Runner, rank: int, n: int, movement: Movement, drive: Callable[[Script, Buffers], None]
) -> Sent:
    """A reduce_scatter of FP32 in BF16 that takes no memory: the source [n·s] is left undefined
    (MegaScale-MoE, section 5).

    BF16 goes to the half of the source in which the target [s] may lie, the others' to the other
    half; the target may be this rank's block of the source. The plan: what the moves made here are
    called in errors: flat_direct in BF16. ``drive`` runs what is compiled here. Returns what this
    rank, of ``n``, has sent.
    """
    plan, source, target = movement.plan, movement.source, movement.target
    size, data = target.nbytes // 2, as_bytes(source)
    half = data.numel() // 2
    is_first = 2 * rank < n
    rounded, other = (data[:half], data[half:]) if is_first else (data[half:], data[:half])
    _round_into_half(source.view(-1), rounded.view(torch.bfloat16), is_first=is_first)
    # The others' blocks lie behind each other at the far end: an output in the middle reaches a
    # block's length into it.
    arrived = other[size:] if is_first else other[: half - size]
    ring = [(rank + distance) % n for distance in range(1, n)]
    places = {k: Region(Buffer.ARRIVED, i * size, (i + 1) * size) for i, k in enumerate(ring)}
    tag = plan.tags_per_step
    sends = tuple(Message(k, tag, Region(Buffer.ENCODED, k * size, (k + 1) * size)) for k in ring)
    steps = (Moves(), Moves(sends, tuple(Message(k, tag, places[k]) for k in ring)), Moves())
    prepared = runner.prepare(plan, steps, {})
    drive(prepared.script, {Buffer.ENCODED: CallMemory(rounded), Buffer.ARRIVED: CallMemory(arrived)})
    parts = [
        (rounded[rank * size : (rank + 1) * size] if k == rank else arrived[places[k].start : places[k].stop]).view(
            torch.bfloat16
        )
        for k in range(n)
    ]
    # Rank 0's sum is twice as long as its own block, and grows over it from the front; the last
    # rank's from behind.
    _sum_in_chunks(parts, target.view(-1), is_descending=rank == 0)
    return prepared.sent


def _round_into_half(source: torch.Tensor, rounded: torch.Tensor, *, is_first: bool) -> None:
    """FP32 ``source`` [N] to BF16 in its own memory: its first half, from the front, or its second,
    from behind. Either way what is overwritten has been read."""
    edges = list(range(0, source.numel(), _SUM_ELEMENTS))
    for start in edges if is_first else reversed(edges):
        rounded[start : start + _SUM_ELEMENTS].copy_(source[start : start + _SUM_ELEMENTS].bfloat16())


def _sum_in_chunks(parts: Sequence[torch.Tensor], target: torch.Tensor, *, is_descending: bool) -> None:
    """The sum of BF16 ``parts`` in their order, in FP32. Each chunk is complete before the target
    is written."""
    edges = list(range(0, target.numel(), _SUM_ELEMENTS))
    for start in reversed(edges) if is_descending else edges:
        total = torch.zeros(min(_SUM_ELEMENTS, target.numel() - start))
        for part in parts:
            total.add_(part[start : start + _SUM_ELEMENTS])
        target[start : start + _SUM_ELEMENTS].copy_(total)

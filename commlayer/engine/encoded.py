"""Collectives of one group of CPU ranks in a wire format: plans whose steps encode and decode, run by messages.

Beside :class:`commlayer.engine.planned.PlannedGroup`, whose connections and memory they use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.calls.ring import Call
from commlayer.engine.plain import as_bytes
from commlayer.engine.reducers import reducer
from commlayer.engine.runner import Sent
from commlayer.profiles.errors import InternalError, NonFiniteError, UsageError
from commlayer.scheduler.encoded_moves import encoded_moves, exchange_moves
from commlayer.scheduler.group_moves import Group, owned_blocks
from commlayer.scheduler.moves import Message, Moves, Region
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.transport.contract import CallMemory
from commlayer.wire.codecs import Codec

if TYPE_CHECKING:
    from commlayer.engine.planned import PlannedGroup

__all__ = ["EncodedGroup", "RowCoder"]

_SUM_ELEMENTS = 16384
"""Elements that an in-place call rounds, or sums, at a time: 64 KiB of FP32, which stay in a core's own cache."""


class RowCoder:
    """A codec on bytes: see transport.Coder."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.width = codec, codec.wire.row_elements

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.codec.encode(self._rows(source), target)

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.codec.decode(source, self._rows(target))

    def add(self, target: torch.Tensor, sources: Sequence[torch.Tensor], coded: Sequence[bool]) -> None:
        into = self._rows(target)
        total = into if into.dtype is torch.float32 else torch.empty_like(into, dtype=torch.float32)
        first, *rest = zip(sources, coded, strict=True)
        if first[1]:
            total.zero_()  # −0 in all sources becomes +0, as in any sum that begins with zero
            self.codec.add(first[0], total)
        else:
            total.copy_(self._rows(first[0]))
        for source, is_coded in rest:
            if is_coded:
                self.codec.add(source, total)
            else:
                total.add_(self._rows(source))
        if total is not into:
            into.copy_(total)

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.codec.dtype).view(-1, self.width)


class EncodedGroup:
    """Runs plans with a wire format on the members of ``planned``. One call at a time, in the same order on all ranks."""

    def __init__(self, planned: PlannedGroup) -> None:
        self._planned = planned

    @torch.inference_mode()  # see PlannedGroup.run
    def run(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        blocks: Sequence[int] | None,
        codec: Codec,
        *,
        timeout_s: float | None = None,
        issued: Call | None = None,
    ) -> Sent:
        """Run an all_gather, reduce_scatter or all_reduce (then source is target); returns when the output may be used.

        Contiguous tensors; ``blocks[k]``: bytes of the tensor that member k owns, whole rows; None: as the plan deals them out.
        Sums are FP32. ``issued``: see :meth:`PlannedGroup.run`.
        Raises NonFiniteError as the codec does, after telling the others; PeerError, CollectiveTimeoutError.
        """
        planned = self._planned
        with _telling(planned, source, codec.wire.row_elements):
            runner = planned.connect_messages(plan.connections)
            if blocks is None:
                blocks = owned_blocks(plan, planned.nodes, plan.traffic.cut_bytes(plan.wire))
            owned = tuple(blocks)
            prepared = runner.prepared(plan, owned, lambda: self._moves(plan, owned))
            limit = timeout_s or planned.timeout_s
            data = CallMemory(as_bytes(source)), CallMemory(as_bytes(target))
            call = runner.start(prepared, *data, limit, reducer(source.dtype, "sum"), RowCoder(codec))
            planned.drive(plan, call, limit, issued)
            return prepared.sent

    @torch.inference_mode()
    def run_exchange(
        self,
        plan: Plan,
        source: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[Sequence[int], Sequence[int]],
        codec: Codec,
        *,
        timeout_s: float | None = None,
        issued: Call | None = None,
    ) -> Sent:
        """Run an all_to_all: ``splits``: bytes of ``source`` that go to each member, of ``target`` that come from each.

        Raises as :meth:`run`.
        """
        planned = self._planned
        with _telling(planned, source, codec.wire.row_elements):
            runner = planned.connect_messages(plan.connections)
            steps, encoded, arrived = exchange_moves(plan, self._group(()), *splits)
            prepared = runner.prepare(plan, steps, {Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived})
            limit = timeout_s or planned.timeout_s
            data = CallMemory(as_bytes(source)), CallMemory(as_bytes(target))
            call = runner.start(prepared, *data, limit, None, RowCoder(codec))
            planned.drive(plan, call, limit, issued)
            return prepared.sent

    @torch.inference_mode()
    def reduce_scatter_in_place(
        self, plan: Plan, source: torch.Tensor, target: torch.Tensor, *, timeout_s: float | None = None
    ) -> Sent:
        """A reduce_scatter of FP32 in BF16 that takes no memory: ``source`` [n·s] is left undefined (MegaScale-MoE, section 5).

        BF16 goes to the half of the source in which ``target`` [s] may lie, the others' to the other half; ``target`` may be
        this rank's block of ``source``. ``plan``: what the moves made here are called in errors: flat_direct in BF16.
        Raises PeerError, CollectiveTimeoutError.
        """
        planned = self._planned
        with _telling(planned, source):
            runner = planned.connect_messages(plan.connections)
            size, rank, n = target.nbytes // 2, planned.rank, len(planned.global_ranks)
            data = as_bytes(source)
            half = data.numel() // 2
            is_first = 2 * rank < n
            rounded, other = (data[:half], data[half:]) if is_first else (data[half:], data[:half])
            _round_into_half(source.view(-1), rounded.view(torch.bfloat16), is_first=is_first)
            # The others' blocks lie behind each other at the far end: an output in the middle reaches a block's length into it.
            arrived = other[size:] if is_first else other[: half - size]
            ring = [(rank + distance) % n for distance in range(1, n)]
            places = {k: Region(Buffer.ARRIVED, i * size, (i + 1) * size) for i, k in enumerate(ring)}
            tag = plan.tags_per_step
            sends = tuple(Message(k, tag, Region(Buffer.ENCODED, k * size, (k + 1) * size)) for k in ring)
            steps = (Moves(), Moves(sends, tuple(Message(k, tag, places[k]) for k in ring)), Moves())
            buffers = {Buffer.ENCODED: CallMemory(rounded), Buffer.ARRIVED: CallMemory(arrived)}
            limit = timeout_s or planned.timeout_s
            prepared = runner.prepare(plan, steps, {})
            planned.drive(plan, runner.transport.start(prepared.script, buffers, limit), limit)
            parts = [
                (
                    rounded[rank * size : (rank + 1) * size] if k == rank else arrived[places[k].start : places[k].stop]
                ).view(torch.bfloat16)
                for k in range(n)
            ]
            # Rank 0's sum is twice as long as its own block, and grows over it from the front; the last rank's from behind.
            _sum_in_chunks(parts, target.view(-1), is_descending=rank == 0)
            return prepared.sent

    def _group(self, blocks: tuple[int, ...]) -> Group:
        return Group(self._planned.nodes, self._planned.rank, blocks)

    def _moves(self, plan: Plan, blocks: tuple[int, ...]) -> tuple[Sequence[Moves], dict[Buffer, int]]:
        steps, staging, encoded, arrived = encoded_moves(plan, self._group(blocks))
        return steps, {Buffer.STAGING: staging, Buffer.ENCODED: encoded, Buffer.ARRIVED: arrived}


@contextlib.contextmanager
def _telling(planned: PlannedGroup, source: torch.Tensor, width: int = 1) -> Iterator[None]:
    """Whatever breaks the call is told to the others; what a codec refuses was found in the middle of it, by one rank perhaps."""
    try:
        yield
    except NonFiniteError as error:  # it has seen a piece
        planned.tell(explained := _non_finite(planned, source, width, error))
        raise explained from error
    except UsageError as error:
        planned.tell(internal := InternalError(f"{type(error).__name__} in the middle of a call: {error}"))
        raise internal from error
    except BaseException as error:
        planned.tell(error)
        raise


def _non_finite(planned: PlannedGroup, source: torch.Tensor, width: int, error: NonFiniteError) -> NonFiniteError:
    wrong = ~source.view(-1, width).isfinite()
    where = f"rank {planned.global_ranks[planned.rank]}, group {planned.name}"
    if not wrong.any():
        return NonFiniteError(f"{where}, in a sum of this node: {error}")
    return NonFiniteError(
        f"{where}: {int(wrong.sum())} of {source.numel()} elements of the tensor are NaN or infinite, the first in row "
        f"{int(wrong.any(1).nonzero()[0])} of {width} elements, and their format was told to raise: look for where they come "
        "from, or allow them with WirePolicy(non_finite='pass'). Nothing more can be sent here: restart the job"
    )


def _round_into_half(source: torch.Tensor, rounded: torch.Tensor, *, is_first: bool) -> None:
    """FP32 ``source`` [N] to BF16 in its own memory: its first half, from the front, or its second, from behind. Either way
    what is overwritten has been read."""
    edges = list(range(0, source.numel(), _SUM_ELEMENTS))
    for start in edges if is_first else reversed(edges):
        rounded[start : start + _SUM_ELEMENTS].copy_(source[start : start + _SUM_ELEMENTS].bfloat16())


def _sum_in_chunks(parts: Sequence[torch.Tensor], target: torch.Tensor, *, is_descending: bool) -> None:
    """The sum of BF16 ``parts`` in their order, in FP32. Each chunk is complete before the target is written."""
    edges = list(range(0, target.numel(), _SUM_ELEMENTS))
    for start in reversed(edges) if is_descending else edges:
        total = torch.zeros(min(_SUM_ELEMENTS, target.numel() - start))
        for part in parts:
            total.add_(part[start : start + _SUM_ELEMENTS])
        target[start : start + _SUM_ELEMENTS].copy_(total)

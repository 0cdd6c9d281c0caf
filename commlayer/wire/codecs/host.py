"""Encoding and decoding of whole messages on the CPU: what a :class:`commlayer.wire.codecs.Codec` does for tensors in
host memory.

Arguments are checked there. Each call uses one core: the caller's thread, or the progress thread that runs the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from commlayer.scheduler.wire import Wire, WireFormat
from commlayer.wire.codecs.arguments import non_finite_error
from commlayer.wire.codecs.fp8 import grid_shape
from commlayer.wire.codecs.scratch import TILE_ELEMENTS, pieces, scratch
from commlayer.wire.codecs.tiles import decode_tiles, find_scales, tile_rows, write_payload

__all__ = ["HostRows"]

_SUM_ELEMENTS = 1 << 18
"""BF16 is added to FP32 so many elements at a time: torch makes an FP32 copy of the whole operand, and beyond some MiB that
copy is fresh memory at each call, which takes four times as long as the sum."""


class HostRows:
    """The counterpart of :class:`commlayer.wire.kernels.rows.RowKernels`, with the same arguments."""

    @staticmethod
    def encode(
        rows: torch.Tensor, wire: Wire, message: torch.Tensor, index: torch.Tensor | None, *, passes: bool
    ) -> None:
        """Write the encoded ``rows``, or rows[index], to ``message`` (uint8); NaN and infinity too where FP8 ``passes``
        them.
        """
        if wire.format is WireFormat.BF16:
            _encode_bf16(rows, message.view(torch.bfloat16), index)
            return
        scales, has_marks = find_scales(rows, wire, index)
        if has_marks and not passes:
            raise non_finite_error(rows if index is None else rows[index], wire)
        wire_scales, payload = _parts(message, wire, scales)
        wire_scales.copy_(scales)
        write_payload(rows, wire, scales, payload, index, has_marks)

    @staticmethod
    def decode(
        message: torch.Tensor, wire: Wire, dtype: torch.dtype, out: torch.Tensor, index: torch.Tensor | None
    ) -> None:
        """Write the rows of ``message`` to ``out`` (or its rows ``index``), whose elements were of ``dtype``."""
        if wire.format is WireFormat.BF16 and index is None:
            out.copy_(message.view(torch.bfloat16).view(out.shape))
            return
        count = out.shape[0] if index is None else index.shape[0]
        height, tiles = _tiles(message, wire, dtype, count)
        if index is None:
            for target, wide in zip(pieces(out, height), tiles, strict=True):
                target.copy_(wide)
        else:
            for places, wide in zip(pieces(index, height), tiles, strict=True):
                out.index_copy_(0, places, _narrow(wide, dtype))

    @staticmethod
    def add(
        message: torch.Tensor,
        wire: Wire,
        dtype: torch.dtype,
        into: torch.Tensor,
        weights: torch.Tensor | None,
        index: torch.Tensor | None,
    ) -> None:
        """Add the rows of ``message``, weighted, to the rows of ``into`` that ``index`` names; in the message's order."""
        if wire.format is WireFormat.BF16 and weights is None and index is None:
            _add_bf16(message.view(torch.bfloat16), into.view(-1))
        elif index is None:
            _add(message, wire, dtype, into, weights)
        elif into.dtype is torch.float32:
            _add_to(message, wire, dtype, into, weights, index)
        else:  # rounded once, at the end
            touched, places = index.unique(return_inverse=True)
            total = into[touched].float()
            _add_to(message, wire, dtype, total, weights, places)
            into[touched] = total.to(into.dtype)


def _add_bf16(halves: torch.Tensor, into: torch.Tensor) -> None:
    """Both 1-D. Sums of gradients: no more than one call where the piece is small."""
    if halves.shape[0] <= _SUM_ELEMENTS:
        torch.add(into, halves, out=into)
        return
    for target, part in zip(into.split(_SUM_ELEMENTS), halves.split(_SUM_ELEMENTS), strict=True):
        torch.add(target, part, out=target)


def _add(
    message: torch.Tensor, wire: Wire, dtype: torch.dtype, into: torch.Tensor, weights: torch.Tensor | None
) -> None:
    """Row i to row i."""
    height, tiles = _tiles(message, wire, dtype, into.shape[0])
    of_weights = None if weights is None else pieces(weights.unsqueeze(1), height)
    for turn, (target, wide) in enumerate(zip(pieces(into, height), tiles, strict=True)):
        if of_weights is not None:
            wide.mul_(of_weights[turn])
        if target.dtype is torch.float32:
            target.add_(wide)
        else:
            target.copy_(wide.add_(target))


def _add_to(
    message: torch.Tensor,
    wire: Wire,
    dtype: torch.dtype,
    into: torch.Tensor,
    weights: torch.Tensor | None,
    index: torch.Tensor,
) -> None:
    """Row i to row index[i] of ``into``, which is FP32."""
    height, tiles = _tiles(message, wire, dtype, index.shape[0])
    of_weights = None if weights is None else pieces(weights.unsqueeze(1), height)
    for turn, (places, wide) in enumerate(zip(pieces(index, height), tiles, strict=True)):
        if of_weights is not None:
            wide.mul_(of_weights[turn])
        into.index_add_(0, places, wide)


def _narrow(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return wide if dtype is torch.float32 else scratch("gathered", tuple(wide.shape), dtype).copy_(wide)


def _tiles(message: torch.Tensor, wire: Wire, dtype: torch.dtype, rows: int) -> tuple[int, Iterator[torch.Tensor]]:
    """How many rows at a time, and those rows in FP32, in memory that the next ones take over."""
    if wire.format.is_scaled:
        scales = message[: 4 * wire.num_scales(rows)].view(torch.float32).view(grid_shape(wire, rows))
        _, codes = _parts(message, wire, scales)
        return tile_rows(wire, rows), decode_tiles(codes, scales, wire, dtype)
    halves = message.view(torch.bfloat16).view(rows, -1)
    height = max(1, TILE_ELEMENTS // max(1, halves.shape[1]))
    return height, (scratch("wide", tuple(part.shape), torch.float32).copy_(part) for part in pieces(halves, height))


def _parts(message: torch.Tensor, wire: Wire, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a message: its scales in the shape of ``scales``, and its payload [r, W] (uint8)."""
    end = 4 * scales.numel()
    return message[:end].view(torch.float32).view(scales.shape), message[end:].view(-1, wire.row_elements)


def _encode_bf16(rows: torch.Tensor, target: torch.Tensor, index: torch.Tensor | None) -> None:
    if index is None:
        target.view(rows.shape).copy_(rows)
        return
    height, width = max(1, TILE_ELEMENTS // max(1, rows.shape[1])), rows.shape[1]
    for part, places in zip(pieces(target.view(-1, width), height), pieces(index, height), strict=True):
        gathered = scratch("gathered", (places.shape[0], width), rows.dtype)
        part.copy_(torch.index_select(rows, 0, places, out=gathered))

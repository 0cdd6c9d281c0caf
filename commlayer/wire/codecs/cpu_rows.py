"""Encoding and decoding of whole messages on the CPU: what a :class:`commlayer.wire.codecs.Codec` does for tensors in
host memory.

Arguments are checked there. Each call uses one core: the caller's thread, or the progress thread that runs the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from commlayer.scheduler.wire import WireFormat
from commlayer.wire.codecs.encoded_rows import EncodedRows, non_finite_error
from commlayer.wire.codecs.scaled_formats import grid_shape
from commlayer.wire.codecs.scratch import TILE_ELEMENTS, pieces, scratch
from commlayer.wire.codecs.tiles import decode_tiles, find_scales, tile_rows, write_payload

__all__ = ["HostRows"]

_SUM_ELEMENTS = 1 << 18
"""BF16 is added to FP32 so many elements at a time: torch makes an FP32 copy of the whole operand, and beyond some MiB that
copy is fresh memory at each call, which takes four times as long as the sum."""


class HostRows:
    """The rows of tensors in host memory (see :class:`commlayer.wire.codecs.encoded_rows.RowPath`)."""

    @staticmethod
    def encode(rows: torch.Tensor, encoded: EncodedRows, *, passes: bool) -> None:
        """Write the message of ``rows`` [r, W], or of those at the places; what is not finite too where it ``passes``."""
        message, wire, _, index = encoded
        if wire.format is WireFormat.BF16:
            target = message.view(torch.bfloat16)
            if index is None:
                target.view(rows.shape).copy_(rows)
                return
            width = rows.shape[1]
            height = max(1, TILE_ELEMENTS // max(1, width))
            for part, places in zip(pieces(target.view(-1, width), height), pieces(index, height), strict=True):
                gathered = scratch("gathered", (places.shape[0], width), rows.dtype)
                part.copy_(torch.index_select(rows, 0, places, out=gathered))
            return
        scales, has_marks = find_scales(rows, wire, index)
        if has_marks and not passes:
            raise non_finite_error(rows if index is None else rows[index], wire)
        wire_scales, payload = encoded.parts(encoded.num_rows(rows))
        wire_scales.view(scales.shape).copy_(scales)
        write_payload(rows, wire, scales, payload.view(-1, wire.row_elements), index, has_marks)

    @staticmethod
    def decode(encoded: EncodedRows, out: torch.Tensor) -> None:
        message, wire, dtype, index = encoded
        if wire.format is WireFormat.BF16 and index is None:
            out.copy_(message.view(torch.bfloat16).view(out.shape))
            return
        height, tiles = _tiles(encoded, encoded.num_rows(out))
        if index is None:
            for target, wide in zip(pieces(out, height), tiles, strict=True):
                target.copy_(wide)
        else:
            for places, wide in zip(pieces(index, height), tiles, strict=True):
                is_float32 = dtype is torch.float32
                out.index_copy_(
                    0, places, wide if is_float32 else scratch("gathered", tuple(wide.shape), dtype).copy_(wide)
                )

    @staticmethod
    def add(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None) -> None:
        index = encoded.places
        if encoded.wire.format is WireFormat.BF16 and weights is None and index is None:
            # Sums of gradients: no more than one call where the piece is small.
            targets = pieces(into.view(-1), _SUM_ELEMENTS)
            for target, part in zip(targets, pieces(encoded.message.view(torch.bfloat16), _SUM_ELEMENTS), strict=True):
                torch.add(target, part, out=target)
        elif index is None:
            _add(encoded, into, weights)
        elif into.dtype is torch.float32:
            _add_to(encoded, into, weights, index)
        else:  # rounded once, at the end
            touched, places = index.unique(return_inverse=True)
            total = into[touched].float()
            _add_to(encoded, total, weights, places)
            into[touched] = total.to(into.dtype)


def _add(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Row i to row i."""
    height, tiles = _weighted(encoded, into.shape[0], weights)
    for target, wide in zip(pieces(into, height), tiles, strict=True):
        if target.dtype is torch.float32:
            target.add_(wide)
        else:
            target.copy_(wide.add_(target))


def _add_to(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor) -> None:
    """Row i to row places[i] of ``into``, which is FP32."""
    height, tiles = _weighted(encoded, places.shape[0], weights)
    for part, wide in zip(pieces(places, height), tiles, strict=True):
        into.index_add_(0, part, wide)


def _weighted(encoded: EncodedRows, rows: int, weights: torch.Tensor | None) -> tuple[int, Iterable[torch.Tensor]]:
    """The :func:`_tiles` of a message, each row times its weight."""
    height, tiles = _tiles(encoded, rows)
    if weights is None:
        return height, tiles
    factors = pieces(weights.unsqueeze(1), height)
    return height, (wide.mul_(factor) for wide, factor in zip(tiles, factors, strict=True))


def _tiles(encoded: EncodedRows, rows: int) -> tuple[int, Iterator[torch.Tensor]]:
    """How many rows at a time, and those rows in FP32, in memory that the next ones take over."""
    message, wire, dtype, _ = encoded
    if wire.format.is_scaled:
        scales, codes = encoded.parts(rows)
        codes = codes.view(-1, wire.row_elements)
        return tile_rows(wire, rows), decode_tiles(codes, scales.view(grid_shape(wire, rows)), wire, dtype)
    halves = message.view(torch.bfloat16).view(rows, -1)
    height = max(1, TILE_ELEMENTS // max(1, halves.shape[1]))
    return height, (scratch("wide", tuple(part.shape), torch.float32).copy_(part) for part in pieces(halves, height))

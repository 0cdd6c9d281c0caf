"""Launches of the kernels on encoded rows: grids, pointers, and the sorted maps that sums need."""

from __future__ import annotations

import torch
import triton

from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat
from commlayer.wire.codecs.encoded_rows import EncodedRows
from commlayer.wire.kernels.row_programs import add_rows, decode_rows, encode_bf16, encode_tiles, encode_tokens

__all__ = ["RowKernels"]

_KINDS = {WireFormat.INT8: 1, WireFormat.FP8_E4M3: 4, WireFormat.FP8_E5M2: 5, WireFormat.BF16: 8}
_SCALINGS = {Scaling.TOKEN: 0, Scaling.BLOCK: 1, Scaling.CHANNEL: 2}
_TILE = 1024
_GROUPS = {Scaling.BLOCK: 8, Scaling.CHANNEL: 32}
"""Groups side by side in one program: 1,024 and 4,096 elements."""
_EXACT = {"enable_fp_fusion": False}


class RowKernels:
    """The rows of tensors on a GPU (see :class:`commlayer.wire.codecs.encoded_rows.RowPath`). Nothing waits on the host."""

    @staticmethod
    def encode(rows: torch.Tensor, encoded: EncodedRows) -> None:
        """Write the message of ``rows`` [r, W], or of those at the places; NaN and infinity are passed on."""
        message, wire, _, index = encoded
        count, width = encoded.num_rows(rows), rows.shape[1]
        if wire.format is WireFormat.BF16:
            if index is None:
                message.view(torch.bfloat16).view(rows.shape).copy_(rows)
            else:
                grid = (count, triton.cdiv(width, _TILE))
                encode_bf16[grid](rows, index, message.view(torch.int16), width, tile=_TILE)
            return
        scales, payload = encoded.parts(count)
        options = {"has_index": index is not None, "kind": _KINDS[wire.format], "power_of_two": wire.power_of_two}
        index = rows if index is None else index  # a pointer is needed, and not followed
        if wire.scaling is Scaling.TOKEN:
            encode_tokens[(count,)](rows, index, scales, payload, width, tile=_TILE, **options, **_EXACT)
            return
        by_channel, tile = wire.scaling is Scaling.CHANNEL, _GROUPS[wire.scaling]
        num_groups = width if by_channel else triton.cdiv(width, GROUP_SIZE)
        grid = (triton.cdiv(count, GROUP_SIZE) if by_channel else count, triton.cdiv(num_groups, tile))
        encode_tiles[grid](
            rows, index, scales, payload, count, width, by_channel=by_channel, tile=tile, **options, **_EXACT
        )

    @staticmethod
    def decode(encoded: EncodedRows, out: torch.Tensor) -> None:
        index, width = encoded.places, out.shape[1]
        count = encoded.num_rows(out)
        scales, payload = _parts(encoded, count)
        decode_rows[(count, triton.cdiv(width, _TILE))](
            payload,
            scales,
            payload if index is None else index,
            out,
            width,
            torch.finfo(encoded.dtype).max,
            has_index=index is not None,
            **_decoding(encoded.wire),
        )

    @staticmethod
    def add(encoded: EncodedRows, into: torch.Tensor, weights: torch.Tensor | None) -> None:
        index, width, order, starts = encoded.places, into.shape[1], None, None
        if index is not None:
            by_target, order = index.sort(stable=True)
            starts = torch.searchsorted(by_target, torch.arange(len(into) + 1, device=into.device))
        scales, payload = _parts(encoded, encoded.num_rows(into))
        add_rows[(len(into), triton.cdiv(width, _TILE))](
            payload,
            scales,
            payload if order is None else order,
            payload if starts is None else starts,
            payload if weights is None else weights,
            into,
            width,
            torch.finfo(encoded.dtype).max,
            has_index=index is not None,
            has_weights=weights is not None,
            **_decoding(encoded.wire),
        )


def _parts(encoded: EncodedRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and payload of a message; BF16 has no scales, and its payload is given as int16."""
    if encoded.wire.format is WireFormat.BF16:
        return encoded.message, encoded.message.view(torch.int16)
    return encoded.parts(count)


def _decoding(wire: Wire) -> dict[str, object]:
    return {"kind": _KINDS[wire.format], "scaling": _SCALINGS[wire.scaling], "tile": _TILE, **_EXACT}

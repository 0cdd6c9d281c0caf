"""Encoding of FP8 and INT8 rows on the CPU, some rows at a time: as many as a core's cache holds with all that is made of them.

Encoding looks at the rows twice: for the scales, then for the payload. So nothing is written when NaN or infinity forbid it,
and 128 rows that share their channels' scales need not be in the cache together. Magnitudes are compared as integers of the
element's own width: that takes half the time of converting bfloat16 first, and shows NaN and infinity at no cost.

torch's cast to FP8 rounds to nearest even, and so do its casts to FP16 and BF16. Its cast back is slow (5 ns an element), so
decoding shifts the codes into place as FP16, which has room for either format: E5M2 is the upper byte of FP16 itself, and
E4M3 moved by seven bits is its value · 2⁻⁸, subnormal ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat
from commlayer.wire.codecs.scaled_formats import (
    FORMATS,
    INFINITY_BITS,
    INTEGERS,
    code_magnitudes,
    codes_of,
    grid_shape,
    make_scales,
)
from commlayer.wire.codecs.scratch import TILE_ELEMENTS, constant, pieces, scratch

__all__ = ["decode_tiles", "find_scales", "tile_rows", "write_payload"]


def tile_rows(wire: Wire, rows: int) -> int:
    """Rows of a tile: none reaches across groups of rows that share scales."""
    height = max(1, min(TILE_ELEMENTS // wire.row_elements, rows))
    if wire.scaling is Scaling.CHANNEL:  # a power of two divides the group
        height = min(1 << (height.bit_length() - 1), GROUP_SIZE)
    return height


def find_scales(rows: torch.Tensor, wire: Wire, index: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The scales (FP32, as :func:`grid_shape` lays them out) and whether any group is marked."""
    dtype, infinity = rows.dtype, INFINITY_BITS[rows.dtype]
    bits = _largest_bits(rows, wire, index, math.inf)
    if int(bits.amax()) < infinity:
        return make_scales(bits.view(dtype).float(), wire), False
    of_finite = _largest_bits(rows, wire, index, infinity)
    return make_scales(of_finite.view(dtype).float(), wire, bits >= infinity), True


def _largest_bits(rows: torch.Tensor, wire: Wire, index: torch.Tensor | None, limit: float) -> torch.Tensor:
    """Find in every group the largest magnitude below ``limit``, as its bits; in the layout of the scales."""
    count = len(rows if index is None else index)
    height, integer = tile_rows(wire, count), INTEGERS[rows.dtype]
    mask = 0x7FFF if integer is torch.int16 else 0x7FFFFFFF
    largest = torch.zeros(grid_shape(wire, count), dtype=integer)
    parts = _grid_parts(largest, wire, height, count)
    for source, part in zip(_sources(rows.view(integer), index, height), parts, strict=True):
        shape = tuple(source.shape)
        magnitudes = scratch("magnitudes", shape, integer)
        torch.bitwise_and(source, constant(mask, shape, integer), out=magnitudes)
        if limit != math.inf:
            magnitudes.masked_fill_(magnitudes >= limit, 0)
        if wire.scaling is Scaling.CHANNEL:
            torch.maximum(part, magnitudes.amax(0, keepdim=True), out=part)
        elif wire.scaling is Scaling.TOKEN:
            torch.amax(magnitudes, 1, keepdim=True, out=part)
        elif _has_whole_blocks(wire):
            torch.amax(magnitudes.view(-1, GROUP_SIZE), 1, keepdim=True, out=part)
        else:
            for column, block in enumerate(magnitudes.split(GROUP_SIZE, 1)):
                part[:, column] = block.amax(1)
    return largest


def write_payload(
    rows: torch.Tensor,
    wire: Wire,
    scales: torch.Tensor,
    payload: torch.Tensor,
    index: torch.Tensor | None,
    has_marks: bool,
) -> None:
    """Write the rounded quotients of ``rows`` (or of those that ``index`` names) and ``scales`` to ``payload`` [r, W]
    (uint8).
    """
    count = len(payload)
    height, kind = tile_rows(wire, count), FORMATS[wire.format]
    inverse = _grid_parts(scales.abs().reciprocal_(), wire, height, count)
    targets = pieces(payload.view(kind.dtype), height)
    for source, factors, target in zip(_sources(rows, index, height), inverse, targets, strict=True):
        scaled = scratch("wide", tuple(source.shape), torch.float32)
        if source.dtype is torch.float32:
            _scale(source, factors, wire, scaled)
        else:
            _scale(scaled.copy_(source), factors, wire, scaled)
        target.copy_(scaled.round_() if kind.is_integer else scaled)  # both to nearest even
        if has_marks:
            codes = codes_of(torch.where(source.isnan(), kind.nan_code, kind.infinity_code), source.signbit(), kind)
            written = target.view(torch.uint8)
            written.copy_(torch.where(source.isfinite(), written, codes))


def decode_tiles(codes: torch.Tensor, scales: torch.Tensor, wire: Wire, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The decoded rows in FP32, :func:`tile_rows` at a time, in memory of this thread that the next ones take over.

    ``codes`` [r, W] (uint8); ``dtype`` sets the largest finite value.
    """
    count, limit = len(codes), torch.finfo(dtype).max
    height = tile_rows(wire, count)
    shift = 256.0 if wire.format is WireFormat.FP8_E4M3 else 1.0
    lowest, highest = (float(end) for end in torch.aminmax(scales))
    is_plain = lowest > 0 and highest * FORMATS[wire.format].largest <= limit  # no marks, and nothing to cut
    factors = _grid_parts(scales.mul(shift) if is_plain else scales.abs(), wire, height, count)
    signed = factors if is_plain else _grid_parts(scales, wire, height, count)
    for part, factor, scale in zip(pieces(codes, height), factors, signed, strict=True):
        wide = _widen(part, wire.format)
        if is_plain:
            _scale(wide, factor, wire, wide)
        else:
            _scale(wide.mul_(shift), factor, wire, wide)
            # Products past the limit become the limit; codes of infinity and NaN in marked groups get their values.
            kind = FORMATS[wire.format]
            magnitude = code_magnitudes(part, kind)
            special = torch.where(magnitude == kind.infinity_code, math.inf, math.nan).copysign_(wide)
            is_special = (magnitude == kind.infinity_code) | (magnitude == kind.nan_code)
            is_special &= _spread(scale, wire) < 0
            wide.copy_(torch.where(is_special, special, wide.clamp(-limit, limit)))
        yield wide


def _widen(codes: torch.Tensor, wire_format: WireFormat) -> torch.Tensor:
    """FP32 values of INT8 and E5M2 codes; of E4M3 codes · 2⁻⁸. Exact."""
    shape = tuple(codes.shape)
    wide = scratch("wide", shape, torch.float32)
    if wire_format is WireFormat.INT8:
        return wide.copy_(codes.view(torch.int8))
    bits = scratch("bits", shape, torch.int16)
    bits.copy_(codes.view(torch.int8))  # the sign fills the upper byte
    if wire_format is WireFormat.FP8_E5M2:
        torch.bitwise_left_shift(bits, constant(8, shape, torch.int16), out=bits)
    else:
        torch.bitwise_left_shift(bits, constant(7, shape, torch.int16), out=bits)
        torch.bitwise_and(bits, constant(-0x4001, shape, torch.int16), out=bits)  # the sign's copy off the exponent
    return wide.copy_(bits.view(torch.float16))


def _sources(rows: torch.Tensor, index: torch.Tensor | None, height: int) -> Iterable[torch.Tensor]:
    """The rows by tiles; those that ``index`` names are gathered into memory that the next ones take over."""
    if index is None:
        return pieces(rows, height)
    return (
        torch.index_select(rows, 0, part, out=scratch("gathered", (len(part), rows.shape[1]), rows.dtype))
        for part in pieces(index, height)
    )


# Groups. Where 128 divides W, blocks are to the code what tokens are: whole rows of a matrix [r·W/128, 128].


def _has_whole_blocks(wire: Wire) -> bool:
    return wire.scaling is Scaling.BLOCK and wire.row_elements % GROUP_SIZE == 0


def _grid_parts(grid: torch.Tensor, wire: Wire, height: int, rows: int) -> Iterable[torch.Tensor]:
    """Cut the scales, or what is laid out like them, into the part of each tile, in the form that ``_scale`` takes."""
    if wire.scaling is Scaling.CHANNEL:
        groups = pieces(grid, 1)
        return [groups[top // GROUP_SIZE] for top in range(0, rows, height)]
    if _has_whole_blocks(wire):
        return pieces(grid.view(-1, 1), height * grid.shape[1])
    return pieces(grid, height)


def _scale(x: torch.Tensor, factors: torch.Tensor, wire: Wire, out: torch.Tensor) -> None:
    """``out`` = ``x`` · the factor of each element's group."""
    if wire.scaling is not Scaling.BLOCK:
        torch.mul(x, factors, out=out)
    elif _has_whole_blocks(wire):
        torch.mul(x.view(-1, GROUP_SIZE), factors, out=out.view(-1, GROUP_SIZE))
    else:
        torch.mul(x, _spread(factors, wire), out=out)


def _spread(part: torch.Tensor, wire: Wire) -> torch.Tensor:
    """A tile's scales in a form that broadcasts against its rows."""
    if wire.scaling is not Scaling.BLOCK:
        return part
    blocks = part.view(-1, -(-wire.row_elements // GROUP_SIZE))
    return blocks.repeat_interleave(GROUP_SIZE, 1)[:, : wire.row_elements]

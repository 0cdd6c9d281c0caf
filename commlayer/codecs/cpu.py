"""FP8 rows on the CPU, a cache-sized tile at a time.

Encoding looks at the rows twice: for the scales, then for the payload. So nothing is written when NaN or infinity forbid it,
and a group that spans tiles (128 rows of a channel) needs no special way. Magnitudes are compared as integers of the
element's own width: that takes half the time of converting bfloat16 first, and shows NaN and infinity at no cost.

torch's cast to FP8 rounds to nearest even, and so do FP16 and BF16 conversions. Its cast back is slow (5 ns an element), so
decoding shifts the codes into place as FP16, which has room for either format: E5M2 is the upper byte of FP16 itself, E4M3
moved by seven bits is its value · 2⁻⁸, subnormal ones too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from commlayer.codecs.fp8 import FORMATS, finite_limit, grid_shape, infinity_bits, integer_of, make_scales
from commlayer.codecs.scratch import TILE_ELEMENTS, constant, scratch
from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat

__all__ = ["decode_tiles", "find_scales", "write_payload"]

Tile = tuple[int, int, int, int]  # first row, end, first column, end


def tiles(wire: Wire, rows: int) -> Iterator[Tile]:
    """Whole rows where they are short, pieces of one row where they are long; none across groups of 128 rows."""
    width = wire.row_elements
    height = max(1, min(TILE_ELEMENTS // width, rows))
    if wire.scaling is Scaling.CHANNEL and height < GROUP_SIZE:  # tiles that divide the group leave no odd ones
        height = 1 << (height.bit_length() - 1)
    elif wire.scaling is Scaling.CHANNEL:
        height = GROUP_SIZE
    for top in range(0, rows, height):
        for left in range(0, width, TILE_ELEMENTS):
            yield top, min(top + height, rows), left, min(left + TILE_ELEMENTS, width)


def find_scales(rows: torch.Tensor, wire: Wire, index: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The scales (FP32, as :func:`grid_shape` lays them out) and whether any group is marked."""
    dtype, count = rows.dtype, len(rows if index is None else index)
    bits = torch.zeros(grid_shape(wire, count), dtype=integer_of(dtype))
    for tile in tiles(wire, count):
        magnitudes = _magnitudes(_source(rows, index, tile), dtype)
        part = _grid_tile(bits, wire, tile)
        torch.maximum(part, _largest(magnitudes, wire.scaling), out=part)
    infinity = infinity_bits(dtype)
    is_marked = bits.ge(infinity) if int(bits.max()) >= infinity else None
    if is_marked is not None:
        _drop_non_finite(bits, rows, wire, index)
    return make_scales(bits.view(dtype).float(), wire, is_marked), is_marked is not None


def _drop_non_finite(bits: torch.Tensor, rows: torch.Tensor, wire: Wire, index: torch.Tensor | None) -> None:
    """Once more, of finite elements only: rare, so it need not be fast."""
    bits.zero_()
    for tile in tiles(wire, len(rows if index is None else index)):
        magnitudes = _magnitudes(_source(rows, index, tile), rows.dtype)
        magnitudes.masked_fill_(magnitudes >= infinity_bits(rows.dtype), 0)
        part = _grid_tile(bits, wire, tile)
        torch.maximum(part, _largest(magnitudes, wire.scaling), out=part)


def write_payload(
    rows: torch.Tensor,
    wire: Wire,
    scales: torch.Tensor,
    payload: torch.Tensor,
    index: torch.Tensor | None,
    has_marks: bool,
) -> None:
    """``payload`` [r, W] (uint8) gets the rounded quotients of ``rows`` (or of those that ``index`` names) and ``scales``."""
    kind = FORMATS[wire.format]
    inverse = scales.abs().reciprocal_()
    for tile in tiles(wire, len(payload)):
        source, target = _source(rows, index, tile), _cut(payload, tile)
        wide = source
        if source.dtype is not torch.float32:
            wide = scratch("wide", tuple(source.shape), torch.float32)
            wide.copy_(source)
        scaled = scratch("wide", tuple(source.shape), torch.float32)
        _scale(wide, _grid_tile(inverse, wire, tile), wire.scaling, scaled)
        target.view(kind.dtype).copy_(scaled)
        if has_marks:
            codes = torch.where(source.isnan(), kind.nan_code, kind.infinity_code) | source.signbit().mul(0x80)
            target.copy_(torch.where(source.isfinite(), target, codes.to(torch.uint8)))


def decode_tiles(
    codes: torch.Tensor, scales: torch.Tensor, wire: Wire, dtype: torch.dtype
) -> Iterator[tuple[Tile, torch.Tensor]]:
    """(tile, its decoded elements in FP32, in memory of this thread that the next one takes over)."""
    shift = 256.0 if wire.format is WireFormat.FP8_E4M3 else 1.0
    limit, kind = finite_limit(dtype), FORMATS[wire.format]
    low, high = (float(value) for value in torch.aminmax(scales))
    is_plain = low > 0 and max(high * shift, high * kind.largest) <= limit / 2
    factors = scales.mul(shift) if is_plain else scales.abs()
    for tile in tiles(wire, len(codes)):
        part = _cut(codes, tile)
        wide = _widen(part, wire.format)
        if not is_plain:
            wide.mul_(shift)
        _scale(wide, _grid_tile(factors, wire, tile), wire.scaling, wide)
        if not is_plain:
            _cut_and_mark(wide, part, _spread(_grid_tile(scales, wire, tile), wire.scaling, wide.shape[1]), wire, limit)
        yield tile, wide


def _widen(codes: torch.Tensor, wire_format: WireFormat) -> torch.Tensor:
    """FP32 values of E5M2 codes; of E4M3 codes · 2⁻⁸. Exact."""
    shape = tuple(codes.shape)
    bits, wide = scratch("bits", shape, torch.int16), scratch("wide", shape, torch.float32)
    bits.copy_(codes.view(torch.int8))  # the sign fills the upper byte
    if wire_format is WireFormat.FP8_E5M2:
        torch.bitwise_left_shift(bits, constant(8, shape, torch.int16), out=bits)
    else:
        torch.bitwise_left_shift(bits, constant(7, shape, torch.int16), out=bits)
        torch.bitwise_and(
            bits, constant(-0x4001, shape, torch.int16), out=bits
        )  # off with the sign's copy in the exponent
    return wide.copy_(bits.view(torch.float16))


def _cut_and_mark(wide: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, wire: Wire, limit: float) -> None:
    """Products past ``limit`` become ``limit``; codes of infinity and NaN in marked groups get their values."""
    kind, magnitude = FORMATS[wire.format], codes & 0x7F
    is_marked = (scales < 0).expand(wide.shape)
    special = torch.where(magnitude == kind.infinity_code, math.inf, math.nan).copysign_(wide)
    is_special = is_marked & ((magnitude == kind.infinity_code) | (magnitude == kind.nan_code))
    wide.copy_(torch.where(is_special, special, wide.clamp(-limit, limit)))


def _source(rows: torch.Tensor, index: torch.Tensor | None, tile: Tile) -> torch.Tensor:
    top, bottom, left, right = tile
    if index is None:
        return _cut(rows, tile)
    part = rows if right - left == rows.shape[1] else rows[:, left:right]
    gathered = scratch("gathered", (bottom - top, right - left), rows.dtype)
    return torch.index_select(part, 0, index[top:bottom], out=gathered)


def _cut(matrix: torch.Tensor, tile: Tile) -> torch.Tensor:
    top, bottom, left, right = tile
    part = matrix[top:bottom]
    return part if right - left == matrix.shape[1] else part[:, left:right]


def _magnitudes(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of |x| as integers."""
    shape, integer = tuple(source.shape), integer_of(dtype)
    mask = constant(0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF, shape, integer)
    return torch.bitwise_and(source.view(integer), mask, out=scratch("magnitudes", shape, integer))


def _largest(magnitudes: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    if scaling is Scaling.TOKEN:
        return magnitudes.amax(1, keepdim=True)
    if scaling is Scaling.CHANNEL:
        return magnitudes.amax(0, keepdim=True)
    blocks, rest = _in_blocks(magnitudes)
    parts = [blocks.amax(2)] if blocks.shape[1] else []
    if rest.shape[1]:
        parts.append(rest.amax(1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _in_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [r, blocks, 128] and [r, what is left of a row]."""
    whole = matrix.shape[1] // GROUP_SIZE
    return matrix[:, : whole * GROUP_SIZE].unflatten(1, (whole, GROUP_SIZE)), matrix[:, whole * GROUP_SIZE :]


def _grid_tile(grid: torch.Tensor, wire: Wire, tile: Tile) -> torch.Tensor:
    """The part of the scales (or of what is laid out like them) that a tile has to do with."""
    top, bottom, left, right = tile
    if wire.scaling is Scaling.TOKEN:
        return grid[top:bottom]
    if wire.scaling is Scaling.BLOCK:
        return grid[top:bottom, left // GROUP_SIZE : -(-right // GROUP_SIZE)]
    return grid[top // GROUP_SIZE : top // GROUP_SIZE + 1, left:right]


def _scale(x: torch.Tensor, factors: torch.Tensor, scaling: Scaling, out: torch.Tensor) -> None:
    """``out`` = ``x`` · the factor of each element's group."""
    if scaling is not Scaling.BLOCK:
        torch.mul(x, factors, out=out)
        return
    (blocks, rest), (out_blocks, out_rest) = _in_blocks(x), _in_blocks(out)
    whole = blocks.shape[1]
    if whole:
        torch.mul(blocks, factors[:, :whole].unsqueeze(2), out=out_blocks)
    if rest.shape[1]:
        torch.mul(rest, factors[:, whole:], out=out_rest)


def _spread(factors: torch.Tensor, scaling: Scaling, width: int) -> torch.Tensor:
    """Something that broadcasts against the tile."""
    return factors.repeat_interleave(GROUP_SIZE, 1)[:, :width] if scaling is Scaling.BLOCK else factors

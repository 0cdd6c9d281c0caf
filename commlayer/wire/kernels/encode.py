"""Kernels that gather rows by a map, find their scales, round them and pack them, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from commlayer.wire.kernels.elements import magnitude, make_scale, round_bf16, to_code

__all__ = ["encode_bf16", "encode_tiles", "encode_tokens"]


@triton.jit
def encode_tokens(
    rows,
    index,
    scales,
    payload,
    width,
    has_index: tl.constexpr,
    kind: tl.constexpr,
    power_of_two: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for each row: its scale, then its codes. The second look at the row finds it in the cache."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row) if has_index else row
    columns = tl.arange(0, tile)
    largest = tl.zeros([tile], tl.int32)
    largest_finite = tl.zeros([tile], tl.int32)
    for first in range(0, width, tile):
        inside = first + columns < width
        size = magnitude(tl.load(rows + source * width + first + columns, mask=inside, other=0).to(tl.float32))
        largest = tl.maximum(largest, size)
        largest_finite = tl.maximum(largest_finite, tl.where(size < 0x7F800000, size, 0))
    scale, inverse, is_marked = make_scale(tl.max(largest, 0), tl.max(largest_finite, 0), kind, power_of_two)
    tl.store(scales + row, tl.where(is_marked, -scale, scale))
    for first in range(0, width, tile):
        inside = first + columns < width
        x = tl.load(rows + source * width + first + columns, mask=inside, other=0).to(tl.float32)
        tl.store(payload + row * width + first + columns, to_code(x, inverse, kind), mask=inside)


@triton.jit
def encode_tiles(
    rows,
    index,
    scales,
    payload,
    num_rows,
    width,
    by_channel: tl.constexpr,
    has_index: tl.constexpr,
    kind: tl.constexpr,
    power_of_two: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for ``tile`` groups side by side: blocks of one row [tile, 128], or channels of 128 rows [128, tile]."""
    if by_channel:
        row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)[:, None]
        column = tl.program_id(1) * tile + tl.arange(0, tile)[None, :]
        group = tl.program_id(1) * tile + tl.arange(0, tile)
        num_groups = width
    else:
        row = tl.program_id(0).to(tl.int64) + tl.zeros([tile, 128], tl.int64)
        column = (tl.program_id(1) * tile + tl.arange(0, tile)[:, None]) * 128 + tl.arange(0, 128)[None, :]
        group = tl.program_id(1) * tile + tl.arange(0, tile)
        num_groups = tl.cdiv(width, 128)
    inside = (row < num_rows) & (column < width)
    source = tl.load(index + row, mask=row < num_rows, other=0) if has_index else row
    x = tl.load(rows + source * width + column, mask=inside, other=0).to(tl.float32)
    size = magnitude(x)
    axis: tl.constexpr = 0 if by_channel else 1
    largest_finite = tl.max(tl.where(size < 0x7F800000, size, 0), axis)
    scale, inverse, is_marked = make_scale(tl.max(size, axis), largest_finite, kind, power_of_two)
    place = tl.program_id(0).to(tl.int64) * num_groups + group
    tl.store(scales + place, tl.where(is_marked, -scale, scale), mask=group < num_groups)
    code = to_code(x, tl.expand_dims(inverse, axis), kind)
    tl.store(payload + row * width + column, code, mask=inside)


@triton.jit
def encode_bf16(rows, index, payload, width, tile: tl.constexpr):
    """One program for a piece of one row that ``index`` names: FP32 to BF16 (as int16)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    x = tl.load(rows + tl.load(index + row) * width + column, mask=column < width, other=0)
    tl.store(payload + row * width + column, round_bf16(x), mask=column < width)

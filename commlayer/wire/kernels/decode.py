"""Kernels that unpack rows, scale them, and put them in their places or add them up there, in one pass.

Sums are the same in every run: there are no atomics. One program holds a piece of one target row and adds what comes to it
in the order of the message; for that the host sorts the map by target (stably) and gives where each target's rows begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from commlayer.wire.kernels.elements import narrow, to_value

__all__ = ["add_rows", "decode_rows"]


@triton.jit
def _row_values(payload, scales, row, column, inside, width, limit, kind: tl.constexpr, scaling: tl.constexpr):
    """A piece of one row of the message, in FP32. ``scaling``: 0 for tokens, 1 for blocks, 2 for channels."""
    code = tl.load(payload + row * width + column, mask=inside, other=0)
    if kind == 8:
        value = (code.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        if scaling == 0:
            index = row + column * 0  # the interpreter has no comparison of a scalar with a tensor
        elif scaling == 1:
            index = row * tl.cdiv(width, 128) + column // 128
        else:
            index = (row // 128) * width + column
        value = to_value(code, tl.load(scales + index, mask=inside, other=1), limit, kind)
    return value


@triton.jit
def decode_rows(
    payload,
    scales,
    index,
    out,
    width,
    limit,
    has_index: tl.constexpr,
    kind: tl.constexpr,
    scaling: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for a piece of one row of the message: to row index[row] of ``out``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    value = _row_values(payload, scales, row, column, inside, width, limit, kind, scaling)
    target = tl.load(index + row) if has_index else row
    tl.store(out + target * width + column, narrow(value, out.dtype.element_ty), mask=inside)


@triton.jit
def add_rows(
    payload,
    scales,
    order,
    starts,
    weights,
    into,
    width,
    limit,
    has_index: tl.constexpr,
    has_weights: tl.constexpr,
    kind: tl.constexpr,
    scaling: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for a piece of one row of ``into``: its rows are order[starts[target]] … order[starts[target + 1] - 1]."""
    target = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    begin = tl.load(starts + target) if has_index else target
    end = tl.load(starts + target + 1) if has_index else target + 1
    if begin < end:
        total = tl.load(into + target * width + column, mask=inside, other=0).to(tl.float32)
        for place in range(begin, end):
            row = tl.load(order + place) if has_index else target
            value = _row_values(payload, scales, row, column, inside, width, limit, kind, scaling)
            if has_weights:
                value = value * tl.load(weights + row)
            total += value
        tl.store(into + target * width + column, narrow(total, into.dtype.element_ty), mask=inside)

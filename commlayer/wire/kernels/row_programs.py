"""Kernels that encode rows for the wire, and that decode them or add them up, each in one pass.

Encoding gathers rows by a map, finds their scales, rounds them and packs them; decoding unpacks them, scales them, and puts
them in their places or adds them up there. Sums are the same in every run: there are no atomics. One program holds a piece of
one target row and adds what comes to it in the order of the message; for that the host sorts the map by target (stably) and
gives where each target's rows begin.

One element is encoded by the rule of :mod:`commlayer.wire.codecs.scaled_formats` in integer arithmetic. No cast to FP8 is used:
GPUs before compute capability 8.9 have none, and neither has Triton's interpreter one that rounds rightly. ``kind`` is 4 for
E4M3 and 5 for E5M2: the bits of the exponent; 1 for INT8. 8 is BF16, which has no scales.

Kernels must be launched with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the rule rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_rows", "decode_rows", "encode_bf16", "encode_tiles", "encode_tokens"]

# One element


@triton.jit
def magnitude(x):
    """The bits of |x| (FP32) as int32: they compare as the numbers do, and NaN and infinity are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def make_scale(largest, largest_finite, kind: tl.constexpr, power_of_two: tl.constexpr):
    """Return (scale, what to multiply by, whether the group is marked) of groups with these largest magnitudes, as bits."""
    is_marked = largest >= 0x7F800000
    if kind == 1:
        amax = tl.maximum(largest_finite.to(tl.float32, bitcast=True), 2.0**-119)
        limit = tl.where(is_marked, 126.0, 127.0)
    else:
        amax = tl.maximum(largest_finite.to(tl.float32, bitcast=True), 1e-4)
        limit = tl.where(is_marked, 416.0, 448.0) if kind == 4 else amax * 0.0 + 57344.0
    scale = tl.div_rn(amax, limit.to(tl.float32))
    if power_of_two:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale, tl.div_rn(scale * 0.0 + 1.0, scale), is_marked


@triton.jit
def to_code(x, inverse, kind: tl.constexpr):
    """The code (uint8) of x · inverse, to nearest even; of NaN and infinity their codes in a marked group."""
    return _to_integer(x, inverse) if kind == 1 else _to_fp8(x, inverse, kind)


@triton.jit
def _to_integer(x, inverse):
    # Added to a number whose last bit is worth one, the FPU rounds, also what is negative.
    code = (x * inverse + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    size_bits = magnitude(x)
    code = tl.where(size_bits == 0x7F800000, tl.where(x > 0, 127, -127), code)
    return tl.where(size_bits > 0x7F800000, -128, code).to(tl.int8).to(tl.uint8, bitcast=True)


@triton.jit
def _to_fp8(x, inverse, kind: tl.constexpr):
    mantissa_bits: tl.constexpr = 7 - kind
    bias: tl.constexpr = 7 if kind == 4 else 15
    dropped: tl.constexpr = 23 - mantissa_bits
    bits = (x * inverse).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal numbers: half of what is dropped is added, less one where the last kept bit is even, and the exponents' biases
    # differ by 127 - bias.
    normal = ((size + ((1 << (dropped - 1)) - 1) + ((size >> dropped) & 1)) >> dropped) - (
        (127 - bias) << mantissa_bits
    )
    # Subnormal ones: added to a number whose last bit is worth the least of them, the FPU rounds.
    ruler: tl.constexpr = 2.0 ** (24 - bias - mantissa_bits)
    small = (size.to(tl.float32, bitcast=True) + ruler).to(tl.int32, bitcast=True)
    subnormal = small - ((127 + 24 - bias - mantissa_bits) << 23)
    code = tl.where(size < ((128 - bias) << 23), subnormal, normal)
    size_bits = magnitude(x)
    code = tl.where(size_bits == 0x7F800000, 0x7E if kind == 4 else 0x7C, code)
    code = tl.where(size_bits > 0x7F800000, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_value(code, scale, limit, kind: tl.constexpr):
    """The FP32 value of a code and its group's (signed) scale, cut at ``limit``."""
    return _integer_value(code, scale, limit) if kind == 1 else _fp8_value(code, scale, limit, kind)


@triton.jit
def _integer_value(code, scale, limit):
    number = code.to(tl.int8, bitcast=True).to(tl.int32)
    value = tl.maximum(tl.minimum(number.to(tl.float32) * tl.abs(scale), limit), -limit).to(tl.int32, bitcast=True)
    infinity = tl.where(number > 0, 0x7F800000, -0x800000)
    special = tl.where(number == -128, 0x7FC00000, infinity)
    is_special = (scale < 0) & ((number == -128) | (number == 127) | (number == -127))
    return tl.where(is_special, special, value).to(tl.float32, bitcast=True)


@triton.jit
def _fp8_value(code, scale, limit, kind: tl.constexpr):
    mantissa_bits: tl.constexpr = 7 - kind
    bias: tl.constexpr = 7 if kind == 4 else 15
    infinity: tl.constexpr = 0x7E if kind == 4 else 0x7C
    bits = code.to(tl.int32)
    size = bits & 0x7F
    normal = ((size << (23 - mantissa_bits)) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    subnormal = size.to(tl.float32) * (2.0 ** (1 - bias - mantissa_bits))
    value = tl.where(size < (1 << mantissa_bits), subnormal, normal)
    value = tl.minimum(value * tl.abs(scale), limit).to(tl.int32, bitcast=True)
    special = (scale < 0) & ((size == infinity) | (size == 0x7F))
    value = tl.where(special, tl.where(size == infinity, 0x7F800000, 0x7FC00000), value)
    return (value | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """The bits (int16) of x (FP32) rounded to BF16, to nearest even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude(x) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.int16)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round x (FP32) to ``dtype``, to nearest even. The interpreter's own cast to BF16 cuts off."""
    return round_bf16(x).to(tl.bfloat16, bitcast=True) if dtype == tl.bfloat16 else x.to(dtype)


# Encoding


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


# Decoding


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

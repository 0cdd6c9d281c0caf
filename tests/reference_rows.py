"""The definition of FP8 and INT8 rows, group by group, slow and obvious: what the fast paths are held against.

Rounding is a search in the sorted list of all values of the format, so it owes nothing to any cast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire
from commlayer.wire.codecs.scaled_formats import FORMATS, ScaledFormat

__all__ = ["add", "reference_decode", "reference_encode"]

Group = tuple[slice, slice]


def reference_encode(rows: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Encode as a message (uint8) the ``rows`` [r, W]; NaN and infinity are passed on."""
    scales, codes = [], torch.zeros(rows.shape, dtype=torch.uint8)
    for group in _groups(wire, rows.shape[0]):
        scale, codes[group] = _encode_group(rows[group].float(), FORMATS[wire.format], wire.power_of_two)
        scales.append(scale)
    return torch.cat([torch.tensor(scales, dtype=torch.float32).view(torch.uint8), codes.view(-1)])


def reference_decode(encoded: torch.Tensor, rows: int, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    """Decode the ``rows`` × W elements of a message, in ``dtype``."""
    return _decode(encoded, rows, wire, dtype).to(dtype)


def add(
    encoded: torch.Tensor,
    into: torch.Tensor,
    wire: Wire,
    dtype: torch.dtype,
    weights: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """Add weights[i] · row i to row index[i] of ``into`` (any float dtype): in FP32, in the order of i, rounded once."""
    total = into.float()
    decoded = _decode(encoded, len(index), wire, dtype)
    for i, row in enumerate(index.tolist()):
        total[row] += weights[i] * decoded[i]
    return total.to(into.dtype)


def _decode(encoded: torch.Tensor, rows: int, wire: Wire, dtype: torch.dtype) -> torch.Tensor:
    num_scales = wire.num_scales(rows)
    scales = encoded[: 4 * num_scales].clone().view(torch.float32)
    codes = encoded[4 * num_scales :].view(rows, wire.row_elements)
    decoded = torch.zeros(codes.shape)
    for scale, group in zip(scales, _groups(wire, rows), strict=True):
        decoded[group] = _decode_group(codes[group], scale, FORMATS[wire.format], torch.finfo(dtype).max)
    return decoded


def _groups(wire: Wire, rows: int) -> Iterator[Group]:
    """Which elements share a scale, in the order of the scales."""
    width = wire.row_elements
    if wire.scaling is Scaling.CHANNEL:
        for first in range(0, rows, GROUP_SIZE):
            for channel in range(width):
                yield slice(first, min(first + GROUP_SIZE, rows)), slice(channel, channel + 1)
        return
    step = width if wire.scaling is Scaling.TOKEN else GROUP_SIZE
    for row in range(rows):
        for first in range(0, width, step):
            yield slice(row, row + 1), slice(first, min(first + step, width))


@lru_cache(maxsize=3)
def _values(dtype: torch.dtype) -> torch.Tensor:
    """List the values of the codes 0, 1, 2, …, up to the largest finite value; FP64."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()]


def _encode_group(x: torch.Tensor, kind: ScaledFormat, power_of_two: bool) -> tuple[float, torch.Tensor]:
    is_finite = x.isfinite()
    finite = torch.where(is_finite, x, 0.0)
    is_marked = not bool(is_finite.all())
    amax = finite.abs().amax().clamp_min(kind.least_amax)
    scale = amax / torch.tensor(kind.largest_marked if is_marked else kind.largest)
    if power_of_two:
        mantissa, exponent = math.frexp(float(scale))
        scale = torch.tensor(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    codes = _round(finite * (1.0 / scale), kind)
    codes = torch.where(x.isinf(), kind.infinity_code, codes)
    codes = torch.where(x.isnan(), kind.nan_code, codes)
    # Two's complement, where zero has no sign; or a sign bit.
    signed = torch.where(x.signbit(), (256 - codes) % 256, codes) if kind.is_integer else codes + 128 * x.signbit()
    return float(-scale if is_marked else scale), signed.to(torch.uint8)


def _round(x: torch.Tensor, kind: ScaledFormat) -> torch.Tensor:
    """The code of the value nearest to |x|; of two as near, the even code."""
    values, magnitude = _values(kind.dtype), x.double().abs()
    below = torch.searchsorted(values, magnitude, right=True) - 1
    above = (below + 1).clamp_max(len(values) - 1)
    middle = (values[below] + values[above]) / 2
    even = torch.where(below % 2 == 0, below, above)
    return torch.where(magnitude < middle, below, torch.where(magnitude > middle, above, even))


def _decode_group(codes: torch.Tensor, scale: torch.Tensor, kind: ScaledFormat, limit: float) -> torch.Tensor:
    code, values = codes.long(), _values(kind.dtype)
    magnitude = torch.where(code >= 128, 256 - code, code) if kind.is_integer else code % 128
    product = (values[magnitude.clamp_max(len(values) - 1)].float() * scale.abs()).clamp_max(limit)
    if scale < 0:
        product = torch.where(magnitude == kind.infinity_code, math.inf, product)
        product = torch.where(magnitude == kind.nan_code, math.nan, product)
    return torch.where(codes >= 0x80, -product, product)

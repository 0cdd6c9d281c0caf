"""FP8 and INT8 rows with scales: the rule that the reference, the CPU's fast path and the GPU's kernels follow bit for bit.

Of every group of elements that shares a scale (see :class:`Scaling`), in FP32 with one rounding per operation:

    amax    = the largest magnitude among its finite elements, at least 1e-4 (as DeepEP's, so that zeros need no exception);
              INT8: at least 2⁻¹¹⁹, for its errors follow amax, and what is sent may be small altogether
    scale   = amax / the format's largest finite value; ``power_of_two``: rounded up to one
    payload = (x · (1 / scale)) rounded to the nearest value of the format, ties to even
    decoded = payload · scale, cut at the largest finite value of the dtype, rounded once to it

No product can round past the largest finite payload: three roundings of FP32 add at most 2e-7 to it, and the next value
would begin 3 % above. So nothing is clamped on the way in. On the way out a scale that was rounded up to a power of two can
bring the largest payload past what FP16 holds (65504 becomes 65536), hence the cut.

NaN and infinity, where they are passed on: a group that has any is *marked* by the sign bit of its scale. E4M3 has no
infinity, so in a marked group its largest code, ±0x7E, means ±infinity, and finite elements reach to 416 (0x7D) instead of
448. E5M2 has its own codes (0x7C). NaN is 0x7F, with its sign. Outside marked groups neither code of E4M3 occurs as NaN or
infinity: 0x7E is 448, and 0x7F is not written.

INT8's values are the whole numbers from −127 to 127, in two's complement. So its error is absolute: half a step, scale / 2, which
is amax / 254 of the group, or up to twice that with powers of two; and zeros lose their sign. In a marked group ±127 mean
±infinity, finite elements reach to ±126, and −128 is NaN; outside such groups −128 is not written.

Rejected: x / scale in place of x · (1 / scale). It saves one rounding of 6e-8 beside one of 6e-2, and costs a division for
every element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat

__all__ = [
    "FORMATS",
    "INFINITY_BITS",
    "INTEGERS",
    "ScaledFormat",
    "code_magnitudes",
    "codes_of",
    "grid_shape",
    "make_scales",
]


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """One format whose rows have scales: its dtype, its largest finite value, that of a marked group, the magnitudes of the codes
    of infinity and NaN, and the least amax of a group."""

    dtype: torch.dtype
    largest: float
    largest_marked: float
    infinity_code: int
    nan_code: int = 0x7F
    least_amax: float = 1e-4

    @property
    def is_integer(self) -> bool:
        """Whether codes are whole numbers in two's complement, and not a magnitude below a sign bit."""
        return self.dtype is torch.int8


FORMATS = {
    WireFormat.INT8: ScaledFormat(torch.int8, 127.0, 126.0, 0x7F, 0x80, 2.0**-119),
    WireFormat.FP8_E4M3: ScaledFormat(torch.float8_e4m3fn, 448.0, 416.0, 0x7E),
    WireFormat.FP8_E5M2: ScaledFormat(torch.float8_e5m2, 57344.0, 57344.0, 0x7C),
}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
"""The signed integer dtype as wide as each: magnitudes compare alike in both, once the sign bit is off."""
INFINITY_BITS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The bits of +infinity; the magnitude of every NaN is above them, of every finite number below."""


def codes_of(magnitudes: torch.Tensor, is_negative: torch.Tensor, kind: ScaledFormat) -> torch.Tensor:
    """The codes (uint8) of these magnitudes of codes, with their signs."""
    signed = (
        torch.where(is_negative, -magnitudes, magnitudes) if kind.is_integer else magnitudes | is_negative.mul(0x80)
    )
    return signed.to(torch.uint8)  # modulo 256


def code_magnitudes(codes: torch.Tensor, kind: ScaledFormat) -> torch.Tensor:
    """The magnitudes of these codes (uint8), as integers of more bits."""
    return codes.view(torch.int8).to(torch.int16).abs() if kind.is_integer else (codes & 0x7F).to(torch.int16)


def grid_shape(wire: Wire, rows: int) -> tuple[int, int]:
    """The scales of ``rows`` rows as a matrix: (row or group of rows) × (1, block or channel)."""
    num_blocks = -(-wire.row_elements // GROUP_SIZE)
    if wire.scaling is Scaling.TOKEN:
        return rows, 1
    return (rows, num_blocks) if wire.scaling is Scaling.BLOCK else (-(-rows // GROUP_SIZE), wire.row_elements)


def make_scales(amax: torch.Tensor, wire: Wire, is_marked: torch.Tensor | None = None) -> torch.Tensor:
    """Scales of groups with these ``amax`` (FP32, of finite elements); those of marked groups are negative."""
    kind = FORMATS[wire.format]
    scales = amax.clamp_min(kind.least_amax)
    if is_marked is None:
        scales.div_(kind.largest)
    else:
        scales.div_(torch.where(is_marked, kind.largest_marked, kind.largest))
    if wire.power_of_two:  # up to the next exponent, unless the mantissa is zero already; scales are normal numbers
        bits = scales.view(torch.int32)
        bits.add_(0x7FFFFF).bitwise_and_(-0x800000)
    if is_marked is not None:
        scales = torch.where(is_marked, -scales, scales)
    return scales

"""Comparing the results of two ways of one call: bit by bit, or within the bound that is stated for
the sum that it is.

Which calls are compared (:func:`is_sampled`) follows from a number that all ranks of a group count
alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from commlayer.scheduler.wire import NATIVE, Scaling, Wire, WireFormat

__all__ = ["Allowance", "ResultDifference", "compare_results", "is_sampled", "memory_of", "sizes_of"]

_AT_ONCE = 1 << 20
"""Elements that are compared at a time: the bounds of all would take twice their memory."""
_GOLDEN = 0.6180339887
_HALF_LEAST = {WireFormat.INT8: 0.5, WireFormat.FP8_E4M3: 2.0**-10, WireFormat.FP8_E5M2: 2.0**-17}
"""Half of the least number of a format, by which its smallest elements are wrong at most, in units
of their scale."""
_LARGEST = {WireFormat.INT8: 126.0, WireFormat.FP8_E4M3: 448.0, WireFormat.FP8_E5M2: 57344.0}
_MARGIN = 1.01
"""For what is rounded while the bound itself is computed."""
_MORE_ROUNDINGS = 3
"""A sum of n has n − 1 roundings; those of 16 bits are also rounded where a node's sum, and the
result, is written."""


def is_sampled(number: int, every: int) -> bool:
    """Whether the call of this number, counted from 0, is the one of its ``every`` calls that is
    compared.

    The first call is. In each later window of so many calls it is another one, all in turn, or a
    program that makes as many calls in each of its steps would have the same one compared for ever.
    """
    window, offset = divmod(number, every)
    stride = max(1, round(every * _GOLDEN))
    while math.gcd(stride, every) > 1:
        stride += 1
    return offset == window * stride % every


class ResultDifference(NamedTuple):
    """Where two results differ: the first element, −1 where none does, and how many do."""

    first: int
    num_wrong: int


_SAME = ResultDifference(-1, 0)


@dataclass(frozen=True)
class Allowance:
    """How far two results of one reduction may be apart, because both are rounded.

    ``op`` of ``num_terms`` terms in ``dtype``. ``magnitude`` [elements], FP64: the sums of the
    terms' absolute values. Of a product ``magnitude`` is that of the factors above 1, and
    ``smallest`` that of the factors below. ``wire``: the format in which terms, or sums of some,
    have travelled; ``is_result_encoded``: the result too.
    """

    op: str
    num_terms: int
    dtype: torch.dtype
    magnitude: torch.Tensor
    smallest: torch.Tensor | None = None
    wire: Wire = NATIVE
    is_result_encoded: bool = False

    def wrong(self, got: torch.Tensor, expected: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Tell for each of these elements whether they are further apart than that.

        Nothing is said of elements whose sum overflows in some order, nor of a least or largest one
        where a term is NaN: the results of those depend on the order. Where a term of a sum is NaN
        or infinite, neither result may be finite.
        """
        magnitude = self.magnitude[start:stop]
        if self.op in ("min", "max"):
            return (got != expected) & ~magnitude.isnan()
        apart = (got.double() - expected.double()).abs()
        largest = magnitude
        if self.op == "product":
            assert self.smallest is not None
            largest = magnitude * self.smallest[start:stop]
        # Both results are rounded so many times.
        info, count = torch.finfo(self.dtype), self.num_terms + _MORE_ROUNDINGS
        bound = largest * (count * info.eps * _MARGIN) + count * info.tiny * info.eps
        if not self.wire.is_native:
            bound = bound + self._encoding(magnitude)
            if self.is_result_encoded:
                bound = bound + self._encoding(expected.double().abs() + bound, 1)
        is_judged = magnitude < info.max / 2
        if self.smallest is not None:
            is_judged &= self.smallest[start:stop] > 2 * info.tiny
        is_wrong = is_judged & ~(apart <= bound)
        if self.op == "sum":
            is_wrong |= ~magnitude.isfinite() & got.isfinite()
        return is_wrong

    def _encoding(self, magnitude: torch.Tensor, terms: int = 0) -> torch.Tensor:
        """The errors of encoding ``terms`` terms, all if 0, whose absolute values add up to
        ``magnitude``."""
        wire = self.wire
        is_relative = wire.format is not WireFormat.INT8
        error = magnitude * (wire.format.unit_roundoff * _MARGIN if is_relative else 0.0)
        if not wire.format.is_scaled:
            return error
        if wire.scaling is Scaling.CHANNEL:
            peak = self.magnitude.max() * 2 if self.magnitude.numel() else magnitude
        else:
            peak = magnitude.view(-1, wire.row_elements).amax(1, keepdim=True).expand(-1, wire.row_elements).reshape(-1)
        scale = peak / _LARGEST[wire.format] * (2.0 if wire.power_of_two else 1.0)
        return error + scale * (_HALF_LEAST[wire.format] * _MARGIN * (terms or self.num_terms))


def compare_results(
    got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, allowance: Allowance | None
) -> ResultDifference:
    """Compare two contiguous tensors of ``dtype``, or their bytes; by their bits, where nothing is
    allowed."""
    got, expected = memory_of(got), memory_of(expected)
    if allowance is None:
        if torch.equal(got, expected):
            return _SAME
        wrong = (got != expected).view(-1, dtype.itemsize).any(1)
        return ResultDifference(int(wrong.nonzero()[0]), int(wrong.count_nonzero()))
    got, expected, first, count = got.view(dtype), expected.view(dtype), -1, 0
    width = allowance.wire.row_elements
    step = max(1, _AT_ONCE // width) * width
    for start in range(0, got.numel(), step):
        stop = min(start + step, got.numel())
        wrong = allowance.wrong(got[start:stop], expected[start:stop], start, stop)
        num_wrong = int(wrong.count_nonzero())
        if num_wrong and first < 0:
            first = start + int(wrong.nonzero()[0])
        count += num_wrong
    return ResultDifference(first, count)


def sizes_of(terms: torch.Tensor, op: str) -> list[torch.Tensor]:
    """The sizes of a rank's terms, FP64, whose sums over all ranks an :class:`Allowance` needs; of
    a product, whose products."""
    sizes = terms.view(-1).abs().double()
    return [sizes.clamp(min=1.0), sizes.clamp(max=1.0)] if op == "product" else [sizes]


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as 1-D uint8 [bytes], a view that leaves its version as it
    is."""
    return x.data.as_strided((x.numel(),), (1,)).view(torch.uint8)

"""The kernel by which a stream of CUDA's is held back. Importing it loads Triton.

CI compiles it for a GPU, and runs it in Triton's interpreter, which has no clock and counts looks; tests/gpu runs it on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = ["hold_here", "hold_while_busy"]

_NS = 1000.0


@triton.jit(do_not_specialize=["count", "least", "most"])
def hold_while_busy(busy, count, least, most: tl.int64, width: tl.constexpr, has_clock: tl.constexpr):
    """Look at ``busy`` until none of its ``count`` numbers is ``least`` or more, for ``most`` nanoseconds, or so many looks.

    Compiled once for a ``width``: numbers are not told apart by their values (1, multiples of 16), nor by how large they are. So
    what was launched once is launched later without a compiler, which would hold the host up inside a step.
    """
    places = tl.arange(0, width)
    began = tl.full((), 0, tl.int64)
    passed = tl.full((), 0, tl.int64)
    if has_clock:
        began = globaltimer()
    largest = tl.max(tl.load(busy + places, mask=places < count, other=0, volatile=True).to(tl.int32), 0)
    while (largest >= least) & (passed < most):
        largest = tl.max(tl.load(busy + places, mask=places < count, other=0, volatile=True).to(tl.int32), 0)
        if has_clock:
            passed = globaltimer() - began
        else:
            passed += 1


def hold_here(busy: torch.Tensor, least: int, most_us: float) -> None:
    """Hold the current stream back: see :meth:`commlayer.devices.device_contract.Stream.hold`. ``busy`` is on CUDA."""
    width = triton.next_power_of_2(busy.numel())
    hold_while_busy[(1,)](busy, busy.numel(), least, int(most_us * _NS), width=width, has_clock=True, num_warps=1)

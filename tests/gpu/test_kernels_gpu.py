"""Encoded rows on a GPU, against the slow reference on the CPU, bit for bit (`make test-gpu`).

On a machine without a GPU tests/wire/test_kernels.py compiles the kernels and runs them in Triton's interpreter.

Rates are printed, as fractions of a plain copy on the device, and not asserted.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable

import pytest
import reference_rows
import torch

from commlayer.profiles.errors import NonFiniteError
from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.wire.codecs import Codec

HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not HAS_TRITON,
        reason=f"needs a CUDA device and Triton: torch {torch.__version__} sees {torch.cuda.device_count()} devices, and "
        f"Triton is {'' if HAS_TRITON else 'not '}installed",
    ),
]

SCALED = [WireFormat.INT8, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ROWS, SIZES = 133, (1, 130, 384)
ROUNDS = 20


def draw(rows: int, width: int, dtype: torch.dtype, *, special: bool) -> torch.Tensor:
    """On the CPU: many magnitudes, subnormals, zeros of both signs, and where ``special`` NaN and infinity."""
    generator = torch.Generator().manual_seed(rows)
    spread = torch.randn(rows, width, generator=generator) * torch.exp(
        5 * torch.randn(rows, width, generator=generator)
    )
    x = spread.clamp(-6e4, 6e4).to(dtype)
    flat = x.view(-1)
    flat[::5], flat[1::17], flat[2::19] = 0.0, -0.0, torch.finfo(dtype).smallest_normal / 4
    if special:
        x[1, ::3], x[1, 1::7], x[-1, -1:] = math.inf, -math.inf, math.nan
    return x


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; any NaN is as good as another."""
    found, bits = found.cpu(), torch.int32 if expected.dtype is torch.float32 else torch.int16
    of_nan = found.isnan() & expected.isnan()
    assert bool(((found.view(bits) == expected.view(bits)) | of_nan).all())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("wire_format", SCALED)
def test_rows_on_the_device_equal_the_reference(
    wire_format: WireFormat, scaling: Scaling, dtype: torch.dtype, power_of_two: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    for width, special in itertools.product(SIZES, (False, True)):
        wire = Wire(wire_format, width, scaling, power_of_two)
        codec, x = Codec(wire, dtype, "pass"), draw(7, width, dtype, special=special)
        index = torch.randint(0, 7, (NUM_ROWS,), generator=generator)
        expected = reference_rows.reference_encode(x[index], wire)
        message = torch.empty(codec.wire_bytes(NUM_ROWS), dtype=torch.uint8, device="cuda")
        codec.encode(x.cuda(), message, index.cuda())
        assert torch.equal(message.cpu(), expected), (width, special)
        out = torch.empty(NUM_ROWS, width, dtype=dtype, device="cuda")
        codec.decode(message, out)
        assert_same(out, reference_rows.reference_decode(expected, NUM_ROWS, wire, dtype))
        before, weights = torch.randn(9, width, generator=generator), torch.rand(NUM_ROWS, generator=generator)
        into = before.cuda()
        codec.add(message, into, weights=weights.cuda(), index=index.cuda())
        assert_same(into, reference_rows.add(expected, before, wire, dtype, weights, index))


def test_bf16_on_the_device() -> None:
    codec, x = Codec(Wire(WireFormat.BF16), torch.float32), draw(7, 130, torch.float32, special=True)
    index = torch.tensor([6, 0, 0, 3])
    message = torch.empty(2 * 4 * 130, dtype=torch.uint8, device="cuda")
    codec.encode(x.cuda(), message, index.cuda())
    assert_same(message.view(torch.bfloat16).view(4, 130), x[index].bfloat16())
    total = torch.ones(4, 130, device="cuda")
    codec.add(message, total)
    assert_same(total, 1 + x[index].bfloat16().float())


def test_nan_is_found_before_anything_is_written() -> None:
    codec = Codec(Wire(WireFormat.FP8_E4M3, 130), torch.bfloat16)
    message = torch.full((codec.wire_bytes(7),), 0xEF, dtype=torch.uint8, device="cuda")
    with pytest.raises(NonFiniteError, match="first in row 1"):
        codec.encode(draw(7, 130, torch.bfloat16, special=True).cuda(), message)
    assert bool((message == 0xEF).all())


def gbps(call: Callable[[], object], num_bytes: int) -> float:
    """Gigabytes (1e9) a second, median of some rounds."""
    times = list[float]()
    for _ in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return num_bytes / sorted(times[3:])[ROUNDS // 2] / 1e9


@pytest.mark.parametrize("scaling", Scaling)
def test_rates_beside_a_plain_copy(scaling: Scaling, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes read and written by each, over its time; 64 MiB of bfloat16."""
    rows, width = 8192, 4096
    codec = Codec(Wire(WireFormat.FP8_E4M3, width, scaling), torch.bfloat16, "pass")
    x = torch.randn(rows, width, device="cuda").bfloat16()
    copy, total = torch.empty_like(x), torch.zeros(rows, width, device="cuda")
    message = torch.empty(codec.wire_bytes(rows), dtype=torch.uint8, device="cuda")
    index, weights = torch.randperm(rows, device="cuda"), torch.rand(rows, device="cuda")
    native, wire = 2 * rows * width, codec.wire_bytes(rows)
    plain = gbps(lambda: copy.copy_(x), 2 * native)
    rates = {
        "encode": gbps(lambda: codec.encode(x, message), native + wire),
        "gather and encode": gbps(lambda: codec.encode(x, message, index), native + wire),
        "decode": gbps(lambda: codec.decode(message, copy), native + wire),
        "weight and add by a map": gbps(
            lambda: codec.add(message, total, weights=weights, index=index), wire + 4 * native
        ),
    }
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, {scaling}: a plain copy moves {plain:.0f} GB/s; of that")
        for what, rate in rates.items():
            print(f"  {what}: {rate / plain:.2f}")

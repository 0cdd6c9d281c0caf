"""Encoded rows against the slow reference, bit for bit, and against what the formats promise."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import reference_rows
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.errors import NonFiniteError, TensorError, UsageError
from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat
from commlayer.wire.codecs import Codec, cpu_rows, tiles
from commlayer.wire.kernels import row_kernels

INT8 = WireFormat.INT8
SCALED = [INT8, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 127), (2, 256), (2, 300)]
CHANNEL_SHAPES = [(1, 1), (3, 20), (130, 3)]  # the reference takes a loop for each channel
BF16 = Wire(WireFormat.BF16)
TOKENS = Wire(WireFormat.FP8_E4M3, 256)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes from subnormal to near the largest, rows of zeros, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator) * torch.exp(5 * torch.randn(shape, generator=generator))
    x = spread.clamp(-6e4, 6e4).to(dtype)
    flat = x.view(-1)
    flat[::5], flat[1::17], flat[2::19] = 0.0, -0.0, torch.finfo(dtype).smallest_normal / 4
    if shape[0] > 2:
        x[1] = 0
    return x


def with_specials(x: torch.Tensor) -> torch.Tensor:
    """In the first row and in the last column."""
    x = x.clone()
    x[0, ::3], x[0, 1::7], x[-1, -1:] = math.inf, -math.inf, math.nan
    return x


def encoded(codec: Codec, rows: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    count = len(rows if index is None else index)
    size = codec.wire_bytes(count) if codec.wire.format.is_scaled else 2 * count * rows.shape[1]
    out = torch.full((size,), 0xAB, dtype=torch.uint8)
    codec.encode(rows, out, index)
    return out


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit-equal, signs of zeros too; any NaN is as good as another."""
    assert found.dtype is expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    known = ~expected.isnan()
    assert torch.equal(found.signbit()[known], expected.signbit()[known])


def allowed(wire_format: WireFormat, amax: float) -> dict[str, Any]:
    """The bound of a group whose scale is that of ``amax``, as assert_close takes it; 1 % over it, for marked groups."""
    if wire_format is INT8:
        return {"rtol": 0.0, "atol": amax / 254 * 1.01}
    return {"rtol": wire_format.unit_roundoff, "atol": 0.0}


# Against the reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("wire_format", SCALED)
def test_rows_are_encoded_and_decoded_as_the_reference_does(
    wire_format: WireFormat, scaling: Scaling, dtype: torch.dtype
) -> None:
    shapes = CHANNEL_SHAPES if scaling is Scaling.CHANNEL else SHAPES
    for (rows, width), power_of_two, special in itertools.product(shapes, (False, True), (False, True)):
        wire = Wire(wire_format, width, scaling, power_of_two)
        codec, x = Codec(wire, dtype, "pass"), draw((rows, width), dtype)
        x = with_specials(x) if special else x
        message, out = encoded(codec, x), torch.empty_like(x)
        assert torch.equal(message, reference_rows.reference_encode(x, wire)), (wire, special)
        codec.decode(message, out)
        assert_same(out, reference_rows.reference_decode(message, rows, wire, dtype))


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("wire_format", SCALED)
def test_rows_that_fill_many_tiles(monkeypatch: pytest.MonkeyPatch, wire_format: WireFormat, scaling: Scaling) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2048)
    for shape in ((300, 10), (140, 260)) if scaling is Scaling.CHANNEL else ((3, 2500), (20, 700), (50, 256)):
        wire = Wire(wire_format, shape[1], scaling)
        x = with_specials(draw(shape, torch.bfloat16))
        codec, out = Codec(wire, torch.bfloat16, "pass"), torch.empty_like(x)
        message = encoded(codec, x)
        assert torch.equal(message, reference_rows.reference_encode(x, wire))
        codec.decode(message, out)
        assert_same(out, reference_rows.reference_decode(message, shape[0], wire, torch.bfloat16))


@pytest.mark.parametrize("scaling", Scaling)
def test_rows_are_gathered_and_placed_by_a_map(scaling: Scaling) -> None:
    wire, x = Wire(WireFormat.FP8_E4M3, 130, scaling), draw((9, 130), torch.bfloat16)
    codec, index = Codec(wire, torch.bfloat16), torch.tensor([8, 0, 0, 3, 8])
    message = encoded(codec, x, index)
    assert torch.equal(message, reference_rows.reference_encode(x[index], wire))
    out, places = torch.full_like(x, 7.0), torch.tensor([4, 0, 8, 1, 2])
    codec.decode(message, out, places)
    assert_same(out[places], reference_rows.reference_decode(message, 5, wire, torch.bfloat16))
    assert bool((out[[3, 5, 6, 7]] == 7.0).all())


def test_repeated_rows_that_fill_many_tiles_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2048)
    wire, generator = Wire(WireFormat.FP8_E4M3, 256), torch.Generator().manual_seed(0)
    x, index = draw((100, 256), torch.bfloat16), torch.randint(0, 20, (100,), generator=generator)
    codec, into, weights = Codec(wire, torch.bfloat16), torch.randn(20, 256), torch.rand(100)
    message = encoded(codec, x)
    expected = reference_rows.add(message, into, wire, torch.bfloat16, weights, index)
    codec.add(message, into, weights=weights, index=index)
    assert_same(into, expected)


@pytest.mark.parametrize("has_index", [False, True], ids=["in place", "by a map"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", Scaling)
def test_rows_are_added_in_fp32_and_rounded_once(
    scaling: Scaling, into_dtype: torch.dtype, has_weights: bool, has_index: bool
) -> None:
    wire, count = Wire(WireFormat.FP8_E5M2, 130, scaling), 6
    codec, x = Codec(wire, torch.bfloat16, "pass"), with_specials(draw((count, 130), torch.bfloat16))
    index = torch.tensor([3, 1, 3, 0, 3, 1]) if has_index else None
    weights = torch.rand(count, generator=torch.Generator().manual_seed(1)) if has_weights else None
    into, message = torch.randn(count, 130).to(into_dtype), encoded(codec, x)
    expected = reference_rows.add(
        message,
        into,
        wire,
        torch.bfloat16,
        torch.ones(count) if weights is None else weights,
        torch.arange(count) if index is None else index,
    )
    codec.add(message, into, weights=weights, index=index)
    assert_same(into, expected)


def test_the_reference_rounds_as_torch_casts() -> None:
    """Two independent definitions of rounding to nearest even: a search among values, and torch's bits."""
    for wire_format, dtype, largest in (
        (WireFormat.FP8_E4M3, torch.float8_e4m3fn, 448.0),
        (WireFormat.FP8_E5M2, torch.float8_e5m2, 57344.0),
    ):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        every = every[every.isfinite() & (every.abs() <= largest)]
        row = torch.cat([every, torch.tensor([largest])])  # so the scale is 1
        message = reference_rows.reference_encode(row.unsqueeze(0), Wire(wire_format, len(row)))
        assert message[:4].view(torch.float32).item() == 1.0
        assert torch.equal(message[4:], row.to(dtype).view(torch.uint8))


# What the formats promise


def test_a_message_is_its_scales_and_then_its_payload() -> None:
    rows = torch.tensor([[448.0, 1.0, -0.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    message = encoded(Codec(Wire(WireFormat.FP8_E4M3, 4), torch.float32), rows)
    assert message[:8].view(torch.float32).tolist() == [1.0, torch.tensor(1e-4).div(448).item()]
    assert message[8:].tolist() == [0x7E, 0x38, 0x80, 0xC0, 0, 0, 0, 0]


def test_an_int8_message_is_whole_numbers_and_bounded_by_its_groups_largest() -> None:
    """Also where all is tiny: no floor under amax makes zeros of it."""
    rows = torch.tensor([[127.0, 1.0, -0.0, -2.5], [0.0, 0.0, 0.0, 0.0], [3e-30, -1e-30, 2.51e-30, -3e-30]])
    codec, out = Codec(Wire(INT8, 4), torch.float32), torch.empty(3, 4)
    message = encoded(codec, rows)
    assert message[:4].view(torch.float32).item() == 1.0
    assert message[12:].view(torch.int8).tolist() == [127, 1, 0, -2, 0, 0, 0, 0, 127, -42, 106, -127]
    codec.decode(message, out)
    assert bool(((out - rows).abs() <= rows.abs().amax(1, keepdim=True) / 254 * 1.000001).all())


@pytest.mark.parametrize("amax", [448.0, 448.0 * (1 + 2**-23), 447.9, 3e38, 1e-30, 1.0])
def test_scales_are_rounded_up_to_powers_of_two(amax: float) -> None:
    x = torch.tensor([[amax, amax / 3]])
    scale = encoded(Codec(Wire(WireFormat.FP8_E4M3, 2, power_of_two=True), torch.float32), x)[:4].view(torch.float32)
    exact = float(x.max().clamp_min(1e-4)) / 448
    assert math.frexp(float(scale))[0] == 0.5
    assert exact <= float(scale) < 2 * exact


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire_format", SCALED)
def test_the_largest_numbers_stay_finite(wire_format: WireFormat, dtype: torch.dtype, power_of_two: bool) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, largest / 3]]).to(dtype)
    wire = Wire(wire_format, 3, power_of_two=power_of_two)
    codec, out, into = Codec(wire, dtype), torch.empty_like(x), torch.zeros(1, 3)
    message = encoded(codec, x)
    codec.decode(message, out)
    codec.add(message, into)
    assert bool(out.isfinite().all())
    assert bool(into.isfinite().all())
    torch.testing.assert_close(out.double(), x.double(), **allowed(wire_format, power_of_two * largest + largest))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_element_is_off_by_more_than_the_bound(data: st.DataObject) -> None:
    """Half a unit in the last place, or half of the least subnormal number times the scale; then one rounding to the dtype."""
    wire_format, scaling = data.draw(st.sampled_from(SCALED)), data.draw(st.sampled_from(list(Scaling)))
    dtype, power_of_two = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    rows, width = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
    seed, magnitude = data.draw(st.integers(0, 2**31)), data.draw(st.floats(-4, 4))
    spread = data.draw(st.floats(0, 6))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 10**magnitude
    x = (x * torch.exp(spread * torch.randn(rows, width, generator=generator))).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    if data.draw(st.booleans()):
        x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = math.inf
    wire = Wire(wire_format, width, scaling, power_of_two)
    codec, out = Codec(wire, dtype, "pass"), torch.empty_like(x)
    message = encoded(codec, x)
    codec.decode(message, out)
    of_scales = message[: 4 * wire.num_scales(rows)].view(torch.float32).abs()
    assert_close_enough(x.double(), out.double(), scales_of_elements(of_scales, wire, rows).double(), wire, dtype)


def scales_of_elements(scales: torch.Tensor, wire: Wire, rows: int) -> torch.Tensor:
    """[r, W]: the scale of each element."""
    width = wire.row_elements
    if wire.scaling is Scaling.TOKEN:
        return scales.view(rows, 1).expand(rows, width)
    if wire.scaling is Scaling.BLOCK:
        return scales.view(rows, -1).repeat_interleave(GROUP_SIZE, 1)[:, :width]
    return scales.view(-1, width).repeat_interleave(GROUP_SIZE, 0)[:rows]


def assert_close_enough(
    x: torch.Tensor, found: torch.Tensor, scales: torch.Tensor, wire: Wire, dtype: torch.dtype
) -> None:
    least = {INT8: 0.5, WireFormat.FP8_E4M3: 2.0**-10, WireFormat.FP8_E5M2: 2.0**-17}[wire.format]
    relative = 0.0 if wire.format is INT8 else wire.format.unit_roundoff
    is_finite = x.isfinite()
    assert torch.equal(found[~is_finite], x[~is_finite])
    bound = torch.maximum(x.abs() * relative, least * scales) * (1 + 2.0 ** (-13 if wire.format is INT8 else -20))
    bound += (x.abs() + bound) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert bool(((found - x).abs() <= bound)[is_finite].all())


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 7001)])
def test_bf16_is_one_rounding_to_nearest_even(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    monkeypatch.setattr(cpu_rows, "_SUM_ELEMENTS", 4096)
    x = with_specials(draw(shape, torch.float32))
    codec, out = Codec(BF16, torch.float32), torch.empty(shape)
    message = encoded(codec, x)
    halves = message.view(torch.bfloat16).view(shape)
    assert_same(halves, x.bfloat16())
    codec.decode(message, out)
    assert_same(out, x.bfloat16().float())
    assert_same(encoded(codec, out).view(torch.bfloat16).view(shape), halves)  # what fits is exact
    into = torch.randn(shape)
    expected = into + x.bfloat16().float()
    codec.add(message, into)
    assert_same(into, expected)


def test_bf16_by_a_map_and_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "TILE_ELEMENTS", 64)
    codec, x = Codec(BF16, torch.float32), draw((9, 33), torch.float32)
    index, weights = torch.tensor([8, 0, 0, 3]), torch.tensor([1.0, 0.5, 2.0, -1.0])
    message = encoded(codec, x, index)
    assert_same(message.view(torch.bfloat16).view(4, 33), x[index].bfloat16())
    out, into = torch.zeros(9, 33), torch.ones(9, 33)
    codec.decode(message, out, torch.tensor([1, 2, 3, 4]))
    assert_same(out[1:5], x[index].bfloat16().float())
    codec.add(message, into, weights=weights, index=torch.tensor([5, 5, 5, 0]))
    rows = x[index].bfloat16().float() * weights.unsqueeze(1)
    assert_same(into[5], 1 + rows[0] + rows[1] + rows[2])
    assert_same(into[0], 1 + rows[3])
    cube = draw((4, 3, 2), torch.float32)
    flat = torch.empty(48, dtype=torch.uint8)
    codec.encode(cube, flat)
    assert_same(flat.view(torch.bfloat16), cube.view(-1).bfloat16())


def test_the_error_is_that_of_encoding_and_decoding() -> None:
    x = draw((150, 256), torch.float32)
    for wire in (Wire(WireFormat.FP8_E4M3, 256, Scaling.BLOCK), BF16):
        codec, out = Codec(wire, torch.float32), torch.empty_like(x)
        codec.decode(encoded(codec, x), out)
        expected = float((out.double() - x.double()).square().sum()), float(x.double().square().sum())
        assert codec.error(x) == pytest.approx(expected, rel=1e-9)
    x[3, 3] = math.inf
    assert all(math.isfinite(part) for part in Codec(TOKENS, torch.float32, "pass").error(x))
    with pytest.raises(NonFiniteError):
        Codec(TOKENS, torch.float32).error(x)


# Where messages lie, and who calls


@pytest.mark.parametrize("wire", [TOKENS, Wire(WireFormat.FP8_E5M2, 256, Scaling.CHANNEL), BF16], ids=str)
def test_a_message_in_the_middle_of_a_buffer(wire: Wire) -> None:
    x, codec = draw((3, 256), torch.float32), Codec(wire, torch.float32)
    alone = encoded(codec, x)
    buffer = torch.full((len(alone) + 20,), 0xCD, dtype=torch.uint8)
    begin = 4 if wire.format.is_scaled else 2
    place = buffer[begin : begin + len(alone)]
    codec.encode(x, place)
    assert torch.equal(place, alone)
    assert bool((buffer[:begin] == 0xCD).all())
    assert bool((buffer[begin + len(alone) :] == 0xCD).all())
    out, expected = torch.empty_like(x), torch.empty_like(x)
    codec.decode(place, out)
    codec.decode(alone, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("wire", [TOKENS, Wire(WireFormat.FP8_E4M3, 256, Scaling.CHANNEL), BF16], ids=str)
def test_no_rows_are_no_bytes(wire: Wire) -> None:
    codec, x, nothing = Codec(wire, torch.float32), torch.ones(2, 256), torch.empty(0, dtype=torch.int64)
    message = torch.empty(0, dtype=torch.uint8)
    codec.encode(x[:0], message)
    codec.encode(x, message, nothing)
    codec.decode(message, x[:0])
    codec.decode(message, x, nothing)
    codec.add(message, x, index=nothing, weights=torch.empty(0))
    assert bool((x == 1).all())
    assert codec.error(x[:0]) == (0.0, 0.0)


def test_rows_with_strides_are_copied_first() -> None:
    x, codec = draw((256, 5), torch.bfloat16).t(), Codec(TOKENS, torch.bfloat16)
    assert torch.equal(encoded(codec, x), reference_rows.reference_encode(x.contiguous(), TOKENS))
    with pytest.raises(TensorError, match="contiguous"):
        codec.decode(encoded(codec, x), x)


def test_codecs_work_in_inference_mode_and_out_of_it_on_any_thread() -> None:
    """The memory that a thread makes in one mode serves it in the other."""
    codec, x = Codec(Wire(WireFormat.FP8_E4M3, 512), torch.bfloat16), draw((200, 512), torch.bfloat16)
    expected, failures = encoded(codec, x), list[BaseException]()

    def work() -> None:
        try:
            for number, inference in enumerate((True, False, True)):
                with torch.inference_mode(inference):
                    rows = x[: 100 * (number + 1)]
                    message, out = encoded(codec, rows), torch.empty_like(rows)
                    codec.decode(message, out)
                    codec.add(message, out.float())
                    assert torch.equal(message, reference_of[len(rows)])
        except BaseException as error:  # noqa: BLE001  # of a thread: the test raises it
            failures.append(error)

    reference_of = {rows: encoded(codec, x[:rows]) for rows in (100, 200)}
    assert torch.equal(reference_of[200], expected)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# NaN and infinity that are not passed, and other misuse


def test_nothing_is_written_when_nan_or_infinity_is_found() -> None:
    codec, x = Codec(TOKENS, torch.bfloat16), torch.ones(300, 256).bfloat16()
    x[170, 3], x[299, 0] = math.nan, -math.inf
    out = torch.full((codec.wire_bytes(300),), 0xEF, dtype=torch.uint8)
    with pytest.raises(NonFiniteError, match=r"2 of 76800 elements.*first in row 170.*non_finite='pass'"):
        codec.encode(x, out)
    assert bool((out == 0xEF).all())
    with pytest.raises(NonFiniteError, match=r"1 of 512 elements.*first in row 1"):
        codec.encode(x, out[: codec.wire_bytes(2)], torch.tensor([0, 299]))
    codec.encode(x, out[: codec.wire_bytes(2)], torch.tensor([0, 298]))  # the others are not sent


@pytest.mark.parametrize("wire_format", SCALED)
def test_marked_groups_keep_their_finite_elements(wire_format: WireFormat) -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 3.0, -1.0], [math.inf] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]])
    codec, out = Codec(Wire(wire_format, 5), torch.float32, "pass"), torch.empty(3, 5)
    message = encoded(codec, x)
    assert message[:12].view(torch.float32).signbit().tolist() == [True, True, False]
    codec.decode(message, out)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out[x.isinf()], x[x.isinf()])
    torch.testing.assert_close(out, x, **allowed(wire_format, 5.0), equal_nan=True)


def misuses() -> Iterator[tuple[str, type[Exception], str]]:
    yield "Codec(Wire(WireFormat.NATIVE), torch.float32)", UsageError, "nothing to encode"
    yield "Codec(TOKENS, torch.float32, 'ignore')", UsageError, "raise or pass"
    for dtype in ("float64", "int32", "complex64", "uint8", "float8_e4m3fn"):
        yield f"Codec(TOKENS, torch.{dtype})", TensorError, "float32, bfloat16 and float16"
        yield f"Codec(BF16, torch.{dtype})", TensorError, "bf16 encodes float32"
    for dtype in ("bfloat16", "float16"):
        yield f"Codec(BF16, torch.{dtype})", TensorError, "already as small.*send it native"
    yield "codec.encode(x.float(), message)", TensorError, "expected rows of torch.bfloat16, got torch.float32"
    yield "codec.encode(x[:, :255], message)", TensorError, r"expected rows \[r, 256\], got shape \[4, 255\]"
    yield "codec.encode(x.view(-1), message)", TensorError, "expected rows"
    yield "codec.encode(x, message[:-1])", TensorError, "message of 1040 bytes"
    yield "codec.encode(x, message.view(torch.int8))", TensorError, "uint8"
    yield "codec.encode(x, torch.empty(2080, dtype=torch.uint8)[::2])", TensorError, "stride of 2"
    yield "codec.encode(x, torch.empty(1042, dtype=torch.uint8)[2:])", TensorError, "multiple of 4 bytes"
    yield "halves.encode(x.float(), torch.empty(2049, dtype=torch.uint8)[1:])", TensorError, "multiple of 2 bytes"
    yield "halves.encode(x.float(), message)", TensorError, "message of 2048 bytes"
    for index in ("[0, 1, 2, 4]", "[0, 1, 2, -1]"):
        yield f"codec.encode(x, message, torch.tensor({index}))", TensorError, "from 0 to 3"
        yield f"codec.decode(message, x, torch.tensor({index}))", TensorError, "from 0 to 3"
        yield f"codec.add(message, x, index=torch.tensor({index}))", TensorError, "from 0 to 3"
    yield "codec.encode(x, message, torch.arange(4).int())", TensorError, "int64"
    yield "codec.encode(x, message, torch.arange(3))", TensorError, "message of 780 bytes"
    yield "codec.decode(message, x.float())", TensorError, "expected rows of torch.bfloat16"
    yield "codec.decode(message, x[:3])", TensorError, "message of 780 bytes"
    yield "codec.add(message, x.half())", TensorError, "torch.float32 or torch.bfloat16"
    yield "codec.add(message, x, weights=torch.ones(3))", TensorError, r"weights float32 \[4\]"
    yield "codec.add(message, x, weights=torch.ones(4).double())", TensorError, "weights float32"
    yield "codec.encode(x.to('meta'), message)", TensorError, "one device"


@pytest.mark.parametrize(("call", "error", "match"), list(misuses()))
def test_misuse_is_told(call: str, error: type[Exception], match: str) -> None:
    x = torch.ones(4, 256).bfloat16()
    names = {"x": x, "codec": Codec(TOKENS, torch.bfloat16), "halves": Codec(BF16, torch.float32)}
    message = torch.zeros(1040, dtype=torch.uint8)
    with pytest.raises(error, match=match):
        eval(call, {**globals(), **names, "message": message})


def test_without_triton_gpu_rows_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "commlayer.wire.kernels.rows", None)
    with pytest.raises(UsageError, match=r"pip install 'triton>=3.2'"):
        row_kernels()

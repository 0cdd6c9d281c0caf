"""The Triton kernels in Triton's interpreter, on the CPU, against the slow reference: bit for bit.

Triton decides when it is loaded whether it interprets, so every check runs in a process of its own, all of them in one: this
file, run as a program, which reports what failed. That shows what the kernels mean. Another process compiles them for GPUs,
which needs none: it shows that the compiler accepts them and fuses nothing. What they do on a GPU, and how fast, is for
tests/gpu/test_kernels_gpu.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference_rows
import torch

from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.wire.codecs.encoded_rows import EncodedRows

SCALED = [WireFormat.INT8, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 130  # a whole block and a short one
CHANNELS = 34  # more than a program's 32: the reference takes a loop for each
LIMIT_S = 100.0
HELPERS = Path(__file__).resolve().parents[1]  # what tests share: pytest puts it on the path, a process does not


def draw(rows: int, dtype: torch.dtype, width: int = WIDTH) -> torch.Tensor:
    """[rows, width] of many magnitudes, with zeros of both signs, subnormals, and the first row all zeros."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(rows, width, generator=generator) * torch.exp(
        5 * torch.randn(rows, width, generator=generator)
    )
    x = spread.clamp(-6e4, 6e4).to(dtype)
    x[:, ::5], x[:, 1::17], x[:, 2::19] = 0.0, -0.0, torch.finfo(dtype).smallest_normal / 4
    x[0] = 0
    return x


def with_specials(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1, ::3], x[1, 1::7], x[-1, -1:] = math.inf, -math.inf, math.nan
    return x


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits; any NaN is as good as another."""
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    of_nan = found.isnan() & expected.isnan()
    return bool(((found.view(bits) == expected.view(bits)) | of_nan).all())


def cases() -> list[tuple[Wire, torch.dtype]]:
    """E4M3 in every scaling and dtype, E5M2 and INT8 in every scaling; powers of two with one dtype of each."""
    kinds = [(WireFormat.FP8_E4M3, False, dtype) for dtype in DTYPES]
    kinds += [
        (WireFormat.FP8_E4M3, True, torch.float16),
        (WireFormat.FP8_E5M2, False, torch.bfloat16),
        (WireFormat.FP8_E5M2, True, torch.float32),
        (WireFormat.INT8, False, torch.float32),
    ]
    return [
        (Wire(wire_format, CHANNELS if scaling is Scaling.CHANNEL else WIDTH, scaling, power_of_two), dtype)
        for (wire_format, power_of_two, dtype), scaling in itertools.product(kinds, Scaling)
    ]


def num_rows(wire: Wire) -> int:
    is_long = wire.scaling is Scaling.CHANNEL and wire.power_of_two and wire.format is WireFormat.FP8_E4M3
    return 131 if is_long else 4


# Checks: run by the interpreting process


def check_encoding() -> None:
    from commlayer.wire.kernels.rows import RowKernels

    for wire, dtype in cases():
        x, count = with_specials(draw(6, dtype, wire.row_elements)), num_rows(wire)
        message = torch.empty(wire.wire_bytes(6), dtype=torch.uint8)
        RowKernels.encode(x, EncodedRows(message, wire, x.dtype))
        assert torch.equal(message, reference_rows.reference_encode(x, wire)), (wire, dtype)
        index = torch.arange(count) * 5 % 6
        message = torch.empty(wire.wire_bytes(count), dtype=torch.uint8)
        RowKernels.encode(x, EncodedRows(message, wire, x.dtype, index))
        assert torch.equal(message, reference_rows.reference_encode(x[index], wire)), (wire, dtype, "by a map")


def check_rounding() -> None:
    """Every value of FP16 that the format has room for: all ties, all subnormals."""
    from commlayer.wire.kernels.rows import RowKernels

    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for wire_format, largest in zip(SCALED, (127.0, 448.0, 57344.0), strict=True):
        row = torch.cat([every[every.abs() <= largest], torch.tensor([largest]).half()]).unsqueeze(0)
        wire = Wire(wire_format, row.shape[1])
        message = torch.empty(wire.wire_bytes(1), dtype=torch.uint8)
        RowKernels.encode(row, EncodedRows(message, wire, row.dtype))
        assert torch.equal(message, reference_rows.reference_encode(row, wire)), wire


def check_decoding() -> None:
    from commlayer.wire.kernels.rows import RowKernels

    for wire, dtype in cases():
        count = num_rows(wire)
        message = reference_rows.reference_encode(
            with_specials(draw(6, dtype, wire.row_elements))[torch.arange(count) % 6], wire
        )
        expected = reference_rows.reference_decode(message, count, wire, dtype)
        out = torch.empty(count, wire.row_elements, dtype=dtype)
        RowKernels.decode(EncodedRows(message, wire, dtype), out)
        assert same(out, expected), (wire, dtype)
        out, places = torch.empty(count + 1, wire.row_elements, dtype=dtype), torch.arange(count, 0, -1)
        RowKernels.decode(EncodedRows(message, wire, dtype, places), out)
        assert same(out[places], expected), (wire, dtype, "by a map")


def check_every_code() -> None:
    """Each of the 256 codes, in a plain group and in a marked one."""
    from commlayer.wire.kernels.rows import RowKernels

    for wire_format, scale in itertools.product(SCALED, (0.37, -0.37)):
        codes = torch.arange(256, dtype=torch.uint8)
        if scale > 0:  # where codes of NaN and infinity do not occur
            largest = 0x7E if wire_format is WireFormat.FP8_E4M3 else 0x7B
            codes = codes[codes != 0x80] if wire_format is WireFormat.INT8 else codes[(codes & 0x7F) <= largest]
        wire = Wire(wire_format, len(codes))
        message = torch.cat([torch.tensor([scale]).view(torch.uint8), codes])
        out = torch.empty(1, len(codes))
        RowKernels.decode(EncodedRows(message, wire, torch.float32), out)
        expected = reference_rows.reference_decode(message, 1, wire, torch.float32)
        if scale < 0 and wire_format is WireFormat.FP8_E5M2:  # 0x7D and 0x7E are not written, and mean nothing
            out, expected = (x[:, (codes & 0x7F <= 0x7C) | (codes & 0x7F == 0x7F)] for x in (out, expected))
        assert same(out, expected), (wire, scale)


def check_sums() -> None:
    from commlayer.wire.kernels.rows import RowKernels

    index = torch.tensor([3, 1, 3, 5, 3, 1])
    for wire, dtype in cases():
        message = reference_rows.reference_encode(with_specials(draw(6, dtype, wire.row_elements)), wire)
        weights = torch.rand(6, generator=torch.Generator().manual_seed(2))
        for into_dtype in {torch.float32, dtype}:
            before = torch.randn(7, wire.row_elements, generator=torch.Generator().manual_seed(1)).to(into_dtype)
            into = before.clone()
            RowKernels.add(EncodedRows(message, wire, dtype, index), into, weights)
            assert same(into, reference_rows.add(message, before, wire, dtype, weights, index)), (
                wire,
                dtype,
                into_dtype,
            )
        into, plainly = torch.ones(6, wire.row_elements), torch.ones(6, wire.row_elements)
        RowKernels.add(EncodedRows(message, wire, dtype), into, None)
        expected = reference_rows.add(message, plainly, wire, dtype, torch.ones(6), torch.arange(6))
        assert same(into, expected), (wire, dtype, "row by row")


def check_bf16() -> None:
    from commlayer.wire.kernels.rows import RowKernels

    wire, x = Wire(WireFormat.BF16, WIDTH), with_specials(draw(6, torch.float32))
    x[2, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38])  # two ties, and one that rounds to infinity
    index, rows = torch.tensor([5, 0, 0, 2, 1]), x.bfloat16()
    message = torch.empty(wire.wire_bytes(5), dtype=torch.uint8)
    RowKernels.encode(x, EncodedRows(message, wire, x.dtype, index))
    assert same(message.view(torch.bfloat16).view(5, WIDTH), rows[index])
    out = torch.empty(6, WIDTH)
    RowKernels.decode(EncodedRows(message, wire, torch.float32, torch.arange(5)), out)
    assert same(out[:5], rows[index].float())
    into, weights = torch.ones(6, WIDTH), torch.rand(5)
    RowKernels.add(EncodedRows(message, wire, torch.float32, torch.tensor([2, 2, 0, 5, 2])), into, weights)
    expected = torch.ones(WIDTH)
    for row in (0, 1, 4):
        expected = expected + weights[row] * rows[index[row]].float()
    assert same(into[2], expected)


def check_holding() -> None:
    """A hold ends at once, or when the numbers change, or after so many looks: else this runs into the limit of its process."""
    from commlayer.devices.hold_kernel import hold_while_busy

    busy, for_ever = torch.zeros(48, dtype=torch.uint8), 10**12
    hold_while_busy[(1,)](busy, 48, 1, for_ever, width=64, has_clock=False)
    busy[32] = 2
    hold_while_busy[(1,)](busy, 32, 1, for_ever, width=32, has_clock=False)
    hold_while_busy[(1,)](busy, 48, 3, for_ever, width=64, has_clock=False)
    hold_while_busy[(1,)](busy, 48, 2, 5, width=64, has_clock=False)
    threading.Timer(0.05, busy.zero_).start()
    hold_while_busy[(1,)](busy, 48, 1, for_ever, width=64, has_clock=False)
    assert not busy.any(), "it has lasted until then"


# Compiled for a GPU that need not be there

TYPES = {
    "index": "*i64",
    "scales": "*fp32",
    "payload": "*u8",
    "order": "*i64",
    "starts": "*i64",
    "weights": "*fp32",
    "num_rows": "i32",
    "width": "i32",
    "limit": "fp32",
    "bounds": "*i64",
    "first_chunk": "i32",
    "num_blocks": "i32",
    "block_words": "i32",
    "busy": "*u8",
    "count": "i32",
    "least": "i32",
    "most": "i32",
}


def assembly(kernel: Any, capability: int, types: dict[str, str], **constants: object) -> str:
    """The PTX of a kernel; ptxas has accepted it too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else {**TYPES, **types}[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 0
    return str(compiled.asm["ptx"])


def assert_exact(assembled: str) -> None:
    """No product is fused with a sum, no division is approximate, no subnormal number is flushed."""
    assert "fma." not in assembled
    assert ".ftz" not in assembled
    assert "div." not in assembled.replace("div.rn.", "").replace("div.s", "").replace("div.u", "")


def compile_encoding() -> None:
    from commlayer.wire.kernels import row_programs

    for kind, dtype, power_of_two in ((4, "*bf16", False), (5, "*fp32", True)):
        options = {"kind": kind, "power_of_two": power_of_two, "has_index": power_of_two}
        capability = 90 if power_of_two else 80
        assert_exact(assembly(row_programs.encode_tokens, capability, {"rows": dtype}, tile=1024, **options))
        for by_channel in (False, True):
            more = {"by_channel": by_channel, "tile": 32 if by_channel else 8, **options}
            assert_exact(assembly(row_programs.encode_tiles, capability, {"rows": dtype}, **more))
    assembly(row_programs.encode_tiles, 80, {"rows": "*fp16"}, width=1, **more)  # as Triton specialises it
    assert_exact(assembly(row_programs.encode_bf16, 80, {"rows": "*fp32", "payload": "*i16"}, tile=1024))


def compile_decoding() -> None:
    from commlayer.wire.kernels import row_programs

    for (kind, dtype), scaling in itertools.product(((4, "*bf16"), (5, "*fp32"), (8, "*fp32")), (0, 1, 2)):
        if kind == 8 and scaling:
            continue
        types = {"out": dtype, "into": dtype} | ({"payload": "*i16", "scales": "*u8"} if kind == 8 else {})
        options = {"kind": kind, "scaling": scaling, "tile": 1024}
        capability, has_map = (80, False) if scaling == 0 else (90, True)
        assert_exact(assembly(row_programs.decode_rows, capability, types, has_index=has_map, **options))
        assert_exact(
            assembly(row_programs.add_rows, capability, types, has_index=has_map, has_weights=has_map, **options)
        )
    types = {"payload": "*i16", "scales": "*u8", "into": "*fp32"}
    options = {"has_index": True, "has_weights": True, "kind": 8, "scaling": 0, "tile": 1024}
    assert_exact(assembly(row_programs.add_rows, 80, types, **options))


def compile_holding() -> None:
    from commlayer.devices.hold_kernel import hold_while_busy

    for width in (128, 512):
        assembled = assembly(hold_while_busy, 90, {}, width=width, has_clock=True)
        assert "ld.volatile" in assembled, "what others write meanwhile is read anew"
        assert assembled.count("globaltimer") == 2
    numbers = {each.name: each for each in hold_while_busy.params if not each.is_constexpr and each.name != "busy"}
    assert numbers.keys() == {"count", "least", "most"}
    assert all(each.do_not_specialize for each in numbers.values()), "a number's value has nothing compiled anew"
    assert numbers["most"].annotation_type == "i64", "nor does how large it is"


def named(prefix: str) -> dict[str, Callable[[], None]]:
    return {name.removeprefix(prefix): check for name, check in list(globals().items()) if name.startswith(prefix)}


CHECKS, COMPILED = named("check_"), named("compile_")


def outcomes(checks: str, environment: dict[str, str]) -> dict[str, str | None]:
    """The error, if any, in each check of a process of its own, or None."""
    ended = subprocess.run(
        [sys.executable, __file__, checks],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path]),
            **environment,
        },
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, str | None] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    return outcomes("interpreted", {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    cache = tmp_path_factory.mktemp("triton")
    return outcomes("compiled", {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)})


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[check] is None, interpreted[check]


@needs_triton
@pytest.mark.parametrize("check", COMPILED)
def test_compiled_for_gpus(check: str, compiled: dict[str, str | None]) -> None:
    assert compiled[check] is None, compiled[check]


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:  # noqa: BLE001  # the test shows it
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    of_mode = {"interpreted": CHECKS, "compiled": COMPILED}[sys.argv[1]]
    print(json.dumps({name: outcome(check) for name, check in of_mode.items()}))

"""The cost of encoding, decoding and adding rows on one core, against the plain torch expressions.

Both alternately, after each pair was found to give the same. No cluster, half a minute.
``python benchmarks/codecs.py [--rounds 25] [--output DIRECTORY]`` writes a dated document and JSON there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from moe_tables import Spread, ratios, spread, table

from commlayer.scheduler.wire import GROUP_SIZE, Scaling, Wire, WireFormat
from commlayer.units import format_bytes
from commlayer.wire.codecs import Codec

WIDTH = 2048
SIZES = (1 << 20, 16 << 20)
"""Native bytes."""
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """Two ways to do one thing, each leaving its result in ``results``; they differ by ``tolerance`` at most, relatively."""

    what: str
    native_bytes: int
    ours: Callable[[], object]
    plain: Callable[[], object]
    results: tuple[torch.Tensor, torch.Tensor]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Row:
    """``ours_gbps``, ``plain_gbps``: gigabytes (1e9) of native bytes a second. ``ratio``: ours over plain, of times of one
    round."""

    what: str
    native_bytes: int
    ours_gbps: Spread
    plain_gbps: Spread
    ratio: Spread
    rounds: int


# The plain expressions


def plain_scales(x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """In a shape that broadcasts against ``grouped(x)``."""
    return (
        grouped(x, scaling).abs().amax(1 if scaling is Scaling.CHANNEL else -1, keepdim=True).float().clamp_min(1e-4)
        / 448
    )


def grouped(x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """[r, W], [r, blocks, 128], or [groups, 128, W]."""
    if scaling is Scaling.TOKEN:
        return x
    return x.view(x.shape[0], -1, GROUP_SIZE) if scaling is Scaling.BLOCK else x.view(-1, GROUP_SIZE, x.shape[1])


def plain_encode(x: torch.Tensor, scaling: Scaling, message: torch.Tensor) -> None:
    scales = plain_scales(x, scaling)
    codes = (grouped(x, scaling).float() / scales).to(torch.float8_e4m3fn)
    end = 4 * scales.numel()
    message[:end].view(torch.float32).copy_(scales.view(-1))
    message[end:].copy_(codes.view(-1).view(torch.uint8))


def plain_values(message: torch.Tensor, scaling: Scaling, rows: int) -> torch.Tensor:
    end = 4 * Wire(WireFormat.FP8_E4M3, WIDTH, scaling).num_scales(rows)
    codes = grouped(message[end:].view(torch.float8_e4m3fn).view(rows, WIDTH), scaling)
    scales = message[:end].view(torch.float32)
    shape = (-1, 1, WIDTH) if scaling is Scaling.CHANNEL else (rows, 1) if scaling is Scaling.TOKEN else (rows, -1, 1)
    return (codes.float() * scales.view(shape)).view(rows, WIDTH)


# Cases


def fp8_cases(scaling: Scaling, num_bytes: int) -> list[Case]:
    """bfloat16 rows as E4M3."""
    rows, generator = num_bytes // 2 // WIDTH, torch.Generator().manual_seed(0)
    codec = Codec(Wire(WireFormat.FP8_E4M3, WIDTH, scaling), torch.bfloat16)
    x = torch.randn(rows, WIDTH, generator=generator).bfloat16()
    messages = tuple(torch.empty(codec.wire_bytes(rows), dtype=torch.uint8) for _ in range(2))
    message = torch.empty_like(messages[0])
    codec.encode(x, message)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    total, other = torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)
    end = 4 * codec.wire.num_scales(rows)
    name = f"bf16, fp8_e4m3 by {scaling}"
    return [
        Case(
            f"encode {name}",
            num_bytes,
            lambda: codec.encode(x, messages[0]),
            lambda: plain_encode(x, scaling, messages[1]),
            (messages[0][:end].view(torch.float32), messages[1][:end].view(torch.float32)),
            2**-22,
        ),
        Case(
            f"decode {name}",
            num_bytes,
            lambda: codec.decode(message, mine),
            lambda: theirs.copy_(plain_values(message, scaling, rows)),
            (mine, theirs),
        ),
        Case(
            f"add {name} to fp32",
            num_bytes,
            lambda: codec.add(message, total),
            lambda: other.add_(plain_values(message, scaling, rows)),
            (total, other),
        ),
    ]


def mapped_cases(num_bytes: int) -> list[Case]:
    """Tokens to rows by expert and back: gathered by a map, and added with weights by one."""
    rows, generator = num_bytes // 2 // WIDTH, torch.Generator().manual_seed(0)
    codec = Codec(Wire(WireFormat.FP8_E4M3, WIDTH), torch.bfloat16)
    x = torch.randn(rows // 2, WIDTH, generator=generator).bfloat16()
    index = torch.randint(0, rows // 2, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator)
    messages = tuple(torch.empty(codec.wire_bytes(rows), dtype=torch.uint8) for _ in range(2))
    message = torch.empty_like(messages[0])
    codec.encode(x, message, index)
    total, other = torch.zeros(rows // 2, WIDTH), torch.zeros(rows // 2, WIDTH)
    return [
        Case(
            "gather and encode bf16, fp8_e4m3 by token",
            num_bytes,
            lambda: codec.encode(x, messages[0], index),
            lambda: plain_encode(x.index_select(0, index), Scaling.TOKEN, messages[1]),
            (messages[0][: 4 * rows].view(torch.float32), messages[1][: 4 * rows].view(torch.float32)),
            2**-22,
        ),
        Case(
            "decode, weight and add to fp32 by a map",
            num_bytes,
            lambda: codec.add(message, total, weights=weights, index=index),
            lambda: other.index_add_(0, index, plain_values(message, Scaling.TOKEN, rows) * weights.unsqueeze(1)),
            (total, other),
        ),
    ]


def bf16_cases(num_bytes: int) -> list[Case]:
    """FP32 as BF16, as gradients travel."""
    x = torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(0))
    codec = Codec(Wire(WireFormat.BF16), torch.float32)
    first, second = (torch.empty(2 * x.numel(), dtype=torch.uint8) for _ in range(2))
    message = torch.empty_like(first)
    codec.encode(x, message)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    total, other = torch.zeros_like(x), torch.zeros_like(x)
    return [
        Case(
            "encode fp32, bf16",
            num_bytes,
            lambda: codec.encode(x, first),
            lambda: second.copy_(x.to(torch.bfloat16).view(torch.uint8)),
            (first.view(torch.bfloat16), second.view(torch.bfloat16)),
        ),
        Case(
            "decode fp32, bf16",
            num_bytes,
            lambda: codec.decode(message, mine),
            lambda: theirs.copy_(message.view(torch.bfloat16).float()),
            (mine, theirs),
        ),
        Case(
            "add bf16 to fp32",
            num_bytes,
            lambda: codec.add(message, total),
            lambda: other.add_(message.view(torch.bfloat16).float()),
            (total, other),
        ),
    ]


# Measuring


def measured(case: Case, rounds: int) -> Row:
    """Raises RuntimeError where the two ways differ."""
    case.ours()
    case.plain()
    torch.testing.assert_close(*case.results, rtol=case.tolerance, atol=0.0, msg=lambda text: f"{case.what}: {text}")
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for k in range(rounds + _WARM_UP_ROUNDS):
        for way, call in (("ours", case.ours), ("plain", case.plain)):
            begin = time.perf_counter()
            call()
            if k >= _WARM_UP_ROUNDS:
                times[way].append(time.perf_counter() - begin)
    rates = {way: spread([case.native_bytes / each / 1e9 for each in of_way]) for way, of_way in times.items()}
    return Row(
        case.what,
        case.native_bytes,
        rates["ours"],
        rates["plain"],
        ratios(times["ours"], times["plain"]),
        rounds,
    )


def document(rows: list[Row], busy: float) -> str:
    """``busy``: the machine's load average before the run."""
    head = ["what", "native", "ours, GB/s", "plain, GB/s", "time, ours / plain"]
    cells = [
        [row.what, format_bytes(row.native_bytes), str(row.ours_gbps), str(row.plain_gbps), str(row.ratio)]
        for row in rows
    ]
    lines = [
        "# Codecs on one core",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, `make bench-codecs`, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release().split('-')[0]}, one thread.",
        f"Load of the machine from other work when the run began: {busy:.1f}.",
        f"{rows[0].rounds} rounds, both ways alternately; median [quartiles]. GB/s: 1e9 bytes of native rows (W = {WIDTH}) a",
        "second, whatever their encoded size. *Plain*: torch expressions on the whole tensor. Encoding: amax, divide, cast, and",
        "copies into the message. Decoding: `codes.float() * scales`, then the copy, or the sum.",
        "",
        *table(head, cells),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each case (default 25)")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="directory (default benchmarks/results)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    busy = os.getloadavg()[0]
    rows = []
    for num_bytes in SIZES:
        cases = [case for scaling in Scaling for case in fp8_cases(scaling, num_bytes)]
        cases += mapped_cases(num_bytes) + bf16_cases(num_bytes)
        rows += [measured(case, options.rounds) for case in cases]
    text = document(rows, busy)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = options.output / f"{datetime.now(timezone.utc):%Y-%m-%d}-codecs"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

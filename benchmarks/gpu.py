"""Everything that one GPU can show, in some minutes: tests, torch's sanitizer, kernels against copies, the host's cost of a call.

``make gpu``, or ``python benchmarks/gpu.py [--output DIRECTORY]``, writes a dated document and JSON there. Several ranks share
the GPU over NCCL (each with a host's name of its own), so bytes and order are shown, no times of collectives. **Not yet run on a
GPU**; ``--device cpu`` runs the kernels' part on the CPU's codecs, to see that this script works, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, machine, today, versions, write_results
from torch.multiprocessing.spawn import spawn

from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.wire.codecs import Codec

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 2048
ROWS = 16384
ROUNDS = 20
TARGET = 0.85
"""The share of the device's copy rate that a kernel should reach."""
CALLS = 200
TESTS_S, RANKS_S = 240.0, 120.0
NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "2",
}


def tests(*options: str, **environment: str) -> dict[str, Any]:
    """Run the tests that need a device; returns their exit status and last lines."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-rs", *options]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TESTS_S,
            check=False,
        )
        status, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        so_far = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        status, text = -1, f"{so_far}\nended after {TESTS_S:g} s"
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "last": text.splitlines()[-12:]}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The time of ``work`` on the device, by events where it has some."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def kernels(device: torch.device) -> list[dict[str, Any]]:
    """Encoding, decoding and adding weighted rows at their places, each alternately with a copy of as many bytes."""
    rows = torch.randn(ROWS, WIDTH, device=device).bfloat16()
    total = torch.zeros(ROWS, WIDTH, device=device)
    index = torch.randperm(ROWS, device=device)
    weights = torch.rand(ROWS, device=device)
    source = torch.empty(rows.nbytes + total.nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = []
    for wire in (Wire(WireFormat.FP8_E4M3, WIDTH), Wire(WireFormat.FP8_E4M3, WIDTH, Scaling.BLOCK)):
        codec = Codec(wire, torch.bfloat16, "pass")
        message = torch.empty(codec.wire_bytes(ROWS), dtype=torch.uint8, device=device)
        works: dict[str, tuple[Callable[[], object], int]] = {
            "encode": (partial(codec.encode, rows, message), rows.nbytes + message.numel()),
            "encode at places": (partial(codec.encode, rows, message, index), rows.nbytes + message.numel()),
            "decode": (partial(codec.decode, message, rows), rows.nbytes + message.numel()),
            "decode, weigh and add at places": (
                partial(codec.add, message, total, weights=weights, index=index),
                2 * total.nbytes + message.numel(),
            ),
        }
        for what, (work, moved) in works.items():
            half = min(moved // 2, source.numel())

            def copy(half: int = half) -> object:
                return target[:half].copy_(source[:half])

            ratios = []
            for turn in range(ROUNDS + 3):
                ours, plain = seconds(work, device) / moved, seconds(copy, device) / (2 * half)
                if turn >= 3:
                    ratios.append(plain / ours)
            quartiles = statistics.quantiles(ratios, n=4)
            found.append({"what": what, "wire": str(wire.format), "scaling": wire.scaling.value, "of_copy": quartiles})
    return found


def host_cost(rank: int, folder: str) -> None:
    """The host's time of a planned all_reduce of 64 KiB, alternately with NCCL's own, on two ranks of one GPU."""
    os.environ.update(
        NCCL, NCCL_HOSTID=f"commlayer-rank-{rank}", COMMLAYER_TOPOLOGY="1x2", COMMLAYER_PLAN="flat_direct"
    )
    torch.cuda.set_device(0)
    limit = timedelta(seconds=RANKS_S / 2)
    dist.init_process_group("commlayer", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    x = torch.ones(1 << 14, device="cuda")
    group: Any = dist.group.WORLD
    own = group._inner.on_devices["cuda"].inner.verbs
    options = dist.AllreduceOptions()
    ways: dict[str, Callable[[], Any]] = {
        "planned": lambda: group.allreduce([x], options),
        "nccl": lambda: own.allreduce([x], options),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(CALLS + 20):
        for name, call in ways.items():
            began = time.perf_counter()
            call().wait()
            if turn >= 20:
                spent[name].append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    if rank == 0:
        Path(folder, "host.json").write_text(
            json.dumps({name: statistics.quantiles(values, n=4) for name, values in spent.items()}), encoding="utf-8"
        )
    dist.destroy_process_group()


def ranks() -> dict[str, list[float]]:
    """Quartiles of the host's time of a call, µs, for each way."""
    with tempfile.TemporaryDirectory() as folder:
        context = spawn(host_cost, (folder,), nprocs=2, join=False)
        until = time.monotonic() + RANKS_S
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > until:
                    raise TimeoutError(f"the two ranks did not end within {RANKS_S:g} s")
        finally:
            for process in context.processes:
                process.kill()
        found: dict[str, list[float]] = json.loads(Path(folder, "host.json").read_text(encoding="utf-8"))
        return found


def document(content: dict[str, Any]) -> str:
    lines = [f"# One GPU, {today()}", "", *(f"- {name}: {value}" for name, value in content["facts"].items()), ""]
    for name in ("tests", "sanitizer"):
        lines += [f"## {name}", "", f"Exit status {content[name]['status']}, {content[name]['seconds']} s.", "", "```"]
        lines += [*content[name]["last"], "```", ""]
    lines += [
        f"## Kernels, over the rate of a copy (target {TARGET})",
        "",
        "| what | format | scaling | share |",
        "|---|---|---|---|",
    ]
    for row in content["kernels"]:
        low, middle, high = row["of_copy"]
        lines.append(f"| {row['what']} | {row['wire']} | {row['scaling']} | {middle:.2f} [{low:.2f}, {high:.2f}] |")
    lines += [
        "",
        "## The host's time of an all_reduce of 64 KiB, µs",
        "",
        "| way | median and quartiles |",
        "|---|---|",
    ]
    for name, (low, middle, high) in content["host"].items():
        lines.append(f"| {name} | {middle:.1f} [{low:.1f}, {high:.1f}] |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        print(json.dumps(kernels(torch.device("cpu")), indent=1))
        return 0
    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here, so nothing is shown", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    content: dict[str, Any] = {
        "facts": {
            "device": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "machine": machine(),
            "versions": versions(),
        },
        "tests": tests(),
        "sanitizer": tests("-k", "streams or asynchronous", TORCH_CUDA_SANITIZER="1"),
        "kernels": kernels(device),
        "host": ranks(),
    }
    stem = dated_stem(options.output, "gpu")
    write_results(stem, content, document(content))
    print(document(content))
    missed = [row for row in content["kernels"] if row["of_copy"][1] < TARGET]
    return 1 if content["tests"]["status"] or content["sanitizer"]["status"] or missed else 0


if __name__ == "__main__":
    sys.exit(main())

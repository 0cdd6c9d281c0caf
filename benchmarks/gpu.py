"""Everything that one GPU can show, in some minutes: tests, torch's sanitizer, kernels against copies, the host's cost of a call.

``make gpu``, or ``python benchmarks/gpu.py [--output DIRECTORY] [--only PART]``, writes a dated document and JSON there, and the
whole output of the tests beside them. A part that fails is told, and the others run. Several ranks share the GPU over NCCL
(each with a host's name of its own), so bytes and order are shown, no times of collectives. ``--device cpu`` runs the
kernels' part on the CPU's codecs, to see that this script works, and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, machine, today, versions, write_results
from torch.multiprocessing.spawn import spawn

import commlayer.backend  # noqa: F401 - registers the backend also where commlayer is not installed, only on the path
from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.wire.codecs import Codec

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 2048
ROWS = 16384
ROUNDS = 20
TARGET = 0.85
"""The share of the device's copy rate that a kernel should reach."""
CALLS = 200
HEAD_START = 1_000_000
"""Cycles, about half a millisecond, for which the device waits before what is timed."""
WORKERS = 4
TESTS_S, RANKS_S = 210.0, 60.0
NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_CTAS": "2",
}


def tests(log: Path, *options: str, **environment: str) -> dict[str, Any]:
    """Run the tests that need a device, several at a time where pytest-xdist is installed; what they print goes to ``log``.

    Returns their exit status and last lines.
    """
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "-rs", "--durations=15", *options]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TESTS_S,
                check=False,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -1
            output.write(f"\nended after {TESTS_S:g} s\n")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    outcomes = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "last": [*outcomes[-60:], *lines[-1:]],
    }


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The time of ``work`` on the device, by events where it has some."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)  # the host launches all of ``work`` meanwhile: its time is no part of the device's
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


def as_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def tests_section(found: Any) -> list[str]:
    return [f"Exit status {found['status']}, {found['seconds']} s.", "", "```", *found["last"], "```"]


def kernels_section(found: Any) -> list[str]:
    rows = []
    for row in found:
        low, middle, high = row["of_copy"]
        rows.append([row["what"], row["wire"], row["scaling"], f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    return as_table(["what", "format", "scaling", "share"], rows)


def host_section(found: Any) -> list[str]:
    rows = [[name, f"{middle:.1f} [{low:.1f}, {high:.1f}]"] for name, (low, middle, high) in found.items()]
    return as_table(["way", "median and quartiles"], rows)


SECTIONS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "kernels": (f"Kernels, over the rate of a copy (target {TARGET})", kernels_section),
    "host": ("The host's time of an all_reduce of 64 KiB, µs", host_section),
    "tests": ("Tests", tests_section),
    "sanitizer": ("Tests of streams under torch's sanitizer", tests_section),
}


def section(name: str, found: Any) -> list[str]:
    """The lines of one part of the document."""
    title, lines = SECTIONS[name]
    body = ["It failed:", "", "```", *found["failed"].splitlines(), "```"] if "failed" in found else lines(found)
    return [f"## {title}", "", *body, ""]


def has_passed(name: str, found: Any) -> bool:
    if "failed" in found:
        return False
    if name == "kernels":
        return all(row["of_copy"][1] >= TARGET for row in found)
    return name == "host" or found["status"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(SECTIONS), action="append", help="one part; may be given again")
    options = parser.parse_args()
    if options.device == "cpu":
        print("\n".join(section("kernels", kernels(torch.device("cpu")))))
        return 0
    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here, so nothing is shown", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    stem = dated_stem(options.output, "gpu")
    works: dict[str, Callable[[], Any]] = {
        "kernels": partial(kernels, device),
        "host": ranks,
        "tests": partial(tests, stem.with_name(f"{stem.name}-tests.log")),
        "sanitizer": partial(
            tests,
            stem.with_name(f"{stem.name}-sanitizer.log"),
            "-k",
            "streams or asynchronous",
            TORCH_CUDA_SANITIZER="1",
        ),
    }
    content: dict[str, Any] = {
        "facts": {
            "device": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "machine": machine(),
            "versions": versions(),
        }
    }
    lines = [f"# One GPU, {today()}", "", *(f"- {name}: {value}" for name, value in content["facts"].items()), ""]
    print("\n".join(lines), flush=True)
    passed = True
    for name in options.only or SECTIONS:
        try:
            result = works[name]()
        except Exception:  # noqa: BLE001 - the other parts of a short lease are worth their time
            result = {"failed": traceback.format_exc()}
        content[name] = result
        passed = passed and has_passed(name, result)
        part = section(name, result)
        print("\n".join(part), flush=True)
        lines += part
        write_results(stem, content, "\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Parts that benchmarks share: where results go, of what machine they are, the profile of their links."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlayer.version import __version__

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # for the model in examples/, which is not installed
    sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from commlayer.emulation import DeviceReport
    from commlayer.measure.profiler import SweepOptions

__all__ = [
    "RESULTS",
    "add_output",
    "dated_stem",
    "described",
    "facts",
    "machine",
    "measure_links",
    "today",
    "versions",
    "write_results",
]

RESULTS = Path(__file__).parent / "results"


def add_output(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the option that says where results go, ``--output`` unless named otherwise."""
    parser.add_argument(
        *(names or ("--output",)),
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="folder to write to (default benchmarks/results)",
    )


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def dated_stem(folder: Path, name: str) -> Path:
    """Return the path, without a suffix, of today's results of the benchmark ``name``; ``folder`` is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{today()}-{name}"


def write_results(stem: Path, content: Any, text: str) -> None:
    """Write ``content`` as JSON and ``text`` as Markdown, beside each other."""
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(text, encoding="utf-8")


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"


def versions() -> str:
    import torch

    return f"commlayer {__version__}, torch {torch.__version__} (Gloo), Python {platform.python_version()}"


def facts(script: str, load: float) -> dict[str, str]:
    """Return what a result is of. ``load``: the machine's load average before the run."""
    return {
        "machine": machine(),
        "load before": f"{load:.1f} processes on average over the last minute",
        "versions": versions(),
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
    }


def described(reports: Sequence[DeviceReport]) -> str:
    """Say whether this machine kept up with the accelerators that ranks stood for."""
    late = max(report.late_s / report.busy_s for report in reports)
    wall_s = max(report.wall_s for report in reports)
    cores = sum(report.cpu_s for report in reports) / (wall_s * len(os.sched_getaffinity(0)))
    return f"Lateness added {late:.1%} at most to an accelerator's operations; the cores were {cores:.0%} busy."


def measure_links(path: str, source: str, options: SweepOptions | None = None, name: str = "bench") -> float:
    """Write the cluster's profile, on every rank of an emulated one; return how long that took, seconds."""
    import torch
    import torch.distributed as dist

    from commlayer.measure.profiler import SweepOptions, measure_cluster

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    begin = time.perf_counter()
    profile = measure_cluster(options or SweepOptions(), name=name, kind="emulated", source=source)
    took_s = time.perf_counter() - begin
    if dist.get_rank() == 0:
        profile.save(path)
    return took_s

"""The start of a job in seconds, on an emulated cluster: the first probe, a later start, and a mesh of groups.

``.venv/bin/python benchmarks/start_seconds.py``: for each cluster (400 Mbit/s a node) a job starts in an empty cache and measures
its links, and another one finds that profile; a third is torch's Gloo. Each then makes the groups of TP2×EP2×DP2 on five axes,
and runs the first all_reduce of a mebibyte on each, trials of plans included. They take turns; medians over ``--rounds``.
``--json FILE`` has all times. All ranks share the machine's cores: a minute for 2×4.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from common import facts

import commlayer.backend.new_groups
import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster
from commlayer.scheduler.mapping.folded import FoldedMapping

AXES = ("tp", "dp", "etp", "ep", "edp")
NUM_BYTES = 1 << 20
PHASES = ("init", "new_group", "first calls", "second calls")


def job(backend: str, cache: str) -> list[float]:
    """One rank's seconds in each of ``PHASES``, the slowest rank's."""
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "auto", "COMMLAYER_CACHE": cache})
    found: list[float] = []
    began = time.perf_counter()
    dist.init_process_group(backend)
    found.append(time.perf_counter() - began)
    rank, mapping = dist.get_rank(), FoldedMapping(dist.get_world_size(), tp=2, etp=2, ep=2)
    groups: list[dist.ProcessGroup] = []
    values = torch.zeros(NUM_BYTES // 4)

    def make() -> None:
        for axis in AXES:
            made = [(ranks, dist.new_group(list(ranks))) for ranks in mapping.groups(axis)]
            groups.extend(group for ranks, group in made if rank in ranks)

    def call() -> None:
        for group in groups:
            dist.all_reduce(values, group=group)

    found += [timed(task) for task in (make, call, call)]
    slowest = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    seconds: list[float] = slowest.tolist()
    return seconds


def timed(task: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def rounds_of(nodes: int, width: int, rounds: int) -> dict[str, list[list[float]]]:
    """The seconds of each kind of start in each round."""
    found: dict[str, list[list[float]]] = {"torch": [], "first job": [], "later job": []}
    with EmulatedCluster(nodes, width, inter="400mbit", mode="netns") as cluster:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as cache:
                for name, times in found.items():
                    backend = "gloo" if name == "torch" else "commlayer"
                    times.append(cluster.run(job, backend, cache, timeout_s=120.0)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", default=["2x4"], metavar="NODESxRANKS", help="(default 2x4)")
    parser.add_argument("--rounds", type=int, default=5, help="(default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    about, found = facts("start_seconds.py", os.getloadavg()[0]), {}
    for shape in options.clusters:
        nodes, width = map(int, shape.split("x"))
        found[shape] = rounds_of(nodes, width, options.rounds)
        print(f"{shape:>10} {' '.join(f'{phase:>13}' for phase in PHASES)}")
        for name, times in found[shape].items():
            print(f"{name:>10} {' '.join(f'{median(each):13.2f}' for each in zip(*times, strict=True))}", flush=True)
    if options.json is not None:
        content = {"about": about, "seconds": found, "phases": PHASES}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

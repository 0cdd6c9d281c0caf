"""Threads and open files of a rank that is in many groups, on the backend and on torch's Gloo.

``.venv/bin/python benchmarks/held.py --cluster 2x4 --groups 20``: every rank is in so many groups of all ranks and makes calls of
each kind in them: waited for, asynchronous, planned, an all_to_all, messages. Prints, for the rank that holds most, its threads
and descriptors by kind after each stage. What a process has before it joins a job is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commlayer.auditing.watch
import commlayer.backend.new_groups  # before the fork, as the next one: ranks then start in milliseconds
import commlayer.measure.calibrate  # noqa: F401  likewise
from commlayer.emulation import EmulatedCluster

BACKENDS = ("gloo", "commlayer")
_ELEMENTS = 1 << 16
Held = dict[str, int]


def threads() -> Counter[str]:
    """This process's threads by name: Python's own, or the kernel's."""
    names = {thread.native_id: re.sub(r"[ -]?\d+.*$", "", thread.name) for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        kernels = Path(f"/proc/self/task/{task}/comm").read_text(encoding="ascii").strip()
        found[names.get(int(task), f"C++ {kernels}")] += 1
    return found


def descriptors() -> Counter[str]:
    """This process's descriptors by kind."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[re.sub(r"[:\[(/].*$", "", os.readlink(f"/proc/self/fd/{fd}")) or "file"] += 1
        except OSError:  # noqa: PERF203  that of the listing
            continue
    return found


def stages(rank: int, size: int) -> dict[str, Callable[[Any], None]]:
    """The calls that are made in each group, one after the other."""
    peer = rank ^ 1
    x, whole = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS * size)

    def talk(group: Any) -> None:
        send = dist.isend(x, peer, group=group)
        dist.recv(torch.empty_like(x), peer, group=group)
        if send is not None:
            send.wait()

    def all_kinds(group: Any) -> None:
        dist.all_gather_single(whole, x, group=group)
        dist.reduce_scatter_single(x, whole, group=group)
        dist.broadcast(x, 0, group=group)

    return {
        "a small all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
        "a large all_reduce": lambda group: dist.all_reduce(x, group=group),
        "other collectives": all_kinds,
        "an all_to_all": lambda group: dist.all_to_all_single(whole.clone(), whole, group=group),
        "an asynchronous all_reduce": lambda group: dist.all_reduce(x, group=group, async_op=True).wait(),
        "messages": talk,
    }


def job(backend: str, groups: int, plan: str) -> list[tuple[str, Held, Held]]:
    """On every rank: what it holds after each stage."""
    torch.set_num_threads(1)
    os.environ |= {"COMMLAYER_PROFILE": "none", "COMMLAYER_PLAN": plan}
    before = threads(), descriptors()
    found: list[tuple[str, Held, Held]] = []

    def note(stage: str) -> None:
        dist.barrier()
        found.append((stage, dict(threads() - before[0]), dict(descriptors() - before[1])))
        dist.barrier()

    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    note("init")
    made = [dist.group.WORLD, *(dist.new_group() for _ in range(groups - 1))]
    note(f"{groups} groups")
    for stage, call in stages(dist.get_rank(), dist.get_world_size()).items():
        for group in made:
            call(group)
        note(stage)
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="2x4")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--plan", default="hierarchical")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nodes, ranks = map(int, options.cluster.split("x"))
    result: dict[str, Any] = {}
    with EmulatedCluster(nodes, ranks) as cluster:
        for backend in BACKENDS:
            every = [outcome.value for outcome in cluster.run(job, backend, options.groups, options.plan, check=False)]
            if None in every:
                sys.exit(f"{backend}: a rank failed")
            print(f"\n{backend}, {options.cluster}, {options.groups} groups: of the rank that holds most")
            rows = []
            for steps in zip(*every, strict=True):
                stage, its_threads, its_files = max(steps, key=lambda step: sum(step[2].values()))
                rows.append({"stage": stage, "threads": its_threads, "descriptors": its_files})
                print(f"  {stage:28} threads {sum(its_threads.values()):4}  descriptors {sum(its_files.values()):4}")
            print(f"  threads: {its_threads}\n  descriptors: {its_files}")
            result[backend] = rows
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

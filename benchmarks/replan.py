"""A card changes its rate while a job runs: after how many calls all ranks plan anew, and how long calls take then.

``.venv/bin/python benchmarks/replan.py --cluster 2x4``: mixed collectives on all ranks at 400 Mbit/s a node; after some calls the
last node's card falls to 100 Mbit/s, and later it recovers. Prints, for each phase, after how many calls each rank's plans
changed and the time of a round of calls afterwards, against the same calls of a job that measured its links at that rate.
``--json FILE`` has all times.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import facts

import commlayer
import commlayer.auditing.watch  # before the fork, as the next ones: ranks then start in milliseconds
import commlayer.measure.calibrate
import commlayer.measure.link_times
from commlayer.emulation import EmulatedCluster, request_shape

FAST, SLOW = "400mbit", "100mbit"
MOST_CALLS = 60


def a_round(sizes: list[int]) -> list[tuple[str, int]]:
    return [(name, size) for size in sizes for name in ("all_reduce", "reduce_scatter", "all_gather")]


def call(name: str, num_bytes: int) -> None:
    n = dist.get_world_size()
    block, whole = torch.zeros(num_bytes // 4 // n), torch.zeros(num_bytes // 4 // n * n)
    if name == "all_reduce":
        dist.all_reduce(whole)
    elif name == "reduce_scatter":
        dist.reduce_scatter_single(block, whole)
    else:
        dist.all_gather_single(whole, block)


def timed_round(sizes: list[int]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for name, num_bytes in a_round(sizes):
        call(name, num_bytes)
    return (time.perf_counter() - begin) * 1e3


def plans_so_far() -> Counter[str]:
    """How many calls each plan has had, by collective and size."""
    return Counter(
        {
            f"{row['collective']} {row['plan']} {row['up_to_bytes'] >> 10} KiB": row["calls"]
            for group in commlayer.audit()["groups"]
            for row in group["calls"]
        }
    )


def changing(sizes: list[int], cache: str, rates: list[tuple[str, str | None]], warm: int) -> dict[str, Any]:
    """One rank: rounds until the plans have changed in each phase, then some more to be timed."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_CACHE"] = cache
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    group: Any = dist.group.WORLD
    phases: list[dict[str, Any]] = []
    for _ in range(warm):
        timed_round(sizes)
    for label, rate in rates:
        dist.barrier()
        before, changed_after, made = (
            group._planned.choices,
            None,
            0,
        )  # the next barrier may be the call where plans change
        if dist.get_rank() == 0 and rate is not None:
            request_shape(inter=rate, node=LAST_NODE)
        dist.barrier()
        changed_after = 0 if group._planned.choices is not before else None
        while made < MOST_CALLS and changed_after is None:
            for name, num_bytes in a_round(sizes):
                call(name, num_bytes)
                made += 1
                if changed_after is None and group._planned.choices is not before:
                    changed_after = made
        timed_round(sizes)
        noted = plans_so_far()
        times = [timed_round(sizes) for _ in range(5)]
        plans = sorted(f"{name} ×{calls}" for name, calls in (plans_so_far() - noted).items())
        phases.append({"phase": label, "calls_until": changed_after, "round_ms": times, "plans": plans})
    found = commlayer.audit()
    events = found["groups"][0]["events"] if found["groups"] else []
    dist.destroy_process_group()
    return {"phases": phases, "events": events}


def steady(sizes: list[int], cache: str, warm: int) -> tuple[list[float], list[str]]:
    """One rank of a job that measured its links as they are."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_CACHE"] = cache
    os.environ["COMMLAYER_REPLAN"] = "off"
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    for _ in range(warm):
        timed_round(sizes)
    noted = plans_so_far()
    times = [timed_round(sizes) for _ in range(5)]
    plans = sorted(f"{name} ×{calls}" for name, calls in (plans_so_far() - noted).items())
    dist.destroy_process_group()
    return times, plans


LAST_NODE = 1


def main() -> None:
    global LAST_NODE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="2x4", help="nodes × ranks of a node (default 2x4)")
    parser.add_argument("--kib", type=int, nargs="+", default=[1024, 4096], help="sizes of the tensors in KiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there, too")
    arguments = parser.parse_args()
    nodes, ranks = map(int, arguments.cluster.split("x"))
    LAST_NODE = nodes - 1
    sizes = [kib << 10 for kib in arguments.kib]
    about = facts("replan.py", os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(nodes, ranks, inter=FAST) as cluster:
        results = cluster.run(changing, sizes, f"{folder}/a", [("slow", SLOW), ("recovered", FAST)], 3, timeout_s=500.0)
        cluster.shape(inter=SLOW, node=nodes - 1)
        slow = cluster.run(steady, sizes, f"{folder}/b", 3, timeout_s=500.0)
        cluster.shape(inter=FAST, node=nodes - 1)
        fast = cluster.run(steady, sizes, f"{folder}/a", 3, timeout_s=500.0)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    for index, best in enumerate((slow, fast)):
        phases = [result["phases"][index] for result in results]
        until = sorted({phase["calls_until"] for phase in phases}, key=str)
        mine, theirs = max(median(p["round_ms"]) for p in phases), max(median(each) for each, _ in best)
        print(
            f"{phases[0]['phase']}: plans changed after calls {until}; a round {mine:.0f} ms, of a job that measured "
            f"those links {theirs:.0f} ms: {mine / theirs:.3f}"
        )
        print(f"  plans: {', '.join(phases[0]['plans'])}\n  that job's: {', '.join(best[0][1])}")
    for event in results[0]["events"]:
        print(f"before call {event['call']}: {event['what']}")
    if arguments.json:
        content = about | {"ranks": results, "slow_ms": slow, "fast_ms": fast}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

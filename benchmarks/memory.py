"""The memory that a long job's ranks keep: of groups made and destroyed, or of mixed work for some minutes.

``groups``: the ranks of 2x2 make a group, call all_reduce in it and destroy it, many times. ``soak``: all_reduce, all_gather,
reduce_scatter and all_to_all of several sizes, barriers, asynchronous calls, and a group every hundredth round. Reported are a
rank's resident memory (RSS), its threads and its descriptors over time. A growth counts from the first third on, because caches
fill before it. Each setting is a job of its own: torch's Gloo, commlayer without a profile (flat), commlayer with plans.

    python benchmarks/memory.py groups --count 2000
    python benchmarks/memory.py soak --minutes 15 --settings plans
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import facts

from commlayer.emulation import EmulatedCluster

SETTINGS = ("gloo", "flat", "plans")
_SAMPLES = 30


def _footprint() -> dict[str, float]:
    """This process's resident memory in MB, its threads and its descriptors.

    Garbage is collected and free memory handed back first: what malloc keeps for later goes up and down by megabytes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if ":" in line
    )
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _one_group(number: int) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(torch.ones(1024), group=group)
    dist.destroy_process_group(group)


def _mixed_round(number: int) -> None:
    """Some calls of every kind, of sizes that come round again."""
    ranks = dist.get_world_size()
    elements = ranks * (64, 4096, 131072)[number % 3]
    tensor = torch.full((elements,), 1.0)
    dist.all_reduce(tensor)
    assert tensor[0] == ranks
    dist.all_gather_into_tensor(torch.empty(elements * ranks), tensor)
    dist.reduce_scatter_tensor(torch.empty(elements // ranks), tensor)
    dist.all_to_all_single(torch.empty_like(tensor), tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    if number % 10 == 0:
        dist.barrier()
    if number % 100 == 0:
        _one_group(number)


def _run(setting: str, kind: str, count: int, seconds: float, pause_s: float) -> list[dict[str, float]]:
    """One rank's footprint over time; every rank of one job runs this."""
    os.environ["COMMLAYER_PROFILE"] = "none" if setting == "flat" else "auto"
    dist.init_process_group("gloo" if setting == "gloo" else "commlayer")
    for number in range(10):
        (_one_group if kind == "groups" else _mixed_round)(number)
    samples = [{"rounds": 0.0, "seconds": 0.0, **_footprint()}]
    began = time.monotonic()
    if kind == "groups":
        for number in range(count):
            _one_group(number)
            if (number + 1) % max(1, count // _SAMPLES) == 0:
                samples.append({"rounds": float(number + 1), "seconds": time.monotonic() - began, **_footprint()})
    else:
        number, is_over = 0, torch.zeros(1)
        while not is_over[0]:
            for _ in range(100):
                _mixed_round(number)
                number += 1
                time.sleep(pause_s)
            elapsed = time.monotonic() - began
            if elapsed >= seconds * len(samples) / _SAMPLES:
                samples.append({"rounds": float(number), "seconds": elapsed, **_footprint()})
            is_over[0] = float(elapsed >= seconds)
            dist.broadcast(is_over, 0)  # one clock decides, or ranks would leave at different rounds
    dist.barrier()
    dist.destroy_process_group()
    return samples


def _summary(setting: str, ranks: list[list[dict[str, float]]], is_groups: bool) -> dict[str, Any]:
    """The largest growth of any rank: from the first third to the end, and of groups also in KB for each."""
    growths = []
    for samples in ranks:
        third = samples[len(samples) // 3]
        last = samples[-1]
        growth_mb = last["rss_mb"] - third["rss_mb"]
        rounds = last["rounds"] - third["rounds"]
        growths.append((growth_mb / third["rss_mb"], growth_mb * 1024 / rounds if rounds else 0.0, third, last))
    share, kilobytes, third, last = max(growths, key=lambda growth: growth[0])
    words = f"{kilobytes:+.2f} KB a group, " if is_groups else ""
    text = ", ".join(
        [
            f"{setting:6} {last['rounds']:8.0f} rounds in {last['seconds']:5.0f} s",
            f"{third['rss_mb']:.1f} -> {last['rss_mb']:.1f} MB since the first third ({words}{100 * share:+.2f} %)",
            f"{third['threads']:.0f} -> {last['threads']:.0f} threads",
            f"{third['descriptors']:.0f} -> {last['descriptors']:.0f} descriptors",
        ]
    )
    return {"setting": setting, "growth_share": share, "kb_per_round": kilobytes, "text": text, "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("groups", "soak"))
    parser.add_argument("--count", type=int, default=2000, help="groups that are made and destroyed")
    parser.add_argument("--minutes", type=float, default=15.0, help="how long the soak lasts")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="between rounds of the soak")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="where all samples go")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(", ".join(facts("memory.py", load).values()))
    results = []
    for setting in arguments.settings:
        with EmulatedCluster(nodes=2, ranks_per_node=2, inter="1gbit") as cluster:
            ranks = cluster.run(
                _run,
                setting,
                arguments.kind,
                arguments.count,
                60 * arguments.minutes,
                arguments.pause,
                timeout_s=60 * arguments.minutes + arguments.count + 300,
            )
        results.append(_summary(setting, ranks, arguments.kind == "groups"))
        print(results[-1]["text"], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

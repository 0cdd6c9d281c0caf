"""A job that starts with a profile of other links: what its calls take after the first two seconds, against a right profile.

``.venv/bin/python benchmarks/stale_start.py``: on an emulated 2×4 of 400 Mbit/s a node jobs start that find a profile in their
cache which was measured at 100 Mbit/s, at 1,600, or, the oracle's, at 400. Each makes rounds of mixed collectives of 1 to 16 MiB;
those of the first two seconds after its start do not count. Jobs take turns; printed is how long they took to start, whether they
measured again, and the oracle's time of a round over theirs, of each turn. ``--json FILE`` has all times. A turn takes some
40 s on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import facts

import commlayer
import commlayer.measure.calibrate
import commlayer.measure.link_times
import commlayer.measure.trials  # before the fork, as the others: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster

RATES = {"oracle": "400mbit", "÷4": "100mbit", "×4": "1600mbit"}
"""The rate at which each job's profile was measured; all run at the first."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
NOT_COUNTED_S = 2.0


def call(name: str, num_bytes: int) -> None:
    n = dist.get_world_size()
    block, whole = torch.zeros(num_bytes // 4 // n), torch.zeros(num_bytes // 4 // n * n)
    if name == "all_reduce":
        dist.all_reduce(whole)
    elif name == "reduce_scatter":
        dist.reduce_scatter_single(block, whole)
    elif name == "all_gather":
        dist.all_gather_single(whole, block)
    else:
        dist.all_to_all_single(torch.empty_like(whole), whole)


def timed_round(sizes: list[int]) -> list[float]:
    """The times of a round's calls, ms."""
    times = []
    for num_bytes in sizes:
        for name in COLLECTIVES:
            dist.barrier()
            begin = time.perf_counter()
            call(name, num_bytes)
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def job(sizes: list[int], cache: str, num_rounds: int) -> dict[str, Any]:
    """One rank of a job with this cache: its start, the rounds of its first two seconds, and those that count."""
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_CACHE=cache, COMMLAYER_PROFILE="auto")
    before = _content(cache)
    begin = time.perf_counter()
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    start_s = time.perf_counter() - begin
    agree = dist.new_group(backend="gloo")
    is_early, early = torch.ones(1), 0
    begin = time.perf_counter()
    while is_early:
        timed_round(sizes)
        early += 1
        is_early.fill_(time.perf_counter() - begin < NOT_COUNTED_S)
        dist.broadcast(is_early, 0, group=agree)
    rounds = [timed_round(sizes) for _ in range(num_rounds)]
    found = commlayer.audit()
    result = {
        "start_s": start_s,
        "measured_again": _content(cache) != before,
        "early_rounds": early,
        "call_ms": rounds,
        "plans": [f"{row['collective']} {row['up_to_bytes']}: {row['plan']}" for row in found["groups"][0]["calls"]],
        "events": found["groups"][0]["events"],
    }
    dist.destroy_process_group()
    return result


def _content(cache: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(cache).glob("*.json")}


def probed(cache: str) -> None:
    """One rank of a job that measures its links."""
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_CACHE=cache, COMMLAYER_PROFILE="auto")
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    dist.barrier()  # who destroys it at once may leave others that are still connecting
    dist.destroy_process_group()


def caches(cluster: EmulatedCluster, folder: Path) -> dict[str, Path]:
    """The caches of the jobs: the name under which a profile is kept is the oracle's, whatever links it is of."""
    made = {}
    for kind, rate in RATES.items():
        made[kind] = folder / kind
        cluster.shape(inter=rate)
        cluster.run(probed, str(made[kind]), timeout_s=120)
    cluster.shape(inter=RATES["oracle"])
    (name,) = (path.name for path in made["oracle"].glob("*.json"))
    for cache in made.values():
        (path,) = cache.glob("*.json")
        path.rename(cache / name)
    return made


def round_ms(ranks: list[dict[str, Any]]) -> float:
    """A round of a job: the sum over its calls of the median time, the slowest rank's."""
    by_call = [list(zip(*rank["call_ms"], strict=True)) for rank in ranks]
    return float(sum(max(median(times[place]) for times in by_call) for place in range(len(by_call[0]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="2x4", help="nodes × ranks of a node (default 2x4)")
    parser.add_argument("--kib", type=int, nargs="+", default=[1024, 4096, 16384], help="sizes of the tensors in KiB")
    parser.add_argument("--turns", type=int, default=3, help="how often each job is run (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of calls that count, of a job (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there, too")
    arguments = parser.parse_args()
    nodes, ranks = map(int, arguments.cluster.split("x"))
    sizes = [kib << 10 for kib in arguments.kib]
    about = facts("stale_start.py", os.getloadavg()[0])
    turns: list[dict[str, list[dict[str, Any]]]] = []
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(nodes, ranks, inter=RATES["oracle"]) as cluster:
        kept = caches(cluster, Path(folder))
        for turn in range(arguments.turns):
            found = {}
            for kind in list(RATES)[:: 1 if turn % 2 == 0 else -1]:
                cache = shutil.copytree(kept[kind], Path(folder) / f"{kind}-{turn}")
                found[kind] = cluster.run(job, sizes, str(cache), arguments.rounds, timeout_s=300)
            turns.append(found)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    for found in turns:
        oracle = round_ms(found["oracle"])
        for kind, of_ranks in found.items():
            first = of_ranks[0]
            print(
                f"{kind:6}: started in {first['start_s']:.1f} s{', measured again' * first['measured_again']}; a round "
                f"{round_ms(of_ranks):.0f} ms, share of the oracle's time {oracle / round_ms(of_ranks):.3f}"
            )
    for kind in list(RATES)[1:]:
        shares = sorted(round_ms(found["oracle"]) / round_ms(found[kind]) for found in turns)
        print(f"{kind}: share {median(shares):.3f} [{shares[0]:.3f}, {shares[-1]:.3f}]")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"turns": turns}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""An all_reduce where one node's card is slow: torch's Gloo, the best plan that does not know of it, and the one that does.

``.venv/bin/python benchmarks/unequal.py``: four emulated nodes of two ranks, 400 Mbit/s a node and 100 Mbit/s for the last one;
the three take turns in one run. Prints medians and quartiles of the ratios; ``--json FILE`` has all times. A minute.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from common import facts
from groups import alternated, group_of_mine

import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster
from commlayer.scheduler import Strategy, choose

NODES, WIDTH = 4, 2
FAST, SLOW = "400mbit", "100mbit"


def measured(num_bytes: int, rounds: int, cache: str) -> dict[str, Any]:
    """One rank's part: the plans, and the times of each way in each round, µs, the slowest rank's."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_CACHE"] = cache
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    everyone = [tuple(range(dist.get_world_size()))]
    ours, torchs = group_of_mine(everyone, "commlayer"), group_of_mine(everyone, "gloo")
    planned = ours._planned
    x = torch.zeros(num_bytes // 4)
    dist.all_reduce(x, group=ours)  # what the group finds out in its first call is known then
    aware = planned.choices.plan("all_reduce", num_bytes)
    known = planned.choices._traffic("all_reduce", num_bytes)
    priced = choose(replace(known, rates=()), planned.choices.planner.profile).candidates
    unaware = min((t for t in priced if t.plan.strategy is Strategy.PIPELINED), key=lambda t: t.total_us).plan
    ways = {
        "torch": partial(dist.all_reduce, x, group=torchs),
        f"unaware: {unaware.name}": partial(planned.run, unaware, x, x),
        f"aware: {aware.name if aware else 'flat'}": partial(dist.all_reduce, x, group=ours),
    }
    times = alternated(list(ways.values()), torchs, (rounds, rounds), 1e9)
    return {
        "slow links": [str(link) for link in planned.choices.job_planner.profile.slow_links],
        "times_us": dict(zip(ways, times, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor in MiB (default 16)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way runs (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there, too")
    arguments = parser.parse_args()
    about = facts("unequal.py", os.getloadavg()[0])
    with EmulatedCluster(NODES, WIDTH, inter=FAST) as cluster, tempfile.TemporaryDirectory() as cache:
        cluster.shape(inter=SLOW, node=NODES - 1)
        found = cluster.run(measured, arguments.mib << 20, arguments.rounds, cache, timeout_s=600.0)[0]
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    print(
        f"{NODES}x{WIDTH}, {FAST} a node, the last one {SLOW}; found: {', '.join(found['slow links']) or 'no slow link'}"
    )
    rows = found["times_us"]
    for name, times in rows.items():
        ratios = [
            f"{_ratio(times, others)} of {other.partition(':')[0]}" for other, others in rows.items() if other != name
        ]
        print(f"{name}: {median(times) / 1e3:.0f} ms; {'; '.join(ratios)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")


def _ratio(times: list[float], others: list[float]) -> str:
    low, middle, high = quantiles([mine / theirs for mine, theirs in zip(times, others, strict=True)], n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()

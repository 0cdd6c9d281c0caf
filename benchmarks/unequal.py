"""Collectives where links are unequal: torch's Gloo, the best plan that does not know of it, and the one that does.

``.venv/bin/python benchmarks/unequal.py``: an all_reduce on four emulated nodes of two ranks, 400 Mbit/s a node and 100
Mbit/s for the last one. ``--slow-pair``: all cards are alike, and the way between nodes 0 and 1 has 100 Mbit/s; an all_reduce,
a reduce_scatter and an all_gather, or those that ``--collective`` names. All ways take turns in one run, after their results
were compared. Prints medians and quartiles of the ratios; ``--json FILE`` has all times. One to two minutes.
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
from groups import Operands, alternated, group_of_mine, num_wrong, run_by

import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster
from commlayer.scheduler import Strategy, choose

NODES, WIDTH = 4, 2
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
FAST, SLOW = "400mbit", "100mbit"


def measured(num_bytes: int, rounds: int, cache: str, collectives: tuple[str, ...]) -> dict[str, Any]:
    """One rank's part: the slow links that the job has found, and for each collective what :func:`compared` says."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_CACHE"] = cache
    dist.init_process_group("commlayer", timeout=timedelta(seconds=120))
    everyone = [tuple(range(dist.get_world_size()))]
    ours, torchs = group_of_mine(everyone, "commlayer"), group_of_mine(everyone, "gloo")
    return {
        "slow links": [str(link) for link in ours._planned.choices.prices.job_planner.profile.slow_links],
        "collectives": {each: compared(ours, torchs, Operands(each, num_bytes, 8), rounds) for each in collectives},
    }


def compared(ours: Any, torchs: Any, operands: Operands, rounds: int) -> dict[str, Any]:
    """The plans of one collective, and the times of each way in each round, µs, the slowest rank's."""
    choices, collective = ours._planned.choices, operands.collective
    operands.run(ours)  # what the group finds out in its first call is known then
    aware = choices.plan(collective, operands.num_bytes)
    known = choices.prices.traffic(collective, operands.num_bytes)
    priced = choose(replace(known, rates=(), slow_pairs=()), choices.prices.planner.profile).candidates
    unaware = min((t for t in priced if t.plan.strategy is Strategy.PIPELINED), key=lambda t: t.total_us).plan
    ways = {
        "torch": partial(operands.run, torchs),
        f"unaware: {unaware.name}": partial(run_by, unaware, ours, operands),
        f"aware: {aware.name if aware else 'flat'}": partial(operands.run, ours),
    }
    decision = choices.prices.planner.decide(known)
    predicted = {t.plan.name: round(t.total_us) for t in decision.candidates}
    wrong = num_wrong(operands, list(ways.values()), torchs)
    if wrong:
        raise SystemExit(f"{collective}: {wrong} elements are not torch's")
    times = alternated(list(ways.values()), torchs, (rounds, rounds), 1e9)
    return {"reason": decision.reason(), "predicted_us": predicted, "times_us": dict(zip(ways, times, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-pair", action="store_true", help="a slow way between two nodes, instead of a slow card")
    parser.add_argument(
        "--collective",
        choices=COLLECTIVES,
        action="append",
        help="only this, may be repeated (default all_reduce; with --slow-pair all three)",
    )
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor in MiB (default 16)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each way runs (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there, too")
    arguments = parser.parse_args()
    about = facts("unequal.py", os.getloadavg()[0])
    collectives = tuple(arguments.collective or (COLLECTIVES if arguments.slow_pair else COLLECTIVES[:1]))
    with EmulatedCluster(NODES, WIDTH, inter=FAST) as cluster, tempfile.TemporaryDirectory() as cache:
        if arguments.slow_pair:
            cluster.shape_pair(0, 1, SLOW)
        else:
            cluster.shape(inter=SLOW, node=NODES - 1)
        job = measured, arguments.mib << 20, arguments.rounds, cache, collectives
        found = cluster.run(*job, timeout_s=600.0)[0]
    what = "the way between nodes 0 and 1" if arguments.slow_pair else "the last one"
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    print(f"{NODES}x{WIDTH}, {FAST} a node, {what} {SLOW}; found: {', '.join(found['slow links']) or 'no slow link'}")
    for collective, result in found["collectives"].items():
        print(f"{collective}: {result['reason']}")
        rows = result["times_us"]
        for name, times in rows.items():
            ratios = [f"{_ratio(times, rows[other])} of {other.partition(':')[0]}" for other in rows if other != name]
            print(f"    {name}: {median(times) / 1e3:.0f} ms; {'; '.join(ratios)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")


def _ratio(times: list[float], others: list[float]) -> str:
    low, middle, high = quantiles([mine / theirs for mine, theirs in zip(times, others, strict=True)], n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()

"""Plans on simulated devices in many orders of their streams: whether any gives other bits, or a deadlock.

``.venv/bin/python benchmarks/interleavings.py --runs 100000``: every collective by every plan that applies, in every format and
on lanes, on groups of 2 to 8 ranks, exchanges of rows and of replicated tokens; each run has a seed, which says in what
order the streams go. ``--first`` continues an earlier run, ``--workers`` shares the runs out. Exits with 1 where a
run went wrong, and names its program and seed, which give the same order again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # what its helpers are shared with
from simulated.device_programs import every_program, exchanges, replicated
from simulated.machine import Deadlock
from simulated.plan_calls import DeviceCall, run_calls

SHAPES = ((2,), (3,), (2, 1), (2, 2), (3, 1), (1, 1, 1), (2, 1, 3), (2, 2, 2), (4, 4))
BATCH = 200


@cache
def programs() -> list[list[DeviceCall]]:
    """All of them; a run with seed s is of program s modulo their number."""
    torch.set_num_threads(1)
    of_groups = itertools.chain.from_iterable(every_program(shape) for shape in SHAPES)
    return [*of_groups, *exchanges(), *replicated()]


def run(seeds: range) -> list[str]:
    """Run these seeds, and return what went wrong, in words."""
    found = []
    for seed in seeds:
        calls = programs()[seed % len(programs())]
        what = f"seed {seed}: {calls[0].plan.traffic.collective} by {calls[0].plan.name} on {calls[0].nodes}"
        try:
            wrong = run_calls(calls, seed).wrong
        except Deadlock as error:
            found.append(f"{what}: {error}")
        else:
            found += [f"{what}: wrong bits at (turn, rank) {wrong}"] if wrong else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    last, began = options.first + options.runs, time.monotonic()
    batches = [range(start, min(start + BATCH, last)) for start in range(options.first, last, BATCH)]
    wrong: list[str] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for found in track(pool.map(run, batches), "runs", total=len(batches), disable=options.json):
            wrong += found
    spent_s = time.monotonic() - began
    if options.json:
        print(json.dumps({"runs": options.runs, "programs": len(programs()), "wrong": wrong, "seconds": spent_s}))
    else:
        print(f"{options.runs} runs of {len(programs())} programs in {spent_s:.0f} s: {len(wrong)} went wrong")
        print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

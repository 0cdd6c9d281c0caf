"""The cost of planning: pricing one plan, deciding with and without the cache, and ``commlayer plan`` from the shell.

Needs no cluster and no torch. Medians and quartiles over repeats; a minute on an idle core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from commlayer.cli.tables import print_json, print_table
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Interference, Profile
from commlayer.scheduler import Planner, Strategy, Traffic, build, price
from commlayer.units import format_us

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # what its helpers are shared with
from synthetic_profiles import synthetic_profile

CHUNKS = (2, 4, 8, 16, 24, 32)
TRAFFIC = Traffic(16 << 20, group_size=2, replication=4)
PLAN = ("plan", "--profile", "monta-a800-2x8", "--bytes", "256e6", "--tp", "8", "--ep", "2")
SHELL = (sys.executable, "-c", "from commlayer.cli.main import main; main(prog_name='commlayer')", *PLAN)


class Cost(NamedTuple):
    """Times in µs of one call: median, and the quartiles around it."""

    what: str
    p50_us: float
    low_us: float
    high_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=101, help="times that each is measured (default 101)")
    parser.add_argument("--shell-repeats", type=int, default=15, help="runs of `commlayer plan` (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if min(options.repeats, options.shell_repeats) < 2:
        parser.error("quartiles need at least 2 repeats")
    slowed = tuple(Interference(a, b, 1.2) for a, b in permutations(Resource, 2))
    profiles = {"six interferences": synthetic_profile(interference=slowed), "no interference": synthetic_profile()}
    costs = [cost for name, profile in profiles.items() for cost in planning(name, profile, options.repeats)]
    costs.append(measured(f"commlayer {' '.join(PLAN)}", run_shell, options.shell_repeats))
    if options.json:
        print_json([cost._asdict() for cost in costs])
    else:
        cells = [(c.what, format_us(c.p50_us), f"{format_us(c.low_us)} … {format_us(c.high_us)}") for c in costs]
        print_table(("what", ">median", ">quartiles"), cells, title="What planning costs, on one core")


def planning(name: str, profile: Profile, repeats: int) -> list[Cost]:
    """Price a plan of each strategy and chunk count, then decide."""
    costs = []
    of_groups = (Strategy.DIRECT, Strategy.LEADERS, Strategy.RING)
    for strategy in [each for each in Strategy if each not in of_groups]:
        is_chunked = strategy in (Strategy.PIPELINED, Strategy.PIPELINED_COPY)
        for chunks in CHUNKS if is_chunked else (1,):
            plan = build(TRAFFIC, strategy, chunks)
            costs.append(measured(f"price {plan.name}, {name}", partial(price, plan, profile), repeats))
    planner = Planner(profile)
    planner.decide(TRAFFIC)
    costs.append(measured(f"decide, uncached, {name}", lambda: Planner(profile).decide(TRAFFIC), repeats))
    costs.append(measured(f"decide, cached, {name}", lambda: planner.decide(TRAFFIC), repeats))
    return costs


def run_shell() -> None:
    subprocess.run(SHELL, stdout=subprocess.DEVNULL, check=True)


def measured(what: str, task: Callable[[], object], repeats: int) -> Cost:
    task()  # what is loaded or compiled once is not the cost of a call
    times_us = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        task()
        times_us.append((time.perf_counter_ns() - begin) / 1e3)
    low, middle, high = quantiles(times_us, n=4, method="inclusive")
    return Cost(what, middle, low, high)


if __name__ == "__main__":
    main()

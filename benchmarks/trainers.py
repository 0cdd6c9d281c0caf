"""``make bench-trainers``: steps of Megatron-Core, torchtitan and DeepSpeed, as they are on Gloo and with commlayer, emulated.

On 2 × 4 ranks at 100 and 400 Mbit/s a node: the tiny models with experts of tests/trainers, where the experts' exchange rules the
step, and where gradients do. Jobs take turns: the stock trainer on Gloo, and the same with commlayer by the lines of its page in
docs/trainers, planned from the profile that the first such job measures when it starts. Every loss of every rank is compared:
within 1e-6. A time is the slowest rank's, from a common start; a job's first steps are left out.

Writes a dated document and JSON. Trainers that are not installed (`make bench-trainers` installs them) are named, and left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from common import add_output, dated_stem, facts, today, write_results
from moe_tables import ratios
from rich.progress import Progress

import commlayer.backend.new_groups
import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster
from commlayer.statistics import Stats, stats

_TESTS = Path(__file__).resolve().parent.parent / "tests" / "trainers"
TRAINERS = {"megatron": "tiny_megatron", "torchtitan": "tiny_titan", "deepspeed": "tiny_deepspeed"}
NAMES = {"megatron": "Megatron-Core", "torchtitan": "torchtitan", "deepspeed": "DeepSpeed"}
PACKAGES = {"megatron": "megatron", "torchtitan": "torchtitan", "deepspeed": "deepspeed"}
RULERS = ("exchange", "gradients")
RATES = ("100mbit", "400mbit")
WAYS = ("gloo", "commlayer")
TARGET, LIMIT, TOLERANCE = 0.75, 1.03, 1e-6
_NODES, _RANKS = 2, 4
_WORLD = _NODES * _RANKS
_UNTIMED = 3
"""A job's first steps: connections are made, plans decided, and experts' times and loads agreed."""
_TIMEOUT_S = 180.0
SIZES: dict[str, dict[str, Any]] = {
    "exchange": {
        "batch": 2, "sequence": 256, "hidden": 128, "width": 32, "vocabulary": 64, "num_experts": 16, "top_k": 8
    },
    "gradients": {
        "batch": 1, "sequence": 32, "hidden": 128, "width": 32, "vocabulary": 8192, "num_experts": 8, "top_k": 2
    },
}  # fmt: skip
"""The models, of one layer. In ``exchange`` tokens are many, and each goes to as many experts as in Qwen3 or DeepSeek."""


@dataclass(frozen=True)
class Job:
    """The results of one rank: its losses, each step's seconds, and what ran."""

    losses: list[float]
    times_s: list[float]
    stats: Stats


@dataclass
class Cell:
    """One trainer, ruled by ``ruler``, at one rate.

    ``times_s``: the slowest rank's of each way's steps, jobs after each other. ``plans``: how many calls of rank 0 were moved by
    each plan; ``stats``: its statistics. ``difference``: of a loss, relative, at most.
    """

    trainer: str
    ruler: str
    rate: str
    size: dict[str, Any]
    times_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    plans: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    difference: float = 0.0
    rounds: int = 0


# On every rank


def steps_of(trainer: str, ruler: str, way: str, steps: int, environment: Mapping[str, str]) -> Iterator[float]:
    """The trainer's losses, step by step."""
    is_ours = way == "commlayer"
    tiny = importlib.import_module(TRAINERS[trainer])
    size = size_of(ruler)
    if trainer == "megatron":
        case = tiny.Case(ruler, (1, _WORLD, 1), size=size, steps=steps, kind="auto", bucket_size=None, overlap=True)
        return tiny.losses_of(case, way, dict(environment))  # type: ignore[no-any-return]
    told = tuple(environment.items())
    if trainer == "deepspeed":
        return tiny.losses_of(tiny.Run(way, ep=_WORLD, steps=steps, size=size, environment=told))  # type: ignore[no-any-return]
    ours = {"alias": "gloo", "override": "commlayer.integrations.torchtitan.token_dispatcher"} if is_ours else {}
    return tiny.losses_of(  # type: ignore[no-any-return]
        tiny.Run(plan="", ep=_WORLD, steps=steps, size=size, environment=told, **ours)
    )


def size_of(ruler: str) -> Any:
    return importlib.import_module("model_size").Size(**SIZES[ruler])


def on_rank(trainer: str, ruler: str, way: str, steps: int, environment: Mapping[str, str]) -> Job:
    """The job of one rank."""
    losses = steps_of(trainer, ruler, way, steps, environment)
    seen, times = [next(losses)], []
    while len(seen) < steps:
        dist.barrier()
        begin = time.perf_counter()
        seen.append(next(losses))
        times.append(time.perf_counter() - begin)
    dist.barrier()
    return Job(seen, times[_UNTIMED - 1 :], stats())


# The program


def measure(cell: Cell, options: argparse.Namespace, advance: Callable[[], None]) -> None:
    """Run jobs in turns, and keep their times in ``cell``."""
    steps = _UNTIMED + options.steps
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(_NODES, _RANKS, inter=cell.rate, mode="netns") as cluster,
    ):
        environment = {"COMMLAYER_PROFILE": options.profile, "COMMLAYER_CACHE": folder}
        began = time.perf_counter()
        while not cell.rounds or (cell.rounds < options.rounds and time.perf_counter() - began < options.budget_s):
            jobs: dict[str, list[Job]] = {}
            for way in WAYS if cell.rounds % 2 else WAYS[::-1]:
                jobs[way] = cluster.run(
                    on_rank, cell.trainer, cell.ruler, way, steps, environment, timeout_s=_TIMEOUT_S
                )
                advance()
            for way, ranks in jobs.items():
                cell.times_s[way] += map(max, zip(*(job.times_s for job in ranks), strict=True))
            cell.difference = max(cell.difference, difference_of(*(jobs[way] for way in WAYS)))
            cell.stats = {"commlayer": jobs["commlayer"][0].stats}
            cell.plans = plans_of(jobs["commlayer"][0].stats)
            cell.rounds += 1


def failures(cell: Cell, options: argparse.Namespace, advance: Callable[[], None]) -> list[str]:
    """Measure ``cell``; what went wrong there."""
    about = f"{cell.trainer}, {cell.ruler}, {cell.rate}"
    try:
        measure(cell, options, advance)
    except Exception as error:  # noqa: BLE001  one cell must not lose the others
        return [f"{about}: {type(error).__name__}: {error}"]
    return [] if cell.difference <= TOLERANCE else [f"{about}: losses differ by {cell.difference:.1e}"]


def difference_of(stock: Sequence[Job], ours: Sequence[Job]) -> float:
    """The largest relative difference of any rank's loss at any step."""
    pairs = [pair for a, b in zip(stock, ours, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def plans_of(found: Stats) -> dict[str, int]:
    """How many calls of several ranks were moved by which plan, and dispatches by which kind; barriers are this program's."""
    counted: Counter[str] = Counter()
    for group in found["groups"]:
        for call in group["calls"] if len(group["ranks"]) > 1 else ():
            counted[f"{call['collective']} {call['plan']}"] += call["calls"]
    for each in found["dispatches"]:
        counted[f"dispatch {each['kind']}"] += each["calls"]
    return {ran: calls for ran, calls in counted.most_common() if not ran.startswith("barrier")}


def document(known: dict[str, str], cells: Sequence[Cell], missing: Mapping[str, str]) -> str:
    lines = [
        f"# Steps of trainers, {today()}",
        "",
        "Emulated: 2 × 4 ranks on one machine, real processes and bytes, wires of the given rate a node; ratios count, not",
        "times. All ranks compute on its cores, so models compute little. The stock trainer on Gloo and the same with commlayer",
        "are jobs that take turns; a ratio is of the steps of the same number in a turn, with quartiles. Losses are of all ranks",
        "and all steps.",
        "",
        *[f"- {name}: {text}" for name, text in known.items()],
        *[f"- left out: {NAMES[name]}, {why}" for name, why in missing.items()],
        "",
        f"Targets: at most {TARGET:g} where the experts' exchange or gradients rule; never above {LIMIT:g}.",
        "",
        "| trainer | what rules | Mbit/s | Gloo, ms | commlayer, ms | ratio | losses differ by | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        gloo, ours = (cell.times_s[way] for way in WAYS)
        lines.append(
            f"| {NAMES[cell.trainer]} | {cell.ruler} | {cell.rate.removesuffix('mbit')} | {1e3 * median(gloo):.0f} | "
            f"{1e3 * median(ours):.0f} | **{ratios(ours, gloo)}** | {cell.difference or 0:.0e} | {len(ours)} |"
        )
    lines += ["", "## What ran", ""]
    for cell in cells:
        ran = ", ".join(f"{plan} ({calls})" for plan, calls in cell.plans.items())
        size = ", ".join(f"{name} {value}" for name, value in cell.size.items())
        lines += [f"- {NAMES[cell.trainer]}, {cell.ruler}, {cell.rate}: {ran}. Of {size}."]
    return "\n".join(lines) + "\n"


def available(wanted: Sequence[str]) -> dict[str, str]:
    """Load trainers, before ranks are forked; which are missing, and why."""
    sys.path.insert(0, str(_TESTS))
    missing = {name: "not installed" for name in wanted if find_spec(PACKAGES[name]) is None}
    for name in wanted:
        if name not in missing:
            importlib.import_module(TRAINERS[name]).load()
    return missing


def finish(
    stem: Path, known: dict[str, str], cells: Sequence[Cell], missing: Mapping[str, str], copy: Path | None
) -> None:
    """Write what there is so far."""
    content = {"date": today(), "facts": known, "missing": dict(missing), "cells": [asdict(cell) for cell in cells]}
    write_results(stem, content, document(known, cells, missing))
    if copy is not None:
        copy.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", action="append", choices=TRAINERS, help="only this one; may be given again")
    parser.add_argument("--ruler", action="append", choices=RULERS, help="only where this rules the step")
    parser.add_argument("--rate", action="append", help="of a node's wire; may be given again (100mbit and 400mbit)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a job (10)")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of jobs (4)")
    parser.add_argument("--budget-s", type=float, default=70.0, help="after which a cell begins no pair of jobs (70)")
    parser.add_argument("--profile", default="auto", help="as COMMLAYER_PROFILE (auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there, too")
    add_output(parser)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    wanted = options.trainer or list(TRAINERS)
    missing = available(wanted)
    stem, known = dated_stem(options.output, "trainers"), facts("trainers.py", os.getloadavg()[0])
    cells: list[Cell] = []
    grid = list(
        product([name for name in wanted if name not in missing], options.ruler or RULERS, options.rate or RATES)
    )
    failed: list[str] = []
    with Progress() as progress:
        task = progress.add_task("jobs", total=len(grid) * options.rounds * len(WAYS))
        for place, (trainer, ruler, rate) in enumerate(grid):
            progress.update(task, description=f"{trainer}, {ruler}, {rate}")
            cell = Cell(trainer, ruler, rate, asdict(size_of(ruler)))
            failed += failures(cell, options, lambda: progress.advance(task))
            progress.update(task, completed=(place + 1) * options.rounds * len(WAYS))
            cells += [cell] if cell.rounds else []
            finish(stem, known, cells, missing, options.json)
    if cells:  # else none has been written
        print(stem.with_suffix(".md").read_text(encoding="utf-8"))
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")  # each job names its own
    main()

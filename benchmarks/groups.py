"""``make bench-groups``: collectives of a trainer's groups, such as TP2's gradient groups, planned, on emulated clusters.

Cells: all siblings of a layout run one collective at once, by every plan worth trying, in alternate rounds. Was the chosen plan
priced, how far is its price from its time (error), and how much longer does it take than the best of those tried (regret)?
Against torch: the same collectives on commlayer and on Gloo, in alternate rounds, on uneven nodes too.

Writes a dated document and JSON. Ten to eleven minutes; ``--quick`` takes one, and writes documents of its own name; so does
``--versus``, which leaves the cells out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, facts, measure_links, today, write_results
from groups_cells import (
    SIZES,
    Cell,
    Versus,
    Way,
    cell_table,
    contenders,
    is_swept,
    layouts,
    sizes_of,
    summary_table,
    unpriced,
    versus_table,
)
from moe_tables import ratios

import commlayer.backend
import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer.agree.messages import ControlMessage, Peers, gather_messages
from commlayer.emulation import EmulatedCluster
from commlayer.measure.profiler import SweepOptions
from commlayer.profiles.errors import PlanError
from commlayer.profiles.sweep import Repeats
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.scheduler.named_plans import parse_plan
from commlayer.scheduler.plan import Plan, Strategy
from commlayer.testing.nodes import run_on_nodes

CLUSTERS = {"2x4": (4, 4), "2x8": (8, 8), "4x4": (4, 4, 4, 4)}
VERSUS = {"2x4": (4, 4), "3+1": (3, 1), "5+3": (5, 3), "2+1+3": (2, 1, 3), "5+1": (5, 1)}
_ALWAYS = ("2x4", "3+1", "5+3", "2+1+3")
"""The ones that are run where none is asked for."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
INTER = "400mbit"
_REPEATS = Repeats(warmup=1, min_repeats=2, max_repeats=6, half_width=0.1, budget_us=1e5)
_SWEEP = SweepOptions(
    max_bytes=4 << 20,
    factor=4.0,
    repeats=_REPEATS,
    group_max_bytes=4 << 20,
    group_factor=8.0,
    group_repeats=_REPEATS,
    interference_rounds=3,
)
"""Coarser than that of ``commlayer measure``, which would take most of the run."""
_CELL_ROUNDS, _CELL_BUDGET_S = (3, 9), 1.5
_VERSUS_ROUNDS, _VERSUS_BUDGET_S = (5, 41), 4.0
"""Rounds, at least and at most, and seconds after which no round more is begun."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", choices=list(CLUSTERS), default=list(CLUSTERS), help="only these")
    parser.add_argument(
        "--quick", action="store_true", help="a fraction: one cluster's smaller cells, one uneven cluster"
    )
    parser.add_argument(
        "--probe", action="store_true", help="plan by what a job measures at its start, without a sweep"
    )
    parser.add_argument("--versus", nargs="+", choices=list(VERSUS), help="only against torch, on these clusters")
    parser.add_argument(
        "--sizes", nargs="+", type=int, metavar="BYTES", help="of the calls against torch [16 MiB; --quick: 4 MiB]"
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        default=[],
        metavar="PLAN",
        help="each of these too, such as pipelined:4, and then all ranks only, not the gradient groups",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there, too")
    add_output(parser)
    options = parser.parse_args()
    name = "groups-quick" if options.quick else "groups-versus" if options.versus else "groups"
    stem = dated_stem(options.output, name)
    about = facts("groups.py", os.getloadavg()[0])
    found: dict[str, list[Cell]] = {}
    against: list[Versus] = []
    clusters = options.clusters[:1] if options.quick else options.clusters
    for key in () if options.versus else clusters:
        found[key] = measured_cells(CLUSTERS[key], is_quick=options.quick, is_probe=options.probe or options.quick)
        finish(stem, about, found, against, options.json)
    sizes = options.sizes or [4 << 20 if options.quick else 16 << 20]
    for key, size in product(options.versus or (_ALWAYS[:2] if options.quick else _ALWAYS), sizes):
        against += measured_versus(key, size, tuple(options.plans))
        finish(stem, about, found, against, options.json)
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


def finish(
    stem: Path, about: Mapping[str, str], found: Mapping[str, list[Cell]], against: Sequence[Versus], copy: Path | None
) -> None:
    """Write what there is so far."""
    content = {
        "about": about,
        "cells": {key: [cell.as_row() for cell in cells] for key, cells in found.items()},
        "against torch": [asdict(row) for row in against],
    }
    write_results(stem, content, document(about, found, against))
    if copy is not None:
        copy.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def measured_cells(nodes: tuple[int, ...], *, is_quick: bool, is_probe: bool) -> list[Cell]:
    """All cells of one cluster."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(len(nodes), nodes[0], inter=INTER, mode="netns") as cluster,
    ):
        environment = {"COMMLAYER_PROFILE": "auto", "COMMLAYER_CACHE": folder}
        if not is_probe:
            print(f"{len(nodes)}x{nodes[0]}: measuring the links", flush=True)
            environment["COMMLAYER_PROFILE"] = path = f"{folder}/profile.json"
            took_s = cluster.run(measure_links, path, "make bench-groups", _SWEEP, timeout_s=600)[0]
            print(f"{len(nodes)}x{nodes[0]}: measured in {took_s:.0f} s", flush=True)
        return cluster.run(cells, nodes, SIZES[:2] if is_quick else SIZES, environment, timeout_s=1800)[0]


def measured_versus(key: str, size: int, plans: Sequence[str] = ()) -> list[Versus]:
    """Run against torch on one cluster, whose profile is what the job measures itself; with ``plans`` on all ranks only."""
    nodes = VERSUS[key]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(len(nodes), max(nodes), inter=INTER, mode="netns") as cluster,
    ):
        environment = {"COMMLAYER_PROFILE": "auto", "COMMLAYER_CACHE": folder}
        return run_on_nodes(cluster, nodes, versus, key, size, plans, environment, timeout_s=900)[0]


# On every rank


def start(environment: Mapping[str, str]) -> Any:
    """A Gloo group of all ranks, to keep them in step, beside the default group."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    dist.init_process_group("commlayer")
    return dist.new_group(backend="gloo")


def group_of_mine(groups: Sequence[Sequence[int]], backend: str) -> Any:
    """Make all ``groups``, and return the one that this rank is in."""
    made = [dist.new_group(list(ranks), backend=backend) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


class Operands:
    """The tensors of one collective. ``size`` is nccl-tests' S; they hold small integers in FP32, so that sums are exact."""

    def __init__(self, collective: str, size: int, num_ranks: int) -> None:
        count = size // 4 // num_ranks
        self.collective, self.num_bytes = collective, count * num_ranks * 4
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.whole = torch.randint(0, 100, (count * num_ranks,), generator=generator).float()
        self.out, self.part = self.whole.clone(), self.whole[:count].clone()

    def run(self, group: Any) -> torch.Tensor:
        """Run the collective once; all_reduce in place."""
        if self.collective == "all_reduce":
            dist.all_reduce(self.out, group=group)
            return self.out
        if self.collective == "reduce_scatter":
            dist.reduce_scatter_single(self.part, self.whole, group=group)
            return self.part
        dist.all_gather_single(self.out, self.whole[: self.part.numel()], group=group)
        return self.out

    def result(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of ``call`` on the same input each time."""
        self.out.copy_(self.whole)
        return call().clone()


def num_wrong(operands: Operands, calls: Sequence[Callable[[], torch.Tensor]], control: Any) -> int:
    """Elements, over all ranks, in which results of ``calls`` are not those of the first, which is Gloo's. Connects, too."""
    expected = operands.result(calls[0])
    wrong = torch.tensor([sum(int((operands.result(call) != expected).sum()) for call in calls[1:])])
    dist.all_reduce(wrong, group=control)
    operands.out.zero_()  # what is summed in place round after round stays a number
    return int(wrong)


def alternated(
    calls: Sequence[Callable[[], object]], control: Any, rounds: tuple[int, int], budget_s: float
) -> list[list[float]]:
    """µs of each call in each round, of the slowest rank: a new order each round, the same on all ranks."""
    times: list[list[float]] = [[] for _ in calls]
    least, most = rounds
    spent_us, chooser = 0.0, random.Random(len(calls))
    while len(times[0]) < least or (spent_us < budget_s * 1e6 and len(times[0]) < most):
        for which in chooser.sample(range(len(calls)), len(calls)):
            dist.barrier(control)
            begin = time.perf_counter()
            calls[which]()
            took = torch.tensor([(time.perf_counter() - begin) * 1e6], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=control)
            times[which].append(float(took))
            spent_us += float(took)
    return times


def run_by(plan: Plan, group: Any, operands: Operands) -> torch.Tensor:
    """Run by ``plan``, through the backend as any call, so that all plans pay the same for it."""
    choices = group._planned.choices
    choices.plan = lambda *_, **__: None if plan.strategy is Strategy.FLAT else plan
    try:
        return operands.run(group)
    finally:
        del choices.plan


def chosen_by(group: Any, collective: str, num_bytes: int) -> tuple[str, str]:
    """The name of the plan that a caller of this rank's group gets; why it has no price, or ""."""
    choices = group._planned.choices
    before = choices.reasons.copy()
    plan = choices.plan(collective, num_bytes, is_float=True)
    return Strategy.FLAT.value if plan is None else plan.name, next(iter(choices.reasons - before), "")


def decided(
    group: Any, collective: str, num_bytes: int, control: Any
) -> tuple[str, str, list[tuple[Plan, float | None]]]:
    """The name of the plan that a caller gets; why it has no price, or ""; and the plans to try, with their prices.

    Siblings may have found different plans the fastest in their trials: then that of rank 0's group is taken for all of them.
    """
    choices = group._planned.choices
    mine, reason = chosen_by(group, collective, num_bytes)
    chosen = everyones(mine, control)[0]
    traffic = choices.prices.traffic(collective, num_bytes)
    if choices.prices.planner is None:
        return chosen, "there is no profile", []
    try:
        priced = contenders(choices.prices.planner.decide(traffic).candidates, chosen)
    except PlanError as error:
        return chosen, reason or str(error), [(plan, None) for plan in unpriced(traffic)]
    return chosen, reason, [(timeline.plan, timeline.total_us) for timeline in priced]


def cells(nodes: tuple[int, ...], sizes: Sequence[int], environment: Mapping[str, str]) -> list[Cell]:
    """Every layout's cells, one after the other."""
    control, found = start(environment), []
    for layout, groups in layouts(sum(nodes)).items():
        if dist.get_rank() == 0:
            print(f"{len(nodes)}x{nodes[0]}: {layout}", flush=True)
        group = group_of_mine(groups, "commlayer")
        for size, collective in product(sizes_of(groups, sizes), COLLECTIVES):
            operands = Operands(collective, size, len(groups[0]))
            operands.run(group)  # what a group finds out in its first call of such a size is known then
            chosen, reason, plans = decided(group, collective, operands.num_bytes, control)
            if not plans:
                raise RuntimeError(
                    f"{layout}: expected the backend to have a profile of {nodes}, it has none: {reason}"
                )
            ways = [Way(plan.name, predicted_us) for plan, predicted_us in plans]
            swept = is_swept(group.shape, nodes)
            cell = Cell(layout, group.shape, len(groups), swept, collective, size, chosen, reason, ways)
            require_alike(
                f"{group.shape}: {chosen} of {[way.plan for way in ways]}", f"{layout}, {collective} of {size}", control
            )
            calls = [partial(run_by, plan, group, operands) for plan, _ in plans]
            cell.num_wrong = num_wrong(operands, calls, control)
            for way, times in zip(ways, alternated(calls, control, _CELL_ROUNDS, _CELL_BUDGET_S), strict=True):
                way.times_us = times
            found.append(cell)
        dist.destroy_process_group(group)
    return found


class _Said(ControlMessage, frozen=True):
    """The choice of a rank's group for a call."""

    text: str


def everyones(text: str, control: Any) -> list[str]:
    """The texts of all ranks, in rank order."""
    return [said.text for said in gather_messages(_Said(text), _Said, Peers.of(control), 60.0, "to compare choices")]


def require_alike(text: str, where: str, control: Any) -> None:
    """Raises RuntimeError where siblings try other plans: they could not take turns in step."""
    said = everyones(text, control)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            raise RuntimeError(
                f"{where}: expected siblings to decide alike, rank 0 has {said[0]}, rank {rank} {theirs}"
            )


def versus(key: str, size: int, plans: Sequence[str], environment: Mapping[str, str]) -> list[Versus]:
    """Each collective on TP2's gradient groups at once, and on uneven nodes on all ranks; by ``plans`` on these alone."""
    control, nodes = start(environment), VERSUS[key]
    world = sum(nodes)
    families = {} if plans else {"TP2×DP, dp": FoldedMapping(world, tp=2).groups("dp")}
    if plans or len(set(nodes)) > 1:
        families["all ranks"] = [tuple(range(world))]
    found = []
    for name, groups in families.items():
        if dist.get_rank() == 0:
            print(f"against torch, {key}: {name}", flush=True)
        ours, torchs = group_of_mine(groups, "commlayer"), group_of_mine(groups, "gloo")
        for collective in COLLECTIVES:
            operands = Operands(collective, size, len(groups[0]))
            calls = [partial(operands.run, torchs), partial(operands.run, ours)]
            calls += [partial(run_by, plan, ours, operands) for plan in forced(plans, ours, operands)]
            wrong = num_wrong(operands, calls, control)
            gloo, *each = alternated(calls, control, _VERSUS_ROUNDS, _VERSUS_BUDGET_S)
            names = [plans_of(ours, collective, operands.num_bytes, control), *plans]
            for plan, mine in zip(names, each, strict=True):
                ratio = ratios(mine, gloo)
                quartiles, times = (ratio.middle, ratio.low, ratio.high), (median(gloo), median(mine))
                found.append(Versus(key, name, collective, size, plan, *times, quartiles, len(gloo), wrong))
    return found


def forced(plans: Sequence[str], group: Any, operands: Operands) -> list[Plan]:
    """The plans of these names for a call on all ranks."""
    traffic = group._planned.choices.prices.traffic(operands.collective, operands.num_bytes)
    return [build(traffic, *parse_plan(name)) for name in plans]


def plans_of(group: Any, collective: str, num_bytes: int, control: Any) -> str:
    """The plan of a call in each of the siblings: on uneven nodes they have other shapes, and may have other plans."""
    plan, reason = chosen_by(group, collective, num_bytes)
    mine = f"{'+'.join(map(str, group.shape))}: {plan}{', no price' if reason else ''}"
    return "; ".join(dict.fromkeys(everyones(mine, control)))


def document(about: Mapping[str, str], found: Mapping[str, list[Cell]], against: Sequence[Versus]) -> str:
    lines = [
        f"# Collectives of a trainer's groups, emulated, {today()}",
        "",
        "Made by `make bench-groups`. Emulated clusters on one machine: real processes and bytes, wires slowed to 400 Mbit/s",
        "a node and direction. All ranks share the machine's cores, so quote the ratios, not the times.",
        "",
        *(f"- {name}: {value}" for name, value in about.items()),
        "- FP32; sizes are nccl-tests' S; times are medians over rounds of the slowest rank of all siblings, which run at once",
        "- error: |predicted − measured| / measured of the chosen plan, where it was planned from a price",
        "- regret: measured time of the chosen plan over that of the best plan tried, less 1; plans take turns, in a new",
        "  order each round, after their results were compared with flat's",
        "- swept: whether a sweep of the cluster measures groups of this shape (all ranks, a node, one rank of each node)",
        *(["", "## Summary", "", *summary_table(found)] if found else []),
    ]
    for key, each in found.items():
        lines += ["", f"## {key}", "", *cell_table(each)]
    if against:
        lines += ["", "## Against torch", ""]
        lines += ["commlayer over torch's Gloo, the ratio of each round: median and quartiles in brackets.", ""]
        lines += versus_table(against)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

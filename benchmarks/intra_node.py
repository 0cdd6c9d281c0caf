"""Collectives inside one emulated node: Gloo's own, the direct plan over Gloo's messages, and over shared memory.

All three alternately in one run, after each was found right. Each time is that of the slowest rank. Two minutes on two
cores. ``python benchmarks/intra_node.py [--ranks 4 8] [--rounds 15] [--output FILE.md]``
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

import torch
import torch.distributed as dist
from common import today
from moe_tables import table
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.calls.movement import Movement
from commlayer.emulation import EmulatedCluster
from commlayer.engine.planned import PlannedGroup
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.settings import Settings
from commlayer.units import format_bytes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
SIZES = (64 << 10, 1 << 20, 8 << 20, 32 << 20)
"""The sizes of the gathered or unreduced whole, bytes."""
WAYS = ("gloo", "direct", "shared")
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """One collective of one size. ``times_us[way]``: one for each round, of the slowest rank."""

    ranks: int
    collective: str
    num_bytes: int
    times_us: dict[str, list[float]]

    def middle(self, way: str) -> float:
        return median(self.times_us[way])

    def spread(self, way: str) -> str:
        """Median, and in brackets the quartiles, ms."""
        low, _, high = quantiles(self.times_us[way], n=4)
        return f"{self.middle(way) / 1e3:.2f} ({low / 1e3:.2f}–{high / 1e3:.2f})"

    def ratio(self, way: str, other: str) -> str:
        return f"{self.middle(way) / self.middle(other):.2f}"


def planned(intra: Literal["gloo", "shared"], world: int) -> PlannedGroup:
    store, rank = PrefixStore(intra, _get_default_store()), dist.get_rank()
    board = FailureBoard(FailureDetector(store, rank, range(world), 60.0), intra, rank, range(world))
    return PlannedGroup(
        name="node",
        rank=rank,
        nodes=[range(world)],
        global_ranks=range(world),
        store=store,
        planner=None,
        settings=Settings(plan="flat_direct", intra=intra),
        board=board,
        timeout_s=60,
    )


def ways(
    collective: str, num_bytes: int, direct: PlannedGroup, shared: PlannedGroup
) -> dict[str, Callable[[], torch.Tensor]]:
    """For each way a call that returns its result."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randint(0, 9, (num_bytes // 4,), dtype=torch.int32, generator=torch.Generator().manual_seed(rank))
    part = whole[: whole.numel() // world].clone()
    gathered, reduced, summed = torch.empty_like(whole), torch.empty_like(part), torch.empty_like(whole)

    def gloo() -> torch.Tensor:
        if collective == "all_gather":
            dist.all_gather_into_tensor(gathered, part)
            return gathered
        if collective == "reduce_scatter":
            dist.reduce_scatter_tensor(reduced, whole)
            return reduced
        summed.copy_(whole)
        dist.all_reduce(summed)
        return summed

    def by(group: PlannedGroup) -> torch.Tensor:
        plan = group.choices.plan(collective, num_bytes)
        assert plan is not None  # it is forced
        if collective == "all_gather":
            group.run(Movement(plan, part, gathered))
            return gathered
        if collective == "reduce_scatter":
            group.run(Movement(plan, whole, reduced))
            return reduced
        summed.copy_(whole)
        group.run(Movement(plan, summed, summed))
        return summed

    return {"gloo": gloo, "direct": lambda: by(direct), "shared": lambda: by(shared)}


def on_rank(rounds: int) -> list[tuple[str, int, dict[str, list[float]]]]:
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)  # ranks that share no memory are nothing to compare
    warnings.simplefilter("ignore", FutureWarning)  # torch's old names of its verbs, which older versions need
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    direct, shared = planned("gloo", world), planned("shared", world)
    found = []
    for collective in COLLECTIVES:
        for num_bytes in SIZES:
            calls = ways(collective, num_bytes, direct, shared)
            expected = calls["gloo"]().clone()
            for way in WAYS[1:]:
                if not torch.equal(calls[way](), expected):
                    raise SystemExit(f"{collective} of {num_bytes} bytes, {way}: wrong result")
            found.append((collective, num_bytes, timed(calls, rounds)))
    return found


def timed(calls: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in calls}
    for k in range(rounds + _WARM_UP_ROUNDS):
        for way, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            if k >= _WARM_UP_ROUNDS:
                times[way].append((time.perf_counter() - begin) * 1e6)
    return times


def measured(ranks: int, rounds: int) -> list[Row]:
    with EmulatedCluster(1, ranks, mode="loopback") as cluster:
        per_rank = cluster.run(on_rank, rounds)
    rows = []
    for entries in zip(*per_rank, strict=True):
        collective, num_bytes, _ = entries[0]
        slowest = {
            way: [max(each) for each in zip(*(times[way] for _, _, times in entries), strict=True)] for way in WAYS
        }
        rows.append(Row(ranks, collective, num_bytes, slowest))
    return rows


def document(rows: list[Row], rounds: int, busy: float) -> str:
    """``busy``: the machine's load average before the run."""
    lines = [
        "# Collectives inside one node",
        "",
        f"{today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}, all ranks on one machine, one "
        "thread each.",
        f"Load of the machine from other work when the run began: {busy:.1f}.",
        f"{rounds} rounds, the ways alternately; of each round the slowest rank's time. Times in ms: median (quartiles).",
        "Size: of the gathered or unreduced whole. *Gloo*: torch.distributed's own call. *Direct*: the plan `flat_direct` over",
        "Gloo's messages. *Shared*: the same plan over shared memory.",
        "",
    ]
    lines += table(
        ["ranks", "collective", "size", "Gloo", "direct", "shared", "shared / direct", "shared / Gloo"],
        [
            [
                *(str(row.ranks), row.collective, format_bytes(row.num_bytes)),
                *(row.spread(way) for way in WAYS),
                *(row.ratio("shared", other) for other in ("direct", "gloo")),
            ]
            for row in rows
        ],
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="ranks on the node (default 4 8)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each size (default 15)")
    parser.add_argument("--output", type=Path, help="also write the table there")
    options = parser.parse_args()
    busy = os.getloadavg()[0]
    rows = [row for ranks in options.ranks for row in measured(ranks, options.rounds)]
    text = document(rows, options.rounds, busy)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""``make bench-collectives``: planned collectives of the backend against torch's on Gloo, on emulated clusters.

For each cluster: measure it, then run every collective on the backend commlayer, on Gloo, and in the best flat direct form on
Gloo (all_gather by isend/irecv, reduce_scatter as an all_to_all with a local sum), alternately in one run, as a dated document
and JSON. Gloo's own all_gather and reduce_scatter are slow: only what remains against the direct forms is the planning's.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, machine, measure_links, today, versions, write_results
from moe_tables import ratios

import commlayer
import commlayer.backend
import commlayer.measure.calibrate  # before the fork: ranks then start in milliseconds
from commlayer.emulation import EmulatedCluster
from commlayer.measure.profiler import SweepOptions
from commlayer.units import format_bytes, format_us

SIZES = (1 << 10, 64 << 10, 1 << 20, 32 << 20)
SMALL = 64 << 10
_SHORT_SWEEP = SweepOptions(max_bytes=1 << 20, factor=4.0, group_max_bytes=1 << 20)
"""Up to 1 MiB, where latency rules."""
_BUDGET_S = 20.0
_MAX_ROUNDS = 41
_BATCH = 20  # calls a sample of a small size
TARGETS = {"all_reduce": 0.62, "reduce_scatter": 0.45, "all_gather": 0.70}


@dataclass(frozen=True)
class Cluster:
    key: str
    nodes: int
    ranks_per_node: int
    inter: str
    delay_us: float
    sizes: tuple[int, ...]
    collectives: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


CLUSTERS = (
    Cluster("2x4", 2, 4, "400mbit", 0.0, SIZES),
    Cluster("4x2-delay", 4, 2, "400mbit", 2000.0, (8 * 4096,), ("all_to_all", "all_reduce")),
)


@dataclass(frozen=True)
class Row:
    """One way of one collective and size. Times are medians over rounds of the slowest rank, µs; ``ratio`` the median over
    rounds of its time over torch's in the same round, with quartiles."""

    collective: str
    size: int
    way: str
    plan: str
    p50_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    num_wrong: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", action="append", choices=[c.key for c in CLUSTERS], help="only these")
    add_output(parser)
    options = parser.parse_args()
    stem = dated_stem(options.output, "collectives")
    found = []
    for cluster in CLUSTERS:
        if not options.cluster or cluster.key in options.cluster:
            found.append((cluster, *measured(cluster)))
            content = {c.key: {"sweep_s": sweep_s, "rows": [asdict(row) for row in rows]} for c, sweep_s, rows in found}
            write_results(stem, content, document(today(), found))
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


def measured(cluster: Cluster) -> tuple[float, list[Row]]:
    """Sweep, then run everything; on the delayed cluster also with the two-level plan forced."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(
            cluster.nodes, cluster.ranks_per_node, inter=cluster.inter, delay_us=cluster.delay_us, mode="netns"
        ) as emulated,
    ):
        path = f"{folder}/profile.json"
        print(f"{cluster.key}: measuring the links", flush=True)
        sweep = _SHORT_SWEEP if cluster.delay_us else SweepOptions()
        sweep_s = emulated.run(measure_links, path, "make bench-collectives", sweep, timeout_s=600)[0]
        print(f"{cluster.key}: running", flush=True)
        rows = emulated.run(compare, cluster, {"COMMLAYER_PROFILE": path}, "commlayer", timeout_s=1800)[0]
        if cluster.delay_us:
            forced = {"COMMLAYER_PLAN": "hierarchical"}
            rows += [r for r in emulated.run(compare, cluster, forced, "two-level, forced")[0] if r.way != "torch"]
    return sweep_s, rows


def compare(cluster: Cluster, environment: Mapping[str, str], name: str) -> list[Row]:
    """On every rank: all ways of all collectives and sizes, alternately."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    dist.init_process_group("commlayer")
    gloo = dist.new_group(backend="gloo")
    assert gloo is not None
    rows = []
    for collective in cluster.collectives:
        for size in cluster.sizes:
            rows += Comparison(collective, size, gloo, name).rows()
    return rows


class Comparison:
    """One collective at one size. ``size`` is nccl-tests' S; tensors hold small integers in FP32, so sums are exact."""

    def __init__(self, collective: str, size: int, gloo: dist.ProcessGroup, name: str) -> None:
        self.collective, self.size, self.gloo, self.name = collective, size, gloo, name
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        count = size // 4 // self.n
        generator = torch.Generator().manual_seed(self.rank)
        self.whole = torch.randint(0, 100, (count * self.n,), generator=generator).float()
        self.block = self.whole[:count].clone()
        # Outputs are made once: new memory is touched for the first time by whoever writes it, which costs more than a copy.
        self.out, self.arrived, self.part = self.whole.clone(), self.whole.clone(), self.block.clone()
        # Uneven splits: block k is from half to one and a half times as long as the mean, and the sums stay the same.
        self.splits = [count + (count // 2 if (k + self.rank) % 2 else -(count // 2)) for k in range(self.n)]
        if self.n % 2:
            self.splits = [count] * self.n

    def ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        torchs: dict[str, Callable[[Any], torch.Tensor]] = {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
            "all_to_all": self.all_to_all,
        }
        direct = {
            "all_gather": self.direct_all_gather,
            "reduce_scatter": self.direct_reduce_scatter,
            "all_reduce": self.direct_all_reduce,
        }
        call = torchs[self.collective]
        found: dict[str, Callable[[], torch.Tensor]] = {"torch": lambda: call(self.gloo), self.name: lambda: call(None)}
        if self.collective in direct:
            found["direct"] = direct[self.collective]
        return found

    def all_gather(self, group: Any) -> torch.Tensor:
        dist.all_gather_single(self.out, self.block, group=group)
        return self.out

    def reduce_scatter(self, group: Any) -> torch.Tensor:
        dist.reduce_scatter_single(self.part, self.whole, group=group)
        return self.part

    def all_reduce(self, group: Any) -> torch.Tensor:
        dist.all_reduce(self.out, group=group)
        return self.out

    def all_to_all(self, group: Any) -> torch.Tensor:
        dist.all_to_all_single(self.out, self.whole, self.splits, self.splits, group=group)  # the matrix is symmetric
        return self.out

    def direct_all_gather(self, block: torch.Tensor | None = None) -> torch.Tensor:
        block = self.block if block is None else block
        parts = list(self.out.chunk(self.n))
        parts[self.rank].copy_(block)
        others = [(self.rank + k) % self.n for k in range(1, self.n)]
        works = [dist.irecv(parts[peer], peer, group=self.gloo) for peer in others]
        works += [dist.isend(block, peer, group=self.gloo) for peer in others]
        for work in works:
            assert work is not None
            work.wait()
        return self.out

    def direct_reduce_scatter(self) -> torch.Tensor:
        return self.direct_sum(self.whole)

    def direct_all_reduce(self) -> torch.Tensor:
        return self.direct_all_gather(self.direct_sum(self.out))

    def direct_sum(self, source: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(self.arrived, source, group=self.gloo)
        return torch.sum(self.arrived.view(self.n, -1), 0, out=self.part)

    def timed(self, call: Callable[[], torch.Tensor]) -> float:
        """µs a call, of the slowest rank."""
        batch = _BATCH if self.size <= SMALL else 1
        dist.barrier(self.gloo)
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        took = torch.tensor([(time.perf_counter() - begin) * 1e6 / batch], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=self.gloo)
        return float(took)

    def rows(self) -> list[Row]:
        ways = self.ways()
        wrong = {way: self.num_wrong(ways["torch"], call) for way, call in ways.items()}
        self.out.zero_()  # what is summed in place round after round stays a number
        commlayer.reset_stats()
        times: dict[str, list[float]] = {way: [] for way in ways}
        order, spent = list(ways), 0.0
        chooser = random.Random(self.size)
        while len(times["torch"]) < 5 or (spent < _BUDGET_S * 1e6 and len(times["torch"]) < _MAX_ROUNDS):
            chooser.shuffle(order)  # the same on all ranks, and a new one each round
            for way in order:
                took = self.timed(ways[way])
                times[way].append(took)
                spent += took * (_BATCH if self.size <= SMALL else 1)
        plan = self.plan_run()
        return [self.row(way, times, plan if way == self.name else "", wrong[way]) for way in ways]

    def num_wrong(self, expected: Callable[[], torch.Tensor], call: Callable[[], torch.Tensor]) -> int:
        for _ in range(2):  # an uneven all_to_all decides by the call before
            self.out.copy_(self.whole)  # all_reduce works in place
            found = call().clone()
        self.out.copy_(self.whole)
        total = (found != expected()).sum()
        dist.all_reduce(total, group=self.gloo)
        return int(total)

    def plan_run(self) -> str:
        calls = [
            c for group in commlayer.stats()["groups"] for c in group["calls"] if c["collective"] == self.collective
        ]
        return max(calls, key=lambda c: c["calls"])["plan"] if calls else "?"

    def row(self, way: str, times: Mapping[str, Sequence[float]], plan: str, wrong: int) -> Row:
        ratio, rounds = ratios(times[way], times["torch"]), len(times[way])
        p50_us = median(times[way])
        return Row(self.collective, self.size, way, plan, p50_us, ratio.middle, ratio.low, ratio.high, rounds, wrong)


def wire_limit_us(cluster: Cluster, collective: str, size: int) -> float:
    """The time that a node's wire needs for the bytes that must cross it, in one direction."""
    rate = 50.0  # 400 Mbit/s in bytes per µs
    m, width = cluster.nodes, cluster.ranks_per_node
    crossing = {
        "all_gather": size * (m - 1) / m,
        "reduce_scatter": size * (m - 1) / m,
        "all_reduce": 2 * size * (m - 1) / m,
        "all_to_all": width * size * (m - 1) / m,
    }
    return crossing[collective] / rate


def document(date: str, found: Sequence[tuple[Cluster, float, list[Row]]]) -> str:
    lines = [
        f"# Collectives of the backend, emulated, {date}",
        "",
        "Made by `make bench-collectives`. Emulated clusters on one machine: real processes and bytes, wires slowed to",
        "400 Mbit/s a node and direction. All ranks share the machine's cores, so quote the ratios, not the times.",
        "",
        f"- machine: {machine()}",
        f"- versions: {versions()}",
        "- FP32; sizes are nccl-tests' S (all_gather: the gathered total); the all_to_all has uneven splits; every way runs",
        "  alternately with the others, in a new order each round, after its result was compared with torch's",
        "- torch: the same call on a Gloo group. direct: the best flat form on Gloo's own messages (all_gather by isend/irecv,",
        "  reduce_scatter as an all_to_all and a local sum, all_reduce as both)",
        "- ratio: the median over rounds of time / torch's time of the same round, with the quartiles in brackets",
    ]
    for cluster, sweep_s, rows in found:
        lines += ["", f"## {cluster.key}", ""]
        kind = "A sweep up to 1 MiB" if cluster.delay_us else "The default sweep of `commlayer measure`"
        lines += [f"{kind} took {sweep_s:.0f} s.", ""]
        lines += [
            "| collective | size | torch | wire limit / torch | way | plan | time | / torch | target | rounds | wrong |"
        ]
        lines += ["|---" * 11 + "|"]
        for row in rows:
            lines.append(line(cluster, row, rows))
    return "\n".join(lines) + "\n"


def line(cluster: Cluster, row: Row, rows: Sequence[Row]) -> str:
    base = next(r for r in rows if (r.collective, r.size, r.way) == (row.collective, row.size, "torch"))
    is_large = row.size == 32 << 20 and row.way == "commlayer"
    target = TARGETS.get(row.collective, 1.05) if is_large else 1.05 if row.way == "commlayer" else None
    if cluster.delay_us and row.collective == "all_to_all" and row.way != "torch":
        target = 0.8
    cells = [
        row.collective,
        format_bytes(row.size),
        format_us(base.p50_us),
        f"{wire_limit_us(cluster, row.collective, row.size) / base.p50_us:.2f}" if row.size >= 1 << 20 else "",
        row.way,
        row.plan,
        format_us(row.p50_us),
        f"{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]",
        "" if target is None else f"≤ {target:.2f}",
        str(row.rounds),
        str(row.num_wrong),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()

"""The dispatch between nodes, flat, in two levels, by all_gather and as chosen, alternately in one run on emulated clusters.

Forward (counts, out, home) and both ways, from the exchange of counts on; the experts do nothing. Before it is timed every
kind is held against flat: two levels bring the experts the same rows bit for bit, and what comes home differs by rounding only.
Each time is that of the slowest rank, each ratio of one round.

``python benchmarks/dispatch_levels.py [--cluster 2x4] [--tokens 256] [--top-k 8] [--rounds 9] [--profiles DIR] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from common import facts, measure_links, today
from dispatch_step import DispatchStep, dispatch_step
from moe_tables import Spread, ratios, spread, table

import commlayer.backend.new_groups  # noqa: F401  # before the fork: ranks then start in milliseconds
from commlayer.collectives import GroupCommunicator
from commlayer.emulation import EmulatedCluster
from commlayer.integrations import FoldedMesh
from commlayer.integrations.moe.dispatcher import TokenDispatcher
from commlayer.measure.profiler import SweepOptions
from commlayer.scheduler.rails import distinct_nodes

KINDS = ("all_to_all", "two_level", "all_gather", "auto")
INTER = "400mbit"
_SWEEP = SweepOptions(min_bytes=4096, max_bytes=8 << 20, factor=4.0, group_max_bytes=16 << 20, longest_us=1e6)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Shape:
    """The call: ``tokens`` of each rank."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """One call on one cluster. Times in ms; ``predicted_ms`` of all kinds and ``chosen``: of ``auto``. ``over_flat``: of both
    ways."""

    cluster: str
    shape: Shape
    rounds: int
    predicted_ms: dict[str, float]
    chosen: str
    forward_ms: dict[str, Spread]
    both_ms: dict[str, Spread]
    over_flat: dict[str, Spread]
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", metavar="NxL", help="nodes x ranks on each (2x4 and 4x2)")
    parser.add_argument("--tokens", type=int, action="append", help="of each rank (256, 512 and 1024)")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds for the rounds of one call")
    parser.add_argument("--inter", default=INTER, help="rate of each node's link")
    parser.add_argument(
        "--profile",
        choices=("sweep", "auto"),
        default="sweep",
        help="choose by a sweep like that of `commlayer measure` (default), or by the short probe that a job makes by itself",
    )
    parser.add_argument(
        "--profiles", type=Path, metavar="DIR", help="keep the clusters' profiles here, and take those there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    options, load, rows = parser.parse_args(), os.getloadavg()[0], []
    shapes = [
        Shape(tokens, options.experts, options.top_k, options.hidden, options.dtype)
        for tokens in options.tokens or (256, 512, 1024)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cluster or ("2x4", "4x2"):
            rows += _on_cluster(name, shapes, options, options.profiles or Path(folder))
    about = facts("dispatch_levels.py", load)
    print(_document(about, rows))
    if options.json:
        options.json.write_text(
            json.dumps({"date": today(), "facts": about, "rows": list(map(asdict, rows))}, indent=1), encoding="utf-8"
        )


def _on_cluster(name: str, shapes: Sequence[Shape], options: argparse.Namespace, folder: Path) -> list[Row]:
    nodes, width = map(int, name.split("x"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["COMMLAYER_CACHE"] = str(folder)
    profile = "auto" if options.profile == "auto" else str(folder / f"{name}-{options.inter}.json")
    if options.profile == "sweep" and not Path(profile).exists():
        with EmulatedCluster(nodes, width, inter=options.inter, mode="netns") as cluster:
            took_s = cluster.run(measure_links, profile, "benchmarks/dispatch_levels.py", _SWEEP, timeout_s=300)[0]
        print(f"links of {name} measured in {took_s:.0f} s", flush=True)
    with EmulatedCluster(nodes, width, inter=options.inter, mode="netns") as cluster:
        given = (name, shapes, profile, options.rounds, options.budget)
        timeout_s = len(shapes) * (3 * options.budget + 120)
        found: list[Row] = cluster.run(_on_rank, *given, timeout_s=timeout_s)[0]
    return found


def _on_rank(name: str, shapes: Sequence[Shape], profile: str, rounds: int, budget_s: float) -> list[Row]:
    os.environ["COMMLAYER_PROFILE"] = profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = FoldedMesh({"ep": dist.get_world_size()}, backend="commlayer")
    rows = []
    for shape in shapes:
        rows.append(_Comparison(GroupCommunicator(mesh.group("ep"), "ep"), shape).row(name, rounds, budget_s))
        if dist.get_rank() == 0:
            print(f"{name}, {shape.tokens} tokens: {rows[-1].chosen} {rows[-1].over_flat['auto']}", flush=True)
    return rows


class _Comparison:
    """All kinds of one call."""

    def __init__(self, ep: GroupCommunicator, shape: Shape) -> None:
        self.shape, dtype = shape, getattr(torch, shape.dtype)
        self.dispatchers = {kind: TokenDispatcher(shape.experts, ep=ep, kind=kind, chunks=1) for kind in KINDS}
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype)
        top, self.indices = torch.rand(shape.tokens, shape.experts, generator=generator).topk(shape.top_k)
        self.weights = top / top.sum(1, keepdim=True)

    def step(self, kind: str) -> DispatchStep:
        """One call, there and back; times of the slowest rank."""
        return dispatch_step(self.dispatchers[kind], self.x, self.indices, self.weights)

    def row(self, cluster: str, rounds: int, budget_s: float) -> Row:
        error = self._checked()
        decision = self.dispatchers["auto"].decision
        assert decision is not None  # made by the checks
        forward: dict[str, list[float]] = {kind: [] for kind in KINDS}
        both: dict[str, list[float]] = {kind: [] for kind in KINDS}
        chooser, order, began, goes_on = random.Random(self.shape.tokens), list(KINDS), time.perf_counter(), True
        while goes_on and len(both["auto"]) < rounds:
            chooser.shuffle(order)  # the same on all ranks
            for kind in order:
                step = self.step(kind)
                forward[kind].append(step.forward_ms)
                both[kind].append(step.both_ms)
            spent = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            goes_on = float(spent) < budget_s
        return Row(
            cluster,
            self.shape,
            len(both["auto"]),
            {kind: us / 1e3 for kind, us in decision.kinds_us.items()},
            decision.kind,
            {kind: spread(each) for kind, each in forward.items()},
            {kind: spread(each) for kind, each in both.items()},
            {kind: ratios(each, both["all_to_all"]) for kind, each in both.items()},
            error,
        )

    def _checked(self) -> float:
        """The largest difference of any kind's outputs and gradients from the tokens: the weights sum to 1, the experts do
        nothing. Raises RuntimeError where that is more than rounding, or two levels bring other rows than flat."""
        flat, found = self.step("all_to_all"), []
        for kind in KINDS[1:]:
            step = self.step(kind)
            if kind == "two_level" and not torch.equal(step.rows, flat.rows):
                raise RuntimeError("two levels bring other rows than flat")
            found.append(max(float((each - self.x).abs().max()) for each in (step.out, step.gradient)))
        worst = torch.tensor([max(found)])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if float(worst) > _TOLERANCE[self.x.dtype]:
            raise RuntimeError(f"{self.shape}: results differ from the tokens by {float(worst):.1e}")
        return float(worst)


def _document(about: dict[str, str], rows: Sequence[Row]) -> str:
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines.append("")
    head = ["cluster", "tokens a rank", "rows on rails / flat", "auto", "rounds"]
    head += [f"{kind}, ms" for kind in KINDS] + [f"{kind} / flat" for kind in KINDS[1:]]
    cells = []
    for row in rows:
        nodes, shape = int(row.cluster.split("x")[0]), row.shape
        fewer = distinct_nodes(shape.experts, nodes, shape.top_k) / shape.top_k
        line = [row.cluster, str(shape.tokens), f"{fewer:.2f}", row.chosen, str(row.rounds)]
        for kind in KINDS:
            guess = f" ({row.predicted_ms[kind]:.0f})" if kind in row.predicted_ms else ""
            line.append(f"{row.both_ms[kind].middle:.0f}{guess}")
        cells.append(line + [str(row.over_flat[kind]) for kind in KINDS[1:]])
    lines += [*table(head, cells), "", "Both ways; in brackets what was predicted, and the quartiles of ratios."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""``make bench-overlap``: the MoE layer where computation takes time but no core: each rank stands for an accelerator.

On 2 × 4 and 2 × 8 emulated ranks, 400 Mbit/s a node: forward and backward of the layer on plain calls in Megatron-Core's order,
planned and overlapped, each with EP over all ranks and inside each node. The accelerators' rate is such that the experts take as
long as the exchanges, or a quarter of that. All ways take turns in one run, after their results were compared; a
time is the slowest rank's, from a common start until its accelerator is done.

A step of a whole model is ``benchmarks/lanes_step.py --set compute=RATE``. Writes a dated document and JSON. Emulated: NOT a
measurement of accelerators; ratios say how much of the exchanges is hidden where computation leaves the cores alone.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, described, facts, measure_links, today, write_results
from moe_baseline import PlainMoE
from moe_tables import Spread, ratios, spread

from commlayer.emulation import DeviceReport, EmulatedCluster, await_device
from commlayer.emulation.accelerators.device_clock import device_clock
from commlayer.integrations import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.measure.profiler import SweepOptions
from commlayer.traces.recorder import close_recorder, recorder

INTER, SCALE = "400gbit", 1000.0
"""The rate of the cluster that is stood for. It runs a thousandth as fast: 400 Mbit/s a node."""
_CLUSTERS = {"2x4": (4, 2048), "2x8": (8, 1024)}
"""Ranks of each of two nodes, and tokens of each rank: a node sends as much."""
_SWEEP = SweepOptions(min_bytes=4096, max_bytes=16 << 20, factor=4.0, group_max_bytes=32 << 20, longest_us=1.5e6)
_TOLERANCE = 1e-4
_INSIDE = ", inside nodes"
WAYS = ("plain", "planned", f"plain{_INSIDE}", f"planned{_INSIDE}")
RATIOS = (
    ("planned", "plain"),
    ("planned, inside nodes", "planned"),
    ("planned, inside nodes", "plain"),
    ("plain, inside nodes", "plain"),
)
TARGETS = {("planned", "plain"): 0.65, ("planned, inside nodes", "planned"): 0.4}


@dataclass(frozen=True)
class Shape:
    """``width``: narrow, so that the real products take little of the cores; the accelerators' rate makes them last."""

    hidden: int = 512
    width: int = 64
    num_experts: int = 16
    top_k: int = 2

    def flops(self, tokens: int) -> float:
        """Count the FLOPs of a rank's experts, forward and backward, where all get as many rows."""
        return 18.0 * tokens * self.top_k * self.hidden * self.width


@dataclass(frozen=True)
class Result:
    """``share``: of the exchanges' time that experts take. ``times_s``: of each way's rounds. ``chosen``: the dispatcher's
    decision. ``reports``: what the accelerators did."""

    cluster: str
    tokens: int
    share: float
    compute: str
    exchange_s: float
    times_s: dict[str, list[float]]
    chosen: str
    error: float
    reports: list[DeviceReport]


# On every rank


def slowest(value: float) -> float:
    agreed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return float(agreed)


def exchanges(shape: Shape, tokens: int) -> float:
    """Seconds of the four exchanges of a layer alone, on plain calls."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sent = torch.randn(tokens * shape.top_k, shape.hidden)
    arrived, times = torch.empty_like(sent), []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(4):
            dist.all_to_all_single(arrived, sent)
        times.append(slowest(time.perf_counter() - begin))
    return min(times)  # what the wire takes


def note_operations() -> None:
    """Mark in the trace when the accelerator was busy; times of calls are in it anyway."""
    clock = device_clock()
    assert clock is not None  # of a rank that stands for one
    launched = clock.launched

    def noted(at: float, flops: float, num_bytes: float = 0.0) -> None:
        busy_until, lasts_s = clock.busy_until(), clock.device.seconds(flops, num_bytes)
        begin = max(at, busy_until or 0.0)
        launched(at, flops, num_bytes)
        recording = recorder()
        if recording is not None and lasts_s > 0:
            recording.mark("accelerator", int(begin * 1e9), int((begin + lasts_s) * 1e9))

    clock.launched = noted  # type: ignore[method-assign]


class _Layers:
    """On every rank; all of its methods are collective."""

    def __init__(self, shape: Shape, tokens: int, ranks_per_node: int, ways: Sequence[str]) -> None:
        self.ways = tuple(ways)
        self.layers: dict[str, MoELayer] = {}
        self.calls: dict[str, Any] = {}
        config = RouterConfig(num_experts=shape.num_experts, top_k=shape.top_k)
        for suffix, ep in (("", dist.get_world_size()), (_INSIDE, ranks_per_node)):
            if not any(way.endswith(_INSIDE) == bool(suffix) for way in ways):
                continue
            mesh = FoldedMesh({"ep": ep}, backend="commlayer")
            groups = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in mesh.mapping.groups("ep")}
            for way in ("plain", "planned"):
                layer = MoELayer(shape.hidden, shape.width, config, mesh=mesh)
                torch.nn.init.orthogonal_(
                    layer.router.weight, generator=torch.Generator().manual_seed(0)
                )  # loads alike
                plain = PlainMoE(layer, groups[mesh.ranks("ep")], shape.top_k)
                self.layers[way + suffix] = layer
                self.calls[way + suffix] = plain if way == "plain" else layer
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x, self.gradient = (torch.randn(tokens, shape.hidden, generator=generator) for _ in range(2))

    def step(self, way: str) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Seconds of the slowest rank; the output, and the gradient of the tokens."""
        self.layers[way].zero_grad()
        began_ns = time.perf_counter_ns()
        x = self.x.detach().requires_grad_()
        await_device()
        dist.barrier()
        begin = time.perf_counter()
        out = self.calls[way](x)
        out.backward(self.gradient)
        await_device()
        took_s = slowest(time.perf_counter() - begin)
        recording = recorder()
        if recording is not None:
            recording.mark(way, began_ns, time.perf_counter_ns())
        assert x.grad is not None  # after a backward pass
        return took_s, out.detach(), x.grad

    def compare(self) -> float:
        """The largest difference from the plain layer, of a tensor's largest magnitude; also each way's first calls."""
        expected = self.step(self.ways[0])[1:]
        worst = 0.0
        for way in self.ways:
            for _ in range(2 if way.startswith("planned") else 1):
                for mine, theirs in zip(self.step(way)[1:], expected, strict=True):
                    worst = max(worst, float((mine - theirs).abs().max() / theirs.abs().max()))
        worst = slowest(worst)
        if worst > _TOLERANCE:
            raise RuntimeError(f"ways differ by {worst:.1e} of a tensor's largest magnitude")
        return worst

    def rounds(self, number: int, budget_s: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {way: [] for way in self.ways}
        first = times[self.ways[0]]
        chooser, began = random.Random(0), time.perf_counter()
        while not first or (len(first) < number and slowest(time.perf_counter() - began) < budget_s):
            for way in chooser.sample(self.ways, len(self.ways)):  # the same on all ranks
                times[way].append(self.step(way)[0])
        return times


def on_rank(
    shape: Shape,
    tokens: int,
    ranks_per_node: int,
    profile: str,
    ways: Sequence[str],
    number: int,
    budget_s: float,
    trace: str,
) -> tuple[dict[str, list[float]], str, float]:
    os.environ["COMMLAYER_PROFILE"] = profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if trace:
        os.environ["COMMLAYER_TRACE"] = trace
        note_operations()
    layers = _Layers(shape, tokens, ranks_per_node, ways)
    error = layers.compare()
    times = layers.rounds(number, budget_s)
    close_recorder()  # ranks leave without atexit
    planned = [layers.layers[way] for way in ways if way.startswith("planned")]
    decision = planned[0].dispatcher.decision if planned else None
    return times, decision.name if decision is not None else "", error


# The program


def measure(
    cluster: str, shares: Sequence[float], ways: Sequence[str], number: int, budget_s: float, kept: str, trace: str = ""
) -> Iterator[Result]:
    """``kept``: the file of a measured profile of the cluster, measured first where it is not there; or ``auto``."""
    ranks, tokens = _CLUSTERS[cluster]
    shape = Shape()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMMLAYER_CACHE"] = folder  # what a job finds in its own may be of another day
        profile = kept if kept == "auto" else str(Path(kept or f"{folder}/profile.json").resolve())
        with EmulatedCluster(2, ranks, inter="400mbit", mode="netns") as emulated:
            if profile != "auto" and not Path(profile).exists():
                emulated.run(measure_links, profile, "make bench-overlap", _SWEEP, "overlap", timeout_s=600)
            exchange_s = emulated.run(exchanges, shape, tokens, timeout_s=120)[0]
        for share in shares:
            compute = f"{shape.flops(tokens) / (share * exchange_s) * SCALE / 1e9:.6g}gflops"
            with EmulatedCluster(2, ranks, inter=INTER, compute=compute, scale=SCALE, mode="netns") as emulated:
                print(f"{cluster}: each rank {emulated.accelerator}", flush=True)
                times, chosen, error = emulated.run(
                    on_rank, shape, tokens, ranks, profile, ways, number, budget_s, trace, timeout_s=4 * budget_s + 120
                )[0]
                reports = emulated.device_reports
            yield Result(cluster, tokens, share, compute, exchange_s, times, chosen, error, reports)


def measure_wires(cluster: str, path: Path) -> None:
    with EmulatedCluster(2, _CLUSTERS[cluster][0], inter="400mbit", mode="netns") as emulated:
        took_s = emulated.run(measure_links, str(path), "make bench-overlap", _SWEEP, "overlap", timeout_s=600)[0]
    print(f"{cluster}: {path}, measured in {took_s:.0f} s")


def ratio(result: Result, way: str, base: str) -> Spread:
    return ratios(result.times_s[way], result.times_s[base])


def document(known: dict[str, str], results: Sequence[Result]) -> str:
    shape = Shape()
    lines = [
        f"# The MoE layer on emulated accelerators, {today()}",
        "",
        "Emulated, NOT a measurement of accelerators: real processes and bytes, slowed wires, and products that last their FLOPs",
        f"over a declared rate. Rates are those of the cluster that is stood for; all runs {SCALE:g} times slower: {INTER} are",
        "400 Mbit/s. Ratios are of one round, with quartiles.",
        "",
        *[f"- {name}: {text}" for name, text in known.items()],
        f"- the layer: hidden {shape.hidden}, {shape.num_experts} experts of width {shape.width}, top-{shape.top_k}, FP32",
    ]
    for result in results:
        lines += [
            "",
            f"## {result.cluster}: experts take {result.share:g} of the exchanges' time",
            "",
            f"{result.tokens} tokens a rank; accelerators of {result.compute}; the four exchanges alone take "
            f"{result.exchange_s * 1e3:.0f} ms. Chosen: {result.chosen}. Ways differ by {result.error:.0e} at most. "
            f"{len(next(iter(result.times_s.values())))} rounds. {described(result.reports)}",
            "",
            "| way | time, ms |",
            "|---|---|",
            *(f"| {way} | {spread([1e3 * s for s in times])} |" for way, times in result.times_s.items()),
            "",
            "| ratio | measured | target |",
            "|---|---|---|",
        ]
        for way, base in [pair for pair in RATIOS if set(pair) <= set(result.times_s)]:
            target = f"{TARGETS[way, base]:g}" if (way, base) in TARGETS else ""
            lines.append(f"| {way} / {base} | **{ratio(result, way, base)}** | {target} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", choices=_CLUSTERS, help="only this one; may be given again")
    parser.add_argument("--share", action="append", type=float, help="experts' time over the exchanges' (1 and 0.25)")
    parser.add_argument(
        "--profile",
        default="",
        help="file of a measured profile of the cluster, measured first where it is not there; or auto: what a job measures",
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be given again")
    parser.add_argument(
        "--links-only", action="store_true", help="measure the links into the file of --profile, and stop"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="record calls and accelerators; take no times then")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=120.0, help="of the rounds of each share (120)")
    add_output(parser)
    options = parser.parse_args()
    stem, known, results = dated_stem(options.output, "overlap"), facts("overlap.py", os.getloadavg()[0]), []
    trace = "" if options.trace is None else str(options.trace.resolve())
    for cluster in options.cluster or _CLUSTERS:
        shares, ways = options.share or (1.0, 0.25), options.way or WAYS
        if options.links_only:
            measure_wires(cluster, Path(options.profile).resolve())
            continue
        for result in measure(cluster, shares, ways, options.rounds, options.budget_s, options.profile, trace):
            results.append(result)
            found = {"date": today(), "facts": known, "results": [asdict(each) for each in results]}
            write_results(stem, found, document(known, results))
    if results:
        print(stem.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")  # on_rank names its own
    main()

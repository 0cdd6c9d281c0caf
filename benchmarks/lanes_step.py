"""A whole training step of a small MoE model on an emulated cluster: lanes and overlap against plain torch.distributed.

EP between nodes, data-parallel gradients between nodes, CP 2, two micro-batches; on 2 × 8 ranks a pipeline of two stages inside
the nodes. On 2 × 4 there is one stage: with two, a stage has two ranks on each node, and a profile knows groups that have all
ranks of their nodes, or one of each; what it does not know goes flat. (``--set pp=2 --set ep=4`` does so all the same.)
The ways, which take turns in one run after their losses and gradients were compared:

plain: the same model on Gloo's groups. Flat calls, send and recv, gradients summed after the backward pass.
after: planned groups, gradients summed after the backward pass.
lanes off: planned groups, gradients in buckets beside the backward pass; who comes first is served first.
lanes on: the same on lanes: ep before pp before cp before dp.

Writes a dated document and JSON. With --quick a few rounds of a smaller model: whether it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, described, facts, measure_links, today, write_results
from moe_tables import ratios

from commlayer.collectives import GroupCommunicator
from commlayer.emulation import DeviceReport, EmulatedCluster, await_device
from commlayer.engine.lane_holds import lanes
from commlayer.integrations.gradients import synchronise_gradients
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.measure.profiler import SweepOptions
from commlayer.scheduler.mapping.folded import AXES, FoldedMapping
from commlayer.statistics import reset_stats, stats
from examples.language_model import ModelConfig, MoELanguageModel

WAYS = ("plain", "after", "lanes off", "lanes on")
RATIOS = (("lanes on", "plain"), ("lanes on", "lanes off"), ("lanes off", "after"), ("after", "plain"))
_TOLERANCE = 1e-3
"""The tolerance, as a part of a gradient's largest magnitude: FP32, summed in other orders."""
_CLUSTERS: dict[str, tuple[int, dict[str, Any]]] = {"2x4": (4, {}), "2x8": (8, {"pp": 2})}
"""Ranks of each node, and what differs from the shape's own values."""
_SWEEP = SweepOptions(min_bytes=4096, max_bytes=16 << 20, factor=4.0, group_max_bytes=32 << 20, longest_us=3e6)


@dataclass(frozen=True)
class Shape:
    """``shared_width`` makes most of the dense gradients; ``sequence`` · ``batch`` tokens on all ranks together. ``plan``: of all
    planned calls, as COMMLAYER_PLAN; else what the profile says. ``compute``: of the accelerator that each rank stands for, such
    as 3gflops; else ranks compute as fast as their share of the machine's cores. ``chunks``: of the experts' exchange on
    planned groups; 0: as the planner says; 1: nothing but products for weights hides it."""

    inter: str = "200mbit"
    compute: str = ""
    plan: str = ""
    pp: int = 1
    cp: int = 2
    ep: int = 8
    hidden: int = 256
    num_layers: int = 4
    width: int = 256
    shared_width: int = 2048
    num_experts: int = 8
    sequence: int = 128
    batch: int = 8
    num_micro_batches: int = 2
    bucket_mib: float = 4.0
    chunks: int = 0

    def mapping(self, world_size: int) -> FoldedMapping:
        """The pipeline innermost, so that its messages stay inside a node; EP and DP outermost, so that both cross."""
        return FoldedMapping(
            world_size,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            attention_order="pp-tp-cp-dp",
            moe_order="pp-etp-edp-ep",
        )

    def model(self, *, is_plain: bool, overlaps: bool) -> ModelConfig:
        return ModelConfig(
            router=RouterConfig(num_experts=self.num_experts, top_k=2),
            hidden=self.hidden,
            num_layers=self.num_layers,
            width=self.width,
            shared_width=self.shared_width,
            dispatch="all_to_all" if is_plain else "auto",
            chunks=1 if is_plain else self.chunks or "auto",
            overlap_gradients=overlaps,
            bucket_bytes=int(self.bucket_mib * (1 << 20)),
            seed=1,
        )


@dataclass(frozen=True)
class Result:
    """``times_s``: of each way's rounds, the slowest rank's. ``error``: the largest difference of losses and gradients between
    ways, of a tensor's largest magnitude. ``held``: how often, and how many seconds, rank 0's gradients were held in all rounds.
    ``calls``: what rank 0 called in one step on lanes: group, collective, plan, calls, bytes. ``reports``: what emulated
    accelerators did."""

    cluster: str
    shape: Shape
    mapping: str
    gradient_bytes: int
    times_s: dict[str, list[float]]
    error: float
    held: tuple[int, float]
    calls: list[tuple[str, str, str, int, int]]
    reports: list[DeviceReport] = field(default_factory=list)


# On every rank


def set_lanes(mesh: FoldedMesh, lane_of_group: dict[Any, str], on: bool) -> None:
    """All groups of ``mesh`` on their lanes, or on none: then nothing is cut into smaller chunks nor held."""
    lanes().is_on = on
    for group, lane in lane_of_group.items():
        group.use_lane(lane if on else "")


def lanes_of(mesh: FoldedMesh) -> dict[Any, str]:
    groups: list[Any] = [mesh.group(axis) for axis in AXES]
    return {group: group.lane for group in groups if group.size() > 1}


def plain_pipeline(
    stage: Callable[[int, torch.Tensor | None], torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """GPipe on send and recv, each waited for where it stands."""
    rank, size = group.rank(), group.size()
    inputs: list[torch.Tensor | None] = []
    outputs = []
    for m, shape in enumerate(shapes):
        x = torch.empty(*shape) if rank else None
        if x is not None:
            dist.recv(x, group=group, group_src=rank - 1)
        inputs.append(None if x is None else x.requires_grad_())
        outputs.append(stage(m, inputs[-1]))
        if rank < size - 1:
            dist.send(outputs[-1].detach(), group=group, group_dst=rank + 1)
    for x, y in zip(inputs, outputs, strict=True):
        gradient = torch.empty_like(y) if rank < size - 1 else None
        if gradient is not None:
            dist.recv(gradient, group=group, group_src=rank + 1)
        torch.autograd.backward(y, gradient)
        if x is not None and x.grad is not None:
            dist.send(x.grad, group=group, group_dst=rank - 1)
    return [y.detach() for y in outputs] if rank == size - 1 else []


def plain_step(
    model: MoELanguageModel, tokens: torch.Tensor, labels: torch.Tensor, num_micro_batches: int
) -> torch.Tensor:
    """The computation of ``train_step``, with :func:`plain_pipeline`, and gradients at the end."""
    assert model.mesh is not None
    losses = plain_pipeline(*model.pipeline_stage(tokens, labels, num_micro_batches), model.mesh.group("pp"))
    synchronise_gradients(model, model.mesh)
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(loss, group=model.mesh.group("world"))
    return loss


class _Bench:
    """On every rank; all of its methods are collective."""

    def __init__(self, shape: Shape, ways: Sequence[str]) -> None:
        self.ways = tuple(ways)
        GroupCommunicator.backends = ("commlayer", "gloo")
        self.shape = shape
        mapping = shape.mapping(dist.get_world_size())
        self.meshes = {name: FoldedMesh(mapping, backend=name) for name in ("gloo", "commlayer")}
        ours = self.meshes["commlayer"]
        on_lanes = MoELanguageModel(shape.model(is_plain=False, overlaps=True), ours)
        self.models = {
            "plain": MoELanguageModel(shape.model(is_plain=True, overlaps=False), self.meshes["gloo"]),
            "after": MoELanguageModel(shape.model(is_plain=False, overlaps=False), ours),
            "lanes off": on_lanes,
            "lanes on": on_lanes,
        }
        rate = 1e-6  # the step is made, and routing stays what it was
        self.optimizers = {name: torch.optim.SGD(model.parameters(), lr=rate) for name, model in self.models.items()}
        generator = torch.Generator().manual_seed(3)
        batch = torch.randint(256, (shape.sequence + 1, shape.batch), generator=generator)
        self.tokens, self.labels = batch[:-1], batch[1:]
        self.lanes_of_groups = lanes_of(ours)

    def step(self, way: str) -> torch.Tensor:
        model, optimizer, number = self.models[way], self.optimizers[way], self.shape.num_micro_batches
        optimizer.zero_grad()
        if way == "plain":
            loss = plain_step(model, self.tokens, self.labels, number)
        else:
            loss = model.train_step(self.tokens, self.labels, num_micro_batches=number)
        optimizer.step()
        return loss

    def timed(self, way: str) -> float:
        """Seconds of the slowest rank."""
        if way != "plain":
            set_lanes(self.meshes["commlayer"], self.lanes_of_groups, way == "lanes on")
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        self.step(way)
        await_device()
        return self.slowest(time.perf_counter() - begin)

    def slowest(self, value: float) -> float:
        agreed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed)

    def compare(self) -> float:
        """The largest error between ways; raises RuntimeError, on all ranks, where it is too large. Each way's first steps."""
        found: dict[str, list[torch.Tensor]] = {}
        for way in self.ways:
            self.timed(way)
            gradients = [parameter.grad for parameter in self.models[way].parameters()]
            found[way] = [self.step(way).view(1), *(gradient.clone() for gradient in gradients if gradient is not None)]
        worst = 0.0
        for way in self.ways[1:]:
            for mine, plain in zip(found[way], found[self.ways[0]], strict=True):
                worst = max(worst, float((mine - plain).abs().max() / plain.abs().max().clamp(min=1e-20)))
        worst = self.slowest(worst)
        if worst > _TOLERANCE:
            raise RuntimeError(f"ways differ by {worst:.1e} of a tensor's largest magnitude")
        return worst

    def rounds(self, number: int, budget_s: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {way: [] for way in self.ways}
        first = times[self.ways[0]]
        chooser, began = random.Random(0), time.perf_counter()
        while not first or (len(first) < number and self.slowest(time.perf_counter() - began) < budget_s):
            for way in chooser.sample(self.ways, len(self.ways)):  # the same on all ranks
                times[way].append(self.timed(way))
        return times

    def calls(self) -> list[tuple[str, str, str, int, int]]:
        reset_stats()
        self.timed("lanes on")
        return [
            (group["description"], call["collective"], call["plan"], call["calls"], call["logical_bytes"])
            for group in stats()["groups"]
            for call in group["calls"]
        ]


def on_rank(cluster: str, shape: Shape, profile: str, ways: Sequence[str], number: int, budget_s: float) -> Result:
    os.environ["COMMLAYER_PROFILE"] = profile
    if shape.plan:
        os.environ["COMMLAYER_PLAN"] = shape.plan
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = _Bench(shape, ways)
    error = bench.compare()
    held = lanes().held[-1]
    before = held.times, held.seconds
    times = bench.rounds(number, budget_s)
    after = held.times - before[0], held.seconds - before[1]
    size = sum(p.nbytes for p in bench.models["plain"].parameters())
    return Result(cluster, shape, str(shape.mapping(dist.get_world_size())), size, times, error, after, bench.calls())


# The program


def measure(
    cluster: str, shape: Shape, profile: Path | None, ways: Sequence[str], number: int, budget_s: float
) -> Result:
    """``profile`` None, or a file that is not there yet: the links are measured first."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, compute = _CLUSTERS[cluster][0], shape.compute or None
        with EmulatedCluster(2, ranks, inter=shape.inter, compute=compute, mode="netns") as emulated:
            profile = Path(folder) / "profile.json" if profile is None else profile.resolve()
            if not profile.exists():
                emulated.run(
                    measure_links, str(profile), "benchmarks/lanes_step.py", _SWEEP, "lanes-step", timeout_s=900
                )
            found: Result = emulated.run(
                on_rank, cluster, shape, str(profile), ways, number, budget_s, timeout_s=4 * budget_s + 300
            )[0]
            reports = emulated.device_reports
        return replace(found, reports=reports)


def measure_wires(cluster: str, shape: Shape, path: Path) -> None:
    with EmulatedCluster(2, _CLUSTERS[cluster][0], inter=shape.inter, mode="netns") as emulated:
        took_s = emulated.run(
            measure_links, str(path), "benchmarks/lanes_step.py", _SWEEP, "lanes-step", timeout_s=900
        )[0]
    print(f"{cluster}: {path}, measured in {took_s:.0f} s")


def document(date: str, known: dict[str, str], results: Sequence[Result]) -> str:
    lines = [f"# A training step on lanes, {date}", "", "Emulated: ratios say something, times do not.", ""]
    lines += [f"- {name}: {text}" for name, text in known.items()]
    for result in results:
        rounds = len(next(iter(result.times_s.values())))
        lines += [
            "",
            f"## {result.cluster}: {result.mapping}",
            "",
            f"{', '.join(f'{name} {value}' for name, value in asdict(result.shape).items() if value)}.",
            "",
            f"{rounds} rounds. Parameters of rank 0: {result.gradient_bytes / (1 << 20):.0f} MiB. Losses and gradients of all "
            f"ways differ by {result.error:.0e} of a tensor's largest magnitude at most. Gradients of rank 0 were held "
            f"{result.held[0]} times, {result.held[1] / rounds:.2f} s a round.",
            "",
            *([f"{described(result.reports)}", ""] if result.reports else []),
            "| way | median step, s |",
            "|---|---|",
            *(f"| {way} | {median(times):.2f} |" for way, times in result.times_s.items()),
            "",
            "| ratio | lower quartile | median | upper quartile |",
            "|---|---|---|---|",
        ]
        for way, base in [pair for pair in RATIOS if set(pair) <= set(result.times_s)]:
            ratio = ratios(result.times_s[way], result.times_s[base])
            lines.append(f"| {way} / {base} | {ratio.low:.3f} | **{ratio.middle:.3f}** | {ratio.high:.3f} |")
        lines += [
            "",
            "What rank 0 calls in a step on lanes:",
            "",
            "| group | call | plan | calls | MiB |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| {g} | {c} | {p} | {n} | {size / (1 << 20):.2f} |" for g, c, p, n, size in result.calls]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", choices=_CLUSTERS, help="only this one; may be given again")
    parser.add_argument(
        "--profile",
        type=Path,
        help="a measured profile of the cluster; measured first, and kept, where it is not there",
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be given again")
    parser.add_argument(
        "--links-only", action="store_true", help="measure the links into the file of --profile, and stop"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=240.0, help="of the rounds on one cluster (240)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of Shape: --set ep=2")
    parser.add_argument("--quick", action="store_true", help="two rounds of a smaller model, at 400 Mbit/s")
    add_output(parser, "--out")
    options = parser.parse_args()
    small: dict[str, Any] = {}
    if options.quick:
        small = {"inter": "400mbit", "shared_width": 512, "batch": 4, "sequence": 64}
    number = 2 if options.quick else options.rounds
    stem = dated_stem(options.out, "lanes-step")
    known = facts("lanes_step.py", os.getloadavg()[0])
    results = []
    for cluster in options.cluster or _CLUSTERS:
        shape = replace(Shape(), **small, **_CLUSTERS[cluster][1])
        for entry in options.set:
            name, _, value = entry.partition("=")
            shape = replace(shape, **{name: type(getattr(shape, name))(value)})
        if options.links_only:
            measure_wires(cluster, shape, options.profile.resolve())
            continue
        results.append(measure(cluster, shape, options.profile, options.way or WAYS, number, options.budget_s))
        found = {"date": today(), "facts": known, "results": [asdict(each) for each in results]}
        write_results(stem, found, document(today(), known, results))
    if results:
        print(stem.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")  # on_rank names its own
    main()

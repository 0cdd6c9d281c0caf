"""``make bench-micro-batches``: how much of the experts' exchange two micro-batches at a time hide, in a pipeline of two stages.

On eight emulated ranks that stand for accelerators: two stages, each on two nodes of its own, EP 4 over both (``--set
num_nodes=2``: both stages on the same two nodes, whose links they share). The ways take turns in one run, after their losses and
gradients were compared, bit by bit:

one by one: each micro-batch alone, tokens in one chunk: nothing of the exchange is hidden but behind products for weights.
two at a time: one's tokens travel while the other is computed (examples.pipeline_schedules).
without exchanges: the same computation one by one with all experts on each rank, which sends no token. Not compared.

What is hidden is the part by which two at a time are faster than one by one, of what one by one is slower than without exchanges,
counts among them. Of n micro-batches (n - 1) / (n + 1) can be hidden at most: one by one, the exchanges of n forward and backward
passes follow each other on the last stage, and those of one more while the first stage fills and drains the pipeline; what fills
and drains it has no partner on either stage. And an exchange runs beside one part of the other micro-batch, attention or experts:
where one of the two takes less time than an exchange, the rest of that is seen.

Writes a dated document and JSON. Emulated: NOT a measurement of accelerators.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, described, facts, today, write_results
from moe_tables import Spread, ratios, spread
from overlap import note_operations
from torch.utils.flop_counter import FlopCounterMode

from commlayer.emulation import DeviceReport, EmulatedCluster, await_device
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.router import RouterConfig
from commlayer.scheduler.mapping.folded import FoldedMapping
from commlayer.traces.recorder import close_recorder, recorder
from examples.language_model import ModelConfig, MoELanguageModel
from examples.pipeline_schedules import Schedule, run_overlapped_pipeline, run_pipeline

INTER_GBIT = 400.0
"""The rate of the cluster that is stood for."""
_WORLD, _STAGES, _EP = 8, 2, 4
WAYS = ("one by one", "two at a time", "without exchanges")
TARGET = 0.8


@dataclass(frozen=True)
class Shape:
    """``share``: of the exchanges' time that a rank computes. ``batch``: sequences of all ranks in each micro-batch.

    Attention and experts have as many FLOPs, because exchanges run beside either; the model is narrow, so that its real
    products leave the cores to Gloo.
    """

    schedule: Schedule = "1f1b"
    num_nodes: int = 4
    scale: float = 1000.0
    share: float = 2.0
    vocabulary: int = 64
    hidden: int = 128
    num_layers: int = 2
    num_kv_heads: int = 1
    width: int = 72
    num_experts: int = 8
    top_k: int = 2
    sequence: int = 64
    batch: int = 128
    num_micro_batches: int = 20

    @property
    def emulated_mbit(self) -> float:
        """The rate of a node's emulated link."""
        return 1000.0 * INTER_GBIT / self.scale

    @property
    def rows(self) -> int:
        """How many tokens of a micro-batch a rank has."""
        return self.sequence * self.batch // (_WORLD // _STAGES)

    @property
    def bound(self) -> float:
        """The most that 1F1B can hide of the exchange: what fills and drains a pipeline of two stages goes one by one."""
        n = self.num_micro_batches
        return (n - 1) / (n + 1)

    def mapping(self, ep: int) -> FoldedMapping:
        """EP over two nodes, and each stage on nodes of its own; where there are only two, stages innermost."""
        if self.num_nodes == 2:
            return FoldedMapping(_WORLD, pp=_STAGES, ep=ep, attention_order="pp-tp-cp-dp", moe_order="pp-etp-edp-ep")
        return FoldedMapping(_WORLD, pp=_STAGES, ep=ep, attention_order="tp-cp-dp-pp", moe_order="etp-edp-ep-pp")

    def config(self, *, at_once: bool) -> ModelConfig:
        return ModelConfig(
            router=RouterConfig(num_experts=self.num_experts, top_k=self.top_k),
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            width=self.width,
            chunks=1,
            dispatch="all_to_all",
            schedule=self.schedule,
            overlap_micro_batches=at_once,
            seed=1,
        )


@dataclass(frozen=True)
class Result:
    """``exchange_s``: of one exchange alone, of one stage. ``times_s``: of each way's rounds, the slowest
    rank's."""

    shape: Shape
    compute: str
    exchange_s: float
    times_s: dict[str, list[float]]
    reports: list[DeviceReport]

    @property
    def hidden(self) -> Spread:
        """The part of the exchange that two at a time hide."""
        one, two, without = (self.times_s[way] for way in WAYS)
        return ratios(
            [a - b for a, b in zip(one, two, strict=True)], [a - c for a, c in zip(one, without, strict=True)]
        )

    @property
    def of_bound(self) -> Spread:
        """The same as a part of what can be hidden."""
        one, two, without = (self.times_s[way] for way in WAYS)
        return ratios(
            [a - b for a, b in zip(one, two, strict=True)],
            [self.shape.bound * (a - c) for a, c in zip(one, without, strict=True)],
        )


# On every rank


def slowest(value: float) -> float:
    agreed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return float(agreed)


def one_exchange(shape: Shape) -> float:
    """Seconds of one all_to_all of a micro-batch's rows, which the ranks of one stage make while the others wait."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = shape.mapping(_EP).groups("ep")
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    group = next(made[ranks] for ranks in groups if dist.get_rank() in ranks)
    sent = torch.randn(shape.rows * shape.top_k, shape.hidden)
    arrived, times = torch.empty_like(sent), []
    for _ in range(4):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(8 if 0 in dist.get_process_group_ranks(group) else 0):
            dist.all_to_all_single(arrived, sent, group=group)
        times.append(slowest(time.perf_counter() - begin) / 8)
    return min(times)


class _Bench:
    """On every rank; all of its methods are collective."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        over = FoldedMesh(shape.mapping(_EP), backend="commlayer", separate=("etp_ep",))
        here = FoldedMesh(shape.mapping(1), backend="commlayer")
        self.models = {
            "one by one": MoELanguageModel(shape.config(at_once=False), over),
            "two at a time": MoELanguageModel(shape.config(at_once=True), over),
            "without exchanges": MoELanguageModel(shape.config(at_once=False), here),
        }
        generator = torch.Generator().manual_seed(3)
        size = (shape.sequence + 1, shape.batch * shape.num_micro_batches)
        batch = torch.randint(shape.vocabulary, size, generator=generator)
        self.tokens, self.labels = batch[:-1], batch[1:]

    def step(self, way: str) -> tuple[float, list[torch.Tensor]]:
        """Seconds of the slowest rank; losses and gradients. Gradients are not summed over ranks."""
        model, number = self.models[way], self.shape.num_micro_batches
        model.zero_grad()
        await_device()
        dist.barrier()
        begin = time.perf_counter()
        if model.config.overlap_micro_batches:
            parts, shapes = model.pipeline_parts(self.tokens, self.labels, number)
            losses = run_overlapped_pipeline(parts, model.pp, shapes, schedule=self.shape.schedule)
        else:
            stage, shapes = model.pipeline_stage(self.tokens, self.labels, number)
            losses = run_pipeline(stage, model.pp, shapes, schedule=self.shape.schedule)
        await_device()
        took_s = slowest(time.perf_counter() - begin)
        recording = recorder()
        if recording is not None:
            recording.mark(way, int(begin * 1e9), time.perf_counter_ns())
        return took_s, [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]

    def compare(self) -> None:
        """Raises RuntimeError, on all ranks, where two at a time have not the bits of one by one. Each way's first steps."""
        found = {way: self.step(way)[1] for way in WAYS}
        pairs = zip(found["one by one"], found["two at a time"], strict=True)
        if slowest(float(not all(torch.equal(mine, theirs) for mine, theirs in pairs))):
            raise RuntimeError("losses or gradients differ between one micro-batch and two at a time")

    def rounds(self, number: int, budget_s: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        first = times[WAYS[0]]
        chooser, began = random.Random(0), time.perf_counter()
        while not first or (len(first) < number and slowest(time.perf_counter() - began) < budget_s):
            for way in chooser.sample(WAYS, len(WAYS)):  # the same on all ranks
                times[way].append(self.step(way)[0])
        return times


def on_rank(shape: Shape, number: int, budget_s: float, trace: str) -> dict[str, list[float]]:
    os.environ["COMMLAYER_PROFILE"] = (
        "none"  # every call is the backend's own: what overlaps is looked at, not what is planned
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if trace:
        os.environ["COMMLAYER_TRACE"] = trace
        note_operations()
    bench = _Bench(shape)
    bench.compare()
    times = bench.rounds(number, budget_s)
    close_recorder()  # ranks leave without atexit
    return times


# The program


def flops_of_rank(shape: Shape) -> float:
    """Count the FLOPs of a step, forward and backward, of each rank's share: on a model that is whole, for one sequence."""
    model = MoELanguageModel(shape.config(at_once=False))
    tokens = torch.randint(shape.vocabulary, (shape.sequence, 1), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model.train_step(tokens, tokens)
    return float(counter.get_total_flops()) * shape.batch * shape.num_micro_batches / _WORLD


def measure(shape: Shape, number: int, budget_s: float, trace: str = "") -> Result:
    size = shape.num_nodes, _WORLD // shape.num_nodes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMMLAYER_CACHE"] = folder
        with EmulatedCluster(*size, inter=f"{shape.emulated_mbit:g}mbit", mode="netns") as emulated:
            exchange_s = emulated.run(one_exchange, shape, timeout_s=120)[0]
        exchanges = 4 * shape.num_layers // _STAGES * shape.num_micro_batches
        rate = flops_of_rank(shape) / (shape.share * exchanges * exchange_s) * shape.scale
        compute = f"{rate / 1e9:.6g}gflops"
        with EmulatedCluster(
            *size, inter=f"{INTER_GBIT:g}gbit", compute=compute, scale=shape.scale, mode="netns"
        ) as emulated:
            print(f"each rank {emulated.accelerator}; an exchange alone takes {exchange_s * 1e3:.0f} ms", flush=True)
            times = emulated.run(on_rank, shape, number, budget_s, trace, timeout_s=4 * budget_s + 120)[0]
            reports = emulated.device_reports
    return Result(shape, compute, exchange_s, times, reports)


def bounded(result: Result) -> str:
    """The share of the most that can be hidden, under the schedule for which that is known."""
    if result.shape.schedule != "1f1b":
        return ""
    n = result.shape.num_micro_batches
    return f", {result.of_bound} of the {result.shape.bound:.3f} that can be hidden of {n} micro-batches"


def document(known: dict[str, str], results: Sequence[Result]) -> str:
    lines = [
        f"# Two micro-batches at a time, {today()}",
        "",
        "Emulated, NOT a measurement of accelerators: real processes and bytes, slowed wires, and products that last their FLOPs",
        f"over a declared rate. Links and products are slowed by one scale; {INTER_GBIT:g} Gbit/s a node are stood for.",
        "Eight ranks, two stages, EP 4 over two nodes; calls are flat. Losses and gradients have the same bits both ways.",
        "",
        *[f"- {name}: {text}" for name, text in known.items()],
    ]
    for result in results:
        lines += [
            "",
            f"## {result.shape.schedule}: computation takes {result.shape.share:g} of the exchanges' time",
            "",
            f"{', '.join(f'{name} {value}' for name, value in asdict(result.shape).items())}.",
            "",
            f"Accelerators of {result.compute}; an exchange of a micro-batch alone takes {result.exchange_s * 1e3:.0f} ms. "
            f"{len(result.times_s[WAYS[0]])} rounds. {described(result.reports)}",
            "",
            "| way | step, ms |",
            "|---|---|",
            *(f"| {way} | {spread([1e3 * s for s in times])} |" for way, times in result.times_s.items()),
            "",
            f"Hidden of the exchange: **{result.hidden}** (target {TARGET:g}){bounded(result)}; two at a time / one by one "
            f"{ratios(result.times_s[WAYS[1]], result.times_s[WAYS[0]])}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule", action="append", choices=("gpipe", "1f1b"), help="only this one; may be given again"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="record calls and accelerators; take no times then")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=120.0, help="of the rounds of each schedule (120)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a field of Shape: --set share=2"
    )
    add_output(parser)
    options = parser.parse_args()
    shape = Shape()
    for entry in options.set:
        name, _, value = entry.partition("=")
        changed: dict[str, Any] = {name: type(getattr(shape, name))(value)}
        shape = replace(shape, **changed)
    stem, known = dated_stem(options.output, "micro-batches"), facts("micro_batches.py", os.getloadavg()[0])
    results, trace = [], "" if options.trace is None else str(options.trace.resolve())
    for schedule in options.schedule or ("1f1b", "gpipe"):
        results.append(measure(replace(shape, schedule=schedule), options.rounds, options.budget_s, trace))
        found = {"date": today(), "facts": known, "results": [asdict(each) for each in results]}
        write_results(stem, found, document(known, results))
    print(stem.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")
    main()

"""``make bench-placement-steps``: the MoE layer under skewed routing, with its experts placed in several ways.

On 2 × 4 and 2 × 8 emulated ranks, 400 Mbit/s a node, each rank standing for an accelerator (docs/emulation.md): forward
and backward of the layer with experts in order (static), by EPLB's placement of the same slots, by our decision (ours),
which knows the load, the measured profile and the measured experts; with experts in order that spill in every step by
LLEP's rule and its authors' thresholds (llep), or where it is predicted to pay (priced); by our decision with what
then still pays to spill (spill); and by the decision that compares all of these, and spills where it says so (chosen).
Loads: even, Zipf 1.0, and what the router of a small model did in training. Experts take as long as the exchanges where
loads are even. All ways take turns in one run, after their results were compared; a time is the slowest rank's, from a
common start until its accelerator is done, with the sums of copies' gradients. What each step was predicted to take is held
against it.

Writes a dated document and JSON. Emulated: NOT a measurement of accelerators. Losses while experts move are compared by
``make bench-placement-losses``.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import add_output, dated_stem, described, facts, measure_links, today, write_results
from moe_tables import Spread, ratios, spread
from overlap import Shape, exchanges, slowest
from torch import nn

from commlayer.emulation import DeviceReport, EmulatedCluster, await_device
from commlayer.integrations import FoldedMesh, GroupedExperts, MoELayer, RouterConfig, Routing, sum_replica_gradients
from commlayer.integrations.moe.placement_rounds import measured_work
from commlayer.measure.profiler import SweepOptions
from commlayer.profiles.profile import read_profile
from commlayer.scheduler.placement.eplb import eplb_placement
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.placement_price import LayerLoad, LayerPrice, PlacementPrices
from commlayer.scheduler.placement.placing import PlacementRoom, place_layer
from commlayer.scheduler.placement.spilling import Spilling
from examples.language_model import ModelConfig, MoELanguageModel
from examples.text import Corpus

INTER, SCALE = "400gbit", 1000.0
_CLUSTERS = {"2x4": (4, 768), "2x8": (8, 384)}
"""Ranks of each of two nodes, and tokens of each rank."""
_SWEEP = SweepOptions(min_bytes=4096, max_bytes=16 << 20, factor=4.0, group_max_bytes=32 << 20, longest_us=1.5e6)
_TOLERANCE = 1e-4
_HORIZON = 1000
_CALLS_FOR_DECISIONS = 5
"""So many calls of the layer that spills by prices say how long its decisions take."""
WAYS = ("static", "eplb", "ours", "llep", "priced", "spill", "chosen")
LOADS = ("even", "zipf 1.0", "recorded")
TARGETS = {
    (way, base): target
    for way in ("ours", "priced", "spill", "chosen")
    for base, target in (("static", 0.7), ("eplb", 0.9), ("llep", 0.95))
}
_COMPARED = (
    *TARGETS,
    ("chosen", "ours"),
    ("chosen", "priced"),
    ("spill", "ours"),
    ("llep", "static"),
    ("eplb", "static"),
)
EVEN_TARGET, PREDICTION_TARGET = 1.02, 0.1


@dataclass(frozen=True)
class PlacedShape(Shape):
    """``spare``: slots of each rank beside those of its own experts."""

    num_experts: int = 32
    spare: int = 1


@dataclass(frozen=True)
class Result:
    """``busiest``: the busiest rank's rows over the mean, by way. ``times_s``: of each way's rounds. ``predicted_s``: of a step.
    ``reasons``: of our decision among placements (ours), and among placements and spilling (chosen). ``spilled``: what spilled in
    a step, by way."""

    cluster: str
    load: str
    tokens: int
    compute: str
    busiest: dict[str, float]
    times_s: dict[str, list[float]]
    predicted_s: dict[str, float]
    kinds: dict[str, str]
    reasons: dict[str, str]
    spilled: dict[str, str]
    error: float
    reports: list[DeviceReport]


# On every rank


class FixedRouting(nn.Module):
    """A router whose choices are drawn once: experts by their popularity, without one twice for a token."""

    def __init__(self, config: RouterConfig, popularity: Sequence[float], tokens: int) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        gumbel = -(-torch.rand(tokens, len(popularity), generator=generator).clamp_min(1e-12).log()).log()
        keys = torch.tensor(popularity).clamp_min(1e-9).log() + gumbel
        self.indices = keys.topk(config.top_k).indices
        self.weights = torch.full(self.indices.shape, 1.0 / config.top_k)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> Routing:
        return Routing.of(self.indices, self.weights, self.config.num_experts)


def placed_layer(
    shape: PlacedShape,
    mesh: FoldedMesh,
    router: FixedRouting,
    placement: ExpertPlacement | None,
    spilling: Spilling | None = None,
) -> MoELayer:
    """The layer with its experts so, or in order; the same weights."""
    layer = MoELayer(
        shape.hidden, shape.width, router.config, mesh=mesh, spare_slots=shape.spare, chunks=1, spilling=spilling
    )
    layer.router = router  # type: ignore[assignment]  # it is called, and has a configuration
    slots = layer.dispatcher.slots
    assert slots is not None  # spare_slots were given
    if placement is not None:
        slots.move_to(placement)
        layer.experts = GroupedExperts(shape.hidden, shape.width, slots=slots)
    return layer


class _Layers:
    """On every rank; all of its methods are collective."""

    def __init__(self, shape: PlacedShape, tokens: int, popularity: Sequence[float], profile: str) -> None:
        mesh = FoldedMesh({"ep": dist.get_world_size()}, backend="commlayer")
        config = RouterConfig(num_experts=shape.num_experts, top_k=shape.top_k)
        router = FixedRouting(config, popularity, tokens)
        counts = torch.bincount(router.indices.flatten(), minlength=shape.num_experts)
        dist.all_reduce(counts)
        self.load = load = LayerLoad(counts.numpy(), shape.top_k)
        static = placed_layer(shape, mesh, router, None)
        assert static.dispatcher.slots is not None
        before = static.dispatcher.slots.placement
        work = measured_work(static, tokens=tokens * dist.get_world_size())
        self.prices = prices = PlacementPrices(read_profile(profile), work)
        by_price = Spilling("priced", profile=prices.times.profile, work=work)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x, self.gradient = (torch.randn(tokens, shape.hidden, generator=generator) for _ in range(2))
        priced = placed_layer(shape, mesh, router, before, by_price)
        assert priced.dispatcher.spiller is not None  # as it was made
        with torch.no_grad():
            for _ in range(_CALLS_FOR_DECISIONS):
                priced(self.x)
        rooms = (
            PlacementRoom(may_spill=False),
            PlacementRoom(decision_us=slowest(priced.dispatcher.spiller.decision_us)),
        )
        eplb = eplb_placement(load.counts, before.slots.size, before.num_ranks, num_nodes=prices.times.num_nodes)
        decision, chosen = (place_layer(load, prices, before, _HORIZON, room) for room in rooms)
        ours = decision.placement
        placements = {"static": before, "eplb": eplb.owned_as(before), "ours": ours}
        placements |= {"llep": before, "priced": before, "spill": ours, "chosen": chosen.placement}
        spilling = {"llep": Spilling("llep"), "priced": by_price, "spill": by_price}
        if chosen.spilled:  # as an ExpertPlacer turns it on
            spilling["chosen"] = by_price
        self.layers = {
            way: placed_layer(shape, mesh, router, placement, spilling.get(way))
            for way, placement in placements.items()
        }
        self.decision_us = rooms[1].decision_us
        self.reasons = {"ours": decision.reason(), "chosen": chosen.reason()}

    def predicted(self, way: str) -> LayerPrice:
        """Predict a step, with what spilled in the latest one."""
        dispatcher = self.layers[way].dispatcher
        assert dispatcher.slots is not None  # as above
        decision, counts = dispatcher.spill_decision, self.load.counts
        parts = () if decision is None else decision.parts
        spilled = tuple((*part[:3], part.rows / counts[part.expert]) for part in parts)
        step = self.prices.layer(self.load, dispatcher.slots.placement, spilled)
        decides = decision is not None and decision.rule == "priced"
        return replace(step, spill_us=step.spill_us + self.decision_us) if decides else step

    def spilled(self) -> dict[str, str]:
        """Describe, way by way, what spilled in the latest step."""
        decisions = {
            way: layer.dispatcher.spill_decision
            for way, layer in self.layers.items()
            if layer.dispatcher.spiller is not None
        }
        return {
            way: "nothing spills: the load is even" if each is None else each.reason()
            for way, each in decisions.items()
        }

    def step(self, way: str) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Seconds of the slowest rank; the output, and the gradient of the tokens."""
        layer = self.layers[way]
        layer.zero_grad()
        x = self.x.detach().requires_grad_()
        await_device()
        dist.barrier()
        begin = time.perf_counter()
        out = layer(x)
        out.backward(self.gradient)
        sum_replica_gradients(layer)
        await_device()
        took_s = slowest(time.perf_counter() - begin)
        assert x.grad is not None  # after a backward pass
        return took_s, out.detach(), x.grad

    def compare(self) -> float:
        """The largest difference from experts in order, of a tensor's largest magnitude; also each way's first calls."""
        expected, worst = self.step(WAYS[0])[1:], 0.0
        for way in (*WAYS, *WAYS):
            for mine, theirs in zip(self.step(way)[1:], expected, strict=True):
                worst = max(worst, float((mine - theirs).abs().max() / theirs.abs().max()))
        worst = slowest(worst)
        if worst > _TOLERANCE:
            raise RuntimeError(f"ways differ by {worst:.1e} of a tensor's largest magnitude")
        return worst

    def rounds(self, number: int, budget_s: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        chooser, began = random.Random(0), time.perf_counter()
        while not times[WAYS[0]] or (len(times[WAYS[0]]) < number and slowest(time.perf_counter() - began) < budget_s):
            for way in chooser.sample(WAYS, len(WAYS)):  # the same on all ranks
                times[way].append(self.step(way)[0])
        return times


def on_rank(
    shape: PlacedShape, tokens: int, popularity: Sequence[float], profile: str, number: int, budget_s: float
) -> dict[str, Any]:
    os.environ["COMMLAYER_PROFILE"] = profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = _Layers(shape, tokens, popularity, profile)
    error = layers.compare()
    times = layers.rounds(number, budget_s)
    decisions = {way: layer.dispatcher.decision for way, layer in layers.layers.items()}
    prices = {way: layers.predicted(way) for way in WAYS}
    return {
        "busiest": {way: price.busiest for way, price in prices.items()},
        "times_s": times,
        "predicted_s": {way: price.total_us / 1e6 for way, price in prices.items()},
        "kinds": {way: "" if each is None else each.name for way, each in decisions.items()},
        "reasons": layers.reasons,
        "spilled": layers.spilled(),
        "error": error,
    }


def record(shape: PlacedShape) -> list[float]:
    """The shares of a router's experts, most popular first, at the end of a short training without a balance loss."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": 4}) as mesh:
        router = RouterConfig(num_experts=shape.num_experts, top_k=shape.top_k)
        model = MoELanguageModel(ModelConfig(router=router, hidden=32, width=32, num_layers=1, num_heads=2), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        corpus, counts = Corpus.of(None), torch.zeros(shape.num_experts)
        (moe,) = (layer for layer in model.modules() if isinstance(layer, MoELayer))
        for step in range(60):
            optimizer.zero_grad()
            model.train_step(*corpus.batch(step, 64, 8))
            optimizer.step()
            if step >= 50 and moe.routing is not None:
                counts += moe.routing.counts
        dist.all_reduce(counts)
        return sorted((counts / counts.sum()).tolist(), reverse=True)


# The program


def measure(cluster: str, loads: Sequence[str], number: int, budget_s: float, kept: str) -> Iterator[Result]:
    """``kept``: the file of a measured profile of the cluster, measured first where it is not there."""
    ranks, tokens = _CLUSTERS[cluster]
    shape = PlacedShape()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMMLAYER_CACHE"] = folder
        profile = str(Path(kept or f"{folder}/profile.json").resolve())
        with EmulatedCluster(2, ranks, inter="400mbit", mode="netns") as emulated:
            if not Path(profile).exists():
                emulated.run(measure_links, profile, "make bench-placement-steps", _SWEEP, "placement", timeout_s=600)
            exchange_s = emulated.run(exchanges, shape, tokens, timeout_s=120)[0]
        compute = f"{shape.flops(tokens) / exchange_s * SCALE / 1e9:.6g}gflops"
        for load in loads:
            popularity = popularity_of(load, shape)
            with EmulatedCluster(2, ranks, inter=INTER, compute=compute, scale=SCALE, mode="netns") as emulated:
                found = emulated.run(
                    on_rank, shape, tokens, popularity, profile, number, budget_s, timeout_s=4 * budget_s + 120
                )[0]
                reports = emulated.device_reports
            yield Result(cluster, load, tokens, compute, **found, reports=reports)


def popularity_of(load: str, shape: PlacedShape) -> list[float]:
    """The popularity of each expert; which of them is the most popular is drawn, for routers know nothing of ranks."""
    shares = [1.0 / rank if load.startswith("zipf") else 1.0 for rank in range(1, shape.num_experts + 1)]
    if load == "recorded":
        with EmulatedCluster(2, 2) as emulated:
            shares = emulated.run(record, shape)[0]
    random.Random(0).shuffle(shares)
    return shares


def ratio(result: Result, way: str, base: str) -> Spread:
    return ratios(result.times_s[way], result.times_s[base])


def errors(result: Result) -> dict[str, float]:
    """How far each way's prediction was from its median, as a fraction of that."""
    return {way: result.predicted_s[way] / median(times) - 1 for way, times in result.times_s.items()}


def document(known: dict[str, str], results: Sequence[Result]) -> str:
    shape = PlacedShape()
    lines = [
        f"# Steps under skewed routing, {today()}",
        "",
        "Emulated, NOT a measurement of accelerators: real processes and bytes, slowed wires, and products that last their FLOPs",
        f"over a declared rate. Rates are those of the cluster that is stood for; all runs {SCALE:g} times slower: {INTER} are",
        "400 Mbit/s. Ratios are of one round, with quartiles. LLEP's rule (llep) has its authors' thresholds, and what it spills",
        "travels as what spills by prices (priced; spill: on top of ours): docs/placement.md. It is not their program.",
        "Chosen: by the decision among all of these.",
        "",
        *[f"- {name}: {text}" for name, text in known.items()],
        f"- the layer: hidden {shape.hidden}, {shape.num_experts} experts of width {shape.width}, top-{shape.top_k}, FP32, "
        f"one chunk; {shape.spare} spare slot on each rank",
    ]
    for result in results:
        lines += [
            "",
            f"## {result.cluster}, {result.load}",
            "",
            f"{result.tokens} tokens a rank; accelerators of {result.compute}. Ways differ by {result.error:.0e} at most. "
            f"{len(next(iter(result.times_s.values())))} rounds. {described(result.reports)}",
            "",
            *[f"{way.capitalize()}: {reason}." for way, reason in result.reasons.items()],
            f"In a step {'; '.join(f'{way}: {what}' for way, what in result.spilled.items())}.",
            "",
            "| way | busiest rank / mean | dispatch | time, ms | predicted, ms | off by |",
            "|---|---|---|---|---|---|",
        ]
        off = errors(result)
        for way, times in result.times_s.items():
            lines.append(
                f"| {way} | {result.busiest[way]:.2f} | {result.kinds[way]} | {spread([1e3 * s for s in times])} | "
                f"{1e3 * result.predicted_s[way]:.1f} | {off[way]:+.1%} |"
            )
        lines += ["", "| ratio | measured | target |", "|---|---|---|"]
        for way, base in _COMPARED:
            target = f"{TARGETS[way, base]:g}" if (way, base) in TARGETS else ""
            if result.load == "even":
                target = f"{EVEN_TARGET:g}" if (way, base) in TARGETS and base == "static" else ""
            lines.append(f"| {way} / {base} | **{ratio(result, way, base)}** | {target} |")
    if results:
        off_by = median(abs(each) for result in results for each in errors(result).values())
        lines += ["", f"Predictions are off by {off_by:.1%} (median; target {PREDICTION_TARGET:.0%})."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", choices=_CLUSTERS, help="only this one; may be given again")
    parser.add_argument("--load", action="append", choices=LOADS, help="only this one; may be given again")
    parser.add_argument(
        "--profile", default="", help="file of a measured profile, measured first where it is not there"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=30.0, help="of the rounds of each load on each cluster (30)")
    add_output(parser)
    options = parser.parse_args()
    stem, known = dated_stem(options.output, "placement-steps"), facts("placement_steps.py", os.getloadavg()[0])
    results: list[Result] = []
    for cluster in options.cluster or _CLUSTERS:
        for result in measure(cluster, options.load or LOADS, options.rounds, options.budget_s, options.profile):
            said = ", ".join(f"{way} / {base} {ratio(result, way, base)}" for way, base in _COMPARED[:3])
            print(f"{cluster}, {result.load}: {said}", flush=True)
            results.append(result)
            found = {"date": today(), "facts": known, "results": [asdict(each) for each in results]}
            write_results(stem, found, document(known, results))
    if results:
        print(stem.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.environ.setdefault("COMMLAYER_PROFILE", "none")  # on_rank names its own
    main()

"""The MoE layer on an emulated cluster of 2 × 4 ranks: planned and overlapped, on plain calls, and DeepSpeed's."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from moe_baseline import Clock, PlainMoE, deepspeed_layer, instrument, why_no_deepspeed
from moe_tables import PHASES, Breakdown, LayerRow, breakdown, ratios, spread, width_of_balance
from torch import nn

from commlayer.agree.messages import ControlMessage, Peers, gather_messages
from commlayer.emulation import EmulatedCluster
from commlayer.integrations import FoldedMesh
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig

__all__ = ["INTER", "LayerResult", "Shape", "run_layer"]

INTER = "400mbit"
NODES, RANKS_PER_NODE = 2, 4
_TOLERANCE = 1e-4
_EVERYWHERE, _INSIDE = NODES * RANKS_PER_NODE, RANKS_PER_NODE
_TIMEOUT_S = 300.0
Way = Callable[[torch.Tensor], torch.Tensor]


class _Spent(ControlMessage, frozen=True):
    """Where a rank's time went: µs by phase."""

    us: dict[str, float]


@dataclass(frozen=True)
class Shape:
    """``num_tokens``: of each rank."""

    hidden: int = 512
    num_experts: int = 8
    top_k: int = 2
    num_tokens: int = 2048


@dataclass(frozen=True)
class LayerResult:
    """``exchange_ms``: four all_to_alls alone. ``experts_ms``: forward and backward of the experts alone, at ``width``.
    ``gradients_ms``: one all_reduce of the experts' gradients over EDP, which EP inside a node needs once a step."""

    shape: Shape
    width: int
    exchange_ms: float
    experts_ms: float
    gradients_ms: float
    rows: list[LayerRow]
    breakdowns: list[Breakdown]
    deepspeed: str


def run_layer(shape: Shape, profile: str, rounds: int, budget_s: float, timeout_s: float) -> LayerResult:
    """All ways, alternately. ``profile``: as COMMLAYER_PROFILE."""
    with EmulatedCluster(NODES, RANKS_PER_NODE, inter=INTER, mode="netns") as cluster:
        result: LayerResult = cluster.run(_on_rank, shape, profile, rounds, budget_s, timeout_s=timeout_s)[0]
    return result


def _on_rank(shape: Shape, profile: str, rounds: int, budget_s: float) -> LayerResult:
    os.environ["COMMLAYER_PROFILE"] = profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = _Bench(shape)
    width, exchange_us, experts_us = bench.calibrate()
    bench.say(f"expert width {width}: experts {experts_us / 1e3:.0f} ms, four exchanges {exchange_us / 1e3:.0f} ms")
    deepspeed = why_no_deepspeed() or ""
    rows = bench.compare(bench.ways(width, deepspeed), width, rounds, 0.7 * budget_s)
    if deepspeed:
        rows += [LayerRow("DeepSpeed", f"EP {ep}", width, why_not=deepspeed) for ep in bench.gloo]
    narrow = max(32, width // 4)
    rows += bench.compare(bench.folding(narrow), narrow, rounds, 0.15 * budget_s)
    return LayerResult(
        shape,
        width,
        exchange_us / 1e3,
        experts_us / 1e3,
        bench.gradients_us(width) / 1e3,
        rows,
        bench.breakdowns(width, rows, rounds, 0.15 * budget_s),
        deepspeed,
    )


@dataclass
class _Way:
    """``chosen``: what the dispatcher decided, and its prediction, ms; asked after the first call."""

    name: str
    ep: int
    call: Way
    parameters: list[nn.Parameter]
    layer: MoELayer | None = None

    @property
    def mapping(self) -> str:
        return f"EP {self.ep}"

    def chosen(self) -> tuple[str, float | None]:
        decision = self.layer.dispatcher.decision if self.layer is not None else None
        if decision is None:
            return "", None
        predicted_us = decision.predicted_us
        return decision.name, None if predicted_us is None else predicted_us / 1e3


class _Bench:
    """On every rank; all of its methods are collective."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.rank = shape, dist.get_rank()
        # A mesh of commlayer's groups for each mapping, and Gloo groups of the same ranks.
        self.meshes = {ep: FoldedMesh({"ep": ep}, backend="commlayer") for ep in (_EVERYWHERE, _INSIDE)}
        self.gloo = {ep: self._gloo(mesh) for ep, mesh in self.meshes.items()}
        generator = torch.Generator().manual_seed(self.rank)
        self.x = torch.randn(shape.num_tokens, shape.hidden, generator=generator)
        self.gradient = torch.randn(shape.num_tokens, shape.hidden, generator=generator)

    def _gloo(self, mesh: FoldedMesh) -> dist.ProcessGroup:
        made = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in mesh.mapping.groups("ep")}
        group: dist.ProcessGroup = made[mesh.ranks("ep")]
        return group

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"layer: {text}", flush=True)

    # Alone

    def calibrate(self) -> tuple[int, float, float]:
        """The width at which experts and exchanges take as long, and what each takes."""
        rows = self.shape.num_tokens * self.shape.top_k
        sent, arrived = torch.randn(rows, self.shape.hidden), torch.empty(rows, self.shape.hidden)

        def exchange() -> None:
            for _ in range(4):
                dist.all_to_all_single(arrived, sent)

        exchange_us = self._alone(exchange)
        widths = (256, 512)
        width = width_of_balance(exchange_us, widths, [self._alone(self._experts(width, sent)) for width in widths])
        return width, exchange_us, self._alone(self._experts(width, sent))

    def _experts(self, width: int, rows: torch.Tensor) -> Callable[[], None]:
        experts = GroupedExperts(self.shape.hidden, width)

        def run() -> None:
            x = rows.detach().requires_grad_()
            experts(x, [x.shape[0]]).backward(rows)

        return run

    def gradients_us(self, width: int) -> float:
        """One all_reduce of the gradients of a rank's experts, over the ranks that hold the same ones."""
        count = self.shape.num_experts // _INSIDE
        gradients = torch.zeros(count * 3 * width * self.shape.hidden)
        group = self.meshes[_INSIDE].group("edp")
        return self._alone(lambda: dist.all_reduce(gradients, group=group))

    def _alone(self, call: Callable[[], Any], repeats: int = 3) -> float:
        call()
        return median(self._slowest(self._time(call)) for _ in range(repeats))

    def _time(self, call: Callable[[], Any]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def _slowest(self, value: float) -> float:
        agreed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed)

    def _summed(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    # The ways

    def layer(self, ep: int, width: int, **options: Any) -> MoELayer:
        config = RouterConfig(num_experts=self.shape.num_experts, top_k=self.shape.top_k)
        return MoELayer(self.shape.hidden, width, config, mesh=self.meshes[ep], **options)

    def plain(self, ep: int, width: int, clock: Clock | None = None) -> _Way:
        layer = self.layer(ep, width)
        call = PlainMoE(layer, self.gloo[ep], self.shape.top_k, clock)
        return _Way("plain", ep, call, list(layer.parameters()))

    def ours(self, name: str, ep: int, width: int, **options: Any) -> _Way:
        layer = self.layer(ep, width, **options)
        return _Way(name, ep, layer, list(layer.parameters()), layer)

    def folding(self, width: int) -> list[_Way]:
        """Plain first: what the others are compared with."""
        return [
            make for ep in (_EVERYWHERE, _INSIDE) for make in (self.plain(ep, width), self.ours("planned", ep, width))
        ]

    def ways(self, width: int, deepspeed: str) -> list[_Way]:
        found = self.folding(width)
        for chunks in (1, 2, 4, 8):
            found.append(self.ours(f"all_to_all × {chunks}", _EVERYWHERE, width, dispatch="all_to_all", chunks=chunks))
        found.append(self.ours("all_gather", _EVERYWHERE, width, dispatch="all_gather"))
        shape = self.shape
        for ep, group in self.gloo.items():
            if not deepspeed:
                call, parameters = deepspeed_layer(shape.hidden, width, shape.num_experts, shape.top_k, group)
                found.append(_Way("DeepSpeed", ep, call, parameters))
        return found

    # Together

    def compare(self, ways: Sequence[_Way], width: int, rounds: int, budget_s: float) -> list[LayerRow]:
        checked = self._checked(ways)
        wrong = [f"{way.name}, {way.mapping}" for way in ways if checked[way.name, way.ep].startswith("WRONG")]
        if wrong:  # the same on all ranks
            raise RuntimeError(f"not the plain layer's output and gradients: {'; '.join(wrong)}")
        totals: dict[tuple[str, int], list[float]] = {(way.name, way.ep): [] for way in ways}
        forwards: dict[tuple[str, int], list[float]] = {key: [] for key in totals}
        cores: dict[tuple[str, int], list[float]] = {key: [] for key in totals}
        chooser, order, began = random.Random(width), list(ways), time.perf_counter()
        done = 0
        while not done or (done < rounds and self._slowest(time.perf_counter() - began) < budget_s):
            chooser.shuffle(order)  # the same on all ranks
            for way in order:
                computed_s = time.process_time()
                total_us, forward_us = self.step(way)
                cores[way.name, way.ep].append(
                    self._summed(time.process_time() - computed_s) / len(os.sched_getaffinity(0))
                )
                totals[way.name, way.ep].append(total_us)
                forwards[way.name, way.ep].append(forward_us)
            done += 1
            self.say(f"width {width}, round {done} of at most {rounds}")
        base = totals[ways[0].name, ways[0].ep]
        rows = []
        for way in ways:
            mine, (chosen, predicted_ms) = totals[way.name, way.ep], way.chosen()
            rows.append(
                LayerRow(
                    way.name,
                    way.mapping,
                    width,
                    chosen,
                    predicted_ms,
                    spread([us / 1e3 for us in mine]),
                    median(forwards[way.name, way.ep]) / 1e3,
                    median(cores[way.name, way.ep]) * 1e3,
                    ratios(mine, base),
                    len(mine),
                    checked[way.name, way.ep],
                )
            )
            self.say(
                f"width {width}: {way.name}, {way.mapping} {chosen}: {rows[-1].time_ms} ms, ratio {rows[-1].ratio}"
            )
        return rows

    def step(self, way: _Way) -> tuple[float, float]:
        """Forward and backward; µs of the slowest rank: both, and the forward pass alone."""
        for parameter in way.parameters:
            parameter.grad = None
        x = self.x.detach().requires_grad_()
        dist.barrier()
        begin = time.perf_counter()
        out = way.call(x)
        middle = time.perf_counter()
        out.backward(self.gradient)
        end = time.perf_counter()
        self.seen = out.detach(), x.grad, [parameter.grad for parameter in way.parameters]
        return self._slowest((end - begin) * 1e6), self._slowest((middle - begin) * 1e6)

    def _checked(self, ways: Sequence[_Way]) -> dict[tuple[str, int], str]:
        """Output and all gradients against the plain layer's of the same mapping; and outputs across mappings.

        It is also each way's first call, which connects, and where chunks are chosen measures the experts.
        """
        found: dict[tuple[str, int], str] = {}
        expected: dict[int, Any] = {}
        for way in ways:
            self.step(way)
            seen, key = self.seen, (way.name, way.ep)
            if way.name == "DeepSpeed":
                found[key] = "not compared: drops tokens, draws its own weights"
                continue
            wanted = expected.setdefault(way.ep, seen)
            pairs = [*zip(seen[:2], wanted[:2], strict=True), *zip(seen[2], wanted[2], strict=True)]
            across = expected[ways[0].ep]
            pairs += zip(seen[:2], across[:2], strict=True)
            worst = max(_error(mine, theirs) for mine, theirs in pairs)
            worst = self._slowest(worst)
            found[key] = f"{'WRONG ' if worst > _TOLERANCE else ''}{worst:.0e}"
        return found

    # Where the time goes

    def breakdowns(self, width: int, rows: Sequence[LayerRow], rounds: int, budget_s: float) -> list[Breakdown]:
        clock = Clock()
        planned = next(row for row in rows if row.way == "planned" and row.mapping == f"EP {_EVERYWHERE}")
        ways = [
            self.plain(_EVERYWHERE, width, clock),
            self.ours("all_to_all × 1", _EVERYWHERE, width, dispatch="all_to_all", chunks=1),
            self.ours(f"planned: {planned.chosen}", _EVERYWHERE, width),
            self.plain(_INSIDE, width, clock),
            self.ours("planned", _INSIDE, width),
        ]
        for way in ways:
            self.step(way)  # experts are measured before their calls are charged
            if way.layer is not None:
                instrument(way.layer, clock)
        seen: dict[int, list[list[dict[str, float]]]] = {place: [] for place in range(len(ways))}
        began = time.perf_counter()
        while not seen[0] or (len(seen[0]) < rounds and self._slowest(time.perf_counter() - began) < budget_s):
            for place, way in enumerate(ways):
                dist.barrier()
                clock.restart()
                self.step(way)
                spent = _Spent({name: clock.spent_us[name] for name in PHASES})
                everyones = gather_messages(
                    spent, _Spent, Peers.of(None), _TIMEOUT_S, "to compare where their time went"
                )
                seen[place].append([theirs.us for theirs in everyones])
        return [breakdown(way.name, way.mapping, seen[place]) for place, way in enumerate(ways)]


def _error(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """The largest difference, over the largest value."""
    assert mine is not None  # after a backward pass all have gradients
    assert theirs is not None
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))

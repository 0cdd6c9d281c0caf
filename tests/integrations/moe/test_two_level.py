"""Dispatch in two levels against the flat one: the same rows in the same order, sums within a bound; refusals; the choice."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
import commlayer.backend.create  # once, before ranks are forked
from commlayer.collectives import GroupCommunicator
from commlayer.integrations import FoldedMesh, MoELayer, Rematerialise, RouterConfig, TokenDispatcher
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.levels import Levels, RowsOnLevel, two_level_way
from commlayer.integrations.moe.planning import DispatchPlanner
from commlayer.profiles.errors import DisagreementError, GroupError, TensorError, UsageError
from commlayer.row_calls import RowCalls
from commlayer.scheduler.overlap import ExpertTimes
from commlayer.scheduler.plan import Span
from commlayer.scheduler.rails import distinct_nodes
from commlayer.testing.plugin import ClusterFactory

HIDDEN = 8
SHAPES = [(2, 2), (2, 3), (3, 2)]


@dataclass(frozen=True)
class Case:
    """``tokens`` of each rank, in turn; ``route``: how they choose among ``experts``."""

    tokens: tuple[int, ...] = (9, 5, 7)
    experts: int = 12
    top_k: int = 3
    route: str = "random"
    dtype: torch.dtype = torch.float32
    capacity: int | None = None
    weighted: bool = True
    seed: int = 0

    def routes(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H], indices [T, K], weights [T, K] of a rank."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        num_tokens = self.tokens[rank % len(self.tokens)]
        x = torch.randn(num_tokens, HIDDEN, generator=generator).to(self.dtype)
        scores = torch.rand(num_tokens, self.experts, generator=generator)
        if self.route == "one hot":
            scores[:, -1] += 2
        elif self.route == "one node":
            scores[:, : self.top_k] += 2
        weights, indices = scores.topk(self.top_k)
        if self.route == "dropped":
            indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.5, -1, indices)
        elif self.route == "all dropped":
            indices = torch.full_like(indices, -1)
        return x, indices, torch.where(indices < 0, 0.0, weights)


def cases() -> Iterator[Case]:
    """Cases that may go wrong, and routings as they come."""
    yield from (
        Case(),
        Case(tokens=(0, 4)),
        Case(tokens=(0,)),
        Case(tokens=(1, 0, 0, 0, 0, 0)),  # one token in all
        Case(route="one hot"),
        Case(route="one hot", top_k=1, tokens=(16, 2)),
        Case(route="one node"),
        Case(route="dropped"),
        Case(route="all dropped"),
        Case(top_k=1),
        Case(top_k=12),
        Case(experts=13, top_k=4),  # one rank has an expert more
        Case(experts=7, top_k=2),
        Case(dtype=torch.bfloat16, top_k=4),
        Case(dtype=torch.float64, weighted=False),
        Case(capacity=9),
        Case(capacity=9, route="dropped", tokens=(9, 0)),
    )
    draw = random.Random(5)
    for seed in range(1, 9):
        experts = draw.randint(6, 24)
        yield Case(
            tokens=tuple(draw.choice((0, 1, 3, 8, 33)) for _ in range(6)),
            experts=experts,
            top_k=draw.randint(1, min(8, experts)),
            route=draw.choice(("random", "dropped", "one node")),
            weighted=draw.random() < 0.7,
            seed=seed,
        )


@dataclass(frozen=True)
class Passed:
    """The results of a kind in a case: rows of the experts and their numbers, the output, gradients of tokens and weights."""

    rows: torch.Tensor
    expert_rows: tuple[int, ...]
    out: torch.Tensor
    of_x: torch.Tensor
    of_weights: torch.Tensor | None


def passes(case: Case, ep: GroupCommunicator, kind: str, *, is_absolute: bool = False) -> Passed:
    """``is_absolute``: of the absolute values of tokens and gradients."""
    dispatcher = TokenDispatcher(case.experts, ep=ep, kind=kind, chunks=1)
    x, indices, weights = case.routes(ep.rank)
    x = (x.abs() if is_absolute else x).requires_grad_()
    weights.requires_grad_()
    given = weights if case.weighted else None
    handle = dispatcher.prepare(indices, capacity=case.capacity, like=x, weights=given)
    assert handle.kind == kind
    rows, expert_rows = dispatcher.dispatch(x, handle)
    scale = torch.linspace(0.5, 2.0, max(1, rows.shape[0])).unsqueeze(1)[: rows.shape[0]].to(case.dtype)
    out = dispatcher.combine(rows * scale, handle, given)  # rows differ, so that one in another's place shows
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(ep.rank)).to(case.dtype)
    out.backward(gradient.abs() if is_absolute else gradient)
    assert x.grad is not None
    return Passed(rows.detach(), expert_rows, out.detach(), x.grad, weights.grad)


def differences(case: Case, ep: GroupCommunicator) -> list[str]:
    flat, two = passes(case, ep, "all_to_all"), passes(case, ep, "two_level")
    sums = passes(case, ep, "all_to_all", is_absolute=True)
    wrong = [] if torch.equal(flat.rows, two.rows) else ["rows"]
    wrong += [] if flat.expert_rows == two.expert_rows else [f"numbers {flat.expert_rows} {two.expert_rows}"]
    for name, mine, theirs, whole in (
        ("out", two.out, flat.out, sums.out),
        ("gradient of x", two.of_x, flat.of_x, sums.of_x),
    ):
        allowed = (case.top_k + 6) * torch.finfo(case.dtype).eps * whole.double()  # as docs/moe.md says
        wrong += [] if bool(((mine.double() - theirs.double()).abs() <= allowed).all()) else [name]
        if case.top_k == 1:
            wrong += [] if torch.equal(mine, theirs) else [f"{name}: of one choice, not the same bits"]
    if case.weighted and flat.of_weights is not None and two.of_weights is not None:
        same = torch.allclose(two.of_weights, flat.of_weights, rtol=1e-6, atol=1e-6)
        wrong += [] if same else ["gradient of the weights"]
    return [f"{case}: {each}" for each in wrong]


def all_cases() -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": dist.get_world_size()}) as mesh:
        ep = GroupCommunicator(mesh.group("ep"), "ep")
        wrong = [each for case in cases() for each in differences(case, ep)]
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_flat_kind(emulated_cluster: ClusterFactory, shape: tuple[int, int]) -> None:
    assert emulated_cluster(*shape).run(all_cases, timeout_s=240) == [[]] * (shape[0] * shape[1])


def scattered_ranks(traces: str) -> list[str]:
    """An EP group whose ranks are not in the order of nodes; calls are compared before they move a byte, and recorded."""
    os.environ |= {"COMMLAYER_DEBUG": "detail", "COMMLAYER_TRACE": traces}
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.new_group([0, 2, 1, 3], backend="commlayer", sort_ranks=False), "ep")
    assert ep.nodes == ((0, 2), (1, 3))
    wrong = [each for case in (Case(), Case(capacity=9)) for each in differences(case, ep)]
    dist.destroy_process_group()
    return wrong


def test_ranks_may_lie_on_nodes_in_any_order(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    assert emulated_cluster(2, 2).run(scattered_ranks, str(tmp_path), timeout_s=120) == [[]] * 4
    text = "".join(path.read_text(errors="replace", encoding="utf-8") for path in tmp_path.iterdir())
    assert '"plan":"hierarchical"' in text
    assert '"steps":[{"op":"all_to_all","resource":"inter"' in text  # over the rails
    assert '"steps":[{"op":"all_to_all","resource":"intra"' in text


def sent_bytes() -> dict[str, tuple[int, int]]:
    """The bytes that each kind sends between nodes and inside them, out and home, without indices, counts and weights."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    case, found = Case(tokens=(8,), top_k=12), {}
    for kind in ("all_to_all", "two_level"):
        dispatcher = TokenDispatcher(case.experts, ep=ep, kind=kind, chunks=1)
        x, indices, _ = case.routes(ep.rank)
        handle = dispatcher.prepare(indices, like=x)
        before = _all_to_alls()
        rows, _ = dispatcher.dispatch(x, handle)
        dispatcher.combine(rows, handle)
        after = _all_to_alls()
        found[kind] = after[0] - before[0], after[1] - before[1]
    dist.destroy_process_group()
    return found


def _all_to_alls() -> tuple[int, int]:
    calls = [call for group in commlayer.stats()["groups"] for call in group["calls"]]
    sent = [call["wire_bytes"] for call in calls if call["collective"] in ("all_to_all", "all_to_all_v")]
    assert None not in sent
    return sum(each["inter"] for each in sent if each), sum(each["intra"] for each in sent if each)


def test_a_token_crosses_once_for_each_node(emulated_cluster: ClusterFactory) -> None:
    """All 12 experts are chosen by each of 8 tokens: flat sends 6 rows of each to the other node."""
    row = HIDDEN * 4
    for found in emulated_cluster(2, 2).run(sent_bytes, timeout_s=120):
        assert found["all_to_all"] == (2 * 8 * 6 * row, 2 * 8 * 3 * row)
        assert found["two_level"] == (2 * 8 * row, 2 * 16 * row)  # those of its own and of its rail go to one neighbour


def layers() -> list[str]:
    """The layer by each kind, plain, rematerialised, and with weights that travel; a call in between that a rank refuses."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    wrong: list[str] = []
    found: dict[tuple[str, bool], list[torch.Tensor]] = {}
    with FoldedMesh({"ep": dist.get_world_size()}) as mesh:
        flat, two = ("all_to_all", False), ("two_level", False)
        for kind, again in (flat, two, ("two_level", True), ("weights travel", False)):
            options: Any = {"dispatch": kind}
            if kind == "weights travel":
                options = {"dispatch": "two_level", "weights_at": "experts"}
            router = RouterConfig(num_experts=8, top_k=2)
            layer = MoELayer(HIDDEN, 16, router, mesh=mesh, seed=3, **options)
            x = torch.randn(4 + dist.get_rank(), HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
            x.requires_grad_()
            if again:
                with Rematerialise():
                    y = layer(x)
            else:
                y = layer(x)
            y.square().sum().backward()
            gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
            found[kind, again] = [y.detach(), *(each for each in gradients if each is not None)]
        for way in (two, ("weights travel", False)):
            for mine, wanted in zip(found[way], found[flat], strict=True):
                wrong += [] if torch.allclose(mine, wanted, rtol=1e-4, atol=1e-5) else [f"{way} differs from flat"]
        for mine, first in zip(found["two_level", True], found[two], strict=True):
            wrong += [] if torch.equal(mine, first) else ["differs when made again"]
        bad = torch.full((3, HIDDEN), float("nan") if dist.get_rank() == 1 else 1.0)
        try:
            layer(bad)
        except (DisagreementError, TensorError):
            layer(bad.nan_to_num()).sum().backward()
        else:
            wrong.append("NaN was not refused")
    dist.destroy_process_group()
    return wrong


def test_layers_go_in_two_levels(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(2, 2).run(layers, timeout_s=120) == [[]] * 4


def in_wire_formats() -> list[str]:
    """Encoded between nodes: near to native, the same twice, and coarser than native."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    ep = GroupCommunicator(dist.group.WORLD, "ep")
    wrong: list[str] = []
    x = torch.randn(20, 256, generator=torch.Generator().manual_seed(ep.rank)).requires_grad_()
    top, indices = torch.rand(20, 8, generator=torch.Generator().manual_seed(9 + ep.rank)).topk(4)
    weights = top / top.sum(1, keepdim=True)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for wire in ("native", "bf16!", "fp8_e4m3!", "again"):
        name = "fp8_e4m3!" if wire == "again" else None if wire == "native" else wire
        dispatcher = TokenDispatcher(8, ep=ep, kind="two_level", wire=name)
        out, _ = dispatcher.run(x, dispatcher.prepare(indices, like=x, weights=weights), lambda rows, *_: rows, weights)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        found[wire] = out.detach(), gradient
    for wire, limit in (("bf16!", 0.01), ("fp8_e4m3!", 0.06)):
        for mine, native in zip(found[wire], found["native"], strict=True):
            wrong += [] if (mine - native).norm() <= limit * native.norm() else [f"{wire}: far from native"]
        wrong += [f"{wire}: nothing was encoded"] if torch.equal(found[wire][0], found["native"][0]) else []
    wrong += [] if torch.equal(found["again"][0], found["fp8_e4m3!"][0]) else ["not the same twice"]
    dist.destroy_process_group()
    return wrong


def test_rows_on_rails_take_wire_formats(emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(2, 2).run(in_wire_formats, timeout_s=120) == [[]] * 4


# What is refused


def refusals(ep: int, etp: int) -> tuple[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    with FoldedMesh({"ep": ep, "etp": etp}) as mesh:
        groups: dict[str, Any] = {"ep": GroupCommunicator(mesh.group("ep"), "ep")}
        if etp > 1:
            groups |= {name: GroupCommunicator(mesh.group(name), "ep") for name in ("etp", "etp_ep")}
        try:
            TokenDispatcher(8, kind="two_level", **groups)
        except GroupError as error:
            said = str(error)
        auto = TokenDispatcher(8, **groups)
        x = torch.ones(3, HIDDEN)
        auto.prepare(torch.zeros(3, 1, dtype=torch.int64), like=x)
        assert auto.grid.levels is None
        assert auto.decision is not None
    dist.destroy_process_group()
    return said, auto.decision.kind


@pytest.mark.parametrize(
    ("shape", "degrees", "why"),
    [
        ((1, 3), (3, 1), "the 3 ranks of EP lie on one node"),
        ((2, 1), (2, 1), "each of 2 nodes holds one rank"),
        ((2, 2), (2, 1), "lie on one node"),
        ((2, 2), (2, 2), "ETP has 2 ranks"),
    ],
    ids=str,
)
def test_groups_without_two_levels_are_refused(
    emulated_cluster: ClusterFactory, shape: tuple[int, int], degrees: tuple[int, int], why: str
) -> None:
    for said, kind in emulated_cluster(*shape).run(refusals, *degrees, timeout_s=120):
        assert why in said
        assert "take kind all_to_all, or auto" in said
        assert kind != "two_level"


class Lying(GroupCommunicator):
    """A group whose ranks lie on ``nodes``, and are not there; ``us_per_byte`` of a collective, or of a span."""

    def __init__(self, nodes: tuple[tuple[int, ...], ...], us_per_byte: dict[str, float] | None = None) -> None:
        super().__init__(None, "ep")
        self.size, self._nodes, self._us_per_byte = sum(map(len, nodes)), nodes, us_per_byte

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return self._nodes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self._nodes))

    def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
        return x.expand(self.size, *x.shape[1:])  # all ranks say the same

    def predicted_us(
        self,
        collective: str,
        num_bytes: int,
        shape: tuple[int, ...] | None = None,
        *,
        siblings: int = 0,
        rows_of: Any = None,
        over: Span = Span.GROUP,
    ) -> float | None:
        name = collective if over is Span.GROUP else over.value
        return None if self._us_per_byte is None else self._us_per_byte.get(name, 0.0) * num_bytes


def test_uneven_nodes_are_refused_and_auto_does_not_ask() -> None:
    uneven = Lying(((0, 1), (2, 3, 4)))
    with pytest.raises(GroupError, match="the nodes hold 2 and 3 ranks of EP: rails need as many"):
        TokenDispatcher(5, ep=uneven, kind="two_level")
    assert TokenDispatcher(5, ep=uneven).grid.levels is None


def test_what_two_levels_do_not_go_with() -> None:
    ep = Lying(((0, 1), (2, 3)))
    with pytest.raises(UsageError, match="two_level brings all tokens at once"):
        TokenDispatcher(4, ep=ep, kind="two_level", chunks=2)


def test_rows_over_rails_go_to_the_rail_only() -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 4, nodes=((0, 1), (2, 3)))
    ep, rows = RowCalls(group, None, "lane ep"), torch.zeros(2, HIDDEN)
    with pytest.raises(TensorError, match=r"over rail rank 0 .* with ranks \[0, 2\], got rows for \[1\]"):
        ep.all_to_all(rows, (0, 2, 0, 0), (0, 0, 0, 0), most_rows=4, over=Span.RAIL)
    with pytest.raises(TensorError, match="most_rows"):
        ep.all_to_all(rows, (0, 0, 2, 0), (0, 0, 0, 0), over=Span.RAIL)


# Numbers


@pytest.mark.parametrize(
    ("experts", "nodes", "top_k"), [(8, 2, 2), (6, 3, 2), (8, 4, 3), (6, 2, 6), (4, 2, 0), (4, 4, 1)]
)
def test_distinct_nodes_are_those_of_all_choices(experts: int, nodes: int, top_k: int) -> None:
    chosen = list(itertools.combinations(range(experts), top_k))
    mean = sum(len({expert * nodes // experts for expert in each}) for each in chosen) / len(chosen)
    assert distinct_nodes(experts, nodes, top_k) == pytest.approx(mean)


def test_rows_that_deduplication_saves() -> None:
    """Top-2 of 8 on two nodes sends 21 % fewer rows, top-8 of 256 on eight less than half."""
    assert distinct_nodes(8, 2, 2) / 2 == pytest.approx(11 / 14)
    assert distinct_nodes(256, 8, 8) / 8 < 0.67
    assert distinct_nodes(64, 2, 8) / 8 < 0.25
    with pytest.raises(UsageError, match="share evenly"):
        distinct_nodes(7, 2, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ranks_find_the_sizes_that_rows_have(shape: tuple[int, int]) -> None:
    m, width = shape
    nodes = tuple(tuple(range(a * width, (a + 1) * width)) for a in range(m))
    experts = (2,) * (m * width)
    tokens = [7, 0, 3, 12, 5, 1][: m * width]
    generator = torch.Generator().manual_seed(1)
    choices = [torch.rand(count, sum(experts), generator=generator).topk(3).indices for count in tokens]
    levels = [Levels(nodes, rank, experts) for rank in range(m * width)]
    reached = torch.stack([each.reached(of) for each, of in zip(levels, choices, strict=True)])
    sizes = RowsOnLevel.of_call(levels[0], reached)
    ways = [two_level_way(each, torch.cat(choices), tokens, sizes, None)[0] for each in levels]
    for name, rows in (("rail", sizes[0]), ("inside", sizes[1])):
        sent = torch.tensor([getattr(way, f"{name}_send") for way in ways])
        received = torch.tensor([getattr(way, f"{name}_receive") for way in ways])
        assert torch.equal(sent, received.t())
        away = sent * ~torch.eye(m * width, dtype=torch.bool)
        assert rows.crossing == max(int(away.sum(1).max()), int(away.sum(0).max()))
        assert rows.whole >= rows.crossing * rows.ranks / (rows.ranks - 1)
    assert all(int(each[:m].sum()) == way.rails.token_of_row.numel() for each, way in zip(reached, ways, strict=True))


# The choice


def layout(group: GroupCommunicator, indices: torch.Tensor, num_experts: int) -> ChoiceCounts:
    """The counts of a call whose ranks all have these choices."""
    grid = ExpertGrid.of(num_experts, group)
    assert grid.levels is not None
    counts = torch.zeros(group.size, 1, 8, num_experts, dtype=torch.int64)
    counts[:, 0, 0] = torch.bincount(indices[indices >= 0], minlength=num_experts)
    on_levels = RowsOnLevel.of_call(grid.levels, grid.levels.reached(indices).expand(group.size, -1))
    return ChoiceCounts(grid, indices, None, (len(indices),) * group.size, counts, on_levels=on_levels)


WIRE = {"all_to_all_v": 1.0, "all_gather": 9.0, "reduce_scatter": 9.0, "rail": 1.0, "node": 0.1}
SPREAD = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)).topk(8).indices
APART = torch.tensor([[0, 8]] * 16)
"""One choice on each node: nothing is sent once that flat would send twice."""


@pytest.mark.parametrize(
    ("indices", "us_per_byte", "kind"),
    [
        (SPREAD, WIRE, "two_level"),
        (APART, WIRE, "all_to_all"),
        (SPREAD, WIRE | {"node": 2.0}, "all_to_all"),  # rows inside the node are as dear as those between
        (SPREAD, WIRE | {"all_gather": 0.01, "reduce_scatter": 0.01}, "all_gather"),
    ],
)
def test_the_kind_is_the_one_predicted_fastest(indices: torch.Tensor, us_per_byte: dict[str, float], kind: str) -> None:
    found = layout(Lying(((0, 1), (2, 3)), us_per_byte), indices, 16)
    like = torch.zeros(16, HIDDEN * 1024)
    decision = DispatchPlanner(found.grid, "auto", None).decide(found, like, None)
    assert decision.kind == kind, decision.kinds_us
    assert set(decision.kinds_us) == {"all_to_all", "all_gather", "two_level"}
    assert all(name in decision.reason for name in decision.kinds_us)


def test_routing_that_stays_on_one_node_is_counted_not_expected() -> None:
    """Eight choices on one node are one row on a rail, where even routing expects nearly two."""
    levels = Levels(((0, 1), (2, 3)), 0, (4,) * 4)
    assert levels.reached(torch.arange(8).expand(16, 8)).tolist() == [16, 0, 16, 16, 0, 0]
    assert levels.reached(SPREAD)[:2].sum() > 1.9 * 16 > 16 * distinct_nodes(16, 2, 8) - 2
    assert levels.reached(torch.full((16, 8), -1)).sum() == 0


def test_a_hot_rank_does_not_make_flat_look_slow() -> None:
    """The bytes on its node's link count there, and two levels carry as much of it."""
    found = layout(Lying(((0, 1), (2, 3))), APART, 16)
    assert (found.most_rows, found.most_rows_of_nodes) == (64, 32)
    even = layout(Lying(((0, 1), (2, 3))), torch.arange(16).view(16, 1), 16)
    assert even.most_rows == even.most_rows_of_nodes == 16


def test_decisions_are_kept_for_about_the_same_counts_on_levels_too() -> None:
    group = Lying(((0, 1), (2, 3)), WIRE)
    planner = DispatchPlanner(ExpertGrid.of(16, group), "auto", None)
    like = torch.zeros(16, HIDDEN * 1024)
    kinds = [planner.decide(layout(group, indices, 16), like, None).kind for indices in (APART, SPREAD, APART)]
    assert kinds == ["all_to_all", "two_level", "all_to_all"]


def test_without_a_profile_auto_does_not_consider_it() -> None:
    found = layout(Lying(((0, 1), (2, 3))), SPREAD, 16)
    assert DispatchPlanner(found.grid, "auto", None).decide(found, torch.zeros(16, HIDDEN), None).kind != "two_level"


def test_chunks_that_experts_hide_may_win() -> None:
    """Two levels go at once: where the experts take as long as a flat dispatch, its chunks are nearly free."""
    like = torch.zeros(16, HIDDEN * 1024)

    def slow(rows: torch.Tensor, counts: Any, _: object) -> torch.Tensor:
        return rows

    found = layout(Lying(((0, 1), (2, 3)), WIRE), SPREAD, 16)
    decisions = []
    for us_per_row in (0.0, 3 * HIDDEN * 4096.0):
        planner = DispatchPlanner(found.grid, "auto", None)
        times = ExpertTimes((1, 1000), (us_per_row, 1000 * us_per_row))
        planner._measured.experts = lambda *_, times=times: times  # type: ignore[method-assign]
        planner._times.exchange_us = lambda size, rows_of: float(size > 1) * size  # type: ignore[method-assign]
        decisions.append(planner.decide(found, like, slow))
    assert [each.kind for each in decisions] == ["two_level", "all_to_all"]
    assert decisions[1].chunks > 1
    assert "in chunks with the experts" in decisions[1].reason

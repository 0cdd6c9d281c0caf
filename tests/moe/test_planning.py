"""What the dispatcher decides from predictions: the pipeline's closed forms, the kind, the chunks; no processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe import planning
from commlayer.integrations.moe.handle import FINEST, Grid, Layout
from commlayer.integrations.moe.measuring import MoveShape, MoveTimes, measure_experts, measure_moves
from commlayer.integrations.moe.planning import DispatchPlanner, _rounded
from commlayer.profiles.errors import UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.overlap import SLICES, ExpertTimes, choose_slices, pipeline, time_pipeline
from commlayer.scheduler.plan import Op
from commlayer.scheduler.traffic import Traffic

TRAFFIC = Traffic(8000, 8, link=Resource.INTER, collective="all_to_all_v", nodes=(4, 4))


@pytest.mark.parametrize("slices", SLICES)
def test_the_pipeline_moves_all_bytes_both_ways_and_computes_once(slices: tuple[int, ...]) -> None:
    assert sum(slices) == FINEST
    plan = pipeline(TRAFFIC, slices)
    moved = [step for step in plan.steps if step.op is Op.ALL_TO_ALL]
    computed = [step for step in plan.steps if step.op is Op.COMPUTE]
    assert sum(step.bytes for step in moved) == 2 * TRAFFIC.logical_bytes
    assert [step.bytes for step in computed] == [TRAFFIC.logical_bytes * part / 8 for part in slices]
    assert plan.name == ("flat" if len(slices) == 1 else f"flat×{len(slices)}")


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_closed_forms(chunks: int) -> None:
    """Bound by compute: first chunk in, all experts, last chunk out. Bound by the link: all chunks both ways,
    and with one chunk its experts between, which nothing hides."""
    plan = pipeline(TRAFFIC, (1,) * chunks)
    by_compute = time_pipeline(plan, lambda _: 1.0, lambda _: 100.0)
    assert by_compute.total_us == 1 + 100 * chunks + 1
    by_link = time_pipeline(plan, lambda _: 100.0, lambda _: 1.0)
    assert by_link.total_us == 200 * chunks + (chunks == 1)
    equal = time_pipeline(plan, lambda size: size, lambda size: size)
    assert equal.total_us == (3 if chunks == 1 else 2) * 8000


def test_a_chunk_in_is_ahead_of_those_out_as_far_as_asked_for() -> None:
    """In the backward pass all gradients are on their way before the first goes back."""
    ops = [step.op for step in pipeline(TRAFFIC, (1, 1, 1), ahead=3).steps]
    assert ops == [*[Op.ALL_TO_ALL] * 3, *[Op.COMPUTE, Op.ALL_TO_ALL] * 3]
    forward = [step.op for step in pipeline(TRAFFIC, (1, 1, 1)).steps]
    both_ways = [Op.ALL_TO_ALL] * 2  # the next one out, an earlier one back
    assert forward == [*both_ways, Op.COMPUTE, *both_ways, *[Op.COMPUTE, Op.ALL_TO_ALL] * 2]


def test_small_chunks_at_both_ends_cost_less_than_small_chunks_everywhere() -> None:
    """Bound by compute only what goes in first and comes out last is not hidden."""
    plan = pipeline(TRAFFIC, (1, 2, 2, 2, 1))
    assert time_pipeline(plan, lambda size: size, lambda size: 10 * size).total_us == 8000 * (1 / 8 + 10 + 1 / 8)


def test_chunks_are_as_many_as_pay() -> None:
    def linear(latency_us: float) -> Callable[[float], float]:
        return lambda size: latency_us + size

    def chosen(*times: Callable[[float], float], **options: Any) -> int:
        return len(choose_slices(TRAFFIC, *times, **options)[0])

    assert chosen(linear(0), linear(0), tolerance=0) == 5
    assert chosen(linear(50_000), linear(0)) == 1  # each chunk costs a latency
    assert chosen(linear(0), lambda _: 0.0) == 1  # nothing to hide behind
    assert chosen(linear(0), linear(0), posting_us=1_000_000) == 1  # each costs the processor time
    slices, priced = choose_slices(TRAFFIC, linear(0), linear(0), tolerance=0.5)
    assert len(slices) < 8  # fewer chunks stay where they are near enough
    assert priced[slices] <= 1.5 * min(priced.values())


def test_expert_times_between_and_beyond_their_points() -> None:
    times = ExpertTimes((10, 100), (20.0, 110.0))
    assert [times.at(rows) for rows in (0, 1, 10, 55, 100, 200)] == [0.0, 20.0, 20.0, 65.0, 110.0, 220.0]


def test_measured_experts_get_even_rows() -> None:
    seen = []

    def experts(rows: torch.Tensor, counts: Any, _: object) -> torch.Tensor:
        seen.append((rows.shape[0], tuple(counts)))
        return rows

    assert len(measure_experts(experts, 3, torch.zeros(1, 4), [1, 8])) == 2
    assert set(seen) == {(1, (1, 0, 0)), (8, (3, 3, 2))}


class Predicted(GroupCommunicator):
    """A group of ``size`` ranks that are not there, with a profile: µs for a byte of each collective."""

    def __init__(self, size: int, us_per_byte: dict[str, float] | None) -> None:
        super().__init__(None, "ep")
        self.size, self._us_per_byte = size, us_per_byte

    def predicted_us(self, collective: str, num_bytes: int, shape: tuple[int, ...] | None = None) -> float | None:
        assert shape is None or sum(shape) == self.size
        return None if self._us_per_byte is None else self._us_per_byte[collective] * num_bytes

    def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
        return x.expand(self.size, *x.shape[1:])  # all ranks measure the same


def layout(group: GroupCommunicator, *, top_k: int, capacity: int | None = None) -> Layout:
    """Four ranks with 16 tokens each, whose choices are spread evenly over 4 experts."""
    grid = Grid(4, group, GroupCommunicator(None, "ep"), group)
    counts = torch.full((4, 1, 8, 4), 16 * top_k // 4 // 8 or 1)
    return Layout(grid, torch.zeros(16, top_k, dtype=torch.int64), capacity, (16,) * 4, counts)


LIKE = torch.zeros(16, 8)


@pytest.mark.parametrize(
    ("gathering_us", "us_per_row", "kind"),
    [(0.5, 0.0, "all_gather"), (2.0, 0.0, "all_to_all"), (0.99, 0.0, "all_to_all"), (0.5, 1e6, "all_to_all")],
    ids=str,
)
def test_the_kind_is_the_one_predicted_faster_by_a_margin(
    monkeypatch: pytest.MonkeyPatch, gathering_us: float, us_per_row: float, kind: str
) -> None:
    """64 rows of 32 bytes either way (k = 4 of 4 experts, one a rank), so times for a byte compare directly. In memory both
    move 64 rows; for all_gather indices (8 bytes) and weights (4) travel too."""
    monkeypatch.setattr(planning, "measure_moves", lambda *_: MoveTimes(us_per_row, us_per_row))
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": gathering_us, "reduce_scatter": gathering_us})
    found = layout(group, top_k=4)
    decision = DispatchPlanner(found.grid, "auto", 1).decide(found, LIKE, None)
    moved_us = 64 * us_per_row
    assert decision.kinds_us == {
        "all_to_all": 2 * 64 * 32 + moved_us,
        "all_gather": gathering_us * (2 * 64 * 32 + 64 * 4 * (8 + 4)) + moved_us,
    }
    assert decision.kind == kind
    assert "predicted" in decision.reason


def test_all_tokens_count_against_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """k = 1: three of four tokens that are gathered and summed have no choice here."""
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.2, "reduce_scatter": 0.2})
    found = layout(group, top_k=1)
    kinds = []
    for us_per_row in (0.0, 1e3):
        monkeypatch.setattr(planning, "measure_moves", lambda *_, us=us_per_row: MoveTimes(us, us))
        kinds.append(DispatchPlanner(found.grid, "auto", 1).decide(found, LIKE, None).kind)
    assert kinds == ["all_gather", "all_to_all"]


def test_moves_are_measured() -> None:
    for is_sorted, needs_gradient in itertools.product((False, True), repeat=2):
        measured = measure_moves(torch.zeros(1, 4), MoveShape(9, 2, 3, 4, 2, is_sorted, needs_gradient))
        assert measured.row_us > 0
        assert measured.token_us > 0


@pytest.mark.parametrize("tokens", [0, 1, 1 << 40])
def test_moves_are_measured_of_as_many_tokens_as_fit(tokens: int) -> None:
    """Of 4 MiB each 16 fit; measured with 2 ranks of 8."""
    seen = []

    class Like(torch.Tensor):
        def new_ones(self, *shape: Any, **_: Any) -> torch.Tensor:
            seen.append(shape)
            return torch.ones(*shape)

    like = torch.zeros(1, 1 << 20).as_subclass(Like)
    assert measure_moves(like, MoveShape(tokens, 2, 1, 2, 1, False, False)).row_us > 0
    assert max(shape[0] for shape in seen) == (2 if tokens < 2 else 16)


def test_the_gradient_goes_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved in memory is measured with it."""
    asked = []

    def measure(_: object, shape: MoveShape) -> MoveTimes:
        asked.append(shape.needs_gradient)
        return MoveTimes(1.0, 2.0)

    monkeypatch.setattr(planning, "measure_moves", measure)
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0})
    forward, both = (
        DispatchPlanner(found.grid, "auto", 1).decide(found, LIKE, None).kinds_us
        for found in (layout(group, top_k=4), replace(layout(group, top_k=4), needs_gradient=True))
    )
    indices_us = 64 * 4 * 8  # have no gradient
    assert both == {
        "all_to_all": 2 * forward["all_to_all"] - 64 * 1.0,
        "all_gather": 2 * forward["all_gather"] - indices_us - 64 * 2.0,
    }
    assert asked == [False, True]


def test_calls_of_about_the_same_counts_are_decided_once() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 9.0, "reduce_scatter": 9.0})
    planner = DispatchPlanner(layout(group, top_k=2).grid, "auto", 1)
    first = planner.decide(layout(group, top_k=2), LIKE, None)
    assert planner.decide(layout(group, top_k=2), LIKE, None) is first
    assert planner.decide(layout(group, top_k=4), LIKE, None) is not first
    assert planner.decide(layout(group, top_k=2), LIKE.to(torch.float64), None) is not first


@pytest.mark.parametrize("count", [0, 1, 31, 33, 100, 4096, 4097, 10**9 + 7])
def test_counts_are_rounded_up_by_a_sixteenth_at_most(count: int) -> None:
    assert count <= _rounded(count) <= count * 17 / 16
    assert _rounded(_rounded(count)) == _rounded(count)


def test_inside_a_node_tokens_go_in_one_chunk() -> None:
    """The cores that compute copy the rows too; between nodes there is something to hide."""

    class Lying(Predicted):
        nodes = 1

        def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
            if x.dtype is torch.int64:  # how each rank's group lies
                return torch.tensor([[4 // self.nodes] * self.nodes + [0] * (4 - self.nodes)] * 4)
            return super().all_gather(x)

        def predicted_us(self, collective: str, num_bytes: int, shape: tuple[int, ...] | None = None) -> float | None:
            return 1e3 * num_bytes

    class AcrossNodes(Lying):
        nodes = 2

    def experts(rows: torch.Tensor, counts: Any, _: object) -> torch.Tensor:
        return rows

    inside, across = (
        DispatchPlanner(found.grid, "all_to_all", "auto").decide(found, LIKE, experts)
        for found in (layout(Lying(4, {}), top_k=2), layout(AcrossNodes(4, {}), top_k=2))
    )
    assert inside.chunks == 1
    assert "the cores that compute also copy" in inside.reason
    assert across.slices_us


@pytest.mark.parametrize(("top_k", "kind"), [(2, "all_to_all"), (8, "all_gather")])
def test_without_a_profile_the_kind_moves_fewer_rows(top_k: int, kind: str) -> None:
    group = Predicted(4, None)
    decision = DispatchPlanner(layout(group, top_k=top_k).grid, "auto", "auto").decide(
        layout(group, top_k=top_k), LIKE, None
    )
    assert (decision.kind, decision.chunks) == (kind, 1)
    assert "for want of a profile" in decision.reason


def test_what_was_asked_for_is_done() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.1, "reduce_scatter": 0.1})
    decision = DispatchPlanner(layout(group, top_k=4).grid, "all_to_all", 4).decide(layout(group, top_k=4), LIKE, None)
    assert (decision.kind, decision.chunks) == ("all_to_all", 4)


def test_padded_rows_go_in_one_chunk_by_all_to_all() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.1, "reduce_scatter": 0.1})
    padded = layout(group, top_k=4, capacity=16)
    decision = DispatchPlanner(padded.grid, "auto", "auto").decide(padded, LIKE, None)
    assert (decision.kind, decision.chunks) == ("all_to_all", 1)
    with pytest.raises(UsageError, match="in one chunk"):
        DispatchPlanner(padded.grid, "auto", 8).decide(padded, LIKE, None)


def test_experts_that_fsdp_shards_see_one_chunk() -> None:
    """Each call of them is a collective over ranks that see other counts."""

    class Sharded(torch.nn.Module):
        def unshard(self) -> None: ...

    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 9.0, "reduce_scatter": 9.0})
    found = layout(group, top_k=2)
    decision = DispatchPlanner(found.grid, "auto", "auto").decide(found, LIKE, Sharded())
    assert (decision.kind, decision.chunks) == ("all_to_all", 1)
    assert "gather the experts' shards" in decision.reason


def test_groups_that_lie_differently_are_priced_alike() -> None:
    """The slowest of them counts on every rank: else ranks of one grid would choose different things."""

    class Uneven(Predicted):
        def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
            if x.dtype is torch.int64:  # how groups lie: one inside a node, the others not
                return torch.tensor([[4, 0, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0], [1, 2, 1, 0]])
            return super().all_gather(x)

        def predicted_us(self, collective: str, num_bytes: int, shape: tuple[int, ...] | None = None) -> float | None:
            return float(len(shape or ()) * num_bytes)

    group = Uneven(4, {})
    found = layout(group, top_k=2)
    exchange_us = DispatchPlanner(found.grid, "auto", 1)._exchange_us(100)
    assert exchange_us == 300.0


def test_the_most_rows_are_of_the_fullest_rank() -> None:
    group = Predicted(2, None)
    grid = Grid(3, group, GroupCommunicator(None, "ep"), group)  # experts 2 + 1
    counts = torch.zeros(2, 1, 8, 3, dtype=torch.int64)
    counts[0, 0, 0] = torch.tensor([5, 1, 2])
    counts[1, 0, 3] = torch.tensor([7, 0, 1])
    found = Layout(grid, torch.zeros(0, 1, dtype=torch.int64), None, (8, 8), counts)
    assert found.most_rows == 13  # received by rank 0
    assert found.gathered_rows == (13, 3)
    assert found.most_expert_rows == 13

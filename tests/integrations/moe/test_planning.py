"""Decisions of the dispatcher from predictions: the pipeline's closed forms, the kind, the chunks; no processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from commlayer.collectives import GroupCommunicator
from commlayer.integrations.moe import measuring
from commlayer.integrations.moe.agreement import FINEST
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.integrations.moe.experts import GroupedExperts
from commlayer.integrations.moe.handle import ChoiceCounts
from commlayer.integrations.moe.measuring import MoveShape, measure_experts, measure_moves
from commlayer.integrations.moe.planning import DispatchDecision, DispatchPlanner, _rounded, slices_of
from commlayer.integrations.moe.row_maps import make_row_map
from commlayer.profiles.errors import DisagreementError, UsageError
from commlayer.profiles.links import Resource
from commlayer.scheduler.overlap import SLICES, ExpertTimes, Micros, choose_slices, pipeline
from commlayer.scheduler.plan import Op, Plan
from commlayer.scheduler.price import Timeline, schedule
from commlayer.scheduler.traffic import Traffic

TRAFFIC = Traffic(8000, 8, link=Resource.INTER, collective="all_to_all_v", nodes=(4, 4))


def time_pipeline(plan: Plan, exchange_us: Micros, experts_us: Micros) -> Timeline:
    """The timeline of a pipeline; each function takes a chunk's bytes."""
    times = {Op.ALL_TO_ALL: exchange_us, Op.COMPUTE: experts_us}
    return Timeline(plan, tuple(schedule(plan, [times[step.op](step.bytes) for step in plan.steps])))


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


@pytest.mark.parametrize("part", [0.001, 0.004, 0.01, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("latency_us", [0.0, 300.0])
@pytest.mark.parametrize("is_short", ["experts", "exchange"])
def test_slices_that_cannot_hide_enough_are_not_simulated(part: float, latency_us: float, is_short: str) -> None:
    """And where they are not, none would have been within the tolerance of one chunk."""

    def long(size: float) -> float:
        return latency_us + size

    def short(size: float) -> float:
        return part * size

    exchange_us, experts_us = (long, short) if is_short == "experts" else (short, long)
    slices, priced = choose_slices(TRAFFIC, exchange_us, experts_us)
    assert (len(priced) == 1) == (part <= 0.02)
    if len(priced) == 1:
        assert slices == (8,)
    for other in SLICES:
        plan = pipeline(TRAFFIC, other, ahead=len(other))
        both_us = sum(time_pipeline(plan, exchange_us, lambda size, n=n: n * experts_us(size)).total_us for n in (1, 2))  # type: ignore[misc]
        assert both_us * 1.03 >= priced[slices]
        assert other not in priced or priced[other] <= both_us * (1 + 1e-9)


def test_products_for_weights_behind_all_others_hide_the_way_back() -> None:
    """In the backward pass the last chunk is on its way back while they are made: 8000 µs one way, 8000 of products."""

    def linear(size: float) -> float:
        return size

    (_, at_once), (_, put_off) = (
        choose_slices(TRAFFIC, linear, linear, puts_off=puts_off) for puts_off in (False, True)
    )
    assert (at_once[8,], put_off[8,]) == (24_000 + 32_000, 24_000 + 24_000)
    assert (at_once[4, 4], put_off[4, 4]) == (16_000 + 24_000, 16_000 + 20_000)


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

    def predicted_us(
        self,
        collective: str,
        num_bytes: int,
        shape: tuple[int, ...] | None = None,
        *,
        siblings: int = 0,
        rows_of: Any = None,
        over: Any = None,
    ) -> float | None:
        assert shape is None or sum(shape) == self.size
        return None if self._us_per_byte is None else self._us_per_byte[collective] * num_bytes

    def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
        return x.expand(self.size, *x.shape[1:])  # all ranks measure the same


def layout(group: GroupCommunicator, *, top_k: int, capacity: int | None = None) -> ChoiceCounts:
    """Four ranks with 16 tokens each, whose choices are spread evenly over 4 experts."""
    grid = ExpertGrid(4, group, GroupCommunicator(None, "ep"), group)
    counts = torch.full((4, 1, 8, 4), 16 * top_k // 4 // 8 or 1)
    return ChoiceCounts(grid, torch.zeros(16, top_k, dtype=torch.int64), capacity, (16,) * 4, counts)


LIKE = torch.zeros(16, 8)
WHOLE = (8,)


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
    monkeypatch.setattr(measuring, "measure_moves", lambda *_: (us_per_row, us_per_row))
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": gathering_us, "reduce_scatter": gathering_us})
    found = layout(group, top_k=4)
    decision = DispatchPlanner(found.grid, "auto", WHOLE).decide(found, LIKE, None)
    moved_us = 64 * us_per_row
    assert decision.kinds_us == {
        "all_to_all": 2 * 64 * 32 + moved_us,
        "all_gather": gathering_us * (2 * 64 * 32 + 64 * 4 * (8 + 4)) + moved_us,
    }
    assert decision.kind == kind
    assert "predicted" in decision.reason


def test_all_tokens_count_against_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """k = 1: three of four tokens that are gathered and summed have no choice here."""
    kinds = []
    for us_per_row in (0.0, 1e3):
        group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.2, "reduce_scatter": 0.2})
        found = layout(group, top_k=1)
        monkeypatch.setattr(measuring, "measure_moves", lambda *_, us=us_per_row: (us, us))
        kinds.append(DispatchPlanner(found.grid, "auto", WHOLE).decide(found, LIKE, None).kind)
    assert kinds == ["all_gather", "all_to_all"]


def test_moves_are_measured() -> None:
    for is_sorted, needs_gradient in itertools.product((False, True), repeat=2):
        shape = MoveShape(2, 3, 4, 2, is_sorted, needs_gradient)
        assert all(us > 0 for us in measure_moves(torch.zeros(1, 4), 9, shape))


def test_what_is_measured_is_what_a_call_does() -> None:
    """On ones: each token is the sum of its 3 choices, of which one or two of each token are here; the gradient once more."""
    choices = torch.arange(24).view(8, 3) % 4
    everywhere = make_row_map(choices, 4)
    here = make_row_map(torch.where(choices < 2, choices, -1), 2)
    like, sums = torch.zeros(1, 5), (choices < 2).sum(1, keepdim=True).float()
    for is_sorted in (False, True):
        forward, both = (MoveShape(2, 3, 4, 2, is_sorted, needs_gradient) for needs_gradient in (False, True))
        assert torch.equal(measuring._exchange(like, everywhere, forward), torch.full((8, 5), 3.0))
        assert torch.equal(measuring._exchange(like, everywhere, both), torch.full((8, 5), 9.0))
        for shape in (forward, both):
            assert torch.equal(measuring._gather(like, here, 4, shape), sums[:4].expand(4, 5))


class Counted:
    """In place of measure_moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        self.shapes: list[MoveShape] = []
        monkeypatch.setattr(measuring, "measure_moves", self)

    def __call__(self, _: object, tokens: int, shape: MoveShape) -> tuple[float, float]:
        self.tokens.append(tokens)
        self.shapes.append(shape)
        return 1.0, 2.0


def test_moves_are_measured_once_for_all_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew for calls of more than twice as many tokens; at most for what 64 MiB hold, at least for 512."""
    counted, group = Counted(monkeypatch), Predicted(4, {"all_to_all_v": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0})
    first, second = (measuring.Measurements(layout(group, top_k=2).grid) for _ in range(2))
    shape = MoveShape(4, 2, 4, 1, False, False)
    for measured, tokens in (
        (first, 1),
        (second, 1000),
        (first, 1025),
        (second, 2050),
        (first, 1 << 40),
        (second, 1 << 50),
    ):
        found = measured.moves(LIKE, tokens, shape)
        assert (found.row_us, found.token_us) == (1.0, 2.0)
    assert counted.tokens == [512, 1025, (64 << 20) // 32]
    first.moves(LIKE.to(torch.bfloat16), 512, shape)
    first.moves(LIKE, 512, replace(shape, needs_gradient=True))
    assert counted.tokens[3:] == [512, 512]
    other = measuring.Measurements(layout(Predicted(4, {}), top_k=2).grid)
    other.moves(LIKE, 512, shape)
    assert len(counted.tokens) == 6


def test_prices_of_experts_have_the_moves_of_calls_with_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, grid = Counted(monkeypatch), layout(Predicted(4, {}), top_k=2).grid
    work = measuring.work_of_experts(GroupedExperts(8, 4), measuring.Measurements(grid), 2, 2048)
    assert (work.move_us, work.level_move_us) == (1.0, 0.0)
    again = measuring.work_of_experts(GroupedExperts(8, 4), measuring.Measurements(grid), 2)
    assert (counted.tokens, again.move_us) == ([2048], 1.0)  # what was measured for as many tokens stands
    assert counted.shapes[0].needs_gradient


def test_prices_of_experts_are_alike_on_ranks_that_have_one_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Counted(monkeypatch)
    monkeypatch.setattr(measuring, "measure_experts", lambda *_: [30.0, 40.0, 50.0])
    grid = replace(layout(Predicted(4, {}), top_k=2).grid, num_experts=7)
    works = [measuring.work_of_experts(GroupedExperts(8, 4, count=n), measuring.Measurements(grid), 2) for n in (2, 1)]
    assert works[0] == works[1]
    assert works[0].expert_us > 0


def test_a_failure_to_measure_is_raised_here_and_told_there() -> None:
    """Instead of leaving the other ranks in the exchange of what was measured."""

    class Told(Predicted):
        ranks = (10, 11, 12)
        theirs = float("nan")

        def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
            return torch.cat([torch.full_like(x, 5.0), x, torch.full_like(x, self.theirs)])

    class Sound(Told):
        theirs = 6.0

    def failing(*_: object) -> torch.Tensor:
        raise ValueError("my experts")

    def doing(rows: torch.Tensor, *_: object) -> torch.Tensor:
        return rows

    with pytest.raises(ValueError, match="my experts"):
        measuring.Measurements(layout(Sound(3, {}), top_k=2).grid).experts(failing, 9, LIKE)
    with pytest.raises(DisagreementError, match="rank 10: rank 12 failed"):
        measuring.Measurements(layout(Told(3, {}), top_k=2).grid).experts(doing, 9, LIKE)
    assert measuring.Measurements(layout(Sound(3, {}), top_k=2).grid).experts(doing, 9, LIKE).times_us == (5.0,) * 3


def test_experts_are_measured_anew_for_more_than_twice_the_rows() -> None:
    sizes: list[int] = []

    def experts(rows: torch.Tensor, *_: object) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows

    measured = measuring.Measurements(layout(Predicted(4, {}), top_k=2).grid)
    most = [measured.experts(experts, rows, LIKE).rows[-1] for rows in (3, 100, 128, 129, 200)]
    assert most == [64, 64, 64, 129, 129]
    assert sorted(set(sizes)) == [8, 16, 32, 64, 129]


def test_the_gradient_goes_the_same_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are moved in memory are measured with it."""
    counted = Counted(monkeypatch)
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0})
    forward, both = (
        DispatchPlanner(found.grid, "auto", WHOLE).decide(found, LIKE, None).kinds_us
        for found in (layout(group, top_k=4), replace(layout(group, top_k=4), needs_gradient=True))
    )
    indices_us = 64 * 4 * 8  # have no gradient
    assert both == {
        "all_to_all": 2 * forward["all_to_all"] - 64 * 1.0,
        "all_gather": 2 * forward["all_gather"] - indices_us - 64 * 2.0,
    }
    assert [shape.needs_gradient for shape in counted.shapes] == [False, True]


def test_calls_of_about_the_same_counts_are_decided_once() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 9.0, "reduce_scatter": 9.0})
    planner = DispatchPlanner(layout(group, top_k=2).grid, "auto", WHOLE)

    def of(tokens: int, like: torch.Tensor = LIKE) -> DispatchDecision:
        return planner.decide(replace(layout(group, top_k=2), tokens=(tokens,) * 4), like, None)

    assert of(1025) is of(1080)
    assert of(1025) is not of(1100)
    assert of(1025) is not of(1025, LIKE.to(torch.float64))
    assert planner.decide(layout(group, top_k=4), LIKE, None) is not planner.decide(layout(group, top_k=2), LIKE, None)
    first = of(1025)
    for tokens in range(40, 40 * 300, 40):  # more than are kept: the oldest go
        of(tokens)
    assert len(planner._decided) <= 256
    assert of(1025) == first


def test_counts_are_rounded_up_by_a_sixteenth_at_most() -> None:
    assert [_rounded(count) for count in (0, 1, 31, 33, 1024, 1025, 1080, 1088, 1089)] == [
        *(0, 1, 31, 34, 1024, 1088, 1088, 1088, 1152),
    ]
    for count in (100, 4097, 10**9 + 7):
        assert count <= _rounded(count) <= count * 17 / 16


@pytest.mark.parametrize(
    ("chunks", "slices"), [(1, (8,)), (2, (4, 4)), (8, (1,) * 8), ([1, 3, 3, 1], (1, 3, 3, 1)), ((8,), (8,))], ids=str
)
def test_chunks_are_fixed_by_number_or_by_eighths(chunks: Any, slices: tuple[int, ...]) -> None:
    assert slices_of(chunks) == slices


@pytest.mark.parametrize("chunks", [0, 3, -1, 1.5, "4", (), (8, 0), (4, 3), (9, -1), (2.0, 6), None], ids=str)
def test_other_chunks_are_refused(chunks: Any) -> None:
    with pytest.raises(UsageError, match=r"1, 2, 4 or 8.*eighths"):
        slices_of(chunks)


def test_inside_a_node_tokens_go_in_one_chunk() -> None:
    """The cores that compute copy the rows too; between nodes there is something to hide."""

    class Lying(Predicted):
        num_nodes = 1

        def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
            if x.dtype is torch.int64:  # how each rank's group lies
                return torch.tensor([[4 // self.num_nodes] * self.num_nodes + [0] * (4 - self.num_nodes)] * 4)
            return super().all_gather(x)

        def predicted_us(
            self,
            collective: str,
            num_bytes: int,
            shape: tuple[int, ...] | None = None,
            *,
            siblings: int = 0,
            rows_of: Any = None,
            over: Any = None,
        ) -> float | None:
            return 1e3 * num_bytes

    class AcrossNodes(Lying):
        num_nodes = 2

    def experts(rows: torch.Tensor, counts: Any, _: object) -> torch.Tensor:
        return rows

    inside, across = (
        DispatchPlanner(found.grid, "all_to_all", None).decide(found, LIKE, experts)
        for found in (layout(Lying(4, {}), top_k=2), layout(AcrossNodes(4, {}), top_k=2))
    )
    assert inside.chunks == 1
    assert "the cores that compute also copy" in inside.reason
    assert across.predicted_us == across.slices_us[across.slices] > 0
    assert (8,) in across.slices_us


@pytest.mark.parametrize(("top_k", "kind"), [(2, "all_to_all"), (8, "all_gather")])
def test_without_a_profile_the_kind_moves_fewer_rows(top_k: int, kind: str) -> None:
    group = Predicted(4, None)
    decision = DispatchPlanner(layout(group, top_k=top_k).grid, "auto", None).decide(
        layout(group, top_k=top_k), LIKE, None
    )
    assert (decision.kind, decision.chunks) == (kind, 1)
    assert "for want of a profile" in decision.reason


def test_what_was_asked_for_is_done() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.1, "reduce_scatter": 0.1})
    decision = DispatchPlanner(layout(group, top_k=4).grid, "all_to_all", (2, 2, 2, 2)).decide(
        layout(group, top_k=4), LIKE, None
    )
    assert (decision.kind, decision.slices) == ("all_to_all", (2, 2, 2, 2))


def test_padded_rows_go_in_one_chunk_by_all_to_all() -> None:
    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 0.1, "reduce_scatter": 0.1})
    padded = layout(group, top_k=4, capacity=16)
    decision = DispatchPlanner(padded.grid, "auto", None).decide(padded, LIKE, None)
    assert (decision.kind, decision.chunks) == ("all_to_all", 1)
    with pytest.raises(UsageError, match="in one chunk"):
        DispatchPlanner(padded.grid, "auto", (1,) * 8).decide(padded, LIKE, None)


def test_experts_that_fsdp_shards_see_one_chunk() -> None:
    """Each call of them is a collective over ranks that see other counts."""

    class Sharded(torch.nn.Module):
        def unshard(self) -> None: ...

    group = Predicted(4, {"all_to_all_v": 1.0, "all_gather": 9.0, "reduce_scatter": 9.0})
    found = layout(group, top_k=2)
    decision = DispatchPlanner(found.grid, "auto", None).decide(found, LIKE, Sharded())
    assert (decision.kind, decision.chunks) == ("all_to_all", 1)
    assert "gather the experts' shards" in decision.reason


def test_groups_that_lie_differently_are_priced_alike() -> None:
    """The slowest of them counts on every rank: else ranks of one grid would choose different things."""

    class Uneven(Predicted):
        def all_gather(self, x: torch.Tensor, rows: Any = None) -> torch.Tensor:
            if x.dtype is torch.int64:  # how groups lie: one inside a node, the others not
                return torch.tensor([[4, 0, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0], [1, 2, 1, 0]])
            return super().all_gather(x)

        def predicted_us(
            self,
            collective: str,
            num_bytes: int,
            shape: tuple[int, ...] | None = None,
            *,
            siblings: int = 0,
            rows_of: Any = None,
            over: Any = None,
        ) -> float | None:
            return float(len(shape or ()) * num_bytes)

    group = Uneven(4, {})
    found = layout(group, top_k=2)
    exchange_us = DispatchPlanner(found.grid, "auto", WHOLE)._times.exchange_us(100, None)
    assert exchange_us == 300.0


def test_the_most_rows_are_of_the_fullest_rank() -> None:
    group = Predicted(2, None)
    grid = ExpertGrid(3, group, GroupCommunicator(None, "ep"), group)  # experts 2 + 1
    counts = torch.zeros(2, 1, 8, 3, dtype=torch.int64)
    counts[0, 0, 0] = torch.tensor([5, 1, 2])
    counts[1, 0, 3] = torch.tensor([7, 0, 1])
    found = ChoiceCounts(grid, torch.zeros(0, 1, dtype=torch.int64), None, (8, 8), counts)
    assert found.most_rows == 13  # received by rank 0
    assert found.gathered_rows == (13, 3)
    assert found.most_expert_rows == 13

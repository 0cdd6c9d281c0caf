"""The pieces of the shadow without processes: which calls, and how far sums may be apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from plans_in_memory import everyones_moves, run_in_memory

from commlayer.auditing.comparing import Allowance, compare_results, is_sampled, sizes_of
from commlayer.profiles.errors import PlanError, SettingsError
from commlayer.scheduler import Strategy, Traffic, build
from commlayer.scheduler.plan import Buffer, Plan
from commlayer.scheduler.wire import Scaling, Wire, WireFormat
from commlayer.settings import Settings
from commlayer.transport.call_memory import reducer
from commlayer.wire.codecs import Codec

NODES = ((0, 2), (1, 3))
PLANS = [
    (Strategy.DIRECT, 1),
    (Strategy.HIERARCHICAL, 1),
    (Strategy.LEADERS, 1),
    (Strategy.PIPELINED, 3),
    (Strategy.RING, 2),
]


@pytest.mark.parametrize("every", [1, 2, 3, 7, 8, 100])
def test_one_call_of_each_window_is_sampled_and_each_place_in_turn(every: int) -> None:
    chosen = [number for number in range(every * every) if is_sampled(number, every)]
    assert [number // every for number in chosen] == list(range(every))
    assert sorted(number % every for number in chosen) == list(range(every))
    assert chosen[0] == 0


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "often", "", "10000000000", "٣"])
def test_what_is_no_number_of_calls_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_SHADOW must be a whole number"):
        Settings.from_environment({"COMMLAYER_SHADOW": value})


def test_a_number_of_calls_is_taken() -> None:
    assert Settings.from_environment({"COMMLAYER_SHADOW": "8"}).shadow == 8
    assert Settings.from_environment({"COMMLAYER_SHADOW": "1e3"}).shadow == 1000
    assert Settings.from_environment({}).shadow is None


def allowed(terms: torch.Tensor, op: str = "sum", wire: Wire | None = None) -> Allowance:
    sizes = [sizes_of(each, op) for each in terms]
    columns = [torch.stack(each) for each in zip(*sizes, strict=True)]
    whole = [each.prod(0) if op == "product" else each.sum(0) for each in columns]
    smallest = whole[1] if len(whole) > 1 else None
    return Allowance(op, len(terms), terms.dtype, whole[0], smallest, *(() if wire is None else (wire,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_other_orders_of_a_reduction_are_within_its_bound_and_other_numbers_are_not(
    dtype: torch.dtype, op: str
) -> None:
    terms = torch.randn(6, 5000, generator=torch.Generator().manual_seed(3)).to(dtype)
    pairs: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    pair = pairs[op]

    def reduced(order: list[int]) -> torch.Tensor:
        total = terms[order[0]].clone()
        for place in order[1:]:
            total = pair(total, terms[place])
        return total

    one, other = reduced([0, 1, 2, 3, 4, 5]), reduced([5, 0, 3, 1, 4, 2])
    assert compare_results(one, other, dtype, allowed(terms, op)).num_wrong == 0
    wrong = one.clone()
    wrong[1234] = wrong[1234] * 2 + 1
    assert compare_results(wrong, other, dtype, allowed(terms, op)) == (1234, 1)


def test_of_an_overflow_nothing_is_said_and_nan_must_stay() -> None:
    terms = torch.tensor([[3e38, 1.0, float("nan")], [3e38, 2.0, 1.0], [-3e38, 3.0, 1.0]])
    flat = torch.tensor([float("inf"), 6.0, float("nan")])
    assert compare_results(torch.tensor([3e38, 6.0, float("nan")]), flat, torch.float32, allowed(terms)).num_wrong == 0
    assert compare_results(torch.tensor([3e38, 6.0, 2.0]), flat, torch.float32, allowed(terms)) == (2, 1)


def test_bits_are_compared_also_of_nan_and_zero() -> None:
    a = torch.tensor([0.0, float("nan"), 1.0])
    assert compare_results(a, a.clone(), torch.float32, None).num_wrong == 0
    assert compare_results(a, torch.tensor([-0.0, float("nan"), 1.0]), torch.float32, None) == (0, 1)


@pytest.mark.parametrize("scaling", list(Scaling))
@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.INT8, WireFormat.FP8_E4M3, WireFormat.FP8_E5M2])
def test_sums_of_what_was_encoded_are_within_their_bound(wire_format: WireFormat, scaling: Scaling) -> None:
    wire = Wire(wire_format, 96, scaling, power_of_two=True)
    codec = Codec(wire, torch.float32)
    terms = torch.randn(4, 256, 96, generator=torch.Generator().manual_seed(1)) * 10.0
    rounded = torch.empty_like(terms)
    for rows, out in zip(terms, rounded, strict=True):
        message = torch.empty(wire.wire_bytes(256), dtype=torch.uint8)
        codec.encode(rows, message)
        codec.decode(message, out)
    assert compare_results(rounded.sum(0), terms.sum(0), torch.float32, allowed(terms, wire=wire)).num_wrong == 0
    wrong = rounded.sum(0)
    wrong[7, 9] += 200.0
    assert compare_results(wrong, terms.sum(0), torch.float32, allowed(terms, wire=wire)) == (7 * 96 + 9, 1)


# Plans


class PlannedSums(NamedTuple):
    """A call of a plan by the ranks of :data:`NODES`: ``inputs`` and flat's results, of each rank."""

    kind: str
    plan: Plan
    inputs: list[torch.Tensor]
    flats: list[torch.Tensor]
    root: int = 0
    splits: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def outputs(self) -> list[torch.Tensor]:
        """Return what the plan gives each rank, in the memory of one process."""
        plan = self.plan
        moves = everyones_moves(self.kind, plan, NODES, root=self.root, splits=self.splits)
        buffers = []
        for given, flat in zip(self.inputs, self.flats, strict=True):
            x = given.clone().view(-1).view(torch.uint8)
            is_in_place = plan.traffic.collective in ("all_reduce", "broadcast")
            output = x if is_in_place else torch.zeros(flat.nbytes, dtype=torch.uint8)
            buffers.append({Buffer.INPUT: x, Buffer.OUTPUT: output})
        coder = None if plan.wire.is_native else Codec(plan.wire, torch.float32).on_bytes()
        run_in_memory(plan, moves, buffers, reducer(torch.float32, "sum"), coder)
        return [each[Buffer.OUTPUT].view(torch.float32) for each in buffers]

    def num_wrong(self, outputs: list[torch.Tensor]) -> int:
        """How many elements are further from flat's than the shadow allows."""
        collective, wire = self.plan.traffic.collective, self.plan.wire
        allowance = None
        if collective in ("all_reduce", "reduce_scatter"):
            terms = torch.stack([each.view(-1) for each in self.inputs])
            allowance = allowed(terms, wire=None if wire.is_native else wire)
            allowance = replace(allowance, is_result_encoded=collective == "all_reduce" and not wire.is_native)
        count = 0
        for rank, (output, flat) in enumerate(zip(outputs, self.flats, strict=True)):
            own = allowance
            if allowance is not None and collective == "reduce_scatter":
                own = replace(allowance, magnitude=allowance.magnitude.chunk(4)[rank])
            count += compare_results(output, flat, torch.float32, own).num_wrong
        return count


def draw(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]


def planned_calls() -> list[PlannedSums]:
    """A call of every plan that applies."""
    calls = []
    x, rows = draw(1000), draw(4, 1000)
    of_all = {
        "all_gather": (16000, x, [torch.cat(x)] * 4),
        "all_reduce": (4000, x, [torch.stack(x).sum(0)] * 4),
        "reduce_scatter": (16000, rows, list(torch.stack(rows).sum(0))),
        "broadcast": (4000, x, [x[1].clone()] * 4),
    }
    for strategy, chunks in PLANS:
        for collective, (size, given, flat) in of_all.items():
            with suppress(PlanError):
                plan = build(Traffic.on_nodes(collective, size, (2, 2)), strategy, chunks)
                calls.append(PlannedSums("whole", plan, given, flat, int(collective == "broadcast")))
        for wire in (Wire(WireFormat.BF16, 100), Wire(WireFormat.FP8_E4M3, 100)):
            with suppress(PlanError):
                traffic = replace(Traffic.on_nodes("all_reduce", 4000, (2, 2)), wires=(wire,), element_bytes=4)
                plan = build(traffic, strategy, chunks, wire=wire)
                calls.append(PlannedSums("encoded", plan, x, [torch.stack(x).sum(0)] * 4))
    counts = [[(5 * a + 3 * b) % 7 * 8 for b in range(4)] for a in range(4)]
    splits = tuple((tuple(counts[a]), tuple(row[a] for row in counts)) for a in range(4))
    given = [torch.randn(sum(row) // 4, generator=torch.Generator().manual_seed(a)) for a, row in enumerate(counts)]
    parts = [part.split([count // 4 for count in row]) for part, row in zip(given, counts, strict=True)]
    plan = build(Traffic.on_nodes("all_to_all_v", 256, (2, 2)), Strategy.HIERARCHICAL)
    flats = [torch.cat([part[a] for part in parts]) for a in range(4)]
    return [*calls, PlannedSums("split", plan, given, flats, splits=splits)]


def test_every_plan_in_memory_is_within_what_the_shadow_allows_and_a_wrong_element_is_not() -> None:
    calls = planned_calls()
    assert len({(call.kind, call.plan.traffic.collective, call.plan.strategy) for call in calls}) > 15
    for call in calls:
        outputs = call.outputs()
        assert call.num_wrong(outputs) == 0, call.plan
        outputs[2][0] += 1000
        assert call.num_wrong(outputs) == 1, call.plan

"""The parts of benchmarks/moe.py that decide what its numbers mean: its statistics and tables, and the layer it compares with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.integrations import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.testing.plugin import ClusterFactory

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_ratio_is_taken_round_by_round() -> None:
    from moe_tables import ratios

    found = ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0])
    assert (found.low, found.middle, found.high) == (0.5, 0.5, 0.5)


def test_the_spread_is_the_median_and_the_quartiles() -> None:
    from moe_tables import spread

    assert str(spread([1, 2, 3, 4, 100])) == "3.000 [2.000, 4.000]"
    assert spread([7.0]).low == spread([7.0]).high == 7.0


def test_the_width_of_balance_lies_on_the_line_through_two_widths() -> None:
    from moe_tables import width_of_balance

    assert width_of_balance(1500, (256, 512), (600, 1100)) == 704  # 256 + 900 / (500 / 256) = 717, by 32
    assert width_of_balance(1, (256, 512), (600, 1100)) == 32
    assert width_of_balance(1000, (256, 512), (600, 500)) == 1024  # noise: in proportion to the larger one


def test_a_breakdown_is_the_mean_over_ranks_and_the_median_over_rounds() -> None:
    from moe_tables import PHASES, breakdown

    rounds = [[{"experts": 1000.0}, {"experts": 3000.0}], [{"experts": 9000.0}, {}], [{"experts": 4000.0}, {}]]
    found = breakdown("plain", "EP 2", rounds)
    assert found.phases_ms["experts"] == 2.0
    assert set(found.phases_ms) == set(PHASES)
    assert found.total_ms == 2.0


def test_time_is_charged_to_the_phase_that_ends_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_baseline import Clock, phase

    seconds = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])
    clock = Clock()

    class Takes(torch.autograd.Function):
        """1 s forward, 2 s backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seconds[0] += 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seconds[0] += 2
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    y = phase(clock, "experts", Takes.apply, phase(clock, "permute", Takes.apply, x))
    assert clock.spent_us == {"permute": 1e6, "experts": 1e6}
    y.sum().backward()
    assert clock.spent_us == {"permute": 3e6, "experts": 3e6}
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]


def plain_against_ours(ep: int) -> list[str]:
    from moe_baseline import Clock, PlainMoE, instrument

    dist.init_process_group("gloo")
    mesh = FoldedMesh({"ep": ep}, backend="commlayer")
    groups = {ranks: dist.new_group(list(ranks), backend="gloo") for ranks in mesh.mapping.groups("ep")}
    x = torch.randn(13, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    seen = []
    clock = Clock()
    for chunks in (None, 1, 4):
        layer = MoELayer(
            16, 24, RouterConfig(num_experts=4, top_k=2), mesh=mesh, dispatch="all_to_all", chunks=chunks or 1
        )
        call: Any = layer
        if chunks is None:
            call = PlainMoE(layer, groups[mesh.ranks("ep")], 2, clock)
        elif chunks == 4:
            instrument(layer, clock)  # measuring changes nothing
        given = x.detach().requires_grad_()
        out = call(given)
        out.backward(torch.ones_like(out))
        seen.append([out.detach(), given.grad, *(parameter.grad for parameter in layer.parameters())])
        if chunks != 1:
            assert set(clock.spent_us) == {"router", "permute", "dispatch", "experts", "combine"}
    return [
        f"chunks {chunks}, tensor {place}"
        for chunks, tensors in ((1, seen[1]), (4, seen[2]))
        for place, (mine, theirs) in enumerate(zip(tensors, seen[0], strict=True))
        if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("ep", [4, 2])
def test_the_plain_layer_gives_what_ours_gives(ep: int, emulated_cluster: ClusterFactory) -> None:
    assert emulated_cluster(2, 2).run(plain_against_ours, ep) == [[]] * 4


def test_the_document_says_what_failed_and_what_was_not_run() -> None:
    from moe_document import Found, document
    from moe_layer import LayerResult, Shape
    from moe_tables import PHASES, Breakdown, HostRow, KindRow, LayerRow, spread

    def row(way: str, mapping: str, ratio: float) -> LayerRow:
        return LayerRow(way, mapping, 512, "", None, spread([1000 * ratio]), 1.0, 2.0, spread([ratio]), 3, "1e-07")

    rows = [
        row("plain", "EP 8", 1.0),
        row("planned", "EP 8", 0.7),
        row("plain", "EP 4", 0.5),
        row("planned", "EP 4", 0.21),
    ]
    rows.append(LayerRow("DeepSpeed", "EP 8", 512, why_not="not installed"))
    layer = LayerResult(Shape(), 512, 1.0, 1.0, 1.0, rows, [Breakdown("plain", "EP 8", dict.fromkeys(PHASES, 1.0))], "")
    times = {"all_to_all": spread([2.0]), "all_gather": spread([1.0])}
    kinds = [KindRow(8, 2, {}, times, times, "all_to_all", 3, "0e+00")]
    host = [HostRow("forward", spread([2.0]), spread([3.0]), spread([1.5]), 3)]
    text = document("2026-01-01", {"machine": "2 cores"}, Found(host, kinds, layer, failed={"kinds": "too slow"}), {})
    for part in (
        "planned / plain, EP 8: 0.700 (target 0.75: met)",
        "planned EP 4 / planned EP 8: 0.300 (target 0.4: met); plain EP 4 / plain EP 8: 0.500 (target 0.4: missed)",
        "not run: not installed",
        "chosen within the margin: 0 of 1",
        "target 1.3: missed",
        "**kinds broke off**: too slow",
    ):
        assert part in text

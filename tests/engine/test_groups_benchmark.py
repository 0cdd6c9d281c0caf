"""The parts of benchmarks/groups.py that decide what its numbers mean: groups of its layouts, what is tried, error and regret."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.traffic import Traffic

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def cell(chosen: str = "flat", reason: str = "", **ways: tuple[float | None, list[float]]) -> Any:
    from groups_cells import Cell, Way

    tried = [Way(name, predicted, times) for name, (predicted, times) in ways.items()]
    return Cell("TP2×DP, dp", (2, 2), 2, False, "all_reduce", 1 << 20, chosen, reason, tried)


@pytest.mark.parametrize("world", [4, 8, 16, 32])
def test_the_groups_of_a_layout_cover_every_rank_once(world: int) -> None:
    from groups_cells import layouts

    for name, groups in layouts(world).items():
        assert sorted(rank for group in groups for rank in group) == list(range(world)), name
        assert len({len(group) for group in groups}) == 1, name


def test_layouts_are_those_of_trainers_each_once() -> None:
    from groups_cells import layouts

    found = layouts(8)
    assert found["TP2×DP, dp"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert found["TP2×EP2×EDP, edp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert found["CP2×DP, cp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert "EP4×EDP2, edp" not in found, "on 8 ranks these are the groups of TP2×EP2×EDP"
    assert layouts(16)["EP8×EDP2, edp"][0] == (0, 8)


def test_a_sweep_measures_all_ranks_a_node_and_rails() -> None:
    from groups_cells import is_swept

    assert [is_swept(shape, (4, 4)) for shape in ((4, 4), (4,), (1, 1))] == [True] * 3
    assert [is_swept(shape, (4, 4)) for shape in ((2, 2), (2,), (1,))] == [False] * 3
    assert not is_swept((1, 1), (4, 4, 4, 4))


def test_large_sizes_are_for_few_siblings_of_few_ranks() -> None:
    from groups_cells import sizes_of

    assert sizes_of([range(4), range(4, 8)]) == [1 << 20, 4 << 20, 16 << 20]
    assert sizes_of([(rank, rank + 4) for rank in range(4)]) == [1 << 20, 4 << 20]
    assert sizes_of([range(16)]) == [1 << 20, 4 << 20]


def test_the_chosen_plan_flat_and_the_best_of_each_strategy_are_tried_once() -> None:
    from groups_cells import contenders

    prices = {
        "flat": (Strategy.FLAT, 90.0),
        "flat_direct": (Strategy.DIRECT, 80.0),
        "hierarchical": (Strategy.HIERARCHICAL, 12.0),
        **{f"pipelined×{n}": (Strategy.PIPELINED, 10.0 + n) for n in (2, 3, 4, 6)},
    }
    priced: list[Any] = [
        SimpleNamespace(plan=SimpleNamespace(name=name, strategy=strategy), total_us=us)
        for name, (strategy, us) in prices.items()
    ]
    found = [each.plan.name for each in contenders(priced, "pipelined×6")]
    assert len(found) == len(set(found))
    assert found[0] == "flat", "the others' results are compared with its"
    assert set(found) == {"flat", "flat_direct", "hierarchical", "pipelined×2", "pipelined×6", "pipelined×3"}
    assert {each.plan.name for each in contenders(priced[:1], "flat")} == {"flat"}


def test_where_nothing_has_a_price_one_plan_of_each_strategy_is_tried() -> None:
    from groups_cells import unpriced

    plans = unpriced(Traffic.on_nodes("all_reduce", 1 << 20, (2, 2)))
    assert [plan.name for plan in plans] == ["flat", "flat_direct", "hierarchical", "leaders", "pipelined×4"]
    assert [plan.name for plan in unpriced(Traffic.on_nodes("all_gather", 1 << 20, (2,)))] == ["flat", "flat_direct"]


def test_error_and_regret_are_of_the_median_of_the_chosen_plan() -> None:
    found = cell("hierarchical", hierarchical=(60.0, [40.0, 50.0, 500.0]), flat=(10.0, [41.0, 40.0, 1.0]))
    assert found.of_chosen.measured_us == 50.0
    assert found.error == pytest.approx(0.2)
    assert found.best.plan == "flat"
    assert found.regret == pytest.approx(0.25)
    assert cell(flat=(10.0, [8.0]), hierarchical=(5.0, [9.0])).regret == 0.0


def test_a_cell_without_a_price_has_a_regret_but_no_error() -> None:
    found = cell(reason="no curve", flat=(None, [30.0]), hierarchical=(None, [20.0]))
    assert found.error is None
    assert found.regret == pytest.approx(0.5)
    assert found.as_row()["best"] == "hierarchical"


def test_the_summary_counts_what_was_planned() -> None:
    from groups_cells import summary, summary_table

    cells = [cell(flat=(float(us), [100.0]), other=(None, [80.0])) for us in range(90, 101)]
    cells.append(cell(reason="no curve", flat=(None, [30.0]), other=(None, [10.0])))
    found = summary(cells)
    assert found["planned"] == pytest.approx(11 / 12)
    assert found["error median"] == pytest.approx(0.05)
    assert found["error 90 %"] == pytest.approx(0.09)
    assert found["regret median"] == pytest.approx(0.25)
    assert found["regret worst"] == pytest.approx(2.0)
    assert "| all | 12 | 91.7% | 5.0% | 9.0% | 25.0% | 200.0% | 0 |" in summary_table({"2x4": cells})

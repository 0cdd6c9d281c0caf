"""Recorded loads run again: by hand for a static placement, and what ways of placing gain."""

from __future__ import annotations

import pytest

from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping import clusters
from commlayer.scheduler.placement.expert_placement import ExpertPlacement
from commlayer.scheduler.placement.llep import llep_spilled
from commlayer.scheduler.placement.load_replay import replay_loads
from commlayer.scheduler.placement.placement_price import ExpertWork, LayerLoad, PlacementPrices
from examples.synthetic_loads import synthetic_loads


@pytest.fixture(scope="module")
def prices() -> PlacementPrices:
    return PlacementPrices(clusters.load("h100-eos").profile_of((4, 4)), ExpertWork.of_shape(2048, 1408, tflops=400))


def test_static_steps_are_those_that_are_priced(prices: PlacementPrices) -> None:
    loads = synthetic_loads("zipf", experts=16, layers=2, steps=3, tokens=4096, top_k=2)
    found = replay_loads(loads, prices, "static", every=1)
    start = ExpertPlacement.in_order(16, 8)
    for step in range(3):
        each = [prices.layer(LayerLoad(counts, 2), start).total_us for counts in loads.counts[step]]
        assert found.step_us[step] == pytest.approx(sum(each))
    assert (found.num_migrations, found.migration_us) == (0, 0.0)
    assert (found.rank_rows == loads.counts.reshape(3, 2, 8, 2).sum(-1)).all()


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_llep_decides_in_every_micro_batch_by_its_own_load(micro_batches: int) -> None:
    work = ExpertWork.of_shape(2048, 1408, tflops=400, micro_batches=micro_batches)
    prices = PlacementPrices(clusters.load("h100-eos").profile_of((4, 4)), work)
    loads = synthetic_loads("zipf", experts=16, layers=2, steps=3, tokens=32768, top_k=2)
    found = replay_loads(loads, prices, "llep", every=1)
    start = ExpertPlacement.in_order(16, 8)
    for step in range(3):
        spilled = [llep_spilled(counts / micro_batches, start) for counts in loads.counts[step]]
        each = [
            prices.layer(LayerLoad(counts, 2), start, own)
            for counts, own in zip(loads.counts[step], spilled, strict=True)
        ]
        assert all(price.sent_us for price in each)
        assert found.step_us[step] == pytest.approx(sum(price.total_us for price in each))
    assert found.busiest < replay_loads(loads, prices, "static").busiest
    assert (found.num_migrations, found.migration_us) == (0, 0.0)


def test_ways_of_placing_gain_where_loads_are_skewed_and_cost_nothing_where_even(prices: PlacementPrices) -> None:
    def total(kind: str, way: str) -> float:
        loads = synthetic_loads(kind, experts=32, steps=36, tokens=65536, top_k=4, period=24, seed=2)  # type: ignore[arg-type]
        return replay_loads(loads, prices, way, every=12).total_us  # type: ignore[arg-type]

    assert total("uniform", "place") == total("uniform", "llep") == total("uniform", "static")
    for kind in ("zipf", "drifting"):
        assert total(kind, "oracle") <= total(kind, "place") * 1.001
        assert total(kind, "place") < 0.95 * total(kind, "static")
        assert total(kind, "place") < total(kind, "eplb")


def test_what_cannot_be_replayed_is_refused(prices: PlacementPrices) -> None:
    with pytest.raises(UsageError, match="one of static"):
        replay_loads(synthetic_loads("zipf", experts=16), prices, "other")  # type: ignore[arg-type]

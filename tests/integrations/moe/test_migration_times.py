"""The kept over migrations: medians of steps before and behind it, what was promised, and the slowest rank's times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlayer.integrations.moe import migration_times
from commlayer.integrations.moe.migration_times import MigrationTimes, PlacementPromise
from commlayer.statistics import PlacementStats, came_of_placement


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, that the kept sees."""
    now = [100.0]
    monkeypatch.setitem(vars(migration_times), "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.fixture
def slowest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times of another rank, ns, with which this one's are compared."""
    theirs = [-1, -1]

    def all_reduce(told: torch.Tensor, op: Any, *, group: object, async_op: bool) -> Any:
        assert async_op
        return SimpleNamespace(wait=lambda: told.copy_(torch.maximum(told, torch.tensor(theirs))))

    monkeypatch.setitem(
        vars(migration_times), "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=torch.distributed.ReduceOp)
    )
    return theirs


def new_record() -> PlacementStats:
    return {
        "step": 7,
        "layers": 2,
        "copies": 3,
        "copy_bytes": 64,
        "reason": "eplb",
        "promised_migration_us": None,
        "migration_us": None,
        "waited_us": None,
        "step_before_us": None,
        "promised_step_us": None,
        "step_us": None,
    }


def migration(took_us: float | None, waited_us: float = 20.0) -> Any:
    return SimpleNamespace(took_us=took_us, waited_us=waited_us)


def make_steps(kept: MigrationTimes, clock: list[float], *times_us: float, is_moving: bool = False) -> None:
    for time_us in times_us:
        kept.begin_step()
        clock[0] += time_us / 1e6
        kept.end_step(is_moving=is_moving)
        clock[0] += 1000.0  # what the placer does itself is in no step


def test_steps_before_and_behind_are_compared_and_those_beside_it_are_not(
    clock: list[float], slowest: list[int]
) -> None:
    group: Any = SimpleNamespace(group=None)
    kept, noted = MigrationTimes(group), new_record()
    make_steps(kept, clock, 500.0, 300.0, 400.0, 9000.0, 410.0)
    kept.begins()
    make_steps(kept, clock, 7000.0, is_moving=True)  # as where an optimizer leaves a step out
    slowest[:] = [90_000, 5_000]
    kept.switched(migration(80.0), noted, PlacementPromise(60.0, 110.0))
    make_steps(kept, clock, 8000.0)
    assert (noted["promised_migration_us"], noted["migration_us"]) == (60.0, None)
    assert noted["step_before_us"] == pytest.approx(410.0)
    assert noted["promised_step_us"] == pytest.approx(300.0)
    make_steps(kept, clock, 330.0, 320.0)
    assert (noted["migration_us"], noted["waited_us"]) == (90.0, 20.0)
    assert noted["step_us"] is None, "two steps are no median"
    make_steps(kept, clock, 310.0)
    assert noted["step_us"] == pytest.approx(320.0)
    said = came_of_placement(noted)
    assert said == (
        "the migration took 90 µs (promised 60 µs); a step waited 20 µs for it; steps take 320 µs (promised 300 µs), "
        "410 µs before"
    )


def test_nothing_is_promised_of_what_nobody_predicted(clock: list[float], slowest: list[int]) -> None:
    group: Any = SimpleNamespace(group=None)
    kept, noted = MigrationTimes(group), new_record()
    make_steps(kept, clock, 500.0)
    kept.begins()
    kept.switched(migration(None), noted, None)
    kept.close()
    assert noted == {**new_record(), "waited_us": 20.0}
    assert came_of_placement(new_record()) == ""


def test_more_is_not_saved_than_a_step_takes(clock: list[float], slowest: list[int]) -> None:
    group: Any = SimpleNamespace(group=None)
    kept, noted = MigrationTimes(group), new_record()
    make_steps(kept, clock, 500.0, 500.0, 500.0)
    kept.begins()
    kept.switched(migration(1.0), noted, PlacementPromise(60.0, 1e6))
    assert noted["promised_step_us"] == 0.0


def test_migrations_one_after_the_other_have_each_its_own_times(clock: list[float], slowest: list[int]) -> None:
    group: Any = SimpleNamespace(group=None)
    kept, first, second = MigrationTimes(group), new_record(), new_record()
    for each, took_us in ((first, 1.0), (second, 2.0)):
        kept.begins()
        kept.switched(migration(took_us), each, None)
        make_steps(kept, clock, 5.0)
    make_steps(kept, clock, 5.0, 5.0, 5.0)
    assert (first["migration_us"], second["migration_us"]) == (1.0, 2.0)
    assert first["step_us"] is None
    assert second["step_us"] == pytest.approx(5.0)

"""Some of the trials of benchmarks/switch_faults.py, with its own verdict: no hang, no mixed plans, all bits right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commlayer.testing.plugin import ClusterFactory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the first trial's ranks leave the profile that they measure, for the others."""
    return str(tmp_path_factory.mktemp("profiles"))


def first_like(**fields: Any) -> Any:
    """The first trial with these fields."""
    from switch_faults import draw

    trials = map(draw, range(10_000))
    return next(trial for trial in trials if all(getattr(trial, name) == value for name, value in fields.items()))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "fields",
    [
        {"fault": "killed", "stage": "edge", "point": "while links are timed", "victim": 1},
        {"fault": "killed", "stage": "commit", "point": "before it decides"},
        {"fault": "stopped for a while", "stage": "acknowledge", "victim": 1},
        {"fault": "slow", "stage": "commit", "victim": 0},
        {"fault": "store lost", "stage": "commit", "point": "when it has decided"},
    ],
    ids=lambda fields: f"{fields['fault']} {fields.get('point') or fields['stage']}",
)
def test_a_fault_at_a_switch(emulated_cluster: ClusterFactory, profiles: str, fields: dict[str, Any]) -> None:
    import switch_faults

    trial = first_like(shape=(2, 2), appointment=2, **fields)
    cluster = emulated_cluster(2, 2, inter="400mbit")
    for _ in range(
        3
    ):  # a switch that nobody keeps, because ranks are late, has no such point: then another job has to come to it
        found = switch_faults.run(trial, cluster, profiles)
        assert found.is_good, found
        if found.is_struck:
            return
    pytest.fail(f"no job came to the point of the fault: {found}")


def test_trials_come_to_every_stage_with_every_fault() -> None:
    from switch_faults import FAULTS, STAGES, draw

    trials = [draw(seed) for seed in range(300)]
    assert trials == [draw(seed) for seed in range(300)]
    assert len(Counter((trial.stage, trial.fault) for trial in trials)) == len(STAGES) * len(FAULTS)
    points = {point for who in STAGES.values() for each in who.values() for point in each}
    assert {trial.point for trial in trials} == points


def test_plans_that_differ_are_found() -> None:
    from switch_faults import Notes

    notes = Notes(3)
    notes.record(0, 7, 1, "flat")
    notes.record(1, 7, 1, "flat")
    assert notes.records(7) == [notes.records(7)[0]] * 2  # the third rank never came to it
    notes.record(2, 7, 2, "flat")
    assert len(set(notes.records(7))) == 2
    notes.record(2, 7, 1, "hierarchical")
    assert len(set(notes.records(7))) == 2

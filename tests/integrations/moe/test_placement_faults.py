"""Some of the trials of benchmarks/placement_faults.py, with its verdict: no hang, the dead is named, the checkpoint loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commlayer.testing.plugin import ClusterFactory

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def first_like(**fields: Any) -> Any:
    """The first trial with these fields."""
    from placement_faults import draw

    trials = map(draw, range(10_000))
    return next(trial for trial in trials if all(getattr(trial, name) == value for name, value in fields.items()))


@pytest.mark.cluster
@pytest.mark.parametrize(
    "fields",
    [
        {"point": "before it sends gradients", "victim": 0, "migration": 1},
        {"point": "before it writes", "victim": 3, "migration": 1},
    ],
    ids=lambda fields: fields["point"],
)
def test_a_rank_dies_while_experts_move(emulated_cluster: ClusterFactory, fields: dict[str, Any]) -> None:
    import placement_faults

    trial = first_like(shape=(2, 2), **fields)
    found = placement_faults.run(trial, emulated_cluster(2, 2))
    assert found.is_good, found


def test_trials_come_to_every_point_in_every_shape() -> None:
    from placement_faults import POINTS, SHAPES, draw

    trials = [draw(seed) for seed in range(100)]
    assert trials == [draw(seed) for seed in range(100)]
    assert len(Counter((trial.point, trial.shape) for trial in trials)) == len(POINTS) * len(SHAPES)

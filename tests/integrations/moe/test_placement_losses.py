"""A short form of benchmarks/placement_losses.py, with copies, in FP64: another order of sums is far below an error there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commlayer.testing.plugin import ClusterFactory

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.cluster
def test_with_copies_a_run_is_the_same_up_to_the_order_of_sums(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from placement_losses import WAYS, compare

    monkeypatch.setenv("COMMLAYER_PROFILE", "none")
    found = compare(WAYS[2], emulated_cluster(2, 2), emulated_cluster(1, 3), steps=10, moves=4)
    assert found.migrations == 4
    assert found.copies > 0
    assert max(found.same) < 1e-13, "copies share rows, so sums are in another order"
    assert max(found.other + found.in_order) < 1e-13


def test_the_first_step_beyond_the_target_is_told() -> None:
    from placement_losses import WAYS, Compared

    found = Compared(WAYS[1], 1, 3.0, 2.0, [0.0, 1e-7, 2e-6, 1e-8], [], [])
    assert found.first_beyond() == 3
    assert found.first_beyond(1e-5) is None
    assert not found.equal_bits
    assert replace(found, same=[0.0, 0.0]).equal_bits

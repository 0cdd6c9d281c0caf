"""Judges of trainers' jobs: a witness, for whom whatever `commlayer diagnose` says of one that ends well is a false alarm;
and losses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from commlayer.emulation import EmulatedCluster
from commlayer.testing.witness import alarms, testifying

__all__ = ["compare_losses", "no_alarms"]


@pytest.fixture(autouse=True)
def no_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in whose jobs the checker of hangs would have found something at any moment."""
    run = EmulatedCluster.run

    def judged(cluster: EmulatedCluster, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="commlayer-witness-") as folder:
            result = run(cluster, testifying(fn, Path(folder)), *args, **options)
            found = alarms(Path(folder))
        assert not found, "of a job that ended well commlayer diagnose says:\n" + "\n".join(found)
        return result

    monkeypatch.setattr(EmulatedCluster, "run", judged)


def compare_losses(got: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], *, tolerance: float) -> None:
    """Compare every rank's loss at every step; ``tolerance`` is relative, 0: the same bits."""
    assert len(got) == len(expected) > 1
    for rank, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert len(one) == len(other) > 0
        for step, (loss, wanted) in enumerate(zip(one, other, strict=True)):
            difference = abs(loss - wanted) / abs(wanted)
            assert difference <= tolerance, (
                f"rank {rank}, step {step}: loss {loss}, expected {wanted}: {difference:.1e}"
            )

"""A fixture that gives jobs of a module a witness: whatever `commlayer diagnose` says of one that ends well is a false alarm."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commlayer.emulation import EmulatedCluster
from commlayer.testing.witness import alarms, testifying

__all__ = ["no_alarms"]


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

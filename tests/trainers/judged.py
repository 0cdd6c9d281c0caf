"""Judges of trainers' jobs: a witness, for whom whatever `commlayer diagnose` says of one that ends well is a false alarm;
losses; which plans and dispatches ran; and what a job says."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from witness import alarms, testifying

from commlayer.auditing import first_step
from commlayer.emulation import EmulatedCluster
from commlayer.statistics import Stats

__all__ = [
    "Said",
    "check_words",
    "compare",
    "compare_losses",
    "dispatches",
    "no_alarms",
    "nothing_is_light",
    "plans",
    "said",
]

_OURS = "commlayer: "


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


class HasLosses(Protocol):
    """The results of a rank."""

    @property
    def losses(self) -> list[float]: ...


def compare(got: Sequence[HasLosses], expected: Sequence[HasLosses], *, steps: int, tolerance: float) -> None:
    """Compare every rank's loss at each of so many steps, after which what is expected may go on."""
    assert {len(one.losses) for one in got} == {steps}
    compare_losses([one.losses for one in got], [one.losses[:steps] for one in expected], tolerance=tolerance)


def plans(found: Stats, description: str = "") -> set[tuple[str, str]]:
    """Which collectives were moved by which plans, in groups whose description begins with this."""
    groups = [group for group in found["groups"] if group["description"].startswith(description)]
    return {(call["collective"], call["plan"]) for group in groups for call in group["calls"]}


def dispatches(found: Stats) -> set[tuple[str, str]]:
    """Who dispatched tokens, and by which way."""
    return {(each["dispatcher"], each["kind"]) for each in found["dispatches"]}


class Said(NamedTuple):
    """Lines on stderr. ``noise``: others' than commlayer's, without numbers, the backend's name, and the progress of bars."""

    ours: list[str]
    noise: set[str]


def said(capfd: pytest.CaptureFixture[str]) -> Said:
    """Return what all ranks have said since the last look."""
    lines = capfd.readouterr().err.replace("distributed_backend=commlayer", "distributed_backend=gloo").splitlines()
    ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    others = {re.sub(r":\s*\d+%\|.*", ": progress", line) for line in lines if not line.startswith(_OURS)}
    return Said(ours, {re.sub(r"\d+", "#", line) for line in others})


@pytest.fixture
def nothing_is_light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the line at the end of the first step come for a tiny model too."""
    monkeypatch.setattr(first_step, "_HEAVY_BYTES", 1)


def check_words(found: Said, stock: Said, *planned: str, steps: bool = True) -> None:
    """Check that a job says no more than the ``stock`` trainer but a line each that begins with ``planned``, and, where an
    optimizer ``steps``, one at the end of the first step, of what stayed flat and why."""
    assert not stock.ours
    assert found.noise <= stock.noise, "it says what it does not say on Gloo"
    wanted = [*planned, *(["in the first step "] if steps else [])]
    assert len(found.ours) == len(wanted), found.ours
    assert all(line.startswith(words) for line, words in zip(found.ours, wanted, strict=True)), found.ours
    if steps:
        assert re.search(r" on 2 nodes stayed flat \(\d+ calls?, .* in all\): .", found.ours[-1])

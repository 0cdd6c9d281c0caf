"""The profile that a job measures by itself: its file says what the job decided by. Without processes: nothing is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from commlayer import calibrate
from commlayer.all_ranks import AllRanks
from commlayer.cli.main import main
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.choose import Planner, choose
from commlayer.scheduler.traffic import Traffic
from commlayer.settings import Settings
from commlayer.testing.synthetic import synthetic_profile

SIZES = [2**k for k in range(12, 27)]


class OneSpeaks:
    """Eight ranks of which this one speaks for all."""

    rank, size, device_type = 0, 8, "cpu"

    def gather(self, value: Any, _: type[Any]) -> list[Any]:
        return [value] * self.size

    def from_first(self, value: Any, _: type[Any]) -> Any:
        return value


def planner_of_a_job(folder: Path) -> Planner:
    ranks = cast("AllRanks", OneSpeaks())
    settings = Settings(cache=str(folder))
    planner = calibrate.planner_for(settings, Topology.parse("2x4"), ranks, is_whole_job=True, timeout_s=1.0)
    assert planner is not None
    return planner


def test_the_file_of_a_probe_decides_as_the_job_that_measured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = synthetic_profile(bytes_per_us={"intra": 60.0}, error=0.01)
    calls: list[Profile] = []

    def measure(*_: Any, **__: Any) -> Profile:
        calls.append(measured)
        return measured

    monkeypatch.setattr(calibrate, "measure_cluster", measure)
    first = planner_of_a_job(tmp_path)
    (path,) = tmp_path.iterdir()
    later = planner_of_a_job(tmp_path)
    assert len(calls) == 1  # a job that finds the file measures nothing

    seen, as_measured = [], []
    for size in SIZES:
        traffic = Traffic(size, 2, 4)
        name = first.decide(traffic).plan.name
        assert later.decide(traffic).plan.name == name
        answer = CliRunner().invoke(main, ["plan", "--profile", str(path), "--bytes", str(size), "--json"])
        assert answer.exit_code == 0, answer.output
        decision = json.loads(answer.output)["decision"]
        assert name in (decision["strategy"], f"{decision['strategy']}×{decision['chunks']}")
        assert decision["tolerance"] == 0.25 or size < 64 << 10
        seen.append(name)
        as_measured.append(choose(traffic, measured).plan.name)
    assert set(seen[: SIZES.index(64 << 10)]) == {"flat"}
    assert set(seen) != {"flat"}
    assert seen != as_measured  # else there was nothing to write down

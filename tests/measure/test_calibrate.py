"""The profile that a job measures by itself: its file says what the job decided by, and the cache keeps the first."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from commlayer.cli.main import main
from commlayer.measure import calibrate
from commlayer.measure.all_ranks import AllRanks
from commlayer.profiles.errors import ProfileError
from commlayer.profiles.profile import Profile, read_profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner, choose
from commlayer.scheduler.traffic import Traffic
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory
from commlayer.testing.synthetic import synthetic_profile

SIZES = [2**k for k in range(12, 27)]


class OneSpeaks:
    """Eight ranks of which this one speaks for all."""

    rank, size, device_type, store = 0, 8, "cpu", None

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


# The cache


def plan_without(monkeypatch: pytest.MonkeyPatch, settings: Settings, name: str = "mine") -> Planner:
    """Of a job whose measuring gives a profile of that name."""
    monkeypatch.setattr(calibrate, "measure_cluster", lambda *_, **__: synthetic_profile().replace(name=name))
    ranks = cast("AllRanks", OneSpeaks())
    planner = calibrate.planner_for(settings, Topology.parse("2x4"), ranks, is_whole_job=True, timeout_s=1.0)
    assert planner is not None
    return planner


def entry_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Where the cache has the profile of such a job."""
    plan_without(monkeypatch, Settings(cache=str(folder)))
    (path,) = folder.iterdir()
    path.unlink()
    return path


def socket_at(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


@pytest.mark.timeout(20)  # without its mend a FIFO is waited for
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, socket_at, lambda path: path.symlink_to("/dev/null")])
def test_an_entry_that_is_no_file_is_said_once_left_alone_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], make: Any
) -> None:
    path = entry_of(monkeypatch, tmp_path)
    make(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    capfd.readouterr()
    planner = plan_without(monkeypatch, Settings(cache=str(tmp_path)))
    assert planner.profile.name == "mine"
    assert stat.S_IFMT(path.stat().st_mode) == kind
    assert list(tmp_path.iterdir()) == [path]
    why, measured = capfd.readouterr().err.splitlines()
    assert f"is not kept: {path}: expected a regular file, got a" in why
    assert "COMMLAYER_CACHE" in why
    assert measured.endswith("or is none")
    assert " s, not kept. " in measured


@pytest.mark.parametrize("cache", ["/" + "x" * 5000, "/tmp/a\0b", "/dev/null", "/tmp/\ud800"])
def test_a_cache_folder_that_cannot_be_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cache: str
) -> None:
    assert plan_without(monkeypatch, Settings(cache=cache)).profile.name == "mine"
    said = capfd.readouterr().err
    assert said.count("not kept: ") == 1
    assert " s, not kept. " in said
    assert len(said) < 1000


def test_a_folder_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan_without(monkeypatch, Settings(cache="/proc/no/such/folder")).profile.name == "mine"
    assert "could not keep it" in capfd.readouterr().err


@pytest.mark.parametrize("content", ["{", '{"\x1b[31m": 1}'])
def test_a_damaged_entry_is_measured_again_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], content: str
) -> None:
    path = entry_of(monkeypatch, tmp_path)
    path.write_text(content)
    assert plan_without(monkeypatch, Settings(cache=str(tmp_path))).profile.name == "mine"
    assert read_profile(path).name == "mine"
    said = capfd.readouterr().err
    assert "cannot be used and is measured again" in said
    assert "\x1b" not in said
    assert (
        plan_without(monkeypatch, Settings(cache=str(tmp_path)), "another").profile.name == "mine"
    )  # that of the cache


@pytest.mark.parametrize("theirs", ["whole", "damaged"])
def test_of_jobs_that_measure_at_once_the_first_one_s_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], theirs: str
) -> None:
    path = entry_of(monkeypatch, tmp_path)

    def measure(*_: Any, **__: Any) -> Profile:
        synthetic_profile().replace(name="theirs").save(path)  # while this one still measures
        if theirs == "damaged":
            path.write_text("{")
        return synthetic_profile().replace(name="mine")

    monkeypatch.setattr(calibrate, "measure_cluster", measure)
    assert planner_of_a_job(tmp_path).profile.name == "mine"  # what this job's ranks have measured
    assert read_profile(path).name == ("theirs" if theirs == "whole" else "mine")
    assert list(tmp_path.iterdir()) == [path]
    assert ("as another job has kept it meanwhile" in capfd.readouterr().err) == (theirs == "whole")


JOB = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from commlayer.measure import calibrate
folder, job, rank, jobs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
measure = calibrate.measure_cluster
def together(*arguments, **options):
    profile = measure(*arguments, **options)
    (folder / f"measured-{job}-{rank}").touch()
    while len(list(folder.glob("measured-*"))) < 2 * jobs:  # nobody keeps one before all have measured
        time.sleep(0.01)
    return profile
calibrate.measure_cluster = together
dist.init_process_group("commlayer", init_method=f"file://{folder}/store-{job}", rank=rank, world_size=2)
print("FINGERPRINT", dist.group.WORLD._planned.choices.planner.profile.fingerprint)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.cluster
def test_jobs_that_start_at_once_each_use_their_own_and_later_ones_the_first(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COMMLAYER_")}
    environment |= {"COMMLAYER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(jobs: list[str]) -> tuple[list[set[str]], str]:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, str(tmp_path), job, str(rank), str(len(jobs))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for job in jobs
            for rank in range(2)
        ]
        ends = [rank.communicate(timeout=100) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), ends
        found = [{line for line in out.splitlines() if "FINGERPRINT" in line} for out, _ in ends]
        return [found[k] | found[k + 1] for k in range(0, len(found), 2)], "".join(err for _, err in ends)

    (first, second), said = run(["first", "second"])
    assert len(first) == len(second) == 1  # the same on all ranks of a job
    assert first != second
    (path,) = (tmp_path / "cache").iterdir()
    kept = {f"FINGERPRINT {read_profile(path).fingerprint}"}
    assert kept in (first, second)
    assert said.count("kept in ") == said.count("as another job has kept it meanwhile") == 1
    (third,), said = run(["third"])
    assert third == kept
    assert said.count("measured one") == 0


@pytest.mark.cluster
@pytest.mark.parametrize("wrong", ["x" * 5000, "/" + "x" * 5000, "fifo"])
def test_a_profile_that_cannot_be_read_is_an_error_on_all_ranks(
    emulated_cluster: ClusterFactory, tmp_path: Path, wrong: str
) -> None:
    if wrong == "fifo":
        os.mkfifo(path := tmp_path / "fifo.json")
        wrong = str(path)

    def job() -> str:
        os.environ["COMMLAYER_PROFILE"] = wrong
        with pytest.raises(ProfileError) as caught:
            dist.init_process_group("commlayer")
        return str(caught.value)

    for text in emulated_cluster(nodes=1, ranks_per_node=2).run(job, timeout_s=60.0):
        assert len(text) < 600
        assert "xxx" in text or "fifo.json: cannot read the profile: expected a regular file, got a FIFO" in text

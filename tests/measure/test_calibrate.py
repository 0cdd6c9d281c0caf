"""The profile that a job measures by itself: its file says what the job decided by, and the cache keeps the first."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from synthetic_profiles import synthetic_profile

from commlayer.backend import world
from commlayer.cli.main import main
from commlayer.measure import calibrate
from commlayer.measure.all_ranks import AllRanks
from commlayer.measure.calibrate import cluster_key
from commlayer.measure.machines import Machine, describe_machine
from commlayer.measure.profiler import UNFINISHED
from commlayer.profiles.curve import Curve
from commlayer.profiles.errors import ProfileError
from commlayer.profiles.links import Resource, SlowLink
from commlayer.profiles.profile import Profile, read_profile
from commlayer.profiles.topology import Topology
from commlayer.scheduler.decision import Planner, choose
from commlayer.scheduler.experience import start_check
from commlayer.scheduler.traffic import Traffic
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory

SIZES = [2**k for k in range(10, 27)]


class OneSpeaks:
    """Eight ranks of which this one speaks for all."""

    rank, size, device_type, store = 0, 8, "cpu", None

    def gather(self, value: Any, _: type[Any]) -> list[Any]:
        return [value] * self.size

    def from_first(self, value: Any, _: type[Any]) -> Any:
        return value

    def time_all_reduce(self, _: int) -> float:
        return 1000.0


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
        assert decision["tolerance"] == 0.25 or size < calibrate.PROBE.min_bytes
        seen.append(name)
        as_measured.append(choose(traffic, measured).plan.name)
    assert set(seen[: SIZES.index(calibrate.PROBE.min_bytes)]) == {"flat"}
    assert set(seen) != {"flat"}
    assert seen != as_measured  # else there was nothing to write down


# The cache


def plan_without(monkeypatch: pytest.MonkeyPatch, settings: Settings, name: str = "mine") -> Planner:
    """The planner of a job whose measuring gives a profile of that name."""
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
    path.write_text(content, encoding="utf-8")
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
            path.write_text("{", encoding="utf-8")
        return synthetic_profile().replace(name="mine")

    monkeypatch.setattr(calibrate, "measure_cluster", measure)
    assert planner_of_a_job(tmp_path).profile.name == "mine"  # what this job's ranks have measured
    assert read_profile(path).name == ("theirs" if theirs == "whole" else "mine")
    assert list(tmp_path.iterdir()) == [path]
    assert ("as another job has kept it meanwhile" in capfd.readouterr().err) == (theirs == "whole")


# A cached profile that does not hold any more


def of_all_ranks(*times_us: float) -> Profile:
    """A profile with the time of an all_reduce of all eight ranks at 4 KiB, 96 KiB, …"""
    sizes = tuple(4096 * 24**k for k in range(len(times_us)))
    curve = Curve("all_reduce", Resource.INTER, 8, sizes, times_us)
    return synthetic_profile().replace(curves=(*synthetic_profile().curves, curve))


class Timed:
    """Eight ranks whose all_reduces take these times, one after the other, µs; the last one for ever."""

    size = 8

    def __init__(self, *times_us: float) -> None:
        self.times_us, self.asked = list(times_us), list[int]()

    def time_all_reduce(self, num_bytes: int) -> float:
        self.asked.append(num_bytes)
        return self.times_us.pop(0) if len(self.times_us) > 1 else self.times_us[0]


def stale(profile: Profile, ranks: Timed) -> str:
    return start_check.why_stale(profile, ranks.size, ranks.time_all_reduce)


@pytest.mark.parametrize(
    ("times_us", "size"),
    [((1e2, 1e3, 1e4), 4096 * 24**2), ((1e2, 1e3, 8e5), 4096 * 128), ((2e5, 1e6), 4096), ((2e4,), 4096)],
)
def test_a_check_asks_for_the_largest_size_that_is_quick(times_us: tuple[float, ...], size: int) -> None:
    profile = of_all_ranks(*times_us)
    ranks = Timed(profile.curves[-1].at(size))
    assert stale(profile, ranks) == ""
    assert set(ranks.asked) == {size}
    assert len(ranks.asked) <= 3


@pytest.mark.parametrize("factor", [0.51, 0.6, 1.0, 1.5, 1.9])
def test_a_profile_that_is_about_right_holds(factor: float) -> None:
    assert stale(of_all_ranks(1e2, 1e3), Timed(1e3 * factor)) == ""


@pytest.mark.parametrize("factor", [0.01, 0.2, 0.39, 0.45, 2.2, 2.6, 1000.0])
def test_a_profile_that_is_off_says_so_and_costs_little(factor: float) -> None:
    ranks = Timed(1e3 * factor)
    said = stale(of_all_ranks(1e2, 1e3), ranks)
    assert said == f"an all_reduce of {4096 * 24} bytes takes {1e3 * factor:.0f} µs, and it says 1000"
    assert sum(1e3 * factor for _ in ranks.asked[:-2]) < 1e5  # two rounds at most once the time is spent


@pytest.mark.parametrize(
    ("factor", "is_off"), [(0.3, True), (0.49, True), (0.51, False), (1.0, False), (1.9, False), (2.1, True)]
)
def test_a_larger_call_decides_where_latency_may_hide_other_links(factor: float, is_off: bool) -> None:
    profile = of_all_ranks(1e2, 1.5e4, 3e5)
    small, large = 4096 * 128, 4096 * 256
    small_us, large_us = map(profile.curves[-1].at, (small, large))
    ranks = Timed(*[small_us / 2] * 3, large_us * factor)
    said = stale(profile, ranks)
    assert said.startswith(f"an all_reduce of {large} bytes takes") == is_off == bool(said)
    assert ranks.asked[:3] == [small] * 3
    assert set(ranks.asked[3:]) == {large}
    assert len(ranks.asked) <= 5


def test_a_hiccup_is_no_drift() -> None:
    assert stale(of_all_ranks(1e2, 1e3), Timed(9e3, 9e3, 1e3)) == ""
    assert stale(of_all_ranks(1e2, 1e3), Timed(9e3, 9e3, 9e3, 9e3, 1e3)) == ""
    assert stale(of_all_ranks(1e2, 1e3), Timed(1e2, 1e2, 1e2, 1e2, 1e3)) == ""


def test_a_profile_without_calls_of_all_ranks_is_not_checked() -> None:
    ranks = Timed(1e9)
    assert stale(synthetic_profile(), ranks) == ""
    assert not ranks.asked


def test_a_cached_profile_that_is_off_is_measured_again_and_replaced_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "measure_cluster", lambda *_, **__: of_all_ranks(10.0).replace(name="old"))
    assert planner_of_a_job(tmp_path).profile.name == "old"  # whoever measures does not check
    capfd.readouterr()
    monkeypatch.setattr(calibrate, "measure_cluster", lambda *_, **__: of_all_ranks(1000.0).replace(name="new"))
    assert planner_of_a_job(tmp_path).profile.name == "new"
    (path,) = tmp_path.glob("*.json")
    assert read_profile(path).name == "new"
    warned, measured = capfd.readouterr().err.splitlines()
    assert f"{path} does not hold any more and is measured again: an all_reduce of 4096 bytes takes 1000 µs" in warned
    assert f"measured one in 0.0 s, kept in {path}" in measured
    assert planner_of_a_job(tmp_path).profile.name == "new"
    assert capfd.readouterr().err == ""


def test_a_probe_whose_time_is_up_leaves_curves_to_later_jobs(
    emulated_cluster: ClusterFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every rank ends at the same call, keeps the first curve of each link, and works; the next job measures the rest."""

    def job(deadline_s: float) -> tuple[list[tuple[str, str, int]], str | None]:
        os.environ.pop("COMMLAYER_PROFILE", None)
        os.environ["COMMLAYER_CACHE"] = str(tmp_path)
        setattr(calibrate, "why_stale", lambda *_: "")  # noqa: B010  # in this rank's process
        setattr(calibrate, "PROBE", replace(calibrate.PROBE, deadline_s=deadline_s))  # noqa: B010
        dist.init_process_group("commlayer")
        total = torch.ones(1 << 16)
        dist.all_reduce(total)
        assert (total == dist.get_world_size()).all()
        profile = world.current().planner.profile  # type: ignore[union-attr]
        dist.destroy_process_group()
        return [curve.key for curve in profile.curves], profile.environment.get(UNFINISHED)

    first, *others = emulated_cluster(2, 2).run(job, 0.0)
    assert others == [first] * 3
    keys, left_out = first
    assert len({link for _, link, _ in keys}) == len(keys) == 3
    assert left_out is not None
    assert f"Time was up before {left_out} of its curves, which later jobs measure" in capfd.readouterr().err
    (whole, none_left), *others = emulated_cluster(2, 2).run(job, math.inf)
    assert others == [(whole, none_left)] * 3
    assert none_left is None
    assert (len(whole), whole[:3]) == (3 + int(left_out), keys)
    assert f"the cached profile lacked {left_out} curves: measured them in" in capfd.readouterr().err
    emulated_cluster(2, 2).run(job, 0.0)
    assert "measured" not in capfd.readouterr().err


# The key


def machine(**other: Any) -> Machine:
    return msgspec.structs.replace(Machine("eth", "cpu", 8, True), **other)


def test_names_of_hosts_and_the_order_of_nodes_do_not_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(topology: Topology, machines: list[Machine], intra: str = "auto") -> str:
        return cluster_key(topology, machines, "cpu", intra)

    fast, slow = machine(interface="fast"), machine()
    by_node, in_turn = ["a", "a", "b", "b"], ["x", "y", "x", "y"]
    first = key(Topology.from_identities(by_node), [fast, fast, slow, slow])
    assert first.startswith("2x2-")
    assert first == key(Topology.from_identities(in_turn), [slow, fast, slow, fast])
    assert first != key(Topology.from_identities(by_node), [fast] * 4)
    assert first != key(Topology.from_identities(by_node), [fast, fast, slow, slow], "gloo")
    for other in ({"interface": "x"}, {"processor": "x"}, {"cores": 9}, {"shares_memory": False}):
        assert key(Topology.parse("2x2"), [machine(**other)] * 4) != key(Topology.parse("2x2"), [machine()] * 4)


def test_a_machine_is_described_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    described = describe_machine(Settings())
    assert described.cores == os.cpu_count()
    for name in ("pod-abcde-0", "no such name", "localhost"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert "pod" not in repr(describe_machine(Settings()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert describe_machine(Settings()).interface.startswith("kind 772 driver ")  # ARPHRD_LOOPBACK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert describe_machine(Settings()).interface == "kind unknown driver unknown speed unknown mtu unknown"


def test_an_entry_of_an_earlier_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its name is another: nothing is said of it."""
    old = tmp_path / "2x4-0123456789abcdef.json"
    old.write_text('{"format": "commlayer-profile", "version": 0}', encoding="utf-8")
    assert plan_without(monkeypatch, Settings(cache=str(tmp_path))).profile.name == "mine"
    assert old.exists()
    assert len(capfd.readouterr().err.splitlines()) == 1


JOB = """
import sys, time
from pathlib import Path
import torch
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
calibrate.why_stale = lambda *_: ""  # whether links take as long in a job that is alone is not the question
dist.init_process_group("commlayer", init_method=f"file://{folder}/store-{job}", rank=rank, world_size=2)
print("FINGERPRINT", dist.group.WORLD._planned.choices.prices.planner.profile.fingerprint)
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

    for text in emulated_cluster(nodes=1, ranks_per_node=2).run(job):
        assert len(text) < 600
        assert "xxx" in text or "fifo.json: cannot read the profile: expected a regular file, got a FIFO" in text


class OnHosts(OneSpeaks):
    """Ranks of which each is on one of these hosts."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    def gather(self, value: Any, kind: type[Any]) -> list[Any]:
        return [kind(host) for host in self.hosts]


def test_slow_links_are_those_of_the_nodes_that_they_were_measured_on() -> None:
    topology = Topology.parse("3x1")
    plain = synthetic_profile(nodes=3).replace(environment={"hosts": "a b c"})
    slow = plain.replace(slow_links=[SlowLink((1,), 0.25)])
    here = cast("AllRanks", OnHosts("a/net:[1]", "b/net:[2]", "c/net:[3]"))
    there = cast("AllRanks", OnHosts("a/net:[9]", "c/net:[2]", "b/net:[3]"))
    assert calibrate._moved(plain, topology, there) == ""
    assert calibrate._moved(slow, topology, here) == ""
    assert calibrate._moved(slow, topology, there) == "it knows which nodes' links are slow, and this job is on others"

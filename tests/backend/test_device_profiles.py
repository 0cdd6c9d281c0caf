"""Profiles of a device's links: measured by the ranks of a group before its first call, decided by, and given up together.

Jobs share a cache, so that what one has measured the next one checks only.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays
from test_device_plans import losses, planned_calls, with_ddp, with_fsdp
from torch import nn
from torch._C._distributed_c10d import HashStore

import commlayer
from commlayer.backend.device_profiles import settle, veto
from commlayer.cli.cache_checks import cache_lines
from commlayer.cli.main import main
from commlayer.devices.accelerator import AcceleratorDevice
from commlayer.integrations.mesh import FoldedMesh
from commlayer.integrations.moe.layer import MoELayer
from commlayer.integrations.moe.router import RouterConfig
from commlayer.measure import calibrate
from commlayer.measure.device_harness import DeviceHarness, device_links
from commlayer.measure.profiler import SweepOptions, measure_cluster
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError, UsageError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile, read_profile
from commlayer.profiles.sweep import Repeats
from commlayer.scheduler.decision import choose
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.traffic import Traffic
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory

NO_DELAYS = StreamDelays(chance=0.0)
LARGE = 1 << 18
"""Elements of which the bytes take much longer on the wire than anything else does."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def by_itself(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs measure what they plan by, in little time: each size once."""
    for name in ("PROBE", "DEVICE_PROBE"):
        monkeypatch.setattr(calibrate, name, replace(getattr(calibrate, name), budget_s=0.3))
    monkeypatch.setenv("COMMLAYER_PROFILE", "auto")
    monkeypatch.setenv("COMMLAYER_CACHE", str(cache))


# Decisions, and training


class Routed(nn.Module):
    """A MoE layer over all ranks, between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(24, 32), nn.Linear(32, 6)
        mesh = FoldedMesh({"ep": dist.get_world_size()})
        self.moe = MoELayer(32, 24, RouterConfig(num_experts=8, top_k=2), mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        out: torch.Tensor = self.after(hidden + self.moe(hidden))
        return out


def with_moe(device: torch.device) -> nn.Module:
    """The gradients of what all ranks hold are summed as they come."""
    model = Routed().to(device)
    for name, parameter in model.named_parameters():  # of the device: moving a model there makes new ones
        if "experts" not in name:
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def plans_of(num_ranks: int) -> set[str]:
    """The plans that groups of so many ranks have launched."""
    groups = [group for group in commlayer.stats()["groups"] if len(group["ranks"]) == num_ranks]
    return {call["plan"] for group in groups for call in group["calls"]}


def decided() -> tuple[set[str], set[str], dict[str, tuple[list[float], list[float]]]]:
    """Plans of an all_reduce over nodes, and of one inside a node; losses on the CPU and on the device."""
    torch.set_num_threads(1)
    device = simulated_device(NO_DELAYS)
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for group, num in ((dist.group.WORLD, size), (inside, 2)):
        x = torch.ones(LARGE, device=device)
        dist.all_reduce(x, group=group)
        assert x.eq(num).all().item()
    over_nodes, in_node = plans_of(4), plans_of(2)
    found = {}
    for make in (with_ddp, with_fsdp, with_moe):
        on_cpu = losses(make, torch.device("cpu"))
        simulated_device(StreamDelays(seed=1, chance=0.5))
        found[make.__name__] = on_cpu, losses(make, device)
    dist.destroy_process_group()
    return over_nodes, in_node, found


@pytest.mark.usefixtures("by_itself")
def test_a_group_measures_its_links_and_decides_by_them(
    emulated_cluster: ClusterFactory, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = emulated_cluster(2, 2, inter="100mbit").run(decided)
    said = capfd.readouterr().err
    assert said.count("no profile of this group on simulated device (2x2) yet: measured one") == 1
    kept = [read_profile(path) for path in cache.glob("*.json")]
    (links,) = [each for each in kept if (each.topology, each.measured_on) == ("2x2", "simulated device")]
    listed = cache_lines(Settings(cache=str(cache)))
    assert sum(name == "device profile" for _, name, _, _ in listed) == len(kept) - 1  # and the CPU's
    # On a busy machine its times may say anything, but they are what is decided by; a flat call is the inner backend's own.
    over_nodes = choose(Traffic(4 * LARGE, 4, collective="all_reduce", nodes=(2, 2)), links).plan
    wanted = set() if over_nodes.strategy is Strategy.FLAT else {over_nodes.name}
    for by_links, in_node, found in outcomes:
        assert by_links == wanted
        assert in_node <= {"flat_direct"}  # on one level, by messages or, more often, by the inner backend's own call
        for on_cpu, on_device in found.values():
            assert on_device == pytest.approx(on_cpu, rel=1e-5)


# A rank that cannot


def spoilt(who: int) -> tuple[list[float], dict[str, int]]:
    """Two sums of a job in which rank ``who`` fails in the middle of the measurement."""
    device = simulated_device(NO_DELAYS)
    times: Any = DeviceHarness._span
    calls = 0

    def failing(self: Any, task: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9 and dist.get_rank() == who:
            raise RuntimeError("no memory left for it")
        return times(self, task, **how)

    DeviceHarness._span = failing  # type: ignore[method-assign]
    return sums_of(device)


def sums_of(device: torch.device) -> tuple[list[float], dict[str, int]]:
    """Two sums of a job that measures what it plans by."""
    torch.set_num_threads(1)
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    sums = []
    for _ in range(2):
        x = torch.ones(LARGE, device=device)
        dist.all_reduce(x)
        sums.append(x[-1].item())
    return sums, planned_calls()


@pytest.mark.usefixtures("by_itself")
def test_where_a_rank_cannot_measure_all_leave_it_to_the_inner_backend(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMLAYER_CACHE", str(tmp_path))
    for sums, planned in emulated_cluster(1, 3).run(spoilt, 1):
        assert sums == [3.0, 3.0]
        assert not planned
    said = capfd.readouterr().err
    assert said.count("are the inner backend's own") == 1
    assert "rank 1 left with RuntimeError: no memory left for it" in said


def unready(who: int) -> tuple[list[float], dict[str, int]]:
    """The same where its device cannot be waited for before anything is measured."""
    if int(os.environ["RANK"]) == who:
        AcceleratorDevice.synchronize = refused  # type: ignore[method-assign]
    return sums_of(simulated_device(NO_DELAYS))


def refused(self: AcceleratorDevice) -> NoReturn:
    raise RuntimeError("no device left for it")


@pytest.mark.usefixtures("by_itself")
def test_where_a_rank_cannot_begin_to_measure_the_others_hear_of_it(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are told: nobody waits for the timeout of a minute, and none takes it for a rank that is late."""
    monkeypatch.setenv("COMMLAYER_CACHE", str(tmp_path))
    for sums, planned in emulated_cluster(1, 2).run(unready, 1):
        assert sums == [2.0, 2.0]
        assert not planned
    assert "rank 1 left with RuntimeError: no device left for it" in capfd.readouterr().err


class Whole:
    """The board of a group of which nobody is missing."""

    rank = 1
    is_broken = has_leaver = False


class Culprit:
    """A judge who knows that rank 2 died."""

    def culprit(self) -> str:
        return "rank 2 died"


class Torn(Whole):
    """The same where a rank is gone."""

    is_broken = True
    judge = Culprit()


def verdicts(vetoes: dict[int, str], num_ranks: int = 3) -> list[str]:
    store, found = HashStore(), [""] * num_ranks

    def ask(rank: int) -> None:
        if rank in vetoes:
            veto(store, vetoes[rank])
        found[rank] = settle(store, num_ranks, Whole(), 20.0, f"rank {rank}")  # type: ignore[arg-type]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_settle_on_one_verdict() -> None:
    assert verdicts({}) == ["", "", ""]
    assert verdicts({1: "rank 1 cannot"}) == ["rank 1 cannot"] * 3
    (one,) = set(verdicts({0: "rank 0 cannot", 2: "rank 2 cannot"}))
    assert one in ("rank 0 cannot", "rank 2 cannot")


def test_a_rank_that_does_not_come_to_the_verdict_is_no_verdict() -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0: a rank did not come within 0\.01 s"):
        settle(HashStore(), 2, Whole(), 0.01, "rank 0")  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="rank 0: rank 2 died"):
        settle(HashStore(), 2, Torn(), 20.0, "rank 0")  # type: ignore[arg-type]


def test_who_waits_for_a_device_says_where_and_for_how_long() -> None:
    over = threading.Event()
    ranks, links = SimpleNamespace(size=2), SimpleNamespace(name="mine")
    harness: Any = SimpleNamespace(ranks=ranks, links=links, board=Whole(), timeout_s=0.01)
    words = r"rank 1, group of 2 ranks, before measuring the links of mine: nothing came within 0\.01 s"
    try:
        with pytest.raises(CollectiveTimeoutError, match=words):
            DeviceHarness._bounded(harness, over.wait, "before measuring")
    finally:
        over.set()


# The whole sweep

QUICK = SweepOptions(
    min_bytes=4096,
    max_bytes=65536,
    factor=16.0,
    repeats=Repeats(warmup=0, min_repeats=2, max_repeats=2),
    group_max_bytes=4096,
    group_repeats=Repeats(warmup=0, min_repeats=1, max_repeats=1),
    interference_rounds=1,
    timeout_s=20.0,
)


def profiled() -> Profile:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    links = device_links(simulated_device(NO_DELAYS))
    found = measure_cluster(QUICK, name="mine", kind="emulated", source="a test", links=links)
    dist.destroy_process_group()
    return found


def test_a_profile_of_a_device_has_what_the_cpus_has_and_products(
    emulated_cluster: ClusterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size is checked byte by byte before it is timed."""
    profiles = emulated_cluster(2, 2).run(profiled)
    profile = profiles[0]
    assert all(each == profile for each in profiles)
    assert (profile.environment["backend"], profile.measured_on) == ("simulated", "simulated device")
    inter, intra, device = Resource.INTER, Resource.INTRA, Resource.DEVICE
    keys = {curve.key for curve in profile.curves}
    assert {("all_to_all", inter, 2), ("all_gather", intra, 2), ("copy", device, 1)} <= keys
    assert {("all_reduce", inter, 4), ("all_reduce", intra, 2), ("reduce_scatter_single", inter, 2)} <= keys
    assert {("encode_bf16", device, 1), ("decode_bf16", device, 1)} <= keys
    beside = {(entry.resource, entry.other) for entry in profile.interference}
    assert {(inter, intra), (intra, inter), (inter, device)} <= beside
    assert {(link, Resource.COMPUTE) for link in (inter, intra)} <= beside
    assert {(Resource.COMPUTE, link) for link in (inter, intra)} <= beside

    path = tmp_path / "device.json"
    profile.save(path)
    shown = CliRunner().invoke(main, ["profiles", "show", str(path)])
    assert "measured on simulated device" in shown.output
    monkeypatch.setenv("COMMLAYER_PROFILE", str(path))
    assert "measured on simulated" in CliRunner().invoke(main, ["doctor"]).output


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a device whose tensors are moved here"):
        device_links(torch.device("xpu", 0))
    answer = CliRunner().invoke(main, ["measure", "--emulate", "1x2", "--device", "cuda"])
    assert answer.exit_code
    assert "the ranks of an emulated cluster have no GPU each" in answer.output

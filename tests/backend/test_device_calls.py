"""Calls on a device are calls like others: the ring, traces, the audit, the shadow, COMMLAYER_DEBUG and re-planning see them."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linear_profiles import linear_profile
from simulated.torch_device import simulated_device
from simulated.torch_streams import StreamDelays

import commlayer
from commlayer import GroupCommunicator, WireFormat, WirePolicy
from commlayer.auditing.shadow import Shadow
from commlayer.auditing.watch import GroupWatch
from commlayer.calls.instruments import Instrument
from commlayer.calls.movement import Movement
from commlayer.calls.ring import Call, recorded_calls
from commlayer.diagnosis.long_waits import waits_of_this_rank
from commlayer.engine.device_plans import DevicePlans
from commlayer.engine.executor import Ran
from commlayer.measure.link_times import time_links
from commlayer.profiles.errors import DisagreementError, TensorError
from commlayer.scheduler.experience.link_rates import LinkRates
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces.rank_files import read_folder

pytestmark = pytest.mark.cluster

SEEDS = 3
LAGGING = 0.5
"""How likely work on a stream waits for no reason."""


def start(**environment: str) -> tuple[torch.device, Any]:
    torch.set_num_threads(1)
    os.environ.update(environment)
    device = simulated_device(StreamDelays(seed=0, chance=LAGGING))
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return device, dist.group.WORLD


def calls_of(group: Any) -> Any:
    """The group's calls on the device."""
    return group._inner.on_devices["simulated"]


def ended(device: torch.device, group: Any) -> None:
    """Have all that was launched run, and be noted."""
    torch.get_device_module(device).synchronize()
    calls_of(group).launched.settle()


def every_verb(device: torch.device, count: int = 64) -> list[torch.Tensor]:
    """Every verb that has plans on a device, and one that has none; small integers, which any order sums alike."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(count, dtype=torch.float32, device=device) % 7 + rank
    mean, sent = x.clone(), x.clone()
    whole, part = torch.zeros(n * count, device=device), torch.zeros(count // n, device=device)
    swapped, parts = torch.zeros(count, device=device), [torch.zeros(count, device=device) for _ in range(n)]
    dist.all_reduce(x)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(part, x)
    dist.broadcast(sent, 1)
    dist.all_to_all_single(swapped, x)
    dist.all_gather(parts, x)
    return [x, mean, whole, part, sent, swapped, *parts]


COLLECTIVES = ["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "all_gather"]


# The ring and instruments


class Heard(Instrument):
    """Notes the moments of calls."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, Call]] = []

    def issued(self, call: Call) -> None:
        self.moments.append(("issued", call))

    def began(self, call: Call) -> None:
        self.moments.append(("began", call))

    def moving(self, call: Call, movement: Movement) -> None:
        assert not movement.source.is_cpu
        self.moments.append(("moving", call))

    def moved(self, call: Call) -> None:
        self.moments.append(("moved", call))

    def ended(self, call: Call) -> None:
        self.moments.append(("ended", call))


def listened() -> list[str]:
    device, group = start()
    heard = Heard()
    group.instruments.add(heard)
    for seed in range(SEEDS):
        simulated_device(StreamDelays(seed, LAGGING))
        heard.moments.clear()
        every_verb(device)
        ended(device, group)
        calls = [call for moment, call in heard.moments if moment == "issued"]
        assert [call.collective for call in calls] == COLLECTIVES
        for call in calls:
            moments = [moment for moment, of in heard.moments if of is call]
            by_plan = ["issued", "began", "moving", "moved", "ended"]
            assert moments == (by_plan if call.plan is not None else ["issued", "began", "ended"]), call
            assert 0 < call.issued_ns <= call.started_ns <= call.ended_ns, call
            assert call.plan is None or (call.moved_ns > 0 and call.inter_bytes >= 0 and call.run_bytes > 0), call
    ring = [call for call in recorded_calls() if call.track.name.endswith(" on simulated")]
    track = calls_of(group).track
    assert [call.number for call in ring] == list(range(1, len(COLLECTIVES) * SEEDS + 1))
    assert track.issued == track.done == len(ring)
    assert all(Path(call.code.co_filename).name == "test_device_calls.py" for call in ring), ring
    # A call that is refused was not made: the next has its number.
    with pytest.raises(TensorError):
        dist.all_gather_into_tensor(torch.zeros(4, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    assert track.issued == len(ring)
    group.instruments.remove(heard)
    dist.all_reduce(torch.ones(4, device=device))
    torch.get_device_module(device).synchronize()
    sequences = [None] * dist.get_world_size()
    dist.all_gather_object(sequences, calls_of(group).sequence)
    assert sequences == [len(ring) + 1] * dist.get_world_size()
    # Nobody has made a later call: a device's call is none that the host waits for.
    assert waits_of_this_rank(dist.get_rank(), track.numbering) == []
    commlayer.stats()  # takes note of what has run
    assert track.done == track.issued
    kept = weakref.ref(calls_of(group))
    gc.collect()
    gc.disable()
    del group, track, calls, call, heard
    dist.destroy_process_group()
    assert kept() is None, "the end of a group takes a search for cycles"
    return [call.plan.name if call.plan else "flat" for call in ring[: len(COLLECTIVES)]]


@pytest.mark.parametrize(("plan", "shadow"), [("hierarchical", ""), ("hierarchical", "1"), ("none", "")])
def test_instruments_and_the_ring_hear_of_calls_on_a_device(
    plan: str, shadow: str, emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plan != "none":
        monkeypatch.setenv("COMMLAYER_PLAN", plan)
    if shadow:
        monkeypatch.setenv("COMMLAYER_SHADOW", shadow)
    for names in emulated_cluster(2, 2).run(listened):
        assert names[-1] == "flat"
        assert (names[0] == "hierarchical") == (plan != "none")


# Traces


def traced(folder: str) -> None:
    device, group = start(COMMLAYER_PLAN="hierarchical", COMMLAYER_TRACE=folder)
    every_verb(device)
    x = torch.ones(8)
    dist.all_reduce(x)
    dist.destroy_process_group()
    del group


def test_a_trace_has_the_calls_on_a_device_with_their_steps(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    emulated_cluster(2, 2).run(traced, str(tmp_path))
    traces = list(read_folder(tmp_path))
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]
    for trace in traces:
        mine = [call for call in trace.calls if call.group.endswith(" on simulated")]
        assert [call.collective for call in trace.calls if call not in mine] == ["all_reduce"]
        assert [call.collective for call in mine] == COLLECTIVES
        for call in mine:
            assert call.start_ns <= call.end_ns
            if call.plan == "hierarchical":
                assert len(call.steps) >= 2
                assert all(call.start_ns <= step.start_ns <= step.end_ns <= call.end_ns for step in call.steps)
                assert sum(step.sent_bytes for step in call.steps) == call.inter_bytes + call.intra_bytes


# COMMLAYER_DEBUG


def compared() -> list[str]:
    device, group = start(COMMLAYER_DEBUG="detail", COMMLAYER_PLAN="hierarchical")
    every_verb(device)
    dist.all_reduce(torch.ones(3))  # and the CPU's beside them
    said = []
    before = commlayer.stats()["groups"][0]["calls"]

    def other_sizes() -> None:
        dist.all_reduce(torch.ones(8 + dist.get_rank() // 3, device=device))

    def other_roots() -> None:
        dist.broadcast(torch.ones(8, device=device), dist.get_rank() // 2)

    def other_verbs() -> None:
        x = torch.ones(2, device=device)
        if dist.get_rank():
            dist.all_gather([torch.ones(2, device=device) for _ in range(4)], x)
        else:
            dist.all_reduce(x)

    for wrong in (other_sizes, other_roots, other_verbs):
        with pytest.raises(DisagreementError) as caught:
            wrong()
        said.append(str(caught.value))
    assert commlayer.stats()["groups"][0]["calls"] == before  # nothing was launched
    every_verb(device)
    ended(device, group)
    dist.destroy_process_group()
    return said


def test_calls_on_a_device_are_compared_before_they_are_launched(emulated_cluster: ClusterFactory) -> None:
    for sizes, roots, verbs in emulated_cluster(2, 2).run(compared):
        assert "all_reduce(32 bytes" in sizes
        assert "36 bytes" in sizes
        assert "root 0" in roots
        assert "root 1" in roots
        assert "calls #" in verbs
        assert "all_gather" in verbs


# The shadow


@contextmanager
def wrong_on(rank: int) -> Iterator[None]:
    """One byte of what plans give on this rank is wrong."""
    run = DevicePlans.run

    def wrongly(self: DevicePlans, movement: Movement, **named: Any) -> Ran:
        ran = run(self, movement, **named)
        if dist.get_rank() == rank:
            ran.under_way.then(partial(movement.target.data.view(-1)[:1].add_, 1000))
        return ran

    DevicePlans.run = wrongly  # type: ignore[method-assign]
    try:
        yield
    finally:
        DevicePlans.run = run  # type: ignore[method-assign]


def shadowed() -> None:
    device, group = start(COMMLAYER_SHADOW="1", COMMLAYER_PLAN="hierarchical")
    calls = calls_of(group)
    shadow = calls.instruments.find(Shadow)
    compressed = GroupCommunicator(group, wire=WirePolicy((WireFormat.BF16,)), name="sums")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*differs from flat")
        every_verb(device)
        x = torch.randn(96, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        compressed.all_reduce_in_place(x).wait()
    assert shadow.num_compared == 7
    # Two ranks have nothing to do in this one.
    sent = [0, 0, 5, 0] if dist.get_rank() == 0 else [0] * 4
    received = [5, 0, 0, 0] if dist.get_rank() == 2 else [0] * 4
    out = torch.zeros(sum(received), device=device)
    dist.all_to_all_single(out, torch.full((sum(sent),), 3.0, device=device), received, sent)
    assert out.eq(3).all().item()
    assert shadow.num_compared == 8
    assert calls.launcher.is_planning
    for collective in ("all_reduce", "broadcast"):
        with (
            wrong_on(2),
            pytest.warns(UserWarning, match="differs from flat") if dist.get_rank() == 0 else warnings.catch_warnings(),
        ):
            x = torch.full((16,), 1.0, device=device)
            dist.all_reduce(x) if collective == "all_reduce" else dist.broadcast(x, 0)
        assert x.eq(4 if collective == "all_reduce" else 1).all().item()  # flat's result
        assert not calls.launcher.is_planning
        x = torch.ones(16, device=device)
        dist.all_reduce(x)
        assert x.eq(4).all().item()
        x = torch.ones(96, device=device)
        work = compressed.all_reduce_in_place(x)  # whoever calls still looks its plan up
        (summed,) = work.get_future().wait()
        assert summed.eq(4).all().item()
        shadow.is_over, calls.launcher.is_planning, calls.launcher.instead = False, True, None
    dist.destroy_process_group()


def test_a_wrong_byte_of_a_plan_on_a_device_is_found(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(2, 2).run(shadowed)


# The audit, and re-planning


def audited(path: str) -> tuple[Any, list[float]]:
    device, group = start(COMMLAYER_PROFILE=path, COMMLAYER_REPLAN="on")
    for _ in range(4):
        every_verb(device, 1 << 14)
        ended(device, group)
    calls = calls_of(group)
    watch = calls.instruments.find(GroupWatch)
    assert watch is not None
    (found,) = [each for each in commlayer.audit()["groups"] if each["group"].endswith(" on simulated")]
    times = time_links(calls.plans, 1 << 12)
    before = calls.plans.choices
    calls.order.in_turn(
        "re-planning", partial(watch.checks._use_choices, before.at_other_rates(LinkRates(1.0, (0.5, 1.0))))
    )
    assert calls.plans.choices is not before
    every_verb(device, 1 << 14)  # by the new choices
    dist.destroy_process_group()
    return found, list(times.taken_us.values())


def test_calls_on_a_device_are_audited_and_planned_anew(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    linear_profile("2x2").replace(environment={"backend": "simulated"}).save(path)
    outcomes = emulated_cluster(2, 2).run(audited, str(path))
    for audit, times in outcomes:
        assert audit["calls"], audit
        assert all(row["measured_us"] > 0 and row["promised_us"] > 0 for row in audit["calls"])
        assert times == outcomes[0][1]
        assert all(time > 0 for time in times)

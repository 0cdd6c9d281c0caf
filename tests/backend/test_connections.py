"""Plans whose large messages go over several connections, and groups whose first calls find out over how many."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import await_others

import commlayer
from commlayer import GroupOptions
from commlayer.emulation import EmulatedCluster
from commlayer.engine.connections import Connections
from commlayer.measure import trials
from commlayer.profiles.errors import ClusterError, PeerError, SettingsError, UsageError
from commlayer.settings import Settings

pytestmark = pytest.mark.cluster

LIMIT = timedelta(seconds=30)
Clusters = Callable[..., EmulatedCluster]


def plans_of(name: str) -> dict[str, int]:
    """The plans of the group's all_reduces, and how often each ran."""
    (group,) = [each for each in commlayer.stats()["groups"] if each["description"] == name]
    return {call["plan"]: call["calls"] for call in group["calls"] if call["collective"] == "all_reduce"}


def group_of(name: str, **options: Any) -> Any:
    return dist.new_group(pg_options=GroupOptions(**options), group_desc=name, timeout=LIMIT)


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-8, 9, (count,), generator=torch.Generator().manual_seed(seed)).float()  # every sum is exact


def total(count: int, seed: int, size: int) -> torch.Tensor:
    return torch.stack([numbers(count, seed + each) for each in range(size)]).sum(0)


def several_connections() -> None:
    dist.init_process_group("commlayer", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {plan: group_of(plan, plan=plan, connections=3) for plan in ("flat_direct", "hierarchical", "pipelined:4")}
    for number, count in enumerate((1, 7, 100_003, 1 << 20)):  # one element, odd, parts of odd sizes
        expected = total(count, 100 * number, size)
        for plan, group in groups.items():
            x = numbers(count, 100 * number + rank)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, expected), f"{plan}, {count} elements"
    for plan in groups:
        assert set(plans_of(plan)) == {f"{plan.replace(':', '×')}∥3"}
    coarse = group_of("coarse", plan="flat_direct", wire="int8!", connections=2)
    x = numbers(1 << 20, rank)
    dist.all_reduce(x, group=coarse)
    dist.all_gather(everyones := [torch.empty_like(x) for _ in range(size)], x)
    assert all(torch.equal(each, x) for each in everyones)
    assert set(plans_of("coarse")) == {"flat_direct∥2/int8"}
    dist.destroy_process_group()


def test_parts_of_messages_come_together_over_several_connections(emulated_cluster: Clusters) -> None:
    emulated_cluster(2, 2).run(several_connections)


def tried() -> None:
    dist.init_process_group("commlayer", timeout=LIMIT)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_of("tried", plan="tried")
    count = (1 << 20) + 3
    expected = total(count, 0, size)
    works = []
    for number in range(20):
        x = numbers(count, rank)
        work = dist.all_reduce(x, group=group, async_op=number % 2 == 0)
        works.append((x, work))
        small = torch.ones(3)
        dist.all_reduce(small, group=group)
        assert small.tolist() == [size] * 3
    for x, work in works:
        if work is not None:
            work.wait()
        assert torch.equal(x, expected)
    ran = plans_of("tried")
    assert set(ran) == {"flat_direct", *(f"flat_direct∥{each}" for each in (2, 4, 8)), "ring×4"}
    dist.all_gather_object(everyones := [None] * size, ran)
    assert all(each == ran for each in everyones), "ranks ran the same plans"
    before = plans_of("tried")
    for _ in range(2):
        dist.all_reduce(numbers(count, rank), group=group)
    changed = [name for name, calls in plans_of("tried").items() if calls != before[name]]
    assert len(changed) == 1, "after three rounds at most one plan is kept"
    dist.destroy_process_group()


def test_plans_take_turns_until_one_is_kept(emulated_cluster: Clusters) -> None:
    emulated_cluster(3, 1).run(tried)


def without_four(where: str) -> tuple[dict[str, int], list[str]]:
    """The plans of a group in which rank 1 cannot make its third connection, and what was warned."""
    dist.init_process_group("commlayer", timeout=LIMIT)
    rank, size, count = dist.get_rank(), dist.get_world_size(), (1 << 20) + 3
    group = group_of("narrow", plan="tried")
    if rank == 1:
        name = "shortage" if where == "shortage" else "_bounded"
        usual = getattr(Connections, name)

        def failing(connections: Connections, wanted: Any, *more: Any) -> Any:
            if where == "shortage":
                return "no descriptors" if wanted > 2 else ""
            if wanted == "messages, connection 3":
                raise RuntimeError("no route to a third")
            return usual(connections, wanted, *more)

        setattr(Connections, name, failing)
    trials._PATIENCE_S = (
        2.0  # not all of it is waited for: one rank fails at once, and the others hear of it behind theirs
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            x = numbers(count, rank)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, total(count, 0, size))
            y = numbers(2 * count, number + rank)  # a contest of its own
            dist.all_reduce(y, group=group)
            assert torch.equal(y, total(2 * count, number, size))
    dist.all_gather_object(everyones := [None] * size, plans_of("narrow"))
    assert everyones == [everyones[0]] * size, "ranks ran the same plans"
    return plans_of("narrow"), [str(each.message) for each in caught if "connections" in str(each.message)]


@pytest.mark.parametrize("where", ["shortage", "connecting"])
def test_connections_that_cannot_be_made_leave_the_contest(emulated_cluster: Clusters, where: str) -> None:
    found = emulated_cluster(2, 1).run(without_four, where)
    for rank, (ran, warned) in enumerate(found):
        assert set(ran) == {"flat_direct", "flat_direct∥2"}
        assert len(warned) == 1, "told once, whatever the contest"
        assert "4 connections between two ranks cannot be made" in warned[0]
        of_others = "rank 1 cannot" if where == "shortage" else "Timed out"
        assert ("no " if rank else of_others) in warned[0], warned


def one_too_many() -> str:
    """The error of a group whose plans shall all take a number of connections that cannot be had."""
    dist.init_process_group("commlayer", timeout=LIMIT)
    setattr(Connections, "shortage", lambda connections, number: "no descriptors")  # noqa: B010
    with pytest.raises(ClusterError) as caught:
        dist.all_reduce(torch.ones(1 << 20), group=group_of("wide", plan="tried", connections=3))
    return str(caught.value)


def test_a_number_of_connections_that_was_named_is_not_replaced(emulated_cluster: Clusters) -> None:
    for said in emulated_cluster(3, 1).run(one_too_many):  # where a ring contends too
        assert "3 connections between two ranks cannot be made: no descriptors: name fewer connections" in said


def _until_it_fails(call: Callable[[], object]) -> None:
    for _ in range(100):
        call()


def one_dies() -> float:
    """How long the others took to hear of it, s."""
    dist.init_process_group("commlayer", timeout=LIMIT)
    rank = dist.get_rank()
    group = group_of("wide", plan="flat_direct", connections=4)
    x = torch.ones(1 << 20)
    dist.all_reduce(x, group=group)
    await_others(2)
    if rank == 2:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(PeerError, match="rank 2"):
        _until_it_fails(lambda: dist.all_reduce(x, group=group))
    return time.monotonic() - began


def test_who_dies_is_named_whatever_the_connections(emulated_cluster: Clusters) -> None:
    *stayed, _ = emulated_cluster(3, 1).run(one_dies, check=False, grace_s=40.0)
    for outcome in stayed:
        assert outcome.failure is None, outcome.failure
        assert outcome.value < LIMIT.total_seconds() / 2, "it waited for its timeout"


@pytest.mark.parametrize("connections", [0, 33, 2.0, True, "2"])
def test_a_number_of_connections_that_is_none_is_refused(connections: Any) -> None:
    with pytest.raises(UsageError, match="connections"):
        GroupOptions(connections=connections)


@pytest.mark.parametrize("text", ["0", "33", "two", "-1"])
def test_the_variable_refuses_it_too(text: str) -> None:
    with pytest.raises(SettingsError, match="COMMLAYER_CONNECTIONS"):
        Settings.from_environment({"COMMLAYER_CONNECTIONS": text})

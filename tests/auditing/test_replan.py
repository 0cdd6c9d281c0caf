"""Re-planning while a job runs, on an emulated cluster: at the same call on every rank, with the same bits, whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import await_others

import commlayer
from commlayer.auditing.watch import GroupWatch
from commlayer.emulation import request_shape
from commlayer.measure import link_times
from commlayer.measure.harness import HostGroup
from commlayer.profiles.errors import ClusterError
from commlayer.scheduler.experience.link_rates import LinkTimes, card_gbps
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

COUNT = 1 << 16
MOST_CALLS = 600


def start(**environment: str) -> Any:
    torch.set_num_threads(1)
    os.environ.update({"COMMLAYER_PROFILE": "emulated-2x4", "COMMLAYER_REPLAN": "on", **environment})
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    return dist.group.WORLD


def start_quiet(**environment: str) -> Any:
    """Start a job whose groups make no appointments of their own, as a busy machine's calls would have them do."""
    group = start(**environment)
    lead = group.instruments.find(GroupWatch).lead
    if lead is not None:
        lead.is_replanning = False
    return group


def check_sum(count: int = COUNT, *, group: Any = None) -> None:
    """An all_reduce of whole numbers is exact, by whatever plan."""
    n, ramp = dist.get_world_size(), torch.arange(float(count)).remainder(64)
    x = ramp + dist.get_rank()
    dist.all_reduce(x, group=group)
    assert torch.equal(x, ramp * n + n * (n - 1) // 2)


def calls_until_changed(group: Any, most: int = MOST_CALLS) -> int:
    """How many sums are made until plans come from other rates; ``most`` + 1 where they never do."""
    before = group._planned.choices
    for number in range(1, most + 1):
        check_sum()
        if group._planned.choices is not before:
            return number
    return most + 1


def events() -> list[str]:
    """The events of the plans of the job's only group."""
    return [event["what"] for event in commlayer.audit()["groups"][0]["events"]]


def are_made_anew(noted: list[str]) -> bool:
    return any("plans are made anew" in event for event in noted)


def set_times(time_us: float, waited_us: float = 0.0) -> None:
    """Have the two nodes take so long for any number of bytes, and wait for a processor for a part of that."""
    found = LinkTimes({(0, 1): time_us}, {(0, 1): time_us - waited_us})
    link_times.time_links = lambda *_: found


def usual_us(group: Any) -> float:
    """How long the message takes that is measured, if the profile is right."""
    bytes_per_us: float = card_gbps(group._planned.choices.agreed.prices.job_planner.profile) * 1e3
    return group.instruments.find(GroupWatch).checks.measured_bytes / bytes_per_us  # type: ignore[no-any-return]


def appoint(group: Any, purpose: str, value: float, ahead: int) -> None:
    """Have the group's first rank make an appointment now, and wait until all of its ranks know of it."""
    watch = group.instruments.find(GroupWatch)
    if dist.get_rank() == 0:
        watch.appointments.make(purpose, value, ahead)
    else:
        while not watch.appointments.is_open:
            watch.appointments.turn()


def test_all_ranks_plan_anew_at_the_same_call_when_links_change(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 4, inter="400mbit")
    if not cluster.shaped:
        pytest.skip("links are not shaped here")

    def job() -> tuple[int, list[str]]:
        group = start()
        for _ in range(12):
            check_sum()
        dist.barrier()
        # A busy machine may have had them plan anew before, or look at links that seemed to be others.
        fabric, num_before = group._planned.choices.experience.links.fabric, len(events())
        if dist.get_rank() == 0:
            request_shape(inter="60mbit", node=1)
        dist.barrier()
        calls = 0
        while group._planned.choices.experience.links.fabric >= 0.5 * fabric and calls <= MOST_CALLS:
            check_sum()
            calls += 1
        for _ in range(3):
            check_sum()
        until = time.monotonic() + 30.0
        while dist.get_rank() == 0 and not are_made_anew(events()[num_before:]) and time.monotonic() < until:
            time.sleep(0.01)  # another thread notes them
        return calls, events()[num_before:]

    found = cluster.run(job)
    assert len({calls for calls, _ in found}) == 1
    assert found[0][0] <= MOST_CALLS
    assert are_made_anew(found[0][1])


def test_flat_is_chosen_again_where_the_fabric_became_fast(emulated_cluster: ClusterFactory) -> None:
    """The profile knows 400 Mbit/s between nodes; a fabric that is as fast as memory needs no hierarchy."""

    def job() -> tuple[str, str]:
        group = start_quiet()
        check_sum()
        set_times(10.0)
        before = group._planned.choices.plan("all_gather", 1 << 21)
        appoint(group, "measure", 0.01, 2)
        check_sum()
        check_sum()
        after = group._planned.choices.plan("all_gather", 1 << 21)
        return before.name if before else "flat", after.name if after else "flat"

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert len(set(found)) == 1
    assert not found[0][0].startswith("flat")
    assert found[0][1].startswith("flat")  # or flat_direct: on one level


def test_calls_in_flight_keep_their_plans_and_calls_ahead_get_the_new_ones(emulated_cluster: ClusterFactory) -> None:
    """Asynchronous calls around an appointment, more of them than the queue has ended: all ranks cut at the same one."""

    def job() -> list[str]:
        group = start_quiet()
        n, rank = dist.get_world_size(), dist.get_rank()
        check_sum()
        set_times(10.0)  # the fabric became fast, so that plans change whatever the machine does beside
        appoint(group, "measure", 0.01, 10)
        ramp = torch.arange(float(COUNT)).remainder(64)
        rows = [ramp + rank for _ in range(20)]
        works = [dist.all_reduce(row, async_op=True) for row in rows]
        for work in works:
            work.wait()
        for row in rows:
            assert torch.equal(row, ramp * n + n * (n - 1) // 2)
        return sorted({row["plan"] for row in commlayer.audit()["groups"][0]["calls"]})

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert all(plans == found[0] for plans in found)
    assert len(found[0]) > 1


def test_wrong_prices_are_tried(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[float, list[str]]:
        group = start_quiet(COMMLAYER_TRIALS="auto")
        check_sum()
        set_times(usual_us(group))
        appoint(group, "try", 3e6, 2)
        for _ in range(4):
            check_sum()
        choices = group._planned.choices
        return choices.experience.spent_us, sorted(str(key) for key in choices.experience._factors)

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert len({str(each) for each in found}) == 1
    assert found[0][0] > 0
    assert len(found[0][1]) >= 3  # strategies, whatever they are priced at


def test_links_that_changed_since_they_were_measured_are_no_wrong_prices(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[bool, float, float]:
        group = start_quiet(COMMLAYER_TRIALS="auto")
        check_sum()
        set_times(4 * usual_us(group))
        appoint(group, "try", 3e6, 2)
        first = group._planned.choices
        for _ in range(2):
            check_sum()
        is_tried = group._planned.choices is not first
        suspected = group._planned.choices.experience.suspected.fabric
        appoint(group, "confirm", 4.0, 2)
        for _ in range(2):
            check_sum()
        return is_tried, suspected, group._planned.choices.experience.links.fabric

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert len(set(found)) == 1
    assert not found[0][0]
    assert found[0][1] == found[0][2] < 0.5


def test_links_that_were_seen_to_be_slower_once_are_measured_again(emulated_cluster: ClusterFactory) -> None:
    """A slowness that is gone at the second appointment, or is owed to a busy processor, changes nothing."""

    def job() -> list[bool]:
        group = start_quiet()
        check_sum()
        first, once_us, found = group._planned.choices, usual_us(group), []
        for purpose, taken_us, waited_us in [
            ("measure", 4 * once_us, 0.0),
            ("confirm", once_us, 0.0),
            ("confirm", 4 * once_us, 0.0),  # of nothing: the suspicion was dropped
            ("confirm", 4 * once_us, 3 * once_us),
            ("measure", 4 * once_us, 3 * once_us),
        ]:
            set_times(taken_us, waited_us)
            appoint(group, purpose, 4.0, 2)
            for _ in range(2):
                check_sum()
            found.append(first.experience.suspected is not None)
            assert group._planned.choices is first
        return found

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert found == [[True, False, True, False, False]] * 8


def test_what_a_busy_processor_may_explain_is_measured_again_until_links_show(emulated_cluster: ClusterFactory) -> None:
    """Calls that stay slow are never taken for usual because one measurement could not tell why they are."""

    def job() -> tuple[bool, float, list[str]]:
        group = start()
        watch, once_us, asked = group.instruments.find(GroupWatch), usual_us(group), 0
        check_sum()

        def time_links(*_: Any) -> LinkTimes:
            nonlocal asked
            asked += 1
            return LinkTimes({(0, 1): 4 * once_us}, {(0, 1): once_us if asked <= 9 else 4 * once_us})

        link_times.time_links = time_links  # type: ignore[assignment]
        watch.times.compare = list
        watch.checks.measuring_us = 0.0
        for ratio in [1.0] * 6 + [4.0] * 6:
            group._planned.choices.experience.told("calls", 1.0, ratio)
        calls_until_changed(group)
        until = time.monotonic() + 30.0
        while dist.get_rank() == 0 and not any("anew" in event for event in events()) and time.monotonic() < until:
            time.sleep(0.01)  # another thread notes them
        return asked > 9, group._planned.choices.experience.links.fabric, events()

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert {(is_seen, fabric < 0.5) for is_seen, fabric, _ in found} == {(True, True)}
    assert "processors were busy" in found[0][2][0]
    assert "plans are made anew" in found[0][2][-1]


def test_predictions_stay_when_plans_change(emulated_cluster: ClusterFactory) -> None:
    """Ranks of other groups, which know nothing of a change here, may be deciding by the same ones."""

    def job() -> tuple[bool, bool]:
        group = start_quiet()
        check_sum()
        first, before = group._planned.choices, group.predicted_us("all_gather", 1 << 20)
        set_times(usual_us(group) / 4)  # what is faster is believed at once, what is slower not
        appoint(group, "measure", 1.0, 2)
        check_sum()
        check_sum()
        return group._planned.choices is not first, before == group.predicted_us("all_gather", 1 << 20)

    assert emulated_cluster(2, 4, mode="loopback").run(job) == [(True, True)] * 8


def test_links_are_timed_beside_messages_of_the_program(emulated_cluster: ClusterFactory) -> None:
    """A receive that the program has posted gets the program's bytes, and not those of the measurement."""

    def job() -> bool:
        group = start_quiet()
        rank = dist.get_rank()
        peer, mine, theirs = (rank + 4) % 8, torch.full((64,), float(rank)), torch.zeros(64)
        check_sum()
        received = dist.irecv(theirs, peer)
        measured, time_links = [], link_times.time_links
        link_times.time_links = lambda *what: measured.append(what) or time_links(*what)  # type: ignore[func-returns-value]
        appoint(group, "measure", 1.0, 2)
        check_sum()
        check_sum()
        dist.send(mine, peer)
        assert received is not None
        received.wait()
        return bool((theirs == peer).all()) and bool(measured)

    assert emulated_cluster(2, 4, mode="loopback").run(job) == [True] * 8


@pytest.mark.parametrize("replan", ["off", "audit"])
def test_plans_stay_where_that_is_asked_for(emulated_cluster: ClusterFactory, replan: str) -> None:
    def job() -> tuple[int, list[str]]:
        group = start(COMMLAYER_REPLAN=replan)
        calls = calls_until_changed(group, 40)
        for _ in range(60):
            check_sum(8 * COUNT)
        dist.barrier()
        return calls, [event["what"] for found in commlayer.audit()["groups"] for event in found["events"]]

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert {calls for calls, _ in found} == {41}
    assert bool(found[0][1]) == (replan == "audit")


@pytest.mark.parametrize("moment", ["before the call", "while links are timed"])
def test_a_rank_that_dies_at_a_switch_is_named_by_the_others(emulated_cluster: ClusterFactory, moment: str) -> None:
    def job() -> str:
        group = start_quiet()
        check_sum()
        appoint(group, "measure", 1.0, 3)
        await_others(5)
        if dist.get_rank() == 5:
            if moment == "before the call":
                os.kill(os.getpid(), signal.SIGKILL)
            die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            HostGroup.swap_us = die  # type: ignore[method-assign, assignment]
        try:
            for _ in range(5):
                check_sum()
        except ClusterError as error:
            return str(error)
        return "no error"

    outcomes = emulated_cluster(2, 4, mode="loopback").run(job, grace_s=30.0, check=False)
    said = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 5]
    assert all(text and "rank 5" in text for text in said), said


def test_the_audit_says_what_was_promised_and_measured(emulated_cluster: ClusterFactory) -> None:
    def job() -> Any:
        group = start(COMMLAYER_REPLAN="audit")
        for _ in range(10):
            check_sum()
        dist.all_to_all_single(torch.empty(COUNT), torch.ones(COUNT))
        dist.barrier()
        watch = weakref.ref(group.instruments.find(GroupWatch))
        found = commlayer.audit()
        dist.destroy_process_group()
        del group
        gc.collect()
        assert watch() is None  # what was counted is kept, and nothing else of the group
        assert commlayer.audit()["groups"][0]["calls"] == found["groups"][0]["calls"]
        return found

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    for rank, audit in enumerate(found):
        assert audit["rank"] == rank
        (group,) = audit["groups"]
        assert group["profile"].startswith("emulated-2x4")
        (row,) = [row for row in group["calls"] if row["collective"] == "all_reduce"]
        assert row["calls"] == 10
        assert row["up_to_bytes"] == 4 * COUNT
        assert row["logical_bytes"] == 10 * 4 * COUNT
        assert row["promised_us"] > 0
        assert row["measured_us"] > 0
        assert not [row for row in group["calls"] if row["collective"] == "barrier"]


def test_exchanges_that_go_straight_to_gloo_come_to_the_same_appointment(emulated_cluster: ClusterFactory) -> None:
    """Where no all_to_all is ever planned, plain tensors go a short way; calls count there as on the long one."""

    def job() -> tuple[int, int]:
        group = start_quiet()
        rank, n = dist.get_rank(), dist.get_world_size()
        given = torch.full((n, 2), float(rank))
        given = given.t().contiguous().t() if rank % 2 else given

        def exchange() -> None:
            taken = torch.empty(n, 2)
            dist.all_to_all_single(taken, given)
            assert torch.equal(taken[:, 0], torch.arange(float(n)))

        exchange()
        assert group._calls.never_plans_exchanges
        appoint(group, "try", 1e5, 4)
        before, changed = group._planned.choices, 0
        for number in range(1, 9):
            exchange()
            if not changed and group._planned.choices is not before:
                changed = number
        return changed, group.instruments.find(GroupWatch).appointments.calls

    found = emulated_cluster(2, 4, mode="loopback").run(job)
    assert set(found) == {(4, 9)}

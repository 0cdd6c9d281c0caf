"""Planned calls of the backend when ranks die, links fail or programs are wrong: an error that says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, await_others, be_absent, meet, start_with, tell, wait_until
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not for type checkers

import commlayer
import commlayer.backend.create
import commlayer.measure.calibrate  # before the fork: ranks then start in milliseconds
from commlayer.auditing import group_instruments
from commlayer.backend import create
from commlayer.emulation import request_shape, rights
from commlayer.engine import connections
from commlayer.failures import waits
from commlayer.profiles.errors import ClusterError, CollectiveTimeoutError, DisagreementError, GroupError, PeerError
from commlayer.testing.plugin import ClusterFactory
from commlayer.transport.gloo import GlooCall

pytestmark = pytest.mark.cluster

VICTIM = 3
COUNT = 40_000  # of float32: large enough for several chunks


def start(plan: str = "hierarchical", timeout_s: float = 20.0, **environment: str) -> int:
    """On a rank: the backend, with a plan forced on every call. Returns the rank."""
    torch.set_num_threads(1)
    os.environ.update(COMMLAYER_PLAN=plan, **environment)
    start_with(timeout_s)
    return dist.get_rank()


def plans_run(collective: str) -> set[str]:
    calls = [call for group in commlayer.stats()["groups"] for call in group["calls"]]
    return {call["plan"] for call in calls if call["collective"] == collective}


def leave_nothing_behind() -> list[str]:
    """Shared memory that somebody forgot."""
    return [name for name in os.listdir("/dev/shm") if "commlayer" in name]


@pytest.mark.parametrize("step", range(6))
def test_a_rank_killed_at_any_stage_is_named_by_all_others(emulated_cluster: ClusterFactory, step: int) -> None:
    """The six stages of a hierarchical all_reduce: share, sum, partial sums, last sum, to the rails, inside."""

    def job() -> tuple[str, str]:
        rank = start(timeout_s=HALF_AN_HOUR)
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        assert plans_run("all_reduce") == {"hierarchical"}
        await_others(VICTIM)
        if rank == VICTIM:
            post = GlooCall.post

            def dying(call: GlooCall, index: int) -> None:
                if index == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                post(call, index)

            GlooCall.post = dying  # type: ignore[method-assign, assignment]
        try:
            for _ in range(2):  # a rank that needs nothing more of the victim may get through the first
                dist.all_reduce(x)
        except RuntimeError as error:
            return type(error).__name__, str(error)
        raise AssertionError("a rank was killed, and nobody noticed")

    outcomes = emulated_cluster(2, 2).run(job, check=False, grace_s=40.0)
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.failure is None, outcome.failure
        kind, text = outcome.value
        assert kind == "PeerError", text
        assert f"rank {VICTIM}" in text, text
        assert "all_reduce" in text
    assert leave_nothing_behind() == []


LARGE = 1 << 20
"""Elements of float32: 4 MiB, in mid-message for longer than anything else on a link of 400 Mbit/s."""


def until_an_error(call: Any, patience_s: float = 60.0) -> tuple[str, str]:
    """Kind and text of the error in which ``call``, made again and again, ends."""
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < patience_s:
            call()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    raise AssertionError("a rank was killed, and nobody noticed")


def die_in(seconds: float) -> None:
    """End this process then, whatever it does, as by kill -9: nobody handles the signal."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def check_named(outcomes: list[Any], victim: int) -> None:
    """Every other rank has ended, within the grace of the run and not after half an hour, with an error that names it."""
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.failure is None, outcome.failure
            kind, text = outcome.value
            assert kind == "PeerError", text
            assert f"rank {victim} died" in text, text


@pytest.mark.parametrize("victim", [0, 5])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_a_death_in_mid_message_reaches_every_rank_long_before_the_timeout(
    emulated_cluster: ClusterFactory, verb: str, victim: int
) -> None:
    """Also those that do not talk to the dead rank, and without the store, which rank 0 hosts."""

    job = partial(die_in_mid_message, verb, victim)
    check_named(emulated_cluster(3, 2, inter="400mbit").run(job, check=False, grace_s=40.0), victim)


def die_in_mid_message(verb: str, victim: int, has_tested_torch: bool = True) -> tuple[str, str]:
    """On every rank: call ``verb`` until the victim's death is an error. Without ``has_tested_torch`` as with a torch whose
    waits for messages cannot be ended."""
    if not has_tested_torch:
        waits.TESTED_TORCH = ("0.0",)
        waits._aborts.cache_clear()
    rank = start("flat" if verb == "broadcast" else "pipelined:3", HALF_AN_HOUR)
    x, whole = torch.ones(LARGE // 6 * 6), torch.empty(LARGE // 6 * 6)
    part = x[: x.numel() // 6]
    call = {
        "all_reduce": partial(dist.all_reduce, x),
        "reduce_scatter": partial(dist.reduce_scatter_single, part, whole),
        "all_gather": partial(dist.all_gather_single, whole, part),
        "all_to_all": partial(dist.all_to_all_single, whole, x),
        "broadcast": partial(dist.broadcast, x, 1),
    }[verb]
    meet(victim)
    if rank == victim:
        die_in(0.25)
    return until_an_error(call)


@pytest.mark.parametrize("verb", ["all_to_all", "broadcast"])
def test_a_death_in_mid_message_with_a_torch_whose_waits_cannot_be_ended(
    emulated_cluster: ClusterFactory, verb: str
) -> None:
    job = partial(die_in_mid_message, verb, 5, has_tested_torch=False)
    check_named(emulated_cluster(3, 2, inter="400mbit").run(job, check=False, grace_s=40.0), 5)


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "asynchronous", "send", "monitored_barrier"])
def test_a_death_ends_calls_that_gloo_makes_itself(emulated_cluster: ClusterFactory, verb: str, detail: bool) -> None:
    """Gloo's own calls, and messages between two ranks of which neither is the dead one, but one has stopped answering."""

    def job() -> tuple[str, str]:
        os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_DEBUG="detail" if detail else "off")
        torch.set_num_threads(1)
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
        rank = dist.get_rank()
        x, part = torch.ones(LARGE), torch.empty(LARGE // 4)
        group: Any = dist.group.WORLD

        def message() -> None:
            if rank % 2:
                dist.recv(x, rank - 1)
            else:
                dist.send(x, rank + 1)

        def asynchronous() -> None:
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()

        call = {
            "all_reduce": partial(dist.all_reduce, x),
            "reduce_scatter": partial(dist.reduce_scatter_single, part, x),
            "asynchronous": asynchronous,
            "send": message,
            "monitored_barrier": group.monitored_barrier,
        }[verb]
        meet(VICTIM)
        if rank == VICTIM:
            die_in(0.25)
        if verb == "monitored_barrier" and rank == 1:
            time.sleep(1.0)  # so that the others wait when it happens
        return until_an_error(call)

    outcomes = emulated_cluster(2, 2, inter="400mbit").run(job, check=False, grace_s=40.0)
    check_named([each for each in outcomes if verb != "send" or each.rank in (2, VICTIM)], VICTIM)


@pytest.mark.parametrize("purpose", ["messages", "agreement", "gloo", "direct", "control"])
def test_a_death_while_connections_are_made_is_named(emulated_cluster: ClusterFactory, purpose: str) -> None:
    """The connections of the first planned call, which are to share memory, and those of another group."""

    def job() -> tuple[str, str]:
        intra = "shared" if purpose == "messages" else "gloo"
        rank = start("flat_direct", HALF_AN_HOUR, COMMLAYER_INTRA=intra, COMMLAYER_DEBUG="detail")
        make: Any = PrefixStore

        def dying(prefix: str, store: Any) -> Any:
            if purpose in prefix:
                os.kill(os.getpid(), signal.SIGKILL)
            return make(prefix, store)

        if rank == VICTIM:
            connections.PrefixStore = create.PrefixStore = dying  # type: ignore[assignment, attr-defined]
            connections.sharing_memory = lambda *_: dying(purpose, None)  # type: ignore[attr-defined]
        group: Any = dist.group.WORLD
        if purpose == "agreement":
            return until_an_error(lambda: group._planned.connections.connect("agreement", HALF_AN_HOUR))
        if purpose == "messages":
            return until_an_error(lambda: dist.all_reduce(torch.ones(COUNT)))
        return until_an_error(lambda: dist.new_group([0, 1, 2, 3]))

    check_named(emulated_cluster(2, 2).run(job, check=False, grace_s=40.0), VICTIM)


def test_a_death_while_a_trace_is_opened_is_named(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Ranks compare their clocks then."""

    def job() -> tuple[str, str]:
        rank = start("flat_direct", HALF_AN_HOUR, COMMLAYER_TRACE=str(tmp_path))
        if rank == VICTIM:
            group_instruments.begin = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, attr-defined]
        return until_an_error(lambda: dist.new_group([0, 1, 2, 3]))

    check_named(emulated_cluster(2, 2).run(job, check=False, grace_s=40.0), VICTIM)


def test_a_rank_that_leaves_by_an_exception_is_quoted_by_all_others(emulated_cluster: ClusterFactory) -> None:
    """Also by those that wait for another one. It alone is a program that starts and ends as users' do: to start one is most of
    what this test costs."""
    program = (
        "import torch, torch.distributed as dist\n"
        "from ranks import await_others\n"
        "dist.init_process_group('commlayer')\n"
        "dist.all_reduce(torch.ones(40_000))\n"
        "await_others(3)\n"
        "raise KeyError('no such shard')\n"
    )

    def job() -> tuple[str, str]:
        os.environ["COMMLAYER_PLAN"] = "hierarchical"
        if os.environ["RANK"] == str(VICTIM):
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
            os.execv(sys.executable, [sys.executable, "-c", program])
        dist.init_process_group("commlayer")
        dist.all_reduce(torch.ones(COUNT))
        await_others(VICTIM)
        return until_an_error(lambda: dist.all_reduce(torch.ones(COUNT)))

    *others, victim = emulated_cluster(2, 2).run(job, check=False, grace_s=40.0)
    assert victim.failure is not None
    assert victim.failure.exitcode == 1
    for each in others:
        assert each.value is not None, each.failure
        kind, text = each.value
        assert kind == "PeerError", text
        assert "rank 3 left with KeyError: 'no such shard'" in text, text


def cut_the_link() -> None:
    """Take this node's network interface down. Connections stay open, and nothing passes."""
    from pyroute2 import IPRoute

    with IPRoute() as network:
        network.link("set", index=network.link_lookup(ifname="eth0")[0], state="down")


def test_a_cut_link_ends_in_a_timeout_that_names_who_waits_for_whom(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2, inter="400mbit")
    if not cluster.shaped:
        pytest.skip(rights().reason)  # loopback cannot be cut

    def job() -> str:
        rank = start(timeout_s=3.0)
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        dist.barrier()
        if rank == 2:
            cut_the_link()  # of node 1: node 0 keeps the store
        with pytest.raises(ClusterError) as caught:
            dist.all_reduce(x)
        assert isinstance(caught.value, (CollectiveTimeoutError, PeerError))
        return str(caught.value)

    for rank, text in enumerate(cluster.run(job)):
        assert f"rank {rank}" in text
        assert "all_reduce" in text
        assert "hierarchical" in text


def test_a_link_slowed_tenfold_in_mid_run_only_takes_longer(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(2, 2, inter="400mbit")

    def job() -> bool:
        rank = start("pipelined:3")
        for _ in range(2):
            x = torch.full((COUNT,), rank + 1.0)
            work = dist.all_reduce(x, async_op=True)
            if rank == 0 and cluster.shaped:
                request_shape(inter="40mbit")
            assert work is not None
            work.wait()
            assert torch.equal(x, torch.full((COUNT,), 10.0))
        return plans_run("all_reduce") == {"pipelined×3"}

    assert all(cluster.run(job))


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_different_collectives_on_two_ranks_are_named_with_debug(emulated_cluster: ClusterFactory, plan: str) -> None:
    def job() -> str:
        rank = start(plan, COMMLAYER_DEBUG="detail")
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        call = partial(dist.broadcast, x, 0) if rank == 2 else partial(dist.all_reduce, x)
        with pytest.raises(DisagreementError) as caught:
            call()
        return str(caught.value)

    for text in emulated_cluster(2, 2).run(job):
        assert "all_reduce" in text
        assert "broadcast" in text
        assert "rank 2" in text


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_different_collectives_without_debug_are_an_error_and_no_hang(
    emulated_cluster: ClusterFactory, plan: str
) -> None:
    def job() -> str:
        rank = start(plan, timeout_s=3.0)
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        try:
            if rank == 2:
                dist.barrier()
            else:
                dist.all_reduce(x)
            dist.all_reduce(x)
        except RuntimeError as error:
            return str(error)
        return "no error"

    outcomes = emulated_cluster(2, 2).run(job, check=False, grace_s=30.0)
    told = [outcome.value for outcome in outcomes if outcome.failure is None]
    assert told, "Gloo ended every process"
    for text in told:
        assert "rank" in text


@pytest.mark.parametrize("differs", ["dtype", "op", "root"])
@pytest.mark.parametrize("plan", ["hierarchical", "flat_direct"])
def test_planned_calls_that_differ_in_more_than_sizes_are_named(
    emulated_cluster: ClusterFactory, plan: str, differs: str
) -> None:
    """Without COMMLAYER_DEBUG, and at no message more: as long as two ranks of a node differ."""
    if plan == "flat_direct" and differs == "root":
        pytest.skip("a broadcast has no such plan")
    shape = (2, 3) if differs == "root" else (2, 2)  # of two ranks that both send nobody receives

    def job() -> str:
        rank = start(plan)
        dist.all_reduce(torch.ones(COUNT))
        # What breaks the next call breaks no end of this one: a rank that is late in a barrier is woken by those who left.
        tell("summed")
        wait_until("summed", dist.get_world_size())
        is_odd = rank == 1
        x = torch.ones(COUNT, dtype=torch.int32 if differs == "dtype" and is_odd else torch.float32)
        try:
            if differs == "root":
                dist.broadcast(x, 1 if is_odd else 0)
            else:
                dist.all_reduce(x, dist.ReduceOp.MAX if differs == "op" and is_odd else dist.ReduceOp.SUM)
            dist.barrier()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = emulated_cluster(*shape).run(job)
    calls = {
        "dtype": ("all_reduce(float32, sum)", "all_reduce(int32, sum)"),
        "op": ("all_reduce(float32, sum)", "all_reduce(float32, max)"),
        "root": ("broadcast(float32, root 0 of the group)", "broadcast(float32, root 1 of the group)"),
    }[differs]
    assert all(message != "nothing" for message in found), found
    named = [message for message in found if message.startswith("DisagreementError")]
    assert named, found
    for message in found:
        assert f"{calls[0]}, but rank" in message or f"{calls[1]}, but rank" in message, found
        assert calls[0] in message
        assert calls[1] in message


def test_splits_that_do_not_match_are_named_with_debug(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start(COMMLAYER_DEBUG="detail")
        splits = [3, 3, 3, 3]
        x = torch.ones(12)
        dist.all_to_all_single(torch.empty(12), x, splits, splits)
        output_splits = [3, 4, 3, 3] if rank == 2 else splits  # rank 1 sends three
        with pytest.raises(DisagreementError) as caught:
            dist.all_to_all_single(torch.empty(sum(output_splits)), x, output_splits, splits)
        return str(caught.value)

    for text in emulated_cluster(2, 2).run(job):
        assert "rank 1" in text
        assert "rank 2" in text


def test_a_destroyed_group_says_so(emulated_cluster: ClusterFactory) -> None:
    def job() -> None:
        start()
        group: Any = dist.new_group([0, 1, 2, 3])
        x = torch.ones(COUNT)
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="not initialized"):  # torch's own
            dist.all_reduce(x, group=group)
        with pytest.raises(GroupError, match="destroyed"):
            group.allreduce([x]).wait()

    emulated_cluster(2, 2).run(job)


def test_a_rank_that_never_comes_is_named(emulated_cluster: ClusterFactory) -> None:
    def job() -> str:
        rank = start(timeout_s=3.0)
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        if rank == VICTIM:
            be_absent(3)
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(x)
        tell("done")
        return str(caught.value)

    found = emulated_cluster(2, 2).run(job)
    assert all(f"rank {VICTIM}" in text for rank, text in enumerate(found) if rank != VICTIM), found


def test_calls_inside_and_outside_of_inference_mode_mix(emulated_cluster: ClusterFactory) -> None:
    """Memory that is kept between calls must not take on the mode of the call that made it."""

    def job() -> None:
        rank = start()
        for is_inference in (True, False, True):
            with torch.inference_mode(is_inference):
                x = torch.full((COUNT,), rank + 1.0)
                dist.all_reduce(x)
                assert torch.equal(x, torch.full((COUNT,), 10.0))
                whole = torch.empty(4 * COUNT)
                work = dist.all_gather_single(whole, x, async_op=True)
                assert work is not None
                work.wait()
                assert torch.equal(whole, x.repeat(4))
                dist.all_to_all_single(whole, whole.clone(), [COUNT] * 4, [COUNT] * 4)
        assert plans_run("all_to_all") == plans_run("all_gather") == {"hierarchical"}

    emulated_cluster(2, 2).run(job)

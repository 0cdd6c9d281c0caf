"""Jobs that really hang, on real processes: the error that a timeout raises names the ranks, the calls and their places."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, be_absent, group_with, start_with, tell, wait_until
from synthetic_profiles import synthetic_profile

import commlayer.backend.create
import commlayer.measure.calibrate  # noqa: F401  before the fork: ranks then start in milliseconds
from commlayer import Communicator, discover_topology
from commlayer.diagnosis import inquiry
from commlayer.diagnosis.findings import Cycle, Mismatch, Missing, diagnose
from commlayer.diagnosis.log_files import log_name, read_logs
from commlayer.failures import aborts
from commlayer.measure.benchmark import world_groups
from commlayer.testing.plugin import ClusterFactory

pytestmark = pytest.mark.cluster

HERE = Path(__file__).name
TIMEOUT_S = 2.0


def start(folder: Path, timeout_s: float = TIMEOUT_S) -> int:
    """On a rank. Others answer in their time: on a busy machine that may be more than a job should lose with it."""
    torch.set_num_threads(1)
    inquiry._STORE_S = inquiry._GATHER_S = inquiry._LINGER_S = 20.0
    inquiry._RESULT_S = 40.0
    os.environ.update(COMMLAYER_PROFILE="none", COMMLAYER_DIAGNOSE_DIR=str(folder))
    start_with(timeout_s)
    return dist.get_rank()


def group_of(*ranks: int, name: str) -> Any:
    return group_with(TIMEOUT_S, list(ranks), group_desc=name)


def texts(
    emulated_cluster: ClusterFactory, folder: Path, program: Callable[[int], None], ranks: int = 4, **environment: str
) -> str:
    """The errors of the ranks that time out, of a program that hangs, and what one rank prints. Ranks that others break raise
    another error."""

    def job() -> str:
        os.environ.update(environment)
        rank = start(folder)
        try:
            program(rank)
        except RuntimeError as error:
            return str(error)
        return ""

    cluster = emulated_cluster(nodes=2, ranks_per_node=ranks // 2)
    with printed(folder.parent / f"{folder.name}.stderr") as lines:
        outcomes = cluster.run(job, check=False, grace_s=30.0)
    errors = [str(outcome.value) for outcome in outcomes if outcome.failure is None]
    said = "".join(lines)
    if "has printed all of it" in "".join(errors):
        assert said.count("asked all ranks what they wait for") == 1, said  # once a job
    return "\n".join([*errors, said])


@contextlib.contextmanager
def printed(path: Path) -> Iterator[list[str]]:
    """The lines that Python writes to stderr inside, in the forked ranks too, once it ends."""
    lines: list[str] = []
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        yield lines
    lines += path.read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_wrong_order_over_two_groups(emulated_cluster: ClusterFactory, tmp_path: Path, plan: str) -> None:
    """The calls are Gloo's own, or planned."""
    x = torch.ones(1 << 16)

    def program(rank: int) -> None:
        first, second = group_of(0, 1, 2, 3, name="first"), group_of(0, 1, 2, 3, name="second")
        dist.all_reduce(x, group=first)
        dist.all_reduce(x, group=second)
        order = (second, first) if rank == 2 else (first, second)
        for group in order:
            dist.all_reduce(x, group=group)

    text = texts(emulated_cluster, tmp_path, program, COMMLAYER_PLAN=plan)
    assert "2 wait for each other, in a circle of 2 (rank 0 has printed all of it)" in text, text
    assert "look at the log" not in text, text  # no log says more than the circle
    assert "mend what is found below, then restart the job" in text, text
    assert "rank 2 waits in all_reduce #2 (float32, 256 KiB, SUM) of group second" in text, text
    assert "which has not come to all_reduce #2 of group first" in text
    assert f"{HERE}:" in text
    assert "in test_wrong_order_over_two_groups.<locals>.program" in text


def test_wrong_order_of_replicated_tokens_and_a_group(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """A Communicator's calls are in the ring too, and its own timeout has the ranks asked."""
    x = torch.ones(4, 1 << 18)

    def program(rank: int) -> None:
        group = group_of(0, 1, 2, 3, name="gradients")
        ep_group, tp_group = world_groups(discover_topology())
        profile = synthetic_profile(nodes=2, ranks_per_node=2)
        communicator = Communicator(ep_group, tp_group, profile=profile, timeout_s=TIMEOUT_S)
        calls = [partial(communicator.all_to_all, x), partial(dist.all_reduce, x, group=group)]
        for call in [*calls, *(reversed(calls) if rank == 2 else calls)]:
            call()

    text = texts(emulated_cluster, tmp_path, program)
    assert "wait for each other, in a circle" in text, text
    assert "rank 2 waits in all_reduce #2 (float32, 4 MiB, SUM) of group gradients" in text, text
    assert "which has not come to all_to_all #2 of group Communicator on lane ep" in text, text


def test_wrong_order_over_three_groups(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        groups = [group_of(index, (index + 1) % 3, name=f"pair{index}") for index in range(3)]
        if rank < 3:
            for index in (rank, rank - 1):
                dist.broadcast(torch.ones(2), min(index % 3, (index + 1) % 3), group=groups[index])
        dist.barrier()

    text = texts(emulated_cluster, tmp_path, program)
    assert "ranks 0, 1 and 2 wait for each other, in a circle of 3" in text, text
    (cycle,) = (each for each in diagnose(read_logs(tmp_path)).findings if isinstance(each, Cycle))
    assert {step.call.kind for step in cycle.steps} == {"broadcast"}
    assert all(Path(step.site.file).name == HERE for step in cycle.steps)


def test_a_rank_that_never_comes(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 3:
            be_absent(3)
            return
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            tell("done")

    text = texts(emulated_cluster, tmp_path, program)
    assert "rank 3 has not come to all_reduce #2 of group default_pg" in text, text
    assert "in wait_until, in no call" in text, text
    assert "its last call was all_reduce #1 (float32, 4 B, SUM)" in text


def test_a_group_that_some_make_while_one_is_in_a_call(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank == 3:
            dist.barrier()
        else:
            dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=TIMEOUT_S))

    text = texts(emulated_cluster, tmp_path, program)
    assert "ranks 0 and 3 wait for each other, in a circle of 2" in text, text
    assert "waits in new_group (connecting for gloo) of group 1 (ranks 0, 1, 2, 3), at" in text, text
    assert "which has not come to new_group of group 1" in text, text
    assert "rank 3 waits in barrier #1 of group default_pg" in text, text


def test_a_group_that_one_does_not_make(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank == 3:
            be_absent(2)
        if rank == 1:
            return
        try:
            dist.new_group([0, 2, 3], timeout=timedelta(seconds=TIMEOUT_S))
        finally:
            tell("done")

    text = texts(emulated_cluster, tmp_path, program)
    assert "rank 3 has not come to new_group of group 1 (ranks 0, 2, 3), for which" in text, text
    assert "in be_absent, in no call" in text or "in wait_until, in no call" in text, text


def test_a_group_that_is_destroyed_waits_for_its_last_call(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    def program(rank: int) -> None:
        if rank == 3:
            while not ended.exists():
                time.sleep(0.01)
            return
        dist.all_reduce(torch.ones(1), async_op=True)
        try:
            dist.destroy_process_group()
        finally:
            if rank == 0:
                ended.touch()

    text = texts(emulated_cluster, tmp_path / "calls", program)
    assert "rank 3 has not come to all_reduce #1 of group default_pg, for which ranks 0, 1 and 2 wait" in text, text
    assert "called at" in text, text
    assert "and waited for at" in text, text


def test_splits_that_do_not_match(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Gloo takes fewer bytes than are expected, and says nothing; it comes out when something else hangs."""

    def program(rank: int) -> None:
        sent = [3, 3, 3, 3]
        received = [3, 300_000, 3, 3] if rank == 2 else sent
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(12), received, sent)
        if rank == 3:
            be_absent(3)
            return
        try:
            dist.barrier()
        finally:
            tell("done")

    text = texts(emulated_cluster, tmp_path, program)
    assert "splits differ: rank 1 sends 12 bytes to rank 2, which expects 1200000" in text, text
    found = diagnose(read_logs(tmp_path)).findings
    (mismatch,) = (each for each in found if isinstance(each, Mismatch))
    assert mismatch.words == "splits differ: rank 1 sends 12 bytes to rank 2, which expects 1200000"
    assert {call.rank for call in mismatch.calls} >= {1, 2}


@pytest.mark.parametrize(
    ("odd", "sent", "received", "going", "expected"),
    [(1, [3, 3, 300, 3], [3, 3, 3, 3], 1200, 12), (2, [3, 3, 3, 3], [3, 1, 3, 3], 12, 4)],
    ids=["one sends more", "one expects less"],
)
def test_wrong_splits_that_end_a_rank_are_printed_as_the_cause(
    emulated_cluster: ClusterFactory,
    tmp_path: Path,
    odd: int,
    sent: list[int],
    received: list[int],
    going: int,
    expected: int,
) -> None:
    """Gloo aborts the rank that is sent more than it expects, which asks all others before."""

    def program(rank: int) -> None:
        aborts._LONGEST_S = 60
        send, receive = (sent, received) if rank == odd else ([3] * 4, [3] * 4)
        dist.all_to_all_single(torch.empty(sum(receive)), torch.ones(sum(send)), receive, send)

    text = texts(emulated_cluster, tmp_path, program)
    words = f"splits differ: rank 1 sends {going} bytes to rank 2, which expects {expected}:"
    assert f"\nranks 1 and 2 differ in call #1 of group default_pg: {words}" in text, text


def test_a_message_against_a_collective(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        x = torch.ones(4)
        if rank == 0:
            dist.recv(x, 1)
        dist.all_reduce(x)
        if rank == 1:
            dist.send(x, 0)

    text = texts(emulated_cluster, tmp_path, program)
    found = diagnose(read_logs(tmp_path)).findings
    (cycle,) = (each for each in found if isinstance(each, Cycle))
    assert {step.call.kind for step in cycle.steps} == {"recv", "all_reduce"}
    assert {step.call.rank for step in cycle.steps} == {0, 1}
    assert "which has not come to send #1 to rank 0 of group default_pg" in text, text


def test_a_wait_between_asynchronous_calls(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """A host synchronisation: both places are named, of the call and of its wait."""

    def program(rank: int) -> None:
        groups = [group_of(0, 1, 2, 3, name=name) for name in ("first", "second")]
        for group in reversed(groups) if rank == 3 else groups:
            work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
            assert work is not None
            work.wait()

    text = texts(emulated_cluster, tmp_path, program)
    assert "in a circle of 2" in text, text
    assert "and waited for at" in text, text


def test_a_signal_finds_a_rank_that_waits_in_gloo(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Python's own handlers do not run while a message is waited for. Nothing is wrong then: rank 1 is only late."""

    def job() -> list[str]:
        rank = start(tmp_path, HALF_AN_HOUR)
        x = torch.ones(4)
        if rank == 0:
            threading.Thread(target=signal_when_told, daemon=True).start()
            dist.recv(x, 1)
            return []
        tell("late")
        until = time.monotonic() + 60.0
        wanted = [log_name(0), log_name(1)]
        while not set(wanted) <= set(os.listdir(tmp_path)) and time.monotonic() < until:
            time.sleep(0.05)
        dist.send(x, 0)
        return sorted(os.listdir(tmp_path))

    def signal_when_told() -> None:
        wait_until("late")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)

    found = emulated_cluster(1, 2).run(job)
    assert found[1] == [log_name(0), log_name(1)]
    logs = read_logs(tmp_path)
    assert {log.reason for log in logs} == {"signal", "asked"}
    diagnosis = diagnose(logs)
    assert not diagnosis.has_found
    (late,) = diagnosis.waits
    assert isinstance(late, Missing)
    assert (late.call.rank, late.call.kind, late.waiting[0].call.rank) == (1, "send", 0)


def test_without_a_ring_nothing_is_asked(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        if rank == 3:
            be_absent(3)
            return
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            tell("done")

    text = texts(emulated_cluster, tmp_path, program, COMMLAYER_RING="0")
    assert "did not answer within 2 s" in text
    assert "has not come to" not in text
    assert os.listdir(tmp_path) == []


def test_a_call_on_a_thread_for_which_the_main_thread_waits(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """Rank 0 leaves out what a thread of rank 1 calls: that call timed out first, and is in the answer."""

    def program(rank: int) -> None:
        pair = group_of(0, 1, name="pair")
        errors: list[BaseException] = []

        def side() -> None:
            try:
                dist.all_reduce(torch.ones(4), group=pair)
            except RuntimeError as error:
                errors.append(error)

        if rank == 1:
            thread = threading.Thread(target=side)
            thread.start()
            thread.join()
            raise errors[0]
        dist.barrier()

    text = texts(emulated_cluster, tmp_path, program, ranks=2)
    assert "rank 0 has not come to all_reduce #1 of group pair, for which a thread of rank 1 waits" in text, text
    assert "rank 0 waits in barrier #1 of group default_pg" in text, text
    assert "in program, in no call" in text, text


def test_two_threads_that_use_one_group(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """A checkpoint may be saved on a thread, beside a barrier of the same group; one rank does not take part."""

    def program(rank: int) -> None:
        if rank == 3:
            be_absent(3)
            return

        def save() -> None:
            with contextlib.suppress(RuntimeError):
                dist.all_gather_into_tensor(torch.empty(4), torch.ones(1))

        thread = threading.Thread(target=save)
        thread.start()
        while dist.group.WORLD._order.track.issued < 1:  # type: ignore[union-attr]
            time.sleep(0.01)
        try:
            dist.barrier()
        finally:
            tell("done")
            thread.join()

    text = texts(emulated_cluster, tmp_path, program)
    assert "ranks 0, 1 and 2 use group default_pg from several threads at once:" in text, text
    assert "give each thread a group of its own" in text, text


@pytest.mark.parametrize("what", ["size", "dtype"])
def test_a_rank_that_gloo_ends_tells_what_it_called(
    emulated_cluster: ClusterFactory, tmp_path: Path, what: str
) -> None:
    """Gloo aborts a process that is sent more than its call expects; the calls of all ranks are there all the same."""

    def job() -> None:
        aborts._LONGEST_S = 60
        rank = start(tmp_path, HALF_AN_HOUR)
        x = torch.ones(1000)
        dist.all_reduce(x)
        if rank == 1:
            x = torch.ones(100_000) if what == "size" else x.double()
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(x)
            dist.all_reduce(x)
        inquiry._linger()  # as a program does when it ends: else its file may not be there yet

    outcomes = emulated_cluster(1, 3).run(job, check=False, grace_s=60.0)
    aborted = [outcome.rank for outcome in outcomes if outcome.failure is not None]
    assert [outcomes[rank].failure.signal for rank in aborted] == [signal.SIGABRT] * len(aborted)  # type: ignore[union-attr]
    assert aborted
    logs = read_logs(tmp_path)
    assert {log.rank for log in logs} >= set(aborted)
    mismatch = diagnose(logs).findings[0]
    assert isinstance(mismatch, Mismatch)
    assert (mismatch.number, mismatch.what, mismatch.odd) == (2, what, (1,))

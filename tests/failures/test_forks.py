"""Forked children can do nothing with the groups of their parent, and the parent goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, await_others
from synthetic_profiles import synthetic_profile
from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers
from torch.utils.data import DataLoader, Dataset

import commlayer
import commlayer.backend.create
import commlayer.measure.calibrate  # before the fork: ranks then start in milliseconds
from commlayer import Communicator, forked_child
from commlayer.calls.counters import GroupCounters
from commlayer.engine.lane_holds import lanes
from commlayer.failures import forks
from commlayer.profiles.errors import GroupError
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces import recorder

PROGRAM = textwrap.dedent(
    """
    import multiprocessing, os, sys, time
    import torch, torch.distributed as dist

    def leave():
        pass

    def child(way):
        if way == "return":
            process = multiprocessing.get_context("fork").Process(target=leave)
            process.start()
            return process.pid
        pid = os.fork()
        if pid == 0:
            if way == "sys.exit":
                sys.exit(0)
            if way == "os._exit":
                os._exit(0)
            raise ValueError("the child's own mistake")
        return pid

    def ended(pid):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, 9)
        return "it hung"

    dist.init_process_group("commlayer")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    x = torch.ones(40_000)
    dist.all_reduce(x)
    for way in ("return", "os._exit", "sys.exit", "exception"):
        x.fill_(1.0)
        if rank == 0:
            works = [dist.all_reduce(x, async_op=True), dist.barrier(async_op=True)]
            status = ended(child(way))
            assert status == (1 if way == "exception" else 0), (way, status)
            store.set(way, "ended")
            for work in works:
                work.wait()
        else:
            store.wait([way])
            dist.all_reduce(x)
            dist.barrier()
        assert x[0] == 2.0, (way, x[0])
    dist.destroy_process_group()
    print("fine", flush=True)
    """
)


@pytest.mark.parametrize("plan", ["flat", "flat_direct"])
def test_a_child_that_leaves_while_a_call_is_under_way_changes_nothing(
    emulated_cluster: ClusterFactory, capfd: Any, tmp_path: Path, plan: str
) -> None:
    """Whole programs: a child that leaves by sys.exit runs what is registered at exit, and ends the interpreter."""
    variables = {"COMMLAYER_PLAN": plan, "COMMLAYER_STATS": "1", "COMMLAYER_TRACE": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        status = emulated_cluster(1, 2).command([sys.executable, "-c", PROGRAM], timeout_s=100)
    out = capfd.readouterr()
    assert status == 0, out.err
    assert out.out.count("fine") == 2
    assert (out.out + out.err).count("commlayer, rank 0") == 1, "a child printed its parent's statistics"
    assert out.err.count("the child's own mistake") == 1
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        json.loads(file.read_text(encoding="utf-8"))


def in_child(task: Callable[[], Any], seconds: float = 60.0) -> Any:
    """``task()`` in a forked child, which leaves at once; what it returned, or how it ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds))
        try:
            answer = json.dumps(task())
        except BaseException:  # noqa: BLE001  a child must not go on as its parent does
            answer = json.dumps(traceback.format_exc())
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answers:
        text = answers.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else f"ended with status {status}"


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_what_a_child_asks_of_an_inherited_group_is_an_error(emulated_cluster: ClusterFactory) -> None:
    def job() -> Any:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PLAN"] = "flat_direct"
        dist.init_process_group("commlayer")
        x = torch.ones(4)
        dist.all_reduce(x)
        other = dist.new_group([0, 1], backend="commlayer")
        dist.all_reduce(x, group=other)
        answers: Any = None
        if dist.get_rank() == 0:
            late = dist.all_reduce(x, async_op=True)
            behind = dist.barrier(async_op=True)
            issued = dist.all_reduce(torch.ones(1), group=other, async_op=True)

            def child() -> list[str]:
                y = torch.ones(4)
                return [
                    refused(lambda: dist.all_reduce(y)),
                    refused(lambda: dist.all_reduce(y, group=other)),
                    refused(lambda: dist.barrier(async_op=True).wait()),
                    refused(lambda: late.wait()),
                    refused(lambda: behind.wait()),
                    refused(lambda: issued.wait()),
                ]

            answers = in_child(child)
            dist.distributed_c10d._get_default_store().set("asked", "")
            for work in (late, behind, issued):
                assert work is not None
                work.wait()
        else:
            dist.distributed_c10d._get_default_store().wait(["asked"])
            dist.all_reduce(x)
            dist.barrier()
            dist.all_reduce(torch.ones(1), group=other)
        dist.barrier()
        return answers

    answers = emulated_cluster(1, 2).run(job)[0]
    assert isinstance(answers, list), answers
    assert len(answers) == 6
    for answer in answers:
        assert answer.startswith("GroupError: rank 0, group"), answer
        assert "forked" in answer


def test_a_child_can_make_groups_of_its_own(emulated_cluster: ClusterFactory) -> None:
    def job() -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        dist.all_reduce(torch.ones(4))

        def child() -> list[Any]:
            before = commlayer.stats()["rank"]
            dist.destroy_process_group()
            dist.init_process_group("commlayer", store=HashStore(), rank=0, world_size=1)
            x = torch.ones(4)
            dist.all_reduce(x)
            made = [len(group["calls"]) for group in commlayer.stats()["groups"]]
            dist.destroy_process_group()
            return [before, float(x[0]), made]

        answer = in_child(child) if dist.get_rank() == 0 else None
        dist.barrier()
        return answer

    assert emulated_cluster(1, 2).run(job)[0] == [None, 1.0, [1]]


def test_a_child_of_an_open_communicator_does_not_break_it(emulated_cluster: ClusterFactory) -> None:
    """It leaves the with-block by its own exception, which would tell the others that this rank is gone."""

    def job() -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        x, answer, profile = torch.arange(4.0), None, synthetic_profile(nodes=2, ranks_per_node=1)
        with Communicator(dist.group.WORLD, profile=profile, timeout_s=20) as comm:  # type: ignore[arg-type]
            comm.all_to_all(x)

            def child() -> list[str]:
                found = [refused(lambda: comm.all_to_all(x))]
                try:
                    with comm:
                        raise ValueError
                except ValueError:
                    pass
                return found

            if dist.get_rank() == 0:
                answer = in_child(child)
            dist.barrier()
            y = comm.all_to_all(x)
        return answer, y.tolist()

    answers = emulated_cluster(2, 1).run(job)
    assert "forked" in answers[0][0][0], answers[0][0]
    assert [y for _, y in answers] == [[0.0, 1.0, 0.0, 1.0], [2.0, 3.0, 2.0, 3.0]]


def test_a_dead_parent_is_seen_although_its_child_lives_on(emulated_cluster: ClusterFactory) -> None:
    """The child must not keep the parent's sockets of shared memory open."""

    def job() -> str:
        torch.set_num_threads(1)
        os.environ.update(COMMLAYER_PLAN="flat_direct", COMMLAYER_INTRA="shared")
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
        x = torch.ones(40_000)
        dist.all_reduce(x)
        await_others(1)
        if dist.get_rank() == 1:
            read, write = os.pipe()
            if os.fork() == 0:
                os.setsid()  # or the cluster ends it with the rank
                os.write(write, b"x")
                time.sleep(90)
                os._exit(0)
            os.read(read, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return refused(lambda: dist.all_reduce(x))

    outcomes = emulated_cluster(1, 2).run(job, check=False, grace_s=40)
    assert outcomes[0].failure is None, outcomes[0].failure
    assert outcomes[0].value.startswith("PeerError"), outcomes[0].value


class Asking(Dataset[str]):
    """Each element is what a worker hears when it asks for a collective."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        assert dist.get_world_size() == 2
        return refused(lambda: dist.all_reduce(torch.ones(index + 1)))


def test_workers_of_a_data_loader(emulated_cluster: ClusterFactory) -> None:
    def job() -> tuple[list[str], float]:
        torch.set_num_threads(1)
        os.environ["COMMLAYER_PLAN"] = "flat_direct"
        dist.init_process_group("commlayer")
        x, heard = torch.ones(40_000), list[str]()
        for _ in range(2):
            work = dist.all_reduce(x, async_op=True)
            loader = DataLoader(Asking(), num_workers=2, batch_size=None, multiprocessing_context="fork", timeout=60)
            heard += list(loader)
            assert work is not None
            work.wait()
        dist.destroy_process_group()
        return heard, float(x[0])

    for heard, sum_ in emulated_cluster(1, 2).run(job):
        assert len(heard) == 8
        assert all("forked" in each for each in heard), heard
        assert sum_ == 4.0


class Thing:
    is_disowned = False

    def disown(self) -> None:
        self.is_disowned = True


def test_things_are_disowned_in_the_child_only() -> None:
    thing = Thing()
    forks.disown_in_child(thing)
    assert in_child(lambda: thing.is_disowned) is True
    assert not thing.is_disowned


def test_what_is_kept_for_the_process_begins_anew(tmp_path: Path) -> None:
    """Also where another thread holds a lock when the process forks."""
    counters = GroupCounters("a group", 0, [0])
    counters.flat["all_reduce"].add(4, 1)
    opened = recorder.open_recorder(tmp_path, 0, 1)
    call = lanes().enter(0)
    try:
        with opened._lock, lanes()._changed:

            def child() -> list[bool]:
                opened.close()
                recorder.close_recorder()
                is_free = lanes().is_free(1)
                lanes().leave(call)
                return [is_free, recorder.recorder() is None, commlayer.stats()["groups"] == []]

            assert in_child(child) == [True, True, True]
        assert not opened.path.exists()
        assert recorder.recorder() is opened
        assert not lanes().is_free(1)
    finally:
        lanes().leave(call)
        recorder.close_recorder()
        commlayer.reset_stats()


def test_tasks_run_in_order_in_the_child_also_behind_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(forked_child, "_tasks", [])
    forked_child.in_forked_child(lambda: done.append("first"))
    forked_child.in_forked_child(lambda: 1 // 0)
    forked_child.in_forked_child(lambda: done.append("last"))
    assert in_child(lambda: done) == ["first", "last"]
    assert done == []


def test_modules_have_children_begin_anew_in_one_way() -> None:
    """A module that asks Python itself shows up in no list of ours."""
    root = Path(forked_child.__file__).parent
    by_themselves = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "os.register_at_fork(" in path.read_text(encoding="utf-8")
    }
    assert by_themselves == {"forked_child.py"}


def test_the_text_says_what_to_do() -> None:
    with pytest.raises(GroupError, match="forked after the group was made"):
        raise GroupError(forks.inherited("rank 0, group 0: all_reduce"))

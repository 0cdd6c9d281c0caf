"""Who listens to calls: the moments that each hears of, in which order, and what calls cost where nobody listens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlayer.auditing.shadow import Shadow
from commlayer.calls import instruments as module
from commlayer.calls.instruments import Instrument, Instruments, listen_to_all, stop_listening_to_all
from commlayer.calls.ring import Call, Silent, open_track
from commlayer.profiles.errors import TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces.recorder import Recorder


class Noting(Instrument):
    """Keeps the moments of every call."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def issued(self, call: Call) -> None:
        self.heard.append(("issued", call.collective))

    def began(self, call: Call) -> None:
        self.heard.append(("began", call.collective))

    def moved(self, call: Call) -> None:
        plan = "flat" if call.plan is None else call.plan.name
        self.heard.append((f"moved {call.run_bytes} {plan}", call.collective))

    def ended(self, call: Call) -> None:
        self.heard.append(("ended " + call.error if call.error else "ended", call.collective))

    def waited(self, call: Call, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        self.heard.append(("waited", call.collective))


class Counting(Instrument):
    """Counts calls that have ended: all that an instrument of one's own takes."""

    def __init__(self) -> None:
        self.count = 0

    def ended(self, call: Call) -> None:
        del call
        self.count += 1


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_of_all", [])


def test_an_instrument_hears_only_what_it_overrides() -> None:
    instruments, counting = Instruments(), Counting()
    instruments.add(counting)
    assert [len(getattr(instruments, moment)) for moment in module._CALL_MOMENTS] == [0, 0, 0, 0, 1, 0]
    for hear in instruments.ended:
        hear(Silent().note("all_reduce", None, 4, 4, None, False))
    assert counting.count == 1
    instruments.remove(counting)
    assert instruments.ended == ()


def test_who_listens_to_all_hears_groups_of_before_and_of_later() -> None:
    before, counting, changes = Instruments(), Counting(), []
    before.changed = lambda: changes.append(before.is_watched)
    listen_to_all(counting)
    later = Instruments()
    assert [len(each.ended) for each in (before, later)] == [1, 1]
    stop_listening_to_all(counting)
    assert [len(each.ended) for each in (before, later)] == [0, 0]
    assert changes == [True, False]


def test_what_lets_calls_pass_makes_no_group_a_watched_one() -> None:
    class Passing(Counting):
        lets_pass = True

    instruments = Instruments()
    instruments.add(Passing())
    assert not instruments.is_watched
    instruments.add(Counting())
    assert instruments.is_watched


def test_the_end_is_told_once_and_nobody_is_kept() -> None:
    told: list[str] = []

    class Ending(Instrument):
        def ending(self) -> None:
            told.append("ending")

        def closing(self, *, with_others: bool) -> None:
            told.append(f"closing {with_others}")

        def closed(self) -> None:
            told.append("closed")

    instruments = Instruments()
    instruments.add(Ending())
    instruments.ending()
    instruments.closing(with_others=True)
    for _ in range(2):
        instruments.closed()
    assert told == ["ending", "closing True", "closed"]


def test_the_end_goes_on_where_an_instrument_fails() -> None:
    told: list[str] = []

    class Failing(Instrument):
        def ending(self) -> None:
            raise RuntimeError("no room on the disk")

        closed = inherited = ending

    class Telling(Instrument):
        def ending(self) -> None:
            told.append("told")

        closed = ending

    instruments = Instruments()
    for each in (Failing(), Telling()):
        instruments.add(each)
    for end in (instruments.ending, instruments.closed):
        with pytest.warns(UserWarning, match="no room on the disk"):
            end()
    assert told == ["told", "told"]


def test_who_listens_already_is_told_once() -> None:
    instruments, counting = Instruments(), Counting()
    for _ in range(2):
        instruments.add(counting)
    assert len(instruments.ended) == 1


def test_a_group_is_named_in_records_also_where_no_ring_is_kept(tmp_path: Path) -> None:
    track = open_track(0, "key", "name", [5, 7], lambda: "experts", lambda: "ep")
    track.rank = 7
    recorder = Recorder(tmp_path, 1, 2)
    recorder.instrument.issued(track.note("all_reduce", None, 4, 4, None, False))
    (record,) = recorder.calls
    assert isinstance(track, Silent)
    assert (record.group, record.lane, record.ranks, record.rank) == ("experts", "ep", (5, 7), 7)


def test_a_call_that_never_ends_has_its_number_in_the_file(tmp_path: Path) -> None:
    track = open_track(0, "key", "name", [0, 1], str, str)
    recorder = Recorder(tmp_path, 0, 2)
    call = track.note("all_reduce", None, 4, 4, None, False)
    recorder.instrument.issued(call)
    call.sequence, call.logical_bytes = 12, 4
    recorder.close()
    assert [(each.sequence, each.logical_bytes, each.end_ns) for each in recorder.calls] == [(12, 4, 0)]


@pytest.mark.cluster
@pytest.mark.parametrize("plan", ["flat", "flat_direct"])
def test_every_moment_of_a_groups_calls_is_heard(emulated_cluster: ClusterFactory, plan: str) -> None:
    def job() -> list[tuple[str, str]]:
        torch.set_num_threads(1)
        os.environ.update({"COMMLAYER_PLAN": plan, "COMMLAYER_PROFILE": "none"})
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        x = torch.ones(4)
        dist.all_reduce(x)  # before anybody listens
        noting = Noting()
        group.instruments.add(noting)
        dist.all_reduce(x)
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        with pytest.raises(TensorError):
            dist.all_gather_into_tensor(torch.ones(3), x)
        group.instruments.remove(noting)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((4,), 2.0**4))
        dist.destroy_process_group()
        return noting.heard

    moved = f"moved 16 {plan}"
    synchronous = [("issued", "all_reduce"), ("began", "all_reduce"), (moved, "all_reduce"), ("ended", "all_reduce")]
    for heard in emulated_cluster(1, 2).run(job):
        assert heard[:5] == [*synchronous, ("waited", "all_reduce")]
        asynchronous = [moment for moment in heard[5:] if moment[1] == "all_reduce" and moment[0] != "waited"]
        assert asynchronous == synchronous
        refused = [moment for moment, collective in heard if collective == "all_gather"]
        assert refused == ["issued", "began", "ended TensorError", "waited"]


@pytest.mark.cluster
def test_a_flat_collective_behind_a_planned_one_of_the_same_call_has_no_plan(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[str]:
        os.environ.update({"COMMLAYER_PLAN": "flat_direct", "COMMLAYER_PROFILE": "none"})
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        noting = Noting()
        group.instruments.add(noting)
        calls, look = group._calls, group._calls.look
        planned = iter((True, False, True))
        module_of_calls = type(calls)
        module_of_calls.look = lambda self, *args, **how: look(*args, **how) if next(planned) else None
        given = [torch.full((4,), float(dist.get_rank())) for _ in range(3)]
        out = [torch.empty(8) for _ in given]
        group.allgather_into_tensor_coalesced(out, given).wait()
        assert all(torch.equal(each, torch.tensor([0.0] * 4 + [1.0] * 4)) for each in out)
        dist.destroy_process_group()
        return [moment for moment, _ in noting.heard if moment.startswith("moved")]

    wanted = ["moved 32 flat_direct", "moved 32 flat", "moved 32 flat_direct"]
    assert emulated_cluster(1, 2).run(job) == [wanted, wanted]


@pytest.mark.cluster
def test_a_failed_call_leaves_nothing_for_the_next_one_to_be_compared_with(emulated_cluster: ClusterFactory) -> None:
    def job() -> bool:
        os.environ.update({"COMMLAYER_PLAN": "flat_direct", "COMMLAYER_PROFILE": "none", "COMMLAYER_SHADOW": "1"})
        torch.set_num_threads(1)
        dist.init_process_group("commlayer")
        group: Any = dist.group.WORLD
        shadow = group.instruments.find(Shadow)
        planned, x = group._planned, torch.ones(4)
        run, planned.run = planned.run, refuse
        with pytest.raises(UsageError):
            dist.all_reduce(x)
        planned.run = run
        assert shadow._sample is None
        dist.all_reduce(x)
        dist.destroy_process_group()
        return bool(torch.equal(x, torch.full((4,), 2.0)))

    assert emulated_cluster(1, 2).run(job) == [True, True]


def refuse(*_: Any, **__: Any) -> None:
    raise UsageError("refused before a byte moved")

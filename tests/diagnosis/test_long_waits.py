"""A call that takes long is told of in a line, long before any timeout."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, group_with, start_with
from test_hangs import printed
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, TCPStore

from commlayer import GroupOptions
from commlayer.backend.new_groups import make_group
from commlayer.calls import ring
from commlayer.calls.group_life import making_group
from commlayer.calls.ring import Call, Track, open_track
from commlayer.diagnosis import long_waits
from commlayer.diagnosis.long_waits import LongWait, LongWaits, waits_of_this_rank
from commlayer.diagnosis.snapshot import rank_log
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError, SettingsError, UsageError
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Track:
    monkeypatch.setattr(ring, "_calls", deque(maxlen=0))
    monkeypatch.setattr(ring, "_waiting", {})
    monkeypatch.setattr(ring, "_tracks", weakref.WeakSet())
    return open_track(16, "key", "name", [5, 7], lambda: "dp", lambda: "")


def note(track: Track, *, is_async: bool = False) -> Call:
    return track.note("all_reduce", None, 4, 4, None, is_async, depth=1)


def kinds(rank: int = 7) -> list[tuple[str, int, int]]:
    return [(wait.kind, wait.number, wait.place) for wait in waits_of_this_rank(rank)]


def test_a_synchronous_call_is_a_wait_until_it_is_done(track: Track) -> None:
    call = note(track)
    assert kinds() == [("all_reduce", 1, 1)]
    track.done = call.number
    assert kinds() == []


def test_an_asynchronous_call_is_one_when_somebody_waits_for_it(track: Track) -> None:
    call = note(track, is_async=True)
    assert kinds() == []
    track.wait(call)
    assert kinds() == [("all_reduce", 1, 1)]
    track.waited()
    assert kinds() == []


def test_a_call_behind_an_asynchronous_one_waits(track: Track) -> None:
    note(track, is_async=True)
    note(track)
    assert kinds() == [("all_reduce", 2, 1)]


def test_a_message_is_a_wait_when_somebody_waits_for_it(track: Track) -> None:
    message = track.note_message("recv", None, 4, 0, 3)
    assert kinds() == []
    track.wait(message)
    assert kinds() == [("recv", 1, 1)]
    assert waits_of_this_rank(7)[0].claim == "key/recv/1/5/3/1"
    track.waited()
    assert kinds() == []


def test_a_group_that_numbers_its_ranks_by_itself_is_left_alone(track: Track) -> None:
    """A quorum of torchft's has ranks from 0, whatever this rank is called in the job, also where the job has such ranks too."""
    own = open_track(16, "quorum", "quorum", range(8), str, str, "quorum")
    call = note(own)
    note(own)
    own.wait(call)
    assert kinds() == []
    assert waits_of_this_rank(3) == []
    assert [(wait.key, wait.place) for wait in waits_of_this_rank(3, "quorum")] == [("quorum", 3)] * 3
    note(track)
    assert kinds() == [("all_reduce", 1, 1)]
    assert [group.key for group in rank_log("", 7, [5, 7], "asked", {}).groups] == ["key"]
    log = rank_log("", 3, range(8), "asked", {}, "quorum")
    assert [group.key for group in log.groups] == ["quorum"]
    assert [call.number for call in log.calls] == [1, 2]


@pytest.mark.parametrize("error", [CollectiveTimeoutError("late"), PeerError("died"), UsageError("wrong")], ids=repr)
def test_a_making_that_has_failed_is_no_wait(track: Track, error: Exception) -> None:
    def make() -> None:
        with making_group(16, "new_group", "made", "made", [5, 7]):
            assert [wait.kind for wait in waits_of_this_rank(7)] == ["new_group"]
            raise error

    with pytest.raises(type(error)):
        make()
    assert kinds() == []


def test_in_a_group_that_has_failed_or_is_gone_nobody_waits(track: Track) -> None:
    note(track)
    track.is_broken = lambda: True
    assert kinds() == []
    track.is_broken = lambda: False
    assert kinds() == [("all_reduce", 1, 1)]
    track.close()
    assert kinds() == []


class Told:
    """Stands for an inquiry: what it was told of, and when all ranks were asked last."""

    def __init__(self) -> None:
        self.waits: list[LongWait] = []
        self.asked_s = -1e9

    def say(self, wait: LongWait) -> None:
        self.waits.append(wait)

    def answered_s(self) -> float:
        return self.asked_s


def test_a_wait_is_told_of_once_and_by_the_first_rank_first(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    monkeypatch.setattr(long_waits, "now", lambda: int(clock_s[0] * 1e9))
    told = Told()
    looks = LongWaits(7, 60.0, told.say, told.answered_s)
    track.note("all_reduce", None, 4, 4, None, False, issued_ns=1, depth=1)
    clock_s[0] = 60.5
    assert looks.look() == pytest.approx(0.52, abs=0.01)  # rank 5, which comes first in the group, has until then
    assert not told.waits
    for clock_s[0] in (61.1, 62.0, 1000.0):
        looks.look()
    assert [wait.number for wait in told.waits] == [1]
    track.done = 1
    looks.look()
    track.note("all_reduce", None, 4, 4, None, False, issued_ns=1, depth=1)
    told.asked_s = time.monotonic()
    looks.look()
    assert len(told.waits) == 1, "what all ranks were just asked tells of this one too"


def test_the_setting() -> None:
    assert Settings().long_wait_s == 60.0
    assert Settings.from_environment({"COMMLAYER_LONG_WAIT_S": "0"}).long_wait_s == 0
    with pytest.raises(SettingsError, match="COMMLAYER_LONG_WAIT_S must be a number of seconds, 0 for never, got -1"):
        Settings(long_wait_s=-1)


def called_in(group: Any) -> None:
    dist.all_reduce(torch.ones(4), group=group)


def waited_for(group: Any) -> None:
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    work.wait()


def sent_to_the_first(group: Any) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(4), 3, group=group)
    elif dist.get_rank() == 3:
        dist.send(torch.ones(4), 0, group=group)


CASES: list[tuple[str, dict[str, Any], Callable[[Any], None], int, str]] = [
    ("direct", {}, called_in, 3, "all_reduce #1 (float32, 16 B, SUM)"),
    ("planned", {"plan": "hierarchical"}, called_in, 3, "all_reduce #1 (float32, 16 B, SUM)"),
    ("on_a_lane", {"plan": "hierarchical", "lane": "dp"}, called_in, 3, "all_reduce #1 (float32, 16 B, SUM)"),
    ("asynchronous", {"plan": "hierarchical"}, waited_for, 3, "all_reduce #1 (float32, 16 B, SUM)"),
    ("message", {}, sent_to_the_first, 3, "recv #1 from rank 3 (float32, 16 B)"),
    ("without_the_first", {}, called_in, 0, "all_reduce #1 (float32, 16 B, SUM)"),
]
"""A group's description and options, what its ranks do, which rank comes late, and the call that the others wait in."""


@pytest.mark.cluster
def test_a_line_says_for_whom_a_call_waits(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    """In every kind of group and call, once each, of the lowest rank that waits; the calls then go on."""
    path = tmp_path / "stderr"

    def job() -> None:
        torch.set_num_threads(1)
        os.environ |= {"COMMLAYER_LONG_WAIT_S": "1", "COMMLAYER_DIAGNOSE_DIR": str(tmp_path)}
        long_waits._COVERED_S = 0.0
        long_waits._NEXT_RANK_S, long_waits._LAST_RANK_S = 5.0, 60.0  # much longer than a busy machine is late
        start_with(HALF_AN_HOUR)
        for name, options, program, late, _ in CASES:
            group = group_with(HALF_AN_HOUR, pg_options=GroupOptions(**options), group_desc=name)
            until = time.monotonic() + 60.0
            while dist.get_rank() == late and f"of group {name}, called" not in path.read_text(encoding="utf-8"):
                assert time.monotonic() < until, f"nothing is said of {name}"
                time.sleep(0.05)
            program(group)
        dist.barrier()
        dist.destroy_process_group()

    with printed(path) as lines:
        emulated_cluster(nodes=2, ranks_per_node=2).run(job)
    said = [line for line in lines if "has waited for" in line]
    for name, _, _, late, call in CASES:
        (line,) = (each for each in said if f"of group {name}, called" in each)
        first = 1 if late == 0 else 0
        assert re.search(rf"commlayer: rank {first} has waited for \d+ s in {re.escape(call)} of group {name}, ", line)
        assert "test_long_waits.py:" in line, line
        assert f"rank {late} has not come to" in line, line
        assert re.search(rf"kill -USR1 \d+ on \S+, or commlayer diagnose {tmp_path} there", line), line
    assert len(said) == len(CASES), said


@pytest.mark.cluster
def test_a_wait_in_a_group_that_stands_alone_is_told_by_its_own_numbers(
    emulated_cluster: ClusterFactory, tmp_path: Path
) -> None:
    """Two replicas of two ranks, whose first and second ranks have a group each, as torchft makes them: this rank is number 0 of
    its group, and 0 or 1 of its job."""
    path = tmp_path / "stderr"

    def job() -> None:
        torch.set_num_threads(1)
        os.environ |= {"COMMLAYER_LONG_WAIT_S": "1", "COMMLAYER_PROFILE": "none"}
        long_waits._COVERED_S = 0.0
        limit, (replica, place) = timedelta(seconds=300), divmod(int(os.environ["RANK"]), 2)
        is_host = os.environ["RANK"] == "0"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=limit)
        own = PrefixStore(f"job {replica}/", store)
        dist.init_process_group("commlayer", store=own, rank=place, world_size=2, timeout=limit)
        group = make_group(
            name=f"sites {place}",
            rank=replica,
            global_ranks=range(2),
            store=PrefixStore(f"sites {place}/", store),
            timeout=limit,
            options=GroupOptions(plan="flat_direct"),
            stands_alone=True,
        )
        until = time.monotonic() + 60.0
        while replica == 1 and f"of group sites {place}, called" not in path.read_text(encoding="utf-8"):
            assert time.monotonic() < until, "nothing is said"
            time.sleep(0.05)
        group.allreduce([torch.ones(4)], AllreduceOptions()).wait()
        group.leave(5.0)
        store.add("done", 1)
        while is_host and store.add("done", 0) < 4:
            time.sleep(0.01)

    with printed(path) as lines:
        emulated_cluster(nodes=2, ranks_per_node=2).run(job)
    said = sorted(re.sub(r"for \d+ s", "for 1 s", line) for line in lines if " of group sites " in line)
    assert len(said) == 2, "\n".join(said)
    for place, line in enumerate(said):
        assert f"rank 0 has waited for 1 s in all_reduce #1 (float32, 16 B, SUM) of group sites {place}, called" in line
        assert f"rank 1 has not come to all_reduce #1 of group sites {place}, for which rank 0 waits" in line

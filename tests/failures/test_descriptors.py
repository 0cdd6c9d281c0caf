"""Too few files that a process may open: an error that says so on all ranks, and an ordinary end of the program."""

from __future__ import annotations

import errno
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
from loaded_programs import run_loaded
from torch._C._distributed_c10d import TCPStore  # torch.distributed has them too, but not for type checkers

from commlayer.failures import descriptors
from commlayer.failures.board import own_client
from commlayer.failures.descriptors import explained, require, set_aside, shortfall
from commlayer.profiles.errors import ClusterError


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may open two files more, of a hundred."""
    monkeypatch.setattr(os, "listdir", lambda _: ["x"] * 99)
    monkeypatch.setattr(descriptors, "_awaiting", weakref.WeakSet())  # other tests' detectors may still be leaving
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))


def test_what_lacks_is_said_with_what_to_do(few: None) -> None:
    assert shortfall(2, "it") == ""
    assert shortfall(3, "it") == (
        "it needs 3 more open files, and this process may open 2 more. Its limit is 100: raise it with `ulimit -n 1024` before "
        "the job starts"
    )
    assert "`ulimit -n 8192`" in shortfall(5000, "it")
    require(2, "it")
    with pytest.raises(ClusterError, match="it needs 3"):
        require(3, "it")


def test_no_limit_and_no_way_to_count_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert shortfall(10**9, "it") == ""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(descriptors, "_TABLE", "/no/such/table")
    assert shortfall(10**9, "it") == ""


def test_a_table_that_cannot_be_opened_for_want_of_a_descriptor_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", full)
    assert "may open 0 more" in shortfall(1, "it")


def test_errors_of_the_system_say_what_to_do_where_descriptors_lack() -> None:
    assert "ulimit -n" in explained(OSError(errno.EMFILE, "Too many open files"))
    assert explained(OSError(errno.ENOMEM, "No memory")) == "[Errno 12] No memory"


class Unasked:
    """A store that would try to connect for half an hour."""

    def clone(self) -> Any:
        raise AssertionError("asked, although no connection can be had")


def test_no_connection_to_the_store_is_begun_that_cannot_be_had(few: None) -> None:
    """The thread that tried was still at it when the program ended, which aborted it."""
    with pytest.raises(ClusterError, match="a connection to the job's store needs 4 more open files"):
        own_client(Unasked())


PROGRAM = """
import os, resource, sys
rank, port, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
os.environ["COMMLAYER_PROFILE"], os.environ["COMMLAYER_CACHE"] = sys.argv[5:]
import torch.distributed as dist
import commlayer.measure.calibrate
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
store = dist.TCPStore("127.0.0.1", port, 4, is_master=False)
dist.init_process_group(backend, store=store, rank=rank, world_size=4)
dist.barrier()
dist.destroy_process_group()
"""
LACKING = [
    ([1024, 1024, 17, 1024], "none", "rank 2, the group 0 of 4 ranks needs 7 more open files"),
    (
        [1024, 38, 1024, 1024],
        "auto",
        "memory shared by 4 ranks of a node needs 6 more open files, and this process may ",
    ),
    ([1024, 36, 1024, 1024], "auto", "a group of 4 ranks needs 7 more open files, and this process may "),
    ([1024, 42, 1024, 1024], "auto", "more open files, and this process may open "),
]
"""Cases: the files that each rank may open, the profile, and the words of all ranks."""


@pytest.mark.cluster
def test_a_program_with_too_few_descriptors_ends_with_an_error_on_all_ranks(tmp_path: Path) -> None:
    """The ranks' store is served here, as torchrun's is by its agent."""
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in LACKING]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COMMLAYER_")}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    jobs = [
        [
            [str(rank), str(server.port), str(limit), "commlayer", profile, str(tmp_path / f"cache-{place}")]
            for rank, limit in enumerate(limits)
        ]
        for place, (server, (limits, profile, _)) in enumerate(zip(servers, LACKING, strict=True))
    ]
    modules = ["torch.distributed", "commlayer.backend.new_groups"]
    ends = run_loaded(PROGRAM, modules, jobs, environment=environment, folder=tmp_path, timeout_s=240)
    for (limits, profile, words), ranks in zip(LACKING, ends, strict=True):
        for rank, (status, said) in enumerate(ranks):
            case = f"limits {limits}, profile {profile}, rank {rank} of 4: {said}"
            assert status == 1, case  # not −6, SIGABRT
            assert "ClusterError: " in said or "PeerError: rank " in said, case
            assert words in said, case
            assert f"Its limit is {min(limits)}: raise it with `ulimit -n 1024` before the job starts" in said, case


class Opening:
    """Something that will open one more file."""

    awaited = 1


def test_files_that_are_still_to_be_opened_count_as_open(few: None) -> None:
    before = shortfall(100, "it")
    opening = Opening()
    set_aside(opening)
    assert _allowed(shortfall(100, "it")) == _allowed(before) - 1
    del opening
    assert shortfall(100, "it") == before


def _allowed(why: str) -> int:
    return int(why.partition("may open ")[2].split()[0])

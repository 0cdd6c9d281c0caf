"""A wait for a Gloo message ends when nobody will answer it: from another thread, or, with an untested torch, by letting go."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from commlayer.failures import waits

HALF_AN_HOUR = timedelta(minutes=30)
ENDED = dedent(
    """
    import os, sys, threading
    sys.path.insert(0, sys.argv[1])
    import torch
    from test_ended_waits import HALF_AN_HOUR, two_ranks
    from commlayer.failures import waits

    waits.TESTED_TORCH = (torch.__version__.partition("+")[0],)
    first, second = two_ranks()
    for work in (first.recv([torch.zeros(4)], 1, 1), first.send([torch.zeros(32 << 20)], 1, 2)):
        threading.Timer(0.05, waits.end_wait, [work]).start()
        print(work.wait(HALF_AN_HOUR), flush=True)
    os._exit(0)
    """
)


class Board:
    """A group's board that breaks when a test says so."""

    has_abandoned, is_broken, has_leaver = False, False, False

    def on_break(self, wake: Any) -> None:
        """Nobody is woken: with a torch not tested, waits look up themselves."""


def two_ranks() -> list[Any]:
    """Two Gloo ranks of this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, HALF_AN_HOUR), range(2)))


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this torch count as none of those that have been tested."""
    monkeypatch.setattr(waits, "TESTED_TORCH", ())
    waits._aborts.cache_clear()
    yield
    waits._aborts.cache_clear()


def test_messages_of_this_torch_can_be_ended() -> None:
    """In a process of its own, which a torch that lays out its objects otherwise may end. It may be listed if this passes."""
    version = torch.__version__.partition("+")[0]
    command = [sys.executable, "-c", ENDED, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    if version not in waits.TESTED_TORCH and done.stdout != "False\nFalse\n":
        pytest.xfail(f"torch {version} takes the slower way")
    assert (done.stdout, done.returncode) == ("False\nFalse\n", 0), done.stderr


def test_the_release_that_development_pins_is_tested() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torch==(.*)$", constraints, re.MULTILINE)
    assert pinned in waits.TESTED_TORCH


@pytest.mark.usefixtures("untested")
def test_a_torch_that_is_not_tested_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("memory of torch's was read")

    monkeypatch.setattr(waits, "_is_torchs", read)
    waits.end_wait(object())


@pytest.mark.usefixtures("untested")
def test_the_slower_way_brings_messages_and_lets_go_of_those_that_never_come() -> None:
    (first, second), board = two_ranks(), Board()
    come, never = torch.zeros(4), torch.zeros(4)
    work = first.recv([come], 1, 1)
    sent = second.send([torch.ones(4)], 0, 1)
    assert waits.wait_for_message(work, HALF_AN_HOUR, board)
    assert sent.wait()
    assert come.tolist() == [1.0] * 4
    assert not board.has_abandoned
    breaks = threading.Timer(0.05, setattr, [board, "is_broken", True])
    breaks.start()
    try:
        assert not waits.wait_for_message(first.recv([never], 1, 2), HALF_AN_HOUR, board)
    finally:
        breaks.join()
        second.send(
            [torch.ones(4)], 0, 2
        ).wait()  # or the thread that was let go of waits as long as this process lives
    assert board.has_abandoned


@pytest.mark.usefixtures("untested")
def test_the_slower_way_keeps_to_our_own_clock() -> None:
    first, second = two_ranks()
    with pytest.raises(RuntimeError, match=r"Timed out after 0.2 s, waiting for a message"):
        waits.Watched(first, Board()).recv([torch.zeros(4)], 1, 1).wait(timedelta(seconds=0.2))
    second.send([torch.ones(4)], 0, 1).wait()


@pytest.mark.usefixtures("untested")
def test_messages_that_are_not_gloos_are_waited_for_where_they_are() -> None:
    class Near:
        def wait(self, timeout: timedelta) -> bool:
            assert threading.current_thread() is threading.main_thread()
            return timeout == HALF_AN_HOUR

    began = time.monotonic()
    assert waits.wait_for_message(Near(), HALF_AN_HOUR, Board())
    assert time.monotonic() - began < 30.0

"""The queue of a group's asynchronous calls, without a group."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, cast

import pytest

from commlayer.engine.progress import ProgressQueue
from commlayer.profiles.errors import InternalError

PATIENCE = timedelta(seconds=30)


class Deadly:
    """Stands for a future whose completion kills the thread that completes it."""

    def set_result(self, _: object) -> None:
        raise MemoryError("no room for a callback")


def test_who_waits_for_a_dead_thread_is_told() -> None:
    queue = ProgressQueue("test", lambda: "rank 3, group ep")
    gate, ran = threading.Event(), list[str]()
    first = queue.submit("first", ["done"], gate.wait, ())
    first._ended = cast("Any", Deadly())
    second = queue.submit("second", None, ran.append, ("second",))
    third = queue.submit("third", None, ran.append, ("third",))
    future = third.get_future()
    gate.set()
    assert first.wait(PATIENCE)  # it had ended well before
    for work, label in ((second, "second"), (third, "third")):
        with pytest.raises(InternalError, match=f"rank 3, group ep: {label} was not run: .*MemoryError: no room"):
            work.wait(PATIENCE)
    with pytest.raises(RuntimeError, match="third was not run"):
        future.wait()
    for later in (queue.submit, lambda *call: queue.run(call[0], *call[2:])):
        with pytest.raises(InternalError, match="fourth was not run"):
            later("fourth", None, ran.append, ("fourth",))
    assert ran == []
    assert queue.drain(30.0)

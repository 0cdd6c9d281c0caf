"""The threads that groups share, without groups."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from commlayer.engine import workers as module
from commlayer.engine.progress import ProgressQueue
from commlayer.engine.workers import Workers, workers

PATIENCE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have left queues."""
    monkeypatch.setattr(module, "_WORKERS", Workers())


def queue(name: str) -> ProgressQueue:
    return ProgressQueue(name, lambda: f"rank 0, group {name}")


def given_back(queue: ProgressQueue) -> None:
    """Return when the queue has given its thread back, which is after the call's end."""
    with queue._counting:
        assert queue._counting.wait_for(lambda: not queue._has_thread, 60.0)


def idle() -> list[str]:
    """The names of the threads that wait for work."""
    return [worker.thread.name for worker in workers()._idle]


def test_queues_that_have_nothing_queued_have_no_threads() -> None:
    queues, idents = [queue(f"group {k}") for k in range(20)], list[int]()
    before = set(threading.enumerate())
    for each in queues:
        work = each.submit("call", None, lambda: idents.append(threading.get_ident()), ())
        assert work.wait(PATIENCE)
        given_back(each)
    assert len(idents) == 20
    assert len(set(threading.enumerate()) - before) == 1
    for each in queues:
        assert each.drain(60.0)
    assert idle() == []


def test_a_queue_whose_call_waits_for_another_queues_does_not_keep_it_from_running() -> None:
    """Two groups, which another rank may use in another order."""
    first, second, gate = queue("first"), queue("second"), threading.Event()
    names = list[str]()

    def waits() -> None:
        names.append(threading.current_thread().name)
        assert gate.wait(60.0)

    waiting = first.submit("waits", None, waits, ())
    assert second.submit("opens", None, gate.set, ()).wait(PATIENCE)
    assert waiting.wait(PATIENCE)
    assert names == ["first"]  # as a snapshot of the process shows it
    assert first.drain(60.0)
    assert second.drain(60.0)


def test_calls_keep_their_order_while_threads_come_and_go() -> None:
    queues = [queue(f"{k}") for k in range(4)]
    ran: list[list[int]] = [[] for _ in queues]

    def program(mine: int) -> None:
        for number in range(400):
            for place in (mine, mine + 2):
                work = queues[place].submit("call", None, ran[place].append, (number,))
            if number % 3 == 0:
                assert work.wait(PATIENCE)

    programs = [threading.Thread(target=program, args=(mine,)) for mine in range(2)]
    for thread in programs:
        thread.start()
    for thread in programs:
        thread.join(60.0)
    for each in queues:
        assert each.drain(60.0)
    assert ran == [list(range(400))] * 4


def test_threads_end_with_the_last_queue() -> None:
    before = set(threading.enumerate())
    first, second = queue("first"), queue("second")
    for each in (first, second):
        assert each.submit("call", None, int, ()).wait(PATIENCE)
    assert first.drain(60.0)
    assert second.drain(60.0)
    assert second.drain(60.0)  # harmless
    for thread in set(threading.enumerate()) - before:  # one that is just giving its queue back
        thread.join(60.0)
    assert set(threading.enumerate()) <= before
    assert idle() == []


def test_a_queue_may_end_in_one_of_its_own_calls() -> None:
    ended = list[bool]()
    mine = queue("mine")
    assert mine.submit("destroy", None, lambda: ended.append(mine.drain(60.0)), ()).wait(PATIENCE)
    assert ended == [True]
    assert mine.drain(60.0)


def test_a_pool_of_no_queues_keeps_no_thread() -> None:
    pool, ran = Workers(), threading.Event()

    class Once:
        name = "once"

        def work(self) -> None:
            ran.set()

    pool.run(Once())
    assert ran.wait(60.0)
    assert pool._idle == []

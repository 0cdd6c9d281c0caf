"""Calls that run beside those of other groups, on a clock of the test's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from commlayer.calls.instruments import Instrument
from commlayer.calls.under_way import CallsUnderWay, calls_under_way, watch_calls_under_way
from commlayer.testing.plugin import ClusterFactory


def test_a_call_is_beside_what_ended_in_it_and_what_still_runs() -> None:
    traffic = CallsUnderWay()
    first, second = 7, 8
    traffic.begin(1, first)
    assert not traffic.is_beside(first, 100), "it is alone"
    traffic.begin(2, second)
    assert traffic.is_beside(first, 100), "another group's still runs"
    traffic.end(2, 150)
    assert traffic.is_beside(first, 100), "another group's has ended in it"
    assert not traffic.is_beside(first, 160), "it began later"
    traffic.end(1, 200)
    assert traffic.is_beside(second, 140)
    assert not traffic.is_beside(second, 210)


def test_a_call_that_nobody_waits_for_ends_by_itself() -> None:
    traffic, is_over = CallsUnderWay(), [False]
    traffic.begin(1, 7, lambda: is_over[0])
    assert traffic.is_beside(8, 100)
    is_over[0] = True
    assert not traffic.is_beside(8, 100)
    assert not traffic._running


def test_calls_of_the_same_group_are_no_others() -> None:
    traffic = CallsUnderWay()
    for call, group in ((1, 7), (2, 7), (3, 8)):
        traffic.begin(call, group)
    traffic.end(3, 50)
    traffic.end(1, 100)
    traffic.end(1, 120)  # again
    assert not traffic.is_beside(7, 60), "only its own"
    assert traffic.is_beside(7, 40)
    assert traffic.is_beside(8, 60)


class Listener(Instrument):
    """Has every call of a group take the long way."""


@pytest.mark.cluster
def test_calls_are_noted_once_somebody_asks(emulated_cluster: ClusterFactory) -> None:
    emulated_cluster(1, 1).run(calls_of_one_rank)


def calls_of_one_rank() -> None:
    """On the only rank of a job: calls that go to Gloo as they are, and calls that take the long way."""
    begun, ended = Mock(), Mock()
    CallsUnderWay.begin, CallsUnderWay.end = begun, ended  # type: ignore[method-assign]
    dist.init_process_group("commlayer", timeout=timedelta(seconds=30))
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(1))  # the first call takes the long way
    for listener in ((), (Listener(),)):
        for each in listener:
            group.instruments.add(each)
        for is_watched in (False, True):
            calls_under_way().is_watched = False
            if is_watched:
                assert watch_calls_under_way() is calls_under_way()
            begun.reset_mock()
            ended.reset_mock()
            dist.all_reduce(torch.ones(1), async_op=True).wait()
            assert begun.call_count == ended.call_count == is_watched
    dist.destroy_process_group()

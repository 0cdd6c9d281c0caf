"""How often a group is looked at: no more often than what a look costs allows, but at once while an appointment is open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlayer.auditing import watch
from commlayer.auditing.watch import GroupWatch


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch that has never looked, one of two in this process."""
    made: Any = GroupWatch.__new__(GroupWatch)
    made.appointments = SimpleNamespace(is_open=False)
    made._next_s = made._rest_s = made._cost_s = 0.0
    monkeypatch.setattr(watch, "_watching", [made, None])
    return made


def test_two_groups_together_take_their_share_of_a_core(looked: Any) -> None:
    looked._rest(100.0, 0.001)
    looked._rest(100.0, 0.001)
    assert looked._next_s == pytest.approx(100.0 + 2 * 0.001 / watch._SHARE)


def test_what_is_done_once_does_not_count_and_nothing_makes_it_wait_for_long(looked: Any) -> None:
    looked._rest(100.0, 0.5)  # it has connected to the store
    looked._rest(100.0, 0.0001)
    assert looked._next_s == pytest.approx(100.0 + 2 * 0.0001 / watch._SHARE)
    looked._rest(101.0, 0.5)
    looked._rest(101.0, 0.5)
    assert looked._next_s == pytest.approx(101.0 + watch._LONGEST_TURN_S)


def test_an_open_appointment_is_looked_after_as_ever(looked: Any) -> None:
    looked.appointments.is_open = True
    looked._next_s = 100.1
    looked._rest(100.0, 0.01)
    looked._rest(100.0, 0.01)
    assert (looked._next_s, looked._rest_s) == (100.1, watch._LONGEST_TURN_S)

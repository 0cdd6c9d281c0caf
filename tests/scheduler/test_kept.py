"""Kept answers: what was once found out is looked up, and the oldest forgotten."""

from __future__ import annotations

from commlayer.scheduler.kept import Kept


def test_the_latest_are_kept_and_the_oldest_goes_first() -> None:
    kept = Kept[str, int](2)
    assert [kept.add(name, number) for number, name in enumerate("abc")] == [0, 1, 2]
    assert dict(kept) == {"b": 1, "c": 2}
    assert kept.get("a") is None
    kept.clear()
    assert kept.add("d", 4) == 4
    assert len(kept) == 1

"""Replays of what groups were told of their calls: they decide as they did when the answers were recorded."""

from __future__ import annotations

import json

import pytest
from experience_replays import GOLDENS, Replay, replays

RECORDED: dict[str, list[str]] = json.loads(GOLDENS.read_text(encoding="utf-8"))
REPLAYS = replays()


def test_each_replay_was_recorded() -> None:
    assert [each.name for each in REPLAYS] == list(RECORDED)


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: str(replay.name))
def test_a_group_decides_as_was_recorded(replay: Replay) -> None:
    assert replay.answers() == RECORDED[replay.name]

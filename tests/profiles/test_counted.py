"""Nouns with their numbers and names."""

from __future__ import annotations

import re
from pathlib import Path

from commlayer.profiles.counted import counted, listed

ROOT = Path(__file__).resolve().parents[2]


def test_one_is_singular_and_all_else_plural() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "entry", "entries") == "3 entries"


def test_names_are_listed_up_to_the_most() -> None:
    assert listed("rank", [3]) == "rank 3"
    assert listed("rank", (rank for rank in (1, 2))) == "ranks 1, 2"
    assert listed("rank", range(5), most=2) == "ranks 0, 1 and 3 more"


def test_no_plural_is_made_by_hand() -> None:
    by_hand = re.compile(r"""['"]s['"] \* \(|else ['"]s['"]|[{ (]['"]s['"] if """)
    places = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("commlayer", "profiles", "scheduler", "integrations")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "counted.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_hand.search(line)
    ]
    assert not places

"""Names that are known, or paths: which is which, and what may have been meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlayer.profiles.known_names import closest, closest_or_all, is_path

KNOWN = ("h100-eos", "h100-two", "h200", "h800", "gb200")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("h100", ". Did you mean h100-eos or h100-two?"),
        ("H20", ". Did you mean h200?"),
        ("h", ". Did you mean h100-eos, h100-two or h200?"),
        ("", ""),
        ("zzz", ""),
    ],
)
def test_close_names_are_few_and_those_that_begin_so_come_first(typed: str, said: str) -> None:
    assert closest(typed, KNOWN) == said
    assert closest_or_all(typed, KNOWN) == (said or ". Known are h100-eos, h100-two, h200, h800, gb200")


def test_a_path_is_what_looks_like_one_or_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    assert all(map(is_path, ("a/b", "none.json", "there")))
    assert not any(map(is_path, ("none", "h100-eos", "")))

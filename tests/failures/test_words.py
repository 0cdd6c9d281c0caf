"""The words by which ranks hear of each other's errors."""

from __future__ import annotations

from commlayer.failures.board import why_left


def test_an_error_without_a_text_leaves_no_colon_behind() -> None:
    assert why_left(ValueError("7 is too large")) == "left with ValueError: 7 is too large"
    assert why_left(KeyboardInterrupt()) == "left with KeyboardInterrupt"

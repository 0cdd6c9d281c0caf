"""Blind rows beside the intervals that the published runs give them."""

from __future__ import annotations

from collections.abc import Sequence

from papers_text import percent, prose, table
from published_predict import Outcome

from commlayer.scheduler.mapping.validity import CheckedRow, assess

__all__ = ["blind_table", "section"]


def section(outcomes: Sequence[Outcome], rows: Sequence[CheckedRow]) -> str:
    """The blind rows on the page."""
    text = """
### Blind rows

Nothing is made of these rows (published_blind.json): no constant, and no interval. They show what both are worth.
"""
    return prose(text) + "\n\n" + blind_table(outcomes, rows)


def blind_table(outcomes: Sequence[Outcome], rows: Sequence[CheckedRow]) -> str:
    """Each row's step as published and as predicted, its interval by ``rows``, and whether it is
    inside."""
    lines = [_line(each, rows) for each in outcomes]
    inside, predicted = sum(line[-1] == "yes" for line in lines), sum(each.error is not None for each in outcomes)
    head = ("row", "published s", "predicted s", "half take more than", "interval, s", "word", "inside")
    return table(head, lines) + f"\n\n{inside} of {predicted} are inside."


def _line(outcome: Outcome, rows: Sequence[CheckedRow]) -> tuple[str, ...]:
    estimate, kind, key = outcome.estimate, outcome.kind, outcome.row.key
    if estimate is None or kind is None or outcome.error is None:
        return key, "", "", "", "", "", outcome.reason
    validity = assess(kind, rows)
    low, high = (us / 1e6 for us in validity.interval(estimate.step_us))
    published, predicted = outcome.step_us / 1e6, estimate.step_us / 1e6
    steps = f"{published:.2f}", f"{predicted:.2f} ({percent(outcome.error, signed=True)})"
    likely = f"{predicted * (1 + validity.middle):.2f}"
    return key, *steps, likely, f"{low:.2f} to {high:.2f}", validity.word, "yes" if low <= published <= high else "no"

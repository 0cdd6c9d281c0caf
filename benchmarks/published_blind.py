"""Blind rows beside the intervals that the published runs give them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from papers_text import percent, prose, table
from published_predict import Outcome, order_pairs

from commlayer.scheduler.mapping.validity import EXTREMES, CheckedRow, assess

__all__ = ["blind_table", "section"]


def section(outcomes: Sequence[Outcome], rows: Sequence[CheckedRow]) -> str:
    """The blind rows on the page."""
    text = """
### Blind rows

Nothing is made of these rows (published_blind.json): no constant, and no interval. They show what both are worth. But those
of AWS were looked at when it was found that a [host that waits](#launches) bounds a layer, and how many calls it makes.
"""
    return "\n\n".join((prose(text), blind_table(outcomes, rows), *map(prose, _orders(outcomes))))


def _reading(outcomes: Sequence[Outcome], rows: Sequence[CheckedRow], inside: int) -> str:
    """Say how many rows are inside, and how many of them only by the widest interval or a choice."""
    predicted = [each for each in outcomes if each.kind is not None and each.error is not None]
    wide = sum(each.kind is not None and assess(each.kind, rows).is_new for each in predicted)
    chosen = sum("throughput" in each.row.assumed.get("graph", "") for each in predicted)
    low, high = EXTREMES
    return (
        f"{inside} of {len(predicted)} are inside. {wide} of the intervals reach from {low:g} to {high:g} times the estimate, as "
        f"nothing is known of such machines. The CUDA graphs of {chosen} of the rows were not stated, and were chosen from its "
        "throughput."
    )


def _orders(outcomes: Sequence[Outcome]) -> list[str]:
    """Say how often the order of two dispatchers on one mapping was predicted right, and where it was not."""
    pairs = [
        (fast, slow, is_right) for fast, slow, is_right in order_pairs(outcomes) if _but_for_dispatcher(fast, slow)
    ]
    if not pairs:
        return []
    right = sum(is_right for _, _, is_right in pairs)
    return [
        f"Of the pairs of one mapping by two dispatchers that were more than 5 % apart, {right} of {len(pairs)} are predicted in "
        "their order.",
        *(
            f"Missed: the order of dispatchers on {fast.row.system}: {fast.row.dispatcher} took {fast.step_us / 1e6:.2f} s and "
            f"{slow.row.dispatcher} {slow.step_us / 1e6:.2f} s of one mapping, and {slow.row.dispatcher} was predicted to be "
            "faster."
            for fast, slow, is_right in pairs
            if not is_right
        ),
    ]


def _but_for_dispatcher(one: Outcome, other: Outcome) -> bool:
    """Whether two rows are of one mapping by two dispatchers."""
    same = {name: getattr(other.row, name) for name in ("key", "place", "published", "dispatcher")}
    return one.row.dispatcher != other.row.dispatcher and msgspec.structs.replace(one.row, **same) == other.row


def blind_table(outcomes: Sequence[Outcome], rows: Sequence[CheckedRow]) -> str:
    """Each row's step as published and as predicted, its interval by ``rows``, and whether it is
    inside."""
    lines = [_line(each, rows) for each in outcomes]
    inside = sum(line[-1] == "yes" for line in lines)
    head = ("row", "published s", "predicted s", "half take more than", "interval, s", "word", "inside")
    return f"{table(head, lines)}\n\n{prose(_reading(outcomes, rows, inside))}"


def _line(outcome: Outcome, rows: Sequence[CheckedRow]) -> tuple[str, ...]:
    estimate, kind, key = outcome.estimate, outcome.kind, outcome.row.key
    if estimate is None or kind is None or outcome.error is None:
        return key, "", "", "", "", "", outcome.reason
    validity = assess(kind, rows)
    low, high = (us / 1e6 for us in validity.interval(estimate.step_us))
    published, predicted = outcome.step_us / 1e6, estimate.step_us / 1e6
    steps = f"{published:.2f}", f"{predicted:.2f} ({percent(outcome.error, signed=True)})"
    likely = "–" if validity.is_unseen else f"{predicted * (1 + validity.middle):.2f}"
    return key, *steps, likely, f"{low:.2f} to {high:.2f}", validity.word, "yes" if low <= published <= high else "no"

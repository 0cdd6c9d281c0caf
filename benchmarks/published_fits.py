"""The worth of one measured run: each published run predicted by a model that was fitted to
another of its source, cluster and software."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from papers_text import percent, prose, table
from published_predict import Outcome, predict

from commlayer.scheduler.mapping.run_fit import FADE, MeasuredRun, fit_to
from commlayer.scheduler.mapping.validity import FittedErrors, quantiles

__all__ = ["Pair", "errors_of", "pairs_of", "section"]

TARGET = 0.08
"""The mean error that a model fitted to one run was to have for another of its cluster and software."""
_MOST = 4
"""Differences from which on pairs are taken together."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A run that was predicted from another one. ``group``: the source, cluster and software of
    both.

    ``before``, ``error``: the published step over the predicted one, less 1, without the fit and
    with it. ``differences``: traits in which the two differ.
    """

    group: tuple[str, ...]
    differences: int
    is_same_model: bool
    before: float
    error: float


def pairs_of(outcomes: Sequence[Outcome]) -> list[Pair]:
    """All pairs of predicted rows of one source, cluster and software."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.error is not None and not each.row.fitted:
            groups[each.row.project, each.row.system, each.row.software].append(each)
    return [
        pair for group, rows in groups.items() if len(rows) > 1 for one in rows for pair in _from_one(group, one, rows)
    ]


def _from_one(group: tuple[str, ...], one: Outcome, rows: Sequence[Outcome]) -> list[Pair]:
    """The other rows of a group, predicted from ``one``."""
    if one.estimate is None or one.kind is None:
        return []
    fit = fit_to([MeasuredRun(estimate=one.estimate, kind=one.kind, step_us=one.step_us)])
    pairs = []
    for other in rows:
        error = predict(other.row, fit).error
        if other is not one and other.kind is not None and other.error is not None and error is not None:
            differences = len(fit.differences(other.kind) or ())
            pairs.append(Pair(group, differences, other.row.model == one.row.model, other.error, error))
    return pairs


def errors_of(pairs: Sequence[Pair]) -> list[FittedErrors]:
    """The errors that a fit to one run leaves, by as many traits that differ as it fades over."""
    return [
        FittedErrors(
            number,
            sum(min(pair.differences, _MOST) == number for pair in pairs),
            *(round(error, 4) for error in _ends(pairs, number)),
        )
        for number in range(len(FADE))
    ]


def _ends(pairs: Sequence[Pair], differences: int) -> tuple[float, float, float]:
    """The ends and the middle of the interval, which is no narrower than that of fewer differences."""
    every = [_quantiles(pairs, number) for number in range(differences + 1)]
    return min(low for low, _, _ in every), every[-1][1], max(high for _, _, high in every)


def _quantiles(pairs: Sequence[Pair], differences: int) -> tuple[float, float, float]:
    """The quantiles of errors: one vote for each group, split by nearness."""
    groups: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.group].append(pair)
    votes = []
    for of_group in groups.values():
        near = [math.exp(-abs(min(pair.differences, _MOST) - differences)) for pair in of_group]
        vote = max(near) / sum(near)
        votes += [(pair.error, vote * each) for pair, each in zip(of_group, near, strict=True)]
    return quantiles(sorted(votes))


def section(pairs: Sequence[Pair]) -> str:
    """The errors of runs without a fit and with one, and whether intervals hold for a group that
    is left out."""
    text = f"""
### What one run of yours is worth

`commlayer estimate --measured` fits the model to a run ([how](cli.md#one-run-of-yours)). Here each run is predicted from each
other one of its source, cluster and software: {len(pairs)} pairs in {len({pair.group for pair in pairs})} groups. Their traits
differ as listed above. The interval is what such an estimate has; inside is how many pairs of a group lie in the interval that
all other groups give them. Factors fade with the traits that differ, short layers not counted: their logarithms have the weights
{", ".join(f"{weight:g}" for weight in FADE)} for 0, 1, … differing traits, and 0 beyond. These weights were chosen on
these very pairs, so that a run which comes anew may fare worse than the table says.

{_worth(pairs)}
"""
    lines = [
        ("of the same model", *_cells([pair for pair in pairs if pair.is_same_model]), "", ""),
        *(_line(pairs, number) for number in range(_MOST + 1)),
        ("all", *_cells(pairs), "", percent(_share_inside(pairs, pairs))),
    ]
    head = ("traits that differ", "pairs", "mean error before", "with the fit", "median", "interval", "inside")
    by_group = sorted({pair.group for pair in pairs})
    groups = [(", ".join(group), *_cells([pair for pair in pairs if pair.group == group])) for group in by_group]
    return "\n\n".join(
        (
            prose(text),
            table(head, lines),
            table(("source, cluster, software", "pairs", "mean error before", "with the fit", "median"), groups),
        )
    )


def _worth(pairs: Sequence[Pair]) -> str:
    """Say for which runs a fit helps, and whether another run is predicted as well as was asked."""
    helped = []
    for number in range(len(FADE)):
        _, before, after, _ = _cells([pair for pair in pairs if pair.differences == number])
        helped.append(f"{before} to {after} at {number}")
    error = mean(abs(pair.error) for pair in pairs)
    met = "met" if error <= TARGET else "**missed**"
    return (
        f"A fit helps for runs that differ in few traits, and there by little: the mean error goes from {', '.join(helped)}. "
        "For runs that differ in more it changes nothing. Target: a mean error of at most "
        f"{TARGET:.0%} for another run of the same software and cluster: {met}, with {percent(error)}."
    )


def _line(pairs: Sequence[Pair], number: int) -> tuple[object, ...]:
    low, _, high = _ends(pairs, number)
    such = [pair for pair in pairs if min(pair.differences, _MOST) == number]
    ends = f"{percent(low, signed=True)} to {percent(high, signed=True)}"
    name = f"{number}" if number < _MOST else f"{number} and more"
    return name, *_cells(such), ends, percent(_share_inside(such, pairs))


def _cells(pairs: Sequence[Pair]) -> tuple[object, ...]:
    before, after = ([abs(each) for each in errors] for errors in _errors(pairs))
    return len(pairs), percent(mean(before)), percent(mean(after)), percent(median(after))


def _errors(pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    return [pair.before for pair in pairs], [pair.error for pair in pairs]


def _share_inside(such: Sequence[Pair], pairs: Sequence[Pair]) -> float:
    """The share of pairs in the intervals by which the other groups would hold them; the estimate
    is inside."""
    ends = {}
    for pair in such:
        key = pair.group, min(pair.differences, _MOST)
        if key not in ends:
            ends[key] = _ends([other for other in pairs if other.group != pair.group], key[1])
    held = [
        min(ends[key][0], 0.0) <= pair.error <= max(ends[key][2], 0.0)
        for pair in such
        for key in [(pair.group, min(pair.differences, _MOST))]
    ]
    return mean(held)

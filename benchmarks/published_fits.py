"""The worth of one measured run: each published run predicted by a model that was fitted to
another of its source, cluster and software."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median

from papers_text import percent, prose, table
from published_data import Published
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
    """A run, ``row``, that was predicted from another one, ``run``, of its source, cluster and
    software.

    ``before``, ``error``: the published step over the predicted one, less 1, without the fit and
    with it. ``differences``: traits in which the two differ.
    """

    run: Published
    row: Published
    differences: int
    before: float
    error: float

    @property
    def group(self) -> tuple[str, ...]:
        """The source, cluster and software of both."""
        return self.row.project, self.row.system, self.row.software

    @property
    def is_same_model(self) -> bool:
        return self.run.model == self.row.model

    @property
    def is_same_release(self) -> bool:
        """Whether both are of one table: of one release of the software, where its source has several."""
        return self.run.release == self.row.release


def pairs_of(outcomes: Sequence[Outcome]) -> list[Pair]:
    """All pairs of predicted rows of one source, cluster and software."""
    groups: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.error is not None and not each.row.fitted:
            groups[each.row.project, each.row.system, each.row.software].append(each)
    return [pair for rows in groups.values() if len(rows) > 1 for one in rows for pair in _from_one(one, rows)]


def _from_one(one: Outcome, rows: Sequence[Outcome]) -> list[Pair]:
    """The other rows of a group, predicted from ``one``."""
    if one.estimate is None or one.kind is None:
        return []
    fit = fit_to([MeasuredRun(estimate=one.estimate, kind=one.kind, step_us=one.step_us)])
    pairs = []
    for other in rows:
        error = predict(other.row, fit).error
        if other is not one and other.kind is not None and other.error is not None and error is not None:
            differences = len(fit.differences(other.kind) or ())
            pairs.append(Pair(one.row, other.row, differences, other.error, error))
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


def section(pairs: Sequence[Pair], blind: Sequence[Pair]) -> str:
    """The errors of runs without a fit and with one, and whether intervals hold for a group that
    is left out. ``blind``: pairs of blind rows, of which nothing is made."""
    text = f"""
### What one run of yours is worth

`commlayer estimate --measured` fits the model to a run ([how](cli.md#one-run-of-yours)). Here each run is predicted from each
other one of its source, cluster and software: {len(pairs)} pairs in {len({pair.group for pair in pairs})} groups. Their traits
differ as listed above. The interval is what such an estimate has; inside is how many pairs of a group lie in the interval that
all other groups give them. Factors fade with the traits that differ, short layers not counted: their logarithms have the weights
{", ".join(f"{weight:g}" for weight in FADE)} for 0, 1, … differing traits, and 0 beyond. These weights were chosen on
these very pairs, so that a run which comes anew may fare worse than the table says: of the blind rows, below, it did.

{_worth(pairs, blind)}
"""
    lines = [
        ("of the same model", *_cells([pair for pair in pairs if pair.is_same_model]), "", ""),
        ("of the same release", *_cells([pair for pair in pairs if pair.is_same_release]), "", ""),
        (
            "of the same model and release",
            *_cells([pair for pair in pairs if pair.is_same_model and pair.is_same_release]),
            "",
            "",
        ),
        *(_line(pairs, number) for number in range(_MOST + 1)),
        ("all", *_cells(pairs), "", percent(_share_inside(pairs, pairs))),
        ("all of the blind rows", *_cells(blind), "", ""),
    ]
    head = ("traits that differ", "pairs", "mean error before", "with the fit", "median", "interval", "inside")
    by_group = sorted({pair.group for pair in pairs})
    groups = [(", ".join(group), *_cells([pair for pair in pairs if pair.group == group])) for group in by_group]
    return "\n\n".join(
        (
            prose(text),
            table(head, lines),
            table(("source, cluster, software", "pairs", "mean error before", "with the fit", "median"), groups),
            *_in_the_way(pairs),
        )
    )


def _worth(pairs: Sequence[Pair], blind: Sequence[Pair]) -> str:
    """Say for which runs a fit helps, and whether another run is predicted as well as was asked."""
    helped = []
    for number in range(len(FADE)):
        _, before, after, _ = _cells([pair for pair in pairs if pair.differences == number])
        helped.append(f"{before} to {after} at {number}")
    near = _shared(pair for pair in pairs if pair.is_same_model)
    far = _shared(pair for pair in pairs if not pair.is_same_model)
    _, before, after, _ = _cells(blind)
    error = _mean_error(pairs)
    met = "met" if error <= TARGET else "**missed**"
    return (
        f"A fit is worth little: the mean error goes from {', '.join(helped)}, and does not change for runs that differ in "
        f"more; of the blind rows it goes from {before} to {after}. For two runs of one cluster and software share little of "
        f"their errors: of the logarithm of one's, the other has {near:.2f} times as much where the model is the same, and "
        f"{far:.2f} times where it is not (least squares). What the model lacks differs from mapping to mapping, and no factor "
        f"of one run has it. Target: a mean error of at most {TARGET:.0%} for another run of the same software and cluster: "
        f"{met}, with {percent(error)}."
    )


def _shared(pairs: Iterable[Pair]) -> float:
    """The part of a run's error that another one has as well: the slope by least squares, in logarithms."""
    errors = {(pair.run.key, pair.row.key): math.log1p(pair.before) for pair in pairs}
    both = [(errors[row, run], error) for (run, row), error in errors.items()]
    return sum(one * other for one, other in both) / sum(one * one for one, _ in both)


def _in_the_way(pairs: Sequence[Pair]) -> list[str]:
    """The rows, those with the largest errors first, without which the others' mean error is what was asked."""
    by_row: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_row[pair.row.key].append(pair)
    worst = sorted(by_row.values(), key=_mean_error, reverse=True)
    number = next(count for count in range(len(worst)) if _mean_error([*chain(*worst[count:])]) <= TARGET)
    if not number:
        return []
    text = (
        f"{number} of {len(worst)} rows keep the mean above {TARGET:.0%}: that of the others is "
        f"{percent(_mean_error([*chain(*worst[number:])]))}. None of them is left out of any figure above."
    )
    lines = [(of_row[0].row.key, *_cells(of_row), of_row[0].row.doubt) for of_row in worst[:number]]
    head = ("row", "pairs", "mean error before", "with the fit", "median", "what its source says against it")
    return [prose(text), table(head, lines)]


def _mean_error(pairs: Sequence[Pair]) -> float:
    return mean(abs(pair.error) for pair in pairs)


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

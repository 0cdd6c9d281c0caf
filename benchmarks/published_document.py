"""docs/published.md: the rows, how far off they were predicted, and what that says of estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, get_args

from papers_text import percent, prose, table
from published_blind import section as blind_section
from published_data import Published
from published_fits import Pair, pairs_of
from published_fits import section as fits_section
from published_launches import section as launches_section
from published_predict import Outcome, order_pairs

from commlayer.scheduler.mapping.result import kind_words
from commlayer.scheduler.mapping.validity import (
    CLOSE,
    COVERAGE,
    EXTREMES,
    LINEAR_RUN,
    ROUGH,
    UNEXPLAINED,
    CheckedRow,
    Validity,
    Word,
    assess,
)

__all__ = ["document"]

TARGETS = {"named": "each within 20 %", "open": "mean at most 8 %", "held": "mean at most 12 %"}
_MEETS: dict[str, Callable[[Sequence[float]], bool]] = {
    "named": lambda errors: max(errors) <= 0.20,
    "open": lambda errors: mean(errors) <= 0.08,
    "held": lambda errors: mean(errors) <= 0.12,
}
_GROUPS = {
    "named": "named in advance: everybody saw them",
    "open": "first two thirds: seen while the model was made",
    "held": "last third: held back",
    "later": "added later, of AWS's network: seen while launches by hosts that wait were modelled",
}
_FAR = 0.30
_SEEN = """
One of the held-back rows was no secret: Megatron-MoE-ModelZoo's Qwen3-235B with merged passes (17.6 s) stands in
[simulation.md](simulation.md#software) with a prediction of an earlier state of the model.
"""

_HEAD = """
# Published training runs, predicted

`make published` writes this page. It sets training runs that others have published beside what the planner predicts for their
mappings, beyond those of [the papers](papers.md). Rates of links, kernels and products have other sources
([clusters](clusters.md)), and the four factors of the papers' rows stay as they are. Set by these rows are three numbers that say
what of a host's [launches](#launches) is exposed, the least time of a call that launches with its factors on a Grace and on p5's
hosts, and what of EFA's rate trainings reach.

The rows were split by a hash of their keys before any was predicted: two thirds were looked at while the model was made, and one
third was held back until it was frozen, and predicted once. What came of that stands here whatever it is.

An error is predicted over published throughput, less 1: +10 % is a step that was predicted too short. The same errors are what
`commlayer estimate`, `search` and `what-if` take their intervals from (below).
"""

_READ = """
## How to read an estimate

An estimate has an interval, in which 8 of 10 real steps are meant to lie, and a word for its width: *close* where its ends are
at most {close:g} times apart, *rough* where they are at most {rough:g} times apart, else *unknown*. The estimate itself always
lies in the interval; where runs like it were all slower than predicted, it is the lower end. Beside it stands the time that half
of such steps take longer than.

The interval comes from the errors of the runs on this page and of [the papers](papers.md). A project (or a paper) is one source,
whatever it publishes in how many releases: its runs share people, machines and software, and so their errors. Each source has
one vote, and a weaker one the more its nearest run differs from the case: in the GPUs' generation, the network, the trainer's
software, the precision, what carries tokens to experts, where experts lie, what hides the exchange, whether experts are fused,
whether layers are short (less than 12 ms a micro-batch), whether weights are sharded, the kind of attention, and the model. Half
a vote goes to all runs
alike, for a source that nobody has seen. Where no run was on such a machine at all (a generation of GPUs, or a network with
curves of its own), no run is near, and the interval reaches from {fastest:g} to {slowest:g} times the estimate. {slowest:g} is
a bound that we took for what nobody measured. Where no run is of a model with such attention, the upper end is {linear:g} times
as far: as much longer than planned did the one published run of a model with linear attention take (Qwen3-Next, among the rows
without a prediction). In both cases no time is named that half of such steps take longer than.
"""


def document(
    *,
    outcomes: Sequence[Outcome],
    held: Sequence[Published],
    first: Mapping[str, Any] | None,
    papers: Sequence[CheckedRow],
    pairs: Sequence[Pair],
    blind: Sequence[Outcome],
) -> str:
    """The whole page. ``first``: what came out when the held-back rows were predicted first; None: they have not been."""
    found = [each for each in outcomes if each.error is not None]
    rows = [each.checked for each in found if each.checked is not None]
    parts = [
        prose(_HEAD),
        _summary(outcomes, held, first),
        prose(_SEEN),
        _models(found, first),
        "![Predicted over published throughput](pictures/published-scatter.svg)",
        prose(_READ.format(close=CLOSE, rough=ROUGH, fastest=EXTREMES[0], slowest=EXTREMES[1], linear=LINEAR_RUN)),
        _coverage([*rows, *papers]),
        fits_section(pairs, pairs_of(blind)),
        blind_section(blind, [*rows, *papers]),
        "![Errors by kind of case](pictures/published-errors.svg)",
        _kinds(rows),
        "## The rows",
        prose(_ROWS),
        _rows(found, first),
        _far(found),
        _unexplained(rows),
        launches_section(found),
        _order(outcomes),
        _without(outcomes, held if first is None else ()),
        _assumptions(outcomes),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


_ROWS = """
Tokens/s of a GPU. Where a source has TFLOP/s, they are those over our count of a token's FLOPs. *Left out* is what a source
did and the planner has no word for.
"""


def _summary(
    outcomes: Sequence[Outcome],
    held: Sequence[Published],
    first: Mapping[str, Any] | None,
) -> str:
    lines: list[tuple[object, ...]] = []
    for group, words in _GROUPS.items():
        mine = [each for each in outcomes if each.row.group == group]
        errors = [abs(each.error) for each in mine if each.error is not None]
        if group == "held":
            if first is None:
                lines.append((words, len(held), "–", "not yet predicted", "", "", TARGETS[group]))
                continue
            known = {key: each["error"] for key, each in first["rows"].items() if each["error"] is not None}
            errors = [abs(error) for error in known.values()]
            words = f"{words}; as predicted first, on {first['date']} at commit {first['commit']}"
        total = len(held) if group == "held" else len(mine)
        if errors:
            far = sum(error > _FAR for error in errors)
            cells = percent(mean(errors)), percent(median(errors)), str(far)
        else:
            cells = "–", "–", "–"
        met = (
            f"{TARGETS[group]}: {'met' if errors and _MEETS[group](errors) else '**missed**'}"
            if group in _MEETS
            else ""
        )
        lines.append((words, total, len(errors), *cells, met))
    head = ("rows", "all", "predicted", "mean", "median", "beyond 30 %", "target")
    return table(head, lines)


def _models(found: Sequence[Outcome], first: Mapping[str, Any] | None) -> str:
    """The mean error by model: of rows that were seen, and of those held back, as predicted first."""
    seen: dict[str, list[float]] = defaultdict(list)
    held: dict[str, list[float]] = defaultdict(list)
    for each in found:
        if each.row.group != "held":
            seen[each.row.model].append(abs(each.error or 0.0))
        elif first is not None and first["rows"][each.row.key]["error"] is not None:
            held[each.row.model].append(abs(first["rows"][each.row.key]["error"]))
    lines = [
        (
            model,
            *(
                f"{percent(mean(group[model]))} of {len(group[model])}" if group[model] else "–"
                for group in (seen, held)
            ),
        )
        for model in sorted({*seen, *held})
    ]
    return table(
        ("model", "mean error, named, first two thirds and added later", "last third, as predicted first"), lines
    )


def _coverage(rows: Sequence[CheckedRow]) -> str:
    """The share of rows in the interval that the rows of the other sources give them."""
    text = f"""
Below, each source's runs beside the intervals that they get from all other sources, its own left out: what a new source can
expect. Target: {COVERAGE:.0%} and more inside. How fast a vote fades with each difference, and the votes themselves, were
chosen on these runs among some hundred settings, of which not all held {COVERAGE:.0%}, and launches are fitted to them: a run
that comes anew may fare worse than the table says.
"""
    parts = [prose(text), _by_source(rows), _by_word(rows)]
    releases = sorted({_release_of(row) for row in rows})
    blind = [each for release in releases for each in _blind(rows, _release_of, release)]
    deployed = [assess(row.kind, rows) for row in rows]
    parts.append(
        prose(
            f"With one release or table left out at a time, and all else of its project kept, "
            f"{_share_inside(blind)} are inside, with a median width of "
            f"{_width(validity for _, validity in blind)}. With nothing left out, as an estimate of such a case "
            f"has it today, the median width is {_width(deployed)}."
        )
    )
    return "\n\n".join(parts)


_Blind = list[tuple[CheckedRow, Validity]]


def _blind(rows: Sequence[CheckedRow], part_of: Callable[[CheckedRow], str], name: str) -> _Blind:
    """The rows of one part, which are left out, each with what the others say of it."""
    others = [row for row in rows if part_of(row) != name]
    return [(row, assess(row.kind, others)) for row in rows if part_of(row) == name]


def _source_of(row: CheckedRow) -> str:
    return row.source


def _release_of(row: CheckedRow) -> str:
    return row.key.partition("/")[0]


def _is_inside(row: CheckedRow, validity: Validity) -> bool:
    return validity.low <= row.error <= validity.high


def _share_inside(blind: _Blind) -> str:
    return percent(mean(_is_inside(*each) for each in blind))


def _width(validities: Iterable[Validity]) -> str:
    return f"{median(each.ratio for each in validities):.2f}"


def _by_source(rows: Sequence[CheckedRow]) -> str:
    sources = sorted({row.source for row in rows})
    blind = {source: _blind(rows, _source_of, source) for source in sources}
    lines = [
        (source, len(each), _share_inside(each), _width(validity for _, validity in each), *_errors(each))
        for source, each in blind.items()
    ]
    every = [each for of_source in blind.values() for each in of_source]
    lines.append(
        ("all runs", len(every), _share_inside(every), _width(validity for _, validity in every), *_errors(every))
    )
    shares = [mean(_is_inside(*each) for each in of_source) for of_source in blind.values()]
    lines.append(("mean of the sources", len(sources), percent(mean(shares)), "", "", ""))
    head = ("source left out", "runs", "inside", "median width (high / low)", "mean error", "of the median")
    return table(head, lines)


def _errors(blind: _Blind) -> tuple[str, str]:
    """The mean errors of a predicted step: as estimated, and with what half of such runs take."""
    estimated = mean(abs(row.error) for row, _ in blind)
    likely = mean(abs((1 + row.error) / (1 + validity.middle) - 1) for row, validity in blind)
    return percent(estimated), percent(likely)


def _by_word(rows: Sequence[CheckedRow]) -> str:
    words: dict[str, _Blind] = defaultdict(list)
    for source in sorted({row.source for row in rows}):
        for row, validity in _blind(rows, _source_of, source):
            words[validity.word].append((row, validity))
    lines = [
        (word, len(words[word]), _share_inside(words[word]), *_errors(words[word]))
        for word in get_args(Word)
        if words[word]
    ]
    return table(("word", "runs", "inside", "mean error", "of the median"), lines)


def _kinds(rows: Sequence[CheckedRow]) -> str:
    kinds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        kinds[kind_words(row.kind)].append(row.error)
    lines = [
        (
            words,
            len(errors),
            percent(mean(map(abs, errors))),
            percent(min(errors), signed=True),
            percent(max(errors), signed=True),
        )
        for words, errors in sorted(kinds.items())
    ]
    return table(("kind of case", "rows", "mean error", "lowest", "highest"), lines)


def _rows(found: Sequence[Outcome], first: Mapping[str, Any] | None) -> str:
    lines = []
    for each in sorted(found, key=lambda each: (list(_GROUPS).index(each.row.group), each.row.key)):
        row = each.row
        was = ""
        if first is not None and row.group == "held" and first["rows"][row.key]["error"] is not None:
            was = percent(first["rows"][row.key]["error"], signed=True)
        fits = "" if each.estimate is None or each.estimate.fits else "does not fit"
        cells = f"{each.published:,.0f}", f"{each.predicted:,.0f}", percent(each.error, signed=True)
        lines.append((row.group, row.key, *cells, was, ", ".join([*each.left_out, *([fits] if fits else [])])))
    head = ("group", "row", "published", "predicted", "error", "error when predicted first", "left out")
    return table(head, lines)


def _far(found: Sequence[Outcome]) -> str:
    far = [each for each in found if each.error is not None and abs(each.error) > _FAR]
    if not far:
        return "No row is farther off than 30 %."
    lines = [(each.row.key, percent(each.error, signed=True), _why(each)) for each in far]
    return "### Farther off than 30 %\n\n" + table(("row", "error", "our reading of why"), lines)


_LEFT = """
### What no public number explains

Mechanisms were added where a public source other than these rows has their numbers: attention of narrow heads and short windows
by cuDNN's times, experts' biases and clamps as kernels of their own, rows put into the order of experts as each dispatcher does
it, padding and casts of FP8 experts one by one, small rows at lower rates; and launches (below), which are fitted. After that
three kinds of runs are still slower than predicted. We know of no number for what they have beyond others, and fit none; an
estimate of such a case says so in a note, and its interval has their errors. Rejected: attention of gpt-oss that writes its
scores, which would be 8.6 GB for each layer of a micro-batch of 4 × 4,096 tokens (64 heads, BF16), and no GPU
of its rows has room for that.
"""


def _unexplained(rows: Sequence[CheckedRow]) -> str:
    lines = []
    for words, has in UNEXPLAINED:
        errors = [row.error for row in rows if has(row.kind)]
        if errors:
            cells = (percent(each, signed=True) for each in (median(errors), min(errors), max(errors)))
            lines.append((words, len(errors), *cells))
    return prose(_LEFT) + "\n\n" + table(("what they have", "rows", "median error", "lowest", "highest"), lines)


def _why(each: Outcome) -> str:
    row, slow = each.row, each.error is not None and each.error > 0
    reasons = [row.doubt] if row.doubt else []
    if slow and each.kind is not None and each.kind.short:
        reasons.append("short layers, of which hosts may add more than is modelled (see below for launches)")
    if slow and row.model.startswith("gpt-oss"):
        reasons.append(
            "not known: narrow heads, windows, biases and clamps are modelled, and how fast kernels for them and for sums of "
            "gradients are in training is not published"
        )
    if not slow and row.graph == "full iteration":
        reasons.append("attention in FP8, which is predicted in BF16")
    apart = max((max(old / row.published, row.published / old) for _, old in row.also), default=1.0)
    if apart > 1 + _FAR:
        reasons.append(f"published {apart:.1f} times apart for this mapping in another release")
    return "; ".join(reasons) or "not known"


def _order(outcomes: Sequence[Outcome]) -> str:
    pairs = order_pairs(outcomes)
    right = sum(each for _, _, each in pairs)
    text = (
        f"Of {len(pairs)} pairs of mappings of one model on one cluster, more than 5 % apart as published, {right} are predicted "
        "in the published order."
    )
    wrong = [
        (fast.row.key, slow.row.key, f"{fast.published / slow.published:.2f}", f"{fast.predicted / slow.predicted:.2f}")
        for fast, slow, is_right in pairs
        if not is_right
    ]
    said = "### The order of mappings\n\n" + prose(text)
    return said + ("\n\n" + table(("faster", "slower", "published ratio", "predicted"), wrong) if wrong else "")


def _without(outcomes: Sequence[Outcome], held: Sequence[Published]) -> str:
    lines = [(each.row.key, each.reason) for each in outcomes if each.error is None]
    lines += [(row.key, row.cannot) for row in held if row.cannot]
    if not lines:
        return ""
    return "## Rows without a prediction\n\n" + table(("row", "why"), lines)


def _assumptions(outcomes: Sequence[Outcome]) -> str:
    sources: dict[str, list[Published]] = defaultdict(list)
    for each in outcomes:
        sources[each.row.source].append(each.row)
    lines = []
    for source, rows in sorted(sources.items()):
        assumed = sorted({f"{name}: {why}" for row in rows for name, why in row.assumed.items()})
        spread = [max(old / row.published, row.published / old) - 1 for row in rows for _, old in row.also]
        again = (
            f"{len(spread)} more values of these from other releases, up to {max(spread):.0%} apart" if spread else ""
        )
        lines.append((source, len(rows), "; ".join(assumed) or "nothing", again))
    return "## Sources, and what they leave open\n\n" + table(("source", "rows", "assumed", "published again"), lines)

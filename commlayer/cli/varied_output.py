"""The answer of commands that vary one thing of a job or a cluster: tables, sentences, pictures and reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlayer.cli.default_choices import software_words
from commlayer.cli.mapping_options import Request
from commlayer.cli.mapping_output import estimate_dict, job_dict
from commlayer.cli.measured_runs import fit_dict
from commlayer.cli.output_files import draw, tell
from commlayer.cli.progress_bars import progress_of
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, rounded
from commlayer.drawing.mapping_cells import JOB_NUMBERS, exposed_share, job_words, short_mappings, speed_cells
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.readers.cluster_files import resolve
from commlayer.scheduler.mapping.explain import why_more_than_in_proportion
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.result import StepEstimate, kind_words
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.variations import (
    Alternative,
    Variation,
    Varied,
    VariedPoint,
    VariedWay,
    vary,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MEASURES", "WORDS", "answer"]

WORDS = ("gpu", "precision")
"""The kinds of variations whose values are words."""
_LABELS = {
    "gpus": "GPUs",
    "inter_gbps": "peak between nodes (GB/s of a GPU)",
    "intra_gbps": "peak inside a node (GB/s of a GPU)",
    "inter_factor": "rate between nodes, times the cluster's",
    "intra_factor": "rate inside a node, times the cluster's",
    "domain": "GPUs that NVLink joins",
    "gpu": "GPU",
    "precision": "precision",
    "top_k": "experts a token",
    "split": "parts of each expert",
    "sequence": "tokens of a sequence",
    "global_batch": "sequences a step",
    "skew": "exponent of experts' popularity (Zipf)",
}
MEASURES: dict[str, tuple[str, Callable[[StepEstimate], float]]] = {
    "mfu": ("MFU", lambda each: each.mfu),
    "tokens": ("tokens/s", lambda each: each.tokens_per_s),
    "step": ("step (ms)", lambda each: each.step_us / 1e3),
}
"""The measures that a picture can show, each with its axis' label."""


def answer(
    request: Request,
    variation: Variation,
    ways: Sequence[Alternative],
    *,
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    hold: bool = False,
    measure: str = "mfu",
) -> None:
    """Estimate every way at every value, and print, draw and write what comes out."""
    if hold:
        ways = [_held(request, way) for way in ways]
    with progress_of("estimating") as progress:
        varied = vary(
            request.job, request.cluster, variation, *ways, make=request.make, named=resolve, progress=progress
        )
    points = [point for each in varied.ways for point in each.points]
    if not any(point.estimate for point in points):  # one value that cannot be is a line with a note
        notes = dict.fromkeys(f"{point.value}: {point.note}" for point in points)
        raise UsageError("no value can be estimated\n" + "\n".join(notes))
    if picture is not None:
        draw(picture, _figure(varied, measure))
    if report is not None:
        _write_report(report, request, varied)
    for note in _notes(request, varied):
        echo_sentence(f"note: {note}", err=True)
    if as_json:
        print_json(_as_dict(request, varied))
    else:
        _show(request, varied)


def _held(request: Request, way: Alternative) -> Alternative:
    """The way by the mapping that is its best as things are."""
    estimator = request.make(request.job, request.cluster, way.software)
    with progress_of(f"searching {way.name}".strip()) as progress:
        now = search(request.job, estimator, way.space, top=1, margin=way.margin, progress=progress)
    return replace(way, setup=now.best.setup)


def _figure(varied: Varied, measure: str) -> Figure:
    from commlayer.drawing.mapping_figures import FigureLine, curves_figure

    label, of = MEASURES[measure]
    kind, values = varied.variation.kind, varied.variation.values
    places = range(len(values)) if kind in WORDS else values
    lines = []
    for each in varied.ways:
        results = [of(point.estimate) if point.estimate else None for point in each.points]
        lines.append(FigureLine(each.way.name or label, list(zip(map(float, places), results, strict=True))))
    marks, crossing = [], varied.crossover
    if crossing is not None:
        faster = crossing.at_low
        for at in crossing.crossings:
            before, faster = faster, crossing.second if faster == crossing.first else crossing.first
            marks.append((at, f"{at:.4g}: {before} is faster below, {faster} above"))
    return curves_figure(
        lines,
        f"{varied.job.model.name} on {varied.cluster}" + f", {counted(varied.job.gpus, 'GPU')}" * (kind != "gpus"),
        _LABELS[kind],
        label,
        crossings=marks,
        percent=measure == "mfu",
        words=[str(value) for value in values] if kind in WORDS else (),
    )


_COLUMNS = ["way", "value", "~mapping", ">step ms", ">tokens/s", ">MFU", ">exposed"]


def _written(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cells(way: str, point: VariedPoint, name: str = "") -> list[str]:
    """A row of :data:`_COLUMNS`. ``name``: of the mapping, where it has a shorter one."""
    value, estimate = _written(point.value), point.estimate
    if estimate is None:
        return [way, value, *"–––––"]
    mapping, *speed = speed_cells(estimate)
    return [way, value, name or mapping, *speed, f"{exposed_share(estimate):.1%}"]


def _sentences(varied: Varied) -> list[str]:
    sentences, crossing = [], varied.crossover
    for each in varied.ways:
        lead = f"{each.way.name}: " if each.way.name else ""
        refused: dict[str, list[str]] = {}
        for point in each.points:
            if point.estimate is None:
                refused.setdefault(point.note, []).append(_written(point.value))
        sentences += [f"{lead}no estimate at {', '.join(where)}: {note}" for note, where in refused.items()]
        if each.way.setup is not None:
            sentences.append(f"{lead}{each.way.setup} at every value")
        if (change := _change(varied.variation.kind, each)) and crossing is None:
            sentences.append(f"{lead}{change}")
        trust: dict[str, list[str]] = {}  # once for each kind
        for point in each.points:
            if point.estimate is not None and (validity := point.estimate.validity) is not None:
                low, high = (f"{end:+.0%}" for end in (validity.low, validity.high))
                words = f"{validity.word} ({kind_words(validity.kind)}): 8 of 10 such steps are {low} to {high} longer"
                trust.setdefault(words, []).append(_written(point.value))
        sentences += [f"{lead}at {', '.join(where)}: {words}" for words, where in trust.items()]
    if crossing is not None:
        sentences.append(str(crossing))
    elif len(varied.ways) > 1 and varied.variation.kind not in WORDS and len(varied.variation.values) > 1:
        sentences.append("nothing crosses: both run at fewer than two of the values")
    return sentences


def _notes(request: Request, varied: Varied) -> list[str]:
    """The notes that all estimates have, those on the fit with the values that they are of, and on
    software that nobody named."""
    points = [
        (_written(point.value), point.estimate) for each in varied.ways for point in each.points if point.estimate
    ]
    every = [set(estimate.notes) for _, estimate in points]
    notes = [note for note in points[0][1].notes if all(note in others for others in every)]
    values: dict[str, dict[str, None]] = {}
    for value, estimate in points:
        if request.fit is not None and estimate.validity is not None:
            values.setdefault(request.fit.note(estimate.validity.kind), {})[value] = None
    notes += [f"at {', '.join(where)}: {note}" for note, where in values.items() if note not in notes]
    is_default = request.is_default_software and {each.way.software.name for each in varied.ways} == {
        request.software.name
    }
    return [*notes, software_words(request)] if is_default else notes


def _change(kind: str, each: VariedWay) -> str:
    """Say what a variation does: between which values the speed changes, by how much, and where the mapping does."""
    known = [(point, point.estimate) for point in each.points if point.estimate]
    if len(known) < 2:
        return ""
    (low, before), (high, after) = known[0], known[-1]
    label, ratio = _LABELS[kind], after.tokens_per_s / before.tokens_per_s
    switches = [
        f"{_written(left.value)} and {_written(right.value)}"
        for (left, one), (right, other) in pairwise(known)
        if _without_dp(one.setup) != _without_dp(other.setup)
    ]
    words = f"{label} from {_written(low.value)} to {_written(high.value)}: {ratio:.3g} times the tokens/s"
    if kind == "gpus" and (why := why_more_than_in_proportion(before, after)):
        words += f", {why}"
    if each.way.setup is not None:
        return words
    if not switches:
        return f"{words}; one mapping is the best at all of them"
    return f"{words}; the best mapping changes between {', between '.join(switches)}"


def _without_dp(setup: Setup) -> str:
    """The mapping but for data parallelism, which follows from the GPUs."""
    return re.sub(r" DP\d+", "", str(setup))


def _headline(request: Request, varied: Varied, software: str) -> str:
    """Describe the job with every value of the number that varies."""
    variation = varied.variation
    values: dict[str, list[int]] = {}
    if variation.kind in JOB_NUMBERS:
        values[variation.kind] = [int(value) for value in variation.values]
    return job_words(request.job, request.cluster.name, software, values)


def _show(request: Request, varied: Varied) -> None:
    software = " and ".join(dict.fromkeys(each.way.software.name for each in varied.ways))
    echo_sentence(_headline(request, varied, software))
    echo_sentence(f"varied: {_LABELS[varied.variation.kind]}\n")
    points = [(each.way.name, point) for each in varied.ways for point in each.points]
    names, same = short_mappings([point.estimate.setup for _, point in points if point.estimate])
    mappings = iter(names)
    rows = [_cells(way, point, next(mappings) if point.estimate else "") for way, point in points]
    kept = [index for index in range(len(_COLUMNS)) if index or any(row[0] for row in rows)]
    spare = [kept.index(_COLUMNS.index(name)) for name in (">exposed", ">tokens/s")]
    print_table([_COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows], spare=spare)
    if same:
        echo_sentence(f"all mappings: {same}")
    echo()
    for sentence in _sentences(varied):
        echo_sentence(sentence)


def _write_report(path: Path, request: Request, varied: Varied) -> None:
    from commlayer.drawing.mapping_figures import breakdown_figure, mapping_name
    from commlayer.drawing.mapping_report import write_what_if_report

    label = _LABELS[varied.variation.kind]
    bars = {
        f"{each.way.name} {_written(point.value)}  {mapping_name(point.estimate.setup)}".strip(): point.estimate
        for each in varied.ways
        for point in each.points
        if point.estimate
    }
    figures = []
    if bars:
        figures = [(MEASURES[measure][0], _figure(varied, measure)) for measure in ("mfu", "tokens")]
        figures.append(("Parts of the steps", breakdown_figure(bars)))
    write_what_if_report(
        path,
        f"What if: {label}",
        [_headline(request, varied, request.software.name)],
        _sentences(varied),
        (_COLUMNS, [_cells(each.way.name, point) for each in varied.ways for point in each.points]),
        figures,
    )
    tell("report", path)


def _as_dict(request: Request, varied: Varied) -> dict[str, Any]:
    crossing = varied.crossover
    return {
        "job": job_dict(request.job),
        "cluster": request.cluster.name,
        "fit": fit_dict(request.fit),
        "varied": varied.variation.kind,
        "ways": [
            {
                "name": each.way.name,
                "software": each.way.software.name,
                "held": str(each.way.setup) if each.way.setup is not None else None,
                "points": [
                    {
                        "value": point.value,
                        "cluster": point.cluster,
                        "note": point.note,
                        "estimate": estimate_dict(point.estimate) if point.estimate else None,
                    }
                    for point in each.points
                ],
            }
            for each in varied.ways
        ],
        "crossover": None
        if crossing is None
        else {
            "crossings": [rounded(at, 6) for at in crossing.crossings],
            "faster_at_low": crossing.at_low,
            "faster_at_high": crossing.at_high,
            "is_exact": crossing.is_exact,
            "words": str(crossing),
        },
    }

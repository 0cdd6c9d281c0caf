"""``commlayer what-if``: what changes with one thing of a job or a cluster, and where two ways change places. Offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.default_choices import software_words
from commlayer.cli.mapping_options import (
    Request,
    ask_fabric,
    job_options,
    margin_option,
    read_request,
    read_space,
    space_options,
)
from commlayer.cli.mapping_output import estimate_dict, job_dict
from commlayer.cli.measured_runs import fit_dict, measured_file_option, runs_of, with_fit
from commlayer.cli.option_types import (
    PICTURE,
    RealNumber,
    WholeNumber,
    given_options,
    in_order,
    json_option,
    report_option,
)
from commlayer.cli.output_files import draw, tell
from commlayer.cli.progress_bars import progress_of
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, rounded
from commlayer.cli.what_if_values import WORDS, values_of
from commlayer.drawing.mapping_cells import exposed_share, job_words, short_mappings, speed_cells
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.readers.cluster_files import resolve
from commlayer.scheduler.mapping.crossing import Crossover
from commlayer.scheduler.mapping.explain import why_more_than_in_proportion
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.result import StepEstimate, kind_words
from commlayer.scheduler.mapping.search import search
from commlayer.scheduler.mapping.space import Space
from commlayer.scheduler.mapping.variations import (
    ALTERNATIVES,
    KINDS,
    Alternative,
    Variation,
    WhatIf,
    WhatIfPoint,
    compare,
)
from commlayer.scheduler.mapping.variations import what_if as estimate_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["answer", "what_if_command"]

_NAMES = {kind.replace("_", "-"): kind for kind in KINDS}
_CHOICES = {"folding": "folded", "attention": "attention", "dispatch": "dispatch", "schedule": "schedule"}
"""In what the two ways of a comparison differ; by software, in nothing of the space."""
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
_REPLACED = {"skew": ("imbalance", "routing"), "top_k": (), "split": (), "gpus": (), "sequence": (), "global_batch": ()}
"""The options whose value a variation takes the place of, where it is not the one of its own name; of the job's three numbers a
value must be given all the same."""
_MEASURES: dict[str, tuple[str, Callable[[StepEstimate], float]]] = {
    "mfu": ("MFU", lambda each: each.mfu),
    "tokens": ("tokens/s", lambda each: each.tokens_per_s),
    "step": ("step (ms)", lambda each: each.step_us / 1e3),
}


_variation_options = in_order(
    "What is different",
    click.option("--vary", type=click.Choice(list(_NAMES)), required=True, help="What is different."),
    click.option("--values", help="Its values, such as 25,50,100."),
    click.option("--from", "low", type=RealNumber(min=0), help="In place of --values: the least …"),
    click.option("--to", "high", type=RealNumber(min=0), help="… the greatest …"),
    click.option(
        "--points",
        type=WholeNumber(2, 100),
        help="… and how many, of rates; all else doubles.  [5]",
    ),
    click.option(
        "--compare", "pair", type=click.Choice(list(ALTERNATIVES)), help="Two ways, and where they change places."
    ),
    click.option(
        "--hold", is_flag=True, help="Keep the mapping that is best as things are, in place of each value's own best."
    ),
)


@click.command("what-if", cls=Command)
@job_options
@space_options
@margin_option
@measured_file_option
@_variation_options
@click.option(
    "--measure", type=click.Choice(list(_MEASURES)), default="mfu", show_default=True, help="What the picture shows."
)
@report_option
@click.option("--picture", type=PICTURE, help="Draw it over the values (.svg, .png, .pdf).")
@json_option
@click.pass_context
def what_if_command(
    ctx: click.Context,
    /,
    measure: str,
    margin: float,
    measured: str | None,
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Estimate a job where one thing is different: more GPUs, a slower network, another NVLink domain, FP8, finer experts.

    Each value runs the mapping that is best there, or with --hold the one that is best as things are. --compare searches twice,
    such as folded and unfolded mappings only, and says where the faster one changes.

    \b
      commlayer what-if -m mixtral-8x22b -c h100-eos -g 128 --global-batch 256 --sequence 4096 --vary inter-factor --values 0.5,1
      commlayer what-if … --vary domain --values 8,16,32,72 --picture domain.svg
      commlayer what-if … --vary inter-factor --from 0.1 --to 2 --points 6 --compare folding
    """
    kind, pair = _NAMES[given["vary"]], given["pair"]
    _refuse_replaced(kind, given_options(ctx))
    is_fabric_named = given["fabric"] is not None
    request, space = with_fit(read_request(given), runs_of(measured)), read_space(given)
    if kind == "skew" and request.job.capacity_factor is not None:
        raise UsageError(
            "--capacity-factor: every expert has as many rows then, whatever the --vary skew of routing: leave it out"
        )
    values = values_of(kind, *(given[name] for name in ("values", "low", "high", "points")))
    if kind == "inter_gbps" and not is_fabric_named:
        ask_fabric(request.cluster, "--vary inter-gbps")
    precisions = [str(value) for value in values] if kind == "precision" else space.precision
    recompute = space.recompute if kind != "gpu" else ()
    request.check(precision=precisions, recompute=recompute, offload=space.offload, ep=space.ep, etp=space.etp)
    plain = (Alternative(name="", software=request.software),)
    asked = [_as_asked(request, space, pair, way) for way in (ALTERNATIVES[pair] if pair else plain)]
    ways = [replace(way, margin=margin) for way in asked]
    variation = Variation(kind, values)  # type: ignore[arg-type]
    answer(
        request, variation, ways, hold=given["hold"], report=report, picture=picture, as_json=as_json, measure=measure
    )


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
    answers = _estimated(request, variation, ways, hold)
    _check_some(answers)
    crossing = _crossing(request, variation, ways) if len(ways) > 1 and variation.kind not in WORDS else None
    if picture is not None:
        draw(picture, _figure(answers, crossing, measure))
    if report is not None:
        _write_report(report, request, answers, crossing)
    for note in _notes(request, answers):
        echo_sentence(f"note: {note}", err=True)
    if as_json:
        print_json(_as_dict(request, answers, crossing))
    else:
        _show(request, answers, crossing)


def _refuse_replaced(kind: str, given: Collection[str]) -> None:
    """Raise UsageError for an option whose value every value of ``kind`` takes the place of. With --hold some mapping is the best
    with it."""
    for name in _REPLACED.get(kind, (kind,)):
        if name in given and "hold" not in given:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option}: --vary {kind.replace('_', '-')} takes its place at every value: leave it out, or add --hold to "
                "keep the mapping that is best with it"
            )


def _estimated(request: Request, variation: Variation, ways: Sequence[Alternative], hold: bool) -> dict[str, WhatIf]:
    """The answers by the name of the way ("" where there is one)."""
    found = {}
    for way in ways:
        setup = None
        if hold:
            estimator = request.make(request.job, request.cluster, way.software)
            with progress_of(f"searching {way.name}".strip()) as progress:
                now = search(request.job, estimator, way.space, top=1, margin=way.margin, progress=progress)
                setup = now.best.setup
        with progress_of(way.name or "estimating") as progress:
            found[way.name] = estimate_all(
                request.job,
                request.cluster,
                variation,
                setup=setup,
                space=way.space,
                software=way.software,
                margin=way.margin,
                make=request.make,
                named=resolve,
                progress=progress,
            )
    return found


def _check_some(found: dict[str, WhatIf]) -> None:
    """One value that cannot be is a line with a note; all of them are a mistake."""
    points = [point for each in found.values() for point in each.points]
    if not any(point.estimate for point in points):
        notes = dict.fromkeys(f"{point.value}: {point.note}" for point in points)
        raise UsageError("no value can be estimated\n" + "\n".join(notes))


def _as_asked(request: Request, space: Space, pair: str | None, way: Alternative) -> Alternative:
    """The way within what the command line leaves of the space, and with what it asks of software, but for what the way differs
    in."""
    name = _CHOICES.get(pair or "")
    if not name:
        return replace(way, space=space, software=request.changed(way.software) if pair else request.software)
    return replace(way, space=replace(space, **{name: getattr(way.space, name)}), software=request.software)


def _crossing(request: Request, variation: Variation, ways: Sequence[Alternative]) -> Crossover | None:
    if len(variation.values) < 2:
        return None
    return compare(request.job, request.cluster, variation, *ways, make=request.make)


def _figure(found: dict[str, WhatIf], crossing: Crossover | None, measure: str) -> Figure:
    from commlayer.drawing.mapping_figures import FigureLine, curves_figure

    label, of = _MEASURES[measure]
    first = next(iter(found.values()))
    kind, words = first.variation.kind, [str(value) for value in first.variation.values]
    lines = []
    for name, each in found.items():
        places = range(len(words)) if kind in WORDS else each.variation.values
        results = [of(point.estimate) if point.estimate else None for point in each.points]
        lines.append(
            FigureLine(name or label, [(float(place), result) for place, result in zip(places, results, strict=True)])
        )
    marks = _marks(crossing) if crossing else []
    return curves_figure(
        lines,
        f"{first.job.model.name} on {first.cluster}" + f", {counted(first.job.gpus, 'GPU')}" * (kind != "gpus"),
        _LABELS[kind],
        label,
        crossings=marks,
        percent=measure == "mfu",
        words=words if kind in WORDS else (),
    )


def _marks(crossing: Crossover) -> list[tuple[float, str]]:
    """Where two ways cross, and which is the faster one on which side."""
    faster = crossing.at_low
    marks = []
    for at in crossing.crossings:
        before, faster = faster, crossing.second if faster == crossing.first else crossing.first
        marks.append((at, f"{at:.4g}: {before} is faster below, {faster} above"))
    return marks


_COLUMNS = ["way", "value", "~mapping", ">step ms", ">tokens/s", ">MFU", ">exposed"]


def _rows(found: dict[str, WhatIf]) -> list[list[str]]:
    return [_cells(name, point) for name, each in found.items() for point in each.points]


def _written(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cells(way: str, point: WhatIfPoint) -> list[str]:
    value, estimate = _written(point.value), point.estimate
    if estimate is None:
        return [way, value, *"–––––"]
    return [way, value, *speed_cells(estimate), f"{exposed_share(estimate):.1%}"]


def _sentences(found: dict[str, WhatIf], crossing: Crossover | None) -> list[str]:
    sentences = []
    for name, each in found.items():
        lead = f"{name}: " if name else ""
        sentences += [f"{lead}{words}" for words in _not_estimated(each)]
        if each.setup is not None:
            sentences.append(f"{lead}{each.setup} at every value")
        if (change := _change(each)) and crossing is None:
            sentences.append(f"{lead}{change}")
        sentences += [f"{lead}{words}" for words in _trust(each)]
    return [*sentences, str(crossing)] if crossing else sentences


def _not_estimated(each: WhatIf) -> list[str]:
    """Say why values have no estimate: each reason once."""
    values: dict[str, list[str]] = {}
    for point in each.points:
        if point.estimate is None:
            values.setdefault(point.note, []).append(_written(point.value))
    return [f"no estimate at {', '.join(where)}: {note}" for note, where in values.items()]


def _notes(request: Request, found: dict[str, WhatIf]) -> list[str]:
    """The notes that all estimates have, those on the fit with the values that they are of, and on
    software that nobody named."""
    points = [
        (_written(point.value), point.estimate) for each in found.values() for point in each.points if point.estimate
    ]
    every = [set(estimate.notes) for _, estimate in points]
    notes = [note for note in points[0][1].notes if all(note in others for others in every)]
    values: dict[str, dict[str, None]] = {}
    for value, estimate in points:
        if request.fit is not None and estimate.validity is not None:
            values.setdefault(request.fit.note(estimate.validity.kind), {})[value] = None
    notes += [f"at {', '.join(where)}: {note}" for note, where in values.items() if note not in notes]
    is_default = request.is_default_software and {each.software for each in found.values()} == {request.software.name}
    return [*notes, software_words(request)] if is_default else notes


def _trust(each: WhatIf) -> list[str]:
    """How far to trust the estimates: once for each kind."""
    values: dict[str, list[str]] = {}
    for point in each.points:
        if point.estimate is not None and (validity := point.estimate.validity) is not None:
            low, high = (f"{end:+.0%}" for end in (validity.low, validity.high))
            words = f"{validity.word} ({kind_words(validity.kind)}): 8 of 10 such steps are {low} to {high} longer"
            values.setdefault(words, []).append(_written(point.value))
    return [f"at {', '.join(where)}: {words}" for words, where in values.items()]


def _change(each: WhatIf) -> str:
    """Say what a variation does: between which values the speed changes, by how much, and where the mapping does."""
    known = [(point, point.estimate) for point in each.points if point.estimate]
    if len(known) < 2:
        return ""
    (low, before), (high, after) = known[0], known[-1]
    label, ratio = _LABELS[each.variation.kind], after.tokens_per_s / before.tokens_per_s
    switches = [
        f"{_written(left.value)} and {_written(right.value)}"
        for (left, one), (right, other) in pairwise(known)
        if _without_dp(one.setup) != _without_dp(other.setup)
    ]
    words = f"{label} from {_written(low.value)} to {_written(high.value)}: {ratio:.3g} times the tokens/s"
    if each.variation.kind == "gpus" and (why := why_more_than_in_proportion(before, after)):
        words += f", {why}"
    if each.setup is not None:
        return words
    if not switches:
        return f"{words}; one mapping is the best at all of them"
    return f"{words}; the best mapping changes between {', between '.join(switches)}"


def _without_dp(setup: Setup) -> str:
    """The mapping but for data parallelism, which follows from the GPUs."""
    return re.sub(r" DP\d+", "", str(setup))


def _show(request: Request, found: dict[str, WhatIf], crossing: Crossover | None) -> None:
    first = next(iter(found.values()))
    software = " and ".join(dict.fromkeys(each.software for each in found.values()))
    echo_sentence(job_words(request.job, request.cluster.name, software))
    echo(f"varied: {_LABELS[first.variation.kind]}\n")
    rows, same = _short_rows(found)
    kept = [index for index in range(len(_COLUMNS)) if index or any(row[0] for row in rows)]
    spare = [kept.index(_COLUMNS.index(name)) for name in (">exposed", ">tokens/s")]
    print_table([_COLUMNS[index] for index in kept], [[row[index] for index in kept] for row in rows], spare=spare)
    if same:
        echo_sentence(f"all mappings: {same}")
    echo()
    for sentence in _sentences(found, crossing):
        echo_sentence(sentence)


def _short_rows(found: dict[str, WhatIf]) -> tuple[list[list[str]], str]:
    """The rows with mappings as short as they are told apart, and what all of these have."""
    points = [point for each in found.values() for point in each.points]
    names, same = short_mappings([point.estimate.setup for point in points if point.estimate])
    rows, given = _rows(found), iter(names)
    for row, point in zip(rows, points, strict=True):
        if point.estimate:
            row[2] = next(given)
    return rows, same


def _write_report(path: Path, request: Request, found: dict[str, WhatIf], crossing: Crossover | None) -> None:
    from commlayer.drawing.mapping_figures import breakdown_figure, mapping_name
    from commlayer.drawing.mapping_report import write_what_if_report

    first = next(iter(found.values()))
    label = _LABELS[first.variation.kind]
    bars = {
        f"{name} {_written(point.value)}  {mapping_name(point.estimate.setup)}".strip(): point.estimate
        for name, each in found.items()
        for point in each.points
        if point.estimate
    }
    figures = []
    if bars:
        figures = [(_MEASURES[measure][0], _figure(found, crossing, measure)) for measure in ("mfu", "tokens")]
        figures.append(("Parts of the steps", breakdown_figure(bars)))
    write_what_if_report(
        path,
        f"What if: {label}",
        [job_words(request.job, request.cluster.name, request.software.name)],
        _sentences(found, crossing),
        (_COLUMNS, _rows(found)),
        figures,
    )
    tell("report", path)


def _as_dict(request: Request, found: dict[str, WhatIf], crossing: Crossover | None) -> dict[str, Any]:
    return {
        "job": job_dict(request.job),
        "cluster": request.cluster.name,
        "fit": fit_dict(request.fit),
        "varied": next(iter(found.values())).variation.kind,
        "ways": [
            {
                "name": name,
                "software": each.software,
                "held": str(each.setup) if each.setup is not None else None,
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
            for name, each in found.items()
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

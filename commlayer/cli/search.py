"""``commlayer search``: the best mappings of a job on a cluster, and why the best one is. Offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.default_choices import with_choices
from commlayer.cli.mapping_options import (
    EXPORT,
    Request,
    margin_option,
    read_request,
    read_space,
    search_job_options,
    space_options,
)
from commlayer.cli.mapping_output import estimate_dict, export_dict, first_export, job_dict, print_export
from commlayer.cli.measured_runs import fit_dict, measured_file_option, runs_of, with_fit
from commlayer.cli.option_types import COUNT, OUTPUT_FOLDER, PICTURE, given_options, json_option, report_option
from commlayer.cli.output_files import draw, tell
from commlayer.cli.progress_bars import progress_of
from commlayer.cli.simulator_exports import simulator_export
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table, rounded
from commlayer.cli.varied_output import answer
from commlayer.drawing.mapping_cells import (
    MAPPING_COLUMNS,
    MAPPING_SPARE,
    job_words,
    mapping_cells,
    other_bests,
    short_mappings,
)
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.mapping.explain import explain
from commlayer.scheduler.mapping.exports import Export
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.run_fit import RunFit
from commlayer.scheduler.mapping.search import SearchResult
from commlayer.scheduler.mapping.search import search as search_mappings
from commlayer.scheduler.mapping.variations import Alternative, Variation

__all__ = ["search_command"]


@click.command("search", cls=Command)
@search_job_options
@space_options
@click.option("--top", type=COUNT, default=10, show_default=True, help="How many mappings to show.")
@click.option("--variants", is_flag=True, help="Rank also mappings that only rename an axis of a faster one.")
@margin_option
@measured_file_option
@report_option
@click.option("--picture", type=PICTURE, help="Draw what their steps are made of (.svg, .png, .pdf).")
@click.option(
    "--export",
    "trainer",
    type=EXPORT,
    help="Print the best mapping's configuration for a trainer instead, or what a simulator reads.",
)
@click.option("--output", "-o", "folder", type=OUTPUT_FOLDER, help="The folder of --export chakra.")
@json_option
@click.pass_context
def search_command(
    ctx: click.Context,
    /,
    top: int,
    variants: bool,
    margin: float,
    measured: str | None,
    report: Path | None,
    picture: Path | None,
    trainer: str | None,
    folder: Path | None,
    as_json: bool,
    sequences: tuple[int, ...],
    **given: Any,
) -> None:
    """Find the fastest mappings of a model on a cluster that fit in its memory.

    Looks at every valid choice of degrees, micro-batch, recomputation and exchange, folded and unfolded, and says why the
    best one wins and what it waits for. Nothing is run, and no GPU is needed. What is repeated (--tp 1 --tp 2) leaves the
    search so many values; of several sequences each has its best mapping.

    \b
      commlayer search --model mixtral-8x22b --cluster h100-eos --gpus 128 --global-batch 256 --sequence 4096
      commlayer search -m config.json -c h200 -g 1024 --global-batch 4096 --sequence 8192 --precision fp8 --tp 1 --tp 2
      commlayer search -m deepseek-v3 -c h800 -g 2048 --global-batch 15360 --sequence 4096 --export megatron
      commlayer search -m mixtral-8x22b -c h100-eos -g 1024 --global-batch 64 --sequence 64K --sequence 256K --sequence 1M
    """
    sequences = tuple(sorted(set(sequences)))
    request = with_fit(read_request({**given, "sequence": sequences[0]}), runs_of(measured))
    asked = given_options(ctx)
    space = read_space(given)
    request.check(space)
    if len(sequences) > 1:
        options = {"top": "--top", "variants": "--variants", "trainer": "--export", "folder": "--output"}
        if option := next((option for name, option in options.items() if name in asked), ""):
            raise UsageError(f"{option} is of one --sequence: leave it out, or all lengths but one")
        way = Alternative(space=space, software=request.software, margin=margin)
        answer(
            request,
            Variation("sequence", sequences),
            [way],
            report=report,
            picture=picture,
            as_json=as_json,
        )
        return
    estimator = request.estimator()
    make = simulator_export(trainer, estimator, folder)
    with progress_of("searching") as progress:
        result = search_mappings(
            request.job, estimator, space, top=top, distinct=not variants, margin=margin, progress=progress
        )
    noted = {each.setup: each for each in with_choices(result.shown, request)}
    result = replace(
        result,
        ranked=tuple(noted.get(each.setup, each) for each in result.ranked),
        kinds={kind: noted[each.setup] for kind, each in result.kinds.items()},
    )
    reasons = explain(result)
    exported = _export(trainer, result, request, make)
    if picture is not None:
        from commlayer.drawing.mapping_figures import breakdown_figure, labelled

        title = f"{result.job.model.name} on {counted(result.job.gpus, 'GPU')} of {result.cluster}"
        draw(picture, breakdown_figure(labelled(result), title))
    if report is not None:
        from commlayer.drawing.mapping_report import write_search_report

        write_search_report(report, result, reasons, request.cluster)
        tell("report", report)
    for note in _notes(result.shown):
        echo_sentence(f"note: {note}", err=True)
    if as_json:
        print_json(_as_dict(result, reasons, exported, request.fit))
    elif exported is not None:
        print_export(exported)
    else:
        _show(result, reasons)


def _notes(shown: Sequence[StepEstimate]) -> Iterator[str]:
    """The notes of mappings, each once; before those that are not of all of them stands of which they are."""
    ranks: dict[str, list[str]] = {}
    for rank, each in enumerate(shown, start=1):
        for note in each.notes:
            ranks.setdefault(note, []).append(str(rank))
    for note, those in ranks.items():
        yield note if len(those) == len(shown) else f"of mapping {', '.join(those)}: {note}"


def _export(
    trainer: str | None, result: SearchResult, request: Request, make: Callable[[Setup], Export] | None
) -> Export | None:
    if trainer is None:
        return None
    candidates = [*result.ranked, *other_bests(result).values()]
    setups = [each.setup for each in candidates]
    place, exported = first_export(trainer, result.job, setups, request.software, make, request.cluster.gpu)
    chosen = candidates[place]
    which = "the best mapping" if place == 0 else f"the best mapping found that {trainer} takes"
    slower = f", {chosen.step_us / result.best.step_us - 1:.1%} slower than the best" if place else ""
    echo_sentence(f"{which}: {chosen.setup} ({chosen.step_us / 1e3:,.1f} ms a step{slower})", err=True)
    return exported


def _show(result: SearchResult, reasons: list[str]) -> None:
    echo_sentence(job_words(result.job, result.cluster, result.software))
    echo()
    rows = [mapping_cells(str(rank), estimate) for rank, estimate in enumerate(result.shown, start=1)]
    rows += [mapping_cells("–", estimate) for estimate in other_bests(result).values()]
    names, same = short_mappings([each.setup for each in (*result.shown, *other_bests(result).values())])
    for row, name in zip(rows, names, strict=True):
        row[1] = name.replace("recompute ", "")
    dim = range(len(result.shown), len(rows))
    print_table(MAPPING_COLUMNS, rows, bold=[0], dim=dim, spare=MAPPING_SPARE)
    if len(result.kinds) > 1:
        echo_sentence(
            f"1 to {len(result.kinds)} are the fastest of each kind: {'; '.join(map(str, result.kinds))}; the others go by time"
        )
    if same:
        echo_sentence(f"all mappings: {same}")
    if "recompute" in "".join(names):
        echo_sentence("megascale, full, or modules: of activations, what is computed again")
    if "offload" in "".join(names):
        echo_sentence("offload: modules whose inputs are in the host's memory until their backward pass")
    echo()
    for reason in reasons:
        echo_sentence(reason)
    echo_sentence(
        f"{result.num_valid:,} valid mappings, {result.num_estimated:,} estimated to the end, in {result.seconds:.1f} s"
    )


def _as_dict(result: SearchResult, reasons: list[str], exported: Export | None, fit: RunFit | None) -> dict[str, Any]:
    ranks = {each.setup: rank for rank, each in enumerate(result.ranked, start=1)}
    best = {"best_folded": result.best_folded, "best_unfolded": result.best_unfolded}
    return {
        "job": job_dict(result.job),
        "cluster": result.cluster,
        "software": result.software,
        "fit": fit_dict(fit),
        "mappings": [{**estimate_dict(each), "rank_by_time": ranks.get(each.setup)} for each in result.shown],
        "kinds": {str(kind): str(each.setup) for kind, each in result.kinds.items()},
        "variants": {str(setup): [str(each) for each in same] for setup, same in result.variants.items()},
        "equal_within_what_is_known": list(result.equal),
        "memory_margin": result.margin,
        **{name: estimate_dict(each) if each is not None else None for name, each in best.items()},
        "reasons": reasons,
        "searched": {
            "valid": result.num_valid,
            "checked": result.num_checked,
            "fitting": result.num_fitting,
            "estimated": result.num_estimated,
            "seconds": rounded(result.seconds),
        },
        "export": export_dict(exported),
    }

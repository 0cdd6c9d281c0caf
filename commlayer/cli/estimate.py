"""``commlayer estimate``: one mapping of a job on a cluster: its step, its memory, everything it sends. Offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TextIO

import click

from commlayer.cli.commands import Command
from commlayer.cli.default_choices import with_choices
from commlayer.cli.mapping_options import EXPORT, Request, job_options, read_request, read_setup, setup_options
from commlayer.cli.mapping_output import (
    estimate_dict,
    export_dict,
    first_export,
    job_dict,
    print_export,
    traffics_dict,
)
from commlayer.cli.measured_runs import fit_dict, measured_options, runs_of, with_fit
from commlayer.cli.measured_runs import keep_run as add_run
from commlayer.cli.option_types import OUTPUT_FILE, OUTPUT_FOLDER, PICTURE, json_option, report_option
from commlayer.cli.output_files import draw, tell, write_chrome
from commlayer.cli.simulator_exports import simulator_export
from commlayer.cli.tables import echo, echo_sentence, print_json, print_table
from commlayer.drawing.mapping_cells import (
    MEMORY_COLUMNS,
    PART_COLUMNS,
    TRAFFIC_COLUMNS,
    TRAFFIC_SPARE,
    job_words,
    memory_cells,
    part_cells,
    traffic_cells,
)
from commlayer.readers.launch_lines import Launch, read_launch
from commlayer.scheduler.mapping.result import StepEstimate, describe_validity
from commlayer.scheduler.mapping.space import Space
from commlayer.units import format_us

__all__ = ["estimate_command"]

_MOST_CHARACTERS = 1 << 20
_TRAFFICS = "What one rank of the slowest stage takes part in, each call priced alone"


def _read_launch(ctx: click.Context, _: click.Parameter, file: TextIO | None) -> Launch | None:
    """Read the launch line before all other options, whose defaults it becomes."""
    if file is None:
        return None
    launch = read_launch(file.read(_MOST_CHARACTERS), os.environ)
    ctx.default_map = {**(ctx.default_map or {}), **launch.options}
    return launch


@click.command("estimate", cls=Command)
@click.option(
    "--from-args",
    "launch",
    type=click.File(errors="replace"),
    is_eager=True,
    callback=_read_launch,
    help="A launch line of Megatron-LM or torchtitan (-: stdin), for all that other options do not say.",
)
@job_options
@setup_options
@measured_options
@report_option
@click.option("--picture", type=PICTURE, help="Draw the course of forward and backward (.svg, .png, .pdf).")
@click.option("--trace", type=OUTPUT_FILE, help="Write that course for Chrome or Perfetto.")
@click.option(
    "--export",
    "trainer",
    type=EXPORT,
    help="Print the mapping's configuration for a trainer instead, or what a simulator reads.",
)
@click.option("--output", "-o", "folder", type=OUTPUT_FOLDER, help="The folder of --export chakra.")
@json_option
def estimate_command(
    measured: str | None,
    keep_run: Path | None,
    report: Path | None,
    picture: Path | None,
    trace: Path | None,
    trainer: str | None,
    folder: Path | None,
    as_json: bool,
    launch: Launch | None,
    **given: Any,
) -> None:
    """Estimate one mapping: what its step is made of, what fills the memory, everything that it sends.

    Degrees that are not given are 1; data parallelism is what they leave of the GPUs. A mapping that does not fit is
    estimated all the same, and said not to fit.

    \b
      commlayer estimate -m mixtral-8x22b -c h100-eos -g 128 --global-batch 256 --sequence 4096 --tp 2 --ep 8 --pp 8 --vpp 7
      commlayer estimate … --tp 2 --ep 8 --pp 8 --trace step.json --picture step.svg
      commlayer estimate … --tp 2 --ep 8 --pp 8 --measured "4.8 s" --keep-run runs.json
      commlayer estimate -m qwen3-235b-a22b -c h100-eos --from-args launch.sh
    """
    request = read_request(given)
    if launch is not None:
        launch.check(request.job.model)
    setup = read_setup(given, request.job.gpus)
    chosen: dict[str, Any] = {
        name: (getattr(setup, name),) for name in ("precision", "recompute", "offload", "ep", "etp")
    }
    request.check(Space(**chosen))
    runs = runs_of(measured, request, setup)
    add_run(keep_run, measured)
    request = with_fit(request, runs)
    estimator = request.estimator()
    make = simulator_export(trainer, estimator, folder)
    (found,) = with_choices([estimator.estimate(setup)], request)
    exported = (
        first_export(trainer, request.job, [setup], request.software, make, request.cluster.gpu)[1] if trainer else None
    )
    if trace is not None:
        from commlayer.drawing.step_course import step_trace

        write_chrome(trace, step_trace(found))
    if picture is not None:
        from commlayer.drawing.step_course import course_figure

        draw(picture, course_figure(found, f"{request.job.model.name}: {setup}"))
    if report is not None:
        from commlayer.drawing.mapping_report import write_estimate_report

        write_estimate_report(report, found, request.cluster)
        tell("report", report)
    for note in (*_notes(found), *(launch.notes() if launch else ())):
        echo_sentence(f"note: {note}", err=True)
    if as_json:
        print_json({**_as_dict(found, request), "fit": fit_dict(request.fit), "export": export_dict(exported)})
    elif exported is not None:
        print_export(exported)
    else:
        _show(found, request)
        for run in runs:
            if run.is_of(found):
                echo_sentence(
                    f"measured {format_us(run.step_us)}, estimated {format_us(run.estimate.step_us)} without the fit and "
                    f"{format_us(found.step_us)} with it: the rest is taken for this run's own"
                )


def _notes(found: StepEstimate) -> list[str]:
    notes = list(found.notes)
    if not found.fits:
        notes.append(
            f"it does not fit: the fullest GPU needs {found.memory.total / 1e9:.1f} GB of {found.memory_limit / 1e9:.1f} GB; "
            "commlayer search finds what does"
        )
    return notes


def _as_dict(found: StepEstimate, request: Request) -> dict[str, Any]:
    return {
        "job": job_dict(request.job),
        "cluster": found.cluster,
        "software": found.software,
        "estimate": estimate_dict(found),
        "traffics": traffics_dict(found.traffics),
    }


def _show(found: StepEstimate, request: Request) -> None:
    echo_sentence(job_words(request.job, found.cluster, found.software))
    echo_sentence(lead=str(found.setup))
    speed = f"{found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%} ({found.tflops:,.0f} TFLOP/s a GPU)"
    longest = [f"{name} ({format_us(us)})" for name, us in found.waits_us.items()][:1]
    waits = f"waits longest for {longest[0]}" if longest else "waits for no link"
    echo_sentence(f"{format_us(found.step_us)} a step, {speed}, {waits}")
    echo()
    parts, memory = part_cells(found), memory_cells(found)
    print_table(PART_COLUMNS, parts, bold=[len(parts) - 1])
    echo()
    print_table(MEMORY_COLUMNS, memory, bold=[len(memory) - 2])
    echo()
    print_table(TRAFFIC_COLUMNS, traffic_cells(found.traffics), title=_TRAFFICS, spare=TRAFFIC_SPARE)
    exposed = ", ".join(f"{lane} {format_us(us)}" for lane, us in found.exposed_us.items() if us > 0)
    echo()
    echo_sentence(f"exposed, by lane: {exposed or 'nothing'}")
    for line in describe_validity(found):
        echo_sentence(line)

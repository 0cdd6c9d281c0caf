"""``--measured``: a run of the user's own, or a file of several, to which the model is fitted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from commlayer.cli.commands import Command
from commlayer.cli.mapping_options import Request, job_options, read_request, read_setup, setup_options
from commlayer.cli.option_types import OUTPUT_FILE, given_options, in_order
from commlayer.cli.output_files import tell
from commlayer.cli.tables import rounded
from commlayer.profiles.errors import CommlayerError, UsageError
from commlayer.profiles.files import read_file, write_file
from commlayer.profiles.printable import shortened
from commlayer.profiles.strict_json import convert, parse_object
from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.run_fit import MeasuredRun, RunFit, fit_to, measured_step_us

__all__ = ["fit_dict", "keep_run", "measured_file_option", "measured_options", "runs_of", "with_fit"]

_FORM = "s, ms, min, tokens/s, tokens/s/GPU or TFLOP/s (of a GPU)"

measured_file_option = click.option(
    "--measured",
    type=click.Path(),
    metavar="FILE",
    help="Fit the model to the measured runs in FILE (commlayer estimate --keep-run).",
)
"""Add the option of commands that look at many mappings: a file of runs."""
measured_options = in_order(
    click.option(
        "--measured",
        metavar="SPEED|FILE",
        help=f"Fit the model to what this mapping was measured at, in {_FORM}; or to runs in FILE.",
    ),
    click.option("--keep-run", type=OUTPUT_FILE, help="Add this mapping and its --measured to a file of runs."),
)
"""Add the options of a command about one mapping, which may itself have been measured."""


class _Runs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of runs: each has the options of `commlayer estimate` by their long names,
    ``measured`` among them."""

    runs: tuple[dict[str, str | int | float | bool | list[str]], ...]


@click.command("run", cls=Command, add_help_option=False)
@job_options
@setup_options
@click.option("--measured", required=True)
def _run(**given: Any) -> None:
    """A run of a file; it is only parsed."""


def with_fit(request: Request, runs: Sequence[MeasuredRun]) -> Request:
    """The request, of a model that is fitted to ``runs``; as it is where there are none."""
    return replace(request, fit=fit_to(runs)) if runs else request


def runs_of(measured: str | None, request: Request | None = None, setup: Setup | None = None) -> list[MeasuredRun]:
    """The runs that --measured names: those of a file, or the one of ``setup`` whose speed it is.

    Raises UsageError: no speed and no file, a damaged file, a run that cannot be.
    """
    if measured is None:
        return []
    if os.path.isfile(measured):
        return _read(measured)
    if request is not None and setup is not None:
        return [_measured(request, setup, measured)]
    raise UsageError(
        f"--measured: expected a file of runs, got {shortened(measured)!r}, which is none: a speed says nothing without its "
        "mapping; commlayer estimate with that mapping, --measured and --keep-run FILE writes one"
    )


def fit_dict(fit: RunFit | None) -> dict[str, Any] | None:
    """The factors of a fit and its runs for ``--json``; None: there is no fit."""
    if fit is None:
        return None
    runs = [
        {
            "mapping": str(run.estimate.setup),
            "measured_us": rounded(run.step_us),
            "estimated_us": rounded(run.estimate.step_us),
        }
        for run in fit.runs
    ]
    return {"factors": {name: rounded(factor, 6) for name, factor in fit.factors.items()}, "runs": runs}


def keep_run(path: Path | None, measured: str | None) -> None:
    """Add the run that the current command is asked about to the file of runs at ``path``, in place
    of one with the same options, measured before; None: nothing is asked.

    Raises UsageError: no speed was measured, or the file has something else.
    """
    if path is None:
        return
    if measured is None or os.path.isfile(measured):
        raise UsageError("--keep-run: expected --measured with the speed of this mapping, such as --measured '4.8 s'")
    context = click.get_current_context()
    names = given_options(context)
    run = {
        max(option.opts, key=len).lstrip("-"): context.params[option.name]
        for option in _run.params
        if option.name in names
    }
    known = msgspec.to_builtins(_without_speed(run), enc_hook=str)  # as the file has it
    others = _contents(path).runs if path.exists() else ()
    runs = [*(each for each in others if _without_speed(each) != known), run]
    write_file(path, json.dumps({"runs": runs}, indent=1, default=str) + "\n")
    tell("runs", path)


def _without_speed(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "measured"}


def _measured(request: Request, setup: Setup, text: str) -> MeasuredRun:
    estimate = request.estimator().estimate(setup)
    if estimate.validity is None:
        raise AssertionError("an estimate in full has its kind")
    step_us = measured_step_us(text, request.job)
    mfu, gpu = estimate.mfu * estimate.step_us / step_us, request.cluster.gpu
    if mfu > gpu.most_mfu(setup.precision):
        raise UsageError(
            f"--measured {shortened(text)}: an MFU of {100 * mfu:.3g}%, which no {gpu.name} has: give the time of "
            "a whole step, or the tokens/s of all GPUs"
        )
    return MeasuredRun(estimate=estimate, kind=estimate.validity.kind, step_us=step_us)


def _contents(path: str | Path) -> _Runs:
    where = shortened(str(path))
    try:
        data = read_file(path)
    except OSError as error:
        raise UsageError(f"{where}: cannot read the file of runs: {error.strerror or error}") from error
    return convert(parse_object(data, where, "file of runs"), _Runs, where, {})


def _read(path: str) -> list[MeasuredRun]:
    """The runs of a file. Raises UsageError, with the number of the run."""
    runs = _contents(path).runs
    if not runs:
        raise UsageError(f"{shortened(path)}: expected a measured run, got none")
    return [_parsed(run, f"{shortened(path)}: run {number}") for number, run in enumerate(runs, start=1)]


def _parsed(run: dict[str, Any], where: str) -> MeasuredRun:
    values = [(name, each) for name, value in run.items() for each in (value if isinstance(value, list) else [value])]
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in values]  # a flag where it is true
    try:
        options = _run.make_context("run", words).params
        text, request = options.pop("measured"), read_request(options)
        return _measured(request, read_setup(options, request.job.gpus), text)
    except click.ClickException as error:
        raise UsageError(f"{where}: {shortened(error.format_message(), 400)}") from error
    except CommlayerError as error:
        raise UsageError(f"{where}: {error}") from error

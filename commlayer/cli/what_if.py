"""``commlayer what-if``: what changes with one thing of a job or a cluster, and where two ways change places. Offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.mapping_options import (
    ask_fabric,
    job_options,
    margin_option,
    read_request,
    read_space,
    space_options,
)
from commlayer.cli.measured_runs import measured_file_option, runs_of, with_fit
from commlayer.cli.option_types import (
    COUNT,
    NUM_GPUS,
    PICTURE,
    RATE_GBPS,
    TOKENS,
    RealNumber,
    WholeNumber,
    given_options,
    in_order,
    json_option,
    report_option,
)
from commlayer.cli.varied_output import MEASURES, WORDS, answer
from commlayer.profiles.errors import UsageError
from commlayer.readers.cluster_files import resolve
from commlayer.scheduler.mapping.variations import ALTERNATIVES, KINDS, Alternative, Variation

__all__ = ["values_of", "what_if_command"]

_NAMES = {kind.replace("_", "-"): kind for kind in KINDS}
_CHOICES = {"folding": "folded", "attention": "attention", "exchange": "exchange", "schedule": "schedule"}
"""In what the two ways of a comparison differ; by software, in nothing of the space."""
_LINKS = ("inter_gbps", "inter_factor", "intra_gbps", "intra_factor")
_REPLACED = {"skew": ("imbalance", "routing"), "top_k": (), "split": (), "gpus": (), "sequence": (), "global_batch": ()}
"""The options whose value a variation takes the place of, where it is not the one of its own name; of the job's three numbers a
value must be given all the same."""

_FACTOR = RealNumber(min=1e-3, max=1e3)
_NUMBERS = {
    "inter_gbps": RATE_GBPS,
    "intra_gbps": RATE_GBPS,
    "inter_factor": _FACTOR,
    "intra_factor": _FACTOR,
    "skew": RealNumber(min=0, max=100),
}
"""The kinds whose values are numbers with fractions, and which ones; all others are whole numbers of at least 1."""
_WHOLE = {"gpus": NUM_GPUS, "sequence": TOKENS}
"""The kinds whose values are whole numbers of their own type."""
_MUCH = 8.0
_POINTS = 5

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
    "--measure", type=click.Choice(list(MEASURES)), default="mfu", show_default=True, help="What the picture shows."
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
    named = given_options(ctx)
    for name in _REPLACED.get(kind, (kind,)):
        if name in named and "hold" not in named:  # with it some mapping is the best with that
            raise UsageError(
                f"--{name.replace('_', '-')}: --vary {kind.replace('_', '-')} takes its place at every value: leave it out, "
                "or add --hold to keep the mapping that is best with it"
            )
    is_fabric_named = given["fabric"] is not None
    request = with_fit(read_request(given), runs_of(measured))
    space = read_space(given)
    if kind == "skew" and request.job.capacity_factor is not None:
        raise UsageError(
            "--capacity-factor: every expert has as many rows then, whatever the --vary skew of routing: leave it out"
        )
    values = values_of(kind, *(given[name] for name in ("values", "low", "high", "points")))
    if kind == "inter_gbps" and not is_fabric_named:
        ask_fabric(request.cluster, "--vary inter-gbps")
    kernels = request.software.kernels
    if kernels is not None and kernels.measured is not None and kind in _LINKS:
        raise UsageError(
            f"--vary {kind.replace('_', '-')}: {kernels.measured.source} has times of one network and one kind of node: take "
            f"--dispatcher {kernels.name}, whose rates are parts of the links' peaks"
        )
    variation = Variation(kind, values)  # type: ignore[arg-type]
    changes = {"precision": values} if kind == "precision" else {"recompute": None} if kind == "gpu" else {}
    request.check(replace(space, **changes))
    ways, choice = [], _CHOICES.get(pair or "")
    for way in ALTERNATIVES[pair] if pair else (Alternative(),):
        # Within what the command line leaves of the space, and with what it asks of software, but
        # for what ways differ in.
        narrowed = replace(space, **{choice: getattr(way.space, choice)}) if choice else space
        software = request.changed(way.software) if pair == "software" else request.software
        ways.append(Alternative(name=way.name, space=narrowed, software=software, margin=margin))
    answer(
        request, variation, ways, hold=given["hold"], report=report, picture=picture, as_json=as_json, measure=measure
    )


def values_of(
    kind: str, values: str | None, low: float | None, high: float | None, points: int | None
) -> tuple[float | int | str, ...]:
    """Return the values that ``values`` lists, or those from ``low`` to ``high``: rates at ``points`` places (five unless given),
    all else doubling.

    Raises UsageError for both or neither, for ``points`` where they would change nothing, and for what is no such number.
    """
    if points is not None and (values is not None or kind not in _NUMBERS):
        raise UsageError(
            "--points says at how many places between --from and --to rates are looked at: values that are listed, and whole "
            "numbers, which double, have none; leave it out"
        )
    if values is not None:
        if low is not None or high is not None:
            raise UsageError("expected --values, or --from and --to, got both: drop one side")
        return tuple(_value(kind, word.strip(), "--values") for word in values.split(","))
    if low is None or high is None:
        raise UsageError("expected --values, or --from and --to: say --values 25,50,100")
    if kind in WORDS or not low < high:
        raise UsageError(
            f"--from {low:g} --to {high:g}: expected ascending numbers, for a thing that has them; or --values"
        )
    ends = _number(kind, low, "--from"), _number(kind, high, "--to")
    if kind in _NUMBERS:
        return _spread(*ends, points or _POINTS)
    doubled = [int(ends[0])]  # in between most degrees would not divide
    while doubled[-1] * 2 < ends[1]:
        doubled.append(doubled[-1] * 2)
    return (*doubled, int(ends[1]))


def _spread(low: float, high: float, points: int) -> tuple[float, ...]:
    """Evenly, over their logarithm where they differ much."""
    places = [index / (points - 1) for index in range(1, points - 1)]
    if low > 0 and high / low >= _MUCH:
        return (low, *(low * (high / low) ** place for place in places), high)
    return (low, *(low + (high - low) * place for place in places), high)


def _value(kind: str, word: str, option: str) -> float | int | str:
    if kind not in WORDS:
        return _number(kind, word, option)
    if not word:
        raise UsageError(f"{option} of {kind}: expected names between commas, got none")
    if kind == "gpu":  # known before anything is searched for the values beside it
        try:
            resolve(word)
        except UsageError as error:
            raise UsageError(f"{option} of gpu: {error}") from error
    return word


def _number(kind: str, given: float | str, option: str) -> float | int:
    """The number that ``option`` says, checked as that of the option that ``kind`` is named after would be."""
    text = given if isinstance(given, str) else f"{given:.17g}"
    try:
        number: float | int = (_NUMBERS | _WHOLE).get(kind, COUNT).convert(text, None, None)
    except click.BadParameter as error:
        raise UsageError(f"{option} of {kind.replace('_', '-')}: {error.message}") from error
    return number

"""``commlayer bench``: every candidate plan and torch's own all_to_all, alternately in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import COUNT, OUTPUT_FILE, PROFILE, REPORT, in_order, json_option, size_options
from commlayer.cli.place import Place, check_has_links, check_place, emulation, place_options, read_place, run_job
from commlayer.cli.tables import echo_json, echo_sentence, print_table
from commlayer.profiles.errors import InternalError

if TYPE_CHECKING:
    from commlayer.measure.benchmark import BenchOptions
    from commlayer.measure.profiler import SweepOptions
    from commlayer.measure.results import BenchResult
    from commlayer.profiles.profile import Profile
    from commlayer.scheduler.price import Timeline

__all__ = ["bench_command", "bench_job", "print_result", "refuse_wrong"]

Timelines = list[tuple[str, "Timeline", "Timeline"]]


_bench_options = in_order(
    click.option(
        "--profile", "profile_name", type=PROFILE, help="Plan with this profile.  [measure the cluster first]"
    ),
    size_options("64KiB", "16MiB", 4.0),
    click.option("-n", "--rounds", type=COUNT, default=5, show_default=True, help="Rounds, at least."),
    click.option("--max-chunks", type=COUNT, default=16, show_default=True, help="No plan of more chunks."),
    click.option("--all-forms", is_flag=True, help="Also run the plans that gather the whole tensor, as MoNTA does."),
)


@click.command("bench", cls=Command)
@place_options
@_bench_options
@click.option("-o", "--output", type=OUTPUT_FILE, help="Write the result as JSON here.")
@click.option("--report", type=REPORT, help="Write an HTML report here.")
@json_option
def bench_command(
    profile_name: str | None, output: Path | None, report: Path | None, as_json: bool, **options: Any
) -> None:
    """Run every candidate plan against torch.distributed, alternately in one run.

    Tokens are replicated over the ranks of a node and exchanged between nodes. Each way is first
    compared with torch's result, byte for byte; times are the largest over ranks, ratios medians
    over rounds.

    \b
      commlayer bench --emulate 2x4 --inter 400mbit
      torchrun --nnodes 2 --nproc-per-node 8 --no-python commlayer bench --profile cluster.json
    """
    place = read_place(options)
    check_has_links(place)
    from commlayer.profiles.catalog import load_profile

    planned_with = load_profile(profile_name) if profile_name else None
    if planned_with is not None:
        check_place(place, planned_with.topology, planned_with.name)
    from commlayer.measure.benchmark import BenchOptions
    from commlayer.profiles.sweep import sizes_between
    from commlayer.scheduler.plan import Gather

    sizes = sizes_between(options["min_bytes"], options["max_bytes"], options["factor"])
    gathers = tuple(Gather) if options["all_forms"] else ()
    drawn = sizes[-1:] if report is not None else ()
    job = BenchOptions(sizes, options["rounds"], options["max_chunks"], gathers, trace_bytes=drawn)
    outcome = run_job(place, bench_job, planned_with, job, place)
    if outcome is None:
        return
    measured, result, timelines = outcome
    if output is not None:
        result.save(output)
    if report is not None:
        from commlayer.drawing import write_report

        write_report(report, measured, result, timelines)
    if as_json:
        echo_json(result.to_json())
    else:
        print_result(result)
    refuse_wrong(result)


def refuse_wrong(result: BenchResult) -> None:
    """Raise InternalError where any way delivered other bytes than torch.distributed."""
    if result.num_wrong:
        raise InternalError(f"{result.num_wrong} bytes differ from torch.distributed's result: see the column 'wrong'")


def bench_job(
    profile: Profile | None, options: BenchOptions, place: Place, sweep: SweepOptions | None = None
) -> tuple[Profile, BenchResult, Timelines]:
    """Measure, on every rank, the cluster where no profile is given, then run everything."""
    from dataclasses import replace

    from commlayer.agree.discovery import discover_topology
    from commlayer.cli.measure import link_rates, measure_job
    from commlayer.cli.progress_bars import progress
    from commlayer.measure.benchmark import nearest_size, run_bench
    from commlayer.measure.profiler import SweepOptions
    from commlayer.profiles.profile import check_shape

    topology = discover_topology()

    def rounded(sizes: Sequence[int]) -> tuple[int, ...]:
        """Three nodes do not divide a power of two: the sizes asked for are a range, so the nearest
        one serves."""
        return tuple(dict.fromkeys(nearest_size(size, topology.num_nodes) for size in sizes))

    options = replace(options, sizes=rounded(options.sizes), trace_bytes=rounded(options.trace_bytes))
    if profile is None:
        sweep = sweep or SweepOptions()
        # What no plan asks for is not measured.
        largest = max(sweep.min_bytes, min(sweep.max_bytes, max(options.sizes)))
        sweep = replace(sweep, max_bytes=largest, inter_gbps=place.inter_gbps, intra_gbps=place.intra_gbps)
        profile, _ = measure_job(sweep, place, None)
    check_shape(profile, topology)
    with progress("running every candidate", len(options.sizes)) as advance:
        result, timelines = run_bench(
            profile,
            topology,
            options,
            is_emulated=emulation() is not None,
            inter=place.inter,
            intra=place.intra,
            inter_gbps=place.inter_gbps,
            links=link_rates(place),
            on_point=lambda so_far: advance(_latest(so_far)),
        )
    return profile, result, timelines


def _latest(result: BenchResult) -> str:
    """The measurement just made, in a few words."""
    from commlayer.units import format_bytes

    point = result.points[-1]
    words = f"{point.chosen.name} takes {point.chosen.ratio:.2f} of torch's time" if result.is_comparable else "ran"
    return f"{format_bytes(point.logical_bytes)}: {words}"


def print_result(result: BenchResult) -> None:
    """Print one table for each size: what was predicted and measured, and, where times compare, the
    ratios to torch's."""
    from commlayer.units import format_bytes, format_us

    compares = result.is_comparable
    where = result.topology
    if result.is_emulated and compares:
        where += f", inter {result.inter}, intra {result.intra or 'unshaped'}"
    if not compares:
        echo_sentence("no links known to be shaped here: these times say that the plans run, not which is faster")
    columns = ("", "strategy", ">chunks", ">predicted", ">measured", ">spread", ">ratio to flat", ">wrong")
    for point in result.points:
        limit = f", wire limit {format_us(point.wire_limit_us)}" if point.wire_limit_us is not None and compares else ""
        print_table(
            [column for column in columns if compares or "ratio" not in column],
            [
                (
                    "→" if row.is_chosen else "",
                    row.name,
                    str(row.chunks or ""),
                    format_us(row.predicted_us) if row.predicted_us is not None else "",
                    format_us(row.p50_us),
                    f"{format_us(row.min_us)} … {format_us(row.max_us)}",
                    *([f"{row.ratio:.3f}"] if compares else []),
                    str(row.num_wrong),
                )
                for row in point.rows
            ],
            title=f"{format_bytes(point.logical_bytes)} a rank on {where}{limit}",
            bold=[index for index, row in enumerate(point.rows) if row.is_chosen],
        )
        echo_sentence(f"→ {point.reason}\n")

"""``commlayer demo``: the whole loop on an emulated cluster: measure, plan, run against torch.distributed, prove, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import OUTPUT_FOLDER, SHAPE, json_option
from commlayer.cli.place import check_has_links, place_of, run_job
from commlayer.cli.tables import echo, echo_json, echo_sentence, print_table
from commlayer.profiles.files import write_file

if TYPE_CHECKING:
    from commlayer.measure.results import BenchResult
    from commlayer.profiles.profile import Profile

__all__ = ["demo"]

_SIZES = (64 << 10, 1 << 20, 16 << 20)
_MAX_CHUNKS = 8


@click.command(cls=Command)
@click.option("--shape", type=SHAPE, default="2x4", show_default=True, help="Nodes x ranks on each.")
@click.option("--inter", metavar="RATE", default="400mbit", show_default=True, help="Rate of a node's interface.")
@click.option("--intra", metavar="RATE", help="Rate of a node's loopback; 3200mbit gives MoNTA's ratio.  [unshaped]")
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FOLDER,
    default="out/demo",
    show_default=True,
    help="Folder for the report, the profile, the result and the trace.",
)
@json_option
def demo(shape: str, inter: str, intra: str | None, output: Path, as_json: bool) -> None:
    """Measure, plan, run and prove it on an emulated cluster.

    Nodes are network namespaces with slow wires, ranks are processes, the bytes are real. Every candidate runs against
    torch.distributed's own all_to_all, alternately; each result is compared with torch's, byte for byte.
    """
    from commlayer.drawing.style import check_drawing

    check_drawing()
    place = place_of(shape, inter, intra, delay=0.0, timeout=10 * 60e6)
    check_has_links(place, "--shape")
    from commlayer.cli.bench import bench_job, refuse_wrong
    from commlayer.measure.benchmark import BenchOptions
    from commlayer.measure.profiler import SweepOptions
    from commlayer.profiles.sweep import Repeats

    output.mkdir(parents=True, exist_ok=True)
    if not as_json:
        # The cluster as it is, not as was asked for: a machine that grants no namespaces has no
        # rates.
        where = f"emulated cluster {shape}: inter {place.inter} a node, intra {place.intra or 'unshaped'}"
        if place.inter is None:
            where = f"{shape} on loopback, with a declared topology and no shaping: this shows that the plans run, not how fast"
        echo_sentence(where, err=True)
        echo_sentence(
            "measuring its links (about a minute), then running every plan against torch.distributed", err=True
        )
    options = BenchOptions(_SIZES, max_chunks=_MAX_CHUNKS, trace_bytes=_SIZES[1:])
    sweep = SweepOptions(max_bytes=_SIZES[-1], repeats=Repeats(warmup=1, min_repeats=6, max_repeats=30, budget_us=1e6))
    outcome = run_job(place, bench_job, None, options, place, sweep)
    if outcome is None:  # under torchrun, and not the first rank
        return
    profile, result, timelines = outcome
    from commlayer.drawing import chrome_trace, write_report

    profile.save(output / "profile.json")
    result.save(output / "result.json")
    write_report(output / "report.html", profile, result, timelines)
    title, predicted, measured = timelines[-1]
    trace = chrome_trace({f"predicted {title}": predicted, f"measured {title}": measured})
    write_file(output / "trace.json", json.dumps(trace))
    if as_json:
        echo_json(result.to_json())
    else:
        _print(profile, result, output)
    refuse_wrong(result)


def _print(profile: Profile, result: BenchResult, output: Path) -> None:
    from commlayer.cli.bench import print_result
    from commlayer.units import format_bytes, format_us

    rows = []
    for curve in profile.curves:
        peak = profile.peaks.of(curve.link)
        largest = curve.bytes[-1]
        rows.append(
            (
                curve.collective,
                curve.link.value,
                str(curve.group_size),
                f"{format_bytes(curve.bytes[0])} … {format_bytes(largest)}",
                format_us(curve.latency_us),
                f"{curve.busbw_gbps(largest) * 1e3:.1f} MB/s",
                f"{curve.efficiency(largest, peak):.0%}",
                f"{curve.holdout_error or 0:.1%}",
            )
        )
    columns = ("collective", "link", ">ranks", "sizes", ">latency", ">bus bandwidth", ">of peak", ">hold-out error")
    print_table(columns, rows, title="Measured links, per rank")
    echo("")
    print_result(result)
    if result.is_comparable:
        for point in result.points:
            chosen = point.chosen
            error = "" if chosen.error is None else f"; predicted within {abs(chosen.error):.0%}"
            echo_sentence(
                f"{format_bytes(point.logical_bytes)} a rank: {chosen.name} takes {chosen.ratio:.3f} of torch.distributed's "
                f"time ({1 / chosen.ratio:.1f}× as fast), bit-equal{error}"
            )
    echo(f"\nreport: {output / 'report.html'}    trace (perfetto.dev): {output / 'trace.json'}")
    bits = "" if result.num_wrong else ", but every result is bit-equal to torch's"
    echo_sentence("emulated: quote the ratios, not the times" if result.is_comparable else f"quote no times{bits}")

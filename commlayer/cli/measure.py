"""``commlayer measure``: measure the links of a cluster into a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import OUTPUT_FILE, PICTURE, PLACE, WholeNumber, in_order, json_option, size_options
from commlayer.cli.place import Place, check_has_links, emulation, place_options, read_place, run_job
from commlayer.cli.tables import echo_json, echo_sentence, print_table
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file
from commlayer.profiles.sweep import doubts

if TYPE_CHECKING:
    from commlayer.measure.device_harness import DeviceLinks
    from commlayer.measure.profiler import SweepOptions
    from commlayer.profiles.nccl_table import NcclRow
    from commlayer.profiles.profile import Profile

__all__ = ["link_rates", "measure_command", "measure_job"]

Rows = list[tuple[str, str, int, "NcclRow"]]
"""Collective, link class, group size, and the line of the table."""


_sweep_options = in_order(
    size_options("4KiB", "32MiB", 2.0),
    click.option("-n", "--iters", type=WholeNumber(2), default=40, show_default=True, help="Most repeats of one size."),
    click.option("-w", "--warmup", type=PLACE, default=1, show_default=True, help="Runs that do not count."),
    click.option("-c", "--check", type=WholeNumber(0, 1), default=1, show_default=True, help="Check every byte first."),
)


@click.command("measure", cls=Command)
@place_options
@_sweep_options
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Whose links: the CPU's over Gloo, or a GPU's over NCCL.  [cuda where there is one]",
)
@click.option("-o", "--output", type=OUTPUT_FILE, help="Write the profile here.")
@click.option("-J", "--table-json", type=OUTPUT_FILE, help="Write the table as JSON here.")
@click.option("--name", help="The profile's name.  [from the shape]")
@click.option("--picture", type=PICTURE, help="Draw efficiency over bytes (.svg, .png, .pdf).")
@json_option
def measure_command(
    device: str | None,
    output: Path | None,
    table_json: Path | None,
    name: str | None,
    picture: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the links of a cluster into a profile.

    Every primitive over sizes, on the groups that plans use, with nccl-tests' letters and columns;
    then pairs of resources together against alone. A size is repeated until the 95 % confidence
    interval of its median is within 5 %.

    \b
      torchrun --nnodes 2 --nproc-per-node 8 --no-python commlayer measure -o cluster.json
      commlayer measure --emulate 2x4 --inter 400mbit -o emulated.json
    """
    place = replace(read_place(options), device=device)
    if device == "cuda" and place.emulate is not None:
        raise UsageError("--device cuda: the ranks of an emulated cluster have no GPU each: say --device cpu")
    check_has_links(place)
    sweep = replace(_sweep(**options), inter_gbps=place.inter_gbps, intra_gbps=place.intra_gbps)
    outcome = run_job(place, measure_job, sweep, place, name)
    if outcome is None:
        return
    measured, rows = outcome
    _warn(measured)
    if output is not None:
        measured.save(output)
    if table_json is not None:
        from dataclasses import asdict

        import msgspec

        table = [{"collective": c, "link": link, "group_size": n, **asdict(row)} for c, link, n, row in rows]
        write_file(table_json, msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")
    if picture is not None:
        from commlayer.drawing import efficiency_figure, save_figure

        save_figure(efficiency_figure(measured), picture)
    if as_json:
        echo_json(measured.to_json())
    else:
        _print(measured, rows, output)


def _sweep(min_bytes: int, max_bytes: int, factor: float, iters: int, warmup: int, check: int) -> SweepOptions:
    from commlayer.measure.profiler import SweepOptions
    from commlayer.profiles.sweep import Repeats, sizes_between

    sizes_between(min_bytes, max_bytes, factor)  # raises here, in the user's words, and not on the ranks
    few = min(6, iters)
    repeats = Repeats(warmup=warmup, min_repeats=few, max_repeats=iters, budget_us=1e6)
    options = SweepOptions(min_bytes, max_bytes, factor, repeats, check=bool(check))
    most = min(iters, options.group_repeats.max_repeats)
    groups = replace(options.group_repeats, warmup=warmup, min_repeats=min(3, iters), max_repeats=most)
    return replace(options, group_repeats=groups)


def measure_job(options: SweepOptions, place: Place, name: str | None) -> tuple[Profile, Rows]:
    """Measure on every rank, with a progress bar on the first."""
    from commlayer.agree.discovery import discover_topology
    from commlayer.cli.progress_bars import progress
    from commlayer.measure.profiler import measure_cluster, num_points
    from commlayer.profiles.nccl_table import NcclRow
    from commlayer.profiles.sweep import Point
    from commlayer.units import format_bytes

    topology = discover_topology()
    is_emulated = emulation() is not None
    links: DeviceLinks | None = None  # those of the CPU, or of the ranks' own backend
    rows: Rows = []
    if place.device == "cuda":
        import torch

        from commlayer.measure.device_harness import device_links

        links = device_links(torch.device("cuda", torch.cuda.current_device()))
    with progress("measuring", num_points(options, topology)) as advance:

        def on_point(point: Point) -> None:
            row = NcclRow.of(point, num_wrong=0 if options.check else None)
            rows.append((point.collective, point.link.value, point.group_size, row))
            advance(f"{point.collective} {format_bytes(point.nbytes)}")

        measured = measure_cluster(
            options,
            name=name or (f"emulated-{topology.shape}" if is_emulated else f"cluster-{topology.shape}"),
            kind="emulated" if is_emulated else "measured",
            source=_source(place, topology.shape),
            topology=topology,
            environment=link_rates(place),
            on_point=on_point,
            links=links,
        )
    return measured, rows


def _source(place: Place, shape: str) -> str:
    mode = emulation()
    if mode is None:
        return "measured by commlayer measure"
    if mode == "loopback":
        return (
            f"measured by commlayer measure on loopback, unshaped, with {shape} only declared: nothing separates its nodes, "
            "and its times mean nothing"
        )
    if place.emulate is None:
        links = "its links shaped by what started it, at rates not known here"
    elif place.inter is None:
        links = "its links unshaped, so that its times mean nothing"
    else:
        intra = f"intra {place.intra} a node" if place.intra else "intra unshaped"
        delay = f", one-way delay {place.delay_us:g} us" if place.delay_us else ""
        links = f"inter {place.inter} a node, {intra}{delay}"
    return (
        f"measured by commlayer measure on an emulated cluster: {shape}, {links}. All ranks share one machine's cores: use "
        "ratios, not rates"
    )


def link_rates(place: Place) -> dict[str, str]:
    """Return what the environment of a profile or a result says about emulated links; nothing for
    real ones."""
    mode = emulation()
    if mode is None:
        return {}
    if mode == "netns" and place.emulate is None:
        return {"emulated": mode}
    rates = {"inter": place.inter or "unshaped", "intra": place.intra or "unshaped"}
    return {"emulated": mode, **rates, "delay_us": f"{place.delay_us:g}"}


def _warn(measured: Profile) -> None:
    """Say on stderr which curves rest on too few times or sizes, and how to have more."""
    if doubtful := doubts(measured.curves):
        for doubt in doubtful:
            echo_sentence(f"warning: {doubt}", err=True)
        echo_sentence(
            "trust these less; more times: -n, up to a second a size (-e leaves out slow ones); more sizes: -b, -e, -f",
            err=True,
        )


def _print(measured: Profile, rows: Rows, output: Path | None) -> None:
    from commlayer.profiles.nccl_table import COLUMNS

    for key in dict.fromkeys((c, link, n) for c, link, n, _ in rows):
        collective, link, group_size = key
        print_table(
            [f">{column}" for column in COLUMNS],
            [row.cells() for c, on, n, row in rows if (c, on, n) == key],
            title=f"{collective} on {link}, group size {group_size}",
        )
    for entry in measured.interference:
        if entry.slowdown > 1.02:
            echo_sentence(f"{entry.resource} beside {entry.other} takes {entry.slowdown:.2f} times as long")
    echo_sentence(f"measured on {measured.measured_on}")
    echo_sentence(f"median hold-out error {measured.error:.1%}; fingerprint {measured.fingerprint[:19]}…")
    if output is not None:
        echo_sentence(f"wrote {output}: plan with `commlayer plan --profile {output} --bytes 16MiB`")

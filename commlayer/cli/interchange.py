"""``commlayer profiles import|export|tuner``: times of NCCL into a profile and out of it, and NCCL's tuner tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from commlayer.cli.commands import Command
from commlayer.cli.option_types import BYTES, OUTPUT_FILE, OUTPUT_FOLDER, PROFILE, SHAPE, json_option
from commlayer.cli.tables import echo, echo_sentence, print_json
from commlayer.cli.traffic_options import group_traffic
from commlayer.profiles import catalog
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.profiles.files import write_file
from commlayer.profiles.profile import Profile
from commlayer.profiles.topology import Topology
from commlayer.readers.nccl_files import NcclRun, nccl_profile, nccl_tests_json, read_nccl_runs
from commlayer.scheduler.decision import choose
from commlayer.scheduler.group_profiles import group_profile
from commlayer.scheduler.nccl_tuner import ONE_CHANNEL, TUNED, TunerRow, nccl_table, ncclx_table, rows_of_decisions
from commlayer.units import format_bytes

__all__ = ["export_command", "import_command", "tuner_command"]

_FORCE = click.option("--force", is_flag=True, help="Replace a file that is there.")


@click.command("import", cls=Command)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", "-o", type=OUTPUT_FILE, required=True, help="Where the profile goes.")
@click.option("--name", help="The profile's name.  [the output's]")
@click.option("--base", type=PROFILE, help="A profile of the same cluster, whose other curves and peaks stay.")
@click.option("--collective", default="", help="What a text of nccl-tests is of, such as all_reduce.")
@click.option("--topology", type=SHAPE, help="Ranks of each node, such as 2x8, where the files do not say.")
@_FORCE
@json_option
def import_command(
    files: tuple[Path, ...],
    output: Path,
    name: str | None,
    base: str | None,
    collective: str,
    topology: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make a profile of what nccl-tests, NCCL Inspector or aiconfigurator have measured.

    FILES are nccl-tests' output, its JSON (-J), NCCL Inspector's JSON, and aiconfigurator's tables of NCCL (nccl_perf.parquet,
    with pyarrow), in any mixture. Where several have times of one size, the shortest counts.

    \b
      commlayer profiles import all_reduce.json alltoall.txt --output cluster.json
      commlayer profiles import inspector/*.log --base h100-eos-2x8 --output cluster.json
    """
    if twice := [path for path, count in Counter(path.resolve() for path in files).items() if count > 1]:
        raise UsageError(f"{twice[0]}: expected each file once, got it twice: leave one out")
    nodes = tuple(len(node) for node in Topology.parse(topology).nodes) if topology else ()
    runs: list[NcclRun] = []
    for path in files:
        file_runs, left_out = read_nccl_runs(path, collective, nodes)
        runs += file_runs
        for what in left_out:
            echo_sentence(f"note: {path}: left out {what}", err=True)
    profile = nccl_profile(runs, name=name or output.stem, base=catalog.load_profile(base) if base else None)
    try:
        profile.save(output, new_only=not force)
    except FileExistsError as error:
        raise UsageError(f"{output}: there is such a file already: choose another, or --force to replace it") from error
    read = [
        f"{each.collective} of {counted(each.key[2] if each.key else sum(each.nodes), 'rank')}, "
        f"{counted(len(each.times_us), 'size')}"
        for each in runs
    ]
    if as_json:
        about = {"path": str(output), "name": profile.name, "topology": profile.topology}
        print_json({**about, "read": read, "source": profile.source})
        return
    for line in read:
        echo_sentence(line)
    echo_sentence(
        f"{output}: {profile.name}, {profile.topology}, {counted(len(profile.curves), 'curve')}, {profile.fingerprint}"
    )
    if not base:
        echo_sentence(
            "note: peaks are the highest bus bandwidths that were measured, and how links slow each other down is not known; "
            "with --base plans have its peaks, its other curves and its slowdowns",
            err=True,
        )


@click.command("export", cls=Command)
@click.argument("profile_name", type=PROFILE, metavar="NAME|PATH")
@click.option(
    "--format", "kind", type=click.Choice(["nccl-tests"]), default="nccl-tests", show_default=True, help="As what."
)
@click.option("--output", "-o", type=OUTPUT_FOLDER, required=True, help="A folder for the files, one a curve.")
@_FORCE
def export_command(profile_name: str, kind: str, output: Path, force: bool) -> None:
    """Write a profile's curves as nccl-tests writes its results with -J, for tools that read these.

    `commlayer profiles import` makes the same curves of them again.
    """
    profile = catalog.load_profile(profile_name)
    output.mkdir(parents=True, exist_ok=True)
    texts = nccl_tests_json(profile)
    there = [name for name in texts if (output / name).exists()]
    if there and not force:
        raise UsageError(
            f"{output}: there is {there[0]} already: choose another folder, or --force to replace its files"
        )
    for name, text in texts.items():
        write_file(output / name, text)
    echo_sentence(f"{output}: {counted(len(texts), 'file')} in the form of {kind}")


@click.command("tuner", cls=Command)
@click.argument("profile_name", type=PROFILE, metavar="NAME|PATH")
@click.option(
    "--format", "kind", type=click.Choice(["nccl", "ncclx"]), default="nccl", show_default=True, help="Whose table."
)
@click.option("--group", help="Which ranks call: world, node, rail, or a shape such as 2x4.  [world]")
@click.option("--begin", "-b", type=BYTES, default="1KiB", show_default=True, help="The smallest size.")
@click.option("--end", "-e", type=BYTES, default="1GiB", show_default=True, help="The largest; sizes double.")
@click.option("--output", "-o", type=OUTPUT_FILE, help="Where the table goes.  [stdout]")
def tuner_command(profile_name: str, kind: str, group: str | None, begin: int, end: int, output: Path | None) -> None:
    """Write a table by which NCCL's example tuner plugin, or NCCLX's own tuner, chooses algorithm and protocol.

    The rows are what is decided on the profile, as far as NCCL has such an algorithm; where it has none, or a single flat call is
    the best, there is no row, and NCCL chooses.

    \b
      commlayer profiles tuner cluster.json --output nccl_tuner.conf
      commlayer profiles tuner cluster.json --format ncclx --output tuner.csv
    """
    rows, comments = _of_profile(catalog.load_profile(profile_name), group, begin, end)
    if kind == "nccl":
        comments.append(ONE_CHANNEL)
    text = (nccl_table if kind == "nccl" else ncclx_table)(rows, comments)
    for comment in comments[1:]:
        echo_sentence(f"note: {comment}", err=True)
    if output is None:
        echo(text.rstrip("\n"))
    else:
        write_file(output, text)
        variable = "NCCL_TUNER_CONFIG_FILE" if kind == "nccl" else "NCCLX_TUNER_CONFIG_FILE"
        echo_sentence(f"{output}: {counted(len(rows), 'row')}; {variable} names it to NCCL")


def _of_profile(profile: Profile, group: str | None, begin: int, end: int) -> tuple[list[TunerRow], list[str]]:
    if begin < 1:
        raise UsageError(f"--begin: expected at least 1 byte, got {begin}")
    if end < begin:
        raise UsageError(f"--end: expected at least --begin, {format_bytes(begin)}, got {format_bytes(end)}")
    sizes = [begin << power for power in range((end // begin).bit_length())]
    rows, untold, unpriced = [], list[str](), list[str]()
    for collective in TUNED:
        try:
            traffics = [group_traffic(profile, collective, size, group, {}) for size in sizes]
            tuned, others = rows_of_decisions([choose(each, group_profile(profile, each.nodes)) for each in traffics])
        except PlanError as error:
            unpriced.append(f"{collective}: {str(error).partition('; it has')[0]}")
            continue
        rows += tuned
        untold += others
    if len(unpriced) == len(TUNED):
        raise UsageError(
            f"nothing that NCCL's tuner is asked about can be priced: {unpriced[0]}; import its times first"
        )
    comments = [f"by commlayer, decisions on {profile.name} ({profile.topology}), {profile.fingerprint}"]
    if untold:
        comments.append(f"{len(untold)} decisions have no counterpart in NCCL, and no row: {untold[0]}, and so on")
    comments += [f"no prices of {what}" for what in unpriced]
    if not rows:
        why = (
            "a single flat call is the best everywhere"
            if not untold
            else "NCCL has none of the algorithms that were chosen"
        )
        comments.append(f"no row at all: {why}, so NCCL chooses")
    return rows, comments

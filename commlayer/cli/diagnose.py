"""``commlayer diagnose``: the logs of a job's ranks as one graph, and the circle or the missing
rank that holds it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from commlayer.cli.commands import Command
from commlayer.cli.failure import refuse_damaged
from commlayer.cli.option_types import OUTPUT_FILE, OUTPUT_FOLDER, json_option
from commlayer.cli.output_files import tell
from commlayer.cli.progress_bars import progress
from commlayer.cli.replicas import of_replicas
from commlayer.cli.tables import echo
from commlayer.diagnosis.call_logs import RankLog
from commlayer.diagnosis.diagnosis_words import in_words, ranks_words
from commlayer.diagnosis.dump_readings import diagnose_dumps
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.diagnosis.log_files import read_logs
from commlayer.diagnosis.recorder_dumps import find_dumps, read_dumps
from commlayer.profiles.files import write_file

__all__ = ["diagnose_command"]

_LOGS = "calls-*.json"
"""The names of the files in which ranks write what they remember."""


@click.command("diagnose", cls=Command)
@click.argument("paths", type=click.Path(path_type=Path, exists=True), metavar="PATH...", nargs=-1, required=True)
@click.option("--output", "-o", type=OUTPUT_FILE, help="Draw what was found on a page (.html).")
@click.option(
    "--flight-recorder",
    type=OUTPUT_FOLDER,
    metavar="OUT",
    help="Write the logs into this folder as dumps of torch's Flight Recorder, too.",
)
@json_option
@click.pass_context
def diagnose_command(
    ctx: click.Context, paths: tuple[Path, ...], output: Path | None, flight_recorder: Path | None, as_json: bool
) -> None:
    """Say who waits for whom, from what a job's ranks remember of their calls.

    PATH is a folder with the files calls-00000.json and so on that every rank writes when a call times out,
    a rank aborts, or gets SIGUSR1; those of all machines. COMMLAYER_DIAGNOSE_DIR says where. Where several
    replicas wrote into it, each has a folder of its own there, and so has each group that replicas form: each is
    diagnosed by itself.

    Or it is dumps of torch's Flight Recorder, of NCCL, Gloo or another backend, pickled or in JSON: files, or
    folders with them at any depth. The rank is the number in a file's name.

    \b
      kill -USR1 PID          (any one rank of the job)
      commlayer diagnose DIR
      commlayer diagnose DIR -o hang.html --flight-recorder dumps
      commlayer diagnose /tmp/nccl_trace_rank_*

    Exit status: 0 nothing is wrong, 1 something is, 2 files that cannot be read: what the others say is printed all the same.
    """
    refused = tuple(name for name, value in (("--output", output), ("--flight-recorder", flight_recorder)) if value)
    damaged: list[str] = []
    results = _results(paths, refused, damaged)
    logs, first = next(iter(results.values()))
    diagnoses = {name: diagnosis for name, (_, diagnosis) in results.items()}
    if as_json:
        import msgspec

        content = msgspec.json.encode({"replicas": diagnoses} if len(results) > 1 else first)
        echo(msgspec.json.format(content, indent=2).decode())
    else:
        for name, (its_logs, diagnosis) in results.items():
            _show(name, its_logs, diagnosis)
    if output is not None:
        from commlayer.drawing.waits_page import waits_page

        write_file(output, waits_page(logs, first))
        tell("report", output)
    if flight_recorder is not None:
        from commlayer.diagnosis.flight_recorder import write_flight_recorder

        write_flight_recorder(flight_recorder, logs)
        echo(f"dumps: {flight_recorder} (torchfrtrace {flight_recorder})", err=True)
    refuse_damaged(damaged)
    ctx.exit(1 if any(each.has_found for each in diagnoses.values()) else 0)


def _results(
    paths: Sequence[Path], refused: tuple[str, ...], damaged: list[str]
) -> dict[str, tuple[list[RankLog], Diagnosis]]:
    """The logs and the diagnosis of every replica; of one without a name, of dumps and where there are no replicas."""
    has_logs = any(path.is_dir() and any(True for _ in path.glob(f"**/{_LOGS}")) for path in paths)
    dumps = [] if has_logs else find_dumps(paths)
    if dumps:
        with progress("reading", len(dumps)) as advance:
            read = read_dumps(dumps, damaged, advance)
        backends = ", ".join(sorted({backend for dump in read for backend in dump.backends}))
        echo(f"dumps of torch's Flight Recorder ({backends}): {ranks_words([dump.rank for dump in read])}", err=True)
        return {"": diagnose_dumps(read)}
    if len(paths) > 1 or not paths[0].is_dir():
        raise click.UsageError(
            f"expected dumps of torch's Flight Recorder, or one folder with files {_LOGS}, got "
            f"{', '.join(map(str, paths[:4]))}"
        )
    logs = {name: read_logs(place, damaged) for name, place in of_replicas(paths[0], _LOGS, refused)}
    return {name: (each, diagnose(each)) for name, each in logs.items()}


def _show(replica: str, logs: Sequence[RankLog], diagnosis: Diagnosis) -> None:
    if replica:
        echo(f"replica {replica}")
    of_job = f"job {logs[0].job}: " if logs[0].job else ""
    echo(f"{of_job}logs of {ranks_words([log.rank for log in logs])} of {len(diagnosis.ranks)}\n")
    echo(in_words(diagnosis))

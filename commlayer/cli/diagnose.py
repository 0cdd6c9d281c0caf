"""``commlayer diagnose``: the logs of a job's ranks as one graph, and the circle or the missing rank that holds it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from commlayer.cli.commands import Command
from commlayer.cli.failure import refuse_damaged
from commlayer.cli.option_types import OUTPUT_FILE, OUTPUT_FOLDER, json_option
from commlayer.cli.output_files import tell
from commlayer.cli.replicas import of_replicas
from commlayer.cli.tables import echo
from commlayer.diagnosis.call_logs import RankLog
from commlayer.diagnosis.diagnosis_words import in_words, ranks_words
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.diagnosis.log_files import read_logs
from commlayer.profiles.files import write_file

__all__ = ["diagnose_command"]


@click.command("diagnose", cls=Command)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
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
    ctx: click.Context, folder: Path, output: Path | None, flight_recorder: Path | None, as_json: bool
) -> None:
    """Say who waits for whom, from what a job's ranks remember of their calls.

    DIR has the files calls-00000.json and so on that every rank writes when a call times out, a rank aborts, or gets SIGUSR1;
    those of all machines. COMMLAYER_DIAGNOSE_DIR says where. Where several replicas wrote into it, each has a folder of its own
    there, and so has each group that replicas form: each is diagnosed by itself.

    \b
      kill -USR1 PID          (any one rank of the job)
      commlayer diagnose DIR
      commlayer diagnose DIR -o hang.html --flight-recorder dumps

    Exit status: 0 nothing is wrong, 1 something is, 2 files that cannot be read: what the others say is printed all the same.
    """
    refused = tuple(name for name, value in (("--output", output), ("--flight-recorder", flight_recorder)) if value)
    places = of_replicas(folder, "calls-*.json", refused)
    damaged: list[str] = []
    all_logs = {name: read_logs(place, damaged) for name, place in places}
    results = {name: diagnose(each) for name, each in all_logs.items()}
    logs, found = next(iter(all_logs.values())), next(iter(results.values()))
    if as_json:
        import msgspec

        told = msgspec.json.encode({"replicas": results} if len(results) > 1 else found)
        echo(msgspec.json.format(told, indent=2).decode())
    else:
        for name, each in results.items():
            _show(name, all_logs[name], each)
    if output is not None:
        from commlayer.drawing.waits_page import waits_page

        write_file(output, waits_page(logs, found))
        tell("report", output)
    if flight_recorder is not None:
        from commlayer.diagnosis.flight_recorder import write_flight_recorder

        write_flight_recorder(flight_recorder, logs)
        echo(f"dumps: {flight_recorder} (torchfrtrace {flight_recorder})", err=True)
    refuse_damaged(damaged)
    ctx.exit(1 if any(each.has_found for each in results.values()) else 0)


def _show(replica: str, logs: Sequence[RankLog], found: Diagnosis) -> None:
    if replica:
        echo(f"replica {replica}")
    echo(f"job {logs[0].job or '?'}: logs of {ranks_words([log.rank for log in logs])} of {len(found.ranks)}\n")
    echo(in_words(found))

"""``commlayer diagnose``: the logs of a job's ranks as one graph, and the circle or the missing
rank that holds it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from commlayer.cli.commands import Command
from commlayer.cli.failure import fitting, refuse_damaged
from commlayer.cli.option_types import OUTPUT_FOLDER, PAGE, json_option
from commlayer.cli.output_files import tell
from commlayer.cli.progress_bars import progress
from commlayer.cli.replicas import of_replicas
from commlayer.cli.tables import echo, echo_sentence
from commlayer.diagnosis.call_logs import RankLog
from commlayer.diagnosis.causes import with_cause
from commlayer.diagnosis.diagnosis_words import in_words, ranks_words
from commlayer.diagnosis.evidence import Judged, gather_evidence
from commlayer.diagnosis.evidence_files import files_in
from commlayer.diagnosis.explaining import (
    LOGS,
    Watch,
    has_other_evidence,
)
from commlayer.diagnosis.findings import Diagnosis, diagnose
from commlayer.diagnosis.log_files import read_logs
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file

__all__ = ["diagnose_command"]


@click.command("diagnose", cls=Command)
@click.argument("paths", type=click.Path(path_type=Path), metavar="PATH...", nargs=-1, required=True)
@click.option("--output", "-o", type=PAGE, help="Draw what was found on a page (.html).")
@click.option(
    "--flight-recorder",
    type=OUTPUT_FOLDER,
    metavar="OUT",
    help="Write the logs into this folder as dumps of torch's Flight Recorder, too.",
)
@click.option(
    "--watch",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="For so long, diagnose files that tell of a hang each time that some have come or changed, and no longer change. "
    "Those that are there before are left out.",
)
@json_option
@click.pass_context
def diagnose_command(
    ctx: click.Context,
    paths: tuple[Path, ...],
    output: Path | None,
    flight_recorder: Path | None,
    watch: float | None,
    as_json: bool,
) -> None:
    """Say who waits for whom, from what a job's ranks have left of their calls.

    PATH is a file, an archive (tar, zip, gz) or a folder, at any depth. Each file is taken for what it is by looking inside:

    \b
      calls-00000.json    what every rank of commlayer writes when a call times out, a rank aborts, or
                          gets SIGUSR1, into the folder COMMLAYER_DIAGNOSE_DIR
      nccl_trace_rank_0   a dump of torch's Flight Recorder, of any backend, pickled or in JSON; the rank
                          is the number in its name
      job.log             lines of NCCL's watchdogs, in logs of one rank or of all
      ras.json, ras.txt   two outputs of ncclras, a minute apart, in two files or in one
      stack_rank_3.txt    stacks of py-spy dump or faulthandler, which add where a rank's program is

    A folder in which several replicas of commlayer wrote has a folder for each, and for each group that replicas form: each is
    diagnosed by itself.

    \b
      kill -USR1 PID          (any one rank of the job)
      commlayer diagnose DIR
      commlayer diagnose DIR -o hang.html --flight-recorder dumps
      commlayer diagnose /tmp/nccl_trace_rank_* slurm-4242.out
      commlayer diagnose /shared/dumps --watch 86400

    Exit status: 0 nothing is wrong, 1 something is, 2 files that cannot be read: what the others say is printed all the same.
    """
    refused = tuple(name for name, value in (("--output", output), ("--flight-recorder", flight_recorder)) if value)
    damaged: list[str] = []
    absent = next((path for path in paths if not (watch or path.exists())), None)
    if absent is not None:
        raise click.UsageError(f"{absent} does not exist (--watch waits for it)")
    answers = _awaited(paths, watch, refused, damaged) if watch else [_results(paths, refused, damaged)]
    has_found = False
    for results in answers:
        logs, first = next(iter(results.values()))
        diagnoses = {name: diagnosis for name, (_, diagnosis) in results.items()}
        has_found = any(each.has_found for each in diagnoses.values())
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
    ctx.exit(1 if has_found else 0)


def _awaited(paths: Sequence[Path], seconds: float, refused: tuple[str, ...], damaged: list[str]) -> Iterator[Judged]:
    """Yield what :func:`_results` finds, for so many seconds each time that it differs."""
    watch = Watch(paths)
    before = f"; {counted(watch.num_before, 'file')} from before left out" if watch.num_before else ""
    echo(f"waiting for files in {', '.join(map(str, paths[:4]))}{before}", err=True)
    latest = None
    for files in watch.each(seconds):
        damaged.clear()
        try:
            results = _results(files, refused, damaged)
        except UsageError as error:  # as of files that are half written
            damaged[:] = [str(error)]
        else:
            diagnoses = {name: diagnosis for name, (_, diagnosis) in results.items()}
            if diagnoses != latest:
                if latest is not None:
                    echo("")
                yield results
            latest = diagnoses
        for words in damaged:
            echo(fitting(words), err=True)
    if latest is None and not damaged:
        raise click.UsageError(
            f"--watch: within {seconds:g} s no dumps, files {LOGS} or logs of a hang came into "
            f"{', '.join(map(str, paths[:4]))}"
        )


def _results(paths: Sequence[Path], refused: tuple[str, ...], damaged: list[str]) -> Judged:
    """The logs and the diagnosis of every replica; of one without a name, of dumps and where there are no replicas."""
    is_folder = len(paths) == 1 and paths[0].is_dir() and any(paths[0].glob(f"**/{LOGS}"))
    if is_folder and not has_other_evidence(paths):
        logs = {name: read_logs(place, damaged) for name, place in of_replicas(paths[0], LOGS, refused)}
        return {name: (each, with_cause(diagnose(each), each)) for name, each in logs.items()}
    with progress("looking", len(files_in(paths))) as advance:
        evidence = gather_evidence(paths, damaged, advance)
    with progress("reading", len(evidence.dump_paths)) as advance:
        evidence.read_dumps(damaged, advance)
    evidence.check_not_empty(paths, damaged)
    echo_sentence(evidence.in_words(), err=True)
    results = evidence.judged()
    if len(results) > 1 and refused:
        raise click.UsageError(f"{' and '.join(refused)}: expected one job, got {', '.join(list(results)[:4])}")
    return results


def _show(replica: str, logs: Sequence[RankLog], diagnosis: Diagnosis) -> None:
    if replica:
        echo_sentence(f"replica {replica}")
    if logs:
        of_job = f"job {logs[0].job}: " if logs[0].job else ""
        echo_sentence(f"{of_job}logs of {ranks_words([log.rank for log in logs])} of {len(diagnosis.ranks)}\n")
    echo_sentence(in_words(diagnosis))

"""Programs that hang, and what is said of each from its dumps, by us and by torch's own analyzer.

``python benchmarks/hangs.py`` runs the programs of ``tests/diagnosis/hanging_programs.py`` as real
processes on torch's Gloo, which torch's own Flight Recorder records (up to 8 ranks), and in memory for
dumps with the states that NCCL's recorder writes, with and without times, and for the lines of
watchdogs alone (up to 32 ranks). Stacks and a job's log lie beside some. For each it counts whether
the cause, the ranks and the places in the program are right. A false verdict blames a cause or ranks
that are not at fault; "cannot be told" is none. Sound and slow jobs have to give no alarm.
``--seed N`` tries other sizes, meshes and orders of calls; ``--json FILE`` keeps every verdict. The
dumps, pickled ones too, were made by this very run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "diagnosis"))  # the programs

from dumps_in_memory import write_dumps, write_texts
from gloo_recordings import record
from hanging_programs import Hang, hangs, judged, seen_in_lines, stuck
from jobs_in_memory import Job, run
from program_shapes import slow_jobs
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from watchdogs_in_memory import PREFIXES, RELEASES, Style, watchdog_lines

from commlayer.diagnosis import explain

RECORDERS = {"gloo": 8, "nccl": 32, "nccl with times": 32, "watchdogs": 32}
"""The recorders, and the most ranks of their programs."""
NUM_SOUND = 200


def main() -> None:
    """Run the programs, and print how many are judged right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recorder", choices=tuple(RECORDERS), help="of this recorder alone")
    parser.add_argument("--only", default="", help="programs whose names have this text")
    parser.add_argument("--seed", type=int, default=0, help="programs of other sizes and orders")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict there")
    arguments = parser.parse_args()
    recorders = [arguments.recorder] if arguments.recorder else list(RECORDERS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for recorder in recorders:
            every = hangs(RECORDERS[recorder], arguments.seed)
            chosen = [each for each in every if arguments.only in each.name and (each.is_on_gloo or recorder != "gloo")]
            shown = track(chosen, recorder, console=Console(stderr=True))
            for index, hang in enumerate(shown):
                paths = files_of(hang, recorder, Path(folder) / f"{recorder} {index}", index)
                rows.append(row_of(hang, recorder, paths))
        alarms = sum(sound_alarms(Path(folder))) if not arguments.only else None
    if arguments.json:
        result = {"programs": rows, "sound": NUM_SOUND, "alarms": alarms}
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    show(rows, alarms)


def files_of(hang: Hang, recorder: str, folder: Path, seed: int) -> list[Path]:
    """The files that a program leaves which hangs."""
    if recorder == "gloo":
        return record(hang, folder)
    job, random_ = stuck(hang), random.Random(seed)
    without = hang.absent + hang.stopped
    if recorder == "watchdogs":
        return [write_watchdogs(folder, job, random_, hang)]
    has_timing = recorder != "nccl"
    dumps = write_dumps(folder, job, random_, has_timing=has_timing, absent=without, most=hang.most)
    return [*dumps, *write_texts(folder, job, hang.died, without)]


def write_watchdogs(folder: Path, job: Job, random_: random.Random, hang: Hang) -> Path:
    """Write the lines of watchdogs as a release of torch behind a launcher, and those of ranks that died."""
    folder.mkdir()
    style = Style(random_.choice(RELEASES), random_.choice(list(PREFIXES)))
    died = [line for lines in hang.died.values() for line in lines]
    lines = [*died, *watchdog_lines(job, random_, style, absent=hang.absent + hang.stopped)]
    path = folder / "job.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row_of(hang: Hang, recorder: str, paths: Sequence[Path]) -> dict[str, Any]:
    """The verdict of a program, and what torch's analyzer says of it."""
    hang = seen_in_lines(hang) if recorder == "watchdogs" else hang
    diagnosis = explain(paths)
    verdict = judged(hang, diagnosis, has_messages=recorder != "gloo")
    dumps = [path for path in paths if path.suffix not in (".txt", ".log")]
    return {
        "program": hang.name,
        "recorder": recorder,
        "expected": sorted(hang.causes),
        "said": verdict.words,
        "cause": verdict.cause,
        "ranks": verdict.ranks,
        "places": verdict.places,
        "false": verdict.is_false,
        "torch": torch_says(dumps) if dumps else "nothing",
    }


def torch_says(paths: Sequence[Path]) -> str:
    """The first thing that torch's analyzer finds wrong."""
    details = {}
    for path in paths:
        data = path.read_bytes()
        dump = json.loads(data) if data[:1] == b"{" else pickle.loads(data)  # made above
        rank = int(path.stem.rpartition("_")[2])
        details[path.name] = {"host_name": f"host{rank}", "rank": rank, **dump}
    arguments = JobConfig().parse_args(["dumps", "--allow-incomplete-ranks"])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            database = build_db(details, arguments, "2.10")
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever its analyzer ends with
        return f"fails: {type(error).__name__} {error}"[:60]
    for each in database.collectives:
        if not each.pass_check:
            missing = f", missing {sorted(each.missing_ranks)}" if each.missing_ranks else ""
            wrong = f", differing {sorted(each.mismatch_collectives or {})}"
            return f"{each.collective_name} of {each.pg_desc}{missing or wrong}"
    return "nothing"


def sound_alarms(folder: Path) -> Iterator[bool]:
    """Whether a sound job gives an alarm, each seen at a moment of its own, 20 s after it began."""
    for index, (groups, program) in enumerate(slow_jobs(NUM_SOUND)):
        random_ = random.Random(index)
        job = Job(groups, program)
        run(job, random_, random_.randint(1, 12))
        paths = write_dumps(folder / f"sound {index}", job, random_, has_timing=bool(index % 2), age_s=20.0)
        yield explain(paths).has_found


def show(rows: Sequence[dict[str, Any]], alarms: int | None) -> None:
    """Print the counts of each recorder, and the programs that are not judged right."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        count = counts.setdefault(row["recorder"], Counter())
        count["programs"] += 1
        count.update(name for name in ("cause", "ranks", "places", "false") if row[name])
        count["torch"] += row["torch"] == "nothing" or row["torch"].startswith("fails")
    table = Table("recorder", "programs", "cause", "ranks", "places", "false", "torch says nothing")
    for recorder, count in counts.items():
        names = ("programs", "cause", "ranks", "places", "false", "torch")
        table.add_row(recorder, *(str(count[name]) for name in names))
    console = Console()
    console.print(table)
    for row in rows:
        if not (row["cause"] and row["ranks"] and row["places"]):
            console.print(f"{row['recorder']}: {row['program']}: {row['said']}", highlight=False)
    if alarms is not None:
        console.print(f"alarms in {NUM_SOUND} sound jobs: {alarms}", highlight=False)


if __name__ == "__main__":
    main()

"""The jobs that ``commlayer trace`` reports on: read from the traces of their ranks, or from dumps of
torch's Flight Recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commlayer.cli.progress_bars import progress
from commlayer.cli.replicas import of_replicas
from commlayer.cli.tables import echo_sentence
from commlayer.profiles.counted import counted, listed
from commlayer.profiles.errors import UsageError
from commlayer.traces.analyse import Selected, Window, select
from commlayer.traces.rank_files import RankTrace, rank_paths, read_folder

__all__ = ["TracedJob", "missing_ranks", "read_jobs"]

_TRACES = "rank-*.json"
_TRACE_BEGINS = b'"traceEvents"'


@dataclass(frozen=True)
class TracedJob:
    """A job, or a replica of it.

    ``replica``: its name, "" where there are none; ``folder``: of its traces, None of dumps; ``ranks``:
    in the window; ``notes``: cautions that a reader must know before believing the times; ``host_errors_ns``: by how
    much stamps of a rank's host in a dump may be off; ``is_size_known``: whether the files say how many ranks the job has.
    """

    replica: str
    folder: Path | None
    ranks: list[Selected]
    notes: list[str]
    host_errors_ns: Mapping[int, int] = field(default_factory=dict)
    is_size_known: bool = True

    @property
    def is_of_dumps(self) -> bool:
        """Whether it was read from dumps, which know no lanes, no predictions and no names of hosts and jobs."""
        return self.folder is None


def read_jobs(
    paths: Sequence[Path], job: str | None, window: Window, refused: tuple[str, ...], damaged: list[str]
) -> list[TracedJob]:
    """Read the job, or every replica of it, that has left files in ``paths``.

    Args:
        job: only of this name.
        refused: names of options that are for one replica, and were given.
        damaged: takes the errors of files that are not sound.

    Raises:
        UsageError: nothing to read, or options that the files have no answer to.
    """
    if len(paths) == 1 and _has_traces(paths[0]):
        jobs = []
        for name, folder in of_replicas(paths[0], _TRACES, refused):
            ranks = select(_traces(folder, job, damaged), window)
            jobs.append(TracedJob(name, folder, ranks, _notes(ranks)))
        return jobs
    if files := [path for path in paths if _is_trace(path)]:
        raise UsageError(f"{files[0]}: expected a folder of traces, got one of its files: give its folder")
    if folders := [path for path in paths if _has_traces(path)]:
        raise UsageError(f"{folders[0]} has traces: expected one folder of traces, or dumps: give it alone")
    for option, value in (("--job", job), ("--step", window.step)):
        if value is not None:
            raise UsageError(f"{option}: expected traces of ranks, got {paths[0]}: dumps name neither jobs nor steps")
    from commlayer.diagnosis.evidence import gather_evidence
    from commlayer.diagnosis.evidence_files import files_in
    from commlayer.traces.dump_traces import traces_of_dumps

    with progress("looking", len(files_in(paths))) as advance:
        evidence = gather_evidence(paths, damaged, advance, keeps_all=True)
    with progress("reading", len(evidence.dump_paths)) as advance:
        evidence.read_dumps(damaged, advance)
    if not evidence.dumps:
        if damaged:
            raise UsageError("\n".join(damaged))
        if paths[0].is_dir() and any(paths[0].glob(_TRACES)):
            # Raises what is wrong with files that are named as traces and begin as none.
            _traces(paths[0], job, damaged)
        raise UsageError(
            f"{paths[0]}: expected files such as rank-00000.json, got {evidence.in_words() or 'none'}: run the job with "
            f"COMMLAYER_TRACE={paths[0]}, and collect the files of all machines; a rank writes its own when it ends. Or give "
            "dumps of torch's Flight Recorder"
        )
    echo_sentence(evidence.in_words(), err=True)
    traces = traces_of_dumps(evidence.dumps)
    ranks = select(traces.ranks, window)
    notes = [*_common_notes(ranks), *traces.notes]
    return [TracedJob("", None, ranks, notes, traces.host_errors_ns, traces.is_size_known)]


def _has_traces(path: Path) -> bool:
    """Whether a folder has a file of that name which is a trace: dumps may be named so too."""
    patterns = (_TRACES, f"*/{_TRACES}")
    return path.is_dir() and any(_is_trace(file) for pattern in patterns for file in path.glob(pattern))


def _is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _TRACE_BEGINS in file.read(64)
    except OSError:
        return False


def _traces(folder: Path, job: str | None, damaged: list[str]) -> list[RankTrace]:
    with progress("reading", len(rank_paths(folder))) as advance:
        traces: list[RankTrace] = []
        for each in read_folder(folder, job, damaged):
            traces.append(each)
            advance(f"rank {each.rank}")
    return traces


def missing_ranks(ranks: Sequence[Selected]) -> list[int]:
    """List the ranks of the job that have left no file."""
    there = {rank.trace.rank for rank in ranks}
    return [rank for rank in range(ranks[0].trace.world_size) if rank not in there]


def _common_notes(ranks: Sequence[Selected]) -> list[str]:
    """The cautions that hold of traces and of dumps."""
    notes = []
    if missing := missing_ranks(ranks):
        notes.append(
            f"no file of {listed('rank', missing)} of {ranks[0].trace.world_size}: killed "
            "before the end, or not copied from another machine"
        )
    if not any(rank.calls for rank in ranks):
        notes.append("no call was recorded here")
    if unfinished := sum(not call.end_ns for rank in ranks for call in rank.calls):
        notes.append(
            f"{counted(unfinished, 'call')} had not ended when the ranks' files were written: in no time below"
        )
    return notes


def _notes(ranks: Sequence[Selected]) -> list[str]:
    """The cautions that a reader must know of traces before believing them."""
    notes = []
    if full := [rank.trace for rank in ranks if rank.trace.num_dropped]:
        most = max(full, key=lambda each: each.num_dropped)
        notes.append(
            f"{len(full)} of {counted(len(ranks), 'trace')} had no room left before the end (rank {most.rank} lacks "
            f"{counted(most.num_dropped, 'entry', 'entries')}): compare the beginning only, with --until"
        )
    if len(ranks) > 1 and (unknown := [rank.trace.rank for rank in ranks if rank.trace.error_ns < 0]):
        notes.append(f"clocks of {listed('rank', unknown)} were not compared: their times say nothing about others")
    return [*_common_notes(ranks), *notes]

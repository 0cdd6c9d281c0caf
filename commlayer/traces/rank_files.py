"""The file of one rank: a Chrome trace that opens in Perfetto as it is, and the records that it was drawn from."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import replacing
from commlayer.profiles.strict_json import each_sound, parse_record, read_data
from commlayer.traces.clock import ClockReading, to_job_ns
from commlayer.traces.records import CallRecord, Mark, rank_name

__all__ = ["TRACE_FORMAT", "RankTrace", "installed_versions", "rank_paths", "read_folder", "write_trace"]

TRACE_FORMAT = 1
_NAME = re.compile(r"rank-(\d+)(?:-(\d+))?\.json")
_WHAT = "the trace of a rank"
_MOST_BYTES = 4 << 30
"""The largest trace that is read: of some ten million calls."""
_PACKAGES = ("commlayer", "torch", "numpy")


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one rank.

    Times are as it stamped them; :meth:`job_clock` makes them comparable. ``pid``: of the process. ``num_dropped``: calls and
    marks that there was no room for. ``closed_ns``: the end of the recording.
    """

    job: str
    rank: int
    world_size: int
    host: str
    pid: int
    versions: dict[str, str]
    readings: tuple[ClockReading, ...]
    opened_ns: int
    closed_ns: int
    num_dropped: int
    calls: tuple[CallRecord, ...]
    marks: tuple[Mark, ...]
    format: int = TRACE_FORMAT

    def job_clock(self) -> Callable[[int], int]:
        """Return the function that turns a stamp of this rank into ns since the job's origin on rank 0's clock; without
        readings, since the opening.
        """
        return to_job_ns(self.readings or (ClockReading(self.opened_ns, 0, -1, self.opened_ns),))

    @property
    def error_ns(self) -> int:
        """The bound by which its times may be wrong against rank 0's; −1: not known."""
        return max((reading.error_ns for reading in self.readings), default=-1)


class _File(msgspec.Struct):
    commlayer: RankTrace


class _Head(msgspec.Struct):
    """The part that is read of a file before it is known to be one that is wanted."""

    format: int
    job: str = ""
    rank: int = 0
    world_size: int = 0


class _Probe(msgspec.Struct):
    commlayer: _Head


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a trace names, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def write_trace(path: Path, events: Iterable[Any], **more: Any) -> None:
    """Write a Chrome trace, with ``more`` beside its events. Whoever looks sees the whole file or none. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file:
        file.write(b'{"traceEvents":[')
        for index, event in enumerate(events):
            file.write(b",\n" if index else b"\n")
            file.write(encode(event))
        file.write(b"]")
        for name, value in ({"displayTimeUnit": "ms"} | more).items():
            file.write(b",\n" + encode(name) + b":" + encode(value))
        file.write(b"}\n")


def read_folder(folder: Path, job: str | None = None, damaged: list[str] | None = None) -> Iterator[RankTrace]:
    """Read the traces in ``folder``, one file after the other, by rank; :func:`rank_paths` says which.

    Args:
        job: only the files of this one, or of the one whose name begins so.  [the only one]
        damaged: takes the errors of files that are not sound, where there are others that are; at the end.

    Raises:
        UsageError: no trace in the folder, a damaged file that ``damaged`` does not take, files of different jobs or none of
            ``job``, a rank's file twice.
    """
    found: dict[int, Path] = {}
    first: RankTrace | None = None
    for path, trace in each_sound(rank_paths(folder), lambda path: (path, _read(path, job or "")), damaged):
        if trace is None:
            continue
        first = first or trace
        if (trace.job, trace.world_size) != (first.job, first.world_size):
            raise UsageError(
                f"{folder}: expected files of one job, got {_jobs(folder, job or '')}: choose one with --job {first.job}, or "
                "give every job a folder of its own"
            )
        if trace.rank in found:
            raise UsageError(
                f"{folder}: expected one file of rank {trace.rank} of job {trace.job}, got {found[trace.rank].name} and "
                f"{path.name}: remove one"
            )
        found[trace.rank] = path
        yield trace
    if first is None:
        raise UsageError(f"{folder}: expected files of job {job}, got {_jobs(folder)}")


def rank_paths(folder: Path) -> list[Path]:
    """List the files of ranks in ``folder``, first those of the first job. Raises UsageError where there are none."""
    numbers = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    places = {path: (int(found[2] or 1), int(found[1])) for path, found in numbers.items() if found}
    if not places:
        raise UsageError(
            f"{folder}: expected files such as rank-00000.json, got none: run the job with COMMLAYER_TRACE={folder}, and collect "
            "the files of all machines; a rank writes its own when it ends"
        )
    return sorted(places, key=places.__getitem__)


def _jobs(folder: Path, begin: str = "") -> str:
    """The jobs of the files in ``folder``, those whose names begin so."""
    jobs: dict[tuple[str, int], list[str]] = {}
    for path in rank_paths(folder):
        with contextlib.suppress(UsageError):
            head, _ = _head(path)
            if head.job.startswith(begin):
                jobs.setdefault((head.job, head.world_size), []).append(path.name)
    each = [
        f"job {job} ({len(names)} of {size} ranks, such as {names[0]})" for (job, size), names in sorted(jobs.items())
    ]
    return " and ".join(each)


def _head(path: Path) -> tuple[_Head, bytes]:
    data = read_data(path, _WHAT, _MOST_BYTES)
    head = parse_record(data, _Probe, path, _WHAT).commlayer
    if head.format != TRACE_FORMAT:
        raise UsageError(
            f"{path}: expected a trace of format {TRACE_FORMAT}, got format {head.format}: read it with the commlayer that "
            "wrote it"
        )
    return head, data


def _read(path: Path, begin: str) -> RankTrace | None:
    """The trace in ``path``; None for one of a job whose name does not begin so."""
    head, data = _head(path)
    if not head.job.startswith(begin):
        return None
    trace = parse_record(data, _File, path, _WHAT).commlayer
    name = _NAME.fullmatch(path.name)
    if name is None or path.name != (right := rank_name(trace.rank, int(name[2] or 1))):
        raise UsageError(f"{path}: expected a name that fits its content, rank {trace.rank}: rename it to {right}")
    return trace

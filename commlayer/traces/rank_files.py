"""The file of one rank: a Chrome trace that opens in Perfetto as it is, and the records that it was
drawn from."""

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
from commlayer.profiles.strict_json import parse_record, read_data
from commlayer.readers.job_files import JobFiles
from commlayer.traces.call_records import CallRecord, Mark, rank_name
from commlayer.traces.clock import ClockReading, to_job_ns

__all__ = ["TRACE_FORMAT", "RankTrace", "installed_versions", "rank_paths", "read_folder", "write_trace"]

TRACE_FORMAT = 1
_WHAT = "the trace of a rank"
_MOST_BYTES = 4 << 30
"""The largest trace that is read: of some ten million calls."""
_PACKAGES = ("commlayer", "torch", "numpy")


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one rank.

    Times are as it stamped them; :meth:`job_clock` makes them comparable. ``pid``: of the process.
    ``num_dropped``: calls and marks that there was no room for. ``closed_ns``: the end of the
    recording.
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
        """Return the function that turns a stamp of this rank into ns since the job's origin on
        rank 0's clock; without readings, since the opening.
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
    world_size: int = 0


class _Probe(msgspec.Struct):
    commlayer: _Head


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a trace names, those that are
    installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def write_trace(path: Path, events: Iterable[Any], **more: Any) -> None:
    """Write a Chrome trace, with ``more`` beside its events. Whoever looks sees the whole file or
    none. Raises OSError."""
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
    """Read the traces in ``folder``, as :meth:`commlayer.readers.job_files.JobFiles.read_all`
    does."""
    return _FILES.read_all(folder, job or "", damaged)


def rank_paths(folder: Path) -> list[Path]:
    """List the files of ranks in ``folder``, first those of the first job. Raises UsageError where
    there are none."""
    return _FILES.paths(folder)


def _read(path: Path) -> RankTrace:
    data = read_data(path, _WHAT, _MOST_BYTES)
    _head(path, data)
    return parse_record(data, _File, path, _WHAT).commlayer


def _head(path: Path, data: bytes | None = None) -> _Head:
    data = read_data(path, _WHAT, _MOST_BYTES) if data is None else data
    head = parse_record(data, _Probe, path, _WHAT).commlayer
    if head.format != TRACE_FORMAT:
        raise UsageError(
            f"{path}: expected a trace of format {TRACE_FORMAT}, got format {head.format}: read it with the commlayer that "
            "wrote it"
        )
    return head


_FILES = JobFiles(
    pattern=re.compile(r"rank-(\d+)(?:-(\d+))?\.json"),
    name=rank_name,
    remedy="run the job with COMMLAYER_TRACE={folder}, and collect the files of all machines; a rank writes its own when it ends",
    head=_head,
    read=_read,
    world_size=lambda trace: trace.world_size,
)

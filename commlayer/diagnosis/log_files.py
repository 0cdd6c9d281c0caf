"""The folder of a job's logs: a file of JSON for each rank, which the rank replaces whenever it is
asked again."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

import msgspec

from commlayer.diagnosis.call_logs import LOG_FORMAT, RankLog, as_foreign
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file
from commlayer.profiles.strict_json import parse_record, read_data
from commlayer.readers.job_files import JobFiles

__all__ = ["folder_of", "folder_path", "log_name", "read_logs", "write_log"]


class _Head(msgspec.Struct):
    format: int


def log_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"calls-{rank:05d}.json"


def folder_path(job: str, given: str | None) -> Path:
    """Return the folder of :func:`folder_of`, which may not be there yet."""
    return Path(given) if given else Path(tempfile.gettempdir()) / f"commlayer-diagnose-{os.getuid()}-{job}"


def folder_of(job: str, given: str | None) -> Path:
    """Make the folder into which the ranks of ``job`` on this machine write: ``given``, or one of
    the job's own among the temporary files, for this user alone. Raises OSError."""
    folder = folder_path(job, given)
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(13, "expected a folder of this user alone, got another's", str(folder))
    return folder


def write_log(folder: Path, log: RankLog) -> Path:
    """Write the file of a rank, whole or not at all. Raises OSError."""
    path = folder / log_name(log.rank)
    write_file(path, msgspec.json.format(msgspec.json.encode(log), indent=1))
    return path


def read_logs(folder: Path, damaged: list[str] | None = None) -> list[RankLog]:
    """Read the logs in ``folder``, by rank, as
    :meth:`commlayer.readers.job_files.JobFiles.read_all` does."""
    return list(_FILES.read_all(folder, damaged=damaged))


def _read(path: Path) -> RankLog:
    """Raises UsageError."""
    what = "the log of a rank"
    data = read_data(path, what)
    head = parse_record(data, _Head, path, what)
    if head.format != LOG_FORMAT:
        raise UsageError(
            f"{path}: expected a log of format {LOG_FORMAT}, got format {head.format}: read it with the commlayer that "
            "wrote it"
        )
    log = parse_record(data, RankLog, path, what)
    try:
        return as_foreign(log)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


_FILES = JobFiles(
    pattern=re.compile(r"calls-(\d+)\.json"),
    name=log_name,
    remedy="ranks write them when a call times out, or on SIGUSR1, into the folder that COMMLAYER_DIAGNOSE_DIR names; collect "
    "those of all machines",
    head=_read,
    read=_read,
    world_size=lambda log: 0,
    has_choice=False,
)

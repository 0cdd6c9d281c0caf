"""The folder of a job's logs: a file of JSON for each rank, which the rank replaces whenever it is asked again."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

import msgspec

from commlayer.diagnosis.call_logs import LOG_FORMAT, RankLog, as_foreign
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file
from commlayer.profiles.strict_json import each_sound, parse_record, read_data

__all__ = ["folder_of", "folder_path", "log_name", "read_logs", "write_log"]

_NAME = re.compile(r"calls-(\d+)\.json")


class _Head(msgspec.Struct):
    format: int
    job: str
    rank: int


def log_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"calls-{rank:05d}.json"


def folder_path(job: str, given: str | None) -> Path:
    """Return the folder of :func:`folder_of`, which may not be there yet."""
    return Path(given) if given else Path(tempfile.gettempdir()) / f"commlayer-diagnose-{os.getuid()}-{job}"


def folder_of(job: str, given: str | None) -> Path:
    """Make the folder into which the ranks of ``job`` on this machine write: ``given``, or one of the job's own among the
    temporary files, for this user alone. Raises OSError."""
    folder = folder_path(job, given)
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(13, "expected a folder of this user alone, got another's", str(folder))
    return folder


def write_log(folder: Path, log: RankLog) -> Path:
    """Write the file of a rank, whole or not at all. Raises OSError."""
    path = folder / log_name(log.rank)
    write_file(path, msgspec.json.format(msgspec.json.encode(log), indent=1))
    return path


def read_logs(folder: Path, damaged: list[str] | None = None) -> list[RankLog]:
    """Read the logs in ``folder``, by rank.

    Args:
        damaged: takes the errors of files that are not sound, where there are others that are.

    Raises:
        UsageError: a folder without logs, files of several jobs; and, unless ``damaged`` takes them, damaged files, those of
            another format, and names that do not fit: with all of them named.
    """
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    if not paths:
        raise UsageError(
            f"{folder}: expected files such as {log_name(0)}, got none: ranks write them when a call times out, or on SIGUSR1, "
            "into the folder that COMMLAYER_DIAGNOSE_DIR names; collect those of all machines"
        )
    logs = list(each_sound(paths, _read, damaged))
    jobs = {log.job for log in logs if log.job}  # whose store was gone, a rank could not read its job's name
    if len(jobs) > 1:
        each = ", ".join(f"{job} ({counted(sum(log.job == job for log in logs), 'file')})" for job in sorted(jobs))
        raise UsageError(f"{folder}: expected files of one job, got {each}: give every job a folder of its own")
    return sorted(logs, key=lambda log: log.rank)


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
    if path.name != log_name(log.rank):
        raise UsageError(
            f"{path}: expected a name that fits its content, rank {log.rank}: rename it to {log_name(log.rank)}"
        )
    try:
        return as_foreign(log)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error

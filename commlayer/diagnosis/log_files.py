"""The folder of a job's logs: a file of JSON for each rank, which the rank replaces whenever it is
asked again."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from pathlib import Path

import msgspec

from commlayer.diagnosis.call_logs import LOG_FORMAT, RankLog, as_foreign
from commlayer.diagnosis.evidence_files import named
from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import write_file
from commlayer.profiles.strict_json import parse_record, read_data
from commlayer.readers.job_files import JobFiles

__all__ = ["folder_of", "folder_path", "log_name", "parse_log", "read_logs", "write_log"]


_WHAT = "the log of a rank"
_PATTERN = re.compile(r"calls-(\d+)\.json")
_STALE_S = 7 * 24 * 3600.0
"""After so long without a new log a job's folder among the temporary files is removed."""


class _Head(msgspec.Struct):
    format: int


def log_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"calls-{rank:05d}.json"


def folder_path(job: str, given: str | None) -> Path:
    """Return the folder of :func:`folder_of`, which may not be there yet."""
    return Path(given) if given else Path(tempfile.gettempdir()) / f"{_own_prefix()}{job}"


def _own_prefix() -> str:
    """Return the beginning of the names of this user's folders among the temporary files."""
    return f"commlayer-diagnose-{os.getuid()}-"


def folder_of(job: str, given: str | None) -> Path:
    """Make the folder into which the ranks of ``job`` on this machine write: ``given``, or one of
    the job's own among the temporary files, for this user alone. Raises OSError.

    A job cannot know when its logs have been read, so they stay when it ends. Who makes a folder
    among the temporary files removes what this user's other jobs left there a week ago.
    """
    folder = folder_path(job, given)
    if given:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # another rank has made it, and cleans up; or it is somebody else's
        if not _is_own(folder.lstat()):
            raise PermissionError(13, "expected a folder of this user alone, got another's", str(folder)) from None
    else:
        _remove_stale(folder)
    return folder


def _is_own(status: os.stat_result) -> bool:
    """Whether it is of a folder, no link to one, of this user alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _remove_stale(own: Path) -> None:
    """Remove logs of this user's jobs that were written a week ago, beside the folder ``own``, and
    their folders where nothing else lies in them. Raises nothing."""
    before, folders = time.time() - _STALE_S, list[Path]()
    with contextlib.suppress(OSError):
        folders = [folder for folder in own.parent.glob(f"{_own_prefix()}*") if folder != own]
    for folder in folders:
        with contextlib.suppress(OSError):  # a rank of another job has been quicker, or other files lie there
            # By its descriptor: a link that takes the folder's place meanwhile leads nowhere.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if not _is_own(status) or status.st_mode & 0o077 or status.st_mtime >= before:
                    continue
                for name in filter(_PATTERN.fullmatch, os.listdir(descriptor)):
                    log = os.lstat(name, dir_fd=descriptor)
                    if stat.S_ISREG(log.st_mode) and log.st_mtime < before:
                        os.unlink(name, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            folder.rmdir()


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
    return parse_log(read_data(path, _WHAT), path)


def parse_log(data: bytes, path: Path) -> RankLog:
    """Read the log in ``data``, of a file ``path``, which may be in an archive. Raises
    UsageError."""
    head = parse_record(data, _Head, path, _WHAT)
    if head.format != LOG_FORMAT:
        raise UsageError(
            f"{named(path)}: expected a log of format {LOG_FORMAT}, got format {head.format}: read it with the commlayer that "
            "wrote it"
        )
    log = parse_record(data, RankLog, path, _WHAT)
    try:
        return as_foreign(log)
    except ValueError as error:
        raise UsageError(f"{named(path)}: {error}") from error


_FILES = JobFiles(
    pattern=_PATTERN,
    name=log_name,
    remedy="ranks write them when a call times out, or on SIGUSR1, into the folder that COMMLAYER_DIAGNOSE_DIR names; collect "
    "those of all machines",
    read=_read,
    world_size=lambda log: 0,
    has_choice=False,
)

"""The way out of a rank's audit: a file of its own while the job runs and when it ends, a table on
rank 0 at exit.

A rank that a signal ends runs nothing at exit, and torchrun's agent, as schedulers do, sends
SIGTERM to the ranks that are left. So the file is written anew every half a minute too, as often as
anybody scrapes it: a signal costs what came after.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec

from commlayer.auditing.audit_files import AuditedGroup, AuditedPlacement, RankAudit, write_audit
from commlayer.auditing.audit_words import AUDIT_COLUMNS, MOST_EVENTS, call_cells, event_lines, group_lines
from commlayer.auditing.job_audit import merge_audits
from commlayer.auditing.ledger import audit
from commlayer.forked_child import in_forked_child
from commlayer.profiles.printable import say, say_table, shortened
from commlayer.version import __version__

__all__ = [
    "AuditReport",
    "JobStore",
    "agreed_job",
    "audit_report",
    "close_audit_report",
    "note_job_over",
    "open_audit_report",
]

_EVERY_S = 30.0
_JOB_KEY = "commlayer/audit/job"
_LONGEST = 2000
"""Characters of a text, such as a group's description, that are kept of it."""


class JobStore(Protocol):
    """A store of the job's; torch's are such."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def agreed_job(store: JobStore) -> str:
    """The job's name for its files: that of whichever rank asks first. Waits for nobody."""
    return bytes(store.compare_set(_JOB_KEY, "", secrets.token_hex(8))).decode()


class AuditReport:
    """The audit of this rank on its way out. ``folder`` None: no file; ``is_printed``: a table at
    exit."""

    def __init__(self, *, job: str, rank: int, world_size: int, folder: Path | None, is_printed: bool) -> None:
        self.job, self.rank, self.world_size = job, rank, world_size
        self.folder, self.is_printed = folder, is_printed
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.is_over = False
        """Whether the job's default group is gone: what is written then is all there is."""
        self._complaint = ""
        if folder is not None:
            threading.Thread(target=self._keep, name="commlayer-audit", daemon=True).start()

    def _keep(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.write()

    def audit(self, *, is_final: bool) -> RankAudit:
        """The audit as it is now, as it goes into the file."""
        known = audit()
        return RankAudit(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            host=socket.gethostname(),
            pid=self.pid,
            slurm_job_id=os.environ.get("SLURM_JOB_ID", "")[:_LONGEST],
            commlayer=__version__,
            written_s=time.time(),
            is_final=is_final,
            groups=tuple(msgspec.convert(_fitting(group), AuditedGroup) for group in known["groups"]),
            placements=tuple(msgspec.convert(_fitting(each), AuditedPlacement) for each in known["placements"]),
        )

    def write(self, *, is_final: bool = False) -> None:
        """Write the rank's file. What cannot be written is said once: the job's results are worth
        more."""
        if self.folder is None or os.getpid() != self.pid:
            return
        with self._lock:
            if self._ended.is_set() and not is_final:
                return
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_audit(self.folder, self.audit(is_final=is_final or self.is_over))
            except (OSError, ValueError) as error:
                complaint = f"rank {self.rank}: the audit cannot be written to {self.folder}: {error}"
                if not self._complaint:
                    say(complaint)
                self._complaint = complaint

    def close(self) -> None:
        """Write for the last time, and print. Again, or in a forked child: nothing."""
        if os.getpid() != self.pid or self._ended.is_set():
            return
        self._ended.set()
        self.write(is_final=True)
        if self.is_printed and self.rank == 0:
            print_audit(self.audit(is_final=True))


def print_audit(found: RankAudit) -> None:
    """Write one rank's audit as a table to stderr; nothing where nothing was audited."""
    groups = merge_audits([found]).groups
    if not groups:
        return
    say_table(
        f"commlayer, what calls were promised to take and took on rank {found.rank}",
        AUDIT_COLUMNS,
        [call_cells(group, calls) for group in groups for calls in group.calls],
        [
            f"{group.name}: {line}"
            for group in groups
            for line in (*group_lines(group), *event_lines(group, MOST_EVENTS))
        ],
    )


def _fitting(group: object) -> object:
    """Plain data whose texts are as long as the file's schema allows."""
    if isinstance(group, str):
        return shortened(group, _LONGEST)
    if isinstance(group, dict):
        return {key: _fitting(value) for key, value in group.items()}
    return [_fitting(each) for each in group] if isinstance(group, list) else group


_report: AuditReport | None = None


def audit_report() -> AuditReport | None:
    """The open report of this process, or None."""
    return _report


def open_audit_report(*, job: str, rank: int, world_size: int, folder: str | None, is_printed: bool) -> None:
    """Have this rank's audit written to ``folder`` from now on, and written and printed when the
    interpreter ends.

    One that is open already, of an earlier job of this process, ends without a file of its own:
    what it knows is in this one.
    """
    global _report
    if _report is not None:
        _report._ended.set()
    else:
        atexit.register(close_audit_report)
    path = Path(folder) if folder else None
    _report = AuditReport(job=job, rank=rank, world_size=world_size, folder=path, is_printed=is_printed)


def note_job_over() -> None:
    """Write now: the default group is gone, and some programs end without running what is
    registered at exit, as children that multiprocessing forks do."""
    if _report is not None:
        _report.is_over = True
        _report.write()


def close_audit_report() -> None:
    """Write and print for the last time; nothing where no report is open."""
    global _report
    closing, _report = _report, None
    atexit.unregister(close_audit_report)
    if closing is not None:
        closing.close()


@in_forked_child
def _in_child() -> None:
    """A forked child's calls are its own, and its parent writes what it has counted before."""
    global _report
    _report = None
    atexit.unregister(close_audit_report)

"""One call for launchers: from the files that a job's ranks have left to what is wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path

import msgspec

from commlayer.diagnosis.diagnosis_words import ranks_words
from commlayer.diagnosis.evidence import Evidence, Judged, gather_evidence
from commlayer.diagnosis.evidence_files import archive_kind, files_in
from commlayer.diagnosis.findings import Diagnosis
from commlayer.diagnosis.program_stacks import has_stacks
from commlayer.diagnosis.ras_output import is_ras_json, is_ras_text
from commlayer.diagnosis.recorder_dumps import begins_as_dump
from commlayer.diagnosis.watchdog_lines import has_watchdog_lines
from commlayer.profiles.errors import UsageError

__all__ = ["LOGS", "await_files", "explain", "has_other_evidence", "judged_in_time"]

LOGS = "calls-*.json"
"""The names of the files in which ranks write what they remember."""
SETTLED_S = 15.0
"""Files that have not changed for so long are taken to be complete."""
_LOOK_S = 0.5
_HEAD = 4096
_END = 1 << 16
"""Bytes at the end of a text in which marks of a job that hangs are looked for."""


def explain(paths: str | PathLike[str] | Iterable[str | PathLike[str]], damaged: list[str] | None = None) -> Diagnosis:
    """Say who waits for whom in a job that hangs, and why.

    Its ``cause`` is one sentence, or None where nothing is wrong; ``in_words`` says all of it, and
    ``msgspec.json.encode`` writes it as JSON. torch is not needed.

    Args:
        paths: a file, a folder or an archive, or several: of one job, of any kind that is read, in
            folders at any depth.
        damaged: takes the errors of files that are not sound, where there are others that are.

    Raises:
        UsageError: nothing to read, or, unless ``damaged`` takes them, files that are damaged or
            contradict others.
    """
    places = [Path(path) for path in ([paths] if isinstance(paths, (str, PathLike)) else paths)]
    errors: list[str] = []
    evidence = gather_evidence(places, errors)
    evidence.check_not_empty(places, errors)
    evidence.read_dumps(errors)
    evidence.check_not_empty(places, errors)
    if errors and damaged is None:
        raise UsageError("\n".join(errors))
    if damaged is not None:
        damaged += errors
    results = judged_in_time(evidence)
    if len(results) > 1:
        raise UsageError(f"expected the files of one job, got those of {', '.join(list(results)[:4])}")
    ((_, diagnosis),) = results.values()
    return diagnosis


def judged_in_time(evidence: Evidence) -> Judged:
    """Find what is wrong, as :meth:`Evidence.judged`, and say which dumps have no time: of no call in
    them it can be told that it is overdue."""
    undated = [dump.rank for dump in evidence.dumps if not dump.has_time]
    results = evidence.judged()
    if not undated or evidence.logs:
        return results
    sentence = (
        f"cannot tell how long {ranks_words(sorted(undated))} had been waiting: the archive does not "
        "say when dumps were written (zip's local time is not enough): pack them as tar, or give the "
        "files"
    )
    return {
        name: (logs, msgspec.structs.replace(diagnosis, open=(*diagnosis.open, sentence)))
        for name, (logs, diagnosis) in results.items()
    }


def await_files(paths: Sequence[Path], timeout_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Wait until files that tell of a hang are in ``paths`` and have not changed for ``SETTLED_S``
    seconds; at most ``timeout_s`` seconds. False: there are none."""
    until = clock() + timeout_s
    before, since = _sizes(paths), clock()
    while clock() < until:
        time.sleep(_LOOK_S)
        now = _sizes(paths)
        if now != before:
            before, since = now, clock()
        elif now and clock() - since >= SETTLED_S:
            break
    return bool(before)


def has_other_evidence(paths: Sequence[Path]) -> bool:
    """Tell whether files among ``paths`` tell of a hang beside those named as ``LOGS``."""
    return any(not path.match(LOGS) for path, *_ in _sizes(paths))


def _sizes(paths: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """The files that tell of a hang, each with its size and when it was last changed; of a text,
    which a job goes on writing, without."""
    sizes = []
    for file in files_in(paths):
        with contextlib.suppress(OSError):  # renamed or removed since
            status = file.stat()
            kind = _kind(file, status.st_size, status.st_mtime_ns) if file.is_file() else ""
            if kind == "text":
                sizes.append((file, 0, 0))
            elif kind:
                sizes.append((file, status.st_size, status.st_mtime_ns))
    return sizes


@lru_cache(maxsize=1 << 16)
def _kind(path: Path, size: int, changed_ns: int) -> str:
    """``data`` or ``text`` for a file that tells of a hang, empty for another one. Raises OSError.

    ``size``, ``changed_ns``: a file is looked into again when it has changed.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
        is_data = path.match(LOGS) or begins_as_dump(head, path.name) or is_ras_json(head.lstrip())
        if is_data or archive_kind(head):
            return "data"
        file.seek(max(size - _END, 0))
        end = file.read(_END)
    tells = has_watchdog_lines(end) or has_stacks(end) or is_ras_text(end)
    return "text" if tells and b"\0" not in head else ""

"""One call for launchers: from the files that a job's ranks have left to what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path

from commlayer.diagnosis.evidence import gather_evidence
from commlayer.diagnosis.evidence_files import files_in
from commlayer.diagnosis.findings import Diagnosis
from commlayer.profiles.errors import UsageError

__all__ = ["LOGS", "await_files", "explain"]

LOGS = "calls-*.json"
"""The names of the files in which ranks write what they remember."""
SETTLED_S = 5.0
"""Files that have not changed for so long are taken to be complete."""
_LOOK_S = 0.5


def explain(paths: Iterable[str | PathLike[str]], damaged: list[str] | None = None) -> Diagnosis:
    """Say who waits for whom in a job that hangs, and why.

    Its ``cause`` is one sentence, or None where nothing is wrong; ``in_words`` says all of it, and
    ``msgspec.json.encode`` writes it as JSON. torch is not needed.

    Args:
        paths: files of one job of any kind that is read, folders with them at any depth, or archives.
        damaged: takes the errors of files that are not sound, where there are others that are.

    Raises:
        UsageError: nothing to read, two dumps of one rank, or, unless ``damaged`` takes them, files that
            are damaged.
    """
    places = [Path(path) for path in paths]
    errors: list[str] = []
    evidence = gather_evidence(places, errors)
    evidence.check_not_empty(places, errors)
    evidence.read_dumps(errors)
    if errors and damaged is None:
        raise UsageError("\n".join(errors))
    if damaged is not None:
        damaged += errors
    results = evidence.judged()
    if len(results) > 1:
        raise UsageError(f"expected the files of one job, got those of {', '.join(list(results)[:4])}")
    ((_, diagnosis),) = results.values()
    return diagnosis


def await_files(paths: Sequence[Path], timeout_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Wait until files are in ``paths`` and have not changed for ``SETTLED_S`` seconds; at
    most ``timeout_s`` seconds. False: none are there, or they are still written."""
    until = clock() + timeout_s
    before, since = _sizes(paths), clock()
    while clock() < until:
        time.sleep(_LOOK_S)
        now = _sizes(paths)
        if now != before:
            before, since = now, clock()
        elif now and clock() - since >= SETTLED_S:
            return True
    return False


def _sizes(paths: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """The files there, each with its size and when it was last changed."""
    sizes = []
    for file in files_in(paths):
        try:
            status = file.stat()
        except OSError:  # renamed or removed since
            continue
        sizes.append((file, status.st_size, status.st_mtime_ns))
    return sizes

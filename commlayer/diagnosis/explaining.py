"""One call for launchers: from the files that a job's ranks have left to what is wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path

from commlayer.diagnosis.evidence import gather_evidence
from commlayer.diagnosis.evidence_files import archive_kind, files_in
from commlayer.diagnosis.findings import Diagnosis
from commlayer.diagnosis.program_stacks import has_stacks
from commlayer.diagnosis.ras_output import is_ras_json, is_ras_text
from commlayer.diagnosis.recorder_dumps import begins_as_dump
from commlayer.diagnosis.watchdog_lines import has_watchdog_lines
from commlayer.profiles.errors import UsageError

__all__ = ["LOGS", "Watch", "explain", "has_other_evidence"]

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
    evidence.read_dumps(errors)
    evidence.check_not_empty(places, errors)
    if errors and damaged is None:
        raise UsageError("\n".join(errors))
    if damaged is not None:
        damaged += errors
    results = evidence.judged()
    if len(results) > 1:
        raise UsageError(f"expected the files of one job, got those of {', '.join(list(results)[:4])}")
    ((_, diagnosis),) = results.values()
    return diagnosis


def has_other_evidence(paths: Sequence[Path]) -> bool:
    """Tell whether files among ``paths`` tell of a hang beside those named as ``LOGS``."""
    return any(not path.match(LOGS) for path, _ in _telling(_stamps(paths), {}))


_Stamps = dict[Path, tuple[int, int]]
"""The size of each file, and when it was last changed."""


class Watch:
    """The files that come to ``paths`` or change there from now on. Those of before that stay as
    they are, are left out: ``num_before`` that tell of a hang."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._at_first = self._now = _stamps(paths)
        self._taken = dict(self._now)
        self.num_before = sum(1 for _ in _telling(self._now, {}))

    def each(self, timeout_s: float) -> Iterator[list[Path]]:
        """Yield what to diagnose each time that files that tell of a hang have come or changed, and
        then have not changed for ``SETTLED_S`` seconds.

        After ``timeout_s`` seconds, or Ctrl-C, what still changes is yielded too.
        """
        until = time.monotonic() + timeout_s
        latest, since = self.look(), time.monotonic()
        try:
            while time.monotonic() < until:
                time.sleep(_LOOK_S)
                now = self.look()
                if now != latest:
                    latest, since = now, time.monotonic()
                elif now and time.monotonic() - since >= SETTLED_S:
                    yield self.taken()
                    latest = {}
        except KeyboardInterrupt:
            pass
        if latest:
            yield self.taken()

    def look(self) -> _Stamps:
        """Find the files that have come to tell of a hang since :meth:`taken`, with their stamps;
        those of texts, which a job goes on writing, as (0, 0)."""
        self._now = _stamps(self.paths)
        for file, (size, _) in self._now.items():
            if size < self._taken.get(file, (0, 0))[0]:  # written anew
                del self._taken[file]
        changed = {file: stamp for file, stamp in self._now.items() if stamp != self._taken.get(file)}
        return {file: changed[file] if kind == "data" else (0, 0) for file, kind in _telling(changed, self._taken)}

    def taken(self) -> list[Path]:
        """List what to diagnose: the paths, or where files of before are left out, all other
        files."""
        self._taken = dict(self._now)
        before = {file: stamp for file, stamp in self._at_first.items() if self._now.get(file) == stamp}
        if any(_telling(before, {})):
            return [file for file in self._now if file not in before]
        return [path for path in self.paths if path.exists()]


def _stamps(paths: Sequence[Path]) -> _Stamps:
    stamps = {}
    for file in files_in(paths):
        with contextlib.suppress(OSError):  # renamed or removed since
            if file.is_file():
                status = file.stat()
                stamps[file] = status.st_size, status.st_ctime_ns  # a copy may keep its old mtime
    return stamps


def _telling(stamps: _Stamps, known: _Stamps) -> Iterator[tuple[Path, str]]:
    """Yield the files that tell of a hang, with what they are. ``known``: of texts, what is new
    since then."""
    for file, (size, changed_ns) in stamps.items():
        with contextlib.suppress(OSError):
            if kind := _kind(file, size, changed_ns, known.get(file, (0, 0))[0]):
                yield file, kind


@lru_cache(maxsize=1 << 16)
def _kind(path: Path, size: int, changed_ns: int, since: int) -> str:
    """``data`` or ``text`` for a file that tells of a hang, empty for another one. Raises OSError.

    ``size``, ``changed_ns``: a file is looked into again when it has changed; ``since``: the place
    from which on a text is.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
        is_data = path.match(LOGS) or begins_as_dump(head, path.name) or is_ras_json(head.lstrip())
        if is_data or archive_kind(head):
            return "data"
        file.seek(max(size - _END, since))
        end = file.read(_END)
    tells = has_watchdog_lines(end) or has_stacks(end) or is_ras_text(end)
    return "text" if tells and b"\0" not in head else ""

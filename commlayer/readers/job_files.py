"""The files that the ranks of a job write into one folder, a file each: found by their names, read,
and held against each other.

Audits, traces and logs of calls are such files. A damaged one hides no other, and those of two jobs
are never mixed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError
from commlayer.profiles.strict_json import each_sound

__all__ = ["JobFiles", "OfJob", "OfRank"]


class OfJob(Protocol):
    """A file, or its head: whose it is. ``job``: "" where the rank could not find out its job's
    name."""

    @property
    def job(self) -> str: ...


class OfRank(OfJob, Protocol):
    """A whole file. ``rank``: that has written it."""

    @property
    def rank(self) -> int: ...


_File = TypeVar("_File", bound=OfRank)


@dataclass(frozen=True)
class JobFiles(Generic[_File]):
    """One kind of such files.

    Attributes:
        pattern: of their names: the rank, and perhaps the number of the job among those of its
            process.
        name: the name of a file, by these numbers.
        remedy: how to get files of this kind; ``{folder}`` is where they are looked for.
        read: reads all of a file.
        head: reads whose a file is; None: whoever wants to know that reads all of it.
        world_size: how many ranks a file's job has; 0: it does not say.
        has_choice: whether commands that read them take ``--job``.
    """

    pattern: re.Pattern[str]
    name: Callable[..., str]
    remedy: str
    read: Callable[[Path], _File]
    world_size: Callable[[Any], int]
    head: Callable[[Path], OfJob] | None = None
    has_choice: bool = True

    def paths(self, folder: Path) -> list[Path]:
        """List the files in ``folder``, by rank, first those of the first job. Raises UsageError
        where there are none."""
        matches = {path: self.pattern.fullmatch(path.name) for path in folder.iterdir()}
        numbers = {path: _numbers(match)[::-1] for path, match in matches.items() if match}
        if not numbers:
            remedy = self.remedy.format(folder=folder)
            raise UsageError(f"{folder}: expected files such as {self.name(0)}, got none: {remedy}")
        return sorted(numbers, key=numbers.__getitem__)

    def read_all(self, folder: Path, job: str = "", damaged: list[str] | None = None) -> Iterator[_File]:
        """Read the files of one job, one after the other, in the order of :meth:`paths`.

        Args:
            job: only the files of the job whose name begins so.
            damaged: takes the errors of files that are not sound, where there are others that are;
                at the end.

        Raises:
            UsageError: no file there, a damaged one that ``damaged`` does not take, files of
                different jobs or none of ``job``, a rank's file twice.
        """
        paths: dict[int, Path] = {}
        known: tuple[str, int] | None = None
        for path, file in each_sound(self.paths(folder), lambda path: (path, self._checked(path, job)), damaged):
            if file is None:
                continue
            if file.job or known is None:
                whose = file.job, self.world_size(file)
                if known is not None and known[0] == whose[0] and whose != known:
                    raise UsageError(
                        f"{path}: field world_size: expected {known[1]}, as the other files of job {known[0]} say, got "
                        f"{whose[1]}: give every job a folder of its own"
                    )
                if known is not None and known[0] and whose != known:
                    choice = f"choose one with --job {known[0]}, or " if self.has_choice else ""
                    raise UsageError(
                        f"{folder}: expected files of one job, got {self._jobs(folder, job)}: {choice}give every job a folder "
                        "of its own"
                    )
                known = whose
            if file.rank in paths:
                raise UsageError(
                    f"{folder}: expected one file of rank {file.rank} of job {file.job}, got {paths[file.rank].name} and "
                    f"{path.name}: remove one"
                )
            paths[file.rank] = path
            yield file
        if known is None:
            raise UsageError(f"{folder}: expected files of job {job}, got {self._jobs(folder)}")

    def _checked(self, path: Path, job: str) -> _File | None:
        """The file at ``path``; None where it is of a job whose name does not begin so."""
        if job and self.head is not None and not self.head(path).job.startswith(job):
            return None
        file, match = self.read(path), self.pattern.fullmatch(path.name)
        if not file.job.startswith(job):
            return None
        assert match is not None  # of the files that were listed
        name = self.name(file.rank, *_numbers(match)[1:])
        if path.name != name:
            raise UsageError(f"{path}: expected a name that fits its content, rank {file.rank}: rename it to {name}")
        return file

    def _jobs(self, folder: Path, job: str = "") -> str:
        """The jobs of the files in ``folder`` whose names begin so, in words."""
        jobs: dict[tuple[str, int], list[str]] = {}
        for path in self.paths(folder):
            with contextlib.suppress(UsageError):
                head = (self.head or self.read)(path)
                if head.job and head.job.startswith(job):
                    jobs.setdefault((head.job, self.world_size(head)), []).append(path.name)
        parts = []
        for (name, size), names in sorted(jobs.items()):
            count = f"{len(names)} of {size} ranks" if size else counted(len(names), "file")
            parts.append(f"job {name} ({count}, such as {names[0]})")
        return " and ".join(parts)


def _numbers(match: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(number or 1) for number in match.groups())

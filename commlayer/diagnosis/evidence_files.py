"""The files that a job left, in folders and archives, as bytes: nothing is written to a disk, and
everything has a bound.

An archive (tar, zip, gz, and one of these within another) can hold more than a machine has. Its
members are taken one after the other, up to ``_MOST_UNPACKED`` bytes of all and ``_MOST_MEMBERS``;
links, devices and files with holes are left out.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from commlayer.profiles.errors import UsageError
from commlayer.profiles.files import read_file
from commlayer.profiles.printable import printable, shortened

__all__ = ["MOST_FILE_BYTES", "EvidenceFile", "archive_kind", "each_file", "files_in", "named"]

MOST_FILE_BYTES = 1 << 28
"""The largest file that is read. Of a larger text its last bytes are, where a job's end is."""
_MOST_UNPACKED = 1 << 33
_MOST_MEMBERS = 200_000
_MOST_HEADERS = 1 << 22
"""Bytes of an archive between two members: long names and comments."""
_MOST_NESTED = 3
_MOST_SECONDS = 1 << 33
"""The last time of a file that is believed, in the year 2242."""
_ZIP_TIME = 0x5455
"""The field of a zip's member that has its time in seconds since 1970, as unzip and zip write
it."""
_HEAD = 4096
_DAMAGED = (
    ArithmeticError,
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    RuntimeError,
    MemoryError,
)
"""The errors of archives that are damaged, encrypted or hostile."""


@dataclass(frozen=True)
class EvidenceFile:
    """A file. ``name``: where it is, also within an archive; ``path``: of one that is in none;
    ``head``: its first bytes; ``written_ns``: when it was written, 0: not known."""

    name: str
    path: Path | None
    head: bytes
    written_ns: int
    content: Callable[[], bytes] = field(repr=False)
    """Reads all of it; raises UsageError."""


def named(path: Path | str) -> str:
    """Return the name of a file as messages have it: short, and in one line."""
    return shortened(printable(str(path), keep=""))


def each_file(paths: Iterable[Path], damaged: list[str], advance: Callable[[str], None]) -> Iterator[EvidenceFile]:
    """Yield the files among ``paths``, and in folders and archives among them, at any depth.

    ``damaged`` takes what is wrong with those that cannot be read; ``advance`` is called with the
    name of each when it is done.
    """
    for path in files_in(paths):
        name = named(path)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{name}: expected a file or a folder, got something else")
            with path.open("rb") as file:
                head = file.read(_HEAD)
                if archive_kind(head) is not None:
                    yield from _Unpacked(name, damaged).members(name, file, head, status.st_mtime_ns)
            if archive_kind(head) is None:
                yield EvidenceFile(name, path, head, status.st_mtime_ns, partial(_end_of, path))
        except UsageError as error:
            damaged.append(str(error))
        except OSError as error:
            damaged.append(f"{name}: cannot read: {error.strerror or error}")
        advance(path.name)


def files_in(paths: Iterable[Path]) -> list[Path]:
    """List the files among ``paths``, and in folders among them, at any depth, each once; an
    archive is one."""
    files: dict[object, Path] = {}
    for path in paths:
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            with contextlib.suppress(OSError):  # in a folder that may not be looked into
                if each == path or each.is_file():
                    files.setdefault(_identity(each), each)
    return list(files.values())


def _identity(path: Path) -> object:
    """The same for all names of a file; the path of one that cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return path
    return status.st_dev, status.st_ino


def _end_of(path: Path) -> bytes:
    """The last ``MOST_FILE_BYTES`` of a file, from the start of a line on where it is larger."""
    try:
        if path.stat().st_size <= MOST_FILE_BYTES:
            return read_file(path, MOST_FILE_BYTES)
        with path.open("rb") as file:
            file.seek(-MOST_FILE_BYTES, io.SEEK_END)
            return file.read(MOST_FILE_BYTES).partition(b"\n")[2]
    except OSError as error:
        raise UsageError(f"{named(path)}: cannot read: {error.strerror or error}") from error


# Archives


def archive_kind(head: bytes) -> str | None:
    """The kind of archive that a file begins as; None: it is none."""
    if head[:3] == b"\x1f\x8b\x08":
        return "gz"
    if head[:4] == b"PK\x03\x04":
        return "zip"
    return "tar" if head[257:262] == b"ustar" else None


class _Bounded(io.RawIOBase):
    """A stream that may be read for so many bytes more: ``left``."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self.stream, self.left = stream, _MOST_HEADERS

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise OSError("expected members of an archive, got more bytes between them than any has")
        return data


class _Unpacked:
    """The members that have been taken out of one archive so far, and of those within it."""

    def __init__(self, archive: str, damaged: list[str]) -> None:
        self.archive, self.damaged, self.num_bytes, self.num_members = archive, damaged, 0, 0

    def members(
        self, name: str, file: IO[bytes], head: bytes, written_ns: int, depth: int = 0
    ) -> Iterator[EvidenceFile]:
        """Yield the files in an archive. Raises UsageError, which names it, for a damaged one,
        after those before the damage."""
        file.seek(0)
        where = name if name.startswith(self.archive) else self.archive
        if depth >= _MOST_NESTED:
            raise UsageError(f"{where}: expected archives in archives {_MOST_NESTED} deep at most")
        kinds = {"gz": self._in_gz, "zip": self._in_zip, "tar": self._in_tar}
        members = kinds[archive_kind(head) or ""](name, file, written_ns)
        while True:
            try:
                member = next(members, None)
            except _DAMAGED as error:
                raise UsageError(_damage(where, error)) from error
            if member is None:
                return
            if archive_kind(member.head) is None:
                yield member
            else:
                inner = io.BytesIO(member.content())
                try:
                    yield from self.members(member.name, inner, member.head, member.written_ns, depth + 1)
                except UsageError as error:
                    self.damaged.append(str(error))

    def _count(self, num_bytes: int) -> None:
        """Count a member. Raises OSError where that is one too many, or too much."""
        self.num_bytes += num_bytes
        self.num_members += 1
        if self.num_bytes > _MOST_UNPACKED or self.num_members > _MOST_MEMBERS:
            raise OSError("it holds more than that")

    def _is_small(self, name: str, num_bytes: int) -> bool:
        """Tell whether a member may be read; one that is too large is told of."""
        if num_bytes <= MOST_FILE_BYTES:
            return True
        self.damaged.append(
            f"{self.archive}: expected members of at most {MOST_FILE_BYTES} bytes, got a larger one, "
            f"{shortened(name)}: unpack it"
        )
        return False

    def _in_gz(self, name: str, file: IO[bytes], written_ns: int) -> Iterator[EvidenceFile]:
        with gzip.GzipFile(fileobj=file) as unpacked:
            head = unpacked.peek(_HEAD)[:_HEAD]
            if archive_kind(head) == "tar":
                yield from self._in_tar(name, unpacked, written_ns)
                return
            data = unpacked.read(MOST_FILE_BYTES + 1)
        self._count(len(data))
        if self._is_small(name, len(data)):
            yield _member(name.removesuffix(".gz"), data, written_ns)

    def _in_tar(self, name: str, file: IO[bytes] | gzip.GzipFile, written_ns: int) -> Iterator[EvidenceFile]:
        stream = _Bounded(file)
        with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8") as archive:
            while True:
                member = archive.next()
                archive.members = []  # type: ignore[attr-defined]  # it would keep all, with their comments
                if member is None:
                    return
                stream.left = max(member.size, 0) + _MOST_HEADERS
                self._count(member.size)  # of those that are passed over, too
                inside = f"{name}/{printable(member.name, keep='')}"
                data = archive.extractfile(member) if member.isreg() and not member.issparse() else None
                if data is not None and self._is_small(inside, member.size):
                    yield _member(inside, data.read(), _nanoseconds(member.mtime))

    def _in_zip(self, name: str, file: IO[bytes], written_ns: int) -> Iterator[EvidenceFile]:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > _MOST_MEMBERS:
                raise OSError(f"expected at most {_MOST_MEMBERS} members, got {len(members)}")
            if members and members[0].filename.endswith("/data.pkl"):
                return  # a checkpoint of torch's
            for member in members:
                if member.is_dir() or stat.S_ISLNK(member.external_attr >> 16):
                    continue
                inside = f"{name}/{printable(member.filename, keep='')}"
                self._count(min(member.file_size, MOST_FILE_BYTES + 1))
                try:
                    with archive.open(member, "r", None) as unpacked:
                        data = unpacked.read(MOST_FILE_BYTES + 1)
                except _DAMAGED as error:  # the others can be read all the same
                    self.damaged.append(_damage(shortened(inside), error))
                    continue
                if self._is_small(inside, len(data)):
                    yield _member(inside, data, _zip_time_ns(member.extra))


def _damage(where: str, error: Exception) -> str:
    """Say what is wrong with an archive or a member of it."""
    reason = shortened(str(error) or type(error).__name__, 300)
    return (
        f"{where}: expected an archive of at most {_MOST_UNPACKED >> 30} GiB unpacked, got a damaged "
        f"one: {reason}. Copy it again, or unpack it"
    )


def _zip_time_ns(extra: bytes) -> int:
    """The time among the extra fields of a zip's member, 0: it is not among them.

    Rejected: the date that every member has, as it is local time of an unknown place.
    """
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == _ZIP_TIME and size >= 5 and len(extra) >= 9 and extra[4] & 1:
            return _nanoseconds(struct.unpack_from("<i", extra, 5)[0])
        extra = extra[4 + size :]
    return 0


def _nanoseconds(seconds: float) -> int:
    """The time in nanoseconds, 0 for one that no file has."""
    return int(seconds) * 10**9 if 0 < seconds < _MOST_SECONDS else 0


def _member(name: str, data: bytes, written_ns: int) -> EvidenceFile:
    return EvidenceFile(name, None, data[:_HEAD], written_ns, lambda: data)

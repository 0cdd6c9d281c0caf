"""Files that others may have put there, or may look at or write at the same time: read bounded, written in one step.

Only regular files are read: opening a FIFO waits for a writer who may never come, and a device may have no end. What is
written goes to a file with an unpredictable name in the same folder, which nobody else can have made, is synced, and then
takes the name: whoever looks sees the old content or the new, whole, also where several write at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO, Union

__all__ = ["MOST_BYTES", "StrPath", "name_in_files", "read_file", "replacing", "write_file"]

StrPath = Union[str, "os.PathLike[str]"]

MOST_BYTES = 64 << 20
"""The largest file that is read as a description of something; those that are shipped have 30 KB at most."""

_BEGINNING, _LARGE = 4096, 1 << 20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def name_in_files(text: str) -> str:
    """Return ``text``, such as a group's name, as a part of a file's name, without what such names cannot have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:100]


def read_file(path: StrPath, most_bytes: int = MOST_BYTES, *, begins: bytes = b"") -> bytes:
    """Return the bytes of a regular file of at most ``most_bytes``. Never waits for another process.

    ``begins``: what the first bytes of a large file must be, but for white space: one of another kind is not read whole.

    Raises:
        OSError: as ``open``; also for what is no regular file, one that is larger or begins otherwise, and a path that no file
            can have.
    """
    name = _checked(path)
    _require_regular(os.stat(name), name)  # before it is opened: that alone may set a device going
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)  # the name may mean another file by now
        _require_regular(status, name)
        if status.st_size <= most_bytes:
            data = file.read(_BEGINNING)
            if status.st_size > _LARGE and not data.lstrip().startswith(begins):
                raise OSError(errno.EINVAL, f"expected a file that begins with {begins.decode()}, got another", name)
            data += file.read(most_bytes + 1 - len(data))  # it may have grown
            if len(data) <= most_bytes:
                return data
    raise OSError(errno.EFBIG, f"expected at most {most_bytes} bytes, got a larger file", name)


def write_file(path: StrPath, content: bytes | str, *, new_only: bool = False, follow_links: bool = True) -> None:
    """Write the file in one step; text as UTF-8. Arguments and errors as :func:`replacing`."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    with replacing(path, new_only=new_only, follow_links=follow_links) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: StrPath, *, new_only: bool = False, follow_links: bool = True) -> Iterator[BinaryIO]:
    """A file to write, which takes the name ``path`` when the block ends; where the block raises, nothing has happened.

    A device, such as /dev/stdout, and a FIFO that somebody reads are written as they are.

    Args:
        new_only: the first one wins: refuse where there is a file of that name by the end of the block. (On a file system
            without hard links the last one wins.)
        follow_links: where ``path`` is a symbolic link, write what it points to; else the link itself is replaced, so that nobody
            who may write in the folder can have another file written.

    Raises:
        OSError: the file system refuses. FileExistsError: ``new_only``, and there is one.
    """
    checked = _checked(path)
    folder, last = os.path.split(checked)
    name = os.path.realpath(checked) if follow_links else os.path.join(os.path.realpath(folder), last)
    if follow_links and _is_stream(path):
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # a FIFO that nobody reads: ENXIO
        os.set_blocking(fd, True)
        with open(fd, "wb") as stream:
            yield stream
        return
    draft = os.path.join(os.path.dirname(name), f".commlayer-{os.urandom(8).hex()}.tmp")
    try:
        # The mode is what the umask, or the folder's default, makes of this. O_EXCL follows no link.
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(fd)
        _take_name(draft, name, new_only=new_only)
    except OSError as error:
        if error.filename == draft:
            error.filename, error.filename2 = name, None  # what the caller knows of
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def _take_name(draft: str, name: str, *, new_only: bool) -> None:
    if new_only:
        try:
            os.link(draft, name)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
    os.replace(draft, name)


def _checked(path: StrPath) -> str:
    """``path`` as text, without what makes the functions of ``os`` raise something else than OSError."""
    name = os.fspath(path)
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, "expected a path, got text that no file system has", name) from error
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "expected a path, got text with a NUL character", name)
    return name


def _require_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", name)


def _is_stream(path: StrPath) -> bool:
    """Whether there is something that cannot be replaced: the next one of that name would be another thing."""
    if os.fspath(path).startswith(_STREAMS):
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

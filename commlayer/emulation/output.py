"""The output of ranks, passed on line by line with the rank's name before each, and the last lines of their stderr."""

from __future__ import annotations

import os
import re
import select
import selectors
import time
from collections import deque
from collections.abc import Iterable

__all__ = ["OutputStream", "RankOutput", "drain", "error_line"]

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16
"""The longest line that is passed on whole; a longer one goes in pieces."""
_LAST_LINES = 20
_LAST_LINE_CHARACTERS = 500
_ERROR = re.compile(
    rb"(\[rank\d+\]: ?)?([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt|Timeout|Failure|Fault)(: |:?\r?$)"
)
"""The first line of an exception at the end of a traceback, before which torch puts the rank."""


def error_line(words: str) -> str:
    """The line of ``words``, the last of a program, that says what went wrong: the first line of the last exception of Python's;
    the last line where there is none. Empty where nothing was said."""
    lines = [line for line in words.splitlines() if line.strip()]
    said = [line for line in lines if _ERROR.match(line.encode(errors="replace"))]
    return (said or lines or [""])[-1]


class OutputStream:
    """One pipe from a rank: what comes out of it goes to descriptor ``target`` of this process."""

    def __init__(self, prefix: bytes, target: int) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.error_line: bytes | None = None
        """The last line that says an exception of Python's: what follows it, such as a diagnosis, may be longer than is kept."""
        self._prefix, self.target = prefix, target
        self._rest = b""
        self.is_open = True

    def take(self) -> bool:
        """Pass on what is there. False at the end, which closes the stream."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        try:
            self._pass_on(data)
        except (
            BrokenPipeError
        ):  # nobody reads our output any more: the rank shall hear of it as if it wrote there itself
            data = b""
        if not data:
            self.close()
        return bool(data)

    def follow(self, selector: selectors.BaseSelector) -> None:
        """Have ``selector`` tell, with the stream as its data, when there is something to take."""
        selector.register(self.read_fd, selectors.EVENT_READ, self)

    def take_from(self, selector: selectors.BaseSelector) -> None:
        """Pass on what ``selector`` has told of; at the end it follows the stream no more."""
        selector.unregister(self.read_fd)  # before the descriptor is closed
        if self.take():
            self.follow(selector)

    def _pass_on(self, data: bytes) -> None:
        lines = (self._rest + data).splitlines(keepends=True)  # also at carriage returns, as progress bars have them
        self._rest = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()  # a line feed may follow the return
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE_BYTES):
            lines.append(self._rest.rstrip(b"\r") + b"\n")
            self._rest = b""
        for line in lines:
            self.last_lines.append(line)
            if _ERROR.match(line):
                self.error_line = line
            _write(self.target, self._prefix + line)

    def close(self) -> None:
        """Give the reading end back. Harmless when repeated."""
        if self.is_open:
            self.is_open = False
            os.close(self.read_fd)


class RankOutput:
    """The two streams of a rank."""

    def __init__(self, name: str) -> None:
        """``name`` stands in brackets before each line."""
        prefix = f"[{name}] ".encode()
        self.streams = (OutputStream(prefix, 1), OutputStream(prefix, 2))
        self._has_writers = True

    def attach(self) -> None:
        """In the rank: make the streams its stdout and stderr. The pipes themselves end with this program (close-on-exec)."""
        for stream in self.streams:
            os.dup2(stream.write_fd, stream.target)

    def close_writers(self) -> None:
        """In the parent, once the rank is forked: without this the streams would never end. Harmless when repeated."""
        if self._has_writers:
            self._has_writers = False
            for stream in self.streams:
                os.close(stream.write_fd)

    def last_words(self) -> str:
        """The last lines on stderr, and before them that of the last exception, where it is not one of them."""
        errors = self.streams[1]
        last = list(errors.last_lines)
        if errors.error_line is not None and errors.error_line not in last:
            last.insert(0, errors.error_line)
        lines = (line.decode(errors="replace").rstrip("\r\n") for line in last)
        return "\n".join(line[:_LAST_LINE_CHARACTERS] for line in lines)

    def close(self) -> None:
        """Give all descriptors back. Harmless when repeated."""
        self.close_writers()
        for stream in self.streams:
            stream.close()


def drain(streams: Iterable[OutputStream], timeout_s: float) -> None:
    """Pass on what is left of ranks that have ended; a process that they left behind may keep a stream open."""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            if stream.is_open:
                stream.follow(selector)
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                key.data.take_from(selector)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[_written(fd, data) :]


def _written(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:  # somebody has made our terminal non-blocking
        select.select([], [fd], [])
        return 0

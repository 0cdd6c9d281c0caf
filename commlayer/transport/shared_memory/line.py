"""The socket between two ranks of one node, on which they tell each other of messages in shared memory.

A stream of lines: a head, and in some a payload. What the socket does not take at once is kept, so that nobody ever waits
for room in it; whoever polls the socket is told when there is something to flush.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum

__all__ = ["Kind", "Line", "News"]

_HEAD = struct.Struct("<B7xQQQ")
"""Kind, tag, size of the message [bytes], where it lies in the sender's slab."""
_CHUNK_BYTES = 64 << 10

News = tuple[int, int, int, memoryview | int]
"""Kind, tag, size of the message [bytes], and its payload, or where it lies in the sender's slab."""


class Kind(IntEnum):
    """What a line says."""

    INLINE = 0
    """A message, which follows."""
    SLAB = 1
    """A message, which lies in the sender's slab."""
    READ = 2
    """The message at this place of the *receiver's* slab has been read."""


class Line:
    """One end of the connection. ``queued`` counts all bytes ever put, ``flushed`` those that are on their way."""

    def __init__(self, connection: socket.socket, poll: select.epoll) -> None:
        self.socket, self._poll = connection, poll
        self._inbox = b""
        self._outbox = bytearray()
        self._is_full = False  # the socket, when last tried
        self.queued = self.flushed = 0
        poll.register(connection, select.EPOLLIN)

    def put(self, kind: Kind, tag: int, size: int, place: int, payload: memoryview | None = None) -> None:
        """Send what was kept and a line, or as much of it as the socket takes; the rest when it can."""
        self.keep(kind, tag, size, place)
        if payload is not None:
            self.queued += len(payload)
            self._outbox += payload
        if not self._is_full:
            self.flush()

    def keep(self, kind: Kind, tag: int, size: int, place: int) -> None:
        """A line that may wait for the next that is put: it need not wake up anybody."""
        self.queued += _HEAD.size
        self._outbox += _HEAD.pack(kind, tag, size, place)

    def flush(self) -> None:
        """Send what was kept. Also to be called when the socket that was full has room."""
        del self._outbox[: self._write(self._outbox)]
        is_full = bool(self._outbox)
        if is_full is not self._is_full:
            self._is_full = is_full
            self._poll.modify(self.socket, select.EPOLLIN | (select.EPOLLOUT if is_full else 0))

    def _write(self, data: bytearray) -> int:
        """How many bytes the socket took."""
        try:
            taken = self.socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            taken = len(data)  # nobody will read it; reading tells what happened, after the peer's last words
        self.flushed += taken
        return taken

    def read(self) -> Iterator[News] | None:
        """What the peer has written; None when it has closed the connection, after all that it wrote.

        A payload may be used until the next line is asked for.
        """
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(self.socket)
            return None
        return self._parsed(self._inbox + data if self._inbox else data)

    def _parsed(self, data: bytes) -> Iterator[News]:
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            kind, tag, size, place = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size + (size if kind == Kind.INLINE else 0)
            if stop > end:
                break
            yield kind, tag, size, memoryview(data)[stop - size : stop] if kind == Kind.INLINE else place
            at = stop
        self._inbox = data[at:]

    def shutdown(self) -> None:
        """End the connection in both directions; the peer and whoever polls here wake up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

"""The socket between two ranks of one node, on which they tell each other of messages in shared memory.

A stream of lines: a head, and in some a payload. What the socket does not take at once is kept, so that nobody ever waits
for room in it; whoever polls the socket is told when there is something to flush.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from enum import IntEnum

__all__ = ["Kind", "Line", "News"]

_HEAD = struct.Struct("<B3xIQQQ")
"""Kind, mark of the call, tag, size of the message [bytes], where it lies in the sender's slab."""
_CHUNK_BYTES = 64 << 10

News = tuple[int, int, int, int, memoryview | int]
"""Kind, mark of the call, tag, size of the message [bytes], and its payload, or where it lies in the sender's slab."""


class Kind(IntEnum):
    """The kinds of lines."""

    INLINE = 0
    """A message, which follows."""
    SLAB = 1
    """A message, which lies in the sender's slab."""
    READ = 2
    """The message at this place of the *receiver's* slab has been read."""


_INLINE = int(Kind.INLINE)  # an enumeration's member is compared in Python
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)


class Line:
    """One end of the connection. ``queued`` counts all bytes ever put, ``flushed`` those that are on their way."""

    def __init__(self, connection: socket.socket, poll: select.epoll) -> None:
        self.socket, self._poll = connection, poll
        self._inbox = b""
        self._outbox = bytearray()
        self.is_full = False
        """Whether the socket took no more when last tried."""
        self.queued = self.flushed = 0
        poll.register(connection, select.EPOLLIN)

    def put(self, kind: int, mark: int, tag: int, size: int, place: int) -> None:
        """Send what was kept and a line, or as much of it as the socket takes; the rest when it can."""
        self.keep(kind, mark, tag, size, place)
        if not self.is_full:
            self.flush()

    def keep(self, kind: int, mark: int, tag: int, size: int, place: int, payload: memoryview | None = None) -> None:
        """A line that waits for :meth:`flush`, or for the next that is put: it need not wake up anybody by itself."""
        self.queued += _HEAD.size
        self._outbox += _HEAD.pack(kind, mark, tag, size, place)
        if payload is not None:
            self.queued += size
            self._outbox += payload

    def flush(self) -> None:
        """Send what was kept. Also to be called when the socket that was full has room."""
        try:
            taken = self.socket.send(self._outbox, _SEND_FLAGS)
        except BlockingIOError:
            taken = 0
        except OSError:
            taken = len(self._outbox)  # nobody will read it; reading tells what happened, after the peer's last words
        self.flushed += taken
        del self._outbox[:taken]
        is_full = bool(self._outbox)
        if is_full is not self.is_full:
            self.is_full = is_full
            self._poll.modify(self.socket, select.EPOLLIN | (select.EPOLLOUT if is_full else 0))

    def read(self) -> list[News] | None:
        """Read what the peer has written; None when it has closed the connection, after all that it wrote."""
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(self.socket)
            return None
        if self._inbox:
            data = self._inbox + data
        found: list[News] = []
        at, end, inbox = 0, len(data), memoryview(data)
        while end - at >= _HEAD.size:
            kind, mark, tag, size, place = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size
            if kind == _INLINE:
                stop += size
                if stop > end:
                    break
                place = inbox[stop - size : stop]
            found.append((kind, mark, tag, size, place))
            at = stop
        self._inbox = data[at:]
        return found

    def shutdown(self) -> None:
        """End the connection in both directions; the peer and whoever polls here wake up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

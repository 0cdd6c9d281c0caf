"""The other ranks of a node: the socket to each, what is expected from it, and handles to wait for
messages.

On the socket two ranks tell each other of messages in shared memory (see shared_messages.py): a
stream of lines, each a head, and in some a payload. What the socket does not take at once is kept,
so that nobody ever waits for room in it; whoever polls the socket is told when there is something
to flush.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from commlayer.transport.call_memory import CallMemory
from commlayer.transport.shared_memory.slabs import Block, Slab

__all__ = [
    "AHEAD_BYTES",
    "INLINE",
    "READ",
    "SENT",
    "SLAB",
    "Arrival",
    "Expected",
    "News",
    "OtherWork",
    "Peer",
    "Receive",
    "Send",
    "Server",
    "Waitable",
    "head",
]

AHEAD_BYTES = 16 << 20
"""Bytes that a rank may have sent without any receiver having read it before its sends wait."""

INLINE = 0
"""The kind of a line with a message, which follows."""
SLAB = 1
"""The kind of a line with a message, which lies in the sender's slab."""
READ = 2
"""The kind of a line that says: the message at this place of the *receiver's* slab has been
read."""

News = tuple[int, int, int, int, memoryview | int]
"""Kind, mark of the call, tag, size of the message [bytes], and its payload, or where it lies in
the sender's slab."""
Expected = tuple["Receive", CallMemory, int, int]
"""A message that is to come, and the bytes of which memory it goes to, from where to where."""
Arrival = tuple[int, int, bytes | int]
"""A message that nobody expects yet: its call's mark, its size [bytes], and its payload, or where
that lies in the sender's slab."""

_HEAD = struct.Struct("<B3xIQQQ")
head = _HEAD.pack
"""The head of a line: kind, mark of the call, tag, size of the message [bytes], where it lies in
the sender's slab."""
_CHUNK_BYTES = 64 << 10
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)


class Peer:
    """Another rank of this node.

    Attributes:
        rank: its number in the group.
        slab: its local rank.
        socket: the connection to it.
        outbox: lines that wait for :meth:`flush`: whoever has something to say adds to them.
        full: the ranks of the node whose sockets took no more when last tried, this one perhaps.
        flushed: bytes that are on their way.
        posted: messages that are expected from it, by tag.
        arrived: messages that have come before anybody expected them, by tag.
        ended: why nothing more comes; None: it may.
        unsaid_bytes: bytes that this rank has read of its slab without having told it.
    """

    __slots__ = (
        "_inbox",
        "_poll",
        "arrived",
        "ended",
        "flushed",
        "full",
        "outbox",
        "posted",
        "rank",
        "slab",
        "socket",
        "unsaid_bytes",
    )

    def __init__(self, rank: int, slab: int, connection: socket.socket, poll: select.epoll, full: set[int]) -> None:
        self.rank, self.slab = rank, slab
        self.socket, self._poll = connection, poll
        self._inbox = b""
        self.outbox = bytearray()
        self.full = full
        self.flushed = 0
        self.posted: dict[int, deque[Expected]] = {}
        self.arrived: dict[int, deque[Arrival]] = {}
        self.ended: str | None = None
        self.unsaid_bytes = 0
        poll.register(connection, select.EPOLLIN)

    def flush(self) -> None:
        """Send what was kept, or as much of it as the socket takes; the rest when it has room
        again."""
        try:
            num_bytes = self.socket.send(self.outbox, _SEND_FLAGS)
        except BlockingIOError:
            num_bytes = 0
        except OSError:
            num_bytes = len(
                self.outbox
            )  # nobody will read it; reading tells what happened, after the peer's last words
        self.flushed += num_bytes
        del self.outbox[:num_bytes]
        if bool(self.outbox) is not (self.rank in self.full):
            self.full ^= {self.rank}
            self._poll.modify(self.socket, select.EPOLLIN | (select.EPOLLOUT if self.outbox else 0))

    def read(self) -> list[News]:
        """Read what the peer has written; where it has closed the connection, after all that it
        wrote, note that it ended."""
        try:
            data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._poll.unregister(self.socket)
            self.full.discard(self.rank)
            self.ended = self.ended or f"Connection closed by peer (member {self.rank} of the group, shared memory)"
            return []
        if self._inbox:
            data = self._inbox + data
        news: list[News] = []
        at, end, inbox = 0, len(data), memoryview(data)
        while end - at >= _HEAD.size:
            kind, mark, tag, size, content = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size
            if kind == INLINE:
                stop += size
                if stop > end:
                    break
                content = inbox[stop - size : stop]
            news.append((kind, mark, tag, size, content))
            at = stop
        self._inbox = data[at:]
        return news

    def shutdown(self) -> None:
        """End the connection in both directions; the peer and whoever polls here wake up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Waitable(Protocol):
    """A handle of a message: torch's Work, or something that can be waited for like one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return True when the message's tensor may be used; no timeout, or zero: the group's.

        Raises RuntimeError, with Gloo's words: "Timed out", or "closed" where the peer is gone;
        SizeMismatch.
        """


class Server(Protocol):
    """The group whose messages these are, as far as they use it: whoever waits for one serves all
    neighbours."""

    timeout_s: float

    @property
    def slab(self) -> Slab:
        """The slab that this rank writes."""

    def wait_for(self, awaited: Send | Receive, timeout_s: float) -> None:
        """Return when ``awaited`` is completed. Raises as Waitable.wait does."""

    def wait_other(self, work: dist.Work, timeout: timedelta | None) -> bool:
        """Wait for a message of the group beneath. Raises as Waitable.wait does."""


class Receive:
    """Messages to come, waited for together. ``missing``: from whom, in the order in which they
    were asked for.
    ``mark``: of their call, which those that come have alike."""

    __slots__ = ("_blamed", "_group", "error", "first", "mark", "missing")
    verb = "recv"

    def __init__(self, group: Server, mark: int = 0) -> None:
        self._group, self.mark = group, mark
        self.missing: list[Peer] = []
        self.first: Peer | None = None
        """The rank from whom the first one comes, or has come."""
        self.error: RuntimeError | None = None
        """Why one of them ended without a message that fits."""
        self._blamed: Peer | None = None

    def fail(self, peer: Peer, error: RuntimeError) -> None:
        """Note that what came from ``peer`` cannot be taken."""
        self.error, self._blamed = error, peer

    @property
    def blamed(self) -> int:
        """The member, by its rank in the group, whom a wait that broke was waiting for."""
        peer = self._blamed or (self.missing[0] if self.missing else self.first)
        assert peer is not None  # a wait is for one message at least
        return peer.rank

    @property
    def peer(self) -> Peer:
        """The next rank from whom one is missing."""
        return self.missing[0]

    def is_completed(self) -> bool:
        return not self.missing or self.error is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_for(self, timeout.total_seconds() if timeout else self._group.timeout_s)
        return True


class Send:
    """A message under way. ``block`` None: it is in the line, as a whole."""

    __slots__ = ("_block", "_end", "_group", "peer")
    verb, error = "send", None

    def __init__(self, group: Server, peer: Peer, block: Block | None) -> None:
        self._group, self.peer, self._block = group, peer, block
        self._end = peer.flushed + len(peer.outbox)

    def is_completed(self) -> bool:
        if self._block is not None and self.peer.rank not in self._block.readers:
            return True
        if self.peer.flushed < self._end:
            return False
        return self._block is None or self._group.slab.unread_bytes <= AHEAD_BYTES

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_for(self, timeout.total_seconds() if timeout else self._group.timeout_s)
        return True


class _Sent:
    """A message of which nothing is left to be waited for."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


SENT = _Sent()
"""The handle of a send that took its tensor, and whose line is on its way."""


class OtherWork:
    """A message of the Gloo group beneath."""

    __slots__ = ("_group", "inner")

    def __init__(self, group: Server, work: dist.Work) -> None:
        self._group, self.inner = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._group.wait_other(self.inner, timeout)

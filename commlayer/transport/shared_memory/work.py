"""Messages under way between the ranks of one node: peers, their messages, and handles to wait for (see shared_messages.py)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from commlayer.transport.contract import CallMemory
from commlayer.transport.shared_memory.slabs import Block
from commlayer.transport.shared_memory.socket_line import Line

__all__ = [
    "AHEAD_BYTES",
    "SENT",
    "Arrival",
    "Expected",
    "OtherWork",
    "Peer",
    "Receive",
    "Send",
    "Server",
    "Waitable",
]

AHEAD_BYTES = 16 << 20
"""Bytes that a rank may have sent without any receiver having read it before its sends wait."""


class Waitable(Protocol):
    """A handle of a message: torch's Work, or something that can be waited for like one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return True when the message's tensor may be used; no timeout, or zero: the group's.

        Raises RuntimeError, with Gloo's words: "Timed out", or "closed" where the peer is gone; SizeMismatch.
        """


Expected = tuple["Receive", CallMemory, int, int]
"""A message that is to come, and the bytes of which memory it goes to, from where to where."""
Arrival = tuple[int, int, bytes | int]
"""A message that nobody expects yet: its call's mark, its size [bytes], and its payload, or where that lies in the sender's slab.
"""


@dataclass(eq=False, slots=True)
class Peer:
    """Another rank of this node. ``rank``: in the group; ``slab``: its local rank. ``ended`` says why nothing more comes."""

    rank: int
    slab: int
    line: Line
    posted: dict[int, deque[Expected]] = field(default_factory=dict)
    arrived: dict[int, deque[Arrival]] = field(default_factory=dict)
    ended: str | None = None
    unsaid_bytes: int = 0
    """Bytes that we have read of its slab without having told it."""


class Server(Protocol):
    """The group whose messages these are, as far as they use it: whoever waits for one serves all neighbours."""

    timeout_s: float

    @property
    def unread_bytes(self) -> int:
        """Bytes that this rank has sent through its slab and some receiver has not read yet."""

    def wait_all(self, receive: Receive, timeout_s: float) -> None:
        """Return when all messages of ``receive`` have come. Raises as Waitable.wait does."""

    def wait_for(self, work: Send, timeout: timedelta | None) -> None:
        """Return when ``work`` is completed. Raises as Waitable.wait does."""

    def wait_other(self, work: dist.Work, timeout: timedelta | None) -> bool:
        """Wait for a message of the group beneath. Raises as Waitable.wait does."""


class Receive:
    """Messages to come, waited for together. ``missing``: from whom, in the order in which they were asked for. ``mark``: of
    their call, which those that come have alike."""

    __slots__ = ("_blamed", "_group", "error", "first", "mark", "missing")

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

    def is_completed(self) -> bool:
        return not self.missing

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_all(self, timeout.total_seconds() if timeout else self._group.timeout_s)
        return True


class Send:
    """A message under way. ``block`` None: it is in the line, as a whole."""

    __slots__ = ("_block", "_group", "_mark", "peer")

    def __init__(self, group: Server, peer: Peer, block: Block | None) -> None:
        self._group, self.peer, self._block, self._mark = group, peer, block, peer.line.queued

    def is_completed(self) -> bool:
        if self._block is not None and self.peer.rank not in self._block.readers:
            return True
        if self.peer.line.flushed < self._mark:
            return False
        return self._block is None or self._group.unread_bytes <= AHEAD_BYTES

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_for(self, timeout)
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

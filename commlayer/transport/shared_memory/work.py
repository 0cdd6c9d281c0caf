"""Messages under way between the ranks of one node: peers, their messages, and what a caller waits for (see node_group.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from commlayer.failures.waits import is_timeout
from commlayer.transport.shared_memory.line import Line
from commlayer.transport.shared_memory.segment import Block

__all__ = ["AHEAD_BYTES", "SENT", "Arrival", "OtherWork", "Peer", "Receive", "Send", "Server", "Waitable"]

AHEAD_BYTES = 16 << 20
"""Bytes that a rank may have sent without any receiver having read it before its sends wait."""


class Waitable(Protocol):
    """A handle of a message: torch's Work, or something that can be waited for like one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Return True when the message's tensor may be used; no timeout, or zero: the group's.

        Raises RuntimeError, with Gloo's words: "Timed out", or "closed" where the peer is gone; SizeMismatch.
        """


Arrival = tuple[int, bytes | int]
"""A message that nobody expects yet: its size [bytes], and its payload, or where it lies in the sender's slab."""


@dataclass(eq=False, slots=True)
class Peer:
    """Another rank of this node. ``rank``: in the group; ``slab``: its local rank. ``ended`` says why nothing more comes."""

    rank: int
    slab: int
    line: Line
    posted: dict[int, deque[Receive]] = field(default_factory=dict)
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

    def wait_all(self, works: Sequence[Receive], timeout_s: float) -> None:
        """Return when all ``works`` are completed. Raises as Waitable.wait does."""

    def wait_for(self, work: Send, timeout: timedelta | None) -> None:
        """Return when ``work`` is completed. Raises as Waitable.wait does."""

    def serve(self) -> None:
        """Take in what has arrived already, and answer it."""

    def failed(self, timeout_s: float) -> None:
        """A wait that was to last ``timeout_s`` has failed; 0: after all that time."""


class Receive:
    """A message to come. ``error``: why it ended without one that fits."""

    __slots__ = ("_group", "error", "is_done", "peer", "tag", "tensor")

    def __init__(self, group: Server, peer: Peer, tensor: torch.Tensor, tag: int) -> None:
        self._group, self.peer, self.tensor, self.tag = group, peer, tensor, tag
        self.is_done = False
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.wait_all((self,), timeout.total_seconds() if timeout else self._group.timeout_s)
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
    """A message of the Gloo group beneath. Where it times out, Gloo has closed its connections: so must we."""

    __slots__ = ("_group", "inner")

    def __init__(self, group: Server, work: dist.Work) -> None:
        self._group, self.inner = group, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.serve()  # the neighbours need not wait for what comes from far away
        try:
            return self.inner.wait(timeout) if timeout else self.inner.wait()
        except RuntimeError as error:
            has_passed = timeout is None or is_timeout(error)
            self._group.failed(0 if has_passed or timeout is None else timeout.total_seconds())
            raise

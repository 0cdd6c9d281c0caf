"""Messages of a rank to itself: a send and a receive of one tag meet in memory, and nothing travels.

The backend's own connections lead to other ranks only. A send is taken in at once, as its tensor may change after its wait, and
nobody but this rank could be waited for; a receive waits for a send that this rank makes, before it or on another thread. As
between two ranks, the messages of one tag keep their order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import TypeVar

import torch

from commlayer.backend.members import Members
from commlayer.failures.waits import Board
from commlayer.profiles.errors import TensorError

__all__ = ["OwnMessage", "OwnMessages"]

_Item = TypeVar("_Item")
_LOOK_S = 0.25
"""How long a receive is waited for before its waiter looks up."""


class OwnMessage:
    """A send or a receive, waited for as Gloo's messages are. ``row``: of a receive, where it belongs, 1-D."""

    def __init__(self, messages: OwnMessages, row: torch.Tensor) -> None:
        self._messages, self._row = messages, row
        self._is_done = False
        self._error: TensorError | None = None

    def take(self, sent: torch.Tensor) -> None:
        """Take what was sent. What does not fit is said where this receive is waited for: other messages go on."""
        row = self._row
        if sent.nbytes == row.nbytes:
            row.view(torch.uint8).copy_(sent.view(torch.uint8))
        else:
            self._error = TensorError(
                f"{self._messages.members.who}: a message of this rank to itself has {sent.nbytes} bytes, and the receive that "
                f"meets it expects {row.nbytes}: send and receive as many with one tag"
            )
        self._is_done = True

    def end(self) -> None:
        """Note that the send has been taken in."""
        self._is_done = True

    def is_completed(self) -> bool:
        """Whether the message has gone or come."""
        return self._is_done

    def _source_rank(self) -> int:
        return self._messages.members.rank

    def wait(self, timeout: timedelta) -> bool:
        """Return True when the message has gone or come, False where the group is broken before.

        Raises TensorError for a message of another size, RuntimeError when ``timeout`` has passed.
        """
        self._messages.wait(self, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return self._is_done


class OwnMessages:
    """The messages of a rank to itself in one group. ``board``: where it is known that the group is broken."""

    def __init__(self, members: Members, board: Board) -> None:
        self.members, self._board = members, board
        self._changed = threading.Condition()
        self._sent: dict[int, deque[torch.Tensor]] = {}
        self._expected: dict[int, deque[OwnMessage]] = {}

    def send(self, row: torch.Tensor, tag: int) -> OwnMessage:
        """Send ``row``, 1-D; it may change at once."""
        message = OwnMessage(self, row)
        with self._changed:
            receive = _next(self._expected, tag)
            if receive is not None:
                receive.take(row)
            else:
                self._sent.setdefault(tag, deque()).append(row.clone())
            message.end()
            self._changed.notify_all()
        return message

    def recv(self, row: torch.Tensor, tag: int) -> OwnMessage:
        """Receive into ``row``, 1-D."""
        message = OwnMessage(self, row)
        with self._changed:
            sent = _next(self._sent, tag)
            if sent is not None:
                message.take(sent)
            else:
                self._expected.setdefault(tag, deque()).append(message)
        return message

    def wait(self, message: OwnMessage, seconds: float) -> None:
        """Return when ``message`` has gone or come, or the group is broken. Raises RuntimeError after ``seconds``."""
        until = time.monotonic() + seconds
        with self._changed:
            while not message.is_completed() and not self._board.is_broken:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise RuntimeError(
                        f"Timed out waiting {seconds * 1000:.0f}ms for a message of this rank to itself, which it has not sent"
                    )
                self._changed.wait(min(left_s, _LOOK_S))


def _next(queues: dict[int, deque[_Item]], tag: int) -> _Item | None:
    """Take out the first of a tag; None: there is none."""
    queue = queues.get(tag)
    if not queue:
        return None
    item = queue.popleft()
    if not queue:
        del queues[tag]
    return item

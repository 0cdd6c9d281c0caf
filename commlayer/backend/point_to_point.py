"""send, recv and their kin: straight to the inner backend, whatever is queued.

Queued behind collectives they would deadlock programs that are correct (two ranks that send to each
other before they receive). Gloo keeps them apart from collectives by their tags, also when another
thread runs those. What a rank sends to itself meets in memory (own_messages.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.order import Order
from commlayer.backend.own_messages import OwnMessages
from commlayer.backend.tensors import land, landing, plain_row, reals, require_room
from commlayer.calls.counters import GroupCounters
from commlayer.calls.ring import ANY, Call
from commlayer.device_time import await_device
from commlayer.engine.progress import OwnWork
from commlayer.failures.board import inquire
from commlayer.failures.waits import NO_TIMEOUT, is_timeout
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError, TensorError
from commlayer.transport.call_memory import require_dense
from commlayer.transport.contract import FIRST_TAG

__all__ = ["MessageWork", "Messages"]


class MessageWork(OwnWork):
    """A send or recv under way. Gloo's own says nothing before it was waited for: so does this."""

    def __init__(
        self,
        messages: Messages,
        work: Work,
        what: str,
        tensor: torch.Tensor,
        moved: torch.Tensor,
        call: Call,
    ) -> None:
        super().__init__()
        self._call = call
        self._messages, self._work, self._what = messages, work, what
        self._tensor, self._moved = tensor, moved
        self._started = time.monotonic()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when the message has gone, or is in its tensor. Raises PeerError,
        CollectiveTimeoutError."""
        if self._done:
            if self._error is not None:
                raise self._error
            return True
        call = self._call
        call.track.wait(call)
        try:
            # Without a timeout Gloo takes the one that the group was made with, not the one it has
            # now.
            self._messages.wait(self._work, timeout if timeout.total_seconds() > 0 else self._messages.timeout)
        except RuntimeError as error:
            self._done, self._error = True, self._messages.error(error, self._what)
            raise self._error from error
        call.track.waited()
        with torch.inference_mode():
            land(self._tensor, self._moved)
        self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        """Who sent what a recv from any source received, as a rank of the group."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is complete: waits for the message first, because Gloo's messages complete
        nothing by themselves."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result([self._tensor])
        return future


class Messages:
    """The point-to-point verbs of one group."""

    def __init__(self, order: Order, counters: GroupCounters) -> None:
        self._order, self._members, self._inner, self._counters = order, order.members, order.inner, counters
        self.track = order.track
        self.own = OwnMessages(self._members, order.inner.planned.board)

    def require(self, verb: str, tensors: Sequence[torch.Tensor], member: int) -> torch.Tensor:
        """The one tensor of a send to, or a recv from, ``member``. Raises TensorError, UsageError
        where it would be refused."""
        tensor = self._only_one(verb, tensors)
        if tensor.is_cpu:
            self._members.require_member("destination" if verb == "send" else "source", member)
            require_dense(tensor)
            if verb == "recv" and not tensor.is_contiguous():
                require_room(tensor)
        return tensor

    def send(self, tensors: Sequence[torch.Tensor], member: int, tag: int = 0) -> Work | None:
        """See CommlayerGroup; so the next two."""
        tensor = self.require("send", tensors, member)
        if not tensor.is_cpu:
            return self._order.on_device(tensor).inner.own("send", tensors, member, tag)
        await_device()
        moved, what = plain_row(tensor), f"send to rank {self._members.named(member)}, tag {tag}"
        return self._start("send", what, moved, moved, member, tag)

    def recv(self, tensors: Sequence[torch.Tensor], member: int, tag: int = 0) -> Work | None:
        tensor = self.require("recv", tensors, member)
        if not tensor.is_cpu:
            return self._order.on_device(tensor).inner.own("recv", tensors, member, tag)
        what = f"recv from rank {self._members.named(member)}, tag {tag}"
        return self._start("recv", what, tensor, landing(tensor), member, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Work | None:
        tensor = self._only_one("recv_anysource", tensors)
        if not tensor.is_cpu:
            return self._order.on_device(tensor).inner.own("recv_anysource", tensors, tag)
        if not tensor.numel():  # Gloo fails in words that sound like a dead peer
            self._refuse("recv from any rank takes a tensor with elements, got none: name the source")
        return self._start("recv_anysource", f"recv from any rank, tag {tag}", tensor, landing(tensor), tag)

    def _start(self, verb: str, what: str, tensor: torch.Tensor, moved: torch.Tensor, *to: int) -> Work | None:
        try:
            # The tags of planned calls begin at FIRST_TAG, on the same connections.
            gloo = self._inner.gloo if to[-1] < FIRST_TAG else self._inner.direct
            work = self.post(gloo, verb, moved, *to)
        except RuntimeError as error:  # a connection that is known to be broken is found here
            raise self.error(error, what) from error
        num_bytes = tensor.nbytes
        call = self.note(verb, tensor.dtype, num_bytes, *to)
        self._counters.flat[verb].add(num_bytes, 0)
        message = MessageWork(self, work, what, tensor, moved, call)
        if self._order.coalescing is None:
            return message
        self._order.coalescing.append(message)
        return None  # as NCCL: what is coalesced is waited for as a whole

    def post(self, gloo: Any, verb: str, row: torch.Tensor, *to: int) -> Work:
        """Post a message on ``gloo``, an inner group; one of this rank to itself, in memory. Raises
        RuntimeError."""
        if len(to) == 2 and to[0] == self._members.rank:
            gloo.rank()  # of a group that has ended it raises
            return getattr(self.own, verb)(row, to[1])  # type: ignore[no-any-return]  # waited for in the same way
        return getattr(gloo, verb)([row], *to)  # type: ignore[no-any-return]

    def note(self, verb: str, dtype: torch.dtype, num_bytes: int, *to: int) -> Call:
        """Note in the ring that a message is posted; ``to``: the member that it goes to or comes
        from, unless from any, and its tag."""
        member, tag = to if len(to) == 2 else (ANY, to[0])
        return self.track.note_message("send" if verb == "send" else "recv", dtype, num_bytes, member, tag)

    @property
    def timeout(self) -> timedelta:
        """The group's timeout, as it is now."""
        return self._inner.timeout

    def wait(self, work: Work, timeout: timedelta) -> None:
        """Return when the message has gone or come. Raises RuntimeError: Gloo's, or that the group
        has been broken meanwhile."""
        self._inner.planned.connections.wait_for_message(work, timeout)

    def error(self, error: RuntimeError, what: str) -> PeerError | CollectiveTimeoutError:
        """The error to raise for a message that failed with ``error``."""
        who, text = self._members.who, str(error)
        if is_timeout(error) or "timeout" in text.lower():
            board = self._inner.planned.board
            inquire(board)
            diagnosis = board.diagnosed()
            return CollectiveTimeoutError(
                f"{who}: {what}: did not happen in time: did the other side make its call, with this tag? Gloo's own "
                f"message: {text}" + (f"\n{diagnosis.words}" if diagnosis.words else "")
            )
        culprit = self._inner.planned.board.judge.culprit() or "the peer died or closed its connection"
        return PeerError(f"{who}: {what}: {culprit}: look at its log. Gloo's own message: {text}")

    def _only_one(self, verb: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        real_tensors = reals(tensors)
        if len(real_tensors) != 1:
            self._refuse(f"{verb} takes one tensor, got {len(real_tensors)}")
        return real_tensors[0]

    def _refuse(self, why: str) -> NoReturn:
        raise TensorError(f"{self._members.who}: {why}")

"""Batches of messages on a group's lane: what a pipeline sends and receives at once.

Receives are posted when they are asked for. What is sent goes out in the order of the calls, on a thread of its own, in chunks
that wait for higher lanes at their edges; a small message that nothing waits for goes at once. Nobody who sends waits for a
receiver: ranks may all send before anybody receives, in any order of peers, as with MPI's non-blocking messages.

Nothing that arrives says how far a message is on the link, as the chunks of the others do in a collective. So the next chunk goes
when the link has had the time for the one before, and that is how few are in a higher lane's way.

All messages of two ranks keep their order: Gloo matches those of one tag in the order in which they were posted. The n-th pieces
of all have one tag, so that messages of different sizes at both ends do not shift what comes behind them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from time import perf_counter_ns as now
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlayer.backend.inner import InnerGroups
from commlayer.backend.order import Order
from commlayer.backend.point_to_point import Messages
from commlayer.backend.tensors import land, landing, plain_row, real
from commlayer.calls.counters import GroupCounters
from commlayer.calls.instruments import Instruments
from commlayer.calls.ring import Call
from commlayer.device_time import await_device
from commlayer.engine.lane_holds import Issued, lanes
from commlayer.engine.progress import OwnWork, ProgressQueue
from commlayer.failures.waits import NO_TIMEOUT
from commlayer.profiles.curve import Curve
from commlayer.profiles.links import Resource
from commlayer.scheduler.lanes import longest_hold_us

__all__ = ["Batch", "Batches", "Pace", "Parcel"]

Parcel = tuple[torch.Tensor, int]
"""A tensor, and the member of the group to which it goes or from which it comes."""
_Pieces = tuple[list[torch.Tensor], int, Call]
"""The chunks of a message, the member that it goes to, and its call."""
_TAG = (1 << 31) - 1
"""Beyond what programs use: torch's tags are 32 bits."""
_TAGS = 1 << 16
_PACE = 0.8
"""The part of the time that a chunk takes on an idle link, until the next one goes: a thread wakes up late."""


class Batch(OwnWork):
    """Messages under way. ``wait()``: those that come are in their tensors, and those that go may be changed.

    It is completed once somebody has waited for it: Gloo's messages say nothing before.
    """

    def __init__(self, messages: Messages, what: str, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._messages, self.what, self._outputs = messages, what, outputs
        self.works: list[tuple[Work, str, Call]] = []
        self.landings: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.call: Call | None = None
        self.instruments: Instruments | None = None
        self._posted = threading.Event()

    def posted(self, error: BaseException | None = None) -> None:
        """All messages are on their way, or ``error`` stopped them."""
        if not self._done:
            self._error = error
        self._posted.set()

    @property
    def is_given_up(self) -> bool:
        """Whether somebody has waited in vain: nothing more of it may be sent, because its tensors may be changed."""
        return self._done and self._error is not None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True at the end. Raises PeerError, CollectiveTimeoutError, naming this rank, the group and the peer."""
        call, instruments, began = self.call, self.instruments, now()
        if self._done or call is None or instruments is None:
            self._wait(timeout)
        else:
            try:
                self._wait(timeout)
            finally:
                for hear in instruments.waited:
                    hear(call, began, now())
                for hear_end in instruments.ended:
                    hear_end(call)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout: timedelta) -> None:
        if not self._done:
            limit = timeout if timeout.total_seconds() > 0 else self._messages.timeout
            until = time.monotonic() + limit.total_seconds()
            if not self._posted.wait(limit.total_seconds()):
                self._error = self._messages.error(RuntimeError("timed out before it was sent"), self.what)
            while self.works and self._error is None:
                work, what, call = self.works.pop()
                call.track.wait(call)
                try:
                    left_s = max(until - time.monotonic(), 0.001)
                    self._messages.wait(work, timedelta(seconds=left_s))
                except RuntimeError as error:
                    self._error = self._messages.error(error, what)
                    self._error.__cause__ = error
                else:
                    call.track.waited()
            if self._error is None:
                with torch.inference_mode():
                    for tensor, moved in self.landings:
                        land(tensor, moved)
            self._done = True
            self.works, self.landings = [], []

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class Pace:
    """How messages to other nodes are cut, and how fast their chunks follow each other, by the profile of the group's calls."""

    def __init__(self, inner: InnerGroups) -> None:
        self._inner = inner

    @cached_property
    def seconds_per_byte(self) -> float:
        """The seconds of a byte to another node, while all ranks of this one send: each has a share of the link, or a card."""
        curve = self._curve
        return 2e-9 / curve.algbw_gbps(curve.bytes[-1]) if curve is not None else 0.0

    @cached_property
    def chunk_bytes(self) -> int:
        """The smallest message to another node, a power of two, that keeps the link's efficiency; 0: whole."""
        curve, planner = self._curve, self._inner.planned.choices.agreed.prices.job_planner
        if curve is None:
            return 0
        least = planner.policy.lanes.efficiency * curve.algbw_gbps(curve.bytes[-1])
        size = 1 << 12
        while size < curve.bytes[-1] and curve.algbw_gbps(size) < least:
            size *= 2
        return size // 2  # of a rank's buffer for two ranks, half goes to the other

    @cached_property
    def _curve(self) -> Curve | None:
        """The curve of messages between two nodes."""
        planner: Any = self._inner.planned.choices.agreed.prices.job_planner
        return None if planner is None else planner.profile.find("all_to_all", Resource.INTER, 2)


class Batches:
    """Batches of one group. ``sender``: the order of what it sends, once there was something to queue."""

    def __init__(self, order: Order, messages: Messages, counters: GroupCounters) -> None:
        self._order, self._messages, self._counters = order, messages, counters
        self._members, self._inner = order.members, order.inner
        self._pace = Pace(order.inner)
        self.sender: ProgressQueue | None = None

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Work:
        """Send and receive, to and from members of the group; tensors of any dtype and layout, on one device.

        Those without elements are not sent. What is sent must not change before the wait. Raises UsageError for a rank
        that is not in the group, PeerError for a connection that is known to be broken.
        """
        sends = [(real(x), peer) for x, peer in sends if x.numel()]
        receives = [(real(x), peer) for x, peer in receives if x.numel()]
        for role, parcels in (("destination", sends), ("source", receives)):
            for _, peer in parcels:
                self._members.require_member(role, peer)
        if any(not x.is_cpu for x, _ in (*sends, *receives)):
            calls = self._order.on_device((*sends, *receives)[0][0])
            calls.start_coalescing()
            for x, peer in receives:
                calls.inner.own("recv", [x], peer, 0)
            for x, peer in sends:
                calls.inner.own("send", [x], peer, 0)
            return calls.end_coalescing()
        if self._order.lane.name is None:
            self._order.use_lane_of_group()
        names = [f"to {self._members.named(peer)}" for _, peer in sends] + [
            f"from {self._members.named(p)}" for _, p in receives
        ]
        batch = Batch(self._messages, f"messages {', '.join(names)}", [x for x, _ in receives])
        self._show(batch, sends)
        for x, peer in receives:
            moved = landing(x)
            batch.landings.append((x, moved))
            call = self._messages.note("recv", x.dtype, x.nbytes, peer, _TAG)
            for nth, piece in enumerate(self._pieces(moved, peer)):
                self._post(batch, "recv", piece, peer, nth, call)
            self._counters.flat["recv"].add(x.nbytes, 0)
        if sends:
            self._send(batch, [(plain_row(x), peer) for x, peer in sends])
        else:
            batch.posted()
        return batch

    def _show(self, batch: Batch, sends: Sequence[Parcel]) -> None:
        """Show the batch as one call to those who listen to the group's calls. It is none of the ring's: its messages are."""
        instruments = self._order.instruments
        if not (instruments.issued or instruments.ended or instruments.waited):
            return
        num_bytes = sum(x.nbytes for x, _ in sends)
        inter = sum(x.nbytes for x, peer in sends if peer in self._members.far)
        batch.call = self._order.track.unnumbered("messages", num_bytes)
        batch.call.logical_bytes, batch.call.inter_bytes, batch.call.intra_bytes = num_bytes, inter, num_bytes - inter
        batch.instruments = instruments
        for hear in instruments.issued:
            hear(batch.call)

    def _send(self, batch: Batch, sends: list[Parcel]) -> None:
        calls = [self._messages.note("send", x.dtype, x.nbytes, peer, _TAG) for x, peer in sends]
        for x, _ in sends:
            self._counters.flat["send"].add(x.nbytes, 0)
        pieces = [(self._pieces(x, peer), peer, each) for (x, peer), each in zip(sends, calls, strict=True)]
        is_small = all(len(each) == 1 for each, _, _ in pieces)
        if self.sender is None:
            self.sender = ProgressQueue(f"commlayer {self._members.name[:8]} send", self._order.progress.who)
        if batch.call is not None and batch.call.begins_after_s is not None:  # its caller goes on meanwhile
            self.sender.submit(batch.what, None, self._post_later, (batch.call.begins_after_s, batch, pieces))
            return
        if is_small and not self.sender.pending and lanes().is_free(self._order.lane.level):
            self._post_all(batch, pieces)
            return
        issued = self._enter_lane(pieces)
        try:
            self.sender.submit(batch.what, None, self._post_in_order, (batch, pieces, issued))
        except BaseException:
            if issued is not None:
                lanes().leave(issued)
            raise

    def _enter_lane(self, pieces: list[_Pieces]) -> Issued | None:
        return self._order.lane.enter([each for each, _, _ in pieces]) if self._order.lane.is_on else None

    def _post_later(self, begins_after_s: float, batch: Batch, pieces: list[_Pieces]) -> None:
        await_device(begins_after_s)
        self._post_in_order(batch, pieces, self._enter_lane(pieces))

    def _post_in_order(self, batch: Batch, pieces: list[_Pieces], issued: Issued | None) -> None:
        try:
            self._post_all(batch, pieces)
        finally:
            if issued is not None:
                lanes().leave(issued)

    def _post_all(self, batch: Batch, pieces: list[_Pieces]) -> None:
        """Chunk after chunk, of all messages side by side. An error is the batch's: raised by its wait."""
        try:
            for nth in range(max(len(each) for each, _, _ in pieces)):
                if batch.is_given_up:
                    return
                here = [(each[nth], peer, call) for each, peer, call in pieces if nth < len(each)]
                far_bytes = sum(piece.numel() for piece, peer, _ in here if peer in self._members.far)
                alone_s = far_bytes * self._pace.seconds_per_byte
                if self._order.lane.is_on:
                    most_us = longest_hold_us(max(alone_s * 1e6, 100.0), lanes().policy)
                    held_s = lanes().hold(self._order.lane.level, most_us, crosses=alone_s > 0)
                    if batch.call is not None:
                        batch.call.held_ns += int(held_s * 1e9)
                for piece, peer, call in here:
                    self._post(batch, "send", piece, peer, nth, call)
                if any(nth + 1 < len(each) for each, _, _ in pieces):
                    time.sleep(alone_s * _PACE)
        except Exception as error:  # noqa: BLE001  carried to whoever waits
            batch.posted(error)
        else:
            batch.posted()

    def _post(self, batch: Batch, verb: str, piece: torch.Tensor, peer: int, nth: int, call: Call) -> None:
        what = f"{verb} {'to' if verb == 'send' else 'from'} rank {self._members.named(peer)}"
        try:
            work = self._messages.post(self._inner.gloo, verb, piece, peer, _TAG - nth % _TAGS)
            batch.works.append((work, what, call))
        except RuntimeError as error:
            raise self._messages.error(error, what) from error

    def _pieces(self, x: torch.Tensor, peer: int) -> list[torch.Tensor]:
        """The chunks of a message: the same at both ends, which know its size, the profile and the lane."""
        data = x.view(torch.uint8)
        chunk = (
            self._pace.chunk_bytes
            if self._order.lane.is_on and self._order.lane.level and peer in self._members.far
            else 0
        )
        return list(data.split(chunk)) if chunk else [data]

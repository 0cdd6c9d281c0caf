"""What an executor needs from a way of moving bytes: the contract, and its implementation on Gloo.

Gloo's collectives are not used: its all_gather costs 2 to 2.5 times the direct form, and none of them can receive where
the bytes finally belong. Point-to-point messages can: every piece is received in place, all receives of a call are
posted before its first send (so that no sender waits for a receiver), and Gloo's own I/O threads move what is posted.
The one exception is a small flat exchange, where Gloo's single call costs less than two messages and their bookkeeping.
A step of an earlier chunk is ahead of a later one on every connection (TCP keeps order), which is the rule that a
resource does one step at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from commlayer.failures import FailureBoard, Wait
from commlayer.profiles.errors import PlanError
from commlayer.scheduler.moves import Moves, Region
from commlayer.scheduler.plan import Buffer, Op, Plan, Strategy

__all__ = ["Call", "Channel", "GlooTransport", "Transport"]

Pending = tuple[dist.Work, int, int | None]
"""A work, the index of its step, and the peer's index in the channel (None: all of them)."""
Buffers = Mapping[Buffer, torch.Tensor]
"""Input, output and staging of one call: 1-D uint8 tensors [bytes]."""


class Call(Protocol):
    """One plan under way on one rank."""

    def require(self, earlier: int, index: int) -> None:
        """Step ``index`` must not start before step ``earlier`` has ended (on the host, or on the device's stream)."""

    def post(self, index: int) -> None:
        """Start step ``index``."""

    def finish(self) -> None:
        """Return when the output may be used (on a device: by the current stream) and the input may be changed."""


class Transport(Protocol):
    def start(self, plan: Plan, steps: Sequence[Moves], buffers: Buffers, timeout_s: float) -> Call:
        """Begin a call. Calls of one transport must be started in the same order on all ranks, from one thread at a time."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True)
class Channel:
    """A process group of our own, for one kind of step: ``peers[i]`` is (global rank, rank in the group) of index i."""

    name: str
    group: dist.ProcessGroup
    peers: tuple[tuple[int, int], ...]

    @property
    def is_in_order(self) -> bool:
        """Whether indices and ranks in the group are the same, so that the group's own collectives may be used."""
        return all(index == place for index, (_, place) in enumerate(self.peers))


_ONE_CALL_BYTES = 128 << 10
"""Up to this send buffer a flat exchange is one Gloo call. Measured on the emulated cluster: at 64 KiB the call takes two
thirds of the messages' time, at 256 KiB and above the messages are as fast or faster. The same number on every rank."""
_TAGS_PER_CALL = 1 << 14
_CALLS_IN_FLIGHT = 1 << 16


class GlooTransport:
    """CPU tensors over Gloo. Not thread-safe: one issuing thread at a time (Gloo gives wrong results otherwise)."""

    def __init__(self, channels: Mapping[Op, Channel], board: FailureBoard) -> None:
        self.channels = channels
        self.board = board
        self.rank = dist.get_rank()
        self.sequence = 0

    def start(self, plan: Plan, steps: Sequence[Moves], buffers: Buffers, timeout_s: float) -> Call:
        if len(steps) * plan.traffic.group_size > _TAGS_PER_CALL:
            raise PlanError(
                f"{plan.name} over {plan.traffic.group_size} ranks needs more than {_TAGS_PER_CALL} message tags: "
                "use fewer chunks"
            )
        self.sequence += 1
        return _GlooCall(self, plan, steps, buffers, timeout_s)

    def close(self) -> None:
        for channel in self.channels.values():
            abort = getattr(channel.group, "abort", None)
            if abort is not None:
                abort()


class _GlooCall:
    def __init__(
        self, transport: GlooTransport, plan: Plan, steps: Sequence[Moves], buffers: Buffers, timeout_s: float
    ) -> None:
        self._transport, self._plan, self._steps, self._buffers = transport, plan, steps, buffers
        self._started, self._timeout_s = time.monotonic(), timeout_s
        self._sequence = transport.sequence
        self._tag = self._sequence % _CALLS_IN_FLIGHT * _TAGS_PER_CALL
        self._sends: list[Pending] = []
        # Receives first: a message that finds no receive waits a round trip for it.
        self._receives = [self._expect(index) for index in range(len(steps))]

    def _expect(self, index: int) -> list[Pending]:
        messages = self._steps[index].receives
        if not messages or self._is_one_call(index):
            return []
        channel = self._transport.channels[self._plan.steps[index].op]
        return [
            (channel.group.recv([self._view(m.region)], channel.peers[m.peer][1], self._tag + m.tag), index, m.peer)
            for m in messages
        ]

    def _is_one_call(self, index: int) -> bool:
        return (
            self._plan.strategy is Strategy.FLAT
            and self._plan.traffic.logical_bytes <= _ONE_CALL_BYTES
            and self._transport.channels[self._plan.steps[index].op].is_in_order
        )

    def require(self, earlier: int, index: int) -> None:
        del index  # the host waits, whoever comes next
        self._wait(self._receives[earlier])

    def post(self, index: int) -> None:
        step = self._steps[index]
        if step.sends:
            channel = self._transport.channels[self._plan.steps[index].op]
            if self._is_one_call(index):
                work = channel.group.alltoall_base(self._buffers[Buffer.OUTPUT], self._buffers[Buffer.INPUT], [], [])
                self._receives[index].append((work, index, None))
                return
            for m in step.sends:
                work = channel.group.send([self._view(m.region)], channel.peers[m.peer][1], self._tag + m.tag)
                self._sends.append((work, index, m.peer))
        for copy in step.copies:
            self._view(copy.target).copy_(self._view(copy.source))

    def finish(self) -> None:
        for works in self._receives:
            self._wait(works)
        self._wait(self._sends)

    def _view(self, region: Region) -> torch.Tensor:
        return self._buffers[region.buffer][region.start : region.stop]

    def _wait(self, works: list[Pending]) -> None:
        """Wait for all and forget them (a Gloo receive may be waited for only once)."""
        for work, index, peer in works:
            left = self._timeout_s - (time.monotonic() - self._started)
            try:
                work.wait(timedelta(seconds=max(left, 0.001)))
            except RuntimeError as error:
                raise self._explain(index, peer, error) from error
        works.clear()

    def _explain(self, index: int, peer: int | None, error: RuntimeError) -> Exception:
        step = self._plan.steps[index]
        channel = self._transport.channels[step.op]
        wait = Wait(
            rank=self._transport.rank,
            peers=tuple(r for r, _ in channel.peers if r != self._transport.rank)
            if peer is None
            else (channel.peers[peer][0],),
            group=channel.name,
            collective=self._plan.traffic.collective,
            plan=self._plan.name,
            step=step.op.value,
            chunk=step.chunk,
            sequence=self._sequence,
        )
        return self._transport.board.explain(wait, error, time.monotonic() - self._started, self._timeout_s)

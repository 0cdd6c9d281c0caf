"""What an executor needs from a way of moving bytes: the contract, and its implementation on Gloo.

Gloo's collectives are not used: its all_gather costs 2 to 2.5 times the direct form, and none of them can receive where
the bytes finally belong. Point-to-point messages can: every piece is received in place, all receives of a call are
posted before its first send (so that no sender waits for a receiver), and Gloo's own I/O threads move what is posted.
The one exception is a small flat exchange, where Gloo's single call costs less than two messages and their bookkeeping.
A step of an earlier chunk is ahead of a later one on every connection (TCP keeps order), which is the rule that a
resource does one step at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist

from commlayer.failures.board import Failure, FailureBoard, Wait
from commlayer.failures.waits import end_wait, keep
from commlayer.failures.waits import wait as wait_for_collective
from commlayer.profiles.errors import ClusterError, DisagreementError, PlanError
from commlayer.scheduler.moves import MAX_TAGS, Message, Moves, Reduction, Region
from commlayer.scheduler.plan import Buffer, Op, Plan, Strategy

__all__ = [
    "ONE_CALL_BYTES",
    "Buffers",
    "Call",
    "Channel",
    "Coder",
    "GlooCall",
    "GlooTransport",
    "Reducer",
    "SizeMismatch",
    "Transport",
    "Whole",
    "break_connections",
]

Pending = tuple[dist.Work, int, int]
"""A work, the index of its step, and the peer's index in the channel."""
Buffers = Mapping[Buffer, torch.Tensor]
"""Input, output and staging of one call: 1-D uint8 tensors [bytes]."""
Whole = Callable[[torch.Tensor, torch.Tensor], None]
"""Runs a plan from source to target, both 1-D uint8 [bytes]."""
Reducer = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Reduces sources into a target, 1-D uint8 [bytes] that hold elements of the call's dtype; see engine/reductions.py."""


class SizeMismatch(RuntimeError):
    """A message has come of another size than was expected: ranks have made different calls."""

    def __init__(self, expected_bytes: int, got_bytes: int, peer: int) -> None:
        super().__init__(f"expected {expected_bytes} bytes from member {peer} of the group, got {got_bytes}")
        self.expected_bytes, self.got_bytes = expected_bytes, got_bytes


class Coder(Protocol):
    """Turns bytes of a tensor into encoded messages and back. All arguments are 1-D uint8 [bytes]."""

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``source``, whole rows of the tensor, becomes one message in ``target``."""

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The message in ``source`` becomes rows of the tensor in ``target``."""

    def add(self, target: torch.Tensor, sources: Sequence[torch.Tensor], coded: Sequence[bool]) -> None:
        """``target`` becomes the sum of ``sources`` in their order, in FP32; ``coded[i]``: whether the i-th is a message."""


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

    def whole(self, plan: Plan, timeout_s: float) -> Whole | None:
        """``plan`` as one call of the backend's own, where that is cheaper than its steps. The same on every rank."""

    def abort(self, why: str | None = None) -> None:
        """After a failure: wake up the ranks that wait for this one, and tell them ``why`` where the failure is ours."""

    def close(self) -> None:
        """Let go of connections. Collective. Raises ClusterError where a rank does not come."""


@dataclass(frozen=True)
class Channel:
    """A process group of our own, for one kind of step: ``peers[i]`` is (global rank, rank in the group) of index i."""

    name: str
    group: dist.ProcessGroup
    peers: tuple[tuple[int, int], ...]

    @cached_property
    def is_in_order(self) -> bool:
        """Whether indices and ranks in the group are the same, so that the group's own collectives may be used."""
        return all(index == place for index, (_, place) in enumerate(self.peers))


ONE_CALL_BYTES = 128 << 10
"""Up to this send buffer a flat exchange is one Gloo call. Measured on the emulated cluster: at 64 KiB the call takes two
thirds of the messages' time, at 256 KiB and above the messages are as fast or faster. The same number on every rank."""
_BROKEN = ("clos", "connect", "timed out", "timeout", "socket", "reset by peer", "broken pipe", "gloo")
"""Words of a connection that failed, Gloo's or shared memory's."""
_CALLS_IN_FLIGHT = 1 << 16
_ABORT_TAG = MAX_TAGS * _CALLS_IN_FLIGHT


class GlooTransport:
    """CPU tensors over Gloo. Not thread-safe: one issuing thread at a time (Gloo gives wrong results otherwise)."""

    def __init__(self, channels: Mapping[Op, Channel], board: FailureBoard, rank: int | None = None) -> None:
        self.channels = channels
        self.board = board
        self.rank = dist.get_rank() if rank is None else rank
        self.sequence = 0
        self.waited_for: set[dist.Work] = set()
        """The messages that calls of ours wait for: where the board breaks, these waits are ended from another thread."""
        self._is_aborted = False
        board.on_break(self._wake)

    def _wake(self) -> None:
        """The board is broken: end the waits that are under way, and break connections."""
        for work in list(self.waited_for):
            end_wait(work)
        self.abort()

    def start(
        self,
        plan: Plan,
        steps: Sequence[Moves],
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
    ) -> GlooCall:
        """See Transport. ``reduce`` runs the steps' reductions, where the plan has any, ``coder`` those of encoded messages."""
        if len(steps) * plan.tags_per_step > MAX_TAGS:
            raise PlanError(
                f"{plan.name} over {plan.traffic.group_size} ranks needs more than {MAX_TAGS} message tags: use fewer chunks"
            )
        self.sequence += 1
        return GlooCall(self, plan, steps, buffers, timeout_s, reduce, coder)

    def whole(self, plan: Plan, timeout_s: float) -> Whole | None:
        channel = self.channels.get(Op.ALL_TO_ALL)
        if plan.strategy is not Strategy.FLAT or plan.traffic.logical_bytes > ONE_CALL_BYTES:
            return None
        return _GlooOneCall(self, plan, timeout_s) if channel is not None and channel.is_in_order else None

    def explain(self, plan: Plan, index: int, sequence: int, peers: tuple[int, ...], failure: Failure) -> Exception:
        """The error for a wait of step ``index`` that broke; reports it to the other ranks and wakes them first."""
        step = plan.steps[index]
        wait = Wait(
            rank=self.rank,
            peers=peers,
            group=self.channels[step.op].name,
            collective=plan.traffic.collective,
            plan=plan.name,
            step=step.op.value,
            chunk=step.chunk,
            sequence=sequence,
        )
        if isinstance(failure.cause, SizeMismatch):
            return self._disagreement(wait, failure.cause)
        self.board.report(wait, failure)
        self.abort()
        return self.board.explain(wait, failure)

    def _disagreement(self, wait: Wait, mismatch: SizeMismatch) -> DisagreementError:
        """Nobody is dead, and nobody must be blamed for it: the others are told what was found here."""
        expected, got = mismatch.expected_bytes, mismatch.got_bytes
        self.abort(f"expected {expected} bytes from rank {wait.peers[0]} and got {got}, so it left the group")
        return DisagreementError(
            f"expected {expected} bytes from rank {wait.peers[0]}, got {got}: ranks must make the same calls, with the same "
            f"sizes; here: {wait}. COMMLAYER_DEBUG=detail compares calls before they move a byte and names those that "
            "differ. Nothing more can be sent here: restart the job"
        )

    def abort(self, why: str | None = None) -> None:
        """Break our connections, so that ranks that wait for this one wake up now instead of at their timeout.

        Gloo's own abort() leaves them open. A receive that times out makes Gloo close every connection of its group, so
        one that nobody will ever answer is posted, and timed out.
        """
        if why is not None:
            self.board.leave(why)
        if self._is_aborted:
            return
        self._is_aborted = True
        for channel in set(self.channels.values()):
            break_connections(channel.group, [place for rank, place in channel.peers if rank != self.rank])

    def close(self) -> None:
        for channel in dict.fromkeys(self.channels.values()):
            self._part(channel)
            if self.board.has_abandoned:
                keep(channel.group)
        self.channels = {}

    def _part(self, channel: Channel) -> None:
        """Wait for the others: a peer may still be reading what we sent. Bounded by the group's timeout."""
        try:
            wait_for_collective(channel.group.barrier(), self.board)
        except RuntimeError as error:
            ranks = [rank for rank, _ in channel.peers]
            raise ClusterError(
                f"rank {self.rank}: not all of ranks {ranks} (group {channel.name}) came to close their Communicator: "
                "every rank of the grid must close it; look at the log of the one that did not"
            ) from error


def break_connections(group: dist.ProcessGroup, peers: Sequence[int]) -> None:
    """Make Gloo close every connection of ``group``; ``peers`` are the other ranks of it.

    Each in turn, because a receive from one that is gone already is refused, and closes nothing.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class GlooCall:
    """See Call. ``revise`` is for steps that become known only while the call runs."""

    def __init__(
        self,
        transport: GlooTransport,
        plan: Plan,
        steps: Sequence[Moves],
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None,
        coder: Coder | None,
    ) -> None:
        self._transport, self._plan, self._steps, self._buffers = transport, plan, list(steps), buffers
        self._reduce, self._coder = reduce, coder
        self._started, self._timeout_s = time.monotonic(), timeout_s
        self._sequence = transport.sequence
        self._tag = self._sequence % _CALLS_IN_FLIGHT * MAX_TAGS
        self._sends: list[Pending] = []
        # Receives first: a message that finds no receive waits a round trip for it.
        self._receives = [self._expect(index) for index in range(len(steps))]

    def _expect(self, index: int) -> list[Pending]:
        messages = self._steps[index].receives
        if not messages:
            return []
        return [self._message(index, m, is_send=False) for m in messages]

    def _message(self, index: int, message: Message, *, is_send: bool) -> Pending:
        """Post one message. On a connection that is already gone posting raises, not waiting."""
        channel = self._transport.channels[self._plan.steps[index].op]
        call = channel.group.send if is_send else channel.group.recv
        try:
            work = call([self._view(message.region)], channel.peers[message.peer][1], self._tag + message.tag)
        except RuntimeError as error:
            self._require_broken(error)
            raise self._explained(index, message.peer, error) from error
        return work, index, message.peer

    def require(self, earlier: int, index: int) -> None:
        del index  # the host waits, whoever comes next
        self._wait(self._receives[earlier])

    def post(self, index: int) -> None:
        step = self._steps[index]
        self._sends += [self._message(index, m, is_send=True) for m in step.sends]
        for copy in step.copies:
            self._view(copy.target).copy_(self._view(copy.source))
        for reduction in step.reductions:
            self._sum(reduction)
        if step.encodes or step.decodes:
            assert self._coder is not None  # whoever starts a plan with a wire format says how to encode
            for encode in step.encodes:
                self._coder.encode(self._view(encode.source), self._view(encode.target))
            for decode in step.decodes:
                self._coder.decode(self._view(decode.source), self._view(decode.target))

    def _sum(self, reduction: Reduction) -> None:
        sources = [self._view(source) for source in reduction.sources]
        coded = [source.buffer in (Buffer.ENCODED, Buffer.ARRIVED) for source in reduction.sources]
        if any(coded):
            assert self._coder is not None
            self._coder.add(self._view(reduction.target), sources, coded)
        else:
            assert self._reduce is not None  # whoever starts a plan with sums says how to sum
            self._reduce(self._view(reduction.target), sources)

    def revise(self, index: int, moves: Moves, buffers: Buffers) -> None:
        """What step ``index``, not posted yet, will do; posts its receives beside those that it had."""
        self._buffers = buffers
        self._steps[index] = moves
        self._receives[index] += self._expect(index)

    def finish(self) -> None:
        for works in self._receives:
            self._wait(works)
        self._wait(self._sends)

    def _view(self, region: Region) -> torch.Tensor:
        return self._buffers[region.buffer][region.start : region.stop]

    def _wait(self, works: list[Pending]) -> None:
        """Wait for all and forget them (a Gloo receive may be waited for only once)."""
        transport = self._transport
        for work, index, peer in works:
            left = self._timeout_s - (time.monotonic() - self._started)
            # In this order: whoever breaks the board looks at the wait afterwards.
            transport.waited_for.add(work)
            try:
                if transport.board.is_broken or not work.wait(timedelta(seconds=max(left, 0.001))):
                    raise transport.board.woken()
            except RuntimeError as error:
                self._require_broken(error)
                raise self._explained(index, peer, error) from error
            finally:
                transport.waited_for.discard(work)
        works.clear()

    @staticmethod
    def _require_broken(error: RuntimeError) -> None:
        """Let through what no peer is to blame for: a fault of our own would send its reader to another rank's log."""
        if not isinstance(error, SizeMismatch) and not any(word in str(error).lower() for word in _BROKEN):
            raise error

    def _explained(self, index: int, peer: int, error: RuntimeError) -> Exception:
        ranks = (self._transport.channels[self._plan.steps[index].op].peers[peer][0],)
        failure = Failure(error, time.monotonic() - self._started, self._timeout_s)
        return self._transport.explain(self._plan, index, self._sequence, ranks, failure)


class _GlooOneCall:
    """A small flat exchange as one call of Gloo's own all_to_all. Made once for a plan, called each time: at these sizes
    every line of Python shows."""

    def __init__(self, transport: GlooTransport, plan: Plan, timeout_s: float) -> None:
        self._transport, self._plan, self._timeout_s = transport, plan, timeout_s
        self._group = transport.channels[Op.ALL_TO_ALL].group

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._transport.sequence += 1
        started = time.monotonic()
        try:
            wait_for_collective(self._group.alltoall_base(target, source, [], []), self._transport.board)
        except RuntimeError as error:
            transport = self._transport
            ranks = tuple(rank for rank, _ in transport.channels[Op.ALL_TO_ALL].peers if rank != transport.rank)
            failure = Failure(error, time.monotonic() - started, self._timeout_s)
            raise transport.explain(self._plan, 0, transport.sequence, ranks, failure) from error

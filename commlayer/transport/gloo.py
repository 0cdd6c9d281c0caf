"""CPU tensors over Gloo's messages, and through shared memory inside nodes: the transport of every plan on the CPU.

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
from datetime import timedelta
from typing import Any

import torch

from commlayer.failures.board import FailedStep, Failure, FailureBoard
from commlayer.failures.waits import end_wait, keep
from commlayer.failures.waits import wait as wait_for_collective
from commlayer.profiles.errors import ClusterError, DisagreementError
from commlayer.scheduler.moves import MAX_TAGS, Message, Moves, Region
from commlayer.scheduler.plan import Buffer, Op, Plan, Strategy
from commlayer.transport.contract import (
    CALLS_IN_FLIGHT,
    Buffers,
    Channel,
    Coder,
    Reducer,
    SizeMismatch,
    Whole,
    break_connections,
)
from commlayer.transport.shared_memory.node_group import SharedMemoryGroup
from commlayer.transport.shared_memory.work import SENT, Receive, Waitable

__all__ = ["ONE_CALL_BYTES", "GlooCall", "GlooTransport"]

ONE_CALL_BYTES = 128 << 10
"""Up to this send buffer a flat exchange is one Gloo call. Measured on the emulated cluster: at 64 KiB the call takes two
thirds of the messages' time, at 256 KiB and above the messages are as fast or faster. The same number on every rank."""
_BROKEN = ("clos", "connect", "timed out", "timeout", "socket", "reset by peer", "broken pipe", "gloo")
"""Words of a connection that failed, Gloo's or shared memory's."""


class GlooTransport:
    """CPU tensors over Gloo. Not thread-safe: one issuing thread at a time (Gloo gives wrong results otherwise)."""

    def __init__(self, channels: Mapping[Op, Channel], board: FailureBoard) -> None:
        self.channels = channels
        self.board = board
        self.rank = board.rank
        self.sequence = 0
        self.waited_for: set[Waitable] = set()
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
        wait = FailedStep(
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
        return self.board.blame(wait, failure, self.abort)

    def _disagreement(self, wait: FailedStep, mismatch: SizeMismatch) -> DisagreementError:
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


class GlooCall:
    """See Call. ``revise`` is for steps that become known only while the call runs.

    One loop for the messages of a step, with everything that it needs at hand: these lines run for every message, and a call of a
    function costs as much as they do.
    """

    __slots__ = (
        "_buffers",
        "_coder",
        "_far",
        "_near",
        "_plan",
        "_reduce",
        "_sends",
        "_sequence",
        "_started",
        "_steps",
        "_tag",
        "_timeout_s",
        "_transport",
    )

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
        self._transport, self._plan, self._steps, self._buffers = transport, plan, steps, buffers
        self._reduce, self._coder = reduce, coder
        self._started, self._timeout_s = time.monotonic(), timeout_s
        self._sequence = transport.sequence
        self._tag = self._sequence % CALLS_IN_FLIGHT * MAX_TAGS
        self._sends: list[tuple[Waitable, int, int]] = []
        # By step: what comes through shared memory, and what comes through Gloo, each with the peer's index in the channel.
        self._near: dict[int, list[Receive]] = {}
        self._far: dict[int, list[tuple[Waitable, int]]] = {}
        for index, moves in enumerate(
            steps
        ):  # receives first: a message that finds no receive waits a round trip for it
            if moves.receives:
                self._expect(index, moves.receives)

    def _expect(self, index: int, messages: Sequence[Message]) -> None:
        """Post receives. On a connection that is already gone posting raises, not waiting."""
        works: list[Waitable] = []
        self._post_all(index, messages, works, is_send=False)
        near, far = self._near.setdefault(index, []), self._far.setdefault(index, [])
        for work, message in zip(works, messages, strict=True):
            if work.__class__ is Receive:
                near.append(work)
            else:
                far.append((work, message.peer))

    def _post_all(self, index: int, messages: Sequence[Message], works: list[Waitable], *, is_send: bool) -> None:
        channel = self._transport.channels[self._plan.steps[index].op]
        group: Any = channel.group  # of torch's, or ours, which takes all messages of a step at once
        peers, buffers, base, parcels = channel.peers, self._buffers, self._tag, []
        for message in messages:
            region = message.region
            view = buffers[region.buffer][region.start : region.stop]
            parcels.append((view, peers[message.peer][1], base + message.tag))
        try:
            if group.__class__ is SharedMemoryGroup:
                (group.send_all if is_send else group.receive_all)(parcels, works)
            else:
                verb = group.send if is_send else group.recv
                for view, place, tag in parcels:
                    works.append(verb([view], place, tag))
        except RuntimeError as error:
            raise self._explained(index, messages[len(works)].peer, error) from error

    def require(self, earlier: int, index: int) -> None:
        del index  # the host waits, whoever comes next
        self._wait(earlier)

    def post(self, index: int) -> None:
        step, buffers = self._steps[index], self._buffers
        if step.sends:
            works: list[Waitable] = []
            self._post_all(index, step.sends, works, is_send=True)
            for work, message in zip(works, step.sends, strict=True):
                if work is not SENT:
                    self._sends.append((work, index, message.peer))
        for copy in step.copies:
            source, target = copy.source, copy.target
            buffers[target.buffer][target.start : target.stop].copy_(buffers[source.buffer][source.start : source.stop])
        if step.reductions:
            self._sum(step)
        if step.encodes or step.decodes:
            self._recode(step)

    def _sum(self, step: Moves) -> None:
        buffers = self._buffers
        for reduction in step.reductions:
            sources, coded = [], []
            for source in reduction.sources:
                sources.append(buffers[source.buffer][source.start : source.stop])
                coded.append(source.buffer is Buffer.ENCODED or source.buffer is Buffer.ARRIVED)
            target = buffers[reduction.target.buffer][reduction.target.start : reduction.target.stop]
            if True in coded:
                assert self._coder is not None
                self._coder.add(target, sources, coded)
            else:
                assert self._reduce is not None  # whoever starts a plan with sums says how to sum
                self._reduce(target, sources)

    def _recode(self, step: Moves) -> None:
        assert self._coder is not None  # whoever starts a plan with a wire format says how to encode
        for encode in step.encodes:
            self._coder.encode(self._view(encode.source), self._view(encode.target))
        for decode in step.decodes:
            self._coder.decode(self._view(decode.source), self._view(decode.target))

    def revise(self, index: int, moves: Moves, buffers: Buffers) -> None:
        """Say what step ``index``, not posted yet, will do; posts its receives beside those that it had."""
        self._buffers = buffers
        self._steps = [*self._steps[:index], moves, *self._steps[index + 1 :]]
        self._expect(index, moves.receives)

    def finish(self) -> None:
        for index in list(self._far):
            self._wait(index)
        for work, index, peer in self._sends:
            self._wait_for(work, index, peer)
        self._sends.clear()

    def _view(self, region: Region) -> torch.Tensor:
        return self._buffers[region.buffer][region.start : region.stop]

    def _wait(self, index: int) -> None:
        """Wait for what step ``index`` receives, and forget it (a Gloo receive may be waited for only once)."""
        near = self._near.get(index)
        if near:
            transport = self._transport
            group = transport.channels[self._plan.steps[index].op].group
            left = max(self._timeout_s - (time.monotonic() - self._started), 0.001)
            try:
                if transport.board.is_broken:
                    raise transport.board.woken()
                group.wait_all(near, left)  # type: ignore[attr-defined]  # of the one that made them
            except RuntimeError as error:
                waited = next((work for work in near if not work.is_done or work.error is error), near[0])
                raise self._explained(index, self._index_of(index, waited.peer.rank), error) from error
            near.clear()
        far = self._far.get(index)
        if far:
            for work, peer in far:
                self._wait_for(work, index, peer)
            far.clear()

    def _wait_for(self, work: Waitable, index: int, peer: int) -> None:
        transport = self._transport
        left = self._timeout_s - (time.monotonic() - self._started)
        # In this order: whoever breaks the board looks at the wait afterwards.
        transport.waited_for.add(work)
        try:
            if transport.board.is_broken or not work.wait(timedelta(seconds=max(left, 0.001))):
                raise transport.board.woken()
        except RuntimeError as error:
            raise self._explained(index, peer, error) from error
        finally:
            transport.waited_for.discard(work)

    def _index_of(self, index: int, place: int) -> int:
        """The index in the channel of the member at ``place`` of its group."""
        channel = self._transport.channels[self._plan.steps[index].op]
        return next(i for i, (_, other) in enumerate(channel.peers) if other == place)

    def _explained(self, index: int, peer: int, error: RuntimeError) -> Exception:
        """The error to raise for a wait, or a post, that broke.

        Raises ``error`` itself where no peer is to blame for it: a fault of our own would send its reader to another rank's log.
        """
        if not isinstance(error, SizeMismatch) and not any(word in str(error).lower() for word in _BROKEN):
            raise error
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
            ranks = transport.board.others(rank for rank, _ in transport.channels[Op.ALL_TO_ALL].peers)
            failure = Failure(error, time.monotonic() - started, self._timeout_s)
            raise transport.explain(self._plan, 0, transport.sequence, ranks, failure) from error

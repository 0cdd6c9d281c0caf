"""CPU tensors over Gloo's messages, and through shared memory inside nodes: the transport of every
plan on the CPU.

Gloo's collectives are not used: its all_gather costs 2 to 2.5 times the direct form, and none of
them can receive where the bytes finally belong. Point-to-point messages can: every piece is
received in place, all receives of a call are posted before its first send (so that no sender waits
for a receiver), and Gloo's own I/O threads move what is posted. The one exception is a small flat
exchange, where Gloo's single call costs less than two messages and their bookkeeping. A step of an
earlier chunk is ahead of a later one on every connection (TCP keeps order), which is the rule that
a resource does one step at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from commlayer.failures.board import FailedStep, Failure, FailureBoard
from commlayer.failures.waits import can_end_waits, end_wait, keep, wait_for_message, woken
from commlayer.failures.waits import wait as wait_for_collective
from commlayer.profiles.errors import ClusterError, DisagreementError
from commlayer.scheduler.moves import MAX_TAGS, Message, Moves, Region
from commlayer.scheduler.plan import Buffer, Op, Plan, Strategy
from commlayer.transport.call_memory import Buffers, Reducer
from commlayer.transport.contract import (
    CALLS_IN_FLIGHT,
    FIRST_TAG,
    CallMismatch,
    Channel,
    Coder,
    SizeMismatch,
    break_connections,
)
from commlayer.transport.marks import mark_text
from commlayer.transport.shared_memory.peers import SENT, Receive, Send, Waitable
from commlayer.transport.shared_memory.shared_messages import INLINE_BYTES, Posting, SharedMemoryGroup

__all__ = ["ONE_CALL_BYTES", "GlooCall", "GlooOneCall", "GlooScript", "GlooStep", "GlooTransport", "is_one_call"]

ONE_CALL_BYTES = 128 << 10
"""Up to this send buffer a flat exchange is one Gloo call. Measured on the emulated cluster: at 64
KiB the call takes two thirds of the messages' time, at 256 KiB and above the messages are as fast
or faster. The same number on every rank."""
_BY_BYTES = 32 << 10
"""Up to this size a copy between buffers is one of bytes: torch's costs more to call, and lets
other threads run meanwhile."""
_STRIPE_BYTES = 64 << 10
"""The least part of a message that goes over a connection of its own: below it a message costs more
than its bytes do."""
_CODED = (Buffer.ENCODED, Buffer.ARRIVED)
"""The buffers whose regions are encoded messages."""
_BROKEN = ("clos", "connect", "timed out", "timeout", "socket", "reset by peer", "broken pipe", "gloo")
"""Words of a connection that failed, Gloo's or shared memory's."""


_BYTE = torch.uint8
_NOTHING: tuple[None, tuple[()]] = None, ()
"""The receives of a step that has none, or for none of which anybody has waited."""

_FarPosting = tuple[int, int, Buffer, int, int, int]
"""A message to a rank of another node: as to a neighbour, and over which of the channel's
connections."""
_Parted = tuple[Sequence[Posting], Sequence[_FarPosting]]


class GlooTransport:
    """CPU tensors over Gloo. Not thread-safe: one issuing thread at a time (Gloo gives wrong
    results otherwise)."""

    def __init__(self, channels: Mapping[Op, Channel], board: FailureBoard) -> None:
        self.channels = channels
        self.shared = {op: _shared(channel) for op, channel in channels.items()}
        self.far: dict[Op, tuple[dist.ProcessGroup, ...]] = {
            op: (channel.group if shared is None else shared.group,)
            for op, channel in channels.items()
            for shared in (self.shared[op],)
        }
        """The Gloo groups, and what carries messages inside the node instead."""
        self.others = list[dist.ProcessGroup]()
        """Groups of the same ranks, in the same order, whose connections take parts of large
        messages to other nodes."""
        self.board = board
        self.rank = board.rank
        self.sequence = 0
        self.waited_for: set[Waitable] = set()
        """The messages that calls of ours wait for: where the board breaks, these waits are ended
        from another thread."""
        self.can_end_waits = can_end_waits()
        self._is_aborted = False
        board.on_break(self._wake)

    def _wake(self) -> None:
        """The board is broken: end the waits that are under way, and break connections."""
        for work in list(self.waited_for):
            end_wait(work)
        self.abort()

    def widen(self, others: Sequence[dist.ProcessGroup]) -> None:
        """Have plans that ask for several connections send parts of large messages over those of
        these groups too. For a transport all of whose channels have the same ranks in the same
        order."""
        self.others += others
        for op, groups in self.far.items():
            self.far[op] = (*groups, *others)

    def compile(self, plan: Plan, steps: Sequence[Moves]) -> GlooScript:
        """Part the messages of ``steps``, this rank's moves in each step of ``plan``, by how they
        go."""
        compiled = tuple(self.compile_step(plan, *each) for each in enumerate(steps))
        return GlooScript(plan, compiled, is_one_call=is_one_call(plan, self.channels))

    def compile_step(self, plan: Plan, index: int, moves: Moves) -> GlooStep:
        """Part the messages of step ``index`` alone."""
        op = plan.steps[index].op
        peers = self.channels[op].peers if op in self.channels else ()  # none where nothing moves between ranks
        shared = self.shared.get(op)
        near = () if shared is None else shared.neighbours
        sends, receives = (_parted(each, peers, near, plan.connections) for each in (moves.sends, moves.receives))
        return GlooStep(op, moves, sends, receives)

    def start(
        self,
        script: GlooScript,
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None = None,
        coder: Coder | None = None,
        mark: int = 0,
    ) -> GlooCall | GlooOneCall:
        self.sequence += 1
        if script.is_one_call:
            return GlooOneCall(self, script, buffers, timeout_s)
        return GlooCall(self, script, buffers, timeout_s, reduce, coder, mark)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        # A tensor that is made in inference mode can be written in it only, and this one is kept.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def abort(self, why: str | None = None) -> None:
        """Break our connections, so that ranks that wait for this one wake up now instead of at
        their timeout.

        Gloo's own abort() leaves them open. A receive that times out makes Gloo close every
        connection of its group, so one that nobody will ever answer is posted, and timed out.
        """
        if why is not None:
            self.board.leave(why)
        if self._is_aborted:
            return
        self._is_aborted = True
        for channel in set(self.channels.values()):
            for group in (channel.group, *self.others):
                break_connections(group, [member for rank, member in channel.peers if rank != self.rank])

    def release(self) -> list[dist.ProcessGroup]:
        """Forget the groups, and return them: only the list refers to them then, as far as the
        transport is concerned."""
        groups = [*(channel.group for channel in dict.fromkeys(self.channels.values())), *self.others]
        self.channels, self.shared, self.far, self.others = {}, {}, {}, []
        return groups

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of it, whatever fails: others wait for this rank in each channel
            stack.callback(self.release)
            for channel in reversed(dict.fromkeys(self.channels.values())):
                stack.callback(_part, channel, self.board)


def is_one_call(plan: Plan, channels: Mapping[Op, Channel]) -> bool:
    """Whether ``plan`` is run as one call of Gloo's own, which is cheaper than its messages.
    The same on every rank."""
    if plan.strategy is not Strategy.FLAT or plan.traffic.logical_bytes > ONE_CALL_BYTES:
        return False
    channel = channels.get(Op.ALL_TO_ALL)
    return channel is not None and channel.is_in_order


def _part(channel: Channel, board: FailureBoard) -> None:
    """Wait for the others: a peer may still be reading what we sent. Bounded by the group's
    timeout."""
    try:
        wait_for_collective(channel.group.barrier(), board)
    except RuntimeError as error:
        ranks = [rank for rank, _ in channel.peers]
        raise ClusterError(
            f"rank {board.rank}: not all of ranks {ranks} (group {channel.name}) came to close their Communicator: "
            "every rank of the grid must close it; look at the log of the one that did not"
        ) from error
    finally:
        if board.has_abandoned:
            keep(channel.group)


def _explained(
    transport: GlooTransport, plan: Plan, index: int, sequence: int, peers: tuple[int, ...], failure: Failure
) -> Exception:
    """The error for a wait of step ``index`` that broke; the other ranks are told, and woken, first.

    Where calls differ, in sizes or in more, nobody is dead, and nobody must be blamed: the others
    are told what was found here.
    """
    step = plan.steps[index]
    wait = FailedStep(
        rank=transport.rank,
        peers=peers,
        group=transport.channels[step.op].name,
        collective=plan.traffic.collective,
        plan=plan.name,
        step=step.op.value,
        chunk=step.chunk,
        sequence=sequence,
    )
    mismatch = failure.cause
    if not isinstance(mismatch, SizeMismatch):
        return transport.board.blame(wait, failure, transport.abort)
    peer = peers[0] if peers else mismatch.peer
    if isinstance(mismatch, CallMismatch):
        own, theirs = mark_text(mismatch.expected), mark_text(mismatch.got)
        why = f"calls {own}, but rank {peer} calls {theirs}"
        words = (
            f"rank {wait.rank} {why}: ranks must make the same calls, of the same dtype, operation and root; here: {wait}. "
            "COMMLAYER_DEBUG=detail compares calls before they move a byte"
        )
    else:
        expected, got = mismatch.expected_bytes, mismatch.got_bytes
        why = f"expected {expected} bytes from rank {peer} and got {got}"
        words = (
            f"expected {expected} bytes from rank {peer}, got {got}: ranks must make the same calls, with the same sizes; "
            f"here: {wait}. COMMLAYER_DEBUG=detail compares calls before they move a byte and names those that differ"
        )
    transport.abort(f"{why}, so it left the group")
    return DisagreementError(f"{words}. Nothing more can be sent here: restart the job")


class GlooStep:
    """One step as this transport posts it: messages to and from neighbours, through shared memory,
    and to and from others."""

    __slots__ = ("far_receives", "far_sends", "moves", "near_receives", "near_sends", "op", "shares", "sums")

    def __init__(self, op: Op, moves: Moves, sends: _Parted, receives: _Parted) -> None:
        self.op, self.moves = op, moves
        self.near_sends, self.far_sends = sends
        self.near_receives, self.far_receives = receives
        near = (*self.near_sends, *self.near_receives)
        self.shares = any(stop - start > INLINE_BYTES for _, _, _, start, stop in near)
        """Whether a message to or from a neighbour lies in memory that they share, where its sender
        may wait for its reader."""
        self.sums = tuple((each, [source.buffer in _CODED for source in each.sources]) for each in moves.reductions)
        """Each reduction, and which of its sources are encoded."""


class GlooScript:
    """A plan as this transport posts it. ``receiving``: the steps that receive. ``is_one_call``: it
    is one call of Gloo's own. ``shares``: one of its steps does."""

    __slots__ = ("is_one_call", "plan", "receiving", "shares", "steps")

    def __init__(self, plan: Plan, steps: tuple[GlooStep, ...], *, is_one_call: bool = False) -> None:
        self.plan, self.steps, self.is_one_call = plan, steps, is_one_call
        self.receiving = tuple(index for index, step in enumerate(steps) if step.near_receives or step.far_receives)
        self.shares = any(step.shares for step in steps)


class GlooCall:
    """See :class:`~commlayer.transport.contract.StartedPlan`. ``revise`` is for steps that become
    known only while the call runs.

    One loop for the messages of a step, with everything that it needs at hand: these lines run for
    every message, and a call of a function costs as much as they do.
    """

    __slots__ = (
        "_buffers",
        "_coder",
        "_expected",
        "_mark",
        "_plan",
        "_reduce",
        "_sends",
        "_sequence",
        "_serves",
        "_started",
        "_steps",
        "_tag",
        "_timeout_s",
        "_transport",
    )

    def __init__(
        self,
        transport: GlooTransport,
        script: GlooScript,
        buffers: Buffers,
        timeout_s: float,
        reduce: Reducer | None,
        coder: Coder | None,
        mark: int,
    ) -> None:
        self._transport, self._plan = transport, script.plan
        self._steps, self._buffers = script.steps, buffers
        self._reduce, self._coder, self._mark = reduce, coder, mark
        self._started, self._timeout_s = time.monotonic(), timeout_s
        self._sequence = transport.sequence
        self._tag = FIRST_TAG + self._sequence % CALLS_IN_FLIGHT * MAX_TAGS
        self._serves = script.shares
        """Whether a neighbour may wait for this rank to take in what has come, or to go on sending,
        while it waits for others. For small messages nobody does: a look would cost as much as
        one."""
        self._sends: list[tuple[Waitable, int, int]] = []
        """Work, step, and the member that it goes to."""
        self._expected: dict[int, tuple[Receive | None, list[tuple[dist.Work, int]]]] = {}
        """The messages by step: what comes from neighbours, and what comes from others, with whom
        it comes from."""
        self._expect(script.receiving)  # first: a message that finds no receive waits a round trip for it

    def _expect(self, indices: Sequence[int]) -> None:
        """Post the receives of these steps. On a connection that is already gone posting raises,
        not waiting."""
        transport, buffers, base = self._transport, self._buffers, self._tag
        for index in indices:
            step = self._steps[index]
            near, far = self._expected.get(index, (None, []))
            posted = 0
            try:
                if step.near_receives:
                    shared: Any = transport.shared[step.op]
                    near = near or Receive(shared, self._mark)
                    posted = -len(near.missing)
                    shared.receive_all(step.near_receives, buffers, base, near)
                for member, tag, buffer, start, stop, connection in step.far_receives:
                    part = buffers[buffer][start, stop, _BYTE]
                    far.append((transport.far[step.op][connection].recv([part], member, base + tag), member))
                    posted += 1
            except RuntimeError as error:
                posted += 0 if near is None else len(near.missing)
                peers = _members(step.near_receives, step.far_receives)
                raise self._explained(index, peers[posted], error) from error
            self._expected[index] = near, far

    @property
    def steps(self) -> Sequence[Moves]:
        return [step.moves for step in self._steps]

    def require(self, earlier: int, index: int) -> None:
        """Wait for what step ``earlier`` receives, and forget it (a Gloo receive may be waited for
        only once)."""
        del index  # the host waits, whoever comes next
        near, far = self._expected.pop(earlier, _NOTHING)
        if near is not None:
            transport = self._transport
            shared: Any = transport.shared[self._steps[earlier].op]
            try:
                if transport.board.is_broken:
                    raise woken()
                shared.wait_for(near, max(self._timeout_s - (time.monotonic() - self._started), 0.001))
            except RuntimeError as error:
                raise self._explained(earlier, near.blamed, error) from error
        if far:
            if self._serves and (group := self._transport.shared[self._steps[earlier].op]) is not None:
                group.serve()  # neighbours need not wait for what comes from far away
            for work, member in far:
                self._wait_for(work, earlier, member)

    def post(self, index: int) -> None:
        step, buffers = self._steps[index], self._buffers
        if step.near_sends or step.far_sends:
            self._send(index, step)
        moves = step.moves
        for copy in moves.copies:
            source, target = copy.source, copy.target
            if target.stop - target.start <= _BY_BYTES:
                arrived = buffers[target.buffer].bytes
                arrived[target.start : target.stop] = buffers[source.buffer].bytes[source.start : source.stop]
            else:
                _bytes_of(buffers, target).copy_(_bytes_of(buffers, source))
        coder = self._coder
        for reduction, coded in step.sums:
            if True in coded:
                assert coder is not None  # whoever starts a plan with a wire format says how to encode
                parts = [_bytes_of(buffers, source) for source in reduction.sources]
                coder.add(_bytes_of(buffers, reduction.target), parts, coded)
            else:
                assert self._reduce is not None  # whoever starts a plan with sums says how to sum
                dtype, target = self._reduce.dtype, reduction.target
                parts = [buffers[each.buffer][each.start, each.stop, dtype] for each in reduction.sources]
                self._reduce.reduce(buffers[target.buffer][target.start, target.stop, dtype], parts)
        if moves.encodes or moves.decodes:
            assert coder is not None  # as above
            for encode in moves.encodes:
                coder.encode(_bytes_of(buffers, encode.source), _bytes_of(buffers, encode.target))
            for decode in moves.decodes:
                coder.decode(_bytes_of(buffers, decode.source), _bytes_of(buffers, decode.target))

    def _send(self, index: int, step: GlooStep) -> None:
        transport, buffers, base, sends = self._transport, self._buffers, self._tag, self._sends
        near: list[Waitable] = []
        posted = 0
        try:
            if step.near_sends:
                shared: Any = transport.shared[step.op]
                shared.send_all(step.near_sends, buffers, base, near, self._mark)
            for member, tag, buffer, start, stop, connection in step.far_sends:
                part = buffers[buffer][start, stop, _BYTE]
                work = transport.far[step.op][connection].send([part], member, base + tag)
                sends.append((work, index, member))
                posted += 1
        except RuntimeError as error:
            peers = _members(step.near_sends, step.far_sends)
            raise self._explained(index, peers[len(near) + posted], error) from error
        for near_work, parcel in zip(near, step.near_sends, strict=True):
            if near_work is not SENT:
                sends.append((near_work, index, parcel[0]))
                self._serves = True

    def revise(self, index: int, step: GlooStep, buffers: Buffers) -> None:
        """Say what step ``index``, not posted yet, will do; posts its receives beside those that it
        had."""
        self._buffers = buffers
        self._serves = self._serves or step.shares
        self._steps = (*self._steps[:index], step, *self._steps[index + 1 :])
        self._expect((index,))

    def finish(self) -> None:
        for index in list(self._expected):
            self.require(index, index)
        if self._sends:
            if self._serves and (group := self._transport.shared[self._steps[self._sends[0][1]].op]) is not None:
                group.serve()
            for work, index, member in self._sends:
                self._wait_for(work, index, member)
            self._sends.clear()

    def _wait_for(self, work: Waitable, index: int, member: int) -> None:
        transport = self._transport
        left_s = max(self._timeout_s - (time.monotonic() - self._started), 0.001)
        # In this order: whoever breaks the board looks at the wait afterwards.
        transport.waited_for.add(work)
        shared = transport.shared[self._steps[index].op]
        try:
            board, timeout = transport.board, timedelta(seconds=left_s)
            if board.is_broken:
                raise woken()
            if work.__class__ is Send:
                has_ended = work.wait(timeout)
            elif shared is not None and shared.full:
                has_ended = shared.wait_writing(lambda: wait_for_message(work, timeout, board))
            else:  # what wait_for_message asks
                has_ended = work.wait(timeout) if transport.can_end_waits else wait_for_message(work, timeout, board)
            if not has_ended:
                raise woken()
        except RuntimeError as error:
            if shared is not None and work.__class__ is not Send:
                shared.failed(error, left_s)
            raise self._explained(index, member, error) from error
        finally:
            transport.waited_for.discard(work)

    def _explained(self, index: int, member: int, error: RuntimeError) -> Exception:
        """The error to raise for a wait, or a post, that broke; ``member``: whom it was
        for. Of messages that are posted together, that behind those which were posted is to blame.

        Raises ``error`` itself where no peer is to blame for it: a fault of our own would send its
        reader to another rank's log.
        """
        if not isinstance(error, SizeMismatch) and not any(word in str(error).lower() for word in _BROKEN):
            raise error
        peers = self._transport.channels[self._steps[index].op].peers
        ranks = tuple(rank for rank, other in peers if other == member)
        failure = Failure(error, time.monotonic() - self._started, self._timeout_s)
        return _explained(self._transport, self._plan, index, self._sequence, ranks, failure)


def _bytes_of(buffers: Buffers, region: Region) -> torch.Tensor:
    return buffers[region.buffer][region.start, region.stop, _BYTE]


def _shared(channel: Channel) -> SharedMemoryGroup | None:
    group: Any = channel.group  # of torch's, or ours
    return group if isinstance(group, SharedMemoryGroup) else None


def _members(near: Sequence[Posting], far: Sequence[_FarPosting]) -> list[int]:
    """Whom each message is for or from, in the order in which they are posted."""
    return [*(each[0] for each in near), *(each[0] for each in far)]


def _parted(
    messages: Sequence[Message], peers: Sequence[tuple[int, int]], near: Collection[int], connections: int
) -> _Parted:
    """Messages as the transport posts them: those of neighbours, and others, large ones in a part
    for each connection.

    How a message is parted follows from its size, which who sends and who receives it know alike.
    """
    inside, outside = list[Posting](), list[_FarPosting]()
    for message in messages:
        member, region = peers[message.peer][1], message.region
        if member in near:
            inside.append((member, message.tag, region.buffer, region.start, region.stop))
            continue
        parts = max(1, min(connections, region.size // _STRIPE_BYTES))
        cuts = [region.start + region.size * part // parts for part in range(parts + 1)]
        for connection, (start, stop) in enumerate(pairwise(cuts)):
            outside.append((member, message.tag, region.buffer, start, stop, connection))
    return inside, outside


class GlooOneCall:
    """A small flat exchange as one call of Gloo's own all_to_all. See
    :class:`~commlayer.transport.contract.StartedPlan`."""

    __slots__ = ("_buffers", "_script", "_sequence", "_started", "_timeout_s", "_transport", "_work")

    def __init__(self, transport: GlooTransport, script: GlooScript, buffers: Buffers, timeout_s: float) -> None:
        self._transport, self._script, self._buffers = transport, script, buffers
        self._started, self._timeout_s = time.monotonic(), timeout_s
        self._sequence = transport.sequence
        self._work: dist.Work | None = None

    @property
    def steps(self) -> Sequence[Moves]:
        return [step.moves for step in self._script.steps]

    def require(self, earlier: int, index: int) -> None:
        del earlier, index  # it has one step
        self.finish()

    def post(self, index: int) -> None:
        del index
        source, target = self._buffers[Buffer.INPUT].tensor, self._buffers[Buffer.OUTPUT].tensor
        try:
            self._work = self._transport.channels[Op.ALL_TO_ALL].group.alltoall_base(target, source, [], [])
        except RuntimeError as error:
            raise self._explained(error) from error

    def finish(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            wait_for_collective(work, self._transport.board)
        except RuntimeError as error:
            raise self._explained(error) from error

    def _explained(self, error: RuntimeError) -> Exception:
        transport = self._transport
        peers = transport.channels[Op.ALL_TO_ALL].peers
        ranks = tuple(rank for rank, _ in peers if rank != transport.rank)
        failure = Failure(error, time.monotonic() - self._started, self._timeout_s)
        return _explained(transport, self._script.plan, 0, self._sequence, ranks, failure)

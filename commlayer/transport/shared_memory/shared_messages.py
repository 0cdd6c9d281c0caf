"""Messages between CPU ranks of one node through shared memory, behind the two verbs of a process
group that a plan needs.

A sender copies its tensor into a slab of memory that the node's ranks share and writes a line about
it to the receiver's socket; the receiver copies it out where it belongs, and says so in its next
line, which frees the slab's bytes. A tensor that goes to several ranks (all_gather, broadcast) is
copied in once. Small messages travel in the line itself. Messages to other nodes are handed to the
Gloo group beneath.

- *Posting never blocks.* A slab grows by as much as is posted, a line that a full socket refuses is
  kept and sent later. So ranks may all send to each other before anybody receives.
- *Whoever waits works.* Any wait takes in whatever arrives, for other messages too; ranks that wait
  for different calls of theirs still serve each other.
- *A send has ended* when its tensor may be changed, as with Gloo, which is at once; but a rank that
  has ``AHEAD_BYTES`` that nobody has read yet waits for its receivers, so that memory stays
  bounded.
- *Failures* look like Gloo's. The kernel closes a dead rank's sockets, so its peers wake up at once
  ("closed"); a wait that takes too long raises "Timed out" and closes all connections, of Gloo too,
  so that the others wake up.

Why sockets ring the bell: one write and one read a message, in order, with timeouts, with the
memory barriers that shared memory needs, and an end that is noticed by itself; with several ranks
on a core nothing may spin. Rejected:

- Gloo's own small messages as bells. They go through I/O threads, so a byte takes several times as
  long on busy cores.
- Futexes or semaphores in the memory. Nobody wakes up when a peer dies, so every wait must be cut
  into slices that look after the peer; and a plain store from Python is no barrier on ARM. (Not
  measured.)
- Reading the sender's own memory (process_vm_readv), which saves one of two copies where each rank
  gets something else. It takes the right to trace other processes, which Ubuntu's kernels do not
  grant by default, and an all_gather, one copy in and many out, has nothing to save.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from commlayer.failures.descriptors import explained, of_shared_memory, shortfall
from commlayer.failures.forks import disown_in_child
from commlayer.failures.waits import Board, is_timeout, on_a_thread
from commlayer.profiles.errors import ClusterError, TensorError
from commlayer.scheduler.moves import Buffer
from commlayer.settings import Settings
from commlayer.transport.call_memory import Buffers, CallMemory
from commlayer.transport.contract import CallMismatch, SizeMismatch, break_connections
from commlayer.transport.shared_memory.meeting import meet
from commlayer.transport.shared_memory.peers import (
    AHEAD_BYTES,
    INLINE,
    READ,
    SENT,
    SLAB,
    Arrival,
    Expected,
    OtherWork,
    Peer,
    Receive,
    Send,
    Waitable,
    head,
)
from commlayer.transport.shared_memory.slabs import Slab

__all__ = [
    "AHEAD_BYTES",
    "INLINE_BYTES",
    "Posting",
    "SharedMemoryGroup",
    "Waitable",
    "sharing_memory",
    "wants_shared_memory",
]

INLINE_BYTES = 32 << 10
"""Up to this size a message travels in its line: one write and one read, and nothing to give
back."""
Posting = tuple[int, int, Buffer, int, int]
"""A message to be posted: the other member of the group, its tag, and the bytes of which buffer,
from where to where."""
_BYTE = torch.uint8
_LOOK_S = 0.001
_NO_PATIENCE_S = 0.001
"""The timeout of the wait in :func:`~commlayer.transport.contract.break_connections`."""


class SharedMemoryGroup:
    """A process group's send and recv, served inside this rank's node through shared memory and
    elsewhere by ``group``.

    ``group``: Gloo's, with nothing under way; ``nodes``: for each node its members, as ranks of the
    group. Made by all members together; where a node's ranks cannot share memory a rank that sees
    why warns, and everything there goes through ``group``. ``shares[k]`` says whether node k's
    ranks do, and is the same on all ranks.

    One thread at a time may post, several may wait. Raises RuntimeError where a rank does not come
    within ``timeout_s``, or where ``board``, on which its failures are known, is broken;
    ClusterError where this process may open too few files.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        nodes: Sequence[Sequence[int]],
        timeout_s: float,
        board: Board | None = None,
    ) -> None:
        self.group, self.rank = group, rank
        self.timeout_s = timeout_s
        self._others = [member for node in nodes for member in node if member != rank]
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_polling = False
        self._num_waiting = 0  # for the thread that polls
        self._is_closed = False
        self._peers: dict[int, Peer] = {}
        self.full = set[int]()
        """The neighbours for whom there are lines that their sockets have refused so far."""
        self.neighbours: Collection[int] = self._peers.keys()
        """The members that share memory with this rank."""
        self._matched: deque[tuple[Peer, Expected, Arrival]] = deque()
        here = next(node for node in nodes if rank in node)
        what = f"member {rank} of the group, memory shared by {len(here)} ranks of a node"
        short = shortfall(of_shared_memory(len(here)), what) if len(here) > 1 else ""
        try:
            neighbourhood, self.shares = meet(group, rank, nodes, timeout_s, is_able=not short, board=board)
        except (
            RuntimeError
        ):  # its threads are not to wait for ranks that are gone when it is freed, nor others for this one
            break_connections(group, self._others)
            raise
        if short:  # only now: a rank that does not come leaves the others waiting in there
            raise ClusterError(short)
        if neighbourhood is not None:
            self._segment = neighbourhood.segment
            self.slab = Slab(neighbourhood.segment, here.index(rank))
            self._poll = select.epoll()
            self._by_fd: dict[int, Peer] = {}
            for slab, connection in neighbourhood.sockets.items():
                peer = Peer(here[slab], slab, connection, self._poll, self.full)
                self._peers[peer.rank] = self._by_fd[connection.fileno()] = peer
            disown_in_child(self)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Waitable:
        """Start sending ``tensors[0]``, 1-D uint8 contiguous, to member ``peer``; it must not
        change until the work's wait.

        Raises RuntimeError where the connection is closed, TensorError for another kind of tensor.
        """
        if peer not in self._peers:
            return self._other(self.group.send, tensors[0], peer, tag)
        works: list[Waitable] = []
        self.send_all([(peer, tag, Buffer.INPUT, 0, tensors[0].numel())], {Buffer.INPUT: _memory(tensors[0])}, 0, works)
        return works[0]

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Waitable:
        """Expect a message of exactly ``tensors[0]``'s size, 1-D uint8 contiguous, from member
        ``peer``. Raises as send.

        Messages of one peer and tag come in the order in which they were sent.
        """
        if peer not in self._peers:
            return self._other(self.group.recv, tensors[0], peer, tag)
        receive, buffers = Receive(self), {Buffer.OUTPUT: _memory(tensors[0])}
        self.receive_all([(peer, tag, Buffer.OUTPUT, 0, tensors[0].numel())], buffers, 0, receive)
        return receive

    def send_all(
        self, messages: Sequence[Posting], buffers: Buffers, tag: int, works: list[Waitable], mark: int = 0
    ) -> None:
        """Start sending ``messages``, all to neighbours, whose works are appended; lines to one
        peer go together.

        ``tag``: the first of the call's, to which a message's is added; ``mark``: of the call.
        Where it raises, the message behind those whose works there are is to blame. Raises
        RuntimeError where a connection is closed.
        """
        short: dict[Peer, list[int]] = {}  # the works of what is in lines that are still to be flushed
        with self._lock:
            try:
                for rank, offset, buffer, start, stop in messages:
                    peer = self._peers[rank]
                    if peer.ended is not None:
                        raise self._ended(peer)
                    peer.unsaid_bytes = 0
                    if stop - start > INLINE_BYTES:
                        tensor = buffers[buffer][start, stop, _BYTE]
                        works.append(self._send_block(tensor, peer, tag + offset, mark))
                        continue
                    peer.outbox += head(INLINE, mark, tag + offset, stop - start, 0)
                    peer.outbox += buffers[buffer].bytes[start:stop]
                    short.setdefault(peer, []).append(len(works))
                    works.append(SENT)
            finally:
                for peer, indices in short.items():
                    if peer.rank not in self.full:
                        peer.flush()
                    if peer.rank in self.full:
                        for index in indices:
                            works[index] = Send(self, peer, None)

    def _send_block(self, tensor: torch.Tensor, peer: Peer, tag: int, mark: int) -> Send:
        """At once, so that the peer copies it out while the next one is copied in. Raises
        RuntimeError."""
        block, size = self.slab.find(tensor), tensor.numel()
        if block is None:
            if self.slab.would_grow(size):
                self._await_news(0)  # perhaps much has been read since we last looked
            try:
                block = self.slab.place(tensor)
            except OSError as error:
                raise RuntimeError(f"no shared memory for a message of {size} bytes: {explained(error)}") from error
        block.readers.append(peer.rank)
        peer.outbox += head(SLAB, mark, tag, size, block.start)
        if peer.rank not in self.full:
            peer.flush()
        return Send(self, peer, block)

    def receive_all(self, messages: Sequence[Posting], buffers: Buffers, tag: int, receive: Receive) -> None:
        """Expect ``messages``, all from neighbours, as part of ``receive``. As :meth:`send_all`;
        where it raises, the message behind those that are missing is to blame."""
        with self._lock:
            for rank, offset, buffer, start, stop in messages:
                peer = self._peers[rank]
                expected = receive, buffers[buffer], start, stop
                arrivals = peer.arrived.get(tag + offset)
                if arrivals:  # copied when somebody waits: posting is to be cheap
                    self._matched.append((peer, expected, arrivals.popleft()))
                    if not arrivals:
                        del peer.arrived[tag + offset]
                else:
                    if peer.ended is not None:
                        raise self._ended(peer)
                    peer.posted.setdefault(tag + offset, deque()).append(expected)
                receive.missing.append(peer)
            receive.first = receive.first or peer

    def alltoall_base(self, *arguments: Any) -> dist.Work:
        """Gloo's own."""
        self.serve()  # the neighbours need not wait for what comes from far away
        return self.group.alltoall_base(*arguments)

    def barrier(self) -> dist.Work:
        """Gloo's own: between all members."""
        self.serve()
        return self.group.barrier()

    def wait_for(self, awaited: Send | Receive, timeout_s: float) -> None:
        """Return when ``awaited`` is completed, serving all neighbours meanwhile. Raises as
        Waitable.wait does."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self.slab.sent.clear()
            if self._matched:
                self._deliver_matched()
            while not awaited.is_completed():
                peer, left_s = awaited.peer, until - time.monotonic()
                if left_s <= 0 or peer.ended is not None:
                    why = peer.ended or (
                        f"Timed out waiting {timeout_s * 1000:.0f}ms for {awaited.verb} operation to complete (member "
                        f"{self.rank} of the group, peer member {peer.rank}, shared memory)"
                    )
                    self.failed(RuntimeError(why), timeout_s)
                    # An error that no variable here refers to: with its traceback it would keep the group.
                    raise RuntimeError(why)
                self._await_news(left_s)
            if awaited.error is not None:
                raise awaited.error

    def wait_other(self, work: dist.Work, timeout: timedelta | None) -> bool:
        """Wait for a message of the group beneath. Raises as Waitable.wait does."""
        self.serve()  # the neighbours need not wait for what comes from far away
        try:
            return self.wait_writing(lambda: work.wait(timeout) if timeout else work.wait())
        except RuntimeError as error:
            self.failed(error, timeout.total_seconds() if timeout else 0.0)
            raise

    def wait_writing(self, wait: Callable[[], bool]) -> bool:
        """``wait()``, which is for somebody on another node. While sockets refuse lines, on a thread,
        and this one writes them when there is room: else ranks of two nodes may wait in a circle,
        each for one whose neighbour keeps its line. Raises as ``wait``."""
        if not self.full:
            return wait()
        answer = on_a_thread(wait)
        while self.full and not answer.done():
            with self._lock:
                self._await_news(_LOOK_S)
        return answer.result()

    def failed(self, error: RuntimeError, timeout_s: float) -> None:
        """A wait that was to last ``timeout_s``, for a message here or of the group beneath, has
        raised ``error``.

        Time-outs break connections, as Gloo's do. A peer that has closed does not: whoever waited
        for it first writes down why it leaves (see failures/board.py). But a wait of no patience is
        one that is to break connections.
        """
        if timeout_s <= _NO_PATIENCE_S or is_timeout(error):
            self.break_connections()

    def serve(self) -> None:
        """Take in what has arrived already, and answer it."""
        if self._peers:
            with self._lock:
                self.slab.sent.clear()
                if self._matched:
                    self._deliver_matched()
                self._await_news(0)

    def break_connections(self) -> None:
        """Close all connections, of ``group`` too, so that whoever waits for this rank wakes up."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for peer in self._peers.values():
                peer.ended = peer.ended or "Connection closed by this rank after a failure"
                peer.shutdown()
            self._changed.notify_all()
        break_connections(self.group, self._others)

    def close(self) -> None:
        """Let go of sockets and memory. Not collective: sends that were waited for still arrive.
        Nobody may be waiting."""
        with self._lock:
            if not self._peers or self._poll.closed:
                return
            self._is_closed = True
            self._matched.clear()
            self.slab.sent.clear()
            for peer in self._peers.values():
                peer.ended = peer.ended or "Connection closed: this rank has closed the group"
                peer.socket.close()
                peer.posted.clear()  # a receive refers to this group, whose Gloo would live until Python looks for cycles
            self._poll.close()
            self._segment.close()

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`. The parent's
        connections stay, and end with the parent."""
        self._lock = threading.RLock()
        self._changed, self._is_polling, self._num_waiting = threading.Condition(self._lock), False, 0
        self.close()  # this process's copies; nothing is said to anybody

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # not all of it was made
            self.close()

    def _ended(self, peer: Peer) -> RuntimeError:
        """Posting to a peer that is gone breaks everything: whoever does so is leaving, or will
        when this is raised."""
        self.break_connections()
        return RuntimeError(peer.ended)

    def _other(
        self,
        verb: Callable[[list[torch.Tensor], int, int], dist.Work],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
    ) -> Waitable:
        if not self._peers:
            return verb([tensor], peer, tag)
        try:
            return OtherWork(self, verb([tensor], peer, tag))
        except RuntimeError:  # as in _ended
            self.break_connections()
            raise

    def _await_news(self, timeout_s: float) -> None:
        """Take in what has been written; wait until somebody writes, or the time is over (one
        thread for all that wait)."""
        if self._is_polling:
            if timeout_s > 0:  # until the thread that polls has taken something in
                self._num_waiting += 1
                self._changed.wait(timeout_s)
                self._num_waiting -= 1
            return
        self._is_polling = True
        self._lock.release()
        try:
            events = self._poll.poll(timeout_s)
        finally:
            self._lock.acquire()
            self._is_polling = False
        for fd, event in events:
            peer = self._by_fd[fd]
            if event & select.EPOLLOUT:
                peer.flush()
            for kind, mark, tag, size, content in peer.read() if event & ~select.EPOLLOUT else ():
                expected = peer.posted.get(tag)
                if kind == READ:
                    assert isinstance(content, int)  # only a message can have a payload
                    self.slab.was_read(content, peer.rank)
                elif expected:
                    self._deliver(peer, expected.popleft(), mark, size, content)
                    if not expected:
                        del peer.posted[tag]
                else:  # its bytes, for it is not to keep all that came with it
                    payload = content if isinstance(content, int) else bytes(content)
                    peer.arrived.setdefault(tag, deque()).append((mark, size, payload))
        if self._num_waiting:
            self._changed.notify_all()

    def _deliver_matched(self) -> None:
        """Put where they belong the messages that had come before they were expected."""
        while self._matched:
            peer, expected, arrival = self._matched.popleft()
            self._deliver(peer, expected, *arrival)

    def _deliver(self, peer: Peer, expected: Expected, mark: int, size: int, content: bytes | memoryview | int) -> None:
        """``content``: the payload, or where it lies in the sender's slab."""
        receive, memory, start, stop = expected
        if mark != receive.mark:
            receive.fail(peer, CallMismatch(receive.mark, mark, stop - start, size, peer.rank))
        elif size != stop - start:
            receive.fail(peer, SizeMismatch(stop - start, size, peer.rank))
        elif isinstance(content, int):
            try:
                memory[start, stop, _BYTE].copy_(self._segment.bytes_of(peer.slab, content, size))
            except OSError as error:
                why = f"cannot map the shared memory of a message of {size} bytes: {error}"
                receive.fail(peer, RuntimeError(why))
        else:
            memory.bytes[start:stop] = content
        receive.missing.remove(peer)
        if isinstance(content, int):
            # Told with our next message, where that is soon enough: else it would wake up a peer
            # that has nothing to do. All peers together leave less unsaid than what makes the
            # sender wait.
            peer.unsaid_bytes += size
            peer.outbox += head(READ, 0, 0, 0, content)
            if peer.unsaid_bytes * 2 * len(self._peers) > AHEAD_BYTES:
                peer.unsaid_bytes = 0
                if peer.rank not in self.full:
                    peer.flush()


def _memory(tensor: torch.Tensor) -> CallMemory:
    """Raises TensorError for a tensor that is not a contiguous row of bytes."""
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise TensorError(
            f"expected a contiguous 1-D tensor of uint8, got {tensor.dtype} of shape {list(tensor.shape)}: send its bytes, "
            "x.contiguous().view(-1).view(torch.uint8)"
        )
    return CallMemory(tensor)


def sharing_memory(
    group: dist.ProcessGroup,
    rank: int,
    nodes: Sequence[Sequence[int]],
    timeout_s: float,
    settings: Settings,
    board: Board,
) -> dist.ProcessGroup:
    """``group`` with messages inside nodes through shared memory, where ``COMMLAYER_INTRA`` and the
    machine allow it.

    ``nodes``: its members on each node, as ranks of the group. Collective. Raises RuntimeError
    where a rank does not come, and at once where ``board`` is broken.
    """
    if not wants_shared_memory(settings) or all(len(members) == 1 for members in nodes):
        return group
    return cast("dist.ProcessGroup", SharedMemoryGroup(group, rank, nodes, timeout_s, board))


def wants_shared_memory(settings: Settings) -> bool:
    """Whether messages inside a node may go past its network; an emulated link that is shaped is
    there to be used."""
    if settings.intra != "auto":
        return settings.intra == "shared"
    links = os.environ.get("COMMLAYER_EMULATED_LINKS")
    return links is None or "intra unshaped" in links

"""How the ranks of one node find each other: a stream socket between every two of them, and one
piece of memory for all.

Sockets have names in Linux' abstract namespace, which is one for each network namespace, vanishes
with its process and touches no file system. So ranks that cannot reach each other this way are on
different machines, or in containers with networks of their own; the memory itself has no name at
all and is passed through a socket. Nothing can be left behind.

Nobody waits for a rank that has failed: each step ends with a word to all ranks on how it went, and
a node goes on only if all its ranks can. Connecting and its first message never block (the queue of
the one who listens has room), so when all have reported success, there is something to accept and
to read.
"""

from __future__ import annotations

import array
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from commlayer.failures.waits import Board, wait
from commlayer.profiles.printable import warn
from commlayer.transport.shared_memory.slabs import Segment

__all__ = ["Neighbourhood", "meet"]

_CARD = struct.Struct("<?B31s32s")
"""The head of what a rank tells all others: whether it is well, the length of its socket's name,
the name, a secret."""
_STRANGERS = 128
"""Room in the queue for processes that connect without being asked."""
_HELLO = struct.Struct("<I32s")
"""First message on a connection: who comes (local rank), and the secret of whom it wants to see."""


@dataclass(frozen=True)
class Neighbourhood:
    """The memory of this rank's node, and a connected socket to each other rank there, by local
    rank."""

    segment: Segment
    sockets: dict[int, socket.socket]


@dataclass(frozen=True)
class _Card:
    is_well: bool
    name: bytes
    secret: bytes


class _Meeting:
    """The ranks of ``group``, Gloo's, as they tell each other how far they have come. ``board``:
    where a rank's failure would be known, if anywhere."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        nodes: Sequence[Sequence[int]],
        timeout_s: float,
        board: Board | None,
    ) -> None:
        self._group, self.rank, self._nodes, self._board = group, rank, nodes, board
        self.timeout_s = timeout_s
        self.node, self.here = next((k, node) for k, node in enumerate(nodes) if rank in node)
        """This rank's node, and the ranks of the group there, by local rank."""
        self.local_rank = self.here.index(rank)

    def show(self, listener: socket.socket | None, secret: bytes) -> list[_Card]:
        """Exchange cards; those of this node's ranks."""
        name = b"" if listener is None else listener.getsockname()
        words = self._tell(_CARD.pack(listener is not None, len(name), name, secret))
        cards = [_CARD.unpack(words[rank]) for rank in self.here]
        return [_Card(is_well, name[:length], theirs) for is_well, length, name, theirs in cards]

    def agree(self, is_well: bool) -> tuple[bool, ...]:
        """For each node, whether all its ranks are well."""
        words = self._tell(b"\1" if is_well else b"\0")
        return tuple(all(words[rank] == b"\1" for rank in node) for node in self._nodes)

    def _tell(self, word: bytes) -> list[bytes]:
        """Every rank's word, of equal lengths, by rank of the group. Raises RuntimeError (Gloo's)
        where a rank is gone."""
        own_word = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        words = [torch.empty_like(own_word) for _ in range(sum(map(len, self._nodes)))]
        work = self._group.allgather([words], [own_word])
        if self._board is None:
            work.wait(timedelta(seconds=self.timeout_s))
        else:  # nobody is to be in there any more when the program ends
            wait(work, self._board, self.timeout_s)
        return [each.numpy().tobytes() for each in words]


def meet(
    group: dist.ProcessGroup,
    rank: int,
    nodes: Sequence[Sequence[int]],
    timeout_s: float,
    *,
    is_able: bool = True,
    board: Board | None = None,
) -> tuple[Neighbourhood | None, tuple[bool, ...]]:
    """Share memory among the ranks of each node. Collective over ``group``, whose members ``nodes``
    lists.

    ``is_able``: whether this rank can open the files for it; one that cannot comes all the same,
    and its node does not share.

    Returns this rank's neighbourhood (None: alone on its node, or its node cannot share) and for
    each node whether it shares, the same on every rank. Where a node cannot, the rank that failed
    warns. Raises RuntimeError where a rank does not come, or ``board`` is broken.
    """
    if all(len(node) == 1 for node in nodes):
        return None, (False,) * len(nodes)
    meeting = _Meeting(group, rank, nodes, timeout_s, board)
    with ExitStack() as stack:
        neighbourhood, shares = _meet(meeting, stack, is_able=is_able)
        if neighbourhood is not None:
            stack.pop_all()  # what was opened is kept
    return neighbourhood, shares


def _meet(meeting: _Meeting, stack: ExitStack, *, is_able: bool) -> tuple[Neighbourhood | None, tuple[bool, ...]]:
    listener, segment = _prepared(len(meeting.here), is_first=meeting.local_rank == 0) if is_able else (None, None)
    with listener or nullcontext():
        secret = os.urandom(32)
        cards = meeting.show(listener, secret)
        sockets = _connected(meeting, cards, stack)
        # All of a node's ranks have connected before the first accepts.
        if not meeting.agree(sockets is not None)[meeting.node]:
            sockets = None
        if sockets is not None and (listener is None or not _accept(meeting, listener, secret, sockets, stack)):
            stack.close()  # nobody is to wait for what we would pass on
            sockets = None
    if sockets is not None:
        segment = _passed_on(meeting, segment, sockets, cards[0].secret)
    shares = meeting.agree(sockets is not None and segment is not None)
    if sockets is None or segment is None or not shares[meeting.node]:
        return None, shares
    for each in sockets.values():
        each.setblocking(False)
    return Neighbourhood(segment, sockets), shares


def _warn(what: str, error: object) -> None:
    warn(
        f"the ranks of this node share no memory ({what}: {error}); they exchange messages over TCP instead, which is "
        "several times slower. Ranks in containers of their own need one network namespace (Docker: --network=host)",
        RuntimeWarning,
        stacklevel=2,
    )


def _prepared(num_ranks: int, is_first: bool) -> tuple[socket.socket | None, Segment | None]:
    """A socket that others can connect to, and on a node's first rank the memory; no socket where
    that failed."""
    if num_ranks == 1:
        return None, None
    try:
        segment = Segment.create(num_ranks) if is_first else None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as stack:
            stack.enter_context(listener)
            listener.bind("")  # Linux then gives it a free abstract name
            listener.listen(num_ranks + _STRANGERS)
            listener.setblocking(False)
            stack.pop_all()
    except OSError as error:
        _warn("no socket or memory file to be had", error)
        return None, None
    return listener, segment


def _connected(meeting: _Meeting, cards: Sequence[_Card], stack: ExitStack) -> dict[int, socket.socket] | None:
    """Sockets to the local ranks before this one, each of which is told who comes. None where one
    cannot be reached."""
    if len(cards) == 1 or not all(card.is_well for card in cards):
        return None
    sockets = {}
    for k in range(meeting.local_rank):
        sockets[k] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sockets[k].setblocking(False)
        try:
            sockets[k].connect(cards[k].name)
            sockets[k].send(_HELLO.pack(meeting.local_rank, cards[k].secret))
        except OSError as error:
            _warn(f"rank {meeting.here[k]} of the group cannot be reached from rank {meeting.rank}", error)
            return None
    return sockets


def _accept(
    meeting: _Meeting, listener: socket.socket, secret: bytes, sockets: dict[int, socket.socket], stack: ExitStack
) -> bool:
    """Take in the local ranks behind this one. Whoever does not know the secret is sent away: any
    process can connect."""
    expected = set(range(meeting.local_rank + 1, len(meeting.here)))
    while expected:
        try:
            visitor, _ = listener.accept()
        except OSError as error:
            _warn(f"local ranks {sorted(expected)} said they had connected to rank {meeting.rank}, but have not", error)
            return False
        try:
            visitor.setblocking(False)
            hello = visitor.recv(_HELLO.size)
        except OSError:
            hello = b""
        k, known = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
        if hmac.compare_digest(known, secret) and k in expected:
            expected.remove(k)
            sockets[k] = stack.enter_context(visitor)
        else:
            visitor.close()
    return True


def _passed_on(
    meeting: _Meeting, segment: Segment | None, sockets: dict[int, socket.socket], proof: bytes
) -> Segment | None:
    """The memory, given by the node's first rank to the others, and proved to be the same by what
    that rank wrote into it."""
    try:
        if segment is not None:
            segment.bytes_of(0, 0, len(proof)).copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
            for each in sockets.values():
                socket.send_fds(each, [b"m"], [segment.fileno()])
            return segment
        sockets[0].settimeout(meeting.timeout_s)
        # Not socket.recv_fds, which leaves it open in programs that this process may start.
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        _, ancillary, _, _ = sockets[0].recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        rights = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
        if not rights:
            raise OSError("the node's first rank has closed the connection")
        segment = Segment(array.array("i", rights[0])[0], len(meeting.here))
        if segment.bytes_of(0, 0, len(proof)).numpy().tobytes() != proof:
            raise OSError("it does not hold what the node's first rank wrote into it")
    except OSError as error:
        _warn(f"the memory could not be passed on to or from rank {meeting.rank}", error)
        return None
    return segment

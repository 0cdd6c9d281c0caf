"""Links: a rank's connections with its neighbours, served by one thread, and dialled again when
they end.

What one rank tells goes out on the thread that tells it, and what comes in is read on the thread of
:class:`Links`. A connection that ends is dialled again by :class:`Dialler`; only where an address
refuses at which a rank of the job has answered before, or a port at which a connection has been
closed, is its rank called dead. So what a firewall drops, or a peer that has no time to answer,
costs nothing.

A rank that leaves says so, says nothing more, and lets its neighbours close the connections, who
have read it then: to close a socket in which something is unread throws away what is still on its
way to the other end.

Rejected: ``asyncio`` on the thread. Whoever tells a record would have to wait for the thread to
send it, and a rank may tell it while it computes, or ends. Tried on two cores, medians of 150,
three times by turns: from telling to the peer's bytes 0.06 ms against 0.02 (0.15 against 0.04
beside a thread that computes, a tenth of them 6 ms, which is when that thread lets go of the
interpreter's lock), from a peer's end to its being noticed 0.10 ms against 0.04, and twice the
processor time. Its import costs nothing, as torch has it; but what it would take off is the forty
lines that read, write and accept.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence

import msgspec

from commlayer.failures.failure_records import (
    LENGTH,
    MAX_FRAME_BYTES,
    Absent,
    Card,
    Frame,
    Gone,
    Hello,
    Record,
    Welcome,
    framed,
    frames,
    read_frame,
)
from commlayer.failures.knowledge import Knowledge
from commlayer.failures.waits import within
from commlayer.profiles.errors import DisagreementError
from commlayer.profiles.printable import say

__all__ = ["MOST_TOLD", "STORE_GRACE_S", "Dialler", "Links", "neighbours", "received"]

STORE_GRACE_S = 2.0
"""How much longer than its own timeout the store is waited for: it says itself what it waited
for."""
MOST_TOLD = 1024
"""Ranks that have not come and are told of: a frame has room for so many."""
_DIAL_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_DIALS, _SAY_AFTER_DIALS = 0.05, 30.0, 40, 4
_FLUSH_S = 0.5
_UNHEARD_S = 1.0
"""For how long a rank that was never connected with another one, and finds its port closed, waits
for what others know of it."""
_NAP_S = 0.05
_MOST_STRANGERS = 64
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A firewall forgets connections on which nothing is sent, and would swallow the news that one is
over."""
_READ_BYTES = 64 << 10
_SECRET_BYTES = 16


class Link:
    """A connection. ``card``: of the rank at its other end, once that has proved who it is."""

    def __init__(self, connection: socket.socket, rank: int = -1, card: Card | None = None) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket, self.rank, self.card = connection, rank, card
        self.inbox, self.outbox = bytearray(), bytearray()

    @property
    def events(self) -> int:
        """The events that its selector is to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)


class Links:
    """The connections of a rank, and their thread. What comes is learned by ``knowledge``, whose
    lock guards these too.

    ``lost(link, is_closed)`` is called on the thread for each connection with a rank of the job
    that ends; ``is_closed``: by its other end. Raises OSError where this process has no descriptors
    for it.
    """

    def __init__(self, knowledge: Knowledge, lost: Callable[[Link, bool], None]) -> None:
        self.knowledge, self._lost = knowledge, lost
        self.secret = os.urandom(_SECRET_BYTES)
        self.links: list[Link] = []
        self.strangers: list[Link] = []
        """Connections that have not said yet who they are."""
        self.heard: set[int] = set()
        """The ranks with which there has been a connection."""
        self.num_linked = 0
        """The number of connections that there have been."""
        self.is_closed = False
        self._regularly: weakref.WeakMethod[Callable[[], float]] | None = None
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(_listener())
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            stack.callback(os.close, self._bell)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._bell, selectors.EVENT_READ, lambda: os.eventfd_read(self._bell))
            stack.pop_all()
        self.port: int = self._listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve, name="commlayer-detector", daemon=True)

    @property
    def awaited(self) -> int:
        """How many connections are still to come at first: as many as there are neighbours, and as
        many from those that dial this rank. One that ends later leaves a descriptor free for its
        successor."""
        if self.is_closed:
            return 0
        return max(
            0, 2 * len(neighbours(self.knowledge.rank, self.knowledge.ranks)) - self.num_linked - len(self.strangers)
        )

    def tell(self, record: Record, but: Link | None = None) -> None:
        """Learn ``record``; if it is news, pass it on to all neighbours but the one at the end of
        ``but``. Raises nothing."""

        def pass_on(record: Record) -> None:
            for link in self.links:
                if link is not but:
                    link.outbox += framed(record)
                    self._push(link)

        self.knowledge.learn(record, pass_on)

    def listen(self, descriptor: int, read: Callable[[], None]) -> bool:
        """Have ``read`` called on the thread when there is something to read in ``descriptor``.
        False: this is closed."""
        with self.knowledge.changed:
            if self.is_closed:
                return False
            self._selector.register(descriptor, selectors.EVENT_READ, read)
            os.eventfd_write(self._bell, 1)
        return True

    def forget(self, descriptor: int) -> None:
        """The opposite of :meth:`listen`."""
        with self.knowledge.changed, contextlib.suppress(KeyError, ValueError, RuntimeError):  # it may be closed
            self._selector.unregister(descriptor)

    def call_regularly(self, look: Callable[[], float]) -> None:
        """Have ``look``, a method whose object is not kept alive, called on the thread: now, and
        each time after as many seconds as it returns."""
        with self.knowledge.changed:
            if not self.is_closed:
                self._regularly = weakref.WeakMethod(look)
                os.eventfd_write(self._bell, 1)

    def add(self, link: Link) -> None:
        """Tell the other end of ``link``, a rank that has proved who it is, all that is known, and
        listen to it."""
        with self.knowledge.changed:
            if self.is_closed:
                link.socket.close()
                return
            self.links.append(link)
            self.num_linked += 1
            self.heard.add(link.rank)
            self.knowledge.changed.notify_all()
            for record in self.knowledge.records():
                link.outbox += framed(record)
            self._push(link)
            self._selector.register(link.socket, link.events, link)
            os.eventfd_write(self._bell, 1)

    # On the thread

    def _serve(self) -> None:
        while not self.is_closed:
            try:
                events = self._selector.select(self._looked())
            except (OSError, ValueError, RuntimeError):  # it has been closed
                return
            for key, event in [] if self.is_closed else events:
                try:
                    if isinstance(key.data, Link):
                        self._serve_link(key.data, event)
                    else:
                        key.data()
                except (OSError, KeyError, ValueError):  # noqa: PERF203  closed in the meantime by another thread
                    if not self.is_closed:
                        say(traceback.format_exc(), keep="\n")

    def _looked(self) -> float | None:
        """Call what is to be called regularly; return after how many seconds it wants to be called
        again, None: never."""
        look = None if self._regularly is None else self._regularly()
        if look is None:
            return None
        try:
            return look()
        except Exception:  # noqa: BLE001  this thread is also the one that hears of deaths
            say(traceback.format_exc(), keep="\n")
            self._regularly = None
            return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptors: the visitor stays at the door, which would wake this thread at once again
            time.sleep(_NAP_S)
            return
        link = Link(connection)
        with self.knowledge.changed:
            self.strangers.append(link)
            oldest = self.strangers[0] if len(self.strangers) > _MOST_STRANGERS else None
            self._selector.register(connection, selectors.EVENT_READ, link)
        if oldest is not None:
            self._end(oldest)

    def _serve_link(self, link: Link, event: int) -> None:
        if event & selectors.EVENT_WRITE:
            with self.knowledge.changed:
                self._push(link)
        if not event & selectors.EVENT_READ:
            return
        try:
            data = link.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(link, is_lost=True, is_closed=isinstance(error, ConnectionResetError))
            return
        link.inbox += data
        try:
            for frame in frames(link.inbox):
                self._take(link, frame)
        except (DisagreementError, ValueError):
            self._end(link)  # whoever speaks another language is no rank of this job
            return
        if not data:
            self._end(link, is_lost=True, is_closed=True)

    def _take(self, link: Link, frame: Frame) -> None:
        """Raises ValueError where ``link`` may not say this."""
        if isinstance(frame, Hello):
            is_known = hmac.compare_digest(frame.proof, self.secret) and frame.rank in self.knowledge.members
            if link.card is not None or not is_known:
                raise ValueError("a stranger")
            address = link.socket.getpeername()[0].removeprefix("::ffff:")  # as IPv6 writes an address of IPv4
            link.rank, link.card = frame.rank, Card((address,), frame.port, frame.secret)
            link.outbox += framed(Welcome(frame.secret))
            with self.knowledge.changed:
                self.strangers.remove(link)
                self._selector.unregister(link.socket)
            self.add(link)
        elif link.card is None or isinstance(frame, Welcome):
            raise ValueError("a stranger")
        else:
            self.tell(frame, but=link)

    def _end(self, link: Link, *, is_lost: bool = False, is_closed: bool = False) -> None:
        """A connection is over; ``is_lost``: and that of a rank of the job, which may be dead;
        ``is_closed``: by its other end."""
        with self.knowledge.changed:
            for links in (self.links, self.strangers):
                if link in links:
                    links.remove(link)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            link.socket.close()
        if link.card is not None and is_lost:
            self._lost(link, is_closed)

    def _push(self, link: Link) -> None:
        """Send what the socket takes; the rest when it can. With the lock held."""
        try:
            while link.outbox:
                del link.outbox[: link.socket.send(link.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            link.outbox.clear()  # its end is read soon
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.modify(link.socket, link.events, link)

    # The end

    def close(self) -> None:
        """Let go of connections, once the neighbours have heard all that was told. Harmless when
        repeated."""
        self._part()
        with self.knowledge.changed:
            if self.is_closed:  # another thread has been quicker
                return
            self.is_closed = True
            os.eventfd_write(self._bell, 1)
        if threading.current_thread() is not self.thread and self.thread.is_alive():
            self.thread.join(_FLUSH_S)
        with self.knowledge.changed:
            for link in (*self.links, *self.strangers):
                link.socket.close()
            self.links, self.strangers = [], []
            self._listener.close()
            self._selector.close()
            with contextlib.suppress(OSError):
                os.close(self._bell)

    def _part(self) -> None:
        """Say nothing more, and wait until the neighbours have heard all of it, and close: half a
        second at most."""
        until = time.monotonic() + _FLUSH_S
        is_read = threading.current_thread() is not self.thread  # else nobody sees that they close
        silent: set[Link] = set()
        while time.monotonic() < until:
            with self.knowledge.changed:
                for link in set(self.links) - silent:
                    if not link.outbox:
                        silent.add(link)
                        with contextlib.suppress(OSError):
                            link.socket.shutdown(socket.SHUT_WR)
                if not (self.links if is_read else set(self.links) - silent):
                    return
            time.sleep(0.005)

    def disown(self) -> None:
        """In a forked child, whose copies of the descriptors would keep this process's connections
        open when it dies."""
        if self.is_closed:
            return
        self.is_closed = True
        sockets = (self._listener, *(link.socket for link in (*self.links, *self.strangers)))
        for descriptor in (self._bell, *(each.detach() for each in sockets)):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.links, self.strangers = [], []
        self._selector.close()  # the child's descriptor of it: what the parent watches stays watched


class Dialler:
    """Connects a rank with its neighbours, again and again, and finds out whose process has
    ended."""

    def __init__(self, knowledge: Knowledge) -> None:
        """Raises OSError as :class:`Links`."""
        self.links, self._knowledge = Links(knowledge, self.lost), knowledge
        self.answering: set[str] = set()
        """Addresses where a rank of the job has answered: a refusal there means something."""
        self._closed: set[tuple[str, int]] = set()
        """Addresses and ports where a process that listened has closed a connection: a refusal
        there means that it is no more."""
        self._cards: dict[int, Card] = {}
        self._refused: set[int] = set()
        """The ranks one of whose addresses has refused a connection."""
        self.has_joined = False

    def connect(self, peer: int, card: Card) -> None:
        """Dial ``peer``; where there is no connection to be had now, go on on another thread."""
        if not self._dial(peer, card) and peer not in self._knowledge.gone:
            self._start_asking(peer, card)

    def miss_unreached(self, timeout_s: float, has_come: Callable[[int], bool], is_over: threading.Event) -> None:
        """Tell all of the ranks that have refused a connection and have not come: that never had
        one, and about which the store says so. Nothing where there are none, the store does not
        answer, or the others have been connected meanwhile."""
        knowledge = self._knowledge
        known = self.links.heard | knowledge.gone.keys() | knowledge.left.keys()
        refused = sorted(self._refused - known)[:MOST_TOLD]

        def ask() -> tuple[int, ...]:
            return tuple(rank for rank in refused if not has_come(rank))

        with contextlib.suppress(RuntimeError, TimeoutError):
            missing = within(STORE_GRACE_S, ask)
            if missing and not is_over.is_set():
                self.links.tell(Absent(missing, timeout_s, knowledge.rank))

    def await_heard(self, seconds: float) -> None:
        """Return when all ranks have had a connection that are to have one with this rank, or are
        known to have ended; or when connections are closed, or after ``seconds``."""
        knowledge, links = self._knowledge, self.links
        awaited = {peer for sign in (1, -1) for peer in neighbours(knowledge.rank, knowledge.ranks, sign)}
        with knowledge.changed:
            knowledge.changed.wait_for(
                lambda: links.is_closed or awaited <= links.heard | knowledge.gone.keys() | knowledge.left.keys(),
                seconds,
            )

    def lost(self, link: Link, is_closed: bool) -> None:
        """Dial anew the rank at the other end of ``link``, which has ended, unless one of both has
        left. See :class:`Links`."""
        assert link.card is not None
        card = self._cards.get(link.rank, link.card)
        if is_closed:
            self._closed |= {(address, card.port) for address in card.addresses}
        leavers = self._knowledge.left
        if not (self.links.is_closed or self._knowledge.rank in leavers or link.rank in leavers):
            self._start_asking(link.rank, card)

    def _dial(self, peer: int, card: Card) -> bool:
        """Connect with ``peer``. Return whether there is a proven connection, which is served from
        now on.

        Where an address refuses at which a rank of the job has answered before, ``peer`` is dead,
        and all are told. Any other error says nothing about a process: a firewall, a wrong address,
        no descriptors here, a peer that has no time to answer.
        """
        for address in card.addresses:
            try:
                connection = self._greeted(address, card)
            except ConnectionRefusedError:  # noqa: PERF203  addresses are few
                self._refused.add(peer)
                is_known = address in self.answering or (address, card.port) in self._closed
                if is_known and not self.links.is_closed:
                    self._find_ended(peer)
                    return False
            except (OSError, DisagreementError, EOFError):
                continue
            else:
                self.answering.add(address)
                self._cards[peer] = msgspec.structs.replace(card, addresses=(address,))
                self.links.add(Link(connection, peer, card))
                return True
        return False

    def _greeted(self, address: str, card: Card) -> socket.socket:
        """A connection at whose other end is the rank of ``card``. Raises OSError, EOFError,
        DisagreementError."""
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address, card.port), _DIAL_S))
            connection.settimeout(_DIAL_S)
            links = self.links
            try:
                connection.sendall(framed(Hello(self._knowledge.rank, card.secret, links.secret, links.port)))
                answer = received(connection)
            except (ConnectionResetError, BrokenPipeError):
                self._closed.add((address, card.port))
                raise
            if answer != Welcome(links.secret):
                raise EOFError("a stranger")
            stack.pop_all()
        return connection

    def _find_ended(self, peer: int) -> None:
        """Tell that nobody is behind the port of ``peer`` any more, unless it has said itself why
        it left."""
        links, knowledge = self.links, self._knowledge
        is_unheard = peer not in links.heard
        if is_unheard and self.has_joined:  # it could not tell this rank; those whom it told pass it on
            with knowledge.changed:
                knowledge.changed.wait_for(
                    lambda: links.is_closed or peer in knowledge.left or peer in knowledge.gone, _UNHEARD_S
                )
        if peer not in knowledge.left and not links.is_closed:
            links.tell(Gone(peer, knowledge.rank, is_unheard))

    def _start_asking(self, peer: int, card: Card) -> None:
        """On a thread of its own: two ranks that dial each other must go on answering."""
        thread = threading.Thread(target=self._ask, args=(peer, card), name="commlayer-ask", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as may be, or the interpreter is ending
            thread.start()

    def _ask(self, peer: int, card: Card) -> None:
        """Dial ``peer`` again and again, ever more rarely, until there is a connection, or it is
        known what became of it."""
        knowledge, links = self._knowledge, self.links
        for attempt in range(_MOST_DIALS):
            is_known = peer in knowledge.left or peer in knowledge.gone
            if links.is_closed or is_known or any(link.rank == peer for link in links.links):
                return
            if self._dial(peer, card):
                return
            if attempt == _SAY_AFTER_DIALS:
                say(
                    f"rank {knowledge.rank} cannot reach rank {peer} at port {card.port} of {', '.join(card.addresses)}: "
                    "should it die, that is perhaps noticed late. GLOO_SOCKET_IFNAME names the interface to use"
                )
            # A rank that answers at one of these addresses meanwhile makes a refusal there mean
            # something.
            with knowledge.changed:
                known = self.answering.intersection(card.addresses)
                knowledge.changed.wait_for(
                    lambda: links.is_closed or self.answering.intersection(card.addresses) != known,  # noqa: B023  asked here only
                    min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S),
                )


def received(connection: socket.socket) -> Frame:
    """One frame, from a socket that blocks. Raises OSError (ConnectionResetError where the other
    end closes it), EOFError, DisagreementError."""
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return read_frame(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    if size > MAX_FRAME_BYTES:
        raise EOFError
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed by its other end")
        data += more
    return data


def _listener() -> socket.socket:
    listener = None
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    if listener is None:
        listener = socket.create_server(("", 0), backlog=128)
    listener.setblocking(False)
    return listener


def neighbours(rank: int, ranks: Sequence[int], sign: int = 1) -> list[int]:
    """The ranks that ``rank`` dials: 1, 2, 4, … places after it; those that dial it, where ``sign``
    is -1: as many places before it."""
    size, place = len(ranks), ranks.index(rank)
    return [ranks[(place + sign * (1 << k)) % size] for k in range((size - 1).bit_length())]

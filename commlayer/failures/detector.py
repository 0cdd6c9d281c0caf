"""A failure detector: every rank of a job learns within moments that another rank's process has ended, and what ranks report.

Each rank holds TCP connections to the ranks 1, 2, 4, 8, … places after it. The kernel closes those of a process that ends,
whatever ended it, so some neighbour notices at once; what one rank notices, or reports, it passes on to all its neighbours
(reliable broadcast by flooding). Nothing is sent while nothing fails, and one thread a process, which sleeps nearly always, is
all that it costs.

Prior art: ULFM's detector for MPI (Bosilca et al., "Failure detection and propagation in HPC systems", SC 2016: a ring of
observers, and propagation over a circulant graph, which this overlay is), and NCCL's RAS subsystem (a ring of threads with
TCP links). Unlike theirs it sends no heartbeats: a stopped process, a cut link and a node without power end in the calls'
timeouts. Rejected:

- *The job's store* (as before): it dies with the rank that hosts it, and everybody must ask it again and again.
- *The groups' own connections*: only those who wait for the dead rank see them close; and of a message that is under way Gloo
  tells nobody (its pairs signal an error to pending operations, not to the one that has begun; see commlayer/failures/waits.py).
- *A full mesh*: a process of 16,384 ranks would hold as many descriptors.

A rank's first act is to listen and to say so in the store, before its thread starts: the kernel accepts who dials it from then
on, and closes their connections when the rank ends. A connection that ends is dialled again, and only where an address refuses at
which a rank of the job has answered before, or a port at which a connection has been closed, is its rank called dead; so what a
firewall drops, or a peer that has no time to answer, costs nothing.

A rank that leaves says so, says nothing more, and lets its neighbours close the connections, who have read it then: to close a
socket in which something is unread throws away what is still on its way to the other end. So a rank that has left in good
order is not taken for dead, and calls for which nothing more is needed from it go on.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import msgspec

from commlayer.failures.blame import Blame, blame_of, first_failure
from commlayer.failures.descriptors import explained, set_aside
from commlayer.failures.failure_records import Absent, Asked, Ended, Gone, Left, Record, Report, told
from commlayer.failures.forks import disown_in_child
from commlayer.failures.last_words import say_nothing_more, speak_before_sigterm
from commlayer.failures.news import FailureNews
from commlayer.failures.store_answers import Deadline, asked_store, store_host
from commlayer.failures.waits import on_a_thread, within
from commlayer.peer_words import read_words
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import BLAMING, ClusterError, CollectiveTimeoutError, DisagreementError, PeerError
from commlayer.profiles.printable import say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = [
    "FailureDetector",
    "Observer",
    "job_detector",
    "leave_all",
    "set_job_detector",
]

_DIAL_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_DIALS, _SAY_AFTER_DIALS = 0.05, 30.0, 40, 4
_FLUSH_S = 0.5
_UNHEARD_S = 1.0
"""For how long a rank that was never connected with another one, and finds its port closed, waits for what others know of it."""
_NAP_S = 0.05
_NEWS_S, _HOST_NEWS_S, _LATE_S = 0.5, 1.0, 10.0
_MOST_STRANGERS = 64
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A firewall forgets connections on which nothing is sent, and would swallow the news that one is over."""
_LENGTH = struct.Struct("!I")
_MAX_FRAME_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_SECRET_BYTES = 16
_STORE_GRACE_S = 2.0
"""How much longer than its own timeout the store is waited for: it says itself what it waited for."""
_MOST_NAMED = 8
_MOST_TOLD = 1024
"""Ranks that have not come and are told of: a frame has room for so many."""
_LOOPBACK = ("127.", "::1")
_Answer = TypeVar("_Answer")
_MOST_ROUNDS = 64
"""So many of the last questions are remembered; older ones are no news."""


class _Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first frame of a rank that dials. ``proof``: the secret of the rank that it dials; ``secret``: its own."""

    rank: int
    proof: bytes
    secret: bytes
    port: int


class _Welcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer. ``proof``: the secret of the rank that dialled."""

    proof: bytes


class _Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank listens; in the store. ``trouble``: why it cannot, and leaves."""

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    trouble: str = ""


_Frame = Gone | Left | Report | Asked | Absent | _Hello | _Welcome


class _NotComeError(Exception):
    """The store has waited in vain for what a rank says there."""


class Observer(Protocol):
    """Somebody who wants to know of every record as it comes."""

    def observe(self, record: Record) -> None:
        """Called once for each record, on the detector's thread or on that which reports."""


class _Link:
    """A connection. ``card``: of the rank at its other end, once that has proved who it is."""

    def __init__(self, connection: socket.socket, rank: int, card: _Card | None) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket, self.rank, self.card = connection, rank, card
        self.inbox, self.outbox = bytearray(), bytearray()


class FailureDetector:
    """Watches the processes of ``ranks`` (global ranks), of which this one is ``rank``. Made by all of them together.

    ``store`` is where they find each other, under keys of their own; afterwards it is not used. Threads and descriptors are
    those of this process: a forked child has neither. ``on_listening`` is called before this rank waits for another one.

    ``timeout_s`` is one limit for all that is asked of the store, whose own waits would add up, or have none (where its
    host is stopped); a :class:`Deadline` where it has begun before.

    Raises CollectiveTimeoutError where a rank does not come in that time, PeerError where one cannot listen, ClusterError
    where this one cannot.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float | Deadline,
        on_listening: Callable[[FailureDetector], None] = lambda _: None,
    ) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.life = ""
        """A text for the default group that this detector was made with, the same on all ranks, another for the next."""
        self.numbering = ""
        """Whose numbers ``ranks`` are: empty: the job's; else those of a group that stands alone, by its key."""
        self._members = frozenset(self.ranks)
        self.changed = threading.Condition()
        self.gone: dict[int, Gone] = {}
        self.left: dict[int, Left] = {}
        self.ended: list[Ended] = []
        """The ranks that died, never came or left by an exception, in the order of cause and effect: a rank tells before it acts
        on it."""
        self.reports: dict[tuple[str, int], Report] = {}
        self.asked: dict[int, Asked] = {}
        """The first question of each of the last rounds."""
        self._observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        self._news = FailureNews(rank)
        self._links: list[_Link] = []
        self._num_linked = 0  # links that there have been
        self._strangers: list[_Link] = []  # who have not said yet who they are
        # Where a rank of the job has answered: a refusal there means something.
        self._answering: set[str] = set()
        # Addresses and ports where a process that listened has closed a connection: a refusal there means that it is no more.
        self._closed: set[tuple[str, int]] = set()
        self._heard: set[int] = set()  # the ranks with which there has been a link
        self._cards: dict[int, _Card] = {}
        self._is_closed = self._is_linked = self._has_joined = False
        self._staying: threading.Thread | None = None
        self._regularly: weakref.WeakMethod[Callable[[], float]] | None = None
        if store is None or len(self.ranks) < 2:
            return
        self._secret = os.urandom(_SECRET_BYTES)
        try:
            with contextlib.ExitStack() as stack:
                self._listener = stack.enter_context(_listener())
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                stack.callback(os.close, self._bell)
                self._selector = stack.enter_context(selectors.DefaultSelector())
                stack.pop_all()
        except OSError as error:
            self._refuse(store, error)
        self._is_linked = True
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        _detectors.add(self)
        disown_in_child(self)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self),), name="commlayer-detector", daemon=True
        )
        deadline = timeout_s if isinstance(timeout_s, Deadline) else Deadline.since(timeout_s)
        try:
            self._say_where(store, deadline)
            set_aside(self)
            self._thread.start()
            on_listening(self)
            self._join(store, deadline)
            self._has_joined = True
        except BaseException as error:
            self.fail(f"could not join its job: {error}", is_consequence=isinstance(error, BLAMING))
            raise
        speak_before_sigterm(self)

    @classmethod
    def alone(cls, rank: int = 0) -> FailureDetector:
        """A detector of this process only, which knows what is reported to it."""
        return cls(None, rank, (rank,), 0.0)

    @property
    def awaited(self) -> int:
        """How many connections are still to come at first: as many as there are neighbours, and as many from those that dial this
        rank. One that ends later leaves a descriptor free for its successor."""
        if self._is_closed:
            return 0
        return max(0, 2 * len(self._neighbours()) - self._num_linked - len(self._strangers))

    def attach(self, observer: Observer) -> None:
        """Have ``observer`` called for each record, those that are there already included; it is not kept alive."""
        with self.changed:
            self._observers.add(observer)
            known = self._known()
        for record in known:
            observer.observe(record)

    def _known(self) -> list[Record]:
        absent = [record for record in self.ended if isinstance(record, Absent)]  # first: who left did so because of it
        return [*absent, *self.gone.values(), *self.left.values(), *self.reports.values()]

    def detach(self, observer: Observer) -> None:
        """The opposite of :meth:`attach`."""
        with self.changed:
            self._observers.discard(observer)

    def listen(self, descriptor: int, read: Callable[[], None]) -> bool:
        """Have ``read`` called on the detector's thread when there is something to read in ``descriptor``. False: it has none."""
        with self.changed:
            if self._is_closed or not self._is_linked:
                return False
            self._selector.register(descriptor, selectors.EVENT_READ, read)
            os.eventfd_write(self._bell, 1)
        return True

    def call_regularly(self, look: Callable[[], float]) -> None:
        """Have ``look``, a method whose object is not kept alive, called on the detector's thread: now, and each time after as
        many seconds as it returns."""
        with self.changed:
            if self._is_linked and not self._is_closed:
                self._regularly = weakref.WeakMethod(look)
                os.eventfd_write(self._bell, 1)

    def _looked(self) -> float | None:
        """Call what is to be called regularly; return after how many seconds it wants to be called again, None: never."""
        look = None if self._regularly is None else self._regularly()
        if look is None:
            return None
        try:
            return look()
        except Exception:  # noqa: BLE001  this thread is also the one that hears of deaths
            say(traceback.format_exc(), keep="\n")
            self._regularly = None
            return None

    def forget(self, descriptor: int) -> None:
        """The opposite of :meth:`listen`."""
        with self.changed, contextlib.suppress(KeyError, ValueError, RuntimeError, AttributeError):  # it may be closed
            self._selector.unregister(descriptor)

    def tell(self, record: Record) -> None:
        """Have every rank know ``record``; of several about one rank (and group) the first one counts. Raises nothing."""
        self._learn(record, None)

    def close(self, why: str, *, is_failure: bool = False, is_consequence: bool = False) -> None:
        """Say why this rank leaves, and let go of connections, once the neighbours have heard it. Harmless when repeated."""
        if self._has_closed() or not self._is_linked:
            return
        self.tell(Left(self.rank, told(why), is_failure, is_consequence))
        self._part()
        with self.changed:
            was_closed, self._is_closed = self._is_closed, True
            if was_closed:  # another thread has been quicker
                return
            os.eventfd_write(self._bell, 1)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(_FLUSH_S)
        self._release()

    def fail(self, why: str, *, is_consequence: bool = False) -> None:
        """Leave a job that is starting: say why, also to those that come later, for ten seconds at most. Returns at once.

        Who dials a rank that has let go of its port before it could say why takes it for the first that died.
        """
        if self._is_closed or not self._is_linked:
            return
        self.tell(Left(self.rank, told(why), is_failure=True, is_consequence=is_consequence))
        self._staying = threading.Thread(target=self._stay, args=(why,), name="commlayer-leave", daemon=True)
        try:
            self._staying.start()
        except RuntimeError:  # as many threads as may be, or the interpreter is ending
            self._staying = None
            self.close(why)

    def _stay(self, why: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._is_closed or not self._unaware(), _LATE_S)
        self.close(why)

    def _unaware(self) -> set[int]:
        """The ranks with which this one has yet to have a connection."""
        size, me = len(self.ranks), self.ranks.index(self.rank)
        dialling = {self.ranks[me - (1 << k)] for k in range((size - 1).bit_length())}
        return dialling.union(self._neighbours()) - self._heard - self.gone.keys() - self.left.keys()

    def linger(self) -> None:
        """Wait, before the process ends, until those have heard whom :meth:`fail` waits for."""
        if self._staying is not None:
            self._staying.join(_LATE_S)

    def last_words(self) -> None:
        """See :class:`commlayer.failures.last_words.Speaker`. Who sends SIGTERM may have seen a rank die sooner than this one."""
        if self._is_closed:
            return
        self._news.await_printed(_NEWS_S)
        self.close("was ended by SIGTERM", is_failure=True, is_consequence=self._news.has_heard)

    def _has_closed(self) -> bool:
        return self._is_closed

    # Joining

    def _say_where(self, store: Store, deadline: Deadline) -> None:
        """Tell the others where this rank listens: its sign of life, without which it is a rank that never came."""
        card = _Card(tuple(_addresses(store)), self._listener.getsockname()[1], self._secret)
        self._answering |= set(card.addresses)  # of this machine: a port that is closed there has nobody behind it
        words = msgspec.msgpack.encode(card)
        self._asked(lambda: store.set(f"detector/{self.rank}", words), store, (), deadline)  # type: ignore[arg-type]

    def _join(self, store: Store, deadline: Deadline) -> None:
        for peer in self._neighbours():
            theirs = self._card_of(peer, store, deadline)
            if theirs.trouble:
                raise PeerError(f"rank {peer} cannot take part: {theirs.trouble}")
            if self._dial(peer, theirs) is None and peer not in self.gone:
                self._start_asking(peer, theirs)

    def _card_of(self, peer: int, store: Store, deadline: Deadline) -> _Card:
        key = f"detector/{peer}"

        def read() -> bytes:
            store.wait([key], timedelta(seconds=max(deadline.left_s(), 0.001)))
            return store.get(key)

        words = self._asked(read, store, (peer,), deadline)
        card: _Card = read_words(words, _Card, f"rank {peer}", _MAX_FRAME_BYTES)
        return card

    def _asked(self, ask: Callable[[], _Answer], store: Store, peers: tuple[int, ...], deadline: Deadline) -> _Answer:
        """Return the answer of ``store``, about ``peers``. Raises CollectiveTimeoutError where it or they do not come until then,
        PeerError where the store is gone, and, at once, where a rank of the job has failed meanwhile."""
        me = f"rank {self.rank}, joining the job of {len(self.ranks)} ranks"

        def asked() -> _Answer:
            try:
                return ask()
            except RuntimeError as error:
                # The store counts in milliseconds, and gives up a moment before its time.
                if deadline.left_s() > 0 and "timeout" not in str(error):
                    raise
                raise _NotComeError from error

        def waited(ask: Callable[[], _Answer]) -> _Answer:
            return self._answered(ask, deadline.left_s() + _STORE_GRACE_S, me)

        try:
            return asked_store(asked, deadline, me, self.host_lost, waited)
        except _NotComeError as error:
            missing = self._missing(store)
            absent = Absent((missing or peers)[:_MOST_TOLD], deadline.timeout_s, self.rank)
            if missing:
                self.tell(absent)
            raise CollectiveTimeoutError(
                f"{me}: {listed('rank', missing or peers, _MOST_NAMED)} {absent.what}: look at the log of each"
            ) from error

    def _answered(self, ask: Callable[[], _Answer], seconds: float, me: str) -> _Answer:
        """``ask()``, on a thread that is let go of after ``seconds``, or when a rank of the job has failed.

        Raises what it raises, TimeoutError, PeerError with the words of that failure, and ``me`` before them.
        """
        answer = on_a_thread(ask)
        answer.add_done_callback(lambda _: self._notify())
        with self.changed:
            self.changed.wait_for(lambda: answer.done() or self.ended, seconds)
            failure = self._failure()
        if answer.done():
            return answer.result()
        if failure:
            raise PeerError(f"{me}: {failure}: look at the log of each")
        raise TimeoutError(f"no answer within {seconds:g} s")

    def failure(self) -> str:
        """Who has failed first, in words, as far as is known; empty: nobody."""
        with self.changed:
            return self._failure()

    def first_failure(self, ranks: Container[int]) -> Blame | None:
        """Find the one of ``ranks`` that failed first, and not because of another rank. None where none has failed so far."""
        return first_failure(self.ended, self.left, ranks)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _failure(self) -> str:
        """:meth:`failure`, with the lock held. Where only consequences are known, the first of them."""
        verdict = self.first_failure(self.ranks)
        if verdict is None and self.ended:
            verdict = blame_of(self.ended[0])
        return "" if verdict is None else verdict.words(self.rank)

    def host_lost(self) -> str:
        """The words to say where the store is gone: others may know which rank has failed, and so has perhaps hosted it."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended, _HOST_NEWS_S)
            if self.ended:
                return self._failure()
        return store_host()

    def _missing(self, store: Store) -> tuple[int, ...]:
        """The ranks that have not said in the store where they are, as far as that answers soon."""

        def ask() -> tuple[int, ...]:
            return tuple(rank for rank in self.ranks if not store.check([f"detector/{rank}"]))

        with contextlib.suppress(RuntimeError, TimeoutError):
            return within(_STORE_GRACE_S, ask)
        return ()

    def _refuse(self, store: Store, error: OSError) -> NoReturn:
        """This rank cannot listen: the others must hear of it, or they wait for it."""
        why = explained(error)
        with contextlib.suppress(RuntimeError):
            store.set(f"detector/{self.rank}", msgspec.msgpack.encode(_Card((), 0, b"", why)))  # type: ignore[arg-type]
        raise ClusterError(f"rank {self.rank} cannot take part: {why}") from error

    def _neighbours(self) -> list[int]:
        """The ranks that this one dials: 1, 2, 4, … places after it."""
        size, me = len(self.ranks), self.ranks.index(self.rank)
        return [self.ranks[(me + (1 << k)) % size] for k in range((size - 1).bit_length())]

    def _dial(self, peer: int, card: _Card) -> _Link | None:
        """A proven connection to ``peer``, which is served from now on; None where it is not to be had.

        Where an address refuses at which a rank of the job has answered before, ``peer`` is dead, and all are told. Any other
        error says nothing about a process: a firewall, a wrong address, no descriptors here, a peer that has no time to answer.
        """
        for address in card.addresses:
            try:
                connection = self._greeted(address, card)
            except ConnectionRefusedError:  # noqa: PERF203  addresses are few
                is_known = address in self._answering or (address, card.port) in self._closed
                if is_known and not self._is_closed:
                    self._find_ended(peer)
                    return None
            except (OSError, DisagreementError, EOFError):
                continue
            else:
                link = _Link(connection, peer, card)
                self._answering.add(address)
                self._cards[peer] = msgspec.structs.replace(card, addresses=(address,))
                self._serve_link(link)
                return link
        return None

    def _find_ended(self, peer: int) -> None:
        """Tell that nobody is behind the port of ``peer`` any more, unless it has said itself why it left."""
        is_unheard = peer not in self._heard
        if is_unheard and self._has_joined:  # it could not tell this rank; those whom it told pass it on
            with self.changed:
                self.changed.wait_for(lambda: self._is_closed or peer in self.left or peer in self.gone, _UNHEARD_S)
        if peer not in self.left and not self._is_closed:
            self._learn(Gone(peer, self.rank, is_unheard), None)

    def _greeted(self, address: str, card: _Card) -> socket.socket:
        """A connection at whose other end is the rank of ``card``. Raises OSError, EOFError, DisagreementError."""
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address, card.port), _DIAL_S))
            connection.settimeout(_DIAL_S)
            hello = _Hello(self.rank, card.secret, self._secret, self._listener.getsockname()[1])
            try:
                connection.sendall(_framed(hello))
                answer = _received(connection)
            except (ConnectionResetError, BrokenPipeError):
                self._closed.add((address, card.port))
                raise
            if answer != _Welcome(self._secret):
                raise EOFError("a stranger")
            stack.pop_all()
        return connection

    def _start_asking(self, peer: int, card: _Card) -> None:
        """On a thread of its own: two ranks that dial each other must go on answering."""
        thread = threading.Thread(target=self._ask, args=(peer, card), name="commlayer-ask", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as may be, or the interpreter is ending
            thread.start()

    def _ask(self, peer: int, card: _Card) -> None:
        """Dial ``peer`` again and again, ever more rarely, until there is a connection, or it is known what became of it."""
        for attempt in range(_MOST_DIALS):
            if (
                self._is_closed
                or peer in self.left
                or peer in self.gone
                or any(link.rank == peer for link in self._links)
            ):
                return
            if self._dial(peer, card) is not None:
                return
            if attempt == _SAY_AFTER_DIALS:
                say(
                    f"rank {self.rank} cannot reach rank {peer} at port {card.port} of {', '.join(card.addresses)}: "
                    "should it die, that is perhaps noticed late. GLOO_SOCKET_IFNAME names the interface to use"
                )
            self._pause(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S), card)

    def _pause(self, seconds: float, card: _Card) -> None:
        """Wait so long, or until a rank has answered at an address of ``card``: then a refusal there means something."""
        with self.changed:
            known = self._answering.intersection(card.addresses)
            self.changed.wait_for(
                lambda: self._is_closed or self._answering.intersection(card.addresses) != known, seconds
            )

    def _serve_link(self, link: _Link) -> None:
        """Tell the other end all that is known, and listen to it."""
        with self.changed:
            if self._is_closed:
                link.socket.close()
                return
            self._links.append(link)
            self._num_linked += 1
            self._heard.add(link.rank)
            self.changed.notify_all()
            for record in self._known():
                link.outbox += _framed(record)
            self._push(link)
            self._selector.register(link.socket, self._wanted(link), link)
            os.eventfd_write(self._bell, 1)

    # Serving, on the detector's thread

    def _turn(self, events: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, event in events:
            try:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._bell:
                    os.eventfd_read(self._bell)
                elif callable(key.data):
                    key.data()
                else:
                    self._serve_event(key.data, event)
            except (OSError, KeyError, ValueError):  # noqa: PERF203  closed in the meantime by another thread
                if not self._is_closed:
                    say(traceback.format_exc(), keep="\n")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptors: the visitor stays at the door, which would wake this thread at once again
            time.sleep(_NAP_S)
            return
        link = _Link(connection, -1, None)
        with self.changed:
            self._strangers.append(link)
            oldest = self._strangers[0] if len(self._strangers) > _MOST_STRANGERS else None
            self._selector.register(connection, selectors.EVENT_READ, link)
        if oldest is not None:
            self._end(oldest, is_lost=False)

    def _serve_event(self, link: _Link, event: int) -> None:
        if event & selectors.EVENT_WRITE:
            with self.changed:
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
            for frame in _frames(link.inbox):
                self._take(link, frame)
        except (DisagreementError, ValueError):
            self._end(link, is_lost=False)  # whoever speaks another language is no rank of this job
            return
        if not data:
            self._end(link, is_lost=True, is_closed=True)

    def _take(self, link: _Link, frame: _Frame) -> None:
        if isinstance(frame, _Hello):
            if (
                link.card is not None
                or not hmac.compare_digest(frame.proof, self._secret)
                or frame.rank not in self._members
            ):
                raise ValueError("a stranger")
            link.rank = frame.rank
            address = link.socket.getpeername()[0].removeprefix("::ffff:")  # as IPv6 writes an address of IPv4
            link.card = _Card((address,), frame.port, frame.secret)
            link.outbox += _framed(_Welcome(frame.secret))
            with self.changed:
                self._strangers.remove(link)
                self._selector.unregister(link.socket)
            self._serve_link(link)
        elif link.card is None or isinstance(frame, _Welcome):
            raise ValueError("a stranger")
        else:
            self._learn(frame, link)

    def _end(self, link: _Link, *, is_lost: bool, is_closed: bool = False) -> None:
        """A connection is over; ``is_lost``: and that of a rank of the job, which may be dead; ``is_closed``: by its other
        end."""
        with self.changed:
            card = None if link.card is None else self._cards.get(link.rank, link.card)
            if is_closed and card is not None:
                self._closed |= {(address, card.port) for address in card.addresses}
            for links in (self._links, self._strangers):
                if link in links:
                    links.remove(link)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            link.socket.close()
        is_over = self._is_closed or self.rank in self.left or link.rank in self.left
        if card is not None and is_lost and not is_over:
            self._start_asking(link.rank, card)

    def _learn(self, record: Record, source: _Link | None) -> None:
        with self.changed:
            if not self._remember(record):
                return
            for link in self._links:
                if link is not source:
                    link.outbox += _framed(record)
                    self._push(link)
            observers = list(self._observers)
            self.changed.notify_all()
        for observer in observers:
            try:
                observer.observe(record)
            except Exception:  # noqa: BLE001, PERF203  the next ones are to hear of it as well, and of the next death
                say(traceback.format_exc(), keep="\n")
        self._announce(record)

    def _announce(self, record: Record) -> None:
        """Say on the terminal who has failed: whoever started the ranks may end this one before a call raises it."""
        if isinstance(record, Absent) and record.seen_by == self.rank:
            self._news.has_heard = True  # its own error says it
            return
        if not self._is_linked or self._is_closed:
            return
        if not isinstance(record, Absent) and record.rank == self.rank:
            return
        if isinstance(record, (Gone, Absent)) or (isinstance(record, Left) and record.is_failure):
            verdict = blame_of(record)
            is_consequence = isinstance(record, Left) and record.is_consequence
            self._news.heard(verdict.culprit, verdict.fate(self.rank), is_consequence=is_consequence)

    def _remember(self, record: Record) -> bool:
        """Whether ``record`` is news."""
        if isinstance(record, Asked):
            return self._is_asked_first(record)
        if isinstance(record, Report):
            return self.reports.setdefault((record.key, record.rank), record) is record
        if isinstance(record, Absent):
            return self._is_first_absence(record)
        if record.rank not in self._members:
            return False
        if isinstance(record, Gone) and (record.rank == self.rank or record.rank in self.left):
            return False  # a rank that has said why it left, and was then not found by one that had not heard it
        kept: dict[int, Gone] | dict[int, Left] = self.gone if isinstance(record, Gone) else self.left
        is_news = kept.setdefault(record.rank, record) is record  # type: ignore[arg-type]  # of the matching kind
        if is_news and (isinstance(record, Gone) or record.is_failure):
            self.ended.append(record)
        return is_news

    def _is_first_absence(self, absent: Absent) -> bool:
        """Ranks run out of patience one after the other, each for the same ranks: the first one counts."""
        if not absent.ranks or not self._members.issuperset(absent.ranks):
            return False
        if any(isinstance(record, Absent) for record in self.ended):
            return False
        self.ended.append(absent)
        return True

    def _is_asked_first(self, asked: Asked) -> bool:
        if asked.round <= max(self.asked, default=-1) - _MOST_ROUNDS or asked.round in self.asked:
            return False
        self.asked[asked.round] = asked
        for old in [each for each in self.asked if each <= asked.round - _MOST_ROUNDS]:
            del self.asked[old]
        return True

    # What is on its way

    def _push(self, link: _Link) -> None:
        """Send what the socket takes; the rest when it can. With the lock held."""
        try:
            while link.outbox:
                del link.outbox[: link.socket.send(link.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            link.outbox.clear()  # its end is read soon
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.modify(link.socket, self._wanted(link), link)

    @staticmethod
    def _wanted(link: _Link) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outbox else 0)

    def _part(self) -> None:
        """Say nothing more, and wait until the neighbours have heard all of it, and close: half a second at most."""
        until = time.monotonic() + _FLUSH_S
        is_read = threading.current_thread() is not self._thread  # else nobody sees that they close
        silent: set[_Link] = set()
        while time.monotonic() < until:
            with self.changed:
                for link in set(self._links) - silent:
                    if not link.outbox:
                        silent.add(link)
                        with contextlib.suppress(OSError):
                            link.socket.shutdown(socket.SHUT_WR)
                if not (self._links if is_read else set(self._links) - silent):
                    return
            time.sleep(0.005)

    def _release(self) -> None:
        say_nothing_more(self)
        with self.changed:
            links, self._links, self._strangers = [*self._links, *self._strangers], [], []
            for link in links:
                link.socket.close()
            self._listener.close()
            self._selector.close()
            with contextlib.suppress(OSError):
                os.close(self._bell)

    def __del__(self) -> None:
        self.close("was dropped")

    def disown(self) -> None:
        """In a forked child (see :class:`commlayer.failures.forks.Disowned`), whose copies of the descriptors would keep this
        process's connections open when it dies."""
        if _job is self:
            set_job_detector(None)
        if self._is_closed or not self._is_linked:
            return
        self._is_closed, self._staying = True, None
        sockets = (self._listener, *(link.socket for link in (*self._links, *self._strangers)))
        for descriptor in (self._bell, *(each.detach() for each in sockets)):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._links, self._strangers = [], []
        self._selector.close()  # the child's descriptor of it: what the parent watches stays watched
        self.changed = threading.Condition()


def _serve(detector: weakref.ref[FailureDetector]) -> None:
    """The thread of a detector, which it does not keep alive while it sleeps."""
    found = detector()
    if found is None:
        return
    selector, is_over = found._selector, partial(_is_over, detector)
    del found
    while not is_over():
        try:
            events = selector.select(_looked(detector))
        except (OSError, ValueError, RuntimeError):  # it has been closed
            return
        current = detector()
        if current is None or current._is_closed:
            return
        current._turn(events)
        del current, events


def _looked(detector: weakref.ref[FailureDetector]) -> float | None:
    found = detector()
    return None if found is None else found._looked()


def _is_over(detector: weakref.ref[FailureDetector]) -> bool:
    found = detector()
    return found is None or found._is_closed


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return _non_blocking(
                socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
            )
    return _non_blocking(socket.create_server(("", 0), backlog=128))


def _non_blocking(listener: socket.socket) -> socket.socket:
    listener.setblocking(False)
    return listener


def _addresses(store: Store) -> list[str]:
    """Where the others may find this process, likeliest first: on Gloo's interface, and on the way to the store."""
    finders: list[Callable[[], str]] = [
        lambda: _interface_address(os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]),
        lambda: _address_towards(store),
        lambda: socket.gethostbyname(socket.gethostname()),
    ]
    found: list[str] = []
    for find in finders[:2] if "GLOO_SOCKET_IFNAME" in os.environ else finders[1:]:
        with contextlib.suppress(OSError, AttributeError, KeyError):
            found.append(find())
        # Looking up a host's own name may take seconds, and many answer with an address of the loopback, where another machine
        # would find itself, and nobody behind the port.
        if found and not found[-1].startswith(_LOOPBACK):
            return list(dict.fromkeys(found))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def _interface_address(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        siocgifaddr = 0x8915  # netdevice(7)
        answer = fcntl.ioctl(any_socket, siocgifaddr, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _address_towards(store: Store) -> str:
    """The address that this machine uses on its way to the store's host; nothing is sent."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = store.host, store.port  # type: ignore[attr-defined]  # of a TCPStore
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _framed(frame: _Frame) -> bytes:
    content = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(content)) + content


def _frames(inbox: bytearray) -> list[_Frame]:
    """The whole frames of ``inbox``, taken out of it. Raises ValueError, DisagreementError for what is none."""
    frames = []
    while len(inbox) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(inbox)
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        if len(inbox) < _LENGTH.size + length:
            break
        frames.append(_frame(bytes(inbox[_LENGTH.size : _LENGTH.size + length])))
        del inbox[: _LENGTH.size + length]
    return frames


def _frame(data: bytes) -> _Frame:
    found: _Frame = read_words(data, _Frame, "a visitor", _MAX_FRAME_BYTES)
    return found


def _received(connection: socket.socket) -> _Frame:
    """One frame, from a socket that blocks. Raises OSError (ConnectionResetError where the other end closes it), EOFError,
    DisagreementError."""
    return _frame(_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]))


def _exactly(connection: socket.socket, size: int) -> bytes:
    if size > _MAX_FRAME_BYTES:
        raise EOFError
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("closed by its other end")
        data += more
    return data


# The detectors of this process

_detectors: weakref.WeakSet[FailureDetector] = weakref.WeakSet()
_job: FailureDetector | None = None


def job_detector(ranks: Sequence[int]) -> FailureDetector | None:
    """The detector of the whole job, where there is one that watches all of ``ranks``. The same answer on all of them."""
    return _job if _job is not None and set(ranks) <= set(_job.ranks) else None


def set_job_detector(detector: FailureDetector | None) -> None:
    """``detector`` watches the whole job; None: none does any more."""
    global _job
    _job = detector


def leave_all(why: str, *, is_failure: bool, is_consequence: bool = False, is_in_haste: bool = False) -> None:
    """Leave every job of this process: it ends. ``is_in_haste``: ranks that have yet to come are not waited for."""
    for detector in list(_detectors):
        if not is_in_haste:
            detector.linger()
        detector.close(why, is_failure=is_failure, is_consequence=is_consequence)


atexit.register(leave_all, "its program has ended", is_failure=False)

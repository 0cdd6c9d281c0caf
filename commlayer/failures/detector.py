"""A failure detector: every rank of a job learns within moments that another rank's process has
ended, and what ranks report.

Each rank holds TCP connections to the ranks 1, 2, 4, 8, … places after it. The kernel closes those
of a process that ends, whatever ended it, so some neighbour notices at once; what one rank notices,
or reports, it passes on to all its neighbours (reliable broadcast by flooding). Nothing is sent
while nothing fails, and one thread a process, which sleeps nearly always, is all that it costs.

Prior art: ULFM's detector for MPI (Bosilca et al., "Failure detection and propagation in HPC
systems", SC 2016: a ring of observers, and propagation over a circulant graph, which this overlay
is), and NCCL's RAS subsystem (a ring of threads with TCP links). Unlike theirs it sends no
heartbeats: a stopped process, a cut link and a node without power end in the calls' timeouts.
Rejected:

- *The job's store* (as before): it dies with the rank that hosts it, and everybody must ask it
  again and again.
- *The groups' own connections*: only those who wait for the dead rank see them close; and of a
  message that is under way Gloo tells nobody (its pairs signal an error to pending operations, not
  to the one that has begun; see commlayer/failures/waits.py).
- *A full mesh*: a process of 16,384 ranks would hold as many descriptors.

A rank's first act is to listen and to say so in the store, before its thread starts: the kernel
accepts who dials it from then on, and closes their connections when the rank ends. A rank that
leaves says so: then it is not taken for dead, and calls for which nothing more is needed from it go
on.

Here is how a detector begins and ends: how it joins its job, and leaves it. What goes over
connections is in :mod:`commlayer.failures.failure_records`, the connections are in
:mod:`commlayer.failures.rank_links`, and what is known in :mod:`commlayer.failures.knowledge`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import msgspec

from commlayer.failures.descriptors import explained, set_aside
from commlayer.failures.failure_records import MAX_FRAME_BYTES, Absent, Card, Left, Record, told
from commlayer.failures.forks import disown_in_child
from commlayer.failures.knowledge import Knowledge
from commlayer.failures.last_words import say_nothing_more, speak_before_sigterm
from commlayer.failures.news import FailureNews
from commlayer.failures.rank_links import MOST_TOLD, STORE_GRACE_S, Dialler, Links, neighbours
from commlayer.failures.store_answers import Deadline, asked_store, store_host
from commlayer.failures.waits import on_a_thread, within
from commlayer.peer_words import read_words
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import BLAMING, ClusterError, CollectiveTimeoutError, PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not for type checkers

__all__ = [
    "FailureDetector",
    "host_lost",
    "job_detector",
    "leave_all",
    "set_job_detector",
]

_NEWS_S, _HOST_NEWS_S, _LATE_S = 0.5, 1.0, 10.0
_CONNECTING_S = 5.0
"""How long ranks that have come are given at least to connect with each other."""
_MOST_NAMED = 8
_LOOPBACK = ("127.", "::1")
_Answer = TypeVar("_Answer")


class FailureDetector:
    """Watches the processes of ``ranks`` (global ranks), of which this one is ``rank``. Made by all
    of them together.

    ``store`` is where they find each other, under keys of their own; afterwards it is not used.
    None: there is nobody to be found, and it knows what is reported to it.
    Threads and descriptors are those of this process: a forked child has neither. ``on_listening``
    is called before this rank waits for another one. ``timeout_s`` is one limit for all that is
    asked of the store, whose own waits would add up, or have none (where its host is stopped); a
    :class:`Deadline` where it has begun before.

    Raises CollectiveTimeoutError where a rank does not come in that time, PeerError where one
    cannot listen, ClusterError where this one cannot.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float | Deadline,
        on_listening: Callable[[FailureDetector], None] = lambda _: None,
    ) -> None:
        self.knowledge = Knowledge(rank, ranks)
        self.rank, self.ranks = rank, self.knowledge.ranks
        self.life = ""
        """A text for the default group that this detector was made with, the same on all ranks,
        another for the next."""
        self.numbering = ""
        """Whose numbers ``ranks`` are: empty: the job's; else those of a group that stands alone,
        by its key."""
        self._news = FailureNews(rank)
        self.links: Links | None = None
        """The connections with other ranks; None: there are none."""
        self._dialler: Dialler | None = None
        self.staying: threading.Thread | None = None
        """The thread of :meth:`fail`, while it waits."""
        self._deadline: Deadline | None = None
        """The end of the time for joining; None: the others have been connected since, or there are
        none."""
        if store is None or len(self.ranks) < 2:
            return
        try:
            self._dialler = Dialler(self.knowledge)
        except OSError as error:  # the others must hear of it, or they wait for this rank
            why = explained(error)
            with contextlib.suppress(RuntimeError):
                store.set(f"detector/{rank}", msgspec.msgpack.encode(Card((), 0, b"", why)))  # type: ignore[arg-type]
            raise ClusterError(f"rank {rank} cannot take part: {why}") from error
        self.links = self._dialler.links
        _detectors.add(self)
        disown_in_child(self)
        self.knowledge.attach(self._news)
        self._deadline = timeout_s if isinstance(timeout_s, Deadline) else Deadline.since(timeout_s)
        cards = _Cards(store, self._dialler, self._deadline)
        try:
            cards.put()
            set_aside(self.links)
            self.links.thread.start()
            on_listening(self)
            for peer in neighbours(rank, self.ranks):
                card = cards.of(peer)
                if card.trouble:
                    raise PeerError(f"rank {peer} cannot take part: {card.trouble}")
                self._dialler.connect(peer, card)
            self._dialler.has_joined = True
        except BaseException as error:
            self.fail(f"could not join its job: {error}", is_consequence=isinstance(error, BLAMING))
            raise
        speak_before_sigterm(self)

    @contextlib.contextmanager
    def expecting_all(self, has_come: Callable[[int], bool]) -> Iterator[None]:
        """Inside, this rank connects with all others by other means than the detector's. Only the
        first time counts.

        A rank that has refused a connection may have died before anybody had dialled it, or stand
        behind a firewall. Where the others are not connected when the time for joining is over, all
        are told that it did not come, unless it has: ``has_come`` asks the store whether a rank has
        got as far as this block, and may raise RuntimeError.
        """
        deadline, self._deadline = self._deadline, None
        if deadline is None or self._dialler is None:
            yield
            return
        # The last rank may have come at the last moment, and connecting takes a moment of its own.
        seconds, is_over = max(deadline.left_s(), _CONNECTING_S), threading.Event()
        timer = threading.Timer(seconds, self._dialler.miss_unreached, [deadline.timeout_s, has_come, is_over])
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # as many threads as may be: the connecting ends in its own timeout
            timer.start()
        try:
            yield
        finally:
            is_over.set()
            timer.cancel()

    def tell(self, record: Record) -> None:
        """Have every rank know ``record``; of several about one rank (and group) the first one
        counts. Raises nothing."""
        if self.links is None:
            self.knowledge.learn(record)
        else:
            self.links.tell(record)

    @property
    def is_open(self) -> bool:
        """Whether there are connections with other ranks, or are to be."""
        return self.links is not None and not self.links.is_closed

    def close(self, why: str, *, is_failure: bool = False, is_consequence: bool = False) -> None:
        """Say why this rank leaves, and let go of connections, once the neighbours have heard it.
        Harmless when repeated."""
        if self.links is None or not self.is_open:
            return
        self.tell(Left(self.rank, told(why), is_failure, is_consequence))
        self.links.close()
        self.knowledge.detach(self._news)
        say_nothing_more(self)

    def fail(self, why: str, *, is_consequence: bool = False) -> None:
        """Leave a job that is starting: say why, also to those that come later, for ten seconds at
        most. Returns at once.

        Who dials a rank that has let go of its port before it could say why takes it for the first
        that died.
        """
        dialler = self._dialler
        if dialler is None or not self.is_open:
            return
        self.tell(Left(self.rank, told(why), is_failure=True, is_consequence=is_consequence))

        def stay() -> None:
            dialler.await_heard(_LATE_S)
            self.close(why)

        self.staying = threading.Thread(target=stay, name="commlayer-leave", daemon=True)
        try:
            self.staying.start()
        except RuntimeError:  # as many threads as may be, or the interpreter is ending
            self.staying = None
            self.close(why)

    def last_words(self) -> None:
        """See :class:`commlayer.failures.last_words.Speaker`. Who sends SIGTERM may have seen a
        rank die sooner than this one."""
        if self.is_open:
            self._news.await_printed(_NEWS_S)
            self.close("was ended by SIGTERM", is_failure=True, is_consequence=self._news.has_heard)

    def disown(self) -> None:
        """In a forked child: see :class:`commlayer.failures.forks.Disowned`."""
        if _job is self:
            set_job_detector(None)
        self.staying = None
        self.knowledge.changed = threading.Condition()
        if self.links is not None:
            self.links.disown()

    def __del__(self) -> None:
        self.close("was dropped")


class _Cards:
    """The cards of a job's ranks in its store, by which they find each other. ``deadline``: until
    when all of them are waited for."""

    def __init__(self, store: Store, dialler: Dialler, deadline: Deadline) -> None:
        self._store, self._dialler, self._deadline = store, dialler, deadline
        self._knowledge = knowledge = dialler.links.knowledge
        self._me = f"rank {knowledge.rank}, joining the job of {len(knowledge.ranks)} ranks"

    def put(self) -> None:
        """Leave this rank's card: its sign of life, without which it is a rank that never came.
        Raises as :meth:`of`."""
        links = self._dialler.links
        card = Card(tuple(_addresses(self._store)), links.port, links.secret)
        # Of this machine: a port that is closed there has nobody behind it.
        self._dialler.answering |= set(card.addresses)
        key, words = f"detector/{self._knowledge.rank}", msgspec.msgpack.encode(card)
        self._asked(lambda: self._store.set(key, words), ())  # type: ignore[arg-type]

    def of(self, peer: int) -> Card:
        """The card of ``peer``, once it is there.

        Raises CollectiveTimeoutError where it or the store does not come in time, PeerError where
        the store is gone, and, at once, where a rank of the job has failed meanwhile.
        """
        key = f"detector/{peer}"

        def read() -> bytes:
            self._store.wait([key], timedelta(seconds=max(self._deadline.left_s(), 0.001)))
            return self._store.get(key)

        card: Card = read_words(self._asked(read, (peer,)), Card, f"rank {peer}", MAX_FRAME_BYTES)
        return card

    def _asked(self, ask: Callable[[], _Answer], peers: tuple[int, ...]) -> _Answer:
        """Return the answer of the store, about ``peers``. Raises as :meth:`of`."""

        def asked() -> _Answer:
            try:
                return ask()
            except RuntimeError as error:
                # The store counts in milliseconds, and gives up a moment before its time.
                if self._deadline.left_s() > 0 and "timeout" not in str(error):
                    raise
                raise _NotComeError from error

        knowledge = self._knowledge
        try:
            return asked_store(asked, self._deadline, self._me, lambda: host_lost(knowledge), self._awaited)
        except _NotComeError as error:
            missing = self._missing()
            absent = Absent((missing or peers)[:MOST_TOLD], self._deadline.timeout_s, knowledge.rank)
            if missing:
                self._dialler.links.tell(absent)
            raise CollectiveTimeoutError(
                f"{self._me}: {listed('rank', missing or peers, _MOST_NAMED)} {absent.what}: look at the log of each"
            ) from error

    def _awaited(self, ask: Callable[[], _Answer]) -> _Answer:
        """``ask()``, on a thread that is let go of where the store is silent, or when a rank of the
        job has failed.

        Raises what it raises, TimeoutError, PeerError with the words of that failure.
        """
        answer, knowledge = on_a_thread(ask), self._knowledge
        seconds = self._deadline.left_s() + STORE_GRACE_S

        def notify(_: object) -> None:
            with knowledge.changed:
                knowledge.changed.notify_all()

        answer.add_done_callback(notify)
        with knowledge.changed:
            knowledge.changed.wait_for(lambda: answer.done() or knowledge.ended, seconds)
            failure = knowledge.failure()
        if answer.done():
            return answer.result()
        if failure:
            raise PeerError(f"{self._me}: {failure}: look at the log of each")
        raise TimeoutError(f"no answer within {seconds:g} s")

    def _missing(self) -> tuple[int, ...]:
        """The ranks that have left no card, as far as the store answers soon."""
        store, ranks = self._store, self._knowledge.ranks
        with contextlib.suppress(RuntimeError, TimeoutError):
            return within(STORE_GRACE_S, lambda: tuple(rank for rank in ranks if not store.check([f"detector/{rank}"])))
        return ()


class _NotComeError(Exception):
    """The store has waited in vain for what a rank says there."""


def host_lost(knowledge: Knowledge) -> str:
    """The words to say where the store is gone: others may know which rank has failed, and so
    has perhaps hosted it."""
    return knowledge.await_failure(_HOST_NEWS_S) or store_host()


def _addresses(store: Store) -> list[str]:
    """Where the others may find this process, likeliest first: on Gloo's interface, and on the way
    to the store."""
    finders: list[Callable[[], str]] = [
        _gloos_address,
        lambda: _address_towards(store),
        lambda: socket.gethostbyname(socket.gethostname()),
    ]
    addresses: list[str] = []
    for find in finders[:2] if "GLOO_SOCKET_IFNAME" in os.environ else finders[1:]:
        with contextlib.suppress(OSError, AttributeError, KeyError):
            addresses.append(find())
        # Looking up a host's own name may take seconds, and many answer with an address of the
        # loopback, where another machine would find itself, and nobody behind the port.
        if addresses and not addresses[-1].startswith(_LOOPBACK):
            return list(dict.fromkeys(addresses))
    return list(dict.fromkeys(addresses)) or ["127.0.0.1"]


def _gloos_address() -> str:
    """The address of the interface that Gloo is told to use."""
    import fcntl

    name = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
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


# The detectors of this process

_detectors: weakref.WeakSet[FailureDetector] = weakref.WeakSet()
_job: FailureDetector | None = None


def job_detector(ranks: Sequence[int]) -> FailureDetector | None:
    """The detector of the whole job, where there is one that watches all of ``ranks``. The same
    answer on all of them."""
    return _job if _job is not None and set(ranks) <= set(_job.ranks) else None


def set_job_detector(detector: FailureDetector | None) -> None:
    """``detector`` watches the whole job; None: none does any more."""
    global _job
    _job = detector


def leave_all(why: str, *, is_failure: bool, is_consequence: bool = False, is_in_haste: bool = False) -> None:
    """Leave every job of this process: it ends. ``is_in_haste``: ranks that have yet to come are
    not waited for."""
    for detector in list(_detectors):
        if not is_in_haste and detector.staying is not None:
            detector.staying.join(_LATE_S)
        detector.close(why, is_failure=is_failure, is_consequence=is_consequence)


atexit.register(leave_all, "its program has ended", is_failure=False)

"""Joining a group: the first act of a rank when a group is made, before the modules that make it
are loaded.

That loading takes some tenths of a second, and a rank that ends before it has told the others where
it listens is, to them, one that never came: only their timeouts tell. So this module loads little,
and the rest is loaded once the rank has joined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from commlayer.backend.called_lists import CalledLists, digest_of, group_key
from commlayer.backend.store_host import joining_since
from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.failures.store_answers import Deadline, asked_store
from commlayer.profiles.errors import CollectiveTimeoutError, CommlayerError, PeerError
from commlayer.profiles.files import name_in_files

if TYPE_CHECKING:
    from commlayer.calls.instruments import AsksRanks

__all__ = ["GroupRequest", "Joined", "call_from_outside", "joining_group", "own_keys"]


@dataclass(frozen=True)
class GroupRequest:
    """A request for a group of ``global_ranks``, of which this is the one at ``rank``. ``store`` is
    the group's alone; ``is_default``: it is the job's default group; ``stands_alone``: its ranks
    are no job's, and agree on everything with each other alone; ``began``: when the time for
    joining began (monotonic clock)."""

    name: str
    rank: int
    global_ranks: tuple[int, ...]
    store: Store
    timeout: timedelta
    is_default: bool = False
    stands_alone: bool = False
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of_torch(cls, opts: Any) -> GroupRequest:
        """The request in torch's options of a group (its extended_api)."""
        ranks = tuple(opts.global_ranks_in_group)
        everyone = ranks or tuple(range(opts.group_size))
        return cls(
            opts.group_id,
            opts.group_rank,
            everyone,
            opts.store,
            opts.timeout,
            is_default=not ranks,
            began=joining_since(),
        )

    @property
    def global_rank(self) -> int:
        """This rank, global."""
        return self.global_ranks[self.rank]

    @property
    def is_numbered(self) -> bool:
        """Whether torch has counted calls of ``new_group`` to name it: then all ranks of the job
        make that call."""
        return self.name.isdecimal()


@dataclass(frozen=True)
class Joined:
    """A group's keys in the store, which of its name it is, and the detector that watches its
    ranks; ``is_own``: which was made for it, and is not the job's. ``lists``: what the job's ranks
    gave ``new_group``, where they can compare it; ``inquiry``: asks its ranks what they wait for,
    where ``detector`` is its own."""

    store: Store
    generation: str
    detector: FailureDetector
    is_own: bool
    lists: CalledLists | None = None
    inquiry: AsksRanks | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Guard the import of what makes the group. Where it fails the other ranks hear of it, in
        the words of its error, and wait no longer."""
        try:
            yield
        except BaseException as error:
            if self.is_own:
                self.detector.fail(f"left with {type(error).__name__}: {error}")
            raise

    @contextmanager
    def comparing_lists(self) -> Iterator[None]:
        """Where what is inside fails because ranks gave ``new_group`` different lists, raise
        DisagreementError, which says so."""
        try:
            yield
        except RuntimeError:  # the rank with another list has told this one, or is one that this one waited for
            if self.lists is not None:
                with suppress(
                    PeerError, CollectiveTimeoutError
                ):  # the store has died with the rank that the error names
                    self.lists.check()
            raise


@contextmanager
def joining_group(request: GroupRequest) -> Iterator[Joined]:
    """Join the group ``request``: find its keys, and, where the job has no failure detector yet,
    tell its ranks where this one listens, and connect with some of them. Inside, the group is made,
    which who asks what this rank waits for is told.

    Raises CollectiveTimeoutError where the store or a rank does not answer, PeerError where it is
    gone, DisagreementError where the job's ranks call ``new_group`` with different lists.
    """
    me, timeout_s = request.global_rank, request.timeout.total_seconds()
    deadline = Deadline.since(timeout_s, request.began)
    where = f"rank {me}, group {request.name} of {len(request.global_ranks)} ranks, which is being made"
    shared = None if request.is_default or request.stands_alone else job_detector(request.global_ranks)
    lists = None
    if shared is not None and request.is_numbered:
        lists = _lists(request.name, request.global_ranks, me, shared, timeout_s)
        generation = f"{digest_of(request.global_ranks)}.{shared.life}"
        store: Store = PrefixStore(f"{generation}/", request.store)
    else:
        store, generation = own_keys(request.store, request.global_ranks, deadline, where)
        if request.stands_alone:
            generation += f".{_drawn(store, deadline, where)}"
    with _Attending(request, store, generation) as attending:
        if shared is None:
            keys = PrefixStore("detector/", store)
            detector = FailureDetector(keys, me, request.global_ranks, deadline, attending.begin)
        else:
            detector = shared
            attending.begin(None)
        if request.is_default:
            detector.life = generation
        if lists is not None:
            lists.tell()
        attending.has_joined()
        yield Joined(store, generation, detector, shared is None, lists, attending.inquiry)


class _Attending:
    """The rank's answers to who asks what it waits for, while a group is made: that it makes this
    group, and for how long.

    What that takes is loaded once the rank has said where it listens (see this module's beginning).
    ``inquiry``: of the ranks of a group that has a detector of its own, where they remember calls.
    """

    def __init__(self, request: GroupRequest, store: Store, generation: str) -> None:
        self._request, self._store, self._generation = request, store, generation
        self._stack, self._joining = ExitStack(), ExitStack()
        self.inquiry: AsksRanks | None = None

    def begin(self, detector: FailureDetector | None) -> None:
        """Begin to answer those who ask this rank for its calls. ``detector``: the group's own,
        where it has one."""
        from commlayer.calls.group_life import making_group, stage
        from commlayer.calls.instruments import inquiries
        from commlayer.settings import Settings

        request = self._request
        try:
            settings = Settings.from_environment()
        except CommlayerError:  # the group is not made, which the ranks are told where they agree on settings
            settings = Settings()
        ring = int(settings.ring) if len(request.global_ranks) > 1 else 0
        kind = "init_process_group" if request.is_default else "new_group"
        key = group_key(request.name, self._generation)
        numbering = key if request.stands_alone else ""
        self._stack.enter_context(making_group(ring, kind, key, request.name, request.global_ranks, numbering))
        self._joining.enter_context(stage("joining"))
        if detector is not None:
            detector.numbering = numbering
        if detector is not None and ring:
            folder = settings.in_replica(settings.diagnose_dir)
            if settings.diagnose_dir is not None and request.stands_alone:  # its ranks have other numbers in the job
                folder = str(Path(settings.diagnose_dir) / name_in_files(request.name))
            own = PrefixStore("diagnosis/", self._store)
            self.inquiry = inquiries().Inquiry(detector, own, folder, settings.long_wait_s)

    def has_joined(self) -> None:
        """End the stage of joining: the group itself is made next."""
        self._joining.close()

    def __enter__(self) -> _Attending:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._joining.close()
        self._stack.__exit__(*failure)
        if failure[0] is not None and self.inquiry is not None:
            self.inquiry.linger()  # what this rank has asked is to be answered
            self.inquiry.close()


def call_from_outside(name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Say that this rank calls ``new_group`` with ``ranks``, which it is not one of. Raises as
    :meth:`commlayer.backend.called_lists.CalledLists.tell`."""
    detector = job_detector([*ranks, rank])
    if detector is not None and name.isdecimal():
        _lists(name, ranks, rank, detector, timeout.total_seconds()).tell()


def _lists(name: str, ranks: Sequence[int], rank: int, detector: FailureDetector, timeout_s: float) -> CalledLists:
    return CalledLists(_get_default_store(), name, detector.life, rank, ranks, detector, timeout_s)


def own_keys(store: Store, ranks: Sequence[int], deadline: Deadline, where: str) -> tuple[Store, str]:
    """``store`` without what an earlier group of the same name has left in it, and which group of
    its name and ranks it is.

    Names are given anew after destroy_process_group, and the store may be the same one: addresses
    that are no more would be found there. All ranks come once for each group, so the count of
    arrivals says which group of the name it is, from 0.

    Raises as :func:`commlayer.failures.store_answers.asked_store`.
    """
    digest = digest_of(ranks)
    arrived = asked_store(lambda: store.add(f"commlayer/arrivals/{digest}", 1), deadline, where)
    generation = f"{digest}.{(arrived - 1) // len(ranks)}"
    return PrefixStore(f"{generation}/", store), generation


def _drawn(store: Store, deadline: Deadline, where: str) -> str:
    """A number of one group, the same on its ranks: the first of them draws it.

    A group that stands alone needs one. Whoever makes it counts its groups from the start again
    when he starts again, with another store, and names of groups of before come back, which a rank
    has made too. Raises as ``own_keys``.
    """
    drawn = token_hex(4)
    return asked_store(lambda: store.compare_set("commlayer/drawn", "", drawn), deadline, where).decode()

"""Joining a group: the first act of a rank when a group is made, before the modules that make it are loaded.

That loading takes some tenths of a second, and a rank that ends before it has told the others where it listens is, to them, one
that never came: only their timeouts tell. So this module loads little, and the rest is loaded once the rank has joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from commlayer.failures.detector import FailureDetector, job_detector
from commlayer.failures.waits import within
from commlayer.profiles.errors import CollectiveTimeoutError, PeerError

__all__ = ["GroupRequest", "Joined", "join_group", "own_keys"]

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class GroupRequest:
    """A request for a group of ``global_ranks``, of which this is the one at ``rank``. ``store`` is the group's alone;
    ``is_default``: it is the job's default group; ``stands_alone``: its ranks are no job's, and agree on everything
    with each other alone."""

    name: str
    rank: int
    global_ranks: tuple[int, ...]
    store: Store
    timeout: timedelta
    is_default: bool = False
    stands_alone: bool = False

    @classmethod
    def of_torch(cls, opts: Any) -> GroupRequest:
        """The request in torch's options of a group (its extended_api)."""
        ranks = tuple(opts.global_ranks_in_group)
        everyone = ranks or tuple(range(opts.group_size))
        return cls(opts.group_id, opts.group_rank, everyone, opts.store, opts.timeout, is_default=not ranks)

    @property
    def global_rank(self) -> int:
        """This rank, global."""
        return self.global_ranks[self.rank]


@dataclass(frozen=True)
class Joined:
    """A group's keys in the store, which of its name it is, and the detector that watches its ranks; ``is_own``: which was made
    for it, and is not the job's."""

    store: Store
    generation: str
    detector: FailureDetector
    is_own: bool

    def load(self, load: Callable[[], _Loaded]) -> _Loaded:
        """``load()``. Where that fails the other ranks hear of it, in the words of its error, and wait no longer."""
        try:
            return load()
        except BaseException as error:
            if self.is_own:
                self.detector.fail(f"left with {type(error).__name__}: {error}")
            raise


def join_group(request: GroupRequest) -> Joined:
    """Join the group ``request``: find its keys, and, where the job has no failure detector yet, tell its ranks where this one
    listens, and connect with some of them.

    Raises CollectiveTimeoutError where the store or a rank does not answer, PeerError where it is gone.
    """
    me, size, timeout_s = request.global_rank, len(request.global_ranks), request.timeout.total_seconds()
    where = f"rank {me}, group {request.name} of {size} ranks, which is being made"
    store, generation = own_keys(request.store, size, timeout_s, where)
    if request.stands_alone:
        generation += f".{_drawn(store, timeout_s, where)}"
    shared = None if request.is_default or request.stands_alone else job_detector(request.global_ranks)
    keys = PrefixStore("detector/", store)
    detector = shared or FailureDetector(keys, me, request.global_ranks, timeout_s)
    return Joined(store, generation, detector, is_own=shared is None)


def own_keys(store: Store, size: int, timeout_s: float, where: str) -> tuple[Store, str]:
    """``store`` without what an earlier group of the same name has left in it, and the group's size and number, from 0.

    Names are given anew after destroy_process_group, and the store may be the same one: addresses that are no more would be
    found there. All ranks come once for each group, so the count of arrivals says which group of the name and size this is.

    Raises CollectiveTimeoutError where the store does not answer, PeerError where it is gone; both begin with ``where``.
    """
    arrived = _asked(lambda: store.add(f"commlayer/arrivals/{size}", 1), timeout_s, where)
    generation = f"{size}.{(arrived - 1) // size}"
    return PrefixStore(f"{generation}/", store), generation


def _drawn(store: Store, timeout_s: float, where: str) -> str:
    """A number of one group, the same on its ranks: the first of them draws it.

    A group that stands alone needs one. Whoever makes it counts its groups from the start again when he starts again, with
    another store, and names of groups of before come back, which a rank has made too. Raises as ``own_keys``.
    """
    mine = token_hex(4)
    return _asked(lambda: store.compare_set("commlayer/drawn", "", mine), timeout_s, where).decode()


def _asked(ask: Callable[[], _Loaded], timeout_s: float, where: str) -> _Loaded:
    """``ask()``, of the job's store, within the timeout. Raises as ``own_keys``."""
    host = "look at the process that hosts it (rank 0's, or torchrun's), and whether it can be reached from here"
    try:
        return within(timeout_s, ask)
    except TimeoutError as error:
        raise CollectiveTimeoutError(
            f"{where}: the job's store did not answer within {timeout_s:g} s: {host}"
        ) from error
    except RuntimeError as error:
        raise PeerError(f"{where}: the job's store is gone: {host} ({error})") from error

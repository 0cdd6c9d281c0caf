"""The lists of ranks with which the ranks of a job call ``new_group``: told when a rank comes, and compared.

torch numbers groups by counting the calls, and asks every rank of the job to make all of them, with the same lists. Ranks that
give different lists meet under one number, where each waits for ranks that are in another group. So the first one to come keeps
its list in the job's store, and whoever has another one says so at once: to its caller, and to those who wait in the group of
the first list. A call costs one more question to the store.

Rejected: lists told with the failure detector's records, which would send each call of each rank to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from commlayer.failures.detector import FailureDetector, host_lost
from commlayer.failures.failure_records import Report, told
from commlayer.failures.store_answers import Deadline, asked_store
from commlayer.profiles.counted import listed
from commlayer.profiles.errors import DisagreementError
from commlayer.profiles.printable import printable

__all__ = ["CalledLists", "digest_of", "group_key"]

_Answer = TypeVar("_Answer")
_MOST_NAMED = 32
_LONGEST = 400
"""Characters of a list that a message shows."""
_REMEDY = (
    "every rank of the job has to call new_group equally often, in the same order and with the same lists, also for groups "
    "that it is not in; where only a group's own ranks call it, give use_local_synchronization=True"
)


def digest_of(ranks: Sequence[int]) -> str:
    """A short text that stands for a list of ranks in keys of the store."""
    return sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def group_key(name: str, generation: str) -> str:
    """The key of a group that is its own in the job."""
    return f"{name}#{generation}"


class CalledLists:
    """The lists of one call of ``new_group`` as the rank ``rank`` (global) knows them, which calls it with ``ranks``.

    ``store``: the job's; ``name``: the group's; ``life``: which of the job's default groups is there, since names come again
    after destroy_process_group; ``detector``: that of the whole job.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        life: str,
        rank: int,
        ranks: Sequence[int],
        detector: FailureDetector,
        timeout_s: float,
    ) -> None:
        self._store = PrefixStore(f"commlayer/lists/{life}/{name}/", store)
        self._name, self._life, self._rank, self._ranks = name, life, rank, tuple(ranks)
        self._digest, self._detector, self._timeout_s = digest_of(ranks), detector, timeout_s

    def tell(self) -> None:
        """Say which list this rank gives.

        Where the first list is another one this raises DisagreementError, also on the ranks that wait with the first list.
        Else raises as :func:`commlayer.failures.store_answers.asked_store`.
        """
        own_list = self._own_words()
        try:
            first = self._ask(lambda: self._store.compare_set("first", "", own_list)).decode(errors="replace")
        except NotImplementedError:
            # A store of the program's own, the same on all ranks, lacks this verb: lists are not compared, and ranks
            # whose lists differ hear at the timeout who has not come.
            return
        _, digest, _ = _parts(first)
        if digest == self._digest:
            return
        self._ask(self._differ)
        words = self._words()
        # Those who wait are in the group that has the first list.
        key = group_key(self._name, f"{digest}.{self._life}")
        self._detector.tell(Report(key, self._rank, (), told(f"called new_group with another list: {words}")))
        raise DisagreementError(words)

    def check(self) -> None:
        """Raise DisagreementError where it is known by now that another rank gave another list.

        Not over a connection of its own: where the store is gone, to connect takes as long as the timeout.
        """
        if self._ask(lambda: self._store.add("others", 0)):
            raise DisagreementError(self._words())

    def _differ(self) -> None:
        number = self._store.add("others", 1)
        self._store.set(f"other/{number}", self._own_words())

    def _words(self) -> str:
        """Who called with which list, as far as ranks have come."""
        ranks_of: dict[str, set[int]] = {}
        texts: dict[str, str] = {}

        def read() -> None:
            count = min(self._store.add("others", 0), _MOST_NAMED)
            keys = ["first", *(f"other/{number}" for number in range(1, count + 1))]
            for key in keys:
                rank, digest, text = _parts(self._store.get(key).decode(errors="replace"))
                if rank.isdecimal():
                    ranks_of.setdefault(digest, set()).add(int(rank))
                    texts[digest] = text
            ranks_of.setdefault(self._digest, set()).add(self._rank)
            texts[self._digest] = self._shown()

        self._ask(read)
        each = "; ".join(
            f"{listed('rank', sorted(ranks))} with {printable(texts[digest][:_LONGEST])}"
            for digest, ranks in ranks_of.items()
        )
        return f"{self._where()}: ranks called new_group with different lists: {each}: {_REMEDY}"

    def _own_words(self) -> str:
        return f"{self._rank} {self._digest} {self._shown()}"

    def _shown(self) -> str:
        text = str(list(self._ranks))
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}… ({len(self._ranks)} ranks)"

    def _where(self) -> str:
        return f"rank {self._rank}, group {self._name}, which is being made"

    def _ask(self, ask: Callable[[], _Answer]) -> _Answer:
        return asked_store(
            ask, Deadline.since(self._timeout_s), self._where(), lambda: host_lost(self._detector.knowledge)
        )


def _parts(words: str) -> tuple[str, str, str]:
    """The rank, the digest and the list of ranks in what a rank told; empty where it told something else."""
    rank, _, rest = words.partition(" ")
    digest, _, text = rest.partition(" ")
    return rank, digest, text

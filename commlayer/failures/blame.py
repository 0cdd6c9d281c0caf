"""The judge of who failed first, and the words that say it, the same for all who tell of a
failure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from commlayer.failures.failure_records import Absent, Ended, Gone, Left
from commlayer.profiles.counted import listed

__all__ = ["Blame", "blame_of", "first_failure", "rank_or_one_of"]

_MOST_NAMED = 32


@dataclass(frozen=True, slots=True)
class Blame:
    """The ranks that are to blame, and ``what`` became of them, as ``seen_by`` tells."""

    ranks: tuple[int, ...]
    what: str
    seen_by: int
    is_unheard: bool = False
    """Whether a rank died that others may have heard."""
    are_all: bool = False
    """Whether it is all of these ranks, and not one of them."""
    leaver: int | None = None
    """The member that left because of these ranks, which are not in the group."""

    @property
    def culprit(self) -> str:
        """The ranks in words."""
        return listed("rank", self.ranks, _MOST_NAMED) if self.are_all else rank_or_one_of(self.ranks)

    def fate(self, reader: int) -> str:
        """Say what became of them, and who has seen it: not where that is the rank ``reader``,
        which is told, or one of them."""
        return self.what if self.seen_by in (reader, *self.ranks) else f"{self.what} (seen by rank {self.seen_by})"

    def words(self, reader: int) -> str:
        """Say to the rank ``reader`` who is to blame, and for what."""
        return f"{self.culprit} {self.fate(reader)}"


def blame_of(record: Ended) -> Blame:
    """Blame the ranks of ``record``, where nothing else is known."""
    if isinstance(record, Absent):
        return Blame(record.ranks, record.what, record.seen_by, are_all=True)
    if isinstance(record, Gone):
        return Blame((record.rank,), record.what, record.seen_by, record.is_unheard)
    return Blame((record.rank,), record.what, record.rank)


def first_failure(ended: Iterable[Ended], left: Mapping[int, Left], ranks: Container[int]) -> Blame | None:
    """Find the ones of ``ranks`` that failed first, and not because of other ranks. None where none
    has failed.

    ``ended``: what is known, in the order of cause and effect; ``left``: what ranks that left have
    said themselves, which counts more than that another one found them gone.
    """
    for record in ended:
        if isinstance(record, Absent):
            absent = tuple(rank for rank in record.ranks if rank in ranks)
            if absent:
                return Blame(absent, record.what, record.seen_by, are_all=True)
        elif record.rank in ranks:
            said = left.get(record.rank)
            if said is None or not said.is_consequence:
                return blame_of(record if said is None else said)
    return None


def rank_or_one_of(ranks: Iterable[int]) -> str:
    """The rank, or the ranks one of which it is (a collective call of the backend does not say
    which)."""
    listed = list(ranks)
    names = ", ".join(map(str, listed[:_MOST_NAMED])) + ("" if len(listed) <= _MOST_NAMED else f", … {listed[-1]}")
    return f"one of ranks {names}" if len(listed) > 1 else f"rank {names}"

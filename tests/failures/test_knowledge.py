"""The knowledge that a rank has of a job, without any connection."""

from __future__ import annotations

import pytest

from commlayer.failures.failure_records import Gone, Left, Record, Report
from commlayer.failures.knowledge import Knowledge
from commlayer.failures.rank_links import neighbours

RANKS = (0, 1, 2, 3)
REPORT = Report("group", 1, (2,), "died")


class Heard:
    """An observer."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def observe(self, record: Record) -> None:
        self.records.append(record)


@pytest.mark.parametrize("size", [2, 5, 64, 512, 4096])
def test_a_rank_has_as_many_neighbours_as_its_number_has_digits(size: int) -> None:
    """It stores one address and reads theirs, however many ranks there are."""
    for rank in (0, 1, size // 2, size - 1):
        dialled = neighbours(rank, range(size))
        assert len(dialled) == len(set(dialled)) == (size - 1).bit_length()
        assert rank not in dialled
        assert all(rank in neighbours(neighbour, range(size), -1) for neighbour in dialled)


def test_news_are_passed_on_and_observed_once_and_strangers_are_none() -> None:
    known, passed, heard = Knowledge(0, RANKS), list[Record](), Heard()
    known.attach(heard)
    for record in (Gone(2, 1), Gone(2, 3), Gone(0, 1), Gone(9, 1), REPORT, REPORT):
        known.learn(record, passed.append)
    assert passed == heard.records == [Gone(2, 1), REPORT]
    assert known.failure() == "rank 2 died: its process has ended (seen by rank 1)"


def test_who_comes_later_is_told_all_that_is_known() -> None:
    known, heard = Knowledge(0, RANKS), Heard()
    for record in (Left(3, "bye", is_failure=False), REPORT):
        known.learn(record)
    known.attach(heard)
    known.detach(heard)
    known.learn(Gone(2, 1))
    assert heard.records == known.records()[1:] == [Left(3, "bye", is_failure=False), REPORT]
    assert known.await_failure(0.0) == known.failure() != ""

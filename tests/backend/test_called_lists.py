"""Ranks that call new_group with different lists are told so at once, and who gave which: those who wait, and those who come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, tell, wait_until
from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers

from commlayer.backend.called_lists import CalledLists, digest_of, group_key
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import DisagreementError
from commlayer.testing.plugin import ClusterFactory

JOB = (0, 1, 2, 3)


def lists(store: HashStore, rank: int, ranks: list[int], life: str = "0") -> CalledLists:
    return CalledLists(store, "7", life, rank, ranks, FailureDetector(None, rank, JOB, 0.0), 20.0)


def test_equal_lists_are_fine() -> None:
    store = HashStore()
    for rank in JOB:
        lists(store, rank, [0, 1]).tell()
    lists(store, 0, [0, 1]).check()


def test_who_gave_which_list_is_said_by_all() -> None:
    store = HashStore()
    first, second, other = lists(store, 0, [0, 1]), lists(store, 1, [0, 1]), lists(store, 3, [2, 3])
    first.tell()
    second.tell()
    with pytest.raises(DisagreementError, match=r"rank 0 with \[0, 1\]; rank 3 with \[2, 3\]: every rank of the job"):
        other.tell()
    with pytest.raises(DisagreementError, match=r"rank 1, group 7, .*: ranks 0, 1 with \[0, 1\]; rank 3 with \[2, 3\]"):
        second.check()
    with pytest.raises(DisagreementError, match=r"rank 0 with \[0, 1\]; ranks 2, 3 with \[2, 3\]"):
        lists(store, 2, [2, 3]).tell()


def test_whoever_waits_in_the_group_of_the_first_list_is_woken() -> None:
    store, detector = HashStore(), FailureDetector(None, 3, JOB, 0.0)
    lists(store, 0, [0, 1], "4.0").tell()
    board = FailureBoard(detector, group_key("7", f"{digest_of([0, 1])}.4.0"), 0, (0, 1))
    with pytest.raises(DisagreementError):
        CalledLists(store, "7", "4.0", 3, [2, 3], detector, 20.0).tell()
    assert board.is_broken


def test_another_job_on_the_same_store_may_give_another_list() -> None:
    """Numbers are counted anew after destroy_process_group."""
    store = HashStore()
    lists(store, 0, [0, 1], life="0").tell()
    lists(store, 0, [0, 2], life="1").tell()


def test_a_long_list_is_cut() -> None:
    store = HashStore()
    lists(store, 0, list(range(20_000))).tell()
    with pytest.raises(DisagreementError) as caught:
        lists(store, 1, [0, 1]).tell()
    assert "(20000 ranks)" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, 0),
        ({0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1], 3: [0, 1, 2]}, 0),
        ({0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2, 3]}, 3),
    ],
    ids=["halves", "one that leaves itself out", "one more"],
)
def test_ranks_that_wait_for_each_other_are_told(
    emulated_cluster: ClusterFactory, given: dict[int, list[int]], waits: int
) -> None:
    def job() -> tuple[str, str]:
        torch.set_num_threads(1)
        dist.init_process_group("commlayer", timeout=timedelta(seconds=HALF_AN_HOUR))
        rank = dist.get_rank()
        if rank != waits:
            wait_until("waits")
        else:
            tell("waits")
        try:
            dist.new_group(given[rank])
        except RuntimeError as error:
            found = type(error).__name__, str(error)
        else:
            found = "", ""
        tell("done")  # rank 0 has the store
        wait_until("done", 4)
        return found

    found = emulated_cluster(2, 2).run(job)
    told = {rank: text for rank, (kind, text) in enumerate(found) if kind}
    assert {kind for kind, _ in found} <= {"", "DisagreementError"}, found
    odd = min((ranks for ranks in given.values()), key=lambda ranks: list(given.values()).count(ranks))
    usual = next(ranks for ranks in given.values() if ranks != odd)
    assert all(f"with {odd}" in text and f"with {usual}" in text for text in told.values()), told
    stuck = {rank for rank, ranks in given.items() if rank in ranks and any(given[each] != ranks for each in ranks)}
    assert stuck <= set(told), told  # they would wait for each other

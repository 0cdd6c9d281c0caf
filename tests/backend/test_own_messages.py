"""Messages of a rank to itself, and batches of which one message is refused."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import HALF_AN_HOUR, start_with

from commlayer.backend.members import Members
from commlayer.backend.own_messages import OwnMessages
from commlayer.failures.board import FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import CollectiveTimeoutError, TensorError, UsageError
from commlayer.testing.plugin import ClusterFactory

A_MINUTE = timedelta(seconds=60)


def messages() -> OwnMessages:
    board = FailureBoard(FailureDetector(None, 0, (0,), 0.0), "group", 0, (0,))
    return OwnMessages(Members("0", 0, (0,), ((0,),), lambda: ""), board)


def test_messages_of_one_tag_keep_their_order_whichever_end_comes_first() -> None:
    own = messages()
    came = [torch.zeros(3) for _ in range(6)]
    early = [own.recv(each, 7) for each in came[:2]]
    other = own.recv(came[5], 8)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        sent = torch.full((3,), value)
        assert own.send(sent, 7).wait(A_MINUTE)
        sent.fill_(9.0)  # it may change after its wait
    late = [own.recv(each, 7) for each in came[2:5]]
    assert all(each.wait(A_MINUTE) for each in (*early, *late))
    assert not other.is_completed()
    assert [float(x[0]) for x in came] == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0]


def test_a_receive_waits_for_a_send_of_another_thread() -> None:
    own, came = messages(), torch.zeros(3)
    work = own.recv(came, 0)
    sender = threading.Timer(0.05, own.send, [torch.ones(3), 0])
    sender.start()
    assert work.wait(A_MINUTE)
    sender.join()
    assert came.tolist() == [1.0, 1.0, 1.0]


def test_a_receive_whose_send_never_comes_ends_with_its_timeout() -> None:
    with pytest.raises(RuntimeError, match="Timed out waiting 10ms for a message of this rank to itself"):
        messages().recv(torch.zeros(3), 0).wait(timedelta(milliseconds=10))


def test_a_message_of_another_size_is_said_where_it_is_received() -> None:
    own = messages()
    assert own.send(torch.ones(2), 0).wait(A_MINUTE)
    with pytest.raises(
        TensorError, match=r"rank 0, group 0: a message of this rank to itself has 8 bytes, .* expects 12"
    ):
        own.recv(torch.zeros(3), 0).wait(A_MINUTE)


@pytest.mark.cluster
def test_a_batch_may_include_oneself(emulated_cluster: ClusterFactory) -> None:
    """An all_to_all that is written with messages, of strided tensors too; then the next one pairs rightly."""

    def job() -> list[list[float]]:
        torch.set_num_threads(1)
        start_with(HALF_AN_HOUR)
        rank, size = dist.get_rank(), dist.get_world_size()
        results = []
        for nth in range(2):
            going = [torch.full((3, 2), float(100 * nth + 10 * rank + peer)).T for peer in range(size)]
            coming = [torch.zeros(3, 2).T for _ in range(size)]
            ops = [dist.P2POp(dist.isend, going[peer], peer) for peer in range(size)]
            ops += [dist.P2POp(dist.irecv, coming[peer], peer) for peer in range(size)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            results.append([float(x.mean()) for x in coming])
        group: Any = dist.group.WORLD
        mine = torch.zeros(2)
        group.start_batch([(torch.ones(2), rank)], [(mine, rank)]).wait()
        results.append(mine.tolist())
        one = torch.zeros(2)
        works = [dist.irecv(one, rank), dist.isend(torch.ones(2), rank)]
        for each in works:
            assert each is not None
            each.wait()
        results.append(one.tolist())
        missing = dist.irecv(one, rank)
        assert missing is not None
        with pytest.raises(CollectiveTimeoutError, match="recv from rank"):
            missing.wait(timedelta(milliseconds=20))
        return results

    for rank, found in enumerate(emulated_cluster(1, 3).run(job)):
        exchanged = [[100.0 * nth + 10.0 * peer + rank for peer in range(3)] for nth in range(2)]
        assert found == [*exchanged, [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.cluster
def test_a_batch_of_which_one_message_is_refused_sends_nothing(emulated_cluster: ClusterFactory) -> None:
    def job() -> float:
        torch.set_num_threads(1)
        start_with(HALF_AN_HOUR)
        rank, came = dist.get_rank(), torch.zeros(2)
        if rank == 0:
            good = dist.P2POp(dist.isend, torch.full((2,), 1.0), 1)
            for bad, error in (
                (dist.P2POp(dist.isend, torch.ones(2), group_peer=7), UsageError),
                (dist.P2POp(dist.isend, torch.ones(2).to_sparse(), 1), TensorError),
                (dist.P2POp(dist.irecv, torch.ones(1).expand(2), 1), TensorError),
            ):
                with pytest.raises(error):
                    dist.batch_isend_irecv([good, bad])
            dist.send(torch.full((2,), 2.0), 1)
        else:
            dist.recv(came, 0)
        return float(came[0])

    assert emulated_cluster(1, 2).run(job) == [0.0, 2.0]

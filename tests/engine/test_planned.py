"""Planned groups, without processes: what a rank of one knows before it has talked to anybody."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from commlayer.engine.planned import PlannedGroup
from commlayer.engine.runner import Sent, drive
from commlayer.failures.board import FailedStep, Failure, FailureBoard
from commlayer.failures.detector import FailureDetector
from commlayer.profiles.errors import ClusterError, DisagreementError
from commlayer.scheduler.call_moves import rank_moves
from commlayer.scheduler.group_moves import Group, group_moves
from commlayer.scheduler.plan import Buffer, Op
from commlayer.settings import Settings
from commlayer.transport.call_memory import CallMemory
from commlayer.transport.contract import Channel, SizeMismatch
from commlayer.transport.gloo import GlooTransport


def rank_of(nodes: list[list[int]], rank: int, plan: str) -> PlannedGroup:
    members = sorted(member for node in nodes for member in node)
    return PlannedGroup(
        name="test",
        rank=rank,
        nodes=nodes,
        global_ranks=members,
        store=HashStore(),
        planner=None,
        settings=Settings(plan=plan),
        timeout_s=1.0,
        board=FailureBoard(FailureDetector(None, 0, (0,), 0.0), "test", members[rank], members),
    )


@pytest.mark.parametrize(("root", "sent"), [(0, (64, 128)), (2, (0, 64))])
def test_what_a_rank_sends_of_a_plan_is_counted_by_link_class(root: int, sent: tuple[int, int]) -> None:
    """128 bytes from the root: it scatters halves inside its node, each crosses the wire once, each node gathers."""
    group = rank_of([[0, 1], [2, 3]], 0, plan="hierarchical")
    broadcast, gather = group.choices.plan("broadcast", 128), group.choices.plan("all_gather", 4 * 256)
    assert broadcast is not None
    assert gather is not None
    for plan, wanted in ((gather, (256, 2 * 256)), (broadcast, sent)):
        moves = rank_moves("whole", plan, group.nodes, group.rank, root=root if plan is broadcast else 0)
        assert Sent.by(moves.steps, group.near) == wanted


class OtherSizes:
    """A process group whose peers send twice what is expected."""

    class Message:
        def __init__(self, expected_bytes: int, peer: int) -> None:
            self.expected_bytes, self.peer = expected_bytes, peer

        def wait(self, timeout: timedelta = timedelta(0)) -> None:
            raise SizeMismatch(self.expected_bytes, 2 * self.expected_bytes, self.peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        return self.Message(tensors[0].numel(), peer)

    send = recv


class BrokenBarrier:
    """A group of Gloo's whose barrier fails; ``parted`` gets the groups of which one was begun."""

    def __init__(self, parted: list[BrokenBarrier]) -> None:
        self._parted = parted

    def barrier(self) -> BrokenBarrier:
        self._parted.append(self)
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_transport_parts_with_every_group_though_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    parted: list[BrokenBarrier] = []
    kept: list[object] = []
    monkeypatch.setattr("commlayer.transport.gloo.keep", kept.append)
    groups = [BrokenBarrier(parted), BrokenBarrier(parted)]
    channels = [Channel(name, cast("Any", group), ((0, 0), (1, 1))) for name, group in zip("ab", groups, strict=True)]
    board = FailureBoard(FailureDetector(None, 0, (0,), 0.0), "closing", 0, (0, 1))
    board.has_abandoned = True
    transport = GlooTransport(dict(zip((Op.ALL_TO_ALL, Op.ALL_GATHER), channels, strict=True)), board)
    with pytest.raises(ClusterError, match="not all of ranks"):
        transport.close()
    assert (parted, kept, transport.channels) == (groups, groups, {})


def test_a_message_of_another_size_is_told_to_the_others() -> None:
    """Whoever waits for the rank that found it must hear of it, and not take that rank for dead."""
    detector, group = FailureDetector(None, 0, (0,), 0.0), cast("Any", OtherSizes())
    channel = Channel("world", group, ((10, 0), (11, 1)))
    transport = GlooTransport(dict.fromkeys(Op, channel), FailureBoard(detector, "failure", 10, (10, 11)))
    planned = rank_of([[0, 1]], 0, plan="flat_direct")
    plan = planned.choices.plan("all_gather", 512)
    assert plan is not None
    moves, _ = group_moves(plan, Group(planned.nodes, 0, (256, 256)), 0)
    buffers = {Buffer.INPUT: CallMemory(torch.zeros(256).byte()), Buffer.OUTPUT: CallMemory(torch.zeros(512).byte())}
    call = transport.start(transport.compile(plan, moves), buffers, 1.0)
    drive(plan, call)
    with pytest.raises(DisagreementError, match=r"rank 11, got 512: .*COMMLAYER_DEBUG=detail"):
        call.finish()
    wait = FailedStep(11, (10,), "world", "all_gather", plan.name, "all_gather", 0, 1)
    theirs = FailureBoard(detector, "failure", 11, (10, 11)).explain(
        wait, Failure(RuntimeError("Connection closed"), 0.1, 1.0)
    )
    assert str(theirs).startswith("rank 10 expected 256 bytes from rank 11 and got 512, so it left the group")

"""The geometry of every plan, run in memory over all ranks at once: the result must be what flat gives, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.profiles.links import Resource
from commlayer.scheduler.group_strategies import build
from commlayer.scheduler.moves import ALIGN, Region
from commlayer.scheduler.plan import Buffer, Gather, Op, Plan, Strategy
from commlayer.scheduler.replicated import replicated_moves, staging_bytes
from commlayer.scheduler.traffic import Traffic

Rank = tuple[int, int]


def run_in_memory(plan: Plan) -> tuple[dict[Rank, np.ndarray], dict[Rank, np.ndarray]]:
    """Execute the plan step by step on all ranks; messages are matched by (group, source, target, tag), each exactly once."""
    e, t, size = plan.traffic.group_size, plan.traffic.replication, plan.traffic.logical_bytes
    ranks = [(i, j) for i in range(e) for j in range(t)]
    random = np.random.default_rng(0)
    inputs = {i: random.integers(0, 256, size, dtype=np.uint8) for i in range(e)}
    memory = {
        (i, j): {
            Buffer.INPUT: inputs[i].copy(),
            Buffer.OUTPUT: np.zeros(size, np.uint8),
            Buffer.STAGING: np.zeros(staging_bytes(plan), np.uint8),
        }
        for i, j in ranks
    }
    todo = {rank: replicated_moves(plan, *rank) for rank in ranks}

    def view(rank: Rank, region: Region) -> np.ndarray:
        assert 0 <= region.start < region.stop <= memory[rank][region.buffer].size
        return memory[rank][region.buffer][region.start : region.stop]

    for index, step in enumerate(plan.steps):
        posted: dict[tuple[Rank, Rank, int], np.ndarray] = {}
        for rank in ranks:
            for message in todo[rank][index].sends:
                peer = (message.peer, rank[1]) if step.op is Op.ALL_TO_ALL else (rank[0], message.peer)
                key = (rank, peer, message.tag)
                assert key not in posted
                posted[key] = view(rank, message.region).copy()
        for rank in ranks:
            for message in todo[rank][index].receives:
                peer = (message.peer, rank[1]) if step.op is Op.ALL_TO_ALL else (rank[0], message.peer)
                data = posted.pop((peer, rank, message.tag))
                view(rank, message.region)[:] = data
            for copy in todo[rank][index].copies:
                view(rank, copy.target)[:] = view(rank, copy.source)
        assert not posted, "a message was sent that nobody receives"
    block = plan.traffic.block_bytes
    expected = {
        (i, j): np.concatenate([inputs[k][i * block : (i + 1) * block] for k in range(e)] or [inputs[i]])
        for i, j in ranks
    }
    return {rank: memory[rank][Buffer.OUTPUT] for rank in ranks}, expected


@settings(max_examples=150, deadline=None)
@given(
    e=st.integers(1, 5),
    t=st.integers(1, 5),
    block=st.one_of(st.integers(0, 3 * ALIGN), st.integers(0, 20_000)),
    strategy=st.sampled_from([s for s in Strategy if s not in (Strategy.DIRECT, Strategy.LEADERS, Strategy.RING)]),
    chunks=st.integers(1, 7),
    gather=st.sampled_from(list(Gather)),
)
def test_every_plan_gives_what_flat_gives(
    e: int, t: int, block: int, strategy: Strategy, chunks: int, gather: Gather
) -> None:
    if strategy is not Strategy.FLAT and (e == 1 or t == 1):
        strategy = Strategy.FLAT
    traffic = Traffic(e * block, e, t)
    got, expected = run_in_memory(build(traffic, strategy, chunks, gather))
    for rank, output in got.items():
        np.testing.assert_array_equal(output, expected[rank], err_msg=str(rank))


def test_the_check_can_fail() -> None:
    traffic = Traffic(2 * 4096, 2, 2)
    plan = build(traffic, Strategy.HIERARCHICAL)
    without_gather = Plan(traffic, plan.strategy, 1, plan.gather, plan.steps[:-1])
    got, expected = run_in_memory(without_gather)
    assert any(not np.array_equal(got[rank], expected[rank]) for rank in got)


@pytest.mark.parametrize(("gather", "share"), [(Gather.WHOLE, 1.0), (Gather.REMOTE, 0.5)])
def test_remote_gather_moves_only_what_crossed_the_wire(gather: Gather, share: float) -> None:
    traffic = Traffic(2 * 4 * ALIGN * 64, 2, 4)
    plan = build(traffic, Strategy.HIERARCHICAL, gather=gather)
    index = next(i for i, step in enumerate(plan.steps) if step.op is Op.ALL_GATHER)
    received = sum(message.region.size for message in replicated_moves(plan, 0, 1)[index].receives)
    assert received == share * traffic.logical_bytes * 3 / 4


def test_a_wire_carries_only_one_slice_of_each_remote_block() -> None:
    traffic = Traffic(4 * 8 * ALIGN * 8, 4, 8)
    for strategy, chunks in ((Strategy.HIERARCHICAL, 1), (Strategy.PIPELINED, 4), (Strategy.PIPELINED_COPY, 8)):
        plan = build(traffic, strategy, chunks)
        sent = sum(
            message.region.size
            for step, move in zip(plan.steps, replicated_moves(plan, 2, 3), strict=True)
            for message in move.sends
            if step.resource is Resource.INTER
        )
        assert sent == traffic.logical_bytes * 3 / 4 / 8

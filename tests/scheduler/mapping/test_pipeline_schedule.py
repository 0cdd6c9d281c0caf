"""Pipeline schedules: every task once, in an order that can be run, and as long as the closed form says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import UsageError
from commlayer.scheduler.mapping.pipeline_schedule import bubble_us, hops, makespan_us, order, timetable


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_of_equal_stages_takes_what_the_closed_form_says(ranks: int, micro_batches: int) -> None:
    tasks = timetable([1.0] * ranks, [2.0] * ranks, micro_batches)
    assert max(task.end for task in tasks) == pytest.approx(makespan_us([3.0] * ranks, micro_batches))
    assert len(tasks) == 2 * ranks * micro_batches


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 5))
def test_interleaved_chunks_divide_the_bubble(ranks: int, groups: int, chunks: int) -> None:
    tasks = timetable([1.0] * ranks, [2.0] * ranks, ranks * groups, chunks)
    assert max(task.end for task in tasks) == pytest.approx(makespan_us([3.0] * ranks, ranks * groups, chunks))
    assert bubble_us([3.0] * ranks, chunks) == pytest.approx((ranks - 1) * 3.0 / chunks)


@given(st.integers(2, 6), st.integers(0, 10), st.floats(1.0, 3.0), st.data())
def test_the_slowest_stage_rules_1f1b(ranks: int, extra: int, slower: float, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, ranks - 1))
    forward = [1.0] * ranks
    forward[which] = slower
    backward = [2 * us for us in forward]
    stages = [a + b for a, b in zip(forward, backward, strict=True)]
    took = max(task.end for task in timetable(forward, backward, ranks + extra))
    said = makespan_us(stages, ranks + extra)
    assert took == pytest.approx(said) if which == ranks - 1 else took <= said * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_every_rank_runs_every_task_once_and_backward_after_forward(ranks: int, groups: int, chunks: int) -> None:
    for rank in range(ranks):
        tasks = order(ranks, rank, ranks * groups, chunks)
        assert len(set(tasks)) == len(tasks) == 2 * ranks * groups * chunks
        for chunk in range(chunks):
            for micro_batch in range(ranks * groups):
                assert tasks.index((chunk, micro_batch, True)) < tasks.index((chunk, micro_batch, False))


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.floats(0.0, 1.0))
def test_no_task_begins_before_its_input_is_there(ranks: int, groups: int, chunks: int, send_us: float) -> None:
    tasks = timetable([1.0] * ranks, [2.0] * ranks, ranks * groups, chunks, send_us=send_us)
    ends = {(task.chunk * ranks + task.rank, task.micro_batch, task.is_forward): task.end for task in tasks}
    for task in tasks:
        stage = task.chunk * ranks + task.rank
        before = stage - 1 if task.is_forward else stage + 1
        if 0 <= before < ranks * chunks:
            assert task.start >= ends[before, task.micro_batch, task.is_forward] + send_us - 1e-9


def test_interleaved_chunks_need_a_multiple_of_the_ranks() -> None:
    with pytest.raises(UsageError, match="multiple of pp=4 micro-batches, got 6"):
        order(4, 0, 6, 2)


@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 4))
def test_sends_lengthen_a_step_as_often_as_hops_says(ranks: int, micro_batches: int, chunks: int) -> None:
    count = micro_batches if chunks == 1 else ranks * (1 + micro_batches // ranks)
    if ranks == 1:
        chunks = 1
    alone = max(task.end for task in timetable([chunks * 1.0] * ranks, [chunks * 2.0] * ranks, count, chunks))
    sending = timetable([chunks * 1.0] * ranks, [chunks * 2.0] * ranks, count, chunks, send_us=0.01)
    assert max(task.end for task in sending) - alone == pytest.approx(0.01 * hops(ranks, count, chunks))

"""Pipeline schedules: every task once, in an order that can be run, and as long as the closed form says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.errors import UsageError
from commlayer.scheduler.mapping.pipeline_orders import Slot, Task, laid_out_us, order, timetable
from commlayer.scheduler.mapping.pipeline_schedule import (
    PipelineSchedule,
    StageTimes,
    bubble_us,
    chunks_of,
    count_merged,
    course,
    hops,
    in_flight_chunks,
    num_chunks,
    passes,
)

DUAL: tuple[PipelineSchedule, ...] = ("dualpipe", "dualpipev")


def laid_out(
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    micro_batches: int,
    chunks: int = 1,
    *,
    send_us: float = 0.0,
    schedule: PipelineSchedule = "1f1b",
    weights_us: Sequence[float] | None = None,
) -> list[Task]:
    """Tasks of stages with these times; merged ones take as long as their two parts."""
    weights = weights_us or [0.0] * len(forward_us)
    each = zip(forward_us, backward_us, weights, strict=True)
    stages = [StageTimes(there, back, part, there + back) for there, back, part in each]
    return timetable(schedule, stages, micro_batches, chunks, send_us=send_us)


def makespan_us(stages_us: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Compute the time of all micro-batches of 1F1B, µs: the slowest rank works without a pause but for the bubble.

    Exact for equal stages, and where the slowest is the last, as it is by the head; where it is another, and forward and backward
    have one ratio in all stages, never too short: a part of the bubble behind it is then hidden.
    """
    return micro_batches * max(stages_us) + bubble_us(stages_us, chunks)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_of_equal_stages_takes_what_the_closed_form_says(ranks: int, micro_batches: int) -> None:
    tasks = laid_out([1.0] * ranks, [2.0] * ranks, micro_batches)
    assert max(task.end for task in tasks) == pytest.approx(makespan_us([3.0] * ranks, micro_batches))
    assert len(tasks) == 2 * ranks * micro_batches


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 5))
def test_interleaved_chunks_divide_the_bubble(ranks: int, groups: int, chunks: int) -> None:
    tasks = laid_out([1.0] * ranks, [2.0] * ranks, ranks * groups, chunks)
    assert max(task.end for task in tasks) == pytest.approx(makespan_us([3.0] * ranks, ranks * groups, chunks))
    assert bubble_us([3.0] * ranks, chunks) == pytest.approx((ranks - 1) * 3.0 / chunks)


@given(st.integers(2, 6), st.integers(0, 10), st.floats(1.0, 3.0), st.data())
def test_the_slowest_stage_rules_1f1b(ranks: int, extra: int, slower: float, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, ranks - 1))
    forward = [1.0] * ranks
    forward[which] = slower
    backward = [2 * us for us in forward]
    stages = [a + b for a, b in zip(forward, backward, strict=True)]
    took = max(task.end for task in laid_out(forward, backward, ranks + extra))
    said = makespan_us(stages, ranks + extra)
    assert took == pytest.approx(said) if which == ranks - 1 else took <= said * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_every_rank_runs_every_task_once_and_backward_after_forward(ranks: int, groups: int, chunks: int) -> None:
    for rank in range(ranks):
        tasks = order(ranks, rank, ranks * groups, chunks)
        assert len(set(tasks)) == len(tasks) == 2 * ranks * groups * chunks
        for chunk in range(chunks):
            for micro_batch in range(ranks * groups):
                forward, backward = (Slot(kind, chunk, micro_batch) for kind in ("forward", "backward"))
                assert tasks.index(forward) < tasks.index(backward)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.floats(0.0, 1.0))
def test_no_task_begins_before_its_input_is_there(ranks: int, groups: int, chunks: int, send_us: float) -> None:
    tasks = laid_out([1.0] * ranks, [2.0] * ranks, ranks * groups, chunks, send_us=send_us)
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
    alone = max(task.end for task in laid_out([chunks * 1.0] * ranks, [chunks * 2.0] * ranks, count, chunks))
    sending = laid_out([chunks * 1.0] * ranks, [chunks * 2.0] * ranks, count, chunks, send_us=0.01)
    assert max(task.end for task in sending) - alone == pytest.approx(0.01 * hops(ranks, count, chunks).alone)


def _equal(schedule: PipelineSchedule, ranks: int, chunk: StageTimes) -> list[StageTimes]:
    """Equal ranks, of the times of one chunk."""
    number = len(chunks_of(schedule, ranks, 0, 2 if schedule == "1f1b-overlap" else 1))
    return [StageTimes(*(number * us for us in chunk))] * ranks


times = st.floats(0.5, 3.0)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), times, times, st.floats(0.5, 1.1))
def test_merged_tasks_take_what_the_closed_form_says(
    ranks: int, groups: int, chunks: int, forward: float, backward: float, hidden: float
) -> None:
    chunks = chunks if ranks > 1 else 1
    both = max(forward, backward, hidden * (forward + backward))
    stages = [StageTimes(chunks * forward, chunks * backward, 0.0, chunks * both)] * ranks
    count = ranks * groups
    took = laid_out_us("1f1b-overlap", stages, count, chunks)
    assert took == pytest.approx(course("1f1b-overlap", stages, count, chunks).total_us(stages))
    alone = min((chunks - 1) * ranks + 1, count * chunks)
    said = ranks * chunks * (forward + backward) + (count * chunks - (chunks - 1) * ranks - 1) * both
    assert took == pytest.approx(said), alone


@given(st.integers(1, 9))
def test_a_merged_course_without_a_pipeline_leaves_the_first_and_the_last_pass_alone(count: int) -> None:
    stages = [StageTimes(1.0, 2.0, 0.0, 2.5)]
    assert laid_out_us("1f1b-overlap", stages, count) == pytest.approx(3.0 + 2.5 * (count - 1))
    assert course("1f1b-overlap", stages, count) == (0, 1.0, count - 1.0, 0.0)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.floats(1.0, 2.0), st.data())
def test_the_slowest_rank_rules_merged_tasks(
    ranks: int, groups: int, chunks: int, slower: float, data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, ranks - 1))
    scale = [slower if rank == which else 1.0 for rank in range(ranks)]
    stages = [StageTimes(by, 2 * by, 0.0, 2.6 * by) for by in scale]
    took = laid_out_us("1f1b-overlap", stages, ranks * groups, chunks)
    said = course("1f1b-overlap", stages, ranks * groups, chunks).total_us(stages)
    busiest = max(each.alone_us * groups for each in stages)
    assert 0.8 * took <= said <= took * (1 + 1e-9) + busiest


@given(st.integers(1, 4), st.integers(0, 5), st.floats(0.7, 1.0))
def test_dualpipe_has_the_bubble_of_its_readme(half: int, extra: int, hidden: float) -> None:
    """(PP/2−1)(F&B + B − 3W), where a chunk's forward pass and its products for weights take half of its backward pass each."""
    ranks, count = 2 * half, 4 * half + 2 * extra
    chunk = StageTimes(1.0, 2.0, 1.0, 3.0 * hidden)
    stages = _equal("dualpipe", ranks, chunk)
    merged = count_merged("dualpipe", ranks, half - 1, count)
    busy = (count - merged) * chunk.alone_us + merged * chunk.merged_us
    bubble = (ranks / 2 - 1) * (chunk.merged_us + chunk.backward_us - 3 * chunk.weights_us)
    assert laid_out_us("dualpipe", stages, count) - busy == pytest.approx(bubble)
    way = course("dualpipe", stages, count, makespan=laid_out_us)
    assert way.total_us(stages) == pytest.approx(busy + bubble)
    assert way.alone + way.merged == count / 2


@given(st.sampled_from(DUAL), st.integers(1, 4), st.integers(0, 5), times, times, st.floats(0.0, 1.0))
def test_dualpipe_runs_every_task_once_with_its_input_there(
    schedule: PipelineSchedule, half: int, extra: int, forward: float, backward: float, part: float
) -> None:
    ranks = 2 * half if schedule == "dualpipe" else half + 1
    count = 2 * ranks + (2 * extra if schedule == "dualpipe" else extra)
    tasks = laid_out(
        [2 * forward] * ranks,
        [2 * backward] * ranks,
        count,
        schedule=schedule,
        weights_us=[2 * part * backward] * ranks,
        send_us=0.1,
    )
    _check_all_there(tasks, schedule, ranks, count)


def _check_all_there(tasks: list[Task], schedule: PipelineSchedule, ranks: int, count: int) -> None:
    """A slow look at every task: each once, weights behind inputs, and what it needs from the neighbour before it begins."""
    ends: dict[tuple[int, str, int, int], float] = {}
    for task in tasks:
        slot = task.slot
        parts = [("forward", slot.chunk, slot.micro_batch)] if slot.is_forward else []
        parts += [("backward", *slot.backward)] if slot.backward else []
        parts += [("weights", slot.chunk, slot.micro_batch)] if slot.kind == "weights" else []
        for part in parts:
            assert (task.rank, *part) not in ends
            ends[(task.rank, *part)] = task.end
    last = (ranks if schedule == "dualpipe" else num_chunks(schedule, ranks, 1)) - 1
    each = passes(schedule, count)
    number = {kind: sum(1 for key in ends if key[1] == kind) for kind in ("forward", "backward")}
    assert number == {"forward": ranks * 2 * each, "backward": ranks * 2 * each}
    put_off = {(task.rank, task.chunk, task.micro_batch): task.end for task in tasks if task.slot.kind == "inputs"}
    made = {(task.rank, task.chunk, task.micro_batch): task.start for task in tasks if task.slot.kind == "weights"}
    assert put_off.keys() == made.keys()
    assert all(made[key] >= put_off[key] for key in made)
    for task in tasks:
        if task.slot.is_forward:
            stage = last - task.rank if task.chunk else task.rank
            before = [
                end
                for (rank, kind, chunk, number_of), end in ends.items()
                if kind == "forward" and number_of == task.micro_batch and (last - rank if chunk else rank) == stage - 1
            ]
            assert len(before) == (stage > 0)
            assert all(task.start >= end - 1e-9 for end in before)


@given(st.sampled_from(("1f1b", "1f1b-overlap", *DUAL)), st.integers(2, 4), st.integers(2, 4), st.integers(1, 3))
def test_a_rank_holds_as_many_activations_as_it_is_said(
    schedule: PipelineSchedule, half: int, groups: int, chunks: int
) -> None:
    ranks = 2 * half
    chunks = 1 if schedule in DUAL else max(chunks, 2) if schedule == "1f1b-overlap" else chunks
    for rank in range(ranks):
        held = most = 0
        for slot in order(ranks, rank, ranks * groups, chunks, schedule):
            held += slot.is_forward - (slot.backward is not None)
            # What a merged task adds it frees; DualPipe's README counts it as one more all the same.
            most = max(most, held + (schedule in DUAL and slot.kind == "merged"))
        assert most <= in_flight_chunks(schedule, ranks, rank, ranks * groups, chunks)
        if rank == 0 or schedule not in DUAL:
            assert most == in_flight_chunks(schedule, ranks, rank, ranks * groups, chunks)


@given(st.integers(2, 5), st.integers(2, 5), st.integers(2, 3))
def test_sends_lengthen_merged_tasks_as_often_as_hops_says(ranks: int, groups: int, chunks: int) -> None:
    stages = [1.0 * chunks] * ranks, [2.0 * chunks] * ranks
    count = ranks * groups
    alone, sending = (
        max(task.end for task in laid_out(*stages, count, chunks, send_us=us, schedule="1f1b-overlap"))
        for us in (0.0, 0.01)
    )
    assert (sending - alone) / 0.01 == pytest.approx(sum(hops(ranks, count, chunks, "1f1b-overlap")))


@given(st.sampled_from(DUAL), st.integers(2, 4), st.integers(1, 4))
def test_sends_lengthen_dualpipe_about_as_often_as_hops_says(
    schedule: PipelineSchedule, half: int, groups: int
) -> None:
    ranks, count = 2 * half, 4 * half * groups
    alone, sending = (
        max(
            task.end
            for task in laid_out(
                [2.0] * ranks, [4.0] * ranks, count, send_us=us, schedule=schedule, weights_us=[2.0] * ranks
            )
        )
        for us in (0.0, 0.01)
    )
    assert (sending - alone) / 0.01 == pytest.approx(sum(hops(ranks, count, 1, schedule)), abs=2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "count", "chunks", "says"),
    [
        ("dualpipe", 3, 6, 1, "even number of stages"),
        ("dualpipe", 4, 6, 1, "at least 2 · pp = 8 micro-batches, got 6"),
        ("dualpipe", 4, 9, 1, "even number of micro-batches"),
        ("dualpipev", 4, 7, 1, "at least 2 · pp = 8"),
        ("dualpipev", 4, 8, 2, "expected vpp=1"),
        ("dualpipev", 1, 8, 1, "expected a pipeline"),
        ("1f1b-overlap", 4, 8, 1, "vpp of at least 2"),
    ],
)
def test_a_schedule_says_what_it_needs(
    schedule: PipelineSchedule, ranks: int, count: int, chunks: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        order(ranks, 0, count, chunks, schedule)

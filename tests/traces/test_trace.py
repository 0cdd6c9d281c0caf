"""Traces of jobs, on made-up records of several ranks whose clocks differ: nothing here sleeps or starts a process but two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from commlayer.calls.ring import StepRecord
from commlayer.cli.main import main
from commlayer.engine.tracing import RecordedCall, recorded, traced
from commlayer.profiles import catalog
from commlayer.profiles.errors import UsageError
from commlayer.scheduler import Plan, Traffic, choose
from commlayer.scheduler.moves import Moves
from commlayer.settings import Settings
from commlayer.traces import recorder as recorder_module
from commlayer.traces.analyse import Window, group_times, lane_times, lateness, plans, select
from commlayer.traces.call_records import CallRecord, Mark, rank_name
from commlayer.traces.chrome_of_job import rank_events, running
from commlayer.traces.clock import ClockReading, clock_identity, clock_offset_ns, exchange_clocks, to_job_ns
from commlayer.traces.intervals import length, rows_without_overlap, union
from commlayer.traces.rank_files import RankTrace, rank_paths, read_folder, write_trace
from commlayer.traces.recorder import Recorder, close_recorder, open_recorder, recorder

MS = 1_000_000
FAST = (200, 900)
"""How long a message of the made-up network takes at least and at most, ns."""


@pytest.fixture(autouse=True)
def _no_recorder_left() -> Any:
    yield
    recorder_module._recorder = None


# Clocks


class SkewedRanks:
    """Ranks that take part in all-gathers in true time, each on a clock of its own: stamp = true · rate + skew."""

    def __init__(self, skews: list[int], delays: Callable[[int, int], int], drift: float = 0.0) -> None:
        self.skews, self.delays, self.drift = skews, delays, drift

    def stamp(self, rank: int, true_ns: int) -> int:
        return round(true_ns * (1 + self.drift * rank)) + self.skews[rank]

    def exchange(self, identities: list[int], rounds: int = 16) -> list[ClockReading]:
        """Each rank's reading. The ranks run one after the other: what a gather gives was worked out for all before."""
        size = len(self.skews)
        entered = [1000 * MS + 5 * MS * rank for rank in range(size)]  # they do not come together
        values: list[list[int]] = []
        leaving: list[list[int]] = []
        for turn in range(rounds + 2):
            everybody = max(entered)
            leaves = [everybody + self.delays(turn, rank) for rank in range(size)]
            leaving.append(leaves)
            values.append([self.stamp(rank, entered[rank]) for rank in range(size)])
            entered = leaves
        # the first of these turns is the untimed one; the stamps after it are those that turn 1 sends
        return [self._read(rank, identities, values, leaving, rounds) for rank in range(size)]

    def _read(
        self, rank: int, identities: list[int], values: list[list[int]], leaving: list[list[int]], rounds: int
    ) -> ClockReading:
        turn = -1
        sent = []

        def gather(value: int) -> list[int]:
            nonlocal turn
            turn += 1
            sent.append(value)
            return identities if turn == 0 else [0] * len(identities) if turn == 1 else values[turn - 1]

        def clock() -> int:
            return self.stamp(rank, leaving[turn - 1][rank])

        reading = exchange_clocks(gather, rank, rounds=rounds, clock=clock, identity=identities[rank])
        assert sent[2:] == [value[rank] for value in values[1 : rounds + 2]]  # the made-up job and the code agree
        return reading


@given(
    st.lists(st.integers(-(10**15), 10**15), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_clock_error_is_a_bound(skews: list[int], random: Any) -> None:
    job = SkewedRanks(skews, lambda turn, rank: random.randint(*FAST))
    for rank, reading in enumerate(job.exchange(list(range(len(skews))))):
        truth = skews[0] - skews[rank]
        assert abs(reading.offset_ns - truth) <= reading.error_ns
        assert reading.error_ns <= FAST[1]  # the tightest round counts, not the sum of them
    assert len({reading.origin_ns for reading in job.exchange(list(range(len(skews))))}) == 1


def test_one_slow_round_does_not_matter() -> None:
    slow = SkewedRanks([0, 77 * MS], lambda turn, rank: 50 * MS if turn == 3 and rank == 1 else 500)
    _, reading = slow.exchange([1, 2])
    assert abs(reading.offset_ns + 77 * MS) <= reading.error_ns <= 500


def test_a_lopsided_network_is_within_the_error() -> None:
    """Messages to rank 1 take ten times as long: the middle is wrong, and the error says by how much it may be."""
    job = SkewedRanks([0, 5 * MS], lambda turn, rank: 10_000 if rank else 1000)
    _, reading = job.exchange([1, 2])
    assert 0 < abs(reading.offset_ns + 5 * MS) <= reading.error_ns <= 10_000


def test_ranks_on_one_kernel_need_no_correction() -> None:
    skews = [3, 3, 900 * MS, 900 * MS]
    readings = SkewedRanks(skews, lambda turn, rank: 300 + 100 * rank).exchange([7, 7, 8, 8])
    assert [(r.offset_ns, r.error_ns) for r in readings[:2]] == [(0, 0), (0, 0)]
    assert readings[2].offset_ns == readings[3].offset_ns  # one machine, one offset
    alone = SkewedRanks([3, 900 * MS], lambda turn, rank: 600 if rank else 300).exchange([7, 8])[1]
    assert readings[2].error_ns <= alone.error_ns


def test_this_machine_knows_its_clock() -> None:
    if sys.platform == "linux":
        assert clock_identity() == clock_identity()
    assert 0 <= clock_identity() < 2**63


def test_offsets_need_a_sample() -> None:
    assert clock_offset_ns([(100, 110, 1100, 1120)]) == (-1005, 15)
    with pytest.raises(ValueError, match="one all-gather at least"):
        clock_offset_ns([])


def test_drift_between_two_readings_is_taken_out() -> None:
    first, last = ClockReading(0, 1000, 5, 400), ClockReading(10 * MS, 3000, 5, 9 * MS)
    clock = to_job_ns([first, last])
    assert clock(0) == 600
    assert clock(10 * MS) == 10 * MS + 3000 - 400
    assert clock(5 * MS) == 5 * MS + 2000 - 400
    assert clock(20 * MS) == 20 * MS + 5000 - 400
    assert to_job_ns([first])(7) == to_job_ns([first, first])(7) == 607
    assert to_job_ns([])(7) == 7


# Intervals


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))))
def test_union_covers_the_same_moments(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for start, end in intervals for moment in range(start, end)}
    joined = union(intervals)
    assert moments == {moment for start, end in joined for moment in range(start, end)}
    assert length(intervals) == len(moments)
    assert all(before[1] < after[0] for before, after in pairwise(joined))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))))
def test_rows_hold_everything_without_overlap(intervals: list[tuple[int, int]]) -> None:
    rows = rows_without_overlap([(interval, place) for place, interval in enumerate(intervals)])
    assert sorted(place for row in rows for _, place in row) == list(range(len(intervals)))
    for row in rows:
        assert all(a[0][1] <= b[0][0] for a, b in pairwise(row))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)).map(lambda pair: (pair[0], sum(pair))), min_size=1))
def test_there_are_no_more_rows_than_needed(intervals: list[tuple[int, int]]) -> None:
    most = max(sum(start <= moment < end for start, end in intervals) for moment, _ in intervals)
    assert len(rows_without_overlap([(interval, None) for interval in intervals])) == most


# A made-up job of four ranks on two hosts: rank 2 is late, rank 3's host counts from elsewhere


SKEWS = (0, 0, 10**12, 10**12)


def step_record(begin: int, op: str, resource: str, chunk: int, start: int, end: int, held: int = 0) -> StepRecord:
    return StepRecord(
        op, resource, chunk, 1024.0, 512, begin + start - held - 10_000, begin + start - 10_000, begin + end
    )


def fake_calls(rank: int, late_ns: int = 0) -> list[CallRecord]:
    """Two steps of training; in each an all_to_all on lane ep, an all_reduce on dp that it holds, and a barrier."""
    calls = []
    for number in range(2):
        begin = 100 * MS * number + SKEWS[rank] + MS
        ep = begin + 10 * MS + late_ns
        calls.append(
            CallRecord(
                "dp", "data", (0, 1, 2, 3), rank, number, "all_reduce", "pipelined×2", 4096, begin, begin + MS,
                begin + 61 * MS + late_ns, 1024, 3072, 5 * MS,
                [(begin + 50 * MS, begin + 61 * MS + late_ns)],
                (
                    step_record(begin, "all_to_all", "inter", 0, 1 * MS, 20 * MS),
                    step_record(begin, "all_to_all", "inter", 1, 15 * MS, 40 * MS, held=5 * MS),
                    step_record(begin, "all_gather", "intra", 1, 45 * MS, 60 * MS),
                ),
                ((0.0, 15e3), (15e3, 30e3), (30e3, 40e3)), 40e3,
            )
        )  # fmt: skip
        calls.append(
            CallRecord(
                "ep", "experts", (0, 1, 2, 3), rank, number, "all_to_all", "flat", 2048, ep, ep, ep + 20 * MS, 512, 512,
                waited=[(ep, ep + 20 * MS)], predicted_us=10e3, wire="bf16",
            )
        )  # fmt: skip
        world = begin + 70 * MS
        calls.append(
            CallRecord("", "world", (0, 1, 2, 3), rank, number, "barrier", "flat", 0, world, world, world + MS,
                       waited=[(world, world + MS)])
        )  # fmt: skip
    return calls


def fake_trace(rank: int, calls: list[CallRecord] | None = None, **changes: Any) -> RankTrace:
    begin = SKEWS[rank]
    trace = RankTrace(
        job="00000000000000ab",
        rank=rank,
        world_size=4,
        host=f"host{rank // 2}",
        pid=4000 + rank,
        versions={"commlayer": "0.1.0"},
        readings=(ClockReading(begin, SKEWS[0] - SKEWS[rank], 50_000 if rank > 1 else 0, 0),),
        opened_ns=begin,
        closed_ns=begin + 300 * MS,
        num_dropped=0,
        calls=tuple(fake_calls(rank, 3 * MS if rank == 2 else 0) if calls is None else calls),
        marks=tuple(
            Mark(f"step {number}", begin + 100 * MS * number, begin + 100 * MS * (number + 1)) for number in range(2)
        ),
    )
    return msgspec.structs.replace(trace, **changes)


def job() -> list[RankTrace]:
    return [fake_trace(rank) for rank in range(4)]


def put(folder: Path, traces: list[RankTrace]) -> Path:
    folder.mkdir(exist_ok=True)
    for trace in traces:
        write_trace(folder / rank_name(trace.rank), rank_events(trace), commlayer=trace)
    return folder


def invoke(*arguments: str | Path, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)], prog_name="commlayer")
    assert result.exit_code == status, f"{result.output}\n{result.exception!r}"
    return result


# Analysis


def test_lanes_add_up() -> None:
    found = {times.lane: times for times in lane_times(select(job()))}
    assert list(found) == ["ep", "dp", ""]
    ep, dp, none = found.values()
    assert (ep.num_calls, ep.num_ranks, ep.num_unknown) == (8, 4, 0)
    assert ep.busy_us == ep.exposed_us == 2 * 20e3
    assert (ep.logical_bytes, ep.inter_bytes, ep.intra_bytes, ep.wire_ratio) == (8 * 2048, 8 * 512, 8 * 512, 0.5)
    # inter 1 to 40 ms, the second chunk behind the first; intra 45 to 60, less what lies before the posts
    assert dp.busy_us == pytest.approx(2 * (39e3 + 15e3 + 20), abs=0)
    assert (dp.queued_us, dp.held_us) == (2 * 1e3, 2 * 5e3)
    assert dp.exposed_us == 2 * (11e3 + 3e3 / 4)  # rank 2 waits 3 ms longer
    assert (none.num_unknown, none.wire_ratio, none.logical_bytes) == (0, None, 0)  # barriers
    (together,) = lane_times(select(job()), together=True)
    assert together.num_calls == 24
    assert together.exposed_us == ep.exposed_us + dp.exposed_us + none.exposed_us  # they do not overlap here


def test_exposed_time_of_overlapping_waits_counts_once() -> None:
    call = replace(fake_calls(0)[1], waited=[(0, 10 * MS), (5 * MS, 12 * MS), (20 * MS, 20 * MS)])
    (times,) = lane_times(select([fake_trace(0, [call, replace(call, sequence=9)])]))
    assert times.exposed_us == 12e3


def test_steps_wait_for_their_resource_in_pictures() -> None:
    call = fake_calls(0)[0]
    begin = call.enqueue_ns
    assert [(start - begin, end - begin) for start, end in running(call)] == [
        (MS - 10_000, 20 * MS),
        (20 * MS, 40 * MS),
        (45 * MS - 10_000, 60 * MS),
    ]


def test_the_late_rank_is_found_whatever_its_clock() -> None:
    found = lateness(select(job()))
    assert [each.rank for each in found] == [2, 0, 1, 3]
    late = found[0]
    assert (late.num_calls, late.num_last, late.worst_us) == (6, 2, 3000.0)
    assert late.worst == "all_to_all #0 in experts"
    assert all((each.num_last, each.worst_us) == (0, 0.0) for each in found[1:])


def test_a_call_takes_from_when_its_last_rank_came_to_the_last_end() -> None:
    data, experts, world = group_times(select(job()))
    assert (data.group, data.num_ranks, data.collective, data.num_calls) == ("data", 4, "all_reduce", 2)
    assert data.median_us == 63e3  # all come together, and rank 2 ends last
    assert data.busbw_gbps == pytest.approx(4096 * 1.5 / 63e3 / 1e3)
    assert (experts.median_us, experts.median_bytes) == (20e3, 2048)  # rank 2 comes 3 ms later, and ends so
    assert (world.collective, world.median_us, world.busbw_gbps) == ("barrier", 1e3, None)


def tp_calls(rank: int, took_ms: int, **changes: Any) -> list[CallRecord]:
    """A call of the rank in its pair, one that has not ended, and one of the rank alone."""
    pair = (rank // 2 * 2, rank // 2 * 2 + 1)
    begin = SKEWS[rank] + MS
    call = CallRecord("", "tp", pair, rank, 0, "all_gather", "flat", 1024, begin, begin, begin + took_ms * MS)
    call = replace(call, **changes)
    return [call, replace(call, sequence=1, end_ns=0), replace(call, ranks=(rank,), group="alone")]


def test_groups_of_one_name_count_together_without_calls_of_one_rank_alone() -> None:
    (tp,) = group_times(select([fake_trace(rank, tp_calls(rank, 1 + rank)) for rank in range(4)]))
    assert (tp.group, tp.num_ranks, tp.num_calls, tp.worst_us) == ("tp", 2, 4, 4e3)
    assert tp.median_us == 3e3  # 2 and 4 ms; the unfinished ones have no time


def test_a_root_that_returns_early_ends_no_call() -> None:
    ranks = [fake_trace(rank, tp_calls(rank, (1, 5)[rank], collective="broadcast")) for rank in range(2)]
    assert [each.median_us for each in group_times(select(ranks))] == [5e3]


def test_without_all_its_ranks_a_call_has_no_time() -> None:
    (tp,) = group_times(select([fake_trace(rank, tp_calls(rank, 1)) for rank in (0, 1, 2)]))
    assert (tp.num_calls, tp.median_us) == (4, 1e3)
    (tp,) = group_times(select([fake_trace(rank, tp_calls(rank, 1)) for rank in (0, 2)]))
    assert (tp.num_calls, tp.median_us, tp.worst_us, tp.busbw_gbps) == (4, None, None, None)


def test_a_launch_is_no_time_of_a_call() -> None:
    """A call that goes to NCCL as it is ends, in records, when it was launched."""
    ranks = [fake_trace(rank, tp_calls(rank, 1, logical_bytes=0, group="tp on cuda")) for rank in range(4)]
    (tp,) = group_times(select(ranks))
    assert (tp.group, tp.num_calls, tp.median_us) == ("tp on cuda", 4, None)


def test_groups_that_took_longest_in_all_come_first() -> None:
    """Also where the end of most of their calls is not known."""
    few, many = [2 * MS, *[0] * 9], [MS] * 4

    def calls(rank: int) -> list[CallRecord]:
        begin = SKEWS[rank] + MS
        return [
            CallRecord("", group, (0, 1), rank, number, "barrier", "flat", 0, begin, begin, ns and begin + ns)
            for group, each in (("few", few), ("many", many))
            for number, ns in enumerate(each)
        ]

    found = group_times(select([fake_trace(rank, calls(rank)) for rank in range(2)]))
    assert [each.group for each in found] == ["many", "few"]


def test_many_groups_are_shortened(tmp_path: Path) -> None:
    def calls(rank: int) -> list[CallRecord]:
        return [replace(call, group=f"tp{number}") for number in range(20) for call in tp_calls(rank, 1)[:1]]

    put(tmp_path, [fake_trace(rank, calls(rank)) for rank in range(4)])
    assert "4 groups of less time not shown (--all)" in invoke(tmp_path).stdout
    assert "not shown" not in invoke(tmp_path, "--all").stdout
    assert len(json.loads(invoke(tmp_path, "--json").stdout)["groups"]) == 20


def test_nobody_is_called_late_within_the_error_of_the_clocks() -> None:
    traces = [
        msgspec.structs.replace(trace, readings=(replace(trace.readings[0], error_ns=2 * MS),)) for trace in job()
    ]
    found = lateness(select(traces))
    assert [each.num_last for each in found] == [0] * 4
    assert found[0].rank in range(4)


def test_a_rank_without_records_counts_nowhere() -> None:
    traces = [*job()[:3], fake_trace(3, [])]
    ranks = select(traces)
    assert {each.rank: each.num_calls for each in lateness(ranks)} == {0: 6, 1: 6, 2: 6, 3: 0}
    assert {times.lane: times.num_ranks for times in lane_times(ranks)} == {"ep": 3, "dp": 3, "": 3}
    # without all its ranks nobody knows when the last one came
    assert {each.ratio_together for each in plans(ranks)} == {None}


def test_predictions_are_held_against_what_the_network_did() -> None:
    pipelined, flat = plans(select(job()))
    assert (pipelined.collective, pipelined.plan) == ("all_reduce", "pipelined×2")
    assert (pipelined.num_calls, pipelined.num_held) == (0, 8)
    assert pipelined.predicted_us is pipelined.measured_us is pipelined.ratio is pipelined.ratio_together is None
    assert (flat.plan, flat.num_calls, flat.num_held, flat.ratio) == ("flat", 8, 0, 2.0)
    assert flat.ratio_together == 2.0  # rank 2 came late, and took no longer than predicted from there


def test_calls_that_any_rank_held_say_nothing_of_the_prediction() -> None:
    """Predicted 10 ms, but it takes 60; of one call a rank was held for 50 ms meanwhile, which would make it look right."""
    base = replace(fake_calls(0)[1], ranks=(0, 1), sequence=0, start_ns=1, end_ns=1 + 60 * MS, waited=[])
    again = replace(base, sequence=1)
    traces = [
        fake_trace(0, [replace(base, held_ns=50 * MS), again]),
        fake_trace(1, [replace(base, rank=1), replace(again, rank=1)]),
    ]
    (found,) = plans(select(traces))
    assert (found.num_calls, found.num_held) == (2, 2)  # also that of the rank which waited for the one that held
    assert found.ratio == found.ratio_together == 6.0


def messages(rank: int, start: int, end: int) -> CallRecord:
    """A batch that was waited for from the middle on."""
    return CallRecord(
        "pp", "pipeline", (rank,), rank, 0, "messages", "messages", 4096, start - MS, start, end, 4096, 0, 2 * MS,
        [((start + end) // 2, end)],
    )  # fmt: skip


def test_batches_of_messages_count_and_are_matched_with_nothing(tmp_path: Path) -> None:
    """Rank 1's come later than rank 0's, and there are more of them: that says nothing of rank 1."""
    traces = [
        fake_trace(0, [messages(0, 10 * MS, 20 * MS)]),
        fake_trace(1, [messages(1, at * MS, (at + 10) * MS) for at in (50, 70, 90)]),
    ]
    ranks = select(traces)
    assert [(each.num_calls, each.num_last, each.late_us) for each in lateness(ranks)] == [(0, 0, [])] * 2
    assert plans(ranks) == []
    (times,) = lane_times(ranks)
    assert (times.lane, times.num_calls, times.num_unknown) == ("pp", 4, 0)
    assert (times.logical_bytes, times.inter_bytes, times.intra_bytes, times.wire_ratio) == (4 * 4096, 4 * 4096, 0, 1.0)
    assert (times.exposed_us, times.busy_us) == (4 * 5e3 / 2, 4 * 10e3 / 2)
    assert (times.queued_us, times.held_us) == (4 * 1e3 / 2, 4 * 2e3 / 2)
    output = invoke(put(tmp_path, traces)).stdout
    assert "Stragglers" not in output
    assert "Predicted" not in output
    (found,) = slices(list(rank_events(traces[0])), "call")
    assert found["name"] == "messages #0 messages"


def test_without_other_ranks_nobody_came_last() -> None:
    call = replace(fake_calls(0)[1], ranks=(0,))
    (found,) = plans(select([fake_trace(0, [call])]))
    assert (found.num_calls, found.ratio, found.ratio_together) == (1, 2.0, None)


def test_a_late_rank_is_not_the_plans_fault() -> None:
    """Three ranks wait 30 ms for the fourth; from then on it takes the 10 ms that were predicted."""
    late, end = 30 * MS, 40 * MS
    base = replace(fake_calls(0)[1], ranks=(0, 1), enqueue_ns=0, start_ns=0, end_ns=end, waited=[])
    traces = [
        fake_trace(0, [replace(base, start_ns=1, end_ns=end)]),
        fake_trace(1, [replace(base, rank=1, start_ns=late)]),
    ]
    (found,) = plans(select(traces))
    assert found.ratio == pytest.approx((4 + 1) / 2, rel=1e-4)
    assert found.ratio_together == pytest.approx(1.0)


def test_a_group_of_the_same_name_made_anew_is_another() -> None:
    base = replace(fake_calls(0)[1], ranks=(0, 1), sequence=0, waited=[])
    again = replace(base, start_ns=base.start_ns + 50 * MS, end_ns=base.end_ns + 50 * MS)
    traces = [fake_trace(0, [base, again]), fake_trace(1, [replace(base, rank=1), replace(again, rank=1)])]
    assert [(each.num_calls, each.worst_us) for each in lateness(select(traces))] == [(2, 0.0), (2, 0.0)]


def test_a_window_that_begins_between_the_ranks_of_a_call_matches_no_other_call_with_it() -> None:
    """Rank 1 makes the first call of a group before the window, rank 0 in it; then the group is made anew."""
    base = replace(fake_calls(0)[1], ranks=(0, 1), sequence=0, waited=[])
    first, again = (replace(base, enqueue_ns=ms * MS, start_ns=ms * MS, end_ns=(ms + 40) * MS) for ms in (30, 130))
    early = replace(first, rank=1, enqueue_ns=10 * MS, start_ns=10 * MS)
    traces = [
        fake_trace(0, [first, again], readings=()),
        fake_trace(1, [early, replace(again, rank=1)], readings=()),
    ]
    ranks = select(traces, Window(since_us=15e3))
    assert [len(rank.calls) for rank in ranks] == [2, 1]
    assert [(each.num_calls, each.worst_us) for each in lateness(ranks)] == [(1, 0.0), (1, 0.0)]


def test_windows() -> None:
    def sequences(**window: Any) -> list[list[int]]:
        return [[call.sequence for call in rank.calls] for rank in select(job(), Window(**window))]

    assert sequences() == [[0, 0, 0, 1, 1, 1]] * 4
    assert sequences(step=1) == [[1, 1, 1]] * 4
    assert sequences(since_us=50e3) == [[0, 1, 1, 1]] * 4  # the barrier of step 0, and all of step 1
    assert sequences(until_us=50e3) == [[0, 0]] * 4
    assert sequences(step=1, until_us=50e3) == [[]] * 4
    with pytest.raises(UsageError, match="got 7; there are steps 0 to 1"):
        select(job(), Window(step=7))
    with pytest.raises(UsageError, match="there are none"):
        select([fake_trace(0, marks=())], Window(step=0))


# Events


def slices(events: list[dict[str, Any]], cat: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == cat]


def test_the_trace_of_a_rank_shows_everything() -> None:
    events = json.loads(json.dumps(list(rank_events(fake_trace(2)))))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == [
        *["program"] * 2, "lane ep", "lane dp", "no lane", "INTER predicted", "INTER", "INTRA predicted", "INTRA",
    ]  # fmt: skip
    assert [event["name"] for event in slices(events, "program")] == ["step 0", "step 1"]
    assert len(slices(events, "call")) == 6
    assert len(slices(events, "wait")) == 6
    assert len(slices(events, "predicted")) == 6
    assert len(slices(events, "all_to_all") + slices(events, "all_gather")) == 6
    call = slices(events, "call")[0]
    assert (call["ts"], call["dur"]) == (14e3, 20e3)  # on rank 0's clock
    assert call["args"]["wire"] == "bf16"
    assert {event["args"]["dp"] for event in events if event["ph"] == "C"} == {0, 1}


def test_nothing_overlaps_on_a_track() -> None:
    calls = fake_calls(0)
    calls += [replace(call, group="another", start_ns=call.start_ns + MS) for call in calls]
    by_track: dict[int, list[tuple[float, float]]] = {}
    for event in rank_events(fake_trace(0, calls)):
        if event["ph"] == "X":
            by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_track) > 9
    for spans in by_track.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.001 for a, b in pairwise(spans))


def test_tracks_of_different_ranks_have_different_numbers() -> None:
    events = (event for trace in job() for event in rank_events(trace))
    owners: dict[int, set[int]] = {}
    for event in events:
        if event["ph"] == "X":
            owners.setdefault(event["tid"], set()).add(event["pid"])
    assert {len(pids) for pids in owners.values()} == {1}
    assert {pid for pids in owners.values() for pid in pids} == {0, 1, 2, 3}


def test_a_call_that_never_ended_reaches_to_the_end_of_the_trace() -> None:
    call = replace(fake_calls(0)[1], end_ns=0, waited=[])
    queued = replace(call, sequence=1, start_ns=0)
    trace = fake_trace(0, [call, queued])
    (drawn,) = slices(list(rank_events(trace)), "call")
    assert drawn["name"].endswith("(never ended)")
    assert drawn["ts"] + drawn["dur"] == 300e3
    (times,) = lane_times(select([trace]))
    assert (times.num_calls, times.num_unfinished, times.busy_us, times.queued_us) == (2, 2, 0.0, 0.0)
    assert plans(select([trace])) == []


# The recorder and its file


def test_no_recorder_unless_one_is_opened() -> None:
    assert recorder() is None
    close_recorder()
    assert Settings.from_environment({}).trace is None
    assert Settings.from_environment({"COMMLAYER_TRACE": "here"}).trace == "here"


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    opened = open_recorder(tmp_path / "new", 0, 1)
    assert recorder() is opened
    calls = fake_calls(0)
    for call in calls:
        opened.add(replace(call, waited=[]))
    opened.wait(opened.calls[1], *calls[1].waited[0])
    opened.mark("step 0", 5, 10)
    assert not list((tmp_path / "new").iterdir())
    close_recorder()
    assert recorder() is None
    (trace,) = read_folder(tmp_path / "new")
    assert trace.calls == tuple(replace(call, waited=call.waited if call is calls[1] else []) for call in calls)
    assert trace.marks == (Mark("step 0", 5, 10),)
    assert (trace.rank, trace.world_size, trace.num_dropped, trace.error_ns) == (0, 1, 0, 0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-00000.json"]
    content = json.loads((tmp_path / "new" / "rank-00000.json").read_text(encoding="utf-8"))
    assert next(iter(content)) == "traceEvents"
    assert len(slices(content["traceEvents"], "call")) == 6
    assert {event["pid"] for event in content["traceEvents"]} == {0}


def test_ranks_of_a_job_agree_on_its_name_and_compare_clocks_twice(tmp_path: Path) -> None:
    gathered: list[int] = []

    def gather(value: int) -> list[int]:
        gathered.append(value)
        return [value, value + 7]

    opened = open_recorder(tmp_path, 0, 2, gather)
    assert opened.job == f"{gathered[0]:016x}"
    count = len(gathered)
    close_recorder(gather)
    assert len(gathered) == 2 * count - 2  # without name and number
    (trace,) = read_folder(tmp_path)
    assert len(trace.readings) == 2
    with pytest.raises(UsageError, match="a gather over the 2 ranks"):
        open_recorder(tmp_path, 0, 2)


def test_a_second_job_overwrites_nothing(tmp_path: Path) -> None:
    jobs = []
    for _ in range(3):
        jobs.append(open_recorder(tmp_path, 0, 1).job)
        close_recorder()
    assert open_recorder(tmp_path / "another", 0, 1).path.name == "rank-00000.json"
    assert [path.name for path in rank_paths(tmp_path)] == [rank_name(0), "rank-00000-2.json", "rank-00000-3.json"]
    assert [next(read_folder(tmp_path, job)).job for job in jobs] == jobs


def test_a_rank_that_was_replaced_takes_the_number_of_the_others(tmp_path: Path) -> None:
    """It has opened nothing before, and they have twice."""

    def gather(value: int) -> list[int]:
        return [2, value]

    assert open_recorder(tmp_path, 1, 2, gather).path.name == "rank-00001-3.json"
    close_recorder()
    assert open_recorder(tmp_path, 1, 2, gather).path.name == "rank-00001-4.json"


def test_a_dead_peer_costs_the_second_comparison_only(tmp_path: Path) -> None:
    def dead(value: int) -> list[int]:
        raise RuntimeError("connection closed by peer")

    open_recorder(tmp_path, 0, 1)
    with pytest.warns(UserWarning, match="could not be compared again: connection closed"):
        close_recorder(dead)
    (trace,) = read_folder(tmp_path)
    assert len(trace.readings) == 1


def test_memory_is_bounded(tmp_path: Path) -> None:
    opened = open_recorder(tmp_path, 0, 1, max_entries=8)
    for call in fake_calls(0)[:3]:  # three calls and three steps
        opened.add(call)
    opened.mark("step 0", 0, 1)
    opened.mark("step 1", 0, 1)
    with pytest.warns(UserWarning, match=r"the trace in .* is full, 3 calls"):
        opened.add(fake_calls(0)[0])
    opened.mark("step 2", 0, 1)
    close_recorder()
    (trace,) = read_folder(tmp_path)
    assert (len(trace.calls), len(trace.marks), trace.num_dropped) == (3, 2, 2)


def test_a_file_that_cannot_be_written_is_a_warning_and_leaves_nothing(tmp_path: Path) -> None:
    open_recorder(tmp_path, 0, 1)
    (tmp_path / "rank-00000.json").mkdir()
    with pytest.warns(UserWarning, match="could not be written"):
        close_recorder()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]


def test_records_from_many_threads(tmp_path: Path) -> None:
    opened = open_recorder(tmp_path, 0, 1)
    call = fake_calls(0)[2]

    def work() -> None:
        for _ in range(200):
            opened.add(replace(call))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened.calls) == 800


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('the program failed')", "sys.exit(3)"])
def test_the_file_is_written_however_the_program_ends(tmp_path: Path, ending: str) -> None:
    code = (
        "import sys\nfrom commlayer.traces.recorder import open_recorder\n"
        f"open_recorder({str(tmp_path)!r}, 0, 1).mark('step 0', 1, 2)\n"
        "assert 'torch' not in sys.modules\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(ending), done.stderr
    (trace,) = read_folder(tmp_path)
    assert [mark.name for mark in trace.marks] == ["step 0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_write_its_parents_file(tmp_path: Path) -> None:
    code = (
        "import os\nfrom commlayer.traces.recorder import open_recorder\n"
        f"open_recorder({str(tmp_path)!r}, 0, 1)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    os.waitpid(child, 0)\n"
        f"    assert not os.listdir({str(tmp_path)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]


# Steps of a plan, timed


class FakeCall:
    """Does what the executor's loop asks, and remembers it."""

    steps: ClassVar[tuple[Moves, ...]] = ()

    def __init__(self, fails_at: int | None = None) -> None:
        self.did: list[str] = []
        self.fails_at = fails_at

    def require(self, earlier: int, index: int) -> None:
        self.did.append(f"wait {earlier}")
        if earlier == self.fails_at:
            raise ConnectionError(f"step {earlier}")

    def post(self, index: int) -> None:
        self.did.append(f"post {index}")

    def finish(self) -> None:
        self.did.append("finish")


def pipelined() -> Plan:
    plan = choose(Traffic(256_000_000, 2, 8), catalog.load("monta-a800-2x8")).plan
    assert len({step.resource for step in plan.steps}) == 3
    return plan


def test_recorded_steps_are_in_order_and_gated() -> None:
    plan, call = pipelined(), FakeCall()
    gated: list[int] = []

    def gate(index: int) -> int:
        assert f"post {index}" not in call.did
        gated.append(index)
        return 1000 + index

    steps, held_ns = recorded(plan, call, gate)
    count = len(plan.steps)
    assert gated == list(range(count))
    assert held_ns == sum(1000 + index for index in range(count))
    assert [entry for entry in call.did if entry.startswith("post")] == [f"post {index}" for index in range(count)]
    assert sorted(entry for entry in call.did if entry.startswith("wait")) == sorted(
        f"wait {index}" for index in range(count)
    )
    assert call.did[-1] == "finish"
    for step, times in zip(plan.steps, steps, strict=True):
        assert times.enqueue_ns <= times.start_ns <= times.end_ns
        assert all(steps[earlier].end_ns <= times.enqueue_ns for earlier in step.after)


def test_traced_is_the_same_in_microseconds() -> None:
    timeline = traced(pipelined(), FakeCall())
    assert timeline.total_us > 0
    for step, (start, end) in zip(timeline.plan.steps, timeline.spans, strict=True):
        assert 0 <= start <= end
        assert all(timeline.spans[earlier][1] <= start for earlier in step.after)


@pytest.mark.parametrize("where", ["a step", "the last step", "the gate", "the driver"])
def test_a_failure_lets_every_thread_go(where: str) -> None:
    plan = pipelined()
    threads = set(threading.enumerate())
    last = len(plan.steps) - 1

    def bad_gate(index: int) -> int:
        raise ConnectionError("the gate")

    def fail() -> None:
        if where == "the gate":
            recorded(plan, FakeCall(), bad_gate)
        elif where == "the driver":
            with RecordedCall(plan, FakeCall()) as call:
                call.post(0)
                raise ConnectionError("of something else")
        else:
            recorded(plan, FakeCall(fails_at=1 if where == "a step" else last))

    with pytest.raises(ConnectionError):
        fail()
    assert set(threading.enumerate()) <= threads


def test_a_thread_that_cannot_start_lets_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, start, started = set(threading.enumerate()), threading.Thread.start, []

    def refuse_third(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        recorded(pipelined(), FakeCall())
    assert len(started) == 3
    assert set(threading.enumerate()) <= threads


# The command


def test_merging_puts_ranks_on_one_clock(tmp_path: Path) -> None:
    folder = put(tmp_path / "t", job())
    result = invoke(folder)
    merged = json.loads((folder / "merged.json").read_text(encoding="utf-8"))
    came = {event["pid"]: event["ts"] for event in slices(merged["traceEvents"], "call") if "#0 flat" in event["name"]
            and event["args"]["group"] == "experts"}  # fmt: skip
    assert came == {0: 11e3, 1: 11e3, 2: 14e3, 3: 11e3}
    assert merged["otherData"]["clock_error_us"] == {"0": 0, "1": 0, "2": 50, "3": 50}
    assert "merged.json" in result.stderr
    invoke(folder, "--output", tmp_path / "other.json")  # the merged trace is not taken for a rank's
    assert json.loads((tmp_path / "other.json").read_text(encoding="utf-8")) == merged


def test_the_tables(tmp_path: Path) -> None:
    output = invoke(put(tmp_path, job())).stdout
    assert (
        "job 00000000000000ab: 4 of 4 ranks on 2 hosts, 24 calls in 171 ms; clocks within 50 µs of rank 0's" in output
    )
    rows = {words[0]: words for line in output.splitlines() if (words := line.split())}
    assert rows["ep"][1:6] == ["8", "40.000", "0.000", "0.000", "40.000"]
    assert rows["dp"][3:5] == ["2.000", "10.000"]
    assert rows["none"][6:] == ["0", "B", "0", "B", "0", "B", "–"]
    assert rows["all"][1] == "24"
    assert rows["ep"][-1] == "0.500"
    assert "rank 2 is last most often: in 2 of 6 calls" in output
    assert "Predicted and measured: medians of the calls that no rank held for a higher lane" in output
    assert rows["all_to_all"][2:] == ["8", "0", "10.000", "20.000", "2.000", "2.000"]
    assert rows["all_reduce"][2:] == ["0", "8", "–", "–", "–", "–"]


def test_bytes_that_only_the_inner_backend_knows(tmp_path: Path) -> None:
    calls = [replace(call, inter_bytes=-1, intra_bytes=-1) if call.sequence else call for call in fake_calls(0)]
    ep, _, _ = lane_times(select([fake_trace(0, calls)]))
    assert (ep.num_unknown, ep.inter_bytes, ep.logical_bytes, ep.wire_ratio) == (1, 512, 4096, 0.5)
    output = invoke(put(tmp_path, [fake_trace(0, calls)])).stdout
    assert "≥ 512 B" in output
    assert "≥: without 2 calls of the inner backend's own" in output
    calls = [replace(call, inter_bytes=-1) for call in calls]
    assert lane_times(select([fake_trace(0, calls)]))[1].wire_ratio is None
    assert invoke(put(tmp_path, [fake_trace(0, calls)])).stdout.count("?") == 4  # two lanes, two links


def test_json_says_the_same(tmp_path: Path) -> None:
    put(tmp_path, job())
    content = json.loads(invoke(tmp_path, "--json").stdout)
    assert (content["world_size"], content["missing"], content["notes"]) == (4, [], [])
    assert [lane["lane"] for lane in content["lanes"]] == ["ep", "dp", ""]
    assert content["lanes"][0]["wire_bytes"] == {"inter": 4096, "intra": 4096}
    assert content["together"]["calls"] == 24
    assert content["stragglers"][0]["rank"] == 2
    assert content["plans"][1]["ratio_together"] == 2.0
    assert [(plan["calls"], plan["held_calls"], plan["ratio"]) for plan in content["plans"]] == [
        (0, 8, None),
        (8, 0, 2.0),
    ]
    step = json.loads(invoke(tmp_path, "--json", "--step", "1").stdout)
    assert step["together"]["calls"] == 12
    assert json.loads(invoke(tmp_path, "--json", "--since", "1s").stdout)["together"] is None


def test_a_job_without_calls(tmp_path: Path) -> None:
    result = invoke(put(tmp_path, [fake_trace(rank, []) for rank in range(4)]))
    assert "no call was recorded here" in result.stderr
    assert "4 of 4 ranks" in result.stdout


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    result = invoke(put(tmp_path, [job()[0], job()[2]]))
    assert "note: no file of ranks 1, 3 of 4: killed before the end" in result.stderr
    assert json.loads(invoke(tmp_path, "--json").stdout)["missing"] == [1, 3]


def test_traces_that_say_less_say_so(tmp_path: Path) -> None:
    full = fake_trace(1, num_dropped=12)
    alone = fake_trace(3, [replace(fake_calls(3)[0], end_ns=0)], readings=())
    errors = invoke(put(tmp_path, [job()[0], full, job()[2], alone])).stderr
    assert "1 of 4 traces had no room left before the end (rank 1 lacks 12 entries)" in errors
    assert "clocks of rank 3 were not compared" in errors
    assert "1 call had not ended when the ranks' files were written" in errors


def test_bad_folders(tmp_path: Path) -> None:
    assert "does not exist" in invoke(tmp_path / "nowhere", status=2).stderr
    assert "expected files such as rank-00000.json, got none" in invoke(tmp_path, status=2).stderr
    put(tmp_path, job())
    (tmp_path / "rank-00001.json").write_text('{"traceEvents": [', encoding="utf-8")
    assert (
        "rank-00001.json: expected the trace of a rank, got a damaged or foreign file"
        in invoke(tmp_path, status=2).stderr
    )
    (tmp_path / "rank-00001.json").write_text('{"commlayer": {"format": 1, "x": ' + "[" * 100_000, encoding="utf-8")
    nested = invoke(tmp_path, status=2)
    assert "rank-00001.json: expected the trace of a rank, got a damaged or foreign file" in nested.stderr
    assert "3 of 4 ranks" in nested.stdout, "one damaged file hides no other"
    (tmp_path / "rank-00001.json").write_text('{"traceEvents": []}', encoding="utf-8")
    assert (
        "got a damaged or foreign file: Object missing required field `commlayer`" in invoke(tmp_path, status=2).stderr
    )
    (tmp_path / "rank-00001.json").write_text('{"commlayer": {"format": 2, "novel": 1}}', encoding="utf-8")
    assert "expected a trace of format 1, got format 2" in invoke(tmp_path, status=2).stderr
    (tmp_path / "rank-00001.json").write_bytes((tmp_path / "rank-00002.json").read_bytes())
    assert "rename it to rank-00002.json" in invoke(tmp_path, status=2).stderr
    (tmp_path / "rank-00001-2.json").write_bytes((tmp_path / "rank-00002.json").read_bytes())
    (tmp_path / "rank-00001.json").unlink()
    assert "rank 2: rename it to rank-00002-2.json" in invoke(tmp_path, status=2).stderr
    (tmp_path / "rank-00001-2.json").replace(tmp_path / "rank-00002-2.json")
    text = invoke(tmp_path, status=2).stderr
    assert "one file of rank 2 of job 00000000000000ab, got rank-00002.json and rank-00002-2.json" in text


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    put(tmp_path, job())
    for rank in range(3):
        again = fake_trace(rank, fake_calls(rank)[:2], job="00000000000000cd", world_size=3)
        write_trace(tmp_path / rank_name(rank, 2), rank_events(again), commlayer=again)
    text = invoke(tmp_path, status=2).stderr
    assert (
        "expected files of one job, got job 00000000000000ab (4 of 4 ranks, such as rank-00000.json) and job 00000000000000cd "
        "(3 of 3 ranks, such as rank-00000-2.json): choose one with --job 00000000000000ab" in text
    )
    assert "got job 00000000000000ab (4 of 4" in invoke(tmp_path, "--job", "0000", status=2).stderr
    assert "expected files of job ef, got job 00000000000000ab (4" in invoke(tmp_path, "--job", "ef", status=2).stderr
    for name, size, calls in (("00000000000000ab", 4, 24), ("00000000000000cd", 3, 6)):
        content = json.loads(invoke(tmp_path, "--job", name, "--json").stdout)
        assert (content["job"], content["world_size"], content["missing"]) == (name, size, [])
        assert content["together"]["calls"] == calls


def test_many_ranks_are_shortened(tmp_path: Path) -> None:
    traces = [msgspec.structs.replace(fake_trace(0), rank=rank, world_size=20) for rank in range(20)]
    put(tmp_path, traces)
    assert "4 ranks less often last not shown" in invoke(tmp_path).stdout
    assert "not shown" not in invoke(tmp_path, "--all").stdout


def test_the_command_loads_nothing_heavy(tmp_path: Path) -> None:
    put(tmp_path, job())
    code = (
        "import sys\nfrom commlayer.cli.main import main\n"
        "try: main(sys.argv[1:], prog_name='commlayer')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_file_of_a_rank_names_what_ran(tmp_path: Path) -> None:
    made = Recorder(tmp_path, 3, 4, job="ab")
    made.close()
    (trace,) = read_folder(tmp_path)
    assert set(trace.versions) >= {"commlayer", "python", "torch"}
    assert (trace.rank, trace.pid, trace.error_ns) == (3, os.getpid(), -1)

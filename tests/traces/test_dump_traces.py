"""Traces made from dumps of torch's Flight Recorder: times, lateness, clocks, and the workload, from dumps made here."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commlayer.cli.main import main
from commlayer.diagnosis.recorder_dumps import read_dumps
from commlayer.profiles.errors import UsageError
from commlayer.profiles.topology import Topology
from commlayer.traces.analyse import group_times, lateness, select
from commlayer.traces.dump_traces import DumpTraces, traces_of_dumps
from commlayer.traces.workload import plan_command, workload

START_NS = 1_795_000_000_000_000_000
MS = 1_000_000
EVIL = "\x1b]0;owned\x07\x1b[2J\u202e"


def entry(
    number: int,
    made_ms: float,
    *,
    took_ms: float | None = None,
    seen_ms: float | None = None,
    name: str = "nccl:all_reduce",
    group: tuple[str, str] = ("0", "default_pg"),
    into: Sequence[Sequence[int]] = ((1000,),),
    out: Sequence[Sequence[int]] | None = None,
    has_ended: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """A call as torch records it; ``made_ms``, ``seen_ms``: by the host's clock, when it was made and seen to have ended."""
    seen_ns = None if seen_ms is None else START_NS + round(seen_ms * MS)
    outputs = into if out is None else out
    return {
        "record_id": number - 1,
        "process_group": group,
        "collective_seq_id": number,
        "profiling_name": name,
        "time_created_ns": START_NS + round(made_ms * MS),
        **({} if took_ms is None else {"duration_ms": took_ms}),
        "input_sizes": into,
        "input_dtypes": ["Float"] * len(into),
        "output_sizes": outputs,
        "output_dtypes": ["Float"] * len(outputs),
        "state": "completed" if has_ended and name.startswith("nccl") else "scheduled",
        "time_discovered_started_ns": seen_ns,
        "time_discovered_completed_ns": seen_ns,
        "retired": has_ended,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "frames": [{"name": "step", "filename": "train.py", "line": 1}],
        **more,
    }


def put(
    folder: Path, dumps: Mapping[int, list[dict[str, Any]]], groups: Mapping[str, Sequence[int]] | None = None
) -> Path:
    """Write a dump of each rank, which lists the members of ``groups`` (by default one of all ranks)."""
    listed = {"0": sorted(dumps)} if groups is None else groups
    folder.mkdir(exist_ok=True)
    for rank, entries in dumps.items():
        config = {
            name: {"name": name, "desc": "", "ranks": str(list(ranks))}
            for name, ranks in listed.items()
            if rank in ranks
        }
        content = {"version": "2.10", "pg_config": config, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    return folder


def traced(folder: Path) -> DumpTraces:
    return traces_of_dumps(read_dumps(sorted(folder.iterdir()), keeps_all=True))


def invoke(*arguments: str | Path, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)], prog_name="commlayer")
    assert result.exit_code == status, result.output
    return result


def slow_rank(folder: Path) -> Path:
    """Twenty calls of three ranks, to which rank 1 comes 5 ms late, and which then take 2 ms. Its clock is a minute ahead."""
    ahead_ms = {0: 0.0, 1: 60_000.0, 2: 0.0}
    dumps = {
        rank: [
            entry(
                number,
                number * 100.0 + ahead,
                took_ms=2.0 if rank == 1 else 7.0,
                seen_ms=number * 100 + 60 + ahead,
                into=[[1 << 20]],
            )
            for number in range(1, 21)
        ]
        for rank, ahead in ahead_ms.items()
    }
    return put(folder, dumps)


# Times and lateness


def test_the_late_rank_is_the_one_whose_calls_took_least(tmp_path: Path) -> None:
    traces = traced(slow_rank(tmp_path))
    ranks = select(traces.ranks)
    worst, *others = lateness(ranks)
    assert (worst.rank, worst.num_last, worst.num_calls) == (1, 20, 20)
    assert worst.median_us == pytest.approx(5000)
    assert all(each.num_last == 0 and each.median_us == 0 for each in others)


def test_a_call_takes_as_long_as_on_its_last_rank(tmp_path: Path) -> None:
    (row,) = group_times(select(traced(slow_rank(tmp_path)).ranks))
    assert (row.num_calls, row.num_ranks, row.median_bytes) == (20, 3, 4 << 20)
    assert row.median_us == pytest.approx(2000)
    assert row.busbw_gbps == pytest.approx(4 / 3 * (4 << 20) / 2e-3 / 1e9)


def test_all_calls_are_kept_also_those_that_ended_long_ago(tmp_path: Path) -> None:
    """A diagnosis keeps 16 of a group."""
    folder = put(tmp_path, {rank: [entry(number, number) for number in range(1, 101)] for rank in range(2)})
    assert [len(rank.calls) for rank in traced(folder).ranks] == [100, 100]
    assert [len(dump.entries) for dump in read_dumps(sorted(folder.iterdir()))] == [16, 16]


def test_calls_end_before_they_were_seen_to_end_and_before_the_next_one_begins(tmp_path: Path) -> None:
    """Both were seen to have ended at 50 ms."""
    calls = [entry(1, 0, took_ms=10, seen_ms=50), entry(2, 1, took_ms=10, seen_ms=50)]
    first = traced(put(tmp_path, {0: calls, 1: calls})).ranks[0]
    one, two = first.calls
    assert (two.end_ns, two.start_ns) == (START_NS + 50 * MS, START_NS + 40 * MS)
    assert (one.end_ns, one.start_ns) == (START_NS + 40 * MS, START_NS + 30 * MS)


def test_without_durations_no_time_is_made_up(tmp_path: Path) -> None:
    """The difference of the times of discovery is none: torch looks for beginning and end at once."""
    dumps = {rank: [entry(1, 10 * rank, seen_ms=100), entry(2, 20 + rank, seen_ms=200)] for rank in range(2)}
    traces = traced(put(tmp_path, dumps))
    ranks = select(traces.ranks)
    (row,) = group_times(ranks)
    assert (row.num_calls, row.median_us, row.worst_us, row.busbw_gbps) == (2, None, None, None)
    assert lateness(ranks)[0].rank == 1
    assert lateness(ranks)[0].worst_us == pytest.approx(10_000), "by when the hosts made the calls"
    assert any("TORCH_NCCL_ENABLE_TIMING=1" in note for note in traces.notes)


@pytest.mark.parametrize("duration", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_duration_that_is_none_counts_as_missing(duration: float, tmp_path: Path) -> None:
    dumps = {0: [entry(1, 0, took_ms=duration)], 1: [entry(1, 0, took_ms=3.0)]}
    (row,) = group_times(select(traced(put(tmp_path, dumps)).ranks))
    assert row.median_us is None


def test_a_duration_longer_than_the_call_can_have_taken_is_not_believed(tmp_path: Path) -> None:
    dumps = {rank: [entry(1, 0, took_ms=took, seen_ms=50)] for rank, took in enumerate((1.0, 5e8))}
    traces = traced(put(tmp_path, dumps))
    assert group_times(select(traces.ranks))[0].median_us is None
    assert [each.worst_us for each in lateness(select(traces.ranks))] == [0, 0]
    assert any("1 recorded duration not believed" in note for note in traces.notes)


def test_gloo_says_when_calls_were_made(tmp_path: Path) -> None:
    dumps = {
        rank: [entry(n, 50 * n + 20 * (rank == 1), name="gloo:all_reduce") for n in (1, 2, 3)] for rank in range(3)
    }
    traces = traced(put(tmp_path, dumps))
    worst = lateness(select(traces.ranks))[0]
    assert (worst.rank, worst.num_last, worst.median_us) == (1, 3, 20_000)
    assert any("Gloo's recorder" in note for note in traces.notes)
    assert any("nothing tells how far" in note for note in traces.notes)


def test_the_ranks_of_a_broadcast_end_one_by_one(tmp_path: Path) -> None:
    dumps = {rank: [entry(1, 0, took_ms=1.0 + rank, name="nccl:broadcast")] for rank in range(2)}
    traces = traced(put(tmp_path, dumps))
    assert group_times(select(traces.ranks))[0].median_us is None
    assert any("with a root" in note for note in traces.notes)


def test_calls_are_compared_from_where_a_full_ring_has_them(tmp_path: Path) -> None:
    calls = [entry(number, 10.0 * number, took_ms=1) for number in range(1, 11)]
    folder = put(tmp_path, {0: calls, 1: calls[6:]})
    traces = traced(folder)
    (row,) = group_times(select(traces.ranks))
    assert row.num_calls == 10
    assert lateness(select(traces.ranks))[0].num_calls == 4
    assert any("rings of rank 1" in note for note in traces.notes)


def test_two_groups_of_one_description_and_ranks_are_not_mixed_up(tmp_path: Path) -> None:
    """Rank 1 has lost all calls of the first group."""
    first, second = (entry(1, 0, group=(name, "grad")) for name in ("3", "4"))
    folder = put(
        tmp_path,
        {0: [first, second | {"record_id": 1}], 1: [second | {"record_id": 1}]},
        {"3": (0, 1), "4": (0, 1)},
    )
    ranks = select(traced(folder).ranks)
    assert [[call.group for call in rank.calls] for rank in ranks] == [["grad (3)", "grad (4)"], ["grad (4)"]]
    assert [each.num_calls for each in lateness(ranks)] == [1, 1]


def test_a_full_ring_has_lost_the_first_life_of_a_group_that_was_made_anew(tmp_path: Path) -> None:
    """Rank 1's ring begins in the second life: its calls are not those of the first, 1000 s before."""
    first, second = (
        [
            entry(number, begin_ms + 100 * number, seen_ms=begin_ms + 100 * number + 50) | {"record_id": begin + number}
            for number in (1, 2, 3)
        ]
        for begin, begin_ms in ((-1, 0), (2, 1e6))
    )
    traces = traced(put(tmp_path, {0: first + second, 1: second}))
    ranks = select(traces.ranks)
    assert not any("corrected" in note for note in traces.notes)
    assert [(each.num_calls, each.worst_us) for each in lateness(ranks)] == [(3, 0), (3, 0)]
    assert {call.group for call in ranks[1].calls} == {"default_pg (2 of 2)"}


def test_a_rank_that_saw_only_the_first_life_of_a_group_is_compared_in_it(tmp_path: Path) -> None:
    """Rank 1's ring has lost nothing: it died before the group was made anew."""
    first = [entry(number, 100 * number) for number in (1, 2, 3)]
    second = [entry(number, 900 + number) | {"record_id": number + 2} for number in (1, 2, 3)]
    ranks = select(traced(put(tmp_path, {0: first + second, 1: first})).ranks)
    assert {call.group for call in ranks[1].calls} == {"default_pg (1 of 2)"}
    assert [each.worst_us for each in lateness(ranks)] == [0, 0]


def test_backends_of_one_group_count_their_own_calls(tmp_path: Path) -> None:
    """The group is on cpu:gloo,cuda:nccl, and was not made anew."""
    calls = [entry(1, 0), entry(2, 1), entry(1, 2, name="gloo:barrier", into=[]), entry(3, 3)]
    traces = traced(put(tmp_path, {0: calls, 1: calls}))
    assert {call.group for rank in traces.ranks for call in rank.calls} == {"default_pg"}


@pytest.mark.parametrize(("took_ms", "num_compared"), [(None, 0), (1.0, 3)])
def test_calls_without_stamps_are_told_of(took_ms: float | None, num_compared: int, tmp_path: Path) -> None:
    dumps = {rank: [entry(number, 0, took_ms=took_ms, time_created_ns=0) for number in (1, 2, 3)] for rank in range(2)}
    traces = traced(put(tmp_path, dumps))
    assert any("no stamp of 6 entries" in note for note in traces.notes)
    assert [each.num_calls for each in lateness(select(traces.ranks))] == [num_compared] * 2


def test_calls_that_have_not_ended_are_told_of(tmp_path: Path) -> None:
    folder = put(tmp_path, {rank: [entry(1, 0, took_ms=1), entry(2, 5, has_ended=False)] for rank in range(2)})
    assert "2 calls had not ended when the ranks' files were written" in invoke(folder).stderr


# Clocks


def test_a_clock_that_must_be_wrong_is_corrected_and_told_of(tmp_path: Path) -> None:
    traces = traced(slow_rank(tmp_path))
    ends = [rank.job_clock()(rank.calls[0].end_ns) for rank in traces.ranks]
    assert ends[0] == ends[1] == ends[2]
    (note,) = [note for note in traces.notes if "corrected" in note]
    assert note.startswith("the clock of rank 1 differs from that of rank 0 by 60 s")


def test_clocks_that_may_agree_stay_as_they_are(tmp_path: Path) -> None:
    dumps = {rank: [entry(1, 3 * rank, seen_ms=80 + rank)] for rank in range(2)}
    traces = traced(put(tmp_path, dumps))
    assert lateness(select(traces.ranks))[0].worst_us == pytest.approx(3000)
    assert any("may be apart by" in note for note in traces.notes)


def test_nobody_is_last_by_less_than_its_host_clock_may_be_wrong(tmp_path: Path) -> None:
    """Rank 1 is 10 ms late by its host's clock, which may be 60 ms wrong, and in the last call 90 ms."""
    dumps = {
        rank: [
            *(entry(number, 100 * number + 10 * rank, seen_ms=100 * number + 50 + 10 * rank) for number in (1, 2)),
            entry(3, 300 + 90 * rank, seen_ms=440),
        ]
        for rank in range(2)
    }
    folder = put(tmp_path, dumps)
    traces = traced(folder)
    assert traces.host_errors_ns == {1: 60 * MS}
    late = {each.rank: each for each in lateness(select(traces.ranks), traces.host_errors_ns)}
    assert (late[1].num_last, late[1].worst_us) == (1, 90_000)
    assert {each["rank"]: each["last"] for each in json.loads(invoke(folder, "--json").stdout)["stragglers"]} == {
        0: 0,
        1: 1,
    }


def test_durations_need_no_clock(tmp_path: Path) -> None:
    """Rank 1's clock is corrected by a minute, give or take 60 ms; its calls took 5 ms less than those of the others."""
    traces = traced(slow_rank(tmp_path))
    assert traces.host_errors_ns[1] > 5 * MS
    assert lateness(select(traces.ranks), traces.host_errors_ns)[0].num_last == 20


def test_no_call_is_lost_where_a_clock_is_far_off(tmp_path: Path) -> None:
    """The first rank's clock is 57 years ahead: a float cannot hold its nanoseconds."""
    dumps = {
        rank: [
            entry(
                number,
                0,
                time_created_ns=begin_ns + 100 * MS * number,
                time_discovered_completed_ns=begin_ns + 100 * MS * number + 50 * MS,
            )
            for number in (1, 2, 3)
        ]
        for rank, begin_ns in enumerate((START_NS + 200, 5))
    }
    traces = traced(put(tmp_path, dumps))
    assert [len(rank.calls) for rank in select(traces.ranks)] == [3, 3]
    assert traces.ranks[0].job_clock()(traces.ranks[0].calls[0].enqueue_ns) == 0, "times begin with the first call"


# The command


def test_the_tables_and_json(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path / "dumps")
    shown = invoke(folder)
    assert "dumps of 3 of 3 ranks, 60 calls" in shown.stdout
    assert "rank 1 is last most often: in 20 of 20 calls" in shown.stdout
    assert "Lanes" not in shown.stdout
    content = json.loads(invoke(folder, "--json").stdout)
    assert content["hosts"] == content["lanes"] == content["plans"] == []
    assert content["clock_error_us"] is None
    assert content["groups"][0]["median_us"] == 2000
    assert content["stragglers"][0]["rank"] == 1
    assert {path.name for path in folder.iterdir()} == {f"nccl_trace_rank_{rank}" for rank in range(3)}, (
        "nothing is added"
    )


def test_a_missing_rank_is_named_and_its_calls_have_no_time(tmp_path: Path) -> None:
    dumps = {rank: [entry(1, 0, took_ms=5)] for rank in (0, 2)}
    result = invoke(put(tmp_path, dumps, {"0": (0, 1, 2)}), "--json")
    content = json.loads(result.stdout)
    assert content["missing"] == [1]
    assert content["groups"][0]["median_us"] is None
    assert "no file of rank 1 of 3" in result.stderr


def test_archives_and_several_files_are_read_too(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path / "dumps")
    with tarfile.open(tmp_path / "job.tar", "w", encoding="utf-8") as archive:
        archive.add(folder, "job")
    for paths in ([tmp_path / "job.tar"], sorted(folder.iterdir())):
        assert json.loads(invoke(*paths, "--json").stdout)["groups"][0]["calls"] == 20


def test_the_merged_trace(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path / "dumps")
    invoke(folder, "-o", tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text(encoding="utf-8"))["traceEvents"]
    calls = [event for event in events if event.get("cat") == "call" and event["pid"] == 1]
    assert len(calls) == 20
    assert {event["dur"] for event in calls} == {2000}
    assert calls[0]["name"] == "all_reduce #1 nccl"


def test_calls_without_an_end_are_moments_in_the_trace(tmp_path: Path) -> None:
    folder = put(tmp_path / "dumps", {rank: [entry(1, 5 * rank, name="gloo:barrier", into=[])] for rank in range(2)})
    invoke(folder, "-o", tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [event["dur"] for event in events if event.get("cat") == "call"] == [0, 0]


def test_options_that_dumps_have_no_answer_to_are_refused(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path / "dumps")
    assert "--step" in invoke(folder, "--step", "3", status=2).stderr
    assert "--job" in invoke(folder, "--job", "x", status=2).stderr


def test_a_damaged_dump_hides_no_other(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path / "dumps")
    (folder / "nccl_trace_rank_3").write_bytes(b"\x80\x04 damaged")
    result = invoke(folder, status=2)
    assert "dumps of 3 of 3 ranks" in result.stdout
    assert "nccl_trace_rank_3" in result.stderr


def test_hostile_texts_and_sizes_obey_the_gate(tmp_path: Path) -> None:
    call = entry(1, 0, took_ms=1, name=f"nccl:{EVIL}", group=("0", EVIL), into=[[1 << 61] * 60])
    result = invoke(put(tmp_path, {rank: [call] for rank in range(2)}), "--plan", "emulated-2x8")
    assert not set("\x1b\x07\u202e") & set(result.stdout + result.stderr)
    assert "no size is recorded" in result.stdout


def test_dumps_may_be_named_as_traces_are(tmp_path: Path) -> None:
    for rank in range(2):
        content = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [entry(1, rank)]}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content), encoding="utf-8")
    assert "dumps of 2 of 2 ranks" in invoke(tmp_path).stdout


def test_a_foreign_file_named_as_a_trace_hides_no_dumps(tmp_path: Path) -> None:
    folder = slow_rank(tmp_path)
    (folder / "rank-00000.json").write_text('{"commlayer": 1}', encoding="utf-8")
    result = invoke(folder)
    assert "dumps of 3 of 3 ranks" in result.stdout
    assert "1 file not understood" in result.stderr


def test_one_trace_is_refused_with_a_word_on_its_folder(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.json").write_text('{"traceEvents":[]}', encoding="utf-8")
    assert "give its folder" in invoke(tmp_path / "rank-00000.json", status=2).stderr


def test_a_dump_of_gloo_alone_does_not_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    result = invoke(put(tmp_path, {0: [entry(1, 0, name="gloo:all_reduce")]}, {}))
    assert "dumps of 1 of at least 1 rank" in result.stdout
    assert "1 call of groups of one rank, as far as the dumps tell: in no table" in result.stderr
    assert "no time of" not in result.stderr


# The workload


def test_the_workload_is_commands_that_plan_takes(tmp_path: Path) -> None:
    groups = {"0": tuple(range(16)), **{f"tp{tp}": (2 * tp, 2 * tp + 1) for tp in range(8)}, "ep": (0, 8)}
    dumps = {
        rank: [
            entry(1, 0, into=[[1 << 20]]),
            entry(1, 1, name="nccl:_all_gather_base", group=(f"tp{rank // 2}", "tp"), into=[[256]], out=[[512]]),
            *(
                [entry(1, 2, name="nccl:all_to_all", group=("ep", "ep"), into=[[100]], out=[[300 if rank else 100]])]
                * (rank in (0, 8))
            ),
            entry(2, 3, name="nccl:all_reduce", into=[]),
        ]
        for rank in range(16)
    }
    work = workload(select(traced(put(tmp_path / "dumps", dumps, groups)).ranks), Topology.parse("2x8"))
    assert [(each.group, each.collective, each.shape, each.siblings, each.median_bytes) for each in work] == [
        ("default_pg", "all_reduce", "2x8", 1, 4 << 20),
        ("tp", "all_gather", "1x2", 4, 2048),
        ("ep", "all_to_all_v", "2x1", 1, 1200),
    ]
    assert [each.num_calls for each in work] == [1, 8, 1]
    assert work[2].imbalance == pytest.approx(1.5)
    for each in work:
        arguments = plan_command(each, "emulated-2x8").split()[1:]
        result = CliRunner().invoke(main, arguments, prog_name="commlayer")
        assert result.exit_code == 0, result.output
    rows = json.loads(invoke(tmp_path / "dumps", "--plan", "emulated-2x8", "--json").stdout)["workload"]
    assert rows[2]["command"] == plan_command(work[2], "emulated-2x8")


def test_siblings_may_be_more_where_dumps_are_missing(tmp_path: Path) -> None:
    dumps = {rank: [entry(1, 0, group=("tp0", "tp"))] for rank in (0, 1)}
    folder = put(tmp_path, dumps, {"0": (0, 1, 2, 3), "tp0": (0, 1), "tp1": (2, 3)})
    assert "groups of ranks 2, 3 alone are unknown" in invoke(folder, "--plan", "emulated-2x8").stderr
    assert "alone are unknown" not in invoke(folder).stderr


def test_a_cluster_that_is_too_small_is_refused(tmp_path: Path) -> None:
    ranks = select(traced(slow_rank(tmp_path)).ranks)
    with pytest.raises(UsageError, match="rank 2"):
        workload(ranks, Topology.parse("1x2"))
